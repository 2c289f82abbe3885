//! The connection manager's way to other hosts: between the sockets of ids and
//! management datagrams.
//!
//! ```text
//!  id ── socket ── Conversation ── Mad ──► queue pair 1 of another host
//! ```
//!
//! An id sees the same as with a peer on this host: a socket that loses nothing and
//! closes when the peer has gone. A conversation repeats what is not answered, answers
//! what is repeated, and ends what its id leaves open. The thread of the network
//! drives it, so that a program that is busy loses no connection.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use rdmacm::{RejectReason, SidrStatus};
use softhca::transport::ack_wait;
use uverbs::Errno;

use super::id::ACK_TIMEOUT;
use super::mad::{About, Attribute, Between, Mad};
use super::ports::{Ports, random};
use super::talk::{Received, receive};
use super::wire::{Kind, Message, send};
use crate::Result;
use crate::udp::ID_BITS;

/// Maximum number of conversations. A request beyond it is dropped, as if lost.
const LIMIT: usize = 4096;
/// First and longest time before an unanswered message is repeated.
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(4);
/// How long a message is repeated whose id has gone.
const ORPHANED: u32 = 6;
/// How long an ended conversation answers what is repeated.
const LINGER: Duration = Duration::from_secs(8);
/// Code of the time that a peer is asked to wait, in an acknowledgement of receipt:
/// rdma_cm's, 69 s.
const SERVICE_TIMEOUT: u8 = 24;
/// Sockets handled per turn.
const READY: usize = 32;

/// Socket numbers in epoll events.
const TIMER: u64 = u64::MAX;
const DIALED: u64 = u64::MAX - 1;

/// Sockets of ids that want a connection to another host.
#[derive(Debug)]
pub(super) struct Dialer {
    sockets: Mutex<Vec<OwnedFd>>,
    wake: EventFd,
}

fn os(errno: nix::Error) -> Errno {
    Errno::new(errno as i32)
}

impl Dialer {
    pub(super) fn new() -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            sockets: Mutex::default(),
            wake: EventFd::from_value_and_flags(0, flags).map_err(os)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a socket whose first message is a request to another host.
    pub(super) fn dial(&self) -> Result<OwnedFd> {
        let (near, far) = pair()?;
        self.lock().push(far);
        // Fails only if the counter is full, which also wakes.
        let _ = self.wake.write(1);
        Ok(near)
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).map_err(os)
}

/// State of a conversation, by what was last sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The id has connected to nothing yet.
    Dialed,
    RequestSent,
    ReplyReceived,
    RequestReceived,
    ReplySent,
    Established,
    DisconnectSent,
    DisconnectReceived,
    ServiceRequestSent,
    ServiceRequestReceived,
    /// Only answers what is repeated.
    Ended,
}

/// A connection with another host, or a request for a datagram service.
#[derive(Debug)]
struct Conversation {
    phase: Phase,
    /// The other end is the id's; `None` once one of them has closed.
    socket: Option<OwnedFd>,
    local: IpAddr,
    remote: IpAddr,
    remote_id: u32,
    transaction: u64,
    remote_qpn: u32,
    /// The request, whose service a reply names.
    request: Option<Box<Message>>,
    /// What was last sent.
    last: Option<Mad>,
    /// When it is repeated, or the conversation forgotten.
    due: Option<Instant>,
    /// How often it was repeated.
    repeated: u32,
}

/// A management datagram to send, from and to these addresses.
pub(crate) struct Outgoing {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) bytes: [u8; super::mad::SIZE],
}

/// All conversations of a device with other hosts.
pub(crate) struct Gateway {
    ports: Arc<Ports>,
    dialer: Arc<Dialer>,
    guid: u64,
    epoll: Epoll,
    timer: TimerFd,
    conversations: BTreeMap<u32, Conversation>,
    outgoing: VecDeque<Outgoing>,
    /// When the timer expires.
    due: Option<Instant>,
}

/// What a conversation does next, after a message.
enum Then {
    Nothing,
    /// Sends a message, and repeats it until it is answered.
    Ask(Kind, Box<Message>, Phase),
    /// Sends a message that is not answered, but repeated on request.
    Answer(Mad, Phase),
}

