//! Why the peers of this process's queue pairs have failed work requests, and answers to peers
//! that ask the same.
//!
//! ```text
//!  observer ── ask ──► asked ── question ──► outgoing ──► wire ──► the peer's queue pair 1
//!                        ▲                                                 │
//!        handler ◄── answers ◄───────────────── wire ◄─────────────────────┤
//!        handler ◄── questions, if from the queue pair's own peer ◄────────┘
//! ```
//!
//! The agent receives with the wire locked, perhaps by a thread that has a device locked. What
//! has arrived therefore waits for [`Reasons::turn`], which whoever drives the network calls.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use roce::packet::{Link, Path, ip_of_gid};
use roce::transport::{self, Failure, Response};
use softhca::Connection;
use softhca::cause::WorkRequest;

use crate::cm::Manager;
use crate::management::{DropCause, DropLog, ReasonDrop};
use crate::random::random;
use crate::runtime::device::Device;
use crate::wires::agent::{MAD_SIZE, ManagementAgent, MemberEnd, Outgoing, Peer, PortAddress};
use crate::wires::reason_datagram::{
    Body, MAX_REASON, PeerFailure, ReasonDatagram, part_at, printable, receiver_of,
};
use crate::wires::segment::member_of_path;
use crate::wires::udp::QPN_BITS;

/// Maximum number of questions that wait for answers, and of datagrams that wait for a turn.
const MAX_ASKED: usize = 64;
const MAX_WAITING: usize = 64;
/// Time after which a question is repeated, and how often it is asked.
const REPEAT: Duration = Duration::from_millis(40);
const TRIES: u8 = 6;
/// Number of questions that are answered at once, and the time after which there may be one
/// more.
const BURST: usize = 64;
const REFILL: Duration = Duration::from_millis(10);

/// Tells the peers of a device's queue pairs why it has failed their requests, and is told what
/// they say.
///
/// It is called by whoever drives the network, without the device's lock. It must not wait.
pub trait ReasonHandler: Send + Sync {
    /// Returns why a queue pair has failed the last request of its peer in this way; `None` if
    /// it has not. The peer reads the first 864 bytes.
    fn reason(&self, qpn: u32, failure: PeerFailure) -> Option<String>;

    /// Called once for each question ([`Embedded::ask_peer`](crate::Embedded::ask_peer)): with
    /// what the peer of a queue pair said, printable ASCII, or `None` if it did not answer.
    fn answered(&self, qpn: u32, reason: Option<&str>);
}

impl PeerFailure {
    /// Returns what the peer of a queue pair has done, if a work request failed by it.
    #[must_use]
    pub fn of_requester(failure: &Failure) -> Option<Self> {
        match failure {
            Failure::Refused(_) => Some(Self::Refused),
            Failure::RnrRetries { .. } => Some(Self::NotReady),
            Failure::Retries { .. } => Some(Self::Silent),
            _ => None,
        }
    }

    /// Returns how a request fails at the peer that meets this cause.
    #[must_use]
    pub fn of_responder(cause: &transport::Cause) -> Option<Self> {
        match cause {
            transport::Cause::Dropped(_) => Some(Self::Silent),
            transport::Cause::Refused(refusal) if refusal.is_retried() => Some(Self::NotReady),
            transport::Cause::Refused(refusal) => Some(match refusal.response() {
                Response::Nothing => Self::Silent,
                _ => Self::Refused,
            }),
            transport::Cause::Failed(_) => None,
        }
    }
}

/// Returns the queue pairs of a number that are of a connected service, with the numbers of
/// their devices.
type Connections<'a> = dyn Fn(u32) -> Vec<(usize, Connection)> + 'a;

/// How a network reaches peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Hosts; with the number of this process among those that share its addresses.
    Hosts(u8),
    /// Processes of a directory; with the number of this one.
    Directory(u16),
}

