//! A thread that sleeps when there is no work.

use crate::asymmetric;
use crate::primitive::{AtomicU32, Ordering};

/// Shows threads that write doorbells whether the thread that polls them sleeps and must
/// be woken.
///
/// The polling thread calls [`announce`](Self::announce), checks for work once more, and
/// sleeps if there is none; after waking it calls [`awake`](Self::awake). Other threads
/// call [`is_asleep`](Self::is_asleep) after a doorbell: either that is true, or the last
/// check finds the doorbell. The polling thread alone pays for the barrier
/// (membarrier(2)).
#[derive(Debug)]
pub struct Sleeper(AtomicU32);

impl Default for Sleeper {
    fn default() -> Self {
        Self::new()
    }
}

impl Sleeper {
    /// Creates the state of a thread that is awake.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Creates the state of a thread that is always woken.
    pub fn asleep() -> Self {
        Self(AtomicU32::new(1))
    }

    /// Announces that this thread is about to sleep. Returns false, without an announcement,
    /// if membarrier(2) is missing: the sleep must then be short. Costs some microseconds.
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
