//! The send queue of an embedded device, whose engine a post wakes. Not inline: the
//! code of a real device stays as it is without this.

use uverbs::PostError;

use super::{Engine, SendWr, mlx5};
use crate::error::Result;

/// A send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    queue: mlx5::SendQueue,
    engine: Engine,
}

impl SendQueue {
    pub fn new(queue: mlx5::SendQueue, engine: Engine) -> Self {
        Self { queue, engine }
    }

    #[inline(never)]
    pub fn begin(&mut self) {
        self.queue.begin();
    }

    /// # Safety
    /// Inline data is readable.
    #[inline(never)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.push(wr) }
    }

    /// # Safety
    /// As of the device crate's.
    #[inline(never)]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.publish() }?;
        self.engine.rung();
        Ok(())
    }

    pub fn abort(&mut self) {
        self.queue.abort();
    }

    pub fn reset(&mut self) {
        self.queue.reset();
    }

    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    pub fn max_sge(&self) -> u32 {
        self.queue.max_sge()
    }

    pub fn max_inline(&self) -> u32 {
        self.queue.max_inline()
    }
}
