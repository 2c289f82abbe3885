//! Input from peers: connections, their messages, and their ends.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use nix::sys::socket::{MsgFlags, recv};
use rdmacm::{EventKind, RejectReason, SidrStatus, abi};
use zerocopy::IntoBytes;

use super::channel::Waiting;
use super::id::{CALLERS, Id, Phase};
use super::monitor::{MonitoredSocket, Ready};
use super::state::{State, connection, event};
use super::wire::{Kind, Message, SIZE, send};
use crate::Result;

/// Content of a socket.
pub(super) enum Received {
    Nothing,
    Message(Kind, Box<Message>),
    /// The peer has closed its socket, or sent a malformed message.
    Closed,
}

pub(super) fn receive(socket: &OwnedFd) -> Received {
    // One more byte, to detect messages that are too long.
    let mut bytes = [0; SIZE + 1];
    loop {
        match recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Received::Closed,
            Ok(length) => match Message::parse(&bytes[..length]) {
                Ok((kind, message)) => return Received::Message(kind, Box::new(message)),
                Err(error) => {
                    tracing::debug!(%error, "malformed message from the peer");
                    return Received::Closed;
                }
            },
            Err(nix::Error::EAGAIN) => return Received::Nothing,
            // ECONNRESET is reported once, if the peer closed its socket with
            // unread data; messages of the peer can still be read.
            Err(nix::Error::EINTR | nix::Error::ECONNRESET) => {}
            Err(_) => return Received::Closed,
        }
    }
}

impl Id {
    /// Sends a message to the peer.
    pub(super) fn say(&self, message: &Message) {
        if let Some(socket) = &self.socket {
            send(socket, message);
        }
    }

    /// Ends the connection.
    pub(super) fn finish(&mut self) {
        self.phase = Phase::Over;
        self.socket = None;
        self.deadline = None;
    }
}

impl State {
    /// Handles a ready descriptor. What has become of its id meanwhile does not matter.
    ///
    /// # Errors
    /// That of accepting a connection, which stays ready.
    pub(super) fn attend(&mut self, what: Ready) -> Result<()> {
        match what {
            Ready::Time => self.expire(),
            Ready::Socket(number) => self.listen_to(number),
            Ready::Listener(number) => return self.let_in(number),
            Ready::Caller(number, place) => self.called(number, place),
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
            id.finish();
            self.queue_event(number, what, -libc::ETIMEDOUT, &[]);
        }
    }

    /// Accepts a connection to a listening id.
    fn let_in(&mut self, number: u32) -> Result<()> {
        let Some(id) = self.ids.get_mut(&number) else {
            return Ok(());
        };
        let Some(listener) = &id.listener else {
            return Ok(());
        };
        let Some(caller) = self.ports.accept(listener)? else {
            return Ok(());
        };
        let free = id.callers.iter().position(Option::is_none);
        let place = match free {
            Some(place) => place,
            None if id.callers.len() < CALLERS => {
                id.callers.push(None);
                id.callers.len() - 1
            }
            // Processes of a directory are fewer, and each sends a request at once.
            None => {
                id.callers.clear();
                id.callers.push(None);
                0
            }
        };
        id.callers[place] =
            MonitoredSocket::new(&self.monitor, caller, Ready::Caller(number, place)).ok();
        Ok(())
    }

    /// Receives from a connection that was accepted but has not sent a request
    /// yet.
    fn called(&mut self, number: u32, place: usize) {
        let Some(listener) = self.ids.get_mut(&number) else {
            return;
        };
        let Some(caller) = listener.callers.get_mut(place) else {
            return;
        };
        let Some(socket) = caller else { return };
        match receive(socket) {
            Received::Nothing => {}
            Received::Closed => *caller = None,
            Received::Message(kind, message) => {
                if let Some(socket) = caller.take() {
                    self.requested(number, socket, kind, &message);
                }
            }
        }
    }

    /// Handles a connection request.
    fn requested(&mut self, number: u32, socket: MonitoredSocket, kind: Kind, message: &Message) {
        let Some(listener) = self.ids.get(&number) else {
            return;
        };
        let Some(channel) = self.channels.get(&listener.channel) else {
            return;
        };
        let datagram = listener.datagram;
        let (asks, says_no, nobody, full) = if datagram {
            let (nobody, full) = (SidrStatus::UNSUPPORTED.0, SidrStatus::REJECT.0);
            (Kind::ServiceRequest, Kind::ServiceReply, nobody, full)
        } else {
            let nobody = RejectReason::INVALID_SERVICE_ID.0;
            let full = RejectReason::CONSUMER_DEFINED.0;
            (Kind::Request, Kind::Reject, nobody, full)
        };
        let refused = if kind != asks || !listener.is_at(message.to(), message.from().ip()) {
            Some(nobody)
        } else if message.is_ethernet() != listener.port.ethernet {
            Some(RejectReason::INVALID_GID.0)
        } else if channel.requests(number) >= listener.backlog as usize {
            Some(full)
        } else {
            None
        };
        if let Some(reason) = refused {
            let mut message = Message::new(says_no, &[]);
            message.reason = reason as u8;
            return send(&socket, &message);
        }
        let (uid, fd) = (listener.uid, listener.channel);
        let mut id = Id::new(fd, listener.port, listener.space, datagram);
        id.phase = Phase::Requested;
        (id.local, id.peer) = (Some(message.to()), Some(message.from()));
        id.hosts = self.hosts.is_some();
        id.port = id.port.at(message.to().ip(), self.hosts.as_deref());
        id.port.mtu = id.port.mtu.min(message.mtu);
        id.meet(message);
        id.tos = listener.tos;
        id.ack_timeout = listener.ack_timeout;
        id.depths.responder_resources = message.initiator_depth;
        id.depths.initiator_depth = message.responder_resources;
        id.depths.retry_count = message.retry_count;
        id.depths.rnr_retry_count = message.rnr_retry_count;
        let request = self.number();
        if socket.rename(Ready::Socket(request)).is_err() {
            return;
        }
        id.socket = Some(socket);
        let param = if datagram {
            service(kind, message, &id).as_bytes().to_vec()
        } else {
            connection(kind, message).as_bytes().to_vec()
        };
        self.ids.insert(request, id);
        let waiting = Waiting {
            of: number,
            membership: None,
            request: Some(request),
            event: event((uid, request), EventKind::CONNECT_REQUEST, 0, &param),
        };
        if let Some(channel) = self.channels.get_mut(&fd) {
            channel.push(waiting);
        }
    }

