//! Waiting for an embedded device: a thread spins, then sleeps.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::{hint, ptr};

use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, gettid, pipe2, read, write};

use crate::cleanup::with_cleanup;
use crate::first_time::FirstTime;
use crate::runtime::runner::{Runner, cap_sleep};
use crate::scope::{in_scope, request_short_slice};

/// How long the network's thread spins after the last activity before it sleeps. It does not
/// yield: on a busy host a thread that yields runs after all others, whereas a thread that
/// sleeps runs when its timer expires.
const SPIN: Duration = Duration::from_micros(60);
/// Shortest sleep.
const MIN_SLEEP: Duration = Duration::from_micros(20);
/// Longest sleep of a thread that polls, which may hold a queue's lock.
const MAX_SLEEP: Duration = Duration::from_millis(2);
/// Longest sleep of a polling thread that a turn wakes: longer than a tick of the kernel
/// (4 ms at 250 Hz), so that the kernel need not program the processor's timer, which is
/// expensive in a virtual machine.
const MAX_WOKEN_SLEEP: Duration = Duration::from_millis(5);

/// Returns whether there is one processor only: spinning would delay other threads.
fn is_single_cpu() -> bool {
    const UNKNOWN: u32 = 0;
    // No `OnceLock`: a child of fork would wait forever for a thread of its parent that was
    // about to set it.
    static PROCESSORS: AtomicU32 = AtomicU32::new(UNKNOWN);
    let known = PROCESSORS.load(Ordering::Relaxed);
    if known != UNKNOWN {
        return known == 1;
    }
    let found = thread::available_parallelism();
    let found = found.map_or(u32::MAX, |count| {
        u32::try_from(count.get()).unwrap_or(u32::MAX)
    });
    PROCESSORS.store(found, Ordering::Relaxed);
    found == 1
}

/// Interval between two checks for CPU contention.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Time in the run queue between two checks that shows that another program wants the
/// processor, if it is also a quarter of the time between them: longer than the thread waits
/// for one of its own network's threads.
const LONG_WAIT: u64 = 300_000;
/// Time that the thread may be in the run queue each time that it gets a processor, if no other
/// program wants one: an idle processor needs time to wake up, and a network's thread runs as
/// long. Threads that sleep for contention would otherwise meet it again by their own wake-ups.
const WAKE_UP: u64 = 30_000;
/// As above, of a thread's first check: the time since its start, if that is also a large part
/// of the time that it could have run.
const LONG_FIRST_WAIT: u64 = 1_000_000;
/// How long a detected contention is assumed to last: a thread that sleeps does not notice
/// that it goes on. Doubled each time that the thread meets it again at once.
const MIN_CONTENTION: Duration = Duration::from_millis(100);
const MAX_CONTENTION: Duration = Duration::from_millis(1600);
/// How long after the end of a contention another one counts as the same.
const SAME_CONTENTION: Duration = Duration::from_millis(50);

/// End of the current contention, and how long it was assumed to last, in nanoseconds
/// ([`nanoseconds`]).
static CONTENDED_UNTIL: AtomicU64 = AtomicU64::new(0);
static CONTENTION_PERIOD: AtomicU64 = AtomicU64::new(0);

/// Returns the time since the first call.
fn nanoseconds(at: Instant) -> u64 {
    static START: FirstTime = FirstTime::new();
    (at - START.get(at)).as_nanos() as u64
}

thread_local! {
    /// When this thread last checked for contention, and its counts until then.
    static LAST_CHECK: Cell<Option<(Instant, Scheduled)>> = const { Cell::new(None) };
}

/// Returns whether there is one processor only, or a thread of this process recently
/// detected contention. Spinning would use up the thread's time slice, and the thread would
/// not be scheduled when the event that it waits for occurs.
fn is_contended(now: Instant) -> bool {
    is_single_cpu() || nanoseconds(now) < CONTENDED_UNTIL.load(Ordering::Relaxed)
}

