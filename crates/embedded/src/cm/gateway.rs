//! Gateway of the connection manager to other hosts: translates between the links of ids and
//! management datagrams.
//!
//! ```text
//!  id ── link ── Communication ── Mad ──► queue pair 1 of another host
//! ```
//!
//! An id sees the same as with a peer on this host: a reliable link that is closed when the
//! peer has ended. A communication retransmits unanswered messages, answers retransmissions
//! of the peer, and disconnects after its id was destroyed. The network's thread drives the
//! gateway, so that a busy program loses no connection.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{self, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::{ClockId, clock_gettime};
use rdmacm::{RejectReason, SidrStatus};
use roce::transport::ack_wait;
use uverbs::Errno;
use zerocopy::IntoBytes;

use super::id::ACK_TIMEOUT;
use super::link::{End, ReadyList, ReceiveResult};
use super::mad::{Attribute, Mad, MadHeader, Subject};
#[cfg(any(test, feature = "test-utils"))]
use super::ports::Binding;
use super::ports::Ports;
use super::wire::{Message, MessageKind};
use crate::Result;
use crate::random::random;
use crate::wires::udp::ID_BITS;
use crate::wires::udp::agent::{ManagementAgent, Outgoing};

/// Maximum number of communications and of queued datagrams. The oldest one that has ended
/// makes room; without one, requests are dropped.
const MAX_COMMUNICATIONS: usize = 4096;
/// Number of communications that requests of other hosts leave to this host's.
const RESERVED: usize = 256;
/// Datagrams that a host gets for each of its own, before it has shown that it receives them:
/// the source of a request may be forged.
const CREDIT: u32 = 3;
/// Shortest and longest time before an unanswered message is retransmitted.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(4);
/// Maximum number of retransmissions after the id was destroyed.
const MAX_ORPHAN_RETRIES: u32 = 6;
/// Number of retransmissions of a DREQ, in 0.75 s, for whose answer an id waits: until 1.75 s.
const MAX_DISCONNECT_RETRIES: u32 = 2;
/// How long the answer to a DREQ waits for the program, which may be busy or never disconnect.
const DISCONNECT_DELAY: Duration = Duration::from_millis(50);
/// How long an ended communication answers retransmissions of the peer.
const LINGER: Duration = Duration::from_secs(8);
/// Service timeout in a message receipt acknowledgement (MRA): rdma_cm's, 69 s.
const SERVICE_TIMEOUT: u8 = 24;
/// Maximum number of turns before all communications are ended.
const MAX_CLOSING_TURNS: usize = 16;
/// Maximum number of descriptors handled per turn.
const MAX_EVENTS: usize = 32;

/// Numbers of descriptors in epoll events.
const TIMER: u64 = u64::MAX;
const DIALER: u64 = u64::MAX - 1;
const LINKS: u64 = u64::MAX - 2;

/// New links of ids that connect to another host.
#[derive(Debug)]
pub(super) struct Dialer {
    ends: Mutex<Vec<End>>,
    wake: EventFd,
}

fn to_errno(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

impl Dialer {
    pub(super) fn new() -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            ends: Mutex::default(),
            wake: EventFd::from_value_and_flags(0, flags).map_err(to_errno)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a link whose first message is a request to another host.
    pub(super) fn dial(&self) -> End {
        let (near, far) = End::pair();
        self.lock().push(far);
        // Fails only if the counter is full, which also wakes.
        let _ = self.wake.write(1);
        near
    }
}

/// State of a communication, after the last message sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The id has not sent its request yet.
    New,
    RequestSent,
    ReplyReceived,
    RequestReceived,
    ReplySent,
    Established,
    DisconnectSent,
    DisconnectReceived,
    ServiceRequestSent,
    ServiceRequestReceived,
    /// Only answers retransmissions of the peer.
    Ended,
}

/// A connection with another host, or a request for a datagram service.
#[derive(Debug)]
struct Communication {
    phase: Phase,
    /// To the id; `None` once either end has closed.
    link: Option<End>,
    local: IpAddr,
    remote: IpAddr,
    remote_id: u32,
    transaction: u64,
    remote_qpn: u32,
    /// The peer's request, if the peer has started the communication.
    request: Option<Box<Message>>,
    /// The last message sent.
    last: Option<Mad>,
    /// When the last message is retransmitted, or the ended communication removed.
    due: Option<Instant>,
    /// The same in the gateway's index, and whether it is in that of the ended ones.
    indexed: Option<(bool, Instant)>,
    /// Number of datagrams that may be sent; `None` if this host has started, or once the peer
    /// has named this communication's id, which only a host that receives can.
    credit: Option<u32>,
    /// Number of retransmissions of the last message.
    retries: u32,
    /// When the last message was first sent, and when the peer was last heard, in the host's
    /// monotonic time.
    sent: Duration,
    heard: Duration,
}

/// Returns the host's monotonic time, the same in all processes.
fn monotonic_time() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// All communications of a device with other hosts.
pub(crate) struct Gateway {
    ports: Arc<Ports>,
    dialer: Arc<Dialer>,
    guid: u64,
    epoll: Epoll,
    links: Arc<ReadyList>,
    timer: TimerFd,
    communications: BTreeMap<u32, Communication>,
    /// The communications that peers have started, by the peer's address and id.
    by_peer: HashMap<(IpAddr, u32), u32>,
    /// Communications by the time at which something is due: active ones, ended ones.
    due_active: BTreeSet<(Instant, u32)>,
    due_ended: BTreeSet<(Instant, u32)>,
    outgoing: VecDeque<Outgoing>,
    /// Numbers of the watched sockets that report errors.
    failed: Vec<usize>,
    /// When the timer expires.
    due: Option<Instant>,
    /// The process ends: requests find no listener.
    is_closed: bool,
}

/// The action of a communication after a message, with the next phase.
enum Action {
    None,
    /// Sends a message, and retransmits it until it is answered.
    Request(MessageKind, Box<Message>, Phase),
    /// Sends a message that has no answer; retransmitted only if the peer retransmits.
    Respond(Mad, Phase),
}

impl ManagementAgent for Gateway {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    fn watch_errors(&self, socket: BorrowedFd<'_>, number: usize) -> Result<()> {
        // Errors are reported whether or not they are asked for.
        let event = EpollEvent::new(EpollFlags::empty(), number as u64);
        self.epoll.add(socket, event).map_err(to_errno)
    }

