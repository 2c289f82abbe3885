//! The entries of a shared receive queue.
//!
//! The entries form a linked list: each names the entry that the device consumes next. The
//! entry of a completed receive is appended, in any order. The last entry is never posted,
//! so the list is never empty.
//!
//! Posters take entries from the front, pollers append them to the end, both under the
//! queue's lock.

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{BiasedLock, DoorbellRecord, write_pair};
use uverbs::Sge;

use crate::abi::{DataSegment, NextSegment, SEGMENT};
use crate::memory::{Purpose, QueueAllocator, QueueMemory};
use crate::qp_queues::{read_segment, scatter};
use crate::recv::{write_list, write_one};
use crate::tags::TagList;
use crate::{CreateError, Limits, MAX_SEGMENT, PostError};

/// A shared receive queue's entries, shared by posters and pollers.
#[derive(Debug)]
pub struct SrqEntries {
    /// Guards `list`.
    lock: BiasedLock,
    list: UnsafeCell<List>,
    entries: u32,
    max_sge: u32,
    memory: QueueMemory,
    /// With tag matching, its tags; guarded by `lock` as well.
    tags: Option<UnsafeCell<TagList>>,
}

// SAFETY: lists are used under the lock only; their pointers lead to `memory`, and to the
// program's memory of tags.
unsafe impl Send for SrqEntries {}
// SAFETY: as above.
unsafe impl Sync for SrqEntries {}

/// The order of the entries, and the producer index.
#[derive(Debug)]
struct List {
    /// The slot of the next receive.
    head: u16,
    last: u16,
    /// Binary logarithm of an entry's bytes.
    shift: u8,
    max_sge: u32,
    /// The first entry.
    first: NonNull<u8>,
    /// The state of each slot.
    slots: Box<[Slot]>,
    /// Number of receives pushed.
    pushed: u32,
    /// Number of receives published.
    published: u32,
    record: DoorbellRecord,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Slot {
    wr_id: u64,
    /// The next slot, and [`OUTSTANDING`].
    state: u64,
}

/// The slot's receive is posted, or in the batch.
const OUTSTANDING: u64 = 1 << 63;

impl Slot {
    fn free(next: u16) -> Self {
        Self {
            wr_id: 0,
            state: next.into(),
        }
    }

    /// Marks a free slot as posted. Returns the next slot.
    ///
    /// # Safety
    /// `slot` is one of the slots, and exclusive.
    #[inline]
    unsafe fn post(slot: NonNull<Self>, wr_id: u64) -> usize {
        // SAFETY: as the caller says; aligned. One store, since posting waits for stores.
        unsafe {
            let next = (*slot.as_ptr()).state;
            write_pair(slot.cast(), wr_id, next | OUTSTANDING);
            next as usize
        }
    }

    #[inline]
    fn is_outstanding(&self) -> bool {
        self.state & OUTSTANDING != 0
    }
}

impl SrqEntries {
    /// Creates a queue of at least `max_wr` receives of `max_sge` elements.
    pub(crate) fn new(
        max_wr: u32,
        max_sge: u32,
        limits: &Limits,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        let too_large = |what| CreateError::TooLarge { what };
        let entry = (max_sge.max(1) as usize)
            .checked_mul(SEGMENT)
            .and_then(|bytes| bytes.checked_add(size_of::<NextSegment>()))
            .and_then(usize::checked_next_power_of_two)
            .filter(|entry| *entry <= limits.max_recv_entry)
            .ok_or(too_large("max_sge"))?;
        // One more, since the last entry is never posted. Slots have 16 bits.
        let entries = (max_wr.checked_add(1))
            .and_then(u32::checked_next_power_of_two)
            .filter(|entries| *entries <= limits.max_srq_wr.min(1 << 15))
            .ok_or(too_large("max_wr"))?
            .max(2);
        let mut slots = Vec::new();
        slots
            .try_reserve_exact(entries as usize)
            .map_err(|_| CreateError::NoMemory)?;
        slots.extend((1..=entries).map(|next| Slot::free(next as u16)));
        let memory = QueueMemory::new(entries as usize * entry, Purpose::SharedQueue, allocator)?;
        let list = List {
            head: 0,
            last: (entries - 1) as u16,
            shift: entry.ilog2() as u8,
            max_sge: (entry / SEGMENT - 1) as u32,
            first: memory.entries.first(),
            slots: slots.into_boxed_slice(),
            pushed: 0,
            published: 0,
            record: memory.records.record(0),
        };
        for slot in 0..entries - 1 {
            list.link(slot as u16, slot as u16 + 1);
        }
        Ok(Self {
            lock: BiasedLock::new(),
            entries,
            max_sge: list.max_sge,
            list: UnsafeCell::new(list),
            memory,
            tags: None,
        })
    }

