//! Reading of completion queues.

use std::marker::PhantomData;

use ring::Span;
use uverbs::{Cq, WorkCompletion};

use super::{mlx5, rxe};
use crate::context::Ctx;
use crate::error::Result;

/// The status of the placeholder for a malformed completion, which names no operation; no
/// device uses this status.
pub(super) const MALFORMED: u32 = u32::MAX;

/// The source of a completion queue's completions.
///
/// The driver of rdma_rxe writes `struct ib_uverbs_wc` into a mapped ring, which is read in
/// place. CQEs of ConnectX are first decoded into an array, several at a time. A batch is a
/// [`Span`] of positions in the ring or array, from [`available`](Self::available).
#[derive(Debug)]
pub(crate) enum DeviceCompletions {
    Rxe(rxe::RxeCompletions),
    Mlx5(Box<mlx5::Mlx5Completions>),
}

impl DeviceCompletions {
    /// Returns the available completions; on ConnectX at most as many as the array holds, and
    /// including malformed ones if `report` is set.
    #[inline]
    pub fn available(&mut self, report: bool) -> Span {
        for_device!(self, ring => ring.available(report))
    }

    /// Returns the completions that were not released, without decoding more.
    pub fn unreleased(&self) -> Span {
        for_device!(self, ring => ring.unreleased())
    }

    /// Returns the completion at `span.at`; at the end of the span, a stale entry.
    #[inline]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        for_device!(self, ring => ring.entry(span))
    }

    /// As [`entry`](Self::entry), without a check of the position.
    ///
    /// # Safety
    /// The span is from [`available`](Self::available), or a step from there, and
    /// the queue has not been resized since.
    #[inline]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        // SAFETY: the caller's obligation.
        unsafe { for_device!(self, ring => ring.entry_inside(span)) }
    }

    /// Limits a non-empty span to `max` completions. Returns its number of completions.
    #[inline]
    pub fn limit(&self, span: &mut Span, max: usize) -> usize {
        for_device!(self, ring => ring.limit(span, max))
    }

    /// Advances to the next completion.
    #[inline]
    pub fn advance(&self, span: &mut Span) {
        for_device!(self, ring => ring.advance(span));
    }

    /// Releases the entries before `span.at`.
    #[inline]
    pub fn release(&mut self, span: &Span) {
        for_device!(self, ring => ring.release(span));
    }

    /// Arms the queue, then returns whether there is a completion.
    pub fn arm_and_check(&mut self, object: &Cq<Ctx>, solicited_only: bool) -> Result<bool> {
        for_device!(self, ring => ring.arm_and_check(object, solicited_only))
    }

    pub fn capacity(&self) -> u32 {
        for_device!(self, ring => ring.capacity())
    }

    /// Resizes the queue, keeping the completions in it. Returns its capacity.
    pub fn resize(&mut self, object: &Cq<Ctx>, cqe: u32) -> Result<u32> {
        for_device!(self, ring => ring.resize(object, cqe))
    }
}

/// A completion in the memory of its queue, or decoded. Each field is read when
/// it is requested.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'r> {
    at: *const WorkCompletion,
    ring: PhantomData<&'r DeviceCompletions>,
}

macro_rules! fields {
    ($($name:ident: $type:ty,)+) => {$(
        #[inline]
        pub fn $name(&self) -> $type {
            // SAFETY: by `Entry::new`; any bytes are a value.
            unsafe { (&raw const (*self.at).$name).read() }
        }
    )+};
}

impl Entry<'_> {
    /// # Safety
    /// A `WorkCompletion` can be read there, aligned, for the lifetime. The device
    /// may write there at any time.
    #[inline]
    pub(super) unsafe fn new(at: *const WorkCompletion) -> Self {
        Self {
            at,
            ring: PhantomData,
        }
    }

    fields! {
        wr_id: u64,
        status: u32,
        opcode: u32,
        vendor_err: u32,
        byte_len: u32,
        ex: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: u32,
    }

    /// Returns a copy.
    #[inline]
    pub fn read(&self) -> WorkCompletion {
        // SAFETY: by `Entry::new`; any bytes are a `WorkCompletion`.
        unsafe { self.at.read() }
    }

    /// Returns when the completion was written, in ticks of the device's clock.
    ///
    /// # Safety
    /// The queue was created with timestamps.
    #[inline]
    pub unsafe fn time(&self) -> u64 {
        // SAFETY: only a ConnectX has timestamps, and its entries are
        // `mlx5::TimedCompletion`: the time follows the completion (asserted there).
        unsafe { self.at.add(1).cast::<u64>().read() }
    }
}
