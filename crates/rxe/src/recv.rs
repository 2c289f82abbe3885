//! Receive queues, of a queue pair or shared.

use std::ptr::NonNull;

use ring::{Producer, Ring};

use crate::abi::{DmaInfo, RecvWqe};
use crate::send::{MAX_MESSAGE, copy_sges};
use crate::{PostError, Sge};

/// A mapped receive queue.
///
/// [`RecvQueue::push`] encodes receives into entries; [`RecvQueue::publish`]
/// hands all of them to the driver at once. The driver needs no doorbell.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates, locks or
/// calls the system.
#[derive(Debug)]
pub struct RecvQueue {
    producer: Producer,
    ring: Ring,
    next: usize,
    max_sge: u32,
}

impl RecvQueue {
    /// A writer over a mapped queue whose entries hold `max_sge` elements,
    /// cut to what the entry size allows. Over a ring of entries smaller than
    /// [`RecvQueue::ENTRY_SIZE`] it holds nothing.
    pub fn new(mut ring: Ring, max_sge: u32) -> Self {
        if ring.stride() < Self::ENTRY_SIZE {
            ring.seal();
        }
        let room = ring.stride().saturating_sub(size_of::<RecvWqe>()) / size_of::<Sge>();
        let producer = Producer::new(ring.indices());
        Self {
            next: producer.tail(),
            producer,
            max_sge: max_sge.min(room as u32),
            ring,
        }
    }

    /// Bytes that an entry must have at least: the fixed part and one element.
    pub const ENTRY_SIZE: usize = size_of::<RecvWqe>() + size_of::<Sge>();

    /// Bytes of an entry with so many elements at most.
    pub const fn entry_size(max_sge: u32) -> usize {
        let count = if max_sge == 0 { 1 } else { max_sge };
        size_of::<RecvWqe>() + count as usize * size_of::<Sge>()
    }

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
        self.abort();
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) -> RecvWriter<'_> {
        RecvWriter {
            next: self.producer.tail(),
            queue: self,
        }
    }

    /// Adds a receive into the memory of `list` to the batch.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; the batch is as it was.
    #[inline]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        // Fast path: one element.
        if let [sge] = list
            && sge.length <= MAX_MESSAGE
            && let Some(after) = self.producer.after_if_room(self.next)
        {
            let entry = self.entry();
            // SAFETY: an entry of the ring that is not the device's, with room for
            // an element.
            unsafe {
                fill(entry, wr_id, sge.length, 1);
                entry.add(1).cast::<Sge>().write(*sge);
            }
            self.next = after;
            return Ok(());
        }
        self.push_any(wr_id, list)
    }

    /// [`RecvQueue::push`] of any receive.
    #[inline(never)]
    fn push_any(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        let after = self.producer.after(self.next).ok_or(PostError::Full)?;
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let entry = self.entry();
        // SAFETY: an entry of the ring that is not the device's, with room for
        // `max_sge` elements.
        unsafe {
            let bytes = copy_sges(entry.add(1).cast().as_ptr(), list);
            if bytes > u64::from(MAX_MESSAGE) {
                return Err(PostError::MessageTooLong);
            }
            fill(entry, wr_id, bytes as u32, list.len() as u32);
        }
        self.next = after;
        Ok(())
    }

    /// The next entry.
    #[inline]
    fn entry(&self) -> NonNull<RecvWqe> {
        // SAFETY: `next` only ever is from the indices of the ring.
        unsafe { self.ring.slots().slot_inside(self.next) }.cast()
    }

    /// Discards the batch.
    #[inline]
    pub fn abort(&mut self) {
        self.next = self.producer.tail();
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

/// Writes the fixed part of an entry.
///
/// # Safety
/// The entry is valid, and not the device's.
#[inline(always)]
unsafe fn fill(entry: NonNull<RecvWqe>, wr_id: u64, length: u32, num_sge: u32) {
    let entry = entry.as_ptr();
    // SAFETY: as the caller says.
    unsafe {
        (*entry).wr_id = wr_id;
        DmaInfo::begin(&raw mut (*entry).dma, length, num_sge);
    }
}

/// The quick way to add the commonest receives to a batch. Where the batch
/// ends is kept here until [`RecvWriter::keep`].
pub struct RecvWriter<'q> {
    next: usize,
    queue: &'q mut RecvQueue,
}

impl<'q> RecvWriter<'q> {
    /// Adds a receive into one element to the batch. False, and nothing is
    /// done, if that takes a closer look: go on with [`RecvQueue::push`],
    /// which says what is wrong, if anything is.
    #[inline(always)]
    pub fn push_one(&mut self, wr_id: u64, sge: &Sge) -> bool {
        let length = sge.length;
        let Some(next) = self.queue.producer.after_if_room(self.next) else {
            return false;
        };
        // The longest message that there is, too, takes the closer look.
        if length >= MAX_MESSAGE {
            return false;
        }
        // SAFETY: `next` is from the indices of the same ring; every entry has
        // room for an element (`RecvQueue::ENTRY_SIZE`), and is not the
        // device's before it is published.
        unsafe {
            let entry = self
                .queue
                .ring
                .slots()
                .slot_inside(self.next)
                .cast::<RecvWqe>();
            fill(entry, wr_id, length, 1);
            // Field by field, as it may have been written just before: a read of
            // several of them at once would wait for that.
            let to = entry.add(1).cast::<Sge>().as_ptr();
            (&raw mut (*to).addr).write(sge.addr);
            (&raw mut (*to).length).write(length);
            (&raw mut (*to).lkey).write(sge.lkey);
        }
        self.next = next;
        true
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// As for [`RecvQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish(self) {
        self.queue.producer.publish(self.next);
    }

    /// The same, and goes on with the next batch.
    ///
    /// # Safety
    /// As for [`RecvQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish_any(&mut self) {
        self.queue.producer.publish(self.next);
    }

    /// Does something with the queue, and goes on where that ends.
    #[inline(always)]
    pub fn with_queue<R>(&mut self, work: impl FnOnce(&mut RecvQueue) -> R) -> R {
        self.queue.next = self.next;
        let result = work(self.queue);
        self.next = self.queue.next;
        result
    }

    /// Ends the quick way; the batch is the queue's, to go on with or to
    /// publish.
    #[inline(always)]
    pub fn keep(self) -> &'q mut RecvQueue {
        self.queue.next = self.next;
        self.queue
    }
}
