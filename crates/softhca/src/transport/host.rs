//! The seam to the engine: work requests, completions, memory.

use crate::packet::{L3, Link, Path};

/// What a work request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Send, and invalidate a key of the peer's.
    SendInvalidate,
    /// RDMA write.
    Write,
    /// RDMA write with immediate data.
    WriteImm,
    /// RDMA read.
    Read,
    /// Atomic fetch and add.
    FetchAdd {
        /// What is added.
        add: u64,
    },
    /// Atomic compare and swap.
    CompareSwap {
        /// What the value is compared with.
        compare: u64,
        /// What it becomes if equal.
        swap: u64,
    },
    /// Something the engine does by itself, in its turn: [`Host::run_local`].
    Local,
    /// A work request that makes no sense: completes with this status in its turn.
    Invalid(Status),
}

impl Operation {
    /// Whether the peer answers with data.
    #[inline]
    #[must_use]
    pub const fn is_read_or_atomic(self) -> bool {
        matches!(
            self,
            Self::Read | Self::FetchAdd { .. } | Self::CompareSwap { .. }
        )
    }
}

/// What a work request waits for before it starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Fence {
    /// Nothing.
    #[default]
    None,
    /// All earlier reads and atomics have completed.
    Reads,
    /// All earlier work requests have completed.
    All,
}

/// Where a datagram goes, or a request over a dynamic connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram {
    /// The way.
    pub path: Path,
    /// The destination QP.
    pub qpn: u32,
    /// The queue key. With its highest bit set the QP's own is used instead.
    pub qkey: u32,
    /// What a target of dynamic connections is asked with.
    pub dc_key: u64,
}

/// A work request of a send queue.
#[derive(Debug)]
pub struct SendWork<L> {
    /// The engine's; comes back in [`Host::send_done`].
    pub id: u64,
    /// What to do.
    pub operation: Operation,
    /// Bytes of the message. 8 for atomics, whatever is said here.
    pub length: u32,
    /// The local buffers, for the engine to understand.
    pub local: L,
    /// Immediate data as a number, or the key to invalidate.
    pub imm: u32,
    /// What to wait for.
    pub fence: Fence,
    /// The receiver's completion is a solicited event.
    pub solicited: bool,
    /// Address at the peer, of writes, reads, atomics.
    pub va: u64,
    /// Its key.
    pub rkey: u32,
    /// The peer's SRQ (XRC).
    pub xrc_srqn: u32,
    /// Where to (UD, DC).
    pub datagram: Option<Box<Datagram>>,
    /// The stream that it is of (DC).
    pub stream: u16,
}

impl<L> SendWork<L> {
    /// A work request with nothing but these.
    pub fn new(id: u64, operation: Operation, length: u32, local: L) -> Self {
        Self {
            id,
            operation,
            length,
            local,
            imm: 0,
            fence: Fence::None,
            solicited: false,
            va: 0,
            rkey: 0,
            xrc_srqn: 0,
            datagram: None,
            stream: 0,
        }
    }
}

/// A work request of a receive queue.
#[derive(Debug)]
pub struct RecvWork<L> {
    /// The engine's; comes back in [`Host::recv_done`].
    pub id: u64,
    /// Bytes of the buffers together.
    pub length: u32,
    /// The buffers.
    pub local: L,
}

/// How a work request ended: the completion statuses of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// As asked.
    Success,
    /// Too long: for the service, or for the receiver's buffers.
    LocalLength,
    /// An error in the queue pair or the work request.
    LocalQpOperation,
    /// A local buffer's key, bounds or rights.
    LocalProtection,
    /// Never started, or not finished: the queue pair is in error.
    Flushed,
    /// Binding a memory window failed.
    MemoryBind,
    /// An answer that does not fit the request.
    BadResponse,
    /// A remote write with immediate data could not be reported.
    LocalAccess,
    /// The peer calls the request invalid.
    RemoteInvalidRequest,
    /// The peer refuses access to its memory.
    RemoteAccess,
    /// The peer failed to do its part.
    RemoteOperation,
    /// No answer, after all retries.
    RetryExceeded,
    /// The peer was not ready to receive, after all retries.
    RnrRetryExceeded,
    /// The peer gave up.
    RemoteAborted,
    /// A receive is given back, since its memory is not there now. The message
    /// comes again, to another.
    Returned,
    /// The engine is broken.
    Fatal,
}

/// A work request of a send queue has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendDone {
    /// How.
    pub status: Status,
    /// Bytes of the message.
    pub length: u32,
}

/// What kind of message was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecvKind {
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Send with invalidate; `imm` is the key, which is invalid by now.
    SendInvalidate,
    /// RDMA write with immediate data.
    WriteImm,
}

/// Where a message came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// The sending QP (UD, DC).
    pub qpn: u32,
    /// The packet's link header.
    pub link: Link,
    /// How the transport header was wrapped; anything but [`L3::None`] counts as GRH.
    pub l3: L3,
    /// The partition key in the packet.
    pub pkey: u16,
    /// It came by multicast.
    pub multicast: bool,
}

/// A work request of a receive queue has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvDone {
    /// How.
    pub status: Status,
    /// What it received.
    pub kind: RecvKind,
    /// Bytes received; datagrams count 40 for the GRH.
    pub length: u32,
    /// Immediate data as a number, or the invalidated key.
    pub imm: u32,
    /// The sender asked for a solicited event.
    pub solicited: bool,
    /// From where; none if flushed.
    pub source: Option<Source>,
    /// The SRQ that the sender named (XRC).
    pub xrc_srqn: Option<u32>,
}

