//! The connection manager on tokio.
//!
//! Waiting requires a runtime with I/O enabled; `tokio::time::timeout` limits a wait. All
//! other calls are kernel commands that do not wait for a peer.

use std::net::SocketAddr;
use std::time::Duration;

use rdmacm::{Event, EventChannel, EventKind, PortSpace};
use tokio::io::unix::AsyncFd;

use super::source::ConnectionManager;
use super::{
    Connection, Connector, Error, HalfOpen, Listener, Options, Request, Result, is_awaited,
};
use crate::Device;
use crate::completion::{WaitFd, watch};
use crate::future::AsyncQueuePair;

/// The kernel's time limit for each step of resolving an address.
const RESOLVING: Duration = Duration::from_secs(30);

fn failed(error: std::io::Error) -> Error {
    Error::Verbs(crate::Error::System {
        what: "waiting for the connection manager",
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    })
}

/// Repeats `attempt` until it returns a result; waits for an event in between.
async fn retry<T>(
    watched: &AsyncFd<WaitFd>,
    mut attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    loop {
        if let Some(result) = attempt()? {
            return Ok(result);
        }
        // An event after the attempt makes the descriptor readable again.
        watched.readable().await.map_err(failed)?.clear_ready();
    }
}

/// Waits for an event; see `await_event`.
async fn next_event(
    channel: &EventChannel,
    watched: &AsyncFd<WaitFd>,
    awaited: EventKind,
) -> Result<Event> {
    retry(watched, || {
        loop {
            let Some(event) = channel.try_event()? else {
                return Ok(None);
            };
            if is_awaited(&event, awaited)? {
                return Ok(Some(event));
            }
        }
    })
    .await
}

/// [`Listener`] on tokio.
#[derive(Debug)]
pub struct AsyncListener {
    watched: AsyncFd<WaitFd>,
    listener: Listener,
}

impl AsyncListener {
    /// Watches a listener with the current runtime.
    ///
    /// # Errors
    /// [`Error::Verbs`] if the descriptor cannot be registered.
    ///
    /// # Panics
    /// Outside of a runtime with I/O enabled, as tokio's own types; the same applies to
    /// all constructors of this module.
    pub fn new(listener: Listener) -> Result<Self> {
        let watched = watch(std::os::fd::AsFd::as_fd(&listener))?;
        Ok(Self { watched, listener })
    }

    /// Listens for requests for reliable connections; see [`Listener::bind`].
    /// Issues kernel commands, which do not wait.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub async fn bind(address: SocketAddr) -> Result<Self> {
        Self::new(Listener::bind(address)?)
    }

    /// Returns the listener.
    pub fn get_ref(&self) -> &Listener {
        &self.listener
    }

    /// Waits for the next request. Dropping the future loses none. Several tasks
    /// may wait.
    ///
    /// # Errors
    /// As [`Listener::next_request`].
    pub async fn next_request(&self) -> Result<Request> {
        let attempt = || self.listener.next_request(Some(Duration::ZERO));
        retry(&self.watched, attempt).await
    }

    /// Waits until there may be an event for [`Handshakes::next`](super::Handshakes::next),
    /// which returned `Pending` before.
    ///
    /// # Errors
    /// [`Error::Verbs`] if the runtime is shutting down.
    pub async fn ready(&self) -> Result<()> {
        self.watched.readable().await.map_err(failed)?.clear_ready();
        Ok(())
    }
}

impl Request {
    /// As [`prepare`](Self::prepare).
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_async(&self, qp: &AsyncQueuePair) -> Result<()> {
        qp.with(|qp| self.prepare(qp))?
    }

    /// As [`accept`](Self::accept); [`AsyncConnection::established`] waits for the
    /// peer.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn accept_async(
        self,
        qp: &AsyncQueuePair,
        options: &Options<'_>,
    ) -> Result<AsyncConnection> {
        AsyncConnection::new(qp.with(|qp| self.accept(qp, options))??)
    }

    /// As [`begin_accept`](Self::begin_accept).
    ///
    /// # Errors
    /// As [`begin_accept`](Self::begin_accept).
    pub fn begin_accept_async(
        self,
        qp: &AsyncQueuePair,
        options: &Options<'_>,
    ) -> Result<HalfOpen> {
        qp.with(|qp| self.begin_accept(qp, options))?
    }
}

/// [`Connector`] on tokio.
#[derive(Debug)]
pub struct AsyncConnector {
    watched: AsyncFd<WaitFd>,
    connector: Connector,
}

