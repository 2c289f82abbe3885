//! Errors of a measurement.

use std::fmt;

use ringverbs::Operation;

use super::plot::PlotError;
use super::protocol::{PerfOperation, PerfTransport, ProtocolError, Setup};
use super::units;
use crate::error::Error;

/// The reason why a measurement failed.
#[derive(Debug)]
pub enum PerfError {
    /// The connection to the other side failed.
    Protocol(ProtocolError),
    /// An operation completed with an error.
    Failed {
        /// The operation.
        operation: Operation,
        /// The completion's status.
        status: String,
    },
    /// The transport does not support the operation.
    UnsupportedOperation {
        /// The transport.
        transport: PerfTransport,
        /// The operation.
        operation: PerfOperation,
    },
    /// The buffers need more memory than the limit.
    Memory {
        /// The requested setup.
        setup: Setup,
        /// The limit in bytes.
        limit: u64,
        /// A depth whose buffers are within the limit.
        max_depth: u32,
    },
    /// Too many outstanding operations.
    Outstanding {
        /// Outstanding operations of a queue pair.
        depth: u32,
        /// The number of queue pairs.
        queue_pairs: u32,
        /// Maximum of all queue pairs together.
        limit: u32,
    },
    /// This number of consecutive messages had no reply.
    Lost(u32),
    /// There was no completion for this number of seconds.
    Timeout(u64),
    /// An operation was posted without a free buffer: a bug in this program.
    NoBuffer,
    /// The plot could not be written.
    Plot(PlotError),
}

impl fmt::Display for PerfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(error) => error.fmt(f),
            Self::Failed { operation, status } => write!(f, "{operation:?} failed: {status}"),
            Self::UnsupportedOperation {
                transport,
                operation,
            } => {
                write!(
                    f,
                    "{} has no {}s: it has ",
                    transport.name(),
                    operation.name()
                )?;
                f.write_str(match transport {
                    PerfTransport::Rc => "all operations",
                    PerfTransport::Uc => "sends and writes (--op send, --op write)",
                    PerfTransport::Ud => "sends (--op send)",
                })
            }
            Self::Memory {
                setup,
                limit,
                max_depth,
            } => write!(
                f,
                "{} outstanding messages of {} on {} queue pair{} need {} of memory, the limit \
                 is {}; try --depth {max_depth}, fewer queue pairs or smaller --sizes",
                setup.depth,
                units::size(setup.size.into()),
                setup.queue_pairs,
                if setup.queue_pairs == 1 { "" } else { "s" },
                units::size(setup.memory()),
                units::size(*limit),
            ),
            Self::Outstanding {
                depth,
                queue_pairs,
                limit,
            } => write!(
                f,
                "--depth {depth} on {queue_pairs} queue pairs: at most {limit} operations \
                 of all queue pairs may be outstanding"
            ),
            Self::Lost(count) => write!(
                f,
                "{count} consecutive messages were lost; has the other side ended?"
            ),
            Self::Timeout(seconds) => {
                write!(
                    f,
                    "no completion for {seconds} s; has the other side ended?"
                )
            }
            Self::NoBuffer => {
                f.write_str("no free buffer for an operation; this is a bug in ringverbs")
            }
            Self::Plot(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PerfError {}

impl From<PlotError> for Error {
    fn from(error: PlotError) -> Self {
        PerfError::Plot(error).into()
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        PerfError::Protocol(error).into()
    }
}

impl From<PerfError> for Error {
    fn from(error: PerfError) -> Self {
        Self::subcommand(error)
    }
}
