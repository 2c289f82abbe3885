//! Entry formats of completion readers.

use std::fmt::Debug;

use super::entry::{FLAG_GRH, FLAG_IMMEDIATE, is_remote_write};
use crate::data::Payload;
use crate::device::WorkCompletion;
use crate::operation::Operation;

bitflags::bitflags! {
    /// Properties of a completion. The values are specific to this crate.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct EntryFlags: u32 {
        /// A message was sent.
        const SEND = 1;
        /// A message was received.
        const RECV = 1 << 1;
        /// An untagged message.
        const MSG = 1 << 2;
        /// A tagged message.
        const TAGGED = 1 << 3;
        /// One-sided access to memory: an RDMA read or write.
        const RMA = 1 << 4;
        /// An atomic operation.
        const ATOMIC = 1 << 5;
        /// An RDMA read, or an atomic that returns a value.
        const READ = 1 << 6;
        /// An RDMA write, or an atomic that changes memory.
        const WRITE = 1 << 7;
        /// A peer has read local memory. Never set for a queue pair: a peer's
        /// read produces no completion here.
        const REMOTE_READ = 1 << 8;
        /// A peer has written local memory, with immediate data.
        const REMOTE_WRITE = 1 << 9;
        /// There is immediate data.
        const REMOTE_CQ_DATA = 1 << 10;
        /// The message was sent to a multicast group.
        const MULTICAST = 1 << 11;
        /// A multi-receive buffer was released to its owner.
        const MULTI_RECV = 1 << 12;
        /// More parts of the same message follow.
        const MORE = 1 << 13;
        /// An unexpected message was claimed.
        const CLAIM = 1 << 14;
        /// A flush.
        const FLUSH = 1 << 15;
        /// A key was invalidated or a window bound.
        const KEY = 1 << 16;
    }
}

impl EntryFlags {
    /// Returns the flags that follow from the operation.
    #[inline]
    pub fn of_operation(operation: Operation) -> Self {
        match operation {
            Operation::Send => Self::SEND | Self::MSG,
            Operation::Write => Self::RMA | Self::WRITE,
            Operation::Read => Self::RMA | Self::READ,
            Operation::CompareSwap | Operation::FetchAdd => Self::ATOMIC | Self::READ | Self::WRITE,
            Operation::AtomicWrite => Self::ATOMIC | Self::WRITE,
            Operation::Flush => Self::RMA | Self::FLUSH,
            Operation::LocalInvalidate | Operation::BindWindow => Self::KEY,
            Operation::Receive => Self::RECV | Self::MSG,
        }
    }

    #[inline]
    pub(crate) fn of_success(raw: &Raw<'_>) -> Self {
        let mut flags = Self::of_operation(raw.operation);
        if raw.operation == Operation::Receive {
            if raw.wc.wc_flags & FLAG_IMMEDIATE != 0 {
                flags |= Self::REMOTE_CQ_DATA;
            }
            if is_remote_write(raw.wc.opcode) {
                flags = Self::RMA | Self::REMOTE_WRITE | Self::REMOTE_CQ_DATA;
            } else if raw.wc.wc_flags & FLAG_GRH != 0 {
                if let Some(header) = raw.payload.route_header() {
                    if crate::route_header::is_multicast(header) {
                        flags |= Self::MULTICAST;
                    }
                }
            }
        }
        flags
    }
}

/// A successful completion before it is converted to a format.
#[doc(hidden)]
#[derive(Debug)]
pub struct Raw<'w> {
    pub(crate) wc: &'w WorkCompletion,
    pub(crate) token: u64,
    pub(crate) operation: Operation,
    pub(crate) payload: Payload,
}

impl Raw<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.wc.byte_len as usize
    }

    #[inline]
    pub(super) fn data(&self) -> Option<u32> {
        (self.operation == Operation::Receive && self.wc.wc_flags & FLAG_IMMEDIATE != 0)
            .then_some(u32::from_be(self.wc.ex))
    }
}

