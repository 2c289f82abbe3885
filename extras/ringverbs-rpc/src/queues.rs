//! The queue pair and message buffers of either side of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringverbs::cm::AsyncConnection;
use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::{
    BufferPool, Inline, PoolBuffer, ProtectionDomain, RemoteAddr, Transport, WorkRequest,
};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use crate::{Error, Options};

/// Maximum length of a message that is sent inline.
const INLINE: usize = 128;

/// Interval between attempts to take a buffer from an empty pool.
const POOL_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Time limit for the peer's answer to a disconnect.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A queue pair with pools of buffers for messages.
pub struct Queues {
    pub qp: AsyncQueuePair,
    sends: BufferPool,
    pub receives: BufferPool,
    /// Number of receives, and the length of each in bytes.
    window: usize,
    message_size: usize,
    keep_alive: Duration,
}

/// Returns the number of completion queue entries that a connection needs.
fn entries(options: &Options) -> u32 {
    8 * u32::from(options.window) + 16
}

/// Creates the completion queue of a connection.
pub fn completion_queue(
    domain: &ProtectionDomain,
    options: &Options,
) -> Result<AsyncCompletionQueue, Error> {
    let queue = domain.context().completion_queue();
    Ok(AsyncCompletionQueue::spawn(
        queue.entries(entries(options)),
    )?)
}

/// Creates the queue pair of a connection.
pub fn queue_pair(
    domain: &ProtectionDomain,
    cq: &AsyncCompletionQueue,
    options: &Options,
) -> Result<AsyncQueuePair, Error> {
    let window = u32::from(options.window);
    let qp = domain
        .queue_pair(Transport::Reliable, cq)
        .send_depth(6 * window + 8)
        .recv_depth(window)
        .inline(INLINE as u32)
        .build()?;
    AsyncQueuePair::new(qp, cq).map_err(|(_, error)| error.into())
}

/// The completion queue of one or several connections of a server.
///
/// It needs descriptors and a task, which clients that never confirm must not cost. So
/// connections whose clients have not confirmed yet share one; a connection that was accepted
/// alone is alone on it.
#[derive(Debug)]
pub struct ServerQueue {
    cq: AsyncCompletionQueue,
    /// Number of connections that are established.
    established: AtomicUsize,
}

impl ServerQueue {
    pub fn new(domain: &ProtectionDomain, options: &Options) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            cq: completion_queue(domain, options)?,
            established: AtomicUsize::new(0),
        }))
    }

    /// Returns whether no established connection uses the queue.
    pub fn is_unused(&self) -> bool {
        self.established.load(Ordering::Relaxed) == 0
    }

    /// Makes room for a connection beside the others, which have references to the queue,
    /// and creates its queue pair.
    pub fn queue_pair(
        this: &Arc<Self>,
        domain: &ProtectionDomain,
        options: &Options,
    ) -> Result<AsyncQueuePair, Error> {
        let connections = u32::try_from(Arc::strong_count(this)).unwrap_or(u32::MAX);
        let needed = connections.saturating_mul(entries(options));
        if needed > this.cq.capacity() {
            this.cq.resize(needed)?;
        }
        queue_pair(domain, &this.cq, options)
    }
}

/// The reference of an established connection to its queue.
pub struct EstablishedOn(Arc<ServerQueue>);

impl EstablishedOn {
    pub fn new(queue: Arc<ServerQueue>) -> Self {
        queue.established.fetch_add(1, Ordering::Relaxed);
        Self(queue)
    }
}

