//! The responder of connected services: executes requests in PSN order and responds.
//!
//! Responses wait in `replies` in the order of the requests, and [`Qp::reply_step`]
//! sends them. An acknowledgement therefore never overtakes an earlier read response, and
//! one acknowledgement serves a batch of requests.

use super::cause::{Cause, DropCause, Refusal, Response};
use super::config::{QpState, Service};
use super::host::{
    Access, AtomicOp, Counted, Fault, Host, MessageStart, QpEvent, RecvDone, RecvKind, RecvWork,
    Source, Target,
};
use super::io::Io;
use super::qp::Qp;
use super::recovery::FollowUp;
use super::state::{Message, ReadReply, RefusedRequest, Reply};
use crate::packet::{
    Aeth, CREDITS_UNLIMITED, NakCode, OpcodeFlags, PacketBuilder, Psn, Syndrome, View, op,
};

/// Number of queued replies at which duplicates no longer get one, and slack beyond
/// what the peer's limit of reads and atomics permits.
const MAX_REPLIES: usize = 64;
/// The syndrome of a positive response: credits are not limited.
const ACK: Syndrome = Syndrome::Ack(CREDITS_UNLIMITED);

impl<L> Qp<L> {
    /// Processes a request packet of a connected service.
    pub fn request<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        view: &View<'_>,
    ) -> Result<FollowUp, DropCause> {
        if self.resp.closing {
            return Err(DropCause::Closing);
        }
        let waiting = self.resp.replies.len();
        if waiting >= self.max_replies() {
            return Err(DropCause::Replies(waiting));
        }
        let (psn, expected) = (view.bth.psn, self.resp.expected);
        let missing = DropCause::OutOfSequence { psn, expected };
        let reliable = self.config.service.is_reliable();
        let distance = psn.distance(expected);
        if reliable {
            if distance > 0 {
                host.count(self.number, Counted::OutOfSequence);
                if !self.resp.nak_sent {
                    self.resp.nak(Syndrome::Nak(NakCode::SequenceError));
                }
                if !self.keeps(distance) {
                    return Err(missing);
                }
                io.counters.out_of_sequence += 1;
                return Ok(FollowUp::Keep);
            }
            if distance < 0 {
                host.count(self.number, Counted::Duplicate);
                self.duplicate(host, view);
                return Err(DropCause::Duplicate(psn));
            }
        } else if view.has(OpcodeFlags::START) {
            // A new message begins (UC): the rest of the previous one is lost.
            if distance != 0 {
                io.counters.out_of_sequence += 1;
            }
            self.abandon();
            self.resp.expected = psn;
        } else if distance != 0 {
            self.abandon();
            return Err(missing);
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
                self.resp.expected = psn.plus(psns);
                Ok(match self.resp.kept.is_empty() {
                    true => FollowUp::Nothing,
                    false => FollowUp::Release,
                })
            }
            Err(refusal) => {
                self.refuse_expected(host, io, refusal);
                Ok(FollowUp::Nothing)
            }
        }
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

    /// Returns whether a packet is the request that is executed next.
    pub fn executes_next(&self, view: &View<'_>) -> bool {
        let waiting = self.resp.replies.len();
        self.config.service.is_reliable()
            && self.accepts(view).is_ok()
            && !view.has(OpcodeFlags::RESPONSE)
            && !self.resp.closing
            && waiting < self.max_replies()
            && view.bth.psn == self.resp.expected
    }

    /// Refuses the request that [is next](Self::executes_next).
    pub fn refuse_expected<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        refusal: Refusal,
    ) {
        host.report(Some(self.number), refusal.into());
        self.refuse(host, io, refusal);
        self.resp.kept.clear();
    }

    fn refuse<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io, refusal: Refusal) {
        if !self.config.service.is_reliable() {
            self.resp.expected = self.resp.expected.plus(1);
            if let Some((recv, done)) = self.resp.failed.take() {
                self.send_rung |= host.recv_done(self.number, recv, done);
                self.fail(host, QpState::Error);
            } else {
                io.counters.dropped += 1;
                self.abandon();
            }
            return;
        }
        match refusal.response() {
            Response::NotReady => {
                io.counters.not_ready += 1;
                self.resp.nak(Syndrome::RnrNak(self.config.min_rnr_timer));
            }
            Response::AbsentMemory => {
                let code = self.resp.wait_code();
                self.resp.nak(Syndrome::RnrNak(code));
            }
            Response::Sequence => self.resp.nak(Syndrome::Nak(NakCode::SequenceError)),
            Response::Nak(..) | Response::Nothing => {
                let (psn, msn) = (self.resp.expected, self.resp.msn);
                self.resp.closing = true;
                let fatal = Reply::Fatal { psn, msn, refusal };
                self.resp.replies.push_back(fatal);
                if self.config.service == Service::DcTarget && self.resp.failed.is_some() {
                    // The connection may be replaced before its NAK is sent.
                    self.end_refusal(host, io, refusal);
                }
            }
        }
    }

    /// Executes the expected request. Returns the number of PSNs that it takes.
    fn execute<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        let opcode = view.bth.opcode;
        if view.opcode.is_none() {
            return Err(Refusal::Opcode(opcode));
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
        if !fits {
            let limit = mtu;
            return Err(Refusal::PayloadLength { length, limit });
        }
        if !in_order {
            return Err(Refusal::Order(opcode));
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
        if let Some(srqn) = named.filter(|srqn| !host.may_name(self.number, *srqn)) {
            return Err(Refusal::Srq(srqn));
        }
        host.next_recv(self.number, named, start)
            .ok_or(Refusal::NoReceive)
    }

    /// Completes a receive; after an error, when the request is refused.
    fn recv_done<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
        recv: RecvWork<L>,
        kind: RecvKind,
        result: Result<u32, Refusal>,
    ) {
        let source = Source {
            qpn: view.dceth().map_or(0, |header| header.source_qpn),
            link: view.network.link,
            l3: view.network.l3,
            pkey: view.bth.pkey,
            multicast: false,
        };
        let done = RecvDone {
            cause: result.err().map(Cause::from),
            kind,
            length: result.unwrap_or(0),
            imm: view.imm(),
            solicited: view.bth.solicited,
            source: Some(source),
            xrc_srqn: view.xrc_srqn(),
        };
        match result {
            Ok(_) => self.send_rung |= host.recv_done(self.number, recv, done),
            Err(_) => {
                host.recv_failed(self.number, &recv);
                self.resp.failed = Some((recv, done));
            }
        }
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
        let room = recv.length;
        if length > room.saturating_sub(offset) {
            let length = offset + length;
            let refusal = Refusal::ReceiveLength { length, room };
            self.recv_done(host, view, recv, kind, Err(refusal));
            return Err(refusal);
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
            return Err(Refusal::AbsentMemory);
        }
        if let Err(fault) = stored {
            let refusal = Refusal::ReceiveMemory(fault);
            self.recv_done(host, view, recv, kind, Err(refusal));
            return Err(refusal);
        }
        let offset = offset + length;
        if view.has(OpcodeFlags::END) {
            if kind == RecvKind::SendInvalidate
                && host.invalidate(self.target(view), view.imm()).is_err()
            {
                let refusal = Refusal::InvalidatedKey(view.imm());
                self.recv_done(host, view, recv, kind, Err(refusal));
                return Err(refusal);
            }
            self.end_message();
            self.recv_done(host, view, recv, kind, Ok(offset));
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
                let reth = view.reth().ok_or(Refusal::Headers)?;
                if !self.config.allow_write {
                    return Err(Refusal::Permission(Access::Write));
                }
                if self.packets_of(reth.length).is_none() {
                    return Err(Refusal::MessageLength(reth.length));
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
                        let at = (reth.rkey, reth.va, reth.length);
                        return Err(self.refuse_write(host, view, recv, at, fault));
                    }
                }
                (reth.rkey, reth.va, reth.length, reth.length)
            }
        };
        // The last packet has exactly the missing length, any other one less.
        if if end { length != left } else { length >= left } {
            let limit = left;
            return Err(Refusal::PayloadLength { length, limit });
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
                return Err(self.refuse_write(host, view, recv, (rkey, va, length), fault));
            }
        }
        if end {
            self.resp.message = Message::None;
            self.end_message();
            if let Some(recv) = recv {
                self.recv_done(host, view, recv, RecvKind::WriteImm, Ok(total));
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
        at: (u32, u64, u32),
        fault: Fault,
    ) -> Refusal {
        let refusal = refuse_access(Access::Write, at, recv.is_some())(fault);
        match recv {
            Some(recv) if fault == Fault::Absent => self.resp.set_spare(recv),
            Some(recv) => self.recv_done(host, view, recv, RecvKind::WriteImm, Err(refusal)),
            None => {}
        }
        refusal
    }

    fn execute_read<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        let reth = view.reth().ok_or(Refusal::Headers)?;
        let packets = self.packets_of(reth.length);
        let packets = packets.ok_or(Refusal::MessageLength(reth.length))?;
        self.permits(self.config.allow_read, Access::Read, view)?;
        let limit = u32::from(self.config.max_dest_rd_atomic);
        if self.resp.reads >= limit {
            return Err(Refusal::Reads(limit));
        }
        // Without bytes the key is not checked (IBA 9.7.4.1.5).
        if reth.length != 0 {
            host.check_remote(
                self.target(view),
                reth.rkey,
                reth.va,
                reth.length,
                Access::Read,
            )
            .map_err(refuse_access(
                Access::Read,
                (reth.rkey, reth.va, reth.length),
                false,
            ))?;
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

    /// Checks that a read or atomic is permitted, and has no payload.
    fn permits(&self, permitted: bool, access: Access, view: &View<'_>) -> Result<(), Refusal> {
        if !permitted {
            return Err(Refusal::Permission(access));
        }
        match view.payload.len() as u32 {
            0 => Ok(()),
            length => Err(Refusal::PayloadLength { length, limit: 0 }),
        }
    }

    fn execute_atomic<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<u32, Refusal> {
        let eth = view.atomic().ok_or(Refusal::Headers)?;
        let resources = usize::from(self.config.max_dest_rd_atomic);
        self.permits(self.config.allow_atomic, Access::Atomic, view)?;
        if eth.va % 8 != 0 {
            return Err(Refusal::Alignment(eth.va));
        }
        if resources == 0 {
            return Err(Refusal::Reads(0));
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
            .map_err(refuse_access(Access::Atomic, (eth.rkey, eth.va, 8), false))?;
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
        let Some(front) = self.resp.replies.front() else {
            return false;
        };
        if self.template.is_none() {
            self.resp.replies.clear();
            return false;
        }
        match *front {
            Reply::Read(_) => return !self.resp.held && self.reply_read(host, io),
            Reply::Atomic { psn, msn, value } => self.reply_atomic(io, psn, msn, value),
            Reply::Ack { psn, msn } => {
                let syndrome = ACK;
                self.send_aeth(io, psn, Aeth { syndrome, msn });
            }
            Reply::Nak { psn, msn, syndrome } => self.send_aeth(io, psn, Aeth { syndrome, msn }),
            Reply::Fatal { psn, msn, refusal } => {
                if let Response::Nak(code, _) = refusal.response() {
                    let syndrome = Syndrome::Nak(code);
                    self.send_aeth(io, psn, Aeth { syndrome, msn });
                }
                self.resp.replies.pop_front();
                match self.config.service {
                    // Only the connection ends, and there is no event.
                    Service::DcTarget => self.fail(host, QpState::Error),
                    _ => self.end_refusal(host, io, refusal),
                }
                return true;
            }
        }
        self.resp.replies.pop_front();
        true
    }

    /// Sends one packet of the read response at the front. Returns whether there was one.
    fn reply_read<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io) -> bool {
        let (Some(Reply::Read(read)), Some(template)) =
            (self.resp.replies.front_mut(), &self.template)
        else {
            return false;
        };
        let mtu = self.config.mtu.bytes();
        let payload = read.rest.min(mtu);
        let (begins, last) = (!read.begun, read.rest <= mtu);
        let operation = match (begins, last) {
            (true, true) => op::READ_RESPONSE_ONLY,
            (true, false) => op::READ_RESPONSE_FIRST,
            (false, false) => op::READ_RESPONSE_MIDDLE,
            (false, true) => op::READ_RESPONSE_LAST,
        };
        let (psn, msn, va, rkey) = (read.psn, read.msn, read.va, read.rkey);
        let (target, duplicate) = (read.target, read.duplicate);
        read.begun = true;
        read.psn = psn.plus(1);
        read.va = va.wrapping_add(u64::from(payload));
        read.rest -= payload;
        let bth = self.bth(operation, psn);
        let mut builder = PacketBuilder::new(&io.pool, template, bth, payload as usize);
        if begins || last {
            let syndrome = ACK;
            builder.put(&Aeth { syndrome, msn }.bytes());
        }
        let result = match payload {
            0 => Ok(()),
            _ => host.remote_read(target, rkey, va, builder.space(payload as usize)),
        };
        match result {
            Ok(()) => {}
            Err(Fault::Absent) => {
                drop(builder);
                // The peer requests this response and all later ones again.
                self.resp.replies.clear();
                self.resp.reads = 0;
                self.send_rnr_nak(psn);
                return true;
            }
            Err(fault) => {
                drop(builder);
                // The memory became invalid after the check.
                self.resp.replies.clear();
                self.resp.closing = true;
                let at = (rkey, va, payload);
                let refusal = refuse_access(Access::Read, at, false)(fault);
                host.report(Some(self.number), refusal.into());
                let fatal = Reply::Fatal { psn, msn, refusal };
                self.resp.replies.push_back(fatal);
                return true;
            }
        }
        io.send(builder.finish());
        if last {
            self.resp.replies.pop_front();
            self.resp.reads -= u32::from(!duplicate).min(self.resp.reads);
        }
        if self.paces {
            self.pace(io);
        }
        true
    }

    fn reply_atomic(&self, io: &mut Io, psn: Psn, msn: u32, value: u64) {
        let Some(template) = &self.template else {
            return;
        };
        let bth = self.bth(op::ATOMIC_ACKNOWLEDGE, psn);
        let mut builder = PacketBuilder::new(&io.pool, template, bth, 0);
        let syndrome = ACK;
        builder.put(&Aeth { syndrome, msn }.bytes());
        builder.put(&value.to_be_bytes());
        io.send(builder.finish());
    }

    /// Ends the processing of a refused request, once its NAK was sent.
    fn end_refusal<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        refusal: Refusal,
    ) {
        let recv = self.resp.failed.take();
        let (has_nak, event) = match refusal.response() {
            Response::Nak(_, event) => (true, event),
            _ => (false, None),
        };
        self.refused.push(RefusedRequest { recv, event });
        match io.confirmed && has_nak {
            true => io.refusing.push(self.number),
            false => self.end_refused(host),
        }
    }

    /// Reports refused requests, and ends the connection.
    pub fn end_refused<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        if self.refused.is_empty() {
            return;
        }
        self.complete_refused(host);
        if self.config.service != Service::DcTarget {
            self.fail(host, QpState::Error);
        }
    }

    /// Reports refused requests.
    pub fn complete_refused<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        let failed = self.resp.failed.take().map(|recv| RefusedRequest {
            recv: Some(recv),
            event: None,
        });
        for RefusedRequest { recv, event } in self.refused.drain(..).chain(failed) {
            if let Some((recv, done)) = recv {
                self.send_rung |= host.recv_done(self.number, recv, done);
            }
            if let Some(event) = event {
                host.event(self.number, event);
            }
        }
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

/// Returns the refusal for a failed access to memory (key, address and length), given the
/// fault.
fn refuse_access(
    access: Access,
    (rkey, va, length): (u32, u64, u32),
    receive: bool,
) -> impl Fn(Fault) -> Refusal {
    move |fault| match fault {
        Fault::Absent => Refusal::AbsentMemory,
        fault => Refusal::RemoteMemory {
            rkey,
            va,
            length,
            access,
            fault,
            receive,
        },
    }
}
