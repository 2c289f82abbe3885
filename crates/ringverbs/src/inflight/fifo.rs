//! Operations in flight on a queue whose completions come in order.

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use ring::Sequences;

use super::id::{QueueId, WorkId};
use super::{Posted, PostedInfo};
use crate::data::Data;

/// The operations in flight on one send or receive queue, in the order in
/// which they were posted, which is the order in which they complete.
///
/// One thread posts ([`FifoWriter`]), one reads completions ([`Fifo::retire`]):
/// neither takes a lock, and nothing is allocated.
pub(crate) struct Fifo {
    id: QueueId,
    prefix: u64,
    sequences: Sequences,
    /// Those from `consumed` up to `produced` hold operations and are the
    /// consumer's; the others are the producer's.
    places: Box<[UnsafeCell<MaybeUninit<Posted>>]>,
    mask: u32,
    capacity: u32,
}

// SAFETY: a place is touched by the producer or by the consumer, as
// `Sequences` hands it over; of each there is one at a time (`FifoWriter::new`,
// `Fifo::retire`). What is handed over is `Send` (asserted below).
unsafe impl Sync for Fifo {}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Posted>();
};

impl Fifo {
    /// A queue for up to `capacity` operations, of that number.
    pub fn new(id: QueueId, capacity: u32) -> Self {
        let places = capacity.max(1).next_power_of_two();
        Self {
            id,
            prefix: id.prefix(false),
            sequences: Sequences::new(),
            places: (0..places)
                .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
                .collect(),
            mask: places - 1,
            capacity,
        }
    }

    /// Its number in the completion queue's registry.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Operations in flight, roughly if others post or poll.
    pub fn len(&self) -> u32 {
        let consumed = self.sequences.consumed();
        self.sequences.produced().wrapping_sub(consumed)
    }

    #[inline(always)]
    fn place(&self, sequence: u32) -> *mut MaybeUninit<Posted> {
        let at = (sequence & self.mask) as usize;
        // SAFETY: there are `mask + 1` places.
        unsafe { self.places.get_unchecked(at) }.get()
    }

    /// Whether the identifier is of a work request of this queue.
    #[inline(always)]
    pub fn is_of(&self, work: WorkId) -> bool {
        work.prefix() == self.prefix
    }

    /// Takes out the operation that `work` names, and those before it, which are
    /// given to `earlier`. `None`, and nothing is taken, if it names none in
    /// flight.
    ///
    /// # Safety
    /// One caller at a time, the owner of the completion queue, and not before
    /// what it got from the last call is gone.
    #[inline(always)]
    pub unsafe fn retire(
        &self,
        work: WorkId,
        mut earlier: impl FnMut(Posted),
    ) -> Option<Retired<'_>> {
        let mut at = self.sequences.own_consumed();
        let there = self.sequences.produced().wrapping_sub(at);
        let ahead = work.ahead_of(at);
        if ahead >= there {
            return None;
        }
        for _ in 0..ahead {
            // SAFETY: between consumed and produced, and this is the consumer.
            let posted = unsafe { (*self.place(at)).assume_init_read() };
            at = at.wrapping_add(1);
            // Published at once: if `earlier` panics, nothing is taken twice.
            self.sequences.publish_consumed(at);
            // Whether it was done is not known: its own completion may have been
            // taken by the raw layer.
            earlier(posted);
        }
        Some(Retired {
            place: self.place(at).cast(),
            release: Release {
                sequences: Some(&self.sequences),
                consumed: at.wrapping_add(1),
            },
        })
    }

    /// Takes out the oldest operation.
    ///
    /// # Safety
    /// As for [`Fifo::retire`].
    pub unsafe fn pop(&self) -> Option<Posted> {
        let at = self.sequences.own_consumed();
        if at == self.sequences.produced() {
            return None;
        }
        // SAFETY: between consumed and produced, and this is the consumer.
        let posted = unsafe { (*self.place(at)).assume_init_read() };
        self.sequences.publish_consumed(at.wrapping_add(1));
        Some(posted)
    }
}

/// An operation that is done, where it was in flight: what is taken out of it
/// is read from there, and goes where it is wanted without a stop.
pub(crate) struct Retired<'f> {
    /// Holds an operation.
    place: *mut Posted,
    release: Release<'f>,
}

