//! Converts events of connections to events of ids; a request gets an id.

use std::time::Duration;

use rdmacm::{EventKind, RejectReason, SidrStatus, abi};
use zerocopy::IntoBytes;

use super::channel::{Channel, QueuedEvent};
use super::connection::ConnectionState;
use super::id::{Id, Phase, TIMEWAIT};
use super::ids::{Ids, conn_param, event};
use super::machine::Event;
use super::message::{Message, MessageKind};
use super::ports::rank;

impl Ids {
    /// Handles what a command or an input has caused within this process.
    pub(super) fn settle(&mut self) {
        loop {
            while let Some((connection, event)) = self.machine.next_event() {
                self.handle(connection, event);
            }
            let Some(datagram) = self.machine.next_local() else {
                return;
            };
            let (peer, now) = (datagram.to, self.clock.now());
            (self.machine).receive(now, peer, datagram.port, &datagram.bytes);
        }
    }

    /// Does what is due.
    pub(super) fn expire(&mut self, now: Duration) {
        self.machine.expire(now);
        while let Some((at, number)) = self.timewaits.first().copied() {
            if at > now {
                return;
            }
            self.timewaits.pop_first();
            self.queue_event(number, EventKind::TIMEWAIT_EXIT, 0, &[]);
        }
    }

    /// Plans the TIMEWAIT_EXIT of an id, once both ends have ended its connection. As in rdma_cm
    /// there is none before the program disconnects.
    pub(super) fn enter_timewait(&mut self, number: u32) {
        let now = self.clock.now();
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        if id.was_disconnected && id.has_disconnected && id.timewait_end.is_none() {
            let end = now + TIMEWAIT;
            id.timewait_end = Some(end);
            self.timewaits.insert((end, number));
        }
    }

