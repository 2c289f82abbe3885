//! Receive queues, of a queue pair or shared.

use ring::{Producer, Ring};

use crate::PostError;
use crate::abi::{RecvWqe, Sge};
use crate::send::{MAX_MESSAGE, copy_sges};

/// A mapped receive queue.
///
/// A batch: [`RecvQueue::begin`], [`RecvQueue::push`] for each work request,
/// [`RecvQueue::publish`] once. The driver needs no doorbell.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates, locks or
/// calls the system.
#[derive(Debug)]
pub struct RecvQueue {
    producer: Producer,
    ring: Ring,
    next: u32,
    max_sge: u32,
}

impl RecvQueue {
    /// A writer over a mapped queue whose entries hold `max_sge` elements,
    /// cut to what the entry size allows.
    pub fn new(ring: Ring, max_sge: u32) -> Self {
        let room = (ring.stride() - size_of::<RecvWqe>()) / size_of::<Sge>();
        let producer = Producer::new(ring.indices());
        Self {
            next: producer.tail(),
            producer,
            max_sge: max_sge.min(room as u32),
            ring,
        }
    }

    /// Bytes that an entry must have at least.
    pub const ENTRY_SIZE: usize = size_of::<RecvWqe>();

    /// Work requests that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Scatter/gather elements that an entry holds at most.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Takes no more receives: the driver has moved the queue out of reach.
    pub(crate) fn seal(&mut self) {
        self.ring.seal();
        self.producer = Producer::new(self.ring.indices());
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.next = self.producer.tail();
    }

    /// Adds a receive into the memory of `list` to the batch.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; the batch is as it was.
    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        if !self.producer.has_room(self.next) {
            return Err(PostError::Full);
        }
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let entry = self.ring.slot(self.next).cast::<RecvWqe>().as_ptr();
        // SAFETY: the slot lies in the mapping and has room for the fixed part
        // and `max_sge` elements; the device does not read it before it is
        // published.
        unsafe {
            let total = copy_sges(entry.add(1).cast(), list);
            if total > MAX_MESSAGE {
                return Err(PostError::MessageTooLong);
            }
            (*entry).wr_id = wr_id;
            (*entry).dma.length = total as u32;
            (*entry).dma.resid = total as u32;
            (*entry).dma.cur_sge = 0;
            (*entry).dma.num_sge = list.len() as u32;
            (*entry).dma.sge_offset = 0;
        }
        self.next = self.ring.indices().next(self.next);
        Ok(())
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is neither read nor
    /// written by the process, until its receive has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        self.producer.publish(self.next);
    }
}
