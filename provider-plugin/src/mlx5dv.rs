//! `mlx5dv_query_device` for programs that are linked to libmlx5.
//!
//! libmlx5 refuses contexts of other providers (EOPNOTSUPP). perftest calls this
//! function for every ConnectX and exits if it fails, so the preloaded plugin
//! answers: no features beyond verbs.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use std::ffi::CStr;
use std::panic::catch_unwind;

use crate::abi::ibv_context;
use crate::layout;
use crate::library::libibverbs;
use crate::registration::objects::{self, Handle};

/// The beginning of `struct mlx5dv_context`; bits of `comp_mask` say which of the
/// following members are valid.
#[repr(C)]
pub struct Mlx5dvContext {
    version: u8,
    flags: u64,
    /// Requested members, then the valid ones.
    comp_mask: u64,
}

const _: () =
    assert!(offset_of!(Mlx5dvContext, flags) == 8 && offset_of!(Mlx5dvContext, comp_mask) == 16);

type QueryDevice = unsafe extern "C" fn(*mut ibv_context, *mut Mlx5dvContext) -> c_int;

const NAME: &CStr = c"mlx5dv_query_device";

/// Interposes libmlx5's function where the plugin is preloaded: reports no
/// features for a context of the plugin, and forwards others.
///
/// # Safety
/// As of libmlx5's function of that name: a live context, and a
/// `mlx5dv_context`.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlx5dv_query_device(
    context: *mut ibv_context,
    answer: *mut Mlx5dvContext,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { query_device(context, answer) }
}

/// # Safety
/// A live context, and a `mlx5dv_context`.
#[cfg_attr(test, allow(dead_code))]
unsafe fn query_device(context: *mut ibv_context, answer: *mut Mlx5dvContext) -> c_int {
    // SAFETY: a live context, whose operations libibverbs has written.
    let ops = unsafe { &(*context).ops };
    let is_ours = libibverbs()
        .and_then(|lib| lib.mlx5_ops.get())
        .is_some_and(|table| table.is_installed(layout::current(), ops));
    if is_ours {
        let nothing = Mlx5dvContext {
            version: 0,
            flags: 0,
            comp_mask: 0,
        };
        // SAFETY: a `mlx5dv_context` begins with this.
        unsafe { answer.write(nothing) };
        return 0;
    }
    match catch_unwind(libmlx5) {
        // SAFETY: libmlx5's function, which has this type; the arguments are
        // the caller's.
        Ok(Some(real)) => unsafe {
            core::mem::transmute::<*mut c_void, QueryDevice>(real)(context, answer)
        },
        _ => libc::EOPNOTSUPP,
    }
}

/// The function of another object that defines it.
fn libmlx5() -> Option<*mut c_void> {
    let here = query_device as *const () as usize;
    objects::loaded().iter().find_map(|object| {
        let real = Handle::open(&object.name)?.find(NAME)?;
        (object.contains(real as usize) && !object.contains(here)).then_some(real)
    })
}
