//! Why the driver refused a command.
//!
//! An error of the driver is made here only, from what broke which rule; its error number
//! derives from it.

use std::fmt;
use std::sync::Arc;

use softhca::cause::AccessError;
use softhca::rule::Rule;
use softhca::status::{CommandError, Status};
use uverbs::abi::ids;
use uverbs::abi::write::cmd;
use uverbs::{AsyncEventType, Errno, QpState};

pub use crate::management::{DropCause, ReasonDrop};

/// Result of a command.
pub(crate) type Result<T> = std::result::Result<T, VerbError>;

/// Why the driver refused a verbs command: a parameter or an object, its value, and the rule
/// that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerbError {
    class: Class,
    /// The parameter, as the kernel's interface names it, or the kind of object.
    pub what: &'static str,
    /// Its value, handle or number.
    pub value: u64,
    /// The rule that it breaks.
    pub rule: Rule,
    /// The attribute or object that contains the parameter.
    pub of: Option<Container>,
}

/// The attribute or object that contains the parameter of a [`VerbError`].
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Container {
    /// An attribute, or an object by its handle.
    Number(u32),
    /// The queue pair that is modified, by its number.
    QueuePair(u32),
}

impl VerbError {
    /// Returns the number of the queue pair that is modified.
    #[must_use]
    pub fn queue_pair(&self) -> Option<u32> {
        match self.of {
            Some(Container::QueuePair(number)) => Some(number),
            _ => None,
        }
    }
}

/// The object in a [`VerbError`] of raw packets on a network interface that the system refuses.
pub const PACKET_SOCKET: &str = "packet socket on interface";

/// Classes of errors, one for each error number of the kernel.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// An invalid parameter (EINVAL).
    Invalid,
    /// What the device does not have, or reserved data (EOPNOTSUPP).
    Unsupported,
    /// An unknown command or attribute (EPROTONOSUPPORT).
    Unknown,
    /// An object that does not exist (ENOENT).
    NotFound,
    /// A descriptor that is not open, or not of the right kind (EBADF).
    BadDescriptor,
    /// A descriptor that takes no commands (ENOTTY).
    NotADevice,
    /// No room for an object (ENOMEM).
    NoMemory,
    /// An object in use (EBUSY).
    Busy,
    /// Memory that is not mapped (EFAULT).
    Fault,
    /// A missing right (EPERM).
    Permission,
    /// What may succeed later, or with another flag (EAGAIN).
    Again,
    /// No room in a table, or too short an input (ENOSPC).
    NoSpace,
    /// An object that contradicts another one (EEXIST).
    Conflict,
    /// A destination that no device has (EHOSTUNREACH).
    Unreachable,
    /// An empty entry (ENODATA).
    NoData,
    /// A removed device (EIO).
    Removed,
    /// The device has refused a command of the driver (the error number by which mlx5_core
    /// replaces the status).
    Device(CommandError),
    /// The device has refused a command of the program (EREMOTEIO).
    Program(CommandError),
    /// A system call has failed.
    System(Errno),
    /// An injected fault.
    Injected(Errno),
}

impl Class {
    fn errno(self) -> Errno {
        Errno::new(match self {
            Self::Invalid => libc::EINVAL,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::Unknown => libc::EPROTONOSUPPORT,
            Self::NotFound => libc::ENOENT,
            Self::BadDescriptor => libc::EBADF,
            Self::NotADevice => libc::ENOTTY,
            Self::NoMemory => libc::ENOMEM,
            Self::Busy => libc::EBUSY,
            Self::Fault => libc::EFAULT,
            Self::Permission => libc::EPERM,
            Self::Again => libc::EAGAIN,
            Self::NoSpace => libc::ENOSPC,
            Self::Conflict => libc::EEXIST,
            Self::Unreachable => libc::EHOSTUNREACH,
            Self::NoData => libc::ENODATA,
            Self::Removed => libc::EIO,
            Self::Program(_) => libc::EREMOTEIO,
            Self::Device(error) => match error.status() {
                Status::ResourceBusy => libc::EBUSY,
                Status::ExceedsLimit => libc::ENOMEM,
                Status::NoResources => libc::EAGAIN,
                Status::BadOpcode
                | Status::BadParameter
                | Status::BadResource
                | Status::BadResourceState
                | Status::BadIndex
                | Status::BadQpState
                | Status::BadSizeOutstandingCqes => libc::EINVAL,
                Status::Ok
                | Status::Internal
                | Status::BadSystemState
                | Status::BadInputLength
                | Status::BadOutputLength => libc::EIO,
            },
            Self::System(errno) | Self::Injected(errno) => return errno,
        })
    }
}

