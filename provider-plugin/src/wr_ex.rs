//! The data path in: work requests by function calls (`ibv_wr_*`).
//!
//! `wr_start` enters the queue's critical section; a builder takes an entry
//! for each operation, setters fill in the rest of the last one; `wr_complete`
//! hands all of them over at once, or none if anything failed; `wr_abort`
//! forgets them. The first failure is kept, and nothing after it is written.

use core::ffi::{c_int, c_void};

use uverbs::{Opcode, SendFlags, Sge};

use crate::abi::*;
use crate::access::{Access, Shared, Single};
use crate::post::scatter_list;
use crate::qp::{Device, Qp, qp_of};
use crate::writers::{Entry, Sends};

/// The writer of a work request.
type EntryOf<'q, D> = <<D as Device>::SendQueue as Sends>::Entry<'q>;

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
pub fn operations<D: Device>(qp_type: u32) -> u64 {
    let all_devices = match qp_type {
        IBV_QPT_UD => DATAGRAM,
        IBV_QPT_UC => UNRELIABLE,
        IBV_QPT_RC => RELIABLE,
        IBV_QPT_XRC_SEND if D::XRC => RELIABLE,
        _ => 0,
    };
    all_devices | D::more_operations(qp_type)
}

/// Sets the functions for the operations that the application asked for.
pub fn set_functions<D: Device>(qp: &mut verbs_qp, asked: u64, single: bool) {
    let qp = &mut qp.qp_ex;
    macro_rules! builders {
        ($($operation:ident => $function:ident;)+) => {
            $(if asked & $operation != 0 { qp.$function = Some($function::<D>); })+
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
        IBV_QP_EX_WITH_LOCAL_INV => wr_local_inv;
        IBV_QP_EX_WITH_BIND_MW => wr_bind_mw;
    }
    qp.wr_set_ud_addr = Some(wr_set_ud_addr::<D>);
    if D::XRC && qp.qp_base.qp_type == IBV_QPT_XRC_SEND {
        qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn::<D>);
    }
    qp.wr_set_inline_data = Some(wr_set_inline_data::<D>);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list::<D>);
    qp.wr_set_sge = Some(wr_set_sge::<D>);
    qp.wr_set_sge_list = Some(wr_set_sge_list::<D>);
    if single {
        qp.wr_start = Some(wr_start::<D, Single>);
        qp.wr_complete = Some(wr_complete::<D, Single>);
        qp.wr_abort = Some(wr_abort::<D, Single>);
    } else {
        qp.wr_start = Some(wr_start::<D, Shared>);
        qp.wr_complete = Some(wr_complete::<D, Shared>);
        qp.wr_abort = Some(wr_abort::<D, Shared>);
    }
}

unsafe extern "C" fn wr_start<D: Device, A: Access>(qp: *mut ibv_qp_ex) {
    // SAFETY: the application passes a live queue pair of ours; the send queue
    // is this caller's until wr_complete or wr_abort.
    unsafe {
        let qp: &Qp<D> = qp_of(qp);
        if !A::try_quick(&qp.send_lock) {
            return start_shared(qp);
        }
        start(qp);
    }
}

/// [`wr_start`] of a thread that is not the only one to post here; apart, so
/// that the usual one saves no registers.
///
/// # Safety
/// As for [`wr_start`].
#[inline(never)]
unsafe extern "C" fn start_shared<D: Device>(qp: &Qp<D>) {
    qp.send_lock.lock_shared();
    // SAFETY: as the caller says.
    unsafe { start(qp) }
}

/// # Safety
/// The queue's critical section has been entered.
#[inline(always)]
unsafe fn start<D: Device>(qp: &Qp<D>) {
    qp.failed.set(if qp.may_send() { 0 } else { libc::EINVAL });
    // SAFETY: as the caller says.
    unsafe { (*qp.send.get()).begin() };
}

