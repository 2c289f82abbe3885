//! The data path in: work requests by function calls (`ibv_wr_*`), the usual
//! ones of connections by the quick way.
//!
//! What does not go that way, whatever the reason, goes on in the function that
//! all devices have, and is refused there if need be.

use core::ffi::c_void;

use mlx5::Besides;
use uverbs::{Opcode, SendFlags, Sge};

use super::Mlx5;
use super::qp::Qp;
use crate::abi::*;
use crate::qp::qp_of;
use crate::wr_ex as any;

/// Sets the functions, of a queue pair that has those of all devices.
pub fn set_functions(qp: &mut Qp, asked: u64) {
    if !qp.send.get_mut().builds() {
        return;
    }
    let qp = &mut qp.public.qp_ex;
    macro_rules! builders {
        ($($operation:ident => $function:ident;)+) => {
            $(if asked & $operation != 0 { qp.$function = Some($function); })+
        };
    }
    builders! {
        IBV_QP_EX_WITH_SEND => wr_send;
        IBV_QP_EX_WITH_SEND_WITH_IMM => wr_send_imm;
        IBV_QP_EX_WITH_RDMA_WRITE => wr_rdma_write;
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM => wr_rdma_write_imm;
        IBV_QP_EX_WITH_RDMA_READ => wr_rdma_read;
    }
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
}

/// Builds a work request; whether that has been done.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(always)]
unsafe fn build<const OPERATION: u32>(qp: *mut ibv_qp_ex, besides: Besides) -> bool {
    // SAFETY: the send queue is this caller's, and so are the public members.
    unsafe {
        let own: &Qp = qp_of(qp);
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        own.failed.get() == 0 && (*own.send.get()).build::<OPERATION>((*qp).wr_id, flags, besides)
    }
}

/// Builders: each is called between wr_start and wr_complete. In brackets are
/// the immediate data and the remote address and key.
macro_rules! builders {
    ($($name:ident($($arg:ident: $type:ty),*)
        $opcode:ident [$immediate:expr, $remote_addr:expr, $rkey:expr];)+) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $type)*) {
            // SAFETY: the application is between wr_start and wr_complete.
            unsafe {
                let besides = Besides {
                    immediate: $immediate,
                    remote_addr: $remote_addr,
                    rkey: $rkey,
                };
                if !build::<{ Opcode::$opcode.0 }>(qp, besides) {
                    any::$name::<Mlx5>(qp $(, $arg)*);
                }
            }
        }
    )+};
}

builders! {
    wr_send() SEND [0, 0, 0];
    wr_send_imm(imm_data: u32) SEND_WITH_IMM [imm_data, 0, 0];
    wr_rdma_write(rkey: u32, addr: u64) RDMA_WRITE [0, addr, rkey];
    wr_rdma_write_imm(rkey: u32, addr: u64, imm_data: u32) RDMA_WRITE_WITH_IMM
        [imm_data, addr, rkey];
    wr_rdma_read(rkey: u32, addr: u64) RDMA_READ [0, addr, rkey];
}

// Without a look whether the batch has failed: what is built then is part of it,
// and goes with it.

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the application is between wr_start and wr_complete, so the send
    // queue is this caller's.
    unsafe {
        let own: &Qp = qp_of(qp);
        if !(*own.send.get()).set_one(Sge { addr, length, lkey }) {
            any::wr_set_sge::<Mlx5>(qp, lkey, addr, length);
        }
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: as in `wr_set_sge`; the application says that the data is readable.
    unsafe {
        let own: &Qp = qp_of(qp);
        if !(*own.send.get()).set_inline(addr.cast_const().cast(), length) {
            any::wr_set_inline_data::<Mlx5>(qp, addr, length);
        }
    }
}
