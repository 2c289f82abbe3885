//! The operations of `ibv_wr_*` that only rdma_rxe has.

use core::ffi::c_void;

use rxe::{Opcode, Operands, RemoteMemory};

use super::Rxe;
use crate::abi::*;
use crate::layout;
use crate::wr_ex::open_with;

/// Operations of a type of queue pair for which this release of libibverbs has
/// functions.
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

/// Sets the functions of operations that only rdma_rxe has.
pub fn set_functions(qp: &mut verbs_qp, operations: u64) {
    let layout = layout::current();
    let has = |operation| operations & operation != 0;
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
        let value = Operands::AtomicWrite(value.cast::<[u8; 8]>().read());
        open_with::<Rxe>(
            qp,
            Opcode::ATOMIC_WRITE,
            RemoteMemory { addr, rkey },
            Ok(value),
        );
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
        let range = match u32::try_from(length) {
            Ok(length) => Ok(Operands::Flush {
                length,
                placement: kind,
                level,
            }),
            Err(_) => Err(libc::EINVAL),
        };
        open_with::<Rxe>(qp, Opcode::FLUSH, RemoteMemory { addr, rkey }, range);
    }
}
