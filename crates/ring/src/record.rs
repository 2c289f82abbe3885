//! Words that synchronise a process and a device over queues in the process's
//! memory.

use std::ptr::NonNull;

use crate::order;
use crate::primitive::{AtomicU8, AtomicU32};

/// A doorbell record: a big-endian word that the process writes and the device
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

    /// Publishes an index: when the device sees it, all entries written (or read)
    /// before are complete.
    #[inline]
    pub fn publish(&self, value: u32) {
        // SAFETY: valid by the contract of `new`.
        order::doorbell_record(unsafe { self.0.as_ref() }, value.to_be());
    }

    /// Returns the last published value. Any thread; it may be outdated.
    #[inline]
    pub fn published(&self) -> u32 {
        // SAFETY: valid by the contract of `new`.
        u32::from_be(order::own(unsafe { self.0.as_ref() }))
    }
}

/// The byte of a CQE that contains the owner bit.
#[derive(Clone, Copy, Debug)]
pub struct Owner(NonNull<AtomicU8>);

impl Owner {
    /// The byte at `at`.
    ///
    /// # Safety
    /// A valid byte for as long as this value or a copy of it is used.
    #[inline]
    pub unsafe fn new(at: NonNull<u8>) -> Self {
        Self(at.cast())
    }

    /// Reads the byte. If it shows a new entry, the whole entry is visible.
    #[inline]
    pub fn read(&self) -> u8 {
        // SAFETY: valid by the contract of `new`.
        order::written_by_device(unsafe { self.0.as_ref() })
    }
}