impl AsyncConnector {
    /// Resolves the address and route of `peer`; see [`Connector::resolve`].
    ///
    /// # Errors
    /// As [`Connector::resolve`].
    pub async fn resolve(peer: SocketAddr) -> Result<Self> {
        let manager = ConnectionManager::from_environment()?;
        Self::resolve_by(manager, (PortSpace::TCP, None), peer).await
    }

    /// As [`resolve`](Self::resolve), in a port space, from a local address, with
    /// the connection manager of a device; see [`Connector::resolve_on`].
    ///
    /// # Errors
    /// As [`Connector::resolve`].
    pub async fn resolve_on(
        device: &Device,
        port_space: PortSpace,
        local: Option<SocketAddr>,
        peer: SocketAddr,
    ) -> Result<Self> {
        Self::resolve_by(ConnectionManager::of(device), (port_space, local), peer).await
    }

    async fn resolve_by(
        manager: ConnectionManager,
        from: (PortSpace, Option<SocketAddr>),
        peer: SocketAddr,
    ) -> Result<Self> {
        let connector = Connector::begin(manager, from, peer, RESOLVING)?;
        let watched = watch(std::os::fd::AsFd::as_fd(connector.channel()))?;
        let this = Self { watched, connector };
        this.next(EventKind::ADDR_RESOLVED).await?;
        this.connector.id().resolve_route(RESOLVING)?;
        this.next(EventKind::ROUTE_RESOLVED).await?;
        Ok(this)
    }

    async fn next(&self, awaited: EventKind) -> Result<Event> {
        let event = next_event(self.connector.channel(), &self.watched, awaited).await;
        event.map_err(|error| self.connector.manager().explain(error))
    }

    /// Returns the device with the route to the peer; see [`Connector::device`].
    ///
    /// # Errors
    /// As [`Connector::device`].
    pub fn device(&self) -> Result<Device> {
        self.connector.device()
    }

    /// Moves a new queue pair to INIT; see [`Connector::prepare`].
    ///
    /// # Errors
    /// As [`Connector::prepare`].
    pub fn prepare(&self, qp: &AsyncQueuePair) -> Result<()> {
        qp.with(|qp| self.connector.prepare(qp))?
    }

    /// Connects, and waits for the peer's answer; see [`Connector::connect`].
    /// Dropping the future abandons the connection.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub async fn connect(
        self,
        qp: &AsyncQueuePair,
        options: &Options<'_>,
    ) -> Result<AsyncConnection> {
        let awaited = qp.with(|qp| self.connector.request(qp, options))??;
        let event = self.next(awaited).await?;
        let connector = self.connector;
        AsyncConnection::new(qp.with(|qp| connector.finish(qp, event))??)
    }
}

/// [`Connection`] on tokio.
#[derive(Debug)]
pub struct AsyncConnection {
    watched: AsyncFd<WaitFd>,
    connection: Connection,
}

impl AsyncConnection {
    /// Watches a connection with the current runtime.
    ///
    /// # Errors
    /// [`Error::Verbs`] if the descriptor cannot be registered.
    pub fn new(connection: Connection) -> Result<Self> {
        let watched = watch(std::os::fd::AsFd::as_fd(&connection))?;
        Ok(Self {
            watched,
            connection,
        })
    }

    /// Returns the connection, with its addresses and the peer's private data.
    pub fn get_ref(&self) -> &Connection {
        &self.connection
    }

    /// Waits, on the accepting side, until the peer is ready.
    ///
    /// # Errors
    /// As [`Connection::wait_established`].
    pub async fn established(&self) -> Result<()> {
        if self.connection.id().state() == rdmacm::State::Established {
            return Ok(());
        }
        let channel = self.connection.id().channel();
        let event = next_event(&channel, &self.watched, EventKind::ESTABLISHED);
        event.await.map(drop)
    }

    /// Disconnects, or answers the peer's disconnect; see
    /// [`Connection::disconnect`]. The futures of the queue pair end.
    ///
    /// # Errors
    /// As [`Connection::disconnect`].
    pub fn disconnect(&self, qp: &AsyncQueuePair) -> Result<()> {
        qp.with(|qp| self.connection.disconnect(qp))?
    }

    /// Waits until the peer has disconnected, has answered a disconnect, or is
    /// gone.
    ///
    /// # Errors
    /// As [`Connection::is_over`].
    pub async fn disconnected(&self) -> Result<()> {
        let attempt = || Ok(self.connection.is_over()?.then_some(()));
        retry(&self.watched, attempt).await
    }
}
