//! The InfiniBand transport: queue pairs as state machines that exchange packets.
//!
//! The transport does no input or output, reads no clock and starts no thread. Packets
//! and the time (nanoseconds from any origin) are passed in; packets and the time of
//! the next timer are returned; memory and queues are accessed through [`Host`]. The
//! same sequence of calls gives the same results.
//!
//! | file | contents |
//! |---|---|
//! | `state` | state of requester, responder and DC between packets |
//! | `requester` | work requests to request packets: segmentation, window, fences |
//! | `completer` | acknowledgements, NAKs, read responses, retries, timers |
//! | `recovery` | losses, before a timeout |
//! | `congestion` | congestion marks, and the rate and window that depend on them and on losses |
//! | `responder` | requests in order, duplicates, responses |
//! | `datagram` | UD |
//! | `cause` | why a packet was dropped, a request refused, or a work request failed |
//! | `loopback` | requests to a queue pair of the same HCA, without packets |
//! | `dynamic` | DC: requester and responder with peers that change |
//!
//! The loop of an HCA calls [`Transport::ring`] for doorbells, [`Transport::receive`]
//! for frames, [`Transport::run`], [`Transport::pop`] until it is empty, and sleeps
//! until [`Transport::deadline`]. In the steady state nothing is allocated: packets
//! come from a [`Pool`], and queues keep their capacity.

mod cause;
mod completer;
mod config;
mod congestion;
mod datagram;
mod describe;
mod dynamic;
mod host;
#[cfg(any(test, feature = "test-utils"))]
pub mod hostile;
mod io;
mod loopback;
#[cfg(any(test, feature = "test-utils"))]
pub mod model;
mod qp;
mod recovery;
mod requester;
mod responder;
mod state;
mod table;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::sync::Arc;

pub use cause::{Cause, DropCause, EngineError, Failure, Refusal, Response};
pub use config::{QpConfig, QpState, QpView, Service, ack_wait, rnr_wait};
pub use host::{
    Access, AtomicOp, Counted, Datagram, Fault, Fence, Host, MessageStart, Operation, QpEvent,
    RecvDone, RecvKind, RecvWork, SendDone, SendWork, Source, Status, Target,
};
pub use io::Counters;

use crate::fabric::Port;
use crate::packet::{CNP, Gid, MULTICAST_QPN, Mtu, Packet, ParseError, Pool, View};
use io::Io;
use qp::Qp;
use recovery::FollowUp;
use requester::Step;
use table::Table;

/// Steps that one queue pair takes before the next one is served.
const TURN: usize = 32;
/// Entries of the timer heap beyond two for each queue pair at which stale ones are
/// removed.
const SPARE_TIMERS: usize = 64;

/// The queue that a doorbell is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// The send queue.
    Send,
    /// The receive queue. Its doorbell has an effect only in the error state, where the
    /// posted work requests are flushed.
    Receive,
}

/// Reason for which a queue pair number was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpError {
    /// A queue pair of this number exists already.
    Exists,
    /// No queue pair has this number.
    Unknown,
}

impl fmt::Display for QpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exists => "a queue pair of this number exists already",
            Self::Unknown => "no queue pair has this number",
        })
    }
}

impl std::error::Error for QpError {}

/// The transport of one HCA: its queue pairs.
pub struct Transport<L> {
    qps: Table<Box<Qp<L>>>,
    io: Io,
    ready: VecDeque<u32>,
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    groups: Vec<(Gid, u32)>,
    aliases: [Option<u32>; 2],
    lossy: bool,
    /// The port of this HCA, if loopback requests may be executed without packets.
    home: Option<Arc<Port>>,
}

