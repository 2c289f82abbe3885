//! Recovery from losses before the local ACK timeout, for networks that lose packets.
//!
//! | lost | recovery |
//! |---|---|
//! | a request | The responder keeps the packets that follow it ([`ReorderBuffer`]), and its NAK makes the requester send this one packet again; also all later ones if the peer keeps no packets. |
//! | a read response | Later responses are stored, and the missing ones are requested again. |
//! | the last packets, an acknowledgement, a retransmission | After about two round trips without progress the oldest and the newest packet are sent again (a probe). The responder's reply names the first missing packet. |
//!
//! A probe is not a retry: the local ACK timeout and the retry count still report a dead
//! peer.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cause::DropCause;
use super::completer::ResponseOutcome;
use super::config::ack_wait;
use super::host::{Fault, Host, Operation};
use super::io::Io;
use super::qp::Qp;
use super::state::{Pending, Reply};
use crate::packet::{NakCode, Packet, Psn, Syndrome, View};

/// Time to the first probe while no round trip has been measured, in nanoseconds.
const INITIAL_PROBE_WAIT: u64 = 2_000_000;
/// Shortest time to a probe, since the peer's thread may wait for a processor.
const MIN_PROBE_WAIT: u64 = 300_000;
/// Maximum number of probes without progress; the time to the next one doubles.
const MAX_PROBES: u32 = 10;
/// Number of unsuccessful single retransmissions after which a peer is assumed to keep no
/// packets out of order.
const MAX_FAILED_REPEATS: u8 = 3;
/// Packets that count as lost when a peer that keeps no packets reports one as missing.
const GO_BACK_LOST: u32 = 8;
/// Maximum distance of a kept packet from the expected PSN.
const MAX_AHEAD: i32 = 256;
/// Maximum number of packets that all responders of a transport keep together.
const MAX_KEPT: usize = 2048;

/// A requester's state for recovery.
#[derive(Default)]
pub(super) struct Recovery {
    /// Smoothed round trip and its variation, in nanoseconds; 0 before the first measurement.
    pub round_trip: u64,
    rtt_variation: u64,
    /// A request being timed: the PSN past which `una` ends it, and when it was sent.
    timed: Option<(Psn, u64)>,
    /// Time of the next probe.
    pub probe_at: Option<u64>,
    probes: u32,
    /// PSN of the last single retransmission.
    resent: Option<Psn>,
    failed_repeats: u8,
    /// All requests before this PSN have been executed.
    executed: Psn,
    /// Missing responses before this PSN were requested again.
    requested_again: Psn,
    early: EarlyResponses,
}

/// Responses that were stored while an earlier one is missing, by PSN.
#[derive(Default)]
struct EarlyResponses {
    bits: [u64; Self::SPAN as usize / 64],
    count: u32,
}

impl EarlyResponses {
    const SPAN: u32 = 1024;

    fn position(psn: Psn) -> (usize, u64) {
        let bit = psn.value() % Self::SPAN;
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    fn has(&self, psn: Psn) -> bool {
        let (word, bit) = Self::position(psn);
        self.bits[word] & bit != 0
    }

    fn set(&mut self, psn: Psn) {
        let (word, bit) = Self::position(psn);
        self.count += u32::from(self.bits[word] & bit == 0);
        self.bits[word] |= bit;
    }

    /// Removes a PSN; returns whether it was there.
    fn take(&mut self, psn: Psn) -> bool {
        let (word, bit) = Self::position(psn);
        let was = self.count != 0 && self.bits[word] & bit != 0;
        if was {
            self.bits[word] &= !bit;
            self.count -= 1;
        }
        was
    }
}

impl Recovery {
    /// Returns the time after which a probe is due.
    fn probe_wait(&self) -> u64 {
        let wait = match self.round_trip {
            0 => INITIAL_PROBE_WAIT,
            // Twice the round trip if it is steady.
            trip => (trip + (4 * self.rtt_variation).max(trip)).max(MIN_PROBE_WAIT),
        };
        wait << self.probes.min(MAX_PROBES)
    }

    /// Resets the state for a first PSN.
    pub fn start(&mut self, psn: Psn) {
        *self = Self {
            executed: psn,
            requested_again: psn,
            ..Self::default()
        };
    }

