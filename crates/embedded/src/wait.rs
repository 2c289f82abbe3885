//! Waiting for an embedded device: a thread spins, then sleeps.

use std::cell::Cell;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, hint, ptr};

use nix::fcntl::OFlag;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{Pid, pipe2, read, write};

use crate::runner::{Runner, cap_sleep};

/// How long a thread spins after the last activity before it sleeps. It does not yield:
/// on a busy host a thread that yields runs after all others, whereas a thread that sleeps
/// runs when its timer expires.
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
    static SINGLE: OnceLock<bool> = OnceLock::new();
    *SINGLE.get_or_init(|| thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}

/// Interval between two checks for CPU contention.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between two reads of the host's run queue by a thread that sleeps.
const RUN_QUEUE_INTERVAL: Duration = Duration::from_millis(10);
/// How long a detected contention is assumed to last.
const CONTENTION_PERIOD: Duration = Duration::from_millis(100);
/// Time between two rounds of a spinning loop that shows that another program ran in
/// between; a turn of a network's thread takes less.
const LATE_ROUND: Duration = Duration::from_micros(100);

/// End of the current contention period, in [`nanoseconds`].
static CONTENDED_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Returns the time since the first call.
fn nanoseconds(at: Instant) -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    (at - *START.get_or_init(|| at)).as_nanos() as u64
}

/// Signs of a thread that other programs want its processor.
#[derive(Clone, Copy)]
struct CpuContention {
    checked: Option<Instant>,
    /// Involuntary context switches of this thread.
    switches: i64,
    /// The last round, if the thread has not slept since.
    round: Option<Instant>,
    /// A round was late since the last check.
    late: bool,
    /// The thread slept since the last check.
    slept: bool,
    /// When the host's run queue was last read without another sign of contention.
    run_queue_read: Option<Instant>,
}

thread_local! {
    static CONTENTION: Cell<CpuContention> = const {
        Cell::new(CpuContention {
            checked: None,
            switches: 0,
            round: None,
            late: false,
            slept: false,
            run_queue_read: None,
        })
    };
}

/// Returns whether there is one processor only, or a thread of this process recently
/// detected contention. Spinning would use up the thread's time slice, and the thread would
/// not be scheduled when the event that it waits for occurs.
fn is_contended(now: Instant) -> bool {
    is_single_cpu() || nanoseconds(now) < CONTENDED_UNTIL.load(Ordering::Relaxed)
}

/// Called in each round of a loop that spins. Returns [`is_contended`].
fn check_contention(now: Instant) -> bool {
    let is_contended = is_contended(now);
    let mut contention = CONTENTION.get();
    contention.late |= contention
        .round
        .is_some_and(|round| now - round >= LATE_ROUND);
    contention.round = Some(now);
    let mut found = false;
    if contention
        .checked
        .is_none_or(|checked| now - checked >= CHECK_INTERVAL)
    {
        let usage = getrusage(UsageWho::RUSAGE_THREAD);
        let switches = usage.map_or(0, |usage| usage.involuntary_context_switches());
        found = match contention.checked {
            // The first check of this thread.
            None => is_run_queue_long() == Some(true),
            Some(_) if switches != contention.switches && contention.late => {
                is_run_queue_long() != Some(false)
            }
            // A thread that sleeps before its slice ends is never late, however long other
            // threads wait in the run queue.
            Some(_)
                if contention.slept
                    && contention.run_queue_read.is_none_or(|run_queue_read| {
                        now - run_queue_read >= RUN_QUEUE_INTERVAL
                    }) =>
            {
                contention.run_queue_read = Some(now);
                is_run_queue_long() == Some(true)
            }
            Some(_) => false,
        };
        if found {
            CONTENDED_UNTIL.store(nanoseconds(now + CONTENTION_PERIOD), Ordering::Relaxed);
        }
        contention.switches = switches;
        contention.late = false;
        contention.slept = false;
        contention.checked = Some(now);
    }
    CONTENTION.set(contention);
    is_contended || found
}

/// Returns whether there are more runnable threads than processors, according to
/// `/proc/loadavg` (fourth field, "5/121": 5 runnable threads); `None` if this process may
/// not use all processors.
fn is_run_queue_long() -> Option<bool> {
    static PROCESSORS: OnceLock<Option<usize>> = OnceLock::new();
    let processors = (*PROCESSORS.get_or_init(|| {
        // SAFETY: no memory is passed.
        let online = usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).ok()?;
        // A control group may limit the process.
        (thread::available_parallelism().ok()?.get() >= online).then_some(online)
    }))?;
    // The thread may have been bound since.
    let usable = sched_getaffinity(Pid::from_raw(0)).ok()?;
    if (0..CpuSet::count())
        .filter(|&it| usable.is_set(it) == Ok(true))
        .count()
        < processors
    {
        return None;
    }
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let (runnable, _) = text.split(' ').nth(3)?.split_once('/')?;
    // One of them may be the network's thread.
    Some(runnable.parse::<usize>().ok()? > processors + 1)
}

/// Called when the thread sleeps or does other work, so that the next round is not late.
fn clear_round() {
    CONTENTION.set(CpuContention {
        round: None,
        ..CONTENTION.get()
    });
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

    /// Returns how long to sleep before the next round, at most `longest`; `None` to
    /// spin.
    pub(crate) fn pause(&mut self, longest: Duration) -> Option<Duration> {
        let now = Instant::now();
        let since = now - *self.since.get_or_insert(now);
        if since < SPIN && !check_contention(now) {
            return None;
        }
        clear_round();
        CONTENTION.set(CpuContention {
            slept: true,
            ..CONTENTION.get()
        });
        Some((since / 4).clamp(MIN_SLEEP, longest))
    }
}

