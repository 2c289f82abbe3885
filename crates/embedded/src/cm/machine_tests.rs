//! The machine alone: scripts of one side, and pairs in simulated time on a bad network.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use rdmacm::RejectReason;

use super::connection::{ConnectionState, Ends};
use super::machine::{Event, MAX_ENDED, MAX_OUTGOING, MAX_REQUESTS, Machine, Rules};
use super::mad::{Attribute, Mad, MadHeader, Subject};
use super::message::{Message, MessageKind};
use crate::management::DropCause;
use crate::random;
use crate::wires::agent::{ConnectionChange, MAD_SIZE, MemberEnd, Peer, PortAddress};

const OWN: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const REMOTE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
const PEER: Peer = Peer::Host {
    local: OWN,
    remote: REMOTE,
};
const PORT: PortAddress = PortAddress {
    ethernet: true,
    gid: [0; 16],
    lid: 0,
};
const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn ends(peer: Peer) -> Ends {
    Ends {
        peer,
        port: PORT,
        guid: 1,
    }
}

fn request(from: IpAddr, to: IpAddr) -> Message {
    let mut message = Message::new(MessageKind::Request, &[])
        .with_addresses((from, 5).into(), (to, 7471).into())
        .with_port(PORT);
    message.space = 0x106;
    message
}

/// A machine, and the datagrams of a peer by hand.
struct Side {
    machine: Machine,
    now: Duration,
}

impl Side {
    fn new() -> Self {
        Self::with(Rules::of_hosts(0, 26))
    }

    fn with(rules: Rules) -> Self {
        Self {
            machine: Machine::new(rules, random::Random::seeded(1)),
            now: SECOND,
        }
    }

    /// Requests a connection; returns its number.
    fn connect(&mut self) -> u32 {
        let kind = MessageKind::Request;
        let message = request(OWN, REMOTE);
        self.machine.request(self.now, ends(PEER), kind, &message)
    }

    /// Receives a message of the peer's connection with a number.
    fn receive(&mut self, kind: MessageKind, local_id: u32, remote_id: u32) {
        let header = MadHeader {
            transaction: 1,
            local_id,
            remote_id,
            guid: 2,
            ack_timeout: 1,
        };
        let mut message = Message::new(kind, &[]);
        if kind == MessageKind::Request {
            message = request(REMOTE, OWN);
        }
        self.receive_mad(&Mad::encode(kind, &message, &header));
    }

    fn receive_mad(&mut self, mad: &Mad) {
        self.machine.receive(self.now, PEER, PORT, mad.bytes());
    }

    fn reply(&mut self, number: u32) {
        let reply = Message::new(MessageKind::Reply, &[]);
        self.machine.reply(self.now, number, &reply);
    }

    fn reject(&mut self, number: u32) {
        let reason = RejectReason::CONSUMER_DEFINED.0 as u8;
        self.machine.reject(self.now, number, reason, &[]);
    }

    fn sent(&mut self) -> Vec<Mad> {
        let all = std::iter::from_fn(|| self.machine.next_datagram());
        all.map(|it| Mad::parse(&it.bytes).unwrap()).collect()
    }

    fn attributes(&mut self) -> Vec<Attribute> {
        self.sent().iter().map(|it| it.attribute).collect()
    }

    fn event(&mut self) -> Option<Event> {
        self.machine.next_event().map(|(_, event)| event)
    }

