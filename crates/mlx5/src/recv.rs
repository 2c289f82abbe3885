//! Receive queues of queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, OutstandingSlots, cold_path, write_pair};
use uverbs::Sge;

use crate::abi::{DataSegment, INVALID_LKEY};
use crate::send::MAX_SEGMENT;
use crate::{PostError, QpQueues};

/// A receive queue.
///
/// A batch is one [`RecvQueue::push`] per receive, then one [`RecvQueue::publish`]
/// or [`RecvQueue::abort`].
///
/// Thread rule: one caller at a time (`&mut`). No method allocates, locks or
/// makes a system call.
#[derive(Debug)]
// The counters are first: in the plugin they share a cache line with the lock.
#[repr(C)]
pub struct RecvQueue {
    /// Number of published receives.
    published: u32,
    /// Number of receives pushed so far, published or not.
    next: u32,
    /// Value of `next` at which the number of completed receives is read again.
    room_until: u32,
    /// Maximum number of outstanding receives.
    capacity: u32,
    max_sge: u32,
    /// Maximum bytes of an element on the fast path; 0 disables the fast path.
    longest: u32,
    /// Address of the entries, their number less one, and the binary logarithm of
    /// their size in bytes.
    entries: NonNull<u8>,
    mask: u32,
    shift: u32,
    record: DoorbellRecord,
    /// The slots of `queues.receives`, one for each entry.
    outstanding: OutstandingSlots,
    queues: Arc<QpQueues>,
}

// SAFETY: the memory belongs to `queues`, and is written under `&mut`.
unsafe impl Send for RecvQueue {}
// SAFETY: public methods that take `&self` only read plain fields.
unsafe impl Sync for RecvQueue {}

impl RecvQueue {
    /// Creates the writer of a queue pair's receive queue.
    pub(crate) fn new(queues: Arc<QpQueues>) -> Self {
        Self {
            published: 0,
            next: 0,
            room_until: queues.max_recv_wr(),
            capacity: queues.max_recv_wr(),
            max_sge: queues.recv.max_sge,
            longest: match queues.recv.max_sge {
                0 => 0,
                _ if queues.out_of_order => 0,
                _ => MAX_SEGMENT - 1,
            },
            entries: queues.memory.entries.first(),
            mask: queues.recv.entries.saturating_sub(1),
            shift: queues.recv.shift,
            record: record(&queues, false),
            outstanding: queues.receives.slots(),
            queues,
        }
    }

    /// Maximum number of outstanding receives.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Maximum number of scatter/gather elements of a receive.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Called after the queue pair was reset and its completions were removed
    /// ([`crate::CqeRing::clean`]).
    pub fn reset(&mut self) {
        (self.published, self.next) = (0, 0);
        self.room_until = self.capacity();
        self.queues.receives.reset();
        self.queues.memory.records.record(0).publish(0);
        self.record = record(&self.queues, false);
    }

    /// Announces receives to the device, also those posted before. Called when a raw packet
    /// queue pair becomes ready to receive; until then receives are only queued, since the
    /// device's receive queue accepts packets as soon as it is initialised.
    pub fn announce(&mut self) {
        self.record = record(&self.queues, true);
        self.record.publish(self.published & 0xffff);
    }

    /// Starts a batch, and discards one that was neither published nor aborted.
    #[inline]
    pub fn begin(&mut self) {
        if self.next != self.published {
            self.abort();
        }
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

    /// Fast path of [`RecvQueue::push`]: one element, and there is room. Returns false
    /// and pushes nothing if it does not apply.
    #[inline]
    pub fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        let at = self.next;
        if sge.length.wrapping_sub(1) >= self.longest || !self.has_room() {
            return false;
        }
        let to = self.entry(at);
        // SAFETY: there is room for an entry of `max_sge` segments. There is at least
        // one segment: `longest` is 0 otherwise.
        unsafe { write_one(to, sge, self.max_sge) };
        self.next = self.accept(at, wr_id);
        true
    }

    /// Slow path of [`RecvQueue::push`]: any receive.
    #[inline(never)]
    pub(crate) fn push_slow(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        if !self.has_room() {
            return Err(PostError::Full);
        }
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        // SAFETY: an entry of `max_sge` segments; there is room.
        unsafe { write_list(self.entry(self.next), list, self.max_sge)? };
        if self.queues.out_of_order {
            let (slot, wr_count) = (self.slot(self.next), self.next.wrapping_add(1));
            self.queues
                .receives
                .post_marked(slot as u32, wr_id, wr_count);
            self.next = wr_count;
            return Ok(());
        }
        self.next = self.accept(self.next, wr_id);
        Ok(())
    }