impl VerbError {
    /// Returns the class, of which the error number is.
    #[must_use]
    pub fn class(&self) -> Class {
        self.class
    }

    /// Returns the error number that the caller gets.
    #[must_use]
    pub fn errno(&self) -> Errno {
        self.class.errno()
    }

    /// Names the attribute that contains the parameter, or the handle of its object, unless
    /// it is named already.
    pub(crate) fn of(mut self, which: impl Into<u32>) -> Self {
        self.of.get_or_insert(Container::Number(which.into()));
        self
    }

    /// Names the queue pair that is modified, unless an attribute is named.
    pub(crate) fn of_queue_pair(mut self, number: u32) -> Self {
        self.of.get_or_insert(Container::QueuePair(number));
        self
    }

    /// Gives the error another class.
    pub(crate) fn as_class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }
}

impl From<VerbError> for Errno {
    fn from(error: VerbError) -> Self {
        error.errno()
    }
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.class {
            Class::Device(error) | Class::Program(error) => {
                write!(f, "the device refused {}: {error}", self.what)?;
            }
            Class::System(errno) => write!(f, "{} {:#x}: {errno}", self.what, self.value)?,
            Class::Injected(_) => write!(f, "{} {}", self.what, self.value)?,
            _ => match (self.what, self.rule) {
                ("path_mtu", Rule::AtMost(limit)) => {
                    let bytes = |code: u64| 128u64.checked_shl(code.min(32) as u32).unwrap_or(0);
                    let (asked, limit) = (bytes(self.value), bytes(limit));
                    write!(f, "path MTU {asked} is above the port's {limit}")?;
                }
                (_, Rule::Transition { from, to }) => {
                    let (from, to) = (state_name(from), state_name(to));
                    write!(f, "there is no transition from {from} to {to}")?;
                }
                (what, rule) => write!(f, "{what} {:#x} {rule}", self.value)?,
            },
        }
        match self.of {
            Some(Container::QueuePair(number)) => write!(f, " (of queue pair {number:#x})"),
            Some(Container::Number(of)) => write!(f, " (of {of:#x})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for VerbError {}

/// What an [`Observer`] is told.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The driver refused a verbs command.
    Verb {
        /// Its object and its method, unless they could not be read.
        method: Option<(u16, u16)>,
        /// The number of a command of write(2) that the method stands for.
        write: Option<u32>,
        /// What broke which rule.
        error: VerbError,
    },
    /// The device: commands, work requests, accesses, packets, events.
    Device(softhca::cause::Cause),
    /// A management datagram was dropped, in the device's network.
    Management(DropCause),
    /// An asynchronous event that is the driver's own.
    Event {
        /// Its type.
        event: AsyncEventType,
        /// The port, or the index in its table.
        element: u64,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verb {
                method: Some((object, method)),
                write,
                error,
            } => {
                match (verb_name(*object, *method, *write), object_name(*object)) {
                    (Some(verb), _) => f.write_str(verb)?,
                    (None, Some(name)) => write!(f, "{name}: command {method:#x}")?,
                    (None, None) => write!(f, "command {method:#x} of object type {object:#x}")?,
                }
                write!(f, " refused: {error}; {}", error.errno())
            }
            Self::Verb {
                method: None,
                error,
                ..
            } => write!(f, "command refused: {error}; {}", error.errno()),
            Self::Device(cause) => cause.fmt(f),
            Self::Management(cause) => write!(f, "management datagram dropped: {cause}"),
            Self::Event { event, element } => write!(f, "asynchronous event: {event:?}: {element}"),
        }
    }
}

/// Returns the name of an `ibv_qp_state`.
fn state_name(state: u8) -> &'static str {
    uverbs::state_name(QpState(state)).unwrap_or("no state")
}

