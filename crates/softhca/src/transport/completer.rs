//! What answers do to the requester: acknowledgements, refusals, read responses,
//! and their absence.

use super::config::{ack_wait, rnr_wait};
use super::host::{Fault, Host, Operation, Status};
use super::qp::{Io, Qp};
use crate::packet::{NakCode, Psn, Syndrome, Traits, View};

impl<L> Qp<L> {
    /// An answer came.
    pub fn response<H: Host<Local = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        view: &View<'_>,
    ) {
        let psn = view.bth.psn;
        if !self.state.sends() || psn.before(self.req.una) || !psn.before(self.req.high) {
            // Late, or an answer to what was never asked.
            io.counters.stale += 1;
            return;
        }
        // Only first, last and only responses have one.
        let syndrome = match view.aeth() {
            Some(aeth) => aeth.syndrome,
            None if view.has(Traits::AETH) => {
                io.counters.malformed += 1;
                return;
            }
            None => Syndrome::Ack(0),
        };
        let answers = view.has(Traits::READ) || view.has(Traits::ATOMIC);
        match syndrome {
            Syndrome::Ack(_) if answers => self.answer(host, now, view),
            Syndrome::Ack(_) => self.acknowledge(host, now, psn.plus(1)),
            // A refusal is of its PSN; what comes before has been done.
            Syndrome::RnrNak(code) => {
                self.acknowledge(host, now, psn);
                if self.req.una == psn && self.state.sends() {
                    io.counters.rnr_naks += 1;
                    self.not_ready(host, now, code);
                }
            }
            Syndrome::Nak(code) => {
                self.acknowledge(host, now, psn);
                if self.req.una == psn && self.state.sends() {
                    io.counters.naks += 1;
                    self.refused(host, now, code);
                }
            }
        }
        self.fast_forward();
    }

    /// All before `end` is acknowledged, unless an answer is missing there.
    fn acknowledge<H: Host<Local = L>>(&mut self, host: &mut H, now: u64, end: Psn) {
        match self.missing_answer(end) {
            None => self.advance(now, end),
            Some(missing) => {
                self.advance(now, missing);
                self.implied_nak(host, now);
            }
        }
        self.complete(host);
    }

    /// The first answer before `end` that has not come.
    fn missing_answer(&self, end: Psn) -> Option<Psn> {
        self.oldest_awaiting(end).map(|(_, psn)| psn)
    }

    /// The oldest work request before `end` that awaits an answer, and the PSN of that.
    fn oldest_awaiting(&self, end: Psn) -> Option<(usize, Psn)> {
        // Most queues have none: not counted if they were sent before a retransmission.
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

    fn advance(&mut self, now: u64, una: Psn) {
        if !self.req.una.before(una) {
            return;
        }
        self.req.una = una;
        self.req.refill(&self.config);
        self.req.implied_nak = false;
        self.req.blocked = false;
        self.restart_timer(now);
    }

    fn restart_timer(&mut self, now: u64) {
        let outstanding = self.req.una.before(self.req.high);
        self.req.deadline = ack_wait(self.config.ack_timeout)
            .filter(|_| outstanding)
            .map(|wait| now + wait);
    }

    /// Answers came for what was about to be sent again.
    fn fast_forward(&mut self) {
        if self.req.send_psn.before(self.req.una) {
            self.req.seek(self.req.una);
        }
    }

    /// An answer was passed over: it is lost.
    fn implied_nak<H: Host<Local = L>>(&mut self, host: &mut H, now: u64) {
        if !self.req.implied_nak && self.req.rnr_until.is_none() {
            self.req.implied_nak = true;
            self.retry(host, now);
        }
    }

    /// Goes back to the oldest packet without acknowledgement.
    fn retry<H: Host<Local = L>>(&mut self, host: &mut H, now: u64) {
        if self.req.retries_left == 0 {
            self.give_up(host, Status::RetryExceeded);
            return;
        }
        self.req.retries_left -= 1;
        self.req.seek(self.req.una);
        self.restart_timer(now);
    }

    /// The oldest work request with packets under way ends with an error.
    fn give_up<H: Host<Local = L>>(&mut self, host: &mut H, status: Status) {
        let una = self.req.una;
        if let Some(pending) = self
            .req
            .works
            .iter_mut()
            .find(|p| p.packets != 0 && una.before(p.end()))
        {
            pending.done = Some(status);
        }
        self.complete(host);
    }

    fn not_ready<H: Host<Local = L>>(&mut self, host: &mut H, now: u64, code: u8) {
        match self.req.rnr_left {
            0 => self.give_up(host, Status::RnrRetryExceeded),
            left => {
                if self.config.rnr_retry != 7 {
                    self.req.rnr_left = left - 1;
                }
                self.req.seek(self.req.una);
                self.req.rnr_until = Some(now + rnr_wait(code));
                self.req.deadline = None;
            }
        }
    }

    fn refused<H: Host<Local = L>>(&mut self, host: &mut H, now: u64, code: NakCode) {
        match code {
            NakCode::SequenceError => self.retry(host, now),
            NakCode::InvalidRequest => self.give_up(host, Status::RemoteInvalidRequest),
            NakCode::RemoteAccess => self.give_up(host, Status::RemoteAccess),
            NakCode::RemoteOperation => self.give_up(host, Status::RemoteOperation),
        }
    }

    /// A read's or atomic's answer.
    fn answer<H: Host<Local = L>>(&mut self, host: &mut H, now: u64, view: &View<'_>) {
        let psn = view.bth.psn;
        let Some((index, expected)) = self.oldest_awaiting(psn.plus(1)) else {
            // Nothing there awaits an answer.
            return;
        };
        if expected != psn {
            self.advance(now, expected);
            self.implied_nak(host, now);
            self.complete(host);
            return;
        }
        let mtu = self.config.mtu;
        let pending = &mut self.req.works[index];
        let local = &mut pending.work.local;
        let stored = if view.has(Traits::ATOMIC) {
            let is_atomic = pending.work.operation != Operation::Read;
            view.atomic_value()
                .filter(|_| is_atomic)
                .map(|value| host.store_atomic(self.number, local, value))
        } else {
            let offset = pending.received << mtu.log2();
            let rest = pending.work.length.saturating_sub(offset);
            let fits = pending.work.operation == Operation::Read
                && view.payload.len() == rest.min(mtu.bytes()) as usize
                && view.has(Traits::END) == (pending.received + 1 == pending.packets);
            fits.then(|| match view.payload {
                [] => Ok(()),
                payload => host.scatter(self.number, local, offset, payload),
            })
        };
        match stored {
            Some(Ok(())) => {
                pending.received += 1;
                let answered = pending.received == pending.packets;
                if index < self.req.cursor {
                    self.req.read_psns = self.req.read_psns.saturating_sub(1);
                    self.req.reads = self.req.reads.saturating_sub(u32::from(answered));
                }
            }
            Some(Err(Fault::Absent)) => {
                // The answer is dropped, and asked for again when there is a
                // place for it.
                self.req.seek(self.req.una);
                self.req.deadline = None;
                self.wait_for_page(now);
                return;
            }
            Some(Err(_)) => pending.done = Some(Status::LocalProtection),
            None => pending.done = Some(Status::BadResponse),
        }
        self.advance(now, psn.plus(1));
        self.complete(host);
    }

    /// Time has passed.
    pub fn timers<H: Host<Local = L>>(&mut self, host: &mut H, io: &mut Io, now: u64) {
        if self.req.rnr_until.is_some_and(|at| at <= now) {
            self.req.rnr_until = None;
            self.req.blocked = false;
        }
        if self.req.deadline.is_some_and(|at| at <= now) {
            self.req.deadline = None;
            if self.state.sends() && self.req.una.before(self.req.high) {
                if io.patient && self.req.patience > 0 {
                    self.req.patience -= 1;
                    self.restart_timer(now);
                } else {
                    io.counters.timeouts += 1;
                    self.retry(host, now);
                }
            }
        }
    }

    /// When [`Qp::timers`] has something to do.
    pub fn deadline(&self) -> u64 {
        let earliest = |at: Option<u64>| at.unwrap_or(u64::MAX);
        earliest(self.req.deadline).min(earliest(self.req.rnr_until))
    }
}