impl Drop for EstablishedOn {
    fn drop(&mut self) {
        self.0.established.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Queues {
    /// Allocates the memory of a connection.
    pub fn new(
        qp: AsyncQueuePair,
        domain: &ProtectionDomain,
        options: &Options,
    ) -> Result<Self, Error> {
        let window = usize::from(options.window);
        let message_size = options.message_size as usize;
        let messages = || BufferPool::new(domain, &[(message_size, 2 * window)]);
        Ok(Self {
            qp,
            sends: messages()?,
            receives: messages()?,
            window,
            message_size,
            keep_alive: options.keep_alive,
        })
    }

    /// Posts all receives; the queue pair must be prepared.
    pub fn post_receives(&self) -> Result<(), Error> {
        let mut buffers = (0..self.window).filter_map(|_| self.receives.get(self.message_size));
        buffers.try_for_each(|buffer| self.post_receive(buffer))
    }

    pub fn post_receive(&self, mut buffer: PoolBuffer) -> Result<(), Error> {
        buffer.fill_up();
        let posted = self.qp.post_receive(buffer);
        posted.map_err(|refused| refused.into_error().into())
    }

    /// Posts a receive as soon as a buffer is free.
    pub async fn post_next_receive(&self) -> Result<(), Error> {
        self.post_receive(take_buffer(&self.receives, self.message_size).await)
    }

    /// Ticks when [`probe`](Self::probe) is due.
    pub fn probes(&self) -> Interval {
        let mut ticks = interval(self.keep_alive);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    /// Posts an empty write, which accesses no memory and fails if the peer is gone.
    pub fn probe(&self) {
        let write = WorkRequest::write(Inline(&[]), RemoteAddr::new(0, 0));
        // If the queue is full, the operations in flight serve as probes.
        let _ = self.qp.post_unsignaled(write);
    }

    /// Disconnects, and waits for the answer up to `DISCONNECT_TIMEOUT`. The message is repeated
    /// only while the connection exists.
    pub async fn close(&self, connection: &AsyncConnection) {
        if connection.disconnect(&self.qp).is_ok() {
            let _ = timeout(DISCONNECT_TIMEOUT, connection.disconnected()).await;
        }
    }

    /// Takes the buffer for sending a message; `None` if it is sent inline.
    pub async fn send_buffer(&self, len: usize) -> Option<PoolBuffer> {
        if len <= INLINE {
            return None;
        }
        Some(take_buffer(&self.sends, len).await)
    }

    /// Posts a message, which is copied to `buffer` if there is one.
    pub fn post_message(
        &self,
        buffer: Option<PoolBuffer>,
        header: &[u8],
        payload: &[u8],
    ) -> Result<(), Error> {
        let len = header.len() + payload.len();
        let Some(mut buffer) = buffer else {
            let mut bytes = [0; INLINE];
            let to = bytes.get_mut(..len).ok_or(Error::Disconnected)?;
            let (front, back) = to.split_at_mut(header.len());
            front.copy_from_slice(header);
            back.copy_from_slice(payload);
            let posted = self.qp.post_unsignaled(WorkRequest::send(Inline(to)));
            return posted.map_err(|refused| refused.into_error().into());
        };
        buffer.set_len(len)?;
        let (front, back) = buffer.split_at_mut(header.len());
        front.copy_from_slice(header);
        back.copy_from_slice(payload);
        // Signalled, so that the buffer returns to the pool soon. The operation continues
        // without its future.
        if !self.qp.send(buffer).is_posted() {
            return Err(Error::Disconnected);
        }
        Ok(())
    }
}

/// Takes a buffer as soon as one is free.
pub async fn take_buffer(pool: &BufferPool, len: usize) -> PoolBuffer {
    loop {
        match pool.get(len) {
            Some(buffer) => return buffer,
            None => tokio::time::sleep(POOL_RETRY_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_shared_queue_has_room_for_all_connections() {
        let device = ringverbs::Device::embedded().unwrap();
        let domain = device.open().unwrap().alloc_pd().unwrap();
        let options = Options::default();
        let queue = ServerQueue::new(&domain, &options).unwrap();
        let mut connections = Vec::new();
        for count in 1..=20 {
            let reference = Arc::clone(&queue);
            let qp = ServerQueue::queue_pair(&queue, &domain, &options).unwrap();
            connections.push((qp, reference));
            assert!(queue.cq.capacity() >= count * entries(&options));
        }
    }
}
