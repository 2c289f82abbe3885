//! Receive queues, of a queue pair or shared.

use std::ptr::NonNull;

use ring::{Producer, Ring};

use crate::abi::{DmaInfo, RecvWqe};
use crate::send::{MAX_MESSAGE, copy_sges};
use crate::{PostError, Sge};

/// A mapped receive queue.
///
/// [`RecvQueue::push`] encodes receives into entries; [`RecvQueue::publish`]
/// publishes all of them at once. There is no doorbell.
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
    /// Creates the writer of a mapped queue whose entries hold `max_sge` elements, limited by
    /// the entry size. A ring of entries smaller than [`RecvQueue::ENTRY_SIZE`] has no
    /// capacity.
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

    /// Minimum bytes of an entry: the fixed part and one element.
    pub const ENTRY_SIZE: usize = size_of::<RecvWqe>() + size_of::<Sge>();

    /// Bytes of an entry for `max_sge` elements.
    pub const fn entry_size(max_sge: u32) -> usize {
        let count = if max_sge == 0 { 1 } else { max_sge };
        size_of::<RecvWqe>() + count as usize * size_of::<Sge>()
    }

    /// Maximum number of outstanding receives.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Maximum number of scatter/gather elements of a receive.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Makes the queue full: the driver has moved it, and it could not be mapped.
    pub(crate) fn seal(&mut self) {
        self.ring.seal();
        self.producer = Producer::new(self.ring.indices());
        self.abort();
    }

    /// Starts a batch, and discards one that was not published.
    #[inline]
    pub fn begin(&mut self) {
        self.abort();
    }

    /// Adds a receive into the memory of `list` to the batch.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; the batch is unchanged.
    #[inline]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        if let [sge] = list {
            if self.push_fast(wr_id, sge) {
                return Ok(());
            }
        }
        self.push_slow(wr_id, list)
    }

    /// Fast path of [`RecvQueue::push`]: one element, and there is room. Returns false and
    /// does nothing if it does not apply.
    #[inline]
    pub fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        if sge.length > MAX_MESSAGE {
            return false;
        }
        let Some(after) = self.producer.next_if_room(self.next) else {
            return false;
        };
        let entry = self.entry();
        // SAFETY: the device does not own the entry, which has room for an element.
        unsafe {
            fill(entry, wr_id, sge.length, 1);
            entry.add(1).cast::<Sge>().write(*sge);
        }
        self.next = after;
        true
    }

    /// Slow path of [`RecvQueue::push`]: any receive.
    #[inline(never)]
    fn push_slow(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        let after = self.producer.after(self.next).ok_or(PostError::Full)?;
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let entry = self.entry();
        // SAFETY: the device does not own the entry, which has room for `max_sge` elements.
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
        // SAFETY: `next` is always an index of the ring.
        unsafe { self.ring.slots().slot_inside(self.next) }.cast()
    }

    /// Discards the batch.
    #[inline]
    pub fn abort(&mut self) {
        self.next = self.producer.tail();
    }

    /// Publishes the batch to the device.
    ///
    /// # Safety
    /// Until a receive has completed, its memory stays registered and is neither read nor
    /// written by the process.
    #[inline]
    pub unsafe fn publish(&mut self) {
        self.producer.publish(self.next);
    }
}

/// Writes the fixed part of an entry.
///
/// # Safety
/// The entry is valid, and the device does not own it.
#[inline]
unsafe fn fill(entry: NonNull<RecvWqe>, wr_id: u64, length: u32, num_sge: u32) {
    let entry = entry.as_ptr();
    // SAFETY: as the caller says.
    unsafe {
        (*entry).wr_id = wr_id;
        DmaInfo::begin(&raw mut (*entry).dma, length, num_sge);
    }
}
