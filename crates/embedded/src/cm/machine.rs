//! The connection manager's protocol (IBA 12.9) without I/O, clock or threads: one state for
//! each connection, in every network.
//!
//! - Commands of ids: [`request`](Machine::request), [`reply`](Machine::reply),
//!   [`establish`](Machine::establish), [`notify`](Machine::notify),
//!   [`reject`](Machine::reject), [`disconnect`](Machine::disconnect),
//!   [`release`](Machine::release).
//! - Input: [`receive`](Machine::receive), [`handle_refusal`](Machine::handle_refusal),
//!   [`end_peers`](Machine::end_peers), and time, by [`expire`](Machine::expire).
//! - Output, after each of these: [`next_event`](Machine::next_event) first, whose handling may
//!   give commands; then [`next_local`](Machine::next_local), [`next_datagram`](Machine::next_datagram)
//!   and [`deadline`](Machine::deadline). [`next_change`](Machine::next_change) tells what other
//!   processes must know, before the datagrams that follow from it. [`next_dropped`](Machine::next_dropped) says why
//!   datagrams were dropped.
//!
//! Whom a request is sent to is decided by the caller. A connection that an id no longer has
//! answers retransmissions for some time, and tells the peer that it has ended.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use rdmacm::{RejectReason, SidrStatus};
use roce::packet::gid_of_ip;
use roce::transport::ack_wait;

use super::ManagementCounters;
use super::connection::{Bound, Connection, ConnectionState, Ends};
use super::mad::{Attribute, Mad, MadHeader, Subject};
use super::message::{Message, MessageKind};
use crate::management::DropCause;
use crate::random::Random;
use crate::wires::agent::{
    ConnectionChange, HostConnection, MAD_SIZE, MemberEnd, Outgoing, Peer, PortAddress,
};

/// Maximum number of requests that the program has not answered; further ones are dropped.
pub(super) const MAX_REQUESTS: usize = 4096;
/// Maximum number of ended connections; the one that ended first makes room.
pub(super) const MAX_ENDED: usize = 4096;
/// Maximum number of queued datagrams; further ones are dropped, as by an overloaded network.
pub(super) const MAX_OUTGOING: usize = 4096;
/// Datagrams that a host gets for each of its own, before it has shown that it receives them:
/// the source of a request may be forged.
const CREDIT: u32 = 3;
/// Shortest and longest time before an unanswered message is retransmitted.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(4);
/// Maximum number of retransmissions for an id that waits no longer.
const MAX_ORPHAN_RETRIES: u32 = 6;
/// Response timeout: about the total time that the kernel waits.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Service timeout in a message receipt acknowledgement (MRA): rdma_cm's, 69 s.
const SERVICE_TIMEOUT: u8 = 24;

/// Interval between two messages to the peer of a connection, for the report of its host that
/// its process has ended.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Parameters of the protocol, by network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// This process itself: what is sent to it arrives with [`Machine::next_local`].
    pub(super) own: Option<Peer>,
    /// Top bits of the communication ids, which tell other processes who has one.
    pub(super) id_prefix: u32,
    /// Number of bits below the prefix.
    pub(super) id_bits: u32,
    /// How long the answer to a DREQ waits for the program, which may be busy or never
    /// disconnect; `None` for any time.
    pub(super) disconnect_delay: Option<Duration>,
    /// Number of retransmissions of a DREQ for whose answer an id waits; `None` for the
    /// response timeout.
    pub(super) max_disconnect_retries: Option<u32>,
    /// Whether the end of a peer's process becomes known only by what its host answers.
    pub(super) probes: bool,
}

impl Rules {
    /// Returns those of hosts that may be unreachable: an id waits 1.75 s for the answer to a
    /// DREQ, which is retransmitted twice in 0.75 s.
    pub(super) fn of_hosts(id_prefix: u32, id_bits: u32) -> Self {
        Self {
            own: None,
            id_prefix,
            id_bits,
            disconnect_delay: Some(Duration::from_millis(50)),
            max_disconnect_retries: Some(2),
            probes: true,
        }
    }

    /// Returns those of nodes of a simulated network, which may be unreachable, and whose
    /// programs answer a DREQ.
    pub(super) fn of_nodes() -> Self {
        Self {
            own: None,
            id_prefix: 0,
            id_bits: u32::BITS,
            disconnect_delay: None,
            max_disconnect_retries: None,
            probes: false,
        }
    }

    /// Returns those of processes of one host.
    pub(super) fn of_members(own: Peer) -> Self {
        Self {
            own: Some(own),
            id_prefix: 0,
            id_bits: u32::BITS,
            disconnect_delay: None,
            max_disconnect_retries: None,
            probes: false,
        }
    }
}

/// An event of a connection.
#[derive(Debug)]
pub(super) enum Event {
    /// A peer requests this new connection, or a datagram service.
    Request(MessageKind, Box<Message>),
    Reply(Box<Message>),
    Established,
    /// By the peer, with its message, or since it has ended.
    Rejected(RejectReason, Option<Box<Message>>),
    ServiceReply(Box<Message>),
    /// The peer, or its program, has not answered.
    TimedOut,
    /// With 0, or a negative error number.
    Disconnected(i32),
}

impl Event {
    /// Returns whether no event of the connection follows.
    pub(super) fn is_last(&self) -> bool {
        !matches!(self, Self::Request(..) | Self::Reply(_) | Self::Established)
    }
}

