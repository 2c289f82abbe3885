//! Shared receive queues, in the process's memory.

use mlx5::{SharedQueue, SharedReceiveQueue};
use uverbs::{SrqInit, SrqModify, Udata};

use super::Mlx5;
use crate::context::CtxRef;
use crate::errno::Errno;
use crate::srq::{Device, Made, Srq};

impl Device for Mlx5 {
    type SharedQueue = SharedQueue;

    fn make(ctx: &CtxRef, init: &SrqInit) -> Result<Made<Self>, Errno> {
        let made = SharedReceiveQueue::create(ctx, ctx.mlx5()?, init)?;
        Ok(Made {
            max_wr: made.recv.capacity(),
            max_sge: made.recv.max_sge(),
            object: made.object,
            recv: made.recv,
            srq_num: made.srq_num,
        })
    }

    /// The device cannot change the size: EOPNOTSUPP.
    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno> {
        if change.max_wr.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(srq.object.modify(change, Udata::none())?)
    }
}
