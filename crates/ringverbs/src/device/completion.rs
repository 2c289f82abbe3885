//! The reader of completions: one for all devices.
//!
//! rdma_rxe writes `struct ib_uverbs_wc` into a ring that is mapped, and those
//! are read in place. What a ConnectX writes means nothing without the queue
//! that it is about; it is decoded, some completions ahead, into a ring of the
//! same form in memory of the process's own ([`Source`]). So all that reads
//! completions is the same, and the device is asked for once a batch.

use super::decoded::Source;
use super::{Entry, Span, WorkCompletion};
use crate::context::Ctx;
use crate::error::Result;

/// The status of what stands for a completion that made no sense: one that
/// names no operation. No device has it.
pub(crate) const SENSELESS: u32 = u32::MAX;

/// A copy of a completion.
#[inline(always)]
pub(crate) fn read(entry: &Entry<'_>) -> WorkCompletion {
    // SAFETY: the entry lies in the ring, whole and aligned; any bytes are a
    // `WorkCompletion`.
    unsafe { entry.as_ptr().read() }
}

/// When a completion was written, in ticks of the device's clock.
///
/// # Safety
/// It is of a queue that was made with times.
#[inline(always)]
pub(crate) unsafe fn read_time(entry: &Entry<'_>) -> u64 {
    // SAFETY: there is one behind each entry of such a queue's ring
    // (`mlx5::Timed`), aligned as the entry is.
    unsafe { entry.as_ptr().add(1).cast::<u64>().read() }
}

/// A completion queue's ring.
#[derive(Debug)]
pub(crate) struct CompletionRing {
    ring: ::rxe::CompletionRing,
    /// What fills the ring, if the kernel's driver does not.
    source: Option<Box<Source>>,
}

impl CompletionRing {
    pub(super) fn new(ring: ::rxe::CompletionRing, source: Option<Box<Source>>) -> Self {
        Self { ring, source }
    }

    /// Whether what the device writes has to be decoded: see
    /// [`CompletionRing::available`].
    pub fn is_decoded(&self) -> bool {
        self.source.is_some()
    }

    /// The completions that are in the ring now: all that are there, unless the
    /// queue is decoded.
    #[inline(always)]
    pub fn ready(&mut self) -> Span {
        self.ring.available()
    }

    /// The completions that are there now. Those that make no sense are left
    /// out, unless there is somebody to `tell`.
    #[inline(always)]
    pub fn available(&mut self, tell: bool) -> Span {
        let span = self.ring.available();
        match &self.source {
            Some(source) if span.at == span.end && !source.is_idle() => self.decode(tell),
            _ => span,
        }
    }

    /// Decodes what has come, into the ring, which is empty.
    #[inline(never)]
    fn decode(&mut self, tell: bool) -> Span {
        if let Some(source) = &mut self.source {
            source.fill(tell);
        }
        self.ring.available()
    }

    /// The completion at `span.at`, in place.
    #[inline(always)]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        self.ring.entry(span)
    }

    /// The same of a span that is known to be of this ring.
    ///
    /// # Safety
    /// As of the device crate's: the span is from [`available`](Self::available),
    /// or a step from there, and the queue has not been resized since.
    #[inline(always)]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        // SAFETY: passed on.
        unsafe { self.ring.entry_inside(span) }
    }

    /// Ends a span that is not empty behind its first completions, `max` or as
    /// many as it has. Returns how many that are.
    #[inline(always)]
    pub fn limit(&self, span: &mut Span, max: usize) -> usize {
        let indices = self.ring.consumer().indices();
        if max == 1 {
            // No shifts, which cost more than the completion.
            span.end = indices.next(span.at);
            return 1;
        }
        let count = indices.distance(span.at, span.end).min(max);
        span.end = indices.advance(span.at, count);
        count
    }

    /// Steps to the next one.
    #[inline(always)]
    pub fn advance(&self, span: &mut Span) {
        span.at = self.ring.consumer().indices().next(span.at);
    }

    /// Gives everything before `span.at` back to the device.
    #[inline(always)]
    pub fn release(&self, span: &Span) {
        self.ring.consumer().release(span.at);
    }

    /// Arms the queue, then looks whether anything is there.
    pub fn arm_and_look(&mut self, object: &uverbs::Cq<Ctx>, solicited_only: bool) -> Result<bool> {
        match &self.source {
            None => (self.ring.consumer()).arm_and_look(|| Ok(object.req_notify(solicited_only)?)),
            Some(source) => {
                source.arm(solicited_only);
                let span = self.available(true);
                Ok(span.at != span.end)
            }
        }
    }

    pub fn capacity(&self) -> u32 {
        match &self.source {
            None => self.ring.capacity(),
            Some(source) => source.capacity(),
        }
    }

    /// Resizes the queue, keeping what is in it.
    pub fn resize(
        &mut self,
        object: &uverbs::Cq<Ctx>,
        peek: &ring::Peek,
        retired: &mut Vec<ring::Retired>,
        cqe: u32,
    ) -> Result<u32> {
        if let Some(source) = &mut self.source {
            return source.resize(object, cqe);
        }
        let ring = &mut self.ring;
        Ok(::rxe::CompletionQueue::resize(
            object, ring, peek, retired, cqe,
        )?)
    }
}
