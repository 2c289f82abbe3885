//! Device health: its registers, fatal errors, and the reset by which the driver
//! recovers.

use crate::engine::registers::NIC_STATE;
use crate::hca::Hca;
use crate::platform::Platform;

/// Bit 30: the driver may reset the device. Bit 31: the device is still
/// initializing.
const INITIALIZING: u64 = 0x1fc;
/// Bit 31: the device requests a reset.
const SEVERITY: u64 = 0x238;
const SYNDROME: u64 = 0x23c;
const COUNTER: u64 = 0x1010;

const STATE_MASK: u32 = 7;
/// NIC interface disabled: the device was reset.
const DISABLED: u32 = 1;
/// The driver requests a reset.
const RESET: u32 = 7;

impl<P: Platform> Hca<P> {
    /// Sets the health syndrome; 0 is healthy. After a fatal one the device stops:
    /// no commands, work or events, and arriving packets are lost, until the driver
    /// resets it.
    pub fn set_health(&mut self, syndrome: u8, fatal: bool) {
        self.core.faults.health = syndrome;
        self.core.faults.fatal = fatal && syndrome != 0;
    }

    /// Whether the device stopped after a fatal error.
    pub(crate) fn has_failed(&self) -> bool {
        self.core.faults.fatal
    }

    /// Whether doorbells take effect: not from a failure until the driver enables
    /// the NIC interface again. Programs keep theirs mapped in between.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.has_failed() && self.core.registers.nic != DISABLED
    }

    /// Reads a health register; others read as 0.
    pub(crate) fn health_register(&self, offset: u64, now: u64) -> u32 {
        let faults = &self.core.faults;
        match offset {
            INITIALIZING => 1 << 30,
            SEVERITY => u32::from(faults.fatal) << 31,
            SYNDROME => u32::from(faults.health) << 16,
            // The counter stops when the device is unhealthy, as on hardware.
            COUNTER if faults.health == 0 => (now / 100_000_000) as u32 & 0xff_ffff,
            COUNTER => u32::from(faults.health) << 24,
            _ => 0,
        }
    }

    /// Handles a write to the low word of the command queue's address.
    pub(crate) fn set_nic_state(&mut self, word: u32) {
        let state = word >> NIC_STATE & STATE_MASK;
        if state == RESET {
            self.reset();
            self.set_health(0, false);
            self.core.registers.nic = DISABLED;
        } else {
            self.core.registers.nic = state;
        }
    }
}
