//! The requester: work requests to request packets.
//!
//! `works` holds the outstanding work requests, oldest first, each with the range of
//! PSNs that it occupies (for a read, one for each response packet). `una` is the
//! oldest unacknowledged PSN; `send_psn` is the next to be sent, and belongs to
//! `works[cursor]`. Retransmission is a return to `una`. [`super::completer`] processes
//! the responses.

use super::cause::Failure;
use super::config::{QpState, Service, ack_wait};
use super::dynamic::FailedRequest;
use super::host::{Fault, Fence, Host, Operation, QpEvent, SendDone, SendWork};
use super::io::Io;
use super::qp::Qp;
use super::state::{MAX_WORKS, Pending};
use crate::packet::{
    AtomicEth, BTH_BYTES, Bth, DCETH_BYTES, ICRC_BYTES, PacketBuilder, Psn, Reth, op,
};

/// Time before absent memory is tried again, in nanoseconds.
const PAGE_WAIT: u64 = 100_000;

/// Result of an attempt to send.
#[derive(PartialEq, Eq)]
pub(super) enum Step {
    /// A step was performed.
    Done,
    /// The requester waits for another event.
    Idle,
}

impl<L> Qp<L> {
    /// Sends one packet, or performs one local operation. `peer` is the queue pair at the
    /// other end, if requests may be handed over to it.
    pub fn request_step<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        peer: Option<&mut Self>,
    ) -> Step {
        if !self.state.sends() {
            return Step::Idle;
        }
        self.stop_if_due(host);
        if self.drain_due && self.state == QpState::SendQueueDrain && self.req.works.is_empty() {
            self.drain_due = false;
            host.event(self.number, QpEvent::SqDrained);
            return Step::Idle;
        }
        if self.req.rnr_until.is_some() {
            return Step::Idle;
        }
        if self.req.cursor == self.req.works.len() && !self.take(host) {
            return Step::Idle;
        }
        let Some(pending) = self.req.works.get(self.req.cursor) else {
            return Step::Idle;
        };
        match &pending.done {
            Some(Ok(())) => {
                self.req.cursor += 1;
                return Step::Done;
            }
            // Fails the queue pair once all earlier work requests have completed.
            Some(Err(_)) => {
                self.req.blocked = true;
                self.complete(host);
                return Step::Idle;
            }
            None => {}
        }
        if self.config.service == Service::DcInitiator && !self.connect(now) {
            return Step::Idle;
        }
        if !self.may_start() {
            self.req.blocked = true;
            return Step::Idle;
        }
        if self.req.works[self.req.cursor].work.operation == Operation::Local {
            self.run_local(host);
            return Step::Done;
        }
        match self.config.service {
            Service::Ud => self.send_datagram(host, io, now),
            _ => self.send_connected(host, io, now, peer),
        }
        Step::Done
    }

    /// Takes the next work request if none is under way. Returns whether there is one to
    /// continue with, for which the peer takes no receive.
    pub fn next_takes_no_receive<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) -> bool {
        self.stop_if_due(host);
        self.state.sends()
            && (self.req.cursor < self.req.works.len() || self.take(host))
            && !self.req.works[self.req.cursor]
                .work
                .operation
                .takes_receive()
    }

    /// Stops sending before the next work request, if the engine demands that.
    fn stop_if_due<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        if self.state != QpState::ReadyToSend || !host.stops(self.number) {
            return;
        }
        self.state = QpState::SendQueueDrain;
        self.drain_due = true;
        host.event(self.number, QpEvent::State(self.state));
        // At most one was taken in advance.
        let last = self.req.works.len().checked_sub(1);
        let last = last.filter(|last| *last == self.req.cursor);
        let waits =
            |pending: &Pending<L>| pending.done.is_none() && self.req.send_psn == pending.first;
        if last.is_some_and(|last| waits(&self.req.works[last])) {
            if let Some(pending) = self.req.works.pop_back() {
                self.req.next_psn = pending.first;
                host.give_back(self.number, pending.work);
            }
        }
    }

    /// Takes the next work request. Returns whether there was one.
    fn take<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) -> bool {
        if !self.send_rung
            || self.state != QpState::ReadyToSend
            || self.req.works.len() >= MAX_WORKS
        {
            return false;
        }
        let Some(mut work) = host.next_send(self.number) else {
            self.send_rung = false;
            return false;
        };
        if matches!(
            work.operation,
            Operation::FetchAdd { .. } | Operation::CompareSwap { .. }
        ) {
            work.length = 8;
        }
        let (packets, done) = match self.packets_for(&work) {
            Ok(packets) => (packets, None),
            Err(cause) => (0, Some(Err(Box::new(cause)))),
        };
        let first = self.req.next_psn;
        self.req.next_psn = first.plus(packets);
        self.req.works.push_back(Pending {
            work,
            first,
            packets,
            received: 0,
            done,
        });
        true
    }

    /// Returns the number of PSNs that a work request takes, or why it cannot be executed.
    fn packets_for(&self, work: &SendWork<L>) -> Result<u32, Failure> {
        if let Some(error) = &work.refused {
            return Err(Failure::Engine(**error));
        }
        let (service, operation) = (self.config.service, work.operation);
        let length = match operation {
            Operation::Local => 0,
            _ => work.length,
        };
        let packets = match service {
            Service::Ud => Some(1).filter(|_| length <= self.config.mtu.bytes()),
            _ => self.packets_of(length),
        };
        let packets = packets.ok_or(Failure::MessageLength(length))?;
        let addressed = work.datagram.is_some() || operation == Operation::Local;
        if service == Service::Ud && !addressed {
            return Err(Failure::NoDestination);
        }
        if service == Service::DcInitiator {
            if let Some(cause) = self.refuse_on_stream(work) {
                return Err(cause);
            }
        }
        if !allowed(service, operation) {
            return Err(Failure::Operation { operation, service });
        }
        if operation.is_read_or_atomic() && self.config.max_rd_atomic == 0 {
            return Err(Failure::NoReads);
        }
        Ok(match operation {
            Operation::Local => 0,
            _ => packets,
        })
    }

    /// Pauses sending, because local memory is absent.
    pub fn wait_for_page(&mut self, now: u64) {
        self.req.rnr_until = Some(now + PAGE_WAIT);
    }

    /// Returns whether window, fence and read limit allow the work request at the
    /// cursor.
    fn may_start(&self) -> bool {
        let req = &self.req;
        let pending = &req.works[req.cursor];
        let begun = req.send_psn != pending.first;
        let fence = match pending.work.fence {
            _ if begun => true,
            Fence::None => true,
            Fence::Reads => req.reads == 0,
            Fence::All => req.cursor == 0,
        };
        let reads = !pending.work.operation.is_read_or_atomic()
            || req.reads < u32::from(self.config.max_rd_atomic);
        // All outstanding PSNs stay within half the PSN range, so that order is
        // defined.
        let span = pending.first.distance(req.una).max(0) as u32 + pending.packets;
        let paced = !self.paces || self.may_send(pending);
        // Without acknowledgements there is no window: a message is in flight until its end.
        let in_window = !self.config.service.is_reliable() || req.flight() < req.window;
        fence
            && reads
            && paced
            && (pending.packets == 0 || in_window)
            && (req.cursor == 0 || span < Psn::RANGE / 2)
    }

    fn run_local<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        let pending = &mut self.req.works[self.req.cursor];
        let result = host.run_local(self.number, &mut pending.work);
        match result {
            Ok(()) => {
                pending.done = Some(Ok(()));
                self.req.cursor += 1;
            }
            Err(error) => pending.fail(Failure::Engine(error)),
        }
        self.complete(host);
    }

    fn send_connected<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        peer: Option<&mut Self>,
    ) {
        let psn = self.req.send_psn;
        let cursor = self.req.cursor;
        if self.template.is_none() {
            self.req.works[cursor].fail(Failure::NoPath);
            return;
        }
        // Requests that consume a receive are sent as packets. Without packets they would
        // arrive faster than the receiver reposts, and each would wait for the RNR timer.
        let takes_receive = self.req.works[cursor].work.operation.takes_receive();
        let mut peer = peer.filter(|peer| !takes_receive && peer.expects(psn));
        let sent = match &mut peer {
            Some(peer) => self.hand_over(host, io, peer, cursor, psn),
            None => self.emit(host, io, cursor, psn, None),
        };
        match sent {
            Ok(()) => {}
            Err(Fault::Absent) => {
                self.wait_for_page(now);
                return;
            }
            Err(fault) => {
                self.req.works[cursor].fail(Failure::LocalMemory(fault));
                self.complete(host);
                return;
            }
        }

        let pending = &self.req.works[cursor];
        let reads = pending.work.operation.is_read_or_atomic();
        let resumes_at = match reads {
            true => pending.end(),
            false => psn.plus(1),
        };
        let last = !resumes_at.before(pending.end());
        let again = psn.before(self.req.high);
        if again {
            io.counters.retransmitted += 1;
        }
        if reads {
            self.req.reads += 1;
            self.req.read_psns += pending.packets - pending.received.min(pending.packets);
        }
        self.req.send_psn = resumes_at;
        if self.req.high.before(resumes_at) {
            self.req.high = resumes_at;
        }
        if last {
            self.req.cursor += 1;
        }
        if self.recovers {
            self.request_sent(now, psn.plus(1), !again && (reads || last));
        }
        if self.paces {
            self.pace(io);
        }
        if self.config.service.is_reliable() {
            if self.req.deadline.is_none() {
                self.req.deadline = ack_wait(self.config.ack_timeout).map(|wait| now + wait);
            }
        } else if last {
            self.req.una = self.req.send_psn;
            self.complete(host);
        }
        if let Some(peer) = peer {
            self.take_acknowledgement(host, io, now, peer);
        }
    }

    /// Sends the request packet of a work request at a PSN. A single retransmission
    /// (`repeated`) requests an acknowledgement or, for a read, the responses before
    /// `repeated`.
    pub fn emit<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        at: usize,
        psn: Psn,
        repeated: Option<Psn>,
    ) -> Result<(), Fault> {
        let request = self.request_packet(at, psn, repeated);
        let Some(template) = &self.template else {
            return Err(Fault::Protection);
        };
        let mut builder = PacketBuilder::new(&io.pool, template, request.bth, request.payload);
        builder.put(request.headers());
        if request.payload != 0 {
            let local = &mut self.req.works[at].work.local;
            let space = builder.space(request.payload);
            host.gather(self.number, local, request.offset, space)?;
        }
        io.send(builder.finish());
        Ok(())
    }

    /// Returns the request packet of a work request at a PSN; see [`Qp::emit`].
    pub fn request_packet(&self, at: usize, psn: Psn, repeated: Option<Psn>) -> Request {
        let mtu = self.config.mtu;
        let flight = self.req.flight();
        let pending = &self.req.works[at];
        let work = &pending.work;
        let index = psn.distance(pending.first).max(0) as u32;
        let offset = index << mtu.log2();
        let rest = work.length.saturating_sub(offset);
        let first = index == 0;
        let (operation, payload, last) = match work.operation {
            Operation::Read => (op::READ_REQUEST, 0, true),
            Operation::FetchAdd { .. } => (op::FETCH_ADD, 0, true),
            Operation::CompareSwap { .. } => (op::COMPARE_SWAP, 0, true),
            other => {
                let last = index + 1 == pending.packets;
                (position(other, first, last), rest.min(mtu.bytes()), last)
            }
        };
        let mut bth = self.bth(operation, psn);
        bth.solicited = work.solicited && last;
        bth.ack_request = self.config.service.is_reliable()
            && (last
                || flight + 1 >= self.req.window
                || (index + 1) & self.req.ack_request_mask == 0
                || repeated.is_some());
        let mut request = Request::new(bth, offset, payload as usize);
        if self.config.service == Service::XrcInitiator {
            request.put(&(work.xrc_srqn & 0xff_ffff).to_be_bytes());
        } else if self.config.service == Service::DcInitiator {
            request.put(&self.initiator.header(self.number, self.req.una).bytes());
        }
        let (va, rkey) = (work.va, work.rkey);
        let atomic = |compare, swap_add| AtomicEth {
            va,
            rkey,
            swap_add,
            compare,
        };
        match work.operation {
            Operation::Read => {
                let length = match repeated {
                    Some(end) if end.before(pending.end()) => {
                        rest.min((end.distance(psn).max(0) as u32) << mtu.log2())
                    }
                    _ => rest,
                };
                let va = va.wrapping_add(u64::from(offset));
                request.put(&Reth { va, rkey, length }.bytes());
            }
            Operation::Write | Operation::WriteImm if first => {
                let length = work.length;
                request.put(&Reth { va, rkey, length }.bytes());
            }
            Operation::FetchAdd { add } => request.put(&atomic(0, add).bytes()),
            Operation::CompareSwap { compare, swap } => {
                request.put(&atomic(compare, swap).bytes());
            }
            _ => {}
        }
        if last && has_imm(work.operation) {
            request.put(&work.imm.to_be_bytes());
        }
        request
    }

    /// Completes ended work requests at the head of the queue, in order.
    pub fn complete<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        self.stop_if_due(host);
        loop {
            let Some(head) = self.req.works.front() else {
                return;
            };
            // `una` does not pass a read whose response is incomplete.
            let is_executed = head.packets != 0 && !self.req.una.before(head.end());
            if head.done.is_none() && !is_executed {
                return;
            }
            let Some(mut head) = self.req.works.pop_front() else {
                return;
            };
            self.req.cursor = self.req.cursor.saturating_sub(1);
            self.req.blocked = false;
            let Some(Err(cause)) = head.done.take() else {
                let (cause, length) = (None, head.work.length);
                host.send_done(self.number, head.work, SendDone { cause, length });
                continue;
            };
            let cause = *cause;
            let failed = FailedRequest {
                cause,
                stream: head.work.stream,
                end: head.end(),
                answered: matches!(cause, Failure::LocalMemory(_))
                    && head.work.operation.is_read_or_atomic(),
                missing: head.packets.saturating_sub(head.received),
            };
            host.send_done(self.number, head.work, SendDone::failed(cause));
            host.report(Some(self.number), cause.into());
            if self.config.service == Service::DcInitiator && self.stream_failed(&failed) {
                continue;
            }
            let to = if self.config.service.is_reliable() {
                QpState::Error
            } else {
                QpState::SendQueueError
            };
            self.fail(host, to);
            return;
        }
    }
}

