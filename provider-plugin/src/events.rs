//! Waiting for the acknowledgement of an object's events before it is freed.
//!
//! A destroy command returns how many events the kernel has reported for the
//! object. Each of them was, or will be, read by a thread that then uses the
//! object and acknowledges. The object may only be freed after the last one:
//! `ibv_ack_cq_events` and `ibv_ack_async_event` count under the object's
//! mutex and signal its condition variable.

use crate::abi::{ibv_cq, ibv_qp, ibv_srq, ibv_wq};

/// Waits until `done` returns that all events were acknowledged.
///
/// # Safety
/// `mutex` and `cond` are initialised and belong to the counters that `done`
/// reads.
unsafe fn wait(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    mut done: impl FnMut() -> bool,
) {
    // SAFETY: both were initialised by libibverbs or by us at creation.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        while !done() {
            libc::pthread_cond_wait(cond, mutex);
        }
        libc::pthread_mutex_unlock(mutex);
    }
}

/// Waits for the acknowledgement of all events of a destroyed queue.
///
/// # Safety
/// `cq` is a live object whose mutex and condition were initialised.
pub unsafe fn wait_cq(cq: *mut ibv_cq, completion: u32, asynchronous: u32) {
    // SAFETY: the caller vouches for `cq`; counters are read under its mutex.
    unsafe {
        wait(&raw mut (*cq).mutex, &raw mut (*cq).cond, || {
            (*cq).comp_events_completed == completion
                && (*cq).async_events_completed == asynchronous
        });
    }
}

/// As [`wait_cq`], of a queue pair.
///
/// # Safety
/// `qp` is a live object whose mutex and condition were initialised.
pub unsafe fn wait_qp(qp: *mut ibv_qp, reported: u32) {
    // SAFETY: the caller vouches for `qp`; the counter is read under its mutex.
    unsafe {
        wait(&raw mut (*qp).mutex, &raw mut (*qp).cond, || {
            (*qp).events_completed == reported
        });
    }
}

/// As [`wait_cq`], of a shared receive queue.
///
/// # Safety
/// `srq` is a live object whose mutex and condition were initialised.
pub unsafe fn wait_srq(srq: *mut ibv_srq, reported: u32) {
    // SAFETY: the caller vouches for `srq`; the counter is read under its
    // mutex.
    unsafe {
        wait(&raw mut (*srq).mutex, &raw mut (*srq).cond, || {
            (*srq).events_completed == reported
        });
    }
}

/// As [`wait_cq`], of a work queue.
///
/// # Safety
/// `wq` is a live object whose mutex and condition were initialised.
pub unsafe fn wait_wq(wq: *mut ibv_wq, reported: u32) {
    // SAFETY: the caller vouches for `wq`; the counter is read under its mutex.
    unsafe {
        wait(&raw mut (*wq).mutex, &raw mut (*wq).cond, || {
            (*wq).events_completed == reported
        });
    }
}

/// Initialises the mutex and condition variable of a public object in place.
///
/// # Safety
/// Both point to writable memory that is not used yet.
pub unsafe fn init(mutex: *mut libc::pthread_mutex_t, cond: *mut libc::pthread_cond_t) {
    // SAFETY: as the caller says. With default attributes neither can fail.
    unsafe {
        libc::pthread_mutex_init(mutex, core::ptr::null());
        libc::pthread_cond_init(cond, core::ptr::null());
    }
}
