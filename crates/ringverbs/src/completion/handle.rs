//! Handles of completion queues.

use std::fmt;
use std::sync::Arc;

use super::{CompletionQueue, CompletionReader, Format, Shared};
use crate::{Context, Error, Result};

/// A handle of a completion queue, for creating queue pairs. It cannot poll, so any thread
/// may have one while the owner of the queue polls.
///
/// Clones refer to the same queue and cost as much as clones of an `Arc`. Like a queue pair,
/// a handle keeps the kernel object alive, and [`CompletionQueue::close`] is refused while
/// handles exist.
///
/// ```no_run
/// # fn f(domain: &ringverbs::ProtectionDomain, mut cq: ringverbs::CompletionQueue) {
/// use ringverbs::Transport;
/// let handle = cq.handle();
/// std::thread::scope(|scope| {
///     scope.spawn(move || while cq.poll_one().is_ok() {});
///     // Meanwhile, here:
///     let _qp = domain.queue_pair(Transport::Reliable, &handle).build();
/// });
/// # }
/// ```
#[derive(Clone)]
pub struct CompletionQueueRef {
    shared: Arc<Shared>,
}

impl CompletionQueueRef {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
        }
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// Returns the queue's identifier in events; see [`CompletionQueue::id`].
    pub fn id(&self) -> u64 {
        self.shared.id()
    }

    /// Returns the part of the queue that a queue pair keeps alive.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the owner has dropped the queue.
    pub(crate) fn live_shared(&self) -> Result<Arc<Shared>> {
        if self.shared.is_dropped() {
            return Err(Error::Invalid {
                what: "the owner of the completion queue has dropped it, so its completions would not be read",
            });
        }
        Ok(Arc::clone(&self.shared))
    }
}

impl From<&Self> for CompletionQueueRef {
    fn from(handle: &Self) -> Self {
        handle.clone()
    }
}

impl From<&CompletionQueue> for CompletionQueueRef {
    fn from(queue: &CompletionQueue) -> Self {
        queue.handle()
    }
}

impl From<&mut CompletionQueue> for CompletionQueueRef {
    fn from(queue: &mut CompletionQueue) -> Self {
        queue.handle()
    }
}

impl<F: Format> From<&CompletionReader<F>> for CompletionQueueRef {
    fn from(reader: &CompletionReader<F>) -> Self {
        reader.queue().handle()
    }
}

impl fmt::Debug for CompletionQueueRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
