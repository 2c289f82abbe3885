//! Operations in flight on a queue that completes in order.

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use ring::Sequences;

use super::id::{QueueId, WorkId};
use super::{Posted, PostedInfo};
use crate::data::Data;

/// The operations in flight on one send or receive queue, in the order of posting, in which
/// they also complete.
///
/// One thread posts ([`OrderedWriter`]), one polls ([`OrderedTable::retire`]);
/// neither locks nor allocates.
pub(crate) struct OrderedTable {
    id: QueueId,
    prefix: u64,
    sequences: Sequences,
    /// Slots from `consumed` up to `produced` hold operations and belong to the
    /// consumer; the others belong to the producer.
    slots: Box<[UnsafeCell<MaybeUninit<Posted>>]>,
    mask: u32,
    capacity: u32,
}

// SAFETY: a slot is accessed by the producer or by the consumer, as `Sequences` passes it
// over; there is one of each at a time (`OrderedWriter::new`, `OrderedTable::retire`). The
// slots are `Send` (asserted below).
unsafe impl Sync for OrderedTable {}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Posted>();
};

impl OrderedTable {
    /// Creates a table for up to `capacity` operations.
    pub fn new(id: QueueId, capacity: u32) -> Self {
        let slots = capacity.max(1).next_power_of_two();
        Self {
            id,
            prefix: id.prefix(false),
            sequences: Sequences::new(),
            slots: (0..slots)
                .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
                .collect(),
            mask: slots - 1,
            capacity,
        }
    }

    /// Returns its identifier in the completion queue's registry.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Returns the number of operations in flight; approximate during concurrent
    /// posts or polls.
    pub fn len(&self) -> u32 {
        let consumed = self.sequences.consumed();
        self.sequences.produced().wrapping_sub(consumed)
    }

    #[inline]
    fn slot(&self, sequence: u32) -> *mut MaybeUninit<Posted> {
        let at = (sequence & self.mask) as usize;
        // SAFETY: there are `mask + 1` slots.
        unsafe { self.slots.get_unchecked(at) }.get()
    }

    /// Returns whether the identifier belongs to this queue.
    #[inline]
    pub fn is_of(&self, work: WorkId) -> bool {
        work.prefix() == self.prefix
    }

    /// Removes the operation that `work` names, and the earlier operations, which are passed to
    /// `earlier`. Returns `None` and removes nothing if no operation in flight has this name.
    ///
    /// # Safety
    /// There is one caller at a time, the owner of the completion queue, which has dropped the
    /// result of the last call.
    #[inline]
    pub unsafe fn retire(
        &self,
        work: WorkId,
        mut earlier: impl FnMut(Posted),
    ) -> Option<Retired<'_>> {
        let mut at = self.sequences.own_consumed();
        let there = self.sequences.produced().wrapping_sub(at);
        let ahead = work.distance_from(at);
        if ahead >= there {
            return None;
        }
        for _ in 0..ahead {
            // SAFETY: between consumed and produced, and this is the consumer.
            let posted = unsafe { (*self.slot(at)).assume_init_read() };
            at = at.wrapping_add(1);
            // Published before the call: if `earlier` panics, nothing is removed
            // twice.
            self.sequences.publish_consumed(at);
            // The outcome is unknown: the raw layer may have read the completion.
            earlier(posted);
        }
        Some(Retired {
            slot: self.slot(at).cast(),
            release: Release {
                sequences: Some(&self.sequences),
                consumed: at.wrapping_add(1),
            },
        })
    }

    /// Removes the oldest operation.
    ///
    /// # Safety
    /// As for [`OrderedTable::retire`].
    pub unsafe fn pop(&self) -> Option<Posted> {
        let at = self.sequences.own_consumed();
        if at == self.sequences.produced() {
            return None;
        }
        // SAFETY: between consumed and produced, and this is the consumer.
        let posted = unsafe { (*self.slot(at)).assume_init_read() };
        self.sequences.publish_consumed(at.wrapping_add(1));
        Some(posted)
    }
}

/// A completed operation, still in its slot, so that its fields are moved directly to their
/// destination.
pub(crate) struct Retired<'f> {
    /// Holds an operation.
    slot: *mut Posted,
    release: Release<'f>,
}