    fn pop_failed(&mut self) -> Option<usize> {
        self.failed.pop()
    }

    fn add_address(&self, address: IpAddr) {
        self.ports.add_address(address);
    }

    fn pop(&mut self) -> Option<Outgoing> {
        self.outgoing.pop_front()
    }

    fn turn(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); MAX_EVENTS];
        let count = self
            .epoll
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        for event in &events[..count.min(MAX_EVENTS)] {
            match event.data() {
                TIMER => self.expire(),
                DIALER => self.accept_dialed(),
                number if number < LINKS => self.failed.push(number as usize),
                _ => (self.links.take().into_iter())
                    .for_each(|number| self.receive_local(number as u32)),
            }
        }
        if count != 0 {
            self.set_timer();
        }
        count != 0
    }

    fn close(&mut self) {
        // Ids may have sent messages, and requests to other hosts, just before.
        let _ = (0..MAX_CLOSING_TURNS).any(|_| !self.turn());
        self.is_closed = true;
        let numbers: Vec<u32> = self.communications.keys().copied().collect();
        for number in numbers {
            self.handle_close(number);
        }
    }

    fn other_member(&self, destination: IpAddr, bytes: &[u8]) -> Option<u8> {
        let mad = Mad::parse(bytes)?;
        if let Attribute::Request | Attribute::ServiceRequest = mad.attribute {
            return self.ports.other_member(mad.service()?, destination);
        }
        let number = mad.receiver_id();
        let member = (number >> ID_BITS) as u8;
        (number != 0 && member != self.ports.member()).then_some(member)
    }

    fn receive(&mut self, source: IpAddr, destination: IpAddr, bytes: &[u8]) {
        let Some(mad) = Mad::parse(bytes) else {
            return;
        };
        match mad.attribute {
            Attribute::Request | Attribute::ServiceRequest => {
                self.handle_request((source, destination), &mad);
            }
            _ => self.handle_response((source, destination), &mad),
        }
        self.set_timer();
    }

    fn handle_refusal(&mut self, both: (IpAddr, IpAddr), bytes: &[u8]) -> Option<Duration> {
        let mad = Mad::parse(bytes)?;
        let number = mad.sender_id();
        let communication = self.communications.get_mut(&number)?;
        // Reports may be forged, but not by who does not know the message.
        let is_about = (communication.local, communication.remote) == both
            && communication.last.as_ref() == Some(&mad);
        if !is_about {
            return None;
        }
        let sent = communication.sent;
        let header = communication.header(number, self.guid);
        communication.handle_refusal(&header);
        self.index(number);
        self.end_peers(both, sent);
        Some(sent)
    }

    fn end_peers(&mut self, both: (IpAddr, IpAddr), time: Duration) {
        let has_ended = |it: &Communication| (it.local, it.remote) == both && it.heard < time;
        let all = self.communications.iter_mut();
        let ended = all.filter(|(_, it)| has_ended(it)).map(|(number, it)| {
            it.handle_peer_end();
            *number
        });
        for number in ended.collect::<Vec<u32>>() {
            self.index(number);
        }
        self.set_timer();
    }
}