    /// Called when all packets from a PSN on are sent again.
    pub fn restart_at(&mut self, psn: Psn) {
        self.timed = None;
        self.resent = None;
        self.requested_again = psn;
    }

    fn measure(&mut self, now: u64, una: Psn) {
        let Some((_, sent)) = self.timed.filter(|(end, _)| !una.before(*end)) else {
            return;
        };
        self.timed = None;
        let trip = now.saturating_sub(sent).max(1);
        if self.round_trip == 0 {
            (self.round_trip, self.rtt_variation) = (trip, trip / 2);
        } else {
            let off = trip.abs_diff(self.round_trip);
            self.rtt_variation = (3 * self.rtt_variation + off) / 4;
            self.round_trip = (7 * self.round_trip + trip) / 8;
        }
    }
}

/// Packets that a responder keeps until the one before them has arrived.
pub(super) struct ReorderBuffer {
    packets: VecDeque<(Psn, Packet, Arc<()>)>,
}

impl ReorderBuffer {
    pub const fn new() -> Self {
        Self {
            packets: VecDeque::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub fn clear(&mut self) {
        self.packets.clear();
    }

    /// Keeps a packet, if there is room. Each packet that the transport keeps has a clone of
    /// `all`, whose reference count is the number of kept packets.
    pub fn keep(&mut self, psn: Psn, packet: Packet, all: &Arc<()>) {
        let place = self
            .packets
            .iter()
            .rposition(|(other, ..)| !psn.before(*other));
        if place.is_some_and(|at| self.packets[at].0 == psn) || Arc::strong_count(all) > MAX_KEPT {
            return;
        }
        let place = place.map_or(0, |at| at + 1);
        self.packets.insert(place, (psn, packet, Arc::clone(all)));
    }

    /// Takes the packet with the expected PSN.
    pub fn take(&mut self, expected: Psn) -> Option<Packet> {
        while let Some((psn, ..)) = self.packets.front() {
            if expected.before(*psn) {
                return None;
            }
            let same = *psn == expected;
            let first = self.packets.pop_front();
            if same {
                return first.map(|(_, packet, _)| packet);
            }
        }
        None
    }
}

/// Follow-up to a request packet.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum FollowUp {
    #[default]
    Nothing,
    /// Keep the packet.
    Keep,
    /// The request was executed: kept packets may follow it.
    Release,
}

impl<L> Qp<L> {
    /// Returns whether a packet at this distance from the expected PSN is kept.
    pub fn keeps(&self, distance: i32) -> bool {
        self.recovers && distance <= MAX_AHEAD && !self.resp.closing
    }

    /// Executes the kept packets that follow the last executed one.
    pub fn release<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io) {
        let mut any = false;
        while let Some(packet) = self.resp.kept.take(self.resp.expected) {
            let expected = self.resp.expected;
            if let Ok(view) = View::parse_checked(&packet) {
                if let Err(cause) = self.request(host, io, &view) {
                    io.drop_packet(host, Some(self.number), cause);
                }
            }
            if self.resp.expected == expected {
                // The packet was refused: the peer repeats it and all later ones, or has failed.
                self.resp.kept.clear();
                return;
            }
            any = true;
        }
        if any && !self.resp.kept.is_empty() {
            // The NAK acknowledges the packets before the next gap.
            if let Some(Reply::Ack { .. }) = self.resp.replies.back() {
                self.resp.replies.pop_back();
            }
            self.resp.nak(Syndrome::Nak(NakCode::SequenceError));
        } else if any {
            // Acknowledges even if no packet requested it, so that the peer can continue.
            self.resp.acknowledge(self.resp.expected.minus(1));
        }
    }

    /// Called when a request was sent that is complete once `una` has reached `end`.
    pub fn request_sent(&mut self, now: u64, end: Psn, is_new: bool) {
        let recovery = &mut self.req.recovery;
        if is_new && recovery.timed.is_none() {
            recovery.timed = Some((end, now));
        }
        if recovery.probe_at.is_none() {
            recovery.probe_at = Some(now + recovery.probe_wait());
        }
    }

    /// Called when `una` has moved.
    pub fn una_moved(&mut self, now: u64) {
        let (una, high) = (self.req.una, self.req.high);
        let recovery = &mut self.req.recovery;
        recovery.measure(now, una);
        recovery.probes = 0;
        recovery.probe_at = una.before(high).then(|| now + recovery.probe_wait());
        self.adapt_window();
    }

