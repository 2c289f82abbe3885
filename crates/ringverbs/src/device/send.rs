//! Send queues' writers: rdma_rxe's, for all devices. What is published reaches
//! another device by its [`Doorbell`].

use std::slice;

use super::staged::Sender;
use super::{MAX_MESSAGE, Opcode, SendFlags, Sge, WindowBinding};
use crate::context::Ctx;
use crate::error::{Error, Result};
use crate::operation::RemoteAddr;

/// What tells the device of work.
#[derive(Debug)]
pub(crate) enum Doorbell {
    /// A system call of the real kernel.
    Direct(::rxe::DirectDoorbell),
    /// The same of any kernel.
    Kernel(::rxe::Doorbell<Ctx>),
    /// None: the process carries it over to the device.
    Staged(Box<Sender>),
}

impl Doorbell {
    /// Rings. `rewind` is called where everything has been taken out of the ring,
    /// and is to start again with its first entry.
    ///
    /// # Errors
    /// [`Error::Doorbell`].
    #[inline(always)]
    pub fn ring(&mut self, rewind: impl FnOnce()) -> Result<()> {
        match self {
            Self::Direct(doorbell) => doorbell.ring().map_err(|refused| Error::Doorbell {
                errno: refused.errno().raw(),
            }),
            Self::Kernel(doorbell) => doorbell
                .ring()
                .map_err(|errno| Error::Doorbell { errno: errno.raw() }),
            Self::Staged(sender) => {
                sender.carry()?;
                // The next entries are those that are near already.
                rewind();
                Ok(())
            }
        }
    }

    /// The queue pair was reset, with nothing in flight.
    pub fn reset(&mut self) {
        if let Self::Staged(sender) = self {
            sender.reset();
        }
    }
}

/// A send queue's writer.
#[derive(Debug)]
pub(crate) struct SendQueue(pub(super) ::rxe::SendQueue);

impl SendQueue {
    /// Starts a batch; one that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        let Self(queue) = self;
        queue.begin().keep();
    }

    #[inline(always)]
    pub fn open(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) -> Result<Wqe<'_>> {
        let Self(queue) = self;
        let capacity = queue.capacity();
        let opened = queue.open(wr_id, opcode, flags);
        opened.map(Wqe).map_err(|_| full(capacity))
    }

    /// The same by a writer, which keeps where the batch stands to itself.
    #[inline(always)]
    pub fn writer(&mut self) -> SendWriter<'_> {
        let Self(queue) = self;
        SendWriter(queue.begin())
    }

    #[inline(always)]
    pub fn accept(&mut self) {
        let Self(queue) = self;
        queue.accept();
    }

    /// Hands the batch to the device; whether there was anything.
    ///
    /// # Safety
    /// As of the device crate's: the memory named stays, and is left alone as
    /// the operation demands, until it has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> bool {
        let Self(queue) = self;
        // SAFETY: passed on.
        unsafe { queue.publish() }
    }

    /// For [`Doorbell::ring`].
    #[inline(always)]
    pub fn rewind(&mut self) {
        let Self(queue) = self;
        queue.rewind();
    }

    pub fn capacity(&self) -> u32 {
        let Self(queue) = self;
        queue.capacity()
    }
}

/// Writes one batch after another to a send queue.
pub(crate) struct SendWriter<'q>(pub(super) ::rxe::SendWriter<'q>);

impl SendWriter<'_> {
    #[inline(always)]
    pub fn open(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) -> Result<Opened<'_>> {
        let Self(writer) = self;
        // Before, since an entry that is open borrows the writer.
        let capacity = writer.capacity();
        let opened = writer.open(wr_id, opcode, flags);
        opened.map(Opened).map_err(|_| full(capacity))
    }

    /// For [`Doorbell::ring`].
    #[inline(always)]
    pub fn rewind(&mut self) {
        let Self(writer) = self;
        writer.rewind();
    }

    /// As [`SendQueue::publish`].
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> bool {
        let Self(writer) = self;
        // SAFETY: passed on.
        unsafe { writer.publish_any() }
    }
}