impl Gateway {
    /// Creates the gateway of ports that reach other hosts.
    pub(super) fn new(ports: Arc<Ports>, dialer: Arc<Dialer>, guid: u64) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(to_errno)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(timerfd::ClockId::CLOCK_MONOTONIC, flags).map_err(to_errno)?;
        let readable = |number| EpollEvent::new(EpollFlags::EPOLLIN, number);
        let links = ReadyList::new()?;
        epoll.add(&timer, readable(TIMER)).map_err(to_errno)?;
        epoll
            .add(links.descriptor(), readable(LINKS))
            .map_err(to_errno)?;
        epoll
            .add(&dialer.wake, readable(DIALER))
            .map_err(to_errno)?;
        Ok(Self {
            ports,
            dialer,
            guid,
            epoll,
            links,
            timer,
            communications: BTreeMap::new(),
            by_peer: HashMap::new(),
            due_active: BTreeSet::new(),
            due_ended: BTreeSet::new(),
            outgoing: VecDeque::new(),
            failed: Vec::new(),
            due: None,
            is_closed: false,
        })
    }

    fn number(&self) -> u32 {
        loop {
            // The top bits tell other processes which member has the number.
            let member = u32::from(self.ports.member()) << ID_BITS;
            let number = member | random() as u32 >> (u32::BITS - ID_BITS);
            if number != 0 && !self.communications.contains_key(&number) {
                return number;
            }
        }
    }

    /// Adds a communication whose id has the other end of the link.
    fn add(&mut self, number: u32, mut communication: Communication, link: End) {
        link.watch(&self.links, number.into());
        communication.link = Some(link);
        if communication.is_passive() {
            let peer = (communication.remote, communication.remote_id);
            self.by_peer.insert(peer, number);
        }
        self.communications.insert(number, communication);
    }

    fn remove(&mut self, number: u32) {
        let Some(removed) = self.communications.remove(&number) else {
            return;
        };
        let peer = (removed.remote, removed.remote_id);
        if self.by_peer.get(&peer) == Some(&number) {
            self.by_peer.remove(&peer);
        }
        if let Some((ended, at)) = removed.indexed {
            self.due_set(ended).remove(&(at, number));
        }
    }

    fn due_set(&mut self, ended: bool) -> &mut BTreeSet<(Instant, u32)> {
        match ended {
            true => &mut self.due_ended,
            false => &mut self.due_active,
        }
    }

    /// Updates the index after a communication has changed.
    fn index(&mut self, number: u32) {
        let Some(communication) = self.communications.get_mut(&number) else {
            return;
        };
        let ended = communication.phase == Phase::Ended;
        let new = communication.due.map(|at| (ended, at));
        let old = std::mem::replace(&mut communication.indexed, new);
        if let Some((ended, at)) = old.filter(|_| old != new) {
            self.due_set(ended).remove(&(at, number));
        }
        if let Some((ended, at)) = new.filter(|_| old != new) {
            self.due_set(ended).insert((at, number));
        }
    }

    /// Returns whether there is room for a communication beside `reserved` others.
    fn make_room(&mut self, reserved: usize) -> bool {
        while self.communications.len() >= MAX_COMMUNICATIONS - reserved {
            let Some((_, oldest)) = self.due_ended.first().copied() else {
                return false;
            };
            self.remove(oldest);
        }
        true
    }

    fn accept_dialed(&mut self) {
        let _ = self.dialer.wake.read();
        let dialed = std::mem::take(&mut *self.dialer.lock());
        for link in dialed {
            // Beyond the limit the link is closed, and its id reports a rejection.
            if self.make_room(0) {
                let number = self.number();
                self.add(number, Communication::new(Phase::New), link);
            }
        }
    }

    /// Receives a message of an id.
    fn receive_local(&mut self, number: u32) {
        let Some(communication) = self.communications.get_mut(&number) else {
            return;
        };
        let Some(link) = &communication.link else {
            return;
        };
        match link.receive() {
            ReceiveResult::Nothing => {}
            ReceiveResult::Closed => self.handle_close(number),
            ReceiveResult::Message(kind, message) => {
                let header = communication.header(number, self.guid);
                let action = communication.handle_local(kind, message, &header);
                self.perform(number, action);
            }
        }
    }

    /// Handles the end of an id, which has closed its link.
    fn handle_close(&mut self, number: u32) {
        let Some(communication) = self.communications.get_mut(&number) else {
            return;
        };
        communication.link = None;
        let header = communication.header(number, self.guid);
        let reject = |about, reason: RejectReason| {
            Action::Respond(Mad::reject(&header, about, reason.0 as u8), Phase::Ended)
        };
        let rejected = RejectReason::CONSUMER_DEFINED;
        let action = match communication.phase {
            Phase::New | Phase::ServiceRequestSent => {
                self.remove(number);
                return;
            }
            Phase::RequestSent => reject(Subject::Other, RejectReason::TIMEOUT),
            Phase::RequestReceived => reject(Subject::Request, rejected),
            Phase::ReplyReceived | Phase::ReplySent => reject(Subject::Reply, rejected),
            Phase::Established => {
                let message = Box::new(Message::new(MessageKind::Disconnect, &[]));
                Action::Request(MessageKind::Disconnect, message, Phase::DisconnectSent)
            }
            Phase::DisconnectReceived => {
                let message = Message::new(MessageKind::Disconnected, &[]);
                let mad = Mad::encode(MessageKind::Disconnected, &message, &header);
                Action::Respond(mad, Phase::Ended)
            }
            Phase::ServiceRequestReceived => {
                let mut message =
                    communication.reply_to(Message::new(MessageKind::ServiceReply, &[]));
                message.reason = SidrStatus::REJECT.0 as u8;
                let mad = Mad::encode(MessageKind::ServiceReply, &message, &header);
                Action::Respond(mad, Phase::Ended)
            }
            Phase::DisconnectSent | Phase::Ended => Action::None,
        };
        self.perform(number, action);
    }

    fn perform(&mut self, number: u32, action: Action) {
        let Some(communication) = self.communications.get_mut(&number) else {
            return;
        };
        match action {
            Action::None => return,
            Action::Request(kind, mut message, phase) => {
                if kind == MessageKind::Disconnect {
                    message.qp_num = communication.remote_qpn;
                }
                let header = communication.header(number, self.guid);
                communication.phase = phase;
                communication.last = Some(Mad::encode(kind, &message, &header));
                communication.sent = monotonic_time();
                communication.retries = 0;
                communication.due = Some(Instant::now() + MIN_RETRY_INTERVAL);
            }
            Action::Respond(mad, phase) => {
                communication.phase = phase;
                communication.last = Some(mad);
                communication.sent = monotonic_time();
                communication.due = None;
                if phase == Phase::Ended {
                    communication.end();
                }
            }
        }
        self.index(number);
        self.send_last(number);
        // If the peer repeats the request, the id may reject it again.
        let ended = self.communications.get(&number);
        if ended.is_some_and(Communication::is_rejected) {
            self.remove(number);
        }
        self.set_timer();
    }

    /// Sends the last message of a communication, possibly again.
    fn send_last(&mut self, number: u32) {
        let Some(communication) = self.communications.get_mut(&number) else {
            return;
        };
        if let Some(mad) = &communication.last {
            if let Some(credit) = &mut communication.credit {
                let Some(rest) = credit.checked_sub(1) else {
                    return;
                };
                *credit = rest;
            }
            let both = (communication.local, communication.remote);
            let mad = mad.clone();
            self.queue(both, mad);
        }
    }

    fn queue(&mut self, (from, to): (IpAddr, IpAddr), mad: Mad) {
        // Dropped beyond the limit, as by an overloaded network.
        if self.outgoing.len() < MAX_COMMUNICATIONS {
            let bytes = *mad.bytes();
            self.outgoing.push_back(Outgoing { from, to, bytes });
        }
    }

    /// Handles communications whose timeout has expired.
    fn expire(&mut self) {
        let _ = self.timer.unset();
        self.due = None;
        let now = Instant::now();
        let late = |set: &BTreeSet<(Instant, u32)>| {
            let late = set.iter().take_while(|(at, _)| *at <= now);
            late.map(|(_, number)| *number).collect::<Vec<u32>>()
        };
        for number in [&self.due_active, &self.due_ended].map(late).concat() {
            let Some(communication) = self.communications.get_mut(&number) else {
                continue;
            };
            if communication.phase == Phase::DisconnectReceived {
                let header = communication.header(number, self.guid);
                let action = Communication::acknowledge_disconnect(&header);
                self.perform(number, action);
                continue;
            }
            communication.retries += 1;
            if communication.phase == Phase::DisconnectSent
                && communication.retries > MAX_DISCONNECT_RETRIES
            {
                communication.deliver(&Message::new(MessageKind::Disconnected, &[]));
                communication.link = None;
            }
            let orphaned =
                communication.link.is_none() && communication.retries > MAX_ORPHAN_RETRIES;
            if communication.phase == Phase::Ended || orphaned {
                self.remove(number);
                continue;
            }
            let wait = MIN_RETRY_INTERVAL * 2u32.saturating_pow(communication.retries.min(8));
            communication.due = Some(now + wait.min(MAX_RETRY_INTERVAL));
            self.index(number);
            self.send_last(number);
        }
    }

    fn set_timer(&mut self) {
        let sets = [&self.due_active, &self.due_ended];
        let first = sets.into_iter().filter_map(|set| set.first());
        let due = first.map(|(at, _)| *at).min();
        if due == self.due {
            return;
        }
        self.due = due;
        let Some(due) = due else {
            let _ = self.timer.unset();
            return;
        };
        // Zero would stop the timer.
        let left = due.saturating_duration_since(Instant::now());
        let left = TimeSpec::from_duration(left.max(Duration::from_nanos(1)));
        // Succeeds for every representable time.
        let _ = (self.timer).set(Expiration::OneShot(left), TimerSetTimeFlags::empty());
    }

    /// Handles a request.
    fn handle_request(&mut self, (source, destination): (IpAddr, IpAddr), mad: &Mad) {
        let sender = mad.sender_id();
        if let Some(number) = self.find_by_peer(source, sender) {
            if let Some(known) = self.communications.get_mut(&number) {
                known.heard = monotonic_time();
                known.credit = known.credit.map(|it| it.saturating_add(CREDIT));
            }
            return self.send_last(number);
        }
        let is_connection = mad.attribute == Attribute::Request;
        let phase = match is_connection {
            true => Phase::RequestReceived,
            false => Phase::ServiceRequestReceived,
        };
        let number = self.number();
        let mut communication = Communication::new(phase);
        communication.local = destination;
        communication.remote = source;
        communication.remote_id = sender;
        communication.transaction = mad.transaction();
        communication.heard = monotonic_time();
        let header = communication.header(number, self.guid);
        let both = (destination, source);
        let message = mad.message(source).map(|it| it.1);
        // The addresses in the request are not trusted.
        let message = message.filter(|it| it.to().ip() == destination);
        let message = message.filter(|_| !is_connection || mad.is_connection());
        let Some(message) = message else {
            if is_connection {
                let reason = RejectReason::INVALID_SERVICE_ID.0 as u8;
                self.queue(both, Mad::reject(&header, Subject::Request, reason));
            }
            return;
        };
        communication.remote_qpn = message.qp_num;
        communication.request = Some(Box::new(message));
        let port = (message.space, message.to().port());
        let connected = match self.is_closed {
            false => self.ports.connect_within(port, destination),
            true => Ok(None),
        };
        if let Ok(Some(link)) = connected {
            if !self.make_room(RESERVED) {
                return;
            }
            link.send(message.as_bytes());
            communication.credit = Some(CREDIT);
            // Sent if the peer repeats its request before the answer.
            if is_connection {
                let mra = Mad::mra(&header, Subject::Request, SERVICE_TIMEOUT);
                communication.last = Some(mra);
            }
            return self.add(number, communication, link);
        }
        // A full backlog is an error, a missing listener is not.
        let no_listener = connected.is_ok();
        let mad = if is_connection {
            let reason = match no_listener {
                true => RejectReason::INVALID_SERVICE_ID,
                false => RejectReason::CONSUMER_DEFINED,
            };
            Mad::reject(&header, Subject::Request, reason.0 as u8)
        } else {
            let mut reply = communication.reply_to(Message::new(MessageKind::ServiceReply, &[]));
            reply.reason = match no_listener {
                true => SidrStatus::UNSUPPORTED.0 as u8,
                false => SidrStatus::REJECT.0 as u8,
            };
            Mad::encode(MessageKind::ServiceReply, &reply, &header)
        };
        self.queue(both, mad);
    }

    /// Returns the communication that a peer has started with this communication id.
    fn find_by_peer(&self, source: IpAddr, sender: u32) -> Option<u32> {
        self.by_peer.get(&(source, sender)).copied()
    }

    /// Handles a message that refers to an earlier one.
    fn handle_response(&mut self, (source, destination): (IpAddr, IpAddr), mad: &Mad) {
        let mut number = mad.receiver_id();
        // The peer cancels a request that was not answered yet.
        if number == 0 && mad.attribute == Attribute::Reject {
            number = self.find_by_peer(source, mad.sender_id()).unwrap_or(0);
        }
        let found = self.communications.get_mut(&number);
        let Some(communication) = found.filter(|it| it.remote == source) else {
            // The connection has ended, but the peer has not received the acknowledgement.
            if mad.attribute == Attribute::Disconnect {
                let header = MadHeader {
                    transaction: mad.transaction(),
                    local_id: number,
                    remote_id: mad.sender_id(),
                    guid: self.guid,
                    ack_timeout: 0,
                };
                let message = Message::new(MessageKind::Disconnected, &[]);
                let mad = Mad::encode(MessageKind::Disconnected, &message, &header);
                self.queue((destination, source), mad);
            }
            return;
        };
        communication.heard = monotonic_time();
        if number == mad.receiver_id() {
            communication.credit = None;
        }
        let Some((kind, message)) = mad.message(source) else {
            if mad.attribute == Attribute::Mra && communication.awaits(mad.mra_subject()) {
                if communication.phase == Phase::RequestSent {
                    communication.remote_id = mad.sender_id();
                }
                // Not the whole time, which is longer than an id waits: the answer may be lost,
                // or the process that has sent this may have ended.
                let wait = ack_wait(mad.service_timeout()).unwrap_or(0);
                let wait = Duration::from_nanos(wait);
                let wait = wait.clamp(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
                communication.due = Some(Instant::now() + wait);
                self.index(number);
            }
            return;
        };
        let header = communication.header(number, self.guid);
        let action = communication.handle_remote(kind, message, mad, &header);
        self.index(number);
        self.perform(number, action);
        if self
            .communications
            .get(&number)
            .is_some_and(|it| it.must_resend(kind))
        {
            self.send_last(number);
        }
    }
}