/// The connections of a network's ids.
#[derive(Debug)]
pub(super) struct Machine {
    rules: Rules,
    /// By the GUID of the device; 0 for messages that belong to no connection of an id.
    counters: HashMap<u64, ManagementCounters>,
    pub(super) response_timeout: Duration,
    connections: HashMap<u32, Connection>,
    /// The connections that peers have started, by the peer and its id.
    by_peer: HashMap<(Peer, u32), u32>,
    /// Connections with hosts, by the host and its queue pair.
    by_queue_pair: HashMap<(Peer, u32), u32>,
    changes: VecDeque<ConnectionChange>,
    /// Connections by the time at which something is due: active ones, ended ones.
    due_active: BTreeSet<(Duration, u32)>,
    due_ended: BTreeSet<(Duration, u32)>,
    /// Number of requests without an answer.
    requests: usize,
    outgoing: VecDeque<Outgoing>,
    local: VecDeque<Outgoing>,
    events: VecDeque<(u32, Event)>,
    dropped: VecDeque<DropCause>,
    /// Of ids and transactions.
    random: Random,
    /// The process ends: requests find no listener.
    is_closed: bool,
}

impl Machine {
    pub(super) fn new(rules: Rules, random: Random) -> Self {
        Self {
            rules,
            counters: HashMap::new(),
            response_timeout: RESPONSE_TIMEOUT,
            connections: HashMap::new(),
            by_peer: HashMap::new(),
            by_queue_pair: HashMap::new(),
            changes: VecDeque::new(),
            due_active: BTreeSet::new(),
            due_ended: BTreeSet::new(),
            requests: 0,
            outgoing: VecDeque::new(),
            local: VecDeque::new(),
            events: VecDeque::new(),
            dropped: VecDeque::new(),
            random,
            is_closed: false,
        }
    }

    /// Returns the state of a connection; `None` if it is forgotten.
    pub(super) fn state(&self, number: u32) -> Option<ConnectionState> {
        Some(self.connections.get(&number)?.state)
    }

    /// Returns what happened next, with the connection's number.
    pub(super) fn next_event(&mut self) -> Option<(u32, Event)> {
        self.events.pop_front()
    }

    /// Returns the next datagram for this process itself, to be [received](Self::receive).
    pub(super) fn next_local(&mut self) -> Option<Outgoing> {
        self.local.pop_front()
    }

    /// Returns the next datagram to send.
    pub(super) fn next_datagram(&mut self) -> Option<Outgoing> {
        self.outgoing.pop_front()
    }

    /// Returns why a datagram was dropped.
    pub(super) fn next_dropped(&mut self) -> Option<DropCause> {
        self.dropped.pop_front()
    }

    pub(super) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Returns the next change of the connections with hosts.
    pub(super) fn next_change(&mut self) -> Option<ConnectionChange> {
        self.changes.pop_front()
    }

    /// Ends a connection of another process, which has ended without doing so.
    pub(super) fn end_of_other(&mut self, now: Duration, it: &HostConnection) {
        if self.connections.contains_key(&it.local_id) {
            return;
        }
        let (local, remote) = (it.local, it.remote);
        let port = PortAddress {
            ethernet: true,
            gid: gid_of_ip(local),
            lid: 0,
        };
        let peer = Peer::Host { local, remote };
        let ends = Ends {
            peer,
            port,
            guid: 0,
        };
        let transaction = self.random.next();
        let mut connection = Connection::new(ConnectionState::Established, ends, transaction, now);
        connection.remote_id = it.remote_id;
        connection.remote_qpn = it.remote_qpn;
        connection.has_id = false;
        self.connections.insert(it.local_id, connection);
        self.disconnect(now, it.local_id);
    }

    fn drop_datagram(&mut self, cause: DropCause) {
        #[cfg(test)]
        crate::management::tests::record(cause);
        self.dropped.push_back(cause);
    }

    pub(super) fn has_datagrams(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Returns whether a peer has yet to answer that a connection ends.
    pub(super) fn awaits_end(&self) -> bool {
        let mut connections = self.connections.values();
        connections.any(|it| it.state == ConnectionState::DreqSent)
    }

    /// Returns when [`expire`](Self::expire) must be called.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let sets = [&self.due_active, &self.due_ended];
        let first = sets.into_iter().filter_map(|set| set.first());
        first.map(|(at, _)| *at).min()
    }

    /// Requests a connection, or a datagram service. Returns its number.
    pub(super) fn request(
        &mut self,
        now: Duration,
        ends: Ends,
        kind: MessageKind,
        message: &Message,
    ) -> u32 {
        let number = self.number();
        let connection = self.requesting(now, ends, kind);
        let state = connection.state;
        self.connections.insert(number, connection);
        self.send_and_wait(now, number, kind, message, state);
        number
    }

    /// Returns a connection whose request is not sent yet.
    fn requesting(&mut self, now: Duration, ends: Ends, kind: MessageKind) -> Connection {
        let state = match kind {
            MessageKind::ServiceRequest => ConnectionState::SidrReqSent,
            _ => ConnectionState::ReqSent,
        };
        Connection::new(state, ends, self.random.next(), now)
    }