/// The format of a reader's entries, chosen when the reader is built. A smaller entry is
/// cheaper to read.
///
/// [`Context`](ContextFormat), [`Message`](MessageFormat), [`Data`](DataFormat),
/// [`Tagged`](TaggedFormat).
pub trait Format: sealed::Sealed + 'static {
    /// The type of an entry.
    type Entry: Debug + Default + Send;

    #[doc(hidden)]
    fn entry(raw: Raw<'_>) -> Self::Entry;
}

mod sealed {
    pub trait Sealed {}
}

/// Entries with the token only.
#[derive(Clone, Copy, Debug, Default)]
pub struct ContextFormat;

/// Entries with flags and length.
#[derive(Clone, Copy, Debug, Default)]
pub struct MessageFormat;

/// Entries with flags, length and immediate data.
#[derive(Clone, Copy, Debug, Default)]
pub struct DataFormat;

/// Entries with flags, length, immediate data and tag.
#[derive(Clone, Copy, Debug, Default)]
pub struct TaggedFormat;

/// A completed operation (`struct fi_cq_entry`).
#[derive(Debug, Default)]
pub struct ContextEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// The memory of the operation.
    pub payload: Payload,
}

/// A completed operation (`struct fi_cq_msg_entry`).
#[derive(Debug, Default)]
pub struct MessageEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// The type of the operation.
    pub flags: EntryFlags,
    /// Bytes received (for a datagram including 40 bytes of route header); for other operations
    /// as the device reports it, possibly 0.
    pub len: usize,
    /// The memory of the operation.
    pub payload: Payload,
}

/// A completed operation (`struct fi_cq_data_entry`).
#[derive(Debug, Default)]
pub struct DataEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// The type of the operation.
    pub flags: EntryFlags,
    /// As [`MessageEntry::len`].
    pub len: usize,
    /// Immediate data of a received message, in host byte order.
    pub data: Option<u32>,
    /// The memory of the operation.
    pub payload: Payload,
}

/// A completed operation (`struct fi_cq_tagged_entry`).
#[derive(Debug, Default)]
pub struct TaggedEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// The type of the operation.
    pub flags: EntryFlags,
    /// As [`MessageEntry::len`].
    pub len: usize,
    /// Immediate data of a received message, in host byte order.
    pub data: Option<u32>,
    /// The tag; `None` for messages without one, such as those received by a
    /// device without tag matching.
    pub tag: Option<u64>,
    /// The memory of the operation.
    pub payload: Payload,
}

impl sealed::Sealed for ContextFormat {}
impl Format for ContextFormat {
    type Entry = ContextEntry;

    #[inline]
    fn entry(raw: Raw<'_>) -> ContextEntry {
        ContextEntry {
            token: raw.token,
            payload: raw.payload,
        }
    }
}

impl sealed::Sealed for MessageFormat {}
impl Format for MessageFormat {
    type Entry = MessageEntry;

    #[inline]
    fn entry(raw: Raw<'_>) -> MessageEntry {
        MessageEntry {
            token: raw.token,
            flags: EntryFlags::of_success(&raw),
            len: raw.len(),
            payload: raw.payload,
        }
    }
}

impl sealed::Sealed for DataFormat {}
impl Format for DataFormat {
    type Entry = DataEntry;

    #[inline]
    fn entry(raw: Raw<'_>) -> DataEntry {
        DataEntry {
            token: raw.token,
            flags: EntryFlags::of_success(&raw),
            len: raw.len(),
            data: raw.data(),
            payload: raw.payload,
        }
    }
}

impl sealed::Sealed for TaggedFormat {}
impl Format for TaggedFormat {
    type Entry = TaggedEntry;

    #[inline]
    fn entry(raw: Raw<'_>) -> TaggedEntry {
        TaggedEntry {
            token: raw.token,
            flags: EntryFlags::of_success(&raw),
            len: raw.len(),
            data: raw.data(),
            tag: None,
            payload: raw.payload,
        }
    }
}

const _: () = {
    assert!(size_of::<ContextEntry>() < size_of::<MessageEntry>());
    assert!(size_of::<MessageEntry>() < size_of::<DataEntry>());
    assert!(size_of::<DataEntry>() < size_of::<TaggedEntry>());
};
