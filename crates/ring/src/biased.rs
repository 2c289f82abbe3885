//! A lock biased towards one thread, since most queues are used by one thread.

use crossbeam_utils::Backoff;

use crate::asymmetric;
use crate::hint::cold_path;
use crate::primitive::{AtomicU32, AtomicUsize, Ordering, unshared};
use crate::{SpinLock, thread};

/// The id that no thread has.
const NO_THREAD: usize = 0;

/// Consecutive acquisitions by one thread before it gets the bias. More than those
/// of a thread that only sets a queue up for another.
#[cfg(not(loom))]
const BIAS_AFTER: u32 = 32;
#[cfg(loom)]
const BIAS_AFTER: u32 = 1;

/// A lock that costs the thread with the bias neither a locked instruction nor a
/// barrier.
///
/// A thread gets the bias by enough consecutive acquisitions. From then on it locks
/// and unlocks by plain loads and stores ([`BiasedLock::try_lock_fast`]). The first
/// other thread revokes the bias for good, by one membarrier(2) of some
/// microseconds; from then on all threads use a [`SpinLock`].
///
/// Locked and unlocked by separate calls, which may be on different threads. It
/// contains no value: the owner defines what it protects.
#[derive(Debug)]
pub struct BiasedLock {
    /// Id of the thread with the bias while it does not hold the lock; [`NO_THREAD`]
    /// while it does, or if no thread has the bias. Other values: the bias is
    /// revoked.
    fast_lock: AtomicUsize,
    /// The bias is revoked, or being revoked. Set under `spin`.
    revoked: AtomicU32,
    /// Not 0 if the holder took the lock through `spin`. Written by the holder only.
    held_by_spin: AtomicU32,
    /// Id of the thread that got the bias. Set once, under `spin`.
    owner: AtomicUsize,
    spin: SpinLock,
    /// The last thread, and its number of consecutive acquisitions; under `spin`.
    last_thread: AtomicUsize,
    streak: AtomicU32,
}

impl Default for BiasedLock {
    fn default() -> Self {
        Self::new()
    }
}

impl BiasedLock {
    /// Creates an unlocked lock. Without membarrier(2) no thread gets the bias.
    pub fn new() -> Self {
        Self {
            fast_lock: AtomicUsize::new(NO_THREAD),
            revoked: AtomicU32::new((!asymmetric::available()).into()),
            held_by_spin: AtomicU32::new(0),
            owner: AtomicUsize::new(NO_THREAD),
            spin: SpinLock::new(),
            last_thread: AtomicUsize::new(NO_THREAD),
            streak: AtomicU32::new(0),
        }
    }

    /// Takes the lock if it is free and this thread has the bias. If it returns
    /// false, [`BiasedLock::lock`] is needed.
    ///
    /// Loads and stores only. Released by [`BiasedLock::unlock_fast`] or
    /// [`BiasedLock::unlock`].
    #[inline]
    pub fn try_lock_fast(&self) -> bool {
        self.try_lock_fast_as(thread::id())
    }

    #[inline]
    fn try_lock_fast_as(&self, id: usize) -> bool {
        // Only the owner finds its id, and only while it does not hold the lock.
        // Acquire: the last unlock may be by another thread, or by an ended thread
        // that had the same id.
        if self.fast_lock.load(Ordering::Acquire) != id {
            return false;
        }
        self.fast_lock.store(NO_THREAD, Ordering::Relaxed);
        // Against `revoke`: either it sees the store and waits, or the load below
        // sees that the bias is revoked.
        asymmetric::light();
        // Acquire: the critical section begins after this.
        if self.revoked.load(Ordering::Acquire) == 0 {
            return true;
        }
        cold_path();
        // The lock is free, and the word is no thread's id: the fast path is disabled.
        self.fast_lock.store(!NO_THREAD, Ordering::Release);
        false
    }