impl Reach {
    /// Returns who has the other end of a path.
    fn peer_of(self, path: &Path) -> Option<Peer> {
        match self {
            Self::Hosts(_) => path.grh.map(|grh| Peer::Host {
                local: ip_of_gid(grh.sgid),
                remote: ip_of_gid(grh.dgid),
            }),
            Self::Directory(_) => member_of_path(path).map(Peer::Member),
        }
    }
}

/// A question that waits for its answer.
struct Asked {
    transaction: u64,
    /// The device's number in the network.
    device: usize,
    qpn: u32,
    peer_qpn: u32,
    peer: Peer,
    port: PortAddress,
    failure: PeerFailure,
    /// The part of the answer that was received.
    text: Vec<u8>,
    tries: u8,
    due: Instant,
}

impl Asked {
    fn question(&self) -> Outgoing {
        let datagram = ReasonDatagram {
            transaction: self.transaction,
            to: self.peer_qpn,
            from: self.qpn,
            failure: self.failure,
            offset: self.text.len(),
            body: Body::Question,
        };
        Outgoing {
            to: self.peer,
            port: self.port,
            bytes: datagram.bytes(),
        }
    }
}

/// A datagram that has arrived.
struct Arrived {
    peer: Peer,
    bytes: [u8; MAD_SIZE],
}

/// The limit of answers.
struct Allowance {
    left: usize,
    since: Instant,
}

impl Allowance {
    /// Takes one, if one is left.
    fn take(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.since);
        let refill = elapsed.as_nanos() / REFILL.as_nanos();
        if refill != 0 {
            self.left = BURST.min(self.left + refill.min(BURST as u128) as usize);
            self.since = now;
        }
        let is_left = self.left != 0;
        self.left -= usize::from(is_left);
        is_left
    }
}

/// The state, which a lock guards.
struct Inner {
    handlers: Vec<(usize, Arc<dyn ReasonHandler>)>,
    asked: Vec<Asked>,
    /// Number of answers of which handlers are being told.
    telling: usize,
    arrived: VecDeque<Arrived>,
    outgoing: VecDeque<Outgoing>,
    allowance: Allowance,
}

/// The agent of queue pair 1 for reasons.
pub(crate) struct Reasons {
    reach: Reach,
    drops: Arc<DropLog>,
    inner: Mutex<Inner>,
    has_outgoing: AtomicBool,
    /// Datagrams have arrived.
    has_arrived: AtomicBool,
    /// Questions wait for answers.
    is_asking: AtomicBool,
    /// A question was asked since the last turn of the network's thread, which repeats it.
    needs_thread: AtomicBool,
}

impl Reasons {
    pub(crate) fn new(reach: Reach, drops: Arc<DropLog>) -> Self {
        Self {
            reach,
            drops,
            inner: Mutex::new(Inner {
                handlers: Vec::new(),
                asked: Vec::new(),
                telling: 0,
                arrived: VecDeque::new(),
                outgoing: VecDeque::new(),
                allowance: Allowance {
                    left: BURST,
                    since: Instant::now(),
                },
            }),
            has_outgoing: AtomicBool::new(false),
            has_arrived: AtomicBool::new(false),
            is_asking: AtomicBool::new(false),
            needs_thread: AtomicBool::new(false),
        }
    }

