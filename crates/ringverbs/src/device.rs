//! The devices behind one face: one variant for each driver that there is code
//! for, chosen when an object is made. No type of a device crate goes further
//! than this module.

use std::slice;

use uverbs::{CqInit, PdHandle, QpInit, SrqInit, SrqModify};

use crate::context::Ctx;
use crate::error::{Error, Result};
use crate::operation::RemoteAddr;

pub(crate) use ring::Span;
pub(crate) use rxe::{BindMwWr as WindowBinding, Sge, WorkCompletion};

/// Operation codes and flags of send work requests, as the kernel numbers
/// them.
pub(crate) use rxe::{Opcode, SendFlags};

/// The flag of a completion that a key was invalidated. rdma_rxe passes on the
/// kernel's own bit (`IB_WC_WITH_INVALIDATE`), which is another than that of the
/// C interface (`IBV_WC_WITH_INV`); it sets neither for anything else.
pub(crate) const FLAG_INVALIDATED: u32 = 1 << 2 | 1 << 3;

/// The rings of a queue pair, and its doorbell.
pub(crate) struct QueuePair {
    pub object: uverbs::Qp<Ctx>,
    pub send: SendQueue,
    pub recv: Option<RecvQueue>,
    pub doorbell: Doorbell,
}

impl QueuePair {
    pub fn create(context: &Ctx, init: &QpInit) -> Result<Self> {
        let made = rxe::QueuePair::create(context, init)?;
        // SAFETY: the queue pair, and so its doorbell, does not outlive the
        // context that it keeps.
        let direct = unsafe { made.doorbell.direct() };
        Ok(Self {
            object: made.object,
            send: SendQueue::Rxe(made.send),
            recv: made.recv.map(RecvQueue::Rxe),
            doorbell: match direct {
                Some(direct) => Doorbell::Direct(direct),
                None => Doorbell::Kernel(made.doorbell),
            },
        })
    }
}

/// What tells the device of work.
#[derive(Debug)]
pub(crate) enum Doorbell {
    /// A system call of the real kernel.
    Direct(rxe::DirectDoorbell),
    /// The same of any kernel.
    Kernel(rxe::Doorbell<Ctx>),
}

impl Doorbell {
    #[inline(always)]
    pub fn ring(&self) -> Result<()> {
        match self {
            Self::Direct(doorbell) => doorbell.ring().map_err(|refused| Error::Doorbell {
                errno: refused.errno().raw(),
            }),
            Self::Kernel(doorbell) => doorbell
                .ring()
                .map_err(|errno| Error::Doorbell { errno: errno.raw() }),
        }
    }
}

/// A send queue's writer.
#[derive(Debug)]
pub(crate) enum SendQueue {
    Rxe(rxe::SendQueue),
}

impl SendQueue {
    /// Starts a batch; one that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        let Self::Rxe(queue) = self;
        queue.begin().keep();
    }

    #[inline(always)]
    pub fn open(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) -> Result<Wqe<'_>> {
        let Self::Rxe(queue) = self;
        let capacity = queue.capacity();
        let opened = queue.open(wr_id, opcode, flags);
        opened.map(Wqe::Rxe).map_err(|_| full(capacity))
    }

    /// The same by a writer, which keeps where the batch stands to itself.
    #[inline(always)]
    pub fn writer(&mut self) -> SendWriter<'_> {
        let Self::Rxe(queue) = self;
        SendWriter::Rxe(queue.begin())
    }

    #[inline(always)]
    pub fn accept(&mut self) {
        let Self::Rxe(queue) = self;
        queue.accept();
    }

    /// Hands the batch to the device; whether there was anything.
    ///
    /// # Safety
    /// As of the device crate's: the memory named stays, and is left alone as
    /// the operation demands, until it has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> bool {
        let Self::Rxe(queue) = self;
        // SAFETY: passed on.
        unsafe { queue.publish() }
    }

    pub fn capacity(&self) -> u32 {
        let Self::Rxe(queue) = self;
        queue.capacity()
    }
}