    /// As [`request`](Self::request), some time later.
    pub(super) fn request_later(
        &mut self,
        now: Duration,
        ends: Ends,
        kind: MessageKind,
        message: &Message,
    ) -> u32 {
        let number = self.number();
        let mut connection = self.requesting(now, ends, kind);
        connection.encode(number, kind, message);
        connection.retry_at = Some(now + MIN_RETRY_INTERVAL);
        connection.deadline = Some(now.saturating_add(self.response_timeout));
        self.connections.insert(number, connection);
        self.index(number);
        number
    }

    /// Accepts a request.
    pub(super) fn reply(&mut self, now: Duration, number: u32, message: &Message) {
        match self.state(number) {
            Some(ConnectionState::ReqRcvd) => {
                self.send_and_wait(
                    now,
                    number,
                    MessageKind::Reply,
                    message,
                    ConnectionState::RepSent,
                );
            }
            Some(ConnectionState::SidrReqRcvd) => self.answer_service(now, number, *message),
            _ => {}
        }
    }

    /// Tells the peer that the queue pair is ready, after its reply.
    pub(super) fn establish(&mut self, now: Duration, number: u32) {
        if self.state(number) == Some(ConnectionState::RepRcvd) {
            let ready = Message::new(MessageKind::Ready, &[]);
            self.send(
                now,
                number,
                MessageKind::Ready,
                &ready,
                ConnectionState::Established,
            );
            self.plan_probe(now, number);
        }
    }

    /// Plans the next message to the peer of an established connection, unless one is planned.
    fn plan_probe(&mut self, now: Duration, number: u32) {
        if let Some(connection) = self.connections.get_mut(&number) {
            if self.rules.probes && connection.state == ConnectionState::Established {
                connection.retry_at.get_or_insert(now + PROBE_INTERVAL);
            }
        }
        self.index(number);
    }

    /// Data of the peer have arrived, before its RTU.
    pub(super) fn notify(&mut self, number: u32) {
        if let Some(connection) = self.connections.get_mut(&number) {
            if connection.state == ConnectionState::RepSent {
                connection.establish();
                self.report(number, Event::Established);
            }
        }
        self.index(number);
    }

    /// Rejects a request or a reply.
    pub(super) fn reject(&mut self, now: Duration, number: u32, reason: u8, data: &[u8]) {
        let kind = match self.state(number) {
            Some(ConnectionState::SidrReqRcvd) => {
                let status = SidrStatus::REJECT.0 as u8;
                let message = Message::rejection(MessageKind::ServiceReply, status, data);
                return self.answer_service(now, number, message);
            }
            Some(ConnectionState::ReqRcvd | ConnectionState::RepRcvd) => MessageKind::Reject,
            _ => return,
        };
        let message = Message::rejection(kind, reason, data);
        self.send(now, number, kind, &message, ConnectionState::Timewait);
    }

    /// Rejects a request that no id has got: nobody listens, or the backlog is full.
    pub(super) fn reject_request(&mut self, now: Duration, number: u32, no_listener: bool) {
        let service = self.state(number) == Some(ConnectionState::SidrReqRcvd);
        let reason = match (service, no_listener) {
            (false, true) => RejectReason::INVALID_SERVICE_ID.0,
            (false, false) => RejectReason::CONSUMER_DEFINED.0,
            (true, true) => SidrStatus::UNSUPPORTED.0,
            (true, false) => SidrStatus::REJECT.0,
        };
        match no_listener {
            true => self.reject_and_forget(now, number, reason as u8),
            // When it is repeated there may be room, but the peer may have got the rejection.
            false => self.reject_for(now, number, reason as u8),
        }
    }

    /// Forgets a request, for which the peer's next one is the first.
    pub(super) fn forget(&mut self, number: u32) {
        self.remove(number);
    }

    /// Rejects a request for a reason that holds if it is repeated, so that it can be forgotten.
    pub(super) fn reject_and_forget(&mut self, now: Duration, number: u32, reason: u8) {
        self.reject_for(now, number, reason);
        self.remove(number);
    }

    fn reject_for(&mut self, now: Duration, number: u32, reason: u8) {
        match self.state(number) {
            Some(ConnectionState::SidrReqRcvd) => {
                let message = Message::rejection(MessageKind::ServiceReply, reason, &[]);
                self.answer_service(now, number, message);
            }
            _ => self.reject(now, number, reason, &[]),
        }
    }

    fn answer_service(&mut self, now: Duration, number: u32, mut message: Message) {
        if let Some(request) = self
            .connections
            .get(&number)
            .and_then(|it| it.request.as_ref())
        {
            message = message.with_addresses(request.to, request.to);
            message.space = request.space;
        }
        let kind = MessageKind::ServiceReply;
        self.send(now, number, kind, &message, ConnectionState::Timewait);
    }

    /// Ends a connection, or acknowledges that the peer has done so.
    pub(super) fn disconnect(&mut self, now: Duration, number: u32) {
        match self.state(number) {
            Some(ConnectionState::Established) => {
                let kind = MessageKind::Disconnect;
                let message = Message::new(kind, &[]);
                self.send_and_wait(now, number, kind, &message, ConnectionState::DreqSent);
            }
            Some(ConnectionState::DreqRcvd) => {
                let kind = MessageKind::Disconnected;
                let message = Message::new(kind, &[]);
                self.send(now, number, kind, &message, ConnectionState::Timewait);
            }
            _ => {}
        }
    }

