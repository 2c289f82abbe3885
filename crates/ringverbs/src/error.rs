//! Error types.

use std::fmt;
use std::io;

use crate::completion::Failure;
use crate::operation::Operation;
use crate::qp::State;

/// Whether the crate was built with the embedded device.
pub(crate) const EMBEDDED: bool = cfg!(feature = "embedded");

/// An error of this crate. The message names the verb, the object and the limit, and
/// advises what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a command, or its answer was malformed. The message
    /// names the verb, the object, the errno and likely causes; of an embedded device
    /// the parameter, its value and the rule that it breaks.
    Kernel(uverbs::Error),
    /// A queue or a buffer could not be mapped.
    Map {
        /// The object that was to be mapped.
        what: &'static str,
        /// The error of mmap(2).
        error: io::Error,
    },
    /// The device's driver returned inconsistent data.
    Driver {
        /// The data in question.
        what: &'static str,
        /// The inconsistency.
        message: String,
    },
    /// There is no device with that name.
    NoDevice {
        /// The name; `None` if there is no device at all.
        name: Option<String>,
    },
    /// This crate does not support the device's driver.
    UnsupportedDriver {
        /// The device's name.
        device: String,
        /// The kernel's number of the driver (`enum rdma_driver_id`).
        driver: u32,
    },
    /// The port has no usable GID.
    NoGid {
        /// The port, from 1.
        port: u8,
    },
    /// Other handles still use the object. Drop or close them first.
    Busy {
        /// The object that was to be closed or changed.
        object: &'static str,
        /// The users of the object.
        users: &'static str,
    },
    /// A value exceeds a limit.
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The requested value.
        asked: u64,
        /// The maximum.
        allowed: u64,
    },
    /// An argument is invalid.
    Invalid {
        /// The reason.
        what: &'static str,
    },
    /// The state or the transport of the queue pair does not allow the operation.
    State {
        /// The operation.
        verb: &'static str,
        /// The state that the queue pair is in.
        state: State,
        /// The required state or transport.
        needed: &'static str,
    },
    /// The memory, address handle, window, queue or channel belongs to another
    /// protection domain or context.
    WrongDomain {
        /// The object.
        what: &'static str,
    },
    /// The queue is full of outstanding operations. Poll the completion queue, or
    /// create a larger queue.
    QueueFull {
        /// Operations that the queue holds.
        capacity: u32,
    },
    /// The device does not support the operation.
    Unsupported {
        /// The operation or feature.
        what: &'static str,
    },
    /// The work requests are posted, but ringing the doorbell failed: the device
    /// was removed, or the kernel refused. The operations are in flight; they are
    /// returned as completions or released when the queue pair is dropped.
    ///
    /// Only rdma_rxe, whose doorbell is a system call, returns this; ConnectX's doorbell
    /// is a register write, which cannot fail.
    Doorbell {
        /// The kernel's errno.
        errno: i32,
    },
    /// A completion names no operation in flight: the device or its driver is
    /// defective, or memory was overwritten. The completion was discarded.
    Corruption {
        /// The work request identifier in the completion.
        wr_id: u64,
        /// The queue pair number in the completion.
        qp_num: u32,
    },
    /// An operation failed on a queue that does not report completions. The queue pair
    /// may be in an error state.
    Failed {
        /// The operation.
        operation: Operation,
        /// The reason.
        failure: Failure,
    },
    /// A system call other than a verb failed.
    System {
        /// The purpose of the call.
        what: &'static str,
        /// The kernel's errno.
        errno: i32,
    },
    /// A text could not be parsed.
    Parse {
        /// The expected format.
        expected: &'static str,
    },
    /// An allocation by this crate failed.
    NoMemory,
}

