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

use crate::runner::{Runner, sooner};

/// How long a thread spins after the last activity before it sleeps. It does not
/// yield: on a busy host a thread that yields runs after all others, one that sleeps
/// when its timer expires.
const SPIN: Duration = Duration::from_micros(60);
/// Shortest sleep.
const SHORTEST: Duration = Duration::from_micros(20);
/// Longest sleep of a thread that polls, which may hold a queue's lock.
const LONGEST: Duration = Duration::from_millis(2);
/// The same if a turn wakes it: longer than a tick of the kernel (4 ms at 250 Hz), so that
/// the processor's timer need not be set, which costs more than the rest of a short sleep
/// in a virtual machine.
const LONGEST_WOKEN: Duration = Duration::from_millis(5);

/// Returns whether there is one processor only: spinning would delay other threads.
fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}

/// Interval between two looks at whether other programs want this thread's processor.
const LOOK: Duration = Duration::from_millis(1);
/// The same of looks at the host's run queue by a thread that sleeps, which cost more.
const ASK: Duration = Duration::from_millis(10);
/// How long the answer holds.
const CROWDED: Duration = Duration::from_millis(100);
/// Time between two rounds of a loop that spins after which another program ran
/// meanwhile; a network's thread that looks for work takes less.
const LATE: Duration = Duration::from_micros(100);

/// When the host is no longer taken to be crowded, by [`nanoseconds`].
static CROWDED_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Returns the time since the first call.
fn nanoseconds(at: Instant) -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    (at - *START.get_or_init(|| at)).as_nanos() as u64
}

/// Signs, seen by a thread, that other programs want its processor.
#[derive(Clone, Copy)]
struct Crowd {
    looked: Option<Instant>,
    /// Involuntary context switches of this thread.
    switches: i64,
    /// The last round, if the thread has not slept since.
    round: Option<Instant>,
    /// A round was late since the last look.
    late: bool,
    /// The thread slept since the last look.
    slept: bool,
    /// When the host's run queue was last asked for without another sign.
    asked: Option<Instant>,
}

thread_local! {
    static CROWD: Cell<Crowd> = const {
        Cell::new(Crowd {
            looked: None,
            switches: 0,
            round: None,
            late: false,
            slept: false,
            asked: None,
        })
    };
}

/// Returns whether there is one processor only, or a thread of this process lately found
/// that other programs want its processor. Spinning uses up the thread's share
/// then, and what it waits for finds it not scheduled.
fn is_crowded(now: Instant) -> bool {
    is_alone() || nanoseconds(now) < CROWDED_UNTIL.load(Ordering::Relaxed)
}

/// Called in each round of a loop that spins. Returns [`is_crowded`].
fn look_around(now: Instant) -> bool {
    let is_crowded = is_crowded(now);
    let mut crowd = CROWD.get();
    crowd.late |= crowd.round.is_some_and(|round| now - round >= LATE);
    crowd.round = Some(now);
    let mut found = false;
    if crowd.looked.is_none_or(|looked| now - looked >= LOOK) {
        let usage = getrusage(UsageWho::RUSAGE_THREAD);
        let switches = usage.map_or(0, |usage| usage.involuntary_context_switches());
        found = match crowd.looked {
            // Nothing is known of this thread yet.
            None => has_queue() == Some(true),
            Some(_) if switches != crowd.switches && crowd.late => has_queue() != Some(false),
            // One that sleeps before its slice is over is never late, however long the
            // threads that it waits for are in the run queue.
            Some(_) if crowd.slept && crowd.asked.is_none_or(|asked| now - asked >= ASK) => {
                crowd.asked = Some(now);
                has_queue() == Some(true)
            }
            Some(_) => false,
        };
        if found {
            CROWDED_UNTIL.store(nanoseconds(now + CROWDED), Ordering::Relaxed);
        }
        crowd.switches = switches;
        crowd.late = false;
        crowd.slept = false;
        crowd.looked = Some(now);
    }
    CROWD.set(crowd);
    is_crowded || found
}