/// Called in each round of a loop that waits. Returns [`is_contended`]. Other programs count
/// if this thread has waited for them: the load of a host says nothing about the processors
/// that a container may use.
fn check_contention(now: Instant) -> bool {
    let is_contended = is_contended(now);
    let last = LAST_CHECK.get();
    if last.is_some_and(|(at, _)| now - at < CHECK_INTERVAL) {
        return is_contended;
    }
    let Some(counts) = Scheduled::of_thread() else {
        LAST_CHECK.set(Some((now, Scheduled::default())));
        return is_contended;
    };
    LAST_CHECK.set(Some((now, counts)));
    let found = match last {
        Some((at, before)) => counts.shows_contention(before, now - at),
        None => counts.waited >= LONG_FIRST_WAIT && counts.waited > counts.ran / 2,
    };
    if found {
        let now = nanoseconds(now);
        let until = CONTENDED_UNTIL.load(Ordering::Relaxed);
        let (min, max) = (
            MIN_CONTENTION.as_nanos() as u64,
            MAX_CONTENTION.as_nanos() as u64,
        );
        let mut period = CONTENTION_PERIOD.load(Ordering::Relaxed).max(min);
        if now >= until {
            period = match now - until < SAME_CONTENTION.as_nanos() as u64 {
                true => (period * 2).min(max),
                false => min,
            };
            CONTENTION_PERIOD.store(period, Ordering::Relaxed);
        }
        CONTENDED_UNTIL.fetch_max(now + period, Ordering::Relaxed);
    }
    is_contended || found
}

/// The file with the counts of a thread. It stays open, since a file has a low number, which the
/// program may want, until it is moved.
struct CountsFile {
    thread: Pid,
    file: ManuallyDrop<File>,
}

thread_local! {
    static COUNTS: RefCell<Option<CountsFile>> = const { RefCell::new(None) };
}

impl CountsFile {
    /// Reads the counts of this thread, and returns their length.
    fn read(to: &mut [u8]) -> Option<usize> {
        let read = |counts: &RefCell<Option<Self>>| {
            let mut counts = counts.try_borrow_mut().ok()?;
            let thread = gettid();
            // That of a child of fork is its parent's.
            if counts.as_ref().is_none_or(|it| it.thread != thread) {
                let file = File::open("/proc/thread-self/schedstat").ok()?;
                let file = ManuallyDrop::new(file);
                *counts = Some(Self { thread, file });
            }
            counts.as_ref()?.file.read_at(to, 0).ok()
        };
        COUNTS.try_with(read).ok()?
    }
}

impl Drop for CountsFile {
    fn drop(&mut self) {
        if gettid() != self.thread {
            // A child of fork closes what its parent's devices have opened.
            return;
        }
        // SAFETY: nobody uses the file any more.
        let file = unsafe { ManuallyDrop::take(&mut self.file) };
        // At the end of a thread of the program.
        in_scope(|| drop(file));
    }
}

/// Opens what [`check_contention`] reads, at the start of a network's thread.
pub(crate) fn prepare_thread() {
    let _ = CountsFile::read(&mut [0; 128]);
}

/// Scheduler statistics of a thread, as in `/proc/PID/task/TID/schedstat`.
#[derive(Clone, Copy, Debug, Default)]
struct Scheduled {
    /// Time that it has run, and that it has waited in the run queue, in nanoseconds.
    ran: u64,
    waited: u64,
    /// Number of times that it got a processor.
    slices: u64,
}

impl Scheduled {
    /// Returns the counts of this thread; `None` if the kernel does not count.
    fn of_thread() -> Option<Self> {
        let mut text = [0; 128];
        let length = CountsFile::read(&mut text)?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        let mut numbers = text.split_ascii_whitespace().map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self {
            ran: next()?,
            waited: next()?,
            slices: next()?,
        })
    }

    /// Returns whether other programs wanted the processor in the time since `before`.
    fn shows_contention(self, before: Self, elapsed: Duration) -> bool {
        let slices = self.slices.saturating_sub(before.slices);
        let waited = self.waited.saturating_sub(before.waited);
        let waited = waited.saturating_sub(slices.saturating_mul(WAKE_UP));
        waited >= LONG_WAIT && u128::from(waited) >= elapsed.as_nanos() / 4
    }
}

/// Pauses of a loop since the last activity: it spins, then sleeps for a quarter of the
/// time since then. So an event without a wake-up is noticed late by at most a quarter of
/// the idle time before it.
#[derive(Clone, Copy)]
pub(crate) struct Backoff {
    since: Option<Instant>,
}

impl Backoff {
    /// The state after activity.
    pub(crate) const NEW: Self = Self { since: None };

    /// Returns the time since the last activity.
    fn elapsed(&mut self, now: Instant) -> Duration {
        now - *self.since.get_or_insert(now)
    }

