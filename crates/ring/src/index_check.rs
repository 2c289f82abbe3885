//! Emptiness of a ring, without the consumer's lock.

use std::ptr;

use crate::primitive::{AtomicPtr, Ordering};
use crate::{Header, Indices, order};

/// Tells an empty queue from one that is worth taking the lock for.
///
/// Most polls find an empty ring; those need no lock. The answer is safe for the
/// arm, check, wait pattern: entries that were there when the queue was armed
/// are seen in the indices or have been consumed, and a later one raises the
/// event.
///
/// A resize moves the queue to other memory and copies the pending entries.
/// Meanwhile ([`IndexCheck::suspend`]) the ring does not count as empty; a check
/// that began before notices the change before it returns. A header must stay
/// readable once it has been used here: see `Mapping::retire`.
#[derive(Debug)]
pub struct IndexCheck {
    header: AtomicPtr<Header>,
}

impl IndexCheck {
    /// Checks the ring of `indices`.
    ///
    /// # Safety
    /// The header, and that of every ring later passed to
    /// [`resume`](Self::resume), must stay readable as long as this value is
    /// used; it may read as zeros once the ring is suspended.
    pub unsafe fn new(indices: &Indices) -> Self {
        Self {
            header: AtomicPtr::new(indices.header_ptr().as_ptr()),
        }
    }

    /// Returns whether the ring is certainly empty; if not, take the lock to find
    /// out. Any thread, no lock, no read-modify-write.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let ring = self.header.load(Ordering::Acquire);
        if ring.is_null() {
            return false;
        }
        // SAFETY: readable by the contract of `new`.
        let header = unsafe { &*ring };
        let produced = order::from_device(&header.producer);
        let consumed = order::from_owner(&header.consumer);
        // The last load stays behind the two above: both are acquires.
        produced == consumed && self.header.load(Ordering::Acquire) == ring
    }

    /// Makes [`is_empty`](Self::is_empty) return false. Called with the lock held,
    /// before the kernel moves the queue.
    pub fn suspend(&self) {
        self.header.store(ptr::null_mut(), Ordering::SeqCst);
    }

    /// Checks the ring of `indices` from now on: the new one, or the old one if
    /// the kernel refused the resize. Called with the lock held.
    pub fn resume(&self, indices: &Indices) {
        self.header
            .store(indices.header_ptr().as_ptr(), Ordering::Release);
    }
}
