//! A queue pair: attributes and state. Its two halves are in [`super::requester`] and
//! [`super::responder`].

use super::cause::{DropCause, Failure};
use super::config::{QpConfig, QpState, QpView, Service};
use super::congestion::Congestion;
use super::host::{Host, QpEvent, RecvDone, RecvWork, SendDone};
use super::io::{Io, MAX_MESSAGE};
use super::recovery::FollowUp;
use super::state::{Initiator, Peers, RefusedRequest, Requester, Responder};
use crate::packet::{
    Bth, Class, Gid, L3, Link, Opcode, OpcodeFlags, Path, Psn, Roce, Template, View,
};

/// A queue pair.
pub(super) struct Qp<L> {
    pub number: u32,
    /// Losses are recovered from before a timeout.
    pub recovers: bool,
    /// Congestion is controlled.
    pub paces: bool,
    pub congestion: Congestion,
    pub config: QpConfig,
    pub state: QpState,
    pub template: Option<Template>,
    /// The queue pair is in the transport's `ready` list.
    pub queued: bool,
    /// Time of its valid entry in the timer heap; later entries are stale.
    pub armed: u64,
    /// The send queue may have work requests.
    pub send_rung: bool,
    /// The receive queue may have work requests to flush.
    pub recv_rung: bool,
    pub last_wqe_due: bool,
    pub drain_due: bool,
    /// Path of the last multicast sent.
    pub multicast_path: Option<Path>,
    pub req: Requester<L>,
    pub resp: Responder<L>,
    pub initiator: Initiator,
    pub peers: Peers<L>,
    /// Refused requests whose NAK has not been confirmed to be sent.
    pub refused: Vec<RefusedRequest<L>>,
}

impl<L> Qp<L> {
    pub fn new(number: u32, config: QpConfig) -> Self {
        Self {
            number,
            recovers: false,
            paces: false,
            congestion: Congestion::default(),
            template: None,
            state: QpState::Reset,
            queued: false,
            armed: u64::MAX,
            send_rung: false,
            recv_rung: false,
            last_wqe_due: false,
            drain_due: false,
            multicast_path: None,
            req: Requester::new(),
            resp: Responder::new(),
            initiator: Initiator::default(),
            peers: Peers::new(),
            refused: Vec::new(),
            config,
        }
    }

    pub fn view(&self) -> QpView {
        QpView {
            state: self.state,
            send_psn: self.req.next_psn.value(),
            recv_psn: self.resp.expected.value(),
            draining: self.drain_due,
            outstanding: self.req.works.len(),
        }
    }