unsafe extern "C" fn wr_complete<D: Device, A: Access>(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the application is after wr_start.
    unsafe {
        let qp: &Qp<D> = qp_of(qp);
        if qp.failed.get() != 0 {
            return give_up::<D, A>(qp);
        }
        // Out of the critical section the functions do nothing.
        qp.failed.set(libc::EINVAL);
        // SAFETY: what the work requests name is the application's affair.
        let any = (*qp.send.get()).publish();
        // Asked before the section is left, so that it is asked once.
        if any {
            A::leave(&qp.send_lock);
            return D::ring(qp);
        }
        A::leave(&qp.send_lock);
        0
    }
}

/// Ends a batch that is not published; the errno by which it has failed.
///
/// # Safety
/// The application is after wr_start.
#[cold]
#[inline(never)]
unsafe extern "C" fn give_up<D: Device, A: Access>(qp: &Qp<D>) -> c_int {
    let failed = qp.failed.replace(libc::EINVAL);
    // SAFETY: the send queue is this caller's.
    unsafe { (*qp.send.get()).abandon() };
    A::leave(&qp.send_lock);
    failed
}

unsafe extern "C" fn wr_abort<D: Device, A: Access>(qp: *mut ibv_qp_ex) {
    // SAFETY: the application is after wr_start. What was not published is
    // forgotten at the next `begin`.
    unsafe {
        let qp: &Qp<D> = qp_of(qp);
        give_up::<D, A>(qp);
    }
}

/// Takes an entry for an operation, without data so far.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(always)]
pub unsafe fn build<D: Device>(
    qp: *mut ibv_qp_ex,
    opcode: Opcode,
    fill: impl FnOnce(&mut EntryOf<'_, D>) -> Result<(), c_int>,
) {
    // SAFETY: the send queue is this caller's, and so are the public members.
    unsafe {
        let own: &Qp<D> = qp_of(qp);
        if own.failed.get() != 0 {
            return;
        }
        let queue = &mut *own.send.get();
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        let filled = match queue.open((*qp).wr_id, opcode, flags) {
            Ok(mut wqe) => {
                wqe.no_data();
                fill(&mut wqe)
            }
            Err(errno) => Err(errno),
        };
        match filled {
            Ok(()) => queue.accept(),
            Err(errno) => own.failed.set(errno),
        }
    }
}

/// Completes the last entry. EINVAL if there is none in this batch.
///
/// # Safety
/// The application is between wr_start and wr_complete.
#[inline(always)]
unsafe fn amend<D: Device>(
    qp: *mut ibv_qp_ex,
    set: impl FnOnce(&mut EntryOf<'_, D>) -> Result<(), c_int>,
) {
    // SAFETY: the send queue is this caller's.
    unsafe {
        let own: &Qp<D> = qp_of(qp);
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
        /// The operation of that name. Between wr_start and wr_complete.
        // Not inlined where a quicker one ends in it.
        #[inline(never)]
        pub unsafe extern "C" fn $name<D: Device>(qp: *mut ibv_qp_ex $(, $arg: $type)*) {
            // SAFETY: the application is between wr_start and wr_complete, and
            // passes live objects.
            unsafe {
                build::<D>(qp, Opcode::$opcode, |$wqe| {
                    $fill;
                    Ok(())
                });
            }
        }
    )+};
}

builders! {
    wr_send() SEND |wqe| { let _ = wqe; };
    wr_send_imm(imm_data: u32) SEND_WITH_IMM |wqe| wqe.immediate_or_key(imm_data);
    wr_send_inv(rkey: u32) SEND_WITH_INV |wqe| wqe.immediate_or_key(rkey);
    wr_rdma_write(rkey: u32, addr: u64) RDMA_WRITE |wqe| wqe.rdma(addr, rkey);
    wr_rdma_write_imm(rkey: u32, addr: u64, imm_data: u32) RDMA_WRITE_WITH_IMM
        |wqe| { wqe.rdma(addr, rkey); wqe.immediate_or_key(imm_data) };
    wr_rdma_read(rkey: u32, addr: u64) RDMA_READ |wqe| wqe.rdma(addr, rkey);
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) ATOMIC_CMP_AND_SWP
        |wqe| wqe.atomic(addr, rkey, compare, swap);
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) ATOMIC_FETCH_AND_ADD
        |wqe| wqe.atomic(addr, rkey, add, 0);
    wr_local_inv(rkey: u32) LOCAL_INV |wqe| wqe.immediate_or_key(rkey);
}