impl<L> Transport<L> {
    /// Creates a transport without queue pairs.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self {
            qps: Table::default(),
            io: Io {
                pool,
                out: VecDeque::new(),
                senders: None,
                counters: Counters::default(),
                now: 0,
                patient: false,
                payload: vec![0; Mtu::B4096.bytes() as usize].into_boxed_slice(),
                confirmed: false,
                refusing: Vec::new(),
                kept: Arc::default(),
            },
            lossy: false,
            home: None,
            ready: VecDeque::new(),
            timers: BinaryHeap::new(),
            groups: Vec::new(),
            aliases: [None; 2],
        }
    }

    /// Creates a queue pair in the reset state.
    ///
    /// # Errors
    /// [`QpError::Exists`].
    pub fn create(&mut self, qpn: u32, config: QpConfig) -> Result<(), QpError> {
        let qpn = qpn & 0xff_ffff;
        if self.qps.contains_key(&qpn) {
            return Err(QpError::Exists);
        }
        let mut qp = Qp::new(qpn, config);
        qp.recovers = self.lossy
            && matches!(
                qp.config.service,
                Service::Rc | Service::XrcInitiator | Service::XrcTarget
            );
        qp.paces = qp.recovers || (self.lossy && qp.config.service == Service::Uc);
        self.qps.insert(qpn, Box::new(qp));
        Ok(())
    }

    /// Sets the state and all attributes of a queue pair. The caller decides which
    /// transitions are allowed. The transition to RTR takes `recv_psn`, that to RTS
    /// `send_psn`; RESET discards outstanding work requests, ERR completes them as
    /// flushed.
    ///
    /// # Errors
    /// [`QpError::Unknown`].
    pub fn modify<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        qpn: u32,
        to: QpState,
        config: QpConfig,
    ) -> Result<(), QpError> {
        let qp = self
            .qps
            .get_mut(&(qpn & 0xff_ffff))
            .ok_or(QpError::Unknown)?;
        qp.modify(host, to, config);
        qp.timers(host, &mut self.io, now);
        schedule(qp, &mut self.ready, &mut self.timers);
        Ok(())
    }

    /// Sets whether an expired local ACK timeout is restarted, up to 64 times without
    /// progress, instead of retransmitting and counting a retry. This is for networks with
    /// frames that were not read yet: a retransmission would only lengthen their queue.
    pub fn set_patient(&mut self, patient: bool) {
        self.io.patient = patient;
    }

    /// Makes queue pairs that are created from now on recover from losses before a
    /// timeout, by probes and by packets kept out of order, and control congestion. This is
    /// for networks that lose packets.
    pub fn set_lossy(&mut self, lossy: bool) {
        self.lossy = lossy;
    }

    /// Sets whether [`Transport::confirm_sent`] is called after packets were sent. A refused
    /// request then becomes known (by an error of a receive, an event, the state of the queue
    /// pair) when its NAK was sent: a program that ends at once does not take it along.
    pub fn set_confirmed(&mut self, confirmed: bool) {
        self.io.confirmed = confirmed;
    }

    /// Returns whether [`Transport::confirm_sent`] has something to do.
    #[must_use]
    pub fn awaits_confirmation(&self) -> bool {
        !self.io.refusing.is_empty()
    }

    /// Called when all packets that [`Transport::pop`] has returned were sent.
    pub fn confirm_sent<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        for qpn in self.io.refusing.drain(..) {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.end_refused(host);
                schedule(qp, &mut self.ready, &mut self.timers);
            }
        }
    }

    /// Sets the port of this HCA. Requests between two of its queue pairs are executed
    /// without packets as long as the port is [`Port::direct_loopback`]; with `None` never.
    pub fn set_loopback(&mut self, home: Option<Arc<Port>>) {
        self.home = home;
    }

    /// Sets whether the numbers of the queue pairs that make packets are recorded, for
    /// [`Transport::take_senders`].
    pub fn record_senders(&mut self, records: bool) {
        self.io.senders = records.then(VecDeque::new);
    }

    /// Returns the numbers of the queue pairs that have made the packets since the last call.
    pub fn take_senders(&mut self) -> impl Iterator<Item = u32> {
        let senders = self.io.senders.as_mut();
        senders.map(std::mem::take).into_iter().flatten()
    }

    /// Removes the queue pair at the other end, if the next request may be handed over to
    /// it.
    fn take_peer<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        qpn: u32,
    ) -> Option<Box<Qp<L>>> {
        if !self.qps.get_mut(&qpn)?.next_takes_no_receive(host) {
            return None;
        }
        let qp = self.qps.get(&qpn)?;
        let number = qp.config.remote_qpn;
        let peer = self.qps.get(&number).filter(|_| number != qpn)?;
        if !qp.pairs_with(peer) {
            return None;
        }
        let home = self.home.as_ref()?.direct_loopback()?;
        match qp.loops_back_to(peer, &home) {
            true => self.qps.remove(&number),
            false => None,
        }
    }

    /// Lets a stream of a DC initiator continue after an error. Returns whether it was
    /// in error.
    pub fn restore_stream(&mut self, qpn: u32, stream: u16) -> bool {
        self.qps
            .get_mut(&(qpn & 0xff_ffff))
            .is_some_and(|qp| qp.initiator.restore(stream))
    }

    /// Destroys a queue pair, without completions.
    pub fn destroy(&mut self, qpn: u32) {
        let qpn = qpn & 0xff_ffff;
        self.qps.remove(&qpn);
        self.groups.retain(|g| g.1 != qpn);
        for alias in &mut self.aliases {
            *alias = alias.filter(|a| *a != qpn);
        }
    }

    /// Returns the state of a queue pair.
    #[must_use]
    pub fn query(&self, qpn: u32) -> Option<QpView> {
        self.qps.get(&(qpn & 0xff_ffff)).map(|qp| qp.view())
    }

    /// Returns the attributes of a queue pair.
    #[must_use]
    pub fn config(&self, qpn: u32) -> Option<&QpConfig> {
        self.qps.get(&(qpn & 0xff_ffff)).map(|qp| &qp.config)
    }

    /// Sets the queue pair that receives packets sent to QP 0 or 1. Other numbers are
    /// ignored.
    pub fn alias(&mut self, wire: u32, qpn: Option<u32>) {
        if let Some(alias) = self.aliases.get_mut(wire as usize) {
            *alias = qpn.map(|q| q & 0xff_ffff);
        }
    }

    /// Attaches a queue pair to a multicast group.
    pub fn attach(&mut self, qpn: u32, group: Gid) {
        let entry = (group, qpn & 0xff_ffff);
        if !self.groups.contains(&entry) {
            self.groups.push(entry);
        }
    }

    /// Detaches a queue pair from a multicast group.
    pub fn detach(&mut self, qpn: u32, group: Gid) {
        self.groups.retain(|g| *g != (group, qpn & 0xff_ffff));
    }

    /// Rings the doorbell of a queue. Work is done by [`Transport::run`].
    #[inline]
    pub fn ring(&mut self, qpn: u32, queue: Queue) {
        if let Some(qp) = self.qps.get_mut(&(qpn & 0xff_ffff)) {
            match queue {
                Queue::Send => qp.send_rung = true,
                Queue::Receive => qp.recv_rung = true,
            }
            schedule(qp, &mut self.ready, &mut self.timers);
        }
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.io.counters
    }

    /// Processes a received frame. Returns the frame if it is not RDMA.
    pub fn receive<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        packet: Packet,
    ) -> Option<Packet> {
        let view = match View::parse_packet(&packet) {
            Ok(view) => view,
            Err(ParseError::NotRdma) => return Some(packet),
            Err(error) => {
                self.io.drop_packet(host, None, error.into());
                return None;
            }
        };
        let bytes = packet.frame().len() as u64;
        self.io.counters.packets_received += 1;
        self.io.counters.bytes_received += bytes;
        let (qpn, psn) = (view.bth.dest_qpn, view.bth.psn);
        let after = match qpn {
            MULTICAST_QPN => {
                self.io.counters.multicasts_received += 1;
                self.io.counters.multicast_bytes_received += bytes;
                self.multicast(host, now, &view);
                FollowUp::Nothing
            }
            0 | 1 => {
                let alias = self.aliases[qpn as usize].unwrap_or(qpn);
                self.deliver(host, now, alias, &view)
            }
            qpn => self.deliver(host, now, qpn, &view),
        };
        if after != FollowUp::Nothing {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                match after {
                    FollowUp::Keep => qp.resp.kept.keep(psn, packet, &self.io.kept),
                    _ => qp.release(host, &mut self.io),
                }
                schedule(qp, &mut self.ready, &mut self.timers);
            }
        }
        None
    }

    /// Returns whether a packet is the request that a queue pair of a reliable service executes
    /// next, so that [`Transport::refuse`] can refuse it.
    #[must_use]
    pub fn executes_next(&self, view: &View<'_>) -> bool {
        let qp = self.qps.get(&view.bth.dest_qpn);
        qp.is_some_and(|qp| qp.config.service != Service::DcTarget && qp.executes_next(view))
    }

    /// Refuses the request that is [next](Self::executes_next), for a fault that is
    /// injected.
    pub fn refuse<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, qpn: u32, refusal: Refusal) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.refuse_expected(host, &mut self.io, refusal);
            schedule(qp, &mut self.ready, &mut self.timers);
        }
    }

    fn multicast<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64, view: &View<'_>) {
        let Some(group) = view.network.dgid(view.frame) else {
            return self.io.drop_packet(host, None, DropCause::NoGroup);
        };
        for index in 0..self.groups.len() {
            let (gid, qpn) = self.groups[index];
            if gid == group {
                // Datagrams have no follow-up.
                let _: FollowUp = self.deliver(host, now, qpn, view);
            }
        }
    }

    /// Processes a packet for a queue pair.
    fn deliver<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        qpn: u32,
        view: &View<'_>,
    ) -> FollowUp {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            self.io
                .drop_packet(host, Some(qpn), DropCause::UnknownQp(qpn));
            return FollowUp::Nothing;
        };
        let processed = match qp.accepts(view) {
            Ok(()) => qp.packet(host, &mut self.io, now, view),
            Err(DropCause::Service { opcode: CNP, .. }) if qp.accepts_cnp(view) => {
                qp.process_cnp(&mut self.io, now);
                return FollowUp::Nothing;
            }
            Err(cause) => Err(cause),
        };
        schedule(qp, &mut self.ready, &mut self.timers);
        processed.unwrap_or_else(|cause| {
            self.io.drop_packet(host, Some(qpn), cause);
            FollowUp::Nothing
        })
    }

    /// Processes expired timers, responses, requests and flushes. Creates about
    /// `budget` packets at most; returns true if more can be done now.
    pub fn run<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        budget: usize,
    ) -> bool {
        self.io.now = now;
        self.remove_stale_timers();
        while let Some(&Reverse((at, qpn))) = self.timers.peek() {
            if at > now {
                break;
            }
            self.timers.pop();
            if let Some(qp) = self.qps.get_mut(&qpn) {
                if qp.armed == at {
                    qp.armed = u64::MAX;
                    qp.timers(host, &mut self.io, now);
                    schedule(qp, &mut self.ready, &mut self.timers);
                }
            }
        }
        let mut left = budget;
        while left > 0 {
            let Some(qpn) = self.ready.pop_front() else {
                return false;
            };
            let mut peer = self.take_peer(host, qpn);
            let Some(qp) = self.qps.get_mut(&qpn) else {
                continue;
            };
            qp.queued = false;
            for step in 0..TURN.min(left) {
                let more = qp.reply_step(host, &mut self.io)
                    || qp.flush_one(host)
                    || qp.request_step(host, &mut self.io, now, peer.as_deref_mut()) == Step::Done;
                if !more {
                    // A turn without a step counts as well, so that the loop ends.
                    left -= usize::from(step == 0);
                    break;
                }
                left -= 1;
            }
            self.io.record_sender(qpn);
            schedule(qp, &mut self.ready, &mut self.timers);
            if let Some(mut peer) = peer {
                schedule(&mut peer, &mut self.ready, &mut self.timers);
                self.qps.insert(peer.number, peer);
            }
        }
        !self.ready.is_empty()
    }

    /// Removes stale entries of the timer heap. With a peer that is never ready they would
    /// otherwise stay until their acknowledgement timeout, which may be hours.
    fn remove_stale_timers(&mut self) {
        if self.timers.len() > SPARE_TIMERS + 2 * self.qps.len() {
            let qps = &self.qps;
            self.timers
                .retain(|Reverse((at, qpn))| qps.get(qpn).is_some_and(|qp| qp.armed == *at));
        }
    }

    /// Returns the next frame to send.
    #[inline]
    pub fn pop(&mut self) -> Option<Packet> {
        self.io.out.pop_front()
    }

    /// Returns the time by which [`Transport::run`] must be called again if nothing
    /// else happens.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }
}

/// Adds a queue pair to the ready list and the timer heap as needed.
#[inline]
fn schedule<L>(
    qp: &mut Qp<L>,
    ready: &mut VecDeque<u32>,
    timers: &mut BinaryHeap<Reverse<(u64, u32)>>,
) {
    if !qp.queued && qp.has_work() {
        qp.queued = true;
        ready.push_back(qp.number);
    }
    // Lazy timer rescheduling: an earlier entry of the queue pair asks for its deadline
    // again when it expires, so that a deadline that only moves back costs nothing.
    let deadline = qp.deadline();
    if deadline < qp.armed {
        qp.armed = deadline;
        timers.push(Reverse((deadline, qp.number)));
    }
}
