//! The passive side.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rdmacm::{EventChannel, EventKind, Id, PortSpace};

use super::connection::accept;
use super::via::Via;
use super::{Connection, Error, Options, Result, prepare};
use crate::Device;
use crate::qp::QueuePair;

/// Takes connection requests.
#[derive(Debug)]
pub struct Listener {
    id: Id,
    channel: EventChannel,
    via: Via,
}

impl Listener {
    /// Listens for reliable connections. Of port 0 the kernel chooses one; an
    /// unspecified address is all devices'.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENODEV; no connection manager.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        Self::bind_in(PortSpace::TCP, address, 0)
    }

    /// Listens for those who ask for a datagram service.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_datagram(address: SocketAddr) -> Result<Self> {
        Self::bind_in(PortSpace::UDP, address, 0)
    }

    /// Listens in a port space. As many requests as `backlog` wait to be
    /// taken, more are refused; zero is the kernel's limit.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_in(port_space: PortSpace, address: SocketAddr, backlog: u32) -> Result<Self> {
        Self::bind_by(Via::usual()?, port_space, address, backlog)
    }

    /// The same, by the connection manager of a device: of an embedded one its
    /// network's, of any other the kernel's, whose addresses say which devices
    /// it listens on.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_on(
        device: &Device,
        port_space: PortSpace,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<Self> {
        Self::bind_by(Via::of(device), port_space, address, backlog)
    }

    fn bind_by(via: Via, port_space: PortSpace, address: SocketAddr, backlog: u32) -> Result<Self> {
        let channel = via.open()?;
        let id = channel.create_id(port_space)?;
        id.bind(address)?;
        id.listen(backlog)?;
        Ok(Self { id, channel, via })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.local_addr()?)
    }

    /// The connection manager's side of it.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Waits for the next request, at most that long (none: for ever). `None`
    /// on timeout.
    ///
    /// # Errors
    /// [`Error::Failed`] if a device is gone that it listened on.
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<Request>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(mut event) = self.channel.wait(left)? else {
                return Ok(None);
            };
            if event.kind() == EventKind::DEVICE_REMOVAL {
                return Err(Error::of(&event));
            }
            let Some(mut id) = event.take_request() else {
                continue;
            };
            let message = event.message();
            let offered = message.connection().map_or((0, 0), |peer| {
                (peer.responder_resources, peer.initiator_depth)
            });
            let private_data = message.private_data().to_vec();
            // A channel of its own, for a thread of its own.
            let channel = self.via.open()?;
            id.migrate(&channel)?;
            return Ok(Some(Request {
                id,
                channel,
                via: self.via.clone(),
                private_data,
                offered,
            }));
        }
    }
}

impl AsFd for Listener {
    /// Readable when there is a request, or another event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A connection request. Rejected when dropped.
#[derive(Debug)]
pub struct Request {
    id: Id,
    channel: EventChannel,
    via: Via,
    private_data: Vec<u8>,
    offered: (u8, u8),
}

impl Request {
    /// What the peer says, and zeros to the end of the message's room.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>> {
        Ok(self.id.peer_addr()?)
    }

    /// RDMA reads and atomics that the peer would have outstanding here, and
    /// that it would take of us.
    pub fn offered_depths(&self) -> (u8, u8) {
        self.offered
    }

    /// The device that the request came by; the queue pair has to be there.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if this process cannot see it.
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
    /// [`Error::WrongDevice`], [`Error::WrongTransport`]; the kernel's.
    pub fn prepare(&self, qp: &mut QueuePair) -> Result<()> {
        prepare(&self.id, qp)
    }

    /// Readies the queue pair (a new one is prepared first) and accepts. The
    /// peer may send as soon as it knows;
    /// [`wait_established`](Connection::wait_established) waits for it.
    ///
    /// # Errors
    /// [`Error::Manager`] for too much private data; the kernel's. The peer is
    /// rejected then, and the queue pair of no use any more.
    pub fn accept(self, qp: &mut QueuePair, options: &Options<'_>) -> Result<Connection> {
        let (responder, initiator) = self.offered;
        let depths = (
            options.responder_resources.unwrap_or(responder),
            options.initiator_depth.unwrap_or(initiator),
        );
        accept(&self.id, qp, options, depths)?;
        Ok(Connection::accepted(
            self.id,
            self.channel,
            self.private_data,
        ))
    }

    /// Rejects, with up to 148 bytes of a reason.
    ///
    /// # Errors
    /// Too many bytes; the kernel's reason.
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        Ok(self.id.reject(private_data)?)
    }
}
