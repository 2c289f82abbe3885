//! Signal actions and masks: [`fault`] keeps the program's actions for faults.

use std::ffi::c_int;
use std::ptr;

use libc::sigset_t;

use super::{export, failed};
use crate::{fault, real};

/// Returns a set without the signals of faults: one of a doorbell while they are blocked would
/// end the process.
///
/// # Safety
/// The set must be readable, or the pointer null.
unsafe fn without_faults(set: *const sigset_t) -> Option<sigset_t> {
    // SAFETY: guaranteed by the caller.
    let mut set = unsafe { *set.as_ref()? };
    for number in fault::SIGNALS {
        // SAFETY: an initialized set.
        unsafe { libc::sigdelset(&raw mut set, number) };
    }
    Some(set)
}

fn pointer<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(ptr::null(), ptr::from_ref)
}

export! {
    pthread_sigmask(how: c_int, set: *const sigset_t, before: *mut sigset_t) -> c_int {
        if how == libc::SIG_UNBLOCK {
            // SAFETY: guaranteed by the caller.
            return unsafe { real::pthread_sigmask(how, set, before) };
        }
        // SAFETY: guaranteed by the caller.
        let set = unsafe { without_faults(set) };
        // SAFETY: guaranteed by the caller.
        unsafe { real::pthread_sigmask(how, pointer(&set), before) }
    }

    sigprocmask(how: c_int, set: *const sigset_t, before: *mut sigset_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        match unsafe { pthread_sigmask(how, set, before) } {
            0 => 0,
            errno => failed(errno),
        }
    }

    sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        // SAFETY: guaranteed by the caller.
        let mut action = unsafe { new.as_ref().copied() };
        if let Some(action) = &mut action {
            // SAFETY: an initialized set.
            if let Some(mask) = unsafe { without_faults(&raw const action.sa_mask) } {
                action.sa_mask = mask;
            }
        }
        // SAFETY: guaranteed by the caller.
        match fault::exchange(number, action.as_ref()) {
            // SAFETY: guaranteed by the caller.
            None => unsafe { real::sigaction(number, pointer(&action), old) },
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
