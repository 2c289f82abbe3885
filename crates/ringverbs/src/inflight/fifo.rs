//! Operations in flight on a queue whose completions come in order.

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use ring::Sequences;

use super::Posted;
use super::id::{QueueId, WorkId};

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
        self.places[(sequence & self.mask) as usize].get()
    }

    /// Takes out all operations up to and including the one that `work` names,
    /// which is given to `done`; those before it are given to `earlier`. False,
    /// and nothing is taken, if it names none in flight.
    ///
    /// # Safety
    /// One caller at a time: the owner of the completion queue.
    #[inline(always)]
    pub unsafe fn retire(
        &self,
        work: WorkId,
        mut earlier: impl FnMut(Posted),
        done: impl FnOnce(Posted),
    ) -> bool {
        let mut at = self.sequences.own_consumed();
        let there = self.sequences.produced().wrapping_sub(at);
        let ahead = work.ahead_of(at);
        if ahead >= there {
            return false;
        }
        for _ in 0..ahead {
            // SAFETY: between consumed and produced, and this is the consumer.
            let posted = unsafe { (*self.place(at)).assume_init_read() };
            at = at.wrapping_add(1);
            // Published at once: if `earlier` panics, nothing is taken twice.
            self.sequences.publish_consumed(at);
            earlier(posted);
        }
        // SAFETY: as above. Given back before it is used, again for a panic:
        // what is read here is a copy.
        let posted = unsafe { (*self.place(at)).assume_init_read() };
        self.sequences.publish_consumed(at.wrapping_add(1));
        done(posted);
        true
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

    /// Adds an operation, for which [`FifoWriter::next_id`] has just found room.
    ///
    /// # Safety
    /// That.
    #[inline(always)]
    pub unsafe fn push(&mut self, posted: Posted) {
        // SAFETY: there is room, so the place is the producer's, and this is
        // the only one.
        unsafe { (*self.fifo.place(self.next)).write(posted) };
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
            drop(unsafe { (*self.fifo.place(self.next)).assume_init_read() });
        }
    }
}

impl Drop for FifoWriter {
    fn drop(&mut self) {
        self.abandon();
    }
}
