//! One connection of the machine: its state, and its last message.

use std::time::Duration;

use super::id::ACK_TIMEOUT;
use super::mad::{Attribute, Mad, MadHeader, Subject};
use super::message::{Message, MessageKind};
use crate::wires::agent::{Peer, PortAddress};

/// How long an ended connection answers retransmissions of the peer.
const LINGER: Duration = Duration::from_secs(8);
/// As above, if its last message is the answer that the peer waits for: several of the peer's
/// retransmissions, which Linux sends every 4.3 s.
const ANSWER_LINGER: Duration = Duration::from_secs(30);

/// State of a connection (12.9.7); those of an MRA are not told apart. An id that has no
/// connection is idle or listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionState {
    ReqSent,
    ReqRcvd,
    RepSent,
    RepRcvd,
    Established,
    DreqSent,
    DreqRcvd,
    /// Only answers retransmissions of the peer.
    Timewait,
    SidrReqSent,
    SidrReqRcvd,
}

impl ConnectionState {
    /// Returns the name that the specification gives it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ReqSent => "REQ Sent",
            Self::ReqRcvd => "REQ Rcvd",
            Self::RepSent => "REP Sent",
            Self::RepRcvd => "REP Rcvd",
            Self::Established => "Established",
            Self::DreqSent => "DREQ Sent",
            Self::DreqRcvd => "DREQ Rcvd",
            Self::Timewait => "Timewait",
            Self::SidrReqSent => "SIDR_REQ Sent",
            Self::SidrReqRcvd => "SIDR_REQ Rcvd",
        }
    }
}

/// The two ends of a new connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) peer: Peer,
    /// The port of this end.
    pub(super) port: PortAddress,
    /// GUID of its device.
    pub(super) guid: u64,
}

impl Ends {
    /// Returns the ends of a connection that `peer` has started from `port`. The port of this
    /// end is known once there is an id.
    pub(super) fn of_peer(peer: Peer, port: PortAddress) -> Self {
        Self {
            peer,
            port: PortAddress {
                ethernet: port.ethernet,
                ..PortAddress::default()
            },
            guid: 0,
        }
    }
}

/// The limit that counts a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Active,
    Request,
    Ended,
}

/// A connection, or a request for a datagram service.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) state: ConnectionState,
    /// An id waits for its events.
    pub(super) has_id: bool,
    pub(super) ends: Ends,
    pub(super) remote_id: u32,
    pub(super) transaction: u64,
    pub(super) remote_qpn: u32,
    /// The peer's request, if the peer has started the connection.
    pub(super) request: Option<Box<Message>>,
    /// The last message sent.
    pub(super) last: Option<Mad>,
    /// When the last message is retransmitted, a DREQ answered, or the ended connection removed.
    pub(super) retry_at: Option<Duration>,
    /// Until when an id waits for the answer to its last message.
    pub(super) deadline: Option<Duration>,
    /// When something is due, in the machine's index, and the bound.
    pub(super) indexed: (Option<Duration>, Bound),
    /// Number of datagrams that may be sent; `None` if this end has started, or once the peer
    /// has named this end's id, which only a host that receives can.
    pub(super) credit: Option<u32>,
    /// Number of retransmissions of the last message.
    pub(super) retries: u32,
    /// Other processes of the address know of it.
    pub(super) is_listed: bool,
    /// When the last message was first sent, and when the peer was last heard.
    pub(super) sent: Duration,
    pub(super) heard: Duration,
}

impl Connection {
    pub(super) fn new(state: ConnectionState, ends: Ends, transaction: u64, now: Duration) -> Self {
        Self {
            state,
            has_id: true,
            ends,
            remote_id: 0,
            transaction,
            remote_qpn: 0,
            request: None,
            last: None,
            retry_at: None,
            deadline: None,
            indexed: (None, Bound::Active),
            credit: None,
            retries: 0,
            is_listed: false,
            sent: now,
            heard: now,
        }
    }

    pub(super) fn header(&self, number: u32) -> MadHeader {
        MadHeader {
            transaction: self.transaction,
            local_id: number,
            remote_id: self.remote_id,
            guid: self.ends.guid,
            ack_timeout: ACK_TIMEOUT,
        }
    }

    /// Makes a message the last one.
    pub(super) fn encode(&mut self, number: u32, kind: MessageKind, message: &Message) {
        let mut message = *message;
        if kind == MessageKind::Disconnect {
            message.qp_num = self.remote_qpn;
        }
        let about = match self.state {
            ConnectionState::RepRcvd => Subject::Reply,
            _ => Subject::Request,
        };
        let mad = Mad::encode(kind, &message, &self.header(number));
        self.last = Some(match kind {
            MessageKind::Reject => mad.with_subject(about),
            _ => mad,
        });
    }

    pub(super) fn establish(&mut self) {
        self.state = ConnectionState::Established;
        (self.retry_at, self.deadline) = (None, None);
    }

    /// Returns whether this is the message that waits for an answer.
    pub(super) fn awaits(&self, subject: Option<Subject>) -> bool {
        matches!(
            (self.state, subject),
            (ConnectionState::ReqSent, Some(Subject::Request))
                | (ConnectionState::RepSent, Some(Subject::Reply))
        )
    }

    /// Ends the connection, which answers retransmissions for some time.
    pub(super) fn end(&mut self, now: Duration) {
        self.state = ConnectionState::Timewait;
        (self.deadline, self.request) = (None, None);
        self.retry_at = Some(now + LINGER);
    }

    /// Extends the time of an ended connection, whose answer the peer may not have received.
    pub(super) fn linger(&mut self, now: Duration) {
        self.retry_at = Some(now + ANSWER_LINGER);
    }

    /// Returns whether a retransmission shows that the peer has not received the last message.
    pub(super) fn must_resend(&self, kind: MessageKind) -> bool {
        let last = self.last.as_ref().map(|mad| mad.attribute);
        matches!(
            (kind, self.state, last),
            (
                MessageKind::Reply,
                ConnectionState::Established,
                Some(Attribute::Ready)
            ) | (
                MessageKind::Reply,
                ConnectionState::Timewait,
                Some(Attribute::Reject)
            )
        )
    }
}
