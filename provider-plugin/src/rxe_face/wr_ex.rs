//! The data path in: the operations of `ibv_wr_*` that rxe has besides.

use core::ffi::c_void;

use rxe::Opcode;

use super::Rxe;
use crate::abi::*;
use crate::layout;
use crate::wr_ex::build;

/// Those that a type of queue pair has, as far as this release of libibverbs
/// has functions for them.
pub fn operations(qp_type: u32) -> u64 {
    let layout = layout::current();
    match qp_type {
        IBV_QPT_UC => IBV_QP_EX_WITH_BIND_MW,
        IBV_QPT_RC => {
            let mut operations = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
            if layout.has_wr_atomic_write() {
                operations |= IBV_QP_EX_WITH_ATOMIC_WRITE;
            }
            if layout.has_wr_flush() {
                operations |= IBV_QP_EX_WITH_FLUSH;
            }
            operations
        }
        _ => 0,
    }
}

/// Sets their functions, but for those that other devices have too.
pub fn set_functions(qp: &mut verbs_qp, asked: u64) {
    let layout = layout::current();
    let has = |operation| asked & operation != 0;
    if has(IBV_QP_EX_WITH_ATOMIC_WRITE) {
        layout.set_wr_atomic_write(qp, Some(wr_atomic_write));
    }
    if has(IBV_QP_EX_WITH_FLUSH) {
        layout.set_wr_flush(qp, Some(wr_flush));
    }
}

unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    addr: u64,
    value: *const c_void,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the value is readable.
    unsafe {
        build::<Rxe>(qp, Opcode::ATOMIC_WRITE, |wqe| {
            wqe.atomic_write(addr, rkey, value.cast::<[u8; 8]>().read());
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    addr: u64,
    length: usize,
    kind: u8,
    level: u8,
) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe {
        build::<Rxe>(qp, Opcode::FLUSH, |wqe| {
            let length = u32::try_from(length).map_err(|_| libc::EINVAL)?;
            wqe.flush(addr, rkey, length, kind, level);
            Ok(())
        });
    }
}
