//! Work requests.

use super::{Companion, Inner};
use crate::data::{Data, Sink, Source};
use crate::device::{Opcode, SendFlags, Wqe};
use crate::memory::MemorySlice;
use crate::mw::Bind;
use crate::operation::{Operation, RemoteAddr};
use crate::pd::Identity;
use crate::{AccessFlags, AddressHandle, Context, Error, MemoryWindow, Result};

/// What is to be done, with which memory, and how its end is heard of.
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
    pub(super) companion: Companion,
}

/// What depends on the operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Send,
    /// To that queue pair, with that queue key; the path is the companion.
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
    /// The companion says which window, and to what.
    Bind,
}

/// How far a flush has to bring what was written before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushTo {
    /// Every reader of the memory sees it.
    GlobalVisibility,
    /// It outlives a loss of power.
    Persistence,
}

/// Which of a peer's memory a flush is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushRange {
    /// So many bytes from the address on.
    Bytes(u32),
    /// The whole region.
    Region,
}

impl FlushTo {
    /// As the kernel numbers the kinds of a flush.
    #[inline(always)]
    pub(crate) fn encode(self) -> u8 {
        match self {
            Self::GlobalVisibility => 1,
            Self::Persistence => 2,
        }
    }
}

impl FlushRange {
    /// Bytes, and the selectivity level as the kernel numbers it.
    #[inline(always)]
    pub(crate) fn encode(self) -> (u32, u8) {
        match self {
            Self::Bytes(length) => (length, 0),
            Self::Region => (0, 1),
        }
    }
}

/// What goes along with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extra {
    None,
    Immediate(u32),
    Invalidate(u32),
    /// It was asked for what does not go together.
    Clash(Clash),
}

/// What was asked of one work request and does not go together. It is refused
/// when it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clash {
    ImmediateAndKey,
    Address,
}