    /// Handles the end of the connection's id: the peer is told, and no event follows.
    pub(super) fn release(&mut self, now: Duration, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        connection.has_id = false;
        connection.deadline = None;
        let rejected = RejectReason::CONSUMER_DEFINED;
        match connection.state {
            ConnectionState::SidrReqSent => return self.remove(number),
            ConnectionState::ReqSent => {
                self.cancel(now, number, Subject::Other, RejectReason::TIMEOUT)
            }
            ConnectionState::ReqRcvd | ConnectionState::RepRcvd | ConnectionState::SidrReqRcvd => {
                self.reject(now, number, rejected.0 as u8, &[]);
            }
            ConnectionState::RepSent => self.cancel(now, number, Subject::Reply, rejected),
            ConnectionState::Established | ConnectionState::DreqRcvd => {
                self.disconnect(now, number)
            }
            ConnectionState::DreqSent | ConnectionState::Timewait => {}
        }
        self.index(number);
    }

    /// Returns whether the process ends.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Ends all connections, since the process ends.
    pub(super) fn close(&mut self, now: Duration) {
        self.is_closed = true;
        let numbers: Vec<u32> = self.connections.keys().copied().collect();
        for number in numbers {
            self.release(now, number);
        }
    }

    /// Rejects what this end has sent itself.
    fn cancel(&mut self, now: Duration, number: u32, about: Subject, reason: RejectReason) {
        if let Some(connection) = self.connections.get_mut(&number) {
            let header = connection.header(number);
            connection.last = Some(Mad::reject(&header, about, reason.0 as u8));
            connection.end(now);
        }
        self.index(number);
        self.send_last(number);
    }

