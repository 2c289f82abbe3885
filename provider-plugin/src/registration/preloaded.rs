//! The plugin preloaded (`LD_PRELOAD`).
//!
//! A program that is linked to a provider, as perftest is to libmlx5, has that
//! register when it starts, before libibverbs looks for any other. Preloaded,
//! these functions come before libibverbs's of the same names: when the first
//! provider registers, ours is registered before it, and the provider is passed
//! on to the libibverbs that it is linked to. What ours does not match stays
//! with it.
//!
//! The names have no version here; the loader lets such a name serve a
//! reference to a version. Loaded in the usual way, by libibverbs, we are in no
//! scope but our own, and nobody finds them.

use core::ffi::c_void;
use std::io::Write;
use std::panic::catch_unwind;

use uverbs::environment::has_raised_rights;

use super::objects::{self, Handle, Library, Object};
use super::{RegisterDriver, attempt, own};
use crate::abi::verbs_device_ops;

macro_rules! interposed {
    ($($name:ident $pabi:literal)*) => {$(
        /// Interposes the function by which providers register.
        ///
        /// # Safety
        /// As of libibverbs's function of that name: `ops` is a provider's, and
        /// stays.
        #[cfg(not(test))]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(ops: *const verbs_device_ops) {
            // SAFETY: the caller's promise.
            unsafe { pass_on($pabi, ops) }
        }
    )*};
}

// Every private ABI of the table in `layout.rs`.
interposed! {
    verbs_register_driver_34 34
    verbs_register_driver_57 57
    verbs_register_driver_59 59
    verbs_register_driver_64 64
    verbs_register_driver_65 65
}

/// Whether what the program is linked to finds us before libibverbs.
pub fn is_first(own: &Object) -> bool {
    let found = Handle::open(c"").and_then(|program| program.find(c"verbs_register_driver_34"));
    found.is_some_and(|address| own.contains(address as usize))
}

/// # Safety
/// `ops` is a provider's, and stays.
#[cfg_attr(test, allow(dead_code))]
unsafe fn pass_on(pabi: u32, ops: *const verbs_device_ops) {
    let real = catch_unwind(|| {
        let objects = objects::loaded();
        let real = real(&objects, pabi, ops as usize)?;
        if let (Some(own), false) = (own(&objects), has_raised_rights()) {
            if let Some(object) = objects.iter().find(|o| o.contains(real as usize)) {
                if let Some(library) = Library::open(object) {
                    attempt(library, own, None);
                }
            }
        }
        Some(real)
    });
    match real {
        // SAFETY: found under libibverbs's private symbol version of that
        // number, where it has this type; the argument is as the caller
        // promises.
        Ok(Some(real)) => unsafe {
            core::mem::transmute::<*mut c_void, RegisterDriver>(real)(ops);
        },
        _ => {
            let line = format!(
                "ringverbs: a provider is left out: it is linked to no libibverbs of \
                 private ABI {pabi}\n"
            );
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

/// The function that the provider with these operations means: that of the
/// libibverbs that it is linked to, which need not be the program's. The
/// provider is known by where its operations are; it is not on the call stack
/// when its constructor has ended with a jump.
fn real(objects: &[Object], pabi: u32, ops: usize) -> Option<*mut c_void> {
    let provider = objects.iter().find(|o| o.contains(ops))?;
    Handle::open(&provider.name)?.register_driver(pabi)
}
