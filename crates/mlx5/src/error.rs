//! Errors of creating objects and of reading completions.

use std::fmt;

/// A malformed CQE. It stays the next one until
/// [`CqeRing::skip`](crate::CqeRing::skip).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionError {
    /// No queue pair with that user index completes here.
    UnknownQueue {
        /// The user index.
        user_index: u32,
    },
    /// The opcode is unknown.
    UnknownOpcode {
        /// The completion's opcode, 4 bits.
        completion: u8,
        /// The work request's opcode.
        request: u8,
    },
    /// The title of a compressed session has an impossible count or opcode.
    BadSession {
        /// The count.
        count: u32,
    },
    /// No work request is outstanding in that slot.
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
                "a completion for user index {user_index:#x}, which no queue pair of this CQ has"
            ),
            Self::UnknownOpcode {
                completion,
                request,
            } => write!(
                f,
                "a completion with opcode {completion:#x} of a request with opcode {request:#x}"
            ),
            Self::BadSession { count } => {
                write!(f, "a malformed session of {count} compressed CQEs")
            }
            Self::UnknownRequest { slot } => write!(
                f,
                "a completion for slot {slot}, in which no work request is outstanding"
            ),
        }
    }
}

impl std::error::Error for CompletionError {}

/// An object could not be created or changed. What the kernel had created was
/// destroyed again.
#[derive(Debug)]
#[non_exhaustive]
pub enum CreateError {
    /// The kernel refused.
    Command(uverbs::Error),
    /// A page of the device could not be mapped.
    Map {
        /// Which page, of the command descriptor.
        page: u32,
        /// The error of mmap(2).
        error: std::io::Error,
    },
    /// Memory for a queue could not be allocated.
    Memory {
        /// Which queue.
        queue: &'static str,
        /// The error of mmap(2).
        error: std::io::Error,
    },
    /// More than the device supports (EINVAL).
    TooLarge {
        /// The exceeded limit.
        what: &'static str,
    },
    /// The device refused a firmware command.
    Device {
        /// The command.
        command: &'static str,
        /// The status, which [`CreateError::errno`] translates.
        status: u8,
        /// The device's syndrome.
        syndrome: u32,
    },
    /// The driver's answer is malformed (EPROTO).
    BadAnswer {
        /// The malformed part.
        what: &'static str,
    },
    /// An unsupported device or object (EOPNOTSUPP).
    Unsupported {
        /// The unsupported feature.
        what: &'static str,
    },
    /// Every user index is taken, or no memory for bookkeeping.
    NoMemory,
}

impl CreateError {
    /// The errno for a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Command(error) => error.errno().raw(),
            Self::Map { error, .. } | Self::Memory { error, .. } => {
                error.raw_os_error().unwrap_or(libc::EIO)
            }
            Self::TooLarge { .. } => libc::EINVAL,
            Self::Device { status, .. } => status_errno(*status),
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
            Self::TooLarge { what } => write!(f, "beyond the limits of the device: {what}"),
            Self::Device {
                command,
                status,
                syndrome,
            } => write!(
                f,
                "{command} failed: status {status:#x}, syndrome {syndrome:#x}"
            ),
            Self::BadAnswer { what } => write!(f, "malformed answer of mlx5_ib: {what}"),
            Self::Unsupported { what } => write!(f, "not supported on mlx5: {what}"),
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

/// The errno for a status of the device (`MLX5_CMD_STAT_...`), as the driver translates
/// it.
fn status_errno(status: u8) -> i32 {
    match status {
        0x02 | 0x03 | 0x05 | 0x09 | 0x0a | 0x10 | 0x30 | 0x40 => libc::EINVAL,
        0x06 => libc::EBUSY,
        0x08 => libc::ENOMEM,
        0x0f => libc::EAGAIN,
        _ => libc::EIO,
    }
}