/// An entry that a [`SendWriter`] has opened; forgotten unless accepted.
pub(crate) struct Opened<'w>(pub(super) ::rxe::Opened<'w>);

impl<'w> Opened<'w> {
    /// Writes to it.
    #[inline(always)]
    pub fn wqe(&mut self) -> Wqe<'_> {
        let Self(opened) = self;
        Wqe(opened.wqe.reborrow())
    }

    /// Makes it part of the batch.
    #[inline(always)]
    pub fn accept(self) {
        let Self(opened) = self;
        opened.accept();
    }
}

/// A work request while it is written.
pub struct Wqe<'q>(::rxe::Wqe<'q>);

impl Wqe<'_> {
    #[inline(always)]
    pub(crate) fn max_sge(&self) -> u32 {
        let Self(wqe) = self;
        wqe.max_sge()
    }

    #[inline(always)]
    pub(crate) fn immediate_or_key(&mut self, value: u32) {
        let Self(wqe) = self;
        wqe.immediate_or_key(value);
    }

    #[inline(always)]
    pub(crate) fn set_inline(&mut self) {
        let Self(wqe) = self;
        wqe.set_inline_flag(true);
    }

    #[inline(always)]
    pub(crate) fn rdma(&mut self, to: RemoteAddr) {
        let Self(wqe) = self;
        wqe.rdma(to.addr, to.rkey);
    }

    #[inline(always)]
    pub(crate) fn atomic(&mut self, to: RemoteAddr, compare_add: u64, swap: u64) {
        let Self(wqe) = self;
        wqe.atomic(to.addr, to.rkey, compare_add, swap);
    }

    #[inline(always)]
    pub(crate) fn atomic_write(&mut self, to: RemoteAddr, value: [u8; 8]) {
        let Self(wqe) = self;
        wqe.atomic_write(to.addr, to.rkey, value);
    }

    #[inline(always)]
    pub(crate) fn flush(&mut self, to: RemoteAddr, length: u32, kind: u8, level: u8) {
        let Self(wqe) = self;
        wqe.flush(to.addr, to.rkey, length, kind, level);
    }

    #[inline(always)]
    pub(crate) fn bind_window(&mut self, binding: WindowBinding) {
        let Self(wqe) = self;
        wqe.bind_mw(binding);
    }

    #[inline(always)]
    pub(crate) fn datagram(&mut self, ah_num: u32, remote_qpn: u32, remote_qkey: u32) {
        let Self(wqe) = self;
        wqe.ud(ah_num, remote_qpn, remote_qkey);
    }

    #[inline(always)]
    pub(crate) fn no_data(&mut self) {
        let Self(wqe) = self;
        wqe.no_data();
    }

    #[inline(always)]
    pub(crate) fn sge(&mut self, sge: Sge) -> Result<u32> {
        let Self(wqe) = self;
        let allowed = wqe.max_sge();
        wqe.sge(sge)
            .map_err(|error| refused(error, slice::from_ref(&sge), allowed))
    }

    #[inline(always)]
    pub(crate) fn sge_list(&mut self, list: &[Sge]) -> Result<u32> {
        let Self(wqe) = self;
        let allowed = wqe.max_sge();
        wqe.sge_list(list)
            .map_err(|error| refused(error, list, allowed))
    }

    #[inline(always)]
    pub(crate) fn inline(&mut self, bytes: &[u8]) -> Result<u32> {
        let Self(wqe) = self;
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
pub(super) fn full(capacity: u32) -> Error {
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
pub(super) fn refused(error: ::rxe::PostError, list: &[Sge], max_sge: u32) -> Error {
    match error {
        ::rxe::PostError::TooManySges => Error::Limit {
            what: "scatter/gather elements",
            asked: list.len() as u64,
            allowed: max_sge.into(),
        },
        // Only `MessageTooLong` is left.
        _ => Error::Limit {
            what: "bytes in a message",
            asked: list.iter().map(|sge| u64::from(sge.length)).sum(),
            allowed: MAX_MESSAGE.into(),
        },
    }
}
