//! Errors.

use std::fmt;

use ringverbs::cm;

/// An error of a call, connection or server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The connection was not established; the text is the connection manager's.
    Connect(String),
    /// The peer does not speak this protocol, or has violated it. The connection has ended.
    Protocol {
        /// The malformed part.
        what: &'static str,
    },
    /// The request is longer than client and server have agreed on. It was not sent.
    RequestTooLong {
        /// The length of the request in bytes.
        len: usize,
        /// The maximum.
        limit: usize,
    },
    /// The reply is longer than the call has room for
    /// ([`CallOptions::reply_up_to`](crate::CallOptions::reply_up_to)), or than the server's
    /// limit.
    ReplyTooLong {
        /// The length of the reply in bytes.
        len: usize,
    },
    /// The handler refused the request with this code.
    Refused(u16),
    /// The handler panicked.
    HandlerPanicked,
    /// No reply arrived in time. Whether the request was handled is unknown.
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
                write!(f, "the request has {len} bytes, the limit is {limit}")
            }
            Self::ReplyTooLong { len } => {
                write!(
                    f,
                    "the reply has {len} bytes, more than the call has room for"
                )
            }
            Self::Refused(code) => write!(f, "the handler refused the request: code {code}"),
            Self::HandlerPanicked => f.write_str("the handler panicked"),
            Self::Timeout => f.write_str("no reply before the timeout"),
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
