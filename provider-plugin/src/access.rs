//! Critical sections of queues: the lock, or the application's promise.

use ring::BiasedLock;

/// A queue's critical section, which is left when the value is dropped.
pub struct Section<'a> {
    /// The application promised one caller at a time: no lock.
    single: bool,
    lock: &'a BiasedLock,
}

impl<'a> Section<'a> {
    /// Enters the section; waits for the lock if needed.
    #[inline]
    pub fn enter(single: bool, lock: &'a BiasedLock) -> Self {
        /// For a lock that is not biased to this thread.
        #[inline(never)]
        fn enter_shared(lock: &BiasedLock) {
            lock.lock_shared();
        }
        if !single && !lock.try_fast() {
            enter_shared(lock);
        }
        Self { single, lock }
    }

    /// Enters it, if that takes no waiting and the lock is biased to this thread, or
    /// to none any more.
    #[inline]
    pub fn try_enter(single: bool, lock: &'a BiasedLock) -> Option<Self> {
        let entered = single || lock.try_fast() || lock.try_spin();
        // Not `then_some`: a value that is dropped unlocks.
        entered.then(|| Self { single, lock })
    }

    /// Keeps the section entered after this value is gone.
    #[inline]
    pub fn keep_locked(self) {
        core::mem::forget(self);
    }

    /// The section that [`Section::keep_locked`] kept.
    ///
    /// # Safety
    /// It was kept, once.
    #[inline]
    pub unsafe fn entered(single: bool, lock: &'a BiasedLock) -> Self {
        Self { single, lock }
    }

    /// Leaves the section.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn section_that_was_not_entered_is_not_left() {
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
