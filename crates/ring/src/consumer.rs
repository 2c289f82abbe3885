//! The consuming role: the device fills slots, we empty them.

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
/// The device's index is read once a batch ([`Consumer::available`]), and ours
/// published once ([`Consumer::release`]). Ours is kept in process memory, and
/// the shared word is a copy for the device: a batch need not wait for what the
/// one before has just written there.
///
/// Nothing here needs exclusive access for memory safety; two callers at once
/// would both be given the same entries, so the owner of the queue lets one in
/// at a time.
#[derive(Debug)]
pub struct Consumer {
    indices: Indices,
    /// Where we consume next. Ordered by what lets callers in one at a time.
    at: AtomicUsize,
}

impl Consumer {
    /// Takes up the consuming role where the shared indices stand.
    pub fn new(indices: Indices) -> Self {
        Self {
            at: AtomicUsize::new(indices.own_consumer()),
            indices,
        }
    }

    /// The arithmetic and the shared words.
    #[inline(always)]
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// The entries that are there now. They may be read until released.
    #[inline(always)]
    pub fn available(&self) -> Span {
        Span {
            at: self.at.load(Ordering::Relaxed),
            end: self.indices.produced_by_device(),
        }
    }

    /// How far the device has come by now, to lengthen a span.
    #[inline(always)]
    pub fn produced(&self) -> usize {
        self.indices.produced_by_device()
    }

    /// Gives the slots before `at` back to the device.
    #[inline(always)]
    pub fn release(&self, at: usize) {
        self.at.store(at, Ordering::Relaxed);
        self.indices.publish_consumer(at);
    }

    /// Arms the queue and looks again, in that order, as one act: entries that
    /// came before the queue was armed raise no event, so whoever arms and
    /// then sleeps without looking sleeps on them.
    ///
    /// `arm` asks the device for an event. Returns whether entries are there;
    /// only if not may the caller wait.
    ///
    /// # Errors
    /// Those of `arm`.
    #[inline]
    pub fn arm_and_look<E>(&self, arm: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        arm()?;
        let span = self.available();
        Ok(span.at != span.end)
    }
}
