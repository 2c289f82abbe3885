//! What can go wrong, when an object is made and when work is posted.

use std::fmt;

use ring::GeometryError;

/// A work request that was not accepted. Nothing of it reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// As many work requests are outstanding as the queue holds (ENOMEM).
    Full,
    /// More scatter/gather elements than the queue was made for (EINVAL).
    TooManySges,
    /// More inline data than the queue was made for (EINVAL).
    InlineTooLong,
    /// More than [`crate::MAX_MESSAGE`] bytes (EINVAL).
    MessageTooLong,
}

impl PostError {
    /// The errno that ibv_post_send(3) and ibv_post_recv(3) give for it.
    pub fn errno(self) -> i32 {
        match self {
            Self::Full => libc::ENOMEM,
            Self::TooManySges | Self::InlineTooLong | Self::MessageTooLong => libc::EINVAL,
        }
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the work queue is full: poll completions first, or make it larger",
            Self::TooManySges => "more scatter/gather elements than the queue was made for",
            Self::InlineTooLong => "more inline data than the queue was made for",
            Self::MessageTooLong => "a message may have at most 2 GiB",
        })
    }
}

impl std::error::Error for PostError {}

/// An object that could not be made or changed. What the kernel had already
/// made has been destroyed again.
#[derive(Debug)]
#[non_exhaustive]
pub enum CreateError {
    /// The kernel refused.
    Command(uverbs::Error),
    /// The queue could not be mapped.
    Map {
        /// Which queue.
        queue: &'static str,
        /// What mmap(2) said.
        error: std::io::Error,
    },
    /// The mapped queue contradicts itself.
    Geometry {
        /// Which queue.
        queue: &'static str,
        /// How.
        error: GeometryError,
    },
    /// The kernel gave no number for an address handle, as old ones did.
    NoAddressHandleNumber,
    /// No memory for bookkeeping.
    NoMemory,
}

impl CreateError {
    /// The errno that says it best to a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Command(error) => error.errno().raw(),
            Self::Map { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Geometry { .. } => libc::EPROTO,
            Self::NoAddressHandleNumber => libc::EOPNOTSUPP,
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl From<uverbs::Error> for CreateError {
    fn from(error: uverbs::Error) -> Self {
        Self::Command(error)
    }
}

impl fmt::Display for CreateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(error) => error.fmt(f),
            Self::Map { queue, error } => write!(f, "mapping the {queue}: {error}"),
            Self::Geometry { queue, error } => write!(f, "the {queue}: {error}"),
            Self::NoAddressHandleNumber => f.write_str(
                "the kernel gave no number for the address handle: rdma_rxe of Linux 6.1 or later is needed",
            ),
            Self::NoMemory => f.write_str("out of memory"),
        }
    }
}

impl std::error::Error for CreateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Command(error) => Some(error),
            Self::Map { error, .. } => Some(error),
            Self::Geometry { error, .. } => Some(error),
            _ => None,
        }
    }
}
