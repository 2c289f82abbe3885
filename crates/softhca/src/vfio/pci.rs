//! PCI configuration space and region layout.

use crate::hca::{BAR_SIZE, VECTORS};
use crate::profile::PortKind;

/// Bytes of the configuration space.
pub const CONFIG_SIZE: usize = 256;

/// Region indices of vfio.
pub mod region {
    /// BAR 0, the registers.
    pub const BAR0: u32 = 0;
    /// The configuration space.
    pub const CONFIG: u32 = 7;
    /// The number of regions, most of them empty.
    pub const COUNT: u32 = 9;
}

/// Interrupt indices of vfio.
pub mod irq {
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// The number of interrupt types.
    pub const COUNT: u32 = 5;
}

/// Mellanox.
const VENDOR_ID: u16 = 0x15b3;
/// ConnectX-5.
const DEVICE_ID: u16 = 0x1017;
const SUBSYSTEM_ID: u16 = 0x0001;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CLASS_CODE: usize = 0x09;
const BAR0: usize = 0x10;
/// 64 bits, prefetchable.
const BAR0_FLAGS: u32 = 0xc;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;

const MSIX: usize = 0x40;
const MSIX_ID: u8 = 0x11;
const MSIX_CONTROL: usize = MSIX + 2;
/// Offsets of the MSI-X table and the pending bits, in the last pages of BAR 0.
const MSIX_TABLE: u32 = 0x1fe_0000;
const MSIX_PENDING: u32 = 0x1ff_0000;

/// The configuration space.
#[derive(Debug, Clone)]
pub struct Config {
    bytes: [u8; CONFIG_SIZE],
    writable: [u8; CONFIG_SIZE],
}

impl Config {
    /// Returns the configuration space as after power-on.
    pub fn new(port: PortKind) -> Config {
        let mut bytes = [0; CONFIG_SIZE];
        let mut writable = [0; CONFIG_SIZE];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &VENDOR_ID.to_le_bytes());
        put(2, &DEVICE_ID.to_le_bytes());
        put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        // Class: network controller, with subclass Ethernet or InfiniBand.
        let subclass = match port {
            PortKind::Ethernet => 0x00,
            PortKind::InfiniBand => 0x07,
        };
        put(CLASS_CODE, &[0, subclass, 0x02]);
        put(BAR0, &BAR0_FLAGS.to_le_bytes());
        put(0x2c, &VENDOR_ID.to_le_bytes());
        put(0x2e, &SUBSYSTEM_ID.to_le_bytes());
        put(CAPABILITIES, &[MSIX as u8]);
        put(MSIX, &[MSIX_ID, 0]);
        put(MSIX_CONTROL, &(VECTORS as u16 - 1).to_le_bytes());
        put(MSIX + 4, &MSIX_TABLE.to_le_bytes());
        put(MSIX + 8, &MSIX_PENDING.to_le_bytes());

        writable[COMMAND..COMMAND + 2].copy_from_slice(&0x0547_u16.to_le_bytes());
        let bar = !(BAR_SIZE - 1);
        writable[BAR0..BAR0 + 8].copy_from_slice(&bar.to_le_bytes());
        writable[INTERRUPT_LINE] = 0xff;
        // MSI-X enable and function mask.
        writable[MSIX_CONTROL + 1] = 0xc0;
        Config { bytes, writable }
    }

    /// Reads bytes; zeros past the end.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        if let Ok(from) = usize::try_from(offset) {
            if let Some(rest) = self.bytes.get(from..) {
                let n = rest.len().min(out.len());
                out[..n].copy_from_slice(&rest[..n]);
            }
        }
    }

    /// Writes bytes, except their read-only bits.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (n, value) in data.iter().enumerate() {
            let at = usize::try_from(offset)
                .unwrap_or(usize::MAX)
                .saturating_add(n);
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !mask | value & mask;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_the_bar_can_be_probed() {
        let mut config = Config::new(PortKind::InfiniBand);
        config.write(BAR0 as u64, &[0xff; 8]);
        let mut bar = [0; 8];
        config.read(BAR0 as u64, &mut bar);
        let bar = u64::from_le_bytes(bar);
        assert_eq!(!(bar & !0xf) + 1, BAR_SIZE);
        assert_eq!(bar & 0xf, 0xc);
        config.write(0, &[0; 4]);
        let mut id = [0; 4];
        config.read(0, &mut id);
        assert_eq!(id, [0xb3, 0x15, 0x17, 0x10]);
        config.write(254, &[1; 8]);
        config.read(u64::MAX, &mut id);
        assert_eq!(id, [0; 4]);
    }
}