    /// Returns when [`expire`](Self::expire) must be called.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let timewait = self.timewaits.first().map(|(at, _)| *at);
        [self.machine.deadline(), timewait]
            .into_iter()
            .flatten()
            .min()
    }

    fn handle(&mut self, connection: u32, event: Event) {
        if let Event::Request(kind, message) = event {
            return self.handle_request(connection, kind, &message);
        }
        let Some(number) = self.by_connection.get(&connection).copied() else {
            return;
        };
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        match event {
            Event::Request(..) => {}
            Event::Reply(message) => {
                if message.port.ethernet != id.port.ethernet {
                    self.machine.release(self.clock.now(), connection);
                    return self.handle_rejection(number, RejectReason::CONSUMER_DEFINED, None);
                }
                id.set_peer(&message);
                id.request = None;
                id.depths.responder_resources = message.initiator_depth;
                id.depths.initiator_depth = message.responder_resources;
                id.depths.rnr_retry_count = message.rnr_retry_count;
                let param = conn_param(MessageKind::Reply, &message);
                self.queue_event(number, EventKind::CONNECT_RESPONSE, 0, param.as_bytes());
            }
            Event::Established => self.queue_event(number, EventKind::ESTABLISHED, 0, &[]),
            Event::Rejected(reason, message) => {
                let nobody = reason == RejectReason::INVALID_SERVICE_ID;
                // Without a message the process has ended.
                let is_alive = message.is_some();
                let id = self.ids.get(&number);
                let waits = id.is_some_and(|id| id.awaits_heir_until.is_some());
                let again = (nobody || waits && !is_alive) && self.request(number)
                    || (nobody || !is_alive) && self.request_later(number)
                    // It has come to listen in between.
                    || waits && self.request(number);
                if !again {
                    self.handle_rejection(number, reason, message.as_deref());
                }
            }
            Event::ServiceReply(message) => self.handle_service_reply(number, &message),
            Event::TimedOut => {
                self.detach(number, Phase::Closed);
                self.queue_event(number, EventKind::UNREACHABLE, -libc::ETIMEDOUT, &[]);
            }
            Event::Disconnected(status) => {
                // The id has yet to acknowledge it.
                if self.machine.state(connection) != Some(ConnectionState::DreqRcvd) {
                    self.detach(number, Phase::Closed);
                }
                self.queue_event(number, EventKind::DISCONNECTED, status, &[]);
                if let Some(id) = self.ids.get_mut(&number) {
                    id.was_disconnected = true;
                }
                self.enter_timewait(number);
            }
        }
    }

    fn handle_rejection(&mut self, number: u32, reason: RejectReason, message: Option<&Message>) {
        self.detach(number, Phase::Closed);
        let kind = MessageKind::Reject;
        let nothing = Message::new(kind, &[]);
        let param = conn_param(kind, message.unwrap_or(&nothing));
        self.queue_event(number, EventKind::REJECTED, reason.0, param.as_bytes());
    }

    fn handle_service_reply(&mut self, number: u32, message: &Message) {
        let status = i32::from(message.reason);
        let nobody = status == SidrStatus::UNSUPPORTED.0;
        if nobody && (self.request(number) || self.request_later(number)) {
            return;
        }
        let phase = match status {
            0 => Phase::Connected,
            _ => Phase::Closed,
        };
        self.detach(number, phase);
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        id.set_peer(message);
        let param = ud_param(MessageKind::ServiceReply, message, id);
        let what = match status {
            0 => EventKind::ESTABLISHED,
            _ => EventKind::UNREACHABLE,
        };
        self.queue_event(number, what, status, param.as_bytes());
    }

    /// Returns the listening id that a request is for.
    pub(super) fn listener_for(&self, kind: MessageKind, message: &Message) -> Option<u32> {
        let of_port = self.listeners.get(&(message.space, message.to.port()))?;
        let datagram = kind == MessageKind::ServiceRequest;
        let accepts = |id: &Id| id.datagram == datagram && id.is_at(message.to, message.from.ip());
        let all = of_port
            .iter()
            .filter_map(|number| Some((*number, self.ids.get(number)?)));
        let best = all.filter(|(_, id)| accepts(id)).min_by_key(|(_, id)| {
            let ip = id.local.map(|local| local.ip());
            ip.map(|ip| rank(ip, message.to.ip()))
        });
        best.map(|(number, _)| number)
    }

    /// Handles a connection request, for which there is an id from now on.
    fn handle_request(&mut self, connection: u32, kind: MessageKind, message: &Message) {
        let now = self.clock.now();
        let found = self.listener_for(kind, message);
        let found = found.filter(|_| !self.machine.is_closed());
        let found = found.and_then(|number| Some((number, self.ids.get(&number)?)));
        let Some((number, listener)) = found else {
            // A process of this host knows that, and asks again itself.
            if self.host_addresses.is_some() && self.ports.awaits_heir(message) {
                return self.machine.forget(connection);
            }
            return self.machine.reject_request(now, connection, true);
        };
        if message.port.ethernet != listener.port.ethernet {
            let reason = RejectReason::INVALID_GID.0 as u8;
            return self.machine.reject_and_forget(now, connection, reason);
        }
        let channel = self.channels.get(&listener.channel);
        if channel.is_some_and(Channel::is_lost) {
            let fd = listener.channel;
            self.leave_channel(fd);
            return self.machine.forget(connection);
        }
        let unread = channel.map_or(usize::MAX, |it| it.requests(number));
        if unread >= listener.backlog as usize {
            return self.machine.reject_request(now, connection, false);
        }
        let (uid, fd, datagram) = (listener.uid, listener.channel, listener.datagram);
        let psn = self.ports.random.next();
        let mut id = Id::new(fd, listener.port, listener.space, datagram, psn);
        id.phase = Phase::Connected;
        id.connection = Some(connection);
        (id.local, id.peer) = (Some(message.to), Some(message.from));
        id.may_be_remote = self.host_addresses.is_some();
        id.port = id
            .port
            .at(message.to.ip(), self.host_addresses.as_deref())
            .toward(message.port.gid);
        self.machine
            .set_port(connection, id.port.address(), id.port.node_guid);
        id.port.mtu = id.port.mtu.min(message.mtu);
        id.set_peer(message);
        id.tos = listener.tos;
        id.ack_timeout = listener.ack_timeout;
        id.depths.responder_resources = message.initiator_depth;
        id.depths.initiator_depth = message.responder_resources;
        id.depths.retry_count = message.retry_count;
        id.depths.rnr_retry_count = message.rnr_retry_count;
        let request = self.number();
        let param = if datagram {
            ud_param(kind, message, &id).as_bytes().to_vec()
        } else {
            conn_param(kind, message).as_bytes().to_vec()
        };
        self.ids.insert(request, id);
        self.by_connection.insert(connection, request);
        let queued = QueuedEvent {
            id: number,
            membership: None,
            request: Some(request),
            event: event((uid, request), EventKind::CONNECT_REQUEST, 0, &param),
        };
        if let Some(channel) = self.channels.get_mut(&fd) {
            channel.push(queued);
        }
    }
}

/// Returns the parameters of an event of a datagram service.
fn ud_param(kind: MessageKind, message: &Message, id: &Id) -> abi::UdParam {
    let mut param = abi::UdParam {
        private_data_len: kind.max_private_data() as u8,
        ..Default::default()
    };
    if kind == MessageKind::ServiceReply {
        param.qp_num = message.qp_num;
        param.qkey = message.qkey;
        param.ah_attr = id.path().unwrap_or_default();
    }
    let data = message.private_data();
    param.private_data[..data.len()].copy_from_slice(data);
    param
}
