//! The start of a ring and the arithmetic of its indices.

use std::ptr::NonNull;

use crate::order;
use crate::primitive::AtomicU32;

/// The start of a queue as rdma_rxe lays it out (`struct rxe_queue_buf` in
/// rdma_user_rxe.h): geometry, then the two indices, each in cache lines of
/// its own. The entries follow.
///
/// Indices lie in `0..=mask`; equal indices mean empty, so that a ring of
/// `mask + 1` slots holds `mask` entries.
#[repr(C)]
pub struct Header {
    pub(crate) log2_stride: u32,
    pub(crate) mask: u32,
    pad_geometry: [u32; 30],
    pub(crate) producer: AtomicU32,
    pad_producer: [u32; 31],
    pub(crate) consumer: AtomicU32,
    pad_consumer: [u32; 31],
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Header>() == 384);
    assert!(std::mem::offset_of!(Header, mask) == 4);
    assert!(std::mem::offset_of!(Header, producer) == 128);
    assert!(std::mem::offset_of!(Header, consumer) == 256);
};

impl Header {
    /// A header for a ring that is not mapped from a driver: tests and fakes.
    pub fn new(log2_stride: u32, mask: u32) -> Self {
        Self {
            log2_stride,
            mask,
            pad_geometry: [0; 30],
            producer: AtomicU32::new(0),
            pad_producer: [0; 31],
            consumer: AtomicU32::new(0),
            pad_consumer: [0; 31],
        }
    }

    /// The producer index as the other side would read it.
    pub fn producer(&self) -> u32 {
        order::from_device(&self.producer)
    }

    /// The consumer index as the other side would read it.
    pub fn consumer(&self) -> u32 {
        order::from_device(&self.consumer)
    }

    /// Plays the other side: publishes the producer index (tests and fakes).
    pub fn publish_producer(&self, value: u32) {
        order::to_device(&self.producer, value);
    }

    /// Plays the other side: publishes the consumer index (tests and fakes).
    pub fn publish_consumer(&self, value: u32) {
        order::to_device(&self.consumer, value);
    }
}

/// The two indices of a ring, as positions, always inside the ring.
///
/// A position is the offset of a slot in bytes from the first slot, so that a loop over
/// entries neither shifts nor multiplies. The shared words count slots; they are converted
/// and masked where they are read and written, so that every position is inside the ring
/// whatever the words contain.
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    header: NonNull<Header>,
    /// The last slot's position. It is also a mask, since the number of slots and the
    /// stride are powers of two, and clears the offset within a slot.
    mask: usize,
    stride: usize,
    log2_stride: u32,
    /// 2^32 over the stride.
    reciprocal: u64,
}

// SAFETY: all access through the pointer is to atomics; the creator vouches
// that the header outlives every copy (`Indices::new`).
unsafe impl Send for Indices {}
// SAFETY: as above; no method needs exclusive access for memory safety.
unsafe impl Sync for Indices {}

impl Indices {
    /// Indices of the ring at `header` with `slot_mask + 1` slots that are
    /// `1 << log2_stride` bytes apart.
    ///
    /// # Safety
    /// `header` stays valid for as long as the value or a copy is used.
    /// `slot_mask + 1` is a power of two, and all slots together have no more
    /// than 2^32 bytes.
    pub unsafe fn new(header: NonNull<Header>, slot_mask: u32, log2_stride: u32) -> Self {
        debug_assert!(slot_mask.wrapping_add(1).is_power_of_two());
        debug_assert!(u64::from(slot_mask) << log2_stride < 1 << 32);
        Self {
            header,
            mask: (slot_mask as usize) << log2_stride,
            stride: 1 << log2_stride,
            log2_stride,
            reciprocal: (1 << 32) >> log2_stride,
        }
    }

    /// Returns indices of the same ring with one slot, which is always both full and
    /// empty. For a queue whose memory has moved and could not be mapped.
    pub fn sealed(&self) -> Self {
        Self { mask: 0, ..*self }
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        // SAFETY: valid by the contract of `new`; `Header`'s changing fields
        // are atomics, its constant ones are not read through here.
        unsafe { self.header.as_ref() }
    }

    /// The header's address, as the ring's identity.
    #[inline]
    pub fn header_ptr(&self) -> NonNull<Header> {
        self.header
    }

    /// Maximum number of entries in the ring: the number of slots less one.
    #[inline]
    pub fn capacity(&self) -> u32 {
        (self.mask >> self.log2_stride) as u32
    }

    /// Bytes from one slot to the next.
    #[inline]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Masks `at` to the start of a slot inside the ring.
    #[inline]
    pub fn inside(&self, at: usize) -> usize {
        at & self.mask
    }

    /// The slot after `at`.
    #[inline]
    pub fn next(&self, at: usize) -> usize {
        at.wrapping_add(self.stride) & self.mask
    }

    /// The slot before `at`.
    #[inline]
    pub fn prev(&self, at: usize) -> usize {
        at.wrapping_sub(self.stride) & self.mask
    }

    /// The slot `slots` after `at`.
    #[inline]
    pub fn advance(&self, at: usize, slots: usize) -> usize {
        at.wrapping_add(slots << self.log2_stride) & self.mask
    }

    /// The number of slots from `from` up to, not including, `to`.
    #[inline]
    pub fn distance(&self, from: usize, to: usize) -> usize {
        (to.wrapping_sub(from) & self.mask) >> self.log2_stride
    }

    /// Converts a shared word to a position.
    #[inline]
    fn position(&self, word: u32) -> usize {
        // Not a shift: on x86-64 one by a variable costs more than this.
        (word as usize).wrapping_mul(self.stride) & self.mask
    }

    /// Converts a position to a shared word. The other side also masks the word.
    #[inline]
    fn word(&self, at: usize) -> u32 {
        // As above: a division by the stride, exact, since a position is a
        // multiple of it and less than 2^32.
        ((at as u64).wrapping_mul(self.reciprocal) >> 32) as u32
    }

    /// The device's producer index ([`order::from_device`]).
    #[inline]
    pub fn produced_by_device(&self) -> usize {
        self.position(order::from_device(&self.header().producer))
    }

    /// The device's consumer index ([`order::from_device`]).
    #[inline]
    pub fn consumed_by_device(&self) -> usize {
        self.position(order::from_device(&self.header().consumer))
    }

    /// The own producer index ([`order::own`]).
    #[inline]
    pub fn own_producer(&self) -> usize {
        self.position(order::own(&self.header().producer))
    }

    /// The own consumer index ([`order::own`]).
    #[inline]
    pub fn own_consumer(&self) -> usize {
        self.position(order::own(&self.header().consumer))
    }

    /// Passes entries up to `at` to the device ([`order::to_device`]).
    #[inline]
    pub fn publish_producer(&self, at: usize) {
        order::to_device(&self.header().producer, self.word(at));
    }

    /// Returns slots up to `at` to the device ([`order::to_device`]).
    #[inline]
    pub fn publish_consumer(&self, at: usize) {
        order::to_device(&self.header().consumer, self.word(at));
    }
}
