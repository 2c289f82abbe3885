//! Signal actions: [`fault`] keeps the program's actions for faults.

use std::ffi::c_int;

use super::export;
use crate::{fault, real};

export! {
    sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        // SAFETY: guaranteed by the caller.
        match fault::exchange(number, unsafe { new.as_ref() }) {
            // SAFETY: guaranteed by the caller.
            None => unsafe { real::sigaction(number, new, old) },
            Some(before) => {
                if !old.is_null() {
                    // SAFETY: guaranteed by the caller.
                    unsafe { old.write(before) };
                }
                0
            }
        }
    }

    signal(number: c_int, handler: usize) -> usize {
        match fault::exchange_handler(number, handler) {
            // SAFETY: guaranteed by the caller.
            None => unsafe { real::signal(number, handler) },
            Some(before) => before,
        }
    }
}
