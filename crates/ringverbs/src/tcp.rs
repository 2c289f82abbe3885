//! Connecting queue pairs over TCP, by exchanging endpoints.
//!
//! Programs with a TCP connection need no connection manager; the alternative is
//! [`cm`](crate::cm), which connects by IP address alone. [`connect`] does all steps;
//! [`exchange`] and [`barrier`] are the individual steps, for programs that exchange
//! several endpoints.
//!
//! ```no_run
//! # fn f(domain: &ringverbs::ProtectionDomain, cq: &ringverbs::CompletionQueue)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! use std::{net::TcpStream, time::Duration};
//! use ringverbs::{Transport, tcp};
//!
//! let local = domain.context().local_address(1)?;
//! let mut qp = domain.queue_pair(Transport::Reliable, cq).build()?;
//! let stream = TcpStream::connect("192.0.2.1:7000")?;
//! tcp::connect(&mut qp, &local, &stream, Duration::from_secs(10))?;
//! # Ok(()) }
//! ```
//!
//! The peer does the same with the accepted stream. Each message is a line of fixed
//! length, and no byte after it is read, so the stream can be used afterwards. The peer
//! is not trusted: a malformed message is refused at its first invalid byte, and the
//! timeout covers the whole call, however slowly bytes arrive. The stream may be
//! blocking or non-blocking; its own timeouts are neither used nor changed.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::qp::{ConnectOptions, Endpoint, LocalAddress};
use crate::{Error, QueuePair};

/// The start of an endpoint's line, with the version of the format.
const GREETING: &[u8] = b"ringverbs 1 ";
/// Length of an endpoint as text: 6 + 6 + 4 + 1 + 32 digits, and colons.
const ENDPOINT: usize = 53;
/// Length of an endpoint's line.
const LINE: usize = GREETING.len() + ENDPOINT + 1;
/// The line that a connected side sends.
const READY: &[u8] = b"ringverbs ready\n";
/// Maximum bytes of a malformed message that an error quotes.
const QUOTED: usize = 24;

/// The reason why peers did not connect over TCP.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The peer did not send or read a message in time.
    Timeout {
        /// The step that failed.
        during: &'static str,
        /// The timeout.
        allowed: Duration,
    },
    /// The peer has closed the stream before the end.
    Closed {
        /// The step that failed.
        during: &'static str,
    },
    /// The stream failed.
    Stream {
        /// The step that failed.
        during: &'static str,
        /// The error.
        source: io::Error,
    },
    /// The peer's message is malformed.
    Malformed {
        /// The expected message.
        expected: &'static str,
        /// The start of the message, at most 24 bytes.
        got: Vec<u8>,
    },
    /// The queue pair could not be connected to the peer's endpoint.
    Verbs(Error),
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout { during, allowed } => write!(
                f,
                "{during}: not finished within {} ms; is the peer running, with the same protocol?",
                allowed.as_millis()
            ),
            Self::Closed { during } => write!(
                f,
                "{during}: the peer has closed the stream; its own messages may tell why"
            ),
            Self::Stream { during, source } => write!(f, "{during}: {source}"),
            Self::Malformed { expected, got } => write!(
                f,
                "the peer sent \"{}\", expected {expected}; does it run the same protocol?",
                got.escape_ascii()
            ),
            Self::Verbs(error) => write!(f, "connecting to the peer's endpoint: {error}"),
        }
    }
}

impl std::error::Error for ExchangeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is part of this one's.
            Self::Stream { source, .. } => source.source(),
            Self::Verbs(error) => error.source(),
            _ => None,
        }
    }
}

impl From<Error> for ExchangeError {
    fn from(error: Error) -> Self {
        Self::Verbs(error)
    }
}

/// Sends the local endpoint and returns the peer's. Both sides call it.
///
/// # Errors
/// [`ExchangeError`], except `Verbs`. The stream cannot be used after an error: it may
/// be in the middle of a message.
pub fn exchange(
    stream: &TcpStream,
    ours: &Endpoint,
    timeout: Duration,
) -> Result<Endpoint, ExchangeError> {
    let exchange = Exchange::new(stream, timeout);
    let mut line = Vec::with_capacity(LINE);
    line.extend_from_slice(GREETING);
    line.extend_from_slice(ours.to_string().as_bytes());
    line.push(b'\n');
    // A peer's socket buffer always has room for one line, so no side waits for
    // the other to read first.
    exchange.write(&line, "telling the peer the local endpoint")?;
    let mut line = [0; LINE];
    let expected = "an endpoint of this crate's tcp::exchange";
    exchange.read(
        &mut line,
        GREETING,
        expected,
        "waiting for the peer's endpoint",
    )?;
    let parse = || {
        let text = line[GREETING.len()..].strip_suffix(b"\n")?;
        let endpoint: Endpoint = std::str::from_utf8(text).ok()?.parse().ok()?;
        // Only the canonical spelling is valid.
        (endpoint.to_string().as_bytes() == text).then_some(endpoint)
    };
    parse().ok_or_else(|| malformed(expected, &line[GREETING.len()..]))
}

