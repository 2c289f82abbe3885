//! Copies between the engine's buffers and memory of the program, which may
//! access it concurrently: peers write at any time.
//!
//! All accesses are atomic, so that there is no data race in terms of the
//! language: aligned words as far as possible, and bytes at the edges. The
//! crate `ringverbs` accesses remote memory by the same words. The accesses
//! order nothing; doorbell records and completions do.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// Returns how many of `length` bytes precede the first aligned word.
#[inline]
fn head(at: *mut u8, length: usize) -> usize {
    (at.addr().wrapping_neg() % WORD).min(length)
}

/// Copies `to.len()` bytes from memory of the program.
///
/// # Safety
/// That many bytes must be mapped and readable at `from`. Concurrent writes to
/// them must be atomic.
#[inline]
pub(crate) unsafe fn load(from: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(from, to.len()));
    // SAFETY: by contract; after the first bytes the address is aligned. Atomic
    // loads do not need writable memory here: they are plain load instructions.
    unsafe {
        let words = from.add(first.len());
        load_bytes(from, first);
        let mut chunks = rest.chunks_exact_mut(WORD);
        let mut at = words.cast::<u64>();
        for chunk in chunks.by_ref() {
            let word = AtomicU64::from_ptr(at).load(Ordering::Relaxed);
            chunk.copy_from_slice(&word.to_ne_bytes());
            at = at.add(1);
        }
        load_bytes(at.cast(), chunks.into_remainder());
    }
}

/// # Safety
/// As [`load`].
#[inline]
unsafe fn load_bytes(from: *mut u8, to: &mut [u8]) {
    for (i, byte) in to.iter_mut().enumerate() {
        // SAFETY: by contract; a byte is always aligned.
        *byte = unsafe { AtomicU8::from_ptr(from.add(i)) }.load(Ordering::Relaxed);
    }
}

/// Copies `from` to memory of the program.
///
/// # Safety
/// That many bytes must be mapped and writable at `to`. Concurrent accesses to
/// them must be atomic.
#[inline]
pub(crate) unsafe fn store(to: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(to, from.len()));
    // SAFETY: by contract; after the first bytes the address is aligned.
    unsafe {
        let words = to.add(first.len());
        store_bytes(to, first);
        let chunks = rest.chunks_exact(WORD);
        let last = chunks.remainder();
        let mut at = words.cast::<u64>();
        for chunk in chunks {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            AtomicU64::from_ptr(at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            at = at.add(1);
        }
        store_bytes(at.cast(), last);
    }
}

/// # Safety
/// As [`store`].
#[inline]
unsafe fn store_bytes(to: *mut u8, from: &[u8]) {
    for (i, byte) in from.iter().enumerate() {
        // SAFETY: by contract; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(to.add(i)) }.store(*byte, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 48;

    /// Covers every offset in a word at which a copy can begin and end;
    /// adjacent bytes stay unchanged.
    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let pattern: Vec<u8> = (1..=LENGTH as u8).collect();
        for offset in 0..=LENGTH {
            for length in 0..=LENGTH - offset {
                let mut words = [u64::from_ne_bytes([0xee; WORD]); LENGTH / WORD];
                let memory = words.as_mut_ptr().cast::<u8>();
                let mut all = [0; LENGTH];
                let mut part = vec![0x77; length];
                // SAFETY: within the array, which nothing else accesses.
                unsafe {
                    store(memory.add(offset), &pattern[..length]);
                    load(memory.add(offset), &mut part);
                    load(memory, &mut all);
                }
                assert_eq!(part, pattern[..length], "{offset} {length}");
                let mut model = [0xee; LENGTH];
                model[offset..offset + length].copy_from_slice(&pattern[..length]);
                assert_eq!(all, model, "{offset} {length}");
            }
        }
    }
}
