//! System calls and descriptors of the library itself.
//!
//! Code of the devices calls the same interposed functions as the program. Descriptors that
//! it opens are marked, so that a program that closes all descriptors spares them, and its
//! waits do not wake the devices.

use std::cell::Cell;
use std::ffi::c_int;

use crate::table;

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// While it exists, this thread runs code of the devices.
pub(crate) struct InternalScope(());

/// Enters code of the devices.
pub(crate) fn enter() -> InternalScope {
    // Fails in a thread that is ending, which opens nothing.
    let _ = INSIDE.try_with(|inside| inside.set(inside.get() + 1));
    InternalScope(())
}

impl Drop for InternalScope {
    fn drop(&mut self) {
        leave_scope();
    }
}

/// As [`enter`], until [`leave_scope`] or the end of the thread.
pub(crate) fn enter_scope() {
    std::mem::forget(enter());
}

/// Leaves code of the devices.
pub(crate) fn leave_scope() {
    let _ = INSIDE.try_with(|inside| inside.set(inside.get().saturating_sub(1)));
}

/// Returns whether this thread runs code of the devices.
#[inline]
pub(crate) fn is_internal() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(0) != 0
}

/// Marks a new descriptor if code of the devices has opened it. Returns the descriptor.
#[inline]
pub(crate) fn mark_internal(fd: c_int) -> c_int {
    if fd >= 0 && is_internal() {
        table::set_internal(fd, true);
    }
    fd
}
