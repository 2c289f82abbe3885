//! Opcodes and flags of send work requests, common to all devices.

use bitflags::bitflags;

/// Opcode of a send work request (`enum ib_uverbs_wr_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode(pub u32);

impl Opcode {
    /// Write to remote memory.
    pub const RDMA_WRITE: Self = Self(0);
    /// Write to remote memory, and complete a receive with immediate data.
    pub const RDMA_WRITE_WITH_IMM: Self = Self(1);
    /// Send to a receive of the peer.
    pub const SEND: Self = Self(2);
    /// Send with immediate data.
    pub const SEND_WITH_IMM: Self = Self(3);
    /// Read remote memory.
    pub const RDMA_READ: Self = Self(4);
    /// Compare and swap 8 bytes of remote memory.
    pub const ATOMIC_CMP_AND_SWP: Self = Self(5);
    /// Fetch and add 8 bytes of remote memory.
    pub const ATOMIC_FETCH_AND_ADD: Self = Self(6);
    /// Invalidate a local key.
    pub const LOCAL_INV: Self = Self(7);
    /// Bind a memory window.
    pub const BIND_MW: Self = Self(8);
    /// Send, and invalidate a remote key.
    pub const SEND_WITH_INV: Self = Self(9);
    /// Send a TCP packet that the device divides into segments.
    pub const TSO: Self = Self(10);
    /// Flush remote memory (IBA release 1.5; kernel 6.3).
    pub const FLUSH: Self = Self(14);
    /// Write 8 bytes of remote memory atomically (IBA release 1.5; kernel 6.2).
    pub const ATOMIC_WRITE: Self = Self(15);
}

bitflags! {
    /// Flags of a send work request (`enum ibv_send_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Wait for completion of earlier reads and atomics.
        const FENCE = 1;
        /// Signalled: completes with a CQE of its own also on success.
        const SIGNALED = 2;
        /// Raise a solicited event at the receiver.
        const SOLICITED = 4;
        /// The data is part of the WQE.
        const INLINE = 8;
        /// The device computes the IP, TCP and UDP checksums of a packet.
        const IP_CSUM = 16;
        const _ = !0;
    }
}
