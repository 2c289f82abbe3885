//! Shared receive queues.
//!
//! The entries are a list: each names the one that the device takes after it.
//! A receive that has completed is put behind the list's last, in any order;
//! the last is never posted, so that there is always one to append to.

use std::mem::offset_of;
use std::sync::{Arc, Mutex, PoisonError};

use ring::DoorbellRecord;
use uverbs::{ContextRef, Sge, Srq, SrqInit, SrqKind, Udata};

use crate::abi::{CreateSrq, CreateSrqResp, DataSegment, NextSegment, Plain, SEGMENT};
use crate::memory::{Lender, Purpose, QueueMemory};
use crate::plan::{RecvPlan, SendPlan};
use crate::recv::write_list;
use crate::work::{read_segment, scatter};
use crate::{CreateError, DeviceContext, Limits, PostError, Service, Work};

/// A shared receive queue's entries, shared by those who post to it and those
/// who read completions of its receives.
#[derive(Debug)]
pub struct SharedWork {
    memory: QueueMemory,
    entries: u32,
    /// Binary logarithm of an entry's bytes.
    shift: u32,
    max_sge: u32,
    list: Mutex<List>,
}

/// The order of the entries, as this side knows it, and how far the device has
/// been told of it.
#[derive(Debug)]
struct List {
    /// What the next receive gets; of the last, none.
    head: u16,
    last: u16,
    slots: Box<[Slot]>,
    /// Receives that were pushed, ever.
    posted: u32,
    /// Of these, how many the device has been told of.
    published: u32,
    record: DoorbellRecord,
}

impl List {
    /// Hands what was pushed to the device.
    #[inline(always)]
    fn publish(&mut self) {
        self.published = self.posted;
        self.record.publish(self.posted & 0xffff);
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    wr_id: u64,
    next: u16,
    /// The device has it, or will when the batch is published.
    outstanding: bool,
}

impl SharedWork {
    pub(crate) fn sized(
        max_wr: u32,
        max_sge: u32,
        limits: &Limits,
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        let too_large = |what| CreateError::TooLarge { what };
        let entry = (max_sge.max(1) as usize)
            .checked_mul(SEGMENT)
            .and_then(|bytes| bytes.checked_add(size_of::<NextSegment>()))
            .and_then(usize::checked_next_power_of_two)
            .filter(|entry| *entry <= limits.max_recv_entry)
            .ok_or(too_large("max_sge"))?;
        // One more: the last is never posted. Slots have 16 bits.
        let entries = (max_wr.checked_add(1))
            .and_then(u32::checked_next_power_of_two)
            .filter(|entries| *entries <= limits.max_srq_wr.min(1 << 15))
            .ok_or(too_large("max_wr"))?
            .max(2);
        let mut slots = Vec::new();
        slots
            .try_reserve_exact(entries as usize)
            .map_err(|_| CreateError::NoMemory)?;
        slots.extend((1..=entries).map(|next| Slot {
            wr_id: 0,
            next: next as u16,
            outstanding: false,
        }));
        let memory = QueueMemory::new(entries as usize * entry, Purpose::SharedQueue, lender)?;
        let record = memory.records.record(0);
        let shared = Self {
            memory,
            entries,
            shift: entry.ilog2(),
            max_sge: (entry / SEGMENT - 1) as u32,
            list: Mutex::new(List {
                head: 0,
                last: (entries - 1) as u16,
                slots: slots.into_boxed_slice(),
                posted: 0,
                published: 0,
                record,
            }),
        };
        for slot in 0..entries - 1 {
            shared.link(slot as u16, slot as u16 + 1);
        }
        Ok(shared)
    }

    fn list(&self) -> std::sync::MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To take several receives in a row.
    #[inline(always)]
    pub(crate) fn taking(&self) -> TakingShared<'_> {
        TakingShared {
            list: self.list(),
            work: self,
        }
    }

    pub(crate) fn entry(&self, slot: u16) -> std::ptr::NonNull<u8> {
        let slot = u32::from(slot) & (self.entries - 1);
        // SAFETY: one of the entries, by the mask.
        unsafe {
            self.memory
                .entries
                .first()
                .add((slot as usize) << self.shift)
        }
    }

    /// As [`SharedQueue::push`], under the lock.
    #[inline(always)]
    fn push(&self, list: &mut List, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        if sges.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let slot = list.head;
        if slot == list.last {
            return Err(PostError::Full);
        }
        // SAFETY: behind the entry's first segment there are `max_sge` more;
        // it is not the device's before it is published.
        unsafe {
            let to = self.entry(slot).add(size_of::<NextSegment>());
            write_list(to.cast::<DataSegment>(), sges, self.max_sge)?;
        }
        let known = &mut list.slots[usize::from(slot)];
        known.wr_id = wr_id;
        known.outstanding = true;
        list.head = known.next;
        list.posted = list.posted.wrapping_add(1);
        Ok(())
    }

