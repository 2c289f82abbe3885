//! The operations of a device's send and receive queues that posting uses.

use core::ffi::c_int;

use uverbs::{Data, Destination, Opcode, SendFlags, SendWr, Sge};

/// A send queue. One caller at a time; errors are errnos. A batch begins when the queue
/// was created, published or aborted.
pub trait SendQueueOps: 'static {
    /// The address of a datagram.
    type Address: 'static;

    /// The format and control segment of a work request that later calls complete.
    type OpenWqe: Copy + Default;

    /// Adds a work request to the batch.
    ///
    /// # Safety
    /// The memory of inline data is readable.
    unsafe fn push(&mut self, wr: &SendWr<'_, Self::Address>) -> Result<(), c_int>;

    /// Fast path of [`SendQueueOps::push`], without calls, for one piece of data, `data`
    /// instead of `wr.data`. Returns false and does nothing if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueueOps::push`].
    unsafe fn push_fast(&mut self, wr: &SendWr<'_, Self::Address>, data: Data<'_>) -> bool;

    /// Opens the next work request.
    fn open(&self, opcode: Opcode, flags: SendFlags, imm_or_key: u32) -> Self::OpenWqe;

    /// [`SendQueueOps::push_fast`] of an open work request without a destination.
    ///
    /// # Safety
    /// As for [`SendQueueOps::push`].
    unsafe fn push_open_wqe(
        &mut self,
        open_wqe: Self::OpenWqe,
        wr: &SendWr<'_, Self::Address>,
        data: Data<'_>,
    ) -> bool;

    /// Writes the destination of the next work request, which is then
    /// [`Destination::InWqe`]. Returns false and does nothing if it does not apply.
    fn write_address(&mut self, _destination: Destination<'_, Self::Address>) -> bool {
        false
    }

    /// [`SendQueueOps::push_open_wqe`] of one element, after
    /// [`SendQueueOps::write_address`].
    fn push_addressed(
        &mut self,
        _open_wqe: Self::OpenWqe,
        _wr: &SendWr<'_, Self::Address>,
        _sge: &Sge,
    ) -> bool {
        false
    }

    /// Publishes the batch to the device. Returns whether it had work requests.
    ///
    /// # Safety
    /// Until the work requests have completed, their memory is used only as their operations
    /// permit.
    #[inline]
    unsafe fn publish(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.publish_fast() || self.publish_slow() }
    }

    /// Fast path of [`SendQueueOps::publish`], without calls. Returns false and publishes
    /// nothing if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueueOps::publish`].
    unsafe fn publish_fast(&mut self) -> bool;

    /// Slow path of [`SendQueueOps::publish`], after [`SendQueueOps::publish_fast`] returned
    /// false.
    ///
    /// # Safety
    /// As for [`SendQueueOps::publish`].
    unsafe fn publish_slow(&mut self) -> bool;

    /// Discards the batch.
    fn abort(&mut self);

    /// Maximum scatter/gather elements of a work request.
    fn max_sge(&self) -> u32;
}

/// A receive queue, of a queue pair or shared. One caller at a time; errors are
/// errnos.
pub trait RecvQueueOps: 'static {
    /// Adds a receive to the batch.
    ///
    /// # Safety
    /// Until the batch is published, the caller holds the queue's lock
    /// ([`RecvQueueOwner::lock`](crate::post::RecvQueueOwner)), or the application promised
    /// one caller at a time.
    unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int>;

    /// Fast path of [`RecvQueueOps::push`], without calls: one element, and there is room.
    /// Returns false and does nothing if it does not apply.
    ///
    /// # Safety
    /// As for [`RecvQueueOps::push`].
    unsafe fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool;

    /// Publishes the batch to the device.
    ///
    /// # Safety
    /// As for [`RecvQueueOps::push`]. The process does not access the memory of a receive
    /// until it has completed.
    unsafe fn publish(&mut self);

    /// Maximum scatter/gather elements of a receive.
    fn max_sge(&self) -> u32;
}
