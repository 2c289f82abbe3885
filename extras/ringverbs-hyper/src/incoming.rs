//! The connections of a listener.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};

use crate::RdmaIo;

/// Maximum number of concurrent handshakes; further streams wait in the listener.
const MAX_HANDSHAKES: usize = 128;
/// Pause after a failed accept.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);
/// Time limit of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

type Handshake<T> =
    Arc<dyn Fn(RdmaStream) -> Pin<Box<dyn Future<Output = io::Result<T>> + Send>> + Send + Sync>;

enum Layer<T> {
    None(fn(RdmaStream) -> T),
    Handshake(Handshake<T>),
}

/// The connections of a listener: a `Stream` of [`RdmaIo`].
pub struct Incoming<T = RdmaStream> {
    listener: RdmaListener,
    layer: Layer<T>,
    handshakes: JoinSet<io::Result<RdmaIo<T>>>,
    pause: Option<Pin<Box<Sleep>>>,
}

/// Returns whether the process, the system or the device lacks descriptors or memory, which
/// peers can cause.
fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory
    )
}

impl Incoming {
    /// Returns the streams of a listener.
    pub fn new(listener: RdmaListener) -> Self {
        Self {
            listener,
            layer: Layer::None(|stream| stream),
            handshakes: JoinSet::new(),
            pause: None,
        }
    }

    /// Calls `handshake` with each stream, and accepts the returned stream, for example a TLS
    /// server's.
    ///
    /// Handshakes run in tasks, up to 128 at once, each for up to 10 seconds. A failed handshake
    /// is logged, and its stream dropped.
    pub fn over<T, F, Fut>(self, handshake: F) -> Incoming<T>
    where
        F: Fn(RdmaStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<T>> + Send + 'static,
    {
        Incoming {
            listener: self.listener,
            layer: Layer::Handshake(Arc::new(move |stream| Box::pin(handshake(stream)))),
            handshakes: JoinSet::new(),
            pause: None,
        }
    }
}

impl<T> Incoming<T> {
    /// Returns the listener's address.
    ///
    /// # Errors
    /// As [`RdmaListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl<T: Send + 'static> Incoming<T> {
    /// Waits for the next connection. Dropping the future loses no connection. A connection
    /// for which there are no descriptors or no memory is rejected and logged.
    ///
    /// # Errors
    /// Others of [`RdmaListener::accept`]; more connections can be accepted.
    pub async fn accept(&mut self) -> io::Result<RdmaIo<T>> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Polls for the next connection.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<RdmaIo<T>>> {
        loop {
            while let Poll::Ready(Some(done)) = self.handshakes.poll_join_next(cx) {
                match done {
                    Ok(Ok(connection)) => return Poll::Ready(Ok(connection)),
                    Ok(Err(error)) => tracing::debug!(%error, "handshake failed"),
                    Err(error) => tracing::error!(%error, "handshake task failed"),
                }
            }
            if self.handshakes.len() >= MAX_HANDSHAKES {
                // The end of a handshake wakes this task.
                return Poll::Pending;
            }
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let (stream, peer) = match ready!(self.listener.poll_accept(cx)) {
                Err(error) if is_shortage(&error) => {
                    tracing::warn!(%error, "rejected a connection");
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                    continue;
                }
                accepted => accepted?,
            };
            let info = match stream.connect_info() {
                Ok(info) => info,
                Err(error) => {
                    tracing::debug!(%error, %peer, "stream dropped");
                    continue;
                }
            };
            match &self.layer {
                Layer::None(same) => return Poll::Ready(Ok(RdmaIo::new(same(stream), info))),
                Layer::Handshake(handshake) => {
                    let handshake = timeout(HANDSHAKE_TIMEOUT, handshake(stream));
                    self.handshakes
                        .spawn(async move { Ok(RdmaIo::new(handshake.await??, info)) });
                }
            }
        }
    }
}

impl<T: Send + 'static> Stream for Incoming<T> {
    type Item = io::Result<RdmaIo<T>>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_accept(cx).map(Some)
    }
}

impl<T> fmt::Debug for Incoming<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming")
            .field("listener", &self.listener)
            .field("handshakes", &self.handshakes.len())
            .finish()
    }
}
