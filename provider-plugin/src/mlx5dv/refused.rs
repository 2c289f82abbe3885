//! Functions of libmlx5 that the plugin does not implement. `libmlx5.so.1` exports
//! each of them as a jump to one of these, by the type of its result (`libmlx5.map`).

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use crate::errno::Errno;

/// A function that returns an errno value: EOPNOTSUPP.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub extern "C" fn ringverbs_refused_status() -> c_int {
    Errno::OPNOTSUPP.set();
    libc::EOPNOTSUPP
}

/// A function that returns an object: NULL, and EOPNOTSUPP in `errno`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub extern "C" fn ringverbs_refused_object() -> *mut c_void {
    Errno::OPNOTSUPP.set();
    null_mut()
}

/// A function that returns a descriptor or a count: -1, and EOPNOTSUPP in `errno`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub extern "C" fn ringverbs_refused_descriptor() -> isize {
    Errno::OPNOTSUPP.set();
    -1
}

/// A function without a result, for an object that is never returned.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub extern "C" fn ringverbs_refused_nothing() {}
