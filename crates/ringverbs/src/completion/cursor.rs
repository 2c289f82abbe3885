//! Completion cursors: reading completions in place.

use std::fmt;

use ring::Span;

use super::entry::{FLAG_CHECKSUMS, FLAG_GRH, FLAG_IMMEDIATE, is_remote_write, received};
use super::{CompletionQueue, Failure, Status, Timestamp};
use crate::data::Payload;
use crate::device::{Entry, FLAG_INVALIDATED};
use crate::inflight::{Posted, Unmatched, WorkId};
use crate::operation::Operation;
use crate::{Error, Result};

/// A cursor over a batch of completions (`ibv_start_poll`, `ibv_next_poll`,
/// `ibv_end_poll`). From [`CompletionQueue::cursor`].
///
/// Entries are not copied, and only the requested fields are read. An entry is
/// valid until the next one is requested; it cannot be kept, and a batch cannot
/// be collected:
///
/// ```compile_fail,E0499
/// fn keep(queue: &mut ringverbs::CompletionQueue) {
///     let mut cursor = queue.cursor();
///     let first = cursor.next_entry().unwrap().unwrap();
///     let second = cursor.next_entry().unwrap().unwrap();
///     first.token();
/// }
/// ```
///
/// ```compile_fail,E0599
/// fn collect(queue: &mut ringverbs::CompletionQueue) {
///     let all: Vec<_> = queue.cursor().collect();
/// }
/// ```
///
/// An entry cannot outlive its batch:
///
/// ```compile_fail,E0515
/// fn outlive(queue: &mut ringverbs::CompletionQueue) -> ringverbs::CursorEntry<'_> {
///     let mut cursor = queue.cursor();
///     cursor.next_entry().unwrap().unwrap()
/// }
/// ```
///
/// Entries that were returned are consumed, whether the cursor is dropped or
/// forgotten; the rest of the batch stays in the queue.
pub struct Cursor<'q> {
    queue: &'q mut CompletionQueue,
    span: Span,
    current: Option<Posted>,
}

impl CompletionQueue {
    /// Starts a batch of the completions that are in the queue. Never blocks, except on
    /// an embedded device (see [`CompletionQueue`]).
    #[inline]
    pub fn cursor(&mut self) -> Cursor<'_> {
        let span = self.available(true);
        self.release_destroyed();
        self.polled(usize::from(span.at != span.end));
        Cursor {
            queue: self,
            span,
            current: None,
        }
    }
}

impl CompletionQueue {
    /// Passes the completions of a batch to `each` until it returns false, and operations
    /// that end without a completion to `earlier`. A completion is consumed also if `each`
    /// panics.
    ///
    /// # Errors
    /// As [`Cursor::next_entry`].
    #[inline]
    pub(crate) fn each_entry(
        &mut self,
        mut each: impl FnMut(CursorEntry<'_>) -> bool,
        mut earlier: impl FnMut(Posted),
    ) -> Result<()> {
        let mut cursor = self.cursor();
        while let Some(entry) = cursor.next_entry_with(&mut earlier)? {
            if !each(entry) {
                break;
            }
        }
        Ok(())
    }
}

/// Applies the completion to the operation: the outcome of a window's bind, and the
/// length of a received message.
#[inline]
fn apply(entry: Entry<'_>, posted: &mut Posted) {
    let status = entry.status();
    posted.attachment.record_outcome(status == 0);
    if posted.operation == Operation::Receive {
        let length = match status {
            0 => received(entry.opcode(), entry.byte_len()),
            _ => 0,
        };
        posted.payload.received(length);
    }
}

impl Cursor<'_> {
    /// Returns the next completion of the batch.
    ///
    /// # Errors
    /// [`Error::Corruption`] for a completion that matches no operation in flight. It is
    /// consumed, and the cursor can continue.
    #[inline]
    pub fn next_entry(&mut self) -> Result<Option<CursorEntry<'_>>> {
        self.next_entry_with(drop)
    }

    /// As [`Cursor::next_entry`]; passes operations that end without a completion to
    /// `earlier`.
    #[inline]
    fn next_entry_with(&mut self, earlier: impl FnMut(Posted)) -> Result<Option<CursorEntry<'_>>> {
        self.step(earlier)?;
        let entry = self.queue.ring.entry(&self.span);
        let has_timestamps = self.queue.has_timestamps;
        Ok(self.current.as_mut().map(|posted| CursorEntry {
            entry,
            posted,
            has_timestamps,
        }))
    }

    /// Advances to the next completion that the user requested.
    #[inline]
    fn step(&mut self, mut earlier: impl FnMut(Posted)) -> Result<()> {
        loop {
            self.put_back();
            if self.span.at == self.span.end {
                return Ok(());
            }
            let queue = &mut *self.queue;
            let entry = queue.ring.entry(&self.span);
            let (wr_id, status) = (entry.wr_id(), entry.status());
            let reaped = queue.reaper.reap(
                WorkId(wr_id),
                &queue.shared.queues,
                &queue.shared.context.inner().srq_tables,
                &mut earlier,
            );
            queue.first_consumed = true;
            match reaped {
                Ok(retired) => {
                    let posted = self.current.insert(retired.with(|posted| posted));
                    apply(entry, posted);
                    if posted.unreported && status == 0 {
                        if let Some(posted) = self.current.take() {
                            earlier(posted);
                        }
                        continue;
                    }
                    return Ok(());
                }
                Err(Unmatched::Stale) => {}
                Err(Unmatched::Corrupt) => return Err(corruption(entry)),
            }
        }
    }

    /// Returns the current entry to the device.
    #[inline]
    fn put_back(&mut self) {
        self.current = None;
        if self.queue.first_consumed {
            self.queue.first_consumed = false;
            self.queue.ring.advance(&mut self.span);
            self.queue.ring.release(&self.span);
        }
    }
}

