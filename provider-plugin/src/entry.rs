//! Entry points of the control path: no panic unwinds into C.
//!
//! Control-path operations run inside [`int`] or [`pointer`], which turn a panic
//! into EIO. Data-path operations do not: they are written not to panic.

use core::ffi::c_int;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::errno::{Errno, int_result, ptr_result};

/// Runs an int-returning verb: 0 or a positive errno value.
pub fn int(verb: impl FnOnce() -> Result<(), Errno>) -> c_int {
    // AssertUnwindSafe: after a panic only later verbs read the objects involved, which are C
    // structures that are valid in any state.
    int_result(catch_unwind(AssertUnwindSafe(verb)).unwrap_or(Err(Errno::IO)))
}

/// Runs a pointer-returning verb: the object, or NULL with `errno` set.
pub fn pointer<T>(verb: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    // AssertUnwindSafe: as in `int`.
    ptr_result(catch_unwind(AssertUnwindSafe(verb)).unwrap_or(Err(Errno::IO)))
}

/// Runs a verb that returns a descriptor: that, or -1 with `errno` set.
pub fn descriptor(verb: impl FnOnce() -> Result<RawFd, Errno>) -> c_int {
    // AssertUnwindSafe: as in `int`.
    let result = catch_unwind(AssertUnwindSafe(verb)).unwrap_or(Err(Errno::IO));
    result.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// Runs a verb without a result.
pub fn unit(verb: impl FnOnce()) {
    // AssertUnwindSafe: as in `int`.
    let _ = catch_unwind(AssertUnwindSafe(verb));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> c_int {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }

    #[test]
    fn a_panic_becomes_eio() {
        assert_eq!(int(|| panic!("on purpose")), libc::EIO);
        assert_eq!(errno(), libc::EIO);
        Errno(0).set();
        assert!(pointer::<u8>(|| panic!("on purpose")).is_null());
        assert_eq!(errno(), libc::EIO);
        Errno(0).set();
        assert_eq!(descriptor(|| panic!("on purpose")), -1);
        assert_eq!(errno(), libc::EIO);
        unit(|| panic!("on purpose"));
    }

    #[test]
    fn errors_are_returned_and_set() {
        assert_eq!(int(|| Err(Errno::BUSY)), libc::EBUSY);
        assert_eq!(errno(), libc::EBUSY);
        assert!(pointer::<u8>(|| Err(Errno::NOMEM)).is_null());
        assert_eq!(errno(), libc::ENOMEM);
        assert_eq!(descriptor(|| Err(Errno::OPNOTSUPP)), -1);
        assert_eq!(errno(), libc::EOPNOTSUPP);
        assert_eq!(int(|| Ok(())), 0);
        assert_eq!(descriptor(|| Ok(7)), 7);
    }
}
