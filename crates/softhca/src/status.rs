//! Command status.

use std::fmt;

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

/// The error of a command: its status, and the reason for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandError {
    /// The status that the driver reads.
    pub status: Status,
    /// The reason.
    pub reason: &'static str,
}

impl CommandError {
    /// The syndrome in the output, which the driver prints: a hash of the reason.
    /// Equal reasons have equal syndromes, and the log has both, so that a line of
    /// the kernel log leads to its reason.
    pub fn syndrome(&self) -> u32 {
        // FNV-1a.
        self.reason.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} ({:#x}), syndrome {:#010x}: {}",
            self.status,
            self.status as u8,
            self.syndrome(),
            self.reason
        )
    }
}

/// Creates the error of a command.
pub const fn refuse(status: Status, reason: &'static str) -> CommandError {
    CommandError { status, reason }
}

/// The result of a command handler.
pub type Outcome = Result<(), CommandError>;
