//! Shared receive queues: the kernel allocates and moves them.

use rxe::{RecvQueue, SharedReceiveQueue};
use uverbs::{SrqInit, SrqModify};

use super::Rxe;
use crate::abi::{ibv_cq, ibv_pd};
use crate::access::locked;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::srq::{NewSrq, Srq, SrqOps};

impl SrqOps for Rxe {
    type SharedQueue = RecvQueue;
    type SrqData = ();

    unsafe fn make(
        ctx: &CtxRef,
        init: &SrqInit,
        _cq: *mut ibv_cq,
        _domain: *mut ibv_pd,
    ) -> Result<NewSrq<Self>, Errno> {
        let new_srq = SharedReceiveQueue::create(ctx, init)?;
        Ok(NewSrq {
            max_wr: new_srq.object.max_wr(),
            max_sge: new_srq.object.max_sge(),
            object: new_srq.object,
            recv: new_srq.recv,
            srq_num: new_srq.srq_num,
            device_data: (),
        })
    }

    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno> {
        locked(srq.single, &srq.lock, || {
            // SAFETY: in the critical section.
            let recv = unsafe { &mut *srq.recv.get() };
            Ok(SharedReceiveQueue::modify(&srq.object, recv, change)?)
        })
    }
}
