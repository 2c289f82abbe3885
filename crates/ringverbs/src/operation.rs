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

impl Operation {
    /// Returns the plural of its name, for error texts.
    #[cold]
    #[inline(never)]
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Send => "sends",
            Self::Write => "RDMA writes",
            Self::Read => "RDMA reads",
            Self::CompareSwap => "compare-and-swap operations",
            Self::FetchAdd => "fetch-and-add operations",
            Self::AtomicWrite => "atomic writes",
            Self::Flush => "flush operations",
            Self::LocalInvalidate => "local invalidate operations",
            Self::BindWindow => "memory window binds",
            Self::Receive => "receives",
        }
    }

    /// Returns the name of its verb, for error texts.
    #[cold]
    #[inline(never)]
    pub(crate) fn post(self) -> &'static str {
        match self {
            Self::Send => "post of a send",
            Self::Write => "post of an RDMA write",
            Self::Read => "post of an RDMA read",
            Self::CompareSwap => "post of a compare-and-swap",
            Self::FetchAdd => "post of a fetch-and-add",
            Self::AtomicWrite => "post of an atomic write",
            Self::Flush => "post of a flush",
            Self::LocalInvalidate => "post of a local invalidate",
            Self::BindWindow => "bind of a memory window",
            Self::Receive => "post of a receive",
        }
    }
}

/// The address of remote memory, with the rkey that gives access to it.
///
/// The owner of the memory sends it to peers; the feature `serde` serialises it.
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
    pub const fn offset(self, bytes: usize) -> Self {
        Self {
            addr: self.addr.wrapping_add(bytes as u64),
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
