//! Copies of memory that others write to at any time: peers through the device,
//! other threads of this process.
//!
//! Every access is of one aligned word of 8 bytes, and atomic. Atomic alone would
//! not do: to the language, accesses of different sizes to the same bytes are a
//! data race, unless they are ordered or all of them reads. So there is one size,
//! and no mixture of copies is a race. (The device's own accesses are not known
//! to the language.)
//!
//! A copy out reads the words at its edges whole. A copy in puts its bytes into
//! them by a compare-exchange, which cannot undo what another has written next to
//! them; a locked instruction at each edge that is not aligned, so at most two.
//! The words in between are plain stores. Memory is whole pages, so that each
//! word of which a byte is asked for is there.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// The word that a byte is in, and which of its bytes it is.
///
/// # Safety
/// The word is in the same allocation.
unsafe fn word_of(at: NonNull<u8>) -> (NonNull<u64>, usize) {
    let skip = at.as_ptr().addr() % WORD;
    // SAFETY: by contract.
    (unsafe { at.byte_sub(skip) }.cast(), skip)
}

/// # Safety
/// The word is valid, aligned, and only accessed as a whole and atomically.
#[inline(always)]
unsafe fn get(at: NonNull<u64>) -> [u8; WORD] {
    // SAFETY: by contract.
    let word = unsafe { AtomicU64::from_ptr(at.as_ptr()) };
    word.load(Ordering::Relaxed).to_ne_bytes()
}

/// Changes a part of a word, and nothing else of it.
///
/// # Safety
/// As [`get`], and the word is writable. `skip + bytes.len()` is at most
/// [`WORD`].
unsafe fn put_part(at: NonNull<u64>, skip: usize, bytes: &[u8]) {
    // SAFETY: by contract.
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
/// Each aligned word that has one of so many bytes at `from` is valid, and only
/// accessed as a whole and atomically.
pub(super) unsafe fn load(from: NonNull<u8>, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    // SAFETY: each access is of an aligned word that has one of the bytes: the
    // first, those behind it of which all are asked for, the last.
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

/// Reads a word; what was written before it is seen afterwards.
///
/// # Safety
/// It is valid, aligned, and only accessed as a whole and atomically.
pub(super) unsafe fn load_word(at: NonNull<u64>) -> u64 {
    // SAFETY: by contract.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }.load(Ordering::Acquire)
}

/// Writes a word, after what was written before.
///
/// # Safety
/// It is valid for writes, aligned, and only accessed as a whole and atomically.
pub(super) unsafe fn store_word(at: NonNull<u64>, value: u64) {
    // SAFETY: by contract.
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

    /// Memory as a region's: whole words, which this module alone accesses.
    #[repr(align(8))]
    struct Memory(UnsafeCell<[u8; LEN]>);

    // SAFETY: the bytes are accessed by this module only, atomically.
    unsafe impl Sync for Memory {}

    impl Memory {
        fn new(fill: u8) -> Self {
            Self(UnsafeCell::new([fill; LEN]))
        }

        fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
            assert!(offset + len <= LEN);
            let start = NonNull::new(self.0.get()).unwrap().cast::<u8>();
            // SAFETY: within the array, as just checked.
            unsafe { start.add(offset) }
        }

        fn write(&self, offset: usize, bytes: &[u8]) {
            // SAFETY: in the array, which is whole words.
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
        // Under Miri one offset of each kind, and up to three words.
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
        /// Writes one over the other, and reads, as of a plain array.
        #[test]
        fn memory_is_as_a_plain_array(
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

    /// Two threads that write to bytes of the same words, neither to the
    /// other's, never find their own changed.
    #[test]
    fn a_write_leaves_its_neighbours_bytes_alone() {
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