impl Gateway {
    /// Creates the gateway of ports that reach other hosts.
    pub(super) fn new(ports: Arc<Ports>, dialer: Arc<Dialer>, guid: u64) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(os)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).map_err(os)?;
        let readable = |number| EpollEvent::new(EpollFlags::EPOLLIN, number);
        epoll.add(&timer, readable(TIMER)).map_err(os)?;
        epoll.add(&dialer.wake, readable(DIALED)).map_err(os)?;
        Ok(Self {
            ports,
            dialer,
            guid,
            epoll,
            timer,
            conversations: BTreeMap::new(),
            outgoing: VecDeque::new(),
            due: None,
        })
    }

    /// Returns the descriptor that is readable when [`turn`](Self::turn) has something
    /// to do.
    pub(crate) fn descriptor(&self) -> &Epoll {
        &self.epoll
    }

    /// Takes ports that listen at a new address of the device, too.
    pub(crate) fn add_address(&self, address: IpAddr) {
        self.ports.add_address(address);
    }

    /// Returns the next datagram to send.
    pub(crate) fn pop(&mut self) -> Option<Outgoing> {
        self.outgoing.pop_front()
    }

    /// Handles what ids have said, and what is due. Returns whether there was anything.
    pub(crate) fn turn(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); READY];
        let count = self
            .epoll
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        for event in &events[..count.min(READY)] {
            match event.data() {
                TIMER => self.expire(),
                DIALED => self.take_dialed(),
                number => self.listen_to(number as u32),
            }
        }
        if count != 0 {
            self.set_timer();
        }
        count != 0
    }

    /// Ends all conversations, since the process ends.
    pub(crate) fn close(&mut self) {
        self.turn();
        let numbers: Vec<u32> = self.conversations.keys().copied().collect();
        for number in numbers {
            self.hung_up(number);
        }
    }

    fn number(&self) -> u32 {
        loop {
            // Other processes know by the top bits whose it is.
            let member = u32::from(self.ports.member()) << ID_BITS;
            let number = member | random() as u32 >> (u32::BITS - ID_BITS);
            if number != 0 && !self.conversations.contains_key(&number) {
                return number;
            }
        }
    }

    fn add(&mut self, number: u32, conversation: Conversation) {
        if let Some(socket) = &conversation.socket {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number.into());
            if self.epoll.add(socket.as_fd(), event).is_err() {
                return;
            }
        }
        self.conversations.insert(number, conversation);
    }

    fn take_dialed(&mut self) {
        let _ = self.dialer.wake.read();
        let dialed = std::mem::take(&mut *self.dialer.lock());
        for socket in dialed {
            // One too many: its id sees that the peer has gone.
            if self.conversations.len() < LIMIT {
                let number = self.number();
                self.add(number, Conversation::new(Phase::Dialed, Some(socket)));
            }
        }
    }

    /// Reads a message of an id.
    fn listen_to(&mut self, number: u32) {
        let Some(conversation) = self.conversations.get_mut(&number) else {
            return;
        };
        let Some(socket) = &conversation.socket else {
            return;
        };
        match receive(socket) {
            Received::Nothing => {}
            Received::Closed => self.hung_up(number),
            Received::Message(kind, message) => {
                let between = conversation.between(number, self.guid);
                let then = conversation.said(kind, message, &between);
                self.go_on(number, then);
            }
        }
    }

    /// The id has closed its socket.
    fn hung_up(&mut self, number: u32) {
        let Some(conversation) = self.conversations.get_mut(&number) else {
            return;
        };
        conversation.socket = None;
        let between = conversation.between(number, self.guid);
        let reject = |about, reason: RejectReason| {
            Then::Answer(Mad::reject(&between, about, reason.0 as u8), Phase::Ended)
        };
        let no = RejectReason::CONSUMER_DEFINED;
        let then = match conversation.phase {
            Phase::Dialed | Phase::ServiceRequestSent => {
                self.conversations.remove(&number);
                return;
            }
            Phase::RequestSent => reject(About::Other, RejectReason::TIMEOUT),
            Phase::RequestReceived => reject(About::Request, no),
            Phase::ReplyReceived | Phase::ReplySent => reject(About::Reply, no),
            Phase::Established => {
                let message = Box::new(Message::new(Kind::Disconnect, &[]));
                Then::Ask(Kind::Disconnect, message, Phase::DisconnectSent)
            }
            Phase::DisconnectReceived => {
                let message = Message::new(Kind::Disconnected, &[]);
                let mad = Mad::of(Kind::Disconnected, &message, &between);
                Then::Answer(mad, Phase::Ended)
            }
            Phase::ServiceRequestReceived => {
                let mut message = conversation.reply_to(Message::new(Kind::ServiceReply, &[]));
                message.reason = SidrStatus::REJECT.0 as u8;
                let mad = Mad::of(Kind::ServiceReply, &message, &between);
                Then::Answer(mad, Phase::Ended)
            }
            Phase::DisconnectSent | Phase::Ended => Then::Nothing,
        };
        self.go_on(number, then);
    }

    fn go_on(&mut self, number: u32, then: Then) {
        let Some(conversation) = self.conversations.get_mut(&number) else {
            return;
        };
        match then {
            Then::Nothing => return,
            Then::Ask(kind, mut message, phase) => {
                if kind == Kind::Disconnect {
                    message.qp_num = conversation.remote_qpn;
                }
                let between = conversation.between(number, self.guid);
                conversation.phase = phase;
                conversation.last = Some(Mad::of(kind, &message, &between));
                conversation.repeated = 0;
                conversation.due = Some(Instant::now() + FIRST);
            }
            Then::Answer(mad, phase) => {
                conversation.phase = phase;
                conversation.last = Some(mad);
                conversation.due = None;
                if phase == Phase::Ended {
                    conversation.end();
                }
            }
        }
        self.say(number);
        self.set_timer();
    }

    /// Sends the last message of a conversation, again.
    fn say(&mut self, number: u32) {
        let Some(conversation) = self.conversations.get(&number) else {
            return;
        };
        if let Some(mad) = &conversation.last {
            let (from, to) = (conversation.local, conversation.remote);
            self.put((from, to), mad.clone());
        }
    }

    fn put(&mut self, (from, to): (IpAddr, IpAddr), mad: Mad) {
        // As a network does that is overloaded.
        if self.outgoing.len() < LIMIT {
            let bytes = *mad.bytes();
            self.outgoing.push_back(Outgoing { from, to, bytes });
        }
    }

    /// Handles conversations whose time has come.
    fn expire(&mut self) {
        let _ = self.timer.unset();
        self.due = None;
        let now = Instant::now();
        let late = |it: &Conversation| it.due.is_some_and(|due| due <= now);
        let all = self.conversations.iter();
        let late: Vec<u32> = all.filter(|it| late(it.1)).map(|it| *it.0).collect();
        for number in late {
            let Some(conversation) = self.conversations.get_mut(&number) else {
                continue;
            };
            conversation.repeated += 1;
            let orphaned = conversation.socket.is_none() && conversation.repeated > ORPHANED;
            if conversation.phase == Phase::Ended || orphaned {
                self.conversations.remove(&number);
                continue;
            }
            let wait = FIRST * 2u32.saturating_pow(conversation.repeated.min(8));
            conversation.due = Some(now + wait.min(LONGEST));
            self.say(number);
        }
    }

    fn set_timer(&mut self) {
        let due = self.conversations.values().filter_map(|it| it.due).min();
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

    /// Returns the number of the other process to which a management datagram may be
    /// passed that has arrived for one of those that share the address.
    pub(crate) fn other_member(&self, destination: IpAddr, bytes: &[u8]) -> Option<u8> {
        let mad = Mad::parse(bytes)?;
        if let Attribute::Request | Attribute::ServiceRequest = mad.attribute {
            return self.ports.other_member(mad.service()?, destination);
        }
        let number = mad.receiver_id();
        let member = (number >> ID_BITS) as u8;
        (number != 0 && member != self.ports.member()).then_some(member)
    }

    /// Handles a management datagram of another host.
    pub(crate) fn receive(&mut self, source: IpAddr, destination: IpAddr, bytes: &[u8]) {
        let Some(mad) = Mad::parse(bytes) else {
            return;
        };
        match mad.attribute {
            Attribute::Request | Attribute::ServiceRequest => {
                self.requested((source, destination), &mad);
            }
            _ => self.answered((source, destination), &mad),
        }
        self.set_timer();
    }

    /// Handles a request.
    fn requested(&mut self, (source, destination): (IpAddr, IpAddr), mad: &Mad) {
        let sender = mad.sender_id();
        if let Some(number) = self.asked_by(source, sender) {
            return self.say(number);
        }
        let is_connection = mad.attribute == Attribute::Request;
        let phase = match is_connection {
            true => Phase::RequestReceived,
            false => Phase::ServiceRequestReceived,
        };
        let number = self.number();
        let mut conversation = Conversation::new(phase, None);
        conversation.local = destination;
        conversation.remote = source;
        conversation.remote_id = sender;
        conversation.transaction = mad.transaction();
        let between = conversation.between(number, self.guid);
        let both = (destination, source);
        let message = mad.message(source).map(|it| it.1);
        // Addresses in the request are the sender's claim.
        let message = message.filter(|it| it.to().ip() == destination);
        let message = message.filter(|_| !is_connection || mad.is_connection());
        let Some(message) = message else {
            if is_connection {
                let reason = RejectReason::INVALID_SERVICE_ID.0 as u8;
                self.put(both, Mad::reject(&between, About::Request, reason));
            }
            return;
        };
        conversation.remote_qpn = message.qp_num;
        conversation.request = Some(Box::new(message));
        let place = (message.space, message.to().port());
        let reached = self.ports.connect_here(place);
        if let Ok(Some(socket)) = reached {
            if self.conversations.len() >= LIMIT {
                return;
            }
            send(&socket, &message);
            conversation.socket = Some(socket);
            if is_connection {
                let received = Mad::received(&between, About::Request, SERVICE_TIMEOUT);
                conversation.last = Some(received);
            }
            self.add(number, conversation);
            return self.say(number);
        }
        // A full backlog is an error.
        let nobody = reached.is_ok();
        let mad = if is_connection {
            let reason = match nobody {
                true => RejectReason::INVALID_SERVICE_ID,
                false => RejectReason::CONSUMER_DEFINED,
            };
            Mad::reject(&between, About::Request, reason.0 as u8)
        } else {
            let mut reply = conversation.reply_to(Message::new(Kind::ServiceReply, &[]));
            reply.reason = match nobody {
                true => SidrStatus::UNSUPPORTED.0 as u8,
                false => SidrStatus::REJECT.0 as u8,
            };
            Mad::of(Kind::ServiceReply, &reply, &between)
        };
        self.put(both, mad);
    }

    /// Returns the conversation that a peer has begun with a number of its own.
    fn asked_by(&self, source: IpAddr, sender: u32) -> Option<u32> {
        let mut all = self.conversations.iter();
        let found =
            all.find(|(_, it)| it.is_asked() && it.remote == source && it.remote_id == sender);
        found.map(|it| *it.0)
    }

    /// Handles a message that is about an earlier one.
    fn answered(&mut self, (source, destination): (IpAddr, IpAddr), mad: &Mad) {
        let mut number = mad.receiver_id();
        // The peer withdraws a request before it was answered.
        if number == 0 && mad.attribute == Attribute::Reject {
            number = self.asked_by(source, mad.sender_id()).unwrap_or(0);
        }
        let found = self.conversations.get_mut(&number);
        let Some(conversation) = found.filter(|it| it.remote == source) else {
            // The peer does not know that the connection has ended.
            if mad.attribute == Attribute::Disconnect {
                let between = Between {
                    transaction: mad.transaction(),
                    local_id: number,
                    remote_id: mad.sender_id(),
                    guid: self.guid,
                    ack_timeout: 0,
                };
                let message = Message::new(Kind::Disconnected, &[]);
                let mad = Mad::of(Kind::Disconnected, &message, &between);
                self.put((destination, source), mad);
            }
            return;
        };
        let Some((kind, message)) = mad.message(source) else {
            if mad.attribute == Attribute::Received && conversation.is_asking() {
                if conversation.phase == Phase::RequestSent {
                    conversation.remote_id = mad.sender_id();
                }
                let wait = ack_wait(mad.service_timeout()).unwrap_or(0);
                let wait = Duration::from_nanos(wait).min(Duration::from_secs(90));
                conversation.due = Some(Instant::now() + wait.max(FIRST));
            }
            return;
        };
        let between = conversation.between(number, self.guid);
        let then = conversation.heard(kind, message, mad, &between);
        self.go_on(number, then);
        if self
            .conversations
            .get(&number)
            .is_some_and(|it| it.must_repeat(kind))
        {
            self.say(number);
        }
    }
}

