//! The server.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use ringverbs::cm::{
    self, AsyncConnection, AsyncListener, HalfOpen, Handshake, Handshakes, Listener,
    manager::PortSpace,
};
use ringverbs::future::AsyncQueuePair;
use ringverbs::{BufferPool, PoolBuffer, ProtectionDomain};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout_at};

use crate::body::{Body, ResponseBody};
use crate::message::{HEADER, Hello, Message, READ_HEADER, ReplyMemory};
use crate::queues::{EstablishedOn, Queues, ServerQueue, take_buffer};
use crate::{Error, Options, Request, Response};

/// Pause after a request that could not be accepted for lack of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(200);

/// Accepts connections, and passes requests to a handler.
#[derive(Debug)]
pub struct Server {
    listener: AsyncListener,
    options: Options,
}

impl Server {
    /// Listens at an address of an RDMA device's network interface. For port 0 a port is
    /// chosen.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub async fn bind(address: SocketAddr) -> Result<Self, Error> {
        Self::bind_with(address, &Options::default()).await
    }

    /// As [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); [`Error::Options`].
    pub async fn bind_with(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        options.check()?;
        Ok(Self {
            listener: match &options.device {
                None => AsyncListener::bind(address).await?,
                Some(device) => {
                    let listener = Listener::bind_on(device, PortSpace::TCP, address, 0)?;
                    AsyncListener::new(listener)?
                }
            },
            options: options.clone(),
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// [`Error::Connect`], not in normal operation.
    pub fn local_addr(&self) -> Result<SocketAddr, Error> {
        let address = self.listener.get_ref().local_addr()?;
        address.ok_or_else(|| Error::Connect("the listener has no address".to_owned()))
    }

    /// Serves requests forever, each in a task of the current runtime. Dropping the future ends
    /// all connections.
    ///
    /// A handler returns bytes, or a result whose error is a code. If it panics, the client gets
    /// [`Error::HandlerPanicked`].
    ///
    /// # Errors
    /// [`Error::Connect`] if the listener's device was removed.
    pub async fn serve<F, Fut, R>(self, handler: F) -> Result<(), Error>
    where
        F: Fn(Request) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Into<Response> + 'static,
    {
        let handler = Arc::new(handler);
        let mut devices = HashMap::new();
        let mut connections = JoinSet::new();
        let mut handshakes = Handshakes::new();
        loop {
            while connections.try_join_next().is_some() {}
            let is_full = connections.len() >= self.options.max_connections;
            let accept = |request| Ok(begin_accept(request, &mut devices, &self.options, is_full));
            let next: Result<_, cm::Error> = handshakes.next(self.listener.get_ref(), accept);
            let (half_open, accepted) = match next {
                Ok(Handshake::Established(half_open, accepted)) => (half_open, accepted),
                Ok(Handshake::Pending(None)) => {
                    self.listener.ready().await?;
                    continue;
                }
                Ok(Handshake::Pending(Some(until))) => {
                    let ready = timeout_at(until.into(), self.listener.ready()).await;
                    ready.unwrap_or(Ok(()))?;
                    continue;
                }
                // Others end and free what they occupy.
                Err(error) if is_shortage(&error) => {
                    tracing::warn!(%error, "rejected a connection");
                    sleep(PAUSE).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if is_full {
                tracing::warn!("ended a connection: too many connections");
                continue;
            }
            let (options, handler) = (self.options.clone(), Arc::clone(&handler));
            connections.spawn(async move {
                let peer = accepted.peer;
                let ended = match accepted.finish(half_open, &options) {
                    Ok(connection) => Arc::new(connection).serve(handler).await,
                    Err(error) => error,
                };
                tracing::debug!(error = %ended, ?peer, "connection ended");
            });
        }
    }
}

/// Returns whether the process, or the system, has no descriptors or memory left, which
/// clients can cause.
fn is_shortage(error: &cm::Error) -> bool {
    let cm::Error::Manager(error) = error else {
        return false;
    };
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM].contains(&error.errno().raw())
}

/// What the connections of a device share.
struct ServerDevice {
    domain: ProtectionDomain,
    /// The latest completion queues.
    queues: VecDeque<Weak<ServerQueue>>,
}

/// Maximum number of completion queues that are looked through for ones without an
/// established connection: as many as there can be clients that have not confirmed.
const MAX_QUEUES: usize = 32;

fn device_of<'a>(
    devices: &'a mut HashMap<String, ServerDevice>,
    request: &cm::Request,
) -> Result<&'a mut ServerDevice, Error> {
    let device = request.device()?;
    match devices.entry(device.name().to_owned()) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => Ok(entry.insert(ServerDevice {
            domain: device.open()?.alloc_pd()?,
            queues: VecDeque::new(),
        })),
    }
}

