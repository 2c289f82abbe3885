//! gRPC over RDMA with tonic.
//!
//! **Client:** [`RdmaConnector`] connects an `Endpoint` to its URI's host and port.
//!
//! ```no_run
//! # async fn f() -> Result<(), tonic::transport::Error> {
//! use ringverbs_tonic::RdmaConnector;
//! use tonic::transport::Endpoint;
//!
//! let endpoint = Endpoint::from_static("http://192.0.2.1:7481");
//! let channel = endpoint.connect_with_connector(RdmaConnector::new()).await?;
//! // let client = GreeterClient::new(channel);
//! # let _ = channel; Ok(()) }
//! ```
//!
//! **Server:** [`Incoming`] is the argument of `serve_with_incoming`. Requests have a
//! [`ConnectInfo`] among their extensions: addresses, the peer's GID, and the numbers of both
//! queue pairs.
//!
//! ```no_run
//! # use std::{convert::Infallible, error::Error};
//! # use tonic::{body::Body, codegen::http};
//! # async fn f<S>(greeter: S) -> Result<(), Box<dyn Error>>
//! # where
//! #     S: tonic::codegen::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
//! #         + Clone + Send + 'static,
//! #     S::Future: Send,
//! # {
//! use ringverbs::stream::tokio::RdmaListener;
//! use ringverbs_tonic::Incoming;
//! use tonic::transport::Server;
//!
//! let incoming = Incoming::new(RdmaListener::bind("192.0.2.1:7481").await?);
//! Server::builder().serve_with_incoming(greeter, incoming).await?;
//! # Ok(()) }
//! ```
//!
//! **TLS:** [`Incoming::over`] and [`RdmaConnector::over`] take a handshake, for
//! example tokio-rustls', as in `https.rs` of ringverbs-hyper.

#![forbid(unsafe_code)]

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use ringverbs::stream::tokio::{RdmaListener, RdmaStream};
use ringverbs_hyper::RdmaIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

pub use ringverbs_hyper::{ConnectInfo, HandshakeConnector, RdmaConnector};

/// The connections of a listener, for tonic's `serve_with_incoming`.
#[derive(Debug)]
pub struct Incoming<T = RdmaStream>(ringverbs_hyper::Incoming<T>);

impl Incoming {
    /// Returns the streams of a listener.
    pub fn new(listener: RdmaListener) -> Self {
        Self(ringverbs_hyper::Incoming::new(listener))
    }

    /// Calls `handshake` with each stream, and accepts the returned stream; see
    /// [`ringverbs_hyper::Incoming::over`].
    pub fn over<T, F, Fut>(self, handshake: F) -> Incoming<T>
    where
        F: Fn(RdmaStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<T>> + Send + 'static,
    {
        Incoming(self.0.over(handshake))
    }
}

impl<T> Incoming<T> {
    /// Returns the listener's address.
    ///
    /// # Errors
    /// As [`RdmaListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl<T: Send + 'static> Stream for Incoming<T> {
    type Item = io::Result<Connection<T>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let accepted = self.0.poll_accept(cx);
        accepted.map(|accepted| Some(accepted.map(Connection)))
    }
}

/// An accepted connection.
#[derive(Debug)]
pub struct Connection<T = RdmaStream>(RdmaIo<T>);

impl<T> Connected for Connection<T> {
    type ConnectInfo = ConnectInfo;

    fn connect_info(&self) -> ConnectInfo {
        self.0.connect_info().clone()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Connection<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Connection<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
