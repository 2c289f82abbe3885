//! The process's environment. Every crate of ringverbs reads it through this
//! module.
//!
//! In a program that has more rights than its caller (set-user-ID,
//! set-group-ID, file capabilities) the caller controls the environment, so it
//! is ignored: no device, file or log level is taken from it.

use std::ffi::{CString, OsString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Returns whether the program has rights that its caller does not have. The
/// kernel decides this at exec (`AT_SECURE`); dropping the rights later changes
/// nothing.
pub fn has_elevated_privileges() -> bool {
    // SAFETY: getauxval accepts any number and only reads the auxiliary vector,
    // which the kernel gave to the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns whether a program file has capabilities.
pub fn has_file_capabilities(program: &Path) -> bool {
    let Ok(path) = CString::new(program.as_os_str().as_bytes()) else {
        return false;
    };
    let name = c"security.capability";
    // SAFETY: both names are NUL-terminated; no buffer is given.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

/// Returns an environment variable; `None` in a program with elevated privileges.
pub fn variable(name: &str) -> Option<OsString> {
    if has_elevated_privileges() {
        return None;
    }
    std::env::var_os(name)
}

/// Returns whether the C library has set the environment up: it does so after it has loaded all
/// libraries, of which some are called before.
pub fn exists() -> bool {
    unsafe extern "C" {
        static mut environ: *mut *mut c_char;
    }
    // SAFETY: a variable of the C library, which other threads may change.
    let environment = unsafe { AtomicPtr::from_ptr(&raw mut environ) };
    !environment.load(Ordering::Relaxed).is_null()
}

/// As [`variable`], if the value is UTF-8.
pub fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}
