//! The driver's side of a queue, played over a memory file.
//!
//! The file is the driver's memory; the queue under test maps it. What the
//! driver does here goes through the file, so that it shares no code with
//! what is tested.
#![allow(missing_docs, reason = "for tests: the names say it")]
#![allow(
    clippy::len_without_is_empty,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    clippy::should_implement_trait,
    reason = "for tests"
)]

pub mod kernel;
pub mod layout;

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::FileExt;

use ring::{Mapping, Ring};

/// What entries hold before they are written: neither zero nor plausible, so
/// that a field that was forgotten shows.
pub const STALE: u8 = 0xff;

/// `struct rxe_queue_buf`: geometry, indices, entries.
const LOG2_ELEM_SIZE: u64 = 0;
const INDEX_MASK: u64 = 4;
const PRODUCER: u64 = 128;
const CONSUMER: u64 = 256;
const DATA: u64 = 384;

/// A queue in the driver's memory.
#[derive(Debug)]
pub struct Driver {
    pub file: File,
    /// Where the queue begins in the file, as in an mmap offset.
    pub offset: u64,
    pub stride: usize,
    pub slots: u32,
}

/// A memory file without contents.
pub fn memory() -> File {
    // SAFETY: a fresh descriptor, owned by nobody else.
    unsafe { File::from_raw_fd(libc::memfd_create(c"driver".as_ptr(), libc::MFD_CLOEXEC)) }
}

impl Driver {
    /// A queue of `slots` entries, all stale, in a file of its own.
    pub fn new(log2_stride: u32, slots: u32) -> Self {
        Self::at(memory(), 0, log2_stride, slots)
    }

    /// The same at `offset` of a file that may hold others.
    pub fn at(file: File, offset: u64, log2_stride: u32, slots: u32) -> Self {
        let driver = Self {
            file,
            offset,
            stride: 1 << log2_stride,
            slots,
        };
        let end = offset + u64::from(driver.size());
        if file_len(&driver.file) < end {
            driver.file.set_len(end).unwrap();
        }
        driver.put(LOG2_ELEM_SIZE, log2_stride);
        driver.put(INDEX_MASK, slots - 1);
        for slot in 0..slots {
            driver.set_entry(slot, &vec![STALE; driver.stride]);
        }
        driver
    }

    /// Bytes to map: whole pages, as the driver announces them.
    pub fn size(&self) -> u32 {
        (DATA as u32 + self.slots * self.stride as u32).next_multiple_of(4096)
    }

    /// `struct mminfo`.
    pub fn mminfo(&self) -> [u8; 16] {
        let mut info = [0; 16];
        info[..8].copy_from_slice(&self.offset.to_ne_bytes());
        info[8..12].copy_from_slice(&self.size().to_ne_bytes());
        info
    }

    /// What the process maps.
    pub fn ring(&self, entry_size: usize) -> Ring {
        let mapping = Mapping::new(self.file.as_fd(), self.offset, self.size() as usize).unwrap();
        Ring::new(mapping, entry_size).unwrap()
    }

    pub fn put(&self, at: u64, word: u32) {
        let at = self.offset + at;
        self.file.write_all_at(&word.to_ne_bytes(), at).unwrap();
    }

    fn get(&self, at: u64) -> u32 {
        let mut word = [0; 4];
        self.file
            .read_exact_at(&mut word, self.offset + at)
            .unwrap();
        u32::from_ne_bytes(word)
    }

    pub fn producer(&self) -> u32 {
        self.get(PRODUCER)
    }

    pub fn consumer(&self) -> u32 {
        self.get(CONSUMER)
    }

    pub fn set_producer(&self, index: u32) {
        self.put(PRODUCER, index);
    }

    pub fn set_consumer(&self, index: u32) {
        self.put(CONSUMER, index);
    }

    fn entry_at(&self, slot: u32) -> u64 {
        self.offset + DATA + u64::from(slot % self.slots) * self.stride as u64
    }

    /// An entry's bytes.
    pub fn entry(&self, slot: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.stride];
        self.file
            .read_exact_at(&mut bytes, self.entry_at(slot))
            .unwrap();
        bytes
    }

    /// Writes the beginning of an entry.
    pub fn set_entry(&self, slot: u32, bytes: &[u8]) {
        assert!(bytes.len() <= self.stride);
        self.file.write_all_at(bytes, self.entry_at(slot)).unwrap();
    }

    /// Consumes what the process has produced, entry by entry, leaving them
    /// stale.
    pub fn consume(&self) -> Vec<Vec<u8>> {
        let mut taken = Vec::new();
        let mut at = self.consumer();
        while at != self.producer() {
            taken.push(self.entry(at));
            self.set_entry(at, &vec![STALE; self.stride]);
            at = (at + 1) % self.slots;
        }
        self.set_consumer(at);
        taken
    }

    /// Whether every slot but those named is untouched.
    pub fn untouched_but(&self, written: &[u32]) -> bool {
        (0..self.slots)
            .filter(|slot| !written.contains(slot))
            .all(|slot| self.entry(slot).iter().all(|&byte| byte == STALE))
    }
}

fn file_len(file: &File) -> u64 {
    file.metadata().unwrap().len()
}
