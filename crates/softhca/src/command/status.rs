//! How a command ends.

use std::fmt;

/// The statuses of a command, by the numbers in its output.
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

/// A command that is not carried out: the status, and the reason for the
/// reader of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// What the driver is told.
    pub status: Status,
    /// Why.
    pub why: &'static str,
}

impl Refused {
    /// The number in the output's syndrome, which the driver prints: the same
    /// for the same reason, so that one finds the reason of a line in the
    /// kernel's log (`softhca syndrome` prints it).
    pub fn syndrome(&self) -> u32 {
        // FNV-1a.
        self.why.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} ({:#x}), syndrome {:#010x}: {}",
            self.status,
            self.status as u8,
            self.syndrome(),
            self.why
        )
    }
}

/// Refuses with a status and a reason.
pub const fn refuse(status: Status, why: &'static str) -> Refused {
    Refused { status, why }
}

/// What a command's handler returns.
pub type Outcome = Result<(), Refused>;