impl ServerDevice {
    /// Returns a completion queue for a request: that of others whose clients have not
    /// confirmed, if none of these has become a connection yet.
    fn queue(&mut self, options: &Options) -> Result<Arc<ServerQueue>, Error> {
        let mut all = self.queues.iter().filter_map(Weak::upgrade);
        if let Some(shared) = all.find(|it| it.is_unused()) {
            return Ok(shared);
        }
        drop(all);
        self.queues.retain(|it| it.strong_count() != 0);
        if self.queues.len() == MAX_QUEUES {
            self.queues.pop_front();
        }
        let created = ServerQueue::new(&self.domain, options)?;
        self.queues.push_back(Arc::downgrade(&created));
        Ok(created)
    }
}

/// A client's connection.
struct ServerConnection {
    queues: Queues,
    _queue: EstablishedOn,
    connection: AsyncConnection,
    /// Buffers for long requests and replies, with a permit for each.
    large: Option<BufferPool>,
    permits: Arc<Semaphore>,
    client: Hello,
    options: Options,
    peer: Option<SocketAddr>,
}

/// A connection whose client has not confirmed yet: it has neither memory nor descriptors of
/// its own.
struct Accepted {
    qp: AsyncQueuePair,
    queue: Arc<ServerQueue>,
    domain: ProtectionDomain,
    client: Hello,
    peer: Option<SocketAddr>,
}

/// Accepts a request; `None` if it was rejected.
fn begin_accept(
    request: cm::Request,
    devices: &mut HashMap<String, ServerDevice>,
    options: &Options,
    is_full: bool,
) -> Option<(HalfOpen, Accepted)> {
    if is_full {
        tracing::warn!("rejected a connection: too many connections");
        return None;
    }
    // An error drops the request, which rejects it.
    let accept = || {
        let client = Hello::decode(request.private_data())?;
        let device = device_of(devices, &request)?;
        let domain = device.domain.clone();
        let peer = request.peer_addr()?;
        let queue = device.queue(options)?;
        let qp = ServerQueue::queue_pair(&queue, &domain, options)?;
        let hello = options.hello().encode();
        let cm_options = cm::Options {
            private_data: &hello,
            // Receives are posted after the client has confirmed, when it may send already.
            rnr_retry_count: 7,
            ..cm::Options::default()
        };
        let half_open = request.begin_accept_async(&qp, &cm_options)?;
        let accepted = Accepted {
            qp,
            queue,
            domain,
            client,
            peer,
        };
        Ok::<_, Error>((half_open, accepted))
    };
    match accept() {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            tracing::warn!(%error, "rejected a connection");
            None
        }
    }
}

impl Accepted {
    /// Allocates the memory of the connection, after the client has confirmed.
    fn finish(self, half_open: HalfOpen, options: &Options) -> Result<ServerConnection, Error> {
        let queue = EstablishedOn::new(self.queue);
        let connection = AsyncConnection::new(half_open.into_connection()?)?;
        let queues = Queues::new(self.qp, &self.domain, options)?;
        let (max, count) = (
            options.max_message as usize,
            usize::from(options.large_buffers),
        );
        let large = match max * count {
            0 => None,
            _ => Some(BufferPool::new(&self.domain, &[(max, count)])?),
        };
        queues.post_receives()?;
        Ok(ServerConnection {
            queues,
            _queue: queue,
            connection,
            large,
            permits: Arc::new(Semaphore::new(count)),
            client: self.client,
            options: options.clone(),
            peer: self.peer,
        })
    }
}

impl ServerConnection {
    /// Handles requests until the connection ends; returns the reason.
    async fn serve<F, Fut, R>(self: Arc<Self>, handler: Arc<F>) -> Error
    where
        F: Fn(Request) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Into<Response> + 'static,
    {
        // At most as many as receives, because a request's receive is reposted with its reply.
        // Dropping the set ends the handlers.
        let mut handlers = JoinSet::new();
        let mut probes = self.queues.probes();
        let ended = loop {
            let message = tokio::select! {
                message = self.queues.qp.message::<PoolBuffer>() => message,
                _ = self.connection.disconnected() => break Error::Disconnected,
                _ = probes.tick() => {
                    self.queues.probe();
                    continue;
                }
                Some(done) = handlers.join_next() => match done {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => break error,
                    Err(_) => break Error::Disconnected,
                },
            };
            let Ok(message) = message else {
                break Error::Disconnected;
            };
            let (id, request, begin) = match Message::decode(&message.data) {
                Ok(decoded) => decoded,
                Err(error) => break error,
            };
            let (connection, handler) = (Arc::clone(&self), Arc::clone(&handler));
            match request {
                Message::Request { reply } => handlers.spawn(async move {
                    let body = Body::Pooled {
                        buffer: message.data,
                        begin,
                        _permit: None,
                    };
                    connection.handle(id, body, reply, &*handler).await
                }),
                Message::Read { reply, from, len } => {
                    let limit = self.options.max_message;
                    if len > limit {
                        break Error::RequestTooLong {
                            len: len as usize,
                            limit: limit as usize,
                        };
                    }
                    drop(message);
                    handlers.spawn(async move {
                        let body = connection.read(from, len).await?;
                        connection.handle(id, body, reply, &*handler).await
                    })
                }
                _ => {
                    break Error::Protocol {
                        what: "message kind",
                    };
                }
            };
        };
        drop(handlers);
        self.queues.close(&self.connection).await;
        ended
    }

