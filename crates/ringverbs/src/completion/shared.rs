//! A completion queue for any thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::completion::{Completion, CompletionQueue, CompletionQueueRef};
use crate::{CloseError, Result};

/// A completion queue that any thread may poll. Each call takes the lock and
/// releases it, so no call can be made while a batch is being read.
///
/// Put it into an `Arc`, or behind a scope's reference, to share it.
#[derive(Debug)]
pub struct SharedCompletionQueue {
    queue: Mutex<CompletionQueue>,
}

impl SharedCompletionQueue {
    /// Shares a queue.
    pub fn new(queue: CompletionQueue) -> Self {
        Self {
            queue: Mutex::new(queue),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CompletionQueue> {
        // A panic in a poll leaves the queue consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`CompletionQueue::poll`]. Of two threads that poll, each gets
    /// completions of its own; each gets them in order.
    ///
    /// # Errors
    /// As there.
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize> {
        self.lock().poll(out)
    }

    /// As [`CompletionQueue::poll_one`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_one(&self) -> Result<Option<Completion>> {
        self.lock().poll_one()
    }

    /// As [`CompletionQueue::arm`].
    ///
    /// # Errors
    /// As there.
    pub fn arm(&self, solicited_only: bool) -> Result<bool> {
        self.lock().arm(solicited_only)
    }

    /// As [`CompletionQueue::handle`].
    pub fn handle(&self) -> CompletionQueueRef {
        self.lock().handle()
    }

    /// Calls `f` with the queue, under the lock: to resize or drain it.
    pub fn with<R>(&self, f: impl FnOnce(&mut CompletionQueue) -> R) -> R {
        f(&mut self.lock())
    }

    /// The queue, for one owner again.
    pub fn into_inner(self) -> CompletionQueue {
        self.queue
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`CompletionQueue::close`].
    ///
    /// # Errors
    /// As there.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        self.into_inner()
            .close()
            .map_err(|refused| refused.map(Self::new))
    }
}
