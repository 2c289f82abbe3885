//! Errors of a ping-pong.

use std::fmt;

use ringverbs::Operation;

use super::exchange::ExchangeError;
use crate::error::Error;

/// The reason why a ping-pong failed.
#[derive(Debug)]
pub enum PingPongError {
    /// The sides could not exchange their addresses.
    Exchange(ExchangeError),
    /// The other side sent no GID.
    NoGid,
    /// An operation failed.
    Failed {
        /// The operation.
        operation: Operation,
        /// The reason.
        status: String,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
    },
    /// A message does not fit a datagram.
    Datagram {
        /// The port's MTU.
        mtu: u32,
    },
    /// The other side has a different number of queue pairs.
    QueuePairs {
        /// On this side.
        ours: usize,
        /// On the other side.
        theirs: usize,
    },
    /// There are fewer receives than queue pairs.
    Depth {
        /// Receives.
        rx_depth: u32,
        /// Queue pairs.
        queue_pairs: u32,
    },
    /// A completion names an unknown queue pair.
    Stray(u32),
    /// A message has unexpected content.
    Content {
        /// Its number, from 1.
        message: u32,
    },
    /// There was no progress for some time.
    Silence {
        /// The time.
        seconds: u64,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
        /// Whether the transport retransmits lost packets.
        repeats: bool,
    },
    /// A side in this process has panicked.
    Panicked,
}

impl fmt::Display for PingPongError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(error) => error.fmt(f),
            Self::NoGid => f.write_str(
                "the other side gave no GID, which Ethernet needs; \
                 start ibv_*_pingpong there with -g and a GID's index (ibv_devinfo -v lists them)",
            ),
            Self::Failed {
                operation,
                status,
                sent,
                received,
            } => write!(
                f,
                "{operation:?} failed after {sent} sent and {received} received: {status}; \
                 do both sides have the same --size, --mtu and --iters?"
            ),
            Self::Datagram { mtu } => write!(
                f,
                "a datagram carries at most the port's MTU, {mtu} bytes; choose a smaller --size"
            ),
            Self::QueuePairs { ours, theirs } => write!(
                f,
                "the other side has {theirs} queue pairs, this one {ours}; \
                 they must have the same --num-qp and --type"
            ),
            Self::Depth {
                rx_depth,
                queue_pairs,
            } => write!(
                f,
                "{rx_depth} receives are too few for {queue_pairs} queue pairs; \
                 raise --rx-depth or lower --num-qp"
            ),
            Self::Stray(qp_num) => write!(
                f,
                "a completion names queue pair {qp_num:#x}, which this side does not have"
            ),
            Self::Content { message } => write!(
                f,
                "message {message} is not what was sent; has the other side --chk too?"
            ),
            Self::Silence {
                seconds,
                sent,
                received,
                repeats,
            } => {
                write!(
                    f,
                    "no progress for {seconds} s after {sent} sent and {received} received; "
                )?;
                f.write_str(match repeats {
                    true => "has the other side ended? do both have the same --iters?",
                    false => "this --type does not retransmit lost packets",
                })
            }
            Self::Panicked => f.write_str("one of the two sides has panicked"),
        }
    }
}

impl std::error::Error for PingPongError {}

impl From<PingPongError> for Error {
    fn from(error: PingPongError) -> Self {
        Self::subcommand(error)
    }
}

impl From<ExchangeError> for Error {
    fn from(error: ExchangeError) -> Self {
        PingPongError::Exchange(error).into()
    }
}