impl Conversation {
    fn new(phase: Phase, socket: Option<OwnedFd>) -> Self {
        Self {
            phase,
            socket,
            local: [0; 4].into(),
            remote: [0; 4].into(),
            remote_id: 0,
            transaction: random(),
            remote_qpn: 0,
            request: None,
            last: None,
            due: None,
            repeated: 0,
        }
    }

    fn between(&self, number: u32, guid: u64) -> Between {
        Between {
            transaction: self.transaction,
            local_id: number,
            remote_id: self.remote_id,
            guid,
            ack_timeout: ACK_TIMEOUT,
        }
    }

    /// Returns whether the peer has begun it.
    fn is_asked(&self) -> bool {
        self.request.is_some()
    }

    /// Returns whether it waits for an answer.
    fn is_asking(&self) -> bool {
        matches!(
            self.phase,
            Phase::RequestSent
                | Phase::ReplySent
                | Phase::DisconnectSent
                | Phase::ServiceRequestSent
        )
    }

    /// Makes it only answer what is repeated, for a while.
    fn end(&mut self) {
        self.phase = Phase::Ended;
        self.socket = None;
        self.due = Some(Instant::now() + LINGER);
    }

    /// Completes a reply to a request for a service.
    fn reply_to(&self, mut reply: Message) -> Message {
        if let Some(request) = &self.request {
            reply = reply.between(request.to(), request.to());
            reply.space = request.space;
        }
        reply
    }