    /// The device takes `next` after `slot`.
    fn link(&self, slot: u16, next: u16) {
        // SAFETY: an aligned field of an entry.
        unsafe {
            let at = self
                .entry(slot)
                .add(offset_of!(NextSegment, next_wqe_index));
            at.cast::<u16>().write_volatile(next.to_be());
        }
    }

    /// The receive in a slot, if one is outstanding there.
    pub(crate) fn find(&self, slot: u16) -> Option<u64> {
        self.taking().find(slot)
    }

    /// The receive in a slot has completed: the slot is free.
    pub(crate) fn free(&self, slot: u16) {
        self.taking().free(slot);
    }

    /// The word by which the device knows how many were posted.
    #[cfg(test)]
    pub(crate) fn record(&self) -> std::ptr::NonNull<u32> {
        self.memory.records.first().cast()
    }

    /// As [`crate::Work::scatter_receive`].
    ///
    /// # Safety
    /// The receive in `slot` is outstanding, and its memory valid, as whoever
    /// posted it has said.
    pub(crate) unsafe fn scatter(&self, slot: u16, data: &[u8]) -> bool {
        let entry = self.entry(slot);
        let segments = (1..=self.max_sge as usize).map(|i| {
            // SAFETY: inside the entry, behind its first segment.
            unsafe { read_segment(entry.add(i * SEGMENT)) }
        });
        // SAFETY: as the caller says.
        unsafe { scatter(segments, data) }
    }
}

/// Receives that are taken, under the lock against those who post, or the other
/// way round.
#[derive(Debug)]
pub(crate) struct TakingShared<'s> {
    list: std::sync::MutexGuard<'s, List>,
    work: &'s SharedWork,
}

impl TakingShared<'_> {
    /// As [`SharedWork::find`].
    #[inline(always)]
    pub(crate) fn find(&self, slot: u16) -> Option<u64> {
        let slot = self.list.slots.get(usize::from(slot))?;
        slot.outstanding.then_some(slot.wr_id)
    }

    /// As [`SharedWork::free`].
    #[inline(always)]
    pub(crate) fn free(&mut self, slot: u16) {
        let list = &mut *self.list;
        let Some(known) = list.slots.get_mut(usize::from(slot)) else {
            return;
        };
        if !std::mem::take(&mut known.outstanding) {
            return;
        }
        let last = list.last;
        list.slots[usize::from(last)].next = slot;
        list.last = slot;
        // Before the device can get there: `last` itself is not posted yet.
        self.work.link(last, slot);
    }

    /// The device could not do the receive in a slot now, and has given it back:
    /// it is posted again, behind all others. False, and nothing is done, if none
    /// is outstanding there.
    ///
    /// Its entry becomes the free list's last, so that the kernel, which may be
    /// reading there which memory was missing, finds it for as long as can be.
    #[cold]
    pub(crate) fn post_again(&mut self, slot: u16) -> bool {
        let Some(wr_id) = self.find(slot) else {
            return false;
        };
        // Now the head is not the last, nor this slot.
        self.free(slot);
        let list = &mut *self.list;
        let head = list.head;
        // SAFETY: two different entries, of as many segments.
        unsafe {
            let [from, to] =
                [slot, head].map(|slot| self.work.entry(slot).add(size_of::<NextSegment>()));
            to.copy_from_nonoverlapping(from, self.work.max_sge as usize * SEGMENT);
        }
        let known = &mut list.slots[usize::from(head)];
        known.wr_id = wr_id;
        known.outstanding = true;
        list.head = known.next;
        let told_all = list.published == list.posted;
        list.posted = list.posted.wrapping_add(1);
        // What has been pushed and not published is the poster's to publish, and
        // this behind it.
        if told_all {
            list.publish();
        }
        true
    }
}

/// The writer over a shared receive queue.
///
/// A batch: [`SharedQueue::push`] for each receive, and
/// [`SharedQueue::publish`] once; a receive that was pushed goes out with the
/// next one at the latest.
///
/// Thread rule: one caller at a time (`&mut`). It locks, for a moment, against
/// those who read completions.
#[derive(Debug)]
pub struct SharedQueue {
    work: Arc<SharedWork>,
}

impl SharedQueue {
    pub(crate) fn new(work: Arc<SharedWork>) -> Self {
        Self { work }
    }