/// Returns the function of libibverbs that gives a command.
pub(crate) fn verb_name(object: u16, method: u16, write: Option<u32>) -> Option<&'static str> {
    if let Some(command) = write {
        return Some(match command {
            cmd::CMD_ALLOC_PD => "ibv_alloc_pd",
            cmd::CMD_REG_MR => "ibv_reg_mr",
            cmd::CMD_REREG_MR => "ibv_rereg_mr",
            cmd::CMD_ALLOC_MW => "ibv_alloc_mw",
            cmd::CMD_CREATE_COMP_CHANNEL => "ibv_create_comp_channel",
            cmd::CMD_RESIZE_CQ => "ibv_resize_cq",
            cmd::CMD_QUERY_QP => "ibv_query_qp",
            cmd::CMD_MODIFY_QP => "ibv_modify_qp",
            cmd::CMD_ATTACH_MCAST => "ibv_attach_mcast",
            cmd::CMD_DETACH_MCAST => "ibv_detach_mcast",
            cmd::CMD_MODIFY_SRQ => "ibv_modify_srq",
            cmd::CMD_QUERY_SRQ => "ibv_query_srq",
            cmd::CMD_OPEN_XRCD => "ibv_open_xrcd",
            cmd::CMD_OPEN_QP => "ibv_open_qp",
            cmd::CMD_CREATE_AH => "ibv_create_ah",
            _ => return None,
        });
    }
    Some(match (object, method) {
        (ids::OBJECT_DEVICE, ids::METHOD_GET_CONTEXT) => "ibv_open_device",
        (ids::OBJECT_PD, ids::METHOD_PD_DESTROY) => "ibv_dealloc_pd",
        (ids::OBJECT_CQ, ids::METHOD_CQ_CREATE) => "ibv_create_cq",
        (ids::OBJECT_CQ, ids::METHOD_CQ_DESTROY) => "ibv_destroy_cq",
        (ids::OBJECT_QP, ids::METHOD_QP_CREATE) => "ibv_create_qp",
        (ids::OBJECT_QP, ids::METHOD_QP_DESTROY) => "ibv_destroy_qp",
        (ids::OBJECT_SRQ, ids::METHOD_SRQ_CREATE) => "ibv_create_srq",
        (ids::OBJECT_SRQ, ids::METHOD_SRQ_DESTROY) => "ibv_destroy_srq",
        (ids::OBJECT_MR, ids::METHOD_MR_DESTROY) => "ibv_dereg_mr",
        (ids::OBJECT_MR, ids::METHOD_ADVISE_MR) => "ibv_advise_mr",
        (ids::OBJECT_MR, ids::METHOD_REG_DMABUF_MR) => "ibv_reg_dmabuf_mr",
        (ids::OBJECT_MW, ids::METHOD_MW_DESTROY) => "ibv_dealloc_mw",
        (ids::OBJECT_AH, ids::METHOD_AH_DESTROY) => "ibv_destroy_ah",
        (ids::OBJECT_XRCD, ids::METHOD_XRCD_DESTROY) => "ibv_close_xrcd",
        (ids::OBJECT_WQ, ids::METHOD_WQ_CREATE) => "ibv_create_wq",
        (ids::OBJECT_WQ, ids::METHOD_WQ_DESTROY) => "ibv_destroy_wq",
        (ids::OBJECT_DM, ids::METHOD_DM_ALLOC) => "ibv_alloc_dm",
        (ids::OBJECT_DM, ids::METHOD_DM_FREE) => "ibv_free_dm",
        _ => return None,
    })
}

/// Returns the name of an object type; `None` for the driver's own.
fn object_name(object: u16) -> Option<&'static str> {
    Some(match object {
        ids::OBJECT_DEVICE => "device",
        ids::OBJECT_PD => "protection domain",
        ids::OBJECT_COMP_CHANNEL => "completion channel",
        ids::OBJECT_CQ => "completion queue",
        ids::OBJECT_QP => "queue pair",
        ids::OBJECT_SRQ => "shared receive queue",
        ids::OBJECT_AH => "address handle",
        ids::OBJECT_MR => "memory region",
        ids::OBJECT_MW => "memory window",
        ids::OBJECT_FLOW => "flow",
        ids::OBJECT_XRCD => "XRC domain",
        ids::OBJECT_RWQ_IND_TBL => "indirection table",
        ids::OBJECT_WQ => "work queue",
        ids::OBJECT_FLOW_ACTION => "flow action",
        ids::OBJECT_DM => "device memory",
        ids::OBJECT_COUNTERS => "counters",
        ids::OBJECT_ASYNC_EVENT => "asynchronous events",
        _ => return None,
    })
}

/// Returns the text of a cause, with the access to memory that failed before it.
pub fn described(cause: impl fmt::Display, access: Option<&AccessError>) -> String {
    match access {
        Some(access) => format!("{cause} ({access})"),
        None => cause.to_string(),
    }
}

/// An observer of a device. It is called under the device's lock: it must not call the device,
/// and must not wait.
pub type Observer = Arc<dyn Fn(&Cause) + Send + Sync>;

/// Refuses a command: the value of `what` breaks `rule`.
#[cold]
pub(crate) fn refuse<T>(
    class: Class,
    what: &'static str,
    value: impl TryInto<u64>,
    rule: Rule,
) -> Result<T> {
    Err(VerbError {
        class,
        what,
        value: value.try_into().unwrap_or(u64::MAX),
        rule,
        of: None,
    })
}

