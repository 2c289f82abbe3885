//! Errors: the command, the id, the request or the limit, the errno, and a hint.

use core::fmt;

use uverbs::Errno;

use crate::state::State;

macro_rules! commands {
    ($($name:ident = $text:literal;)+) => {
        /// A command to the kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum Command { $($name),+ }

        impl Command {
            /// Returns the command's name, in the kernel header's spelling.
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

/// Why a command failed. `Copy`, and created without allocating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The kernel returned an error.
    Refused {
        /// The command.
        command: Command,
        /// The kernel's number of the id, if it already had one.
        id: Option<u32>,
        /// The kernel's reason.
        errno: Errno,
    },
    /// The kernel returned an error because of the state of the id.
    WrongState {
        /// The command.
        command: Command,
        /// The kernel's number of the id.
        id: u32,
        /// The state of the id, as far as its commands and the events read so
        /// far show.
        state: State,
    },
    /// The private data exceed what the message can carry.
    PrivateDataTooLong {
        /// The command.
        command: Command,
        /// Length in bytes.
        len: usize,
        /// Maximum length in bytes.
        max: usize,
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
    /// The kernel's connection manager has another ABI version.
    Abi {
        /// The kernel's version; this crate implements
        /// [`ABI_VERSION`](crate::abi::ABI_VERSION).
        found: u32,
    },
}

impl Error {
    /// Returns the command that failed.
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

    /// Returns the error number, for callers that only understand those.
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

    /// Returns what to check, or an empty string.
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
                "another id uses the port"
            }
            (Command::Bind | Command::BindIp, libc::EADDRNOTAVAIL) => {
                "the address does not belong to this host, or another id uses the port"
            }
            (
                Command::Bind | Command::BindIp | Command::ResolveAddr | Command::ResolveIp,
                libc::ENODEV,
            ) => "no RDMA device has that address; see the devices' GIDs",
            (Command::ResolveAddr | Command::ResolveIp, libc::ENETUNREACH) => {
                "no route to the address; see ip route"
            }
            (Command::WriteCmEvent, libc::EINVAL) => {
                "the kernel may not support this command; Linux 6.12 does not"
            }
            (_, libc::EACCES) => "the process changed its credentials after opening the channel",
            (_, libc::ENOENT) => "the id was destroyed",
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
                requirement(command)
            )?,
            Self::PrivateDataTooLong { len, max, .. } => {
                write!(
                    f,
                    ": {len} bytes of private data exceed the maximum of {max}"
                )?;
            }
            Self::BadAnswer { what, .. } => {
                write!(f, ": malformed answer from the kernel: {what}")?;
            }
            Self::Invalid { what, .. } => write!(f, ": {what}")?,
            Self::Abi { found } => write!(
                f,
                ": the kernel has ABI version {found}, this crate implements version {}",
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

/// Returns whether a command can succeed in a state. Only used after an error.
pub(crate) const fn allows(state: State, command: Command) -> bool {
    use State::{
        Accepting, AddressResolved, Bound, Connecting, Disconnected, Established, Idle, Requested,
        Responded, RouteResolved,
    };
    match command {
        Command::Bind | Command::BindIp => matches!(state, Idle),
        Command::ResolveAddr | Command::ResolveIp | Command::Listen => {
            matches!(state, Idle | Bound)
        }
        Command::ResolveRoute => matches!(state, AddressResolved),
        Command::Connect => matches!(state, RouteResolved),
        Command::Accept => matches!(state, Requested),
        Command::Establish => matches!(state, Responded),
        Command::Reject => matches!(state, Requested | Responded),
        Command::Disconnect => matches!(
            state,
            Connecting | Responded | Accepting | Established | Disconnected
        ),
        Command::InitQpAttr | Command::Notify | Command::JoinMcast | Command::JoinIpMcast => {
            !matches!(state, Idle | State::DeviceRemoved)
        }
        _ => true,
    }
}

/// Describes what the command requires.
pub(crate) const fn requirement(command: Command) -> &'static str {
    match command {
        Command::Bind | Command::BindIp => "binding needs a new id",
        Command::ResolveAddr | Command::ResolveIp => "resolving an address needs a new or bound id",
        Command::Listen => "listening needs a new or bound id",
        Command::ResolveRoute => "the route is resolved after ADDR_RESOLVED",
        Command::Connect => "connecting comes after ROUTE_RESOLVED",
        Command::Accept => "only a connection request can be accepted, once",
        Command::Establish => "only a connect response can be accepted, once",
        Command::Reject => "only a connection request or response can be rejected",
        Command::Disconnect => "the id has no connection",
        _ => "the id has no device: bind it or resolve an address first",
    }
}