/// Writes one batch after another to a send queue.
pub(crate) enum SendWriter<'q> {
    Rxe(rxe::SendWriter<'q>),
}

impl SendWriter<'_> {
    #[inline(always)]
    pub fn open(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) -> Result<Opened<'_>> {
        let Self::Rxe(writer) = self;
        // Before, since an entry that is open borrows the writer.
        let capacity = writer.capacity();
        let opened = writer.open(wr_id, opcode, flags);
        opened.map(Opened::Rxe).map_err(|_| full(capacity))
    }

    /// As [`SendQueue::publish`].
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> bool {
        let Self::Rxe(writer) = self;
        // SAFETY: passed on.
        unsafe { writer.publish_any() }
    }
}

/// An entry that a [`SendWriter`] has opened; forgotten unless accepted.
pub(crate) enum Opened<'w> {
    Rxe(rxe::Opened<'w>),
}

impl<'w> Opened<'w> {
    /// Writes to it.
    #[inline(always)]
    pub fn wqe(&mut self) -> Wqe<'_> {
        let Self::Rxe(opened) = self;
        Wqe::Rxe(opened.wqe.reborrow())
    }

    /// Makes it part of the batch.
    #[inline(always)]
    pub fn accept(self) {
        let Self::Rxe(opened) = self;
        opened.accept();
    }
}

/// A work request while it is written.
pub enum Wqe<'q> {
    #[doc(hidden)]
    Rxe(rxe::Wqe<'q>),
}

impl Wqe<'_> {
    #[inline(always)]
    pub(crate) fn max_sge(&self) -> u32 {
        let Self::Rxe(wqe) = self;
        wqe.max_sge()
    }

    #[inline(always)]
    pub(crate) fn immediate_or_key(&mut self, value: u32) {
        let Self::Rxe(wqe) = self;
        wqe.immediate_or_key(value);
    }

    #[inline(always)]
    pub(crate) fn set_inline(&mut self) {
        let Self::Rxe(wqe) = self;
        wqe.set_inline_flag(true);
    }

    #[inline(always)]
    pub(crate) fn rdma(&mut self, to: RemoteAddr) {
        let Self::Rxe(wqe) = self;
        wqe.rdma(to.addr, to.rkey);
    }

    #[inline(always)]
    pub(crate) fn atomic(&mut self, to: RemoteAddr, compare_add: u64, swap: u64) {
        let Self::Rxe(wqe) = self;
        wqe.atomic(to.addr, to.rkey, compare_add, swap);
    }

    #[inline(always)]
    pub(crate) fn atomic_write(&mut self, to: RemoteAddr, value: [u8; 8]) {
        let Self::Rxe(wqe) = self;
        wqe.atomic_write(to.addr, to.rkey, value);
    }

    #[inline(always)]
    pub(crate) fn flush(&mut self, to: RemoteAddr, length: u32, kind: u8, level: u8) {
        let Self::Rxe(wqe) = self;
        wqe.flush(to.addr, to.rkey, length, kind, level);
    }

    #[inline(always)]
    pub(crate) fn bind_window(&mut self, binding: WindowBinding) {
        let Self::Rxe(wqe) = self;
        wqe.bind_mw(binding);
    }

    #[inline(always)]
    pub(crate) fn datagram(&mut self, ah_num: u32, remote_qpn: u32, remote_qkey: u32) {
        let Self::Rxe(wqe) = self;
        wqe.ud(ah_num, remote_qpn, remote_qkey);
    }

    #[inline(always)]
    pub(crate) fn no_data(&mut self) {
        let Self::Rxe(wqe) = self;
        wqe.no_data();
    }

    #[inline(always)]
    pub(crate) fn sge(&mut self, sge: Sge) -> Result<u32> {
        let Self::Rxe(wqe) = self;
        let allowed = wqe.max_sge();
        wqe.sge(sge)
            .map_err(|error| refused(error, slice::from_ref(&sge), allowed))
    }

    #[inline(always)]
    pub(crate) fn sge_list(&mut self, list: &[Sge]) -> Result<u32> {
        let Self::Rxe(wqe) = self;
        let allowed = wqe.max_sge();
        wqe.sge_list(list)
            .map_err(|error| refused(error, list, allowed))
    }

    #[inline(always)]
    pub(crate) fn inline(&mut self, bytes: &[u8]) -> Result<u32> {
        let Self::Rxe(wqe) = self;
        let allowed = wqe.max_inline();
        // Nothing else is wrong with inline data.
        wqe.inline(bytes)
            .map_err(|_| inline_too_long(bytes.len(), allowed))
    }
}

