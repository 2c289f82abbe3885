//! The process's environment, which every crate of ringverbs reads by this
//! module alone.
//!
//! In a program that has more rights than whoever runs it (set-user-ID,
//! set-group-ID, file capabilities) the environment is the caller's, and none of
//! it counts: no device, file or log level is taken from there.

use std::ffi::OsString;

/// Whether the program has rights that its caller does not have. The kernel
/// says so at exec (`AT_SECURE`); giving the rights back later changes nothing.
pub fn has_raised_rights() -> bool {
    // SAFETY: it reads what the kernel gave to the process, and takes any number.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// A variable of the environment; none in a program with raised rights.
pub fn variable(name: &str) -> Option<OsString> {
    if has_raised_rights() {
        return None;
    }
    std::env::var_os(name)
}

/// The same, if it is UTF-8.
pub fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}
