//! Error entries: failed operations, which readers report out of band.

use std::fmt;

use super::{EntryFlags, Status};
use crate::Error;
use crate::data::Payload;
use crate::device::WorkCompletion;
use crate::inflight::Posted;
use crate::operation::Operation;
use crate::route_header::RawAddress;

/// A failed operation (`struct fi_cq_err_entry`).
///
/// For a failed work request the device reports only its identifier, the reason and the
/// queue pair. Unknown fields are `None` or empty.
#[derive(Debug)]
pub struct ErrorEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// The type of the operation.
    pub flags: EntryFlags,
    /// Bytes received of a truncated message.
    pub len: Option<usize>,
    /// Bytes that did not fit.
    pub overflow_len: Option<usize>,
    /// Immediate data, if the message arrived.
    pub data: Option<u32>,
    /// The tag of a tagged message.
    pub tag: Option<u64>,
    /// The general error, an errno(3).
    pub errno: i32,
    /// The provider's error: the status of the completion.
    pub provider: Status,
    /// The device's vendor error code.
    pub vendor_err: u32,
    /// The queue pair number.
    pub qp_num: u32,
    /// The sender, if the address vector does not contain it; it can then be inserted.
    pub source: Option<RawAddress>,
    /// The memory of the operation.
    pub payload: Payload,
}

impl ErrorEntry {
    pub(crate) fn new(wc: &WorkCompletion, posted: Posted) -> Self {
        let status = Status(wc.status);
        let mut payload = posted.payload;
        if posted.operation == Operation::Receive {
            // The device does not report how many bytes it has written, if any.
            payload.received(0);
        }
        Self {
            token: posted.token,
            flags: EntryFlags::of_operation(posted.operation),
            len: None,
            overflow_len: None,
            data: None,
            tag: None,
            errno: status.errno(),
            provider: status,
            vendor_err: wc.vendor_err,
            qp_num: wc.qp_num,
            source: None,
            payload,
        }
    }
}

impl fmt::Display for ErrorEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", uverbs::Errno::new(self.errno))?;
        if !self.provider.is_success() {
            write!(f, ": {}", self.provider)?;
        }
        if self.vendor_err != 0 {
            write!(f, " (vendor error {:#x})", self.vendor_err)?;
        }
        if let Some(over) = self.overflow_len {
            write!(f, ", {over} bytes did not fit")?;
        }
        if let Some(source) = &self.source {
            write!(f, ", from {source}")?;
        }
        Ok(())
    }
}

impl Status {
    /// Returns the errno(3) that matches the status best; 0 for success, EIO for
    /// an unknown status.
    pub fn errno(self) -> i32 {
        match self {
            Self::SUCCESS => 0,
            Self::LOC_LEN_ERR => libc::EMSGSIZE,
            Self::WR_FLUSH_ERR => libc::ECANCELED,
            Self::LOC_PROT_ERR
            | Self::LOC_ACCESS_ERR
            | Self::REM_ACCESS_ERR
            | Self::MW_BIND_ERR => libc::EACCES,
            Self::LOC_QP_OP_ERR | Self::REM_INV_REQ_ERR | Self::REM_INV_RD_REQ_ERR => libc::EINVAL,
            Self::BAD_RESP_ERR => libc::EPROTO,
            Self::RETRY_EXC_ERR | Self::RESP_TIMEOUT_ERR => libc::ETIMEDOUT,
            Self::RNR_RETRY_EXC_ERR => libc::EAGAIN,
            Self::REM_ABORT_ERR => libc::ECONNABORTED,
            Self::REM_OP_ERR => libc::EREMOTEIO,
            _ => libc::EIO,
        }
    }
}

/// Returns the text of a general error number (`fi_strerror`), for any number.
pub fn error_text(errno: i32) -> String {
    uverbs::Errno::new(errno).to_string()
}

/// Returns the text of a provider's error and its data (`fi_cq_strerror`,
/// `ibv_wc_status_str`), for any status.
pub fn provider_error_text(status: Status, vendor_err: u32) -> String {
    if vendor_err == 0 {
        status.to_string()
    } else {
        format!("{status} (vendor error {vendor_err:#x})")
    }
}

/// The reason why a reader returned no entry.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReadError {
    /// An operation has failed: `read_err` returns it, and until it is called nothing else is
    /// read (`-FI_EAVAIL`).
    ErrorAvailable,
    /// A blocking read found nothing until the timeout or a signal
    /// (`-FI_EAGAIN`).
    Again,
    /// Completions were lost because more arrived than the queue holds. All that it held were
    /// read. The error is permanent; create a larger queue.
    Overrun,
    /// The queue could not be read, armed, or waited for.
    Queue(Error),
}

impl ReadError {
    /// Returns the errno that matches the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::ErrorAvailable => libc::EIO,
            Self::Again => libc::EAGAIN,
            Self::Overrun => libc::EOVERFLOW,
            Self::Queue(error) => error.errno(),
        }
    }
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Queue(error)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ErrorAvailable => f.write_str("an operation has failed; read_err returns it"),
            Self::Again => f.write_str("no completion until the timeout or a signal"),
            Self::Overrun => f.write_str(
                "the completion queue was overrun and completions are lost; make it as large as all operations that can be outstanding",
            ),
            Self::Queue(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ErrorEntry {}

impl std::error::Error for ReadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Queue(error) => Some(error),
            _ => None,
        }
    }
}
