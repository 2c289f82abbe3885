//! The interface to the engine: work requests, completions, memory.

use super::cause::{Cause, EngineError, Failure};
use crate::packet::{L3, Link, Path, Payload};

/// Operation of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Send, and invalidate an rkey of the peer.
    SendInvalidate,
    /// RDMA write.
    Write,
    /// RDMA write with immediate data.
    WriteImm,
    /// RDMA read.
    Read,
    /// Atomic fetch and add.
    FetchAdd {
        /// Addend.
        add: u64,
    },
    /// Atomic compare and swap.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// New value if they are equal.
        swap: u64,
    },
    /// An operation that the engine performs itself, in order: [`Host::run_local`].
    Local,
}

impl Operation {
    /// Returns its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::SendImm => "send with immediate data",
            Self::SendInvalidate => "send with invalidate",
            Self::Write => "RDMA write",
            Self::WriteImm => "RDMA write with immediate data",
            Self::Read => "RDMA read",
            Self::FetchAdd { .. } => "fetch and add",
            Self::CompareSwap { .. } => "compare and swap",
            Self::Local => "local operation",
        }
    }

    /// Returns whether the peer takes a receive for it.
    #[must_use]
    pub fn takes_receive(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendImm | Self::SendInvalidate | Self::WriteImm
        )
    }

    /// Returns whether the peer responds with data.
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

/// Destination of a datagram, or of a request over a dynamic connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram {
    /// Path to the destination.
    pub path: Path,
    /// Destination QP number.
    pub qpn: u32,
    /// Queue key. If its highest bit is set, the QP's own is used instead.
    pub qkey: u32,
    /// Access key of the DC target.
    pub dc_key: u64,
}

/// A work request of a send queue.
#[derive(Debug)]
pub struct SendWork<L> {
    /// Identifier chosen by the engine; returned in [`Host::send_done`].
    pub id: u64,
    /// Operation.
    pub operation: Operation,
    /// Length of the message in bytes. Ignored for atomics, which have 8.
    pub length: u32,
    /// Local buffers, opaque to the transport.
    pub local: L,
    /// Immediate data as a number, or the rkey to invalidate.
    pub imm: u32,
    /// Fence.
    pub fence: Fence,
    /// Request a solicited event at the receiver.
    pub solicited: bool,
    /// Remote address of writes, reads and atomics.
    pub va: u64,
    /// Remote key for `va`.
    pub rkey: u32,
    /// SRQ number at the peer (XRC).
    pub xrc_srqn: u32,
    /// Destination (UD, DC).
    pub datagram: Option<Box<Datagram>>,
    /// Stream that it belongs to (DC).
    pub stream: u16,
    /// The engine refuses it: it is not executed, and completes with this error, in order.
    pub refused: Option<Box<EngineError>>,
}

impl<L> SendWork<L> {
    /// Creates a work request with these fields, and defaults for the others.
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
            refused: None,
        }
    }
}

/// A work request of a receive queue.
#[derive(Debug)]
pub struct RecvWork<L> {
    /// Identifier chosen by the engine; returned in [`Host::recv_done`].
    pub id: u64,
    /// Total length of the buffers in bytes.
    pub length: u32,
    /// Local buffers, opaque to the transport.
    pub local: L,
}

/// The first packet of a message, by which its receive may be chosen (tag matching).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageStart<'a> {
    /// Data of the packet.
    pub payload: &'a [u8],
    /// The message has no other packet.
    pub single_packet: bool,
    /// The queue pair is able to read from its peer.
    pub may_read: bool,
}

/// Completion status of a work request, as in the InfiniBand specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Completed successfully.
    Success,
    /// The message is too long for the service or for the receive buffers.
    LocalLength,
    /// Error in the queue pair or in the work request.
    LocalQpOperation,
    /// Wrong key, bounds or rights of a local buffer.
    LocalProtection,
    /// Not started or not finished, because the queue pair is in error.
    Flushed,
    /// Binding a memory window failed.
    MemoryBind,
    /// The response does not match the request.
    BadResponse,
    /// The memory of a remote write with immediate data is not accessible.
    LocalAccess,
    /// The peer reports an invalid request.
    RemoteInvalidRequest,
    /// The peer refuses access to remote memory.
    RemoteAccess,
    /// The peer failed to perform the operation.
    RemoteOperation,
    /// No response after all retries.
    RetryExceeded,
    /// The peer was not ready to receive, after all retries.
    RnrRetryExceeded,
    /// The peer aborted the operation.
    RemoteAborted,
    /// A receive is returned because its memory is absent. The message is sent again,
    /// to another receive.
    Returned,
    /// The engine failed.
    Fatal,
}

/// Completion of a send work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendDone {
    /// Why it failed; `None` if it succeeded.
    pub cause: Option<Failure>,
    /// Length of the message in bytes.
    pub length: u32,
}

