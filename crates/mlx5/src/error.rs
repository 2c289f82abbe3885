//! What can go wrong: when an object is made, when work is posted, when a
//! completion is read.

use std::fmt;

/// A malformed CQE. It stays the next one until
/// [`CompletionRing::skip`](crate::CompletionRing::skip).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionError {
    /// No queue of that user index completes here.
    UnknownQueue {
        /// The index that the completion has.
        user_index: u32,
    },
    /// What the completion is about is not known.
    UnknownOpcode {
        /// The completion's opcode, 4 bits.
        completion: u8,
        /// The work request's opcode.
        request: u8,
    },
    /// It stands for a number of completions that cannot be, or for others than
    /// of success.
    BadSession {
        /// How many.
        count: u32,
    },
    /// It names a work request that is not outstanding.
    UnknownRequest {
        /// The slot.
        slot: u16,
    },
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownQueue { user_index } => write!(
                f,
                "a completion for user index {user_index:#x}, of which no queue completes here"
            ),
            Self::UnknownOpcode {
                completion,
                request,
            } => write!(
                f,
                "a completion of opcode {completion:#x} for a request of opcode {request:#x}"
            ),
            Self::BadSession { count } => {
                write!(f, "a completion that stands for {count} that cannot be")
            }
            Self::UnknownRequest { slot } => write!(
                f,
                "a completion for the work request in slot {slot}, where none is outstanding"
            ),
        }
    }
}

impl std::error::Error for CompletionError {}

/// An object that could not be made or changed. What the kernel had already
/// made has been destroyed again.
#[derive(Debug)]
#[non_exhaustive]
pub enum CreateError {
    /// The kernel refused.
    Command(uverbs::Error),
    /// A page of the device could not be mapped.
    Map {
        /// Which page, of the command descriptor.
        page: u32,
        /// What mmap(2) said.
        error: std::io::Error,
    },
    /// Memory for a queue could not be had.
    Memory {
        /// Which queue.
        queue: &'static str,
        /// What mmap(2) said.
        error: std::io::Error,
    },
    /// More than the device can do (EINVAL).
    TooLarge {
        /// What of the request.
        what: &'static str,
    },
    /// The driver's answer contradicts itself, or what it was asked (EPROTO).
    BadAnswer {
        /// Which part of it.
        what: &'static str,
    },
    /// A device or an object that this crate does not serve (EOPNOTSUPP).
    Unsupported {
        /// What about it.
        what: &'static str,
    },
    /// Every user index is taken, or no memory for bookkeeping.
    NoMemory,
}

impl CreateError {
    /// The errno that says it best to a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Command(error) => error.errno().raw(),
            Self::Map { error, .. } | Self::Memory { error, .. } => {
                error.raw_os_error().unwrap_or(libc::EIO)
            }
            Self::TooLarge { .. } => libc::EINVAL,
            Self::BadAnswer { .. } => libc::EPROTO,
            Self::Unsupported { .. } => libc::EOPNOTSUPP,
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
            Self::Map { page, error } => {
                write!(f, "mapping page {page} of the device: {error}")
            }
            Self::Memory { queue, error } => write!(f, "memory for the {queue}: {error}"),
            Self::TooLarge { what } => write!(f, "more than the device can do: {what}"),
            Self::BadAnswer { what } => write!(f, "mlx5_ib's answer makes no sense: {what}"),
            Self::Unsupported { what } => write!(f, "not done on mlx5: {what}"),
            Self::NoMemory => f.write_str("out of memory"),
        }
    }
}

impl std::error::Error for CreateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Command(error) => Some(error),
            Self::Map { error, .. } | Self::Memory { error, .. } => Some(error),
            _ => None,
        }
    }
}
