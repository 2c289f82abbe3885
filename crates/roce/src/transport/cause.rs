//! Why a packet was dropped, a request refused, or a work request failed.
//!
//! Each is one value, made where the rule is checked: the rule and what it compared. What
//! follows from it derives from the value: counter, NAK, event and completion status.

use super::config::{QpState, Service};
use super::host::{Access, Fault, Operation, QpEvent, Status};
use super::io::Counters;
use crate::packet::{NakCode, ParseError, Psn};
use crate::rule::Violation;

/// The cause of a drop, a refusal or a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// A packet was dropped.
    Dropped(DropCause),
    /// A request was not executed.
    Refused(Refusal),
    /// A work request ended with an error.
    Failed(Failure),
}

impl Cause {
    /// Returns the status of a work request that ended for this reason.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            Self::Refused(refusal) => refusal.status(),
            Self::Failed(failure) => failure.status(),
            // Ends no work request.
            Self::Dropped(_) => Status::Fatal,
        }
    }
}

impl From<DropCause> for Cause {
    fn from(cause: DropCause) -> Self {
        Self::Dropped(cause)
    }
}

impl From<Refusal> for Cause {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Failure> for Cause {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Why a received packet was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropCause {
    /// Lengths or headers are malformed.
    Malformed,
    /// The ICRC is wrong.
    Icrc,
    /// No queue pair has the number.
    UnknownQp(u32),
    /// A multicast has no destination GID.
    NoGroup,
    /// The opcode is reserved, or of another service.
    Service {
        /// Opcode of the packet.
        opcode: u8,
        /// Service of the queue pair.
        service: Service,
    },
    /// The queue pair does not receive.
    State(QpState),
    /// The packet is a request, or a response, and the queue pair takes none.
    Direction(Service),
    /// The partition keys do not match.
    PartitionKey {
        /// Key of the packet.
        packet: u16,
        /// Key of the queue pair.
        own: u16,
    },
    /// The source is not the connected peer.
    Peer,
    /// It is of the other version of RoCE than the queue pair.
    RoceVersion,
    /// The queue keys differ.
    QueueKey {
        /// Key of the packet.
        packet: u32,
        /// Key of the queue pair.
        own: u32,
    },
    /// A multicast of the queue pair itself, which does not want those.
    OwnMulticast,
    /// A datagram is longer than the receive.
    DatagramLength {
        /// Its length, with 40 bytes for the GRH.
        length: u32,
        /// Length of the receive.
        room: u32,
    },
    /// A datagram found no receive posted.
    NoReceive,
    /// The memory of a datagram's receive is absent now.
    AbsentMemory,
    /// The access key of a dynamic connection is wrong.
    DcKey {
        /// Key of the packet.
        packet: u64,
        /// Key of the target.
        own: u64,
    },
    /// A newer dynamic connection has replaced this one.
    StaleConnection(u64),
    /// A request was refused before, and the queue pair is about to be in error.
    Closing,
    /// Too many responses wait to be sent.
    Replies(usize),
    /// A packet before this one is missing.
    OutOfSequence {
        /// PSN of the packet.
        psn: Psn,
        /// The expected PSN.
        expected: Psn,
    },
    /// The request was executed before.
    Duplicate(Psn),
    /// The response to an earlier request is missing.
    MissingResponse {
        /// PSN of the response.
        psn: Psn,
        /// PSN of the missing one.
        missing: Psn,
    },
    /// No outstanding request has this PSN, or its response has arrived already.
    StaleResponse(Psn),
}

impl From<ParseError> for DropCause {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::BadIcrc => Self::Icrc,
            ParseError::NotRdma | ParseError::Malformed => Self::Malformed,
        }
    }
}

