//! The plugin preloaded (`LD_PRELOAD`).
//!
//! If a program is linked to a provider, as perftest is to libmlx5, that provider registers
//! at program start, before libibverbs loads any other. The functions of a preloaded plugin
//! interpose libibverbs's functions of the same names: when the first provider registers,
//! the plugin registers before it, then forwards the call to the libibverbs that the
//! provider is linked to. Devices that the plugin does not match remain with that provider.
//!
//! The names are unversioned here; the loader resolves versioned references to them. When
//! libibverbs loads the plugin, its symbols are in no global scope, so nothing is interposed.

use core::ffi::c_void;
use std::io::Write;
use std::panic::catch_unwind;

use uverbs::environment::has_elevated_privileges;

use super::objects::{self, Handle, Library, Object, PrivateAbi};
use super::{RegisterDriver, plugin_object, register_once};
use crate::abi::verbs_device_ops;

macro_rules! interposed {
    ($($name:ident $pabi:literal)*) => {$(
        /// Interposes the function by which providers register.
        ///
        /// # Safety
        /// As of libibverbs's function of the same name: `ops` is a provider's, and is never
        /// freed.
        #[cfg(not(test))]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(ops: *const verbs_device_ops) {
            // SAFETY: as the caller says.
            unsafe { forward($pabi, ops) }
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

/// Returns whether the plugin interposes libibverbs in the program's global scope.
pub fn is_preloaded(plugin_object: &Object) -> bool {
    let found = Handle::open(c"").and_then(|program| program.find(c"verbs_register_driver_34"));
    found.is_some_and(|address| plugin_object.contains(address as usize))
}

/// Registers the plugin, then forwards the provider's registration to its libibverbs.
///
/// # Safety
/// `ops` is a provider's, and is never freed.
#[cfg_attr(test, allow(dead_code))]
unsafe fn forward(pabi: u32, ops: *const verbs_device_ops) {
    let libibverbs_register_driver = catch_unwind(|| {
        let objects = objects::loaded();
        let libibverbs_register_driver = libibverbs_register_driver(&objects, pabi, ops as usize)?;
        if let (Some(plugin_object), false) = (plugin_object(&objects), has_elevated_privileges()) {
            if let Some(object) = objects
                .iter()
                .find(|o| o.contains(libibverbs_register_driver as usize))
            {
                if let Some(library) = Library::open(object) {
                    register_once(library, plugin_object, None);
                }
            }
        }
        Some(libibverbs_register_driver)
    });
    match libibverbs_register_driver {
        // SAFETY: found under libibverbs's private symbol version of that
        // number, where it has this type; the argument is as the caller
        // promises.
        Ok(Some(libibverbs_register_driver)) => unsafe {
            core::mem::transmute::<*mut c_void, RegisterDriver>(libibverbs_register_driver)(ops);
        },
        _ => {
            let line = format!(
                "ringverbs: a provider is not registered: it is not linked to a libibverbs of \
                 private ABI {pabi}\n"
            );
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

/// Returns `verbs_register_driver_<N>` of the libibverbs that the provider is linked to, which
/// need not be the program's. The provider is found by the address of its operations: it is
/// not on the call stack if its constructor ends with a tail call.
fn libibverbs_register_driver(objects: &[Object], pabi: u32, ops: usize) -> Option<*mut c_void> {
    let provider = objects.iter().find(|o| o.contains(ops))?;
    Handle::open(&provider.name)?.register_driver(PrivateAbi::supported(pabi)?)
}