impl Communication {
    fn new(phase: Phase) -> Self {
        Self {
            phase,
            link: None,
            local: [0; 4].into(),
            remote: [0; 4].into(),
            remote_id: 0,
            transaction: random(),
            remote_qpn: 0,
            request: None,
            last: None,
            due: None,
            indexed: None,
            credit: None,
            retries: 0,
            sent: Duration::ZERO,
            heard: Duration::ZERO,
        }
    }

    fn header(&self, number: u32, guid: u64) -> MadHeader {
        MadHeader {
            transaction: self.transaction,
            local_id: number,
            remote_id: self.remote_id,
            guid,
            ack_timeout: ACK_TIMEOUT,
        }
    }

    /// Returns whether the peer has started the communication.
    fn is_passive(&self) -> bool {
        self.request.is_some()
    }

    /// Returns whether this host has rejected the peer's request.
    fn is_rejected(&self) -> bool {
        let last = self.last.as_ref();
        self.phase == Phase::Ended && self.is_passive() && last.is_some_and(Mad::rejects_request)
    }

    /// Returns whether this is the message that waits for an answer.
    fn awaits(&self, subject: Option<Subject>) -> bool {
        matches!(
            (self.phase, subject),
            (Phase::RequestSent, Some(Subject::Request)) | (Phase::ReplySent, Some(Subject::Reply))
        )
    }

