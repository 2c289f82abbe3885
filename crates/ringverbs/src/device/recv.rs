//! Receive queues.

use uverbs::{Srq, SrqModify};

use super::send::refused;
use super::{Sge, mlx5, rxe};
use crate::context::Ctx;
use crate::error::Result;

/// A queue pair's receive queue.
#[derive(Debug)]
pub(crate) enum RecvQueue {
    Rxe(rxe::RecvQueue),
    Mlx5(mlx5::RecvQueue),
}

impl RecvQueue {
    /// Starts a batch and discards an unpublished one.
    #[inline]
    pub fn begin(&mut self) {
        for_device!(self, queue => queue.begin());
    }

    /// Adds a receive to the batch.
    ///
    /// # Errors
    /// The device's refusal; the batch is unchanged.
    #[inline]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        let pushed = for_device!(self, queue => queue.push(wr_id, list));
        pushed.map_err(|error| refused(error, self.capacity(), list, self.max_sge()))
    }

    /// Posts the batch.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is not accessed, until its receive has
    /// completed.
    #[inline]
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { for_device!(self, queue => queue.publish()) }
    }

    /// Called after the queue pair was reset with nothing in flight.
    pub fn reset(&mut self) {
        for_device!(self, queue => queue.reset());
    }

    /// Called when a raw packet queue pair becomes ready to receive.
    pub fn announce(&mut self) {
        if let Self::Mlx5(queue) = self {
            queue.announce();
        }
    }

    pub fn capacity(&self) -> u32 {
        for_device!(self, queue => queue.capacity())
    }

    pub fn max_sge(&self) -> u32 {
        for_device!(self, queue => queue.max_sge())
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) enum SharedRecvQueue {
    Rxe(rxe::RecvQueue),
    Mlx5(mlx5::SharedRecvQueue),
}

impl SharedRecvQueue {
    /// Adds a receive to the batch.
    ///
    /// # Errors
    /// The device's refusal; the batch is unchanged.
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        let pushed = for_device!(self, queue => {
            queue.begin();
            queue.push(wr_id, list)
        });
        pushed.map_err(|error| refused(error, self.capacity(), list, self.max_sge()))
    }

    /// Posts the batch.
    ///
    /// # Safety
    /// As [`RecvQueue::publish`].
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { for_device!(self, queue => queue.publish()) }
    }

    pub fn capacity(&self) -> u32 {
        for_device!(self, queue => queue.capacity())
    }

    pub fn max_sge(&self) -> u32 {
        for_device!(self, queue => queue.max_sge())
    }

    /// Modifies the kernel's object, and with it the queue.
    pub fn modify(&mut self, object: &Srq<Ctx>, change: &SrqModify) -> Result<()> {
        for_device!(self, queue => queue.modify(object, change))
    }
}