impl<'f> Retired<'f> {
    /// An operation that was moved to `place`.
    ///
    /// # Safety
    /// There is one, which is taken out by this.
    #[inline(always)]
    pub unsafe fn moved(place: &'f mut MaybeUninit<Posted>) -> Self {
        Self {
            place: place.as_mut_ptr(),
            release: Release {
                sequences: None,
                consumed: 0,
            },
        }
    }

    /// Whether its user did not ask to hear of its success.
    #[inline(always)]
    pub fn is_quiet(&self) -> bool {
        // SAFETY: there is an operation, and nobody else touches it.
        unsafe { (*self.place).quiet }
    }

    /// Gives it to `f`; its place is given back when `f` is through, also with
    /// a panic.
    #[inline(always)]
    pub fn with<R>(self, f: impl FnOnce(Posted) -> R) -> R {
        // SAFETY: as above, and it is taken out once: `self` is gone.
        unsafe { self.in_place(|place| f(place.read())) }
    }

    /// As [`Retired::with`], where it is.
    ///
    /// # Safety
    /// `f` moves everything out of it that has something to drop.
    #[inline(always)]
    pub unsafe fn in_place<R>(self, f: impl FnOnce(*const Posted) -> R) -> R {
        let Self { place, release } = self;
        let _release = release;
        f(place)
    }
}

/// Gives the places before `consumed` back when dropped.
struct Release<'f> {
    sequences: Option<&'f Sequences>,
    consumed: u32,
}

impl Drop for Release<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(sequences) = self.sequences {
            sequences.publish_consumed(self.consumed);
        }
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        // SAFETY: nobody else has this value any more.
        while unsafe { self.pop() }.is_some() {}
    }
}

impl fmt::Debug for Fifo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fifo")
            .field("id", &self.id)
            .field("len", &self.len())
            .field("capacity", &self.capacity)
            .finish()
    }
}

/// The posting side of a [`Fifo`].
///
/// Operations are pushed, then published together, before the device is given
/// them: a completion must find its operation.
#[derive(Debug)]
pub(crate) struct FifoWriter {
    fifo: Arc<Fifo>,
    /// Where the next operation goes.
    next: u32,
    /// What is published.
    published: u32,
    /// What had been consumed when that was looked at last.
    seen: u32,
}

impl FifoWriter {
    /// The posting side of an empty queue.
    ///
    /// # Safety
    /// The only one of this queue.
    pub unsafe fn new(fifo: Arc<Fifo>) -> Self {
        let next = fifo.sequences.own_produced();
        Self {
            next,
            published: next,
            seen: fifo.sequences.consumed(),
            fifo,
        }
    }

    /// The queue.
    #[inline(always)]
    pub fn fifo(&self) -> &Arc<Fifo> {
        &self.fifo
    }

    /// Operations that it takes at most.
    #[inline(always)]
    pub fn capacity(&self) -> u32 {
        self.fifo.capacity
    }

    /// The identifier of the operation that is pushed next, if there is room.
    #[inline(always)]
    pub fn next_id(&mut self) -> Option<WorkId> {
        if self.next.wrapping_sub(self.seen) >= self.fifo.capacity {
            self.seen = self.fifo.sequences.consumed();
            if self.next.wrapping_sub(self.seen) >= self.fifo.capacity {
                return None;
            }
        }
        Some(WorkId::new(self.fifo.prefix, self.next))
    }

