//! The data path in: lists of work requests.
//!
//! No allocation and no system call; a lock where the queue is shared.

use core::ffi::c_int;

use super::qp::Qp;
use crate::abi::*;
use crate::access::locked;
use crate::mw;
use crate::post::{refuse, report, write_list};
use crate::qp::qp_of;

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
            let result = write_list(queue, own.datagram, &mut next);
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