    /// Creates the agent of a network with a manager.
    pub(crate) fn of(reach: Reach, manager: &Manager) -> Arc<Self> {
        Arc::new(Self::new(reach, Arc::clone(manager.drops())))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drop_datagram(&self, cause: ReasonDrop) {
        self.drops.add(DropCause::Reason(cause));
    }

    /// Sets the handler of a device.
    pub(crate) fn set_handler(&self, device: usize, handler: Arc<dyn ReasonHandler>) {
        let handlers = &mut self.lock().handlers;
        handlers.retain(|(number, _)| *number != device);
        handlers.push((device, handler));
    }

    /// Asks the peer of a queue pair why it has failed a work request. Returns false if the
    /// peer cannot be asked, or too many questions wait.
    pub(crate) fn ask(&self, device: usize, work: &WorkRequest, failure: PeerFailure) -> bool {
        let (Some(path), Some(peer_qpn)) = (work.path.as_ref(), work.peer) else {
            return false;
        };
        let Some(peer) = self.reach.peer_of(path) else {
            return false;
        };
        if let (Peer::Host { local, remote }, Reach::Hosts(own)) = (peer, self.reach) {
            // A queue pair of this process, which would not answer if it does not exist.
            if local == remote && member_of_qpn(peer_qpn) == own {
                return false;
            }
        }
        let inner = &mut *self.lock();
        let knows = inner.handlers.iter().any(|(number, _)| *number == device);
        if !knows || inner.asked.len() >= MAX_ASKED {
            return false;
        }
        let asked = Asked {
            transaction: random(),
            device,
            qpn: work.qpn,
            peer_qpn,
            peer,
            port: port_of(path),
            failure,
            text: Vec::new(),
            tries: 1,
            due: Instant::now() + REPEAT,
        };
        self.send(inner, asked.question());
        inner.asked.push(asked);
        self.is_asking.store(true, Ordering::Relaxed);
        self.needs_thread.store(true, Ordering::Relaxed);
        true
    }

    /// Returns whether questions wait for answers, or the handler is being told one.
    pub(crate) fn is_waiting(&self) -> bool {
        let inner = self.lock();
        !inner.asked.is_empty() || inner.telling != 0
    }

    /// Returns whether something has arrived for the next turn. Costs a load.
    pub(crate) fn has_arrived(&self) -> bool {
        self.has_arrived.load(Ordering::Relaxed)
    }

    /// Returns whether the network's thread must take a turn.
    pub(crate) fn needs_thread(&self) -> bool {
        self.needs_thread.load(Ordering::Relaxed)
    }

    /// Sends a datagram, to this process itself at once.
    fn send(&self, inner: &mut Inner, datagram: Outgoing) {
        let own = match self.reach {
            Reach::Directory(own) => Some(Peer::Member(own)),
            // The wire knows its own addresses.
            Reach::Hosts(_) => None,
        };
        if Some(datagram.to) == own {
            let Outgoing { to, bytes, .. } = datagram;
            inner.arrived.push_back(Arrived { peer: to, bytes });
            self.has_arrived.store(true, Ordering::Relaxed);
        } else {
            inner.outgoing.push_back(datagram);
            self.has_outgoing.store(true, Ordering::Relaxed);
        }
    }

    /// Handles what has arrived in earlier turns, and repeats questions: called when the devices
    /// have processed the packets that arrived before. Returns whether there was anything, and
    /// the time until a question is repeated. Costs a load if there is nothing.
    pub(crate) fn turn(
        &self,
        devices: &[Arc<Device>],
        is_thread: bool,
    ) -> (bool, Option<Duration>) {
        if !self.has_arrived() && !self.is_asking.load(Ordering::Relaxed) {
            return (false, None);
        }
        if is_thread {
            self.needs_thread.store(false, Ordering::Relaxed);
        }
        let connections = |qpn| {
            let of_device = |device: &Arc<Device>| {
                let connection = device.lock_for_turn().hca.connection(qpn);
                connection.map(|it| (device.number(), it))
            };
            devices.iter().filter_map(of_device).collect()
        };
        self.turn_with(&connections, Instant::now())
    }

    fn turn_with(&self, connections: &Connections<'_>, now: Instant) -> (bool, Option<Duration>) {
        let mut busy = false;
        let count = self.lock().arrived.len();
        for _ in 0..count {
            let Some(arrived) = self.lock().arrived.pop_front() else {
                break;
            };
            busy = true;
            if let Err(cause) = self.handle(connections, &arrived, now) {
                self.drop_datagram(cause);
            }
        }
        let mut ended = Vec::new();
        let due = {
            let inner = &mut *self.lock();
            let mut at = 0;
            while let Some(asked) = inner.asked.get_mut(at) {
                if asked.due > now {
                    at += 1;
                } else if asked.tries < TRIES {
                    asked.tries += 1;
                    asked.due = now + REPEAT;
                    let question = asked.question();
                    self.send(inner, question);
                    busy = true;
                } else {
                    ended.push(inner.asked.swap_remove(at));
                    inner.telling += 1;
                }
            }
            let due = inner.asked.iter().map(|asked| asked.due).min();
            self.is_asking.store(due.is_some(), Ordering::Relaxed);
            let has_arrived = !inner.arrived.is_empty();
            self.has_arrived.store(has_arrived, Ordering::Relaxed);
            due.map(|due| due.saturating_duration_since(now))
        };
        for asked in ended {
            self.tell(&asked, None);
        }
        (busy, due)
    }

    /// Tells the handler the answer to a question that was taken from the list, and counted.
    fn tell(&self, asked: &Asked, reason: Option<&str>) {
        if let Some(handler) = self.handler(asked.device) {
            handler.answered(asked.qpn, reason);
        }
        self.lock().telling -= 1;
    }

    fn handler(&self, device: usize) -> Option<Arc<dyn ReasonHandler>> {
        let inner = self.lock();
        let mut handlers = inner.handlers.iter();
        let found = handlers.find(|(number, _)| *number == device);
        found.map(|(_, handler)| Arc::clone(handler))
    }

    fn handle(
        &self,
        connections: &Connections<'_>,
        arrived: &Arrived,
        now: Instant,
    ) -> Result<(), ReasonDrop> {
        let datagram = ReasonDatagram::parse(&arrived.bytes)?;
        match datagram.body {
            Body::Question => self.answer(connections, arrived.peer, &datagram, now),
            Body::Answer { length, part } => self.accept(arrived.peer, &datagram, length, part),
            Body::Unsupported => self.accept(arrived.peer, &datagram, 0, &[]),
        }
    }

    /// Answers a question, if it is asked by the peer of the queue pair.
    fn answer(
        &self,
        connections: &Connections<'_>,
        peer: Peer,
        question: &ReasonDatagram<'_>,
        now: Instant,
    ) -> Result<(), ReasonDrop> {
        let qpn = question.to;
        let is_peer = |(_, connection): &(usize, Connection)| {
            connection.path.is_none_or(|path| {
                connection.peer == question.from && self.reach.peer_of(&path) == Some(peer)
            })
        };
        let found = connections(qpn).into_iter().find(is_peer);
        let (device, Connection { path, state, .. }) = found.ok_or(ReasonDrop::NotPeer { qpn })?;
        let handler = self.handler(device).ok_or(ReasonDrop::NotShared)?;
        if !self.lock().allowance.take(now) {
            return Err(ReasonDrop::TooMany(BURST));
        }
        let reason = match path {
            Some(_) => handler.reason(qpn, question.failure).unwrap_or_default(),
            // Whoever asks may be the peer that it gets. What it did before is not told.
            None => format!("queue pair {qpn:#x} is in {state}, and connected to no peer"),
        };
        let reason = reason.as_bytes();
        let part = part_at(reason, question.offset);
        // Nothing, if the reason has changed and ends before the offset.
        let (length, offset) = match part.is_empty() {
            true => (0, 0),
            false => (reason.len().min(MAX_REASON), question.offset),
        };
        let answer = ReasonDatagram {
            to: question.from,
            from: qpn,
            offset,
            body: Body::Answer { length, part },
            ..*question
        };
        let datagram = Outgoing {
            to: peer,
            port: path.as_ref().map(port_of).unwrap_or_default(),
            bytes: answer.bytes(),
        };
        self.send(&mut self.lock(), datagram);
        Ok(())
    }

    /// Handles an answer.
    fn accept(
        &self,
        peer: Peer,
        answer: &ReasonDatagram<'_>,
        length: usize,
        part: &[u8],
    ) -> Result<(), ReasonDrop> {
        let asked = {
            let inner = &mut *self.lock();
            let is_for = |asked: &Asked| {
                asked.transaction == answer.transaction
                    && asked.peer == peer
                    && asked.qpn == answer.to
                    && asked.peer_qpn == answer.from
            };
            let at = inner.asked.iter().position(is_for);
            let at = at.ok_or(ReasonDrop::Unasked)?;
            let asked = &mut inner.asked[at];
            if length != 0 && asked.text.len() != answer.offset {
                // It has arrived before.
                return Err(ReasonDrop::Unasked);
            }
            asked.text.extend_from_slice(part);
            if asked.text.len() < length {
                (asked.tries, asked.due) = (1, Instant::now() + REPEAT);
                let question = asked.question();
                self.send(inner, question);
                return Ok(());
            }
            inner.telling += 1;
            inner.asked.swap_remove(at)
        };
        let reason = (!asked.text.is_empty()).then(|| printable(&asked.text));
        self.tell(&asked, reason.as_deref());
        Ok(())
    }
}

impl ManagementAgent for Reasons {
    fn has_outgoing(&self) -> bool {
        self.has_outgoing.load(Ordering::Relaxed)
    }