    /// Returns the number of the connection that the peer requests.
    fn requested(&mut self) -> Option<u32> {
        match self.machine.next_event() {
            Some((number, Event::Request(..))) => Some(number),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    /// Lets the time pass until something is due.
    fn pass_time(&mut self) {
        if let Some(due) = self.machine.deadline() {
            self.now = self.now.max(due);
            self.machine.expire(self.now);
        }
    }

    /// Connects; returns the number.
    fn connected(&mut self, peer_id: u32) -> u32 {
        let number = self.connect();
        self.receive(MessageKind::Reply, peer_id, number);
        assert!(matches!(self.event(), Some(Event::Reply(_))));
        self.machine.establish(self.now, number);
        assert_eq!(self.attributes(), [Attribute::Request, Attribute::Ready]);
        number
    }
}

/// The source of a request may be forged, and must not get much more than was sent.
#[test]
fn a_peer_gets_little_before_it_has_answered() {
    let mut side = Side::new();
    side.receive(MessageKind::Request, 7, 0);
    assert_eq!(side.sent(), []);
    let number = side.requested().unwrap();
    side.reply(number);
    for _ in 0..10 {
        side.pass_time();
    }
    let sent = side.sent();
    assert_eq!(sent.len(), 3);
    assert!(sent.iter().all(|it| it.attribute == Attribute::Reply));
    // It asks again, since all were lost.
    side.receive(MessageKind::Request, 7, 0);
    side.pass_time();
    assert_eq!(side.sent().len(), 2);
    // A number that it can only know from an answer.
    side.receive(MessageKind::Ready, 7, number);
    side.machine.release(side.now, number);
    for _ in 0..5 {
        side.pass_time();
    }
    let sent = side.attributes();
    assert_eq!(sent, [Attribute::Disconnect; 6]);
}

#[test]
fn messages_are_counted() {
    let index = Attribute::index;
    let mut side = Side::new();
    side.receive(MessageKind::Request, 7, 0);
    side.receive(MessageKind::Request, 7, 0);
    let number = side.requested().unwrap();
    side.machine.set_port(number, PortAddress::default(), 2);
    side.reply(number);
    for _ in 0..10 {
        // The peer is sent no more than its credit.
        side.pass_time();
    }
    side.receive(MessageKind::Ready, 7, number);
    side.receive(MessageKind::Disconnect, 7, number);
    side.machine.disconnect(side.now, number);
    side.receive(MessageKind::Disconnect, 7, number);
    let mut sent = [0; 11];
    for attribute in side.attributes() {
        sent[attribute.index()] += 1;
    }
    let mut counters = side.machine.counters(2);
    // The repeated request came before there was an id, as its acknowledgement.
    let before = side.machine.counters(0);
    assert_eq!(before.received[index(Attribute::Request)], 1);
    assert_eq!(before.duplicates[index(Attribute::Request)], 1);
    assert_eq!(before.sent[index(Attribute::Mra)], 1);
    counters = counters.plus(&before);
    assert_eq!(counters.sent, sent);
    let replies = sent[index(Attribute::Reply)];
    assert!(replies > 1 && sent[index(Attribute::Disconnected)] == 2);
    assert_eq!(counters.retries[index(Attribute::Reply)], replies - 1);
    assert_eq!(counters.retries.iter().sum::<u64>(), replies - 1);
    let only = |counts: &[(Attribute, u64)]| {
        let mut all = [0; 11];
        counts
            .iter()
            .for_each(|(it, count)| all[it.index()] = *count);
        all
    };
    let received = [
        (Attribute::Request, 2),
        (Attribute::Ready, 1),
        (Attribute::Disconnect, 2),
    ];
    assert_eq!(counters.received, only(&received));
    let duplicates = [(Attribute::Request, 1), (Attribute::Disconnect, 1)];
    assert_eq!(counters.duplicates, only(&duplicates));
}

#[test]
fn a_repeated_request_is_acknowledged() {
    let mut side = Side::new();
    side.receive(MessageKind::Request, 7, 0);
    side.receive(MessageKind::Request, 7, 0);
    assert_eq!(side.attributes(), [Attribute::Mra]);
    assert!(side.requested().is_some() && side.requested().is_none());
}

/// Its answer may be lost, or whoever has acknowledged it may have ended.
#[test]
fn an_acknowledged_request_is_repeated() {
    let mut side = Side::new();
    let number = side.connect();
    assert_eq!(side.attributes(), [Attribute::Request]);
    let header = MadHeader {
        transaction: 1,
        local_id: 9,
        remote_id: number,
        guid: 2,
        ack_timeout: 1,
    };
    let acknowledge = |side: &mut Side| {
        side.receive_mad(&Mad::mra(&header, Subject::Request, 24));
        side.machine.deadline().unwrap() - side.now
    };
    assert_eq!(acknowledge(&mut side), 4 * SECOND);
    side.pass_time();
    assert_eq!(side.attributes(), [Attribute::Request]);
    // It arrives late, and delays no other message.
    side.receive(MessageKind::Reply, 9, number);
    side.machine.establish(side.now, number);
    side.machine.disconnect(side.now, number);
    assert_eq!(side.attributes(), [Attribute::Ready, Attribute::Disconnect]);
    assert_eq!(acknowledge(&mut side), 250 * MILLISECOND);
}

/// Whoever forges the peer's address must know both ids.
#[test]
fn messages_with_a_wrong_id_end_nothing() {
    let mut side = Side::new();
    let id = side.connected(7);
    side.receive(MessageKind::Request, 8, 0);
    let requested = side.requested().unwrap();
    for kind in [MessageKind::Disconnect, MessageKind::Reject] {
        for (number, peers) in [(id, 7), (requested, 8)] {
            side.receive(kind, peers ^ 1, number);
            side.receive(kind, 0, number);
            side.receive(kind, peers, number ^ 1);
        }
    }
    assert!(side.event().is_none());
    assert_eq!(side.machine.state(id), Some(ConnectionState::Established));
    assert_eq!(
        side.machine.state(requested),
        Some(ConnectionState::ReqRcvd)
    );
    side.receive(MessageKind::Disconnect, 7, id);
    assert!(matches!(side.event(), Some(Event::Disconnected(0))));
}

/// Its other connections there end, but not those that were heard later.
#[test]
fn a_refused_message_ends_the_connections_with_a_host() {
    let mut side = Side::new();
    let [id, other] = [7, 8].map(|number| side.connected(number));
    side.now += SECOND;
    side.machine.disconnect(side.now, id);
    let sent = side.sent().pop().unwrap();
    side.now += SECOND;
    let late = side.connected(9);
    assert_eq!(sent.attribute, Attribute::Disconnect);
    let mut forged = *sent.bytes();
    forged[255] ^= 1;
    let elsewhere = Peer::Host {
        local: REMOTE,
        remote: OWN,
    };
    for (peer, bytes) in [
        (PEER, &forged[..]),
        (PEER, &sent.bytes()[..255]),
        (elsewhere, sent.bytes()),
    ] {
        let refused = side.machine.handle_refusal(side.now, peer, bytes);
        assert_eq!(refused, None);
        assert!(side.event().is_none());
    }
    let refused = side.machine.handle_refusal(side.now, PEER, sent.bytes());
    assert_eq!(refused, Some(2 * SECOND));
    for expected in [id, other] {
        let (number, event) = side.machine.next_event().unwrap();
        assert_eq!(number, expected);
        assert!(matches!(event, Event::Disconnected(0)));
    }
    assert!(side.event().is_none());
    assert_eq!(side.machine.state(late), Some(ConnectionState::Established));
    // Nothing is repeated but to the peer of the late one.
    side.pass_time();
    let sent = side.sent();
    assert_eq!(sent.len(), 1);
    assert_eq!(
        (sent[0].attribute, sent[0].sender_id()),
        (Attribute::Ready, late)
    );
}

#[test]
fn a_refused_request_is_rejected() {
    let mut side = Side::new();
    let number = side.connect();
    let sent = side.sent().pop().unwrap();
    // Of another request, of which nothing is known.
    side.machine.end_peers(side.now, PEER, Some(2 * SECOND));
    assert!(side.event().is_none());
    assert!(
        side.machine
            .handle_refusal(side.now, PEER, sent.bytes())
            .is_some()
    );
    let Some(Event::Rejected(RejectReason::INVALID_SERVICE_ID, None)) = side.event() else {
        panic!("not rejected");
    };
    assert_eq!(side.sent(), []);
    // A process that has started since replies to a repeated request.
    side.receive(MessageKind::Reply, 9, number);
    assert_eq!(side.attributes(), [Attribute::Reject]);
}

#[test]
fn an_id_does_not_wait_long_for_the_answer_to_its_dreq() {
    let mut side = Side::new();
    let number = side.connected(7);
    let begin = side.now;
    side.machine.disconnect(side.now, number);
    while side.machine.deadline().unwrap() < begin + 1750 * MILLISECOND {
        side.pass_time();
        assert!(side.event().is_none());
    }
    side.pass_time();
    assert_eq!(side.now, begin + 1750 * MILLISECOND);
    assert!(matches!(side.event(), Some(Event::Disconnected(0))));
    // The peer is told further on.
    while side.machine.deadline().is_some() {
        side.pass_time();
    }
    assert_eq!(side.attributes(), [Attribute::Disconnect; 7]);
    assert_eq!(side.machine.sizes(), [0; 4]);
}

/// Whether or not the program disconnects, and its RTU has arrived.
#[test]
fn a_dreq_is_answered() {
    let mut side = Side::new();
    side.receive(MessageKind::Request, 7, 0);
    let number = side.requested().unwrap();
    side.reply(number);
    assert_eq!(side.attributes(), [Attribute::Reply]);
    side.receive(MessageKind::Disconnect, 7, number);
    assert_eq!(side.sent(), []);
    assert!(matches!(side.event(), Some(Event::Established)));
    assert!(matches!(side.event(), Some(Event::Disconnected(0))));
    let begin = side.now;
    side.pass_time();
    assert_eq!(side.now, begin + 50 * MILLISECOND);
    side.receive(MessageKind::Disconnect, 7, number);
    side.machine.disconnect(side.now, number);
    // Also once it is forgotten.
    side.pass_time();
    assert_eq!(side.machine.state(number), None);
    side.receive(MessageKind::Disconnect, 7, number);
    assert_eq!(side.attributes(), [Attribute::Disconnected; 4]);
    assert!(side.event().is_none());
}

/// On one host, the program answers a DREQ, as with a card.
#[test]
fn processes_of_a_host_wait_for_the_program() {
    let own = Peer::Member(3);
    let mut side = Side::with(Rules::of_members(own));
    let number = side.connected(7);
    side.receive(MessageKind::Disconnect, 7, number);
    assert!(matches!(side.event(), Some(Event::Disconnected(0))));
    assert_eq!(side.machine.deadline(), None);
    side.machine.disconnect(side.now, number);
    assert_eq!(side.attributes(), [Attribute::Disconnected]);
    let number = side.connected(8);
    let begin = side.now;
    side.machine.disconnect(side.now, number);
    let event = loop {
        side.pass_time();
        if let Some(event) = side.event() {
            break event;
        }
    };
    assert!(matches!(event, Event::Disconnected(errno) if errno == -libc::ETIMEDOUT));
    assert_eq!(side.now, begin + 60 * SECOND);
}

#[test]
fn requests_are_rejected_when_the_process_ends() {
    let mut side = Side::new();
    side.receive(MessageKind::Request, 7, 0);
    side.machine.close(side.now);
    let sent = side.sent();
    assert!(sent.len() == 1 && sent[0].rejects_request());
    // Of later ones the caller decides.
    assert!(side.machine.is_closed());
}

/// Its rejection was lost, or it was repeated before it was rejected. The program does not see
/// it again.
#[test]
fn a_rejected_request_is_rejected_again() {
    let mut side = Side::new();
    for (number, is_released) in [(1, false), (2, true)] {
        side.receive(MessageKind::Request, number, 0);
        let request = side.requested().unwrap();
        match is_released {
            false => side.reject(request),
            // An id that is destroyed rejects its request.
            true => side.machine.release(side.now, request),
        }
        let rejection = side.sent();
        for _ in 0..3 {
            side.now += 12 * SECOND;
            side.machine.expire(side.now);
            side.receive(MessageKind::Request, number, 0);
            assert_eq!(side.sent(), rejection);
            side.machine.expire(side.now);
        }
        assert!(rejection[0].rejects_request() && side.event().is_none());
    }
    // Forgotten when the peer repeats it no longer, and at once if nobody listens.
    while side.machine.deadline().is_some() {
        side.pass_time();
    }
    assert_eq!(side.machine.sizes(), [0; 4]);
    side.receive(MessageKind::Request, 3, 0);
    let request = side.requested().unwrap();
    side.machine.reject_request(side.now, request, true);
    assert_eq!(side.attributes(), [Attribute::Reject]);
    assert_eq!(side.machine.sizes(), [0; 4]);
}

#[test]
fn requests_and_ended_connections_are_bounded() {
    let mut side = Side::new();
    for number in 1..MAX_ENDED as u32 + 100 {
        side.receive(MessageKind::Request, number, 0);
        let request = side.requested().expect("room");
        if number % 2 == 0 {
            side.reject(request);
            continue;
        }
        side.reply(request);
        side.receive(MessageKind::Reject, number, request);
        let event = side.machine.next_event();
        assert!(matches!(event, Some((_, Event::Rejected(..)))));
    }
    let ended = [MAX_ENDED, MAX_ENDED, 0, MAX_ENDED];
    assert_eq!(side.machine.sizes(), ended);
    let first = 2 * MAX_ENDED as u32;
    for number in first..first + MAX_REQUESTS as u32 + 100 {
        side.receive(MessageKind::Request, number, 0);
    }
    let requests = std::iter::from_fn(|| side.requested()).count();
    assert_eq!(requests, MAX_REQUESTS);
    // Those of this side are not bounded by them.
    let number = side.connect();
    side.receive(MessageKind::Reply, 9, number);
    assert!(matches!(side.event(), Some(Event::Reply(_))));
}

/// A peer gives up while the RTU is under way: Linux's `cm_rej_handler` takes its REJ, too.
#[test]
fn a_reply_may_be_withdrawn_after_this_end_is_established() {
    let mut side = Side::new();
    let number = side.connected(7);
    while side.event().is_some() {}
    side.receive(MessageKind::Reject, 7, number);
    assert!(matches!(side.event(), Some(Event::Rejected(_, Some(_)))));
    assert_eq!(side.machine.state(number), Some(ConnectionState::Timewait));
    assert!(side.event().is_none());
}

/// The events after the end of a peer, by state, for a process of this host and another host.
#[test]
fn the_end_of_a_peer_is_reported_in_each_state() {
    const STATES: [(ConnectionState, bool); 8] = [
        (ConnectionState::ReqSent, true),
        (ConnectionState::ReqRcvd, true),
        (ConnectionState::RepRcvd, true),
        (ConnectionState::RepSent, true),
        (ConnectionState::Established, false),
        (ConnectionState::DreqSent, false),
        (ConnectionState::DreqRcvd, false),
        (ConnectionState::Timewait, false),
    ];
    for of_member in [false, true] {
        for (state, rejected) in STATES {
            let mut side = Side::new();
            let number = match state {
                ConnectionState::ReqRcvd | ConnectionState::RepSent => {
                    side.receive(MessageKind::Request, 7, 0);
                    let number = side.requested().unwrap();
                    if state == ConnectionState::RepSent {
                        side.reply(number);
                    }
                    number
                }
                _ => side.connect(),
            };
            if !matches!(
                state,
                ConnectionState::ReqSent | ConnectionState::ReqRcvd | ConnectionState::RepSent
            ) {
                side.receive(MessageKind::Reply, 7, number);
                if state != ConnectionState::RepRcvd {
                    side.machine.establish(side.now, number);
                }
            }
            match state {
                ConnectionState::DreqSent => side.machine.disconnect(side.now, number),
                ConnectionState::DreqRcvd => side.receive(MessageKind::Disconnect, 7, number),
                ConnectionState::Timewait => {
                    side.machine.disconnect(side.now, number);
                    side.receive(MessageKind::Disconnected, 7, number);
                }
                _ => {}
            }
            assert_eq!(side.machine.state(number), Some(state));
            while side.event().is_some() {}
            match of_member {
                true => side.machine.end_member(side.now, PEER, MemberEnd::Ended),
                false => side.machine.end_peers(side.now, PEER, None),
            }
            let events: Vec<Event> = std::iter::from_fn(|| side.event()).collect();
            let expected = match (of_member, state) {
                // Hosts answer a request only when it reaches them.
                (false, ConnectionState::ReqSent) => events.is_empty(),
                (_, ConnectionState::DreqRcvd | ConnectionState::Timewait) => events.is_empty(),
                _ if rejected => {
                    let reason = match of_member {
                        true => RejectReason::CONSUMER_DEFINED,
                        false => RejectReason::TIMEOUT,
                    };
                    matches!(events[..], [Event::Rejected(it, None)] if it == reason)
                }
                _ => matches!(events[..], [Event::Disconnected(0)]),
            };
            assert!(expected, "{of_member} {state:?}: {events:?}");
        }
    }
}

/// Its host refuses them if its process has ended; nothing else happens.
#[test]
fn the_peer_of_a_connection_gets_messages_from_time_to_time() {
    let mut side = Side::new();
    let number = side.connected(7);
    side.receive(MessageKind::Request, 8, 0);
    let passive = side.requested().unwrap();
    side.reply(passive);
    side.receive(MessageKind::Ready, 8, passive);
    assert!(matches!(side.event(), Some(Event::Established)));
    side.sent();
    for _ in 0..3 {
        let begin = side.now;
        side.pass_time();
        assert_eq!(side.now, begin + 5 * SECOND);
        assert_eq!(side.attributes(), [Attribute::Ready, Attribute::Reply]);
        side.receive(MessageKind::Ready, 8, passive);
        // A peer's REP is answered, as Linux does.
        side.receive(MessageKind::Reply, 7, number);
        assert_eq!(side.attributes(), [Attribute::Ready]);
    }
    assert!(side.event().is_none() && side.machine.next_dropped().is_none());
    side.pass_time();
    let sent = side.sent();
    side.now += MILLISECOND;
    let refused = side.machine.handle_refusal(side.now, PEER, sent[0].bytes());
    assert_eq!(refused, Some(side.now - MILLISECOND));
    let ended = [side.event(), side.event()];
    assert!(
        ended
            .iter()
            .all(|it| matches!(it, Some(Event::Disconnected(0))))
    );
    side.pass_time();
    assert_eq!(side.sent(), []);
}

/// The queue pair of a connection whose peer has ended unnoticed is used for a new one.
#[test]
fn a_stale_connection_ends_before_its_queue_pair_connects() {
    let mut side = Side::new();
    let header = |local_id| MadHeader {
        transaction: 1,
        local_id,
        remote_id: 0,
        guid: 2,
        ack_timeout: 1,
    };
    let mut message = request(REMOTE, OWN);
    message.qp_num = 5;
    let encoded = |local_id| Mad::encode(MessageKind::Request, &message, &header(local_id));
    side.receive_mad(&encoded(7));
    let number = side.requested().unwrap();
    // Not established: the program may not have answered.
    side.receive_mad(&encoded(6));
    assert!(side.requested().is_some());
    side.reply(number);
    side.receive(MessageKind::Ready, 7, number);
    assert!(matches!(side.event(), Some(Event::Established)));
    side.sent();
    side.receive_mad(&encoded(8));
    let sent = side.sent();
    let (kind, rejection) = sent[0].message(PORT).unwrap();
    assert_eq!(kind, MessageKind::Reject);
    assert_eq!(i32::from(rejection.reason), RejectReason::STALE_CONN.0);
    assert_eq!(sent[1].attribute, Attribute::Disconnect);
    side.receive(MessageKind::Disconnected, 7, number);
    assert!(matches!(side.event(), Some(Event::Disconnected(0))));
    side.receive_mad(&encoded(9));
    assert!(side.requested().is_some());
}

/// A process knows the connections of another one of its address, which was killed.
#[test]
fn connections_of_another_process_are_ended() {
    let mut killed = Side::with(Rules::of_hosts(3 << 26, 26));
    let number = killed.connected(7);
    let Some(ConnectionChange::Begins(connection)) = killed.machine.next_change() else {
        panic!("not listed");
    };
    assert_eq!((connection.local_id, connection.remote_id), (number, 7));
    assert_eq!((connection.local, connection.remote), (OWN, REMOTE));
    assert_eq!(killed.machine.next_change(), None);
    let mut side = Side::with(Rules::of_hosts(4 << 26, 26));
    side.machine.end_of_other(side.now, &connection);
    let sent = side.sent();
    assert_eq!(sent[0].attribute, Attribute::Disconnect);
    assert_eq!((sent[0].sender_id(), sent[0].receiver_id()), (number, 7));
    side.pass_time();
    assert_eq!(side.attributes(), [Attribute::Disconnect]);
    // It is listed meanwhile, since this process may be killed, too.
    let begins = ConnectionChange::Begins(connection);
    assert_eq!(side.machine.next_change(), Some(begins));
    side.receive(MessageKind::Disconnected, 7, number);
    assert_eq!(
        side.machine.next_change(),
        Some(ConnectionChange::Ends(number))
    );
    while side.machine.deadline().is_some() {
        side.pass_time();
    }
    assert!(side.sent().is_empty() && side.event().is_none());
    assert_eq!(side.machine.sizes(), [0; 4]);
    // Its own end.
    killed.machine.disconnect(killed.now, number);
    killed.receive(MessageKind::Disconnected, 7, number);
    let ends = ConnectionChange::Ends(number);
    assert_eq!(killed.machine.next_change(), Some(ends));
}

#[test]
pub(crate) fn what_is_dropped_has_a_cause() {
    let mut side = Side::new();
    let dropped = |side: &mut Side| {
        let all = std::iter::from_fn(|| side.machine.next_dropped());
        all.collect::<Vec<_>>()
    };
    let not_due = |kind, id, state| DropCause::NotDue {
        attribute: Attribute::of(kind) as u16,
        id,
        state,
    };
    side.machine.receive(side.now, PEER, PORT, &[0; MAD_SIZE]);
    assert_eq!(dropped(&mut side), [DropCause::Format]);
    side.receive(MessageKind::Reply, 7, 0x55);
    let attribute = Attribute::Reply as u16;
    let unknown = DropCause::NoConnection {
        attribute,
        id: 0x55,
    };
    assert_eq!(dropped(&mut side), [unknown]);
    // Answered all the same.
    side.receive(MessageKind::Disconnect, 7, 0x55);
    assert_eq!(dropped(&mut side), []);
    assert_eq!(side.attributes(), [Attribute::Disconnected]);
    let number = side.connected(7);
    side.receive(MessageKind::Reply, 7, number);
    assert_eq!(dropped(&mut side), [], "the RTU was lost");
    side.receive(MessageKind::Disconnected, 7, number);
    let expected = not_due(MessageKind::Disconnected, number, "Established");
    assert_eq!(dropped(&mut side), [expected]);
    side.sent();
    // A request with another address than that of its packet.
    let header = MadHeader {
        transaction: 1,
        local_id: 8,
        remote_id: 0,
        guid: 2,
        ack_timeout: 1,
    };
    let kind = MessageKind::Request;
    side.receive_mad(&Mad::encode(kind, &request(OWN, REMOTE), &header));
    assert_eq!(dropped(&mut side), [DropCause::Request { id: 8 }]);
    side.receive(kind, 9, 0);
    let number = side.requested().unwrap();
    side.reply(number);
    for _ in 0..3 {
        side.pass_time();
    }
    assert_eq!(dropped(&mut side), [DropCause::NoCredit { id: number }]);
    let first = 0x100;
    for number in first..first + MAX_REQUESTS as u32 {
        side.receive(kind, number, 0);
    }
    assert_eq!(dropped(&mut side), []);
    side.receive(kind, 0x10, 0);
    assert_eq!(dropped(&mut side), [DropCause::Requests(MAX_REQUESTS)]);
    side.sent();
    for number in first..first + MAX_OUTGOING as u32 {
        side.receive(kind, number, 0);
    }
    assert_eq!(dropped(&mut side), []);
    side.receive(kind, first, 0);
    assert_eq!(dropped(&mut side), [DropCause::Outgoing(MAX_OUTGOING)]);
    assert_eq!(side.sent().len(), MAX_OUTGOING);
}

/// A generator of random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn milliseconds(&mut self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit))
    }
}

