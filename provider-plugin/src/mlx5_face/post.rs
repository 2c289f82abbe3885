//! The data path in: lists of work requests, each by the quick way if it goes.
//!
//! No allocation and no system call; a lock where the queue is shared.

use core::ffi::c_int;

use mlx5::{One, RecvQueue, SendQueue};
use ring::BiasedLock;
use uverbs::{Opcode, SendFlags, Sge};

use super::qp::Qp;
use crate::abi::*;
use crate::mw;
use crate::post::{push_list, refuse, report, write_list};
use crate::qp::qp_of;

/// How to take a work request by the quick way.
#[derive(Clone, Copy)]
enum How {
    /// As one of a batch.
    Push,
    /// As a list of its own.
    Post,
}

/// Takes a work request by the quick way, if it is one of nearly all.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write_quickly(queue: &mut SendQueue, wr: &ibv_send_wr, how: How) -> bool {
    if wr.num_sge != 1 {
        return false;
    }
    // SAFETY: any bytes are an address and a key; the work request says that it
    // has one element, the application that it is there, and that its data is
    // readable if it is to be copied. The two types of elements are the same.
    // What the work request names is the application's affair.
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
        match (how, wr.send_flags & IBV_SEND_INLINE != 0) {
            (How::Push, false) => queue.push_one(&one),
            (How::Push, true) => queue.push_one_inline(&one),
            (How::Post, false) => queue.post_one(&one),
            (How::Post, true) => queue.post_one_inline(&one),
        }
    }
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
        // Whatever takes longer goes on in a function of its own, so that this
        // one saves no registers.
        if !own.send_lock.try_quick() && !own.single {
            return post_shared(own, wr, bad_wr);
        }
        if !(*wr).next.is_null() {
            return post_several(own, wr, bad_wr);
        }
        if !write_quickly(&mut *own.send.get(), &*wr, How::Post) {
            return post_several(own, wr, bad_wr);
        }
        // Of a queue pair with one owner nobody took it: a plain store, less
        // than to ask.
        own.send_lock.unlock_quick();
        0
    }
}

/// [`post_send`] of a thread that is not the only one to post here.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_shared(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    own.send_lock.lock_shared();
    // SAFETY: as the caller says.
    unsafe {
        (*own.send.get()).begin();
        post_rest(own, wr, bad_wr)
    }
}

/// Posts a list in the critical section that was entered, and leaves it.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_several(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.send.get();
        queue.begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if !write_quickly(queue, request, How::Push) {
                return post_rest(own, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the work requests name is the application's affair.
        queue.publish();
        own.send_lock.unlock_quick();
        0
    }
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_rest(
    own: &Qp,
    mut next: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.send.get();
        let result = write_list(queue, own.datagram, &mut next);
        // SAFETY: what the work requests name is the application's affair.
        queue.publish();
        if !own.single {
            own.send_lock.unlock();
        }
        result.map_or_else(
            |errno| {
                report(next, bad_wr);
                errno
            },
            |()| 0,
        )
    }
}

/// Posts a list of receives.
///
/// # Safety
/// As for [`crate::writers::Receives::post`].
#[inline(always)]
pub unsafe fn receives(
    single: bool,
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says; in the critical section.
    unsafe {
        if !lock.try_quick() && !single {
            return receive_shared(lock, queue, wr, bad_wr);
        }
        let own = &mut *queue;
        own.begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            let pushed = request.num_sge == 1
                && own.push_one(request.wr_id, &*request.sg_list.cast::<Sge>());
            if !pushed {
                return receive_rest(single, lock, queue, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the receives name is the application's affair.
        own.publish();
        // As for sends.
        lock.unlock_quick();
        0
    }
}

/// [`receives`] of a thread that is not the only one to post here.
///
/// # Safety
/// As there.
#[inline(never)]
unsafe extern "C" fn receive_shared(
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    lock.lock_shared();
    // SAFETY: as the caller says; in the critical section.
    unsafe {
        (*queue).begin();
        receive_rest(false, lock, queue, wr, bad_wr)
    }
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs.
///
/// # Safety
/// As for [`receives`].
#[inline(never)]
unsafe extern "C" fn receive_rest(
    single: bool,
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    next: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *queue;
        let result = push_list(queue, next, bad_wr);
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        if !single {
            lock.unlock();
        }
        result
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
