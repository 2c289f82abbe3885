//! The reader of a completion queue.
//!
//! [`WcRing::available`] reads the indices once and returns a span of
//! entries; [`WcRing::entry`] is one of them, in place;
//! [`WcRing::release`] releases all that were read at once.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use ring::{Consumer, Ring, Span};

use crate::WorkCompletion;

/// A mapped completion queue.
///
/// Thread rule: one reader at a time; two would get the same entries. The owner of the queue
/// ensures that by a lock or a single thread, not by `&mut`, since a batch spans several calls
/// of a C interface. No method allocates, locks or makes a system call.
#[derive(Debug)]
pub struct WcRing {
    consumer: Consumer,
    ring: Ring,
}

impl WcRing {
    /// Minimum size of an entry in bytes.
    pub const ENTRY_SIZE: usize = size_of::<WorkCompletion>();

    /// Creates a reader of a mapped queue. A ring of entries smaller than
    /// [`WcRing::ENTRY_SIZE`] is always empty.
    pub fn new(mut ring: Ring) -> Self {
        if ring.stride() < Self::ENTRY_SIZE {
            ring.seal();
        }
        Self {
            consumer: Consumer::new(ring.indices()),
            ring,
        }
    }

    /// The consumer of the ring: arming, and [`ring::IndexCheck`].
    pub fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    /// Capacity of the queue.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Makes the queue read as empty: the driver has moved it, and it could not be mapped.
    pub(crate) fn seal(&mut self) {
        self.ring.seal();
        self.consumer = Consumer::new(self.ring.indices());
    }

    pub(crate) fn into_mapping(self) -> ring::Mapping {
        self.ring.into_mapping()
    }

    /// Returns the available completions.
    #[inline]
    pub fn available(&self) -> Span {
        self.consumer.available()
    }

    /// Steps to the next completion of the span. Returns false at its end.
    #[inline]
    pub fn step_within(&self, span: &mut Span) -> bool {
        let next = self.consumer.indices().next(span.at);
        if next == span.end {
            return false;
        }
        span.at = next;
        true
    }

    /// Steps to the next completion; reads the producer index again at the end of the span.
    /// Returns false if there is no next completion.
    #[inline]
    pub fn step(&self, span: &mut Span) -> bool {
        if self.step_within(span) {
            return true;
        }
        span.end = self.consumer.produced();
        self.step_within(span)
    }

    /// Returns the completion at `span.at`, in place. At the end of the span the entry is
    /// stale.
    #[inline]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        Entry {
            entry: self.ring.slots().slot(span.at).cast(),
            ring: PhantomData,
        }
    }

    /// [`WcRing::entry`] without a check of the position.
    ///
    /// # Safety
    /// `span.at` is from [`WcRing::available`], or a step from there,
    /// and the queue has not been resized since.
    #[inline]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        Entry {
            // SAFETY: by contract.
            entry: unsafe { self.ring.slots().slot_inside(span.at).cast() },
            ring: PhantomData,
        }
    }

    /// Releases everything up to and including `span.at`.
    #[inline]
    pub fn release(&self, span: &Span) {
        self.consumer.release(self.consumer.indices().next(span.at));
    }

    /// Reads and releases up to `out.len()` completions, in order. Returns how
    /// many were written to the front of `out`.
    #[inline]
    pub fn take(&self, out: &mut [MaybeUninit<WorkCompletion>]) -> usize {
        let span = self.available();
        let indices = self.consumer.indices();
        let unread = indices.distance(span.at, span.end);
        let count = unread.min(out.len());
        if count == 0 {
            return 0;
        }
        let slots = self.ring.slots();
        let stop = indices.advance(span.at, count);
        let mut at = span.at;
        let mut to = out.as_mut_ptr();
        // A loop to a position: the compiler would unroll a counted loop, which is slower
        // for a batch of one.
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

    /// Removes the unread completions of a queue pair; the others stay, in order.
    /// Called after the queue pair was reset or destroyed, outside of a span.
    #[cold]
    pub fn clean(&self, qp_num: u32) {
        let span = self.available();
        let (indices, slots) = (self.consumer.indices(), self.ring.slots());
        let slot = |n| {
            let at = indices.advance(span.at, n);
            slots.slot(at).cast::<WorkCompletion>()
        };
        // From the last to the first: those that stay move towards the end.
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

/// A completion in the queue's memory, valid until it is released. Each field is
/// read when it is requested.
#[derive(Clone, Copy)]
pub struct Entry<'r> {
    entry: NonNull<WorkCompletion>,
    ring: PhantomData<&'r WcRing>,
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

    /// The entry's address, for an interface that reads it in later calls.
    #[inline]
    pub fn as_ptr(&self) -> *const WorkCompletion {
        self.entry.as_ptr()
    }
}
