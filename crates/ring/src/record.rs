//! The words by which a process and a device keep in step over queues in the
//! process's own memory.

use std::ptr::NonNull;

use crate::order;
use crate::primitive::{AtomicU8, AtomicU32};

/// A doorbell record: a word, big-endian, that this side writes and the device
/// reads.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellRecord(NonNull<AtomicU32>);

// SAFETY: it only ever leads to an atomic word.
unsafe impl Send for DoorbellRecord {}
// SAFETY: as above.
unsafe impl Sync for DoorbellRecord {}

impl DoorbellRecord {
    /// The word at `at`.
    ///
    /// # Safety
    /// Aligned to 4 bytes, and a valid word for as long as this value or a
    /// copy of it is used.
    pub unsafe fn new(at: NonNull<u32>) -> Self {
        Self(at.cast())
    }

    /// Tells the device; every entry written (or read) before is finished when
    /// it sees the value.
    #[inline(always)]
    pub fn publish(&self, value: u32) {
        // SAFETY: valid by the contract of `new`.
        order::doorbell_record(unsafe { self.0.as_ref() }, value.to_be());
    }

    /// What was published last. Any thread: it may be over.
    #[inline(always)]
    pub fn published(&self) -> u32 {
        // SAFETY: valid by the contract of `new`.
        u32::from_be(order::own(unsafe { self.0.as_ref() }))
    }
}

/// The byte at which an entry says whose it is.
#[derive(Clone, Copy, Debug)]
pub struct Owner(NonNull<AtomicU8>);

impl Owner {
    /// The byte at `at`.
    ///
    /// # Safety
    /// A valid byte for as long as this value or a copy of it is used.
    #[inline(always)]
    pub unsafe fn new(at: NonNull<u8>) -> Self {
        Self(at.cast())
    }

    /// Reads it; if it says that the device has written the entry, so it has.
    #[inline(always)]
    pub fn look(&self) -> u8 {
        // SAFETY: valid by the contract of `new`.
        order::written_by_device(unsafe { self.0.as_ref() })
    }
}
