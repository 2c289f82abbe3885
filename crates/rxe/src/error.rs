//! Errors of creating objects.

use std::fmt;

use ring::GeometryError;

/// An object could not be created or changed. What the kernel had created was
/// destroyed again.
#[derive(Debug)]
#[non_exhaustive]
pub enum CreateError {
    /// The kernel refused.
    Command(uverbs::Error),
    /// The queue could not be mapped.
    Map {
        /// Which queue.
        queue: &'static str,
        /// The error of mmap(2).
        error: std::io::Error,
    },
    /// The mapped queue's header is malformed.
    Geometry {
        /// Which queue.
        queue: &'static str,
        /// The malformed part of the geometry.
        error: GeometryError,
    },
    /// The kernel has no address handle numbers.
    NoAddressHandleNumber,
    /// No memory for bookkeeping.
    NoMemory,
}

impl CreateError {
    /// The errno for a C caller.
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