/// Longest extended headers of a request: of an atomic over a dynamic connection.
const MAX_HEADERS: usize = DCETH_BYTES + 28;

/// A request packet.
pub(super) struct Request {
    pub bth: Bth,
    extended: [u8; MAX_HEADERS],
    extended_length: usize,
    /// Offset of its payload in the message, and the length of the payload.
    pub offset: u32,
    pub payload: usize,
}

impl Request {
    fn new(bth: Bth, offset: u32, payload: usize) -> Self {
        Self {
            bth,
            extended: [0; MAX_HEADERS],
            extended_length: 0,
            offset,
            payload,
        }
    }

    fn put(&mut self, header: &[u8]) {
        let end = self.extended_length + header.len();
        self.extended[self.extended_length..end].copy_from_slice(header);
        self.extended_length = end;
    }

    /// Returns the length of its packet without the headers of the template.
    pub fn length(&self) -> usize {
        BTH_BYTES + self.extended_length + self.payload.next_multiple_of(4) + ICRC_BYTES
    }

    /// Returns the extended headers.
    pub fn headers(&self) -> &[u8] {
        &self.extended[..self.extended_length]
    }
}

/// Returns whether a service supports an operation.
fn allowed(service: Service, operation: Operation) -> bool {
    match operation {
        Operation::Send | Operation::SendImm | Operation::Local => {
            !matches!(service, Service::XrcTarget | Service::DcTarget)
        }
        Operation::Write | Operation::WriteImm => !matches!(
            service,
            Service::Ud | Service::XrcTarget | Service::DcTarget
        ),
        Operation::SendInvalidate
        | Operation::Read
        | Operation::FetchAdd { .. }
        | Operation::CompareSwap { .. } => {
            matches!(
                service,
                Service::Rc | Service::XrcInitiator | Service::DcInitiator
            )
        }
    }
}

fn has_imm(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::SendImm | Operation::SendInvalidate | Operation::WriteImm
    )
}

/// Returns the wire operation of a packet of a send or write.
fn position(operation: Operation, first: bool, last: bool) -> u8 {
    let write = matches!(operation, Operation::Write | Operation::WriteImm);
    match (first, last) {
        (true, false) if write => op::WRITE_FIRST,
        (true, false) => op::SEND_FIRST,
        (false, false) if write => op::WRITE_MIDDLE,
        (false, false) => op::SEND_MIDDLE,
        (false, true) => match operation {
            Operation::Write => op::WRITE_LAST,
            Operation::WriteImm => op::WRITE_LAST_IMM,
            Operation::SendImm => op::SEND_LAST_IMM,
            Operation::SendInvalidate => op::SEND_LAST_INV,
            _ => op::SEND_LAST,
        },
        (true, true) => match operation {
            Operation::Write => op::WRITE_ONLY,
            Operation::WriteImm => op::WRITE_ONLY_IMM,
            Operation::SendImm => op::SEND_ONLY_IMM,
            Operation::SendInvalidate => op::SEND_ONLY_INV,
            _ => op::SEND_ONLY,
        },
    }
}
