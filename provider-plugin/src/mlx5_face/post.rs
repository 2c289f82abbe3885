//! The data path in: work requests as lists.
//!
//! No allocation and no system call; a lock where the queue is shared.

use core::ffi::c_int;

use mlx5::{Opcode, PostError, SendFlags, SendQueue, Sge};

use super::Mlx5;
use crate::abi::*;
use crate::mlx5_face::ah::ah_of;
use crate::mlx5_face::qp::Qp;
use crate::post::{refuse, report};
use crate::qp::qp_of;
use crate::srq::srq_of;

const _: () = {
    assert!(size_of::<ibv_sge>() == size_of::<Sge>());
    assert!(align_of::<ibv_sge>() >= align_of::<Sge>());
};

/// A scatter list of the application, if it is no longer than `max`.
///
/// # Safety
/// `list` is readable for `num_sge` elements.
#[inline(always)]
pub unsafe fn scatter_list<'a>(
    list: *const ibv_sge,
    num_sge: usize,
    max: u32,
) -> Result<&'a [Sge], c_int> {
    if num_sge > max as usize {
        return Err(libc::EINVAL);
    }
    if num_sge == 0 {
        return Ok(&[]);
    }
    // SAFETY: as the caller says; the two types are the same.
    Ok(unsafe { core::slice::from_raw_parts(list.cast::<Sge>(), num_sge) })
}

/// Writes a work request and adds it to the batch.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write(queue: &mut SendQueue, datagram: bool, wr: &ibv_send_wr) -> Result<(), c_int> {
    let errno = |error: PostError| error.errno();
    // A negative number is too large a one.
    let num_sge = wr.num_sge as u32 as usize;
    // SAFETY: as the caller says.
    let list = unsafe { scatter_list(wr.sg_list, num_sge, queue.max_sge())? };
    let flags = SendFlags::from_bits_retain(wr.send_flags);
    let opcode = Opcode(wr.opcode);
    let mut wqe = queue.open(wr.wr_id, opcode, flags).map_err(errno)?;
    wqe.immediate_or_key(wr.imm_data);
    // SAFETY: the opcode says which member of the union the application set.
    unsafe {
        match opcode {
            _ if datagram => {
                let ud = wr.wr.ud;
                if ud.ah.is_null() {
                    return Err(libc::EINVAL);
                }
                wqe.ud(&ah_of(ud.ah).address, ud.remote_qpn, ud.remote_qkey);
            }
            Opcode::ATOMIC_CMP_AND_SWP | Opcode::ATOMIC_FETCH_AND_ADD => {
                let operands = wr.wr.atomic;
                wqe.atomic(
                    operands.remote_addr,
                    operands.rkey,
                    operands.compare_add,
                    operands.swap,
                );
            }
            // Of operations without remote memory nothing is written.
            _ => {
                wqe.rdma(wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
            }
        }
        if flags.contains(SendFlags::INLINE) {
            let pieces = list
                .iter()
                .map(|sge| (sge.addr as *const u8, sge.length as usize));
            // SAFETY: the application says that the pieces are readable.
            wqe.inline_raw(pieces).map_err(errno)?;
        } else {
            wqe.sge_list(list).map_err(errno)?;
        }
    }
    queue.accept();
    Ok(())
}

/// `ibv_post_send`. On an error `*bad_wr` is the first work request that was
/// not posted; those before it were.
///
/// EINVAL for a bad work request or a state that does not send, ENOMEM for a
/// full queue, EOPNOTSUPP for binding a window or invalidating a local key.
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
        if own.single {
            return post(own, wr, bad_wr);
        }
        own.send_lock.lock();
        let result = post(own, wr, bad_wr);
        own.send_lock.unlock();
        result
    }
}

/// # Safety
/// As for [`post_send`], in the critical section.
#[inline(always)]
unsafe fn post(own: &Qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.send.get();
        queue.begin();
        let mut result = 0;
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if let Err(errno) = write(queue, own.datagram, request) {
                report(next, bad_wr);
                result = errno;
                break;
            }
            next = request.next;
        }
        // SAFETY: what the work requests name is the application's affair.
        queue.publish();
        result
    }
}

/// Adds a list of receives, one by one; the errno of the first that is
/// refused.
///
/// # Safety
/// The list is the application's.
#[inline(always)]
unsafe fn receive(
    mut next: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    max_sge: u32,
    mut push: impl FnMut(u64, &[Sge]) -> Result<(), PostError>,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        while let Some(request) = next.as_ref() {
            let num_sge = request.num_sge as u32 as usize;
            let pushed = scatter_list(request.sg_list, num_sge, max_sge)
                .and_then(|list| push(request.wr_id, list).map_err(|error| error.errno()));
            if let Err(errno) = pushed {
                report(next, bad_wr);
                return errno;
            }
            next = request.next;
        }
    }
    0
}

/// `ibv_post_recv`. EINVAL for a bad work request, the RESET state, or a
/// queue pair with a shared receive queue; ENOMEM for a full queue. On an
/// error `*bad_wr` is the first that was not posted; those before it were.
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own; the queue is this call's once the lock is
    // taken or the application has promised it.
    unsafe {
        let own: &Qp = qp_of(qp);
        let queue = own.recv();
        if wr.is_null() || queue.is_null() || !own.may_receive() {
            return refuse(wr, bad_wr);
        }
        if !own.single {
            own.recv_lock.lock();
        }
        let queue = &mut *queue;
        queue.begin();
        let max_sge = queue.max_sge();
        let result = receive(wr, bad_wr, max_sge, |wr_id, list| queue.push(wr_id, list));
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        if !own.single {
            own.recv_lock.unlock();
        }
        result
    }
}

/// `ibv_post_srq_recv`. EINVAL for a bad work request, ENOMEM for a full
/// queue; `*bad_wr` as with [`post_recv`].
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe {
        let own = srq_of::<Mlx5>(srq);
        if !own.single {
            own.lock.lock();
        }
        let queue = &mut *own.recv.get();
        let max_sge = queue.max_sge();
        let result = receive(wr, bad_wr, max_sge, |wr_id, list| queue.push(wr_id, list));
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        if !own.single {
            own.lock.unlock();
        }
        result
    }
}
