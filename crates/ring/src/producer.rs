//! The producer of a ring whose consumer is the device.

use crate::Indices;

/// Fills slots of a work queue.
///
/// A batch works on plain positions: start at [`Producer::tail`], ask
/// [`Producer::has_room`] before each slot, step with [`Indices::next`], and
/// [`Producer::publish`] once. The device sees nothing that was not published.
///
/// A plain value: a loop works on a copy, and stores it back to keep the device
/// index that it read.
///
/// Thread rule: one caller at a time.
#[derive(Clone, Copy, Debug)]
pub struct Producer {
    indices: Indices,
    /// Producer index; the shared word is a copy for the device.
    tail: usize,
    /// Consumer index when it was last read. A later value can only leave more
    /// room, so it is read again only if there seems to be none.
    seen: usize,
}

impl Producer {
    /// Creates a producer that continues at the shared indices.
    pub fn new(indices: Indices) -> Self {
        Self {
            tail: indices.own_producer(),
            seen: indices.consumed_by_device(),
            indices,
        }
    }

    /// Returns the index arithmetic and the shared words.
    #[inline]
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// Returns the first unpublished slot.
    #[inline]
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// Returns the slot after `at` if the cached consumer index leaves room for
    /// `at`.
    #[inline]
    pub fn next_if_room(&self, at: usize) -> Option<usize> {
        let next = self.indices.next(at);
        (next != self.seen).then_some(next)
    }

    /// Returns the slot after `at` if `at` may be filled. One slot always stays
    /// free.
    #[inline]
    pub fn after(&mut self, at: usize) -> Option<usize> {
        if let after @ Some(_) = self.next_if_room(at) {
            return after;
        }
        self.seen = self.indices.consumed_by_device();
        self.next_if_room(at)
    }

    /// Returns whether slot `at` may be filled.
    #[inline]
    pub fn has_room(&mut self, at: usize) -> bool {
        self.after(at).is_some()
    }

    /// Publishes the slots before `at` to the device.
    #[inline]
    pub fn publish(&mut self, at: usize) {
        self.tail = at;
        self.indices.publish_producer(at);
    }
}
