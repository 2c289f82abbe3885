//! The active side, and established connections.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdmacm::{ConnParam, Event, EventChannel, EventKind, Id, PortSpace};
use uverbs::{AhAttr, QpState};

use super::source::ConnectionManager;
use super::{Options, Result, advance, await_event, check_queue_pair, prepare};
use crate::Device;
use crate::qp::QueuePair;

/// A resolved route to a peer, before connecting.
#[derive(Debug)]
pub struct Connector {
    id: Id,
    channel: EventChannel,
    manager: ConnectionManager,
}

impl Connector {
    /// Resolves the address and route of `peer` for a reliable connection. Each
    /// of the two steps takes at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Manager`](super::Error::Manager) without a connection manager or
    /// a route, [`Error::Failed`](super::Error::Failed) if the peer cannot be
    /// resolved.
    pub fn resolve(peer: SocketAddr, timeout: Duration) -> Result<Self> {
        Self::resolve_from(PortSpace::TCP, None, peer, timeout)
    }

    /// As [`resolve`](Self::resolve), for a datagram service.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_datagram(peer: SocketAddr, timeout: Duration) -> Result<Self> {
        Self::resolve_from(PortSpace::UDP, None, peer, timeout)
    }

    /// As [`resolve`](Self::resolve), in a port space, from a local address.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_from(
        port_space: PortSpace,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        Self::resolve_by(
            ConnectionManager::from_environment()?,
            (port_space, local),
            peer,
            timeout,
        )
    }

    /// As [`resolve_from`](Self::resolve_from), with the connection manager of a
    /// device: its network's for an embedded device, otherwise the kernel's,
    /// which finds the device by the address.
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
        Self::resolve_by(
            ConnectionManager::of(device),
            (port_space, local),
            peer,
            timeout,
        )
    }

    fn resolve_by(
        manager: ConnectionManager,
        from: (PortSpace, Option<SocketAddr>),
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        let this = Self::begin(manager, from, peer, timeout)?;
        // The kernel's timeout should expire first: its error is more specific.
        let event_timeout = Some(timeout.saturating_add(Duration::from_secs(1)));
        await_event(&this.channel, EventKind::ADDR_RESOLVED, event_timeout)?;
        this.id.resolve_route(timeout)?;
        await_event(&this.channel, EventKind::ROUTE_RESOLVED, event_timeout)?;
        Ok(this)
    }

    /// Begins to resolve an address. `ADDR_RESOLVED` follows, and then the route.
    pub(super) fn begin(
        manager: ConnectionManager,
        (port_space, local): (PortSpace, Option<SocketAddr>),
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self> {
        let channel = manager.open()?;
        let id = channel.create_id(port_space)?;
        id.resolve_address(local.map(Into::into), peer, timeout)?;
        Ok(Self {
            id,
            channel,
            manager,
        })
    }

    #[cfg(feature = "tokio")]
    pub(super) fn manager(&self) -> &ConnectionManager {
        &self.manager
    }

    #[cfg(feature = "tokio")]
    pub(super) fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// Returns the device with the route to the peer, on which the queue pair must be
    /// created.
    ///
    /// # Errors
    /// [`Error::NoDevice`](super::Error::NoDevice) if it is not visible to this
    /// process.
    pub fn device(&self) -> Result<Device> {
        self.manager.device_of(&self.id)
    }

    /// Returns the connection manager id.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Moves a new queue pair to INIT, so that receives can be posted before the
    /// peer can send; a datagram queue pair to RTS.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](super::Error::WrongDevice),
    /// [`Error::WrongTransport`](super::Error::WrongTransport); those of the
    /// kernel.
    pub fn prepare(&self, qp: &mut QueuePair) -> Result<()> {
        prepare(&self.id, qp)
    }

    /// Connects and moves the queue pair to RTS; a new queue pair is prepared first. For
    /// datagrams, requests the peer's service ([`Connection::service`]).
    ///
    /// `timeout` limits the wait for the peer's answer. The kernel's own timeout is about
    /// a minute.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) if the peer rejects, with its
    /// private data, or does not answer;
    /// [`Error::Timeout`](super::Error::Timeout);
    /// [`Error::Manager`](super::Error::Manager) for too much private data. The
    /// queue pair cannot be used after an error.
    pub fn connect(
        self,
        qp: &mut QueuePair,
        options: &Options<'_>,
        timeout: Option<Duration>,
    ) -> Result<Connection> {
        let awaited = self.request(qp, options)?;
        let event = await_event(&self.channel, awaited, timeout)
            .map_err(|error| self.manager.explain(error))?;
        self.finish(qp, event)
    }

    /// Prepares the queue pair and sends the request. Returns the event that reports the
    /// peer's answer.
    pub(super) fn request(&self, qp: &mut QueuePair, options: &Options<'_>) -> Result<EventKind> {
        self.prepare(qp)?;
        self.id.connect(&ConnParam {
            qp_num: qp.qp_num(),
            private_data: options.private_data,
            responder_resources: options.responder_resources.unwrap_or(1),
            initiator_depth: options.initiator_depth.unwrap_or(1),
            retry_count: options.retry_count,
            rnr_retry_count: options.rnr_retry_count,
            ..ConnParam::default()
        })?;
        Ok(if self.id.is_datagram() {
            EventKind::ESTABLISHED
        } else {
            EventKind::CONNECT_RESPONSE
        })
    }

    /// Connects the queue pair after the peer's answer.
    pub(super) fn finish(self, qp: &mut QueuePair, event: Event) -> Result<Connection> {
        let Self { id, channel, .. } = self;
        let message = event.message();
        let service = message.datagram().map(|datagram| Service {
            qp_num: datagram.qp_num,
            qkey: datagram.qkey,
            path: datagram.ah_attr,
        });
        let private_data = message.private_data().to_vec();
        drop(event);
        if service.is_none() {
            let ready = reinitialize(&id, qp)
                .and_then(|()| advance(&id, qp, QpState::RTR, |_| {}))
                .and_then(|()| advance(&id, qp, QpState::RTS, |_| {}));
            if let Err(error) = ready {
                // The peer is waiting for an answer; the error to report is the
                // first one.
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

/// The destination of datagrams for a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Queue pair number.
    pub qp_num: u32,
    /// Queue key.
    pub qkey: u32,
    /// The path, for an address handle.
    pub path: AhAttr,
}

/// A connection of a queue pair, or a resolved datagram service.
///
/// Dropping the connection disconnects without flushing the queue pair's operations,
/// which then fail individually; [`disconnect`](Self::disconnect) flushes them.
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

    /// Returns the private data of the peer's request or answer, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the destination of a requested datagram service.
    pub fn service(&self) -> Option<Service> {
        self.service
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.local_addr()?)
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.peer_addr()?)
    }

    /// Returns the connection manager id.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Waits, on the accepting side, until the peer is ready. The first message
    /// may arrive earlier.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) if the peer cancelled,
    /// [`Error::Timeout`](super::Error::Timeout).
    pub fn wait_established(&self, timeout: Option<Duration>) -> Result<()> {
        if self.id.state() == rdmacm::State::Established {
            return Ok(());
        }
        await_event(&self.channel, EventKind::ESTABLISHED, timeout).map(drop)
    }

    /// Returns whether the peer has disconnected or the device was removed. Reads
    /// all pending events without blocking: a system call.
    ///
    /// When a peer is killed, its memory and queue pair are destroyed, so operations in
    /// flight can fail before the disconnect arrives. After a failed completion,
    /// [`wait_disconnected`](Connection::wait_disconnected) with a timeout of a second or
    /// two distinguishes a peer that has ended from a peer that has made an error.
    ///
    /// # Errors
    /// [`Error::Manager`](super::Error::Manager) if the channel cannot be read.
    pub fn is_over(&self) -> Result<bool> {
        while self.channel.try_event()?.is_some() {}
        Ok(self.has_ended())
    }

    /// As [`is_over`](Self::is_over), but reads no events.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(
            self.id.state(),
            rdmacm::State::Disconnected | rdmacm::State::Failed | rdmacm::State::DeviceRemoved
        )
    }

    /// Disconnects, or answers the peer's disconnect. Operations in flight on the
    /// queue pair are flushed.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn disconnect(&self, qp: &mut QueuePair) -> Result<()> {
        qp.set_error()?;
        Ok(self.id.disconnect()?)
    }

    /// Waits until the peer has disconnected or has answered a disconnect.
    ///
    /// # Errors
    /// [`Error::Timeout`](super::Error::Timeout).
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        // `is_over` may have read the event.
        if self.is_over()? {
            return Ok(());
        }
        await_event(&self.channel, EventKind::DISCONNECTED, timeout).map(drop)
    }
}

impl AsFd for Connection {
    /// Readable when the state of the connection has changed:
    /// [`is_over`](Connection::is_over) reads it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// Moves the queue pair to INIT again: before the peer was known, the connection
/// manager's attributes allowed no remote access.
fn reinitialize(id: &Id, qp: &mut QueuePair) -> Result<()> {
    advance(id, qp, QpState::INIT, |_| {})
}

/// Time after which the peer repeats a message that found no receive: 0.64 ms. The connection
/// manager's 0 stands for 655 ms.
const RNR_TIMER: u8 = 12;

/// Accepts with these depths; implements
/// [`Request::accept`](super::Request::accept).
pub(super) fn accept(
    id: &Id,
    qp: &mut QueuePair,
    options: &Options<'_>,
    (responder_resources, initiator_depth): (u8, u8),
) -> Result<()> {
    check_queue_pair(id, qp)?;
    prepare(id, qp)?;
    if !id.is_datagram() {
        reinitialize(id, qp)?;
        advance(id, qp, QpState::RTR, |attr| {
            attr.max_dest_rd_atomic = responder_resources;
            attr.min_rnr_timer = RNR_TIMER;
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
