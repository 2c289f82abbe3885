//! The completer: processes acknowledgements, NAKs, read responses and timeouts for the
//! requester.

use super::cause::{DropCause, Failure};
use super::config::{ack_wait, rnr_wait};
use super::host::{Counted, Fault, Host, Operation};
use super::io::Io;
use super::qp::Qp;
use super::state::{GRACE, LATE, MAX_SILENT_WAIT, STOPPED_WAIT};
use crate::packet::{NakCode, OpcodeFlags, Psn, Syndrome, View};

/// Result of [`Qp::take_response`].
pub(super) enum ResponseOutcome {
    Stored,
    /// The work request has ended with an error.
    Failed,
    /// The memory for it is absent: the response is requested again later.
    Absent,
}

impl<L> Qp<L> {
    /// Processes a response packet.
    pub fn response<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        view: &View<'_>,
    ) -> Result<(), DropCause> {
        let psn = view.bth.psn;
        if !self.state.sends() || psn.before(self.req.una) || !psn.before(self.req.high) {
            // The response is late, or its PSN was never sent.
            return Err(DropCause::StaleResponse(psn));
        }
        // Read responses other than first, last and only have no AETH.
        let syndrome = match view.aeth() {
            Some(aeth) => aeth.syndrome,
            None if view.has(OpcodeFlags::AETH) => return Err(DropCause::Malformed),
            None => Syndrome::Ack(0),
        };
        let answers = view.has(OpcodeFlags::READ) || view.has(OpcodeFlags::ATOMIC);
        let mut processed = Ok(());
        match syndrome {
            Syndrome::Ack(_) if answers && self.recovers => {
                processed = self.answered(host, io, now, view);
            }
            Syndrome::Ack(_) if answers => processed = self.answer(host, now, view),
            Syndrome::Ack(_) => self.acknowledge(host, io, now, psn.plus(1)),
            // A NAK applies to its PSN; all earlier requests have been executed
            // (IBA 9.7.5.1.2).
            Syndrome::RnrNak(code) => {
                self.acknowledge(host, io, now, psn);
                // While the RNR timer runs, a probe is answered by another RNR NAK.
                let again = self.recovers && self.req.rnr_until.is_some();
                if self.req.una == psn && self.state.sends() && !again {
                    io.counters.rnr_naks += 1;
                    self.not_ready(host, now, code);
                }
            }
            Syndrome::Nak(NakCode::SequenceError) if self.recovers => {
                self.acknowledge(host, io, now, psn);
                if self.state.sends() {
                    io.counters.naks += 1;
                    self.count_retry(host, Counted::SequenceNak);
                    self.out_of_sequence(host, io, now, psn);
                }
            }
            Syndrome::Nak(code) => {
                self.acknowledge(host, io, now, psn);
                if self.req.una == psn && self.state.sends() {
                    io.counters.naks += 1;
                    self.refused(host, now, code);
                }
            }
        }
        self.fast_forward();
        processed
    }

    /// Acknowledges all PSNs before `end`, up to the first missing response.
    pub fn acknowledge<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        end: Psn,
    ) {
        if self.recovers {
            return self.acknowledged(host, io, now, end);
        }
        match self.missing_answer(end) {
            None => self.advance(now, end),
            Some(missing) => {
                self.advance(now, missing);
                self.implied_nak(host, now);
            }
        }
        self.complete(host);
    }

    /// Returns the PSN of the first missing response before `end`.
    fn missing_answer(&self, end: Psn) -> Option<Psn> {
        self.oldest_awaiting(end).map(|(_, psn)| psn)
    }

    /// Returns the oldest work request before `end` that awaits a response, and the PSN
    /// of that response.
    pub fn oldest_awaiting(&self, end: Psn) -> Option<(usize, Psn)> {
        // `req.reads` cannot shorten this scan: it excludes reads sent before a
        // retransmission.
        for (index, pending) in self.req.works.iter().enumerate() {
            if !pending.first.before(end) {
                break;
            }
            if pending.awaits() {
                let psn = pending.first.plus(pending.received);
                return psn.before(end).then_some((index, psn));
            }
        }
        None
    }

    pub fn advance(&mut self, now: u64, una: Psn) {
        if !self.req.una.before(una) {
            return;
        }
        self.req.una = una;
        self.req.progress(&self.config);
        self.req.implied_nak = false;
        self.req.blocked = false;
        self.restart_timer(now);
        if self.recovers {
            self.una_moved(now);
        }
    }

    fn restart_timer(&mut self, now: u64) {
        let outstanding = self.req.una.before(self.req.high);
        self.req.deadline = ack_wait(self.config.ack_timeout)
            .filter(|_| outstanding)
            .map(|wait| now + wait);
    }

    /// Skips a retransmission of requests that have been acknowledged meanwhile.
    fn fast_forward(&mut self) {
        if self.req.send_psn.before(self.req.una) {
            self.req.seek(self.req.una);
        }
    }

    /// A response was skipped, so it is lost: retries once until `una` moves.
    fn implied_nak<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64) {
        if !self.req.implied_nak && self.req.rnr_until.is_none() {
            self.req.implied_nak = true;
            self.count_retry(host, Counted::ImpliedNak);
            self.retry(host, now);
        }
    }

    /// Counts an event after which the queue pair sends again, unless that was the last time.
    fn count_retry<H: Host<LocalBuffers = L>>(&self, host: &mut H, event: Counted) {
        if self.req.retries_left != 0 {
            host.count(self.number, event);
        }
    }

    /// Returns to the oldest unacknowledged packet.
    pub fn retry<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64) {
        if self.req.retries_left == 0 {
            let cause = Failure::Retries {
                count: self.config.retry_count,
                timeout: self.config.ack_timeout,
                excused: self.req.excused,
            };
            self.fail_request(host, cause);
            return;
        }
        self.req.retries_left -= 1;
        self.send_again(now);
    }

    fn send_again(&mut self, now: u64) {
        self.req.seek(self.req.una);
        self.restart_timer(now);
    }

    /// Fails the oldest work request with packets in flight.
    fn fail_request<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, cause: Failure) {
        let una = self.req.una;
        if let Some(pending) = self
            .req
            .works
            .iter_mut()
            .find(|p| p.packets != 0 && una.before(p.end()))
        {
            pending.fail(cause);
        }
        self.complete(host);
    }

    fn not_ready<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64, code: u8) {
        match self.req.rnr_left {
            0 => {
                let (count, timer) = (self.config.rnr_retry, code);
                self.fail_request(host, Failure::RnrRetries { count, timer });
            }
            left => {
                host.count(self.number, Counted::RnrNak);
                if self.config.rnr_retry != 7 {
                    self.req.rnr_left = left - 1;
                }
                self.req.seek(self.req.una);
                self.req.rnr_until = Some(now + rnr_wait(code));
                self.req.deadline = None;
            }
        }
    }

    fn refused<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, now: u64, code: NakCode) {
        match code {
            NakCode::SequenceError => {
                self.count_retry(host, Counted::SequenceNak);
                self.retry(host, now);
            }
            _ => self.fail_request(host, Failure::Refused(code)),
        }
    }

    /// Processes the response to a read or atomic.
    fn answer<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        view: &View<'_>,
    ) -> Result<(), DropCause> {
        let psn = view.bth.psn;
        let awaiting = self.oldest_awaiting(psn.plus(1));
        let (index, expected) = awaiting.ok_or(DropCause::StaleResponse(psn))?;
        if expected != psn {
            self.advance(now, expected);
            self.implied_nak(host, now);
            self.complete(host);
            let missing = expected;
            return Err(DropCause::MissingResponse { psn, missing });
        }
        match self.take_response(host, now, view, index, psn) {
            ResponseOutcome::Stored => {
                let pending = &mut self.req.works[index];
                pending.received += 1;
                let answered = pending.received == pending.packets;
                if index < self.req.cursor {
                    self.req.read_psns = self.req.read_psns.saturating_sub(1);
                    self.req.reads = self.req.reads.saturating_sub(u32::from(answered));
                }
            }
            ResponseOutcome::Failed => {}
            ResponseOutcome::Absent => return Err(DropCause::AbsentMemory),
        }
        self.advance(now, psn.plus(1));
        self.complete(host);
        Ok(())
    }

    /// Stores the response at a PSN, or ends its work request with an error status.
    pub fn take_response<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        now: u64,
        view: &View<'_>,
        index: usize,
        psn: Psn,
    ) -> ResponseOutcome {
        let cause = match self.store(host, view, index, psn) {
            Some(Ok(())) => return ResponseOutcome::Stored,
            Some(Err(Fault::Absent)) => {
                // The response is dropped, and requested again when its memory may be
                // present.
                self.req.seek(self.req.una);
                self.req.deadline = None;
                self.wait_for_page(now);
                return ResponseOutcome::Absent;
            }
            Some(Err(fault)) => Failure::LocalMemory(fault),
            None => Failure::Response(psn),
        };
        self.req.works[index].fail(cause);
        ResponseOutcome::Failed
    }

    /// Stores the response at a PSN; `None` if it does not match its request.
    fn store<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
        index: usize,
        psn: Psn,
    ) -> Option<Result<(), Fault>> {
        let mtu = self.config.mtu;
        let pending = &mut self.req.works[index];
        let local = &mut pending.work.local;
        if view.has(OpcodeFlags::ATOMIC) {
            return view
                .atomic_value()
                .filter(|_| pending.work.operation != Operation::Read)
                .map(|value| host.store_atomic(self.number, local, value));
        }
        let place = psn.distance(pending.first).max(0) as u32;
        let offset = place << mtu.log2();
        let rest = pending.work.length.saturating_sub(offset);
        let (ends, last) = (view.has(OpcodeFlags::END), place + 1 == pending.packets);
        let fits = pending.work.operation == Operation::Read
            && view.payload.len() == rest.min(mtu.bytes()) as usize
            // A partial read that was requested again may end before the read itself.
            && (ends == last || (self.recovers && ends));
        fits.then(|| match view.payload.bytes() {
            [] => Ok(()),
            payload => host.scatter(self.number, local, offset, payload),
        })
    }

    /// Processes expired timers.
    pub fn timers<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io, now: u64) {
        if self.req.rnr_until.is_some_and(|at| at <= now) {
            self.req.rnr_until = None;
            self.req.blocked = false;
        }
        if self.congestion.paused_until.is_some_and(|at| at <= now) {
            self.congestion.paused_until = None;
            self.req.blocked = false;
            self.resp.held = false;
        }
        if let Some(at) = self.req.deadline.filter(|at| *at <= now) {
            self.req.deadline = None;
            if self.state.sends() && self.req.una.before(self.req.high) {
                if self.is_excused(host, now - at) {
                    self.restart_timer(now);
                    let earliest = now + STOPPED_WAIT;
                    self.req.deadline = self.req.deadline.map(|at| at.max(earliest));
                } else if let Some(silence) = self.accepted_silence(host, now, at) {
                    io.counters.timeouts += 1;
                    self.count_retry(host, Counted::Timeout);
                    self.halve_window();
                    self.send_again(now);
                    let earliest = now + (silence / 8).min(MAX_SILENT_WAIT);
                    self.req.deadline = self.req.deadline.map(|at| at.max(earliest));
                } else if io.patient && self.req.patience > 0 {
                    self.req.patience -= 1;
                    self.restart_timer(now);
                } else {
                    io.counters.timeouts += 1;
                    self.count_retry(host, Counted::Timeout);
                    self.halve_window();
                    if self.recovers && self.req.grace > 0 {
                        self.req.grace -= 1;
                        self.send_again(now);
                    } else {
                        self.req.grace = GRACE;
                        self.retry(host, now);
                    }
                }
            }
        }
        self.probe_if_due(host, io, now);
    }

    /// Returns whether a timeout restarts without counting, since the peer or this process was
    /// stopped. After the peer's stop there is a whole timeout for its answer.
    fn is_excused<H: Host<LocalBuffers = L>>(&mut self, host: &H, delay: u64) -> bool {
        let path = self.config.path.as_ref();
        let is_stopped = path.is_some_and(|it| host.is_peer_stopped(it, self.config.remote_qpn));
        if std::mem::replace(&mut self.req.peer_stopped, is_stopped) || is_stopped {
            return true;
        }
        let is_late = delay > LATE && self.req.late_restarts > 0;
        if is_late {
            self.req.late_restarts -= 1;
        }
        is_late
    }

    /// Returns how long the peer is silent, if that does not count as a retry yet. `expired` is
    /// the deadline of the timeout.
    fn accepted_silence<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &H,
        now: u64,
        expired: u64,
    ) -> Option<u64> {
        let wait = ack_wait(self.config.ack_timeout).unwrap_or(0);
        let since = expired.saturating_sub(wait);
        let silence = now.saturating_sub(*self.req.silent_since.get_or_insert(since));
        // One that has never answered may not exist.
        let was_alive = self.req.answered || self.resp.expected != Psn::new(self.config.recv_psn);
        let path = self.config.path.as_ref().filter(|_| was_alive)?;
        let limit = host.max_silence(path, self.config.remote_qpn);
        self.req.excused = silence.min(limit);
        (silence < limit).then_some(silence)
    }

    /// Returns the time at which [`Qp::timers`] has something to do.
    pub fn deadline(&self) -> u64 {
        let earliest = |at: Option<u64>| at.unwrap_or(u64::MAX);
        earliest(self.req.deadline)
            .min(earliest(self.req.rnr_until))
            .min(earliest(self.req.recovery.probe_at))
            .min(earliest(self.congestion.paused_until))
    }
}
