//! Streams for tokio.
//!
//! They require a runtime with I/O enabled. Dropping a future cancels it: the stream keeps
//! the operations in flight, and no data that was read is lost. The halves of
//! `tokio::io::split` can be used concurrently.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use ::tokio::net::{ToSocketAddrs, lookup_host};
use ::tokio::runtime::Handle;
use ::tokio::task::JoinHandle;

use super::engine::Engine;
use super::events::EventChannels;
use super::linger::LingeringEngine;
use super::setup::{connect, each_address, from_manager, from_verbs};
use super::{ConnectInfo, RdmaListener as StdListener, RdmaStream as StdStream, StreamOptions};
use crate::CompletionChannel;
use crate::cm::manager::EventChannel;

/// [`RdmaStream`](super::RdmaStream) for tokio.
///
/// `shutdown` ends the stream and waits until all data has arrived. Dropping a stream
/// without it does not wait: a thread for all such streams delivers the data, for up to 5 s.
/// A runtime that shuts down waits up to 100 ms for it.
pub struct RdmaStream {
    registration: Arc<Registration>,
    wakers: Arc<Wakers>,
    engine: LingeringEngine,
}

/// The events of connections.
struct EventChannelFd(EventChannel);

impl AsRawFd for EventChannelFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A type whose descriptor does not change.
///
/// # Safety
/// The descriptor is open and does not change while the value lives.
unsafe trait StableFd: AsRawFd {}
// SAFETY: a handle of the channel keeps its file open.
unsafe impl StableFd for CompletionChannel {}
// SAFETY: as above.
unsafe impl StableFd for EventChannelFd {}
// SAFETY: a listener keeps its only channel open.
unsafe impl StableFd for ListenerFd {}

/// Registers a descriptor with the runtime.
fn watch<T: StableFd>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: `StableFd` guarantees that the descriptor is open and does not change.
    let watched = unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) };
    watched.map_err(io::Error::from)
}

/// The registration of channels with a runtime. Its waker reads their events, and wakes the
/// streams that they are of.
pub(super) struct Registration {
    completions: AsyncFd<CompletionChannel>,
    connections: AsyncFd<EventChannelFd>,
    /// They own the registration.
    channels: Weak<EventChannels>,
    /// Of completions and of connections; the runtime has clones.
    wakers: [Waker; 2],
    /// Whether the runtime has shut down.
    has_ended: AtomicBool,
}

/// The registration that all streams of the channels use.
pub(super) type SharedRegistration = Mutex<Option<Arc<Registration>>>;

impl Registration {
    /// Returns the registration of the channels; if there is none, registers them with the
    /// current runtime.
    fn of(channels: &Arc<EventChannels>) -> io::Result<Arc<Self>> {
        let shared = &channels.registration;
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registration) = shared.as_ref().filter(|it| !it.has_ended()) {
            return Ok(Arc::clone(registration));
        }
        Handle::try_current().map_err(io::Error::other)?;
        let completions = watch(channels.completions().clone())?;
        let connections = watch(EventChannelFd(channels.connections().clone()))?;
        let created = Arc::new_cyclic(|this| {
            let waker = |of| {
                let registration = Weak::clone(this);
                Waker::from(Arc::new(RegistrationWaker { registration, of }))
            };
            Self {
                completions,
                connections,
                channels: Arc::downgrade(channels),
                wakers: [waker(Channel::Completions), waker(Channel::Connections)],
                has_ended: AtomicBool::new(false),
            }
        });
        *shared = Some(Arc::clone(&created));
        drop(shared);
        created.poll(Channel::Completions);
        created.poll(Channel::Connections);
        Ok(created)
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Handles the events of a channel; then the runtime wakes the waker, which polls again.
    fn poll(&self, of: Channel) {
        let mut task = Context::from_waker(&self.wakers[of as usize]);
        match of {
            Channel::Completions => self.poll_fd(&self.completions, [true, false], &mut task),
            Channel::Connections => self.poll_fd(&self.connections, [false, true], &mut task),
        }
    }