/// Returns whether clearly more threads run or wait than the host has processors, by
/// `/proc/loadavg` ("5/121" in its fourth place: 5 of them); `None` if this process may not
/// use all processors.
fn has_queue() -> Option<bool> {
    static PROCESSORS: OnceLock<Option<usize>> = OnceLock::new();
    let processors = (*PROCESSORS.get_or_init(|| {
        // SAFETY: no memory is passed.
        let online = usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).ok()?;
        // Less if a control group limits the process.
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
    // One may be the network's thread, which looks for work now and then.
    Some(runnable.parse::<usize>().ok()? > processors + 1)
}

/// Called when the thread sleeps, or does other work: the next round is not late.
fn forget_round() {
    CROWD.set(Crowd {
        round: None,
        ..CROWD.get()
    });
}

/// Pauses of a loop since the last activity: it spins, then sleeps for a quarter of
/// the time since then. What comes without a wake-up so waits for a quarter longer
/// than it would have.
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
        if since < SPIN && !look_around(now) {
            return None;
        }
        forget_round();
        CROWD.set(Crowd {
            slept: true,
            ..CROWD.get()
        });
        Some((since / 4).clamp(SHORTEST, longest))
    }
}

/// Longest time between two empty polls of one loop. After a longer one the thread
/// did something else meanwhile, and has not been waiting.
const GAP: Duration = Duration::from_micros(200);

thread_local! {
    /// The empty polls of this thread.
    static IDLE: Cell<Idle> = const {
        Cell::new(Idle {
            backoff: Backoff::NEW,
            last: None,
            turns: 0,
            writes: 0,
            written: 0,
            network: None,
            queue: None,
            prompt: false,
        })
    };
}

#[derive(Clone, Copy)]
struct Idle {
    backoff: Backoff,
    /// When the last one ended.
    last: Option<Instant>,
    /// Turns that had found something, and those that had written memory, before the
    /// last one's wait.
    turns: u32,
    writes: u32,
    /// Completions that were written to the queue before the last poll began.
    written: u32,
    /// The network of the last one, and the queue: where its completions are counted.
    network: Option<*const Waiters>,
    queue: Option<*const AtomicU32>,
    /// [`prompt`] has been called.
    prompt: bool,
}

/// Called when a poll of this thread has found something.
pub(crate) fn found() {
    forget_round();
    IDLE.set(Idle {
        backoff: Backoff::NEW,
        ..IDLE.get()
    });
}

/// Called when a poll of this thread has found nothing, in the queue to which `written`
/// counts completions if it is known. Drives the devices; if that makes no progress,
/// spins, then sleeps for lengthening intervals, on a crowded host at once.
pub(crate) fn idle(runner: &Runner, written: Option<&Arc<AtomicU32>>) {
    let turn = runner.take_turn();
    if turn.is_some_and(|turn| turn.busy) {
        return found();
    }
    let waiters = runner.waiters();
    let mut idle = IDLE.get();
    let network = Some(ptr::from_ref(waiters));
    let queue = written.map(Arc::as_ptr);
    if idle.last.is_none_or(|last| last.elapsed() >= GAP) {
        idle.backoff = Backoff::NEW;
    }
    let (turns, writes) = (waiters.turns(), waiters.writes());
    if idle.network != network {
        // The counts are of another network: a thread that polls several sleeps for its
        // time.
        (idle.turns, idle.writes) = (turns, writes);
    }
    if let Some(limit) = idle.backoff.pause(LONGEST) {
        // A thread that polls several queues waits for any turn that finds something.
        let single = written.filter(|_| (idle.network, idle.queue) == (network, queue));
        let until = Until {
            count: Arc::clone(single.unwrap_or(&waiters.turns)),
            seen: single.map_or(idle.turns, |_| idle.written),
            writes: idle.writes,
        };
        // One that polls one queue is woken. It need not look by itself if it has looked
        // since its last doorbell.
        let woken = single.is_some() && turn.is_some() && is_crowded(Instant::now());
        let limit = if woken { LONGEST_WOKEN } else { limit };
        if !idle.prompt {
            idle.prompt = true;
            prompt();
        }
        runner.wait(&until, sooner(limit, turn.and_then(|turn| turn.due)));
    } else {
        hint::spin_loop();
    }
    idle.network = network;
    idle.queue = queue;
    // From before the wait: another queue may have what ended it.
    (idle.turns, idle.writes) = (turns, writes);
    idle.written = written.map_or(0, |written| written.load(Ordering::Acquire));
    idle.last = Some(Instant::now());
    IDLE.set(idle);
}

