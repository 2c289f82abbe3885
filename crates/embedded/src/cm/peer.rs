//! Input from peers: connections, messages, and closed sockets.

use std::time::Instant;

use rdmacm::{EventKind, RejectReason, SidrStatus, abi};
use zerocopy::IntoBytes;

use super::channel::QueuedEvent;
use super::id::{Id, MAX_PENDING, Phase};
use super::link::ReceiveResult;
use super::monitor::{MonitoredLink, Ready};
use super::state::{State, conn_param, event};
use super::wire::{Message, MessageKind};
use crate::Result;

impl Id {
    /// Sends a message to the peer.
    pub(super) fn send(&self, message: &Message) {
        if let Some(socket) = &self.socket {
            socket.send(message);
        }
    }

    /// Ends the connection.
    pub(super) fn close(&mut self) {
        self.phase = Phase::Closed;
        self.socket = None;
        self.deadline = None;
    }
}

impl State {
    /// Handles a ready descriptor, whose id may no longer exist.
    ///
    /// # Errors
    /// Errors of accepting a connection; the listener stays ready.
    pub(super) fn handle(&mut self, item: Ready) -> Result<()> {
        match item {
            Ready::Deadline => self.expire(),
            Ready::Socket(number) => self.receive_from_peer(number),
            Ready::Listener(number) => return self.accept_connection(number),
            Ready::Pending(number, index) => self.receive_request(number, index),
        }
        Ok(())
    }

    /// Handles ids whose deadline has passed.
    fn expire(&mut self) {
        let now = Instant::now();
        let deadlines = self.ids.iter().filter_map(|(number, id)| {
            let deadline = id.deadline?;
            Some((deadline, *number))
        });
        let (late, pending): (Vec<_>, Vec<_>) = deadlines.partition(|(at, _)| *at <= now);
        self.due = pending.iter().map(|(at, _)| *at).min();
        self.monitor.set_timer(self.due);
        for (_, number) in late {
            let Some(id) = self.ids.get_mut(&number) else {
                continue;
            };
            let what = if id.phase == Phase::Disconnecting {
                EventKind::DISCONNECTED
            } else {
                EventKind::UNREACHABLE
            };
            id.close();
            self.queue_event(number, what, -libc::ETIMEDOUT, &[]);
        }
    }

    /// Accepts a connection to a listening id.
    fn accept_connection(&mut self, number: u32) -> Result<()> {
        let Some(id) = self.ids.get_mut(&number) else {
            return Ok(());
        };
        let (Some(listener), Some(bound_port)) = (&id.listener, &id.bound_port) else {
            return Ok(());
        };
        let Some(connection) = bound_port.accept(listener)? else {
            return Ok(());
        };
        let free = id.pending.iter().position(Option::is_none);
        let index = match free {
            Some(index) => index,
            None if id.pending.len() < MAX_PENDING => {
                id.pending.push(None);
                id.pending.len() - 1
            }
            // There are fewer processes, and each sends its request immediately.
            None => {
                id.pending.clear();
                id.pending.push(None);
                0
            }
        };
        id.pending[index] =
            MonitoredLink::new(&self.monitor, connection, Ready::Pending(number, index)).ok();
        Ok(())
    }

    /// Receives the request of an accepted connection.
    fn receive_request(&mut self, number: u32, index: usize) {
        let Some(listener) = self.ids.get_mut(&number) else {
            return;
        };
        let Some(connection) = listener.pending.get_mut(index) else {
            return;
        };
        let Some(socket) = connection else { return };
        match socket.receive() {
            ReceiveResult::Nothing => {}
            ReceiveResult::Closed => *connection = None,
            ReceiveResult::Message(kind, message) => {
                if let Some(socket) = connection.take() {
                    self.handle_request(number, socket, kind, &message);
                }
            }
        }
    }

