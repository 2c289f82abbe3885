//! Multicast groups of a queue pair.

use core::ffi::c_int;

use uverbs::QpHandle;

use crate::abi::{ibv_gid, ibv_qp};
use crate::context::{CtxRef, destroyed};
use crate::entry;

/// `ibv_attach_mcast`.
pub unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, the application a
    // GID.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*qp).context);
        Ok(uverbs::qp::attach_multicast(
            &ctx,
            QpHandle((*qp).handle),
            &(*gid).raw,
            lid,
        )?)
    })
}

/// `ibv_detach_mcast`.
pub unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: as in `attach_mcast`.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*qp).context);
        let result = uverbs::qp::detach_multicast(&ctx, QpHandle((*qp).handle), &(*gid).raw, lid);
        destroyed(result.map_err(Into::into))
    })
}
