//! Looking at completions where they lie.

use std::fmt;

use super::entry::{FLAG_GRH, FLAG_IMMEDIATE, is_remote_write, received};
use super::{CompletionQueue, Failure, Status, Timestamp};
use crate::data::Payload;
use crate::device::{self, Entry, FLAG_INVALIDATED, Span};
use crate::inflight::{Nothing, Posted, WorkId};
use crate::operation::Operation;
use crate::{Error, Result};

/// A batch of completions, looked at one after the other (`ibv_start_poll`,
/// `ibv_next_poll`, `ibv_end_poll`). From [`CompletionQueue::cursor`].
///
/// An entry is not copied, and only the fields asked for are read. It lives
/// until the next one is asked for; it cannot be kept, and the batch cannot be
/// collected:
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
/// What has been looked at is out of the queue, whether the cursor is dropped
/// or forgotten; the rest of the batch stays in the queue.
pub struct Cursor<'q> {
    queue: &'q mut CompletionQueue,
    span: Span,
    current: Option<Posted>,
}

impl CompletionQueue {
    /// Starts a batch of what is in the queue now.
    #[inline]
    pub fn cursor(&mut self) -> Cursor<'_> {
        let span = self.available();
        self.look_for_departures();
        Cursor {
            queue: self,
            span,
            current: None,
        }
    }
}

impl Cursor<'_> {
    /// The next completion of the batch, if there is one.
    ///
    /// # Errors
    /// [`Error::Corruption`] for a completion of nothing that was in flight. It
    /// is out of the queue; one may go on.
    #[inline]
    pub fn next_entry(&mut self) -> Result<Option<CursorEntry<'_>>> {
        self.step()?;
        let entry = self.queue.ring.entry(&self.span);
        let timed = self.queue.timed;
        Ok(self.current.as_mut().map(|posted| CursorEntry {
            entry,
            posted,
            timed,
        }))
    }

    /// Makes the next completion that somebody asked for the current one.
    #[inline]
    fn step(&mut self) -> Result<()> {
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
                &queue.shared.context.inner().slabs,
                drop,
            );
            queue.held = true;
            match reaped {
                Ok(retired) => {
                    let posted = self.current.insert(retired.with(|posted| posted));
                    posted.companion.settle(status == 0);
                    if posted.quiet && status == 0 {
                        continue;
                    }
                    if posted.operation == Operation::Receive {
                        let here = match status {
                            0 => received(entry.opcode(), entry.byte_len()),
                            _ => 0,
                        };
                        posted.payload.received(here);
                    }
                    return Ok(());
                }
                Err(Nothing::Stale) => {}
                Err(Nothing::Corrupt) => return Err(corruption(entry)),
            }
        }
    }

    /// Gives the entry that was looked at last back to the device.
    #[inline(always)]
    fn put_back(&mut self) {
        self.current = None;
        if self.queue.held {
            self.queue.held = false;
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

/// A completion that a [`Cursor`] looks at.
pub struct CursorEntry<'c> {
    entry: Entry<'c>,
    posted: &'c mut Posted,
    /// The entry has its time.
    timed: bool,
}

impl<'c> CursorEntry<'c> {
    /// The token that the operation was posted with.
    #[inline]
    pub fn token(&self) -> u64 {
        self.posted.token
    }

    /// What it was.
    #[inline]
    pub fn operation(&self) -> Operation {
        self.posted.operation
    }

    /// The queue pair that it was posted to, or that a shared receive was used
    /// by.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.entry.qp_num()
    }

    /// How it ended.
    #[inline]
    pub fn status(&self) -> Status {
        Status(self.entry.status())
    }

    /// What else there is to ask: after a failure, not what only a success has.
    ///
    /// # Errors
    /// Why the operation was not done.
    #[inline]
    pub fn result(&self) -> Result<SuccessFields<'c>, Failure> {
        let status = self.status();
        if status.is_success() {
            Ok(SuccessFields {
                entry: self.entry,
                timed: self.timed,
            })
        } else {
            Err(Failure {
                status,
                vendor_err: self.entry.vendor_err(),
            })
        }
    }

    /// Its memory. What is not taken is freed with the next step.
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

/// The fields that a successful completion has, each read when asked for.
#[derive(Clone, Copy)]
pub struct SuccessFields<'c> {
    entry: Entry<'c>,
    /// The entry has its time.
    timed: bool,
}

impl SuccessFields<'_> {
    /// Bytes moved, as [`Success::byte_len`](super::Success::byte_len).
    #[inline]
    pub fn byte_len(&self) -> u32 {
        self.entry.byte_len()
    }

    /// Immediate data, host byte order.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        (self.entry.wc_flags() & FLAG_IMMEDIATE != 0).then(|| u32::from_be(self.entry.ex()))
    }

    /// The key of ours that the message has invalidated.
    #[inline]
    pub fn invalidated(&self) -> Option<u32> {
        (self.entry.wc_flags() & FLAG_INVALIDATED != 0).then(|| self.entry.ex())
    }

    /// When the device wrote it; `None` of a queue that was built without
    /// [`timestamps`](crate::CompletionQueueBuilder::timestamps). A failure has
    /// no time: the device has other things to say in its place.
    #[inline]
    pub fn timestamp(&self) -> Option<Timestamp> {
        // SAFETY: the entry is of a queue with times.
        (self.timed).then(|| Timestamp(unsafe { device::read_time(&self.entry) }))
    }

    /// The sender's queue pair, of a datagram.
    #[inline]
    pub fn src_qp(&self) -> u32 {
        self.entry.src_qp()
    }

    /// Whether a datagram came with its route header.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.entry.wc_flags() & FLAG_GRH != 0
    }

    /// Whether a receive was used up by the peer's write with immediate data.
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