    /// Returns how long the network's thread sleeps before the next round, at most
    /// `longest`; `None` to spin.
    pub(crate) fn pause(&mut self, longest: Duration) -> Option<Duration> {
        let now = Instant::now();
        let since = self.elapsed(now);
        if since < SPIN && !check_contention(now) {
            return None;
        }
        Some((since / 4).clamp(MIN_SLEEP, longest))
    }
}

/// Longest time between two empty polls of a loop that only polls.
const MAX_POLL_GAP: Duration = Duration::from_micros(2);
/// A thread works between its polls if at least one of so many gaps is longer: a loop over
/// many queues has one long gap.
const GAPS: u32 = 256;

thread_local! {
    /// The empty polls of this thread.
    static IDLE_STATE: Cell<IdleState> = const {
        Cell::new(IdleState {
            backoff: Backoff::NEW,
            last: None,
            clocks: None,
            is_first: true,
            gaps: 0,
            long_gaps: 0,
            worked: Duration::ZERO,
            slept: Duration::ZERO,
            turns: 0,
            writes: 0,
            written: 0,
            network: None,
            queue: None,
            short_slice: false,
        })
    };
    /// A poll of this thread has found something since its last empty poll.
    static HAS_COMPLETION: Cell<bool> = const { Cell::new(false) };
    /// The thread has waited for an event since its last request for notification.
    static EVENT_WAIT: Cell<bool> = const { Cell::new(false) };
}

#[derive(Clone, Copy)]
struct IdleState {
    backoff: Backoff,
    /// When the last empty poll ended.
    last: Option<Instant>,
    /// An earlier time since which the thread has not slept, with its processor time then:
    /// the time that other programs take is no work of this one.
    clocks: Option<(Instant, Duration)>,
    /// There was no empty poll since the last completion.
    is_first: bool,
    /// Number of gaps between two empty polls, and of those longer than [`MAX_POLL_GAP`].
    gaps: u32,
    long_gaps: u32,
    /// Processor time between polls, and time in sleeps, since the last completion.
    worked: Duration,
    slept: Duration,
    /// [`Waiters::turns`] and [`Waiters::writes`] before the last wait.
    turns: u32,
    writes: u32,
    /// Completions that were written to the queue before the last poll began.
    written: u32,
    /// The network and the queue (its completion counter) of the last empty poll.
    network: Option<*const Waiters>,
    queue: Option<*const AtomicU32>,
    /// [`request_short_slice`] has been called.
    short_slice: bool,
}

impl IdleState {
    /// Begins a new wait.
    fn reset(&mut self) {
        self.backoff = Backoff::NEW;
        self.is_first = true;
        (self.worked, self.slept) = (Duration::ZERO, Duration::ZERO);
    }

    /// Counts the time since the last empty poll.
    fn record_gap(&mut self) {
        let (Some(last), Some((since, before))) = (self.last, self.clocks) else {
            return;
        };
        let now = Instant::now();
        let mut is_long = now - last > MAX_POLL_GAP;
        if is_long {
            let time = processor_time();
            let worked = time.saturating_sub(before).saturating_sub(last - since);
            is_long = worked > MAX_POLL_GAP;
            self.worked += worked;
            self.clocks = Some((now, time));
        }
        // The program handles a completion before the first empty poll.
        if std::mem::take(&mut self.is_first) {
            return;
        }
        self.gaps += 1;
        self.long_gaps += u32::from(is_long);
        if self.gaps >= 16 * GAPS {
            (self.gaps, self.long_gaps) = (self.gaps / 2, self.long_gaps / 2);
        }
    }

    /// Returns the longest sleep that the program allows; `None` if it must not sleep.
    fn longest_sleep(&self) -> Option<Duration> {
        if self.long_gaps * GAPS < self.gaps || self.long_gaps == 0 {
            return Some(MAX_WOKEN_SLEEP);
        }
        let rest = (self.worked / 2).saturating_sub(self.slept);
        (rest >= MIN_SLEEP).then_some(rest)
    }
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.map_or(Duration::ZERO, Duration::from)
}

/// Called when a poll of this thread has found something.
#[inline]
pub(crate) fn reset_backoff() {
    HAS_COMPLETION.set(true);
}

/// Called before a thread waits for events.
pub(crate) fn prepare_event_wait() {
    EVENT_WAIT.set(true);
    let mut idle = IDLE_STATE.get();
    // The time of the wait is no work.
    (idle.last, idle.is_first) = (None, true);
    if !std::mem::replace(&mut idle.short_slice, true) {
        request_short_slice();
    }
    IDLE_STATE.set(idle);
}

