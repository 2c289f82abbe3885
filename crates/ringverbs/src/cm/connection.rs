//! The active side, and connections.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdmacm::{ConnParam, EventChannel, EventKind, Id, PortSpace};
use uverbs::{AhAttr, QpState};

use super::via::Via;
use super::{Options, Result, advance, await_event, check_queue_pair, prepare};
use crate::Device;
use crate::qp::QueuePair;

/// A way to a peer, before the connection.
#[derive(Debug)]
pub struct Connector {
    id: Id,
    channel: EventChannel,
    via: Via,
}

impl Connector {
    /// Finds the device and the path that lead to `peer`, for a reliable
    /// connection. Each of the two steps takes at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Manager`](super::Error::Manager) without a connection manager or a route,
    /// [`Error::Failed`](super::Error::Failed) if the peer cannot be found.
    pub fn resolve(peer: SocketAddr, timeout: Duration) -> Result<Self> {
        Self::resolve_from(PortSpace::TCP, None, peer, timeout)
    }

    /// The same for a datagram service.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_datagram(peer: SocketAddr, timeout: Duration) -> Result<Self> {
        Self::resolve_from(PortSpace::UDP, None, peer, timeout)
    }

    /// The same, of a port space, and from a local address.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_from(
        port_space: PortSpace,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        Self::resolve_by(Via::usual()?, (port_space, local), peer, timeout)
    }

    /// The same, by the connection manager of a device: of an embedded one its
    /// network's, of any other the kernel's, which finds the device by the
    /// address.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_on(
        device: &Device,
        port_space: PortSpace,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        Self::resolve_by(Via::of(device), (port_space, local), peer, timeout)
    }

    fn resolve_by(
        via: Via,
        (port_space, local): (PortSpace, Option<SocketAddr>),
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        let channel = via.open()?;
        let id = channel.create_id(port_space)?;
        id.resolve_address(local.map(Into::into), peer, timeout)?;
        // The kernel's own time-out comes first, and says more.
        let patience = Some(timeout.saturating_add(Duration::from_secs(1)));
        await_event(&channel, EventKind::ADDR_RESOLVED, patience)?;
        id.resolve_route(timeout)?;
        await_event(&channel, EventKind::ROUTE_RESOLVED, patience)?;
        Ok(Self { id, channel, via })
    }

    /// The device that leads to the peer; the queue pair has to be there.
    ///
    /// # Errors
    /// [`Error::NoDevice`](super::Error::NoDevice) if this process cannot see it.
    pub fn device(&self) -> Result<Device> {
        self.via.device_of(&self.id)
    }

    /// The connection manager's side of it.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Takes a new queue pair to INIT, so that receives can be posted before
    /// the peer can send. Of datagrams, to RTS.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](super::Error::WrongDevice), [`Error::WrongTransport`](super::Error::WrongTransport); the kernel's.
    pub fn prepare(&self, qp: &mut QueuePair) -> Result<()> {
        prepare(&self.id, qp)
    }

    /// Connects, and readies the queue pair; a new one is prepared first. For
    /// a datagram service: asks for it ([`Connection::service`]).
    ///
    /// `timeout` is for the peer's answer; the kernel gives up by itself after
    /// about a minute.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) if the peer rejects or does not answer, with what it
    /// has to say; [`Error::Timeout`](super::Error::Timeout); [`Error::Manager`](super::Error::Manager) for too much private
    /// data. The queue pair is then of no use any more.
    pub fn connect(
        self,
        qp: &mut QueuePair,
        options: &Options<'_>,
        timeout: Option<Duration>,
    ) -> Result<Connection> {
        self.prepare(qp)?;
        let Self { id, channel, .. } = self;
        id.connect(&ConnParam {
            qp_num: qp.qp_num(),
            private_data: options.private_data,
            responder_resources: options.responder_resources.unwrap_or(1),
            initiator_depth: options.initiator_depth.unwrap_or(1),
            retry_count: options.retry_count,
            rnr_retry_count: options.rnr_retry_count,
            ..ConnParam::default()
        })?;
        let awaited = if id.is_datagram() {
            EventKind::ESTABLISHED
        } else {
            EventKind::CONNECT_RESPONSE
        };
        let event = await_event(&channel, awaited, timeout)?;
        let message = event.message();
        let service = message.datagram().map(|datagram| Service {
            qp_num: datagram.qp_num,
            qkey: datagram.qkey,
            path: datagram.ah_attr,
        });
        let private_data = message.private_data().to_vec();
        drop(event);
        if service.is_none() {
            let ready = admit(&id, qp)
                .and_then(|()| advance(&id, qp, QpState::RTR, |_| {}))
                .and_then(|()| advance(&id, qp, QpState::RTS, |_| {}));
            if let Err(error) = ready {
                // The peer waits for us; the reason to tell is the first one.
                let _ = id.reject(&[]);
                return Err(error);
            }
            id.establish()?;
        }
        Ok(Connection {
            id,
            channel,
            private_data,
            service,
        })
    }
}

