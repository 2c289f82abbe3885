//! Limits and sizes.

use std::time::Duration;

use ringverbs::Device;

use crate::Error;
use crate::wire::{Hello, READ_HEADER};

/// Sizes and limits of a client or a server. The two sides may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub(crate) window: u16,
    pub(crate) message_size: u32,
    pub(crate) max_message: u32,
    pub(crate) large_buffers: u16,
    pub(crate) max_connections: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) keep_alive: Duration,
    pub(crate) device: Option<Device>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            window: 32,
            message_size: 4096,
            max_message: 1 << 20,
            large_buffers: 4,
            max_connections: 256,
            connect_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(10),
            device: None,
        }
    }
}

impl Options {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum of calls in flight on a connection; default 32. The smaller
    /// number of both sides applies.
    #[must_use]
    pub fn window(mut self, calls: u16) -> Self {
        self.window = calls;
        self
    }

    /// Sets the size of a receive buffer: longer messages go by one-sided
    /// operations. 64 bytes to 1 MiB, with up to 48 for the header; default 4096.
    #[must_use]
    pub fn message_size(mut self, bytes: u32) -> Self {
        self.message_size = bytes;
        self
    }

    /// Sets the maximum length of a request or reply; up to 1 GiB, default 1 MiB.
    #[must_use]
    pub fn max_message(mut self, bytes: u32) -> Self {
        self.max_message = bytes;
        self
    }

    /// Sets the number of buffers for long messages: as many calls of a connection
    /// can have them at once; further ones wait. Default 4.
    #[must_use]
    pub fn large_buffers(mut self, count: u16) -> Self {
        self.large_buffers = count;
        self
    }

    /// Sets the maximum of a server's connections: further ones are rejected.
    /// Default 256.
    #[must_use]
    pub fn max_connections(mut self, count: usize) -> Self {
        self.max_connections = count;
        self
    }

    /// Sets the time in which a connection has to be made; default 10 seconds.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the interval at which an empty RDMA write shows whether the peer is still
    /// there; default 10 seconds. A peer that ends says so once only: if that message is
    /// lost, or the peer's host is, the connection ends at the next such write, after the
    /// retries of its device.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.keep_alive = interval;
        self
    }

    /// Uses the connection manager of this device: its network's for an embedded
    /// device, such as a node of `ringverbs-testkit`, otherwise the kernel's, where the
    /// address decides. By default what `RINGVERBS_DEVICE` names.
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let what = if !(1..=4096).contains(&self.window) {
            "a window has 1 to 4096 calls"
        } else if !(64..=1 << 20).contains(&self.message_size) {
            "a message has 64 bytes to 1 MiB"
        } else if self.max_message > 1 << 30 {
            "a long message has up to 1 GiB"
        } else if self.max_message as usize > self.message_size as usize - READ_HEADER
            && self.large_buffers == 0
        {
            "long messages need buffers"
        } else if self.keep_alive.is_zero() {
            "there is time between two writes that keep a connection alive"
        } else {
            return Ok(());
        };
        Err(Error::Options { what })
    }

    pub(crate) fn hello(&self) -> Hello {
        Hello {
            window: self.window,
            message_size: self.message_size,
            max_message: self.max_message,
        }
    }
}

/// Options of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallOptions {
    pub(crate) reply_up_to: usize,
    pub(crate) timeout: Duration,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self {
            reply_up_to: 0,
            timeout: Duration::from_secs(30),
        }
    }
}

impl CallOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the length of reply that there has to be room for. Replies that fit into
    /// a message always have room; for longer ones the call takes one of the
    /// client's large buffers, of [`Options::max_message`] bytes. A call whose request
    /// does not fit into a message has one in any case, and so room for a reply of that
    /// length.
    #[must_use]
    pub fn reply_up_to(mut self, bytes: usize) -> Self {
        self.reply_up_to = bytes;
        self
    }

    /// Sets the time for the whole call, with the time that it waits for room;
    /// default 30 seconds.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}