    fn pop(&self) -> Option<Outgoing> {
        let mut inner = self.lock();
        let next = inner.outgoing.pop_front();
        let is_left = !inner.outgoing.is_empty();
        self.has_outgoing.store(is_left, Ordering::Relaxed);
        next
    }

    fn receive(&self, peer: Peer, _: PortAddress, bytes: &[u8]) {
        let Ok(bytes) = bytes.try_into() else {
            return self.drop_datagram(ReasonDrop::Format);
        };
        let mut inner = self.lock();
        if inner.handlers.is_empty() {
            return self.drop_datagram(ReasonDrop::NotShared);
        }
        if inner.arrived.len() >= MAX_WAITING {
            return self.drop_datagram(ReasonDrop::TooMany(MAX_WAITING));
        }
        inner.arrived.push_back(Arrived { peer, bytes });
        self.has_arrived.store(true, Ordering::Relaxed);
    }

    fn close(&self) {}

    fn add_address(&self, _: IpAddr) {}

    fn other_member(&self, _: IpAddr, bytes: &[u8]) -> Option<u8> {
        let Reach::Hosts(own) = self.reach else {
            return None;
        };
        let member = member_of_qpn(receiver_of(bytes)?);
        (member != own).then_some(member)
    }

    /// The question is repeated.
    fn handle_refusal(&self, _: Peer, _: &[u8]) -> Option<Duration> {
        None
    }

