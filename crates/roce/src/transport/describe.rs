//! Causes in plain words, with both sides of the comparison.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::cause::{Cause, DropCause, EngineError, Failure, Refusal};
use super::config::{QpState, Service, ack_wait, rnr_wait};
use super::host::{Access, Fault};
use crate::packet::NakCode;

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dropped(cause) => write!(f, "packet dropped: {cause}"),
            Self::Refused(refusal) => write!(f, "request of the peer refused: {refusal}"),
            Self::Failed(failure) => write!(f, "work request failed: {failure}"),
        }
    }
}

impl Display for Service {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::XrcInitiator => "XRC initiator",
            Self::XrcTarget => "XRC target",
            Self::DcInitiator => "DC initiator",
            Self::DcTarget => "DC target",
        })
    }
}

impl Display for QpState {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::ReadyToReceive => "RTR",
            Self::ReadyToSend => "RTS",
            Self::SendQueueDrain => "SQD",
            Self::SendQueueError => "SQE",
            Self::Error => "ERR",
        })
    }
}

impl Display for Access {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "RDMA read",
            Self::Write => "RDMA write",
            Self::Atomic => "atomic",
        })
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Protection => "the key does not permit it",
            Self::Memory => "the memory is not mapped",
            Self::Absent => "the memory is absent now",
        })
    }
}

impl Display for NakCode {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SequenceError => "a packet is missing",
            Self::InvalidRequest => "invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
        })
    }
}

impl Display for DropCause {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => f.write_str("lengths or headers are malformed"),
            Self::Icrc => f.write_str("the ICRC is wrong"),
            Self::UnknownQp(qpn) => write!(f, "there is no queue pair {qpn:#x}"),
            Self::NoGroup => f.write_str("a multicast without a destination GID"),
            Self::Service { opcode, service } => {
                write!(f, "opcode {opcode:#x} is not one of {service}")
            }
            Self::State(state) => write!(f, "the queue pair is in {state}"),
            Self::Direction(service) => write!(f, "{service} takes no packets in this direction"),
            Self::PartitionKey { packet, own } => {
                write!(
                    f,
                    "P_Key {packet:#x} does not match {own:#x} of the queue pair"
                )
            }
            Self::Peer => f.write_str("it is not from the connected peer"),
            Self::RoceVersion => f.write_str(
                "one end uses a GID of RoCE v1, the other of v2: the source GID of both must be \
                 of the same version",
            ),
            Self::QueueKey { packet, own } => {
                write!(f, "Q_Key {packet:#x} is not {own:#x} of the queue pair")
            }
            Self::OwnMulticast => f.write_str("a multicast of the queue pair itself"),
            Self::DatagramLength { length, room } => write!(
                f,
                "{length} bytes, with 40 for the GRH, do not fit into the receive of {room}"
            ),
            Self::NoReceive => f.write_str("no receive is posted"),
            Self::AbsentMemory => f.write_str("the memory of the receive is absent now"),
            Self::DcKey { packet, own } => {
                write!(f, "DC key {packet:#x} is not {own:#x} of the target")
            }
            Self::StaleConnection(_) => {
                f.write_str("a newer dynamic connection has replaced this one")
            }
            Self::Closing => f.write_str("a request before it was refused"),
            Self::Replies(count) => write!(f, "{count} responses wait to be sent already"),
            Self::OutOfSequence { psn, expected } => {
                write!(f, "PSN {psn:?} is not the expected {expected:?}")
            }
            Self::Duplicate(psn) => write!(f, "PSN {psn:?} was executed before"),
            Self::MissingResponse { psn, missing } => {
                write!(
                    f,
                    "the response with PSN {missing:?} before {psn:?} is missing"
                )
            }
            Self::StaleResponse(psn) => {
                write!(f, "no outstanding request has PSN {psn:?}")
            }
        }
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opcode(opcode) => write!(f, "opcode {opcode:#x} is reserved"),
            Self::Order(opcode) => {
                write!(f, "opcode {opcode:#x} cannot follow the one before it")
            }
            Self::Headers => f.write_str("a header that the opcode demands is missing"),
            Self::PayloadLength { length, limit } => {
                write!(
                    f,
                    "a packet has {length} bytes of payload where {limit} are due"
                )
            }
            Self::MessageLength(length) => {
                write!(f, "{length} bytes are more than a message may have")
            }
            Self::Permission(access) => write!(
                f,
                "the access flags of the queue pair do not permit an {access}"
            ),
            Self::Srq(srq) => {
                write!(f, "SRQ {srq:#x} is not of the target's XRC domain")
            }
            Self::Reads(limit) => write!(
                f,
                "more reads and atomics at a time than the queue pair's max_dest_rd_atomic, {limit}"
            ),
            Self::Alignment(va) => {
                write!(
                    f,
                    "the address of an atomic, {va:#x}, is not a multiple of 8"
                )
            }
            Self::RemoteMemory {
                rkey,
                va,
                length,
                access,
                fault,
                ..
            } => write!(
                f,
                "{access} of {length} bytes at {va:#x} with rkey {rkey:#x}: {fault}"
            ),
            Self::ReceiveLength { length, room } => write!(
                f,
                "a message of {length} bytes or more does not fit into the receive of {room}"
            ),
            Self::ReceiveMemory(fault) => write!(f, "the buffers of the receive: {fault}"),
            Self::InvalidatedKey(key) => {
                write!(
                    f,
                    "key {key:#x} of a send with invalidate cannot be invalidated"
                )
            }
            Self::NoReceive => f.write_str("no receive is posted"),
            Self::AbsentMemory => f.write_str("memory is absent now"),
            Self::InjectedNak(code) => write!(f, "an injected fault: {code}"),
            Self::InjectedRnr => f.write_str("an injected fault: the receiver is not ready"),
        }
    }
}

impl Display for EngineError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.violation.fmt(f)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::MessageLength(length) => {
                write!(f, "{length} bytes are more than the service permits")
            }
            Self::Operation { operation, service } => {
                write!(f, "{service} has no {}", operation.name())
            }
            Self::NoReads => f.write_str("a read or atomic, but max_rd_atomic is 0"),
            Self::NoDestination => f.write_str("it names no destination"),
            Self::NoPath => f.write_str("the queue pair has no path to a peer"),
            Self::LocalMemory(fault) => write!(f, "its local buffers: {fault}"),
            Self::Refused(code) => write!(f, "the peer refused it: {code}"),
            Self::Response(psn) => {
                write!(f, "the response with PSN {psn:?} does not match it")
            }
            Self::Retries {
                count,
                timeout,
                excused,
            } => {
                write!(f, "no answer of the peer after {count} retries")?;
                if let Some(wait) = ack_wait(*timeout).map(Duration::from_nanos) {
                    write!(f, " with a timeout of {wait:.1?}")?;
                }
                match Duration::from_nanos(*excused) {
                    Duration::ZERO => Ok(()),
                    excused => write!(
                        f,
                        "; before them it was silent for {excused:.1?}, which did not count \
                         (patience, or its process waited for a processor)"
                    ),
                }
            }
            Self::RnrRetries { count, timer } => {
                let wait = Duration::from_nanos(rnr_wait(*timer));
                write!(
                    f,
                    "the peer had no receive posted, after {count} retries, each after {wait:.1?} \
                     (RNR)"
                )
            }
            Self::Flushed => f.write_str("flushed, since the queue pair is in error"),
        }
    }
}
