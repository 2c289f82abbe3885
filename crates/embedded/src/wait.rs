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
pub(crate) const SPIN: Duration = Duration::from_micros(30);
/// Shortest and longest sleep.
pub(crate) const SHORTEST: Duration = Duration::from_micros(20);
pub(crate) const LONGEST: Duration = Duration::from_millis(1);

/// A thread that did something else for so long between two polls does not wait in
/// a loop: the row of empty polls begins anew.
const GAP: Duration = Duration::from_micros(200);

thread_local! {
    /// The empty polls of this thread since the last one that found something.
    static IDLE: Cell<Idle> = const { Cell::new(Idle::NONE) };
}

#[derive(Clone, Copy)]
struct Idle {
    /// When the row began, and when the last of its polls ended.
    since: Option<(Instant, Instant)>,
    sleep: Duration,
    /// [`prompt`] has been called.
    prompt: bool,
}

impl Idle {
    const NONE: Self = Self {
        since: None,
        sleep: SHORTEST,
        prompt: false,
    };

    /// The state after activity. [`prompt`] is not called again.
    fn over(self) -> Self {
        Self {
            prompt: self.prompt,
            ..Self::NONE
        }
    }
}

/// Returns whether there is one processor only: spinning would delay other threads.
pub(crate) fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}

/// Called when a poll of this thread has found something.
pub(crate) fn found() {
    IDLE.set(IDLE.get().over());
}

/// Called when a poll of this thread has found nothing. Drives the devices; if that
/// makes no progress, spins, then sleeps for lengthening intervals.
pub(crate) fn idle(runner: &Runner) {
    let mut idle = IDLE.get();
    if runner.turn_made_progress() {
        return IDLE.set(idle.over());
    }
    let now = Instant::now();
    let since = match idle.since {
        Some((since, last)) if now.duration_since(last) < GAP => since,
        _ => {
            idle = idle.over();
            now
        }
    };
    if now.duration_since(since) < SPIN && !is_alone() {
        std::hint::spin_loop();
    } else {
        if !idle.prompt {
            idle.prompt = true;
            prompt();
        }
        runner.wait(idle.sleep);
        idle.sleep = (idle.sleep * 2).min(LONGEST);
    }
    idle.since = Some((since, Instant::now()));
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
