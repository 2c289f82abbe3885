//! The index protocol of a ring of frames between two processes.
//!
//! One process writes frames and moves the producer index, the other reads them and
//! moves the consumer index. Both count words, and wrap. Each side keeps its own index
//! and never reads it back; the other side's is read once, and is either possible or
//! [`ProtocolViolation`]. A side that has been killed leaves nothing locked: its index stops.
//!
//! Before the consumer sleeps, it [arms](FrameConsumer::arm) the ring and checks it once
//! more. After publishing, the producer checks whether the consumer must be woken
//! ([`FrameProducer::takes_wake_up`]). Each executes a store, a full barrier, and a load
//! of the other's word, so that at least one of them sees the other's store.

use std::ptr::NonNull;

use crate::order;
use crate::primitive::AtomicU32;

/// A word in cache lines of its own.
#[repr(C, align(128))]
struct CacheLine(AtomicU32);

/// The start of the shared memory. The frames follow.
#[repr(C)]
pub struct FrameHeader {
    producer: CacheLine,
    consumer: CacheLine,
    /// 1 if the consumer must be woken.
    armed: CacheLine,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<FrameHeader>() == 384);

impl FrameHeader {
    /// The header of an empty ring.
    pub fn new() -> Self {
        let line = || CacheLine(AtomicU32::new(0));
        Self {
            producer: line(),
            consumer: line(),
            armed: line(),
        }
    }
}

impl Default for FrameHeader {
    fn default() -> Self {
        Self::new()
    }
}

/// The other side has violated the protocol. The ring is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolViolation;

/// The side that writes frames.
#[derive(Debug)]
pub struct FrameProducer {
    header: NonNull<FrameHeader>,
    capacity: u32,
    tail: u32,
    /// The consumer index when it was read last.
    consumed: u32,
}

/// The side that reads frames.
#[derive(Debug)]
pub struct FrameConsumer {
    header: NonNull<FrameHeader>,
    capacity: u32,
    head: u32,
}

// SAFETY: the pointer leads to atomics only, for as long as the value lives, by the
// contract of `new`.
unsafe impl Send for FrameProducer {}
// SAFETY: as above.
unsafe impl Send for FrameConsumer {}

impl FrameProducer {
    /// The producer of a new ring of `capacity` words.
    ///
    /// # Safety
    /// `header` is valid for as long as the value lives.
    pub unsafe fn new(header: NonNull<FrameHeader>, capacity: u32) -> Self {
        Self {
            header,
            capacity,
            tail: 0,
            consumed: 0,
        }
    }

    fn header(&self) -> &FrameHeader {
        // SAFETY: valid by the contract of `new`; it has atomics only.
        unsafe { self.header.as_ref() }
    }

    /// Reads the consumer index. Returns the number of unread words.
    fn count_unread(&mut self) -> Result<u32, ProtocolViolation> {
        let consumed = order::from_device(&self.header().consumer.0);
        let unread = self.tail.wrapping_sub(consumed);
        if unread > self.capacity {
            return Err(ProtocolViolation);
        }
        self.consumed = consumed;
        Ok(unread)
    }

    /// Returns where the next frame begins, if it has room for `words` words.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if the consumer's index is impossible.
    pub fn room(&mut self, words: u32) -> Result<Option<u32>, ProtocolViolation> {
        let most = match self.capacity.checked_sub(words) {
            Some(most) => most,
            None => return Ok(None),
        };
        // The last index that was read is possible; a newer one means more room.
        if self.tail.wrapping_sub(self.consumed) <= most {
            return Ok(Some(self.tail));
        }
        Ok((self.count_unread()? <= most).then_some(self.tail))
    }

    /// Publishes `words` words that were written at the position from [`room`](Self::room).
    pub fn publish(&mut self, words: u32) {
        self.tail = self.tail.wrapping_add(words);
        order::to_device(&self.header().producer.0, self.tail);
    }

    /// Called after publishing, once for any number of frames: returns whether the
    /// consumer sleeps, or is about to, and must be woken by this call's caller.
    #[must_use]
    pub fn takes_wake_up(&self) -> bool {
        order::between_stores_and_sleep();
        let armed = &self.header().armed.0;
        // The swap makes one wake-up of several callers' frames.
        order::own(armed) != 0 && order::take(armed) != 0
    }

    /// Returns whether the consumer has not read everything.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if its index is impossible.
    pub fn is_unread(&mut self) -> Result<bool, ProtocolViolation> {
        Ok(self.count_unread()? != 0)
    }
}

impl FrameConsumer {
    /// The consumer of a ring of `capacity` words, of which nothing has been read.
    ///
    /// # Safety
    /// `header` is valid for as long as the value lives.
    pub unsafe fn new(header: NonNull<FrameHeader>, capacity: u32) -> Self {
        Self {
            header,
            capacity,
            head: 0,
        }
    }

    fn header(&self) -> &FrameHeader {
        // SAFETY: valid by the contract of `new`; it has atomics only.
        unsafe { self.header.as_ref() }
    }

    /// Returns where the next unread word is, and how many there are, never more than
    /// the ring has.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if the producer's index is impossible.
    pub fn unread(&self) -> Result<(u32, u32), ProtocolViolation> {
        let tail = order::from_device(&self.header().producer.0);
        let unread = tail.wrapping_sub(self.head);
        match unread <= self.capacity {
            true => Ok((self.head, unread)),
            false => Err(ProtocolViolation),
        }
    }

    /// Releases `words` words that were read to the producer.
    pub fn release(&mut self, words: u32) {
        self.head = self.head.wrapping_add(words);
        order::to_device(&self.header().consumer.0, self.head);
    }

    /// Asks the producer for a wake-up. Returns whether there is something to read
    /// already; if not, the producer's next frame wakes.
    #[must_use]
    pub fn arm(&self) -> bool {
        order::announce(&self.header().armed.0, 1);
        order::between_stores_and_sleep();
        // A protocol violation is reported by `unread`.
        self.unread().map_or(true, |(_, unread)| unread != 0)
    }
}
