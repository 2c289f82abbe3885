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
//! **Connecting** completes when the listener's program has accepted, unlike with TCP, so
//! one thread cannot do both.
//!
//! **Protocol.** Each side registers memory once, posts receives, and sends their number
//! and length to the peer. Written bytes are copied into a registered buffer and sent as a
//! message; a read copies them out and posts the receive again. Credits in the messages
//! ensure that every message finds a receive. Reads and writes neither register nor
//! allocate memory.
//!
//! **Full duplex.** The directions are independent: an unread direction blocks its writer,
//! but not the other direction.
//!
//! **End of stream.** A side that shuts down writing, or closes, sends an end
//! mark; the peer reads all data before it, then 0. If a peer disconnects without an end
//! mark, reads return the data that it has sent, then `ConnectionReset`. As with TCP, only
//! a writer detects that a host has failed silently.
//!
//! **Progress.** A stream has no thread: it makes progress during reads, writes, polls and
//! the close. When `write` returns, the data was posted to the device.

mod blocking;
mod engine;
mod events;
mod fault;
mod flow;
mod linger;
mod listener;
mod messages;
mod setup;
#[cfg(feature = "tokio")]
pub mod tokio;
mod wait;

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
    /// The GID of the peer's port; `None` if the path uses LIDs only.
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

    /// Sets the number of receives, which limits the unread messages; at least 8, default
    /// 16. The smaller number of both sides limits the messages in flight in each
    /// direction.
    #[must_use]
    pub fn receives(mut self, messages: u16) -> Self {
        self.receives = messages;
        self
    }

    /// Sets the size of each buffer, and thus of a message, in bytes; 256 to 1 GiB, default
    /// 64 KiB.
    #[must_use]
    pub fn message_size(mut self, bytes: u32) -> Self {
        self.size = bytes;
        self
    }

    /// Sets the time limit for the peer's answer; default 10 seconds.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Selects the connection manager of a device: that of the network of an embedded
    /// device, otherwise the kernel's, which is the default. With the feature `embedded`,
    /// the environment may change the default ([`cm`](crate::cm)).
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    fn hello(&self) -> messages::Hello {
        messages::Hello {
            receives: self.receives,
            size: self.size,
        }
    }

    fn check(&self) -> io::Result<()> {
        let text = if self.sends < 2 {
            "a stream needs at least 2 send buffers"
        } else if self.receives < messages::MIN_RECEIVES {
            "a stream needs at least 8 receives"
        } else if !(messages::MIN_SIZE..=messages::MAX_SIZE).contains(&self.size) {
            "a stream's messages have 256 bytes to 1 GiB"
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}
