//! Receive queues' writers: rdma_rxe's, for all devices.

use super::Sge;
use super::send::{full, refused};
use super::staged::Receiver;
use crate::error::{Error, Result};

/// A receive queue's writer.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    pub(super) queue: ::rxe::RecvQueue,
    /// What carries receives over to the device, if the driver does not look
    /// for them.
    pub(super) receiver: Option<Box<Receiver>>,
}

impl RecvQueue {
    /// Starts a batch; one that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.queue.begin().keep();
    }

    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        let pushed = self.queue.push(wr_id, list);
        pushed.map_err(|error| not_received(error, &self.queue, list))
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays, and is left alone, until its receive
    /// has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        // SAFETY: passed on.
        unsafe { self.queue.publish() };
        if let Some(receiver) = &mut self.receiver
            && receiver.carry()
        {
            // The next entries are those that are near already.
            self.queue.rewind();
        }
    }

    /// The queue pair was reset, with nothing in flight.
    pub fn reset(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            receiver.reset();
        }
    }

    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    #[inline(always)]
    pub fn max_sge(&self) -> u32 {
        self.queue.max_sge()
    }
}

#[cold]
fn not_received(error: ::rxe::PostError, queue: &::rxe::RecvQueue, list: &[Sge]) -> Error {
    match error {
        ::rxe::PostError::Full => full(queue.capacity()),
        error => refused(error, list, queue.max_sge()),
    }
}
