//! The data path in: work requests by function calls (`ibv_wr_*`).
//!
//! As in `crate::wr_ex`: the first failure between `wr_start` and
//! `wr_complete` is kept, nothing after it is written, and then nothing is
//! posted.

use core::ffi::{c_int, c_void};

use mlx5::{Opcode, PostError, SendFlags, Sge, Wqe};

use crate::abi::*;
use crate::access::{Access, Shared, Single};
use crate::mlx5_face::ah::ah_of;
use crate::mlx5_face::post::scatter_list;
use crate::mlx5_face::qp::Qp;
use crate::qp::qp_of;

const DATAGRAM: u64 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
const UNRELIABLE: u64 = DATAGRAM
    | IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND_WITH_INV;
const RELIABLE: u64 = UNRELIABLE
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

/// The operations (`IBV_QP_EX_WITH_*`) that a type of queue pair has.
pub fn operations(qp_type: u32) -> u64 {
    match qp_type {
        IBV_QPT_UD => DATAGRAM,
        IBV_QPT_UC => UNRELIABLE,
        IBV_QPT_RC => RELIABLE,
        _ => 0,
    }
}

/// Sets the functions for the operations that the application asked for.
pub fn set_functions(qp: &mut verbs_qp, asked: u64, single: bool) {
    let qp = &mut qp.qp_ex;
    macro_rules! builders {
        ($($operation:ident => $function:ident;)+) => {
            $(if asked & $operation != 0 { qp.$function = Some($function); })+
        };
    }
    builders! {
        IBV_QP_EX_WITH_SEND => wr_send;
        IBV_QP_EX_WITH_SEND_WITH_IMM => wr_send_imm;
        IBV_QP_EX_WITH_SEND_WITH_INV => wr_send_inv;
        IBV_QP_EX_WITH_RDMA_WRITE => wr_rdma_write;
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM => wr_rdma_write_imm;
        IBV_QP_EX_WITH_RDMA_READ => wr_rdma_read;
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP => wr_atomic_cmp_swp;
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD => wr_atomic_fetch_add;
    }
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    if single {
        qp.wr_start = Some(wr_start::<Single>);
        qp.wr_complete = Some(wr_complete::<Single>);
        qp.wr_abort = Some(wr_abort::<Single>);
    } else {
        qp.wr_start = Some(wr_start::<Shared>);
        qp.wr_complete = Some(wr_complete::<Shared>);
        qp.wr_abort = Some(wr_abort::<Shared>);
    }
}

unsafe extern "C" fn wr_start<A: Access>(qp: *mut ibv_qp_ex) {
    // SAFETY: the application passes a live queue pair of ours; the send queue
    // is this caller's until wr_complete or wr_abort.
    unsafe {
        let qp: &Qp = qp_of(qp);
        A::enter(&qp.send_lock);
        qp.failed.set(if qp.may_send() { 0 } else { libc::EINVAL });
        (*qp.send.get()).begin();
    }
}

unsafe extern "C" fn wr_complete<A: Access>(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the application is after wr_start.
    unsafe {
        let qp: &Qp = qp_of(qp);
        // Out of the critical section the functions do nothing.
        let failed = qp.failed.replace(libc::EINVAL);
        if failed == 0 {
            // SAFETY: what the work requests name is the application's affair.
            (*qp.send.get()).publish();
        }
        A::leave(&qp.send_lock);
        failed
    }
}

unsafe extern "C" fn wr_abort<A: Access>(qp: *mut ibv_qp_ex) {
    // SAFETY: the application is after wr_start. What was not published is
    // forgotten at the next `begin`.
    unsafe {
        let qp: &Qp = qp_of(qp);
        qp.failed.set(libc::EINVAL);
        A::leave(&qp.send_lock);
    }
}

