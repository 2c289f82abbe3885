//! What the device stands on: the guest's memory, its interrupts, a clock.
//!
//! A front end implements these and calls the other way for what the guest
//! does to the device's registers ([`crate::Hca::read`], [`crate::Hca::write`]).

/// An address that the guest has not made accessible to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped {
    /// The first address asked for.
    pub address: u64,
}

/// The guest's memory, by the addresses that the guest gives to the device.
///
/// The guest's processors access the same bytes at any time, so nothing hands
/// out references. An access is all or nothing.
pub trait Memory {
    /// Copies out of memory. Whatever was written before the last `publish`
    /// of the other side that this thread has seen, is seen.
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped>;

    /// Copies into memory, in no order.
    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped>;

    /// Writes one byte after everything written before: what tells the guest
    /// that an entry is complete.
    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped>;

    /// Reads an aligned big-endian word before everything read after: what
    /// tells the device how far the guest has got.
    fn read_index(&self, address: u64) -> Result<u32, Unmapped>;

    /// One atomic operation on 8 aligned bytes as seen by other users of this
    /// trait; the value is in the byte order of memory, the answer is the
    /// value before. `None` leaves memory as it is.
    fn update(
        &self,
        address: u64,
        change: &mut dyn FnMut([u8; 8]) -> Option<[u8; 8]>,
    ) -> Result<[u8; 8], Unmapped> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        if let Some(new) = change(bytes) {
            self.write(address, &new)?;
        }
        Ok(bytes)
    }
}

/// The device's interrupt vectors.
pub trait Interrupts {
    /// Raises a vector, once. One that the guest has not set up is lost, as
    /// on a bus.
    fn interrupt(&mut self, vector: u16);
}

/// Time.
pub trait Clock {
    /// Nanoseconds since any moment; never goes back.
    fn now(&self) -> u64;
}

/// All of it.
pub trait Platform: Memory + Interrupts + Clock {}

impl<T: Memory + Interrupts + Clock> Platform for T {}
