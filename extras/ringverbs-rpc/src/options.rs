//! Limits and sizes.

use std::time::Duration;

use ringverbs::Device;

use crate::Error;
use crate::message::{Hello, READ_HEADER};

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

    /// Sets the maximum number of calls in flight on a connection; default 32. The smaller
    /// number of both sides applies.
    #[must_use]
    pub fn window(mut self, calls: u16) -> Self {
        self.window = calls;
        self
    }

    /// Sets the size of a receive buffer, 64 bytes to 1 MiB including up to 48 bytes of header;
    /// default 4096. Longer messages are transferred by one-sided operations.
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

    /// Sets the number of buffers for long messages, which limits the calls of a connection that
    /// use them; further calls wait. Default 4.
    #[must_use]
    pub fn large_buffers(mut self, count: u16) -> Self {
        self.large_buffers = count;
        self
    }

    /// Sets the maximum number of a server's connections; further ones are rejected. Default
    /// 256.
    #[must_use]
    pub fn max_connections(mut self, count: usize) -> Self {
        self.max_connections = count;
        self
    }

    /// Sets a client's time limit for establishing a connection; default 10 seconds.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the interval of empty RDMA writes that check whether the peer is still there;
    /// default 10 seconds. A peer sends only one disconnect message: if it is lost, or the
    /// peer's host fails, the connection ends at the next such write, after the device's
    /// retries.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.keep_alive = interval;
        self
    }

    /// Selects the connection manager of a device: that of its network for an embedded device,
    /// such as a node of `ringverbs-testkit`, otherwise the kernel's, which finds the device by
    /// the address. Default: the device in `RINGVERBS_DEVICE`, otherwise the kernel's.
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let what = if !(1..=4096).contains(&self.window) {
            "the window must be 1 to 4096 calls"
        } else if !(64..=1 << 20).contains(&self.message_size) {
            "the message size must be 64 bytes to 1 MiB"
        } else if self.max_message > 1 << 30 {
            "the maximum message length must not exceed 1 GiB"
        } else if self.max_message as usize > self.message_size as usize - READ_HEADER
            && self.large_buffers == 0
        {
            "long messages need at least one large buffer"
        } else if self.keep_alive.is_zero() {
            "the keep-alive interval must not be zero"
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

    /// Sets the length of the reply to reserve room for. A reply that fits in a message needs
    /// no reservation; for a longer reply the call takes one of the client's large buffers, of
    /// [`Options::max_message`] bytes. A call whose request does not fit in a message takes a
    /// large buffer in any case.
    #[must_use]
    pub fn reply_up_to(mut self, bytes: usize) -> Self {
        self.reply_up_to = bytes;
        self
    }

    /// Sets the time limit for the whole call, including the wait for a slot; default 30
    /// seconds.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}