unsafe extern "C" fn wr_bind_mw<D: Device>(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the application is between wr_start and wr_complete, and passes
    // live objects.
    unsafe {
        build::<D>(qp, Opcode::BIND_MW, |wqe| wqe.bind_window(mw, rkey, &*info));
    }
}

unsafe extern "C" fn wr_set_ud_addr<D: Device>(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: the application is between wr_start and wr_complete, and passes
    // a live address handle.
    unsafe {
        amend::<D>(qp, |wqe| {
            if ah.is_null() {
                return Err(libc::EINVAL);
            }
            wqe.ud(ah, remote_qpn, remote_qkey);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn<D: Device>(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe {
        amend::<D>(qp, |wqe| {
            wqe.xrc(remote_srqn);
            Ok(())
        });
    }
}

/// Sets the data of the last entry to what is in the entry itself.
///
/// # Safety
/// As for [`amend`]; the pieces are readable.
#[inline(always)]
unsafe fn set_inline<D: Device>(
    qp: *mut ibv_qp_ex,
    pieces: impl Iterator<Item = (*const u8, usize)>,
) {
    // SAFETY: as the caller says.
    unsafe {
        amend::<D>(qp, |wqe| {
            wqe.inline(pieces)?;
            wqe.set_inline_flag(true);
            Ok(())
        });
    }
}

/// `ibv_wr_set_inline_data`. Between wr_start and wr_complete.
#[inline(never)]
pub unsafe extern "C" fn wr_set_inline_data<D: Device>(
    qp: *mut ibv_qp_ex,
    addr: *mut c_void,
    length: usize,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the data is readable.
    unsafe { set_inline::<D>(qp, core::iter::once((addr.cast_const().cast(), length))) }
}

unsafe extern "C" fn wr_set_inline_data_list<D: Device>(
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
        set_inline::<D>(qp, pieces);
    }
}

/// Sets the data of the last entry to what the application's memory has.
///
/// # Safety
/// As for [`amend`].
#[inline(always)]
unsafe fn set_gather<D: Device>(
    qp: *mut ibv_qp_ex,
    set: impl FnOnce(&mut EntryOf<'_, D>) -> Result<(), c_int>,
) {
    // SAFETY: as the caller says.
    unsafe {
        amend::<D>(qp, |wqe| {
            set(wqe)?;
            wqe.set_inline_flag(false);
            Ok(())
        });
    }
}

/// `ibv_wr_set_sge`. Between wr_start and wr_complete.
#[inline(never)]
pub unsafe extern "C" fn wr_set_sge<D: Device>(
    qp: *mut ibv_qp_ex,
    lkey: u32,
    addr: u64,
    length: u32,
) {
    // SAFETY: the application is between wr_start and wr_complete.
    unsafe { set_gather::<D>(qp, |wqe| wqe.gather_one(Sge { addr, length, lkey })) }
}

unsafe extern "C" fn wr_set_sge_list<D: Device>(
    qp: *mut ibv_qp_ex,
    num_sge: usize,
    list: *const ibv_sge,
) {
    // SAFETY: the application is between wr_start and wr_complete, and says
    // that the list is readable; a longer one than the queue was made for is
    // not read.
    unsafe {
        set_gather::<D>(qp, |wqe| {
            let list = scatter_list(list, num_sge, wqe.max_sge())?;
            wqe.gather(list)
        });
    }
}
