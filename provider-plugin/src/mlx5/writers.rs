//! The queues of `ringverbs_mlx5`, for posting.

use core::ffi::c_int;

use mlx5::{Address, OpenWqe, PostError, RecvQueue, SendQueue, SendWr, SharedQueue};
use uverbs::{Data, Destination, Opcode, SendFlags, Sge};

use crate::writers::{RecvQueueOps, SendQueueOps};

impl SendQueueOps for SendQueue {
    type Address = Address;
    type OpenWqe = OpenWqe;

    #[inline]
    unsafe fn push(&mut self, wr: &SendWr<'_, Address>) -> Result<(), c_int> {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push(self, wr) }.map_err(PostError::errno)
    }

    // Without `always` a work request is assembled in memory: 36 instructions per
    // send of a batch.
    #[inline(always)]
    unsafe fn push_fast(&mut self, wr: &SendWr<'_, Address>, data: Data<'_>) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push_fast(self, wr, data) }
    }

    #[inline]
    fn open(&self, opcode: Opcode, flags: SendFlags, imm_or_key: u32) -> OpenWqe {
        SendQueue::open(self, opcode, flags, imm_or_key)
    }

    // `always` as of `SendQueue::push_open_wqe`.
    #[inline(always)]
    unsafe fn push_open_wqe(
        &mut self,
        open_wqe: OpenWqe,
        wr: &SendWr<'_, Address>,
        data: Data<'_>,
    ) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push_open_wqe(self, open_wqe, wr, data) }
    }

    #[inline]
    fn write_address(&mut self, destination: Destination<'_, Address>) -> bool {
        SendQueue::write_address(self, destination)
    }

    #[inline]
    fn push_addressed(&mut self, open_wqe: OpenWqe, wr: &SendWr<'_, Address>, sge: &Sge) -> bool {
        SendQueue::push_addressed(self, open_wqe, wr, sge)
    }

    #[inline]
    unsafe fn publish_fast(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::publish_fast(self) }
    }

    #[inline]
    unsafe fn publish_slow(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::publish_slow(self) }
    }

    fn abort(&mut self) {
        SendQueue::abort(self);
    }

    #[inline]
    fn max_sge(&self) -> u32 {
        SendQueue::max_sge(self)
    }
}

impl RecvQueueOps for RecvQueue {
    #[inline]
    unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int> {
        RecvQueue::push(self, wr_id, list).map_err(PostError::errno)
    }

    #[inline]
    unsafe fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        RecvQueue::push_fast(self, wr_id, sge)
    }

    #[inline]
    unsafe fn publish(&mut self) {
        // SAFETY: as the caller says.
        unsafe { RecvQueue::publish(self) };
    }

    #[inline]
    fn max_sge(&self) -> u32 {
        RecvQueue::max_sge(self)
    }
}

impl RecvQueueOps for SharedQueue {
    #[inline]
    unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int> {
        // SAFETY: the caller has the lock.
        unsafe { SharedQueue::push(self, wr_id, list) }.map_err(PostError::errno)
    }

    #[inline]
    unsafe fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        // SAFETY: the caller has the lock.
        unsafe { SharedQueue::push_fast(self, wr_id, sge) }
    }

    #[inline]
    unsafe fn publish(&mut self) {
        // SAFETY: the caller has the lock; the rest is as the caller says.
        unsafe { SharedQueue::publish(self) };
    }

    #[inline]
    fn max_sge(&self) -> u32 {
        SharedQueue::max_sge(self)
    }
}
