//! Byte streams over RDMA, with the interface of TCP streams.
//!
//! [`RdmaListener`] and [`RdmaStream`] correspond to `std::net::TcpListener` and
//! `TcpStream`, and use the same addresses: those of the RDMA device's network
//! interface. With the feature `tokio`, the module `tokio` has both for
//! asynchronous programs.
//!
//! ```no_run
//! # fn f() -> std::io::Result<()> {
//! use std::io::{Read, Write};
//! use ringverbs::stream::{RdmaListener, RdmaStream};
//!
//! let listener = RdmaListener::bind("192.0.2.1:7471")?;
//! let address = listener.local_addr()?;
//! let server = std::thread::spawn(move || {
//!     let (mut stream, _peer) = listener.accept()?;
//!     let mut text = String::new();
//!     stream.read_to_string(&mut text)?;
//!     Ok::<_, std::io::Error>(text)
//! });
//!
//! let mut client = RdmaStream::connect(address)?;
//! client.write_all(b"hello")?;
//! client.shutdown(std::net::Shutdown::Write)?;
//! assert_eq!(server.join().unwrap()?, "hello");
//! # Ok(()) }
//! ```
//!
//! **Connecting** ends when the listener's program has accepted, unlike with TCP: one
//! thread cannot do both.
//!
//! **Protocol.** Each side registers memory once, posts receives, and tells the
//! other their number and length. Written bytes are copied into a registered
//! buffer and sent as a message; a read copies them out and posts the receive
//! again. Credits, carried by the messages, ensure that every message finds a
//! receive. No read or write registers or allocates memory.
//!
//! **Full duplex.** The directions are independent: a stream that is not read
//! blocks its writer, but not the other direction.
//!
//! **End of stream.** A side that shuts down writing, or closes, sends an end
//! mark; the peer reads everything before it, then 0. If a peer disconnects
//! without an end mark, reads return what it has sent, then `ConnectionReset`. A
//! host that fails silently is noticed only by those who write to it, as with
//! TCP.
//!
//! **Progress.** A stream has no thread: it makes progress while it is read,
//! written, closed or polled. When `write` returns, the data was posted to the
//! device.

mod blocking;
mod engine;
mod fault;
mod flow;
mod linger;
mod listener;
mod setup;
#[cfg(feature = "tokio")]
pub mod tokio;
mod wait;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::{Device, Gid};

pub use blocking::RdmaStream;
pub use listener::RdmaListener;

/// The two ends of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectInfo {
    /// The local address, if the connection manager knows it.
    pub local_addr: Option<SocketAddr>,
    /// The peer's address, if the connection manager knows it.
    pub peer_addr: Option<SocketAddr>,
    /// The local device.
    pub device: String,
    /// The number of the local queue pair.
    pub qp_num: u32,
    /// The number of the peer's queue pair.
    pub peer_qp_num: u32,
    /// The GID of the peer's port; `None` in a subnet that is addressed by LID.
    pub peer_gid: Option<Gid>,
}

/// Buffers and timeouts of streams.
///
/// A stream has `(sends + receives) * size` bytes of registered memory; default 2
/// MiB. The two sides may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    sends: u16,
    receives: u16,
    size: u32,
    connect_timeout: Duration,
    device: Option<Device>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            sends: 16,
            receives: 16,
            size: 64 * 1024,
            connect_timeout: Duration::from_secs(10),
            device: None,
        }
    }
}

impl StreamOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of send buffers, which limits the messages in flight; at
    /// least 2, default 16.
    #[must_use]
    pub fn sends(mut self, messages: u16) -> Self {
        self.sends = messages;
        self
    }

    /// Sets the number of receives, which limits the unread messages; at least 8,
    /// default 16. In each direction as many messages are in flight as the
    /// smaller number of both sides.
    #[must_use]
    pub fn receives(mut self, messages: u16) -> Self {
        self.receives = messages;
        self
    }

    /// Sets the size of each buffer, and so of a message, in bytes; 256 to 1 GiB,
    /// default 64 KiB.
    #[must_use]
    pub fn message_size(mut self, bytes: u32) -> Self {
        self.size = bytes;
        self
    }

    /// Sets how long to wait for the peer's answer; default 10 seconds.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Selects the connection manager of a device: its network's for an embedded
    /// device, otherwise the kernel's, which is the default. If none is selected,
    /// with the feature `embedded`, the environment may name a device
    /// ([`cm`](crate::cm)).
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    fn hello(&self) -> wire::Hello {
        wire::Hello {
            receives: self.receives,
            size: self.size,
        }
    }

    fn check(&self) -> io::Result<()> {
        let text = if self.sends < 2 {
            "a stream needs at least 2 buffers to send from"
        } else if self.receives < wire::MIN_RECEIVES {
            "a stream needs at least 8 receives"
        } else if !(wire::MIN_SIZE..=wire::MAX_SIZE).contains(&self.size) {
            "a stream's messages have 256 bytes to 1 GiB"
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}