    /// Releases the lock after [`BiasedLock::try_lock_fast`] has taken it.
    #[inline]
    pub fn unlock_fast(&self) {
        let owner = self.owner.load(Ordering::Relaxed);
        // Release: the critical section is visible to the owner, which may be
        // another thread, and to the thread that revokes the bias.
        self.fast_lock.store(owner, Ordering::Release);
    }

    /// Takes the lock; waits for it if necessary.
    #[inline]
    pub fn lock(&self) {
        if !self.try_lock_fast() {
            self.lock_unbiased();
        }
    }

    /// [`BiasedLock::lock`] when [`BiasedLock::try_lock_fast`] has failed.
    #[inline]
    pub fn lock_unbiased(&self) {
        if !self.try_lock_spin() {
            self.lock_slow(thread::id());
        }
    }

    /// Takes the lock if it is free and the bias is revoked: the fast path for
    /// several threads. If it returns false, [`BiasedLock::lock_unbiased`] is needed.
    ///
    /// Released by [`BiasedLock::unlock_spin`] or [`BiasedLock::unlock`].
    #[inline]
    pub fn try_lock_spin(&self) -> bool {
        // The thread that revokes the bias holds `spin` until the owner has unlocked.
        let taken = self.is_revoked() && self.spin.try_lock();
        if taken {
            self.held_by_spin.store(1, Ordering::Relaxed);
        }
        taken
    }

    /// As [`BiasedLock::lock`], by the thread of this id.
    #[cfg(loom)]
    pub fn lock_as(&self, id: usize) {
        if !self.try_lock_fast_as(id) && !self.try_lock_spin() {
            self.lock_slow(id);
        }
    }

    /// Releases the lock after [`BiasedLock::try_lock_spin`] has taken it.
    #[inline]
    pub fn unlock_spin(&self) {
        self.held_by_spin.store(0, Ordering::Relaxed);
        self.spin.unlock();
    }

    /// Releases the lock, however it was taken.
    #[inline]
    pub fn unlock(&self) {
        // SAFETY: only the holder writes this, and reads it.
        if unsafe { unshared(&self.held_by_spin) } == 0 {
            self.unlock_fast();
        } else {
            cold_path();
            self.unlock_spin();
        }
    }

    /// Slow path of [`BiasedLock::lock_unbiased`].
    #[inline(never)]
    fn lock_slow(&self, id: usize) {
        let backoff = Backoff::new();
        // This thread has the bias and holds the lock: it waits, as with any lock,
        // until another thread unlocks it.
        while self.owner.load(Ordering::Relaxed) == id && !self.is_revoked() {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
            if self.try_lock_fast_as(id) {
                return;
            }
        }
        self.spin.wait();
        if self.is_revoked() {
            // `spin` alone is the lock.
        } else if self.owner.load(Ordering::Relaxed) != NO_THREAD {
            self.revoke();
        } else if self.earns_bias(id) {
            // It holds the lock by its bias from here on: `fast_lock` is `NO_THREAD` already.
            self.owner.store(id, Ordering::Relaxed);
            self.spin.unlock();
            return;
        }
        self.held_by_spin.store(1, Ordering::Relaxed);
    }

    // Inlined, or the callers would save registers for a call.
    #[inline]
    fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed) != 0
    }

    /// Counts consecutive acquisitions. Returns whether this thread gets the bias.
    fn earns_bias(&self, id: usize) -> bool {
        let streak = if self.last_thread.load(Ordering::Relaxed) == id {
            self.streak.load(Ordering::Relaxed) + 1
        } else {
            self.last_thread.store(id, Ordering::Relaxed);
            1
        };
        self.streak.store(streak, Ordering::Relaxed);
        streak >= BIAS_AFTER
    }

    /// Revokes the bias, and waits until its owner has unlocked.
    #[cold]
    fn revoke(&self) {
        self.revoked.store(1, Ordering::Relaxed);
        asymmetric::heavy();
        let backoff = Backoff::new();
        // Acquire: the owner's critical section is visible. The owner may still clear
        // `fast_lock` for a moment, but then sees that the bias is revoked.
        while self.fast_lock.load(Ordering::Acquire) == NO_THREAD {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }
}
