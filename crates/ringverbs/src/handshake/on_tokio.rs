//! Handshakes over streams of tokio.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context as Task, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Counts, HEADER, HandshakeError, Hello, MAGIC, check_magic};
use crate::future::AsyncQueuePair;
use crate::{ConnectOptions, LocalAddress};

/// The exchange of one message in each direction.
struct Exchange {
    out: Vec<u8>,
    written: usize,
    flushed: bool,
    read: Vec<u8>,
    /// Bytes of the peer's message that were read.
    read_len: usize,
    counts: Option<Counts>,
    peer: Option<Hello>,
}

impl Exchange {
    /// Writes as many bytes as the stream accepts.
    fn poll_write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        task: &mut Task<'_>,
    ) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            let rest = &self.out[self.written..];
            match Pin::new(&mut *stream).poll_write(task, rest) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(count)) => self.written += count.min(rest.len()),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        if !self.flushed {
            match Pin::new(stream).poll_flush(task) {
                Poll::Ready(Ok(())) => self.flushed = true,
                other => return other,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads the available bytes, and no byte after the message.
    fn poll_read(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        task: &mut Task<'_>,
    ) -> Poll<Result<(), HandshakeError>> {
        loop {
            // The magic number, then the header, then the rest.
            let wanted = match &self.counts {
                _ if self.read_len < MAGIC.len() => MAGIC.len(),
                None => HEADER,
                Some(counts) => HEADER + counts.rest,
            };
            if self.read_len == wanted {
                if let Some(counts) = &self.counts {
                    self.peer = Some(counts.hello(&self.read[HEADER..])?);
                    return Poll::Ready(Ok(()));
                }
                if let Some(header) = self.read.first_chunk() {
                    self.counts = Some(Counts::read(header)?);
                    continue;
                }
            }
            self.read.resize(wanted, 0);
            let mut buffer = ReadBuf::new(&mut self.read[self.read_len..]);
            match Pin::new(&mut *stream).poll_read(task, &mut buffer) {
                Poll::Ready(Ok(())) if buffer.filled().is_empty() => {
                    return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
                }
                Poll::Ready(Ok(())) => self.read_len += buffer.filled().len(),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
                Poll::Pending => return Poll::Pending,
            }
            if let Some(magic) = self.read[..self.read_len].get(..MAGIC.len()) {
                check_magic(magic)?;
            }
        }
    }
}

/// Sends a message and receives the peer's concurrently, so that neither side waits
/// for the other regardless of the stream's buffers. Both sides call it.
///
/// Dropping the future may leave the stream in the middle of a message.
///
/// # Errors
/// [`HandshakeError`], except `Verbs`. The stream cannot be used after an error.
pub async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    ours: &Hello,
) -> Result<Hello, HandshakeError> {
    let mut exchange = Exchange {
        out: ours.encode()?,
        written: 0,
        flushed: false,
        read: Vec::new(),
        read_len: 0,
        counts: None,
        peer: None,
    };
    poll_fn(|task| {
        if let Poll::Ready(Err(error)) = exchange.poll_write(stream, task) {
            return Poll::Ready(Err(error.into()));
        }
        if exchange.peer.is_none() {
            if let Poll::Ready(Err(error)) = exchange.poll_read(stream, task) {
                return Poll::Ready(Err(error));
            }
        }
        match exchange.peer.take_if(|_| exchange.flushed) {
            Some(peer) => Poll::Ready(Ok(peer)),
            None => Poll::Pending,
        }
    })
    .await
}

/// Connects a queue pair to the one that the peer passes to this function, and
/// waits until both are ready to send. `ours` has regions and data for the peer;
/// the endpoint is added to it. Returns the peer's message.
///
/// A peer may send as soon as its call returns, so post receives first, after
/// [`AsyncQueuePair::initialize`].
///
/// # Errors
/// [`HandshakeError`]; `Malformed` if the peer has not sent exactly one
/// endpoint.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    qp: &AsyncQueuePair,
    local: &LocalAddress,
    stream: &mut S,
    ours: Hello,
) -> Result<Hello, HandshakeError> {
    connect_with(qp, local, stream, ours, &ConnectOptions::new()).await
}

/// As [`connect`], with options, which apply to this side.
///
/// # Errors
/// As [`connect`].
pub async fn connect_with<S: AsyncRead + AsyncWrite + Unpin>(
    qp: &AsyncQueuePair,
    local: &LocalAddress,
    stream: &mut S,
    mut ours: Hello,
    options: &ConnectOptions,
) -> Result<Hello, HandshakeError> {
    ours.endpoints = vec![qp.endpoint(local)?];
    let peer = exchange(stream, &ours).await?;
    let [endpoint] = peer.endpoints[..] else {
        let what = "number of endpoints";
        return Err(HandshakeError::Malformed { what });
    };
    qp.connect_with(local, &endpoint, options)?;
    if exchange(stream, &Hello::default()).await? != Hello::default() {
        let what = "message that it is ready";
        return Err(HandshakeError::Malformed { what });
    }
    Ok(peer)
}
