//! Errors of a measurement.

use std::fmt;

use ringverbs::Operation;

use super::plot::PlotError;
use super::protocol::ProtocolError;
use crate::error::Error;

/// The reason why a measurement failed.
#[derive(Debug)]
pub enum PerfError {
    /// The communication between the sides failed.
    Protocol(ProtocolError),
    /// The server could not be reached.
    Connect {
        /// The address.
        to: String,
        /// The reason.
        why: std::io::Error,
    },
    /// The port cannot be listened on.
    Listen {
        /// The port.
        port: u16,
        /// The reason.
        why: std::io::Error,
    },
    /// An operation failed.
    Failed {
        /// The operation.
        operation: Operation,
        /// The reason.
        status: String,
    },
    /// There was no progress for that many seconds.
    Silence(u64),
    /// More operations than buffers: a bug of this program.
    NoBuffer,
    /// There is no picture.
    Plot(PlotError),
    /// The server in this process has ended with a panic.
    Panicked,
}

impl fmt::Display for PerfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(error) => error.fmt(f),
            Self::Connect { to, why } => {
                write!(
                    f,
                    "connecting to {to}: {why}; is `ringverbs perf --server` started there?"
                )
            }
            Self::Listen { port, why } => write!(
                f,
                "listening on TCP port {port}: {why}; choose another port with --port"
            ),
            Self::Failed { operation, status } => write!(f, "{operation:?} failed: {status}"),
            Self::Silence(seconds) => {
                write!(
                    f,
                    "no completion for {seconds} s; has the other side ended?"
                )
            }
            Self::NoBuffer => f.write_str("more operations than buffers"),
            Self::Plot(error) => error.fmt(f),
            Self::Panicked => f.write_str("the server in this process has panicked"),
        }
    }
}

impl std::error::Error for PerfError {}

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
