//! Shared receive queues, in the process's memory.

use std::sync::Arc;

use mlx5::{Lender, Role, SharedQueue, SharedReceiveQueue, SharedWork, Work};
use ring::BiasedLock;
use uverbs::{SrqInit, SrqModify, Udata};

use super::Mlx5;
use super::cq::Cq;
use super::memory::Allocators;
use crate::abi::{ibv_cq, ibv_pd};
use crate::context::CtxRef;
use crate::cq::cq_of;
use crate::errno::Errno;
use crate::srq::{NewSrq, Srq, SrqOps};

/// Data of a shared receive queue besides the writer.
pub struct SrqDevice {
    /// The entries, with the lock.
    work: Arc<SharedWork>,
    /// For an XRC SRQ, its entry in the QP table.
    xrc: Option<Arc<Work>>,
}

impl SrqOps for Mlx5 {
    type SharedQueue = SharedQueue;
    type SrqData = SrqDevice;

    const XRC: bool = true;
    const SHARES_LOCK: bool = true;

    #[inline]
    fn lock(srq: &Srq<Self>) -> &BiasedLock {
        srq.device_data.work.lock()
    }

    unsafe fn make(
        ctx: &CtxRef,
        init: &SrqInit,
        cq: *mut ibv_cq,
        domain: *mut ibv_pd,
    ) -> Result<NewSrq<Self>, Errno> {
        // SAFETY: live, as the caller says.
        let lender = unsafe { Allocators::of(domain) };
        let lender = lender.as_ref().map(|lender| lender as &dyn Lender);
        let made = SharedReceiveQueue::create_with(ctx, ctx.mlx5()?, init, lender)?;
        if let Some(work) = &made.xrc {
            // SAFETY: live, as the caller says, since an XRC SRQ names it. It has
            // no completions yet.
            let cq: &Cq = unsafe { cq_of(cq) };
            cq.attach(work, Role::RECEIVE)?;
        }
        Ok(NewSrq {
            max_wr: made.recv.capacity(),
            max_sge: made.recv.max_sge(),
            device_data: SrqDevice {
                work: Arc::clone(made.recv.work()),
                xrc: made.xrc,
            },
            object: made.object,
            recv: made.recv,
            srq_num: made.srq_num,
        })
    }

    /// Discards unread completions.
    unsafe fn srq_destroyed(srq: &Srq<Self>) {
        if let Some(work) = &srq.device_data.xrc {
            // SAFETY: live, as the caller says.
            let cq: &Cq = unsafe { cq_of(srq.public.cq) };
            cq.detach(work);
        }
    }

    /// The device cannot change the size: EOPNOTSUPP.
    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno> {
        if change.max_wr.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(srq.object.modify(change, Udata::none())?)
    }
}
