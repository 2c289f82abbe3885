//! A fake rdma_rxe: the driver's side of a queue in a memory file.
//!
//! The file is the driver's memory; the queue under test maps it. The driver reads and
//! writes the file with system calls, so that it shares no code with the queue under test.

pub mod kernel;
pub mod layout;

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::FileExt;

use ring::{Mapping, Ring};

/// Value of each byte of an unwritten entry: neither zero nor plausible, so that tests
/// detect fields that were not written.
pub const UNWRITTEN: u8 = 0xff;

// Offsets in `struct rxe_queue_buf`.
const LOG2_ELEM_SIZE: u64 = 0;
const INDEX_MASK: u64 = 4;
const PRODUCER: u64 = 128;
const CONSUMER: u64 = 256;
const DATA: u64 = 384;

/// A queue in the driver's memory.
#[derive(Debug)]
pub struct Driver {
    pub file: File,
    /// Offset of the queue in the file, as for mmap.
    pub offset: u64,
    pub stride: usize,
    pub slots: u32,
}

/// Creates an empty memory file.
pub fn memory() -> File {
    // SAFETY: the descriptor is new and has no other owner.
    unsafe { File::from_raw_fd(libc::memfd_create(c"driver".as_ptr(), libc::MFD_CLOEXEC)) }
}

impl Driver {
    /// Creates a queue of `slots` unwritten entries in a new file.
    pub fn new(log2_stride: u32, slots: u32) -> Self {
        Self::at(memory(), 0, log2_stride, slots)
    }

    /// Creates a queue at `offset` of a file, which may have other queues.
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
            driver.set_entry(slot, &vec![UNWRITTEN; driver.stride]);
        }
        driver
    }

    /// Returns the size of the mapping: whole pages, as in the driver's `struct mminfo`.
    pub fn size(&self) -> u32 {
        (DATA as u32 + self.slots * self.stride as u32).next_multiple_of(4096)
    }

    /// Returns the queue's `struct mminfo`.
    pub fn mminfo(&self) -> [u8; 16] {
        let mut info = [0; 16];
        info[..8].copy_from_slice(&self.offset.to_ne_bytes());
        info[8..12].copy_from_slice(&self.size().to_ne_bytes());
        info
    }

    /// Maps the queue as a process does.
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

    /// Returns the bytes of an entry.
    pub fn entry(&self, slot: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.stride];
        self.file
            .read_exact_at(&mut bytes, self.entry_at(slot))
            .unwrap();
        bytes
    }

    /// Writes the first bytes of an entry.
    pub fn set_entry(&self, slot: u32, bytes: &[u8]) {
        assert!(bytes.len() <= self.stride);
        self.file.write_all_at(bytes, self.entry_at(slot)).unwrap();
    }

    /// Consumes the entries that the process has produced, and marks them as unwritten.
    pub fn consume(&self) -> Vec<Vec<u8>> {
        let mut entries = Vec::new();
        let mut at = self.consumer();
        while at != self.producer() {
            entries.push(self.entry(at));
            self.set_entry(at, &vec![UNWRITTEN; self.stride]);
            at = (at + 1) % self.slots;
        }
        self.set_consumer(at);
        entries
    }

    /// Returns whether all entries but those of the slots in `written` are unwritten.
    pub fn unwritten_except(&self, written: &[u32]) -> bool {
        (0..self.slots)
            .filter(|slot| !written.contains(slot))
            .all(|slot| self.entry(slot).iter().all(|&byte| byte == UNWRITTEN))
    }
}

fn file_len(file: &File) -> u64 {
    file.metadata().unwrap().len()
}
