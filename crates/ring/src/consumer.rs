//! The consumer of a ring whose producer is the device.

use crate::Indices;
use crate::primitive::{AtomicUsize, Ordering};

/// Slots `at..end` (modulo the ring) that may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The slot to read next.
    pub at: usize,
    /// The first slot that may not be read.
    pub end: usize,
}

/// Empties slots of a completion queue.
///
/// The producer index is read once a batch ([`Consumer::available`]), and the
/// consumer index published once ([`Consumer::release`]). The latter is kept in
/// process memory, and the shared word is a copy for the device, so a batch does
/// not wait for the previous batch's store.
///
/// Memory safety does not need exclusive access; but two callers at once would get
/// the same entries, so the owner of the queue serialises them.
#[derive(Debug)]
pub struct Consumer {
    indices: Indices,
    /// Consumer index. Ordered by what serialises the callers.
    at: AtomicUsize,
}

impl Consumer {
    /// Creates a consumer that continues at the shared indices.
    pub fn new(indices: Indices) -> Self {
        Self {
            at: AtomicUsize::new(indices.own_consumer()),
            indices,
        }
    }

    /// Returns the index arithmetic and the shared words.
    #[inline]
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// Returns the available entries. They may be read until released.
    #[inline]
    pub fn available(&self) -> Span {
        Span {
            at: self.at.load(Ordering::Relaxed),
            end: self.indices.produced_by_device(),
        }
    }

    /// Returns the current producer index, to extend a span.
    #[inline]
    pub fn produced(&self) -> usize {
        self.indices.produced_by_device()
    }

    /// Releases the slots before `at` to the device.
    #[inline]
    pub fn release(&self, at: usize) {
        self.at.store(at, Ordering::Relaxed);
        self.indices.publish_consumer(at);
    }

    /// Arms the queue, then checks it again: entries that arrived before the queue
    /// was armed raise no event, and a caller that sleeps without the check could
    /// miss them.
    ///
    /// `arm` requests the event. Returns whether there are entries; only if not may
    /// the caller wait.
    ///
    /// # Errors
    /// Those of `arm`.
    #[inline]
    pub fn arm_and_check<E>(&self, arm: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        arm()?;
        let span = self.available();
        Ok(span.at != span.end)
    }
}
