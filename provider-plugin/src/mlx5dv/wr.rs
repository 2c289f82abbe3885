//! Functions for work requests of `ibv_wr_*` that verbs do not have.

use core::ffi::c_void;
use core::mem::offset_of;
use core::ptr::null_mut;

use mlx5::PostError;
use uverbs::Destination;

use super::abi::*;
use super::{exported, is_ours};
use crate::abi::{ibv_ah, ibv_qp_ex};
use crate::ah::ah_of;
use crate::mlx5::Mlx5;
use crate::mlx5::qp::Qp;
use crate::qp::Addressing;
use crate::wr_ex::{push_by, set_destination};

exported! {
    /// `mlx5dv_qp_ex_from_ibv_qp_ex`: the functions of a queue pair that was created
    /// with `send_ops_flags`. Those that are missing are null.
    fn mlx5dv_qp_ex_from_ibv_qp_ex(qp: *mut ibv_qp_ex) -> *mut mlx5dv_qp_ex
    where is_ours((*qp).qp_base.context), else null_mut() => {
        // SAFETY: a live queue pair of ours, of which no part is read.
        unsafe { &raw mut (*qp.cast::<Qp>()).device_data.functions }
    }
}

impl mlx5dv_qp_ex {
    /// No functions.
    pub const NONE: Self = Self {
        comp_mask: 0,
        wr_set_dc_addr: None,
        wr_mr_interleaved: None,
        wr_mr_list: None,
        wr_mkey_configure: None,
        wr_set_mkey_access_flags: None,
        wr_set_mkey_layout_list: None,
        wr_set_mkey_layout_interleaved: None,
        wr_set_mkey_sig_block: None,
        wr_raw_wqe: None,
        wr_set_dc_addr_stream: None,
        wr_memcpy: None,
        wr_set_mkey_crypto: None,
    };

    /// Those of a queue pair that was created for these operations.
    pub fn of(addressing: Addressing, operations: u64) -> Self {
        let mut functions = Self::NONE;
        if addressing == Addressing::Dynamic {
            functions.wr_set_dc_addr = Some(wr_set_dc_addr);
            functions.wr_set_dc_addr_stream = Some(wr_set_dc_addr_stream);
        }
        if operations & send_ops::RAW_WQE != 0 {
            functions.wr_raw_wqe = Some(wr_raw_wqe);
        }
        functions
    }
}

/// The queue pair that has the functions.
///
/// # Safety
/// What [`mlx5dv_qp_ex_from_ibv_qp_ex`] has returned for a live queue pair.
unsafe fn queue_pair(functions: *mut mlx5dv_qp_ex) -> *mut ibv_qp_ex {
    const AT: usize = offset_of!(Qp, device_data.functions);
    // SAFETY: as the caller says; the queue pair begins with its public part.
    unsafe { functions.byte_sub(AT).cast() }
}

unsafe extern "C" fn wr_set_dc_addr(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
) {
    // SAFETY: as the caller says.
    unsafe { wr_set_dc_addr_stream(functions, ah, remote_dctn, access_key, 0) };
}

unsafe extern "C" fn wr_set_dc_addr_stream(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
    stream: u16,
) {
    // SAFETY: the application is between wr_start and wr_complete of the queue pair,
    // and passes an address handle that lives until the work request is posted.
    unsafe {
        let target = (!ah.is_null()).then(|| Destination::Dynamic {
            address: &ah_of::<Mlx5>(ah).address,
            remote_dctn,
            access_key,
            stream,
        });
        set_destination::<Mlx5>(queue_pair(functions), target);
    }
}

unsafe extern "C" fn wr_raw_wqe(functions: *mut mlx5dv_qp_ex, wqe: *const c_void) {
    // SAFETY: the application is between wr_start and wr_complete of the queue pair,
    // and passes a whole WQE.
    unsafe {
        push_by::<Mlx5>(queue_pair(functions), |queue, wr_id| {
            queue.push_raw(wr_id, wqe.cast()).map_err(PostError::errno)
        });
    }
}