    /// Discards the batch: no completion can match its receives.
    #[cold]
    pub fn abort(&mut self) {
        for receive in 0..self.next.wrapping_sub(self.published) {
            let slot = self.slot(self.published.wrapping_add(receive));
            self.queues.receives.note(slot as u32, 0, self.published);
        }
        self.next = self.published;
    }

    /// Whether there is room for one more receive.
    #[inline]
    fn has_room(&mut self) -> bool {
        if self.next != self.room_until {
            return true;
        }
        // Read the number of completed receives again. Inline, because a call would
        // make the callers save registers.
        cold_path();
        let completed = self.queues.receives.completed();
        self.room_until = completed.wrapping_add(self.capacity);
        self.next != self.room_until
    }

    #[inline]
    fn slot(&self, next: u32) -> usize {
        (next & self.mask) as usize
    }

    /// The entry of the receive `next`.
    #[inline]
    fn entry(&self, next: u32) -> NonNull<DataSegment> {
        // SAFETY: the mask keeps it inside the queue, which has entries: callers have
        // checked for room.
        let entry = unsafe { self.entries.add(self.slot(next) << self.shift) };
        entry.cast()
    }

    /// Adds the receive in entry `next` to the batch. Returns the following entry.
    #[inline]
    fn accept(&self, next: u32, wr_id: u64) -> u32 {
        let wr_count = next.wrapping_add(1);
        // SAFETY: `queues` owns one slot per entry (one of an empty queue) and outlives
        // this queue.
        unsafe { self.outstanding.post(self.slot(next), wr_id, wr_count) };
        wr_count
    }

    /// Publishes the batch to the device.
    ///
    /// # Safety
    /// Until a receive has completed, its memory stays registered and is neither read nor
    /// written by the process.
    #[inline]
    pub unsafe fn publish(&mut self) {
        // An empty batch publishes the same index again.
        self.published = self.next;
        self.record.publish(self.published & 0xffff);
    }
}

/// The doorbell record of receives, or its replacement before they are announced.
fn record(queues: &QpQueues, announced: bool) -> DoorbellRecord {
    match &queues.unannounced {
        // SAFETY: the word belongs to `queues`, which outlives the record.
        Some(word) if !announced => unsafe { DoorbellRecord::new(NonNull::from(&**word).cast()) },
        _ => queues.memory.records.record(0),
    }
}

/// Writes an element as a [`DataSegment`].
///
/// # Safety
/// The segment is writable, and aligned to its size.
#[inline]
unsafe fn write_segment(to: NonNull<DataSegment>, sge: &Sge) {
    let first = u64::from(sge.length) << 32 | u64::from(sge.lkey);
    // SAFETY: as the caller says.
    unsafe { write_pair(to.cast(), first.to_be(), sge.addr.to_be()) };
}

/// The terminator of a list that is shorter than the entry.
const END: DataSegment = DataSegment {
    byte_count: 0,
    lkey: INVALID_LKEY.to_be(),
    addr: 0,
};

/// Writes an element that is the whole list, and a terminator if the entry is longer.
///
/// # Safety
/// `to` is writable for `room` segments, at least one, and aligned for them.
#[inline]
pub(crate) unsafe fn write_one(to: NonNull<DataSegment>, sge: &Sge, room: u32) {
    // SAFETY: as the caller says; `room` is at least 2 where it is not 1.
    unsafe {
        if room != 1 {
            to.add(1).write(END);
        }
        write_segment(to, sge);
    }
}

/// Writes a scatter list without empty elements, and a terminator if it is
/// shorter than the entry.
///
/// # Safety
/// `to` is writable for `room` segments, and aligned for them; the list has at
/// most as many elements.
#[inline]
pub(crate) unsafe fn write_list(
    to: NonNull<DataSegment>,
    list: &[Sge],
    room: u32,
) -> Result<(), PostError> {
    let mut at = 0;
    for sge in list {
        if sge.length >= MAX_SEGMENT {
            return Err(PostError::MessageTooLong);
        }
        // A length of 0 means 2 GiB to the device.
        if sge.length == 0 {
            continue;
        }
        // SAFETY: the list is no longer than the room.
        unsafe { write_segment(to.add(at), sge) };
        at += 1;
    }
    if at < room as usize {
        // SAFETY: `at` is less than `room`.
        unsafe { to.add(at).write(END) };
    }
    Ok(())
}
