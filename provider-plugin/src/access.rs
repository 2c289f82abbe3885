//! Critical sections of queues: a lock, unless the application promised one caller
//! at a time.

use ring::BiasedLock;

/// Guard of a queue's critical section. Dropping it leaves the section.
pub struct Section<'a> {
    /// None if the application promised one caller at a time.
    lock: Option<&'a BiasedLock>,
}

impl<'a> Section<'a> {
    /// Enters the section; waits for the lock if it is held.
    #[inline]
    pub fn enter(single: bool, lock: &'a BiasedLock) -> Self {
        /// Slow path: the lock is not biased to this thread, or is held.
        #[inline(never)]
        fn enter_shared(lock: &BiasedLock) {
            lock.lock_unbiased();
        }
        if !single && !lock.try_lock_fast() {
            enter_shared(lock);
        }
        Self::of(single, lock)
    }

    /// Enters the section if the lock is free and either biased to this thread or no longer
    /// biased. Otherwise use [`Section::enter`].
    #[inline]
    pub fn try_enter(single: bool, lock: &'a BiasedLock) -> Option<Self> {
        let entered = single || lock.try_lock_fast() || lock.try_lock_spin();
        // `then`, not `then_some`: dropping an unused `Section` would unlock.
        entered.then(|| Self::of(single, lock))
    }

    #[inline]
    fn of(single: bool, lock: &'a BiasedLock) -> Self {
        Self {
            lock: (!single).then_some(lock),
        }
    }

    /// Consumes the guard without leaving the section.
    #[inline]
    pub fn keep_locked(self) {
        core::mem::forget(self);
    }

    /// Returns the guard of a section that [`Section::keep_locked`] left entered.
    ///
    /// # Safety
    /// Called once for each [`Section::keep_locked`].
    #[inline]
    pub unsafe fn entered(single: bool, lock: &'a BiasedLock) -> Self {
        Self::of(single, lock)
    }

    /// Leaves the section.
    #[inline]
    pub fn leave(self) {}
}

impl Drop for Section<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(lock) = self.lock {
            lock.unlock();
        }
    }
}

/// Runs `f` with `lock` held; without it if the application promised one caller at a
/// time (`single`).
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn failed_try_enter_does_not_release_the_lock() {
        let lock = BiasedLock::new();
        lock.lock();
        assert!(Section::try_enter(false, &lock).is_none());
        let entered = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let section = Section::enter(false, &lock);
                entered.store(true, Ordering::Relaxed);
                section.leave();
            });
            thread::sleep(Duration::from_millis(50));
            assert!(!entered.load(Ordering::Relaxed), "the lock was released");
            lock.unlock();
        });
        assert!(entered.load(Ordering::Relaxed));
        assert!(Section::try_enter(true, &lock).is_some());
    }
}
