//! What an event says.

use core::fmt;

use uverbs::Errno;
use zerocopy::FromBytes;

use crate::abi;
use crate::param::{PeerConnection, UdParam};
use uverbs::open_enum;

open_enum! {
    /// What has happened (`enum rdma_cm_event_type`).
    EventKind(u32) {
        /// The address is resolved: the id has a device. Next: its route.
        ADDR_RESOLVED = 0,
        /// The address could not be resolved.
        ADDR_ERROR = 1,
        /// The route is resolved. Next: connect.
        ROUTE_RESOLVED = 2,
        /// The route could not be resolved.
        ROUTE_ERROR = 3,
        /// A peer wants a connection; on a listening id.
        CONNECT_REQUEST = 4,
        /// The peer has accepted. Next: ready the queue pair, then establish.
        CONNECT_RESPONSE = 5,
        /// The connection failed.
        CONNECT_ERROR = 6,
        /// The peer did not answer, or has no such service.
        UNREACHABLE = 7,
        /// The peer rejected.
        REJECTED = 8,
        /// The connection is established; of a datagram id: the peer is known.
        ESTABLISHED = 9,
        /// The connection is over.
        DISCONNECTED = 10,
        /// The device is gone; the id must be destroyed.
        DEVICE_REMOVAL = 11,
        /// The multicast group is joined.
        MULTICAST_JOIN = 12,
        /// The multicast group could not be joined, or is no more.
        MULTICAST_ERROR = 13,
        /// The network device's address has changed.
        ADDR_CHANGE = 14,
        /// No packet of a former connection can come any more: its queue pair
        /// number is free.
        TIMEWAIT_EXIT = 15,
        /// Address information is resolved (newer kernels).
        ADDRINFO_RESOLVED = 16,
        /// Address information could not be resolved (newer kernels).
        ADDRINFO_ERROR = 17,
        /// An event of this process's own.
        USER = 18,
        /// An event of librdmacm's own.
        INTERNAL = 19,
    }
}

open_enum! {
    /// Why a peer, or its kernel, rejected (`enum ib_cm_rej_reason`).
    RejectReason(i32) {
        /// No queue pair.
        NO_QP = 1,
        /// No end-to-end context.
        NO_EEC = 2,
        /// No resources.
        NO_RESOURCES = 3,
        /// The peer waited too long.
        TIMEOUT = 4,
        /// The request is not supported.
        UNSUPPORTED = 5,
        /// The communication identifier is not known.
        INVALID_COMM_ID = 6,
        /// The communication instance is not known.
        INVALID_COMM_INSTANCE = 7,
        /// Nobody listens on that port.
        INVALID_SERVICE_ID = 8,
        /// The transport is not supported.
        INVALID_TRANSPORT_TYPE = 9,
        /// A connection of the same queue pairs is not over yet.
        STALE_CONN = 10,
        /// The device has no such GID.
        INVALID_GID = 12,
        /// The path's MTU is not supported.
        INVALID_MTU = 26,
        /// The peer cannot take as many RDMA reads.
        INSUFFICIENT_RESP_RESOURCES = 27,
        /// The program at the peer rejected; its private data may say why.
        CONSUMER_DEFINED = 28,
        /// The retry count is not supported.
        INVALID_RNR_RETRY = 29,
        /// The version of the protocol is not supported.
        INVALID_CLASS_VERSION = 31,
        /// A vendor's option is not supported; a program may reject with it.
        VENDOR_OPTION_NOT_SUPPORTED = 35,
    }
}

open_enum! {
    /// Why a datagram service was not given (`enum ib_cm_sidr_status`).
    SidrStatus(i32) {
        /// Nobody listens on that port.
        UNSUPPORTED = 1,
        /// The program at the peer rejected.
        REJECT = 2,
        /// The peer has no queue pair for it.
        NO_QP = 3,
        /// The peer names another.
        REDIRECT = 4,
        /// The version of the protocol is not supported.
        UNSUPPORTED_VERSION = 5,
    }
}

/// Why something failed that an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// An error number, of this host's kernel.
    Errno(Errno),
    /// The peer's reason to reject.
    Rejected(RejectReason),
    /// The peer's status for a datagram service.
    Sidr(SidrStatus),
    /// A number without a meaning here.
    Other(i32),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Errno(errno) => errno.fmt(f),
            Self::Rejected(RejectReason::INVALID_SERVICE_ID) => {
                f.write_str("rejected: nobody listens on that port")
            }
            Self::Rejected(RejectReason::CONSUMER_DEFINED) => {
                f.write_str("rejected by the program at the peer")
            }
            Self::Rejected(reason) => write!(f, "rejected: {reason:?}"),
            Self::Sidr(SidrStatus::UNSUPPORTED) => {
                f.write_str("no datagram service: nobody listens on that port")
            }
            Self::Sidr(SidrStatus::REJECT) => {
                f.write_str("no datagram service: rejected by the program at the peer")
            }
            Self::Sidr(status) => write!(f, "no datagram service: {status:?}"),
            Self::Other(status) => write!(f, "status {status}"),
        }
    }
}