impl Error {
    /// Returns the errno that matches the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Kernel(error) => error.errno().raw(),
            Self::Map { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Driver { .. } | Self::Corruption { .. } => libc::EPROTO,
            Self::NoDevice { .. } => libc::ENODEV,
            Self::UnsupportedDriver { .. } | Self::Unsupported { .. } => libc::EOPNOTSUPP,
            Self::Failed { .. } => libc::EIO,
            Self::NoGid { .. } => libc::EADDRNOTAVAIL,
            Self::Busy { .. } => libc::EBUSY,
            Self::QueueFull { .. } | Self::NoMemory => libc::ENOMEM,
            Self::Doorbell { errno } | Self::System { errno, .. } => *errno,
            Self::Limit { .. }
            | Self::Invalid { .. }
            | Self::State { .. }
            | Self::WrongDomain { .. }
            | Self::Parse { .. } => libc::EINVAL,
        }
    }

    /// Returns whether this is the error that the kernel reports after the device was
    /// removed (unplugged, or its driver unloaded): EIO. Drivers of live devices
    /// occasionally report EIO too, so this crate queries the kernel again before it
    /// releases memory.
    pub fn is_device_gone(&self) -> bool {
        match self {
            Self::Kernel(error) => error.is_device_gone(),
            Self::Doorbell { errno } => *errno == libc::EIO,
            _ => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(error) => error.fmt(f),
            Self::Map { what, error } => write!(f, "mapping the {what}: {error}"),
            Self::Driver { what, message } => write!(f, "the {what}: {message}"),
            Self::NoDevice { name: Some(name) } if !EMBEDDED && name.starts_with("embedded") => {
                write!(
                    f,
                    "there is no device {name}: ringverbs was built without its feature `embedded`"
                )
            }
            Self::NoDevice { name: Some(name) } => write!(
                f,
                "there is no RDMA device {name}; `rdma link` lists the devices{}",
                if EMBEDDED {
                    ", and `embedded` is always available"
                } else {
                    ""
                },
            ),
            Self::NoDevice { name: None } => write!(
                f,
                "there is no RDMA device; `rdma link add rxe0 type rxe netdev IFACE` creates one on a network interface{}",
                if EMBEDDED {
                    "; RINGVERBS_DEVICE=embedded selects one in the process, embedded: one that reaches other processes, roce:INTERFACE one that reaches other hosts"
                } else {
                    ""
                },
            ),
            Self::UnsupportedDriver { device, driver } => write!(
                f,
                "{device} has kernel driver number {driver}, which this crate does not support; rdma_rxe and mlx5 are supported"
            ),
            Self::NoGid { port } => write!(
                f,
                "port {port} has no usable GID; give its network interface an address"
            ),
            Self::Busy { object, users } => {
                write!(f, "the {object} is in use by {users}; close them first")
            }
            Self::Limit {
                what,
                asked,
                allowed,
            } => write!(f, "{what}: {asked} requested, the limit is {allowed}"),
            Self::Invalid { what } => f.write_str(what),
            Self::State {
                verb,
                state,
                needed,
            } => write!(
                f,
                "{verb}: the queue pair is in state {state:?}, the operation needs {needed}"
            ),
            Self::WrongDomain { what } => write!(
                f,
                "the {what} belongs to another protection domain or context"
            ),
            Self::QueueFull { capacity } => write!(
                f,
                "the queue holds {capacity} operations, and all are outstanding; poll its completion queue, or make it larger"
            ),
            Self::Unsupported { what } => write!(f, "the device does not support this: {what}"),
            Self::Doorbell { errno } => write!(
                f,
                "the work requests were queued, but ringing the doorbell failed: {}",
                uverbs::Errno::new(*errno)
            ),
            Self::Corruption { wr_id, qp_num } => write!(
                f,
                "a completion names no operation in flight (identifier {wr_id:#x}, queue pair {qp_num:#x}); it was discarded"
            ),
            Self::Failed { operation, failure } => write!(f, "{operation:?} failed: {failure}"),
            Self::System { what, errno } => {
                write!(f, "{what}: {}", uverbs::Errno::new(*errno))
            }
            Self::Parse { expected } => write!(f, "not {expected}"),
            Self::NoMemory => f.write_str("out of memory"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is part of this one's.
            Self::Kernel(error) => error.source(),
            Self::Map { error, .. } => error.source(),
            _ => None,
        }
    }
}

impl From<uverbs::Error> for Error {
    fn from(error: uverbs::Error) -> Self {
        Self::Kernel(error)
    }
}

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An object that could not be closed, with the reason. The object is unchanged
/// and can be closed later.
///
/// Converts to [`Error`], so `?` works; that drops the object.
///
/// ```no_run
/// # fn f(domain: ringverbs::ProtectionDomain) -> Result<(), ringverbs::Error> {
/// if let Err(refused) = domain.close() {
///     eprintln!("{refused}");
///     let domain = refused.into_object();
///     // ... close the objects that still use the domain ...
///     domain.close()?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct CloseError<T> {
    /// The object.
    pub object: T,
    /// The reason.
    pub error: Error,
}

impl<T> CloseError<T> {
    pub(crate) fn new(object: T, error: impl Into<Error>) -> Self {
        Self {
            object,
            error: error.into(),
        }
    }

    /// Replaces the object by the one that contains it.
    pub fn map<U>(self, whole: impl FnOnce(T) -> U) -> CloseError<U> {
        CloseError {
            object: whole(self.object),
            error: self.error,
        }
    }

    /// Returns the object.
    pub fn into_object(self) -> T {
        self.object
    }

    /// Returns the object and the reason.
    pub fn into_parts(self) -> (T, Error) {
        (self.object, self.error)
    }
}

impl<T> fmt::Display for CloseError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: fmt::Debug> std::error::Error for CloseError<T> {
    /// The cause of the reason; the reason's own text is the text of this error.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T> From<CloseError<T>> for Error {
    /// Drops the object.
    fn from(error: CloseError<T>) -> Self {
        error.error
    }
}
