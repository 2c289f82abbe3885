//! Errors.

use std::fmt;

use ringverbs::cm;

/// A call, connection or server that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The connection was not made; the text is the connection manager's.
    Connect(String),
    /// The peer is not one of this protocol, or sends what the protocol does not
    /// have. The connection has ended.
    Protocol {
        /// The malformed part.
        what: &'static str,
    },
    /// The request is longer than what server and client have agreed on. Nothing
    /// was sent.
    RequestTooLong {
        /// Bytes of the request.
        len: usize,
        /// The maximum.
        limit: usize,
    },
    /// The reply is longer than the call has room for
    /// ([`CallOptions::reply_up_to`](crate::CallOptions::reply_up_to)), or than the
    /// server sends.
    ReplyTooLong {
        /// Bytes of the reply.
        len: usize,
    },
    /// The handler has answered with this code.
    Refused(u16),
    /// The handler has panicked.
    HandlerPanicked,
    /// There was no reply in time. Whether the request was handled is unknown.
    Timeout,
    /// The connection has ended. Whether the request was handled is unknown.
    Disconnected,
    /// A queue, or memory, could not be created or used; the text is ringverbs'.
    Verbs(String),
    /// An option is out of range.
    Options {
        /// The option.
        what: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(text) | Self::Verbs(text) => f.write_str(text),
            Self::Protocol { what } => write!(f, "the peer's {what} is malformed"),
            Self::RequestTooLong { len, limit } => {
                write!(f, "a request of {len} bytes; at most {limit} are possible")
            }
            Self::ReplyTooLong { len } => {
                write!(f, "a reply of {len} bytes; the call has room for fewer")
            }
            Self::Refused(code) => write!(f, "the handler refused: code {code}"),
            Self::HandlerPanicked => f.write_str("the handler panicked"),
            Self::Timeout => f.write_str("no reply in time"),
            Self::Disconnected => f.write_str("the connection has ended"),
            Self::Options { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

impl From<cm::Error> for Error {
    fn from(error: cm::Error) -> Self {
        Self::Connect(error.to_string())
    }
}

impl From<ringverbs::Error> for Error {
    fn from(error: ringverbs::Error) -> Self {
        Self::Verbs(error.to_string())
    }
}
