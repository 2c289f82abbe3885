//! Exchange of connection data before RDMA is used: endpoints of queue pairs, remote
//! memory, and application data.
//!
//! A [`Hello`] is sent over any stream: a socket, a pipe, TLS. It is one message with
//! a version, a length and a limit. No byte after it is read, so the stream can be
//! used afterwards. The peer is not trusted: its input is either a `Hello` with values
//! in range or a [`HandshakeError`], and at most [`MAX_LENGTH`] bytes are read or
//! allocated. Timeouts are up to the caller.
//!
//! ```no_run
//! # fn f(qp: &mut ringverbs::QueuePair, region: &ringverbs::RemoteRegion)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::TcpStream;
//! use ringverbs::handshake::Hello;
//!
//! let local = qp.context().local_address(1)?;
//! let mut stream = TcpStream::connect("192.0.2.1:7000")?;
//! let ours = Hello {
//!     endpoints: vec![qp.endpoint(&local)],
//!     regions: vec![region.remote()],
//!     data: b"my protocol 1".to_vec(),
//! };
//! ours.write_to(&mut stream)?;
//! let peer = Hello::read_from(&mut stream)?;
//! let [endpoint] = peer.endpoints[..] else {
//!     return Err("the peer has another number of queue pairs".into());
//! };
//! qp.connect(&local, &endpoint)?;
//! # Ok(()) }
//! ```
//!
//! A queue pair may send only after the peer's queue pair is connected too; a second,
//! empty `Hello` reports that.
//!
//! With the feature `tokio`, [`exchange`] sends and receives concurrently, and
//! [`connect`] does all steps.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, Read, Write};

use crate::qp::Mtu;
use crate::{Endpoint, Gid, RemoteAddr, RemoteMemory};

#[cfg(feature = "tokio")]
mod on_tokio;
#[cfg(test)]
mod tests;

#[cfg(feature = "tokio")]
pub use on_tokio::{connect, connect_with, exchange};

/// The longest message, in bytes.
pub const MAX_LENGTH: usize = 1 << 16;

/// The start of a message; the last byte is the version.
const MAGIC: [u8; 8] = *b"RVHELLO\x01";
/// Length of a header: magic number, and the counts of endpoints, regions and data
/// bytes, of 4 bytes each, little-endian.
const HEADER: usize = MAGIC.len() + 3 * 4;
/// Length of an endpoint: queue pair number, PSN, LID, code of the MTU, 0, GID.
const ENDPOINT: usize = 4 + 4 + 2 + 1 + 1 + 16;
/// Length of a region: address, length, rkey.
const REGION: usize = 8 + 8 + 4;

/// The message that each side sends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Hello {
    /// Endpoints of queue pairs.
    pub endpoints: Vec<Endpoint>,
    /// Memory that the other side may use.
    pub regions: Vec<RemoteMemory>,
    /// Application data.
    pub data: Vec<u8>,
}

/// The reason why a [`Hello`] was not sent or received.
#[derive(Debug)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The stream failed; `UnexpectedEof` if the peer has closed it.
    Stream(io::Error),
    /// The peer does not speak this protocol.
    Protocol,
    /// The peer speaks another version of the protocol.
    Version(u8),
    /// The message is, or would be, longer than [`MAX_LENGTH`].
    TooLong,
    /// A value of the peer is out of range, or a message is malformed.
    Malformed {
        /// The malformed part.
        what: &'static str,
    },
    /// The queue pair could not be connected.
    Verbs(crate::Error),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stream(error) => write!(f, "handshake: {error}"),
            Self::Protocol => f.write_str("the peer does not speak ringverbs' handshake"),
            Self::Version(version) => {
                write!(
                    f,
                    "the peer speaks version {version} of the handshake, not 1"
                )
            }
            Self::TooLong => write!(f, "a handshake of more than {MAX_LENGTH} bytes"),
            Self::Malformed { what } => write!(f, "handshake: malformed {what}"),
            Self::Verbs(error) => write!(f, "connecting to the peer's endpoint: {error}"),
        }
    }
}

impl std::error::Error for HandshakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is part of this one's.
            Self::Stream(error) => error.source(),
            Self::Verbs(error) => error.source(),
            _ => None,
        }
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Stream(error)
    }
}

impl From<crate::Error> for HandshakeError {
    fn from(error: crate::Error) -> Self {
        Self::Verbs(error)
    }
}

/// The unread bytes of a message.
struct Bytes<'b>(&'b [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], HandshakeError> {
        let Some((first, rest)) = self.0.split_first_chunk() else {
            return Err(HandshakeError::Malformed { what: "length" });
        };
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32, HandshakeError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HandshakeError> {
        self.take().map(u64::from_le_bytes)
    }

    fn u24(&mut self, what: &'static str) -> Result<u32, HandshakeError> {
        let number = self.u32()?;
        let fits = number < 1 << 24;
        fits.then_some(number)
            .ok_or(HandshakeError::Malformed { what })
    }
}

/// The counts of a header, and the length of the message after it.
struct Counts {
    endpoints: u32,
    regions: u32,
    rest: usize,
}

