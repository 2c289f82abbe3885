//! Copies between the engine's buffers and memory of the program, which may be
//! there at the same time: a peer writes when it likes.
//!
//! All accesses are atomic, so that this is no data race to the language: of
//! aligned words as far as there are any, and of bytes at the edges. The crate
//! `ringverbs` reads and writes what peers may reach by the same words. They order
//! nothing: that is what doorbell records and completions do.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// How many of `length` bytes come before the first word.
#[inline]
fn head(at: *mut u8, length: usize) -> usize {
    (at.addr().wrapping_neg() % WORD).min(length)
}

/// Copies `to.len()` bytes out.
///
/// # Safety
/// So many bytes are mapped and readable there. Who writes to them meanwhile does
/// so atomically.
#[inline]
pub(crate) unsafe fn load(from: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(from, to.len()));
    // SAFETY: by contract; what is behind the first is aligned. Loads do not
    // need memory that can be written to: these are plain instructions.
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
        // SAFETY: by contract; a byte is aligned.
        *byte = unsafe { AtomicU8::from_ptr(from.add(i)) }.load(Ordering::Relaxed);
    }
}

/// Copies `from` in.
///
/// # Safety
/// So many bytes are mapped and writable there. Who accesses them meanwhile does
/// so atomically.
#[inline]
pub(crate) unsafe fn store(to: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(to, from.len()));
    // SAFETY: by contract; what is behind the first is aligned.
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
        // SAFETY: by contract; a byte is aligned.
        unsafe { AtomicU8::from_ptr(to.add(i)) }.store(*byte, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 48;

    /// Every place in a word at which a copy can begin and end, and nothing
    /// beside it.
    #[test]
    fn every_offset_and_length_is_copied_exactly() {
        let pattern: Vec<u8> = (1..=LENGTH as u8).collect();
        for offset in 0..=LENGTH {
            for length in 0..=LENGTH - offset {
                let mut words = [u64::from_ne_bytes([0xee; WORD]); LENGTH / WORD];
                let memory = words.as_mut_ptr().cast::<u8>();
                let mut all = [0; LENGTH];
                let mut part = vec![0x77; length];
                // SAFETY: within the array, which nobody else accesses.
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
