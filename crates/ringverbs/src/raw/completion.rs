//! The cursor over completions.

use crate::completion::{CompletionQueue, Status, Timestamp};
use crate::device;

/// A completion in the queue's memory. Each field is read when it is asked for.
///
/// It cannot outlive the call that it was given to. After a failure only
/// `wr_id`, `status`, `qp_num` and `vendor_err` mean anything.
#[derive(Clone, Copy)]
pub struct Entry<'r> {
    entry: device::Entry<'r>,
    /// The entry has its time.
    timed: bool,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)+) => {
        impl Entry<'_> {$(
            $(#[$doc])*
            #[inline(always)]
            pub fn $name(&self) -> $type {
                self.entry.$name()
            }
        )+}
    };
}

fields! {
    /// The work request's identifier.
    wr_id: u64;
    /// What was done (`enum ibv_wc_opcode`).
    opcode: u32;
    /// The device's own number of an error.
    vendor_err: u32;
    /// Bytes moved.
    byte_len: u32;
    /// Immediate data, as it came (big-endian), or the key that was
    /// invalidated.
    ex: u32;
    /// Queue pair that the work request was posted to.
    qp_num: u32;
    /// The sender's queue pair, of a datagram.
    src_qp: u32;
    /// Which of the above are set (`enum ibv_wc_flags`).
    wc_flags: u32;
}

impl Entry<'_> {
    /// How it ended.
    #[inline(always)]
    pub fn status(&self) -> Status {
        Status(self.entry.status())
    }

    /// When the device wrote it, if it was done; `None` of a queue that was built
    /// without [`timestamps`](crate::CompletionQueueBuilder::timestamps), and of
    /// a failure.
    #[inline(always)]
    pub fn timestamp(&self) -> Option<Timestamp> {
        if !self.timed || !self.status().is_success() {
            return None;
        }
        // SAFETY: the entry is of a queue with times.
        Some(Timestamp(unsafe { device::read_time(&self.entry) }))
    }
}

impl CompletionQueue {
    /// Gives up to `max` completions to `each`, in order, and takes them out of
    /// the queue. Returns how many. Indices are read once and published once;
    /// the entries are looked at in place.
    ///
    /// What a ConnectX writes that makes no sense is left out.
    ///
    /// Operations of the safe layer whose completions are read by this are not
    /// brought to an end by it: their memory stays in flight.
    #[inline(always)]
    pub fn poll_raw(&mut self, max: usize, mut each: impl FnMut(Entry<'_>)) -> usize {
        let mut span = self.available_raw();
        let (ring, timed) = (self.ring(), self.timed);
        if span.at == span.end || max == 0 {
            return 0;
        }
        // A loop to a position: one condition for each entry.
        let count = ring.limit(&mut span, max);
        loop {
            // SAFETY: the span is fresh and not at its end, and the queue is not
            // resized while this borrows it.
            let entry = unsafe { ring.entry_inside(&span) };
            each(Entry { entry, timed });
            ring.advance(&mut span);
            if span.at == span.end {
                break;
            }
        }
        ring.release(&span);
        count
    }
}
