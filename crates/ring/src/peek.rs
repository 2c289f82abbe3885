//! "Is it empty?" without the consumer's lock.

use std::ptr;

use crate::primitive::{AtomicPtr, Ordering};
use crate::{Header, Indices, order};

/// Tells an empty queue from one that is worth taking the lock for.
///
/// Most polls find nothing; those need no lock. The answer is safe for the
/// arm, look, wait pattern: entries that were there when the queue was armed
/// are in both readings of the indices or have been consumed, and a later one
/// raises the event.
///
/// A resize moves the queue to other memory, and copies what is pending. While
/// it is under way ([`Peek::suspend`]) nothing is called empty; a look that
/// began before it finds the ring changed when it is about to answer, and
/// sends the caller to the lock. Memory that was looked at once must stay
/// readable: see `Mapping::retire`.
#[derive(Debug)]
pub struct Peek {
    header: AtomicPtr<Header>,
}

impl Peek {
    /// Looks at the ring of `indices`.
    ///
    /// # Safety
    /// The header, and that of every ring later given to [`Peek::resume`],
    /// stays readable for as long as this value is used, though it may read
    /// as zeros from the moment the ring is suspended.
    pub unsafe fn new(indices: &Indices) -> Self {
        Self {
            header: AtomicPtr::new(indices.header_ptr().as_ptr()),
        }
    }

    /// Whether the queue is certainly empty. `false` means: take the lock and
    /// look there. Any thread, no lock, no read-modify-write.
    #[inline(always)]
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

    /// From now on nothing is called empty. Called with the lock held, before
    /// the kernel is asked to move the queue.
    pub fn suspend(&self) {
        self.header.store(ptr::null_mut(), Ordering::SeqCst);
    }

    /// Looks at the ring of `indices` from now on: the new one, or the old one
    /// when the kernel refused. Called with the lock held.
    pub fn resume(&self, indices: &Indices) {
        self.header
            .store(indices.header_ptr().as_ptr(), Ordering::Release);
    }
}
