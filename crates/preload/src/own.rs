//! The library's own system calls and descriptors.
//!
//! Code of the devices calls the C library by the same names as the program. What it
//! opens is marked, so that a program that closes all descriptors leaves it alone,
//! and its waiting is no reason to wake the devices.

use std::cell::Cell;
use std::ffi::c_int;

use crate::table;

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// While it exists, this thread runs code of the devices.
pub(crate) struct Inside(());

/// Enters code of the devices.
pub(crate) fn enter() -> Inside {
    // A thread that ends has no locals any more; it opens nothing.
    let _ = INSIDE.try_with(|inside| inside.set(inside.get() + 1));
    Inside(())
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(inside.get() - 1));
    }
}

/// Enters code of the devices for as long as this thread exists.
pub(crate) fn enter_for_good() {
    std::mem::forget(enter());
}

/// Returns whether this thread runs code of the devices.
#[inline]
pub(crate) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(0) != 0
}

/// Marks a new descriptor, if code of the devices has opened it. Returns it.
#[inline]
pub(crate) fn opened(fd: c_int) -> c_int {
    if fd >= 0 && is_inside() {
        table::set_own(fd, true);
    }
    fd
}
