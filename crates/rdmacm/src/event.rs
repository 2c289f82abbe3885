//! Content of an event.

use core::fmt;

use uverbs::Errno;
use zerocopy::FromBytes;

use crate::abi;
use crate::param::{PeerConnection, UdParam};
use uverbs::open_enum;

open_enum! {
    /// Type of an event (`enum rdma_cm_event_type`).
    EventKind(u32) {
        /// The address is resolved: the id has a device. Next: resolve the
        /// route.
        ADDR_RESOLVED = 0,
        /// Resolving the address failed.
        ADDR_ERROR = 1,
        /// The route is resolved. Next: connect.
        ROUTE_RESOLVED = 2,
        /// Resolving the route failed.
        ROUTE_ERROR = 3,
        /// A peer requests a connection; on a listening id.
        CONNECT_REQUEST = 4,
        /// The peer has accepted. Next: modify the queue pair, then establish.
        CONNECT_RESPONSE = 5,
        /// The connection failed.
        CONNECT_ERROR = 6,
        /// The peer did not respond, or does not offer the service.
        UNREACHABLE = 7,
        /// The peer rejected the request.
        REJECTED = 8,
        /// The connection is established; for a datagram id: the peer is known.
        ESTABLISHED = 9,
        /// The connection has ended.
        DISCONNECTED = 10,
        /// The device was removed; the id must be destroyed.
        DEVICE_REMOVAL = 11,
        /// The multicast group is joined.
        MULTICAST_JOIN = 12,
        /// Joining the multicast group failed, or the membership has ended.
        MULTICAST_ERROR = 13,
        /// The network device's address has changed.
        ADDR_CHANGE = 14,
        /// Packets of the former connection can no longer arrive: its queue
        /// pair number can be reused.
        TIMEWAIT_EXIT = 15,
        /// Address information is resolved (newer kernels).
        ADDRINFO_RESOLVED = 16,
        /// Resolving address information failed (newer kernels).
        ADDRINFO_ERROR = 17,
        /// An event that the process itself added.
        USER = 18,
        /// An event internal to librdmacm.
        INTERNAL = 19,
    }
}

open_enum! {
    /// Why the peer, or its kernel, rejected (`enum ib_cm_rej_reason`).
    RejectReason(i32) {
        /// No queue pair.
        NO_QP = 1,
        /// No end-to-end context.
        NO_EEC = 2,
        /// No resources.
        NO_RESOURCES = 3,
        /// The peer's timeout expired.
        TIMEOUT = 4,
        /// The request is not supported.
        UNSUPPORTED = 5,
        /// The communication identifier is unknown.
        INVALID_COMM_ID = 6,
        /// The communication instance is unknown.
        INVALID_COMM_INSTANCE = 7,
        /// No listener on that port.
        INVALID_SERVICE_ID = 8,
        /// The transport is not supported.
        INVALID_TRANSPORT_TYPE = 9,
        /// An earlier connection of the same queue pairs has not ended yet.
        STALE_CONN = 10,
        /// The device has no such GID.
        INVALID_GID = 12,
        /// The path's MTU is not supported.
        INVALID_MTU = 26,
        /// The peer does not support as many RDMA reads.
        INSUFFICIENT_RESP_RESOURCES = 27,
        /// The program at the peer rejected; its private data may give the
        /// reason.
        CONSUMER_DEFINED = 28,
        /// The RNR retry count is not supported.
        INVALID_RNR_RETRY = 29,
        /// The protocol version is not supported.
        INVALID_CLASS_VERSION = 31,
        /// A vendor option is not supported; a program may reject with this
        /// reason.
        VENDOR_OPTION_NOT_SUPPORTED = 35,
    }
}

open_enum! {
    /// Why a datagram service was refused (`enum ib_cm_sidr_status`).
    SidrStatus(i32) {
        /// No listener on that port.
        UNSUPPORTED = 1,
        /// The program at the peer rejected.
        REJECT = 2,
        /// The peer has no queue pair for the service.
        NO_QP = 3,
        /// The peer redirects to another one.
        REDIRECT = 4,
        /// The protocol version is not supported.
        UNSUPPORTED_VERSION = 5,
    }
}

/// Why the operation failed that an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// An error number of this host's kernel.
    Errno(Errno),
    /// The peer's reason for rejecting.
    Rejected(RejectReason),
    /// The peer's status of a datagram service.
    Sidr(SidrStatus),
    /// A number without a known meaning.
    Other(i32),
}

impl Reason {
    /// Returns whether there is no listener on the requested port.
    pub fn is_no_listener(self) -> bool {
        matches!(
            self,
            Self::Rejected(RejectReason::INVALID_SERVICE_ID) | Self::Sidr(SidrStatus::UNSUPPORTED)
        )
    }
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

/// Format of an event's parameters.
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

/// Content of an event, without its ids.
#[derive(Clone, Copy)]
pub struct Message {
    kind: EventKind,
    status: i32,
    param: Param,
    arg: u64,
}

/// The input is shorter than an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncated;

impl Message {
    /// Decodes an event from the kernel. `form` is the id's, since the event
    /// does not contain it. Any bytes decode to some event.
    pub fn new(event: &abi::EventResp, form: Form) -> Self {
        let bytes = event.param.as_slice();
        // Both parameter structures fit, by a constant assertion.
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
            status: event.status as i32,
            param,
            arg: u64::from_ne_bytes(arg),
        }
    }

    /// Decodes an event from bytes; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Truncated`] if there are too few bytes.
    pub fn parse(bytes: &[u8], form: Form) -> Result<(abi::EventResp, Self), Truncated> {
        let (event, _) = abi::EventResp::read_from_prefix(bytes).map_err(|_| Truncated)?;
        Ok((event, Self::new(&event, form)))
    }

    /// Returns the type of the event.
    pub fn kind(&self) -> EventKind {
        self.kind
    }

    /// Returns the kernel's number for the outcome: zero, a negative error
    /// number, or a positive reason of the peer.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// Returns the outcome.
    ///
    /// # Errors
    /// The reason, if the event reports a failure.
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

    /// Returns the parameters of the connection: for requests, responses,
    /// rejections, and establishment on the connecting side.
    pub fn connection(&self) -> Option<PeerConnection<'_>> {
        match &self.param {
            Param::Connection(param) => Some(param.into()),
            Param::Datagram(_) => None,
        }
    }

    /// Returns the parameters of the datagram service or multicast group.
    pub fn datagram(&self) -> Option<UdParam<'_>> {
        match &self.param {
            Param::Datagram(param) => Some(param.into()),
            Param::Connection(_) => None,
        }
    }

    /// Returns the peer's private data, zero-padded to the size of the
    /// message's field.
    pub fn private_data(&self) -> &[u8] {
        match &self.param {
            Param::Connection(param) => PeerConnection::from(param).private_data,
            Param::Datagram(param) => UdParam::from(param).private_data,
        }
    }

    /// Returns the argument of an [`EventKind::USER`].
    pub fn user_argument(&self) -> Option<u64> {
        (self.kind == EventKind::USER).then_some(self.arg)
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Omits the private data, which are mostly zeros.
        f.debug_struct("Message")
            .field("kind", &self.kind)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl EventKind {
    /// Returns whether events of this type report a failure, regardless of the
    /// status.
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

    /// Returns whether events of this type belong to a multicast membership.
    pub(crate) const fn is_multicast(self) -> bool {
        matches!(self, Self::MULTICAST_JOIN | Self::MULTICAST_ERROR)
    }
}