    fn end_host(&self, _: Peer, _: Duration) {}

    fn end_member(&self, _: u16, _: MemberEnd) {}
}

/// Returns whether two paths are those of the two ends of a connection.
pub(crate) fn are_opposite(a: &Path, b: &Path) -> bool {
    match (a.grh, b.grh) {
        (Some(a), Some(b)) => a.sgid == b.dgid && a.dgid == b.sgid,
        _ => match (a.link, b.link) {
            (
                Link::Ib { slid, dlid, .. },
                Link::Ib {
                    slid: source,
                    dlid: destination,
                    ..
                },
            ) => slid == destination && dlid == source,
            _ => false,
        },
    }
}

/// Returns the number of the process that has a queue pair, among those that share an address.
fn member_of_qpn(qpn: u32) -> u8 {
    (qpn >> QPN_BITS) as u8
}

/// Returns the port from which packets of a path leave.
fn port_of(path: &Path) -> PortAddress {
    let lid = match path.link {
        Link::Ib { slid, .. } => slid,
        _ => 0,
    };
    PortAddress {
        ethernet: !matches!(path.link, Link::Ib { .. }),
        gid: path.grh.map(|grh| grh.sgid).unwrap_or_default(),
        lid,
    }
}

/// Datagrams of a hostile peer, for tests and fuzzing.
#[cfg(any(test, feature = "test-utils"))]
pub(crate) mod hostile {
    use std::net::Ipv4Addr;

    use roce::packet::gid_of_ipv4;
    use roce::transport::QpState;

    use super::*;

    pub(crate) const OWN: [u8; 4] = [192, 0, 2, 1];
    pub(crate) const PEER: [u8; 4] = [192, 0, 2, 2];
    pub(crate) const QPN: u32 = 0x41;
    pub(crate) const PEER_QPN: u32 = 0x52;
    /// A queue pair in INIT.
    pub(crate) const NEW_QPN: u32 = 0x43;
    pub(crate) const REASON: &str = "the key does not permit it";

