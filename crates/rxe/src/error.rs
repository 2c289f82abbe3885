//! What can go wrong, when an object is made and when work is posted.

use std::fmt;

use ring::GeometryError;

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
