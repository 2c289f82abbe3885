//! A counter in a server's memory that clients increment, without the server's help.

use std::time::Duration;

use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, Context, QueuePair, RemoteAddr, RemoteRegion, Transport,
    WorkRequest,
};

/// An error of the device, or of an operation.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The longest that an increment may take.
const LIMIT: Duration = Duration::from_secs(30);

/// The server: a counter, and a queue pair for a client.
pub struct Server {
    /// To be connected to a client's.
    pub qp: QueuePair,
    counter: RemoteRegion,
}

impl Server {
    /// Creates the counter, with value 0.
    pub fn new(context: &Context) -> Result<Self, Error> {
        let domain = context.alloc_pd()?;
        let cq = context.completion_queue().entries(16).build()?;
        let access = AccessFlags::REMOTE_ATOMIC;
        Ok(Self {
            qp: domain.queue_pair(Transport::Reliable, &cq).build()?,
            counter: domain.alloc_remote(8, access)?,
        })
    }

    /// Returns where the counter is, for the client.
    pub fn key(&self) -> RemoteAddr {
        self.counter.key()
    }

    /// Returns the counter's value.
    pub fn value(&self) -> Result<u64, Error> {
        Ok(self.counter.load_u64(0)?)
    }
}

/// A client.
pub struct Client {
    /// To be connected to the server's.
    pub qp: QueuePair,
    cq: CompletionQueue,
    /// Receives the former value; `None` after a failure.
    buffer: Option<Buffer>,
}

impl Client {
    /// Creates a client that is not connected.
    pub fn new(context: &Context) -> Result<Self, Error> {
        let domain = context.alloc_pd()?;
        let cq = context.completion_queue().entries(16).build()?;
        Ok(Self {
            qp: domain.queue_pair(Transport::Reliable, &cq).build()?,
            buffer: Some(domain.alloc(8)?.into_buffer()),
            cq,
        })
    }

    /// Increments the counter once, and returns its former value.
    pub fn increment(&mut self, counter: RemoteAddr) -> Result<u64, Error> {
        let buffer = self.buffer.take().ok_or("the connection has failed")?;
        let add = WorkRequest::fetch_add(buffer, counter, 1);
        self.qp.post(add).map_err(|refused| refused.error)?;
        let done = self.cq.poll_for(LIMIT)?;
        let mut done = done.ok_or("the increment takes too long")?;
        done.result?;
        let buffer = done.take_buffer().ok_or("no buffer")?;
        let value = u64::from_ne_bytes(buffer[..8].try_into()?);
        self.buffer = Some(buffer);
        Ok(value)
    }
}