    pub(crate) fn host(remote: [u8; 4]) -> Peer {
        Peer::Host {
            local: Ipv4Addr::from(OWN).into(),
            remote: Ipv4Addr::from(remote).into(),
        }
    }

    pub(crate) fn path() -> Path {
        Path::ip(gid_of_ipv4(OWN), gid_of_ipv4(PEER))
    }

    /// The queue pairs of the device.
    pub(crate) fn connections(qpn: u32) -> Vec<(usize, Connection)> {
        let (state, path) = match qpn {
            QPN => (QpState::ReadyToSend, Some(path())),
            NEW_QPN => (QpState::Init, None),
            _ => return Vec::new(),
        };
        let connection = Connection {
            state,
            peer: PEER_QPN,
            path,
        };
        vec![(0, connection)]
    }

    pub(crate) fn work() -> WorkRequest {
        WorkRequest {
            qpn: QPN,
            service: transport::Service::Rc,
            number: Some(0),
            operation: Some(transport::Operation::Write),
            length: 8,
            buffers: Default::default(),
            buffer_count: 0,
            remote: Some((64, 3)),
            peer: Some(PEER_QPN),
            path: Some(path()),
            is_loopback: false,
            is_malformed: false,
        }
    }

    /// Keeps what it is told.
    #[derive(Default)]
    pub(crate) struct Kept(pub(crate) Mutex<Vec<Option<String>>>);

    impl ReasonHandler for Kept {
        fn reason(&self, qpn: u32, _: PeerFailure) -> Option<String> {
            assert_eq!(qpn, QPN);
            Some(REASON.repeat(40))
        }

        fn answered(&self, qpn: u32, reason: Option<&str>) {
            assert_eq!(qpn, QPN);
            if let Some(reason) = reason {
                assert!(reason.len() <= MAX_REASON && reason.bytes().all(|it| it >= b' '));
            }
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push(reason.map(str::to_owned));
        }
    }