#[cold]
fn corruption(entry: Entry<'_>) -> Error {
    Error::Corruption {
        wr_id: entry.wr_id(),
        qp_num: entry.qp_num(),
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        self.put_back();
    }
}

impl fmt::Debug for Cursor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cursor").field(&self.queue).finish()
    }
}

/// A completion under a [`Cursor`].
pub struct CursorEntry<'c> {
    entry: Entry<'c>,
    posted: &'c mut Posted,
    /// Whether the entry has a timestamp.
    has_timestamps: bool,
}

impl<'c> CursorEntry<'c> {
    /// Returns the token that the operation was posted with.
    #[inline]
    pub fn token(&self) -> u64 {
        self.posted.token
    }

    /// Returns the type of the operation.
    #[inline]
    pub fn operation(&self) -> Operation {
        self.posted.operation
    }

    /// Returns the number of the queue pair that it was posted to, or that
    /// consumed a shared receive.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.entry.qp_num()
    }

    /// Returns the status.
    #[inline]
    pub fn status(&self) -> Status {
        Status(self.entry.status())
    }

    /// Returns the fields that only a successful completion has.
    ///
    /// # Errors
    /// The reason for the failure.
    #[inline]
    pub fn result(&self) -> Result<SuccessFields<'c>, Failure> {
        let status = self.status();
        if status.is_success() {
            Ok(SuccessFields {
                entry: self.entry,
                has_timestamps: self.has_timestamps,
            })
        } else {
            Err(Failure {
                status,
                vendor_err: self.entry.vendor_err(),
            })
        }
    }

    /// Takes the memory of the operation. Memory that is not taken is released when the
    /// cursor advances.
    #[inline]
    pub fn take_payload(&mut self) -> Payload {
        std::mem::take(&mut self.posted.payload)
    }
}

impl fmt::Debug for CursorEntry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CursorEntry")
            .field("token", &self.token())
            .field("status", &self.status())
            .finish()
    }
}

/// The fields of a successful completion, each read when it is requested.
#[derive(Clone, Copy)]
pub struct SuccessFields<'c> {
    entry: Entry<'c>,
    /// Whether the entry has a timestamp.
    has_timestamps: bool,
}

impl SuccessFields<'_> {
    /// Returns the bytes transferred, as
    /// [`Success::byte_len`](super::Success::byte_len).
    #[inline]
    pub fn byte_len(&self) -> u32 {
        self.entry.byte_len()
    }

    /// Returns the immediate data, in host byte order.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        (self.entry.wc_flags() & FLAG_IMMEDIATE != 0).then(|| u32::from_be(self.entry.ex()))
    }

    /// Returns the local rkey that the message has invalidated.
    #[inline]
    pub fn invalidated(&self) -> Option<u32> {
        (self.entry.wc_flags() & FLAG_INVALIDATED != 0).then(|| self.entry.ex())
    }

    /// Returns the time at which the device wrote the completion; `None` if the
    /// queue was built without
    /// [`timestamps`](crate::CompletionQueueBuilder::timestamps). Failed
    /// completions have none: the device uses the field for the error.
    #[inline]
    pub fn timestamp(&self) -> Option<Timestamp> {
        // SAFETY: `has_timestamps` says that the queue was created with timestamps.
        (self.has_timestamps).then(|| Timestamp(unsafe { self.entry.time() }))
    }

    /// Returns the sender's queue pair number, of a datagram.
    #[inline]
    pub fn src_qp(&self) -> u32 {
        self.entry.src_qp()
    }

    /// Returns whether a datagram has a global route header.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.entry.wc_flags() & FLAG_GRH != 0
    }

    /// Returns whether the device validated the checksums of a raw packet.
    #[inline]
    pub(crate) fn checksums_ok(&self) -> bool {
        self.entry.wc_flags() & FLAG_CHECKSUMS != 0
    }

    /// Returns whether a write with immediate data of the peer consumed the
    /// receive.
    #[inline]
    pub fn is_remote_write(&self) -> bool {
        is_remote_write(self.entry.opcode())
    }
}

impl fmt::Debug for SuccessFields<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SuccessFields")
            .field("byte_len", &self.byte_len())
            .field("immediate", &self.immediate())
            .finish()
    }
}
