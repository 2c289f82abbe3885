//! Operations, and addresses of remote memory.

/// The type of a posted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Sends a message to a receive of the peer.
    Send,
    /// RDMA write: writes to remote memory.
    Write,
    /// RDMA read: reads remote memory.
    Read,
    /// Compares 8 bytes of remote memory, and swaps them if equal.
    CompareSwap,
    /// Adds to 8 bytes of remote memory.
    FetchAdd,
    /// Writes 8 bytes of remote memory atomically.
    AtomicWrite,
    /// Makes earlier writes globally visible or persistent.
    Flush,
    /// Invalidates a local memory key.
    LocalInvalidate,
    /// Binds a memory window.
    BindWindow,
    /// Receives a message.
    Receive,
}

/// The address of remote memory, with the rkey that gives access to it.
///
/// The owner of the memory sends it to its peers; the feature `serde` serialises
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RemoteAddr {
    /// The address, in the peer's registration.
    pub addr: u64,
    /// The peer's rkey.
    pub rkey: u32,
}

impl RemoteAddr {
    /// Creates a remote address from an address and an rkey.
    pub const fn new(addr: u64, rkey: u32) -> Self {
        Self { addr, rkey }
    }

    /// Returns the address `bytes` further on, with the same rkey.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self {
            addr: self.addr.wrapping_add(bytes),
            ..self
        }
    }
}

impl From<RemoteAddr> for uverbs::RemoteMemory {
    #[inline]
    fn from(RemoteAddr { addr, rkey }: RemoteAddr) -> Self {
        Self { addr, rkey }
    }
}