    /// Receives datagrams: each of a byte of flags and up to 256 bytes.
    ///
    /// # Panics
    /// If more is sent than was received, to another than the peer, or bounds are passed.
    pub(crate) fn receive(script: &[u8]) {
        let reasons = Reasons::new(Reach::Hosts(0), Arc::default());
        reasons.set_handler(0, Arc::new(Kept::default()));
        // Before all questions, so that none is repeated.
        let start = Instant::now();
        let mut allowed = 0;
        for message in script.chunks(MAD_SIZE + 1) {
            let [flags, content @ ..] = message else {
                break;
            };
            let mut bytes = [0; MAD_SIZE];
            bytes[..content.len()].copy_from_slice(content);
            if flags & 1 != 0 && reasons.ask(0, &work(), PeerFailure::Refused) {
                allowed += 1;
            }
            let transaction = reasons.lock().asked.last().map(|asked| asked.transaction);
            if flags & 2 != 0 {
                // Of the right form, for a known queue pair.
                let question = ReasonDatagram {
                    transaction: transaction.unwrap_or_default(),
                    to: [QPN, NEW_QPN][usize::from(flags >> 2 & 1)],
                    from: PEER_QPN,
                    failure: PeerFailure::Silent,
                    offset: 0,
                    body: Body::Question,
                };
                let form = question.bytes();
                let kept = [3, 36, 37, 38, 39].map(|at| (at, bytes[at] & 0x83));
                bytes[..36].copy_from_slice(&form[..36]);
                kept.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            }
            let peer = host(if flags & 8 == 0 { PEER } else { [192, 0, 2, 3] });
            reasons.receive(peer, PortAddress::default(), &bytes);
            allowed += 1;
            if flags & 16 != 0 {
                reasons.turn_with(&connections, start);
            }
            while let Some(sent) = reasons.pop() {
                allowed -= 1;
                assert!(allowed >= 0, "more is sent than was received");
                assert!(ReasonDatagram::parse(&sent.bytes).is_ok());
                let is_new = ReasonDatagram::parse(&sent.bytes).is_ok_and(|it| it.from == NEW_QPN);
                assert!(is_new || sent.to == host(PEER));
            }
            let inner = reasons.lock();
            assert!(inner.arrived.len() <= MAX_WAITING && inner.asked.len() <= MAX_ASKED);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::hostile::*;
    use super::*;

    fn created() -> (Reasons, Arc<Kept>) {
        let reasons = Reasons::new(Reach::Hosts(0), Arc::default());
        let kept = Arc::new(Kept::default());
        reasons.set_handler(0, Arc::clone(&kept) as _);
        reasons.drops.observe();
        (reasons, kept)
    }

    fn received(reasons: &Reasons, peer: Peer, bytes: &[u8]) {
        reasons.receive(peer, PortAddress::default(), bytes);
        reasons.turn_with(&connections, Instant::now());
    }

    fn dropped(reasons: &Reasons) -> Option<ReasonDrop> {
        match reasons.drops.next()? {
            DropCause::Reason(cause) => Some(cause),
            other => panic!("{other}"),
        }
    }

    /// Both ends: each part of a long reason is asked for.
    #[test]
    fn a_reason_is_pulled_in_parts() {
        let (asker, kept) = created();
        let (peer, _) = created();
        assert!(asker.ask(0, &work(), PeerFailure::Refused) && asker.needs_thread());
        let mut questions = 0;
        while let Some(question) = asker.pop() {
            questions += 1;
            assert_eq!(question.to, host(PEER));
            // Both ends have the same numbers here.
            let mut read = ReasonDatagram::parse(&question.bytes).unwrap();
            (read.to, read.from) = (QPN, PEER_QPN);
            received(&peer, host(PEER), &read.bytes());
            let answer = peer.pop().unwrap();
            assert!(peer.pop().is_none());
            let mut read = ReasonDatagram::parse(&answer.bytes).unwrap();
            (read.to, read.from) = (QPN, PEER_QPN);
            received(&asker, host(PEER), &read.bytes());
        }
        assert_eq!(questions, 4);
        let reason = REASON.repeat(40)[..MAX_REASON].to_owned();
        assert_eq!(*kept.0.lock().unwrap(), [Some(reason)]);
        assert!(!asker.is_waiting());
    }

    #[test]
    pub(crate) fn forged_answers_are_dropped() {
        let (reasons, kept) = created();
        assert!(reasons.ask(0, &work(), PeerFailure::Refused));
        let question = reasons.pop().unwrap();
        let question = ReasonDatagram::parse(&question.bytes).unwrap();
        let answer = ReasonDatagram {
            to: QPN,
            from: PEER_QPN,
            body: Body::Answer {
                length: 9,
                part: b"all\x1b[2J\x80\n",
            },
            ..question
        };
        let other = [192, 0, 2, 3];
        let forged = |datagram: ReasonDatagram<'_>, peer| {
            received(&reasons, host(peer), &datagram.bytes());
            assert_eq!(dropped(&reasons), Some(ReasonDrop::Unasked));
            assert!(kept.0.lock().unwrap().is_empty());
        };
        forged(answer, other);
        let transaction = answer.transaction ^ 1;
        forged(
            ReasonDatagram {
                transaction,
                ..answer
            },
            PEER,
        );
        forged(ReasonDatagram { from: 7, ..answer }, PEER);
        forged(ReasonDatagram { to: 7, ..answer }, PEER);
        received(&reasons, host(PEER), &answer.bytes());
        // Control characters are replaced.
        assert_eq!(*kept.0.lock().unwrap(), [Some("all?[2J??".to_owned())]);
    }

    /// Returns a question of the queue pair's peer.
    fn question() -> ReasonDatagram<'static> {
        ReasonDatagram {
            transaction: 1,
            to: QPN,
            from: PEER_QPN,
            failure: PeerFailure::Refused,
            offset: 0,
            body: Body::Question,
        }
    }

