//! Simulated time: a clock that moves when nothing else can happen.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use roce::fabric::Random;

use crate::runtime::runner::Runner;

/// Real time without activity after which the clock may move, if several threads use
/// the network: another one may be about to post.
const GRACE: Duration = Duration::from_millis(1);
/// The same before a [`Limit`]: a timeout of the program, whose other threads are expected
/// to act before.
const LIMIT_GRACE: Duration = Duration::from_millis(100);
/// Idle turns of tasks after which the clock may move: more than an executor runs between
/// two polls of its descriptors (tokio: 61).
const IDLE_TURNS: u32 = 256;

/// The clock of a simulated network.
#[derive(Debug)]
pub(crate) struct SimulatedTime {
    /// Nanoseconds, from 1: a driver may take 0 for no time.
    now: Arc<AtomicU64>,
    /// Times at which the clock stops until each waiting thread has noticed.
    limits: Mutex<Vec<u64>>,
    /// The seed of the network's random numbers.
    seed: u64,
    random: Mutex<Random>,
    /// The thread that uses the network.
    user: Mutex<Option<ThreadId>>,
    /// Several threads use the network.
    several: AtomicBool,
    /// When something last happened, in real time.
    active: Mutex<Instant>,
    idle_turns: AtomicU32,
    /// Tasks that wait for a command or a doorbell.
    tasks: Mutex<Vec<Waker>>,
}

/// Result of an attempt to move the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Something happened, or the clock moved.
    Advanced,
    /// Another thread may be about to act: try again later.
    Retry,
    /// Nothing can happen without a command or a doorbell.
    Stuck,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are consistent after each store.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimulatedTime {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: Arc::new(AtomicU64::new(1)),
            limits: Mutex::default(),
            seed,
            random: Mutex::new(Random::new(seed)),
            user: Mutex::default(),
            several: AtomicBool::new(false),
            active: Mutex::new(Instant::now()),
            idle_turns: AtomicU32::new(0),
            tasks: Mutex::default(),
        }
    }

    /// Returns the seed of the network's random numbers.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the word that holds the time.
    pub(crate) fn clock(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.now)
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    /// Returns the next random number.
    pub(crate) fn random(&self) -> u64 {
        lock(&self.random).next()
    }

    /// Called when something has happened in the network.
    pub(crate) fn record_activity(&self) {
        self.idle_turns.store(0, Ordering::Relaxed);
        if self.several.load(Ordering::Relaxed) {
            *lock(&self.active) = Instant::now();
        }
    }

    /// Called when a thread has given a command or written a doorbell.
    pub(crate) fn record_call(&self) {
        self.record_user();
        self.record_activity();
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        tasks.into_iter().for_each(Waker::wake);
    }

    /// Assumes from now on that several threads use the network.
    pub(crate) fn use_several_threads(&self) {
        *lock(&self.active) = Instant::now();
        self.several.store(true, Ordering::Relaxed);
    }

    /// Notes that this thread uses the network.
    fn record_user(&self) {
        if self.several.load(Ordering::Relaxed) {
            return;
        }
        let me = thread::current().id();
        let mut user = lock(&self.user);
        if *user.get_or_insert(me) != me {
            self.use_several_threads();
        }
    }

    fn may_advance(&self, grace: Duration) -> bool {
        !self.several.load(Ordering::Relaxed) || lock(&self.active).elapsed() >= grace
    }

    /// Moves the clock to the next deadline, `due`, or limit.
    fn advance_to_next(&self, due: Option<u64>) -> Progress {
        let limits = lock(&self.limits);
        let limit = limits.iter().min().copied();
        let next = match (due, limit) {
            (Some(due), Some(limit)) => due.min(limit),
            (Some(at), None) | (None, Some(at)) => at,
            (None, None) => return Progress::Stuck,
        };
        if next <= self.now() {
            // A turn is due, or the thread that waits for the limit has not noticed yet.
            return Progress::Retry;
        }
        let grace = if due == Some(next) {
            GRACE
        } else {
            LIMIT_GRACE
        };
        if !self.may_advance(grace) {
            return Progress::Retry;
        }
        self.now.fetch_max(next, Ordering::AcqRel);
        self.record_activity();
        Progress::Advanced
    }

    /// Moves the clock ahead.
    fn set(&self, at: u64) {
        self.now.fetch_max(at, Ordering::AcqRel);
        self.record_activity();
    }
}

/// A point in simulated time that a thread or task waits for. The clock stops there until
/// the limit is dropped.
pub struct Limit {
    runner: Arc<Runner>,
    at: u64,
}

impl Limit {
    /// Sets a limit, `after` from now; `None` if time is not simulated.
    pub(crate) fn new(runner: &Arc<Runner>, after: Duration) -> Option<Self> {
        let time = runner.time()?;
        time.record_user();
        let mut limits = lock(&time.limits);
        let after = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
        let at = time.now().saturating_add(after);
        limits.push(at);
        Some(Self {
            runner: Arc::clone(runner),
            at,
        })
    }

    /// Returns whether the clock has reached the limit.
    pub fn is_over(&self) -> bool {
        self.runner.time().is_none_or(|time| time.now() >= self.at)
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Limit").field(&self.at).finish()
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if let Some(time) = self.runner.time() {
            let mut limits = lock(&time.limits);
            if let Some(place) = limits.iter().position(|at| *at == self.at) {
                limits.swap_remove(place);
            }
        }
    }
}

/// Performs pending work or, if there is none, moves the clock.
pub(crate) fn step(runner: &Runner, time: &SimulatedTime) -> Progress {
    time.record_user();
    match runner.turn() {
        Some(true) => return Progress::Advanced,
        Some(false) => {}
        // Another thread is driving.
        None => return Progress::Retry,
    }
    match time.advance_to_next(runner.deadline()) {
        Progress::Advanced => {
            runner.turn();
            Progress::Advanced
        }
        other => other,
    }
}

/// Called by a thread whose poll has found nothing.
pub(crate) fn idle(runner: &Runner, time: &SimulatedTime) {
    match step(runner, time) {
        Progress::Advanced => {}
        _ if time.several.load(Ordering::Relaxed) => thread::sleep(GRACE / 20),
        _ => std::hint::spin_loop(),
    }
}

/// As [`step`], by a task: other tasks run before the clock moves. Returns whether to
/// call it again; if not, `waker` is called once there is something to do.
pub(crate) fn poll(runner: &Runner, time: &SimulatedTime, waker: Option<&Waker>) -> bool {
    time.record_user();
    if runner.turn() != Some(false) {
        return true;
    }
    if time.idle_turns.fetch_add(1, Ordering::Relaxed) < IDLE_TURNS {
        return true;
    }
    let Some(waker) = waker else {
        return step(runner, time) == Progress::Advanced;
    };
    {
        let mut tasks = lock(&time.tasks);
        if !tasks.iter().any(|task| task.will_wake(waker)) {
            tasks.push(waker.clone());
        }
    }
    step(runner, time) != Progress::Stuck
}

/// Moves the clock by a duration, and runs what becomes due on the way.
pub(crate) fn advance(runner: &Runner, time: &SimulatedTime, by: Duration) {
    let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
    let end = time.now().saturating_add(by);
    loop {
        while runner.turn() != Some(false) {}
        match runner.deadline() {
            Some(due) if due <= end => time.set(due),
            _ => break,
        }
    }
    time.set(end);
    while runner.turn() != Some(false) {}
}
