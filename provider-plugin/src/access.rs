//! How a queue is kept to one caller at a time, chosen when it is made.

use ring::SpinLock;

/// Shared by threads, or used by one at a time as the application promised.
pub trait Access {
    /// Enters the queue's critical section.
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
    fn enter(_: &SpinLock) {}
    #[inline(always)]
    fn leave(_: &SpinLock) {}
}
