//! The queues of `ringverbs_rxe`, for posting.

use core::ffi::c_int;

use rxe::{Data, Opcode, PostError, RecvQueue, SendFlags, SendQueue, SendWr, Sge};

use crate::writers::{RecvQueueOps, SendQueueOps};

impl SendQueueOps for SendQueue {
    type Address = u32;
    type OpenWqe = ();

    #[inline]
    unsafe fn push(&mut self, wr: &SendWr<'_, u32>) -> Result<(), c_int> {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push(self, wr) }.map_err(PostError::errno)
    }

    // Without `always` a work request is assembled in memory: 31 instructions per
    // send of a batch.
    #[inline(always)]
    unsafe fn push_fast(&mut self, wr: &SendWr<'_, u32>, data: Data<'_>) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push_fast(self, wr, data) }
    }

    fn open(&self, _opcode: Opcode, _flags: SendFlags, _imm_or_key: u32) {}

    // `always` as of `push_fast`.
    #[inline(always)]
    unsafe fn push_open_wqe(&mut self, (): (), wr: &SendWr<'_, u32>, data: Data<'_>) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::push_fast(self, wr, data) }
    }

    #[inline]
    unsafe fn publish_fast(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { SendQueue::publish(self) }
    }

    unsafe fn publish_slow(&mut self) -> bool {
        // `publish_fast` publishes every batch that is not empty.
        false
    }

    #[inline]
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
