//! Stream errors as `std::io` errors.

use std::io::{self, ErrorKind};

use super::flow::Violation;
use crate::cm;
use crate::completion::{Failure, Status};

/// An error that every later use of the stream returns.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    kind: ErrorKind,
    text: std::borrow::Cow<'static, str>,
}

impl Fault {
    /// The peer disconnected without an end mark.
    pub const RESET: Self = Self::new(
        ErrorKind::ConnectionReset,
        "the peer has disconnected before the end of its stream",
    );
    /// The peer has ended its stream and disconnected.
    pub const CLOSED: Self = Self::new(ErrorKind::BrokenPipe, "the peer has closed the stream");
    /// This side was shut down for writing.
    pub const SHUT_DOWN: Self = Self::new(
        ErrorKind::BrokenPipe,
        "the stream was shut down for writing",
    );

    const fn new(kind: ErrorKind, text: &'static str) -> Self {
        Self {
            kind,
            text: std::borrow::Cow::Borrowed(text),
        }
    }

    /// The peer violated the protocol.
    pub fn violation(violation: Violation) -> Self {
        Self::new(ErrorKind::InvalidData, violation.text())
    }

    /// A message was not delivered.
    pub fn failure(failure: Failure) -> Self {
        let kind = match failure.status {
            Status::RETRY_EXC_ERR | Status::RNR_RETRY_EXC_ERR | Status::RESP_TIMEOUT_ERR => {
                ErrorKind::TimedOut
            }
            Status::REM_INV_REQ_ERR
            | Status::REM_ACCESS_ERR
            | Status::REM_OP_ERR
            | Status::REM_ABORT_ERR => ErrorKind::ConnectionReset,
            _ => ErrorKind::Other,
        };
        Self {
            kind,
            text: failure.to_string().into(),
        }
    }

    /// A verb failed.
    pub fn verbs(error: &crate::Error) -> Self {
        Self {
            kind: kind_of_errno(error.errno()),
            text: error.to_string().into(),
        }
    }

    /// The connection failed, or its events cannot be read.
    pub fn manager(error: &cm::Error) -> Self {
        use cm::manager::EventKind;
        let kind = match error {
            cm::Error::Verbs(error) => return Self::verbs(error),
            cm::Error::Manager(error) => kind_of_errno(error.errno().raw()),
            cm::Error::Timeout { .. } => ErrorKind::TimedOut,
            cm::Error::NoDevice => ErrorKind::NetworkUnreachable,
            _ if error.is_rejected() => ErrorKind::ConnectionRefused,
            cm::Error::Failed { kind, .. } => match *kind {
                EventKind::UNREACHABLE => ErrorKind::TimedOut,
                EventKind::ADDR_ERROR | EventKind::ROUTE_ERROR => ErrorKind::HostUnreachable,
                EventKind::DISCONNECTED => ErrorKind::ConnectionReset,
                _ => ErrorKind::ConnectionAborted,
            },
            _ => ErrorKind::Other,
        };
        Self {
            kind,
            text: error.to_string().into(),
        }
    }

    pub fn to_io(&self) -> io::Error {
        io::Error::new(self.kind, self.text.clone())
    }
}

/// Returns the kind of an errno. A lack of descriptors, for which the standard library has no
/// stable kind, is [`ErrorKind::QuotaExceeded`].
fn kind_of_errno(errno: i32) -> ErrorKind {
    match errno {
        libc::EMFILE | libc::ENFILE => ErrorKind::QuotaExceeded,
        _ => io::Error::from_raw_os_error(errno).kind(),
    }
}
