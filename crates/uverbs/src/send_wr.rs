//! A send work request as one value.
//!
//! The plugin and the Rust crate convert a request into a [`SendWr`]; the send
//! queue of a device crate encodes it. Nothing else knows either form.

use std::fmt;

use crate::{MwType, Opcode, SendFlags, Sge};

/// A send work request (`ibv_send_wr`).
///
/// `A` is how the device addresses a datagram: the number of an address handle,
/// or an address vector. Fields that the opcode does not use are ignored.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a, A> {
    /// The identifier that the completion returns.
    pub wr_id: u64,
    /// The operation.
    pub opcode: Opcode,
    /// The flags. [`SendFlags::INLINE`] is ignored: the variant of [`SendWr::data`] counts.
    pub flags: SendFlags,
    /// Immediate data in wire order, or the key to invalidate.
    pub imm_or_key: u32,
    /// The remote memory of a read, write, atomic or flush.
    pub remote: RemoteMemory,
    /// The operands that only some operations have.
    pub operands: Operands<'a>,
    /// The destination, where the queue pair has more than one.
    pub destination: Destination<'a, A>,
    /// The local memory.
    pub data: Data<'a>,
}

impl<A> SendWr<'_, A> {
    /// A work request without remote memory, operands, destination or data.
    #[inline]
    pub const fn new(wr_id: u64, opcode: Opcode, flags: SendFlags) -> Self {
        Self {
            wr_id,
            opcode,
            flags,
            imm_or_key: 0,
            remote: RemoteMemory { addr: 0, rkey: 0 },
            operands: Operands::None,
            destination: Destination::Connected,
            data: Data::Sges(&[]),
        }
    }
}

/// Remote memory: an address and the key of its region or window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteMemory {
    /// The first byte.
    pub addr: u64,
    /// The remote key.
    pub rkey: u32,
}

/// Operands that only some operations have.
#[derive(Clone, Copy, Debug)]
pub enum Operands<'a> {
    /// None.
    None,
    /// Those of an atomic.
    Atomic {
        /// The value to compare with, or to add.
        compare_add: u64,
        /// The value to swap in; fetch-and-add has none.
        swap: u64,
    },
    /// The value of an atomic write.
    AtomicWrite([u8; 8]),
    /// Those of a flush.
    Flush {
        /// Bytes of the range.
        length: u32,
        /// Placement type: 1 global visibility, 2 persistence.
        placement: u8,
        /// Selectivity level: 0 the range, 1 the whole region.
        level: u8,
    },
    /// The bind of a memory window.
    Bind(&'a Bind),
    /// TCP segmentation offload. The data does not include the headers.
    Tso {
        /// Address of the headers, from Ethernet to TCP, which each segment gets.
        headers: u64,
        /// Bytes of the headers.
        length: u16,
        /// Maximum bytes of data in a segment.
        mss: u16,
    },
}

/// Where a message goes.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a, A> {
    /// The connected queue pair.
    Connected,
    /// The destination that is already in the WQE.
    InWqe,
    /// Any queue pair, by a datagram.
    Datagram {
        /// The address.
        address: &'a A,
        /// The remote queue pair's number.
        remote_qpn: u32,
        /// The remote queue pair's queue key.
        remote_qkey: u32,
    },
    /// A shared receive queue of the connected peer (XRC).
    Xrc {
        /// Its number.
        remote_srqn: u32,
    },
    /// A DC target.
    Dc {
        /// The address.
        address: &'a A,
        /// The target's number.
        remote_dctn: u32,
        /// The target's access key.
        access_key: u64,
        /// The stream whose order it keeps; 0 without streams.
        stream: u16,
    },
}

/// The local memory of a work request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Memory that is read or written when the work request is executed.
    Sges(&'a [Sge]),
    /// Memory that is copied into the WQE when the work request is posted; the
    /// keys are ignored.
    Inline(&'a [Sge]),
}

/// The bind of a memory window to a part of a region, or to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// The window's rkey so far.
    pub window_rkey: u32,
    /// The rkey that it gets, of which the low 8 bits count.
    pub rkey: u32,
    /// The window's type.
    pub window_type: MwType,
    /// The lkey of the region.
    pub lkey: u32,
    /// The first byte.
    pub addr: u64,
    /// Bytes; 0 unbinds the window.
    pub length: u64,
    /// The rights that it gives: the bits of `enum ibv_access_flags`.
    pub access: u32,
}

/// Why a work request was refused. Nothing of it reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full: its capacity of work requests is outstanding (ENOMEM).
    Full,
    /// More scatter/gather elements than the queue was created for (EINVAL).
    TooManySges,
    /// More inline data than the queue was created for (EINVAL).
    InlineTooLong,
    /// A message or scatter/gather element longer than the device supports (EINVAL).
    MessageTooLong,
    /// The queue pair does not support the operation or its operands (EINVAL).
    BadOperation,
    /// The device does not support it: a memory window of more than 2 GiB (EOPNOTSUPP).
    Unsupported,
}

impl PostError {
    /// The errno that ibv_post_send(3) and ibv_post_recv(3) return for the error.
    pub fn errno(self) -> i32 {
        match self {
            Self::Full => libc::ENOMEM,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::TooManySges | Self::InlineTooLong | Self::MessageTooLong | Self::BadOperation => {
                libc::EINVAL
            }
        }
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the work queue is full: poll completions first, or make it larger",
            Self::TooManySges => "more scatter/gather elements than the queue was made for",
            Self::InlineTooLong => "more inline data than the queue was made for",
            Self::MessageTooLong => "a longer message than the device takes (2 GiB)",
            Self::BadOperation => "this type of queue pair has no such operation",
            Self::Unsupported => "a memory window must not span more than 2 GiB",
        })
    }
}

impl std::error::Error for PostError {}