/// Returns whether the thread has waited for an event since the last call.
pub(crate) fn takes_event_wait() -> bool {
    EVENT_WAIT.take()
}

/// Called when a poll of this thread has found nothing. `written` counts the completions
/// of the polled queue, if that is known. Drives the devices. If that makes no progress and
/// other programs want the processor, sleeps: a thread that only polls for lengthening
/// intervals, and one that works between its polls for at most half as long as it has worked.
pub(crate) fn idle(runner: &Runner, written: Option<&Arc<AtomicU32>>) {
    let mut idle = IDLE_STATE.get();
    if HAS_COMPLETION.take() {
        idle.reset();
    }
    idle.record_gap();
    let turn = runner.take_turn();
    if turn.is_some_and(|turn| turn.busy) {
        idle.reset();
        (idle.last, idle.clocks) = (None, None);
        return IDLE_STATE.set(idle);
    }
    let now = turn.and_then(|turn| turn.time);
    let now = now.unwrap_or_else(Instant::now);
    let waiters = runner.waiters();
    let network = Some(ptr::from_ref(waiters));
    let queue = written.map(Arc::as_ptr);
    let (turns, writes) = (waiters.turns(), waiters.writes());
    let same_network = idle.network == network;
    if !same_network {
        // The counts belong to another network: a thread that polls several networks is
        // not woken by turns.
        (idle.turns, idle.writes) = (turns, writes);
    }
    let since = idle.backoff.elapsed(now);
    let contended = check_contention(now);
    let longest = if contended {
        idle.longest_sleep()
    } else {
        None
    };
    if let Some(longest) = longest {
        // A thread that polls several queues waits for any busy turn.
        let single = written.filter(|_| (idle.network, idle.queue) == (network, queue));
        let condition = WaitCondition {
            count: Arc::clone(single.unwrap_or(&waiters.turns)),
            last_count: single.map_or(idle.turns, |_| idle.written),
            last_writes: idle.writes,
        };
        // It is woken by a turn, and need not take a turn itself if it has taken one since its
        // last doorbell.
        let limit = match same_network && turn.is_some() {
            true => MAX_WOKEN_SLEEP,
            false => (since / 4).clamp(MIN_SLEEP, MAX_SLEEP),
        };
        if !std::mem::replace(&mut idle.short_slice, true) {
            request_short_slice();
        }
        let limit = cap_sleep(limit.min(longest), turn.and_then(|turn| turn.due));
        runner.wait(&condition, limit);
        idle.slept += now.elapsed();
        idle.clocks = None;
    } else {
        hint::spin_loop();
    }
    idle.network = network;
    idle.queue = queue;
    // Counts from before the wait: the completion that ended it may be in another queue.
    (idle.turns, idle.writes) = (turns, writes);
    idle.written = written.map_or(0, |written| written.load(Ordering::Acquire));
    (idle.last, idle.clocks) = match contended {
        true => {
            let end = Instant::now();
            let clocks = idle.clocks.unwrap_or_else(|| (end, processor_time()));
            (Some(end), Some(clocks))
        }
        false => (None, None),
    };
    IDLE_STATE.set(idle);
}

/// A wait ends when a count of completions or turns changes, or the number of turns that
/// wrote memory.
#[derive(Clone)]
pub(crate) struct WaitCondition {
    count: Arc<AtomicU32>,
    last_count: u32,
    last_writes: u32,
}

impl WaitCondition {
    fn is_met(&self, writes: &AtomicU32) -> bool {
        self.count.load(Ordering::Acquire) != self.last_count
            || writes.load(Ordering::Acquire) != self.last_writes
    }
}

/// Threads that wait for turns of other threads.
#[derive(Default)]
pub(crate) struct Waiters {
    /// Number of busy turns; it wraps.
    turns: Arc<AtomicU32>,
    /// Number of busy turns that wrote memory for remote operations; it wraps.
    writes: AtomicU32,
    /// Number of waiting threads.
    count: AtomicUsize,
    list: Mutex<WaiterList>,
}

/// A pipe that wakes a waiting thread. Unlike a futex, a write to a pipe tells the kernel
/// that the writer is about to sleep: on a busy host the kernel then runs both threads on one
/// processor, where a wake-up needs no inter-processor interrupt.
struct WakePipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl WakePipe {
    fn new() -> nix::Result<Self> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        Ok(Self { reader, writer })
    }

    fn wake(&self) {
        // Fails only if the pipe is full, which also wakes.
        let _ = write(&self.writer, &[0]);
    }

    fn clear(&self) {
        let _ = read(&self.reader, &mut [0; 64]);
    }
}