    /// Receives that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.work.entries - 1
    }

    /// Scatter/gather elements that a receive holds at most.
    pub fn max_sge(&self) -> u32 {
        self.work.max_sge
    }

    /// Starts a batch, under the lock until it ends. It has none to forget: what
    /// is pushed is linked to the rest.
    #[inline(always)]
    pub fn begin(&mut self) -> SharedWriter<'_> {
        SharedWriter(self.work.taking())
    }

    /// Adds a receive into the memory of `list`.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; nothing is added.
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        self.work.push(&mut self.work.list(), wr_id, sges)
    }

    /// Hands what was pushed to the device.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is neither read nor
    /// written by the process, until its receive has completed.
    pub unsafe fn publish(&mut self) {
        self.work.list().publish();
    }

    /// What queue pairs that take their receives from here are made with.
    pub fn work(&self) -> &Arc<SharedWork> {
        &self.work
    }
}

/// Receives of one element, added to a shared queue as
/// [`RecvWriter`](crate::RecvWriter) adds them to a queue pair's.
#[derive(Debug)]
pub struct SharedWriter<'q>(TakingShared<'q>);

impl SharedWriter<'_> {
    /// Adds a receive. False, and nothing is done, if it is refused:
    /// [`SharedQueue::push`] says why.
    #[inline(always)]
    pub fn push_one(&mut self, wr_id: u64, sge: &Sge) -> bool {
        let TakingShared { list, work } = &mut self.0;
        work.push(list, wr_id, std::slice::from_ref(sge)).is_ok()
    }

    /// Hands what was pushed to the device.
    ///
    /// # Safety
    /// As for [`SharedQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish(mut self) {
        self.0.list.publish();
    }

    /// Ends the quick way: what was pushed goes out when the queue is published
    /// next.
    #[inline(always)]
    pub fn keep(self) {}
}

/// A shared receive queue. The parts are public so that a face can put the
/// queue under the lock that it needs.
#[derive(Debug)]
pub struct SharedReceiveQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Srq<C>,
    /// The queue.
    pub recv: SharedQueue,
    /// The number that the device knows it by; XRC initiators name it by that.
    pub srq_num: u32,
    /// Of an XRC one, what completions find it by: its receives complete to a
    /// completion queue of its own choice, and name it, not the queue pair that
    /// took them. A face attaches it there before the queue is used, and
    /// detaches it after it is destroyed ([`crate::CompletionRing::attach`]).
    pub xrc: Option<Arc<Work>>,
}

impl<C: ContextRef> SharedReceiveQueue<C> {
    /// Makes a shared receive queue; its sizes are those of `recv`.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] for tag matching; [`CreateError::TooLarge`]; those of memory and of CREATE_SRQ. Nothing
    /// is left behind.
    pub fn create(
        context: &C,
        device: &DeviceContext,
        init: &SrqInit,
    ) -> Result<Self, CreateError> {
        Self::create_with(context, device, init, None)
    }

    /// As [`SharedReceiveQueue::create`], in the `lender`'s memory, if that has
    /// any.
    ///
    /// # Errors
    /// As there.
    pub fn create_with(
        context: &C,
        device: &DeviceContext,
        init: &SrqInit,
        lender: Option<&dyn Lender>,
    ) -> Result<Self, CreateError> {
        if let SrqKind::TagMatching { .. } = init.kind {
            return Err(CreateError::Unsupported {
                what: "a shared receive queue with tag matching",
            });
        }
        let work = Arc::new(SharedWork::sized(
            init.max_wr,
            init.max_sge,
            &device.limits,
            lender,
        )?);
        // To those who read completions it is a queue pair that has nothing
        // but receives of a shared queue.
        let xrc = match init.kind {
            SrqKind::Xrc { .. } => Some(Arc::new(Work::new(
                device.user_index()?,
                Service::XrcTarget,
                SendPlan::default(),
                RecvPlan::default(),
                Some(Arc::clone(&work)),
                None,
            )?)),
            _ => None,
        };
        let request = CreateSrq {
            uidx: xrc.as_ref().map_or(0, |xrc| xrc.user_index()),
            buf_addr: work.memory.entries.address(),
            db_addr: work.memory.records.address(),
            ..CreateSrq::default()
        };
        let mut answer = CreateSrqResp::default();
        let init = SrqInit {
            // The driver works out the memory's size from these, as is done
            // above.
            max_wr: work.entries - 1,
            max_sge: work.max_sge,
            ..*init
        };
        // SAFETY: the addresses are those of the queue's memory, which has that
        // many entries and two doorbell records, and outlives the object: it
        // lives in the same value, behind it.
        let udata = unsafe { Udata::new(request.bytes(), answer.bytes_mut()) };
        let object = Srq::create(context, &init, udata)?;
        Ok(Self {
            object,
            recv: SharedQueue::new(work),
            srq_num: answer.srqn,
            xrc,
        })
    }
}
