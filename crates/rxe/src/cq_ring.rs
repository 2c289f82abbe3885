//! The cursor over work completions.
//!
//! [`CompletionRing::available`] reads the indices once and gives a span of
//! entries; [`CompletionRing::entry`] looks at one in place;
//! [`CompletionRing::release`] gives all that were read back at once.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use ring::{Consumer, Ring, Span};

use crate::WorkCompletion;

/// A mapped completion queue.
///
/// Thread rule: one reader at a time; two would be given the same entries.
/// That is kept by the owner of the queue (a lock, or a single thread), not by
/// `&mut`, because it spans several calls of a C interface. No method
/// allocates, locks or calls the system.
#[derive(Debug)]
pub struct CompletionRing {
    consumer: Consumer,
    ring: Ring,
}

impl CompletionRing {
    /// Bytes that an entry must have at least.
    pub const ENTRY_SIZE: usize = size_of::<WorkCompletion>();

    /// A cursor over a mapped queue. Over a ring of entries smaller than
    /// [`CompletionRing::ENTRY_SIZE`] it is always empty.
    pub fn new(mut ring: Ring) -> Self {
        if ring.stride() < Self::ENTRY_SIZE {
            ring.seal();
        }
        Self {
            consumer: Consumer::new(ring.indices()),
            ring,
        }
    }

    /// The consuming side of the ring: arming, and [`ring::IndexCheck`].
    pub fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    /// Completions that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Reads as empty from now on: the driver has moved the queue out of reach.
    pub(crate) fn seal(&mut self) {
        self.ring.seal();
        self.consumer = Consumer::new(self.ring.indices());
    }

    pub(crate) fn into_mapping(self) -> ring::Mapping {
        self.ring.into_mapping()
    }

    /// The completions that are there now.
    #[inline]
    pub fn available(&self) -> Span {
        self.consumer.available()
    }

    /// Steps to the next completion of the span. False, and no step, at its
    /// end.
    #[inline]
    pub fn step_within(&self, span: &mut Span) -> bool {
        let next = self.consumer.indices().next(span.at);
        if next == span.end {
            return false;
        }
        span.at = next;
        true
    }

    /// Steps to the next completion, asking the device for more at the end of
    /// the span. False, and no step, when there is none.
    #[inline]
    pub fn step(&self, span: &mut Span) -> bool {
        if self.step_within(span) {
            return true;
        }
        span.end = self.consumer.produced();
        self.step_within(span)
    }

    /// The completion at `span.at`, looked at in place. The span must not be
    /// empty, or the entry is an old one.
    #[inline]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        Entry {
            entry: self.ring.slots().slot(span.at).cast(),
            ring: PhantomData,
        }
    }

    /// [`CompletionRing::entry`] of a span that is known to be of this ring.
    ///
    /// # Safety
    /// `span.at` is from [`CompletionRing::available`], or a step from there,
    /// and the queue has not been resized since.
    #[inline]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        Entry {
            // SAFETY: by contract.
            entry: unsafe { self.ring.slots().slot_inside(span.at).cast() },
            ring: PhantomData,
        }
    }

    /// Gives everything up to and including `span.at` back to the device.
    #[inline]
    pub fn release(&self, span: &Span) {
        self.consumer.release(self.consumer.indices().next(span.at));
    }

    /// Takes up to `out.len()` completions out of the queue, in order, each
    /// once. Returns how many were written to the front of `out`.
    #[inline]
    pub fn take(&self, out: &mut [MaybeUninit<WorkCompletion>]) -> usize {
        let span = self.available();
        let indices = self.consumer.indices();
        let there = indices.distance(span.at, span.end);
        let count = there.min(out.len());
        if count == 0 {
            return 0;
        }
        let slots = self.ring.slots();
        let stop = indices.advance(span.at, count);
        let mut at = span.at;
        let mut to = out.as_mut_ptr();
        // A loop to a position, not over a count: the compiler neither unrolls
        // it nor prepares to, and a batch of one pays for one.
        loop {
            // SAFETY: `at` is from the ring's indices; of the entry 48 bytes or
            // more are mapped, and any bit pattern is a `WorkCompletion`.
            // `count` is at most `out.len()` and less than the ring's slots,
            // so the loop ends before the end of `out`.
            unsafe {
                (*to).write(slots.slot_inside(at).cast::<WorkCompletion>().read());
                to = to.add(1);
            }
            at = indices.next(at);
            if at == stop {
                break;
            }
        }
        self.consumer.release(stop);
        count
    }

    /// Takes out the unread completions of a queue pair, by its number; the others
    /// stay, in order. After the queue pair was reset or destroyed, and in no span.
    #[cold]
    pub fn clean(&self, qp_num: u32) {
        let span = self.available();
        let (indices, slots) = (self.consumer.indices(), self.ring.slots());
        let slot = |n| {
            let at = indices.advance(span.at, n);
            slots.slot(at).cast::<WorkCompletion>()
        };
        // From the last to the first: those that stay move up.
        let mut to = indices.distance(span.at, span.end);
        for from in (0..to).rev() {
            // SAFETY: entries of the ring that the driver has written and that are
            // not consumed; any bit pattern is a `WorkCompletion`.
            unsafe {
                let wc = slot(from).read();
                if wc.qp_num != qp_num {
                    to -= 1;
                    slot(to).write(wc);
                }
            }
        }
        if to != 0 {
            self.consumer.release(indices.advance(span.at, to));
        }
    }
}

/// A completion in the queue's memory. Gone once released: it borrows the
/// ring, and reads what is there when asked.
#[derive(Clone, Copy)]
pub struct Entry<'r> {
    entry: NonNull<WorkCompletion>,
    ring: PhantomData<&'r CompletionRing>,
}

/// Reads one field of the entry.
macro_rules! field {
    ($(#[$doc:meta])* $name:ident: $type:ty) => {
        $(#[$doc])*
        #[inline]
        pub fn $name(&self) -> $type {
            // SAFETY: the entry lies in the mapping that `'r` keeps, aligned;
            // any bit pattern is a value.
            unsafe { (&raw const (*self.entry.as_ptr()).$name).read() }
        }
    };
}

impl Entry<'_> {
    field!(
        /// The work request's identifier.
        wr_id: u64);
    field!(
        /// See [`WorkCompletion::status`].
        status: u32);
    field!(
        /// See [`WorkCompletion::opcode`].
        opcode: u32);
    field!(
        /// See [`WorkCompletion::vendor_err`].
        vendor_err: u32);
    field!(
        /// See [`WorkCompletion::byte_len`].
        byte_len: u32);
    field!(
        /// See [`WorkCompletion::ex`].
        ex: u32);
    field!(
        /// See [`WorkCompletion::qp_num`].
        qp_num: u32);
    field!(
        /// See [`WorkCompletion::src_qp`].
        src_qp: u32);
    field!(
        /// See [`WorkCompletion::wc_flags`].
        wc_flags: u32);
    field!(
        /// See [`WorkCompletion::slid`].
        slid: u16);
    field!(
        /// See [`WorkCompletion::sl`].
        sl: u8);
    field!(
        /// See [`WorkCompletion::dlid_path_bits`].
        dlid_path_bits: u8);

    /// The entry's place, for an interface that reads it in later calls.
    #[inline]
    pub fn as_ptr(&self) -> *const WorkCompletion {
        self.entry.as_ptr()
    }
}
