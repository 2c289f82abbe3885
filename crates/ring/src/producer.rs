//! The producing role: we fill slots, the device empties them.

use crate::Indices;

/// Fills slots of a work queue.
///
/// A batch works on plain slot numbers: start at [`Producer::tail`], ask
/// [`Producer::has_room`] before each slot, step with [`Indices::next`], and
/// [`Producer::publish`] once. What was not published never happened.
///
/// Thread rule: one caller at a time (`&mut`).
#[derive(Debug)]
pub struct Producer {
    indices: Indices,
    /// The device's index when it was last read. Reading it again can only
    /// find more room, so it is read when there seems to be none: a full
    /// queue costs the shared cache line, a queue with room does not.
    seen: u32,
}

impl Producer {
    /// Takes up the producing role where the shared indices stand.
    pub fn new(indices: Indices) -> Self {
        Self {
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
    pub fn tail(&self) -> u32 {
        self.indices.own_producer()
    }

    /// Whether slot `at` may be filled. One slot always stays free.
    #[inline(always)]
    pub fn has_room(&mut self, at: u32) -> bool {
        let next = self.indices.next(at);
        next != self.seen || self.look_again(next)
    }

    #[cold]
    fn look_again(&mut self, next: u32) -> bool {
        self.seen = self.indices.consumed_by_device();
        next != self.seen
    }

    /// Hands the slots before `at` to the device.
    #[inline(always)]
    pub fn publish(&mut self, at: u32) {
        self.indices.publish_producer(at);
    }
}
