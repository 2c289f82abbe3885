//! Waiting for an embedded device: a thread spins, then sleeps.

use std::cell::Cell;
use std::mem::size_of;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

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
        let since = self.since.get_or_insert_with(Instant::now).elapsed();
        if since < SPIN && !is_alone() {
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
            prompt: false,
        })
    };
}

#[derive(Clone, Copy)]
struct Idle {
    backoff: Backoff,
    /// When the last one ended.
    last: Option<Instant>,
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
    let mut idle = IDLE.get();
    if idle.last.is_none_or(|last| last.elapsed() >= GAP) {
        idle.backoff = Backoff::NEW;
    }
    match idle.backoff.pause(LONGEST) {
        None => std::hint::spin_loop(),
        Some(limit) => {
            if !idle.prompt {
                idle.prompt = true;
                prompt();
            }
            runner.wait(limit);
        }
    }
    idle.last = Some(Instant::now());
    IDLE.set(idle);
}

/// Threads that wait for a turn of another thread.
#[derive(Default)]
pub(crate) struct Waiters {
    count: AtomicUsize,
    threads: Mutex<Vec<Thread>>,
}

impl Waiters {
    /// Sleeps until [`Waiters::wake`] is called, or the time is up. A wake-up just
    /// before this call is lost, so the limit must be short.
    pub(crate) fn wait(&self, limit: Duration) {
        let me = thread::current();
        self.lock().push(me.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
        thread::park_timeout(limit);
        self.count.fetch_sub(1, Ordering::Relaxed);
        let mut threads = self.lock();
        if let Some(at) = threads.iter().position(|thread| thread.id() == me.id()) {
            threads.swap_remove(at);
        }
    }

    /// Wakes all that wait.
    pub(crate) fn wake(&self) {
        if self.count.load(Ordering::Relaxed) != 0 {
            self.lock().iter().for_each(Thread::unpark);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Thread>> {
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
