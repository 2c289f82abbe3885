//! The device's health: what its registers show of it, how it fails for good,
//! and the reset with which the driver brings it back.

use crate::hca::Hca;
use crate::platform::Platform;

/// Bit 30 says that the driver may reset the device; bit 31 that the device is
/// still starting.
const INITIALIZING: u64 = 0x1fc;
/// Bit 31: the device asks for a reset.
const SEVERITY: u64 = 0x238;
const SYNDROME: u64 = 0x23c;
const COUNTER: u64 = 0x1010;

/// Where the low word of the command queue's address has what the driver may
/// use of the device, in three bits.
pub(crate) const STATE: u32 = 8;
const STATE_MASK: u32 = 7;
/// Nothing: it has been reset.
const DISABLED: u32 = 1;
/// The driver wants it reset.
const RESET: u32 = 7;

impl<P: Platform> Hca<P> {
    /// Shows a health syndrome, 0 for a healthy device. After a fatal one the
    /// device does nothing more: no command, no work, no event, and what
    /// arrives is lost, until the driver has reset it.
    pub fn set_health(&mut self, syndrome: u8, fatal: bool) {
        self.core.faults.health = syndrome;
        self.core.faults.fatal = fatal && syndrome != 0;
    }

    /// Whether it does nothing until it is reset.
    pub(crate) fn has_failed(&self) -> bool {
        self.core.faults.fatal
    }

    /// Whether doorbells mean anything: not from the failure on until the driver
    /// takes the device into use again. Programs have theirs mapped until then.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.has_failed() && self.core.registers.nic != DISABLED
    }

    /// The registers of health; others read as 0.
    pub(crate) fn health_register(&self, offset: u64, now: u64) -> u32 {
        let faults = &self.core.faults;
        match offset {
            INITIALIZING => 1 << 30,
            SEVERITY => u32::from(faults.fatal) << 31,
            SYNDROME => u32::from(faults.health) << 16,
            // Stands still when the device is not healthy, as real ones do.
            COUNTER if faults.health == 0 => (now / 100_000_000) as u32 & 0xff_ffff,
            COUNTER => u32::from(faults.health) << 24,
            _ => 0,
        }
    }

    /// The driver has written the low word of the command queue's address.
    pub(crate) fn set_nic_state(&mut self, word: u32) {
        let state = word >> STATE & STATE_MASK;
        if state == RESET {
            self.reset();
            self.set_health(0, false);
            self.core.registers.nic = DISABLED;
        } else {
            self.core.registers.nic = state;
        }
    }
}
