//! The client.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringverbs::cm::{self, AsyncConnection, AsyncConnector, manager::PortSpace};
use ringverbs::{AccessFlags, PoolBuffer, RemoteRegion};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use crate::body::{Body, Reply};
use crate::message::{HEADER, Hello, Message, READ_HEADER, REQUEST_HEADER, ReplyMemory};
use crate::queues::{Queues, completion_queue, queue_pair};
use crate::{CallOptions, Error, Options};

/// A connection to a server.
///
/// A handle: clones share the connection, which ends with the last clone. Any number of
/// tasks may call concurrently.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    /// Dropping it ends the reader task.
    _reader: oneshot::Sender<()>,
}

struct Shared {
    queues: Queues,
    connection: AsyncConnection,
    calls: Mutex<Calls>,
    /// A permit for each call in flight.
    window: Arc<Semaphore>,
    large: Arc<LargeMemory>,
    server: Hello,
    options: Options,
}

/// Memory that the server may read and write, with a piece for each large call.
struct LargeMemory {
    region: Option<RemoteRegion>,
    piece: usize,
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
}

/// A piece of [`LargeMemory`], which the server may use until it has replied.
struct LargePiece {
    large: Arc<LargeMemory>,
    number: usize,
    _permit: OwnedSemaphorePermit,
}

impl LargePiece {
    fn offset(&self) -> usize {
        self.number * self.large.piece
    }

    fn reply_memory(&self) -> Option<ReplyMemory> {
        let region = self.large.region.as_ref()?;
        Some(ReplyMemory {
            at: region.key().offset(self.offset()),
            len: self.large.piece as u32,
        })
    }
}