impl SendDone {
    /// Creates the completion of a failed work request.
    pub const fn failed(cause: Failure) -> Self {
        Self {
            cause: Some(cause),
            length: 0,
        }
    }

    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.cause.map_or(Status::Success, Failure::status)
    }
}

/// Kind of a received message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecvKind {
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Send with invalidate; `imm` is the rkey, which has been invalidated.
    SendInvalidate,
    /// RDMA write with immediate data.
    WriteImm,
}

/// Source of a received message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// Source QP number (UD, DC).
    pub qpn: u32,
    /// Link header of the packet.
    pub link: Link,
    /// Layer between link and transport header; anything but [`L3::None`] counts as a
    /// GRH.
    pub l3: L3,
    /// Partition key of the packet.
    pub pkey: u16,
    /// Received by multicast.
    pub multicast: bool,
}

/// Completion of a receive work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvDone {
    /// Why it failed; `None` if it succeeded.
    pub cause: Option<Cause>,
    /// Kind of the message.
    pub kind: RecvKind,
    /// Bytes received; for datagrams this includes 40 for the GRH.
    pub length: u32,
    /// Immediate data as a number, or the invalidated rkey.
    pub imm: u32,
    /// The sender requested a solicited event.
    pub solicited: bool,
    /// Source of the message; `None` if flushed.
    pub source: Option<Source>,
    /// SRQ number in the request (XRC).
    pub xrc_srqn: Option<u32>,
}

impl RecvDone {
    /// Creates the completion of a receive that received no data.
    pub const fn failed(cause: Failure) -> Self {
        Self {
            cause: Some(Cause::Failed(cause)),
            kind: RecvKind::Send,
            length: 0,
            imm: 0,
            solicited: false,
            source: None,
            xrc_srqn: None,
        }
    }

    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.cause.map_or(Status::Success, Cause::status)
    }
}

/// Queue pair, and SRQ for XRC, for which a peer's memory access is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// Queue pair that received the request.
    pub qpn: u32,
    /// SRQ number in the request (XRC). The protection domain of the SRQ applies, since
    /// an XRC target has none of its own.
    pub xrc_srqn: Option<u32>,
}

/// Access of a peer to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Atomic operation.
    Atomic,
}

/// Atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Fetch and add.
    FetchAdd {
        /// Addend.
        add: u64,
    },
    /// Compare and swap.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// New value if they are equal.
        swap: u64,
    },
}

/// Reason for which a memory access failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Wrong key, bounds or rights.
    Protection,
    /// The memory is unmapped in the host's address space.
    Memory,
    /// The memory is absent now and has been requested; the access is to be retried.
    Absent,
}

/// Asynchronous event of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpEvent {
    /// First packet in RTR: communication established.
    Established,
    /// A drain requested by the transition to SQD has finished.
    SqDrained,
    /// A peer was refused access; the QP is in error now.
    AccessError,
    /// A peer's request was invalid; the QP is in error now.
    RequestError,
    /// The transport moved the queue pair to this state by itself.
    State(super::QpState),
    /// In error with an SRQ: the queue pair consumes no more of the SRQ's work
    /// requests.
    LastWqe,
}

/// An event of a reliable queue pair that its counters count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// A request had a PSN beyond the expected one.
    OutOfSequence,
    /// A request had been executed before.
    Duplicate,
    /// A NAK for a PSN sequence error, which used up no last retry.
    SequenceNak,
    /// A response was skipped, which used up no last retry.
    ImpliedNak,
    /// An RNR NAK, which used up no last retry.
    RnrNak,
    /// A local ACK timeout, which used up no last retry.
    Timeout,
}

/// The engine as the transport uses it. Queue pairs are named by number.
///
/// Local buffers are of a type that the engine chooses ([`Host::LocalBuffers`]); keys are
/// checked on access. The accesses of one message come in order of offset;
/// retransmission restarts at a lower offset.
pub trait Host {
    /// Local buffers of a work request: a scatter/gather list, or inline data.
    type LocalBuffers;

    /// Returns the next work request of the send queue, in order; `None` if there is
    /// none now ([`super::Transport::ring`] announces more).
    fn next_send(&mut self, qpn: u32) -> Option<SendWork<Self::LocalBuffers>>;

    /// Copies local buffers from `offset` into `out`. Called again on retransmission.
    ///
    /// # Errors
    /// The work request completes with [`Status::LocalProtection`], or is retried if
    /// the memory is [`Fault::Absent`].
    fn gather(
        &mut self,
        qpn: u32,
        local: &mut Self::LocalBuffers,
        offset: u32,
        out: &mut [u8],
    ) -> Result<(), Fault>;

    /// Returns the address of a part of local buffers, for this host's own
    /// [`Host::remote_write`]. `None` if it is not in one piece or not accessible, or not
    /// sent as it is in memory.
    fn locate(
        &mut self,
        _qpn: u32,
        _local: &Self::LocalBuffers,
        _offset: u32,
        _length: usize,
    ) -> Option<u64> {
        None
    }

