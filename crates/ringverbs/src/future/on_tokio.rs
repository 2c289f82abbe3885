//! The driver as a task of tokio.

use std::io;
use std::os::fd::AsFd;
use std::task::{Context as Task, Poll, ready};

use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;

use super::{AsyncCompletionQueue, Readable};
use crate::completion::{CompletionQueueBuilder, WaitFd, watch};
use crate::{Error, Result};

impl AsyncCompletionQueue {
    /// Creates a completion queue and spawns its driver on the current runtime. The driver ends
    /// with the last handle and queue pair. Futures may also be polled outside the runtime,
    /// even after its shutdown.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Invalid`] outside of a runtime;
    /// [`Error::System`] if the descriptor cannot be registered.
    ///
    /// # Panics
    /// On a runtime without I/O enabled, as tokio's own types.
    pub fn spawn(queue: CompletionQueueBuilder) -> Result<Self> {
        let runtime = Handle::try_current().map_err(|_| Error::Invalid {
            what: "AsyncCompletionQueue::spawn must be called within a tokio runtime",
        })?;
        let (this, driver) = Self::new(queue)?;
        let watched = watch(driver.as_fd())?;
        runtime.spawn(async move {
            if let Err(error) = driver.run(ReadableFd(watched)).await {
                tracing::error!(%error, "completion queue failed");
            }
        });
        Ok(this)
    }
}

struct ReadableFd(AsyncFd<WaitFd>);

impl Readable for ReadableFd {
    fn poll_readable(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_read_ready(task))?.clear_ready();
        Poll::Ready(Ok(()))
    }
}