/// Longest time between two empty polls of one loop. After a longer time the thread has
/// done other work, and its wait begins anew.
const MAX_POLL_GAP: Duration = Duration::from_micros(200);

thread_local! {
    /// The empty polls of this thread.
    static IDLE_STATE: Cell<IdleState> = const {
        Cell::new(IdleState {
            backoff: Backoff::NEW,
            last: None,
            turns: 0,
            writes: 0,
            written: 0,
            network: None,
            queue: None,
            short_slice: false,
        })
    };
}

#[derive(Clone, Copy)]
struct IdleState {
    backoff: Backoff,
    /// When the last empty poll ended.
    last: Option<Instant>,
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

/// Called when a poll of this thread has found something.
pub(crate) fn reset_backoff() {
    clear_round();
    IDLE_STATE.set(IdleState {
        backoff: Backoff::NEW,
        ..IDLE_STATE.get()
    });
}

/// Called when a poll of this thread has found nothing. `written` counts the completions
/// of the polled queue, if that is known. Drives the devices; if that makes no progress,
/// spins, then sleeps for lengthening intervals. Under CPU contention it does not spin.
pub(crate) fn idle(runner: &Runner, written: Option<&Arc<AtomicU32>>) {
    let turn = runner.take_turn();
    if turn.is_some_and(|turn| turn.busy) {
        return reset_backoff();
    }
    let waiters = runner.waiters();
    let mut idle = IDLE_STATE.get();
    let network = Some(ptr::from_ref(waiters));
    let queue = written.map(Arc::as_ptr);
    if idle.last.is_none_or(|last| last.elapsed() >= MAX_POLL_GAP) {
        idle.backoff = Backoff::NEW;
    }
    let (turns, writes) = (waiters.turns(), waiters.writes());
    if idle.network != network {
        // The counts belong to another network: a thread that polls several networks is
        // not woken by turns.
        (idle.turns, idle.writes) = (turns, writes);
    }
    if let Some(limit) = idle.backoff.pause(MAX_SLEEP) {
        // A thread that polls several queues waits for any busy turn.
        let single = written.filter(|_| (idle.network, idle.queue) == (network, queue));
        let condition = WaitCondition {
            count: Arc::clone(single.unwrap_or(&waiters.turns)),
            last_count: single.map_or(idle.turns, |_| idle.written),
            last_writes: idle.writes,
        };
        // A thread that polls one queue is woken by a turn. It need not take a turn itself if
        // it has taken one since its last doorbell.
        let woken = single.is_some() && turn.is_some() && is_contended(Instant::now());
        let limit = if woken { MAX_WOKEN_SLEEP } else { limit };
        if !idle.short_slice {
            idle.short_slice = true;
            request_short_slice();
        }
        runner.wait(&condition, cap_sleep(limit, turn.and_then(|turn| turn.due)));
    } else {
        hint::spin_loop();
    }
    idle.network = network;
    idle.queue = queue;
    // Counts from before the wait: the completion that ended it may be in another queue.
    (idle.turns, idle.writes) = (turns, writes);
    idle.written = written.map_or(0, |written| written.load(Ordering::Acquire));
    idle.last = Some(Instant::now());
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
    condition: WaitCondition,
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
    /// condition. A spurious wakeup is harmless.
    pub(crate) fn wait(&self, condition: &WaitCondition, sleep: impl FnOnce(BorrowedFd<'_>)) {
        let mut list = self.lock();
        let pipe = match list.spare_pipes.pop() {
            Some(pipe) => pipe,
            None => match WakePipe::new() {
                Ok(pipe) => Arc::new(pipe),
                Err(_) => {
                    drop(list);
                    return thread::sleep(MIN_SLEEP);
                }
            },
        };
        list.waiters.push(Waiter {
            pipe: Arc::clone(&pipe),
            condition: condition.clone(),
        });
        drop(list);
        self.count.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `wake`: either this thread sees the changed count, or the
        // turn sees this waiter.
        fence(Ordering::SeqCst);
        if !condition.is_met(&self.writes) {
            sleep(pipe.reader.as_fd());
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        pipe.clear();
        let mut list = self.lock();
        list.waiters.retain(|it| !Arc::ptr_eq(&it.pipe, &pipe));
        list.spare_pipes.push(pipe);
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
            let is_met = it.condition.is_met(&self.writes);
            if is_met {
                pipes.push(Arc::clone(&it.pipe));
            }
            !is_met
        });
        // Unlocked before the wake-ups: a woken thread may preempt this one.
        pipes.iter().for_each(|pipe| pipe.wake());
    }

    /// Wakes one waiter, whatever its condition.
    pub(crate) fn wake_one(&self) {
        if self.count.load(Ordering::Relaxed) != 0 {
            let waiter = self.lock().waiters.pop();
            if let Some(waiter) = waiter {
                waiter.pipe.wake();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaiterList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `struct sched_attr` of `linux/sched/types.h`, first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<SchedAttr>() == 48);

/// Asks the kernel to schedule this thread soon after it wakes: a timer slack of
/// 1 µs and, under SCHED_OTHER on Linux 6.12 and later, a time slice of 0.1 ms, with
/// which it preempts threads that have longer slices. Its share of the processor does not
/// change. Both settings are permanent.
pub(crate) fn request_short_slice() {
    const SLICE: u64 = 100_000;
    let mut attr = SchedAttr::default();
    let size = size_of::<SchedAttr>() as u32;
    // SAFETY: PR_SET_TIMERSLACK takes nanoseconds; sched_getattr writes at most
    // `size` bytes, and sched_setattr reads them.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64);
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) != 0 {
            return;
        }
        // An older kernel reports a slice of 0.
        if attr.policy == libc::SCHED_OTHER as u32 && attr.runtime > SLICE {
            attr.runtime = SLICE;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}
