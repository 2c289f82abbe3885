//! Copies from and to memory that others may access at any time: of a program, of
//! another process.
//!
//! All accesses are atomic, so that there is no data race in terms of the
//! language: aligned words as far as possible, and bytes at the edges. The
//! crate `ringverbs` accesses remote memory by the same words. The accesses
//! order nothing; doorbell records and completions do.
//!
//! The compiler copies atomic words one by one. Instructions for two words at once
//! (`blocks`) take half the time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// How a copy is divided: bytes, words, blocks, words, bytes. Only some of them may be
/// there.
struct Parts {
    head: usize,
    words: usize,
    blocks: usize,
}

impl Parts {
    /// Divides a copy from or to `length` bytes of shared memory.
    #[inline]
    fn new(at: *mut u8, length: usize) -> Self {
        let before = |alignment: usize| at.addr().wrapping_neg() % alignment;
        let head = before(WORD).min(length);
        let words = (before(blocks::ALIGNMENT) - before(WORD)).min((length - head) / WORD * WORD);
        let rest = length - head - words;
        Self {
            head,
            words,
            blocks: rest / blocks::SIZE * blocks::SIZE,
        }
    }
}

/// Copies `to.len()` bytes from shared memory.
///
/// # Safety
/// That many bytes must be mapped and readable at `from`. Concurrent writes to
/// them must be atomic.
#[inline]
pub unsafe fn load(from: *mut u8, to: &mut [u8]) {
    let parts = Parts::new(from, to.len());
    let (head, rest) = to.split_at_mut(parts.head);
    let (words, rest) = rest.split_at_mut(parts.words);
    let (blocks, rest) = rest.split_at_mut(parts.blocks);
    // SAFETY: by contract; after the first bytes the address is aligned for words, and
    // after the first words for blocks.
    unsafe {
        load_bytes(from, head);
        let from = from.add(head.len());
        let from = load_words(from, words);
        blocks::load(from, blocks);
        let from = from.add(blocks.len());
        let (words, tail) = rest.split_at_mut(rest.len() / WORD * WORD);
        load_bytes(load_words(from, words), tail);
    }
}

