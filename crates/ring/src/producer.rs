//! The producing role: we fill slots, the device empties them.

use crate::Indices;

/// Fills slots of a work queue.
///
/// A batch works on plain positions: start at [`Producer::tail`], ask
/// [`Producer::has_room`] before each slot, step with [`Indices::next`], and
/// [`Producer::publish`] once. What was not published never happened.
///
/// Plain values: a loop works on a copy, and puts it back to keep what it saw.
///
/// Thread rule: one caller at a time.
#[derive(Clone, Copy, Debug)]
pub struct Producer {
    indices: Indices,
    /// The first slot that the device has not been given: our index, of which
    /// the shared word is a copy for the device.
    tail: usize,
    /// The device's index when it was last read. Reading it again can only
    /// find more room, so it is read when there seems to be none: a full
    /// queue costs the shared cache line, a queue with room does not.
    seen: usize,
}

impl Producer {
    /// Takes up the producing role where the shared indices stand.
    pub fn new(indices: Indices) -> Self {
        Self {
            tail: indices.own_producer(),
            seen: indices.consumed_by_device(),
            indices,
        }
    }

    /// The arithmetic and the shared words.
    #[inline(always)]
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// The first slot that the device has not been given.
    #[inline(always)]
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// The slot after `at` if `at` may be filled, as far as is known without
    /// looking at the device's index again. What it says yes to is so.
    #[inline(always)]
    pub fn after_if_room(&self, at: usize) -> Option<usize> {
        let next = self.indices.next(at);
        (next != self.seen).then_some(next)
    }

    /// The slot after `at` if `at` may be filled. One slot always stays free.
    #[inline(always)]
    pub fn after(&mut self, at: usize) -> Option<usize> {
        if let after @ Some(_) = self.after_if_room(at) {
            return after;
        }
        self.seen = self.indices.consumed_by_device();
        self.after_if_room(at)
    }

    /// Whether slot `at` may be filled.
    #[inline(always)]
    pub fn has_room(&mut self, at: usize) -> bool {
        self.after(at).is_some()
    }

    /// Hands the slots before `at` to the device.
    #[inline(always)]
    pub fn publish(&mut self, at: usize) {
        self.tail = at;
        self.indices.publish_producer(at);
    }
}
