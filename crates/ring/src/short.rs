//! Copies of a few bytes, such as inline data, without a function call, which would save
//! registers on the stack.

/// Maximum bytes of [`copy_short`].
pub const SHORT: u32 = 64;

/// Copies up to [`SHORT`] bytes without a call.
///
/// # Safety
/// As for `copy_nonoverlapping`; not more than `SHORT`.
#[inline(always)]
pub unsafe fn copy_short(to: *mut u8, from: *const u8, bytes: usize) {
    /// Copies the first and the last `N` bytes, which may overlap.
    ///
    /// # Safety
    /// As for `copy_nonoverlapping`; `N <= bytes <= 2 * N`.
    #[inline]
    unsafe fn ends<const N: usize>(to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: both pieces lie within the `bytes` of either side.
        unsafe {
            to.copy_from_nonoverlapping(from, N);
            to.add(bytes - N)
                .copy_from_nonoverlapping(from.add(bytes - N), N);
        }
    }
    // SAFETY: by contract; each branch's range is the one that `ends` demands.
    // (Comparisons one after another need no registers of their own.)
    unsafe {
        if bytes > 32 {
            ends::<32>(to, from, bytes);
        } else if bytes >= 16 {
            ends::<16>(to, from, bytes);
        } else if bytes >= 8 {
            ends::<8>(to, from, bytes);
        } else if bytes >= 4 {
            ends::<4>(to, from, bytes);
        } else if bytes >= 2 {
            ends::<2>(to, from, bytes);
        } else if bytes == 1 {
            to.write(from.read());
        }
    }
}
