//! Receive queue writer of the raw layer.

use crate::device;
use crate::qp::RecvHalf;
use crate::raw::Sge;
use crate::{Error, Result};

/// A receive queue, borrowed from its half.
pub struct RecvQueue<'h> {
    queue: &'h mut device::RecvQueue,
}

impl RecvHalf {
    /// Returns the queue without ownership tracking.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the queue pair uses a shared receive queue.
    #[inline]
    pub fn raw(&mut self) -> Result<RecvQueue<'_>> {
        let queue = self.raw_queue().ok_or(Error::Invalid {
            what: "the queue pair has a shared receive queue",
        })?;
        Ok(RecvQueue { queue })
    }
}

impl RecvQueue<'_> {
    /// Adds a receive into the memory of `list` to the batch.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::Limit`]; the batch is unchanged.
    #[inline]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        self.queue.push(wr_id, list)
    }

    /// Posts the batch.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is neither read nor
    /// written, until its receive has completed. The completions are read by
    /// [`poll_raw`](crate::CompletionQueue::poll_raw) as long as operations of
    /// the safe layer are in flight on the same completion queue.
    #[inline]
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.publish() };
    }
}
