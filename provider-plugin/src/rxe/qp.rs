//! Queue pairs: mapped queues and the kernel's doorbell.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr::NonNull;

use rxe::{DirectDoorbell, QueuePair, RecvQueue, SendQueue};
use uverbs::{QpCap, QpInit, Sge};

use super::{Rxe, wr_ex};
use crate::abi::*;
use crate::context::CtxRef;
use crate::cq::cq_of;
use crate::errno::Errno;
use crate::qp::{NewQp, QpOps, SendAttr};

/// Data of a queue pair besides its queues.
pub struct QpData {
    /// The send queue's doorbell; any thread may ring.
    doorbell: DirectDoorbell,
    /// Buffer for the response of the doorbell command; never read.
    response: UnsafeCell<u32>,
}

/// A queue pair of rdma_rxe.
type Qp = crate::qp::Qp<Rxe>;

/// Removes the queue pair's unread completions from its completion queues.
///
/// # Safety
/// The queue pair, or the completion queues that it had, are live.
unsafe fn clean(qp: &Qp) {
    // SAFETY: the public members are as libibverbs has set them.
    unsafe {
        let public = &qp.public.qp_ex.qp_base;
        for queue in [public.send_cq, public.recv_cq] {
            if !queue.is_null() {
                cq_of::<Rxe, _>(queue).clean(public.qp_num);
            }
        }
    }
}

impl QpOps for Rxe {
    type SendQueue = SendQueue;
    type RecvQueue = RecvQueue;
    type QpData = QpData;
    type QpOptions = ();

    unsafe fn make_qp(
        ctx: &CtxRef,
        _attr: &ibv_qp_init_attr,
        init: &QpInit,
        _send_attr: &SendAttr,
        _options: &(),
        _thread: Option<&()>,
        _domain: *mut ibv_pd,
    ) -> Result<NewQp<Self>, Errno> {
        let new_qp = QueuePair::create(ctx, init)?;
        // SAFETY: the queue pair does not outlive its context (see `CtxRef`).
        let doorbell = unsafe { new_qp.doorbell.direct() }.ok_or(Errno::IO)?;
        Ok(NewQp {
            cap: new_qp.object.cap(),
            object: new_qp.object,
            send: new_qp.send,
            recv: new_qp.recv,
            device_data: QpData {
                doorbell,
                response: UnsafeCell::new(0),
            },
        })
    }

    fn set_final_address(device_data: &mut QpData) {
        // SAFETY: a cell is not at address 0.
        let response = unsafe { NonNull::new_unchecked(device_data.response.get()) };
        // SAFETY: the buffer is part of the queue pair, as the doorbell is, and
        // only accessed through a cell.
        unsafe { device_data.doorbell.set_response(response) };
    }

    unsafe fn state_changed(qp: &Qp, state: u32) {
        if state == IBV_QPS_RESET {
            // SAFETY: as the caller says.
            unsafe { clean(qp) };
        }
    }

    /// Removes unread completions.
    unsafe fn qp_destroyed(qp: &Qp) {
        // SAFETY: as the caller says.
        unsafe { clean(qp) };
    }

    fn sizes(_qp: &Qp) -> Option<QpCap> {
        None
    }

    #[inline]
    fn ring(qp: &Qp) -> c_int {
        let result = qp.device_data.doorbell.ring();
        result.map_or_else(|error| error.errno().raw(), |()| 0)
    }

    /// As the stock provider.
    fn accepts_atomic(remote_addr: u64, list: &[Sge]) -> bool {
        let length: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
        remote_addr % 8 == 0 && length >= 8
    }

    fn device_operations(qp_type: u32) -> u64 {
        wr_ex::operations(qp_type)
    }

    fn set_device_functions(qp: &mut Qp, operations: u64, (): &()) {
        wr_ex::set_functions(&mut qp.public, operations);
    }
}
