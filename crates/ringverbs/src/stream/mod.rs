//! Streams of bytes over RDMA, with the interface of TCP's.
//!
//! [`RdmaListener`] and [`RdmaStream`] are what `std::net::TcpListener` and
//! `TcpStream` are, by the same addresses: those of the network interface that
//! the RDMA device belongs to. With feature `tokio`, module `tokio` has both
//! for asynchronous programs.
//!
//! ```no_run
//! # fn f() -> std::io::Result<()> {
//! use std::io::{Read, Write};
//! use ringverbs::stream::{RdmaListener, RdmaStream};
//!
//! let listener = RdmaListener::bind("192.0.2.1:7471")?;
//! let mut client = RdmaStream::connect(listener.local_addr()?)?;
//! let (mut server, _) = listener.accept()?;
//!
//! client.write_all(b"hello")?;
//! client.shutdown(std::net::Shutdown::Write)?;
//! let mut text = String::new();
//! server.read_to_string(&mut text)?;
//! # Ok(()) }
//! ```
//!
//! **How.** Each side registers memory once and posts receives, and tells the
//! other how many and how long they are. Bytes that are written are copied into
//! a registered buffer and sent as a message; a read copies them out, and posts
//! the receive again. Credits, which go along with the messages, see to it that
//! none is sent that finds no receive. Nothing is registered or allocated per
//! read or write.
//!
//! **Full duplex.** The directions are independent: a stream that is read by
//! nobody stops its writer, not the other direction.
//!
//! **Ends.** A side that shuts down writing, or closes, sends an end; the peer
//! reads all before it, then 0. A peer that goes without an end is
//! `ConnectionReset`, after all that it has sent. A host that goes without a
//! word is noticed by those who write to it, as with TCP.
//!
//! **Progress.** There is no thread behind a stream: it works while it is read,
//! written, closed or polled. What was written is on its way when `write`
//! returns.

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
use std::time::Duration;

use crate::Device;

pub use blocking::RdmaStream;
pub use listener::RdmaListener;

/// Memory and patience of streams.
///
/// A stream has `(sends + receives) * size` bytes of registered memory: 2 MiB
/// unless told. The two sides need not have the same.
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
    /// What is good for most.
    pub fn new() -> Self {
        Self::default()
    }

    /// Messages that may be on their way out; at least 2.
    #[must_use]
    pub fn sends(mut self, messages: u16) -> Self {
        self.sends = messages;
        self
    }

    /// Messages that may be here unread; at least 8. In each direction there
    /// are as many on the way as the smaller number of the two sides.
    #[must_use]
    pub fn receives(mut self, messages: u16) -> Self {
        self.receives = messages;
        self
    }

    /// Bytes of each buffer, and so of a message; at least 256, at most 1 GiB.
    #[must_use]
    pub fn message_size(mut self, bytes: u32) -> Self {
        self.size = bytes;
        self
    }

    /// How long the peer may take to answer; 10 seconds unless told.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// By whose connection manager: of an embedded device its network's, of any
    /// other the kernel's, as when none is named. Where none is, and with the
    /// feature `embedded`, the environment may name one ([`cm`](crate::cm)).
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