/// No room in a queue.
///
/// The error is made out of line and known to be no other. If it were made in
/// place, the compiler would fill the bytes that it leaves unset with what an
/// open entry has there, its way to the writer among them; and the writer would
/// have to lie in memory, at a store to a cache line of its own for each work
/// request.
#[inline(always)]
fn full(capacity: u32) -> Error {
    #[cold]
    #[inline(never)]
    fn make(capacity: u32) -> Error {
        Error::QueueFull { capacity }
    }
    match make(capacity) {
        error @ Error::QueueFull { .. } => error,
        _ => unreachable!("made as that"),
    }
}

/// Inline data without room for them; made as [`full`] is.
#[inline(always)]
fn inline_too_long(asked: usize, allowed: u32) -> Error {
    #[cold]
    #[inline(never)]
    fn make(asked: usize, allowed: u32) -> Error {
        Error::Limit {
            what: "bytes of inline data",
            asked: asked as u64,
            allowed: allowed.into(),
        }
    }
    match make(asked, allowed) {
        error @ Error::Limit { .. } => error,
        _ => unreachable!("made as that"),
    }
}

/// Why a list was not taken by an entry that there was room for.
#[inline(always)]
fn refused(error: rxe::PostError, list: &[Sge], max_sge: u32) -> Error {
    match error {
        rxe::PostError::TooManySges => Error::Limit {
            what: "scatter/gather elements",
            asked: list.len() as u64,
            allowed: max_sge.into(),
        },
        // Only the first of these is left.
        rxe::PostError::MessageTooLong | rxe::PostError::InlineTooLong | rxe::PostError::Full => {
            Error::Limit {
                what: "bytes in a message",
                asked: list.iter().map(|sge| u64::from(sge.length)).sum(),
                allowed: rxe::MAX_MESSAGE.into(),
            }
        }
    }
}

#[cold]
fn not_received(error: rxe::PostError, queue: &rxe::RecvQueue, list: &[Sge]) -> Error {
    match error {
        rxe::PostError::Full => full(queue.capacity()),
        error => refused(error, list, queue.max_sge()),
    }
}

/// A receive queue's writer.
#[derive(Debug)]
pub(crate) enum RecvQueue {
    Rxe(rxe::RecvQueue),
}

impl RecvQueue {
    /// Starts a batch; one that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        let Self::Rxe(queue) = self;
        queue.begin().keep();
    }

    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        let Self::Rxe(queue) = self;
        let pushed = queue.push(wr_id, list);
        pushed.map_err(|error| not_received(error, queue, list))
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays, and is left alone, until its receive
    /// has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        let Self::Rxe(queue) = self;
        // SAFETY: passed on.
        unsafe { queue.publish() }
    }

    pub fn capacity(&self) -> u32 {
        let Self::Rxe(queue) = self;
        queue.capacity()
    }

    #[inline(always)]
    pub fn max_sge(&self) -> u32 {
        let Self::Rxe(queue) = self;
        queue.max_sge()
    }
}

/// A completion queue's ring.
#[derive(Debug)]
pub(crate) enum CompletionRing {
    Rxe(rxe::CompletionRing),
}

/// A completion in the queue's memory.
#[derive(Clone, Copy)]
pub(crate) enum Entry<'r> {
    Rxe(rxe::Entry<'r>),
}

/// A completion queue as the device crate makes it.
pub(crate) struct CompletionQueue {
    pub object: uverbs::Cq<Ctx>,
    pub ring: CompletionRing,
    pub peek: ring::Peek,
}