/// Waits for the peer: both sides call this function, and neither call returns before
/// the other side has called it.
///
/// # Errors
/// As [`exchange`].
pub fn barrier(stream: &TcpStream, timeout: Duration) -> Result<(), ExchangeError> {
    let exchange = Exchange::new(stream, timeout);
    exchange.write(READY, "telling the peer that this side is ready")?;
    exchange.read(
        &mut [0; READY.len()],
        READY,
        "its ready message",
        "waiting until the peer is ready",
    )
}

/// Connects a queue pair to the one that the peer passes to this function, and
/// waits until both are ready to send. Returns the peer's endpoint.
///
/// A peer may send as soon as its call returns, so post receives first: call
/// [`QueuePair::initialize`] and [`QueuePair::receive`].
///
/// # Errors
/// As [`exchange`]; [`ExchangeError::Verbs`] as [`QueuePair::connect`].
pub fn connect(
    qp: &mut QueuePair,
    local: &LocalAddress,
    stream: &TcpStream,
    timeout: Duration,
) -> Result<Endpoint, ExchangeError> {
    connect_with(qp, local, stream, timeout, &ConnectOptions::new())
}

/// As [`connect`], with options ([`QueuePair::connect_with`]). They apply to this
/// side; the peer has its own.
///
/// # Errors
/// As [`connect`].
pub fn connect_with(
    qp: &mut QueuePair,
    local: &LocalAddress,
    stream: &TcpStream,
    timeout: Duration,
    options: &ConnectOptions,
) -> Result<Endpoint, ExchangeError> {
    let begin = Instant::now();
    let peer = exchange(stream, &qp.endpoint(local), timeout)?;
    qp.connect_with(local, &peer, options)?;
    barrier(stream, timeout.saturating_sub(begin.elapsed()))?;
    Ok(peer)
}

fn malformed(expected: &'static str, got: &[u8]) -> ExchangeError {
    ExchangeError::Malformed {
        expected,
        got: got[..got.len().min(QUOTED)].to_vec(),
    }
}

/// A stream with the deadline for one message in each direction.
struct Exchange<'s> {
    stream: &'s TcpStream,
    begin: Instant,
    allowed: Duration,
}

impl<'s> Exchange<'s> {
    fn new(stream: &'s TcpStream, allowed: Duration) -> Self {
        Self {
            stream,
            begin: Instant::now(),
            allowed,
        }
    }

    /// Waits until the stream is ready for `what`, or has failed.
    fn wait(&self, what: PollFlags, during: &'static str) -> Result<(), ExchangeError> {
        loop {
            let left = self.allowed.saturating_sub(self.begin.elapsed());
            if left.is_zero() {
                return Err(ExchangeError::Timeout {
                    during,
                    allowed: self.allowed,
                });
            }
            // Rounded up, so that it does not spin at the end; a timeout beyond
            // the range of poll is waited for in parts.
            let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.as_fd(), what)], timeout) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(broken(during, errno)),
            }
        }
    }

    fn write(&self, mut bytes: &[u8], during: &'static str) -> Result<(), ExchangeError> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            self.wait(PollFlags::POLLOUT, during)?;
            match send(self.stream.as_raw_fd(), bytes, flags) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(broken(during, errno)),
            }
        }
        Ok(())
    }

    /// Fills `to`, which has to start with `greeting`.
    fn read(
        &self,
        to: &mut [u8],
        greeting: &[u8],
        expected: &'static str,
        during: &'static str,
    ) -> Result<(), ExchangeError> {
        let flags = MsgFlags::MSG_DONTWAIT;
        let mut filled = 0;
        while filled < to.len() {
            self.wait(PollFlags::POLLIN, during)?;
            match recv(self.stream.as_raw_fd(), &mut to[filled..], flags) {
                Ok(0) => return Err(ExchangeError::Closed { during }),
                Ok(count) => filled += count,
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) => return Err(broken(during, errno)),
            }
            let common = filled.min(greeting.len());
            if to[..common] != greeting[..common] {
                return Err(malformed(expected, &to[..filled]));
            }
        }
        Ok(())
    }
}

fn broken(during: &'static str, errno: Errno) -> ExchangeError {
    match errno {
        Errno::ECONNRESET | Errno::EPIPE => ExchangeError::Closed { during },
        _ => ExchangeError::Stream {
            during,
            source: errno.into(),
        },
    }
}

#[cfg(test)]
mod tests;