/// Refuses a command with an invalid parameter.
#[cold]
pub(crate) fn invalid<T>(what: &'static str, value: impl TryInto<u64>, rule: Rule) -> Result<T> {
    refuse(Class::Invalid, what, value, rule)
}

/// Refuses a command that asks for what the device does not have.
#[cold]
pub(crate) fn unsupported<T>(
    what: &'static str,
    value: impl TryInto<u64>,
    rule: Rule,
) -> Result<T> {
    refuse(Class::Unsupported, what, value, rule)
}

/// Refuses a command unless a parameter obeys a rule.
pub(crate) fn require(
    condition: bool,
    what: &'static str,
    value: impl TryInto<u64>,
    rule: Rule,
) -> Result<()> {
    match condition {
        true => Ok(()),
        false => invalid(what, value, rule),
    }
}

/// Refuses a command unless the device supports a parameter.
pub(crate) fn require_support(
    condition: bool,
    what: &'static str,
    value: impl TryInto<u64>,
    rule: Rule,
) -> Result<()> {
    match condition {
        true => Ok(()),
        false => unsupported(what, value, rule),
    }
}

/// Refuses a command unless a parameter is at most `limit`.
pub(crate) fn at_most(what: &'static str, value: impl Into<u64>, limit: u64) -> Result<()> {
    let value = value.into();
    require(value <= limit, what, value, Rule::AtMost(limit))
}

/// Refuses a command unless a parameter is between two values.
pub(crate) fn between(
    what: &'static str,
    value: impl Into<u64>,
    (low, high): (u64, u64),
) -> Result<()> {
    let value = value.into();
    require(
        (low..=high).contains(&value),
        what,
        value,
        Rule::Between(low, high),
    )
}

/// Refuses a command unless a parameter has a value.
pub(crate) fn is(what: &'static str, value: impl Into<u64>, expected: u64) -> Result<()> {
    let value = value.into();
    require(value == expected, what, value, Rule::Is(expected))
}

/// Refuses a command whose flags have others than the known ones.
pub(crate) fn known_bits(what: &'static str, value: impl Into<u64>, known: u64) -> Result<()> {
    let value = value.into();
    require(value & !known == 0, what, value, Rule::Bits(known))
}

/// Refuses a command that asks for more than the supported flags.
pub(crate) fn supported_bits(
    what: &'static str,
    value: impl Into<u64>,
    supported: u64,
) -> Result<()> {
    let value = value.into();
    require_support(value & !supported == 0, what, value, Rule::Bits(supported))
}

/// Refuses a command whose reserved data are not zero, as those that later devices know.
pub(crate) fn reserved(what: &'static str, value: impl Into<u64>) -> Result<()> {
    let value = value.into();
    require_support(value == 0, what, value, Rule::Zero)
}

/// Returns the error of a system call about `what`.
pub(crate) fn system(
    what: &'static str,
    value: impl TryInto<u64> + Copy,
) -> impl Fn(Errno) -> VerbError {
    move |errno| VerbError {
        class: Class::System(errno),
        what,
        value: value.try_into().unwrap_or(u64::MAX),
        rule: Rule::Granted,
        of: None,
    }
}

/// Fails a command by the fault of a line.
pub(crate) fn injected<T>(line: usize, errno: i32) -> Result<T> {
    let class = Class::Injected(Errno::new(errno));
    refuse(class, "injected fault of line", line, Rule::NoFault)
}

/// As [`injected`], as if the limit on locked memory were reached.
pub(crate) fn no_memory_lock<T>(line: usize) -> Result<T> {
    injected(line, libc::ENOMEM)
}

/// Returns the error number of a system call.
pub(crate) fn errno_of(error: nix::Error) -> Errno {
    Errno::new(error as i32)
}

/// Returns the error of memory that a command names: it is not mapped, or not writable.
pub(crate) fn memory(what: &'static str, address: u64, rule: Rule) -> impl Fn(Errno) -> VerbError {
    move |errno| VerbError {
        class: match errno.raw() {
            libc::EFAULT => Class::Fault,
            _ => Class::Invalid,
        },
        what,
        value: address,
        rule,
        of: None,
    }
}

/// Returns the error of a command that the device refused.
pub(crate) fn by_device(command: &'static str, error: CommandError) -> VerbError {
    VerbError {
        class: Class::Device(error),
        what: command,
        value: error.value,
        rule: error.rule,
        of: None,
    }
}