/// Copies words, and returns the end of what was read.
///
/// # Safety
/// As [`load`]. The address must be aligned, and the length a number of words.
#[inline]
unsafe fn load_words(mut from: *mut u8, to: &mut [u8]) -> *mut u8 {
    for to in to.chunks_exact_mut(WORD) {
        // SAFETY: by contract. Atomic loads do not need writable memory here: they are
        // plain load instructions.
        unsafe {
            let word = AtomicU64::from_ptr(from.cast()).load(Ordering::Relaxed);
            to.copy_from_slice(&word.to_ne_bytes());
            from = from.add(WORD);
        }
    }
    from
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

/// Copies `from` to shared memory.
///
/// # Safety
/// That many bytes must be mapped and writable at `to`. Concurrent accesses to
/// them must be atomic.
#[inline]
pub unsafe fn store(to: *mut u8, from: &[u8]) {
    let parts = Parts::new(to, from.len());
    let (head, rest) = from.split_at(parts.head);
    let (words, rest) = rest.split_at(parts.words);
    let (blocks, rest) = rest.split_at(parts.blocks);
    // SAFETY: by contract; after the first bytes the address is aligned for words, and
    // after the first words for blocks.
    unsafe {
        store_bytes(to, head);
        let to = to.add(head.len());
        let to = store_words(to, words);
        blocks::store(to, blocks);
        let to = to.add(blocks.len());
        let (words, tail) = rest.split_at(rest.len() / WORD * WORD);
        store_bytes(store_words(to, words), tail);
    }
}

/// Copies words, and returns the end of what was written.
///
/// # Safety
/// As [`store`]. The address must be aligned, and the length a number of words.
#[inline]
unsafe fn store_words(mut to: *mut u8, from: &[u8]) -> *mut u8 {
    for from in from.chunks_exact(WORD) {
        let mut word = [0; WORD];
        word.copy_from_slice(from);
        // SAFETY: by contract.
        unsafe {
            AtomicU64::from_ptr(to.cast()).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            to = to.add(WORD);
        }
    }
    to
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

/// Returns whether [`within`] divides both ranges in the same places, and they have no
/// memory in common.
#[inline]
pub fn has_common_parts(from: *mut u8, to: *mut u8, length: usize) -> bool {
    let distance = from.addr().abs_diff(to.addr());
    distance % blocks::ALIGNMENT == 0 && distance >= length
}

/// Copies within shared memory.
///
/// # Safety
/// As [`load`] and [`store`]; [`has_common_parts`].
#[inline]
pub unsafe fn within(from: *mut u8, to: *mut u8, length: usize) {
    let parts = Parts::new(to, length);
    // Bytes and words before the blocks, and after them.
    let before = parts.head + parts.words;
    let after = before + parts.blocks;
    // SAFETY: by contract; both addresses are aligned for blocks after `before`.
    unsafe {
        copy_edge(from, to, before);
        blocks::copy(from.add(before), to.add(before), parts.blocks);
        copy_edge(from.add(after), to.add(after), length - after);
    }
}

/// Copies less than a block before or after blocks.
///
/// # Safety
/// As [`within`].
#[inline]
unsafe fn copy_edge(from: *mut u8, to: *mut u8, length: usize) {
    let mut buffer = [0; blocks::SIZE + blocks::ALIGNMENT];
    let bytes = &mut buffer[..length];
    if bytes.is_empty() {
        return;
    }
    // SAFETY: by contract.
    unsafe {
        load(from, bytes);
        store(to, bytes);
    }
}

/// Copies of blocks by instructions that access 16 aligned bytes at once. Each aligned
/// word of memory is accessed whole: Intel and AMD promise it of processors with AVX for
/// all 16 bytes, and those without access 8 bytes at once.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod blocks {
    use std::arch::asm;

    pub(super) const SIZE: usize = 64;
    pub(super) const ALIGNMENT: usize = 16;

    /// Copies blocks from shared memory.
    ///
    /// # Safety
    /// As [`load`](super::load). The address must be aligned, and the length a number of
    /// blocks.
    #[inline]
    pub(super) unsafe fn load(from: *mut u8, to: &mut [u8]) {
        for (number, to) in to.chunks_exact_mut(SIZE).enumerate() {
            // SAFETY: by contract; the instructions write one block.
            unsafe {
                asm!(
                    "movdqa {a}, [{from}]",
                    "movdqa {b}, [{from} + 16]",
                    "movdqa {c}, [{from} + 32]",
                    "movdqa {d}, [{from} + 48]",
                    "movdqu [{to}], {a}",
                    "movdqu [{to} + 16], {b}",
                    "movdqu [{to} + 32], {c}",
                    "movdqu [{to} + 48], {d}",
                    from = in(reg) from.add(number * SIZE),
                    to = in(reg) to.as_mut_ptr(),
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Copies blocks within shared memory.
    ///
    /// # Safety
    /// As [`within`](super::within). Both addresses must be aligned, and the length a number
    /// of blocks.
    #[inline]
    pub(super) unsafe fn copy(from: *mut u8, to: *mut u8, length: usize) {
        for at in (0..length).step_by(SIZE) {
            // SAFETY: by contract; the instructions read and write one block.
            unsafe {
                asm!(
                    "movdqa {a}, [{from}]",
                    "movdqa {b}, [{from} + 16]",
                    "movdqa {c}, [{from} + 32]",
                    "movdqa {d}, [{from} + 48]",
                    "movdqa [{to}], {a}",
                    "movdqa [{to} + 16], {b}",
                    "movdqa [{to} + 32], {c}",
                    "movdqa [{to} + 48], {d}",
                    from = in(reg) from.add(at),
                    to = in(reg) to.add(at),
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Copies blocks to shared memory.
    ///
    /// # Safety
    /// As [`store`](super::store). The address must be aligned, and the length a number of
    /// blocks.
    #[inline]
    pub(super) unsafe fn store(to: *mut u8, from: &[u8]) {
        for (number, from) in from.chunks_exact(SIZE).enumerate() {
            // SAFETY: by contract; the instructions read one block.
            unsafe {
                asm!(
                    "movdqu {a}, [{from}]",
                    "movdqu {b}, [{from} + 16]",
                    "movdqu {c}, [{from} + 32]",
                    "movdqu {d}, [{from} + 48]",
                    "movdqa [{to}], {a}",
                    "movdqa [{to} + 16], {b}",
                    "movdqa [{to} + 32], {c}",
                    "movdqa [{to} + 48], {d}",
                    from = in(reg) from.as_ptr(),
                    to = in(reg) to.add(number * SIZE),
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

/// Blocks are words.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod blocks {
    pub(super) const SIZE: usize = super::WORD;
    pub(super) const ALIGNMENT: usize = super::WORD;

    /// # Safety
    /// As [`load_words`](super::load_words).
    #[inline]
    pub(super) unsafe fn load(from: *mut u8, to: &mut [u8]) {
        // SAFETY: by contract.
        unsafe { super::load_words(from, to) };
    }

    /// # Safety
    /// As [`store_words`](super::store_words).
    #[inline]
    pub(super) unsafe fn store(to: *mut u8, from: &[u8]) {
        // SAFETY: by contract.
        unsafe { super::store_words(to, from) };
    }

    /// # Safety
    /// As [`within`](super::within), for words.
    #[inline]
    pub(super) unsafe fn copy(from: *mut u8, to: *mut u8, length: usize) {
        for at in (0..length).step_by(SIZE) {
            let mut word = [0; SIZE];
            // SAFETY: by contract.
            unsafe {
                super::load_words(from.add(at), &mut word);
                super::store_words(to.add(at), &word);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 176;

    /// Covers every offset in a word and in a block at which a copy can begin and end;
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

    /// Every offset and length of a copy within memory, at several distances in either
    /// direction.
    #[test]
    fn a_copy_is_exact() {
        const DISTANCES: [usize; 3] = [LENGTH, LENGTH + blocks::ALIGNMENT, 256];
        let pattern: Vec<u8> = (1..=LENGTH as u8).collect();
        for (offset, length) in (0..=LENGTH).flat_map(|at| (0..=LENGTH - at).map(move |n| (at, n)))
        {
            for (distance, back) in DISTANCES
                .into_iter()
                .flat_map(|it| [(it, false), (it, true)])
            {
                let mut words = [u64::from_ne_bytes([0xee; WORD]); 64];
                let first = words.as_mut_ptr().cast::<u8>();
                let (from, to) = if back { (distance, 0) } else { (0, distance) };
                let mut all = [0; 512];
                // SAFETY: within the array, which nothing else accesses.
                unsafe {
                    store(first.add(from), &pattern);
                    let (from, to) = (first.add(from + offset), first.add(to + offset));
                    assert!(has_common_parts(from, to, length));
                    within(from, to, length);
                    load(first, &mut all);
                }
                let mut model = [0xee; 512];
                model[from..from + LENGTH].copy_from_slice(&pattern);
                model.copy_within(from + offset..from + offset + length, to + offset);
                assert_eq!(all, model, "{offset} {length} {distance} {back}");
            }
        }
    }

    #[test]
    fn overlapping_ranges_are_not_copied_at_once() {
        let at = |address: usize| std::ptr::without_provenance_mut::<u8>(address);
        assert!(has_common_parts(at(0x1000), at(0x1040), 64));
        assert!(!has_common_parts(at(0x1000), at(0x1040), 65));
        assert!(!has_common_parts(at(0x1040), at(0x1000), 65));
        let apart = at(0x1040 + blocks::ALIGNMENT / 2);
        assert!(!has_common_parts(at(0x1000), apart, 8));
    }
}