/// A scheduled step of the simulation.
enum Step {
    Arrive(Box<[u8; MAD_SIZE]>),
    /// The program gives a command for a connection.
    Program(u32, Command),
}

#[derive(Clone, Copy)]
enum Command {
    Answer,
    Establish,
    Disconnect,
    Release,
}

/// An id of a program.
#[derive(Default)]
struct TestId {
    last_events: u32,
    released: bool,
}

/// Two hosts, and a network that loses, duplicates and reorders.
struct Pair {
    machines: [Machine; 2],
    random: Random,
    now: Duration,
    steps: BTreeMap<(Duration, u64), (usize, Step)>,
    count: u64,
    ids: [HashMap<u32, TestId>; 2],
    datagrams: u64,
    /// Only these are lost, nearly all of them; `None` for 30% of all.
    lost: Option<Attribute>,
    /// The queue pairs of the requests that the programs got.
    requested: Vec<u32>,
}

impl Pair {
    fn new(seed: u64, rules: [Rules; 2]) -> Self {
        let mut random = Random(seed);
        Self {
            machines: rules.map(|rules| Machine::new(rules, random::Random::seeded(random.next()))),
            random,
            now: SECOND,
            steps: BTreeMap::new(),
            count: 0,
            ids: Default::default(),
            datagrams: 0,
            lost: None,
            requested: Vec::new(),
        }
    }

