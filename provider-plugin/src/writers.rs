//! What posting needs of a device's queues.

use core::ffi::c_int;

use uverbs::{Data, Destination, Opcode, SendFlags, SendWr, Sge};

/// A send queue. One caller at a time; errors are errnos. A queue is ready for
/// a batch when it was created, published or aborted.
pub trait SendQueueOps: 'static {
    /// How a datagram is addressed.
    type Address: 'static;

    /// The beginning of a work request that several calls put together.
    type Opened: Copy + Default;

    /// Adds a work request to the batch.
    ///
    /// # Safety
    /// The memory of inline data is readable.
    unsafe fn push(&mut self, wr: &SendWr<'_, Self::Address>) -> Result<(), c_int>;

    /// Fast path of [`SendQueueOps::push`], without calls, for `data` of one piece in the
    /// place of `wr.data`. False, and nothing was done, if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueueOps::push`].
    unsafe fn push_fast(&mut self, wr: &SendWr<'_, Self::Address>, data: Data<'_>) -> bool;

    /// The beginning of the next work request.
    fn open(&self, opcode: Opcode, flags: SendFlags, imm_or_key: u32) -> Self::Opened;

    /// As [`SendQueueOps::push_fast`], of a work request without a destination, with its
    /// beginning.
    ///
    /// # Safety
    /// As for [`SendQueueOps::push`].
    unsafe fn push_opened(
        &mut self,
        opened: Self::Opened,
        wr: &SendWr<'_, Self::Address>,
        data: Data<'_>,
    ) -> bool;

    /// Writes the destination of the next work request, which is then
    /// [`Destination::Placed`]. False, and nothing was done, if it does not apply.
    fn place_address(&mut self, _destination: Destination<'_, Self::Address>) -> bool {
        false
    }

    /// As [`SendQueueOps::push_opened`], of one element, after
    /// [`SendQueueOps::place_address`].
    fn push_addressed(
        &mut self,
        _opened: Self::Opened,
        _wr: &SendWr<'_, Self::Address>,
        _sge: &Sge,
    ) -> bool {
        false
    }

    /// Hands the batch to the device. Returns whether there was anything.
    ///
    /// # Safety
    /// The memory that the work requests name is used as their operations
    /// demand until they have completed.
    #[inline]
    unsafe fn publish(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.publish_fast() || self.publish_slow() }
    }

    /// Fast path of [`SendQueueOps::publish`], without calls. False, and nothing was
    /// published, if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueueOps::publish`].
    unsafe fn publish_fast(&mut self) -> bool;

    /// [`SendQueueOps::publish`] of what [`SendQueueOps::publish_fast`] has not published.
    ///
    /// # Safety
    /// As for [`SendQueueOps::publish`].
    unsafe fn publish_slow(&mut self) -> bool;

    /// Discards the batch.
    fn abort(&mut self);

    /// Scatter/gather elements that a work request holds at most.
    fn max_sge(&self) -> u32;
}

/// A receive queue, of a queue pair or shared. One caller at a time; errors are
/// errnos.
pub trait RecvQueueOps: 'static {
    /// Adds a receive to the batch.
    ///
    /// # Safety
    /// The caller has the queue's lock ([`RecvQueueOwner::lock`](crate::post::RecvQueueOwner))
    /// or the application's promise in its place, until the batch is published.
    unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int>;

    /// Fast path of [`RecvQueueOps::push`], without calls: one element, and there is
    /// room. False, and nothing was done, if it does not apply.
    ///
    /// # Safety
    /// As for [`RecvQueueOps::push`].
    unsafe fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool;

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// As for [`RecvQueueOps::push`]. The memory of every list is left alone until
    /// its receive has completed.
    unsafe fn publish(&mut self);

    /// Scatter/gather elements that a receive holds at most.
    fn max_sge(&self) -> u32;
}
