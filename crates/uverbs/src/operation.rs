//! Operation codes and flags of send work requests, which all devices share.

use bitflags::bitflags;

use crate::Sge;

/// What a send work request asks for (`enum ib_uverbs_wr_opcode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode(pub u32);

impl Opcode {
    /// Write to remote memory.
    pub const RDMA_WRITE: Self = Self(0);
    /// Write to remote memory and consume a receive with immediate data.
    pub const RDMA_WRITE_WITH_IMM: Self = Self(1);
    /// Send to a receive.
    pub const SEND: Self = Self(2);
    /// Send with immediate data.
    pub const SEND_WITH_IMM: Self = Self(3);
    /// Read remote memory.
    pub const RDMA_READ: Self = Self(4);
    /// Compare and swap 8 bytes.
    pub const ATOMIC_CMP_AND_SWP: Self = Self(5);
    /// Fetch and add 8 bytes.
    pub const ATOMIC_FETCH_AND_ADD: Self = Self(6);
    /// Invalidate a local key.
    pub const LOCAL_INV: Self = Self(7);
    /// Bind a memory window.
    pub const BIND_MW: Self = Self(8);
    /// Send, and invalidate a remote key.
    pub const SEND_WITH_INV: Self = Self(9);
    /// Flush remote memory (IBA 1.5; kernel 6.3).
    pub const FLUSH: Self = Self(14);
    /// Write 8 bytes atomically (IBA 1.5; kernel 6.2).
    pub const ATOMIC_WRITE: Self = Self(15);
}

bitflags! {
    /// Flags of a send work request (`enum ibv_send_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Wait for reads and atomics posted before.
        const FENCE = 1;
        /// Raise a work completion on success too.
        const SIGNALED = 2;
        /// Raise a solicited event at the receiver.
        const SOLICITED = 4;
        /// The data is in the entry itself.
        const INLINE = 8;
        const _ = !0;
    }
}

/// A send, write or read of one element, wherever a face has it. Each value is
/// asked for just before it is written.
///
/// The immediate data, remote address and key may be asked for whether or not
/// the operation has them: then they are any number.
pub trait OneElement {
    /// The work request's identifier.
    fn wr_id(&self) -> u64;
    /// The operation.
    fn opcode(&self) -> Opcode;
    /// Its flags; INLINE or not as it is posted.
    fn flags(&self) -> SendFlags;
    /// Immediate data, as it goes on the wire, or the key to invalidate.
    fn immediate_or_key(&self) -> u32;
    /// Remote memory.
    fn remote_addr(&self) -> u64;
    /// Its key.
    fn rkey(&self) -> u32;
    /// The data.
    fn sge(&self) -> &Sge;
}
