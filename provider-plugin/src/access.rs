//! How a queue is kept to one caller at a time, chosen when it is made.

use ring::BiasedLock;

/// Shared by threads, or used by one at a time as the application promised.
pub trait Access {
    /// Enters the queue's critical section if this thread can at once, as the
    /// one that nearly always does.
    ///
    /// Data-path functions go on in a function of their own when it cannot:
    /// without a call that waits in them, they save no registers.
    fn try_quick(lock: &BiasedLock) -> bool;
    /// Leaves it, however it was entered.
    fn leave(lock: &BiasedLock);
}

/// Any thread may call: the lock is taken.
pub enum Shared {}

/// The application keeps the calls apart (IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
/// or a thread domain): nothing is taken.
pub enum Single {}

impl Access for Shared {
    #[inline(always)]
    fn try_quick(lock: &BiasedLock) -> bool {
        lock.try_quick()
    }
    #[inline(always)]
    fn leave(lock: &BiasedLock) {
        lock.unlock();
    }
}

impl Access for Single {
    #[inline(always)]
    fn try_quick(_: &BiasedLock) -> bool {
        true
    }
    #[inline(always)]
    fn leave(_: &BiasedLock) {}
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
