//! The data path in: lists of work requests, each by the quick way if it goes.
//!
//! No allocation and no system call; a lock where the queue is shared.

use core::ffi::c_int;
use core::hint::black_box;

use mlx5::{PostedOne, SendQueue};

use super::qp::Qp;
use crate::abi::*;
use crate::mw;
use crate::post::{Posted, refuse, report, write_list};
use crate::qp::qp_of;

/// Adds a work request to the batch by the quick way, if it is one of nearly
/// all.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn push_quickly(queue: &mut SendQueue, wr: &ibv_send_wr) -> bool {
    if wr.num_sge != 1 {
        return false;
    }
    // SAFETY: the application says that the element is there, and readable if it
    // is to be copied.
    unsafe {
        let one = Posted::new(wr);
        if wr.send_flags & IBV_SEND_INLINE != 0 {
            queue.push_one_inline(&one)
        } else {
            queue.push_one(&one)
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
        // Every way goes on in a function of its own, so that this one saves no
        // registers.
        if !own.single && !own.send_lock.try_quick() {
            return post_shared(own, wr, bad_wr);
        }
        let request = &*wr;
        if !request.next.is_null() || request.num_sge != 1 {
            return post_several(own, wr, bad_wr);
        }
        if request.send_flags & IBV_SEND_INLINE != 0 {
            return post_inline(own, wr, bad_wr);
        }
        post_single(own, wr, bad_wr)
    }
}

/// Posts a list of one work request of one element in the critical section that
/// was entered, and leaves it.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_single(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says; what the work request names is the
    // application's affair.
    unsafe {
        let posted = (*own.send.get()).post_one(&Posted::new(&*wr));
        end_one(own, posted, wr, bad_wr)
    }
}

/// Goes on after a list of one by what has become of it, and leaves the critical
/// section.
///
/// # Safety
/// As for [`post_send`].
#[inline(always)]
unsafe fn end_one(
    own: &Qp,
    posted: PostedOne,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    match posted {
        // SAFETY: as the caller says.
        PostedOne::No => unsafe { post_several(own, wr, bad_wr) },
        // SAFETY: as the caller says.
        PostedOne::Written => unsafe { tell_posted(own) },
        PostedOne::Told => {
            // Of a queue pair with one owner nobody took it: a plain store, less
            // than to ask.
            own.send_lock.unlock_quick();
            0
        }
    }
}

/// Tells the device of what was posted, and leaves the critical section.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn tell_posted(own: &Qp) -> c_int {
    // SAFETY: in the critical section.
    unsafe { (*own.send.get()).tell_posted() };
    own.send_lock.unlock_quick();
    // Nobody knows what, so that callers end in here: what is called in between
    // makes them keep a frame.
    black_box(0)
}

/// Posts a list of one work request of one element, which is copied now, in the
/// critical section that was entered, and leaves it.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_inline(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says; the application says that the data is
    // readable, and what else the work request names is its affair.
    unsafe {
        let posted = (*own.send.get()).post_one_inline(&Posted::new(&*wr));
        end_one(own, posted, wr, bad_wr)
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
            if !push_quickly(queue, request) {
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