    fn poll_fd<T: AsRawFd>(&self, fd: &AsyncFd<T>, readable: [bool; 2], task: &mut Context<'_>) {
        let Some(channels) = self.channels.upgrade() else {
            return;
        };
        while let Poll::Ready(guard) = fd.poll_read_ready(task) {
            let Ok(mut guard) = guard else {
                self.has_ended.store(true, Ordering::Relaxed);
                return channels.wake_all();
            };
            // Before the events are read: later ones make it ready again.
            guard.clear_ready();
            channels.dispatch(readable);
        }
    }
}

#[derive(Clone, Copy)]
enum Channel {
    Completions = 0,
    Connections = 1,
}

struct RegistrationWaker {
    registration: Weak<Registration>,
    of: Channel,
}

impl Wake for RegistrationWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(registration) = self.registration.upgrade() {
            registration.poll(self.of);
        }
    }
}

/// The wakers of the tasks that wait to read and to write. An event wakes both, because it
/// may concern either.
#[derive(Default)]
struct Wakers([Mutex<Option<Waker>>; 2]);

#[derive(Clone, Copy)]
enum Direction {
    Read = 0,
    Write = 1,
}

impl Direction {
    fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

impl Wakers {
    fn set(&self, direction: Direction, waker: &Waker) {
        let mut place = self.0[direction as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if (place.as_ref()).is_some_and(|registered| registered.will_wake(waker)) {
            return;
        }
        let replaced = place.replace(waker.clone());
        drop(place);
        // Without the lock, because this runs code of the task.
        drop(replaced);
    }

    fn wake_one(&self, direction: Direction) {
        let waker = self.0[direction as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Wake for Wakers {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_one(Direction::Read);
        self.wake_one(Direction::Write);
    }
}

impl RdmaStream {
    /// Connects to a listener; see [`connect`](super::RdmaStream::connect).
    /// tokio's blocking threads wait for the connection manager.
    ///
    /// # Errors
    /// As [`connect`](super::RdmaStream::connect).
    pub async fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::connect_with(address, &StreamOptions::default()).await
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect_with`](super::RdmaStream::connect_with).
    pub async fn connect_with(
        address: impl ToSocketAddrs,
        options: &StreamOptions,
    ) -> io::Result<Self> {
        let addresses: Vec<_> = lookup_host(address).await?.collect();
        let options = options.clone();
        let attempt = move || each_address(&addresses[..], |address| connect(address, &options));
        let engine = ::tokio::task::spawn_blocking(attempt)
            .await
            .map_err(io::Error::other)??;
        Self::new(engine)
    }

    /// Converts a blocking stream.
    ///
    /// # Errors
    /// `InvalidInput` if the stream has other handles; the stream is dropped. An error
    /// outside of a runtime.
    pub fn from_std(stream: StdStream) -> io::Result<Self> {
        let engine = stream.into_engine().map_err(|_| {
            let text = "the stream has other handles; drop them first";
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?;
        Self::new(engine)
    }

    fn new(engine: LingeringEngine) -> io::Result<Self> {
        let wakers = Arc::new(Wakers::default());
        engine.events().set_waker(Arc::clone(&wakers).into());
        Ok(Self {
            registration: Registration::of(engine.events().channels())?,
            wakers,
            engine,
        })
    }

    /// Returns addresses and queue pair numbers of both ends. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn connect_info(&self) -> io::Result<ConnectInfo> {
        self.engine.connect_info().map_err(from_verbs)
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager no longer has it.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.engine.connection().local_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager no longer has it.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.engine.connection().peer_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Retries until there is a result; otherwise registers for events.
    fn poll_until<R>(
        &mut self,
        cx: &mut Context<'_>,
        direction: Direction,
        mut attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> Poll<io::Result<R>> {
        loop {
            if self.engine.progress() {
                // This call may have consumed the event of the other direction.
                self.wakers.wake_one(direction.other());
            }
            if let Some(result) = attempt(&mut self.engine)? {
                return Poll::Ready(Ok(result));
            }
            self.wakers.set(direction, cx.waker());
            let events = self.engine.events();
            if self.registration.has_ended() {
                self.registration = Registration::of(events.channels())?;
            }
            if events.are_pending() {
                if events.has_connection_event() {
                    self.engine.handle_connection_events();
                }
                self.engine.take_events()?;
                self.wakers.wake_one(direction.other());
                continue;
            }
            if !self.engine.arm()? {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncRead for RdmaStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        self.get_mut()
            .poll_until(cx, Direction::Read, |engine| {
                engine.read_with(|bytes| {
                    let count = bytes.len().min(buf.remaining());
                    buf.put_slice(&bytes[..count]);
                    count
                })
            })
            .map_ok(drop)
    }
}

impl AsyncWrite for RdmaStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_until(cx, Direction::Write, |engine| engine.write(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: written data was already posted to the device.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_until(cx, Direction::Write, |engine| {
            engine.finish();
            engine.is_flushed()
        })
    }
}

impl fmt::Debug for RdmaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self.engine).fmt(f)
    }
}

/// [`RdmaListener`](super::RdmaListener) for tokio.
///
/// The queues and memory of a stream are created in a blocking thread of tokio,
/// for one stream at a time.
pub struct RdmaListener {
    listener: AsyncFd<ListenerFd>,
    pending: Mutex<Pending>,
    runtime: Handle,
}

/// The task that handles the listener's events.
#[derive(Default)]
struct Pending {
    task: Option<JoinHandle<SetupResult>>,
    /// Whether the last task ended before it had handled all requests.
    more: bool,
}

#[derive(Debug)]
struct ListenerFd(Arc<StdListener>);

/// The result of handling the listener's events: `None` if no stream is established yet.
type SetupResult = io::Result<Option<(LingeringEngine, SocketAddr)>>;

impl AsRawFd for ListenerFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl RdmaListener {
    /// Listens; see [`bind`](super::RdmaListener::bind).
    ///
    /// # Errors
    /// As [`bind`](super::RdmaListener::bind).
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with(address, &StreamOptions::default()).await
    }

    /// As [`bind`](Self::bind), with options for the streams.
    ///
    /// # Errors
    /// As [`bind_with`](super::RdmaListener::bind_with).
    pub async fn bind_with(
        address: impl ToSocketAddrs,
        options: &StreamOptions,
    ) -> io::Result<Self> {
        let addresses: Vec<_> = lookup_host(address).await?.collect();
        Self::from_std(StdListener::bind_with(&addresses[..], options)?)
    }

    /// Converts a blocking listener.
    ///
    /// # Errors
    /// An error outside of a runtime.
    pub fn from_std(listener: StdListener) -> io::Result<Self> {
        let runtime = Handle::try_current().map_err(io::Error::other)?;
        Ok(Self {
            listener: watch(ListenerFd(Arc::new(listener)))?,
            pending: Mutex::default(),
            runtime,
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.get_ref().0.local_addr()
    }

    /// Waits for the next stream; see [`accept`](super::RdmaListener::accept).
    /// Dropping the future loses no stream.
    ///
    /// # Errors
    /// As [`accept`](super::RdmaListener::accept).
    pub async fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        std::future::poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Polls for the next stream. If several tasks poll, the last one is woken.
    ///
    /// # Errors
    /// As [`accept`](super::RdmaListener::accept).
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(RdmaStream, SocketAddr)>> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(task) = &mut pending.task {
                let made = ready!(Pin::new(task).poll(cx));
                (pending.task, pending.more) = (None, true);
                if let Some((engine, peer)) = made.map_err(io::Error::other)?? {
                    return Poll::Ready(RdmaStream::new(engine).map(|stream| (stream, peer)));
                }
                pending.more = false;
            }
            let listener = &self.listener.get_ref().0;
            if !pending.more {
                let mut guard = ready!(self.listener.poll_read_ready(cx))?;
                // The task handles all events, but others may have followed.
                if !is_readable(listener.as_fd())? {
                    guard.clear_ready();
                    continue;
                }
            }
            let listener = Arc::clone(listener);
            let accept = move || listener.accept_ready(false);
            pending.task = Some(self.runtime.spawn_blocking(accept));
        }
    }
}

impl fmt::Debug for RdmaListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.listener.get_ref().0.fmt(f)
    }
}

/// Returns whether there is a request or another event.
fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let ready = super::wait::readable([fd, fd], Some(std::time::Instant::now()))?;
    Ok(ready[0])
}