    fn peer(of: usize) -> Peer {
        let addresses = [OWN, REMOTE];
        Peer::Host {
            local: addresses[of],
            remote: addresses[1 - of],
        }
    }

    fn after(&mut self, delay: Duration, side: usize, step: Step) {
        self.count += 1;
        self.steps
            .insert((self.now + delay, self.count), (side, step));
    }

    /// The program acts after a random time.
    fn program(&mut self, side: usize, number: u32, limit: u64, command: Command) {
        let delay = self.random.milliseconds(limit);
        self.after(delay, side, Step::Program(number, command));
    }

    fn connect(&mut self, kind: MessageKind) {
        let mut message = request(OWN, REMOTE);
        if kind == MessageKind::ServiceRequest {
            message.space = 0x111;
        }
        message.qp_num = 1 + self.ids[0].len() as u32;
        let number = self.machines[0].request(self.now, ends(Self::peer(0)), kind, &message);
        self.ids[0].insert(number, TestId::default());
        // Some are given up, the others end some time.
        if self.random.below(8) == 0 {
            self.program(0, number, 5000, Command::Release);
        }
    }

    /// Moves events to the programs, and datagrams to the network.
    fn settle(&mut self, side: usize) {
        while let Some((number, event)) = self.machines[side].next_event() {
            let id = self.ids[side].entry(number).or_default();
            assert!(!id.released, "an event of a released id");
            assert_eq!(id.last_events, 0, "an event after the last one: {event:?}");
            id.last_events += u32::from(event.is_last());
            match event {
                Event::Request(_, message) => {
                    self.requested.push(message.qp_num);
                    self.program(side, number, 3000, Command::Answer);
                }
                Event::Reply(_) => self.program(side, number, 1000, Command::Establish),
                Event::Disconnected(_) => match self.random.below(4) {
                    0 => {}
                    1 => self.program(side, number, 200, Command::Release),
                    _ => self.program(side, number, 200, Command::Disconnect),
                },
                _ => {}
            }
        }
        while let Some(datagram) = self.machines[side].next_datagram() {
            self.datagrams += 1;
            let attribute = Mad::parse(&datagram.bytes).map(|it| it.attribute);
            let copies = match (self.random.below(10), self.lost) {
                (0..9, Some(lost)) if attribute == Some(lost) => 0,
                (0..3, None) => 0,
                (3..5, _) => 2,
                _ => 1,
            };
            for _ in 0..copies {
                let delay = self.random.milliseconds(400);
                self.after(delay, 1 - side, Step::Arrive(Box::new(datagram.bytes)));
            }
        }
    }

