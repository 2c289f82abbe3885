//! Two words of 8 bytes, written and read as one piece where the machine has
//! such: half the stores, which is what filling queues and registers waits for.

use std::ptr::NonNull;

/// As the machine has it in a register; aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) type Pair = core::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Pair([u64; 2]);

const _: () = assert!(size_of::<Pair>() == 16 && align_of::<Pair>() == 16);

/// `first` and behind it `second`.
#[inline]
pub(crate) fn pair_of(first: u64, second: u64) -> Pair {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has SSE2. Asked for by name, or the compiler
    // makes two stores of it; the lower word is the first.
    unsafe {
        core::arch::x86_64::_mm_set_epi64x(second as i64, first as i64)
    }
    #[cfg(not(target_arch = "x86_64"))]
    Pair([first, second])
}

/// Writes `first` and behind it `second`.
///
/// # Safety
/// `to` is writable for 16 bytes, and aligned to as many.
#[inline]
pub unsafe fn write_pair(to: NonNull<u64>, first: u64, second: u64) {
    // SAFETY: as the caller says.
    unsafe { to.cast::<Pair>().write(pair_of(first, second)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_places() {
        let mut memory = [aligned(); 3];
        let at = NonNull::from(&mut memory).cast::<u64>();
        // SAFETY: six words, aligned to 16 bytes.
        let words = unsafe {
            write_pair(at.add(2), 1, 2);
            at.cast::<[u64; 6]>().read()
        };
        assert_eq!(words, [0, 0, 1, 2, 0, 0]);
    }

    fn aligned() -> Pair {
        // SAFETY: any bytes are a pair.
        unsafe { std::mem::zeroed() }
    }
}
