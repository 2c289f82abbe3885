//! Completion channels: waiting for completion events.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::completion::CompletionQueue;
use crate::context::Ctx;
use crate::{Context, Result};

/// A channel for the events of armed completion queues (`ibv_comp_channel`). Several
/// queues may share a channel; each event names its queue.
///
/// A handle: clones refer to the same channel. Any thread may use it; an event is
/// delivered to one of the waiting threads. `AsFd` returns the descriptor for `poll`
/// and similar calls; it is readable when an event is pending.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Inner>,
}

struct Inner {
    /// Declared before the context, so that it is closed first.
    channel: uverbs::CompletionChannel<Ctx>,
    context: Context,
}

/// An event of a completion queue: a completion arrived after the queue was
/// armed.
///
/// Events need no acknowledgement: the queue may be destroyed at any time, and an
/// event of a destroyed queue matches no other queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelEvent {
    /// The [`id`](CompletionQueue::id) of the queue.
    pub queue: u64,
}

impl ChannelEvent {
    /// Returns whether the event belongs to this queue.
    pub fn is_of(&self, queue: &CompletionQueue) -> bool {
        self.queue == queue.id()
    }
}

impl Context {
    /// Creates a completion channel.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn completion_channel(&self) -> Result<CompletionChannel> {
        let channel = uverbs::CompletionChannel::create(self.uverbs())?;
        channel.set_nonblocking(true)?;
        Ok(CompletionChannel {
            inner: Arc::new(Inner {
                channel,
                context: self.clone(),
            }),
        })
    }
}

impl CompletionChannel {
    /// Returns the context.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Returns the next event, or `None` if there is none. A system call; never
    /// blocks.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn try_event(&self) -> Result<Option<ChannelEvent>> {
        match self.inner.channel.read_event() {
            Ok(queue) => {
                self.inner.context.provider().event_read(queue);
                Ok(Some(ChannelEvent { queue }))
            }
            Err(error) if is_again(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for an event, without limit if `timeout` is `None`. Returns `None`
    /// after the timeout, or if a signal handler ran.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<ChannelEvent>> {
        let channel = &self.inner.channel;
        if !wait_readable(timeout, |millis| channel.wait_readable(millis))? {
            return Ok(None);
        }
        self.try_event()
    }
}

/// Returns whether the error is EAGAIN: there was nothing to read.
pub(crate) fn is_again(error: &uverbs::Error) -> bool {
    matches!(error.errno().raw(), libc::EAGAIN | libc::EINTR)
}

/// Waits until a file is readable, with a `wait` that takes milliseconds. Returns
/// false after the timeout, or if a signal handler ran.
pub(crate) fn wait_readable(
    timeout: Option<Duration>,
    wait: impl FnOnce(i32) -> std::result::Result<bool, uverbs::Error>,
) -> Result<bool> {
    // Rounded up, so that it does not return before the timeout.
    let millis = match timeout {
        None => -1,
        Some(time) => i32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(i32::MAX),
    };
    match wait(millis) {
        Ok(readable) => Ok(readable),
        Err(error) if error.errno().raw() == libc::EINTR => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.channel.as_fd()
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.channel.fd()
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionChannel")
            .field(&self.inner.channel.fd())
            .finish()
    }
}
