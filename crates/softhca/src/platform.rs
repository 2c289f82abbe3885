//! The environment of the device: guest memory, interrupts and a clock.
//!
//! A front end implements these traits, and passes the guest's register accesses to
//! [`crate::Hca::read`] and [`crate::Hca::write`].

use roce::packet::Path;
use roce::transport::Access;

/// The address is not mapped for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped {
    /// The first address of the access.
    pub address: u64,
}

/// Guest memory, by the addresses that the guest gives to the device.
///
/// The guest's CPUs may access the same bytes at any time, so no references are
/// handed out. An access succeeds as a whole or not at all.
pub trait Memory {
    /// Copies from memory. Sees everything that the guest wrote before the last of
    /// its index updates that this thread has read with [`Memory::read_index`].
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped>;

    /// Called before data of a queue pair, not an entry of a queue, is read from memory.
    fn before_gather(&self, _qpn: u32, _address: u64, _length: usize) {}

    /// Called before data of a queue pair, not an entry of a queue, is written to memory: by a
    /// write or an atomic of its peer if `is_remote`.
    fn before_scatter(&self, _qpn: u32, _address: u64, _length: usize, _is_remote: bool) {}

    /// Called when a queue pair has found a request of its peer for memory with a key permitted.
    fn peer_accesses(&self, _qpn: u32, _key: u32, _access: Access) {}

    /// Copies to memory, in no particular order.
    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped>;

    /// Returns whether [`Memory::copy`] reads this range without an error, faster than
    /// [`Memory::read`] and [`Memory::write`].
    fn copies_from(&self, _address: u64, _length: usize) -> bool {
        false
    }

    /// Copies at most [`LONGEST_COPY`] bytes within memory, as if all were read before
    /// any of them is written.
    fn copy(&self, from: u64, to: u64, length: usize) -> Result<(), Unmapped> {
        copy_through_buffer(self, from, to, length)
    }

    /// Writes one byte, ordered after all previous writes. It tells the guest that
    /// an entry is complete.
    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped>;

    /// Reads an aligned big-endian word, ordered before all later reads. It tells
    /// the device how far the guest's producer or consumer has got.
    fn read_index(&self, address: u64) -> Result<u32, Unmapped>;

    /// Updates 8 aligned bytes, atomically with respect to other users of this
    /// trait. Values are in memory byte order. Returns the previous value. If
    /// `change` returns `None`, memory is unchanged.
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

/// Maximum length of [`Memory::copy`]: the payload of a packet.
pub const LONGEST_COPY: usize = 4096;

/// Implements [`Memory::copy`] by the other functions.
pub fn copy_through_buffer<M: Memory + ?Sized>(
    memory: &M,
    from: u64,
    to: u64,
    length: usize,
) -> Result<(), Unmapped> {
    let mut buffer = [0; LONGEST_COPY];
    let bytes = buffer.get_mut(..length);
    let bytes = bytes.ok_or(Unmapped { address: from })?;
    memory.read(from, bytes)?;
    memory.write(to, bytes)
}

/// Interrupt vectors of the device.
pub trait Interrupts {
    /// Raises a vector once. A vector that the guest has not set up is ignored, as
    /// on a bus.
    fn interrupt(&mut self, vector: u16);
}

/// A monotonic clock.
pub trait Clock {
    /// Nanoseconds since any fixed moment; never decreases.
    fn now(&self) -> u64;
}

/// The processes that have the peers of queue pairs.
pub trait Peers {
    /// Returns whether that of a queue pair, by its path and number, is known to be stopped.
    fn is_stopped(&self, _path: &Path, _qpn: u32) -> bool {
        false
    }

    /// Returns for how many nanoseconds the peer of a queue pair may be silent before its timeouts
    /// count as retries: its process waits for a processor, or cannot be known to be stopped.
    fn max_silence(&self, _path: &Path, _qpn: u32) -> u64 {
        0
    }
}

/// Everything that the device needs.
pub trait Platform: Memory + Interrupts + Clock + Peers {}

impl<T: Memory + Interrupts + Clock + Peers> Platform for T {}
