//! Work requests.

use uverbs::{Destination, Operands};

use super::Attachment;
use crate::data::{Data, Sink, Source};
use crate::device::{Opcode, SendData, SendFlags, SendWr};
use crate::memory::MemorySlice;
use crate::mw::Bind;
use crate::operation::{Operation, RemoteAddr};
use crate::pd::Identity;
use crate::{AccessFlags, AddressHandle, Context, Error, MemoryWindow, Result};

/// An operation with its memory, token and flags.
///
/// ```no_run
/// # fn f(qp: &mut ringverbs::QueuePair, buffer: ringverbs::Buffer, there: ringverbs::RemoteAddr)
/// # -> Result<(), ringverbs::PostError<ringverbs::Buffer>> {
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
    pub(super) attachment: Attachment,
}

/// Parameters that depend on the operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Send,
    /// A datagram to that queue pair, with that queue key; the path is the
    /// attachment.
    SendTo {
        qp_num: u32,
        qkey: u32,
    },
    Write(RemoteAddr),
    Read(RemoteAddr),
    CompareSwap {
        at: RemoteAddr,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        at: RemoteAddr,
        add: u64,
    },
    AtomicWrite {
        to: RemoteAddr,
        value: [u8; 8],
    },
    Flush {
        at: RemoteAddr,
        length: u32,
        kind: FlushTo,
        level: u8,
    },
    LocalInvalidate {
        rkey: u32,
    },
    /// The attachment has the window and its target.
    Bind,
}

/// The placement type of a flush: the effect on earlier writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushTo {
    /// Earlier writes are visible to every reader of the memory.
    GlobalVisibility,
    /// Earlier writes survive a power failure.
    Persistence,
}

/// The part of remote memory that a flush applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushRange {
    /// This number of bytes from the address on.
    Bytes(u32),
    /// The whole region.
    Region,
}

impl FlushTo {
    /// Returns the placement type as the kernel encodes it.
    #[inline]
    pub(crate) fn encode(self) -> u8 {
        match self {
            Self::GlobalVisibility => 1,
            Self::Persistence => 2,
        }
    }
}

impl FlushRange {
    /// Returns the length in bytes and the selectivity level as the kernel
    /// encodes it.
    #[inline]
    pub(crate) fn encode(self) -> (u32, u8) {
        match self {
            Self::Bytes(length) => (length, 0),
            Self::Region => (0, 1),
        }
    }
}

/// A value that a message carries to the peer in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extra {
    None,
    Immediate(u32),
    Invalidate(u32),
    /// Conflicting values were set.
    Conflict(Conflict),
}

/// A conflict between parameters of a work request, which is refused when it is
/// posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conflict {
    ImmediateAndKey,
    Address,
}

impl Conflict {
    fn text(self) -> &'static str {
        match self {
            Self::ImmediateAndKey => {
                "a message has immediate data or a key to be invalidated, not both"
            }
            Self::Address => "only a send goes to an address; a write goes to memory",
        }
    }
}

