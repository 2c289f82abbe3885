//! The passive side.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rdmacm::{Event, EventChannel, EventKind, Id, Key, PortSpace};

use super::connection::accept;
use super::source::ConnectionManager;
use super::{Connection, Error, Options, Result, prepare};
use crate::Device;
use crate::qp::QueuePair;

/// Accepts connection requests.
#[derive(Debug)]
pub struct Listener {
    id: Id,
    channel: EventChannel,
    manager: ConnectionManager,
}

impl Listener {
    /// Listens for requests for reliable connections. For port 0 the kernel chooses a
    /// port; an unspecified address means all devices.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENODEV; [`Error::Manager`] without a connection
    /// manager.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        Self::bind_in(PortSpace::TCP, address, 0)
    }

    /// Listens for requests for a datagram service.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_datagram(address: SocketAddr) -> Result<Self> {
        Self::bind_in(PortSpace::UDP, address, 0)
    }

    /// Listens in a port space. Up to `backlog` requests wait to be accepted, and
    /// further ones are refused; 0 means the kernel's limit.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_in(port_space: PortSpace, address: SocketAddr, backlog: u32) -> Result<Self> {
        Self::bind_by(
            ConnectionManager::from_environment()?,
            port_space,
            address,
            backlog,
        )
    }

    /// As [`bind_in`](Self::bind_in), with the connection manager of a device:
    /// its network's for an embedded device, otherwise the kernel's, where the
    /// address decides on which devices it listens.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_on(
        device: &Device,
        port_space: PortSpace,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<Self> {
        Self::bind_by(ConnectionManager::of(device), port_space, address, backlog)
    }

    fn bind_by(
        manager: ConnectionManager,
        port_space: PortSpace,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<Self> {
        let channel = manager.open()?;
        let id = channel.create_id(port_space)?;
        id.bind(address)?;
        id.listen(backlog)?;
        Ok(Self {
            id,
            channel,
            manager,
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.local_addr()?)
    }

    /// Returns the connection manager id.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Waits for the next request, without limit if `timeout` is `None`. Returns
    /// `None` after the timeout.
    ///
    /// # Errors
    /// [`Error::Failed`] if a device that it listened on was removed.
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<Request>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(mut event) = self.channel.wait(left)? else {
                return Ok(None);
            };
            if let Some(request) = self.request(&mut event)? {
                return Ok(Some(request));
            }
        }
    }

    /// Returns the request of an event; `None` if it is another event.
    fn request(&self, event: &mut Event) -> Result<Option<Request>> {
        if event.kind() == EventKind::DEVICE_REMOVAL && event.is_of(&self.id) {
            return Err(Error::of(event));
        }
        let Some(id) = event.take_request() else {
            return Ok(None);
        };
        let message = event.message();
        let offered = message.connection().map_or((0, 0), |peer| {
            (peer.responder_resources, peer.initiator_depth)
        });
        Ok(Some(Request {
            id,
            manager: self.manager.clone(),
            private_data: message.private_data().to_vec(),
            offered,
        }))
    }

    /// Returns the next request or event of an accepted request; does not wait.
    ///
    /// # Errors
    /// As [`next_request`](Self::next_request).
    pub(super) fn next_arrival(&self) -> Result<Option<Arrival>> {
        let Some(mut event) = self.channel.try_event()? else {
            return Ok(None);
        };
        let request = self.request(&mut event)?;
        Ok(Some(match request {
            Some(request) => Arrival::Request(request),
            None => Arrival::Event(event.key(), event.kind()),
        }))
    }
}

/// An event of a listener's channel.
pub(super) enum Arrival {
    Request(Request),
    Event(Key, EventKind),
}

impl AsFd for Listener {
    /// Readable when there is a request, or another event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A connection request. Dropping it rejects the request.
///
/// Until it is accepted it is on the listener's channel, and needs no descriptor.
#[derive(Debug)]
pub struct Request {
    id: Id,
    manager: ConnectionManager,
    private_data: Vec<u8>,
    offered: (u8, u8),
}

impl Request {
    /// Returns the peer's private data, padded with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.peer_addr()?)
    }

    /// Returns the number of outstanding RDMA reads and atomics that the peer requests, and
    /// the number that it accepts from this side.
    pub fn offered_depths(&self) -> (u8, u8) {
        self.offered
    }

    /// Returns the device that received the request, on which the queue pair must
    /// be created.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if it is not visible to this process.
    pub fn device(&self) -> Result<Device> {
        self.manager.device_of(&self.id)
    }

    /// Returns the connection manager id.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Opens a channel of the connection manager that the request is from.
    pub(crate) fn open_channel(&self) -> Result<EventChannel> {
        self.manager.open()
    }

    /// Moves a new queue pair to INIT, so that receives can be posted before the
    /// peer can send; a datagram queue pair to RTS.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::WrongTransport`]; those of the kernel.
    pub fn prepare(&self, qp: &mut QueuePair) -> Result<()> {
        prepare(&self.id, qp)
    }

    /// Moves the queue pair to RTS (a new one is prepared first) and accepts. The peer may
    /// send as soon as it is notified;
    /// [`wait_established`](Connection::wait_established) waits until it is ready.
    ///
    /// # Errors
    /// [`Error::Manager`] for too much private data; those of the kernel. After an error
    /// the peer is rejected, and the queue pair cannot be used.
    pub fn accept(mut self, qp: &mut QueuePair, options: &Options<'_>) -> Result<Connection> {
        // A channel of its own, so that another thread can wait for it.
        let channel = self.manager.open()?;
        self.id.migrate(&channel)?;
        Ok(self.begin_accept(qp, options)?.on_channel(channel))
    }

    /// As [`accept`](Self::accept), but the connection stays on the listener's channel until
    /// its peer has confirmed, for [`Handshakes`](super::Handshakes). Receives may be posted
    /// after that: until then, the peer's messages are retried.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn begin_accept(self, qp: &mut QueuePair, options: &Options<'_>) -> Result<HalfOpen> {
        let (responder, initiator) = self.offered;
        let depths = (
            options.responder_resources.unwrap_or(responder),
            options.initiator_depth.unwrap_or(initiator),
        );
        accept(&self.id, qp, options, depths)?;
        Ok(HalfOpen {
            id: self.id,
            manager: self.manager,
            private_data: self.private_data,
        })
    }

    /// Rejects the request, with up to 148 bytes of private data.
    ///
    /// # Errors
    /// Too much private data; those of the kernel.
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        Ok(self.id.reject(private_data)?)
    }
}

/// An accepted request, on the listener's channel. Dropping it rejects or disconnects the
/// peer.
#[derive(Debug)]
pub struct HalfOpen {
    id: Id,
    manager: ConnectionManager,
    private_data: Vec<u8>,
}

impl HalfOpen {
    pub(crate) fn key(&self) -> Key {
        self.id.key()
    }

    /// Moves the connection to a channel of its own.
    ///
    /// # Errors
    /// EMFILE and other errors of opening a channel.
    pub fn into_connection(self) -> Result<Connection> {
        let channel = self.manager.open()?;
        self.into_connection_on(channel)
    }

    /// Moves the connection to a channel. If others are there, too, only
    /// [`Connection::has_ended`] may be asked for its end.
    pub(crate) fn into_connection_on(mut self, channel: EventChannel) -> Result<Connection> {
        self.id.migrate(&channel)?;
        Ok(self.on_channel(channel))
    }

    fn on_channel(self, channel: EventChannel) -> Connection {
        Connection::accepted(self.id, channel, self.private_data)
    }
}