/// The end of a wait: the count changes, or the number of turns that wrote memory.
#[derive(Clone)]
pub(crate) struct Until {
    count: Arc<AtomicU32>,
    seen: u32,
    writes: u32,
}

impl Until {
    fn is_over(&self, writes: &AtomicU32) -> bool {
        self.count.load(Ordering::Acquire) != self.seen
            || writes.load(Ordering::Acquire) != self.writes
    }
}

/// Threads that wait for turns of others.
#[derive(Default)]
pub(crate) struct Waiters {
    /// Number of turns that have found something; it wraps.
    turns: Arc<AtomicU32>,
    /// Number of those that wrote memory for remote operations; it wraps.
    writes: AtomicU32,
    waiting: AtomicUsize,
    threads: Mutex<Threads>,
}

/// A pipe, which wakes a thread that waits. A write to a pipe tells the kernel that the
/// writer is about to sleep, unlike a futex: on a busy host the kernel so brings both threads
/// to one processor, where a wake-up needs no interrupt of another.
struct Bell {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Bell {
    fn new() -> nix::Result<Self> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        Ok(Self { reader, writer })
    }

    fn ring(&self) {
        // Fails only if the pipe is full, which also wakes.
        let _ = write(&self.writer, &[0]);
    }

    fn silence(&self) {
        let _ = read(&self.reader, &mut [0; 64]);
    }
}

struct Waiting {
    bell: Arc<Bell>,
    until: Until,
}

/// The threads that wait, and bells of those that do not any more.
#[derive(Default)]
struct Threads {
    waiting: Vec<Waiting>,
    spare: Vec<Arc<Bell>>,
}

impl Waiters {
    /// Returns the number of turns that have found something.
    fn turns(&self) -> u32 {
        self.turns.load(Ordering::Acquire)
    }

    /// Returns the number of those that wrote memory.
    fn writes(&self) -> u32 {
        self.writes.load(Ordering::Acquire)
    }

    /// Sleeps by `sleep`, given a descriptor that is readable once a turn has ended the
    /// wait. A spurious wakeup is harmless.
    pub(crate) fn wait(&self, until: &Until, sleep: impl FnOnce(BorrowedFd<'_>)) {
        let mut threads = self.lock();
        let bell = match threads.spare.pop() {
            Some(bell) => bell,
            None => match Bell::new() {
                Ok(bell) => Arc::new(bell),
                Err(_) => {
                    drop(threads);
                    return thread::sleep(SHORTEST);
                }
            },
        };
        threads.waiting.push(Waiting {
            bell: Arc::clone(&bell),
            until: until.clone(),
        });
        drop(threads);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // With that of `wake`: either this sees the count changed, or the turn sees this.
        fence(Ordering::SeqCst);
        if !until.is_over(&self.writes) {
            sleep(bell.reader.as_fd());
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        bell.silence();
        let mut threads = self.lock();
        threads.waiting.retain(|it| !Arc::ptr_eq(&it.bell, &bell));
        threads.spare.push(bell);
    }

    /// Counts a turn that has found something, or has also written memory, and wakes the
    /// threads that wait for it.
    pub(crate) fn wake(&self, wrote: bool) {
        self.turns.fetch_add(1, Ordering::Release);
        self.writes.fetch_add(wrote.into(), Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut over = Vec::new();
        self.lock().waiting.retain(|it| {
            let is_over = it.until.is_over(&self.writes);
            if is_over {
                over.push(Arc::clone(&it.bell));
            }
            !is_over
        });
        // One that wakes may run at once, in this one's place.
        over.iter().for_each(|bell| bell.ring());
    }

    /// Wakes one, whatever it waits for.
    pub(crate) fn wake_one(&self) {
        if self.waiting.load(Ordering::Relaxed) != 0 {
            let one = self.lock().waiting.pop();
            if let Some(one) = one {
                one.bell.ring();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `struct sched_attr` of `linux/sched/types.h`, as of its first version.
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
/// which it preempts threads that have longer slices. Its share of the processor
/// stays the same. Both settings stay with the thread.
pub(crate) fn prompt() {
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
