//! Requests and replies.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;

use ringverbs::PoolBuffer;
use tokio::sync::OwnedSemaphorePermit;

/// The bytes of a message, in the buffer in which they arrived, or copied.
pub(crate) enum Body {
    Pooled {
        buffer: PoolBuffer,
        begin: usize,
        /// Limits the large buffers of a connection.
        _permit: Option<OwnedSemaphorePermit>,
    },
    Copied(Vec<u8>),
}

impl Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Pooled { buffer, begin, .. } => buffer.get(*begin..).unwrap_or_default(),
            Self::Copied(bytes) => bytes,
        }
    }
}

/// A request as passed to a handler: a slice of bytes.
///
/// It occupies a buffer of its connection until it is dropped, so copy data that is kept.
pub struct Request {
    pub(crate) body: Body,
    pub(crate) peer: Option<SocketAddr>,
}

impl Request {
    /// Returns the client's address, if the connection manager has it.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.peer
    }
}

impl Deref for Request {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.body
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("len", &self.len())
            .field("peer", &self.peer)
            .finish()
    }
}

/// A reply: a slice of bytes.
pub struct Reply {
    pub(crate) body: Body,
}

impl Reply {
    /// Returns the bytes, copied if they are in a buffer of the connection.
    pub fn into_vec(self) -> Vec<u8> {
        match self.body {
            Body::Copied(bytes) => bytes,
            body @ Body::Pooled { .. } => body.to_vec(),
        }
    }
}

impl Deref for Reply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.body
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("len", &self.len()).finish()
    }
}

/// The response of a handler: bytes, the request itself, or an error code.
#[derive(Debug)]
pub struct Response(pub(crate) ResponseBody);

pub(crate) enum ResponseBody {
    Bytes(Vec<u8>),
    Static(&'static [u8]),
    Echo(Request),
    Refused(u16),
}

impl fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(code) => f.debug_tuple("Refused").field(code).finish(),
            _ => f.write_str("Bytes"),
        }
    }
}

impl Response {
    /// Returns a response that the client gets as [`Error::Refused`](crate::Error::Refused).
    pub fn refused(code: u16) -> Self {
        Self(ResponseBody::Refused(code))
    }
}

impl From<Vec<u8>> for Response {
    fn from(bytes: Vec<u8>) -> Self {
        Self(ResponseBody::Bytes(bytes))
    }
}

impl From<&'static [u8]> for Response {
    fn from(bytes: &'static [u8]) -> Self {
        Self(ResponseBody::Static(bytes))
    }
}

impl From<Request> for Response {
    fn from(request: Request) -> Self {
        Self(ResponseBody::Echo(request))
    }
}

/// The error is the code of [`Error::Refused`](crate::Error::Refused).
impl<B: Into<Response>> From<Result<B, u16>> for Response {
    fn from(result: Result<B, u16>) -> Self {
        result.map_or_else(Self::refused, B::into)
    }
}