impl<'f> Retired<'f> {
    /// Creates a value for an operation outside of a table.
    ///
    /// # Safety
    /// `slot` holds an operation, which this value owns.
    #[inline]
    pub unsafe fn moved(slot: &'f mut MaybeUninit<Posted>) -> Self {
        Self {
            slot: slot.as_mut_ptr(),
            release: Release {
                sequences: None,
                consumed: 0,
            },
        }
    }

    /// Returns whether its success is not reported.
    #[inline]
    pub fn is_unreported(&self) -> bool {
        // SAFETY: the slot holds an operation, which only this value accesses.
        unsafe { (*self.slot).unreported }
    }

    /// Passes the operation to `f`. Its slot is released when `f` returns or
    /// panics.
    #[inline]
    pub fn with<R>(self, f: impl FnOnce(Posted) -> R) -> R {
        // SAFETY: as above, and the operation is moved out once: `self` is consumed.
        unsafe { self.in_place(|slot| f(slot.read())) }
    }

    /// As [`Retired::with`], in place.
    ///
    /// # Safety
    /// `f` moves out every field that needs to be dropped.
    #[inline]
    pub unsafe fn in_place<R>(self, f: impl FnOnce(*const Posted) -> R) -> R {
        let Self { slot, release } = self;
        let _release = release;
        f(slot)
    }
}

/// Releases the slots before `consumed` when dropped.
struct Release<'f> {
    sequences: Option<&'f Sequences>,
    consumed: u32,
}

impl Drop for Release<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(sequences) = self.sequences {
            sequences.publish_consumed(self.consumed);
        }
    }
}

impl Drop for OrderedTable {
    fn drop(&mut self) {
        // SAFETY: `&mut self` excludes other consumers.
        while unsafe { self.pop() }.is_some() {}
    }
}

impl fmt::Debug for OrderedTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrderedTable")
            .field("id", &self.id)
            .field("len", &self.len())
            .field("capacity", &self.capacity)
            .finish()
    }
}

/// The posting side of an [`OrderedTable`].
///
/// Operations are pushed and published before they are posted to the device, because a
/// completion must find its operation.
#[derive(Debug)]
pub(crate) struct OrderedWriter {
    table: Arc<OrderedTable>,
    /// Sequence number of the next operation.
    next: u32,
    /// Sequence number up to which operations are published.
    published: u32,
    /// The consumer's sequence number when it was last read.
    seen: u32,
}

impl OrderedWriter {
    /// Creates the posting side of an empty table.
    ///
    /// # Safety
    /// The table has no other writer.
    pub unsafe fn new(table: Arc<OrderedTable>) -> Self {
        let next = table.sequences.own_produced();
        Self {
            next,
            published: next,
            seen: table.sequences.consumed(),
            table,
        }
    }

    /// Returns the table.
    #[inline]
    pub fn table(&self) -> &Arc<OrderedTable> {
        &self.table
    }