    fn tell(&self, message: &Message) {
        if let Some(socket) = &self.socket {
            send(socket, message);
        }
    }

    /// Handles a message of the id.
    fn said(&mut self, kind: Kind, message: Box<Message>, between: &Between) -> Then {
        let mad = |message: &Message| Mad::of(kind, message, between);
        match (self.phase, kind) {
            (Phase::Dialed, Kind::Request | Kind::ServiceRequest) => {
                (self.local, self.remote) = (message.from().ip(), message.to().ip());
                let phase = match kind {
                    Kind::Request => Phase::RequestSent,
                    _ => Phase::ServiceRequestSent,
                };
                Then::Ask(kind, message, phase)
            }
            (Phase::RequestReceived, Kind::Reply) => Then::Ask(kind, message, Phase::ReplySent),
            (Phase::RequestReceived, Kind::Reject) => {
                Then::Answer(mad(&message).about(About::Request), Phase::Ended)
            }
            (Phase::ReplyReceived, Kind::Reject) => {
                Then::Answer(mad(&message).about(About::Reply), Phase::Ended)
            }
            (Phase::ReplyReceived, Kind::Ready) => Then::Answer(mad(&message), Phase::Established),
            // The peer's acknowledgement was lost, but not its data.
            (Phase::Established | Phase::ReplySent, Kind::Disconnect) => {
                Then::Ask(kind, message, Phase::DisconnectSent)
            }
            (Phase::DisconnectReceived, Kind::Disconnected) => {
                Then::Answer(mad(&message), Phase::Ended)
            }
            (Phase::ServiceRequestReceived, Kind::ServiceReply) => {
                Then::Answer(mad(&self.reply_to(*message)), Phase::Ended)
            }
            _ => Then::Nothing,
        }
    }

