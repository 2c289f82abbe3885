//! mlx5dv: the direct verbs of ConnectX devices.
//!
//! The plugin exports these functions without a version; a preloaded plugin interposes
//! libmlx5's. `libmlx5.so.1` (`cargo xtask dist`) has the same code with libmlx5's symbol
//! versions, and the remaining functions of `libmlx5.map`, which fail (`refused`).
//!
//! Calls with contexts of other providers are forwarded to libmlx5, if the process has
//! loaded it.

pub(crate) mod abi;
mod attributes;
mod create;
pub(crate) mod crypto;
mod destination;
mod device;
pub(crate) mod devx;
mod flow;
mod memory;
mod mkey;
mod objects;
pub(crate) mod protection;
mod refused;
pub(crate) mod reserved;
mod scheduling;
mod sharing;
mod wr;

pub(crate) use wr::{Functions, set_batch_functions};

use core::ffi::c_void;
use std::ffi::CStr;
use std::panic::catch_unwind;

use crate::abi::{ibv_context, ibv_device, verbs_device};
use crate::registration::is_mlx5;
use crate::registration::objects::{self as loaded, Handle};

/// Returns whether this provider serves the device, a ConnectX.
///
/// # Safety
/// A live device.
unsafe fn serves(device: *mut ibv_device) -> bool {
    // SAFETY: every device is the beginning of a verbs_device.
    is_mlx5(unsafe { (*device.cast::<verbs_device>()).ops })
}

/// Returns whether the context is of a device that this provider serves.
///
/// # Safety
/// A live context, or null.
unsafe fn is_ours(context: *mut ibv_context) -> bool {
    // SAFETY: as the caller says. Its operations do not tell: others may replace some.
    unsafe {
        context
            .as_ref()
            .is_some_and(|context| serves(context.device))
    }
}

/// The function of libmlx5 with a name: any definition in another object than the plugin.
fn libmlx5(name: &CStr) -> Option<*mut c_void> {
    let here = libmlx5 as *const () as usize;
    let found = catch_unwind(|| {
        loaded::loaded().iter().find_map(|object| {
            let real = Handle::open(&object.name)?.find(name)?;
            (object.contains(real as usize) && !object.contains(here)).then_some(real)
        })
    });
    found.ok().flatten()
}

/// Exports a function whose body serves contexts of this provider. For other contexts it calls
/// libmlx5's function, or returns `otherwise` without libmlx5.
macro_rules! exported {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty
        where $ours:expr, else $otherwise:expr => $body:block
    )+) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As of libmlx5's function of that name.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code))]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            type Function = unsafe extern "C" fn($($type),*) -> $ret;
            // Not every check is unsafe.
            #[allow(unused_unsafe)]
            // SAFETY: the arguments are as the function of that name has them.
            if unsafe { $ours } {
                return $body;
            }
            static REAL: std::sync::OnceLock<Function> = std::sync::OnceLock::new();
            let real = REAL.get().copied().or_else(|| {
                let name = concat!(stringify!($name), "\0");
                let name = core::ffi::CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
                let found = $crate::mlx5dv::libmlx5(name)?;
                // SAFETY: libmlx5's function of that name, which has this type.
                let real = unsafe {
                    core::mem::transmute::<*mut core::ffi::c_void, Function>(found)
                };
                Some(*REAL.get_or_init(|| real))
            });
            match real {
                // SAFETY: the arguments are the caller's.
                Some(real) => unsafe { real($($arg),*) },
                None => $otherwise,
            }
        }
    )+};
}
use exported;

#[cfg(test)]
mod tests;
