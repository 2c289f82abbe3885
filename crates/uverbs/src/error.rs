//! Errors: the command, the object, the errno, and what to do about it.

use core::fmt;

use crate::driver::DriverMethod;
use crate::reason::Reason;

/// A Linux error number, as the kernel returned it; any value is representable.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

impl Errno {
    /// Wraps an error number (positive, as in `errno`).
    pub const fn new(raw: i32) -> Self {
        Self(raw)
    }

    /// Returns the number, as in `errno`.
    pub const fn raw(self) -> i32 {
        self.0
    }

    /// Returns the calling thread's `errno`, after a failed libc call.
    pub(crate) fn last() -> Self {
        // SAFETY: __errno_location always returns a valid pointer to this
        // thread's errno.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({})", self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // std's text ends in "(os error N)".
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $text:literal on $object:literal;)+) => {
        /// A command to the kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum Command {
            $($(#[$doc])* $name,)+
            /// A method that a driver adds.
            Driver(&'static DriverMethod),
        }

        impl Command {
            /// Returns the command's name, in the kernel headers' spelling if
            /// they have one.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                    Self::Driver(method) => method.name,
                }
            }

            /// Returns the kind of object that the command acts on.
            pub const fn object(self) -> &'static str {
                match self {
                    $(Self::$name => $object,)+
                    Self::Driver(method) => method.object,
                }
            }
        }
    };
}

commands! {
    Open = "open" on "device";
    GetContext = "GET_CONTEXT" on "context";
    QueryContext = "QUERY_CONTEXT" on "context";
    QueryDevice = "QUERY_DEVICE" on "device";
    QueryDeviceEx = "QUERY_DEVICE (extended)" on "device";
    CountObjects = "RDMA_NLDEV_CMD_RES_GET" on "device";
    QueryPort = "QUERY_PORT" on "port";
    QueryPortSpeed = "QUERY_PORT_SPEED" on "port";
    QueryGidTable = "QUERY_GID_TABLE" on "GID table";
    QueryGidEntry = "QUERY_GID_ENTRY" on "GID table";
    AllocPd = "ALLOC_PD" on "protection domain";
    DeallocPd = "PD_DESTROY" on "protection domain";
    RegMr = "REG_MR" on "memory region";
    RegDmabufMr = "REG_DMABUF_MR" on "memory region";
    ReregMr = "REREG_MR" on "memory region";
    QueryMr = "QUERY_MR" on "memory region";
    AdviseMr = "ADVISE_MR" on "memory region";
    DeregMr = "MR_DESTROY" on "memory region";
    AllocDm = "DM_ALLOC" on "device memory";
    FreeDm = "DM_FREE" on "device memory";
    AllocDmah = "DMAH_ALLOC" on "DMA handle";
    FreeDmah = "DMAH_FREE" on "DMA handle";
    AllocDmabuf = "DMABUF_ALLOC" on "DMA buffer";
    RegDmMr = "DM_MR_REG" on "memory region";
    AllocMw = "ALLOC_MW" on "memory window";
    DeallocMw = "MW_DESTROY" on "memory window";
    CreateCompChannel = "CREATE_COMP_CHANNEL" on "completion channel";
    ReadCompEvent = "read" on "completion channel";
    AllocAsyncEventFile = "ASYNC_EVENT_ALLOC" on "asynchronous event file";
    ReadAsyncEvent = "read" on "asynchronous event file";
    CreateCq = "CQ_CREATE" on "completion queue";
    ResizeCq = "RESIZE_CQ" on "completion queue";
    ReqNotifyCq = "REQ_NOTIFY_CQ" on "completion queue";
    ModifyCq = "MODIFY_CQ" on "completion queue";
    DestroyCq = "CQ_DESTROY" on "completion queue";
    CreateSrq = "SRQ_CREATE" on "shared receive queue";
    ModifySrq = "MODIFY_SRQ" on "shared receive queue";
    QuerySrq = "QUERY_SRQ" on "shared receive queue";
    DestroySrq = "SRQ_DESTROY" on "shared receive queue";
    CreateQp = "QP_CREATE" on "queue pair";
    OpenQp = "OPEN_QP" on "queue pair";
    ModifyQp = "MODIFY_QP" on "queue pair";
    ModifyQpEx = "MODIFY_QP (extended)" on "queue pair";
    QueryQp = "QUERY_QP" on "queue pair";
    DestroyQp = "QP_DESTROY" on "queue pair";
    AttachMcast = "ATTACH_MCAST" on "queue pair";
    DetachMcast = "DETACH_MCAST" on "queue pair";
    CreateWq = "WQ_CREATE" on "work queue";
    ModifyWq = "MODIFY_WQ" on "work queue";
    DestroyWq = "WQ_DESTROY" on "work queue";
    CreateWqTable = "CREATE_RWQ_IND_TBL" on "indirection table";
    DestroyWqTable = "RWQ_IND_TBL_DESTROY" on "indirection table";
    CreateFlow = "CREATE_FLOW" on "queue pair";
    DestroyFlow = "DESTROY_FLOW" on "flow";
    CreateCounters = "COUNTERS_CREATE" on "counters";
    ReadCounters = "COUNTERS_READ" on "counters";
    DestroyCounters = "COUNTERS_DESTROY" on "counters";
    CreateAh = "CREATE_AH" on "address handle";
    DestroyAh = "AH_DESTROY" on "address handle";
    OpenXrcd = "OPEN_XRCD" on "XRC domain";
    CloseXrcd = "XRCD_DESTROY" on "XRC domain";
    ListDevices = "RDMA_NLDEV_CMD_GET" on "device list";
    GetCharDevice = "RDMA_NLDEV_CMD_GET_CHARDEV" on "character device";
    GetSystem = "RDMA_NLDEV_CMD_SYS_GET" on "RDMA subsystem";
    ReadSysfs = "read of sysfs" on "device attribute";
}