    /// Ends the communication, which answers retransmissions for some time.
    fn end(&mut self) {
        self.phase = Phase::Ended;
        self.link = None;
        self.due = Some(Instant::now() + LINGER);
    }

    /// Adds the addresses to a reply to a service request.
    fn reply_to(&self, mut reply: Message) -> Message {
        if let Some(request) = &self.request {
            reply = reply.with_addresses(request.to(), request.to());
            reply.space = request.space;
        }
        reply
    }

    fn deliver(&self, message: &Message) {
        if let Some(link) = &self.link {
            link.send(message.as_bytes());
        }
    }

    /// Handles a message of the id.
    fn handle_local(
        &mut self,
        kind: MessageKind,
        message: Box<Message>,
        header: &MadHeader,
    ) -> Action {
        let mad = |message: &Message| Mad::encode(kind, message, header);
        match (self.phase, kind) {
            (Phase::New, MessageKind::Request | MessageKind::ServiceRequest) => {
                (self.local, self.remote) = (message.from().ip(), message.to().ip());
                let phase = match kind {
                    MessageKind::Request => Phase::RequestSent,
                    _ => Phase::ServiceRequestSent,
                };
                Action::Request(kind, message, phase)
            }
            (Phase::RequestReceived, MessageKind::Reply) => {
                Action::Request(kind, message, Phase::ReplySent)
            }
            (Phase::RequestReceived, MessageKind::Reject) => {
                Action::Respond(mad(&message).with_subject(Subject::Request), Phase::Ended)
            }
            (Phase::ReplyReceived, MessageKind::Reject) => {
                Action::Respond(mad(&message).with_subject(Subject::Reply), Phase::Ended)
            }
            (Phase::ReplyReceived, MessageKind::Ready) => {
                Action::Respond(mad(&message), Phase::Established)
            }
            // In `ReplySent` the peer's RTU may be lost, though its data have arrived.
            (Phase::Established | Phase::ReplySent, MessageKind::Disconnect) => {
                Action::Request(kind, message, Phase::DisconnectSent)
            }
            (Phase::DisconnectReceived, MessageKind::Disconnected) => {
                Action::Respond(mad(&message), Phase::Ended)
            }
            (Phase::ServiceRequestReceived, MessageKind::ServiceReply) => {
                Action::Respond(mad(&self.reply_to(*message)), Phase::Ended)
            }
            _ => Action::None,
        }
    }

    /// Handles a message of the peer, other than a request.
    fn handle_remote(
        &mut self,
        kind: MessageKind,
        message: Message,
        mad: &Mad,
        header: &MadHeader,
    ) -> Action {
        match (self.phase, kind) {
            (Phase::RequestSent, MessageKind::Reply) => {
                self.remote_id = mad.sender_id();
                self.remote_qpn = message.qp_num;
                self.phase = Phase::ReplyReceived;
                (self.last, self.due) = (None, None);
                self.deliver(&message);
            }
            (
                Phase::RequestSent
                | Phase::RequestReceived
                | Phase::ReplyReceived
                | Phase::ReplySent,
                MessageKind::Reject,
            ) => {
                self.deliver(&message);
                self.end();
            }
            (Phase::ReplySent, MessageKind::Ready) => {
                self.phase = Phase::Established;
                self.due = None;
                self.deliver(&message);
            }
            (Phase::ReplySent | Phase::Established, MessageKind::Disconnect) => {
                self.transaction = mad.transaction();
                if self.phase == Phase::ReplySent {
                    // The RTU was lost, or overtaken.
                    self.deliver(&Message::new(MessageKind::Ready, &[]));
                }
                self.phase = Phase::DisconnectReceived;
                self.last = None;
                self.due = Some(Instant::now() + DISCONNECT_DELAY);
                self.deliver(&message);
            }
            (Phase::DisconnectSent, MessageKind::Disconnected) => {
                self.deliver(&message);
                self.last = None;
                self.end();
            }
            (Phase::DisconnectSent | Phase::Ended, MessageKind::Disconnect) => {
                self.deliver(&message);
                let header = MadHeader {
                    transaction: mad.transaction(),
                    ..*header
                };
                let answer = Message::new(MessageKind::Disconnected, &[]);
                let answer = Mad::encode(MessageKind::Disconnected, &answer, &header);
                return Action::Respond(answer, Phase::Ended);
            }
            (Phase::DisconnectReceived, MessageKind::Disconnect) => {
                return Communication::acknowledge_disconnect(header);
            }
            (Phase::ServiceRequestSent, MessageKind::ServiceReply) => {
                self.deliver(&message);
                self.end();
            }
            _ => {}
        }
        Action::None
    }

    /// Answers a DREQ before the program does.
    fn acknowledge_disconnect(header: &MadHeader) -> Action {
        let message = Message::new(MessageKind::Disconnected, &[]);
        let mad = Mad::encode(MessageKind::Disconnected, &message, header);
        Action::Respond(mad, Phase::DisconnectReceived)
    }

