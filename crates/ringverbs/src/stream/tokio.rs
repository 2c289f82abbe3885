//! Streams for tokio.
//!
//! They need a runtime with I/O enabled. Cancelling is dropping a future: what
//! is in flight stays the stream's, and nothing that was read is lost. The
//! halves of `tokio::io::split` work at the same time.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use ::tokio::runtime::Handle;
use ::tokio::task::JoinHandle;

use super::engine::Engine;
use super::linger::Lingering;
use super::setup::{connect, each_address, from_manager};
use super::{RdmaListener as StdListener, RdmaStream as StdStream, StreamOptions};
use crate::CompletionChannel;
use crate::cm::manager::EventChannel;

/// [`RdmaStream`](super::RdmaStream) for tokio.
///
/// `shutdown` ends the stream and waits until all has arrived. Dropped without,
/// it tries for up to 100 ms, then in a thread up to 5 s more.
pub struct RdmaStream {
    /// Before the engine, which closes the descriptors.
    completions: AsyncFd<CompletionChannel>,
    events: AsyncFd<Events>,
    wakers: Arc<Wakers>,
    waker: Waker,
    engine: Lingering,
}

/// The connection's events.
struct Events(EventChannel);

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// What has a descriptor that stays the same.
///
/// # Safety
/// The descriptor is open, and the same one, as long as the value lives.
unsafe trait Steady: AsRawFd {}
// SAFETY: a handle of the channel keeps its file open.
unsafe impl Steady for CompletionChannel {}
// SAFETY: as above.
unsafe impl Steady for Events {}
// SAFETY: a listener has one channel all its life, and keeps it open.
unsafe impl Steady for Listening {}

/// Registers a descriptor with the runtime.
fn watch<T: Steady>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: `Steady` says what is asked for.
    let watched = unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) };
    watched.map_err(io::Error::from)
}

/// Who waits to read, and who to write: an event wakes both, since either's
/// may have come.
#[derive(Default)]
struct Wakers([Mutex<Option<Waker>>; 2]);

#[derive(Clone, Copy)]
enum Side {
    Read = 0,
    Write = 1,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

impl Wakers {
    fn set(&self, side: Side, waker: &Waker) {
        let mut place = self.0[side as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &mut *place {
            Some(old) => old.clone_from(waker),
            None => *place = Some(waker.clone()),
        }
    }

    fn wake_one(&self, side: Side) {
        let waker = self.0[side as usize]
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
        self.wake_one(Side::Read);
        self.wake_one(Side::Write);
    }
}

impl RdmaStream {
    /// Connects to a listener; see [`connect`](super::RdmaStream::connect). The
    /// connection manager is waited for in tokio's blocking threads.
    ///
    /// # Errors
    /// As there.
    pub async fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::connect_with(address, StreamOptions::default()).await
    }

    /// The same, with other than the usual buffers.
    ///
    /// # Errors
    /// As there.
    pub async fn connect_with(
        address: impl ToSocketAddrs,
        options: StreamOptions,
    ) -> io::Result<Self> {
        let addresses: Vec<_> = address.to_socket_addrs()?.collect();
        let attempt = move || each_address(&addresses[..], |address| connect(address, &options));
        let engine = ::tokio::task::spawn_blocking(attempt)
            .await
            .map_err(io::Error::other)??;
        Self::new(engine)
    }

