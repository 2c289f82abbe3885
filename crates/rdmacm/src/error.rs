//! Errors: the command, the id, what was asked or allowed, the errno, and what
//! to do about it.

use core::fmt;

use uverbs::Errno;

use crate::state::{self, State};

macro_rules! commands {
    ($($name:ident = $text:literal;)+) => {
        /// What the kernel was asked.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum Command { $($name),+ }

        impl Command {
            /// The command's name, as the kernel's header has it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }
        }
    };
}

commands! {
    Open = "open of rdma_cm";
    CreateId = "CREATE_ID";
    DestroyId = "DESTROY_ID";
    BindIp = "BIND_IP";
    Bind = "BIND";
    ResolveIp = "RESOLVE_IP";
    ResolveAddr = "RESOLVE_ADDR";
    ResolveRoute = "RESOLVE_ROUTE";
    QueryRoute = "QUERY_ROUTE";
    QueryAddr = "QUERY (addresses)";
    QueryPath = "QUERY (paths)";
    QueryGid = "QUERY (GIDs)";
    Connect = "CONNECT";
    Listen = "LISTEN";
    Accept = "ACCEPT";
    Establish = "ACCEPT (of a response)";
    Reject = "REJECT";
    Disconnect = "DISCONNECT";
    InitQpAttr = "INIT_QP_ATTR";
    GetEvent = "GET_EVENT";
    SetOption = "SET_OPTION";
    Notify = "NOTIFY";
    JoinIpMcast = "JOIN_IP_MCAST";
    JoinMcast = "JOIN_MCAST";
    LeaveMcast = "LEAVE_MCAST";
    MigrateId = "MIGRATE_ID";
    WriteCmEvent = "WRITE_CM_EVENT";
}

/// Why a command failed. `Copy`, and made without allocating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The kernel said no.
    Refused {
        /// What was asked.
        command: Command,
        /// The kernel's number of the id, where there was one already.
        id: Option<u32>,
        /// The kernel's reason.
        errno: Errno,
    },
    /// The kernel said no, and the id was not in a state for it.
    WrongState {
        /// What was asked.
        command: Command,
        /// The kernel's number of the id.
        id: u32,
        /// The state that the id was in, as far as its commands and the events
        /// that were read tell.
        state: State,
    },
    /// More private data than fits in the message.
    PrivateDataTooLong {
        /// What was to be asked.
        command: Command,
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// The kernel said yes, and its answer makes no sense.
    BadAnswer {
        /// What was asked.
        command: Command,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// Refused here, before the kernel was asked.
    Invalid {
        /// What was to be asked.
        command: Command,
        /// What is wrong with the request.
        what: &'static str,
    },
    /// The kernel's connection manager speaks another version of the ABI.
    Abi {
        /// Its version; this crate knows [`ABI_VERSION`](crate::abi::ABI_VERSION).
        found: u32,
    },
}

impl Error {
    /// The command that failed.
    pub const fn command(&self) -> Command {
        match *self {
            Self::Refused { command, .. }
            | Self::WrongState { command, .. }
            | Self::PrivateDataTooLong { command, .. }
            | Self::BadAnswer { command, .. }
            | Self::Invalid { command, .. } => command,
            Self::Abi { .. } => Command::Open,
        }
    }

    /// The error number to give to a caller that knows only those.
    pub const fn errno(&self) -> Errno {
        match *self {
            Self::Refused { errno, .. } => errno,
            Self::BadAnswer { .. } => Errno::new(libc::EPROTO),
            Self::Abi { .. } => Errno::new(libc::EOPNOTSUPP),
            Self::WrongState { .. } | Self::PrivateDataTooLong { .. } | Self::Invalid { .. } => {
                Errno::new(libc::EINVAL)
            }
        }
    }

    /// What to look at, or an empty string.
    pub const fn hint(&self) -> &'static str {
        let Self::Refused { command, errno, .. } = *self else {
            return "";
        };
        match (command, errno.raw()) {
            (Command::Open, libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                "no connection manager; load its module: modprobe rdma_ucm"
            }
            (Command::Open, libc::EACCES | libc::EPERM) => {
                "no permission on /dev/infiniband/rdma_cm; check its owner and mode"
            }
            (Command::Bind | Command::BindIp | Command::Listen, libc::EADDRINUSE) => {
                "another id has the port"
            }
            (Command::Bind | Command::BindIp, libc::EADDRNOTAVAIL) => {
                "the address is not one of this host's"
            }
            (
                Command::Bind | Command::BindIp | Command::ResolveAddr | Command::ResolveIp,
                libc::ENODEV,
            ) => "no RDMA device has that address; see the devices' GIDs",
            (Command::ResolveAddr | Command::ResolveIp, libc::ENETUNREACH) => {
                "no route to the address; see ip route"
            }
            (Command::WriteCmEvent, libc::EINVAL) => {
                "the kernel may not have this; Linux 6.12 does not"
            }
            (_, libc::EACCES) => "the process changed its credentials after opening the channel",
            (_, libc::ENOENT) => "the id is gone",
            _ => "",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.command().name())?;
        match *self {
            Self::Refused { id, errno, .. } => {
                if let Some(id) = id {
                    write!(f, " on id {id}")?;
                }
                write!(f, ": {errno}")?;
            }
            Self::WrongState {
                command, id, state, ..
            } => write!(
                f,
                " on id {id}: its state is {state:?}; {}",
                state::needed(command)
            )?,
            Self::PrivateDataTooLong { len, max, .. } => {
                write!(f, ": {len} bytes of private data, of at most {max}")?;
            }
            Self::BadAnswer { what, .. } => {
                write!(f, ": the kernel's answer makes no sense: {what}")?;
            }
            Self::Invalid { what, .. } => write!(f, ": {what}")?,
            Self::Abi { found } => write!(
                f,
                ": the kernel speaks version {found} of the ABI, this is version {}",
                crate::abi::ABI_VERSION
            )?,
        }
        match self.hint() {
            "" => Ok(()),
            hint => write!(f, "; {hint}"),
        }
    }
}

impl std::error::Error for Error {}