    fn command(&mut self, side: usize, number: u32, command: Command) {
        let (now, machine) = (self.now, &mut self.machines[side]);
        let choice = self.random.below(10);
        match command {
            Command::Answer if choice == 0 => self.release(side, number),
            Command::Answer if choice == 1 => {
                machine.reject(now, number, 28, &[]);
                self.ids[side].entry(number).or_default().released = true;
            }
            Command::Answer if choice == 2 => {
                // Longer than the peer waits.
                self.program(side, number, 200_000, Command::Release);
            }
            Command::Answer => {
                let kind = match machine.state(number) {
                    Some(ConnectionState::SidrReqRcvd) => {
                        self.ids[side].entry(number).or_default().released = true;
                        MessageKind::ServiceReply
                    }
                    _ => MessageKind::Reply,
                };
                machine.reply(now, number, &Message::new(kind, &[]));
                if kind == MessageKind::Reply {
                    let delay = 90 * SECOND + self.random.milliseconds(20_000);
                    self.after(delay, side, Step::Program(number, Command::Disconnect));
                    if choice == 3 {
                        self.program(side, number, 20_000, Command::Release);
                    }
                }
            }
            Command::Establish if choice == 0 => {
                machine.reject(now, number, 28, &[]);
                self.ids[side].entry(number).or_default().released = true;
            }
            Command::Establish => {
                machine.establish(now, number);
                self.program(side, number, 20_000, Command::Disconnect);
            }
            Command::Disconnect => machine.disconnect(now, number),
            Command::Release => self.release(side, number),
        }
    }

