//! The barriers between a process and the driver on the other side of a ring,
//! named by what they are for.
//!
//! The driver uses `smp_load_acquire` and `smp_store_release` on the same
//! words (drivers/infiniband/sw/rxe/rxe_queue.h). Threads of one process are
//! ordered among themselves by the queue's lock, so own indices need none.

use crate::primitive::{AtomicU32, Ordering};

/// Reads an index that the other side publishes.
///
/// Acquire: entries (or free slots) that the other side finished before it
/// stored this value are seen by every access that follows.
#[inline(always)]
pub fn from_device(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}

/// Publishes an index of ours to the other side.
///
/// Release: every entry written (or read) before is finished when the other
/// side sees the value.
#[inline(always)]
pub fn to_device(index: &AtomicU32, value: u32) {
    index.store(value, Ordering::Release);
}

/// Reads back an index that only this side writes; the caller owns that side
/// (by the queue's lock, or as its only thread), so nothing is to be ordered.
#[inline(always)]
pub fn own(index: &AtomicU32) -> u32 {
    index.load(Ordering::Relaxed)
}

/// Reads, without the lock, an index that another thread of this process
/// publishes under the lock.
///
/// Acquire: what is looked at next (the ring's identity in [`crate::Peek`]) is
/// not read earlier.
#[inline(always)]
pub fn from_owner(index: &AtomicU32) -> u32 {
    index.load(Ordering::Acquire)
}