    /// Returns whether the process that has a queue pair, by its path and number, is known to be
    /// stopped: what it does not answer is not lost. Called when a local ACK timeout expires.
    fn is_peer_stopped(&self, _path: &Path, _qpn: u32) -> bool {
        false
    }

    /// Returns how long the peer on a path, a queue pair with this number, may be silent before its
    /// timeouts count as retries, in nanoseconds, if it has ever answered or sent a request: its
    /// process may be stopped, or wait for a processor. Called when a local ACK timeout expires.
    fn max_silence(&self, _path: &Path, _qpn: u32) -> u64 {
        0
    }

    /// Copies `data` into local buffers from `offset` on: a read response, or a
    /// received message.
    ///
    /// # Errors
    /// The work request completes with [`Status::LocalProtection`], or is retried if
    /// the memory is [`Fault::Absent`].
    fn scatter(
        &mut self,
        qpn: u32,
        local: &mut Self::LocalBuffers,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault>;

    /// Stores the response of an atomic.
    ///
    /// # Errors
    /// The work request completes with [`Status::LocalProtection`].
    fn store_atomic(
        &mut self,
        qpn: u32,
        local: &mut Self::LocalBuffers,
        value: u64,
    ) -> Result<(), Fault>;

    /// Performs an [`Operation::Local`]: once, in order, after its fence.
    ///
    /// # Errors
    /// The work request completes with the error's status.
    fn run_local(
        &mut self,
        qpn: u32,
        work: &mut SendWork<Self::LocalBuffers>,
    ) -> Result<(), EngineError>;

    /// Completes a send work request. Called for every one that was taken, in order.
    fn send_done(&mut self, qpn: u32, work: SendWork<Self::LocalBuffers>, done: SendDone);

    /// Returns whether the peer of an XRC target may name an SRQ, that is, whether the
    /// SRQ belongs to the target's XRC domain.
    fn may_name(&self, qpn: u32, xrc_srqn: u32) -> bool;

    /// Returns the next work request of the receive queue, or of the SRQ that the queue
    /// pair uses, or of SRQ `xrc_srqn`, which it may name. `start` is the message if it is
    /// a send over a connection. `None` means receiver not ready: reliable services send
    /// an RNR NAK.
    fn next_recv(
        &mut self,
        qpn: u32,
        xrc_srqn: Option<u32>,
        start: Option<&MessageStart<'_>>,
    ) -> Option<RecvWork<Self::LocalBuffers>>;

    /// Called before a receive work request ends with an error, whose cause is reported next.
    fn recv_failed(&mut self, _qpn: u32, _work: &RecvWork<Self::LocalBuffers>) {}

    /// Completes a receive work request. Returns whether the engine has a work request of
    /// its own for the send queue now.
    fn recv_done(&mut self, qpn: u32, work: RecvWork<Self::LocalBuffers>, done: RecvDone) -> bool;

    /// Checks whether the peer may access the whole memory of a message. Called at its
    /// first packet, not for empty messages.
    ///
    /// # Errors
    /// A reliable service answers the request with a NAK.
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
    /// A reliable service answers the request with a NAK.
    fn remote_write(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        data: Payload<'_>,
    ) -> Result<(), Fault>;

    /// Reads a part of a message.
    ///
    /// # Errors
    /// A reliable service answers the request with a NAK.
    fn remote_read(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), Fault>;

    /// Performs an atomic on eight aligned bytes. Returns the previous value.
    ///
    /// # Errors
    /// A reliable service answers the request with a NAK.
    fn remote_atomic(
        &mut self,
        target: Target,
        rkey: u32,
        va: u64,
        operation: AtomicOp,
    ) -> Result<u64, Fault>;

    /// Invalidates an rkey for a send with invalidate, before its completion.
    ///
    /// # Errors
    /// The receive ends with an error, and the peer gets no response.
    fn invalidate(&mut self, target: Target, rkey: u32) -> Result<(), Fault>;

    /// Returns whether sending is to stop before the next work request (SQD), once.
    fn stops(&mut self, qpn: u32) -> bool {
        let _ = qpn;
        false
    }

    /// Takes back the last work request of [`Host::next_send`], which was not begun: sending
    /// has stopped.
    fn give_back(&mut self, qpn: u32, work: SendWork<Self::LocalBuffers>) {
        let _ = (qpn, work);
    }

    /// Reports why a packet was dropped, a request refused, or a work request failed; the
    /// latter also with its completion. `qpn` is the queue pair, if the packet is for one. A
    /// peer chooses how often this is called.
    fn report(&mut self, qpn: Option<u32>, cause: Cause) {
        let _ = (qpn, cause);
    }

    /// Counts an event of a queue pair. A peer chooses how often this is called.
    fn count(&mut self, qpn: u32, event: Counted) {
        let _ = (qpn, event);
    }

    /// Reports an event of a queue pair.
    fn event(&mut self, qpn: u32, event: QpEvent);
}
