//! The data path in: lists of work requests, by the quick way where it goes.
//!
//! No allocation, and no system call but one doorbell a list; a lock where
//! the queue is shared.
//!
//! Functions apart from the quick path are `extern "C"`, which says that they
//! do not unwind: so they can be jumped to, and the quick path needs no frame.

use core::ffi::c_int;

use ring::BiasedLock;
use rxe::{Refused, SendWriter};

use super::qp::Qp;
use crate::abi::*;
use crate::mw;
use crate::post::{Posted, refuse, report, write_list};
use crate::qp::qp_of;

/// Adds a work request by the quick way, if it is one of nearly all.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write_quickly(writer: &mut SendWriter<'_>, plain: u32, wr: &ibv_send_wr) -> bool {
    if wr.opcode >= 32 || plain & 1 << wr.opcode == 0 || wr.num_sge != 1 {
        return false;
    }
    // SAFETY: the application says that the element is there, and readable if it
    // is to be copied.
    unsafe {
        let one = Posted::new(wr);
        if wr.send_flags & IBV_SEND_INLINE != 0 {
            writer.push_one_inline(&one)
        } else {
            writer.push_one(&one)
        }
    }
}

/// `ibv_post_send`. On an error `*bad_wr` is the first work request that was
/// not posted; those before it were.
///
/// EINVAL for a bad work request or a state that does not send, ENOMEM for a
/// full queue, what the doorbell says if the device is gone.
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
        if wr.is_null() {
            return refuse(wr, bad_wr);
        }
        // Whatever takes longer goes on in a function of its own, so that this
        // one saves no registers.
        if !own.single && !own.send_lock.try_quick() {
            return post_shared(own, wr, bad_wr);
        }
        // Of a queue pair with one owner nobody took it: a plain store, less
        // than to ask.
        post(own, wr, bad_wr, BiasedLock::unlock_quick)
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
    // SAFETY: as the caller says.
    unsafe {
        if !own.send_lock.try_spin() {
            return post_contended(own, wr, bad_wr);
        }
        post(own, wr, bad_wr, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// As for [`post_send`].
#[cold]
#[inline(never)]
unsafe extern "C" fn post_contended(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    own.send_lock.lock_shared();
    // SAFETY: as the caller says.
    unsafe {
        let _ = (*own.send.get()).begin().keep();
        post_rest(own, wr, wr, bad_wr)
    }
}

/// Posts a list in the critical section that was entered, and leaves it.
///
/// # Safety
/// As for [`post_send`].
#[inline(always)]
unsafe fn post(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
    leave: fn(&BiasedLock),
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let plain = own.plain();
        let mut writer = (*own.send.get()).begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if !write_quickly(&mut writer, plain, request) {
                let _ = writer.keep();
                return post_rest(own, wr, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the work requests name is the application's affair.
        writer.publish();
        leave(&own.send_lock);
        match own.besides.doorbell.ring() {
            Ok(()) => 0,
            Err(refused) => unheard(refused, wr, bad_wr),
        }
    }
}

/// The kernel would not hear of the work requests that are in the queue: none
/// of the list may be counted on, so the first is the bad one.
///
/// # Safety
/// `bad_wr` is null or writable.
#[cold]
#[inline(never)]
unsafe extern "C" fn unheard(
    refused: Refused,
    first: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { report(first, bad_wr) };
    refused.errno().raw()
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs; `first` is the list's beginning.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_rest(
    own: &Qp,
    first: *mut ibv_send_wr,
    mut next: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.send.get();
        let result = if own.may_send() {
            write_list(queue, own.datagram, &mut next)
        } else {
            Err(libc::EINVAL)
        };
        // SAFETY: what the work requests name is the application's affair.
        let any = queue.publish();
        if !own.single {
            own.send_lock.unlock();
        }
        if any && let Err(refused) = own.besides.doorbell.ring() {
            return unheard(refused, first, bad_wr);
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