impl Counts {
    fn read(header: &[u8; HEADER]) -> Result<Self, HandshakeError> {
        let mut header = Bytes(header);
        let magic: [u8; MAGIC.len()] = header.take()?;
        let [name @ .., version] = magic;
        let [ours @ .., known] = MAGIC;
        if name != ours {
            return Err(HandshakeError::Protocol);
        }
        if version != known {
            return Err(HandshakeError::Version(version));
        }
        let (endpoints, regions, data) = (header.u32()?, header.u32()?, header.u32()?);
        // No overflow: each is less than 2^32 times a small number.
        let rest = u64::from(endpoints) * ENDPOINT as u64
            + u64::from(regions) * REGION as u64
            + u64::from(data);
        if rest + HEADER as u64 > MAX_LENGTH as u64 {
            return Err(HandshakeError::TooLong);
        }
        let rest = rest as usize;
        Ok(Self {
            endpoints,
            regions,
            rest,
        })
    }

    fn hello(&self, rest: &[u8]) -> Result<Hello, HandshakeError> {
        let mut rest = Bytes(rest);
        let mut hello = Hello::default();
        for _ in 0..self.endpoints {
            let qp_num = rest.u24("queue pair number")?;
            let psn = rest.u24("packet sequence number")?;
            let lid = u16::from_le_bytes(rest.take()?);
            let [mtu, reserved] = rest.take()?;
            let mtu = Mtu::from_code(mtu).filter(|_| reserved == 0);
            hello.endpoints.push(Endpoint {
                qp_num,
                psn,
                lid,
                mtu: mtu.ok_or(HandshakeError::Malformed { what: "MTU" })?,
                gid: Gid(rest.take()?),
            });
        }
        for _ in 0..self.regions {
            let (addr, len) = (rest.u64()?, rest.u64()?);
            let key = RemoteAddr::new(addr, rest.u32()?);
            let region = usize::try_from(len).ok();
            let region = region.and_then(|len| RemoteMemory::new(key, len));
            let what = "length of a region";
            hello
                .regions
                .push(region.ok_or(HandshakeError::Malformed { what })?);
        }
        hello.data = rest.0.to_vec();
        Ok(hello)
    }
}

impl Hello {
    /// Returns the message as bytes.
    ///
    /// # Errors
    /// [`HandshakeError::TooLong`]; `Malformed` for a queue pair number or PSN of
    /// more than 24 bits.
    pub fn encode(&self) -> Result<Vec<u8>, HandshakeError> {
        let count = |count: usize| u32::try_from(count).map_err(|_| HandshakeError::TooLong);
        let mut bytes = MAGIC.to_vec();
        for count in [
            count(self.endpoints.len())?,
            count(self.regions.len())?,
            count(self.data.len())?,
        ] {
            bytes.extend(count.to_le_bytes());
        }
        for endpoint in &self.endpoints {
            if endpoint.qp_num >= 1 << 24 || endpoint.psn >= 1 << 24 {
                return Err(HandshakeError::Malformed { what: "endpoint" });
            }
            bytes.extend(endpoint.qp_num.to_le_bytes());
            bytes.extend(endpoint.psn.to_le_bytes());
            bytes.extend(endpoint.lid.to_le_bytes());
            bytes.extend([endpoint.mtu.code(), 0]);
            bytes.extend(endpoint.gid.0);
        }
        for region in &self.regions {
            bytes.extend(region.key().addr.to_le_bytes());
            bytes.extend((region.len() as u64).to_le_bytes());
            bytes.extend(region.key().rkey.to_le_bytes());
        }
        bytes.extend(&self.data);
        if bytes.len() > MAX_LENGTH {
            return Err(HandshakeError::TooLong);
        }
        Ok(bytes)
    }

    /// Reads a message from bytes that contain nothing else.
    ///
    /// # Errors
    /// [`HandshakeError`], except `Verbs`.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let Some((header, rest)) = bytes.split_first_chunk() else {
            return Err(HandshakeError::Malformed { what: "length" });
        };
        let counts = Counts::read(header)?;
        if counts.rest != rest.len() {
            return Err(HandshakeError::Malformed { what: "length" });
        }
        counts.hello(rest)
    }

    /// Sends the message.
    ///
    /// Both sides may send before they read if the stream buffers a message; a socket
    /// buffers messages of the usual length.
    ///
    /// # Errors
    /// As [`encode`](Self::encode); errors of the stream.
    pub fn write_to(&self, stream: &mut impl Write) -> Result<(), HandshakeError> {
        stream.write_all(&self.encode()?)?;
        Ok(stream.flush()?)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// [`HandshakeError`], except `Verbs`. The stream cannot be used after an error.
    pub fn read_from(stream: &mut impl Read) -> Result<Self, HandshakeError> {
        let mut header = [0; HEADER];
        // Another protocol is recognised by its first bytes; more may never arrive.
        let (magic, counts) = header.split_at_mut(MAGIC.len());
        stream.read_exact(magic)?;
        check_magic(magic)?;
        stream.read_exact(counts)?;
        let counts = Counts::read(&header)?;
        let mut rest = vec![0; counts.rest];
        stream.read_exact(&mut rest)?;
        counts.hello(&rest)
    }
}

/// Checks the first bytes of a message.
fn check_magic(magic: &[u8]) -> Result<(), HandshakeError> {
    let mut header = [0; HEADER];
    header[..MAGIC.len()].copy_from_slice(magic);
    Counts::read(&header).map(drop)
}
