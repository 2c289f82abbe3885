//! The responder of connected services: executes requests in PSN order and responds.
//!
//! Responses wait in `replies` in the order of the requests, and [`Qp::reply_step`]
//! sends them. An acknowledgement therefore never overtakes an earlier read response, and
//! one acknowledgement serves a batch of requests.

use super::config::{QpState, Service};
use super::host::{
    Access, AtomicOp, Fault, Host, MessageStart, QpEvent, RecvDone, RecvKind, RecvWork, Source,
    Status, Target,
};
use super::io::Io;
use super::qp::{Qp, nak_of};
use super::recovery::FollowUp;
use super::state::{Message, ReadReply, Reply};
use crate::packet::{
    Aeth, CREDITS_UNLIMITED, NakCode, OpcodeFlags, PacketBuilder, Psn, Syndrome, View, op,
};

/// Number of queued replies at which duplicates no longer get one, and slack beyond
/// what the peer's limit of reads and atomics permits.
const MAX_REPLIES: usize = 64;

/// Reason for which a request was not executed.
enum Refusal {
    /// The peer gets a NAK; the queue pair is in error afterwards.
    Nak(NakCode),
    /// As `Nak`, without an event: a receive has completed with an error.
    Completed(NakCode),
    /// As `Completed`, but the peer gets no response (class J).
    Silent,
    /// No receive is posted.
    NotReady,
    /// Memory is absent now.
    Absent,
}