impl Drop for LargePiece {
    fn drop(&mut self) {
        // Before the permit is released.
        lock(&self.large.free).push(self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calls in flight, each in a slot.
struct Calls {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// The reason why the connection has ended.
    ended: Option<Error>,
}

struct Slot {
    /// Number of calls of the slot, so that a late reply does not match a newer call.
    generation: u16,
    call: Option<Call>,
}

/// A call in flight, and the resources that it occupies until the server has replied, even if
/// its future was dropped.
struct Call {
    reply: oneshot::Sender<Result<Reply, Error>>,
    piece: Option<LargePiece>,
    _permit: OwnedSemaphorePermit,
}

impl Calls {
    fn begin(&mut self, call: Call) -> Result<u32, Error> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let number = self.free.pop().ok_or(Error::Disconnected)?;
        let slot = &mut self.slots[usize::from(number)];
        slot.generation = slot.generation.wrapping_add(1);
        slot.call = Some(call);
        Ok(u32::from(slot.generation) << 16 | u32::from(number))
    }

    /// Removes a call.
    fn end(&mut self, id: u32) -> Option<Call> {
        let slot = self.slots.get_mut(id as u16 as usize)?;
        if u32::from(slot.generation) != id >> 16 {
            return None;
        }
        let call = slot.call.take()?;
        self.free.push(id as u16);
        Some(call)
    }
}

impl Shared {
    /// Ends all calls.
    fn fail(&self, error: &Error) {
        let mut ended = Vec::new();
        let mut calls = lock(&self.calls);
        calls.ended.get_or_insert_with(|| error.clone());
        ended.extend(calls.slots.iter_mut().filter_map(|slot| slot.call.take()));
        drop(calls);
        // After `ended` is set, because calls that wait for a permit return that error.
        self.window.close();
        self.large.permits.close();
        for call in ended {
            // The future may have been dropped.
            let _ = call.reply.send(Err(error.clone()));
        }
    }

    /// Delivers a message to its call.
    fn deliver(&self, message: PoolBuffer) -> Result<(), Error> {
        let (id, header, begin) = Message::decode(&message)?;
        let malformed = |what| Err(Error::Protocol { what });
        let mut calls = lock(&self.calls);
        let Some(call) = calls.end(id) else {
            drop(calls);
            return malformed("call number");
        };
        drop(calls);
        let reply = self.reply(&call, header, begin, message);
        let (reply, ended) = match reply {
            Ok(reply) => (reply, Ok(())),
            Err(error) => (Err(error.clone()), Err(error)),
        };
        // The receive was reposted, so another call may take the permit. The future may have
        // been dropped.
        let _ = call.reply.send(reply.map(|body| Reply { body }));
        ended
    }

    /// Returns the result of a call. The outer error ends the connection.
    fn reply(
        &self,
        call: &Call,
        header: Message,
        begin: usize,
        message: PoolBuffer,
    ) -> Result<Result<Body, Error>, Error> {
        let malformed = |what| Err(Error::Protocol { what });
        let size = self.options.message_size as usize;
        Ok(match header {
            Message::Reply => Ok(match self.queues.receives.get(size) {
                // The caller gets the buffer; another one is posted.
                Some(spare) => {
                    self.queues.post_receive(spare)?;
                    Body::Pooled {
                        buffer: message,
                        begin,
                        _permit: None,
                    }
                }
                None => {
                    let bytes = message.get(begin..).unwrap_or_default().to_vec();
                    self.queues.post_receive(message)?;
                    Body::Copied(bytes)
                }
            }),
            other => {
                self.queues.post_receive(message)?;
                match other {
                    Message::Written { len } => {
                        let region = self.large.region.as_ref();
                        let piece = call.piece.as_ref().zip(region);
                        match piece.filter(|(piece, _)| len as usize <= piece.large.piece) {
                            Some((piece, region)) => {
                                let mut bytes = vec![0; len as usize];
                                region.read_at(piece.offset(), &mut bytes)?;
                                Ok(Body::Copied(bytes))
                            }
                            None => return malformed("reply length"),
                        }
                    }
                    Message::Refused { code } => Err(Error::Refused(code)),
                    Message::TooLong { len } => Err(Error::ReplyTooLong { len: len as usize }),
                    Message::Panicked => Err(Error::HandlerPanicked),
                    _ => return malformed("message kind"),
                }
            }
        })
    }

    /// Reads replies until the connection ends, or the client is dropped.
    async fn read(&self, mut dropped: oneshot::Receiver<()>) -> Error {
        let mut probes = self.queues.probes();
        loop {
            let message = tokio::select! {
                message = self.queues.qp.message::<PoolBuffer>() => message,
                _ = self.connection.disconnected() => return Error::Disconnected,
                _ = &mut dropped => return Error::Disconnected,
                _ = probes.tick() => {
                    self.queues.probe();
                    continue;
                }
            };
            let taken = match message {
                Ok(message) => self.deliver(message.data),
                Err(_) => return Error::Disconnected,
            };
            if let Err(error) = taken {
                return error;
            }
        }
    }
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Protocol`], [`Error::Timeout`],
    /// [`Error::Verbs`].
    pub async fn connect(address: SocketAddr) -> Result<Self, Error> {
        Self::connect_with(address, &Options::default()).await
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::Options`].
    pub async fn connect_with(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        options.check()?;
        let connected = timeout(options.connect_timeout, Self::establish(address, options)).await;
        connected.map_err(|_| Error::Timeout)?
    }

    async fn establish(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        let connector = match &options.device {
            None => AsyncConnector::resolve(address).await?,
            Some(device) => {
                AsyncConnector::resolve_on(device, PortSpace::TCP, None, address).await?
            }
        };
        let context = connector.device()?.open()?;
        // A separate domain, so that only this server can use the keys of the memory.
        let domain = context.alloc_pd()?;
        let cq = completion_queue(&domain, options)?;
        let queues = Queues::new(queue_pair(&domain, &cq, options)?, &domain, options)?;
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let (piece, pieces) = (
            options.max_message as usize,
            usize::from(options.large_buffers),
        );
        let large = LargeMemory {
            region: match piece * pieces {
                0 => None,
                total => Some(domain.alloc_remote(total, access)?),
            },
            piece,
            free: Mutex::new((0..pieces).collect()),
            permits: Arc::new(Semaphore::new(pieces)),
        };
        connector.prepare(&queues.qp)?;
        queues.post_receives()?;
        let hello = options.hello().encode();
        let cm_options = cm::Options {
            private_data: &hello,
            // Every message finds a receive.
            rnr_retry_count: 0,
            // Large requests are read by the server.
            responder_resources: Some(4),
            ..cm::Options::default()
        };
        let connection = connector.connect(&queues.qp, &cm_options).await?;
        let server = Hello::decode(connection.get_ref().private_data())?;
        let window = options.window.min(server.window);
        let slot = |_| Slot {
            generation: 0,
            call: None,
        };
        let shared = Arc::new(Shared {
            queues,
            connection,
            calls: Mutex::new(Calls {
                slots: (0..window).map(slot).collect(),
                free: (0..window).rev().collect(),
                ended: None,
            }),
            window: Arc::new(Semaphore::new(window.into())),
            large: Arc::new(large),
            server,
            options: options.clone(),
        });
        let reader = Arc::clone(&shared);
        let (_reader, dropped) = oneshot::channel();
        tokio::spawn(async move {
            let error = reader.read(dropped).await;
            tracing::debug!(%error, "connection ended");
            reader.fail(&error);
            reader.queues.close(&reader.connection).await;
        });
        Ok(Self {
            inner: Arc::new(Inner { shared, _reader }),
        })
    }

    /// Sends a request and waits for the reply. A reply that is longer than a message requires
    /// [`CallOptions::reply_up_to`], or a request that is longer than a message. Dropping the
    /// future discards the reply.
    ///
    /// # Errors
    /// [`Error`], except `Connect` and `Options`.
    pub async fn call(&self, request: &[u8]) -> Result<Reply, Error> {
        self.call_with(request, &CallOptions::default()).await
    }

    /// As [`call`](Self::call), with a timeout and room for a longer reply.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub async fn call_with(&self, request: &[u8], options: &CallOptions) -> Result<Reply, Error> {
        let result = timeout(options.timeout, self.exchange(request, options.reply_up_to)).await;
        result.map_err(|_| Error::Timeout)?
    }

