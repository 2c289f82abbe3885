//! Copies of memory that others write to at any time: peers through the device,
//! other threads of this process.
//!
//! Every access is atomic, so that no mixture of them is a data race; the
//! device's own are not known to the language. Words where alignment allows it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// The bytes up to the first aligned word, those in words, the rest.
fn parts(at: NonNull<u8>, len: usize) -> (usize, usize) {
    let head = at.as_ptr().align_offset(WORD).min(len);
    let words = (len - head) / WORD;
    (head, words)
}

/// Copies `to.len()` bytes out.
///
/// # Safety
/// So many bytes at `from` are valid, and only accessed atomically.
pub(super) unsafe fn load(from: NonNull<u8>, to: &mut [u8]) {
    let (head, words) = parts(from, to.len());
    let (first, rest) = to.split_at_mut(head);
    // SAFETY: each access lies in the `to.len()` bytes; those of words are
    // aligned, by `parts`.
    unsafe {
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(from.add(i).as_ptr()).load(Ordering::Relaxed);
        }
        let from = from.add(head);
        let mut chunks = rest.chunks_exact_mut(WORD);
        for (i, chunk) in chunks.by_ref().enumerate() {
            let word = AtomicU64::from_ptr(from.cast().add(i).as_ptr()).load(Ordering::Relaxed);
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        let from = from.add(words * WORD);
        for (i, byte) in chunks.into_remainder().iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(from.add(i).as_ptr()).load(Ordering::Relaxed);
        }
    }
}

/// Copies `from` in.
///
/// # Safety
/// As many bytes at `to` are valid for writes, and only accessed atomically.
pub(super) unsafe fn store(to: NonNull<u8>, from: &[u8]) {
    let (head, words) = parts(to, from.len());
    let (first, rest) = from.split_at(head);
    // SAFETY: as in `load`.
    unsafe {
        for (i, byte) in first.iter().enumerate() {
            AtomicU8::from_ptr(to.add(i).as_ptr()).store(*byte, Ordering::Relaxed);
        }
        let to = to.add(head);
        let chunks = rest.chunks_exact(WORD);
        let last = chunks.remainder();
        for (i, chunk) in chunks.enumerate() {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            AtomicU64::from_ptr(to.cast().add(i).as_ptr())
                .store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        let to = to.add(words * WORD);
        for (i, byte) in last.iter().enumerate() {
            AtomicU8::from_ptr(to.add(i).as_ptr()).store(*byte, Ordering::Relaxed);
        }
    }
}

/// Reads a word; what was written before it is seen afterwards.
///
/// # Safety
/// It is valid, aligned, and only accessed atomically.
pub(super) unsafe fn load_word(at: NonNull<u64>) -> u64 {
    // SAFETY: by contract.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }.load(Ordering::Acquire)
}

/// Writes a word, after what was written before.
///
/// # Safety
/// It is valid for writes, aligned, and only accessed atomically.
pub(super) unsafe fn store_word(at: NonNull<u64>, value: u64) {
    // SAFETY: by contract.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }.store(value, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_exactly() {
        let mut memory = [0u64; 8];
        let start = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
        let pattern: Vec<u8> = (1..=64).collect();
        for offset in 0..16 {
            for len in 0..=48 {
                // SAFETY: the array has 64 bytes, and this is its only use.
                let all = unsafe {
                    store(start, &[0xee; 64]);
                    store(start.add(offset), &pattern[..len]);
                    let mut all = [0; 64];
                    load(start, &mut all);
                    let mut part = vec![0; len];
                    load(start.add(offset), &mut part);
                    assert_eq!(part, pattern[..len]);
                    all
                };
                assert!(all[..offset].iter().all(|&byte| byte == 0xee));
                assert_eq!(all[offset..offset + len], pattern[..len]);
                assert!(all[offset + len..].iter().all(|&byte| byte == 0xee));
            }
        }
    }
}
