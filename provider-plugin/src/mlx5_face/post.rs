//! The data path in: lists of work requests, each by the quick way if it goes.
//!
//! No allocation and no system call; a lock where the queue is shared.

use core::ffi::c_int;

use mlx5::{One, SendQueue};
use uverbs::{Opcode, SendFlags, Sge};

use super::qp::Qp;
use crate::abi::*;
use crate::access::locked;
use crate::mw;
use crate::post::{refuse, report, write_list};
use crate::qp::qp_of;

/// Adds a work request by the quick way, if it is one of nearly all.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write_quickly(queue: &mut SendQueue, wr: &ibv_send_wr) -> bool {
    if wr.num_sge != 1 {
        return false;
    }
    // SAFETY: any bytes are an address and a key; the work request says that it
    // has one element, the application that it is there, and that its data is
    // readable if it is to be copied. The two types of elements are the same.
    unsafe {
        let one = One {
            wr_id: wr.wr_id,
            opcode: Opcode(wr.opcode),
            flags: SendFlags::from_bits_retain(wr.send_flags),
            immediate: wr.imm_data,
            remote_addr: wr.wr.rdma.remote_addr,
            rkey: wr.wr.rdma.rkey,
            sge: &*wr.sg_list.cast::<Sge>(),
        };
        if wr.send_flags & IBV_SEND_INLINE != 0 {
            queue.push_one_inline(&one)
        } else {
            queue.push_one(&one)
        }
    }
}

/// Writes a list, as [`write_list`]; what is left of it goes the long way.
///
/// # Safety
/// As for [`write_list`].
#[inline(always)]
unsafe fn write_all(
    queue: &mut SendQueue,
    datagram: bool,
    next: &mut *mut ibv_send_wr,
) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    unsafe {
        while let Some(request) = next.as_ref() {
            if !write_quickly(queue, request) {
                return write_rest(queue, datagram, next);
            }
            *next = request.next;
        }
    }
    Ok(())
}

/// # Safety
/// As for [`write_list`].
#[inline(never)]
unsafe fn write_rest(
    queue: &mut SendQueue,
    datagram: bool,
    next: &mut *mut ibv_send_wr,
) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    unsafe { write_list(queue, datagram, next) }
}

/// `ibv_post_send`. On an error `*bad_wr` is the first work request that was
/// not posted; those before it were.
///
/// EINVAL for a bad work request or a state that does not send, ENOMEM for a
/// full queue, EOPNOTSUPP for binding a window of more than 2 GiB.
pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own; the send queue is this call's once the lock is
    // taken or the application has promised it.
    unsafe {
        let own: &Qp = qp_of(qp);
        if wr.is_null() || !own.may_send() {
            return refuse(wr, bad_wr);
        }
        locked(own.single, &own.send_lock, || {
            let queue = &mut *own.send.get();
            queue.begin();
            let mut next = wr;
            let result = write_all(queue, own.datagram, &mut next);
            // SAFETY: what the work requests name is the application's affair.
            queue.publish();
            result.map_or_else(
                |errno| {
                    report(next, bad_wr);
                    errno
                },
                |()| 0,
            )
        })
    }
}

/// `ibv_bind_mw`.
pub unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the application passes a live queue pair and window of ours and
    // its arguments.
    unsafe { mw::bind(post_send, qp, mw, bind) }
}
