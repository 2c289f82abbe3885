//! What the two ends of a connection tell each other: the messages of
//! InfiniBand's connection manager, by name and by meaning, one a datagram of a
//! socket that the connection has for itself.
//!
//! The other end is untrusted. What is not exactly a message is an error, and
//! the end of the connection.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rdmacm::param::{
    MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, MAX_UD_ACCEPT_DATA, MAX_UD_CONNECT_DATA,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Begins every message: name and version of the protocol.
const PROTOCOL: u32 = u32::from_be_bytes(*b"RVc\x01");
/// The longest private data.
const ROOM: usize = 200;

/// What a message is; the specification's short names are in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks for a connection (REQ).
    Request = 1,
    /// Accepts it (REP).
    Reply,
    /// The queue pair of who asked is ready (RTU).
    Ready,
    /// Says no to a request or a reply (REJ).
    Reject,
    /// Ends the connection (DREQ).
    Disconnect,
    /// Has heard of that (DREP).
    Disconnected,
    /// Asks for a datagram service (SIDR REQ).
    ServiceRequest,
    /// Says which it is, or why not (SIDR REP).
    ServiceReply,
}

impl Kind {
    fn of(number: u8) -> Option<Self> {
        const ALL: [Kind; 8] = [
            Kind::Request,
            Kind::Reply,
            Kind::Ready,
            Kind::Reject,
            Kind::Disconnect,
            Kind::Disconnected,
            Kind::ServiceRequest,
            Kind::ServiceReply,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Bytes of private data that it has room for: as many as over IP on
    /// InfiniBand.
    pub(super) fn room(self) -> usize {
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

/// A message as it is sent. Both ends are on one machine: the numbers are in
/// its byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Message {
    protocol: u32,
    kind: u8,
    /// Why it says no; of a service reply zero is yes.
    pub(super) reason: u8,
    private_data_len: u8,
    /// Whether the port is one of Ethernet.
    ethernet: u8,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
    /// What the sender's packets are numbered from.
    pub(super) psn: u32,
    /// As the sender sees them.
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
    private_data: [u8; ROOM],
}

const _: () = assert!(size_of::<Message>() == 280 && MAX_ACCEPT_DATA <= ROOM);

/// Bytes of a message.
pub(super) const SIZE: usize = size_of::<Message>();

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Too few or too many.
    Length(usize),
    /// Of another protocol, or another version of it.
    Protocol(u32),
    /// A kind that there is not.
    Kind(u8),
    /// A number that cannot be.
    Number(&'static str),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(length) => write!(f, "{length} bytes, and not {SIZE}"),
            Self::Protocol(number) => write!(f, "protocol {number:#x}"),
            Self::Kind(kind) => write!(f, "a message of kind {kind}"),
            Self::Number(what) => write!(f, "{what} that cannot be"),
        }
    }
}

fn ip_of(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

fn bytes_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

impl Message {
    /// A message without anything in it. `private_data` is cut off at the
    /// kind's room, which its sender has looked at.
    pub(super) fn new(kind: Kind, private_data: &[u8]) -> Self {
        let mut message = Self::new_zeroed();
        message.protocol = PROTOCOL;
        message.kind = kind as u8;
        let length = private_data.len().min(kind.room());
        message.private_data_len = length as u8;
        message.private_data[..length].copy_from_slice(&private_data[..length]);
        message
    }

    /// With the addresses of both ends.
    pub(super) fn between(mut self, from: SocketAddr, to: SocketAddr) -> Self {
        (self.from, self.from_port) = (bytes_of(from.ip()), from.port());
        (self.to, self.to_port) = (bytes_of(to.ip()), to.port());
        self
    }

    /// With the sender's port of the device.
    pub(super) fn by(mut self, ethernet: bool, gid: [u8; 16], lid: u16) -> Self {
        (self.ethernet, self.gid, self.lid) = (ethernet.into(), gid, lid);
        self
    }

    /// Reads what the other end has sent.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Kind, Self), Malformed> {
        let message = Self::read_from_bytes(bytes).map_err(|_| Malformed::Length(bytes.len()))?;
        if message.protocol != PROTOCOL {
            return Err(Malformed::Protocol(message.protocol));
        }
        let kind = Kind::of(message.kind).ok_or(Malformed::Kind(message.kind))?;
        for (right, what) in [
            (message.qp_num < 1 << 24, "a queue pair number"),
            (message.psn < 1 << 24, "a packet number"),
            (message.retry_count < 8, "a retry count"),
            (message.rnr_retry_count < 8, "a retry count"),
            (message.ethernet < 2, "a kind of port"),
            (
                usize::from(message.private_data_len) <= kind.room(),
                "a length of private data",
            ),
        ] {
            if !right {
                return Err(Malformed::Number(what));
            }
        }
        Ok((kind, message))
    }

    /// Who sends it.
    pub(super) fn from(&self) -> SocketAddr {
        (ip_of(self.from), self.from_port).into()
    }

    /// Where it was sent to.
    pub(super) fn to(&self) -> SocketAddr {
        (ip_of(self.to), self.to_port).into()
    }

    pub(super) fn is_ethernet(&self) -> bool {
        self.ethernet != 0
    }

    /// The sender's private data.
    pub(super) fn private_data(&self) -> &[u8] {
        &self.private_data[..usize::from(self.private_data_len).min(ROOM)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_says_what_it_was_told() {
        let (from, to) = ("127.0.0.1:5", "[::1]:65535");
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let mut sent = Message::new(Kind::Reply, &[7; 196])
            .between(from, to)
            .by(true, [3; 16], 0x102);
        (sent.qp_num, sent.psn, sent.reason) = (0xff_ffff, 0xff_fffe, 28);
        let (kind, got) = Message::parse(sent.as_bytes()).unwrap();
        assert_eq!((kind, got.from(), got.to()), (Kind::Reply, from, to));
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
    fn what_cannot_be_is_said() {
        let good = Message::new(Kind::Request, &[1; 56]);
        let parse = |change: fn(&mut Message)| {
            let mut bad = good;
            change(&mut bad);
            Message::parse(bad.as_bytes()).map(|(kind, _)| kind)
        };
        assert_eq!(parse(|_| ()), Ok(Kind::Request));
        assert_eq!(parse(|it| it.kind = 0), Err(Malformed::Kind(0)));
        assert_eq!(parse(|it| it.kind = 9), Err(Malformed::Kind(9)));
        assert_eq!(parse(|it| it.protocol = 1), Err(Malformed::Protocol(1)));
        let changes: [fn(&mut Message); 7] = [
            |it| it.qp_num = 1 << 24,
            |it| it.psn = 1 << 24,
            |it| it.retry_count = 8,
            |it| it.rnr_retry_count = 8,
            |it| it.ethernet = 2,
            // More than a request has room for, and than there is at all.
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
        /// Any bytes are a message within its bounds, or an error.
        #[test]
        fn any_bytes_are_judged(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..SIZE + 3),
            kind in 0u8..10,
            begun in any::<bool>(),
        ) {
            if begun && bytes.len() > 12 {
                bytes.resize(SIZE, 0);
                bytes[..4].copy_from_slice(&PROTOCOL.to_ne_bytes());
                bytes[4] = kind;
                // The bits that numbers have no use for.
                (bytes[11], bytes[19], bytes[22], bytes[23], bytes[7]) = (0, 0, 7, 0, 1);
            }
            match Message::parse(&bytes) {
                Ok((kind, message)) => {
                    prop_assert!(message.private_data().len() <= kind.room());
                    prop_assert!(message.qp_num < 1 << 24 && message.psn < 1 << 24);
                    prop_assert!(message.retry_count < 8 && message.rnr_retry_count < 8);
                    let _ = (message.from(), message.to());
                }
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