    /// Adds tag matching, with up to `max_tags` tags.
    pub(crate) fn with_tags(mut self, max_tags: u32) -> Result<Self, CreateError> {
        self.tags = Some(UnsafeCell::new(TagList::new(max_tags)?));
        Ok(self)
    }

    /// Whether the queue has tag matching.
    pub(crate) fn has_tags(&self) -> bool {
        self.tags.is_some()
    }

    pub(crate) fn memory(&self) -> &QueueMemory {
        &self.memory
    }

    /// The lock of the list, held while posting and polling.
    #[inline]
    pub fn lock(&self) -> &BiasedLock {
        &self.lock
    }

    /// Maximum number of outstanding receives.
    pub fn capacity(&self) -> u32 {
        self.entries - 1
    }

    /// Maximum number of scatter/gather elements of a receive.
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Takes the lock for a poller.
    #[inline]
    pub(crate) fn enter(&self) -> LockedEntries<'_> {
        self.lock.lock();
        LockedEntries { entries: self }
    }

    /// The list, in the critical section.
    ///
    /// # Safety
    /// The caller holds the lock as long as it uses the reference, and uses one at a time.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "the lock guards the list")]
    unsafe fn list(&self) -> &mut List {
        // SAFETY: as the caller says.
        unsafe { &mut *self.list.get() }
    }

    /// The tags, in the critical section.
    ///
    /// # Safety
    /// As of [`SrqEntries::list`].
    #[expect(clippy::mut_from_ref, reason = "the lock guards the tags")]
    pub(crate) unsafe fn tags(&self) -> Option<&mut TagList> {
        // SAFETY: as the caller says.
        self.tags.as_ref().map(|tags| unsafe { &mut *tags.get() })
    }

    #[cfg(test)]
    pub(crate) fn entry(&self, slot: u16) -> NonNull<u8> {
        self.enter().list().entry(slot)
    }

    /// As [`crate::QpQueues::scatter_receive`].
    ///
    /// # Safety
    /// The receive in `slot` is outstanding, and its memory valid, as its poster guaranteed.
    pub(crate) unsafe fn scatter(&self, slot: u16, data: &[u8]) -> bool {
        let entry = self.enter().list().segments(slot);
        // SAFETY: as the caller says; its entry.
        unsafe { self.scatter_to(entry, data) }
    }

    /// Writes `data` to the segments of the receive at `entry`.
    ///
    /// # Safety
    /// As of [`SrqEntries::scatter`].
    unsafe fn scatter_to(&self, entry: NonNull<DataSegment>, data: &[u8]) -> bool {
        let segments = (0..self.max_sge as usize).map(|i| {
            // SAFETY: inside the entry.
            unsafe { read_segment(entry.add(i).cast()) }
        });
        // SAFETY: as the caller says.
        unsafe { scatter(segments, data) }
    }
}

impl List {
    #[inline]
    fn entry(&self, slot: u16) -> NonNull<u8> {
        let slot = usize::from(slot) & (self.slots.len() - 1);
        // SAFETY: one of the entries, by the mask: their number is a power of two.
        unsafe { self.first.add(slot << self.shift) }
    }

    /// The segments of an entry's receive.
    #[inline]
    fn segments(&self, slot: u16) -> NonNull<DataSegment> {
        // SAFETY: in the entry, which is longer than the first segment.
        unsafe { self.entry(slot).add(size_of::<NextSegment>()).cast() }
    }