    /// Returns the maximum number of operations in flight.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.table.capacity
    }

    /// Returns the identifier of the next operation, if there is room.
    #[inline]
    pub fn next_id(&mut self) -> Option<WorkId> {
        if self.next.wrapping_sub(self.seen) >= self.table.capacity {
            self.seen = self.table.sequences.consumed();
            if self.next.wrapping_sub(self.seen) >= self.table.capacity {
                return None;
            }
        }
        Some(WorkId::new(self.table.prefix, self.next))
    }

    /// Adds an operation whose memory is `data`.
    ///
    /// # Safety
    /// [`OrderedWriter::next_id`] has just returned an identifier: there is room.
    #[inline]
    pub unsafe fn push(&mut self, info: PostedInfo, data: impl Data) {
        let PostedInfo {
            token,
            attachment,
            operation,
            unreported,
        } = info;
        let slot: *mut Posted = self.table.slot(self.next).cast();
        // SAFETY: there is room, so the slot is the producer's, and this is the
        // only writer. Field by field, without a copy (see `Data::write_payload`).
        unsafe {
            (&raw mut (*slot).token).write(token);
            data.write_payload(&raw mut (*slot).payload);
            (&raw mut (*slot).attachment).write(attachment);
            (&raw mut (*slot).operation).write(operation);
            (&raw mut (*slot).unreported).write(unreported);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Publishes the pushed operations to the consumer.
    #[inline]
    pub fn publish(&mut self) {
        self.published = self.next;
        self.table.sequences.publish_produced(self.next);
    }

    /// Discards operations that were pushed and not published.
    #[inline]
    pub fn abandon(&mut self) {
        if self.next != self.published {
            self.abandon_slow();
        }
    }

    #[cold]
    fn abandon_slow(&mut self) {
        while self.next != self.published {
            self.next = self.next.wrapping_sub(1);
            // SAFETY: pushed and not published, so still the producer's.
            let mut posted = unsafe { (*self.table.slot(self.next)).assume_init_read() };
            // In reverse order, because each undoes its effect.
            posted.attachment.not_posted();
        }
    }
}

impl Drop for OrderedWriter {
    fn drop(&mut self) {
        self.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;
    use crate::qp::Attachment;

    /// A table after `count` operations.
    fn queue(count: u32, capacity: u32) -> OrderedWriter {
        let (index, generation) = (7, 9);
        let mut table = OrderedTable::new(QueueId { index, generation }, capacity);
        table.sequences = Sequences::starting_at(count);
        // SAFETY: the only one.
        unsafe { OrderedWriter::new(Arc::new(table)) }
    }

    fn post(writer: &mut OrderedWriter, token: u64) -> Option<WorkId> {
        let work = writer.next_id()?;
        let info = PostedInfo {
            token,
            attachment: Attachment::None,
            operation: Operation::Send,
            unreported: false,
        };
        // SAFETY: there is room.
        unsafe { writer.push(info, ()) };
        writer.publish();
        Some(work)
    }

    /// Retires `work`. Returns the tokens of all retired operations.
    fn retire(table: &OrderedTable, work: WorkId) -> Option<Vec<u64>> {
        let mut done = Vec::new();
        // SAFETY: the only consumer, with nothing kept.
        let retired = unsafe { table.retire(work, |posted| done.push(posted.token)) }?;
        retired.with(|posted| done.push(posted.token));
        Some(done)
    }

    /// All fill levels and completions of a small table, around each wrap: only operations in
    /// flight are found, each with all earlier ones.
    #[test]
    fn only_operations_in_flight_are_found() {
        const CAPACITY: u32 = 3;
        let wraps = [0, 1 << 24, 1 << 23, u32::MAX];
        let wraps = &wraps[..if cfg!(miri) { 1 } else { wraps.len() }];
        let reach = if cfg!(miri) { 3 } else { 20 };
        for start in wraps.iter().map(|wrap: &u32| wrap.wrapping_sub(4)) {
            for (fill, first) in (1..=CAPACITY).flat_map(|fill| (0..fill).map(move |f| (fill, f))) {
                let mut writer = queue(start, CAPACITY);
                let table = Arc::clone(writer.table());
                let mut token = 0;
                let mut in_flight = std::collections::VecDeque::new();
                for _ in 0..8 {
                    while (in_flight.len() as u32) < fill {
                        in_flight.push_back((post(&mut writer, token).unwrap(), token));
                        token += 1;
                    }
                    assert_eq!(writer.next_id().is_none(), fill == CAPACITY);
                    let (consumed, next) = (table.sequences.own_consumed(), writer.next);
                    let behind = (1..reach).map(|i| consumed.wrapping_sub(i));
                    let ahead = (0..reach).map(|i| next.wrapping_add(i));
                    let others = behind.chain(ahead).chain([next ^ 1 << 23]);
                    for sequence in others {
                        let work = WorkId::new(table.prefix, sequence);
                        assert_eq!(retire(&table, work), None, "{sequence:#x} {next:#x}");
                    }
                    let done: Vec<_> = in_flight.drain(..=first as usize).collect();
                    let tokens = done.iter().map(|(_, token)| *token).collect();
                    let (last, _) = done[first as usize];
                    assert_eq!(retire(&table, last), Some(tokens));
                    assert_eq!(retire(&table, last), None);
                    assert_eq!(table.len(), in_flight.len() as u32);
                }
            }
        }
    }
}