/// Which of the two forms an event's parameters have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of a connection.
    Connection,
    /// Of a datagram service or a multicast group.
    Datagram,
}

/// The parameters of an event.
#[derive(Clone, Copy)]
enum Param {
    Connection(abi::ConnParam),
    Datagram(abi::UdParam),
}

/// What an event says, without the ids that it is of.
#[derive(Clone, Copy)]
pub struct Message {
    kind: EventKind,
    status: i32,
    param: Param,
    arg: u64,
}

/// The bytes are shorter than an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncated;

impl Message {
    /// Reads what the kernel wrote. `form` is the id's; the bytes do not say.
    /// Any bytes are some event.
    pub fn new(event: &abi::EventResp, form: Form) -> Self {
        let bytes = event.param.as_slice();
        // Both parameters fit, by a constant assertion.
        let param = match form {
            Form::Connection => Param::Connection(
                abi::ConnParam::read_from_prefix(bytes)
                    .map_or_else(|_| Default::default(), |p| p.0),
            ),
            Form::Datagram => Param::Datagram(
                abi::UdParam::read_from_prefix(bytes).map_or_else(|_| Default::default(), |p| p.0),
            ),
        };
        let mut arg = [0; 8];
        for (to, from) in arg.iter_mut().zip(bytes) {
            *to = *from;
        }
        Self {
            kind: EventKind(event.event),
            status: event.status.cast_signed(),
            param,
            arg: u64::from_ne_bytes(arg),
        }
    }

    /// Reads an event from its bytes: what is behind it is ignored.
    ///
    /// # Errors
    /// If there are too few.
    pub fn parse(bytes: &[u8], form: Form) -> Result<(abi::EventResp, Self), Truncated> {
        let (event, _) = abi::EventResp::read_from_prefix(bytes).map_err(|_| Truncated)?;
        Ok((event, Self::new(&event, form)))
    }

    /// What has happened.
    pub fn kind(&self) -> EventKind {
        self.kind
    }

    /// The kernel's number for the outcome: zero, a negative error number, or
    /// a positive reason of the peer's.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The outcome.
    ///
    /// # Errors
    /// The reason, if the event is of a failure.
    pub fn result(&self) -> Result<(), Reason> {
        let reason = match (self.kind, self.status, &self.param) {
            (EventKind::REJECTED, status, _) if status > 0 => {
                Reason::Rejected(RejectReason(status))
            }
            (_, 0, _) if !self.kind.is_failure() => return Ok(()),
            (EventKind::UNREACHABLE, status, Param::Datagram(_)) if status > 0 => {
                Reason::Sidr(SidrStatus(status))
            }
            (_, status, _) if status < 0 => Reason::Errno(Errno::new(status.saturating_neg())),
            (_, status, _) => Reason::Other(status),
        };
        Err(reason)
    }

    /// The connection's parameters: of requests, responses, rejections and
    /// establishments of a connecting id.
    pub fn connection(&self) -> Option<PeerConnection<'_>> {
        match &self.param {
            Param::Connection(param) => Some(param.into()),
            Param::Datagram(_) => None,
        }
    }

    /// The datagram service's or multicast group's parameters.
    pub fn datagram(&self) -> Option<UdParam<'_>> {
        match &self.param {
            Param::Datagram(param) => Some(param.into()),
            Param::Connection(_) => None,
        }
    }

    /// The peer's private data, and zeros to the end of the message's room.
    pub fn private_data(&self) -> &[u8] {
        match &self.param {
            Param::Connection(param) => PeerConnection::from(param).private_data,
            Param::Datagram(param) => UdParam::from(param).private_data,
        }
    }

    /// The number that came with an [`EventKind::USER`].
    pub fn user_argument(&self) -> Option<u64> {
        (self.kind == EventKind::USER).then_some(self.arg)
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the private data, which is mostly zeros.
        f.debug_struct("Message")
            .field("kind", &self.kind)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl EventKind {
    /// Whether it says that something failed, whatever the status.
    pub const fn is_failure(self) -> bool {
        matches!(
            self,
            Self::ADDR_ERROR
                | Self::ROUTE_ERROR
                | Self::CONNECT_ERROR
                | Self::UNREACHABLE
                | Self::REJECTED
                | Self::MULTICAST_ERROR
                | Self::ADDRINFO_ERROR
        )
    }

    /// Whether it is of a multicast group's membership.
    pub(crate) const fn is_multicast(self) -> bool {
        matches!(self, Self::MULTICAST_JOIN | Self::MULTICAST_ERROR)
    }
}
