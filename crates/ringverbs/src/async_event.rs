//! Asynchronous events of a context (`ibv_get_async_event`).

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

pub use uverbs::AsyncEventType;

use crate::channel::{is_again, wait_readable};
use crate::{Context, Result};

/// The object that an event refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventSource {
    /// The completion queue with this [`id`](crate::CompletionQueue::id).
    CompletionQueue(u64),
    /// The queue pair with this [`id`](crate::QueuePair::id).
    QueuePair(u64),
    /// The shared receive queue with this
    /// [`id`](crate::SharedReceiveQueue::id).
    SharedReceiveQueue(u64),
    /// The port with this number.
    Port(u8),
    /// The device.
    Device,
    /// The element of an event whose type is unknown to this crate.
    Unknown(u64),
}

/// An unrequested change of an object, a port or the device.
///
/// Events need no acknowledgement: an event of a destroyed object matches no
/// other object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// The type of the event.
    pub event: AsyncEventType,
    /// The object that it refers to.
    pub source: EventSource,
}

impl From<uverbs::AsyncEvent> for AsyncEvent {
    fn from(from: uverbs::AsyncEvent) -> Self {
        type Type = AsyncEventType;
        let element = from.element;
        let source = match from.event {
            Type::CQ_ERR => EventSource::CompletionQueue(element),
            Type::QP_FATAL
            | Type::QP_REQ_ERR
            | Type::QP_ACCESS_ERR
            | Type::COMM_EST
            | Type::SQ_DRAINED
            | Type::PATH_MIG
            | Type::PATH_MIG_ERR
            | Type::QP_LAST_WQE_REACHED => EventSource::QueuePair(element),
            Type::SRQ_ERR | Type::SRQ_LIMIT_REACHED => EventSource::SharedReceiveQueue(element),
            Type::PORT_ACTIVE
            | Type::PORT_ERR
            | Type::LID_CHANGE
            | Type::PKEY_CHANGE
            | Type::SM_CHANGE
            | Type::CLIENT_REREGISTER
            | Type::GID_CHANGE => {
                u8::try_from(element).map_or(EventSource::Unknown(element), EventSource::Port)
            }
            Type::DEVICE_FATAL => EventSource::Device,
            _ => EventSource::Unknown(element),
        };
        Self {
            event: from.event,
            source,
        }
    }
}

/// The asynchronous events of a context. `AsFd` returns the descriptor for `poll`
/// and similar calls; it is readable when an event is pending.
#[derive(Clone, Debug)]
pub struct AsyncEvents {
    context: Context,
}

impl Context {
    /// Returns the asynchronous events of all objects of this context.
    pub fn async_events(&self) -> AsyncEvents {
        AsyncEvents {
            context: self.clone(),
        }
    }
}

impl AsyncEvents {
    /// Returns the next event, or `None` if there is none. A system call; never
    /// blocks.
    ///
    /// # Errors
    /// EIO after the device was removed and its last event was read.
    pub fn try_event(&self) -> Result<Option<AsyncEvent>> {
        match self.context.inner().events.read_event() {
            Ok(event) => Ok(Some(event.into())),
            Err(error) if is_again(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for an event, without limit if `timeout` is `None`. Returns `None`
    /// after the timeout, or if a signal handler ran.
    ///
    /// # Errors
    /// As [`AsyncEvents::try_event`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<AsyncEvent>> {
        let events = &self.context.inner().events;
        if !wait_readable(timeout, |millis| events.wait_readable(millis))? {
            return Ok(None);
        }
        self.try_event()
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.context.inner().events.as_fd()
    }
}
