//! Completion cursor of the raw layer.

use crate::completion::{CompletionQueue, Status, Timestamp};
use crate::device;

/// A completion in the ring's memory. Each field is read when it is requested.
///
/// It is valid only during the callback. After a failure only `wr_id`, `status`, `qp_num`
/// and `vendor_err` are valid.
#[derive(Clone, Copy)]
pub struct Entry<'r> {
    entry: device::Entry<'r>,
    /// Whether the entry has a timestamp.
    has_timestamps: bool,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)+) => {
        impl Entry<'_> {$(
            $(#[$doc])*
            #[inline]
            pub fn $name(&self) -> $type {
                self.entry.$name()
            }
        )+}
    };
}

fields! {
    /// The work request identifier.
    wr_id: u64;
    /// The operation (`enum ibv_wc_opcode`).
    opcode: u32;
    /// The device's vendor error code.
    vendor_err: u32;
    /// Bytes transferred.
    byte_len: u32;
    /// The immediate data as received (big-endian), or the invalidated rkey.
    ex: u32;
    /// The number of the queue pair that the work request was posted to.
    qp_num: u32;
    /// The sender's queue pair number, of a datagram.
    src_qp: u32;
    /// The fields that are valid (`enum ibv_wc_flags`).
    wc_flags: u32;
}

impl Entry<'_> {
    /// Returns the status.
    #[inline]
    pub fn status(&self) -> Status {
        Status(self.entry.status())
    }

    /// Returns the time at which the device wrote the completion; `None` if the
    /// queue was built without
    /// [`timestamps`](crate::CompletionQueueBuilder::timestamps), and for a
    /// failure.
    #[inline]
    pub fn timestamp(&self) -> Option<Timestamp> {
        if !self.has_timestamps || !self.status().is_success() {
            return None;
        }
        // SAFETY: `has_timestamps` says that the queue was created with timestamps.
        Some(Timestamp(unsafe { self.entry.time() }))
    }
}

impl CompletionQueue {
    /// Passes up to `max` completions to `each`, in order, and consumes them.
    /// Returns their number. Indices are read once and published once; the
    /// entries are read in place.
    ///
    /// Malformed CQEs of a ConnectX are skipped.
    ///
    /// Reading completions of operations of the safe layer here does not retire these
    /// operations: their memory stays in flight.
    #[inline]
    pub fn poll_raw(&mut self, max: usize, mut each: impl FnMut(Entry<'_>)) -> usize {
        let mut span = self.available(false);
        if span.at == span.end || max == 0 {
            self.polled(0);
            return 0;
        }
        let (ring, has_timestamps) = (&mut *self.ring, self.has_timestamps);
        // The limit is applied to the end position, for one condition per entry.
        let count = ring.limit(&mut span, max);
        loop {
            // SAFETY: the span is fresh and not at its end, and the queue is not
            // resized while this borrows it.
            let entry = unsafe { ring.entry_inside(&span) };
            each(Entry {
                entry,
                has_timestamps,
            });
            ring.advance(&mut span);
            if span.at == span.end {
                break;
            }
        }
        ring.release(&span);
        self.polled(count);
        count
    }
}