    /// Reads a long request.
    async fn read(&self, from: ringverbs::RemoteAddr, len: u32) -> Result<Body, Error> {
        let (permit, mut buffer) = self.large_buffer().await?;
        buffer.set_len(len as usize)?;
        let read = self.queues.qp.read(buffer, from).await;
        Ok(Body::Pooled {
            buffer: read.map_err(|_| Error::Disconnected)?,
            begin: 0,
            _permit: Some(permit),
        })
    }

    async fn large_buffer(&self) -> Result<(tokio::sync::OwnedSemaphorePermit, PoolBuffer), Error> {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| Error::Disconnected)?;
        let pool = self.large.as_ref().ok_or(Error::Disconnected)?;
        Ok((permit, take_buffer(pool, 0).await))
    }

    /// Calls the handler and sends its response.
    async fn handle<F, Fut, R>(
        &self,
        id: u32,
        body: Body,
        memory: ReplyMemory,
        handler: &F,
    ) -> Result<(), Error>
    where
        F: Fn(Request) -> Fut,
        Fut: Future<Output = R>,
        R: Into<Response>,
    {
        let request = Request {
            body,
            peer: self.peer,
        };
        let response = match call_handler(handler, request).await {
            Some(response) => response.0,
            None => return self.send_reply(id, Message::Panicked, &[]).await,
        };
        let bytes: &[u8] = match &response {
            ResponseBody::Bytes(bytes) => bytes,
            ResponseBody::Static(bytes) => bytes,
            ResponseBody::Echo(request) => request,
            ResponseBody::Refused(code) => {
                return self
                    .send_reply(id, Message::Refused { code: *code }, &[])
                    .await;
            }
        };
        let size = self.options.message_size.min(self.client.message_size) as usize;
        if bytes.len() <= size - HEADER {
            return self.send_reply(id, Message::Reply, bytes).await;
        }
        let limit = self.options.max_message.min(memory.len);
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if len > limit || self.large.is_none() {
            return self.send_reply(id, Message::TooLong { len }, &[]).await;
        }
        let write = match response {
            // The request is already in registered memory.
            ResponseBody::Echo(Request {
                body:
                    Body::Pooled {
                        buffer,
                        begin: 0,
                        _permit,
                    },
                ..
            }) => (self.queues.qp.write(buffer, memory.at), _permit),
            response => {
                let (permit, mut buffer) = self.large_buffer().await?;
                buffer.copy_from(match &response {
                    ResponseBody::Bytes(bytes) => bytes,
                    ResponseBody::Static(bytes) => bytes,
                    ResponseBody::Echo(request) => request,
                    ResponseBody::Refused(_) => &[],
                })?;
                drop(response);
                (self.queues.qp.write(buffer, memory.at), Some(permit))
            }
        };
        let (write, _permit) = write;
        if write.is_posted() {
            // The queue pair is in order: the message follows the write.
            self.send_reply(id, Message::Written { len }, &[]).await?;
            write.await.map_err(|_| Error::Disconnected)?;
            return Ok(());
        }
        write.await.map_err(|_| Error::Disconnected)?;
        self.send_reply(id, Message::Written { len }, &[]).await
    }

    /// Sends a reply, after posting a receive for the client's next request.
    async fn send_reply(&self, id: u32, message: Message, bytes: &[u8]) -> Result<(), Error> {
        self.queues.post_next_receive().await?;
        let mut header = [0; READ_HEADER];
        let len = message.encode(id, bytes.len(), &mut header);
        let buffer = self.queues.send_buffer(len + bytes.len()).await;
        self.queues.post_message(buffer, &header[..len], bytes)
    }
}

/// Calls a handler; returns `None` if it panics.
async fn call_handler<F, Fut, R>(handler: &F, request: Request) -> Option<Response>
where
    F: Fn(Request) -> Fut,
    Fut: Future<Output = R>,
    R: Into<Response>,
{
    let future = catch_unwind(AssertUnwindSafe(|| handler(request))).ok()?;
    let mut future = pin!(future);
    poll_fn(|task| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(task).map(R::into)));
        match polled {
            Ok(Poll::Ready(response)) => Poll::Ready(Some(response)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(_) => Poll::Ready(None),
        }
    })
    .await
}