    /// Sends a probe if it is due.
    pub fn probe_if_due<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io, now: u64) {
        if self.req.recovery.probe_at.is_none_or(|at| at > now) {
            return;
        }
        self.req.recovery.probe_at = None;
        let (una, high) = (self.req.una, self.req.high);
        if !self.state.sends() || !una.before(high) || self.req.rnr_until.is_some() {
            return;
        }
        let recovery = &mut self.req.recovery;
        // Beyond the local ACK timeout, its retransmission replaces probes.
        let more = recovery.probes < MAX_PROBES
            && ack_wait(self.config.ack_timeout).is_none_or(|wait| recovery.probe_wait() < wait);
        if !io.patient {
            recovery.probes += 1;
            recovery.resent = None;
            if recovery.probes > 1 {
                self.halve_window();
            }
        }
        let recovery = &mut self.req.recovery;
        if more {
            recovery.probe_at = Some(now + recovery.probe_wait());
        }
        // The frames not yet read may contain the responses.
        if io.patient {
            return;
        }
        io.counters.probes += 1;
        let newest = high.minus(1);
        let Some(oldest) = self.work_at(una) else {
            return;
        };
        self.req.recovery.requested_again = self.ask(host, io, oldest, una);
        if let Some(index) = self.work_at(newest) {
            let pending = &self.req.works[index];
            let psn = match pending.work.operation.is_read_or_atomic() {
                true if index == oldest => None,
                true => {
                    let rest =
                        (pending.received..pending.packets).take(EarlyResponses::SPAN as usize);
                    let mut psns = rest.map(|number| pending.first.plus(number));
                    psns.find(|psn| !self.req.recovery.early.has(*psn))
                }
                false => Some(newest),
            };
            match psn {
                Some(psn) if una.before(psn) && psn.before(self.req.send_psn) => {
                    self.ask(host, io, index, psn);
                }
                _ => {}
            }
        }
    }

    /// Returns the index of the work request with a PSN.
    fn work_at(&self, psn: Psn) -> Option<usize> {
        let within = |p: &Pending<L>| !psn.before(p.first) && psn.before(p.end());
        let place = self.req.works.iter().position(within)?;
        self.req.works[place].done.is_none().then_some(place)
    }

