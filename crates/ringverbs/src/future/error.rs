//! The error of an operation.

use std::fmt;
use std::sync::Arc;

use super::slots::EndReason;
use crate::completion::ReadError;
use crate::{Error, Failure};

/// The error of an operation, with its memory.
#[derive(Debug)]
pub struct OperationError<D> {
    /// The reason.
    pub cause: Cause,
    /// The operation's memory. `None` if the device may still use it, or the operation owned
    /// no memory.
    pub data: Option<D>,
}

/// The reason why an operation did not succeed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The operation was not posted.
    Refused(Error),
    /// The operation failed, or was flushed after another operation had failed
    /// ([`AsyncQueuePair::failure`](super::AsyncQueuePair::failure) returns the first
    /// failure).
    Failed(Failure),
    /// The operation was in a batch that was not posted; its memory is released.
    Abandoned,
    /// The queue pair was dropped. Whether the operation was executed is unknown.
    Closed,
    /// The completion queue was overrun, or the device was removed: the operation's outcome is
    /// unknown, and its memory is released with the queue pair.
    Queue(Arc<ReadError>),
}

impl From<EndReason> for Cause {
    fn from(end: EndReason) -> Self {
        match end {
            EndReason::Failed(failure) => Self::Failed(failure),
            EndReason::Abandoned => Self::Abandoned,
            EndReason::Closed => Self::Closed,
            EndReason::Queue(error) => Self::Queue(error),
        }
    }
}

impl<D> OperationError<D> {
    pub(super) fn new(cause: impl Into<Cause>, data: Option<D>) -> Self {
        Self {
            cause: cause.into(),
            data,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => error.fmt(f),
            Self::Failed(failure) => failure.fmt(f),
            Self::Abandoned => f.write_str("the batch was not posted"),
            Self::Closed => f.write_str("the queue pair was dropped with the operation in flight"),
            Self::Queue(error) => error.fmt(f),
        }
    }
}

impl<D> fmt::Display for OperationError<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<D: fmt::Debug> std::error::Error for OperationError<D> {
    /// The cause of the reason; the reason's own text is the text of this error.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Cause::Refused(error) => error.source(),
            Cause::Queue(error) => error.source(),
            _ => None,
        }
    }
}
