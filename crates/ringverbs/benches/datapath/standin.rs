//! Finding what was preloaded.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A symbol of what was preloaded.
pub fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a name with its NUL; the default search order.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}