    /// Links `slot` to `next`.
    #[inline]
    fn link(&self, slot: u16, next: u16) {
        // SAFETY: an aligned field of an entry.
        unsafe {
            let at = self
                .entry(slot)
                .add(offset_of!(NextSegment, next_wqe_index));
            at.cast::<u16>().write_volatile(next.to_be());
        }
    }

    #[inline]
    fn find(&self, slot: u16) -> Option<u64> {
        let slot = self.slots.get(usize::from(slot))?;
        slot.is_outstanding().then_some(slot.wr_id)
    }

    #[inline]
    fn take(&mut self, slot: u16) -> Option<u64> {
        let freed = self.slots.get_mut(usize::from(slot))?;
        if !freed.is_outstanding() {
            return None;
        }
        freed.state = 0;
        let wr_id = freed.wr_id;
        let last = std::mem::replace(&mut self.last, slot);
        self.slots[usize::from(last)].state = slot.into();
        // The link is written before `last` is posted, so before the device reads it.
        self.link(last, slot);
        Some(wr_id)
    }

    /// Marks the receive in the head's slot as posted, and advances the head.
    #[inline]
    fn accept(&mut self, head: u16, wr_id: u64) -> u16 {
        let slot = NonNull::from(&mut self.slots[usize::from(head)]);
        // SAFETY: a free one of the slots.
        unsafe { Slot::post(slot, wr_id) as u16 }
    }

    #[inline]
    fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        if let [sge] = sges {
            if self.push_fast(wr_id, sge) {
                return Ok(());
            }
        }
        self.push_slow(wr_id, sges)
    }

    /// Fast path of [`List::push`]: one element, and there is room.
    #[inline]
    fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        let head = self.head;
        if sge.length.wrapping_sub(1) >= MAX_SEGMENT - 1 || head == self.last {
            return false;
        }
        let to = self.segments(head);
        // SAFETY: the entry has `max_sge` segments, at least one; the device does not own
        // them before they are published.
        unsafe { write_one(to, sge, self.max_sge) };
        self.head = self.accept(head, wr_id);
        self.pushed = self.pushed.wrapping_add(1);
        true
    }

    /// [`List::push`] of any receive.
    #[inline(never)]
    fn push_slow(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        if sges.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let head = self.head;
        if head == self.last {
            return Err(PostError::Full);
        }
        // SAFETY: the entry has `max_sge` segments; the device does not own them before they
        // are published.
        unsafe { write_list(self.segments(head), sges, self.max_sge)? };
        self.head = self.accept(head, wr_id);
        self.pushed = self.pushed.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn publish(&mut self) {
        self.published = self.pushed;
        self.record.publish(self.pushed & 0xffff);
    }

    #[cold]
    fn post_again(&mut self, slot: u16) -> bool {
        // Now the freed slot is the last, so the head is another slot, and not the last.
        let Some(wr_id) = self.take(slot) else {
            return false;
        };
        let (head, count) = (self.head, self.max_sge as usize);
        // SAFETY: two different entries of `count` segments.
        unsafe {
            let from = self.segments(slot);
            self.segments(head).copy_from_nonoverlapping(from, count);
        }
        self.head = self.accept(head, wr_id);
        let all_published = self.published == self.pushed;
        self.pushed = self.pushed.wrapping_add(1);
        // If there are unpublished receives, the poster publishes this one with
        // them.
        if all_published {
            self.publish();
        }
        true
    }
}

/// The list under the lock.
#[derive(Debug)]
pub(crate) struct LockedEntries<'s> {
    entries: &'s SrqEntries,
}

impl Drop for LockedEntries<'_> {
    #[inline]
    fn drop(&mut self) {
        self.entries.lock.unlock();
    }
}

