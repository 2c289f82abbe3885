//! What can go wrong.

use std::fmt;
use std::io;

use crate::qp::State;

/// Why something was not done: what was asked, of which object, what is
/// allowed, and what to do about it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a verb, or its answer made no sense. The message
    /// names the verb, the object, the errno and what to look at.
    Kernel(uverbs::Error),
    /// A queue or a buffer could not be mapped.
    Map {
        /// What was to be mapped.
        what: &'static str,
        /// What mmap(2) said.
        error: io::Error,
    },
    /// The device's driver gave something that contradicts itself.
    Driver {
        /// What it gave.
        what: &'static str,
        /// How it is wrong.
        message: String,
    },
    /// There is no device of that name.
    NoDevice {
        /// The name asked for; `None`: there is no device at all.
        name: Option<String>,
    },
    /// This crate has no code for the device's driver.
    UnsupportedDriver {
        /// The device.
        device: String,
        /// The kernel's number of the driver (`enum rdma_driver_id`).
        driver: u32,
    },
    /// The port has no GID that could be used.
    NoGid {
        /// The port.
        port: u8,
    },
    /// Other handles still use the object. Drop or close them first.
    Busy {
        /// What was to be closed or changed.
        object: &'static str,
        /// Who uses it.
        users: &'static str,
    },
    /// More was asked for than there can be.
    Limit {
        /// What was asked for.
        what: &'static str,
        /// How much.
        asked: u64,
        /// How much is possible.
        allowed: u64,
    },
    /// An argument that makes no sense.
    Invalid {
        /// What is wrong with it.
        what: &'static str,
    },
    /// The queue pair's state, or type, does not allow it.
    State {
        /// What was asked for.
        verb: &'static str,
        /// The state it is in.
        state: State,
        /// What it would take.
        needed: &'static str,
    },
    /// Memory, address handle, window, queue or channel of another protection
    /// domain, or context, than what it was to be used with.
    WrongDomain {
        /// What was given.
        what: &'static str,
    },
    /// As many operations are outstanding as the queue holds. Poll the
    /// completion queue, or make a larger queue.
    QueueFull {
        /// Operations that it holds.
        capacity: u32,
    },
    /// The device cannot do this.
    Unsupported {
        /// What.
        what: &'static str,
    },
    /// The work is queued, but the device could not be told of it: it is gone,
    /// or has refused. The operations are in flight, and come back as
    /// completions or when the queue pair is dropped.
    Doorbell {
        /// The kernel's reason.
        errno: i32,
    },
    /// A completion that names no operation in flight. The device or its
    /// driver is broken, or memory was overwritten; nothing of it was believed.
    Corruption {
        /// The identifier it carried.
        wr_id: u64,
        /// The queue pair that it named.
        qp_num: u32,
    },
    /// A system call besides the verbs.
    System {
        /// What was to be done.
        what: &'static str,
        /// The kernel's reason.
        errno: i32,
    },
    /// A text that is not what it should be.
    Parse {
        /// What it should have been.
        expected: &'static str,
    },
    /// No memory for bookkeeping.
    NoMemory,
}

impl Error {
    /// The error number that says it best to a caller that knows only those.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Kernel(error) => error.errno().raw(),
            Self::Map { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Driver { .. } | Self::Corruption { .. } => libc::EPROTO,
            Self::NoDevice { .. } => libc::ENODEV,
            Self::UnsupportedDriver { .. } | Self::Unsupported { .. } => libc::EOPNOTSUPP,
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

    /// Whether the kernel says what it says when the device is gone: unplugged,
    /// or its driver unloaded. Now and then a driver says so (EIO) of a device
    /// that is alive; this crate itself asks once more before it lets go of
    /// memory.
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
            Self::NoDevice { name: Some(name) } => write!(
                f,
                "there is no RDMA device {name}; `rdma link` lists those that there are"
            ),
            Self::NoDevice { name: None } => f.write_str(
                "there is no RDMA device; `rdma link add rxe0 type rxe netdev IFACE` makes one of a network interface",
            ),
            Self::UnsupportedDriver { device, driver } => write!(
                f,
                "{device} has kernel driver number {driver}, which this crate does not know; rdma_rxe and mlx5 are supported"
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
            } => write!(f, "{what}: {asked} asked for, at most {allowed} possible"),
            Self::Invalid { what } => f.write_str(what),
            Self::State {
                verb,
                state,
                needed,
            } => write!(
                f,
                "{verb}: the queue pair is in state {state:?}; it takes {needed}"
            ),
            Self::WrongDomain { what } => write!(
                f,
                "the {what} belongs to another protection domain, or context, than what it was to be used with"
            ),
            Self::QueueFull { capacity } => write!(
                f,
                "the queue holds {capacity} operations, and all are outstanding; poll its completion queue, or make it larger"
            ),
            Self::Unsupported { what } => write!(f, "the device cannot do this: {what}"),
            Self::Doorbell { errno } => write!(
                f,
                "the device could not be told of the work that was queued: {}",
                uverbs::Errno::new(*errno)
            ),
            Self::Corruption { wr_id, qp_num } => write!(
                f,
                "a completion names no operation in flight (identifier {wr_id:#x}, queue pair {qp_num:#x}); it was dropped"
            ),
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
            Self::Kernel(error) => Some(error),
            Self::Map { error, .. } => Some(error),
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

/// An object that could not be closed, with the reason. It works as it did, and
/// can be closed later.
///
/// `?` makes an [`Error`] of it where that is what a function returns, and drops
/// the object.
///
/// ```no_run
/// # fn f(domain: ringverbs::ProtectionDomain) -> Result<(), ringverbs::Error> {
/// if let Err(refused) = domain.close() {
///     eprintln!("{refused}");
///     let domain = refused.into_object();
///     // ... close what it says is in its way ...
///     domain.close()?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct CloseError<T> {
    /// The object.
    pub object: T,
    /// Why it could not be closed.
    pub error: Error,
}

impl<T> CloseError<T> {
    pub(crate) fn new(object: T, error: impl Into<Error>) -> Self {
        Self {
            object,
            error: error.into(),
        }
    }

    /// Of what the object is a part of.
    pub(crate) fn map<U>(self, whole: impl FnOnce(T) -> U) -> CloseError<U> {
        CloseError {
            object: whole(self.object),
            error: self.error,
        }
    }

    /// The object.
    pub fn into_object(self) -> T {
        self.object
    }

    /// The object and the reason.
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
    /// What is behind the reason, whose text is this one's.
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
