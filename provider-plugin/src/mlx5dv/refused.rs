//! Functions of libmlx5 that the plugin does not implement. `libmlx5.so.1` exports
//! each of them as a jump to one of these, by the type of its result (`libmlx5.map`).

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use super::abi::ContextFirst;
use super::{exported, is_ours};
use crate::abi::ibv_context;
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

// Direct rules on objects of this provider: libmlx5 would treat the objects as its own.
exported! {
    /// `mlx5dv_dr_domain_create`. EOPNOTSUPP: there are no direct rules.
    fn mlx5dv_dr_domain_create(context: *mut ibv_context, kind: u32) -> *mut c_void
    where is_ours(context), else ringverbs_refused_object() => {
        ringverbs_refused_object()
    }

    /// `mlx5dv_dr_action_create_dest_devx_tir`, as [`mlx5dv_dr_domain_create`].
    fn mlx5dv_dr_action_create_dest_devx_tir(object: *mut ContextFirst) -> *mut c_void
    where is_ours((*object).context), else ringverbs_refused_object() => {
        ringverbs_refused_object()
    }

    /// `mlx5dv_dr_action_create_flow_counter`, as [`mlx5dv_dr_domain_create`].
    fn mlx5dv_dr_action_create_flow_counter(object: *mut ContextFirst, offset: u32)
        -> *mut c_void
    where is_ours((*object).context), else ringverbs_refused_object() => {
        ringverbs_refused_object()
    }
}
