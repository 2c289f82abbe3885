//! The lock of a shared queue.

use std::hint::spin_loop;

use crate::primitive::{AtomicU32, Ordering};

/// A spin lock that is taken and released by separate calls, as a batch that
/// spans several calls of a C interface needs (`ibv_start_poll` ...
/// `ibv_end_poll`). Uncontended: one
/// compare-and-exchange and one store.
///
/// Contended, it spins as pthread_spin_lock(3) does, by loads alone, so that it is
/// taken soon after it was released. It yields the processor now and then, for a
/// holder which was preempted.
///
/// It contains no value and is never poisoned: the owner defines what it protects.
#[derive(Debug)]
pub struct SpinLock {
    held: AtomicU32,
}

impl Default for SpinLock {
    fn default() -> Self {
        Self::new()
    }
}

impl SpinLock {
    /// A free lock.
    pub fn new() -> Self {
        Self {
            held: AtomicU32::new(0),
        }
    }

    /// Takes the lock; waits for it if necessary.
    #[inline]
    pub fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> bool {
        // Acquire: the last holder's critical section is visible.
        self.held
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Slow path of [`SpinLock::lock`]: loads before it tries, since a failed
    /// compare-and-exchange takes the cache line from the holder.
    #[cold]
    pub(crate) fn wait(&self) {
        /// Tens of microseconds: far longer than a running holder needs.
        const SPINS: u32 = 1024;
        let mut spins = 0u32;
        while self.held.load(Ordering::Relaxed) != 0 || !self.try_lock() {
            spins = spins.wrapping_add(1);
            if spins % SPINS == 0 {
                std::thread::yield_now();
            } else {
                spin_loop();
            }
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// Releases the lock. Only its holder may.
    #[inline]
    pub fn unlock(&self) {
        // Release: the critical section is visible to the next holder.
        self.held.store(0, Ordering::Release);
    }
}
