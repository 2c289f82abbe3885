//! Waiting for an embedded device: a thread spins, then sleeps.

use core::ffi::c_int;
use std::cell::Cell;
use std::mem::size_of;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeSpec;

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
pub(crate) fn idle(runner: &Runner) {
    if runner.turn() == Some(true) {
        return found();
    }
    let turns = runner.waiters().turns();
    let mut idle = IDLE.get();
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
            runner.wait(turns, limit);
        }
    }
    idle.seen = turns;
    idle.last = Some(Instant::now());
    IDLE.set(idle);
}

/// Threads that wait for a turn that finds something.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// Number of such turns, on which threads sleep (futex(2)).
    turns: AtomicU32,
    count: AtomicUsize,
}

impl Waiters {
    /// Returns the number of turns that have found something; it wraps.
    pub(crate) fn turns(&self) -> u32 {
        self.turns.load(Ordering::SeqCst)
    }

    /// Sleeps until the number of turns is not `turns`, or the time is up.
    pub(crate) fn wait(&self, turns: u32, limit: Duration) {
        let limit = TimeSpec::from_duration(limit);
        // Before the kernel reads the number of turns: it sees the turn, or the turn
        // sees the count.
        self.count.fetch_add(1, Ordering::SeqCst);
        self.futex(libc::FUTEX_WAIT, turns, &raw const limit);
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a turn, and wakes all that wait.
    pub(crate) fn wake(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        if self.count.load(Ordering::SeqCst) != 0 {
            self.futex(libc::FUTEX_WAKE, i32::MAX as u32, ptr::null());
        }
    }

    /// Errors are those of a wait: the number has changed, a signal, the limit.
    fn futex(&self, operation: c_int, value: u32, limit: *const TimeSpec) {
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word outlives the call, as does the limit of a wait;
        // `TimeSpec` is `struct timespec` (`repr(transparent)`).
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.turns.as_ptr(),
                operation,
                value,
                limit,
            );
        }
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