/// Why a command failed.
///
/// `Copy`, and made without allocating, so that running out of memory can be
/// reported too; unless the kernel says more than the errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The kernel returned an error.
    Refused {
        /// The command.
        command: Command,
        /// Handle number of the object, if it already had one.
        handle: Option<u32>,
        /// The error number.
        errno: Errno,
        /// The parameter, its value and the rule that it breaks, if the kernel says so
        /// ([`Kernel::refusal`](crate::kernel::Kernel::refusal)).
        reason: Option<Reason>,
    },
    /// The kernel reported success, but its answer is malformed.
    BadAnswer {
        /// The command.
        command: Command,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// Rejected before the kernel was called.
    Invalid {
        /// The command.
        command: Command,
        /// What is wrong with the request.
        what: &'static str,
    },
}

// Results of posts contain it: with a text in it they took a fifth more instructions.
const _: () = assert!(size_of::<Error>() <= 40);

impl Error {
    /// The kernel returned an error, and no more than its number.
    pub const fn refused(command: Command, handle: Option<u32>, errno: Errno) -> Self {
        Self::Refused {
            command,
            handle,
            errno,
            reason: None,
        }
    }

    /// Returns the command that failed.
    pub const fn command(&self) -> Command {
        match self {
            Self::Refused { command, .. }
            | Self::BadAnswer { command, .. }
            | Self::Invalid { command, .. } => *command,
        }
    }

    /// Returns the error number for callers that only understand those: the
    /// kernel's own, EPROTO for a malformed answer, EINVAL for an invalid
    /// request.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Refused { errno, .. } => *errno,
            Self::BadAnswer { .. } => Errno::new(libc::EPROTO),
            Self::Invalid { .. } => Errno::new(libc::EINVAL),
        }
    }

    /// Returns the parameter, its value and the rule that it breaks ("cqe 0x800001 is not at
    /// most 0x400000"); `None` if the kernel has not said so, as Linux never does, and after
    /// [`Reason::KEPT`] later ones.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Refused { reason, .. } => reason.and_then(Reason::text),
            Self::BadAnswer { .. } | Self::Invalid { .. } => None,
        }
    }

    /// Returns whether the error is the one that the kernel returns when the
    /// device is gone (unplugged, or its driver unloaded) and has destroyed its
    /// objects. A driver may return the same error for a device that is alive;
    /// check [`Context::is_gone`](crate::Context::is_gone) before releasing
    /// memory.
    pub const fn is_device_gone(&self) -> bool {
        matches!(self, Self::Refused { errno, .. } if errno.raw() == libc::EIO)
    }

    /// Returns what to check, or an empty string.
    pub const fn hint(&self) -> &'static str {
        let Self::Refused {
            command,
            errno,
            reason,
            ..
        } = self
        else {
            return "";
        };
        // The reason says it better.
        if reason.is_some() && errno.raw() != libc::EHOSTUNREACH {
            return "";
        }
        match (*command, errno.raw()) {
            (Command::Open, libc::EACCES | libc::EPERM) => {
                "no permission on the uverbs character device; check its owner and mode"
            }
            (Command::Open, libc::ENOENT) => "no such character device; is ib_uverbs loaded?",
            (Command::RegMr, libc::EFAULT) => {
                "the range is not mapped, or not writable although local write access is requested"
            }
            (
                Command::RegMr | Command::CreateCq | Command::CreateQp | Command::CreateSrq,
                libc::ENOMEM,
            ) => {
                "out of memory, or over the locked memory limit (ulimit -l) or a limit of the device"
            }
            (Command::ModifyQp | Command::CreateAh, libc::EHOSTUNREACH) => {
                "the destination GID has no address; an embedded device reaches devices of its own process and, with embedded:DIRECTORY, of processes with the same directory"
            }
            (_, libc::EIO) => "the device is gone, with all its objects",
            (_, libc::EBUSY) => "other objects still use this one; destroy them first",
            (
                Command::AllocDmabuf | Command::QueryPortSpeed,
                libc::EOPNOTSUPP | libc::EPROTONOSUPPORT,
            ) => "the device's driver does not support this, or the kernel is older than 7.0",
            (_, libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOTTY) => {
                "the device's driver does not support this, or the kernel is older than 6.1"
            }
            (_, libc::EPERM) => "the operation needs a privilege, such as CAP_NET_RAW",
            _ => "",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let command = self.command();
        write!(f, "{} on {}", command.name(), command.object())?;
        match self {
            Self::Refused {
                handle,
                errno,
                reason,
                ..
            } => {
                if let Some(handle) = handle {
                    write!(f, " {handle}")?;
                }
                write!(f, ": {errno}")?;
                if let Some(text) = reason.and_then(Reason::text) {
                    write!(f, ": {text}")?;
                }
            }
            Self::BadAnswer { what, .. } => {
                write!(f, ": malformed answer from the kernel: {what}")?
            }
            Self::Invalid { what, .. } => write!(f, ": {what}")?,
        }
        match self.hint() {
            "" => Ok(()),
            hint => write!(f, "; {hint}"),
        }
    }
}

impl std::error::Error for Error {}