impl RecvDone {
    /// Nothing of a message came into it.
    pub const fn failed(status: Status) -> Self {
        Self {
            status,
            kind: RecvKind::Send,
            length: 0,
            imm: 0,
            solicited: false,
            source: None,
            xrc_srqn: None,
        }
    }
}

/// Through what a peer asks for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The queue pair that the request came to.
    pub qpn: u32,
    /// The SRQ that the request names (XRC): its protection domain counts, since
    /// an XRC target has none of its own.
    pub xrc_srqn: Option<u32>,
}

/// What a peer wants to do to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read it.
    Read,
    /// Write it.
    Write,
    /// An atomic.
    Atomic,
}

/// An atomic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Add.
    FetchAdd {
        /// What is added.
        add: u64,
    },
    /// Compare and swap.
    CompareSwap {
        /// What the value is compared with.
        compare: u64,
        /// What it becomes if equal.
        swap: u64,
    },
}

/// Why memory was not accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Key, bounds or rights.
    Protection,
    /// The memory itself: a hole in the host's address space.
    Memory,
    /// Memory that is not there now, and has been asked for: to be tried again.
    Absent,
}

/// Something to report besides completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpEvent {
    /// First packet in RTR: communication established.
    Established,
    /// A drain asked for by SQD has finished.
    SqDrained,
    /// A peer was refused access (the QP is in error now).
    AccessError,
    /// A peer's request was invalid (the QP is in error now).
    RequestError,
    /// The transport moved the queue pair to this state by itself.
    State(super::QpState),
    /// In error with an SRQ: no more of the SRQ's work requests are used.
    LastWqe,
}

/// What the transport needs of the engine. Queue pairs are named by number.
///
/// Local buffers are what the engine makes them ([`Host::Local`]); keys are checked
/// when they are accessed. Accesses of one message come in order of offset;
/// retransmission begins again at a lower one.
pub trait Host {
    /// The local buffers of a work request: a scatter list, or inline data.
    type Local;

    /// The next work request of the send queue, in order; none if there is none
    /// now ([`super::Transport::ring`] announces more).
    fn next_send(&mut self, qpn: u32) -> Option<SendWork<Self::Local>>;

    /// Copies local buffers from `offset` into `out`. Called again for what is
    /// retransmitted.
    ///
    /// # Errors
    /// The work request then completes with [`Status::LocalProtection`], or is
    /// tried again if the memory is [`Fault::Absent`].
    fn gather(
        &mut self,
        qpn: u32,
        local: &mut Self::Local,
        offset: u32,
        out: &mut [u8],
    ) -> Result<(), Fault>;

    /// Copies `data` into local buffers from `offset` on: a read's answer, or
    /// what was received.
    ///
    /// # Errors
    /// The work request then completes with [`Status::LocalProtection`], or is
    /// tried again if the memory is [`Fault::Absent`].
    fn scatter(
        &mut self,
        qpn: u32,
        local: &mut Self::Local,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault>;

    /// Stores an atomic's answer.
    ///
    /// # Errors
    /// The work request then completes with [`Status::LocalProtection`].
    fn store_atomic(&mut self, qpn: u32, local: &mut Self::Local, value: u64) -> Result<(), Fault>;

    /// Does an [`Operation::Local`], once, in its turn and after its fence.
    ///
    /// # Errors
    /// The work request completes with the status.
    fn run_local(&mut self, qpn: u32, work: &mut SendWork<Self::Local>) -> Result<(), Status>;

    /// A work request has ended: every one that was taken, in order.
    fn send_done(&mut self, qpn: u32, work: SendWork<Self::Local>, done: SendDone);

    /// Whether the peer of an XRC target may name an SRQ: it is of the target's
    /// domain.
    fn may_name(&self, qpn: u32, xrc_srqn: u32) -> bool;

    /// The next work request of the receive queue, or of the SRQ that the queue
    /// pair uses, or of SRQ `xrc_srqn`, which it may name. None is "receiver not ready".
    fn next_recv(&mut self, qpn: u32, xrc_srqn: Option<u32>) -> Option<RecvWork<Self::Local>>;

    /// A receive work request has ended.
    fn recv_done(&mut self, qpn: u32, work: RecvWork<Self::Local>, done: RecvDone);

    /// Whether the peer may do this to the whole of a message's memory; asked at
    /// its first packet, not for empty messages.
    ///
    /// # Errors
    /// The peer is told.
    fn check_remote(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        length: u32,
        access: Access,
    ) -> Result<(), Fault>;

    /// Writes a part of a message. The key may have become invalid since the check.
    ///
    /// # Errors
    /// The peer is told.
    fn remote_write(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        data: &[u8],
    ) -> Result<(), Fault>;

    /// Reads a part of a message.
    ///
    /// # Errors
    /// The peer is told.
    fn remote_read(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), Fault>;

    /// Does an atomic on eight aligned bytes; the value before.
    ///
    /// # Errors
    /// The peer is told.
    fn remote_atomic(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        operation: AtomicOp,
    ) -> Result<u64, Fault>;

    /// Invalidates a key for a send with invalidate, before its completion.
    ///
    /// # Errors
    /// The peer is told.
    fn invalidate(&mut self, target: Target, rkey: u32) -> Result<(), Fault>;

    /// Something happened to a queue pair.
    fn event(&mut self, qpn: u32, event: QpEvent);
}