    /// Handles a connection request.
    fn handle_request(
        &mut self,
        number: u32,
        socket: MonitoredLink,
        kind: MessageKind,
        message: &Message,
    ) {
        let Some(listener) = self.ids.get(&number) else {
            return;
        };
        let Some(channel) = self.channels.get(&listener.channel) else {
            return;
        };
        let datagram = listener.datagram;
        let (request_kind, reject_kind, no_listener, full) = if datagram {
            let (no_listener, full) = (SidrStatus::UNSUPPORTED.0, SidrStatus::REJECT.0);
            (
                MessageKind::ServiceRequest,
                MessageKind::ServiceReply,
                no_listener,
                full,
            )
        } else {
            let no_listener = RejectReason::INVALID_SERVICE_ID.0;
            let full = RejectReason::CONSUMER_DEFINED.0;
            (MessageKind::Request, MessageKind::Reject, no_listener, full)
        };
        let is_addressed = listener.is_at(message.to(), message.from().ip());
        let reason = if kind != request_kind || !is_addressed {
            Some(no_listener)
        } else if message.is_ethernet() != listener.port.ethernet {
            Some(RejectReason::INVALID_GID.0)
        } else if channel.requests(number) >= listener.backlog as usize {
            Some(full)
        } else {
            None
        };
        if let Some(reason) = reason {
            let mut message = Message::new(reject_kind, &[]);
            message.reason = reason as u8;
            return socket.send(&message);
        }
        let (uid, fd) = (listener.uid, listener.channel);
        let mut id = Id::new(fd, listener.port, listener.space, datagram);
        id.phase = Phase::Requested;
        (id.local, id.peer) = (Some(message.to()), Some(message.from()));
        id.may_be_remote = self.host_addresses.is_some();
        id.port = id
            .port
            .at(message.to().ip(), self.host_addresses.as_deref())
            .toward(message.gid);
        id.port.mtu = id.port.mtu.min(message.mtu);
        id.set_peer(message);
        id.tos = listener.tos;
        id.ack_timeout = listener.ack_timeout;
        id.depths.responder_resources = message.initiator_depth;
        id.depths.initiator_depth = message.responder_resources;
        id.depths.retry_count = message.retry_count;
        id.depths.rnr_retry_count = message.rnr_retry_count;
        let request = self.number();
        if socket.set_item(Ready::Socket(request)).is_err() {
            return;
        }
        id.socket = Some(socket);
        let param = if datagram {
            ud_param(kind, message, &id).as_bytes().to_vec()
        } else {
            conn_param(kind, message).as_bytes().to_vec()
        };
        self.ids.insert(request, id);
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

    /// Receives from the peer of an id.
    fn receive_from_peer(&mut self, number: u32) {
        let Some(id) = self.ids.get(&number) else {
            return;
        };
        let Some(socket) = &id.socket else {
            return;
        };
        match socket.receive() {
            ReceiveResult::Nothing => {}
            ReceiveResult::Closed => self.handle_closed(number),
            ReceiveResult::Message(kind, message) => self.handle_message(number, kind, &message),
        }
    }

    fn handle_message(&mut self, number: u32, kind: MessageKind, message: &Message) {
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        let param = conn_param(kind, message);
        match (id.phase, kind) {
            (Phase::Connecting, MessageKind::Reply) if !id.datagram => {
                if message.is_ethernet() != id.port.ethernet {
                    return self.handle_closed(number);
                }
                id.set_peer(message);
                id.phase = Phase::Responded;
                id.deadline = None;
                id.depths.responder_resources = message.initiator_depth;
                id.depths.initiator_depth = message.responder_resources;
                id.depths.rnr_retry_count = message.rnr_retry_count;
                self.queue_event(number, EventKind::CONNECT_RESPONSE, 0, param.as_bytes());
            }
            (Phase::Connecting, MessageKind::ServiceReply) if id.datagram => {
                let status = i32::from(message.reason);
                id.set_peer(message);
                let param = ud_param(kind, message, id);
                id.close();
                if status == 0 {
                    id.phase = Phase::Established;
                    self.queue_event(number, EventKind::ESTABLISHED, 0, param.as_bytes());
                } else {
                    self.queue_event(number, EventKind::UNREACHABLE, status, param.as_bytes());
                }
            }
            (
                Phase::Connecting | Phase::Responded | Phase::Requested | Phase::Accepting,
                MessageKind::Reject,
            ) if !id.datagram => {
                id.close();
                // Zero would mean success.
                let reason = i32::from(message.reason).max(1);
                self.queue_event(number, EventKind::REJECTED, reason, param.as_bytes());
            }
            (Phase::Accepting, MessageKind::Ready) => {
                id.phase = Phase::Established;
                id.deadline = None;
                self.queue_event(number, EventKind::ESTABLISHED, 0, &[]);
            }
            // An event of the queue pair has already established the connection.
            (Phase::Established, MessageKind::Ready) if id.notified => id.notified = false,
            (Phase::Accepting | Phase::Established, MessageKind::Disconnect) => {
                id.phase = Phase::PeerDisconnected;
                id.deadline = None;
                self.queue_event(number, EventKind::DISCONNECTED, 0, &[]);
            }
            (Phase::Disconnecting, MessageKind::Disconnect | MessageKind::Disconnected) => {
                id.close();
                self.queue_event(number, EventKind::DISCONNECTED, 0, &[]);
            }
            _ => self.handle_closed(number),
        }
    }

    /// Handles a closed socket: the peer's id was destroyed or its process has ended. Reports
    /// the events that the kernel would report.
    fn handle_closed(&mut self, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        let phase = id.phase;
        id.socket = None;
        if id.datagram && phase != Phase::Connecting {
            return;
        }
        if !matches!(phase, Phase::Closed) {
            id.close();
        }
        match phase {
            Phase::Connecting | Phase::Responded | Phase::Accepting => {
                let (reason, status) = (RejectReason::CONSUMER_DEFINED, SidrStatus::REJECT);
                let nothing = abi::ConnParam {
                    private_data_len: MessageKind::Reject.max_private_data() as u8,
                    ..Default::default()
                };
                let datagram = self.ids.get(&number).is_some_and(|id| id.datagram);
                let param = if datagram { &[] } else { nothing.as_bytes() };
                self.queue_failure(number, reason, status, param);
            }
            Phase::Requested => {
                let reason = RejectReason::TIMEOUT.0;
                self.queue_event(number, EventKind::REJECTED, reason, &[]);
            }
            Phase::Established | Phase::Disconnecting => {
                self.queue_event(number, EventKind::DISCONNECTED, 0, &[]);
            }
            _ => {}
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
