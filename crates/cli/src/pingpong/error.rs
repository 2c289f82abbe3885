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
    /// An operation completed with an error.
    Failed {
        /// The operation.
        operation: Operation,
        /// The completion's status.
        status: String,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
    },
    /// The other side has a different number of queue pairs.
    QueuePairCount {
        /// Queue pairs of this side.
        ours: usize,
        /// Queue pairs of the other side.
        theirs: usize,
    },
    /// There are fewer receives than queue pairs.
    TooFewReceives {
        /// Number of receives.
        rx_depth: u32,
        /// Number of queue pairs.
        queue_pairs: u32,
    },
    /// A completion names an unknown queue pair.
    UnknownQueuePair(u32),
    /// A message has unexpected content.
    DataMismatch {
        /// The message's number, from 1.
        message: u32,
    },
    /// There was no completion for some time.
    Timeout {
        /// The time without a completion.
        seconds: u64,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
        /// Whether the transport retransmits lost packets.
        retransmits: bool,
    },
}

impl fmt::Display for PingPongError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(error) => error.fmt(f),
            Self::NoGid => f.write_str(
                "the other side sent no GID, which Ethernet needs; \
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
            Self::QueuePairCount { ours, theirs } => write!(
                f,
                "the other side has {theirs} queue pairs, this one {ours}; \
                 they must have the same --num-qp and --type"
            ),
            Self::TooFewReceives {
                rx_depth,
                queue_pairs,
            } => write!(
                f,
                "{rx_depth} receives are too few for {queue_pairs} queue pairs; \
                 raise --rx-depth or lower --num-qp"
            ),
            Self::UnknownQueuePair(qp_num) => write!(
                f,
                "a completion names queue pair {qp_num:#x}, which this side does not have"
            ),
            Self::DataMismatch { message } => write!(
                f,
                "message {message} has unexpected data; does the other side use --chk, too?"
            ),
            Self::Timeout {
                seconds,
                sent,
                received,
                retransmits,
            } => {
                write!(
                    f,
                    "no progress for {seconds} s after {sent} sent and {received} received; "
                )?;
                f.write_str(match retransmits {
                    true => "has the other side ended? do both sides have the same --iters?",
                    false => "this --type does not retransmit lost packets",
                })
            }
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