    /// Handles a message of the peer, which answers or ends something.
    fn heard(&mut self, kind: Kind, message: Message, mad: &Mad, between: &Between) -> Then {
        match (self.phase, kind) {
            (Phase::RequestSent, Kind::Reply) => {
                self.remote_id = mad.sender_id();
                self.remote_qpn = message.qp_num;
                self.phase = Phase::ReplyReceived;
                (self.last, self.due) = (None, None);
                self.tell(&message);
            }
            (
                Phase::RequestSent
                | Phase::RequestReceived
                | Phase::ReplyReceived
                | Phase::ReplySent,
                Kind::Reject,
            ) => {
                self.tell(&message);
                self.end();
            }
            (Phase::ReplySent, Kind::Ready) => {
                self.phase = Phase::Established;
                self.due = None;
                self.tell(&message);
            }
            (Phase::ReplySent | Phase::Established, Kind::Disconnect) => {
                self.phase = Phase::DisconnectReceived;
                self.transaction = mad.transaction();
                (self.last, self.due) = (None, None);
                self.tell(&message);
            }
            (Phase::DisconnectSent, Kind::Disconnected) => {
                self.tell(&message);
                self.last = None;
                self.end();
            }
            (Phase::DisconnectSent | Phase::Ended, Kind::Disconnect) => {
                self.tell(&message);
                let between = Between {
                    transaction: mad.transaction(),
                    ..*between
                };
                let answer = Message::new(Kind::Disconnected, &[]);
                let answer = Mad::of(Kind::Disconnected, &answer, &between);
                return Then::Answer(answer, Phase::Ended);
            }
            (Phase::ServiceRequestSent, Kind::ServiceReply) => {
                self.tell(&message);
                self.end();
            }
            _ => {}
        }
        Then::Nothing
    }