impl DropCause {
    /// Returns the counter of such packets.
    pub(super) fn counter(self, counters: &mut Counters) -> &mut u64 {
        match self {
            Self::Malformed => &mut counters.malformed,
            Self::Icrc => &mut counters.bad_icrc,
            Self::PartitionKey { .. } => &mut counters.pkey_violations,
            Self::QueueKey { .. } => &mut counters.qkey_violations,
            Self::DcKey { .. } => &mut counters.dc_key_violations,
            Self::NoReceive => &mut counters.not_ready,
            Self::OutOfSequence { .. } => &mut counters.out_of_sequence,
            Self::Duplicate(_) => &mut counters.duplicates,
            Self::StaleResponse(_) => &mut counters.stale,
            Self::UnknownQp(_)
            | Self::NoGroup
            | Self::Service { .. }
            | Self::State(_)
            | Self::Direction(_)
            | Self::Peer
            | Self::RoceVersion
            | Self::OwnMulticast
            | Self::DatagramLength { .. }
            | Self::AbsentMemory
            | Self::StaleConnection(_)
            | Self::Closing
            | Self::MissingResponse { .. }
            | Self::Replies(_) => &mut counters.dropped,
        }
    }
}

/// Why a request was not executed. A reliable service answers with a NAK ([`Response`]); an
/// unreliable one drops the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The opcode is reserved.
    Opcode(u8),
    /// The opcode cannot follow the one before it.
    Order(u8),
    /// A header that the opcode demands is missing.
    Headers,
    /// The payload of a packet has a wrong length.
    PayloadLength {
        /// Its length.
        length: u32,
        /// The path MTU, or what is left of the message.
        limit: u32,
    },
    /// The message is longer than messages may be.
    MessageLength(u32),
    /// The queue pair does not permit this access.
    Permission(Access),
    /// The SRQ that the request names does not belong to the target's XRC domain.
    Srq(u32),
    /// More reads and atomics at a time than the queue pair permits.
    Reads(u32),
    /// The address of an atomic is not a multiple of 8.
    Alignment(u64),
    /// The memory cannot be accessed with the key.
    RemoteMemory {
        /// The key.
        rkey: u32,
        /// First address.
        va: u64,
        /// Length in bytes.
        length: u32,
        /// Kind of access.
        access: Access,
        /// The fault of the access.
        fault: Fault,
        /// A receive ends with an error by it.
        receive: bool,
    },
    /// The message is longer than the receive.
    ReceiveLength {
        /// Length of the message so far.
        length: u32,
        /// Length of the receive.
        room: u32,
    },
    /// The memory of the receive cannot be written.
    ReceiveMemory(Fault),
    /// The key of a send with invalidate cannot be invalidated.
    InvalidatedKey(u32),
    /// No receive is posted.
    NoReceive,
    /// Memory is absent now.
    AbsentMemory,
    /// An injected fault answers with this NAK.
    InjectedNak(NakCode),
    /// An injected fault answers as if no receive were posted.
    InjectedRnr,
}

/// The response to a refused request, and the state of the queue pair after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Response {
    /// A NAK. The queue pair is in error afterwards, with this event.
    Nak(NakCode, Option<QpEvent>),
    /// Nothing (class J). The queue pair is in error afterwards.
    Nothing,
    /// An RNR NAK with the queue pair's timer.
    NotReady,
    /// An RNR NAK with a timer that grows.
    AbsentMemory,
    /// A NAK that asks for the request again.
    Sequence,
}

impl Refusal {
    /// Returns whether the peer tries again.
    #[must_use]
    pub fn is_retried(self) -> bool {
        matches!(
            self.response(),
            Response::NotReady | Response::AbsentMemory | Response::Sequence
        )
    }

