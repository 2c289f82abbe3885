//! Copies to and from memory that peers (through the device) and other threads of this
//! process may write at any time.
//!
//! Every access is atomic and of one aligned 8-byte word. Atomicity alone does
//! not suffice: in Rust's memory model, unordered accesses of different sizes to
//! the same bytes are a data race unless all are reads. With a single access
//! size, no combination of copies is a race. (Accesses by the device are outside
//! the memory model.)
//!
//! A copy out reads whole words at its ends. A copy in changes only its own bytes of these
//! words, by compare-exchange, so that it cannot revert a concurrent write of adjacent
//! bytes; this costs one locked instruction for each unaligned end, at most two. The words
//! in between are plain stores. Regions are whole pages, so the word of each requested byte
//! is mapped.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// Returns the word that contains a byte, and the byte's index in it.
///
/// # Safety
/// The word is in the same allocation.
unsafe fn word_of(at: NonNull<u8>) -> (NonNull<u64>, usize) {
    let skip = at.as_ptr().addr() % WORD;
    // SAFETY: the caller's obligation.
    (unsafe { at.byte_sub(skip) }.cast(), skip)
}

/// # Safety
/// The word is valid, aligned, and only accessed as a whole and atomically.
#[inline]
unsafe fn get(at: NonNull<u64>) -> [u8; WORD] {
    // SAFETY: the caller's obligation.
    let word = unsafe { AtomicU64::from_ptr(at.as_ptr()) };
    word.load(Ordering::Relaxed).to_ne_bytes()
}

/// Changes `bytes.len()` bytes of a word from `skip` on; leaves the others unchanged.
///
/// # Safety
/// As [`get`], and the word is writable. `skip + bytes.len()` is at most
/// [`WORD`].
unsafe fn put_part(at: NonNull<u64>, skip: usize, bytes: &[u8]) {
    // SAFETY: the caller's obligation.
    let word = unsafe { AtomicU64::from_ptr(at.as_ptr()) };
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let mut new = old.to_ne_bytes();
        for (to, from) in new.iter_mut().skip(skip).zip(bytes) {
            *to = *from;
        }
        let new = u64::from_ne_bytes(new);
        match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
}

/// Copies `to.len()` bytes out.
///
/// # Safety
/// Each aligned word that contains one of the `to.len()` bytes at `from` is
/// valid, and only accessed as a whole and atomically.
pub(super) unsafe fn load(from: NonNull<u8>, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    // SAFETY: each access is of an aligned word that contains a requested byte:
    // the first word, those that are requested whole, and the last.
    unsafe {
        let (mut at, skip) = word_of(from);
        let head = if skip == 0 { 0 } else { WORD - skip };
        let (first, rest) = to.split_at_mut(head.min(to.len()));
        if !first.is_empty() {
            first.copy_from_slice(&get(at)[skip..skip + first.len()]);
            at = at.add(1);
        }
        let words = rest.len() / WORD;
        let mut chunks = rest.chunks_exact_mut(WORD);
        for (i, chunk) in chunks.by_ref().enumerate() {
            chunk.copy_from_slice(&get(at.add(i)));
        }
        let last = chunks.into_remainder();
        if !last.is_empty() {
            last.copy_from_slice(&get(at.add(words))[..last.len()]);
        }
    }
}

