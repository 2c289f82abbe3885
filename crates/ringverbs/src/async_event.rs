//! Asynchronous events of a context.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

pub use uverbs::AsyncEventType;

use crate::channel::{is_again, wait_readable};
use crate::{Context, Result};

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventSource {
    /// The completion queue with that [`id`](crate::CompletionQueue::id).
    CompletionQueue(u64),
    /// The queue pair with that [`id`](crate::QueuePair::id).
    QueuePair(u64),
    /// The shared receive queue with that
    /// [`id`](crate::SharedReceiveQueue::id).
    SharedReceiveQueue(u64),
    /// That port.
    Port(u8),
    /// The device.
    Device,
    /// An event that this crate does not know is about this.
    Unknown(u64),
}

/// Something that happened to an object, a port or the device by itself.
///
/// There is nothing to acknowledge: an event of an object that is gone matches
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What happened.
    pub event: AsyncEventType,
    /// To what.
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

/// A view of a context's asynchronous events, for `poll` and its like: readable
/// means that an event is there.
#[derive(Clone, Debug)]
pub struct AsyncEvents {
    context: Context,
}

impl Context {
    /// The asynchronous events of everything made in this context.
    pub fn async_events(&self) -> AsyncEvents {
        AsyncEvents {
            context: self.clone(),
        }
    }
}

impl AsyncEvents {
    /// An event if one is there.
    ///
    /// # Errors
    /// EIO after the device is gone and its last event was read.
    pub fn try_event(&self) -> Result<Option<AsyncEvent>> {
        match self.context.inner().events.read_event() {
            Ok(event) => Ok(Some(event.into())),
            Err(error) if is_again(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for an event, for ever without a `timeout`. `None` when the time is
    /// up, or a signal handler has run.
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
