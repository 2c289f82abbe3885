//! Command status.

use std::fmt;

pub use crate::rule::Rule;

/// Command status codes, as in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Status {
    Ok = 0,
    Internal = 0x1,
    BadOpcode = 0x2,
    BadParameter = 0x3,
    BadSystemState = 0x4,
    BadResource = 0x5,
    ResourceBusy = 0x6,
    ExceedsLimit = 0x8,
    BadResourceState = 0x9,
    BadIndex = 0xa,
    NoResources = 0xf,
    BadInputLength = 0x50,
    BadOutputLength = 0x51,
    BadQpState = 0x10,
    BadSizeOutstandingCqes = 0x40,
}

/// Why a command was refused: what broke which rule, and the status that the driver reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandError {
    status: Status,
    /// The field, or kind of object.
    pub what: &'static str,
    /// Its value or number.
    pub value: u64,
    /// The rule that it breaks.
    pub rule: Rule,
}

impl CommandError {
    /// Returns the status in the output.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The syndrome in the output, which the driver prints: a hash of what broke which rule.
    /// It is the same for all values, and the log has both, so that a line of the kernel log
    /// leads to its cause.
    pub fn syndrome(&self) -> u32 {
        let bytes = self.what.bytes().chain([self.rule.number()]);
        // FNV-1a.
        bytes.fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} ({:#x}), syndrome {:#010x}: {} {:#x} {}",
            self.status,
            self.status as u8,
            self.syndrome(),
            self.what,
            self.value,
            self.rule
        )
    }
}

impl std::error::Error for CommandError {}

/// Creates the error of a command: the value of `what` breaks `rule`.
#[cold]
pub(crate) fn refuse(
    status: Status,
    what: &'static str,
    value: impl TryInto<u64>,
    rule: Rule,
) -> CommandError {
    CommandError {
        status,
        what,
        value: value.try_into().unwrap_or(u64::MAX),
        rule,
    }
}

/// Creates the error of a command that names an object which does not exist.
#[cold]
pub(crate) fn no_object(what: &'static str, number: impl TryInto<u64>) -> CommandError {
    refuse(Status::BadResource, what, number, Rule::Exists)
}

/// Creates the error of a command that destroys an object which others use.
#[cold]
pub(crate) fn in_use(what: &'static str, number: impl TryInto<u64>) -> CommandError {
    refuse(Status::ResourceBusy, what, number, Rule::Unused)
}

/// Creates the error of a command whose field has an invalid value.
#[cold]
pub(crate) fn invalid(what: &'static str, value: impl TryInto<u64>, rule: Rule) -> CommandError {
    refuse(Status::BadParameter, what, value, rule)
}

/// Creates the error of a command that needs more than the device has.
#[cold]
pub(crate) fn too_many(what: &'static str, value: impl TryInto<u64>, limit: u64) -> CommandError {
    refuse(Status::ExceedsLimit, what, value, Rule::AtMost(limit))
}

/// The result of a command handler.
pub type Outcome = Result<(), CommandError>;
