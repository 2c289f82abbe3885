//! The configuration space and the resources of a PCI function.

/// A PCI function, as its configuration space describes it.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Vendor and device.
    pub model: (u16, u16),
    /// Number of the subsystem, whose vendor is the same.
    pub subsystem: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Generation of the PCI link, of 16 lanes.
    pub generation: u8,
    /// Whether it is a bridge.
    pub is_bridge: bool,
    /// For a bridge with functions below it: the bus below it, and the last one.
    pub buses: Option<(u8, u8)>,
}

impl Function {
    /// Returns the first 256 bytes of the configuration space: the header and the PCI Express
    /// capability.
    #[must_use]
    pub fn config(&self) -> Vec<u8> {
        const CAPABILITIES: usize = 0x40;
        const PCI_EXPRESS: u8 = 0x10;
        const DEVICE_CAPABILITIES: usize = CAPABILITIES + 4;
        const LINK_CAPABILITIES: usize = CAPABILITIES + 0xc;
        const LINK_STATUS: usize = CAPABILITIES + 0x12;
        const LINK_CAPABILITIES_2: usize = CAPABILITIES + 0x2c;
        const LINK_CONTROL_2: usize = CAPABILITIES + 0x30;
        let mut bytes = vec![0u8; 256];
        let mut put = |at: usize, value: u32, length: usize| {
            bytes[at..at + length].copy_from_slice(&value.to_le_bytes()[..length]);
        };
        let (vendor, device) = self.model;
        put(0, vendor.into(), 2);
        put(2, device.into(), 2);
        // Memory and bus mastering enabled; a list of capabilities.
        put(4, 0x0010_0406, 4);
        put(8, self.class << 8, 4);
        put(0x34, CAPABILITIES as u32, 1);
        put(CAPABILITIES, PCI_EXPRESS.into(), 1);
        let (type_of_port, header) = if self.is_bridge { (4, 1) } else { (0, 0) };
        put(CAPABILITIES + 2, 2 | type_of_port << 4, 2);
        put(0xe, header, 1);
        if let Some((first, last)) = self.buses {
            put(0x19, first.into(), 1);
            put(0x1a, last.into(), 1);
        }
        if !self.is_bridge {
            put(0x2c, vendor.into(), 2);
            put(0x2e, self.subsystem.into(), 2);
        }
        // Role-based errors, payloads of 512 bytes.
        put(DEVICE_CAPABILITIES, 0x8002, 4);
        let generation = u32::from(self.generation);
        put(LINK_CAPABILITIES, generation | 16 << 4, 4);
        put(LINK_STATUS, generation | 16 << 4, 2);
        let all_generations = (1 << (generation + 1)) - 2;
        put(LINK_CAPABILITIES_2, all_generations, 4);
        put(LINK_CONTROL_2, generation, 2);
        bytes
    }

    /// Returns the attribute `resource`, without its last line break: start, end and flags of
    /// the resources, with those of virtual functions and of what is below a bridge. The
    /// function has no memory that could be mapped.
    #[must_use]
    pub fn resource(&self) -> String {
        let lines = if self.is_bridge { 17 } else { 13 };
        let none = ["0x0000000000000000"; 3].join(" ");
        vec![none; lines].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_has_another_header_and_more_resources() {
        let function = Function {
            model: (0x15b3, 0x1021),
            subsystem: 0x23,
            class: 0x02_0000,
            generation: 5,
            is_bridge: false,
            buses: None,
        };
        let config = function.config();
        assert_eq!(config[..4], [0xb3, 0x15, 0x21, 0x10]);
        assert_eq!(config[9..12], [0, 0, 2]);
        assert_eq!(config[0x2c..0x30], [0xb3, 0x15, 0x23, 0]);
        for link in [0x4c, 0x52] {
            assert_eq!(config[link..link + 2], [0x05, 0x01]);
        }
        assert_eq!(config[0x6c], 0b11_1110);
        assert_eq!(function.resource().lines().count(), 13);
        let bridge = Function {
            is_bridge: true,
            buses: Some((0x17, 0x19)),
            ..function
        };
        let config = bridge.config();
        assert_eq!(config[0xe], 1);
        assert_eq!(config[0x19..0x1b], [0x17, 0x19]);
        assert_eq!(config[0x2c..0x30], [0; 4]);
        assert_eq!(bridge.resource().lines().count(), 17);
        assert!(
            bridge
                .resource()
                .lines()
                .all(|it| it.split(' ').count() == 3)
        );
    }
}
