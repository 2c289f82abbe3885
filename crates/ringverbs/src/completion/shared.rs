//! Completion queues for any thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::completion::{Completion, CompletionQueue, CompletionQueueRef};
use crate::{CloseError, Result};

/// A completion queue that any thread may poll. Each call takes and releases a lock, so a
/// batch is read without interruption.
///
/// To share it, put it into an `Arc`, or pass a reference to scoped threads.
#[derive(Debug)]
pub struct SharedCompletionQueue {
    queue: Mutex<CompletionQueue>,
}

impl SharedCompletionQueue {
    /// Makes a queue shareable.
    pub fn new(queue: CompletionQueue) -> Self {
        Self {
            queue: Mutex::new(queue),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CompletionQueue> {
        // A panic in a poll leaves the queue consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls for completions; see [`CompletionQueue::poll`]. Threads that poll
    /// concurrently get different completions, each in order.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize> {
        self.lock().poll(out)
    }

    /// Polls for completions, which are appended to `out`; see
    /// [`CompletionQueue::poll_into`].
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub fn poll_into(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.lock().poll_into(out, max)
    }

    /// Polls for one completion; see [`CompletionQueue::poll_one`].
    ///
    /// # Errors
    /// As [`CompletionQueue::poll_one`].
    pub fn poll_one(&self) -> Result<Option<Completion>> {
        self.lock().poll_one()
    }

    /// Arms the queue; see [`CompletionQueue::arm`].
    ///
    /// # Errors
    /// As [`CompletionQueue::arm`].
    pub fn arm(&self, solicited_only: bool) -> Result<bool> {
        self.lock().arm(solicited_only)
    }

    /// Returns a handle; see [`CompletionQueue::handle`].
    pub fn handle(&self) -> CompletionQueueRef {
        self.lock().handle()
    }

    /// Calls `f` with the queue under the lock, for example to resize or drain
    /// it.
    pub fn with<R>(&self, f: impl FnOnce(&mut CompletionQueue) -> R) -> R {
        f(&mut self.lock())
    }

    /// Returns the queue, for a single owner.
    pub fn into_inner(self) -> CompletionQueue {
        self.queue
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the queue; see [`CompletionQueue::close`].
    ///
    /// # Errors
    /// As [`CompletionQueue::close`].
    pub fn close(self) -> Result<(), CloseError<Self>> {
        self.into_inner()
            .close()
            .map_err(|refused| refused.map(Self::new))
    }
}
