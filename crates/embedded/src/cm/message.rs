//! Messages of the connection manager, independent of their format on the wire.

use std::net::{Ipv4Addr, SocketAddr};

use rdmacm::param::{
    MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, MAX_UD_ACCEPT_DATA, MAX_UD_CONNECT_DATA,
};

use super::id::MTU;
use crate::wires::agent::PortAddress;

/// Size of the private data field.
const PRIVATE_DATA_SIZE: usize = 200;

const _: () = assert!(MAX_ACCEPT_DATA <= PRIVATE_DATA_SIZE);

/// Type of a message; the specification's abbreviations are in parentheses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// Requests a connection (REQ).
    Request,
    /// Accepts a request (REP).
    Reply,
    /// The requester's queue pair is ready (RTU).
    Ready,
    /// Rejects a request or a reply (REJ).
    Reject,
    /// Ends the connection (DREQ).
    Disconnect,
    /// Acknowledges the end of the connection (DREP).
    Disconnected,
    /// Requests a datagram service (SIDR REQ).
    ServiceRequest,
    /// Answers a request for a datagram service (SIDR REP).
    ServiceReply,
}

impl MessageKind {
    /// Returns the maximum length of private data: the same as over IP on
    /// InfiniBand.
    pub(super) fn max_private_data(self) -> usize {
        match self {
            Self::Request => MAX_CONNECT_DATA,
            Self::Reply => MAX_ACCEPT_DATA,
            Self::Reject => MAX_REJECT_DATA,
            Self::ServiceRequest => MAX_UD_CONNECT_DATA,
            Self::ServiceReply => MAX_UD_ACCEPT_DATA,
            Self::Ready | Self::Disconnect | Self::Disconnected => 0,
        }
    }
}

/// A message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    /// Reason of a rejection; in a service reply, zero is success.
    pub(super) reason: u8,
    private_data_len: u8,
    /// The sender's device port.
    pub(super) port: PortAddress,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
    /// Packet sequence number at which the receiver of the message begins to send.
    pub(super) psn: u32,
    /// From the sender's view, as all counts.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) flow_control: u8,
    pub(super) srq: u8,
    /// The addresses of a request: the sender's, and the requested one.
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// Port space.
    pub(super) space: u16,
    /// Path MTU, in MTU encoding.
    pub(super) mtu: u8,
    pub(super) traffic_class: u8,
    private_data: [u8; PRIVATE_DATA_SIZE],
}

impl Message {
    /// Creates a message with private data only. `private_data` is truncated to
    /// the type's maximum, which the caller has checked.
    pub(super) fn new(kind: MessageKind, private_data: &[u8]) -> Self {
        const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let mut message = Self {
            reason: 0,
            private_data_len: 0,
            port: PortAddress::default(),
            qp_num: 0,
            qkey: 0,
            psn: 0,
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            flow_control: 0,
            srq: 0,
            from: NOWHERE,
            to: NOWHERE,
            space: 0,
            mtu: MTU,
            traffic_class: 0,
            private_data: [0; PRIVATE_DATA_SIZE],
        };
        let length = private_data.len().min(kind.max_private_data());
        message.private_data_len = length as u8;
        message.private_data[..length].copy_from_slice(&private_data[..length]);
        message
    }

    /// Creates a rejection, or a service reply that is one.
    pub(super) fn rejection(kind: MessageKind, reason: u8, private_data: &[u8]) -> Self {
        Self {
            reason,
            ..Self::new(kind, private_data)
        }
    }

    /// Sets the addresses of both ends.
    pub(super) fn with_addresses(mut self, from: SocketAddr, to: SocketAddr) -> Self {
        (self.from, self.to) = (from, to);
        self
    }

    /// Sets the sender's device port.
    pub(super) fn with_port(mut self, port: PortAddress) -> Self {
        self.port = port;
        self
    }

    /// Returns the sender's private data.
    pub(super) fn private_data(&self) -> &[u8] {
        &self.private_data[..usize::from(self.private_data_len).min(PRIVATE_DATA_SIZE)]
    }
}