    /// Returns whether a message shows that the peer has not received the last one.
    fn must_repeat(&self, kind: Kind) -> bool {
        let last = self.last.as_ref().map(|mad| mad.attribute);
        matches!(
            (kind, self.phase, last),
            (Kind::Reply, Phase::Established, Some(Attribute::Ready))
                | (Kind::Reply, Phase::Ended, Some(Attribute::Reject))
        )
    }
}

/// Gives the gateway a message of another host, with valid headers and numbers that
/// exist, and lets a listening id answer: for tests and fuzzing.
#[cfg(any(test, feature = "test-utils"))]
pub(crate) fn hostile_messages(
    manager: &super::Manager,
    gateway: &mut Gateway,
    flags: u8,
    script: &[u8],
) {
    let peer = IpAddr::from([192, 0, 2, 2 + (flags >> 6)]);
    let own = IpAddr::from([192, 0, 2, 1]);
    let mut bytes = [0; super::mad::SIZE];
    for (to, from) in bytes.iter_mut().zip(script) {
        *to = *from;
    }
    if flags & 4 != 0 {
        // A message of this class, to a conversation that exists, from few numbers.
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        (bytes[16], bytes[17]) = (0, 0x10 + bytes[17] % 9);
        let known = gateway.conversations.keys().nth((flags >> 3 & 7).into());
        if bytes[17] != 0x10 && bytes[17] != 0x17 {
            let number = known.copied().unwrap_or(1).to_be_bytes();
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
        let taken = ports.take(space, 7471).ok()?;
        Some((taken.listen(4).ok()?, taken))
    });
    gateway.receive(peer, own, &bytes);
    for (listener, _) in listening.iter().flatten() {
        let Ok(Some(id)) = ports.accept(listener) else {
            continue;
        };
        let kinds = [
            Kind::Reply,
            Kind::Reject,
            Kind::ServiceReply,
            Kind::Disconnect,
        ];
        let kind = kinds[usize::from(flags >> 4 & 3)];
        send(&id, &Message::new(kind, &[]));
        gateway.turn();
    }
    gateway.turn();
    // A conversation that the program begins.
    if flags & 8 != 0 {
        if let Ok(Some(socket)) = manager.lock().ports.connect((0x106, 1)) {
            let message =
                Message::new(Kind::Request, &[]).between((own, 5).into(), (peer, 6).into());
            send(&socket, &message);
            gateway.turn();
            gateway.turn();
        }
    }
    assert!(gateway.conversations.len() <= LIMIT && gateway.outgoing.len() <= LIMIT);
    while let Some(outgoing) = gateway.pop() {
        assert!(Mad::parse(&outgoing.bytes).is_some());
    }
}
