//! The lock of a shared queue that, as nearly all are, is used by one thread.

use std::hint::cold_path;

use crossbeam_utils::Backoff;

use crate::asymmetric;
use crate::primitive::{AtomicU32, AtomicUsize, Ordering, unshared};
use crate::{SpinLock, thread};

/// No thread's mark.
const NOBODY: usize = 0;

/// How often in a row a thread must come before it gets the bias: whoever only
/// fills a queue before another thread serves it does not.
#[cfg(not(loom))]
const ROW: u32 = 32;
#[cfg(loom)]
const ROW: u32 = 1;

/// A lock for any thread that costs its usual one neither a locked instruction
/// nor a barrier.
///
/// A thread that has come often enough with no other in between gets the bias:
/// from then on it enters and leaves by plain loads and stores
/// ([`BiasedLock::try_quick`]). The first other thread to come takes the bias
/// away, for good, at the price of one membarrier(2), some microseconds; then
/// everybody goes by a [`SpinLock`].
///
/// Taken and released by separate calls, which may be on different threads. It
/// guards no value: the owner says what it stands for.
#[derive(Debug)]
pub struct BiasedLock {
    /// The mark of the thread with the bias while it is out, [`NOBODY`] while
    /// it is in or there is none. Anything else: the bias is gone.
    key: AtomicUsize,
    /// The bias is gone, or is going. Set under `spin`.
    revoked: AtomicU32,
    /// Whoever is in has `spin`. Written by that one only.
    by_spin: AtomicU32,
    /// Who got the bias. Set once, under `spin`.
    owner: AtomicUsize,
    spin: SpinLock,
    /// Who came last, and how often in a row; under `spin`.
    last: AtomicUsize,
    row: AtomicU32,
}

impl Default for BiasedLock {
    fn default() -> Self {
        Self::new()
    }
}

impl BiasedLock {
    /// A free lock. Where there is no membarrier(2) nobody gets the bias.
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

    /// Takes the lock if it is free and this thread's by bias. `false` says
    /// nothing but that [`BiasedLock::lock`] is needed.
    ///
    /// Loads and stores only. Released by [`BiasedLock::unlock_quick`] or
    /// [`BiasedLock::unlock`].
    #[inline(always)]
    pub fn try_quick(&self) -> bool {
        self.try_quick_as(thread::mark())
    }

    #[inline(always)]
    fn try_quick_as(&self, me: usize) -> bool {
        // Only the owner finds its mark, and not while a batch of its own is
        // under way. Acquire: another thread may have released it in the
        // owner's stead, or have been the owner, and ended.
        if self.key.load(Ordering::Acquire) != me {
            return false;
        }
        self.key.store(NOBODY, Ordering::Relaxed);
        // Against `revoke`: either that sees the store, and waits, or the load
        // sees that the bias is gone.
        asymmetric::light();
        // Acquire: nothing of the critical section is done before.
        if self.revoked.load(Ordering::Acquire) == 0 {
            return true;
        }
        cold_path();
        // Out, and not by its mark: it shall not come this way any more.
        self.key.store(!NOBODY, Ordering::Release);
        false
    }

    /// Releases the lock after [`BiasedLock::try_quick`] has taken it.
    #[inline(always)]
    pub fn unlock_quick(&self) {
        let owner = self.owner.load(Ordering::Relaxed);
        // Release: the owner, who may not be this thread, and whoever takes the
        // bias away see what was done under it.
        self.key.store(owner, Ordering::Release);
    }

    /// Takes the lock; waits for it if need be.
    #[inline(always)]
    pub fn lock(&self) {
        if !self.try_quick() {
            self.lock_shared();
        }
    }

    /// [`BiasedLock::lock`] when [`BiasedLock::try_quick`] has failed.
    #[inline(always)]
    pub fn lock_shared(&self) {
        if !self.try_spin() {
            self.lock_by_spin(thread::mark());
        }
    }

    /// Takes the lock if it is free and the bias is gone: the quick way where
    /// several threads come. `false` says nothing but that
    /// [`BiasedLock::lock_shared`] is needed. Released by
    /// [`BiasedLock::unlock_spin`] or [`BiasedLock::unlock`].
    #[inline(always)]
    pub fn try_spin(&self) -> bool {
        // Whoever is still waiting for the owner to be out has `spin`.
        let taken = self.is_revoked() && self.spin.try_lock();
        if taken {
            self.by_spin.store(1, Ordering::Relaxed);
        }
        taken
    }

    /// As [`BiasedLock::lock`], by the thread of this mark.
    #[cfg(loom)]
    pub fn lock_as(&self, me: usize) {
        if !self.try_quick_as(me) && !self.try_spin() {
            self.lock_by_spin(me);
        }
    }

    /// Releases the lock after [`BiasedLock::try_spin`] has taken it.
    #[inline(always)]
    pub fn unlock_spin(&self) {
        self.by_spin.store(0, Ordering::Relaxed);
        self.spin.unlock();
    }

    /// Releases the lock, however it was taken.
    #[inline(always)]
    pub fn unlock(&self) {
        // SAFETY: only the holder writes this, and reads it.
        if unsafe { unshared(&self.by_spin) } == 0 {
            self.unlock_quick();
        } else {
            cold_path();
            self.unlock_spin();
        }
    }

    /// [`BiasedLock::lock_shared`] when that takes more than a try.
    #[inline(never)]
    fn lock_by_spin(&self, me: usize) {
        let backoff = Backoff::new();
        // This thread has the bias and is in already: as with any lock it
        // waits for another thread to release it in its stead.
        while self.owner.load(Ordering::Relaxed) == me && !self.is_revoked() {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
            if self.try_quick_as(me) {
                return;
            }
        }
        self.spin.lock();
        if self.is_revoked() {
            // What the rest is about is done.
        } else if self.owner.load(Ordering::Relaxed) != NOBODY {
            self.revoke();
        } else if self.comes_often(me) {
            // It is in by its bias from here on: `key` says so already.
            self.owner.store(me, Ordering::Relaxed);
            self.spin.unlock();
            return;
        }
        self.by_spin.store(1, Ordering::Relaxed);
    }

    fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed) != 0
    }

    /// Counts how often a thread comes in a row; whether that is often enough.
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

    /// Takes the bias from its owner, and waits until that is out.
    #[cold]
    fn revoke(&self) {
        self.revoked.store(1, Ordering::Relaxed);
        asymmetric::heavy();
        let backoff = Backoff::new();
        // Acquire: what the owner did is seen. It may take its key once more,
        // for a moment, but then finds that the bias is gone.
        while self.key.load(Ordering::Acquire) == NOBODY {
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }
}
