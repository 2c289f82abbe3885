//! Descriptors that this library uses itself, which the program must not close.

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether this thread runs code of the devices.
pub(crate) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(0) != 0
}
