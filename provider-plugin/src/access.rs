//! How a queue is kept to one caller at a time, chosen when it is made.

use ring::BiasedLock;

/// A queue's critical section, which is left when the value is dropped.
pub struct Section<'a> {
    /// None is needed: one caller at a time by the application's promise.
    single: bool,
    lock: &'a BiasedLock,
}

impl<'a> Section<'a> {
    /// Enters it; waits for the lock if need be.
    #[inline]
    pub fn enter(single: bool, lock: &'a BiasedLock) -> Self {
        /// Of a lock that several threads take, or for the first times.
        #[inline(never)]
        fn enter_shared(lock: &BiasedLock) {
            lock.lock_shared();
        }
        if !single && !lock.try_fast() {
            enter_shared(lock);
        }
        Self { single, lock }
    }

    /// Enters it, if that takes no waiting and the lock is biased to this thread.
    #[inline]
    pub fn try_enter(single: bool, lock: &'a BiasedLock) -> Option<Self> {
        (single || lock.try_fast()).then_some(Self { single, lock })
    }

    /// Stays in it, beyond the end of the call.
    #[inline]
    pub fn keep_locked(self) {
        core::mem::forget(self);
    }

    /// The section that was entered and not left.
    ///
    /// # Safety
    /// It was: by [`Section::keep_locked`].
    #[inline]
    pub unsafe fn entered(single: bool, lock: &'a BiasedLock) -> Self {
        Self { single, lock }
    }

    /// Leaves it.
    #[inline]
    pub fn leave(self) {}
}

impl Drop for Section<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.single {
            self.lock.unlock();
        }
    }
}

/// Runs `f` in the critical section of `lock`, which a single owner does not
/// need.
pub fn locked<R>(single: bool, lock: &BiasedLock, f: impl FnOnce() -> R) -> R {
    if !single {
        lock.lock();
    }
    let result = f();
    if !single {
        lock.unlock();
    }
    result
}
