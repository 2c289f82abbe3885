//! Formats of entries: what a reader is told of a completion.

use std::fmt::Debug;

use super::entry::{FLAG_GRH, FLAG_IMMEDIATE, is_remote_write};
use crate::data::Payload;
use crate::device::WorkCompletion;
use crate::operation::Operation;

bitflags::bitflags! {
    /// What a completion was of. The numbers are this crate's own.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct EntryFlags: u32 {
        /// A message was sent.
        const SEND = 1;
        /// A message was received.
        const RECV = 1 << 1;
        /// A message, untagged.
        const MSG = 1 << 2;
        /// A tagged message.
        const TAGGED = 1 << 3;
        /// Memory was read or written by one side alone.
        const RMA = 1 << 4;
        /// An atomic operation.
        const ATOMIC = 1 << 5;
        /// A read, or an atomic that brings a value back.
        const READ = 1 << 6;
        /// A write, or an atomic that changes memory.
        const WRITE = 1 << 7;
        /// A peer has read from here. No queue pair raises this: a peer's read
        /// leaves no trace in the completion queue.
        const REMOTE_READ = 1 << 8;
        /// A peer has written here, and said so with immediate data.
        const REMOTE_WRITE = 1 << 9;
        /// Immediate data came along.
        const REMOTE_CQ_DATA = 1 << 10;
        /// The message was sent to a group.
        const MULTICAST = 1 << 11;
        /// A buffer of many messages is the owner's again.
        const MULTI_RECV = 1 << 12;
        /// More parts of the same follow.
        const MORE = 1 << 13;
        /// An unexpected message was set aside for its finder.
        const CLAIM = 1 << 14;
        /// A flush.
        const FLUSH = 1 << 15;
        /// A key was invalidated, or a window bound.
        const KEY = 1 << 16;
    }
}

impl EntryFlags {
    /// What an operation stands for by itself.
    #[inline]
    pub(crate) fn of_operation(operation: Operation) -> Self {
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
            } else if raw.wc.wc_flags & FLAG_GRH != 0
                && let Some(header) = raw.payload.front()
                && super::address::is_multicast(header)
            {
                flags |= Self::MULTICAST;
            }
        }
        flags
    }
}

/// A successful completion before it has a format.
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

/// How much an entry tells. Chosen when a reader is made: a smaller entry costs
/// less to read.
///
/// [`Context`](ContextFormat), [`Message`](MessageFormat),
/// [`Data`](DataFormat), [`Tagged`](TaggedFormat).
pub trait Format: sealed::Sealed + 'static {
    /// The entry.
    type Entry: Debug + Default + Send;

    #[doc(hidden)]
    fn entry(raw: Raw<'_>) -> Self::Entry;
}

mod sealed {
    pub trait Sealed {}
}

/// Entries that say which operation is done, and nothing else.
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

/// An operation is done (`struct fi_cq_entry`).
#[derive(Debug, Default)]
pub struct ContextEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// Its memory.
    pub payload: Payload,
}

/// An operation is done (`struct fi_cq_msg_entry`).
#[derive(Debug, Default)]
pub struct MessageEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// What it was.
    pub flags: EntryFlags,
    /// Bytes received (a datagram's with its 40 bytes of route header); of
    /// other operations what the device says, which may be 0.
    pub len: usize,
    /// Its memory.
    pub payload: Payload,
}

/// An operation is done (`struct fi_cq_data_entry`).
#[derive(Debug, Default)]
pub struct DataEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// What it was.
    pub flags: EntryFlags,
    /// As [`MessageEntry::len`].
    pub len: usize,
    /// Immediate data of a received message, host byte order.
    pub data: Option<u32>,
    /// Its memory.
    pub payload: Payload,
}

/// An operation is done (`struct fi_cq_tagged_entry`).
#[derive(Debug, Default)]
pub struct TaggedEntry {
    /// The token that it was posted with.
    pub token: u64,
    /// What it was.
    pub flags: EntryFlags,
    /// As [`MessageEntry::len`].
    pub len: usize,
    /// Immediate data of a received message, host byte order.
    pub data: Option<u32>,
    /// The tag; `None` if the message has none, as those that a device without
    /// tag matching receives.
    pub tag: Option<u64>,
    /// Its memory.
    pub payload: Payload,
}

impl sealed::Sealed for ContextFormat {}
impl Format for ContextFormat {
    type Entry = ContextEntry;

    #[inline(always)]
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

    #[inline(always)]
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

    #[inline(always)]
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

    #[inline(always)]
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
