//! Messages between the two ends of a connection, with the meaning of those of InfiniBand's
//! connection manager. Each is a datagram on the connection's socket.
//!
//! The peer is untrusted. Malformed input is an error that ends the connection.

use std::fmt;
use std::net::SocketAddr;

use super::id::MTU;
use rdmacm::param::{
    MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, MAX_UD_ACCEPT_DATA, MAX_UD_CONNECT_DATA,
};
use roce::packet::{gid_of_ip, ip_of_gid};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// First word of every message: name and version of the protocol.
const PROTOCOL: u32 = u32::from_be_bytes(*b"RVc\x02");
/// Size of the private data field.
const PRIVATE_DATA_SIZE: usize = 200;

/// Type of a message; the specification's abbreviations are in parentheses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum MessageKind {
    /// Requests a connection (REQ).
    Request = 1,
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
    pub(super) const ALL: [Self; 8] = [
        Self::Request,
        Self::Reply,
        Self::Ready,
        Self::Reject,
        Self::Disconnect,
        Self::Disconnected,
        Self::ServiceRequest,
        Self::ServiceReply,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

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

/// A message in transfer format. Both ends are on one host, so numbers are in
/// host byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Message {
    protocol: u32,
    kind: u8,
    /// Reason of a rejection; in a service reply, zero is success.
    pub(super) reason: u8,
    private_data_len: u8,
    /// Whether the port is an Ethernet port.
    ethernet: u8,
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
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    from: [u8; 16],
    to: [u8; 16],
    from_port: u16,
    to_port: u16,
    /// Port space.
    pub(super) space: u16,
    /// Path MTU, in MTU encoding.
    pub(super) mtu: u8,
    pub(super) traffic_class: u8,
    private_data: [u8; PRIVATE_DATA_SIZE],
}

const _: () = assert!(size_of::<Message>() == 284 && MAX_ACCEPT_DATA <= PRIVATE_DATA_SIZE);

/// Bytes of a message.
pub(super) const SIZE: usize = size_of::<Message>();

/// Error of a malformed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Wrong length.
    Length(usize),
    /// Unknown protocol or version.
    Protocol(u32),
    /// Unknown message type.
    Kind(u8),
    /// Number out of range.
    Number(&'static str),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(length) => write!(f, "{length} bytes, expected {SIZE}"),
            Self::Protocol(number) => write!(f, "unknown protocol {number:#x}"),
            Self::Kind(kind) => write!(f, "unknown message type {kind}"),
            Self::Number(what) => write!(f, "invalid {what}"),
        }
    }
}

impl Message {
    /// Creates a message with private data only. `private_data` is truncated to
    /// the type's maximum, which the caller has checked.
    pub(super) fn new(kind: MessageKind, private_data: &[u8]) -> Self {
        let mut message = Self::new_zeroed();
        message.protocol = PROTOCOL;
        message.kind = kind as u8;
        message.mtu = MTU;
        let length = private_data.len().min(kind.max_private_data());
        message.private_data_len = length as u8;
        message.private_data[..length].copy_from_slice(&private_data[..length]);
        message
    }

    /// Sets the addresses of both ends.
    pub(super) fn with_addresses(mut self, from: SocketAddr, to: SocketAddr) -> Self {
        (self.from, self.from_port) = (gid_of_ip(from.ip()), from.port());
        (self.to, self.to_port) = (gid_of_ip(to.ip()), to.port());
        self
    }

    /// Sets the sender's device port.
    pub(super) fn with_port(mut self, ethernet: bool, gid: [u8; 16], lid: u16) -> Self {
        (self.ethernet, self.gid, self.lid) = (ethernet.into(), gid, lid);
        self
    }

    /// Parses a message of the peer.
    pub(super) fn parse(bytes: &[u8]) -> Result<(MessageKind, Self), Malformed> {
        let message = Self::read_from_bytes(bytes).map_err(|_| Malformed::Length(bytes.len()))?;
        if message.protocol != PROTOCOL {
            return Err(Malformed::Protocol(message.protocol));
        }
        let kind = MessageKind::of(message.kind).ok_or(Malformed::Kind(message.kind))?;
        for (is_valid, what) in [
            (message.qp_num < 1 << 24, "queue pair number"),
            (message.psn < 1 << 24, "packet sequence number"),
            (message.retry_count < 8, "retry count"),
            (message.rnr_retry_count < 8, "retry count"),
            (message.ethernet < 2, "port type"),
            ((1..=5).contains(&message.mtu), "path MTU"),
            (
                usize::from(message.private_data_len) <= kind.max_private_data(),
                "private data length",
            ),
        ] {
            if !is_valid {
                return Err(Malformed::Number(what));
            }
        }
        Ok((kind, message))
    }

