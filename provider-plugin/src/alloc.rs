//! Fallible allocation of objects that C code holds pointers to.
//!
//! `Box::new` aborts the process when memory is short; a provider returns ENOMEM.

use core::alloc::Layout;
use core::ptr::NonNull;

use crate::errno::Errno;

/// Moves a value to the heap, or returns it with ENOMEM, so that what it owns can
/// be released.
pub fn try_box<T>(value: T) -> Result<Box<T>, (T, Errno)> {
    const { assert!(size_of::<T>() != 0, "objects of libibverbs are not empty") };
    // SAFETY: the layout of T has a size that is not zero, asserted above.
    let raw = unsafe { std::alloc::alloc(Layout::new::<T>()) }.cast::<T>();
    match NonNull::new(raw) {
        Some(allocated) => {
            // SAFETY: `allocated` is fresh, aligned for T and large enough.
            unsafe { allocated.write(value) };
            // SAFETY: from the global allocator with T's layout, initialised,
            // and owned by nobody else.
            Ok(unsafe { Box::from_raw(allocated.as_ptr()) })
        }
        None => Err((value, Errno::NOMEM)),
    }
}

/// A zeroed object on the heap, for C structures whose members may all be 0.
///
/// # Safety
/// All-zero bytes must be a valid `T`.
pub unsafe fn try_box_zeroed<T>() -> Result<Box<T>, Errno> {
    const { assert!(size_of::<T>() != 0, "objects of libibverbs are not empty") };
    // SAFETY: the layout of T has a size that is not zero, asserted above.
    let raw = unsafe { std::alloc::alloc_zeroed(Layout::new::<T>()) }.cast::<T>();
    if raw.is_null() {
        return Err(Errno::NOMEM);
    }
    // SAFETY: from the global allocator with T's layout; zeroed, which the
    // caller vouches is a valid T.
    Ok(unsafe { Box::from_raw(raw) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_hold_their_value() {
        let b = try_box([7u64; 9]).map_err(|_| ()).unwrap();
        assert_eq!(*b, [7; 9]);
        // SAFETY: an array of integers may be zero.
        let z = unsafe { try_box_zeroed::<[u32; 5]>() }.unwrap();
        assert_eq!(*z, [0; 5]);
    }

    #[test]
    fn too_large_is_enomem_not_an_abort() {
        // 2^47 bytes: more than the address space has.
        // SAFETY: an array of bytes may be zero.
        let r = unsafe { try_box_zeroed::<[u8; 1 << 47]>() };
        assert_eq!(r.err(), Some(Errno::NOMEM));
    }
}