    /// The peer's host has refused the last message: there is nobody to receive it.
    fn handle_refusal(&mut self, header: &MadHeader) {
        match self.phase {
            // As if the host had received it, and nobody listened.
            Phase::RequestSent => {
                let reason = RejectReason::INVALID_SERVICE_ID.0 as u8;
                let mut message = Message::new(MessageKind::Reject, &[]);
                message.reason = reason;
                self.deliver(&message);
                // For a process that has started since, and replies to a repeated request.
                let timeout = RejectReason::TIMEOUT.0 as u8;
                self.last = Some(Mad::reject(header, Subject::Other, timeout));
                self.end();
            }
            Phase::ServiceRequestSent => {
                let mut message = Message::new(MessageKind::ServiceReply, &[]);
                message.reason = SidrStatus::UNSUPPORTED.0 as u8;
                self.deliver(&message);
                self.end();
            }
            _ => self.handle_peer_end(),
        }
    }

    /// Handles the end of the peer's process, which has sent nothing before it.
    fn handle_peer_end(&mut self) {
        match self.phase {
            Phase::RequestReceived | Phase::ReplyReceived | Phase::ReplySent => {
                let mut message = Message::new(MessageKind::Reject, &[]);
                message.reason = RejectReason::TIMEOUT.0 as u8;
                self.deliver(&message);
                self.end();
            }
            Phase::Established => {
                self.phase = Phase::DisconnectReceived;
                (self.last, self.due) = (None, None);
                self.deliver(&Message::new(MessageKind::Disconnect, &[]));
            }
            Phase::DisconnectSent => {
                self.deliver(&Message::new(MessageKind::Disconnected, &[]));
                self.last = None;
                self.end();
            }
            Phase::New
            | Phase::RequestSent
            | Phase::DisconnectReceived
            | Phase::ServiceRequestSent
            | Phase::ServiceRequestReceived
            | Phase::Ended => {}
        }
    }

    /// Returns whether a retransmission shows that the peer has not received the last message.
    fn must_resend(&self, kind: MessageKind) -> bool {
        let last = self.last.as_ref().map(|mad| mad.attribute);
        matches!(
            (kind, self.phase, last),
            (
                MessageKind::Reply,
                Phase::Established,
                Some(Attribute::Ready)
            ) | (MessageKind::Reply, Phase::Ended, Some(Attribute::Reject))
        )
    }
}