impl CompletionQueue {
    pub fn create(context: &Ctx, init: &CqInit) -> Result<Self> {
        let made = rxe::CompletionQueue::create(context, init)?;
        Ok(Self {
            object: made.object,
            ring: CompletionRing::Rxe(made.ring),
            peek: made.peek,
        })
    }
}

impl Entry<'_> {
    /// A copy.
    #[inline(always)]
    pub fn read(&self) -> WorkCompletion {
        let Self::Rxe(entry) = self;
        // SAFETY: the entry lies in the mapping, whole and aligned; any bytes
        // are a `WorkCompletion`.
        unsafe { entry.as_ptr().read() }
    }
}

impl CompletionRing {
    /// The completions that are there now.
    #[inline(always)]
    pub fn available(&self) -> Span {
        let Self::Rxe(ring) = self;
        ring.available()
    }

    /// The completion at `span.at`, in place.
    #[inline(always)]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        let Self::Rxe(ring) = self;
        Entry::Rxe(ring.entry(span))
    }

    /// The same of a span that is known to be of this ring.
    ///
    /// # Safety
    /// As of the device crate's: the span is from [`available`](Self::available),
    /// or a step from there, and the queue has not been resized since.
    #[inline(always)]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        let Self::Rxe(ring) = self;
        // SAFETY: passed on.
        Entry::Rxe(unsafe { ring.entry_inside(span) })
    }

    /// Ends a span that is not empty behind its first completions, `max` or as
    /// many as it has. Returns how many that are.
    #[inline(always)]
    pub fn limit(&self, span: &mut Span, max: usize) -> usize {
        let Self::Rxe(ring) = self;
        let indices = ring.consumer().indices();
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
        let Self::Rxe(ring) = self;
        span.at = ring.consumer().indices().next(span.at);
    }

    /// Gives everything before `span.at` back to the device.
    #[inline(always)]
    pub fn release(&self, span: &Span) {
        let Self::Rxe(ring) = self;
        ring.consumer().release(span.at);
    }

    /// Arms by `arm`, then looks whether anything is there.
    pub fn arm_and_look(&self, arm: impl FnOnce() -> Result<()>) -> Result<bool> {
        let Self::Rxe(ring) = self;
        ring.consumer().arm_and_look(arm)
    }

    pub fn capacity(&self) -> u32 {
        let Self::Rxe(ring) = self;
        ring.capacity()
    }

    /// Resizes the queue, keeping what is in it.
    pub fn resize(
        &mut self,
        object: &uverbs::Cq<Ctx>,
        peek: &ring::Peek,
        retired: &mut Vec<ring::Retired>,
        cqe: u32,
    ) -> Result<u32> {
        let Self::Rxe(ring) = self;
        Ok(rxe::CompletionQueue::resize(
            object, ring, peek, retired, cqe,
        )?)
    }
}

/// A shared receive queue as the device crate makes it.
pub(crate) struct SharedReceiveQueue {
    pub object: uverbs::Srq<Ctx>,
    pub recv: RecvQueue,
}

impl SharedReceiveQueue {
    pub fn create(context: &Ctx, init: &SrqInit) -> Result<Self> {
        let made = rxe::SharedReceiveQueue::create(context, init)?;
        Ok(Self {
            object: made.object,
            recv: RecvQueue::Rxe(made.recv),
        })
    }

    pub fn modify(
        object: &uverbs::Srq<Ctx>,
        recv: &mut RecvQueue,
        change: &SrqModify,
    ) -> Result<()> {
        let RecvQueue::Rxe(recv) = recv;
        Ok(rxe::SharedReceiveQueue::modify(object, recv, change)?)
    }
}

/// An address handle as the device crate makes it.
#[derive(Debug)]
pub(crate) struct AddressHandle {
    pub object: uverbs::Ah<Ctx>,
    pub number: u32,
}

impl AddressHandle {
    pub fn create(context: &Ctx, pd: PdHandle, attr: &uverbs::AhAttr) -> Result<Self> {
        let made = rxe::AddressHandle::create(context, pd, attr, 0)?;
        Ok(Self {
            object: made.object,
            number: made.ah_num,
        })
    }
}
