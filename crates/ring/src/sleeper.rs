//! A thread that sleeps when there is no work.

use crate::asymmetric;
use crate::primitive::{AtomicU32, Ordering};

/// Tells threads that write doorbells whether the thread which looks for them
/// sleeps and has to be woken.
///
/// The thread calls [`announce`](Self::announce), looks for work once more, and
/// sleeps if there is none; awake again it calls [`awake`](Self::awake). Others
/// call [`is_asleep`](Self::is_asleep) after a doorbell: either that is true, or
/// the last look finds the doorbell. The barrier that this needs is paid by the
/// thread that goes to sleep (membarrier(2)).
#[derive(Debug)]
pub struct Sleeper(AtomicU32);

impl Default for Sleeper {
    fn default() -> Self {
        Self::new()
    }
}

impl Sleeper {
    /// A thread that is awake.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// One that is woken for all work.
    pub fn asleep() -> Self {
        Self(AtomicU32::new(1))
    }

    /// Announces that this thread is about to sleep. Returns false where
    /// membarrier(2) is missing: others are not told then, and the sleep must be
    /// short. Costs some microseconds.
    pub fn announce(&self) -> bool {
        if !asymmetric::available() {
            return false;
        }
        self.0.store(1, Ordering::Relaxed);
        asymmetric::heavy();
        true
    }

    /// Ends an announcement.
    pub fn awake(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Returns whether the thread has announced a sleep. Called after the work
    /// was made visible to it.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        asymmetric::light();
        self.0.load(Ordering::Relaxed) != 0
    }
}