impl Kind {
    /// Validates the less common work requests.
    fn check(self, extra: Extra, datagram: bool, context: &Context) -> Result<()> {
        let invalid = |what| Err(Error::Invalid { what });
        let sends = matches!(self, Self::Send | Self::SendTo { .. });
        match extra {
            Extra::Conflict(clash) => return invalid(clash.text()),
            Extra::Immediate(_) if !sends && !matches!(self, Self::Write(_)) => {
                return invalid("immediate data goes with a send or a write only");
            }
            Extra::Invalidate(_) if !sends || datagram => {
                return invalid("a key is invalidated by a send over a connection only");
            }
            _ => {}
        }
        match self {
            Self::Send if datagram => {
                return invalid("a datagram needs an address: see WorkRequest::to");
            }
            Self::SendTo { .. } if !datagram => {
                return invalid("a connection sends to its peer, not to an address");
            }
            Self::CompareSwap { at, .. } | Self::FetchAdd { at, .. } if at.addr % 8 != 0 => {
                return invalid("the address of an atomic must be a multiple of 8");
            }
            Self::AtomicWrite { to, .. } if to.addr % 8 != 0 => {
                return invalid("the address of an atomic write must be a multiple of 8");
            }
            Self::AtomicWrite { .. } if !context.can_write_atomically() => {
                return Err(Error::Unsupported {
                    what: "atomic writes",
                });
            }
            Self::Flush { kind, .. } if !context.can_flush_to(kind) => {
                return Err(Error::Unsupported { what: "flush" });
            }
            _ => {}
        }
        Ok(())
    }
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
            attachment: Attachment::None,
        }
    }

    /// Sets the token, a number that the completion returns; default 0.
    #[inline]
    pub fn token(mut self, token: u64) -> Self {
        self.token = token;
        self
    }

    /// Requests no completion on success. The operation is then retired, and its memory
    /// released, by the next completion of its queue. (The library signals a request from
    /// time to time so that the queue cannot fill up; these completions are not reported.)
    /// Failures are always reported.
    #[inline]
    pub fn unsignaled(mut self) -> Self {
        self.signaled = false;
        self
    }

    /// Requests a completion.
    #[inline]
    pub(crate) fn signaled(mut self) -> Self {
        self.signaled = true;
        self
    }

    /// Lets the device compute the checksums of a raw packet.
    pub(crate) fn checksums(mut self) -> Self {
        self.flags |= SendFlags::IP_CSUM;
        self
    }

    /// Returns whether the request has a datagram's address.
    pub(super) fn is_addressed(&self) -> bool {
        !matches!(self.attachment, Attachment::None)
    }

    /// Returns the memory.
    pub(crate) fn into_data(self) -> D {
        self.data
    }

    /// Delays execution until all earlier reads and atomics have completed.
    ///
    /// rdma_rxe (Linux 6.1 to 7.2) never retransmits a fenced read or atomic, nor a fenced
    /// operation that is followed by a read or atomic: after a lost packet, or a response
    /// later than the timeout, the queue pair hangs without an error.
    #[inline]
    pub fn fence(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// Makes the peer's completion a solicited event.
    #[inline]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    #[inline]
    pub(super) fn operation(&self) -> Operation {
        match self.kind {
            Kind::Send | Kind::SendTo { .. } => Operation::Send,
            Kind::Write(_) => Operation::Write,
            Kind::Read(_) => Operation::Read,
            Kind::CompareSwap { .. } => Operation::CompareSwap,
            Kind::FetchAdd { .. } => Operation::FetchAdd,
            Kind::AtomicWrite { .. } => Operation::AtomicWrite,
            Kind::Flush { .. } => Operation::Flush,
            Kind::LocalInvalidate { .. } => Operation::LocalInvalidate,
            Kind::Bind => Operation::BindWindow,
        }
    }

    #[inline]
    pub(super) fn opcode(&self) -> Opcode {
        match (self.kind, self.extra) {
            (Kind::Send | Kind::SendTo { .. }, Extra::None | Extra::Conflict(_)) => Opcode::SEND,
            (Kind::Send | Kind::SendTo { .. }, Extra::Immediate(_)) => Opcode::SEND_WITH_IMM,
            (Kind::Send | Kind::SendTo { .. }, Extra::Invalidate(_)) => Opcode::SEND_WITH_INV,
            (Kind::Write(_), Extra::Immediate(_)) => Opcode::RDMA_WRITE_WITH_IMM,
            (Kind::Write(_), _) => Opcode::RDMA_WRITE,
            (Kind::Read(_), _) => Opcode::RDMA_READ,
            (Kind::CompareSwap { .. }, _) => Opcode::ATOMIC_CMP_AND_SWP,
            (Kind::FetchAdd { .. }, _) => Opcode::ATOMIC_FETCH_AND_ADD,
            (Kind::AtomicWrite { .. }, _) => Opcode::ATOMIC_WRITE,
            (Kind::Flush { .. }, _) => Opcode::FLUSH,
            (Kind::LocalInvalidate { .. }, _) => Opcode::LOCAL_INV,
            (Kind::Bind, _) => Opcode::BIND_MW,
        }
    }

    /// Validates the request before anything is written. `datagram`: for a
    /// datagram queue pair.
    #[inline]
    pub(super) fn check(&self, datagram: bool, domain: Identity, context: &Context) -> Result<()> {
        match self.kind {
            Kind::Send if !datagram && !matches!(self.extra, Extra::Conflict(_)) => Ok(()),
            Kind::Write(_) if matches!(self.extra, Extra::None | Extra::Immediate(_)) => Ok(()),
            Kind::Read(_) if self.extra == Extra::None => Ok(()),
            // Passed by value: without references, the parts can stay in
            // registers.
            kind => {
                kind.check(self.extra, datagram, context)?;
                match &self.attachment {
                    Attachment::Address(handle) if handle.identity() != domain => {
                        Err(Error::WrongDomain {
                            what: "address handle",
                        })
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Returns the work request for the device, with this identifier, flags and data.
    #[inline]
    fn send_wr<'a>(&'a self, (wr_id, flags): (u64, SendFlags), data: SendData<'a>) -> SendWr<'a> {
        let mut wr = SendWr::new(wr_id, self.opcode(), flags);
        wr.data = data;
        match self.extra {
            Extra::None | Extra::Conflict(_) => {}
            Extra::Immediate(value) => wr.imm_or_key = value.to_be(),
            Extra::Invalidate(rkey) => wr.imm_or_key = rkey,
        }
        match self.kind {
            Kind::Send | Kind::Bind => {}
            Kind::SendTo { qp_num, qkey } => {
                if let Attachment::Address(handle) = &self.attachment {
                    wr.destination = Destination::Datagram {
                        address: handle.address(),
                        remote_qpn: qp_num,
                        remote_qkey: qkey,
                    };
                }
            }
            Kind::Write(at) | Kind::Read(at) => wr.remote = at.into(),
            Kind::CompareSwap { at, compare, swap } => {
                wr.remote = at.into();
                wr.operands = Operands::Atomic {
                    compare_add: compare,
                    swap,
                };
            }
            Kind::FetchAdd { at, add } => {
                wr.remote = at.into();
                wr.operands = Operands::Atomic {
                    compare_add: add,
                    swap: 0,
                };
            }
            Kind::AtomicWrite { to, value } => {
                wr.remote = to.into();
                wr.operands = Operands::AtomicWrite(value);
            }
            Kind::Flush {
                at,
                length,
                kind,
                level,
            } => {
                wr.remote = at.into();
                wr.operands = Operands::Flush {
                    length,
                    placement: kind.encode(),
                    level,
                };
            }
            Kind::LocalInvalidate { rkey } => wr.imm_or_key = rkey,
        }
        wr
    }

    /// Calls `post` with the work request for the device, with this identifier and these
    /// flags. Not for a bind, whose operands depend on its window.
    #[inline]
    pub(super) fn with_send_wr<R>(
        &self,
        id_and_flags: (u64, SendFlags),
        (max_sge, domain): (u32, Identity),
        post: impl FnOnce(&SendWr<'_>) -> Result<R>,
    ) -> Result<R> {
        let is_atomic = matches!(self.kind, Kind::CompareSwap { .. } | Kind::FetchAdd { .. });
        self.data.gather(max_sge, domain, |data| {
            if is_atomic && length_of(data) < 8 {
                return Err(Error::Invalid {
                    what: "an atomic needs 8 bytes for the old value",
                });
            }
            post(&self.send_wr(id_and_flags, data))
        })
    }
}

/// Returns the length of an operation's data.
fn length_of(data: SendData<'_>) -> u64 {
    let (SendData::Sges(list) | SendData::Inline(list)) = data;
    list.iter().map(|sge| u64::from(sge.length)).sum()
}

impl<D: Source> WorkRequest<D> {
    /// Sends a message to a receive of the peer.
    #[inline]
    pub fn send(data: D) -> Self {
        Self::new(Kind::Send, data)
    }

    /// Writes to remote memory (RDMA write).
    #[inline]
    pub fn write(data: D, to: RemoteAddr) -> Self {
        Self::new(Kind::Write(to), data)
    }

    /// Adds immediate data to a send or write. A write with immediate data
    /// consumes a receive of the peer. Combined with
    /// [`invalidate`](Self::invalidate) it is refused when it is posted.
    #[inline]
    pub fn immediate(mut self, value: u32) -> Self {
        self.extra = match self.extra {
            Extra::None | Extra::Immediate(_) => Extra::Immediate(value),
            Extra::Invalidate(_) => Extra::Conflict(Conflict::ImmediateAndKey),
            Extra::Conflict(clash) => Extra::Conflict(clash),
        };
        self
    }

    /// Makes a send invalidate `rkey`, a key of the peer, when the message
    /// arrives there. Combined with [`immediate`](Self::immediate) data it is
    /// refused when it is posted.
    #[inline]
    pub fn invalidate(mut self, rkey: u32) -> Self {
        self.extra = match self.extra {
            Extra::None | Extra::Invalidate(_) => Extra::Invalidate(rkey),
            Extra::Immediate(_) => Extra::Conflict(Conflict::ImmediateAndKey),
            Extra::Conflict(clash) => Extra::Conflict(clash),
        };
        self
    }

    /// Sets the destination of a datagram: the path, and a queue pair with the queue key
    /// `qkey`. Posting refuses any operation other than a send.
    #[inline]
    pub fn to(mut self, path: &AddressHandle, qp_num: u32, qkey: u32) -> Self {
        match self.kind {
            Kind::Send | Kind::SendTo { .. } => {
                self.kind = Kind::SendTo { qp_num, qkey };
                self.attachment = Attachment::Address(path.clone());
            }
            _ => self.extra = Extra::Conflict(Conflict::Address),
        }
        self
    }
}

impl<D: Sink> WorkRequest<D> {
    /// Reads remote memory into `data`, as many bytes as its length (RDMA read).
    #[inline]
    pub fn read(data: D, from: RemoteAddr) -> Self {
        Self::new(Kind::Read(from), data)
    }

    /// Compares 8 bytes of remote memory with `compare` and, if they are equal,
    /// replaces them by `swap`, atomically. The previous value is stored in
    /// `old`: 8 bytes, native byte order.
    #[inline]
    pub fn compare_swap(old: D, at: RemoteAddr, compare: u64, swap: u64) -> Self {
        Self::new(Kind::CompareSwap { at, compare, swap }, old)
    }

    /// Adds `add` to 8 bytes of remote memory, atomically, wrapping. The previous
    /// value is stored in `old`: 8 bytes, native byte order.
    #[inline]
    pub fn fetch_add(old: D, at: RemoteAddr, add: u64) -> Self {
        Self::new(Kind::FetchAdd { at, add }, old)
    }
}

impl WorkRequest<()> {
    /// Writes 8 bytes of remote memory atomically; see
    /// [`Context::can_write_atomically`].
    #[inline]
    pub fn atomic_write(to: RemoteAddr, value: [u8; 8]) -> Self {
        Self::new(Kind::AtomicWrite { to, value }, ())
    }

    /// Flushes earlier writes to the range with placement type `level`; see
    /// [`Context::can_flush_to`]. The peer's region must allow it (`FLUSH_GLOBAL`,
    /// `FLUSH_PERSISTENT`).
    #[inline]
    pub fn flush(at: RemoteAddr, range: FlushRange, level: FlushTo) -> Self {
        let (length, selectivity) = range.encode();
        let kind = Kind::Flush {
            at,
            length,
            kind: level,
            level: selectivity,
        };
        Self::new(kind, ())
    }

    /// Invalidates a local rkey: that of a type 2 window, or of a region.
    #[inline]
    pub fn local_invalidate(rkey: u32) -> Self {
        Self::new(Kind::LocalInvalidate { rkey }, ())
    }

    /// Unbinds a type 1 window; its key changes.
    pub fn unbind(window: &MemoryWindow) -> Self {
        let mut this = Self::new(Kind::Bind, ());
        let bind = Bind::new(window, None, AccessFlags::empty());
        this.attachment = Attachment::Window(Box::new(bind));
        this
    }
}

impl WorkRequest<MemorySlice> {
    /// Binds a window to a part of a region that has `MW_BIND`, with the access
    /// rights `access` for peers. [`MemoryWindow::rkey`] returns the new key as
    /// soon as this is posted.
    ///
    /// Posting refuses a region without `MW_BIND`, remote writes or atomics to a
    /// region without `LOCAL_WRITE`, a range longer than the device's windows can
    /// span (2 GiB on ConnectX), and a window that has binds in flight on another
    /// queue pair ([`Error::Busy`]).
    pub fn bind(window: &MemoryWindow, to: MemorySlice, access: AccessFlags) -> Self {
        let bind = Bind::new(window, Some(to.clone()), access);
        let mut this = Self::new(Kind::Bind, to);
        this.attachment = Attachment::Window(Box::new(bind));
        this
    }
}