    /// Sends the packet at a PSN again, or a read of the missing responses from there on.
    /// Returns the end of the requested PSNs.
    fn ask<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        index: usize,
        psn: Psn,
    ) -> Psn {
        let pending = &self.req.works[index];
        let mut end = psn.plus(1);
        if pending.work.operation == Operation::Read {
            let early = &self.req.recovery.early;
            let stored = (1..EarlyResponses::SPAN).map(|ahead| psn.plus(ahead));
            let stored = stored
                .filter(|_| early.count != 0)
                .find(|psn| early.has(*psn));
            end = stored
                .filter(|psn| psn.before(pending.end()))
                .unwrap_or(pending.end());
        }
        self.repeat(host, io, index, psn, end);
        end
    }

    /// Sends one request packet again.
    fn repeat<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        index: usize,
        psn: Psn,
        end: Psn,
    ) {
        io.counters.retransmitted += 1;
        self.congestion.lost += 1;
        // A time that includes a loss is not a round trip.
        self.req.recovery.timed = None;
        // Absent or invalid memory is reported by the timeout's retransmission.
        let sent: Result<(), Fault> = self.emit(host, io, index, psn, Some(end));
        if sent.is_ok() {
            self.pace(io);
        }
    }

    /// Processes an acknowledgement of all PSNs before `end`.
    pub fn acknowledged<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        end: Psn,
    ) {
        let recovery = &mut self.req.recovery;
        if recovery.executed.before(end) {
            recovery.executed = end;
            // This is progress, even if an earlier response is missing.
            self.req.progress(&self.config);
        }
        if let Some(resent) = self.req.recovery.resent {
            let after = resent.plus(1);
            if after.before(end) {
                // The acknowledgement covers later packets too, so the peer keeps packets.
                self.req.recovery.failed_repeats = 0;
                self.req.recovery.resent = None;
            } else if end == after && after.before(self.req.send_psn) {
                self.settle(host, io, now, None);
                self.go_back(host, now);
                return;
            }
        }
        self.settle(host, io, now, None);
    }

    /// Sends all packets from `una` on again, after a single retransmission was unsuccessful.
    fn go_back<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64) {
        self.halve_window();
        let recovery = &mut self.req.recovery;
        recovery.resent = None;
        recovery.failed_repeats = recovery
            .failed_repeats
            .saturating_add(1)
            .min(MAX_FAILED_REPEATS);
        if self.state.sends() && self.req.una.before(self.req.high) {
            self.retry(host, now);
        }
    }

    /// Processes a NAK for a missing packet; those before it are acknowledged.
    pub fn out_of_sequence<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        psn: Psn,
    ) {
        let recovery = &self.req.recovery;
        let next = recovery.resent.is_some_and(|resent| resent.plus(1) == psn);
        let alone = recovery.failed_repeats < MAX_FAILED_REPEATS && !next;
        let index = self.work_at(psn).filter(|_| alone);
        match index {
            _ if next => self.go_back(host, now),
            None => {
                self.congestion.lost += GO_BACK_LOST;
                self.retry(host, now);
            }
            Some(_) if !psn.before(self.req.send_psn) => {}
            Some(index) => {
                self.req.recovery.resent = Some(psn);
                let end = self.req.works[index].end();
                self.repeat(host, io, index, psn, end);
            }
        }
    }

    /// Moves `una` to the first missing response, which is requested again, or past the last
    /// executed request. `stored` is the response that has just arrived.
    fn settle<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        stored: Option<Psn>,
    ) {
        let executed = self.req.recovery.executed;
        for index in 0..self.req.works.len() {
            let pending = &mut self.req.works[index];
            if !pending.first.before(executed) {
                break;
            }
            if !pending.awaits() {
                continue;
            }
            let early = &mut self.req.recovery.early;
            while pending.received < pending.packets
                && early.take(pending.first.plus(pending.received))
            {
                pending.received += 1;
                let sent = u32::from(index < self.req.cursor);
                self.req.read_psns = self.req.read_psns.saturating_sub(sent);
            }
            if pending.awaits() {
                break;
            }
            self.req.reads = self
                .req
                .reads
                .saturating_sub(u32::from(index < self.req.cursor));
        }
        let missing = self.oldest_awaiting(executed);
        let una = missing.map_or(executed, |(_, psn)| psn);
        self.advance(now, una);
        let recovery = &mut self.req.recovery;
        if recovery.requested_again.before(una) {
            recovery.requested_again = una;
        }
        if let Some((index, psn)) = missing {
            // Responses arrive in order: a later one of those requested again shows that
            // this one was lost again.
            let again = |stored: Psn| psn.before(stored) && stored.before(recovery.requested_again);
            if !psn.before(recovery.requested_again) || stored.is_some_and(again) {
                // One gap at a time: rdma_rxe refuses a part of a read that precedes the
                // part it has repeated.
                self.req.recovery.requested_again = self.ask(host, io, index, psn);
            }
        }
        self.complete(host);
    }

    /// Processes the response to a read or atomic, in any order.
    pub fn answered<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        view: &View<'_>,
    ) -> Result<(), DropCause> {
        let psn = view.bth.psn;
        let stale = DropCause::StaleResponse(psn);
        let ahead = psn.distance(self.req.una) as u32;
        if ahead >= EarlyResponses::SPAN || self.req.recovery.early.has(psn) {
            return Err(stale);
        }
        let index = self.work_at(psn).ok_or(stale)?;
        let pending = &self.req.works[index];
        if !pending.awaits() || psn.before(pending.first.plus(pending.received)) {
            return Err(stale);
        }
        match self.take_response(host, now, view, index, psn) {
            ResponseOutcome::Stored => {
                self.req.recovery.early.set(psn);
                self.req.progress(&self.config);
            }
            ResponseOutcome::Failed => {}
            ResponseOutcome::Absent => return Err(DropCause::AbsentMemory),
        }
        let recovery = &mut self.req.recovery;
        if recovery.executed.before(psn.plus(1)) {
            recovery.executed = psn.plus(1);
        }
        self.settle(host, io, now, Some(psn));
        Ok(())
    }
}