    /// Returns the sender's address.
    pub(super) fn from(&self) -> SocketAddr {
        (ip_of_gid(self.from), self.from_port).into()
    }

    /// Returns the destination address.
    pub(super) fn to(&self) -> SocketAddr {
        (ip_of_gid(self.to), self.to_port).into()
    }

    pub(super) fn is_ethernet(&self) -> bool {
        self.ethernet != 0
    }

    /// Returns the sender's private data.
    pub(super) fn private_data(&self) -> &[u8] {
        &self.private_data[..usize::from(self.private_data_len).min(PRIVATE_DATA_SIZE)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_is_read_as_written() {
        let (from, to) = ("127.0.0.1:5", "[::1]:65535");
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let mut sent = Message::new(MessageKind::Reply, &[7; 196])
            .with_addresses(from, to)
            .with_port(true, [3; 16], 0x102);
        (sent.qp_num, sent.psn, sent.reason) = (0xff_ffff, 0xff_fffe, 28);
        let (kind, got) = Message::parse(sent.as_bytes()).unwrap();
        assert_eq!((kind, got.from(), got.to()), (MessageKind::Reply, from, to));
        assert_eq!(got.private_data(), [7; 196]);
        assert_eq!(
            (got.qp_num, got.psn, got.reason),
            (0xff_ffff, 0xff_fffe, 28)
        );
        assert_eq!(
            (got.is_ethernet(), got.gid, got.lid),
            (true, [3; 16], 0x102)
        );
    }

    #[test]
    fn invalid_requests_are_rejected() {
        let good = Message::new(MessageKind::Request, &[1; 56]);
        let parse = |change: fn(&mut Message)| {
            let mut bad = good;
            change(&mut bad);
            Message::parse(bad.as_bytes()).map(|(kind, _)| kind)
        };
        assert_eq!(parse(|_| ()), Ok(MessageKind::Request));
        assert_eq!(parse(|it| it.kind = 0), Err(Malformed::Kind(0)));
        assert_eq!(parse(|it| it.kind = 9), Err(Malformed::Kind(9)));
        assert_eq!(parse(|it| it.protocol = 1), Err(Malformed::Protocol(1)));
        let changes: [fn(&mut Message); 9] = [
            |it| it.mtu = 0,
            |it| it.mtu = 6,
            |it| it.qp_num = 1 << 24,
            |it| it.psn = 1 << 24,
            |it| it.retry_count = 8,
            |it| it.rnr_retry_count = 8,
            |it| it.ethernet = 2,
            // More than a request may have, and more than the field.
            |it| it.private_data_len = 57,
            |it| it.private_data_len = 255,
        ];
        for change in changes {
            assert!(matches!(parse(change), Err(Malformed::Number(_))));
        }
        for length in [0, 1, SIZE - 1, SIZE + 1] {
            let bytes = vec![0; length];
            let wrong = Message::parse(&bytes).unwrap_err();
            assert_eq!(wrong, Malformed::Length(length));
        }
    }

    proptest! {
        /// Arbitrary bytes parse to a message within its bounds, or to an
        /// error.
        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..SIZE + 3),
            kind in 0u8..10,
            begun in any::<bool>(),
        ) {
            if begun && bytes.len() > 12 {
                bytes.resize(SIZE, 0);
                bytes[..4].copy_from_slice(&PROTOCOL.to_ne_bytes());
                bytes[4] = kind;
                // The bits that valid numbers leave zero.
                (bytes[11], bytes[19], bytes[22], bytes[23], bytes[7]) = (0, 0, 7, 0, 1);
                bytes[82] = 5;
            }
            match Message::parse(&bytes) {
                Ok((kind, message)) => {
                    prop_assert!(message.private_data().len() <= kind.max_private_data());
                    prop_assert!(message.qp_num < 1 << 24 && message.psn < 1 << 24);
                    prop_assert!(message.retry_count < 8 && message.rnr_retry_count < 8);
                    let _ = (message.from(), message.to());
                }
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
