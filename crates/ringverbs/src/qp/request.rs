//! Work requests.

use super::Companion;
use crate::data::{Data, Sink, Source};
use crate::device::{Opcode, SendFlags, Wqe};
use crate::operation::{Operation, RemoteAddr};

/// What is to be done, with which memory, and how its end is heard of.
///
/// ```no_run
/// # fn f(qp: &mut ringverbs::QueuePair, buffer: ringverbs::Buffer, there: ringverbs::RemoteAddr)
/// # -> Result<(), ringverbs::Error> {
/// use ringverbs::WorkRequest;
/// qp.post(WorkRequest::write(buffer, there).immediate(7).token(42))?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use]
pub struct WorkRequest<D> {
    pub(super) kind: Kind,
    pub(super) data: D,
    pub(super) token: u64,
    pub(super) extra: Extra,
    pub(super) flags: SendFlags,
    pub(super) signaled: bool,
}

/// What depends on the operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Send,
    Write(RemoteAddr),
    Read(RemoteAddr),
}

/// What goes along with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extra {
    None,
    Immediate(u32),
    Invalidate(u32),
}

impl<D: Data> WorkRequest<D> {
    fn new(kind: Kind, data: D) -> Self {
        Self {
            kind,
            data,
            token: 0,
            extra: Extra::None,
            flags: SendFlags::empty(),
            signaled: true,
        }
    }

    /// A number that its completion brings back; 0 unless told.
    #[inline]
    pub fn token(mut self, token: u64) -> Self {
        self.token = token;
        self
    }

    /// No completion if it succeeds. It is then brought to an end, and its
    /// memory released, by the next completion of its queue. (The library
    /// signals one now and then by itself, so that the queue does not fill up;
    /// nobody hears of that.) A failure is always heard of.
    #[inline]
    pub fn unsignaled(mut self) -> Self {
        self.signaled = false;
        self
    }

    /// Not before the reads and atomics posted earlier are done.
    #[inline]
    pub fn fence(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// The peer's completion raises a solicited event.
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    pub(super) fn operation(&self) -> Operation {
        match self.kind {
            Kind::Send => Operation::Send,
            Kind::Write(_) => Operation::Write,
            Kind::Read(_) => Operation::Read,
        }
    }

    #[inline(always)]
    pub(super) fn opcode(&self) -> Opcode {
        match (self.kind, self.extra) {
            (Kind::Send, Extra::None) => Opcode::SEND,
            (Kind::Send, Extra::Immediate(_)) => Opcode::SEND_WITH_IMM,
            (Kind::Send, Extra::Invalidate(_)) => Opcode::SEND_WITH_INV,
            (Kind::Write(_), Extra::Immediate(_)) => Opcode::RDMA_WRITE_WITH_IMM,
            (Kind::Write(_), _) => Opcode::RDMA_WRITE,
            (Kind::Read(_), _) => Opcode::RDMA_READ,
        }
    }

    /// Writes what is not data.
    #[inline(always)]
    pub(super) fn describe(&self, wqe: &mut Wqe<'_>) {
        match self.extra {
            Extra::None => {}
            Extra::Immediate(value) => wqe.immediate_or_key(value.to_be()),
            Extra::Invalidate(rkey) => wqe.immediate_or_key(rkey),
        }
        match self.kind {
            Kind::Send => {}
            Kind::Write(to) | Kind::Read(to) => wqe.rdma(to),
        }
    }

    #[inline(always)]
    pub(super) fn companion(&self) -> Companion {
        Companion::None
    }
}

impl<D: Source> WorkRequest<D> {
    /// A message to a receive of the peer's.
    #[inline]
    pub fn send(data: D) -> Self {
        Self::new(Kind::Send, data)
    }

    /// A write to memory of the peer's.
    #[inline]
    pub fn write(data: D, to: RemoteAddr) -> Self {
        Self::new(Kind::Write(to), data)
    }

    /// Immediate data for the peer, with a send or write. A write with
    /// immediate data uses up a receive of the peer's.
    #[inline]
    pub fn immediate(mut self, value: u32) -> Self {
        self.extra = Extra::Immediate(value);
        self
    }
}

impl<D: Sink> WorkRequest<D> {
    /// A read of memory of the peer's, as long as the data is.
    #[inline]
    pub fn read(data: D, from: RemoteAddr) -> Self {
        Self::new(Kind::Read(from), data)
    }
}