    /// Takes a stream over from the program's blocking part.
    ///
    /// # Errors
    /// `InvalidInput` while there are other handles of the stream, which is
    /// dropped then; no runtime to register with.
    pub fn from_std(stream: StdStream) -> io::Result<Self> {
        let engine = stream.into_engine().map_err(|_| {
            let text = "the stream has other handles; drop them first";
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?;
        Self::new(engine)
    }

    fn new(engine: Lingering) -> io::Result<Self> {
        let wakers = Arc::new(Wakers::default());
        let channel = Events(engine.connection().id().channel());
        Ok(Self {
            completions: watch(engine.channel().clone())?,
            events: watch(channel)?,
            waker: Waker::from(Arc::clone(&wakers)),
            wakers,
            engine,
        })
    }

    /// Our address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager knows of none any more.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.engine.connection().local_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager knows of none any more.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.engine.connection().peer_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Tries until there is a result, or waits for events.
    fn poll_until<R>(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        mut attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> Poll<io::Result<R>> {
        loop {
            if self.engine.progress() {
                // Its event may be gone when the other one looks.
                self.wakers.wake_one(side.other());
            }
            if let Some(result) = attempt(&mut self.engine)? {
                return Poll::Ready(Ok(result));
            }
            self.wakers.set(side, cx.waker());
            let mut both = Context::from_waker(&self.waker);
            if let Poll::Ready(guard) = self.events.poll_read_ready(&mut both) {
                let mut guard = guard?;
                self.engine.look_at_connection();
                guard.clear_ready();
                self.wakers.wake_one(side.other());
                continue;
            }
            if self.engine.arm()? {
                continue;
            }
            let mut guard = ready!(self.completions.poll_read_ready(&mut both))?;
            self.engine.take_events()?;
            guard.clear_ready();
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
            .poll_until(cx, Side::Read, |engine| {
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
            .poll_until(cx, Side::Write, |engine| engine.write(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: what was written is on its way.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_until(cx, Side::Write, |engine| {
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
/// A stream's queues and memory are made in one of tokio's blocking threads, one
/// stream at a time.
pub struct RdmaListener {
    listener: AsyncFd<Listening>,
    /// The stream that is being made.
    making: Mutex<Option<JoinHandle<Answer>>>,
    runtime: Handle,
}

#[derive(Debug)]
struct Listening(Arc<StdListener>);

/// What has become of a request: no stream if it was of none.
type Answer = io::Result<Option<(Lingering, SocketAddr)>>;

impl AsRawFd for Listening {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl RdmaListener {
    /// Listens; see [`bind`](super::RdmaListener::bind). Names are not resolved
    /// asynchronously.
    ///
    /// # Errors
    /// As there.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::from_std(StdListener::bind(address)?)
    }

    /// The same, for streams with other than the usual buffers.
    ///
    /// # Errors
    /// As there.
    pub fn bind_with(address: impl ToSocketAddrs, options: StreamOptions) -> io::Result<Self> {
        Self::from_std(StdListener::bind_with(address, options)?)
    }

    /// Takes a listener over from the program's blocking part.
    ///
    /// # Errors
    /// No runtime to register with.
    pub fn from_std(listener: StdListener) -> io::Result<Self> {
        let runtime = Handle::try_current().map_err(io::Error::other)?;
        Ok(Self {
            listener: watch(Listening(Arc::new(listener)))?,
            making: Mutex::new(None),
            runtime,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.get_ref().0.local_addr()
    }

    /// Waits for the next stream; see [`accept`](super::RdmaListener::accept).
    /// A future that is dropped loses none.
    ///
    /// # Errors
    /// As there.
    pub async fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        std::future::poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// The same, polled. Of several tasks that poll, the last one is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(RdmaStream, SocketAddr)>> {
        let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(task) = &mut *making {
                let made = ready!(Pin::new(task).poll(cx));
                *making = None;
                if let Some((engine, peer)) = made.map_err(io::Error::other)?? {
                    return Poll::Ready(RdmaStream::new(engine).map(|stream| (stream, peer)));
                }
            }
            let mut guard = ready!(self.listener.poll_read_ready(cx))?;
            let listener = &self.listener.get_ref().0;
            // There may be more behind it: what is ready stays so until there
            // was nothing.
            if let Some(request) = listener.request_within(Some(Duration::ZERO))? {
                let listener = Arc::clone(listener);
                let answer = move || listener.answer(request);
                *making = Some(self.runtime.spawn_blocking(answer));
                continue;
            }
            if !is_readable(self.listener.get_ref().0.as_fd())? {
                guard.clear_ready();
            }
        }
    }
}

impl fmt::Debug for RdmaListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.listener.get_ref().0.fmt(f)
    }
}

/// Whether a request, of use or not, is there.
fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let ready = super::wait::readable([fd, fd], Some(std::time::Instant::now()))?;
    Ok(ready[0])
}
