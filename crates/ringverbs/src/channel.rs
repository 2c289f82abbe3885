//! Completion channels: sleeping until a completion queue has something.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::completion::CompletionQueue;
use crate::context::Ctx;
use crate::{Context, Result};

/// A file that the events of armed completion queues come through. Several
/// queues may share one; an event says which queue it is of.
///
/// A handle: clones refer to the same channel. Any thread; an event goes to one
/// of those that wait. For `poll` and its like there is `AsFd`: readable means
/// that an event is there.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Inner>,
}

struct Inner {
    /// Before the context: closed first.
    channel: uverbs::CompletionChannel<Ctx>,
    context: Context,
}

/// An event of a completion queue: since it was armed, something came.
///
/// There is nothing to acknowledge: the queue may be destroyed before or after,
/// and an event of a queue that is gone matches none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelEvent {
    /// The [`id`](CompletionQueue::id) of the queue.
    pub queue: u64,
}

impl ChannelEvent {
    /// Whether it is of that queue.
    pub fn is_of(&self, queue: &CompletionQueue) -> bool {
        self.queue == queue.id()
    }
}

impl Context {
    /// Makes a completion channel.
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
    /// The context that it lives in.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// An event if one is there.
    ///
    /// # Errors
    /// EIO if the device is gone.
    pub fn try_event(&self) -> Result<Option<ChannelEvent>> {
        match self.inner.channel.read_event() {
            Ok(queue) => {
                self.inner.context.provider().seen_event(queue);
                Ok(Some(ChannelEvent { queue }))
            }
            Err(error) if is_again(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for an event, for ever without a `timeout`. `None` when the time is
    /// up, or a signal handler has run.
    ///
    /// # Errors
    /// EIO if the device is gone.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<ChannelEvent>> {
        let channel = &self.inner.channel;
        if !wait_readable(timeout, |millis| channel.wait_readable(millis))? {
            return Ok(None);
        }
        self.try_event()
    }
}

/// Whether a read found nothing.
pub(crate) fn is_again(error: &uverbs::Error) -> bool {
    matches!(error.errno().raw(), libc::EAGAIN | libc::EINTR)
}

/// Waits until a file is readable, by a `wait` of so many milliseconds. False
/// when the time is up, or a signal handler has run.
pub(crate) fn wait_readable(
    timeout: Option<Duration>,
    wait: impl FnOnce(i32) -> std::result::Result<bool, uverbs::Error>,
) -> Result<bool> {
    // Rounded up: not to return before the time is up.
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
