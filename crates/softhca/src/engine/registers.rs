//! Registers that keep a value, and the layout of the register space.

/// First page that can be a UAR; the pages before it hold the registers.
pub(crate) const FIRST_UAR: u32 = 8;
/// Number of UARs. The last pages of the BAR hold the interrupt vector table.
pub(crate) const UARS: usize = 8000;

/// The address of the queue, as written to its registers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CommandQueue {
    pub(crate) high: u32,
    pub(crate) low: u32,
}

impl CommandQueue {
    pub(crate) fn address(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low & !0xfff)
    }
}

/// Shift of the NIC interface state, three bits in the low word of the command
/// queue's address.
pub(crate) const NIC_STATE: u32 = 8;

/// Registers that keep a value.
#[derive(Debug, Default)]
pub(crate) struct Registers {
    pub(crate) commands: CommandQueue,
    /// NIC interface state, as the driver set it (`health`).
    pub(crate) nic: u32,
}