impl LockedEntries<'_> {
    #[inline]
    fn list(&mut self) -> &mut List {
        // SAFETY: the lock is this value's.
        unsafe { self.entries.list() }
    }

    /// The outstanding receive in a slot.
    #[inline]
    pub(crate) fn find(&mut self, slot: u16) -> Option<u64> {
        self.list().find(slot)
    }

    /// Completes the outstanding receive in a slot, and frees the slot.
    #[inline]
    pub(crate) fn take(&mut self, slot: u16) -> Option<u64> {
        self.list().take(slot)
    }

    /// Writes data of a CQE to the memory of the receive in `slot`. Returns false if it does
    /// not fit, or no receive is outstanding there.
    ///
    /// # Safety
    /// The receive's memory is valid, as its poster guaranteed.
    pub(crate) unsafe fn scatter(&mut self, slot: u16, data: &[u8]) -> bool {
        if self.find(slot).is_none() {
            return false;
        }
        let entry = self.list().segments(slot);
        // SAFETY: as the caller says; its entry.
        unsafe { self.entries.scatter_to(entry, data) }
    }

    /// The tags.
    pub(crate) fn tags(&mut self) -> Option<&mut TagList> {
        // SAFETY: the lock is this value's.
        unsafe { self.entries.tags() }
    }

    /// The slots of the next receive and of the last entry, and an entry's bytes.
    pub(crate) fn ends(&mut self) -> (u16, u16, u32) {
        let list = self.list();
        (list.head, list.last, 1 << list.shift)
    }

    /// Posts the receive in a slot again, behind all others, after a page fault. Returns
    /// false if no receive is outstanding there.
    ///
    /// Its old entry becomes the last free one, because the kernel may still read
    /// it to find the missing memory.
    #[cold]
    pub(crate) fn post_again(&mut self, slot: u16) -> bool {
        self.list().post_again(slot)
    }
}

/// The writer over a shared receive queue.
///
/// A batch is [`LockedQueue::push`] for each receive, and
/// [`LockedQueue::publish`] once, on [`SharedQueue::locked`]; or, with the lock
/// taken separately, the methods of the same names here.
#[derive(Debug)]
pub struct SharedQueue {
    entries: Arc<SrqEntries>,
}

impl SharedQueue {
    pub(crate) fn new(entries: Arc<SrqEntries>) -> Self {
        Self { entries }
    }

    /// Maximum number of outstanding receives.
    pub fn capacity(&self) -> u32 {
        self.entries.capacity()
    }

    /// Maximum number of scatter/gather elements of a receive.
    pub fn max_sge(&self) -> u32 {
        self.entries.max_sge()
    }

    /// The entries, for queue pairs that use this queue.
    pub fn entries(&self) -> &Arc<SrqEntries> {
        &self.entries
    }

    /// Takes the lock, until the value is dropped.
    pub fn locked(&mut self) -> LockedQueue<'_> {
        self.entries.lock.lock();
        LockedQueue(self)
    }

    /// Adds a receive into the memory of `list`.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; nothing is added.
    ///
    /// # Safety
    /// The caller has [`SrqEntries::lock`].
    #[inline]
    pub unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        // SAFETY: as the caller says.
        unsafe { self.entries.list() }.push(wr_id, list)
    }

    /// Fast path of [`SharedQueue::push`], as [`crate::RecvQueue::push_fast`].
    ///
    /// # Safety
    /// As for [`SharedQueue::push`].
    #[inline]
    pub unsafe fn push_fast(&mut self, wr_id: u64, sge: &Sge) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.entries.list() }.push_fast(wr_id, sge)
    }

    /// Publishes the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is neither read nor
    /// written by the process, until its receive has completed. The caller has
    /// [`SrqEntries::lock`].
    #[inline]
    pub unsafe fn publish(&mut self) {
        // SAFETY: as the caller says.
        unsafe { self.entries.list() }.publish();
    }
}

/// A shared receive queue under its lock.
#[derive(Debug)]
pub struct LockedQueue<'q>(&'q mut SharedQueue);

impl Drop for LockedQueue<'_> {
    fn drop(&mut self) {
        self.0.entries.lock.unlock();
    }
}

impl LockedQueue<'_> {
    /// As [`SharedQueue::push`].
    ///
    /// # Errors
    /// As there.
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        // SAFETY: the lock is this value's.
        unsafe { self.0.push(wr_id, list) }
    }

    /// As [`SharedQueue::publish`].
    ///
    /// # Safety
    /// As for [`SharedQueue::publish`], regarding memory.
    pub unsafe fn publish(&mut self) {
        // SAFETY: the lock is this value's; the rest is as the caller says.
        unsafe { self.0.publish() };
    }
}
