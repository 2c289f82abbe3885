//! Operations that libibverbs wants a function for, and that mlx5 has not yet:
//! EOPNOTSUPP.

use core::ffi::c_int;

use crate::abi::*;
use crate::entry;
use crate::errno::Errno;

/// `ibv_alloc_mw`. Binding a window is a work request that changes keys.
pub unsafe extern "C" fn alloc_mw(_pd: *mut ibv_pd, _kind: u32) -> *mut ibv_mw {
    entry::pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_bind_mw`.
pub unsafe extern "C" fn bind_mw(
    _qp: *mut ibv_qp,
    _mw: *mut ibv_mw,
    _bind: *mut ibv_mw_bind,
) -> c_int {
    entry::int(|| Err(Errno::OPNOTSUPP))
}
