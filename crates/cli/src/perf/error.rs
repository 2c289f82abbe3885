//! Errors of a measurement.

use std::fmt;

use ringverbs::Operation;

use super::plot::PlotError;
use super::protocol::{Measured, ProtocolError, Setup, Type};
use super::units;
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
    /// The transport does not have the operation.
    Operation {
        /// The transport.
        transport: Type,
        /// The operation.
        operation: Measured,
    },
    /// A datagram does not fit.
    Datagram {
        /// The port's MTU.
        mtu: u32,
    },
    /// The buffers need more memory than there may be.
    Memory {
        /// What was asked for.
        setup: Setup,
        /// The limit in bytes.
        limit: u64,
        /// A depth that fits.
        fits: u32,
    },
    /// Too many operations outstanding.
    Outstanding {
        /// Of a queue pair.
        depth: u32,
        /// The number of queue pairs.
        queue_pairs: u32,
        /// Most of all.
        most: u32,
    },
    /// As many messages in a row were not answered.
    Lost(u32),
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
            Self::Operation {
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
                    Type::Rc => "all operations",
                    Type::Uc => "sends and writes (--op send, --op write)",
                    Type::Ud => "sends (--op send)",
                })
            }
            Self::Datagram { mtu } => write!(
                f,
                "a datagram is one packet, of at most {mtu} bytes on this port: choose --sizes"
            ),
            Self::Memory { setup, limit, fits } => write!(
                f,
                "{} outstanding messages of {} on {} queue pair{} need {} of memory, the limit \
                 is {}: --depth {fits} fits, if not fewer queue pairs or smaller --sizes",
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
                most,
            } => write!(
                f,
                "--depth {depth} on {queue_pairs} queue pairs: at most {most} operations \
                 are outstanding, of all queue pairs together"
            ),
            Self::Lost(count) => write!(
                f,
                "{count} messages in a row were lost; has the other side ended?"
            ),
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