/// Takes an entry for an operation, without data so far.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(always)]
unsafe fn build(qp: *mut ibv_qp_ex, opcode: Opcode, fill: impl FnOnce(&mut Wqe<'_>)) {
    // SAFETY: the send queue is this caller's, and so are the public members.
    unsafe {
        let own: &Qp = qp_of(qp);
        if own.failed.get() != 0 {
            return;
        }
        let queue = &mut *own.send.get();
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        match queue.open((*qp).wr_id, opcode, flags) {
            Ok(mut wqe) => {
                fill(&mut wqe);
                queue.accept();
            }
            Err(error) => own.failed.set(error.errno()),
        }
    }
}

/// Completes the last entry. EINVAL if there is none in this batch.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(always)]
unsafe fn amend(qp: *mut ibv_qp_ex, set: impl FnOnce(&mut Wqe<'_>) -> Result<(), c_int>) {
    // SAFETY: the send queue is this caller's.
    unsafe {
        let own: &Qp = qp_of(qp);
        if own.failed.get() != 0 {
            return;
        }
        let queue = &mut *own.send.get();
        let done = match queue.last() {
            Some(mut wqe) => set(&mut wqe),
            None => Err(libc::EINVAL),
        };
        match done {
            Ok(()) => queue.settle(),
            Err(errno) => own.failed.set(errno),
        }
    }
}

/// Builders: each is called between wr_start and wr_complete.
macro_rules! builders {
    ($($name:ident($($arg:ident: $type:ty),*) $opcode:ident |$wqe:ident| $fill:expr;)+) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $type)*) {
            // SAFETY: the application is between wr_start and wr_complete, and
            // passes live objects.
            unsafe { build(qp, Opcode::$opcode, |$wqe| { $fill; }) }
        }
    )+};
}

builders! {
    wr_send() SEND |wqe| { let _ = wqe; };
    wr_send_imm(imm_data: u32) SEND_WITH_IMM |wqe| wqe.immediate_or_key(imm_data);
    wr_send_inv(rkey: u32) SEND_WITH_INV |wqe| wqe.immediate_or_key(rkey);
    wr_rdma_write(rkey: u32, addr: u64) RDMA_WRITE |wqe| wqe.rdma(addr, rkey);
    wr_rdma_write_imm(rkey: u32, addr: u64, imm_data: u32) RDMA_WRITE_WITH_IMM
        |wqe| wqe.rdma(addr, rkey).immediate_or_key(imm_data);
    wr_rdma_read(rkey: u32, addr: u64) RDMA_READ |wqe| wqe.rdma(addr, rkey);
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) ATOMIC_CMP_AND_SWP
        |wqe| wqe.atomic(addr, rkey, compare, swap);
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) ATOMIC_FETCH_AND_ADD
        |wqe| wqe.atomic(addr, rkey, add, 0);
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: the application is between wr_start and wr_complete, and passes
    // a live address handle.
    unsafe {
        amend(qp, |wqe| {
            if ah.is_null() {
                return Err(libc::EINVAL);
            }
            wqe.ud(&ah_of(ah).address, remote_qpn, remote_qkey);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let piece = core::iter::once((addr.cast_const().cast(), length));
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the data is readable.
    unsafe { amend(qp, |wqe| wqe.inline_raw(piece).map_err(PostError::errno)) }
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the list and the data are readable.
    unsafe {
        let pieces = (0..num_buf).map(|i| {
            let piece = list.add(i).read();
            (piece.addr.cast_const().cast(), piece.length)
        });
        amend(qp, |wqe| wqe.inline_raw(pieces).map_err(PostError::errno));
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = Sge { addr, length, lkey };
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe { amend(qp, |wqe| wqe.sge_list(&[sge]).map_err(PostError::errno)) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, list: *const ibv_sge) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the list is readable; a longer one than the queue was made for is
    // not read.
    unsafe {
        amend(qp, |wqe| {
            let list = scatter_list(list, num_sge, wqe.max_sge())?;
            wqe.sge_list(list).map_err(PostError::errno)
        });
    }
}
