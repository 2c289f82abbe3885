//! What can be asked of a queue pair.

/// What a posted operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Sends a message to a receive of the peer's.
    Send,
    /// Writes to memory of the peer's.
    Write,
    /// Reads memory of the peer's.
    Read,
    /// Compares 8 bytes of the peer's memory, and swaps them if equal.
    CompareSwap,
    /// Adds to 8 bytes of the peer's memory.
    FetchAdd,
    /// Writes 8 bytes of the peer's memory, all at once.
    AtomicWrite,
    /// Makes earlier writes visible, or persistent.
    Flush,
    /// Invalidates a key of one's own.
    LocalInvalidate,
    /// Binds a memory window.
    BindWindow,
    /// Receives a message.
    Receive,
}

/// Where in a peer's memory: an address and the key that gives access to it.
///
/// It is what a peer has to be told of memory; with feature `serde` it can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RemoteAddr {
    /// The address, as the peer's registration has it.
    pub addr: u64,
    /// The peer's key.
    pub rkey: u32,
}

impl RemoteAddr {
    /// An address and its key.
    pub const fn new(addr: u64, rkey: u32) -> Self {
        Self { addr, rkey }
    }

    /// `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self {
            addr: self.addr.wrapping_add(bytes),
            ..self
        }
    }
}