/// Passes a hostile message to the gateway, with valid headers and existing ids depending on
/// `flags`, and lets a listening id answer. For tests and fuzzing.
#[cfg(any(test, feature = "test-utils"))]
pub(crate) fn hostile_messages(
    manager: &super::Manager,
    gateway: &mut Gateway,
    flags: u8,
    script: &[u8],
) {
    let peer = IpAddr::from([192, 0, 2, 2 + (flags >> 6)]);
    let own = IpAddr::from([192, 0, 2, 1]);
    let mut bytes = [0; crate::wires::udp::agent::MAD_SIZE];
    for (to, from) in bytes.iter_mut().zip(script) {
        *to = *from;
    }
    if flags & 4 != 0 {
        // A valid header, and the id of an existing communication.
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        (bytes[16], bytes[17]) = (0, 0x10 + bytes[17] % 9);
        let existing = gateway.communications.keys().nth((flags >> 3 & 7).into());
        if bytes[17] != 0x10 && bytes[17] != 0x17 {
            let number = existing.copied().unwrap_or(1).to_be_bytes();
            let at = if bytes[17] == 0x18 { 24 } else { 28 };
            bytes[at..at + 4].copy_from_slice(&number);
        } else {
            // To port 7471 of the TCP or UDP port space, in IPv4.
            let space = if bytes[17] == 0x10 { [1, 6] } else { [1, 0x11] };
            bytes[32..36].fill(0);
            bytes[36..38].copy_from_slice(&space);
            bytes[38..40].copy_from_slice(&7471u16.to_be_bytes());
            let header = if bytes[17] == 0x10 { 164 } else { 40 };
            bytes[header..header + 2].copy_from_slice(&[0, 0x40]);
            bytes[header + 32..header + 36].copy_from_slice(&[192, 0, 2, 1]);
        }
    }
    let ports = Arc::clone(&gateway.ports);
    let listening = [0x106, 0x111].map(|space| {
        let port = ports.reserve(space, 7471, Binding::to_all(), false).ok()?;
        Some((port.listen(4).ok()?, port))
    });
    gateway.receive(peer, own, &bytes);
    for (listener, port) in listening.iter().flatten() {
        let Ok(Some(id)) = port.accept(listener) else {
            continue;
        };
        let kinds = [
            MessageKind::Reply,
            MessageKind::Reject,
            MessageKind::ServiceReply,
            MessageKind::Disconnect,
        ];
        let kind = kinds[usize::from(flags >> 4 & 3)];
        id.send(&Message::new(kind, &[]));
        gateway.turn();
    }
    gateway.turn();
    // A communication that the program starts.
    if flags & 8 != 0 {
        if let Ok(Some(socket)) = manager.lock().ports.connect((0x106, 1), peer) {
            let message = Message::new(MessageKind::Request, &[])
                .with_addresses((own, 5).into(), (peer, 6).into());
            socket.send(&message);
            gateway.turn();
            gateway.turn();
        }
    }
    assert!(
        gateway.communications.len() <= MAX_COMMUNICATIONS
            && gateway.outgoing.len() <= MAX_COMMUNICATIONS
    );
    while let Some(outgoing) = gateway.pop() {
        assert!(Mad::parse(&outgoing.bytes).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manager;
    use std::os::fd::OwnedFd;

    use super::super::link::Link;
    use super::super::ports::BoundPort;
    use super::*;
    use crate::addresses::AddressList;
    use crate::drive::Drive;

    const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    struct Server {
        gateway: Gateway,
        port: BoundPort,
        listener: OwnedFd,
        _manager: Manager,
    }

    impl Server {
        fn new() -> Self {
            let list = Arc::new(AddressList::new([OWN]));
            let (manager, gateway) = Manager::of_hosts(Drive::Caller, list, 1, None).unwrap();
            let port = gateway.ports.reserve(0x106, 7471, Binding::to_all(), false);
            let port = port.unwrap();
            let listener = port.listen(1024).unwrap();
            Self {
                gateway,
                port,
                listener,
                _manager: manager,
            }
        }

        /// Sends a connection request of an id of this side to the peer.
        fn dial(&mut self) -> End {
            let id = self.gateway.dialer.dial();
            let request = Message::new(MessageKind::Request, &[]);
            let request = request.with_addresses((OWN, 5).into(), (PEER, 7471).into());
            id.send(request.as_bytes());
            while self.gateway.turn() {}
            id
        }

        /// Receives a message of the peer's communication with a number.
        fn receive(&mut self, kind: MessageKind, local_id: u32, remote_id: u32) {
            let addresses = ((PEER, 5).into(), (OWN, 7471).into());
            let mut message = Message::new(kind, &[]).with_addresses(addresses.0, addresses.1);
            message.space = 0x106;
            let header = MadHeader {
                transaction: 1,
                local_id,
                remote_id,
                guid: 2,
                ack_timeout: 1,
            };
            let mad = Mad::encode(kind, &message, &header);
            self.gateway.receive(PEER, OWN, mad.bytes());
        }

        /// The listening id accepts a connection, and sends a message.
        fn answer(&mut self, kind: MessageKind) -> Option<Link> {
            let socket = self.port.accept(&self.listener).unwrap()?;
            socket.send(&Message::new(kind, &[]));
            while self.gateway.turn() {}
            Some(socket)
        }

        fn sent(&mut self) -> Vec<Mad> {
            let all = std::iter::from_fn(|| self.gateway.pop());
            all.map(|it| Mad::parse(&it.bytes).unwrap()).collect()
        }

        /// Lets the times of all communications pass.
        fn pass_time(&mut self) {
            let numbers: Vec<u32> = self.gateway.communications.keys().copied().collect();
            for number in numbers {
                let found = self.gateway.communications.get_mut(&number).unwrap();
                found.due = found.due.map(|_| Instant::now());
                self.gateway.index(number);
            }
            self.gateway.expire();
        }
    }

    /// The source of a request may be forged, and must not get much more than was sent.
    #[test]
    fn a_peer_gets_little_before_it_has_answered() {
        let mut server = Server::new();
        server.receive(MessageKind::Request, 7, 0);
        assert_eq!(server.sent(), []);
        let id = server.answer(MessageKind::Reply);
        for _ in 0..50 {
            server.pass_time();
        }
        let sent = server.sent();
        assert_eq!(sent.len(), 3);
        assert!(sent.iter().all(|it| it.attribute == Attribute::Reply));
        // It asks again, since all were lost.
        server.receive(MessageKind::Request, 7, 0);
        server.pass_time();
        assert_eq!(server.sent().len(), 2);
        // A number that it can only know from an answer.
        server.receive(MessageKind::Ready, 7, sent[0].sender_id());
        drop(id);
        while server.gateway.turn() {}
        for _ in 0..5 {
            server.pass_time();
        }
        let sent = server.sent();
        assert_eq!(sent.len(), 6);
        assert!(sent.iter().all(|it| it.attribute == Attribute::Disconnect));
    }

    /// A request that is repeated before its answer is acknowledged.
    #[test]
    fn a_repeated_request_is_acknowledged() {
        let mut server = Server::new();
        server.receive(MessageKind::Request, 7, 0);
        server.receive(MessageKind::Request, 7, 0);
        let sent = server.sent();
        assert!(sent.len() == 1 && sent[0].attribute == Attribute::Mra);
        assert!(server.answer(MessageKind::Reply).is_some());
        assert!(server.answer(MessageKind::Reply).is_none());
    }

    /// Its answer may be lost, or whoever has acknowledged it may have ended.
    #[test]
    fn an_acknowledged_request_is_repeated() {
        let mut server = Server::new();
        let id = server.dial();
        let number = server.sent().pop().unwrap().sender_id();
        let acknowledge = |server: &mut Server| {
            let header = MadHeader {
                transaction: 1,
                local_id: 9,
                remote_id: number,
                guid: 2,
                ack_timeout: 1,
            };
            let mad = Mad::mra(&header, Subject::Request, SERVICE_TIMEOUT);
            server.gateway.receive(PEER, OWN, mad.bytes());
            let due = server.gateway.communications[&number].due.unwrap();
            due.saturating_duration_since(Instant::now())
        };
        let wait = acknowledge(&mut server);
        assert!(wait > MIN_RETRY_INTERVAL && wait <= MAX_RETRY_INTERVAL);
        server.pass_time();
        let sent = server.sent();
        assert!(sent.len() == 1 && sent[0].attribute == Attribute::Request);
        // It arrives late, and delays no other message.
        server.receive(MessageKind::Reply, 9, number);
        id.send(Message::new(MessageKind::Ready, &[]).as_bytes());
        id.send(Message::new(MessageKind::Disconnect, &[]).as_bytes());
        while server.gateway.turn() {}
        assert_eq!(
            server.sent().pop().unwrap().attribute,
            Attribute::Disconnect
        );
        assert!(acknowledge(&mut server) <= MIN_RETRY_INTERVAL);
    }

    /// Connects an id; returns it with the number of its communication.
    fn connected(server: &mut Server, peer_id: u32) -> (End, u32) {
        let id = server.dial();
        let number = server.sent().pop().unwrap().sender_id();
        server.receive(MessageKind::Reply, peer_id, number);
        id.send(Message::new(MessageKind::Ready, &[]).as_bytes());
        while server.gateway.turn() {}
        assert!(matches!(
            id.receive(),
            ReceiveResult::Message(MessageKind::Reply, _)
        ));
        assert_eq!(server.sent().len(), 1);
        (id, number)
    }

    fn kind_received(id: &End) -> Option<MessageKind> {
        match id.receive() {
            ReceiveResult::Message(kind, _) => Some(kind),
            _ => None,
        }
    }

    /// Its other connections there end, but not those that were heard later.
    #[test]
    fn a_refused_message_ends_the_connections_with_a_host() {
        let mut server = Server::new();
        let [(id, _), (other, _), (late, late_number)] =
            [7, 8, 9].map(|number| connected(&mut server, number));
        id.send(Message::new(MessageKind::Disconnect, &[]).as_bytes());
        while server.gateway.turn() {}
        let sent = server.sent().pop().unwrap();
        assert_eq!(sent.attribute, Attribute::Disconnect);
        let found = server.gateway.communications.get_mut(&late_number);
        found.unwrap().heard = monotonic_time() + Duration::from_secs(1);
        let mut forged = *sent.bytes();
        forged[255] ^= 1;
        for (both, bytes) in [
            ((OWN, PEER), &forged[..]),
            ((OWN, PEER), &sent.bytes()[..255]),
            ((PEER, OWN), sent.bytes()),
        ] {
            assert_eq!(server.gateway.handle_refusal(both, bytes), None);
            assert_eq!(kind_received(&id), None);
        }
        let refused = server.gateway.handle_refusal((OWN, PEER), sent.bytes());
        assert!(refused.is_some());
        assert_eq!(kind_received(&id), Some(MessageKind::Disconnected));
        assert_eq!(kind_received(&other), Some(MessageKind::Disconnect));
        assert!(matches!(late.receive(), ReceiveResult::Nothing));
        // Nothing is repeated.
        server.pass_time();
        assert_eq!(server.sent(), []);
    }

    #[test]
    fn a_refused_request_is_rejected() {
        let mut server = Server::new();
        let id = server.dial();
        let sent = server.sent().pop().unwrap();
        // Of another request, of which nothing is known.
        server.gateway.end_peers((OWN, PEER), monotonic_time());
        assert!(matches!(id.receive(), ReceiveResult::Nothing));
        let refused = server.gateway.handle_refusal((OWN, PEER), sent.bytes());
        assert!(refused.is_some());
        let ReceiveResult::Message(MessageKind::Reject, message) = id.receive() else {
            panic!("not rejected");
        };
        assert_eq!(
            i32::from(message.reason),
            RejectReason::INVALID_SERVICE_ID.0
        );
        assert_eq!(server.sent(), []);
        // A process that has started since replies to a repeated request.
        server.receive(MessageKind::Reply, 9, sent.sender_id());
        assert_eq!(server.sent().pop().unwrap().attribute, Attribute::Reject);
    }

    #[test]
    fn an_id_does_not_wait_long_for_the_answer_to_its_dreq() {
        let mut server = Server::new();
        let (id, _) = connected(&mut server, 7);
        id.send(Message::new(MessageKind::Disconnect, &[]).as_bytes());
        while server.gateway.turn() {}
        for _ in 0..MAX_DISCONNECT_RETRIES {
            server.pass_time();
            assert!(matches!(id.receive(), ReceiveResult::Nothing));
        }
        server.pass_time();
        assert_eq!(kind_received(&id), Some(MessageKind::Disconnected));
        // The peer is told further on.
        for _ in 0..2 * MAX_ORPHAN_RETRIES {
            server.pass_time();
        }
        assert_eq!(server.sent().len(), 1 + MAX_ORPHAN_RETRIES as usize);
        assert!(server.gateway.communications.is_empty());
    }

    /// Whether or not the program disconnects, and its RTU has arrived.
    #[test]
    fn a_dreq_is_answered() {
        let mut server = Server::new();
        server.receive(MessageKind::Request, 7, 0);
        let id = server.answer(MessageKind::Reply).unwrap();
        let number = server.sent().pop().unwrap().sender_id();
        server.receive(MessageKind::Disconnect, 7, number);
        assert_eq!(server.sent(), []);
        for wanted in [
            MessageKind::Request,
            MessageKind::Ready,
            MessageKind::Disconnect,
        ] {
            let ReceiveResult::Message(kind, _) = id.receive() else {
                panic!("no message");
            };
            assert_eq!(kind, wanted);
        }
        server.pass_time();
        server.receive(MessageKind::Disconnect, 7, number);
        id.send(&Message::new(MessageKind::Disconnected, &[]));
        while server.gateway.turn() {}
        let sent = server.sent();
        assert_eq!(sent.len(), 3);
        let answers = |it: &Mad| it.attribute == Attribute::Disconnected;
        assert!(sent.iter().all(answers));
    }

    #[test]
    fn requests_find_no_listener_while_the_process_ends() {
        let mut server = Server::new();
        server.receive(MessageKind::Request, 7, 0);
        server.gateway.close();
        server.receive(MessageKind::Request, 8, 0);
        let sent = server.sent();
        assert_eq!(sent.len(), 2);
        assert!(sent.iter().all(Mad::rejects_request));
    }

    #[test]
    fn rejected_requests_are_forgotten() {
        let mut server = Server::new();
        for number in 1..10 {
            server.receive(MessageKind::Request, number, 0);
            server.answer(MessageKind::Reject).unwrap();
            let sent = server.sent();
            assert!(sent.len() == 1 && sent[0].attribute == Attribute::Reject);
            // An id that is dropped rejects its request.
            server.receive(MessageKind::Request, number, 0);
            drop(server.port.accept(&server.listener).unwrap().unwrap());
            while server.gateway.turn() {}
            assert_eq!(server.sent().len(), 1);
        }
        let gateway = &server.gateway;
        assert_eq!(
            (gateway.communications.len(), gateway.by_peer.len()),
            (0, 0)
        );
        assert!(gateway.due_active.is_empty() && gateway.due_ended.is_empty());
    }

    #[test]
    fn ended_communications_make_room() {
        const COUNT: u32 = MAX_COMMUNICATIONS as u32 + 100;
        let mut server = Server::new();
        for number in 1..COUNT {
            server.receive(MessageKind::Request, number, 0);
            let _id = server.answer(MessageKind::Reply).expect("room");
            let reply = server.sent().pop().unwrap();
            server.receive(MessageKind::Reject, number, reply.sender_id());
        }
        let gateway = &mut server.gateway;
        let limit = MAX_COMMUNICATIONS - RESERVED;
        assert_eq!(gateway.communications.len(), limit);
        assert_eq!(gateway.by_peer.len(), limit);
        assert_eq!(
            (gateway.due_active.len(), gateway.due_ended.len()),
            (0, limit)
        );
        // Active ones leave room for those of this host.
        let mut waiting = Vec::new();
        for number in COUNT..2 * COUNT {
            server.receive(MessageKind::Request, number, 0);
            waiting.extend(server.port.accept(&server.listener).unwrap());
            if waiting.len() == 500 {
                break;
            }
        }
        assert_eq!(waiting.len(), 500);
        let _dialed = server.gateway.dialer.dial();
        let before = server.gateway.communications.len();
        while server.gateway.turn() {}
        assert_eq!(server.gateway.communications.len(), before + 1);
    }
}
