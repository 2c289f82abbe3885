//! A completion queue for those who make queue pairs on it.

use std::fmt;
use std::sync::Arc;

use super::{CompletionQueue, CompletionReader, Format, Shared};
use crate::{Context, Error, Result};

/// A handle of a completion queue, to make queue pairs on: it does not poll, so
/// any thread may have one while the owner of the queue does.
///
/// Clones are of the same queue, and as cheap as an `Arc`'s. Like a queue pair
/// a handle keeps the kernel's object, and [`CompletionQueue::close`] is refused
/// while there are any.
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

    /// The context that the queue lives in.
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// What the queue's events name it by: its [`CompletionQueue::id`].
    pub fn id(&self) -> u64 {
        self.shared.id()
    }

    /// What a queue pair keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the queue's owner is gone.
    pub(crate) fn admit(&self) -> Result<Arc<Shared>> {
        if self.shared.is_parked() {
            return Err(Error::Invalid {
                what: "the completion queue was dropped: nobody would read its completions",
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