    /// Returns the response of a reliable service.
    #[must_use]
    pub fn response(self) -> Response {
        match self {
            Self::Opcode(_)
            | Self::Order(_)
            | Self::Headers
            | Self::PayloadLength { .. }
            | Self::MessageLength(_)
            | Self::Permission(_)
            | Self::Srq(_)
            | Self::Reads(_)
            | Self::Alignment(_) => {
                Response::Nak(NakCode::InvalidRequest, Some(QpEvent::RequestError))
            }
            Self::RemoteMemory { fault, receive, .. } => {
                let (code, event) = match fault {
                    Fault::Protection => (NakCode::RemoteAccess, QpEvent::AccessError),
                    // Absent memory is retried before this is reached.
                    Fault::Memory | Fault::Absent => {
                        (NakCode::RemoteOperation, QpEvent::RequestError)
                    }
                };
                Response::Nak(code, Some(event).filter(|_| !receive))
            }
            Self::ReceiveLength { .. } => Response::Nak(NakCode::InvalidRequest, None),
            Self::ReceiveMemory(_) => Response::Nak(NakCode::RemoteOperation, None),
            Self::InvalidatedKey(_) => Response::Nothing,
            Self::NoReceive | Self::InjectedRnr => Response::NotReady,
            Self::AbsentMemory => Response::AbsentMemory,
            Self::InjectedNak(NakCode::SequenceError) => Response::Sequence,
            Self::InjectedNak(code) => {
                let event = match code {
                    NakCode::RemoteAccess => QpEvent::AccessError,
                    _ => QpEvent::RequestError,
                };
                Response::Nak(code, Some(event))
            }
        }
    }

    /// Returns the status of a receive that ends by it.
    fn status(self) -> Status {
        match self {
            Self::ReceiveLength { .. } => Status::LocalLength,
            Self::ReceiveMemory(_) => Status::LocalProtection,
            Self::RemoteMemory { .. } => Status::LocalAccess,
            Self::InvalidatedKey(_) => Status::RemoteInvalidRequest,
            // They end no receive.
            _ => Status::Fatal,
        }
    }
}

/// Why the engine refused a work request, or failed to perform it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineError {
    /// Status of the work request.
    pub status: Status,
    /// What broke which rule.
    pub violation: Violation,
}

/// Why a work request ended with an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The engine refused it, or failed to perform it.
    Engine(EngineError),
    /// The message is longer than the service permits.
    MessageLength(u32),
    /// The service has no such operation.
    Operation {
        /// The operation.
        operation: Operation,
        /// The service.
        service: Service,
    },
    /// A read or atomic on a queue pair that permits itself none.
    NoReads,
    /// It has no destination, and its service demands one.
    NoDestination,
    /// The queue pair has no path to a peer.
    NoPath,
    /// Its local buffers cannot be accessed.
    LocalMemory(Fault),
    /// The peer refused the request.
    Refused(NakCode),
    /// The response does not match the request.
    Response(Psn),
    /// No response.
    Retries {
        /// Number of retries.
        count: u8,
        /// Code of the local ACK timeout.
        timeout: u8,
        /// Silence before these retries that did not count ([`super::Host::max_silence`]), in
        /// nanoseconds.
        excused: u64,
    },
    /// The peer was not ready to receive.
    RnrRetries {
        /// Number of retries.
        count: u8,
        /// The "RNR NAK timer field" of the peer's last answer.
        timer: u8,
    },
    /// The queue pair, or the stream, is in error.
    Flushed,
}

impl Failure {
    /// Returns the status of the work request.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            Self::Engine(error) => error.status,
            Self::MessageLength(_) => Status::LocalLength,
            Self::Operation { .. } | Self::NoReads | Self::NoDestination | Self::NoPath => {
                Status::LocalQpOperation
            }
            Self::LocalMemory(_) => Status::LocalProtection,
            Self::Refused(NakCode::InvalidRequest) => Status::RemoteInvalidRequest,
            Self::Refused(NakCode::RemoteAccess) => Status::RemoteAccess,
            Self::Refused(NakCode::RemoteOperation) => Status::RemoteOperation,
            // Is answered by sending again.
            Self::Refused(NakCode::SequenceError) => Status::Fatal,
            Self::Response(_) => Status::BadResponse,
            Self::Retries { .. } => Status::RetryExceeded,
            Self::RnrRetries { .. } => Status::RnrRetryExceeded,
            Self::Flushed => Status::Flushed,
        }
    }
}