    #[test]
    pub(crate) fn only_the_peer_of_a_queue_pair_is_answered() {
        let (reasons, _) = created();
        let question = question();
        let refused = |datagram: ReasonDatagram<'_>, peer, qpn| {
            received(&reasons, host(peer), &datagram.bytes());
            assert_eq!(dropped(&reasons), Some(ReasonDrop::NotPeer { qpn }));
            assert!(reasons.pop().is_none());
        };
        refused(question, [192, 0, 2, 3], QPN);
        refused(
            ReasonDatagram {
                from: 7,
                ..question
            },
            PEER,
            QPN,
        );
        refused(ReasonDatagram { to: 9, ..question }, PEER, 9);
        received(&reasons, host(PEER), &question.bytes());
        assert_eq!(reasons.pop().map(|it| it.to), Some(host(PEER)));
        // One that is not connected says that, and nothing else.
        let to = NEW_QPN;
        received(
            &reasons,
            host(PEER),
            &ReasonDatagram { to, ..question }.bytes(),
        );
        let answer = reasons.pop().unwrap();
        let Body::Answer { part, .. } = ReasonDatagram::parse(&answer.bytes).unwrap().body else {
            panic!("{answer:?}");
        };
        assert_eq!(
            part,
            b"queue pair 0x43 is in INIT, and connected to no peer"
        );
    }

    #[test]
    pub(crate) fn what_is_no_question_is_dropped() {
        let (reasons, _) = created();
        let short = question().bytes()[..100].to_vec();
        reasons.receive(host(PEER), PortAddress::default(), &short);
        assert_eq!(dropped(&reasons), Some(ReasonDrop::Format));
        let quiet = Reasons::new(Reach::Hosts(0), Arc::default());
        quiet.drops.observe();
        quiet.receive(host(PEER), PortAddress::default(), &question().bytes());
        assert_eq!(dropped(&quiet), Some(ReasonDrop::NotShared));
    }

    #[test]
    pub(crate) fn floods_are_limited() {
        let (reasons, kept) = created();
        let question = question();
        let bytes = question.bytes();
        for _ in 0..MAX_WAITING + 10 {
            reasons.receive(host(PEER), PortAddress::default(), &bytes);
        }
        assert_eq!(dropped(&reasons), Some(ReasonDrop::TooMany(MAX_WAITING)));
        let start = Instant::now();
        reasons.turn_with(&connections, start);
        for _ in 0..5 {
            reasons.receive(host(PEER), PortAddress::default(), &bytes);
            reasons.turn_with(&connections, start);
        }
        let sent = |reasons: &Reasons| std::iter::from_fn(|| reasons.pop()).count();
        assert_eq!(sent(&reasons), BURST);
        reasons.receive(host(PEER), PortAddress::default(), &bytes);
        reasons.turn_with(&connections, start + REFILL);
        assert_eq!(sent(&reasons), 1);
        let asked = std::iter::repeat_with(|| reasons.ask(0, &work(), PeerFailure::Silent));
        assert_eq!(
            asked.take(MAX_ASKED + 9).filter(|it| *it).count(),
            MAX_ASKED
        );
        assert!(kept.0.lock().unwrap().is_empty());
    }

    /// A question is repeated, and ends without an answer.
    #[test]
    fn silence_is_told_once() {
        let (reasons, kept) = created();
        assert!(reasons.ask(0, &work(), PeerFailure::Silent));
        let mut now = Instant::now();
        let mut sent = 0;
        while reasons.is_waiting() {
            assert!(kept.0.lock().unwrap().is_empty());
            sent += std::iter::from_fn(|| reasons.pop()).count();
            now += REPEAT;
            reasons.turn_with(&connections, now);
        }
        assert_eq!(sent, usize::from(TRIES));
        assert_eq!(*kept.0.lock().unwrap(), [None]);
        assert_eq!(reasons.turn(&[], true), (false, None));
        assert!(
            !reasons.ask(1, &work(), PeerFailure::Silent),
            "of no handler"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_datagrams_are_handled(
            script in proptest::collection::vec(any::<u8>(), 0..3000),
        ) {
            hostile::receive(&script);
        }
    }
}