    /// Returns the maximum length of a request.
    pub fn max_request(&self) -> usize {
        let shared = &self.inner.shared;
        let large = match shared.large.region {
            Some(_) => shared.large.piece.min(shared.server.max_message as usize),
            None => 0,
        };
        large.max(self.small_request())
    }

    fn small_request(&self) -> usize {
        let shared = &self.inner.shared;
        let size = shared.options.message_size.min(shared.server.message_size);
        size as usize - REQUEST_HEADER
    }

    async fn exchange(&self, request: &[u8], reply_up_to: usize) -> Result<Reply, Error> {
        let shared = &*self.inner.shared;
        let limit = self.max_request();
        if request.len() > limit {
            let len = request.len();
            return Err(Error::RequestTooLong { len, limit });
        }
        let ended = |_| {
            lock(&shared.calls)
                .ended
                .clone()
                .unwrap_or(Error::Disconnected)
        };
        let permit = Arc::clone(&shared.window).acquire_owned().await;
        let permit = permit.map_err(ended)?;
        let is_small = request.len() <= self.small_request();
        let small_reply = shared.options.message_size as usize - HEADER;
        let piece = if !is_small || reply_up_to > small_reply {
            if reply_up_to > shared.large.piece || shared.large.region.is_none() {
                return Err(Error::ReplyTooLong { len: reply_up_to });
            }
            let permit = Arc::clone(&shared.large.permits).acquire_owned().await;
            let permit = permit.map_err(ended)?;
            let number = lock(&shared.large.free).pop().ok_or(Error::Disconnected)?;
            let large = Arc::clone(&shared.large);
            Some(LargePiece {
                large,
                number,
                _permit: permit,
            })
        } else {
            None
        };
        let reply_memory = piece
            .as_ref()
            .and_then(LargePiece::reply_memory)
            .unwrap_or_default();
        if let (false, Some(piece), Some(region)) = (is_small, &piece, &shared.large.region) {
            region.write_at(piece.offset(), request)?;
        }
        let (begin, payload) = match is_small {
            true => (REQUEST_HEADER, request),
            false => (READ_HEADER, &[][..]),
        };
        // Waits before the call is registered: a registered call must be sent.
        let buffer = shared.queues.send_buffer(begin + payload.len()).await;
        let (reply, reply_receiver) = oneshot::channel();
        let id = lock(&shared.calls).begin(Call {
            reply,
            piece,
            _permit: permit,
        })?;
        let mut header = [0; READ_HEADER];
        let message = match is_small {
            true => Message::Request {
                reply: reply_memory,
            },
            false => Message::Read {
                reply: reply_memory,
                from: reply_memory.at,
                len: request.len() as u32,
            },
        };
        let len = message.encode(id, payload.len(), &mut header);
        if let Err(error) = shared.queues.post_message(buffer, &header[..len], payload) {
            // The request was not sent. If the connection has ended, the call has failed already.
            if lock(&shared.calls).end(id).is_some() {
                return Err(error);
            }
        }
        reply_receiver.await.unwrap_or(Err(Error::Disconnected))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.fail(&Error::Disconnected);
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field(
                "server",
                &self
                    .inner
                    .shared
                    .connection
                    .get_ref()
                    .peer_addr()
                    .ok()
                    .flatten(),
            )
            .field("queue_pair", &self.inner.shared.queues.qp)
            .finish()
    }
}
