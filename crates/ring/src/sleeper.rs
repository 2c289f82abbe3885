//! A thread that sleeps when there is no work.

use crate::asymmetric;
use crate::primitive::{AtomicU32, Ordering, fence};

const AWAKE: u32 = 0;
/// Doorbells and commands must wake the thread.
const ASLEEP: u32 = 1;
/// Only commands must wake the thread, which sleeps for a short time.
const RESTING: u32 = 2;
/// A thread has undertaken to wake it.
const WOKEN: u32 = 3;
/// Every doorbell and command is told of.
const ALWAYS: u32 = 4;

/// Shows threads that write doorbells whether the thread that polls them sleeps and must
/// be woken.
///
/// The polling thread calls [`announce`](Self::announce), checks for work once more, and
/// sleeps if there is none; after waking it calls [`awake`](Self::awake). Other threads
/// call [`is_asleep`](Self::is_asleep) after a doorbell: either that is true, or the last
/// check finds the doorbell. The polling thread alone pays for the barrier
/// (membarrier(2)). Of the threads that find it asleep, one wakes it:
/// [`claim_wake`](Self::claim_wake).
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
        Self(AtomicU32::new(AWAKE))
    }

    /// Creates the state of a thread that is always woken.
    pub fn asleep() -> Self {
        Self(AtomicU32::new(ALWAYS))
    }

    /// Announces that this thread is about to sleep. Returns false, without an announcement,
    /// if membarrier(2) is missing: the sleep must then be short. Costs some microseconds.
    pub fn announce(&self) -> bool {
        if !asymmetric::available() {
            return false;
        }
        self.0.store(ASLEEP, Ordering::Relaxed);
        asymmetric::heavy();
        true
    }

    /// As [`announce`](Self::announce), for threads that call
    /// [`claim_wake`](Self::claim_wake) only: doorbells do not end the sleep. Needs no
    /// membarrier(2).
    pub fn announce_rest(&self) {
        self.0.store(RESTING, Ordering::Relaxed);
        // Pairs with the fence in `claim_wake`.
        fence(Ordering::SeqCst);
    }

    /// Ends an announcement.
    pub fn awake(&self) {
        self.0.store(AWAKE, Ordering::Relaxed);
    }

    /// Returns whether the thread has announced a sleep, and nobody has undertaken to wake
    /// it. Called after the work was made visible to it.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        asymmetric::light();
        matches!(self.0.load(Ordering::Relaxed), ASLEEP | ALWAYS)
    }

    /// Returns whether the caller has to wake the thread: it sleeps or rests, and nobody else
    /// has undertaken to wake it. Called after the work was made visible to it: either the
    /// thread's last check finds that, or somebody wakes it.
    pub fn claim_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        let state = self.0.load(Ordering::Relaxed);
        match state {
            AWAKE | WOKEN => false,
            ALWAYS => true,
            _ => {
                let order = Ordering::Relaxed;
                self.0.compare_exchange(state, WOKEN, order, order).is_ok()
            }
        }
    }
}