    /// Sends a message, retransmits it until it is answered, and waits for the answer.
    fn send_and_wait(
        &mut self,
        now: Duration,
        number: u32,
        kind: MessageKind,
        message: &Message,
        state: ConnectionState,
    ) {
        let timeout = self.response_timeout;
        let own = self.rules.own;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.encode(number, kind, message);
            connection.state = state;
            (connection.sent, connection.retries) = (now, 0);
            // A datagram to this process itself is not lost.
            let is_own = own == Some(connection.ends.peer);
            connection.retry_at = (!is_own).then(|| now + MIN_RETRY_INTERVAL);
            connection.deadline = connection.has_id.then(|| now.saturating_add(timeout));
        }
        self.index(number);
        self.send_last(number);
    }

    /// Sends a message that has no answer; retransmitted only if the peer retransmits.
    fn send(
        &mut self,
        now: Duration,
        number: u32,
        kind: MessageKind,
        message: &Message,
        state: ConnectionState,
    ) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.encode(number, kind, message);
            connection.sent = now;
            (connection.state, connection.retry_at, connection.deadline) = (state, None, None);
            if state == ConnectionState::Timewait {
                connection.has_id = false;
                connection.end(now);
                if let MessageKind::Reject | MessageKind::ServiceReply = kind {
                    connection.linger(now);
                }
            }
        }
        self.index(number);
        self.send_last(number);
    }

    /// Sends the last message of a connection, possibly again.
    fn send_last(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let Some(mad) = &connection.last else {
            return;
        };
        if let Some(credit) = &mut connection.credit {
            let Some(rest) = credit.checked_sub(1) else {
                return self.drop_datagram(DropCause::NoCredit { id: number });
            };
            *credit = rest;
        }
        let (ends, bytes) = (connection.ends, *mad.bytes());
        self.queue(ends, bytes);
    }

    fn queue(&mut self, ends: Ends, bytes: [u8; MAD_SIZE]) {
        let queue = match self.rules.own == Some(ends.peer) {
            true => &mut self.local,
            false => &mut self.outgoing,
        };
        if queue.len() < MAX_OUTGOING {
            let attribute = Mad::parse(&bytes).map(|mad| mad.attribute.index());
            if let Some(attribute) = attribute {
                let counters = self.counters.entry(ends.guid).or_default();
                counters.sent[attribute] += 1;
            }
            let (to, port) = (ends.peer, ends.port);
            queue.push_back(Outgoing { to, port, bytes });
        } else {
            self.drop_datagram(DropCause::Outgoing(MAX_OUTGOING));
        }
    }

    fn report(&mut self, number: u32, event: Event) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        if connection.has_id {
            connection.has_id = !event.is_last();
            self.events.push_back((number, event));
        }
    }

    fn number(&mut self) -> u32 {
        loop {
            let random = self.random.next() as u32;
            let number = self.rules.id_prefix | random >> (u32::BITS - self.rules.id_bits);
            if number != 0 && !self.connections.contains_key(&number) {
                return number;
            }
        }
    }

    fn remove(&mut self, number: u32) {
        let Some(removed) = self.connections.remove(&number) else {
            return;
        };
        let peer = (removed.ends.peer, removed.remote_id);
        if self.by_peer.get(&peer) == Some(&number) {
            self.by_peer.remove(&peer);
        }
        self.unindex(number, removed.indexed);
        if removed.is_listed {
            self.unlist(number, removed.ends.peer, removed.remote_qpn);
        }
    }

    /// Lists a connection for other processes while its peer must be told of its end.
    fn list(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let Peer::Host { local, remote } = connection.ends.peer else {
            return;
        };
        let lasts = [
            ConnectionState::RepSent,
            ConnectionState::Established,
            ConnectionState::DreqSent,
        ];
        let lasts = lasts.contains(&connection.state);
        if std::mem::replace(&mut connection.is_listed, lasts) == lasts {
            return;
        }
        let (peer, remote_qpn) = (connection.ends.peer, connection.remote_qpn);
        if !lasts {
            return self.unlist(number, peer, remote_qpn);
        }
        self.changes
            .push_back(ConnectionChange::Begins(HostConnection {
                local,
                remote,
                local_id: number,
                remote_id: connection.remote_id,
                remote_qpn,
            }));
        self.by_queue_pair.insert((peer, remote_qpn), number);
    }

    fn unlist(&mut self, number: u32, peer: Peer, remote_qpn: u32) {
        self.changes.push_back(ConnectionChange::Ends(number));
        let key = (peer, remote_qpn);
        if self.by_queue_pair.get(&key) == Some(&number) {
            self.by_queue_pair.remove(&key);
        }
    }

    fn due_set(&mut self, bound: Bound) -> &mut BTreeSet<(Duration, u32)> {
        match bound {
            Bound::Ended => &mut self.due_ended,
            Bound::Active | Bound::Request => &mut self.due_active,
        }
    }

    fn unindex(&mut self, number: u32, (due, bound): (Option<Duration>, Bound)) {
        if let Some(at) = due {
            self.due_set(bound).remove(&(at, number));
        }
        if bound == Bound::Request {
            self.requests -= 1;
        }
    }

    /// Updates the index after a connection has changed.
    fn index(&mut self, number: u32) {
        self.list(number);
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let bound = match connection.state {
            ConnectionState::Timewait => Bound::Ended,
            ConnectionState::ReqRcvd | ConnectionState::SidrReqRcvd => Bound::Request,
            _ => Bound::Active,
        };
        let due = [connection.retry_at, connection.deadline]
            .into_iter()
            .flatten()
            .min();
        let new = (due, bound);
        let old = std::mem::replace(&mut connection.indexed, new);
        if old == new {
            return;
        }
        self.unindex(number, old);
        if let Some(at) = due {
            self.due_set(bound).insert((at, number));
        }
        if bound == Bound::Request {
            self.requests += 1;
        }
        if self.due_ended.len() > MAX_ENDED {
            if let Some((_, oldest)) = self.due_ended.first().copied() {
                self.remove(oldest);
            }
        }
    }

    /// Does what is due.
    pub(super) fn expire(&mut self, now: Duration) {
        let late = |set: &BTreeSet<(Duration, u32)>| {
            let late = set.iter().take_while(|(at, _)| *at <= now);
            late.map(|(_, number)| *number).collect::<Vec<u32>>()
        };
        for number in [&self.due_active, &self.due_ended].map(late).concat() {
            self.expire_one(now, number);
        }
    }

    fn expire_one(&mut self, now: Duration, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let is_due = |at: Option<Duration>| at.is_some_and(|at| at <= now);
        match connection.state {
            ConnectionState::Timewait if is_due(connection.retry_at) => return self.remove(number),
            ConnectionState::DreqSent if is_due(connection.deadline) => {
                connection.deadline = None;
                self.report(number, Event::Disconnected(-libc::ETIMEDOUT));
                return self.index(number);
            }
            _ if is_due(connection.deadline) => {
                self.report(number, Event::TimedOut);
                return self.release(now, number);
            }
            _ if !is_due(connection.retry_at) => return,
            ConnectionState::Established => {
                // The peer ignores an RTU, and repeats its own after a REP.
                connection.sent = now;
                connection.retry_at = None;
                self.plan_probe(now, number);
                return self.send_last(number);
            }
            ConnectionState::DreqRcvd => {
                // Before the program does.
                connection.encode(
                    number,
                    MessageKind::Disconnected,
                    &Message::new(MessageKind::Disconnected, &[]),
                );
                connection.retry_at = None;
                self.index(number);
                return self.send_last(number);
            }
            _ => {}
        }
        connection.retries += 1;
        let retries = connection.retries;
        let max = self.rules.max_disconnect_retries;
        if connection.state == ConnectionState::DreqSent && max.is_some_and(|max| retries > max) {
            connection.deadline = None;
            self.report(number, Event::Disconnected(0));
        }
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        if !connection.has_id && retries > MAX_ORPHAN_RETRIES {
            return self.remove(number);
        }
        let wait = MIN_RETRY_INTERVAL * 2u32.saturating_pow(retries.min(8));
        connection.retry_at = Some(now + wait.min(MAX_RETRY_INTERVAL));
        let repeated = connection.last.as_ref().map(|mad| mad.attribute.index());
        let guid = connection.ends.guid;
        let before = self.counters(guid).sent;
        self.index(number);
        self.send_last(number);
        if let Some(kind) = repeated.filter(|_| self.counters(guid).sent != before) {
            self.counters.entry(guid).or_default().retries[kind] += 1;
        }
    }

    /// Returns the counters of a device, by its GUID; with 0 those of messages that belong to no
    /// connection of an id.
    pub(super) fn counters(&self, guid: u64) -> ManagementCounters {
        self.counters.get(&guid).copied().unwrap_or_default()
    }

    /// Counts a message that was received again.
    fn count_duplicate(&mut self, number: u32, mad: &Mad) {
        let guid = self.guid_of(number);
        let counters = self.counters.entry(guid).or_default();
        counters.duplicates[mad.attribute.index()] += 1;
    }

    /// Returns the GUID of the device of a connection; 0 if there is none.
    fn guid_of(&self, number: u32) -> u64 {
        let connection = self.connections.get(&number);
        connection.map_or(0, |connection| connection.ends.guid)
    }

    /// Returns the connection that a message seems to belong to.
    fn addressed(&self, peer: Peer, mad: &Mad) -> Option<u32> {
        let started = || self.by_peer.get(&(peer, mad.sender_id())).copied();
        let number = match mad.attribute {
            Attribute::Request | Attribute::ServiceRequest => started()?,
            _ if mad.receiver_id() == 0 => started()?,
            _ => mad.receiver_id(),
        };
        let connection = self.connections.get(&number)?;
        (connection.ends.peer == peer).then_some(number)
    }

    /// Handles a datagram from `port` of a peer.
    pub(super) fn receive(&mut self, now: Duration, peer: Peer, port: PortAddress, bytes: &[u8]) {
        let Some(mad) = Mad::parse(bytes) else {
            return self.drop_datagram(DropCause::Format);
        };
        let guid = self
            .addressed(peer, &mad)
            .map_or(0, |number| self.guid_of(number));
        let counters = self.counters.entry(guid).or_default();
        counters.received[mad.attribute.index()] += 1;
        match mad.attribute {
            Attribute::Request | Attribute::ServiceRequest => {
                self.handle_request(now, peer, port, &mad);
            }
            _ => self.handle_response(now, peer, port, &mad),
        }
    }

    fn handle_request(&mut self, now: Duration, peer: Peer, port: PortAddress, mad: &Mad) {
        let sender = mad.sender_id();
        if let Some(number) = self.by_peer.get(&(peer, sender)).copied() {
            self.count_duplicate(number, mad);
            if let Some(known) = self.connections.get_mut(&number) {
                known.heard = now;
                known.credit = known.credit.map(|it| it.saturating_add(CREDIT));
                if known.state == ConnectionState::Timewait {
                    known.linger(now);
                }
            }
            self.index(number);
            return self.send_last(number);
        }
        let is_connection = mad.attribute == Attribute::Request;
        let state = match is_connection {
            true => ConnectionState::ReqRcvd,
            false => ConnectionState::SidrReqRcvd,
        };
        if self.requests >= MAX_REQUESTS {
            return self.drop_datagram(DropCause::Requests(MAX_REQUESTS));
        }
        let number = self.number();
        let ends = Ends::of_peer(peer, port);
        let mut connection = Connection::new(state, ends, mad.transaction(), now);
        connection.remote_id = sender;
        // Only a host's address may be forged.
        connection.credit = matches!(peer, Peer::Host { .. }).then_some(CREDIT);
        let message = mad.message(port).map(|it| it.1);
        // The addresses in the request are not trusted.
        let message = message.filter(|it| match peer {
            Peer::Host { local, .. } => it.to.ip() == local,
            Peer::Member(_) | Peer::Node { .. } => true,
        });
        let message = message.filter(|_| !is_connection || mad.is_connection());
        let Some(message) = message else {
            if is_connection {
                let reason = RejectReason::INVALID_SERVICE_ID.0 as u8;
                let header = connection.header(number);
                let mad = Mad::reject(&header, Subject::Request, reason);
                self.queue(ends, *mad.bytes());
            }
            return self.drop_datagram(DropCause::Request { id: sender });
        };
        if let Some(stale) = self
            .stale_connection(peer, &message)
            .filter(|_| is_connection)
        {
            // As Linux does: the queue pair has been destroyed since, unnoticed.
            let reason = RejectReason::STALE_CONN.0 as u8;
            let header = connection.header(number);
            let mad = Mad::reject(&header, Subject::Request, reason);
            self.queue(ends, *mad.bytes());
            return self.disconnect(now, stale);
        }
        // Sent if the peer repeats its request before the answer.
        if is_connection {
            let header = connection.header(number);
            connection.last = Some(Mad::mra(&header, Subject::Request, SERVICE_TIMEOUT));
        }
        connection.remote_qpn = message.qp_num;
        connection.request = Some(Box::new(message));
        self.connections.insert(number, connection);
        self.by_peer.insert((peer, sender), number);
        self.index(number);
        let kind = match is_connection {
            true => MessageKind::Request,
            false => MessageKind::ServiceRequest,
        };
        self.report(number, Event::Request(kind, Box::new(message)));
    }

    /// Returns the established connection with the queue pair that a request is for.
    fn stale_connection(&self, peer: Peer, request: &Message) -> Option<u32> {
        let number = *self.by_queue_pair.get(&(peer, request.qp_num))?;
        let is_established = self.state(number) == Some(ConnectionState::Established);
        (is_established && request.qp_num != 0).then_some(number)
    }

    /// Sets the port from which a request is answered.
    pub(super) fn set_port(&mut self, number: u32, port: PortAddress, guid: u64) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let before = connection.ends.guid;
        (connection.ends.port, connection.ends.guid) = (port, guid);
        let attribute = match connection.state {
            ConnectionState::SidrReqRcvd => Attribute::ServiceRequest,
            _ => Attribute::Request,
        };
        // The request was counted when its device was not known.
        for (guid, change) in [(before, -1), (guid, 1)] {
            let counters = self.counters.entry(guid).or_default();
            let counted = &mut counters.received[attribute.index()];
            *counted = counted.saturating_add_signed(change);
        }
    }

    /// Handles a message that refers to an earlier one.
    fn handle_response(&mut self, now: Duration, peer: Peer, port: PortAddress, mad: &Mad) {
        let mut number = mad.receiver_id();
        // The peer cancels a request that was not answered yet.
        if number == 0 && mad.attribute == Attribute::Reject {
            let known = self.by_peer.get(&(peer, mad.sender_id()));
            number = known.copied().unwrap_or(0);
        }
        let found = self.connections.get_mut(&number);
        // Addresses may be forged, so both ids must be right once the peer's is known.
        let found = found.filter(|it| {
            let is_known = it.remote_id != 0
                && !matches!(
                    it.state,
                    ConnectionState::ReqSent | ConnectionState::SidrReqSent
                );
            it.ends.peer == peer && (!is_known || it.remote_id == mad.sender_id())
        });
        let Some(connection) = found else {
            return self.acknowledge_unknown(peer, port, mad);
        };
        connection.heard = now;
        if number == mad.receiver_id() {
            connection.credit = None;
        }
        let Some((kind, message)) = mad.message(port) else {
            if mad.attribute != Attribute::Mra {
                return self.drop_datagram(DropCause::Format);
            }
            if !connection.awaits(mad.mra_subject()) {
                let state = connection.state;
                return self.drop_not_due(number, mad, state);
            }
            if connection.state == ConnectionState::ReqSent {
                connection.remote_id = mad.sender_id();
            }
            // Not the whole time, which is longer than an id waits: the answer may be lost,
            // or the process that has sent this may have ended.
            let wait = Duration::from_nanos(ack_wait(mad.service_timeout()).unwrap_or(0));
            let wait = wait.clamp(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
            connection.retry_at = Some(now + wait);
            return self.index(number);
        };
        self.handle_message(now, number, kind, &message, mad);
        self.index(number);
    }

    fn drop_not_due(&mut self, id: u32, mad: &Mad, state: ConnectionState) {
        self.drop_datagram(DropCause::NotDue {
            attribute: mad.attribute as u16,
            id,
            state: state.name(),
        });
    }

    /// Answers the DREQ of a connection that has ended here, whose acknowledgement was lost.
    fn acknowledge_unknown(&mut self, peer: Peer, port: PortAddress, mad: &Mad) {
        if mad.attribute != Attribute::Disconnect {
            return self.drop_datagram(DropCause::NoConnection {
                attribute: mad.attribute as u16,
                id: mad.receiver_id(),
            });
        }
        let header = MadHeader {
            transaction: mad.transaction(),
            local_id: mad.receiver_id(),
            remote_id: mad.sender_id(),
            guid: 0,
            ack_timeout: 0,
        };
        let message = Message::new(MessageKind::Disconnected, &[]);
        let mad = Mad::encode(MessageKind::Disconnected, &message, &header);
        self.queue(Ends::of_peer(peer, port), *mad.bytes());
    }

    fn handle_message(
        &mut self,
        now: Duration,
        number: u32,
        kind: MessageKind,
        message: &Message,
        mad: &Mad,
    ) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        match (connection.state, kind) {
            (ConnectionState::ReqSent, MessageKind::Reply) => {
                connection.remote_id = mad.sender_id();
                connection.remote_qpn = message.qp_num;
                connection.state = ConnectionState::RepRcvd;
                (connection.retry_at, connection.deadline, connection.last) = (None, None, None);
                self.report(number, Event::Reply(Box::new(*message)));
            }
            // Once this end is established, of a peer that has given up before the RTU arrived.
            (
                ConnectionState::ReqSent
                | ConnectionState::ReqRcvd
                | ConnectionState::RepRcvd
                | ConnectionState::RepSent
                | ConnectionState::Established,
                MessageKind::Reject,
            ) => {
                connection.last = None;
                connection.end(now);
                // Zero would mean success.
                let reason = RejectReason(i32::from(message.reason).max(1));
                self.report(number, Event::Rejected(reason, Some(Box::new(*message))));
            }
            (ConnectionState::RepSent, MessageKind::Ready) => {
                connection.establish();
                self.report(number, Event::Established);
                self.plan_probe(now, number);
            }
            // Repeated by the peer, or after its data.
            (ConnectionState::Established, MessageKind::Ready) => {
                self.count_duplicate(number, mad);
                self.plan_probe(now, number);
            }
            (ConnectionState::RepSent | ConnectionState::Established, MessageKind::Disconnect) => {
                connection.transaction = mad.transaction();
                let was_established = connection.state == ConnectionState::Established;
                connection.state = ConnectionState::DreqRcvd;
                (connection.last, connection.deadline) = (None, None);
                connection.retry_at = self.rules.disconnect_delay.map(|delay| now + delay);
                if !was_established {
                    // The RTU was lost, or overtaken.
                    self.report(number, Event::Established);
                }
                self.report(number, Event::Disconnected(0));
            }
            (ConnectionState::DreqSent, MessageKind::Disconnected) => {
                connection.last = None;
                connection.end(now);
                self.report(number, Event::Disconnected(0));
            }
            (ConnectionState::DreqSent | ConnectionState::Timewait, MessageKind::Disconnect) => {
                if connection.state == ConnectionState::Timewait {
                    self.count_duplicate(number, mad);
                }
                self.report(number, Event::Disconnected(0));
                self.answer_disconnect(now, number, mad.transaction(), ConnectionState::Timewait);
            }
            (ConnectionState::DreqRcvd, MessageKind::Disconnect)
                if self.rules.disconnect_delay.is_some() =>
            {
                self.answer_disconnect(now, number, mad.transaction(), ConnectionState::DreqRcvd);
            }
            (ConnectionState::SidrReqSent, MessageKind::ServiceReply) => {
                connection.last = None;
                connection.end(now);
                self.report(number, Event::ServiceReply(Box::new(*message)));
            }
            _ if connection.must_resend(kind) => {
                self.count_duplicate(number, mad);
                self.send_last(number);
            }
            (state, _) => self.drop_not_due(number, mad, state),
        }
    }

    fn answer_disconnect(
        &mut self,
        now: Duration,
        number: u32,
        transaction: u64,
        state: ConnectionState,
    ) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.transaction = transaction;
        }
        let kind = MessageKind::Disconnected;
        self.send(now, number, kind, &Message::new(kind, &[]), state);
    }

    /// Handles the report that a host has refused a datagram: there is nobody to receive it.
    /// Returns when it was first sent; `None` if it is not about a message that waits.
    pub(super) fn handle_refusal(
        &mut self,
        now: Duration,
        peer: Peer,
        bytes: &[u8],
    ) -> Option<Duration> {
        let mad = Mad::parse(bytes)?;
        let number = mad.sender_id();
        let connection = self.connections.get_mut(&number)?;
        // Reports may be forged, but not by who does not know the message.
        if connection.ends.peer != peer || connection.last.as_ref() != Some(&mad) {
            return None;
        }
        let sent = connection.sent;
        self.end_peer(now, number, RejectReason::TIMEOUT, MemberEnd::Absent);
        self.end_peers(now, peer, Some(sent));
        Some(sent)
    }

    /// Ends the connections with a host that were last heard before `time`.
    pub(super) fn end_peers(&mut self, now: Duration, peer: Peer, time: Option<Duration>) {
        let has_ended = |it: &Connection| {
            let waits = matches!(
                it.state,
                ConnectionState::ReqSent | ConnectionState::SidrReqSent
            );
            it.ends.peer == peer && !waits && time.is_none_or(|time| it.heard < time)
        };
        for number in self.numbers(has_ended) {
            self.end_peer(now, number, RejectReason::TIMEOUT, MemberEnd::Ended);
        }
    }

    /// Ends the connections with a process of the network.
    pub(super) fn end_member(&mut self, now: Duration, peer: Peer, end: MemberEnd) {
        for number in self.numbers(|it| it.ends.peer == peer) {
            self.end_peer(now, number, RejectReason::CONSUMER_DEFINED, end);
        }
    }

    fn numbers(&self, which: impl Fn(&Connection) -> bool) -> Vec<u32> {
        let all = self.connections.iter().filter(|(_, it)| which(it));
        let mut numbers: Vec<u32> = all.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Handles the end of the peer's process, which has sent nothing before it.
    fn end_peer(&mut self, now: Duration, number: u32, reason: RejectReason, end: MemberEnd) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let absent = end == MemberEnd::Absent;
        let event = match connection.state {
            // As if it had been received, and nobody listened.
            ConnectionState::ReqSent if absent => {
                Event::Rejected(RejectReason::INVALID_SERVICE_ID, None)
            }
            ConnectionState::ReqSent
            | ConnectionState::ReqRcvd
            | ConnectionState::RepRcvd
            | ConnectionState::RepSent => Event::Rejected(reason, None),
            ConnectionState::SidrReqSent => {
                let status = match absent {
                    true => SidrStatus::UNSUPPORTED,
                    false => SidrStatus::REJECT,
                };
                let kind = MessageKind::ServiceReply;
                let message = Message::rejection(kind, status.0 as u8, &[]);
                Event::ServiceReply(Box::new(message))
            }
            ConnectionState::Established | ConnectionState::DreqSent => Event::Disconnected(0),
            ConnectionState::SidrReqRcvd
            | ConnectionState::DreqRcvd
            | ConnectionState::Timewait => return,
        };
        // For a process that has started since, and replies to a repeated request.
        connection.last = (connection.state == ConnectionState::ReqSent).then(|| {
            let reason = RejectReason::TIMEOUT.0 as u8;
            Mad::reject(&connection.header(number), Subject::Other, reason)
        });
        connection.end(now);
        self.report(number, event);
        self.index(number);
    }

    /// Returns the numbers of connections, of those in the index of peers, of unanswered
    /// requests, and of ended connections.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn sizes(&self) -> [usize; 4] {
        [
            self.connections.len(),
            self.by_peer.len(),
            self.requests,
            self.due_ended.len(),
        ]
    }

    /// Returns the number of queued datagrams.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn queued(&self) -> usize {
        self.outgoing.len() + self.local.len()
    }

    /// Returns the numbers of all connections.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn all_numbers(&self) -> Vec<u32> {
        self.numbers(|_| true)
    }
}