struct Waiter {
    pipe: Arc<WakePipe>,
    /// `None`: only [`Waiters::wake_one`] wakes it.
    condition: Option<WaitCondition>,
}

/// The waiting threads, and unused pipes.
#[derive(Default)]
struct WaiterList {
    waiters: Vec<Waiter>,
    spare_pipes: Vec<Arc<WakePipe>>,
}

impl Waiters {
    /// Returns the number of busy turns.
    fn turns(&self) -> u32 {
        self.turns.load(Ordering::Acquire)
    }

    /// Returns the number of busy turns that wrote memory.
    fn writes(&self) -> u32 {
        self.writes.load(Ordering::Acquire)
    }

    /// Calls `sleep` with a descriptor that becomes readable once a turn meets the
    /// condition, or it is the thread's turn to wait for frames; without one if none is left:
    /// it must then sleep for a short time. Returns `None` without a call if the condition is
    /// met already. A spurious wakeup is harmless.
    pub(crate) fn wait<T>(
        &self,
        condition: Option<&WaitCondition>,
        sleep: impl FnOnce(Option<BorrowedFd<'_>>) -> T,
    ) -> Option<T> {
        let mut list = self.lock();
        let pipe = match list.spare_pipes.pop() {
            Some(pipe) => pipe,
            None => match WakePipe::new() {
                Ok(pipe) => Arc::new(pipe),
                Err(_) => {
                    drop(list);
                    return Some(sleep(None));
                }
            },
        };
        list.waiters.push(Waiter {
            pipe: Arc::clone(&pipe),
            condition: condition.cloned(),
        });
        drop(list);
        self.count.fetch_add(1, Ordering::Relaxed);
        let end = || {
            self.count.fetch_sub(1, Ordering::Relaxed);
            pipe.clear();
            let mut list = self.lock();
            list.waiters.retain(|it| !Arc::ptr_eq(&it.pipe, &pipe));
            list.spare_pipes.push(Arc::clone(&pipe));
        };
        with_cleanup(end, || {
            // Pairs with the fence in `wake`: either this thread sees the changed count, or
            // the turn sees this waiter.
            fence(Ordering::SeqCst);
            let is_met = condition.is_some_and(|condition| condition.is_met(&self.writes));
            (!is_met).then(|| sleep(Some(pipe.reader.as_fd())))
        })
    }

    /// Counts a busy turn, and wakes the threads whose condition it meets. With `wrote`, the
    /// turn has written memory for remote operations.
    pub(crate) fn wake(&self, wrote: bool) {
        self.turns.fetch_add(1, Ordering::Release);
        self.writes.fetch_add(wrote.into(), Ordering::Release);
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut pipes = Vec::new();
        self.lock().waiters.retain(|it| {
            let condition = it.condition.as_ref();
            let is_met = condition.is_some_and(|condition| condition.is_met(&self.writes));
            if is_met {
                pipes.push(Arc::clone(&it.pipe));
            }
            !is_met
        });
        // Unlocked before the wake-ups: a woken thread may preempt this one.
        pipes.iter().for_each(|pipe| pipe.wake());
    }

    /// Wakes one waiter, whatever its condition. Returns whether there is one.
    pub(crate) fn wake_one(&self) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let waiter = self.lock().waiters.pop();
        if let Some(waiter) = &waiter {
            waiter.pipe.wake();
        }
        waiter.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, WaiterList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_of_a_sleeping_thread_are_no_contention() {
        let shows = |milliseconds, waited, slices| {
            let before = Scheduled {
                ran: 7,
                waited: 5_000_000,
                slices: 900,
            };
            let now = Scheduled {
                ran: 1_000_000,
                waited: before.waited + waited,
                slices: before.slices + slices,
            };
            now.shows_contention(before, Duration::from_millis(milliseconds))
        };
        // Another program runs for a part of its slice.
        assert!(shows(1, 400_000, 1));
        assert!(shows(4, 3_000_000, 2));
        // A sleep of 20 us and a wake-up of 30, all the time.
        assert!(!shows(1, 500_000, 20));
        // A network's thread that wakes up once in a millisecond.
        assert!(!shows(40, 1_200_000, 4));
    }
}