    /// Modifies the state and all attributes.
    pub fn modify<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        to: QpState,
        mut config: QpConfig,
    ) {
        config.service = self.config.service;
        self.template = config
            .path
            .map(|path| Template::new(&self.ecn_capable(path)));
        self.config = config;
        self.adopt_connection();
        let from = self.state;
        self.state = to;
        match to {
            QpState::Reset => {
                // Reset discards work requests without completions.
                self.req = Requester::new();
                self.resp = Responder::new();
                self.initiator.reset();
                self.refused.clear();
                self.congestion = Congestion::default();
                self.send_rung = false;
                self.recv_rung = false;
                self.drain_due = false;
                self.last_wqe_due = false;
            }
            QpState::ReadyToReceive if from != QpState::ReadyToReceive => {
                self.resp
                    .start(Psn::new(self.config.recv_psn), &self.config);
            }
            QpState::ReadyToSend => {
                if matches!(
                    from,
                    QpState::ReadyToReceive | QpState::Init | QpState::Reset
                ) {
                    self.req.start(Psn::new(self.config.send_psn));
                    self.open_window(Psn::new(self.config.send_psn));
                }
                self.req.refill(&self.config);
                self.send_rung = true;
                self.drain_due = false;
            }
            QpState::SendQueueDrain => self.drain_due = true,
            QpState::Error if from != QpState::Error => self.flush(host),
            _ => {}
        }
    }

    /// Moves the queue pair to an error state because of an error that the transport found.
    pub fn fail<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, to: QpState) {
        if self.state == QpState::Error {
            return;
        }
        if self.config.service == Service::DcTarget {
            // For a DC target, only the connection has failed.
            let recv = self.resp.clear();
            self.peers.set_spare(recv);
            return;
        }
        self.state = to;
        host.event(self.number, QpEvent::State(to));
        if to == QpState::Error {
            self.flush(host);
        } else {
            self.flush_sends(host);
        }
    }

    fn flush_sends<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        self.drain_due = false;
        for pending in self.req.clear() {
            let done = SendDone::failed(Failure::Flushed);
            host.send_done(self.number, pending, done);
        }
        // The work requests not yet taken are flushed by `flush_one`.
        self.send_rung = true;
    }

    fn flush<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) {
        self.complete_refused(host);
        self.flush_sends(host);
        if let Some(work) = self.resp.clear() {
            self.recv_flushed(host, work);
        }
        self.recv_rung = true;
        self.last_wqe_due = self.config.srq;
    }

    fn recv_flushed<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, work: RecvWork<L>) {
        host.recv_done(self.number, work, RecvDone::failed(Failure::Flushed));
    }

    /// Flushes one work request. Returns whether there was one.
    pub fn flush_one<H: Host<LocalBuffers = L>>(&mut self, host: &mut H) -> bool {
        if self.send_rung && matches!(self.state, QpState::Error | QpState::SendQueueError) {
            match host.next_send(self.number) {
                Some(work) => {
                    host.send_done(self.number, work, SendDone::failed(Failure::Flushed));
                    return true;
                }
                None => self.send_rung = false,
            }
        }
        if self.state != QpState::Error {
            return false;
        }
        if self.last_wqe_due {
            self.last_wqe_due = false;
            host.event(self.number, QpEvent::LastWqe);
        }
        if self.recv_rung {
            if !self.config.srq && self.config.service != Service::XrcTarget {
                if let Some(work) = host.next_recv(self.number, None, None) {
                    self.recv_flushed(host, work);
                    return true;
                }
            }
            self.recv_rung = false;
        }
        false
    }

    /// Returns whether [`super::Transport::run`] has something to do for this queue
    /// pair.
    pub fn has_work(&self) -> bool {
        match self.state {
            QpState::Reset | QpState::Init => false,
            QpState::Error => self.send_rung || self.recv_rung || self.last_wqe_due,
            _ if self.config.service == Service::DcTarget => self.peers.have_replies(),
            QpState::SendQueueError => self.send_rung || self.resp.has_replies(),
            QpState::ReadyToReceive => self.resp.has_replies(),
            QpState::ReadyToSend | QpState::SendQueueDrain => {
                self.resp.has_replies()
                    || self
                        .req
                        .can_continue(self.send_rung && self.state == QpState::ReadyToSend)
                    || (self.drain_due && self.req.works.is_empty())
            }
        }
    }

    /// Returns a BTH for a packet to the peer.
    #[inline]
    pub fn bth(&self, operation: u8, psn: Psn) -> Bth {
        Bth {
            opcode: Opcode {
                class: self.class(),
                operation,
            }
            .encode(),
            solicited: false,
            migrated: true,
            pad: 0,
            version: 0,
            pkey: self.config.pkey,
            dest_qpn: self.config.remote_qpn,
            ack_request: false,
            psn,
        }
    }

    /// Returns the opcode class of the packets.
    #[inline]
    pub fn class(&self) -> Class {
        match self.config.service {
            Service::Rc => Class::Rc,
            Service::Uc => Class::Uc,
            Service::Ud => Class::Ud,
            Service::XrcInitiator | Service::XrcTarget => Class::Xrc,
            Service::DcInitiator | Service::DcTarget => Class::Dc,
        }
    }

    /// Checks whether a packet is for this queue pair's service, state and partition, and from
    /// its peer.
    #[inline]
    pub fn accepts(&self, view: &View<'_>) -> Result<(), DropCause> {
        let opcode = view.bth.opcode;
        let class = view.opcode.map_or(opcode & 0xe0, |o| o.class as u8);
        let service = self.config.service;
        if class != self.class() as u8 {
            return Err(DropCause::Service { opcode, service });
        }
        if !self.state.receives() {
            return Err(DropCause::State(self.state));
        }
        let (packet, own) = (view.bth.pkey, self.config.pkey);
        if !self.pkey_matches(packet) {
            return Err(DropCause::PartitionKey { packet, own });
        }
        if service != Service::Ud && !self.is_from_peer(view) {
            return Err(match self.speaks(view.network.l3) {
                true => DropCause::Peer,
                false => DropCause::RoceVersion,
            });
        }
        Ok(())
    }

    /// Processes a packet that [`Qp::accepts`].
    #[inline]
    pub fn packet<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        view: &View<'_>,
    ) -> Result<FollowUp, DropCause> {
        // Whoever sends packets that may be marked slows down, though this side may not.
        if view.network.is_marked(view.frame) && self.config.path.is_some() {
            self.process_mark(io, now, view);
        }
        let (service, opcode) = (self.config.service, view.bth.opcode);
        let is_response = view.has(OpcodeFlags::RESPONSE);
        let done = match service {
            Service::Ud if view.opcode.is_none() => Err(DropCause::Service { opcode, service }),
            Service::Ud => self.datagram(host, view),
            Service::XrcTarget | Service::DcTarget if is_response => {
                Err(DropCause::Direction(service))
            }
            _ if is_response => self.response(host, io, now, view),
            Service::XrcInitiator | Service::DcInitiator => Err(DropCause::Direction(service)),
            Service::DcTarget => self.request_of_peer(host, io, view),
            _ => return self.request(host, io, view),
        };
        done.map(|()| FollowUp::Nothing)
    }

    /// Returns whether a packet may have come from the connected peer.
    pub fn is_from_peer(&self, view: &View<'_>) -> bool {
        let network = &view.network;
        self.speaks(network.l3) && self.is_connected_to(network.link, network.sgid(view.frame))
    }

    /// Returns whether packets of the connected peer have these headers: GIDs of RoCE v1 and v2
    /// do not reach each other.
    pub fn speaks(&self, l3: L3) -> bool {
        let path = self.config.path.as_ref();
        path.is_none_or(|path| match path.link {
            Link::Ib { .. } => true,
            _ => (path.roce == Roce::V1) == (l3 == L3::Grh),
        })
    }

    /// Returns whether the connected peer may send packets with these addresses.
    pub fn is_connected_to(&self, link: Link, sgid: Option<Gid>) -> bool {
        let Some(path) = &self.config.path else {
            return true;
        };
        match (path.link, link) {
            // The low bits of a LID are path bits (LMC) and may differ.
            (Link::Ib { dlid, .. }, Link::Ib { slid, .. }) => dlid & !0x7f == slid & !0x7f,
            (Link::Ether { .. }, Link::Ether { .. }) | (Link::Ip, Link::Ip) => {
                path.grh.map(|g| g.dgid) == sgid
            }
            _ => false,
        }
    }

    /// Returns whether a partition key matches: same partition, and at least one full
    /// member.
    #[inline]
    pub fn pkey_matches(&self, pkey: u16) -> bool {
        let own = self.config.pkey;
        self.config.any_pkey || (own & 0x7fff == pkey & 0x7fff && (own | pkey) & 0x8000 != 0)
    }

    /// Returns the number of packets of a message, or `None` if it is too long.
    pub fn packets_of(&self, length: u32) -> Option<u32> {
        let packets = self.config.mtu.packets(length);
        // The PSNs of one message stay within half the PSN range, so that order is
        // defined.
        (length <= MAX_MESSAGE && packets < Psn::RANGE / 2).then_some(packets)
    }
}
