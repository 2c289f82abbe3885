//! Streams with their addresses.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::{Connected, Connection};
use ringverbs::stream::ConnectInfo;
use ringverbs::stream::tokio::RdmaStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream, or a protocol on top of one, with the addresses of both ends.
#[derive(Debug)]
pub struct RdmaIo<T = RdmaStream> {
    io: T,
    info: ConnectInfo,
}

impl<T> RdmaIo<T> {
    pub(crate) fn new(io: T, info: ConnectInfo) -> Self {
        Self { io, info }
    }

    /// Returns the addresses and queue pair numbers of both ends.
    pub fn connect_info(&self) -> &ConnectInfo {
        &self.info
    }

    /// Returns a reference to the stream.
    pub fn get_ref(&self) -> &T {
        &self.io
    }

    /// Returns the stream.
    pub fn into_inner(self) -> T {
        self.io
    }
}

/// Responses have the [`ConnectInfo`] among their extensions.
impl<T> Connection for RdmaIo<T> {
    fn connected(&self) -> Connected {
        Connected::new().extra(self.info.clone())
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for RdmaIo<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RdmaIo<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