impl Clash {
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
    /// Of those that are rarer.
    fn check(self, extra: Extra, datagram: bool, context: &Context) -> Result<()> {
        let invalid = |what| Err(Error::Invalid { what });
        let sends = matches!(self, Self::Send | Self::SendTo { .. });
        match extra {
            Extra::Clash(clash) => return invalid(clash.text()),
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
            Self::CompareSwap { at, .. } | Self::FetchAdd { at, .. }
                if !at.addr.is_multiple_of(8) =>
            {
                return invalid("the address of an atomic must be a multiple of 8");
            }
            Self::AtomicWrite { to, .. } if !to.addr.is_multiple_of(8) => {
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
            companion: Companion::None,
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

    #[inline(always)]
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

    #[inline(always)]
    pub(super) fn opcode(&self) -> Opcode {
        match (self.kind, self.extra) {
            (Kind::Send | Kind::SendTo { .. }, Extra::None | Extra::Clash(_)) => Opcode::SEND,
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

    /// What is wrong with it, before anything is written. `datagram`: for a
    /// queue pair of datagrams.
    #[inline(always)]
    pub(super) fn check(&self, datagram: bool, domain: Identity, context: &Context) -> Result<()> {
        match self.kind {
            Kind::Send if !datagram && !matches!(self.extra, Extra::Clash(_)) => Ok(()),
            Kind::Write(_) if matches!(self.extra, Extra::None | Extra::Immediate(_)) => Ok(()),
            Kind::Read(_) if self.extra == Extra::None => Ok(()),
            // Values, no reference: what nobody outside refers to need not lie
            // in memory.
            kind => {
                kind.check(self.extra, datagram, context)?;
                match &self.companion {
                    Companion::Address(handle) if handle.identity() != domain => {
                        Err(Error::WrongDomain {
                            what: "address handle",
                        })
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Writes everything into the entry. A bind is in flight from here on:
    /// nothing after it fails.
    #[inline(always)]
    pub(super) fn describe(
        &mut self,
        wqe: &mut Wqe<'_>,
        domain: Identity,
        queue_pair: &Inner,
    ) -> Result<()> {
        match self.extra {
            Extra::None | Extra::Clash(_) => {}
            Extra::Immediate(value) => wqe.immediate_or_key(value.to_be()),
            Extra::Invalidate(rkey) => wqe.immediate_or_key(rkey),
        }
        match self.kind {
            Kind::Send => {}
            Kind::SendTo { qp_num, qkey } => {
                if let Companion::Address(handle) = &self.companion {
                    wqe.datagram(handle.number(), qp_num, qkey);
                }
            }
            Kind::Write(to) | Kind::Read(to) => wqe.rdma(to),
            Kind::CompareSwap { at, compare, swap } => wqe.atomic(at, compare, swap),
            Kind::FetchAdd { at, add } => wqe.atomic(at, add, 0),
            Kind::AtomicWrite { to, value } => {
                wqe.atomic_write(to, value);
                return Ok(());
            }
            Kind::Flush {
                at,
                length,
                kind,
                level,
            } => {
                wqe.flush(at, length, kind.encode(), level);
                return Ok(());
            }
            Kind::LocalInvalidate { rkey } => {
                wqe.immediate_or_key(rkey);
                wqe.no_data();
                return Ok(());
            }
            Kind::Bind => {
                if let Companion::Window(bind) = &mut self.companion {
                    wqe.bind_window(bind.begin(queue_pair.id, domain)?);
                }
                return Ok(());
            }
        }
        let bytes = self.data.gather(wqe, domain)?;
        if matches!(self.kind, Kind::CompareSwap { .. } | Kind::FetchAdd { .. }) && bytes < 8 {
            return Err(Error::Invalid {
                what: "an atomic needs 8 bytes for the old value",
            });
        }
        Ok(())
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
    /// immediate data uses up a receive of the peer's. With
    /// [`invalidate`](Self::invalidate) it is refused when it is posted.
    #[inline]
    pub fn immediate(mut self, value: u32) -> Self {
        self.extra = match self.extra {
            Extra::None | Extra::Immediate(_) => Extra::Immediate(value),
            Extra::Invalidate(_) => Extra::Clash(Clash::ImmediateAndKey),
            Extra::Clash(clash) => Extra::Clash(clash),
        };
        self
    }

    /// The peer's device invalidates that key of the peer's when the message,
    /// a send, arrives. With [`immediate`](Self::immediate) data it is refused
    /// when it is posted.
    #[inline]
    pub fn invalidate(mut self, rkey: u32) -> Self {
        self.extra = match self.extra {
            Extra::None | Extra::Invalidate(_) => Extra::Invalidate(rkey),
            Extra::Immediate(_) => Extra::Clash(Clash::ImmediateAndKey),
            Extra::Clash(clash) => Extra::Clash(clash),
        };
        self
    }

    /// Where a datagram goes, a send: along a path, to a queue pair that takes
    /// `qkey`. What is no send is refused when it is posted.
    #[inline]
    pub fn to(mut self, path: &AddressHandle, qp_num: u32, qkey: u32) -> Self {
        match self.kind {
            Kind::Send | Kind::SendTo { .. } => {
                self.kind = Kind::SendTo { qp_num, qkey };
                self.companion = Companion::Address(path.clone());
            }
            _ => self.extra = Extra::Clash(Clash::Address),
        }
        self
    }
}

impl<D: Sink> WorkRequest<D> {
    /// A read of memory of the peer's, as long as the data is.
    #[inline]
    pub fn read(data: D, from: RemoteAddr) -> Self {
        Self::new(Kind::Read(from), data)
    }

    /// Compares 8 bytes of the peer's memory with `compare` and, if they are
    /// equal, replaces them by `swap`. What was there comes into `old`, 8 bytes,
    /// native byte order.
    #[inline]
    pub fn compare_swap(old: D, at: RemoteAddr, compare: u64, swap: u64) -> Self {
        Self::new(Kind::CompareSwap { at, compare, swap }, old)
    }

    /// Adds to 8 bytes of the peer's memory, wrapping. What was there comes
    /// into `old`, 8 bytes, native byte order.
    #[inline]
    pub fn fetch_add(old: D, at: RemoteAddr, add: u64) -> Self {
        Self::new(Kind::FetchAdd { at, add }, old)
    }
}

impl WorkRequest<()> {
    /// Writes 8 bytes of the peer's memory, all at once
    /// ([`Context::can_write_atomically`]).
    #[inline]
    pub fn atomic_write(to: RemoteAddr, value: [u8; 8]) -> Self {
        Self::new(Kind::AtomicWrite { to, value }, ())
    }

    /// Brings what was written before it to where `level` says
    /// ([`Context::can_flush_to`]). The peer's region must allow it (`FLUSH_GLOBAL`,
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

    /// Makes a remote key of one's own useless: that of a window of type 2, or
    /// of a region.
    #[inline]
    pub fn local_invalidate(rkey: u32) -> Self {
        Self::new(Kind::LocalInvalidate { rkey }, ())
    }

    /// Binds a window of type 1 to nothing; its key changes.
    pub fn unbind(window: &MemoryWindow) -> Self {
        let mut this = Self::new(Kind::Bind, ());
        let bind = Bind::new(window, None, AccessFlags::empty());
        this.companion = Companion::Window(Box::new(bind));
        this
    }
}

impl WorkRequest<MemorySlice> {
    /// Binds a window to a part of a region made with `MW_BIND`, for peers to do
    /// there what `access` says. The window's new key is
    /// [`MemoryWindow::rkey`] as soon as this is posted. Refused then: a region
    /// without `MW_BIND`, remote writes or atomics in one without `LOCAL_WRITE`,
    /// more than the device's windows span (2 GiB with a ConnectX), and a bind of
    /// a window that has others in flight on another queue pair
    /// ([`Error::Busy`]).
    pub fn bind(window: &MemoryWindow, to: MemorySlice, access: AccessFlags) -> Self {
        let bind = Bind::new(window, Some(to.clone()), access);
        let mut this = Self::new(Kind::Bind, to);
        this.companion = Companion::Window(Box::new(bind));
        this
    }
}