impl<L> Qp<L> {
    /// Processes a request packet of a connected service.
    pub fn request<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        view: &View<'_>,
    ) -> FollowUp {
        let mut after = FollowUp::Nothing;
        if self.resp.closing {
            return after;
        }
        if self.resp.replies.len() >= self.max_replies() {
            io.counters.dropped += 1;
            return after;
        }
        let reliable = self.config.service.is_reliable();
        let distance = view.bth.psn.distance(self.resp.expected);
        if reliable {
            if distance > 0 {
                io.counters.out_of_sequence += 1;
                if !self.resp.nak_sent {
                    self.resp.nak(Syndrome::Nak(NakCode::SequenceError));
                }
                if self.keeps(distance) {
                    after = FollowUp::Keep;
                }
                return after;
            }
            if distance < 0 {
                io.counters.duplicates += 1;
                self.duplicate(host, view);
                return after;
            }
        } else if view.has(OpcodeFlags::START) {
            // A new message begins (UC): the rest of the previous one is lost.
            if distance != 0 {
                io.counters.out_of_sequence += 1;
            }
            self.abandon();
            self.resp.expected = view.bth.psn;
        } else if distance != 0 {
            io.counters.out_of_sequence += 1;
            self.abandon();
            return after;
        }
        if !self.resp.established {
            self.resp.established = true;
            if self.state == QpState::ReadyToReceive {
                host.event(self.number, QpEvent::Established);
            }
        }
        match self.execute(host, view) {
            Ok(psns) => {
                self.resp.nak_sent = false;
                self.resp.absent = 0;
                self.resp.expected = view.bth.psn.plus(psns);
                if !self.resp.kept.is_empty() {
                    after = FollowUp::Release;
                }
            }
            Err(refusal) => {
                self.refuse(host, io, refusal);
                self.resp.kept.clear();
            }
        }
        after
    }

    /// Returns the maximum number of queued replies. A peer that keeps to its limit of
    /// reads and atomics, with an acknowledgement after each, needs no more; requests
    /// beyond that are dropped.
    fn max_replies(&self) -> usize {
        MAX_REPLIES + 2 * usize::from(self.config.max_dest_rd_atomic)
    }

    /// Gives up a message whose rest is lost (UC), and keeps its receive.
    fn abandon(&mut self) {
        if let Message::Send { recv, .. } = std::mem::replace(&mut self.resp.message, Message::None)
        {
            self.resp.spare = Some(recv);
        }
    }

    fn refuse<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io, refusal: Refusal) {
        if !self.config.service.is_reliable() {
            self.resp.expected = self.resp.expected.plus(1);
            if let Refusal::Completed(_) | Refusal::Silent = refusal {
                self.fail(host, QpState::Error);
            } else {
                io.counters.dropped += 1;
                self.abandon();
            }
            return;
        }
        let (code, event) = match refusal {
            Refusal::NotReady => {
                io.counters.not_ready += 1;
                self.resp.nak(Syndrome::RnrNak(self.config.min_rnr_timer));
                return;
            }
            Refusal::Absent => {
                let code = self.resp.wait_code();
                self.resp.nak(Syndrome::RnrNak(code));
                return;
            }
            Refusal::Nak(NakCode::RemoteAccess) => {
                (Some(NakCode::RemoteAccess), Some(QpEvent::AccessError))
            }
            Refusal::Nak(code) => (Some(code), Some(QpEvent::RequestError)),
            Refusal::Completed(code) => (Some(code), None),
            Refusal::Silent => (None, None),
        };
        let (psn, msn) = (self.resp.expected, self.resp.msn);
        self.resp.closing = true;
        self.resp.replies.push_back(Reply::Fatal {
            psn,
            msn,
            code,
            event,
        });
    }

    /// Executes the expected request. Returns the number of PSNs that it takes.
    fn execute<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        const INVALID: Refusal = Refusal::Nak(NakCode::InvalidRequest);
        if view.opcode.is_none() {
            return Err(INVALID);
        }
        let (start, end) = (view.has(OpcodeFlags::START), view.has(OpcodeFlags::END));
        let mtu = self.config.mtu.bytes();
        let length = view.payload.len() as u32;
        let fits = match (start, end) {
            (_, false) => length == mtu,
            (false, true) => length >= 1 && length <= mtu,
            (true, true) => length <= mtu,
        };
        let in_order = match &self.resp.message {
            Message::None => start,
            Message::Send { .. } => !start && view.has(OpcodeFlags::SEND),
            Message::Write { .. } => !start && view.has(OpcodeFlags::WRITE),
        };
        if !fits || !in_order {
            return Err(INVALID);
        }
        if view.has(OpcodeFlags::SEND) {
            self.execute_send(host, view)
        } else if view.has(OpcodeFlags::WRITE) {
            self.execute_write(host, view)
        } else if view.has(OpcodeFlags::READ) {
            self.execute_read(host, view)
        } else {
            self.execute_atomic(host, view)
        }
    }

    /// Sends an RNR NAK, so that the peer repeats its requests from `psn` on.
    fn send_rnr_nak(&mut self, psn: Psn) {
        let syndrome = Syndrome::RnrNak(self.resp.wait_code());
        let msn = self.resp.msn;
        self.resp
            .replies
            .push_back(Reply::Nak { psn, msn, syndrome });
    }

    /// Returns the object for which the memory access of a request is checked.
    fn target(&self, view: &View<'_>) -> Target {
        Target {
            qpn: self.number,
            xrc_srqn: self.xrc_srqn(view),
        }
    }

    /// Returns the SRQ that a request names (XRC).
    fn xrc_srqn(&self, view: &View<'_>) -> Option<u32> {
        view.xrc_srqn()
            .filter(|_| self.config.service == Service::XrcTarget)
    }

    fn take_recv<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
        start: Option<&MessageStart<'_>>,
    ) -> Result<RecvWork<L>, Refusal> {
        if let Some(spare) = self.resp.spare.take().or_else(|| self.peers.take_spare()) {
            return Ok(spare);
        }
        let named = self.xrc_srqn(view);
        if named.is_some_and(|srqn| !host.may_name(self.number, srqn)) {
            return Err(Refusal::Nak(NakCode::InvalidRequest));
        }
        host.next_recv(self.number, named, start)
            .ok_or(Refusal::NotReady)
    }

    fn recv_done<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
        recv: RecvWork<L>,
        (status, kind, length): (Status, RecvKind, u32),
    ) {
        let source = Source {
            qpn: view.dceth().map_or(0, |header| header.source_qpn),
            link: view.network.link,
            l3: view.network.l3,
            pkey: view.bth.pkey,
            multicast: false,
        };
        let done = RecvDone {
            status,
            kind,
            length,
            imm: view.imm(),
            solicited: view.bth.solicited,
            source: Some(source),
            xrc_srqn: view.xrc_srqn(),
        };
        self.send_rung |= host.recv_done(self.number, recv, done);
    }

    fn execute_send<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        let kind = if view.has(OpcodeFlags::IMM) {
            RecvKind::SendImm
        } else if view.has(OpcodeFlags::INVALIDATE) {
            RecvKind::SendInvalidate
        } else {
            RecvKind::Send
        };
        let (mut recv, offset) = match std::mem::replace(&mut self.resp.message, Message::None) {
            Message::Send { recv, offset } => (recv, offset),
            _ => {
                let start = MessageStart {
                    payload: view.payload.bytes(),
                    single_packet: view.has(OpcodeFlags::END),
                    may_read: self.state == QpState::ReadyToSend,
                };
                (self.take_recv(host, view, Some(&start))?, 0)
            }
        };
        let length = view.payload.len() as u32;
        if length > recv.length.saturating_sub(offset) {
            self.recv_done(host, view, recv, (Status::LocalLength, kind, 0));
            return Err(Refusal::Completed(NakCode::InvalidRequest));
        }
        let stored = match view.payload.bytes() {
            [] => Ok(()),
            payload => host.scatter(self.number, &mut recv.local, offset, payload),
        };
        if stored == Err(Fault::Absent) {
            // The packet is sent again.
            if offset == 0 {
                self.resp.set_spare(recv);
            } else {
                self.resp.message = Message::Send { recv, offset };
            }
            return Err(Refusal::Absent);
        }
        if stored.is_err() {
            self.recv_done(host, view, recv, (Status::LocalProtection, kind, 0));
            return Err(Refusal::Completed(NakCode::RemoteOperation));
        }
        let offset = offset + length;
        if view.has(OpcodeFlags::END) {
            if kind == RecvKind::SendInvalidate
                && host.invalidate(self.target(view), view.imm()).is_err()
            {
                self.recv_done(host, view, recv, (Status::RemoteInvalidRequest, kind, 0));
                return Err(Refusal::Silent);
            }
            self.end_message();
            self.recv_done(host, view, recv, (Status::Success, kind, offset));
        } else {
            self.resp.message = Message::Send { recv, offset };
        }
        self.acknowledge_if_asked(view);
        Ok(1)
    }

    fn end_message(&mut self) {
        self.resp.msn = (self.resp.msn + 1) & 0xff_ffff;
    }

    fn acknowledge_if_asked(&mut self, view: &View<'_>) {
        if view.bth.ack_request && self.config.service.is_reliable() {
            self.resp.acknowledge(view.bth.psn);
        }
    }

    fn execute_write<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        const INVALID: Refusal = Refusal::Nak(NakCode::InvalidRequest);
        let length = view.payload.len() as u32;
        let end = view.has(OpcodeFlags::END);
        let (rkey, va, left, total) = match self.resp.message {
            Message::Write {
                rkey,
                va,
                left,
                total,
            } => (rkey, va, left, total),
            _ => {
                let reth = view.reth().ok_or(INVALID)?;
                if !self.config.allow_write || self.packets_of(reth.length).is_none() {
                    return Err(INVALID);
                }
                if reth.length != 0 {
                    let checked = host.check_remote(
                        self.target(view),
                        reth.rkey,
                        reth.va,
                        reth.length,
                        Access::Write,
                    );
                    if let Err(fault) = checked {
                        let recv = match fault {
                            Fault::Absent => None,
                            _ if end && view.has(OpcodeFlags::IMM) => {
                                self.take_recv(host, view, None).ok()
                            }
                            _ => None,
                        };
                        return Err(self.refuse_write(host, view, recv, fault));
                    }
                }
                (reth.rkey, reth.va, reth.length, reth.length)
            }
        };
        // The last packet has exactly the missing length, any other one less.
        if if end { length != left } else { length >= left } {
            return Err(INVALID);
        }
        let recv = if end && view.has(OpcodeFlags::IMM) {
            Some(self.take_recv(host, view, None)?)
        } else {
            None
        };
        if length != 0 {
            if let Err(fault) = host.remote_write(self.target(view), rkey, va, view.payload) {
                if fault != Fault::Absent {
                    self.resp.message = Message::None;
                }
                return Err(self.refuse_write(host, view, recv, fault));
            }
        }
        if end {
            self.resp.message = Message::None;
            self.end_message();
            if let Some(recv) = recv {
                self.recv_done(
                    host,
                    view,
                    recv,
                    (Status::Success, RecvKind::WriteImm, total),
                );
            }
        } else {
            let va = va.wrapping_add(u64::from(length));
            self.resp.message = Message::Write {
                rkey,
                va,
                left: left - length,
                total,
            };
        }
        self.acknowledge_if_asked(view);
        Ok(1)
    }

    /// Returns the refusal of a write. A receive that it takes ends with an error.
    fn refuse_write<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
        recv: Option<RecvWork<L>>,
        fault: Fault,
    ) -> Refusal {
        match recv {
            Some(recv) if fault == Fault::Absent => {
                self.resp.set_spare(recv);
                Refusal::Absent
            }
            Some(recv) => {
                let result = (Status::LocalAccess, RecvKind::WriteImm, 0);
                self.recv_done(host, view, recv, result);
                Refusal::Completed(nak_of(fault))
            }
            None => refusal(fault),
        }
    }

    fn execute_read<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        const INVALID: Refusal = Refusal::Nak(NakCode::InvalidRequest);
        let reth = view.reth().ok_or(INVALID)?;
        let packets = self.packets_of(reth.length).ok_or(INVALID)?;
        if !self.config.allow_read || !view.payload.is_empty() {
            return Err(INVALID);
        }
        if self.resp.reads >= u32::from(self.config.max_dest_rd_atomic) {
            return Err(INVALID);
        }
        if reth.length != 0 {
            host.check_remote(
                self.target(view),
                reth.rkey,
                reth.va,
                reth.length,
                Access::Read,
            )
            .map_err(refusal)?;
        }
        self.end_message();
        self.resp.reads += 1;
        self.resp.replies.push_back(Reply::Read(ReadReply {
            psn: view.bth.psn,
            end: view.bth.psn.plus(packets),
            msn: self.resp.msn,
            va: reth.va,
            rkey: reth.rkey,
            rest: reth.length,
            target: self.target(view),
            begun: false,
            duplicate: false,
        }));
        Ok(packets)
    }

    fn execute_atomic<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        const INVALID: Refusal = Refusal::Nak(NakCode::InvalidRequest);
        let eth = view.atomic().ok_or(INVALID)?;
        let resources = usize::from(self.config.max_dest_rd_atomic);
        if !self.config.allow_atomic
            || !view.payload.is_empty()
            || eth.va % 8 != 0
            || resources == 0
        {
            return Err(INVALID);
        }
        let operation = match view.opcode.map(|o| o.operation) {
            Some(op::COMPARE_SWAP) => AtomicOp::CompareSwap {
                compare: eth.compare,
                swap: eth.swap_add,
            },
            _ => AtomicOp::FetchAdd { add: eth.swap_add },
        };
        let value = host
            .remote_atomic(self.target(view), eth.rkey, eth.va, operation)
            .map_err(refusal)?;
        self.end_message();
        if self.resp.atomics.len() >= resources {
            self.resp.atomics.pop_front();
        }
        let psn = view.bth.psn;
        self.resp.atomics.push_back((psn, value));
        self.resp.replies.push_back(Reply::Atomic {
            psn,
            msn: self.resp.msn,
            value,
        });
        Ok(1)
    }

    /// Processes a duplicate request: its response was lost.
    fn duplicate<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, view: &View<'_>) {
        let psn = view.bth.psn;
        if self.resp.replies.len() >= MAX_REPLIES {
            return;
        }
        if view.has(OpcodeFlags::SEND) || view.has(OpcodeFlags::WRITE) {
            if view.bth.ack_request {
                // Acknowledges the last executed PSN rather than the duplicate's: a
                // waiting acknowledgement of a later PSN is replaced by this one.
                let done = self.resp.expected.minus(1);
                self.resp.acknowledge(done);
            }
            return;
        }
        if let Some(reth) = view.reth() {
            let Some(packets) = self.packets_of(reth.length) else {
                return;
            };
            let known = psn.plus(packets).distance(self.resp.expected) <= 0;
            let under_way = self.resp.replies.iter().any(|r| {
                matches!(r, Reply::Read(read) if read.psn.distance(psn) <= 0
                    && psn.before(read.end))
            });
            let checked = match reth.length {
                0 => Ok(()),
                length => {
                    host.check_remote(self.target(view), reth.rkey, reth.va, length, Access::Read)
                }
            };
            if checked == Err(Fault::Absent) {
                self.send_rnr_nak(psn);
                return;
            }
            let allowed = checked.is_ok();
            if known && allowed && !under_way && self.config.allow_read {
                self.resp.answer_again(Reply::Read(ReadReply {
                    psn,
                    end: psn.plus(packets),
                    msn: self.resp.msn,
                    va: reth.va,
                    rkey: reth.rkey,
                    rest: reth.length,
                    target: self.target(view),
                    begun: false,
                    duplicate: true,
                }));
            }
        } else if let Some(&(_, value)) = self.resp.atomics.iter().find(|a| a.0 == psn) {
            self.resp.answer_again(Reply::Atomic {
                psn,
                msn: self.resp.msn,
                value,
            });
        }
    }

    /// Sends one response, or one packet of it. Returns whether there was one.
    pub fn reply_step<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io) -> bool {
        match self.config.service {
            Service::DcTarget => self.reply_to_peers(host, io),
            _ => self.reply(host, io),
        }
    }

    /// Sends one response of the responder in `self.resp`; see [`Qp::reply_step`].
    pub fn reply<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io) -> bool {
        let unlimited = Syndrome::Ack(CREDITS_UNLIMITED);
        let Some(front) = self.resp.replies.front_mut() else {
            return false;
        };
        let Some(template) = &self.template else {
            self.resp.replies.clear();
            return false;
        };
        match *front {
            Reply::Read(_) if self.resp.held => return false,
            Reply::Read(ref mut read) => {
                let mtu = self.config.mtu.bytes();
                let payload = read.rest.min(mtu);
                let last = read.rest <= mtu;
                let operation = match (!read.begun, last) {
                    (true, true) => op::READ_RESPONSE_ONLY,
                    (true, false) => op::READ_RESPONSE_FIRST,
                    (false, false) => op::READ_RESPONSE_MIDDLE,
                    (false, true) => op::READ_RESPONSE_LAST,
                };
                let (psn, msn, va, rkey) = (read.psn, read.msn, read.va, read.rkey);
                let target = read.target;
                let duplicate = read.duplicate;
                let begins = !read.begun;
                read.begun = true;
                read.psn = psn.plus(1);
                read.va = va.wrapping_add(u64::from(payload));
                read.rest -= payload;
                let bth = self.bth(operation, psn);
                let mut builder = PacketBuilder::new(&io.pool, template, bth, payload as usize);
                if begins || last {
                    builder.put(
                        &Aeth {
                            syndrome: unlimited,
                            msn,
                        }
                        .bytes(),
                    );
                }
                let result = match payload {
                    0 => Ok(()),
                    _ => host.remote_read(target, rkey, va, builder.space(payload as usize)),
                };
                if result == Err(Fault::Absent) {
                    drop(builder);
                    // The peer requests this response and all later ones again.
                    self.resp.replies.clear();
                    self.resp.reads = 0;
                    self.send_rnr_nak(psn);
                    return true;
                }
                if let Err(fault) = result {
                    drop(builder);
                    // The memory became invalid after the check.
                    self.resp.replies.clear();
                    self.resp.closing = true;
                    let (code, event) = (Some(nak_of(fault)), Some(QpEvent::AccessError));
                    self.resp.replies.push_back(Reply::Fatal {
                        psn,
                        msn,
                        code,
                        event,
                    });
                    return true;
                }
                io.send(builder.finish());
                if last {
                    self.resp.replies.pop_front();
                    self.resp.reads -= u32::from(!duplicate).min(self.resp.reads);
                }
                if self.paces {
                    self.pace(io);
                }
            }
            Reply::Atomic { psn, msn, value } => {
                let bth = self.bth(op::ATOMIC_ACKNOWLEDGE, psn);
                let mut builder = PacketBuilder::new(&io.pool, template, bth, 0);
                builder.put(
                    &Aeth {
                        syndrome: unlimited,
                        msn,
                    }
                    .bytes(),
                );
                builder.put(&value.to_be_bytes());
                io.send(builder.finish());
                self.resp.replies.pop_front();
            }
            Reply::Ack { psn, msn } => {
                self.send_aeth(
                    io,
                    psn,
                    Aeth {
                        syndrome: unlimited,
                        msn,
                    },
                );
                self.resp.replies.pop_front();
            }
            Reply::Nak { psn, msn, syndrome } => {
                self.send_aeth(io, psn, Aeth { syndrome, msn });
                self.resp.replies.pop_front();
            }
            Reply::Fatal {
                psn,
                msn,
                code,
                event,
            } => {
                if let Some(code) = code {
                    let syndrome = Syndrome::Nak(code);
                    self.send_aeth(io, psn, Aeth { syndrome, msn });
                }
                self.resp.replies.pop_front();
                if let Some(event) = event {
                    if self.config.service != Service::DcTarget {
                        host.event(self.number, event);
                    }
                }
                self.fail(host, QpState::Error);
            }
        }
        true
    }

    fn send_aeth(&self, io: &mut Io, psn: Psn, aeth: Aeth) {
        let Some(template) = &self.template else {
            return;
        };
        let mut builder = PacketBuilder::new(&io.pool, template, self.bth(op::ACKNOWLEDGE, psn), 0);
        builder.put(&aeth.bytes());
        io.send(builder.finish());
    }
}

/// Returns the refusal for a failed memory access.
fn refusal(fault: Fault) -> Refusal {
    match fault {
        Fault::Absent => Refusal::Absent,
        other => Refusal::Nak(nak_of(other)),
    }
}