    fn release(&mut self, side: usize, number: u32) {
        self.machines[side].release(self.now, number);
        self.ids[side].entry(number).or_default().released = true;
    }

    /// Runs until nothing is due. Returns the number of ids.
    fn run(&mut self) -> usize {
        for side in [0, 1] {
            self.settle(side);
        }
        for round in 0.. {
            assert!(round < 1_000_000 && self.datagrams < 100_000, "no end");
            let step = self.steps.keys().next().map(|(at, _)| *at);
            let timers = self.machines.iter().filter_map(Machine::deadline).min();
            let Some(at) = step.into_iter().chain(timers).min() else {
                break;
            };
            self.now = self.now.max(at);
            let side = if step == Some(at) {
                let (_, (side, step)) = self.steps.pop_first().unwrap();
                match step {
                    Step::Arrive(bytes) => {
                        let peer = Self::peer(side);
                        self.machines[side].receive(self.now, peer, PORT, &bytes[..]);
                    }
                    Step::Program(number, command) => {
                        if !self.ids[side].entry(number).or_default().released {
                            self.command(side, number, command);
                        }
                    }
                }
                side
            } else {
                let side = usize::from(self.machines[0].deadline() != Some(at));
                self.machines[side].expire(self.now);
                side
            };
            self.settle(side);
        }
        for (side, ids) in self.ids.iter().enumerate() {
            for (number, id) in ids {
                let expected = if id.released { 0..=1 } else { 1..=1 };
                assert!(
                    expected.contains(&id.last_events),
                    "side {side}, {number}: {} last events",
                    id.last_events
                );
            }
        }
        for machine in &self.machines {
            assert_eq!(machine.sizes(), [0; 4], "nothing is left");
        }
        self.ids.iter().map(HashMap::len).sum()
    }
}

fn run_seeds(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let run = move || {
            let rules = Rules::of_hosts(0, 26);
            let member = Rules::of_members(Peer::Member(9));
            let rules = if seed % 2 == 0 { rules } else { member };
            let mut pair = Pair::new(seed, [rules; 2]);
            for _ in 0..1 + seed % 4 {
                let service = pair.random.below(5) == 0;
                pair.connect(match service {
                    true => MessageKind::ServiceRequest,
                    false => MessageKind::Request,
                });
            }
            assert!(pair.run() > 0);
        };
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// 30% of datagrams are lost, others duplicated and reordered: each id gets exactly one last
/// event, and nothing is left.
#[test]
fn each_id_ends_once_on_a_bad_network() {
    run_seeds(0..10_000);
}

/// A program gets each request once, also if it is repeated since its rejection was lost.
#[test]
fn a_request_is_reported_once() {
    for seed in 0..2000 {
        let mut pair = Pair::new(seed, [Rules::of_hosts(0, 26); 2]);
        pair.lost = Some(Attribute::Reject);
        (0..4).for_each(|_| pair.connect(MessageKind::Request));
        pair.run();
        pair.requested.sort_unstable();
        assert_eq!(pair.requested, [1, 2, 3, 4], "seed {seed}");
    }
}
