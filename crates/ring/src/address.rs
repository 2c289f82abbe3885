//! Addresses as the machine has them.

use std::ptr::NonNull;

/// The same address. The compiler forgets that it is a sum, of which it would
/// keep both summands, to add them wherever it is used: where registers are
/// scarce, one of them is saved and restored for that.
#[inline(always)]
pub fn as_one<T>(at: NonNull<T>) -> NonNull<T> {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut at = at.as_ptr();
        // SAFETY: nothing is done.
        unsafe {
            core::arch::asm!("/* {0} */", inout(reg) at, options(nostack, preserves_flags));
            NonNull::new_unchecked(at)
        }
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    at
}
