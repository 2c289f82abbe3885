//! How a queue is kept to one caller at a time, chosen when it is made.

use ring::SpinLock;

/// Shared by threads, or used by one at a time as the application promised.
pub trait Access {
    /// Enters the queue's critical section if nobody else is in it.
    ///
    /// Data-path functions go on in a function of their own when somebody is:
    /// without a call that waits in them, they save no registers.
    fn try_enter(lock: &SpinLock) -> bool;
    /// Enters the queue's critical section; waits for it if need be.
    fn enter(lock: &SpinLock);
    /// Leaves it.
    fn leave(lock: &SpinLock);
}

/// Any thread may call: the lock is taken.
pub enum Shared {}

/// The application keeps the calls apart (IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
/// or a thread domain): nothing is taken.
pub enum Single {}

impl Access for Shared {
    #[inline(always)]
    fn try_enter(lock: &SpinLock) -> bool {
        lock.try_lock()
    }
    #[inline(always)]
    fn enter(lock: &SpinLock) {
        lock.lock();
    }
    #[inline(always)]
    fn leave(lock: &SpinLock) {
        lock.unlock();
    }
}

impl Access for Single {
    #[inline(always)]
    fn try_enter(_: &SpinLock) -> bool {
        true
    }
    #[inline(always)]
    fn enter(_: &SpinLock) {}
    #[inline(always)]
    fn leave(_: &SpinLock) {}
}