    /// Adds an operation with `data` for its memory, for which
    /// [`FifoWriter::next_id`] has just found room.
    ///
    /// # Safety
    /// That.
    #[inline(always)]
    pub unsafe fn push(&mut self, info: PostedInfo, data: impl Data) {
        let PostedInfo {
            token,
            companion,
            operation,
            quiet,
        } = info;
        let place: *mut Posted = self.fifo.place(self.next).cast();
        // SAFETY: there is room, so the place is the producer's, and this is
        // the only one. Field by field, each from where it is to where it
        // belongs (see `Data::hold_at`).
        unsafe {
            (&raw mut (*place).token).write(token);
            data.hold_at(&raw mut (*place).payload);
            (&raw mut (*place).companion).write(companion);
            (&raw mut (*place).operation).write(operation);
            (&raw mut (*place).quiet).write(quiet);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Hands what was pushed to the consumer.
    #[inline(always)]
    pub fn publish(&mut self) {
        self.published = self.next;
        self.fifo.sequences.publish_produced(self.next);
    }

    /// Takes back what was pushed and not published.
    #[inline(always)]
    pub fn abandon(&mut self) {
        if self.next != self.published {
            self.take_back();
        }
    }

    #[cold]
    fn take_back(&mut self) {
        while self.next != self.published {
            self.next = self.next.wrapping_sub(1);
            // SAFETY: pushed and not published, so still the producer's.
            let mut posted = unsafe { (*self.fifo.place(self.next)).assume_init_read() };
            // The last first: each undoes what it did.
            posted.companion.take_back();
        }
    }
}

impl Drop for FifoWriter {
    fn drop(&mut self) {
        self.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;
    use crate::qp::Companion;

    /// A queue that has seen `count` operations.
    fn queue(count: u32, capacity: u32) -> FifoWriter {
        let (index, generation) = (7, 9);
        let mut fifo = Fifo::new(QueueId { index, generation }, capacity);
        fifo.sequences = Sequences::starting_at(count);
        // SAFETY: the only one.
        unsafe { FifoWriter::new(Arc::new(fifo)) }
    }

    fn post(writer: &mut FifoWriter, token: u64) -> Option<WorkId> {
        let work = writer.next_id()?;
        let info = PostedInfo {
            token,
            companion: Companion::None,
            operation: Operation::Send,
            quiet: false,
        };
        // SAFETY: there is room.
        unsafe { writer.push(info, ()) };
        writer.publish();
        Some(work)
    }

    /// Ends what `work` names; the tokens of all that are done with it.
    fn retire(fifo: &Fifo, work: WorkId) -> Option<Vec<u64>> {
        let mut done = Vec::new();
        // SAFETY: the only consumer, with nothing kept.
        let retired = unsafe { fifo.retire(work, |posted| done.push(posted.token)) }?;
        retired.with(|posted| done.push(posted.token));
        Some(done)
    }

    /// Every filling and every completion of a small queue, wherever the count
    /// wraps: what is in flight is found, with all before it, and nothing else.
    #[test]
    fn only_what_is_in_flight_is_found() {
        const CAPACITY: u32 = 3;
        let wraps = [0, 1 << 24, 1 << 23, u32::MAX];
        let wraps = &wraps[..if cfg!(miri) { 1 } else { wraps.len() }];
        let reach = if cfg!(miri) { 3 } else { 20 };
        for start in wraps.iter().map(|wrap: &u32| wrap.wrapping_sub(4)) {
            for (fill, first) in (1..=CAPACITY).flat_map(|fill| (0..fill).map(move |f| (fill, f))) {
                let mut writer = queue(start, CAPACITY);
                let fifo = Arc::clone(writer.fifo());
                let mut token = 0;
                let mut flying = std::collections::VecDeque::new();
                for _ in 0..8 {
                    while (flying.len() as u32) < fill {
                        flying.push_back((post(&mut writer, token).unwrap(), token));
                        token += 1;
                    }
                    assert_eq!(writer.next_id().is_none(), fill == CAPACITY);
                    let (consumed, next) = (fifo.sequences.own_consumed(), writer.next);
                    let behind = (1..reach).map(|i| consumed.wrapping_sub(i));
                    let ahead = (0..reach).map(|i| next.wrapping_add(i));
                    let others = behind.chain(ahead).chain([next ^ 1 << 23]);
                    for sequence in others {
                        let work = WorkId::new(fifo.prefix, sequence);
                        assert_eq!(retire(&fifo, work), None, "{sequence:#x} {next:#x}");
                    }
                    let done: Vec<_> = flying.drain(..=first as usize).collect();
                    let tokens = done.iter().map(|(_, token)| *token).collect();
                    let (last, _) = done[first as usize];
                    assert_eq!(retire(&fifo, last), Some(tokens));
                    assert_eq!(retire(&fifo, last), None);
                    assert_eq!(fifo.len(), flying.len() as u32);
                }
            }
        }
    }
}
