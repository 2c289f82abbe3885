//! Waiting for an embedded device: a thread spins, then sleeps.

use std::cell::Cell;
use std::mem::size_of;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

use crate::device::Device;
use crate::runner::Runner;

/// How long a thread spins after the last activity before it sleeps. It does not
/// yield: on a busy host a thread that yields runs after all others, one that sleeps
/// when its timer expires.
const SPIN: Duration = Duration::from_micros(30);
/// Shortest sleep.
const SHORTEST: Duration = Duration::from_micros(20);
/// Longest sleep of a thread that polls, which may hold a queue's lock.
const LONGEST: Duration = Duration::from_millis(2);

/// Returns whether there is one processor only: spinning would delay other threads.
fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}

/// Interval between two looks at whether other programs want this thread's processor.
const LOOK: Duration = Duration::from_millis(1);
/// How long the answer holds.
const CROWDED: Duration = Duration::from_millis(20);

/// Detection of a busy host, by thread: the kernel takes the processor away from a
/// thread that has not given it up.
#[derive(Clone, Copy)]
struct Crowd {
    looked: Option<Instant>,
    /// Involuntary context switches of this thread.
    switches: i64,
    until: Option<Instant>,
}

thread_local! {
    static CROWD: Cell<Crowd> = const {
        Cell::new(Crowd {
            looked: None,
            switches: 0,
            until: None,
        })
    };
}

/// Returns whether this thread was preempted lately. Spinning would then use up its
/// share of the processor, and what it waits for would find it not scheduled.
fn is_crowded(now: Instant) -> bool {
    let mut crowd = CROWD.get();
    if crowd.looked.is_none_or(|looked| now - looked >= LOOK) {
        let usage = getrusage(UsageWho::RUSAGE_THREAD);
        let switches = usage.map_or(0, |usage| usage.involuntary_context_switches());
        if crowd.looked.is_some() && switches != crowd.switches {
            crowd.until = Some(now + CROWDED);
        }
        crowd.switches = switches;
        crowd.looked = Some(now);
        CROWD.set(crowd);
    }
    crowd.until.is_some_and(|until| now < until)
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
        if since < SPIN && !is_alone() && !is_crowded(now) {
            return None;
        }
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
            seen: 0,
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
    /// Turns that had found something before the last poll ([`Waiters::turns`]).
    seen: u32,
    /// The queue of the last one: its device's number, and its handle.
    queue: Option<(usize, u32)>,
    /// [`prompt`] has been called.
    prompt: bool,
}

/// Called when a poll of this thread has found something.
pub(crate) fn found() {
    IDLE.set(Idle {
        backoff: Backoff::NEW,
        ..IDLE.get()
    });
}

/// Called when a poll of this thread has found nothing. Drives the devices; if that
/// makes no progress, spins, then sleeps for lengthening intervals.
pub(crate) fn idle(runner: &Runner, polled: Option<Polled>) {
    if runner.turn() == Some(true) {
        return found();
    }
    let turns = runner.waiters().turns();
    let mut idle = IDLE.get();
    let queue = polled.as_ref().map(Polled::id);
    let polled = polled.filter(|_| idle.queue == queue);
    if idle.last.is_none_or(|last| last.elapsed() >= GAP) {
        idle.backoff = Backoff::NEW;
    }
    match idle.backoff.pause(LONGEST) {
        None => std::hint::spin_loop(),
        // A turn since the last poll may have brought what is waited for.
        Some(_) if idle.seen != turns => {}
        Some(limit) => {
            if !idle.prompt {
                idle.prompt = true;
                prompt();
            }
            runner.wait(polled, turns, limit);
        }
    }
    idle.queue = queue;
    idle.seen = turns;
    idle.last = Some(Instant::now());
    IDLE.set(idle);
}

/// A completion queue that a thread polls: its device and its handle there.
#[derive(Clone)]
pub(crate) struct Polled {
    pub(crate) device: Arc<Device>,
    pub(crate) handle: u32,
}

impl Polled {
    fn id(&self) -> (usize, u32) {
        (self.device.number(), self.handle)
    }

    /// Returns how many completions were written to it.
    fn written(&self) -> Option<u32> {
        self.device.lock().written(self.handle)
    }
}

/// A thread that waits for completions.
struct Waiting {
    thread: Thread,
    /// `None` for any turn that finds something, as for a thread that polls several
    /// queues.
    polled: Option<Polled>,
    /// When it began to wait.
    written: Option<u32>,
}

impl Waiting {
    /// Returns whether there is something to poll.
    fn is_over(&self) -> bool {
        let polled = self.polled.as_ref();
        polled.is_none_or(|polled| polled.written().is_none_or(|now| Some(now) != self.written))
    }
}

/// Threads that wait for turns of others.
#[derive(Default)]
pub(crate) struct Waiters {
    /// Number of turns that have found something; it wraps.
    turns: AtomicU32,
    count: AtomicUsize,
    threads: Mutex<Vec<Waiting>>,
}

impl Waiters {
    /// Returns the number of turns that have found something.
    pub(crate) fn turns(&self) -> u32 {
        self.turns.load(Ordering::SeqCst)
    }

    /// Sleeps until a turn has written completions to the queue, or, for `None`, has
    /// found something; or the time is up. The queue was found empty when `turns` turns
    /// had found something.
    pub(crate) fn wait(&self, polled: Option<Polled>, turns: u32, limit: Duration) {
        let me = thread::current();
        let written = polled.as_ref().and_then(Polled::written);
        self.lock().push(Waiting {
            thread: me.clone(),
            polled,
            written,
        });
        // Before the number of turns is read: either this sees a turn, or the turn sees
        // this.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.turns() == turns {
            thread::park_timeout(limit);
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.lock().retain(|it| it.thread.id() != me.id());
    }

    /// Counts a turn, and wakes those who have something to poll.
    pub(crate) fn wake(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut threads = self.lock();
        let mut at = 0;
        while at < threads.len() {
            match threads[at].is_over() {
                true => threads.swap_remove(at).thread.unpark(),
                false => at += 1,
            }
        }
    }

    /// Wakes one, whatever it waits for.
    pub(crate) fn wake_one(&self) {
        if self.count.load(Ordering::SeqCst) != 0 {
            let one = self.lock().pop();
            if let Some(one) = one {
                one.thread.unpark();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
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