/// Copies `from` in.
///
/// # Safety
/// As [`load`], and the words are writable.
pub(super) unsafe fn store(to: NonNull<u8>, from: &[u8]) {
    if from.is_empty() {
        return;
    }
    // SAFETY: as in `load`.
    unsafe {
        let (mut at, skip) = word_of(to);
        let head = if skip == 0 { 0 } else { WORD - skip };
        let (first, rest) = from.split_at(head.min(from.len()));
        if !first.is_empty() {
            put_part(at, skip, first);
            at = at.add(1);
        }
        let words = rest.len() / WORD;
        let chunks = rest.chunks_exact(WORD);
        let last = chunks.remainder();
        for (i, chunk) in chunks.enumerate() {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            AtomicU64::from_ptr(at.add(i).as_ptr())
                .store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        if !last.is_empty() {
            put_part(at.add(words), 0, last);
        }
    }
}

/// Reads a word (acquire): writes made before that value was stored are visible
/// afterwards.
///
/// # Safety
/// It is valid, aligned, and only accessed as a whole and atomically.
pub(super) unsafe fn load_word(at: NonNull<u64>) -> u64 {
    // SAFETY: the caller's obligation.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }.load(Ordering::Acquire)
}

/// Writes a word (release), after all earlier writes.
///
/// # Safety
/// It is valid for writes, aligned, and only accessed as a whole and atomically.
pub(super) unsafe fn store_word(at: NonNull<u64>, value: u64) {
    // SAFETY: the caller's obligation.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }.store(value, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;
    use std::thread;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const LEN: usize = 64;

    /// Memory like that of a region: whole words that only this module accesses.
    #[repr(align(8))]
    struct Memory(UnsafeCell<[u8; LEN]>);

    // SAFETY: only this module accesses the bytes, atomically.
    unsafe impl Sync for Memory {}

    impl Memory {
        fn new(fill: u8) -> Self {
            Self(UnsafeCell::new([fill; LEN]))
        }

        fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
            assert!(offset + len <= LEN);
            let start = NonNull::new(self.0.get()).unwrap().cast::<u8>();
            // SAFETY: the assertion above checked that it is within the array.
            unsafe { start.add(offset) }
        }

        fn write(&self, offset: usize, bytes: &[u8]) {
            // SAFETY: within the array, which consists of whole words.
            unsafe { store(self.at(offset, bytes.len()), bytes) };
        }

        fn read(&self, offset: usize, len: usize) -> Vec<u8> {
            let mut bytes = vec![0x77; len];
            // SAFETY: as in `write`.
            unsafe { load(self.at(offset, len), &mut bytes) };
            bytes
        }
    }

    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let pattern: Vec<u8> = (1..=LEN as u8).collect();
        // Miri runs each alignment, and up to three words.
        let (offsets, most) = if cfg!(miri) { (8, 25) } else { (LEN, LEN) };
        for offset in 0..=offsets {
            for len in 0..=most.min(LEN - offset) {
                let memory = Memory::new(0xee);
                memory.write(offset, &pattern[..len]);
                let mut model = [0xee; LEN];
                model[offset..offset + len].copy_from_slice(&pattern[..len]);
                assert_eq!(memory.read(0, LEN), model, "{offset} {len}");
                assert_eq!(memory.read(offset, len), pattern[..len]);
            }
        }
    }

    proptest! {
        /// Overlapping writes and reads behave as on a plain array.
        #[test]
        fn copies_match_a_plain_array(
            steps in vec((0..=LEN, vec(any::<u8>(), 0..=LEN), 0..=LEN), 1..30),
        ) {
            let memory = Memory::new(0);
            let mut model = [0; LEN];
            for (offset, bytes, from) in steps {
                let bytes = &bytes[..bytes.len().min(LEN - offset)];
                memory.write(offset, bytes);
                model[offset..offset + bytes.len()].copy_from_slice(bytes);
                prop_assert_eq!(memory.read(from, LEN - from), &model[from..]);
            }
        }
    }

    /// Threads that write different bytes of the same words never find their own
    /// bytes changed.
    #[test]
    fn write_preserves_adjacent_bytes() {
        let memory = Memory::new(0);
        let rounds = if cfg!(miri) { 20 } else { 5_000u32 };
        let run = |offset: usize, len: usize| {
            for round in 0..rounds {
                let bytes = vec![round as u8; len];
                memory.write(offset, &bytes);
                assert_eq!(memory.read(offset, len), bytes);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| run(3, 10));
            scope.spawn(|| run(13, 14));
            run(0, 3);
        });
    }
}
