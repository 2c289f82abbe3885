//! A lock biased towards one thread, since most queues are used by one thread.

use std::hint::cold_path;

use crossbeam_utils::Backoff;

use crate::asymmetric;
use crate::primitive::{AtomicU32, AtomicUsize, Ordering, unshared};
use crate::{SpinLock, thread};

/// The mark that no thread has.
const NOBODY: usize = 0;

/// Consecutive acquisitions by one thread before it gets the bias. More than those
/// of a thread that only sets a queue up for another.
#[cfg(not(loom))]
const ROW: u32 = 32;
#[cfg(loom)]
const ROW: u32 = 1;

/// A lock that costs the thread with the bias neither a locked instruction nor a
/// barrier.
///
/// A thread gets the bias by enough consecutive acquisitions. From then on it locks
/// and unlocks by plain loads and stores ([`BiasedLock::try_fast`]). The first
/// other thread revokes the bias for good, by one membarrier(2) of some
/// microseconds; from then on all threads use a [`SpinLock`].
///
/// Locked and unlocked by separate calls, which may be on different threads. It
/// contains no value: the owner defines what it protects.
#[derive(Debug)]
pub struct BiasedLock {
    /// Mark of the thread with the bias while it does not hold the lock; [`NOBODY`]
    /// while it does, or if no thread has the bias. Other values: the bias is
    /// revoked.
    key: AtomicUsize,
    /// The bias is revoked, or being revoked. Set under `spin`.
    revoked: AtomicU32,
    /// Not 0 if the holder took the lock through `spin`. Written by the holder only.
    by_spin: AtomicU32,
    /// Mark of the thread that got the bias. Set once, under `spin`.
    owner: AtomicUsize,
    spin: SpinLock,
    /// The last thread, and its number of consecutive acquisitions; under `spin`.
    last: AtomicUsize,
    row: AtomicU32,
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
            key: AtomicUsize::new(NOBODY),
            revoked: AtomicU32::new((!asymmetric::available()).into()),
            by_spin: AtomicU32::new(0),
            owner: AtomicUsize::new(NOBODY),
            spin: SpinLock::new(),
            last: AtomicUsize::new(NOBODY),
            row: AtomicU32::new(0),
        }
    }

    /// Takes the lock if it is free and this thread has the bias. If it returns
    /// false, [`BiasedLock::lock`] is needed.
    ///
    /// Loads and stores only. Released by [`BiasedLock::unlock_fast`] or
    /// [`BiasedLock::unlock`].
    #[inline]
    pub fn try_fast(&self) -> bool {
        self.try_fast_as(thread::mark())
    }

    #[inline]
    fn try_fast_as(&self, me: usize) -> bool {
        // Only the owner finds its mark, and only while it does not hold the lock.
        // Acquire: the last unlock may be by another thread, or by an ended thread
        // that had the same mark.
        if self.key.load(Ordering::Acquire) != me {
            return false;
        }
        self.key.store(NOBODY, Ordering::Relaxed);
        // Against `revoke`: either it sees the store and waits, or the load below
        // sees that the bias is revoked.
        asymmetric::light();
        // Acquire: the critical section begins after this.
        if self.revoked.load(Ordering::Acquire) == 0 {
            return true;
        }
        cold_path();
        // The lock is free, and no thread's mark: the fast path is disabled.
        self.key.store(!NOBODY, Ordering::Release);
        false
    }

    /// Releases the lock after [`BiasedLock::try_fast`] has taken it.
    #[inline]
    pub fn unlock_fast(&self) {
        let owner = self.owner.load(Ordering::Relaxed);
        // Release: the critical section is visible to the owner, which may be
        // another thread, and to the thread that revokes the bias.
        self.key.store(owner, Ordering::Release);
    }

    /// Takes the lock; waits for it if necessary.
    #[inline]
    pub fn lock(&self) {
        if !self.try_fast() {
            self.lock_shared();
        }
    }

    /// [`BiasedLock::lock`] when [`BiasedLock::try_fast`] has failed.
    #[inline]
    pub fn lock_shared(&self) {
        if !self.try_spin() {
            self.lock_by_spin(thread::mark());
        }
    }

    /// Takes the lock if it is free and the bias is revoked: the fast path for
    /// several threads. If it returns false, [`BiasedLock::lock_shared`] is needed.
    ///
    /// Released by [`BiasedLock::unlock_spin`] or [`BiasedLock::unlock`].
    #[inline]
    pub fn try_spin(&self) -> bool {
        // The thread that revokes the bias holds `spin` until the owner has unlocked.
        let taken = self.is_revoked() && self.spin.try_lock();
        if taken {
            self.by_spin.store(1, Ordering::Relaxed);
        }
        taken
    }

    /// As [`BiasedLock::lock`], by the thread of this mark.
    #[cfg(loom)]
    pub fn lock_as(&self, me: usize) {
        if !self.try_fast_as(me) && !self.try_spin() {
            self.lock_by_spin(me);
        }
    }

    /// Releases the lock after [`BiasedLock::try_spin`] has taken it.
    #[inline]
    pub fn unlock_spin(&self) {
        self.by_spin.store(0, Ordering::Relaxed);
        self.spin.unlock();
    }

    /// Releases the lock, however it was taken.
    #[inline]
    pub fn unlock(&self) {
        // SAFETY: only the holder writes this, and reads it.
        if unsafe { unshared(&self.by_spin) } == 0 {
            self.unlock_fast();
        } else {
            cold_path();
            self.unlock_spin();
        }
    }

    /// Slow path of [`BiasedLock::lock_shared`].
    #[inline(never)]
    fn lock_by_spin(&self, me: usize) {
        let backoff = Backoff::new();
        // This thread has the bias and holds the lock: it waits, as with any lock,
        // until another thread unlocks it.
        while self.owner.load(Ordering::Relaxed) == me && !self.is_revoked() {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
            if self.try_fast_as(me) {
                return;
            }
        }
        self.spin.lock();
        if self.is_revoked() {
            // `spin` alone is the lock.
        } else if self.owner.load(Ordering::Relaxed) != NOBODY {
            self.revoke();
        } else if self.comes_often(me) {
            // It holds the lock by its bias from here on: `key` is `NOBODY` already.
            self.owner.store(me, Ordering::Relaxed);
            self.spin.unlock();
            return;
        }
        self.by_spin.store(1, Ordering::Relaxed);
    }

    fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed) != 0
    }

    /// Counts consecutive acquisitions. Returns whether this thread gets the bias.
    fn comes_often(&self, me: usize) -> bool {
        let row = if self.last.load(Ordering::Relaxed) == me {
            self.row.load(Ordering::Relaxed) + 1
        } else {
            self.last.store(me, Ordering::Relaxed);
            1
        };
        self.row.store(row, Ordering::Relaxed);
        row >= ROW
    }

    /// Revokes the bias, and waits until its owner has unlocked.
    #[cold]
    fn revoke(&self) {
        self.revoked.store(1, Ordering::Relaxed);
        asymmetric::heavy();
        let backoff = Backoff::new();
        // Acquire: the owner's critical section is visible. The owner may still clear
        // `key` for a moment, but then sees that the bias is revoked.
        while self.key.load(Ordering::Acquire) == NOBODY {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }
}