/// Whom to send datagrams to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Queue pair number.
    pub qp_num: u32,
    /// Queue key.
    pub qkey: u32,
    /// The path, for an address handle.
    pub path: AhAttr,
}

/// A connection of a queue pair, or what is known of a datagram service.
///
/// Dropping it disconnects; the queue pair notices only by its work failing,
/// or by [`disconnect`](Self::disconnect).
#[derive(Debug)]
pub struct Connection {
    id: Id,
    channel: EventChannel,
    private_data: Vec<u8>,
    service: Option<Service>,
}

impl Connection {
    pub(super) fn accepted(id: Id, channel: EventChannel, private_data: Vec<u8>) -> Self {
        Self {
            id,
            channel,
            private_data,
            service: None,
        }
    }

    /// What the peer has said when it connected or accepted, and zeros to the
    /// end of the message's room.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Whom to send to: of a datagram service that was asked for.
    pub fn service(&self) -> Option<Service> {
        self.service
    }

    /// Our address.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.local_addr()?)
    }

    /// The peer's address.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.peer_addr()?)
    }

    /// The connection manager's side of it.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Waits until the peer is ready, on the side that accepted. The first
    /// message may come before this is known.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) if the peer gave up, [`Error::Timeout`](super::Error::Timeout).
    pub fn wait_established(&self, timeout: Option<Duration>) -> Result<()> {
        if self.id.state() == rdmacm::State::Established {
            return Ok(());
        }
        await_event(&self.channel, EventKind::ESTABLISHED, timeout).map(drop)
    }

    /// Whether the peer has disconnected, or the device is gone. Reads the
    /// events that there are, without waiting: a system call.
    ///
    /// A peer that is killed takes its memory and its queue pair with it, so what
    /// is in flight can fail before this is known: after a failed completion,
    /// [`wait_disconnected`](Connection::wait_disconnected) with a second or two
    /// tells a peer that is gone from one that has done wrong.
    ///
    /// # Errors
    /// [`Error::Manager`](super::Error::Manager) if the channel cannot be read.
    pub fn is_over(&self) -> Result<bool> {
        while self.channel.try_event()?.is_some() {}
        Ok(matches!(
            self.id.state(),
            rdmacm::State::Disconnected | rdmacm::State::Failed | rdmacm::State::DeviceRemoved
        ))
    }

    /// Disconnects, or answers the peer's disconnecting: what is in flight on
    /// the queue pair is flushed.
    ///
    /// # Errors
    /// The kernel's reason.
    pub fn disconnect(&self, qp: &mut QueuePair) -> Result<()> {
        qp.set_error()?;
        Ok(self.id.disconnect()?)
    }

    /// Waits until the peer has disconnected, or has answered that.
    ///
    /// # Errors
    /// [`Error::Timeout`](super::Error::Timeout).
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        // The event may have been read by `is_over`.
        if self.is_over()? {
            return Ok(());
        }
        await_event(&self.channel, EventKind::DISCONNECTED, timeout).map(drop)
    }
}

impl AsFd for Connection {
    /// Readable when the connection's state has changed:
    /// [`is_over`](Connection::is_over) says how.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// To INIT once more: before there was a peer, the connection manager did not
/// let it write or read here.
fn admit(id: &Id, qp: &mut QueuePair) -> Result<()> {
    advance(id, qp, QpState::INIT, |_| {})
}

/// Accepts with what was agreed on: for [`Request::accept`](super::Request::accept).
pub(super) fn accept(
    id: &Id,
    qp: &mut QueuePair,
    options: &Options<'_>,
    (responder_resources, initiator_depth): (u8, u8),
) -> Result<()> {
    check_queue_pair(id, qp)?;
    prepare(id, qp)?;
    if !id.is_datagram() {
        admit(id, qp)?;
        advance(id, qp, QpState::RTR, |attr| {
            attr.max_dest_rd_atomic = responder_resources;
        })?;
        advance(id, qp, QpState::RTS, |attr| {
            attr.max_rd_atomic = initiator_depth
        })?;
    }
    id.accept(&ConnParam {
        qp_num: qp.qp_num(),
        private_data: options.private_data,
        responder_resources,
        initiator_depth,
        retry_count: options.retry_count,
        rnr_retry_count: options.rnr_retry_count,
        ..ConnParam::default()
    })?;
    Ok(())
}