    /// Receives from the peer of an id.
    fn listen_to(&mut self, number: u32) {
        let Some(id) = self.ids.get(&number) else {
            return;
        };
        let Some(socket) = &id.socket else {
            return;
        };
        match receive(socket) {
            Received::Nothing => {}
            Received::Closed => self.ended(number),
            Received::Message(kind, message) => self.handle_message(number, kind, &message),
        }
    }

    fn handle_message(&mut self, number: u32, kind: Kind, message: &Message) {
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        let param = connection(kind, message);
        match (id.phase, kind) {
            (Phase::Connecting, Kind::Reply) if !id.datagram => {
                if message.is_ethernet() != id.port.ethernet {
                    return self.ended(number);
                }
                id.meet(message);
                id.phase = Phase::Responded;
                id.deadline = None;
                id.depths.responder_resources = message.initiator_depth;
                id.depths.initiator_depth = message.responder_resources;
                id.depths.rnr_retry_count = message.rnr_retry_count;
                self.queue_event(number, EventKind::CONNECT_RESPONSE, 0, param.as_bytes());
            }
            (Phase::Connecting, Kind::ServiceReply) if id.datagram => {
                let status = i32::from(message.reason);
                id.meet(message);
                let param = service(kind, message, id);
                id.finish();
                if status == 0 {
                    id.phase = Phase::Established;
                    self.queue_event(number, EventKind::ESTABLISHED, 0, param.as_bytes());
                } else {
                    self.queue_event(number, EventKind::UNREACHABLE, status, param.as_bytes());
                }
            }
            (
                Phase::Connecting | Phase::Responded | Phase::Requested | Phase::Accepting,
                Kind::Reject,
            ) if !id.datagram => {
                id.finish();
                // Zero would mean success.
                let reason = i32::from(message.reason).max(1);
                self.queue_event(number, EventKind::REJECTED, reason, param.as_bytes());
            }
            (Phase::Accepting, Kind::Ready) => {
                id.phase = Phase::Established;
                id.deadline = None;
                self.queue_event(number, EventKind::ESTABLISHED, 0, &[]);
            }
            // Its queue pair has reported it before.
            (Phase::Established, Kind::Ready) if id.notified => id.notified = false,
            (Phase::Accepting | Phase::Established, Kind::Disconnect) => {
                id.phase = Phase::Left;
                id.deadline = None;
                self.queue_event(number, EventKind::DISCONNECTED, 0, &[]);
            }
            (Phase::Disconnecting, Kind::Disconnect | Kind::Disconnected) => {
                id.finish();
                self.queue_event(number, EventKind::DISCONNECTED, 0, &[]);
            }
            _ => self.ended(number),
        }
    }

    /// Handles the end of a peer: its id was destroyed or its process has
    /// ended. Reports the events that the kernel would report.
    fn ended(&mut self, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else {
            return;
        };
        let phase = id.phase;
        id.socket = None;
        if id.datagram && phase != Phase::Connecting {
            return;
        }
        if !matches!(phase, Phase::Over) {
            id.finish();
        }
        match phase {
            Phase::Connecting | Phase::Responded | Phase::Accepting => {
                let (reason, status) = (RejectReason::CONSUMER_DEFINED, SidrStatus::REJECT);
                let nothing = abi::ConnParam {
                    private_data_len: Kind::Reject.room() as u8,
                    ..Default::default()
                };
                let datagram = self.ids.get(&number).is_some_and(|id| id.datagram);
                let param = if datagram { &[] } else { nothing.as_bytes() };
                self.refused(number, reason, status, param);
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
fn service(kind: Kind, message: &Message, id: &Id) -> abi::UdParam {
    let mut param = abi::UdParam {
        private_data_len: kind.room() as u8,
        ..Default::default()
    };
    if kind == Kind::ServiceReply {
        param.qp_num = message.qp_num;
        param.qkey = message.qkey;
        param.ah_attr = id.path().unwrap_or_default();
    }
    let data = message.private_data();
    param.private_data[..data.len()].copy_from_slice(data);
    param
}
