//! Connectors.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::Uri;
use hyper_util::rt::TokioIo;
use ringverbs::stream::StreamOptions;
use ringverbs::stream::tokio::RdmaStream;
use tower_service::Service;

use crate::RdmaIo;

/// The future of a connector.
pub type Connecting<T> =
    Pin<Box<dyn Future<Output = io::Result<TokioIo<RdmaIo<T>>>> + Send + 'static>>;

/// Connects to the host and port of a URI; the default port is 80, or 443 for `https`. TLS
/// requires a handshake: [`over`](Self::over).
#[derive(Clone, Debug, Default)]
pub struct RdmaConnector {
    options: StreamOptions,
    to: Option<SocketAddr>,
}

impl RdmaConnector {
    /// Returns a connector with default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the options of the streams.
    #[must_use]
    pub fn options(mut self, options: &StreamOptions) -> Self {
        self.options = options.clone();
        self
    }

    /// Connects to `address`, regardless of the URI.
    #[must_use]
    pub fn to(mut self, address: SocketAddr) -> Self {
        self.to = Some(address);
        self
    }

    /// Returns a connector that calls `handshake` with each stream and its URI, and uses the
    /// returned stream, for example a TLS client's.
    pub fn over<F>(self, handshake: F) -> HandshakeConnector<F> {
        HandshakeConnector {
            connector: self,
            handshake,
        }
    }

    async fn connect(self, uri: &Uri) -> io::Result<RdmaStream> {
        if let Some(address) = self.to {
            return RdmaStream::connect_with(address, &self.options).await;
        }
        let Some(host) = uri.host() else {
            let text = format!("{uri} has no host to connect to");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        let is_https = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let host = host.trim_start_matches('[').trim_end_matches(']');
        RdmaStream::connect_with((host, port), &self.options).await
    }
}

impl Service<Uri> for RdmaConnector {
    type Response = TokioIo<RdmaIo>;
    type Error = io::Error;
    type Future = Connecting<RdmaStream>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let stream = connector.connect(&uri).await?;
            let info = stream.connect_info()?;
            Ok(TokioIo::new(RdmaIo::new(stream, info)))
        })
    }
}

/// A connector with a handshake, from [`RdmaConnector::over`].
#[derive(Clone)]
pub struct HandshakeConnector<F> {
    connector: RdmaConnector,
    handshake: F,
}

impl<F, Fut, T> Service<Uri> for HandshakeConnector<F>
where
    F: Fn(RdmaStream, Uri) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = io::Result<T>> + Send,
{
    type Response = TokioIo<RdmaIo<T>>;
    type Error = io::Error;
    type Future = Connecting<T>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connector, handshake) = (self.connector.clone(), self.handshake.clone());
        Box::pin(async move {
            let stream = connector.connect(&uri).await?;
            let info = stream.connect_info()?;
            Ok(TokioIo::new(RdmaIo::new(
                handshake(stream, uri).await?,
                info,
            )))
        })
    }
}

impl<F> fmt::Debug for HandshakeConnector<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandshakeConnector")
            .field(&self.connector)
            .finish()
    }
}
