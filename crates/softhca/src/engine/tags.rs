//! Formats of tag matching, and the list of tags of an SRQ.

use roce::rule::{Rule, Violation};

use super::wqe::Segment;

/// Base-2 logarithm of the longest list.
pub(crate) const LOG_MAX_TAGS: u32 = 7;
/// Bytes of the header.
pub(crate) const TMH_SIZE: usize = 16;

/// Operations of tag matching in CQEs.
pub(super) mod app {
    pub(in crate::engine) const CONSUMED: u8 = 0x1;
    pub(in crate::engine) const EXPECTED: u8 = 0x2;
    pub(in crate::engine) const UNEXPECTED: u8 = 0x3;
    pub(in crate::engine) const NO_TAG: u8 = 0x4;
    pub(in crate::engine) const APPEND: u8 = 0x5;
    pub(in crate::engine) const REMOVE: u8 = 0x6;
    pub(in crate::engine) const NOOP: u8 = 0x7;
    pub(in crate::engine) const CONSUMED_SOFTWARE: u8 = 0x9;
    pub(in crate::engine) const CONSUMED_MESSAGE: u8 = 0xa;
    pub(in crate::engine) const CONSUMED_MESSAGE_SOFTWARE: u8 = 0xb;
    pub(in crate::engine) const CANCELED: u8 = 0xc;
}

/// A tag of the list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tag {
    pub(super) index: u16,
    pub(super) tag: u64,
    pub(super) mask: u64,
    /// Software has seen all unexpected messages that preceded this tag.
    pub(super) active: bool,
    pub(super) buffer: Segment,
}

/// The list of tags of an SRQ.
#[derive(Debug)]
pub(crate) struct TagList {
    /// Tags in the order in which they were appended.
    pub(super) tags: Vec<Tag>,
    pub(crate) log_size: u32,
    /// Index of the tag that is appended next.
    pub(crate) next: u16,
    /// Number of unexpected messages: received, and seen by software as last reported.
    pub(crate) received: u16,
    pub(crate) seen: u16,
    /// The device transfers the data of rendezvous.
    pub(crate) transfers: bool,
}

impl TagList {
    pub(crate) fn new(log_size: u32, transfers: bool) -> TagList {
        TagList {
            tags: Vec::new(),
            log_size,
            next: 0,
            received: 0,
            seen: 0,
            transfers,
        }
    }

    pub(super) fn all_unexpected_seen(&self) -> bool {
        self.received == self.seen
    }

    /// Sets the number of unexpected messages that software has seen.
    pub(super) fn synchronize(&mut self, seen: u16) {
        self.seen = seen;
        if self.all_unexpected_seen() {
            for tag in &mut self.tags {
                tag.active = true;
            }
        }
    }

    /// Appends a tag at the index that the previous operation named. `next` is the index
    /// of the tag after it.
    pub(super) fn append(
        &mut self,
        next: u16,
        (tag, mask): (u64, u64),
        buffer: Segment,
    ) -> Result<(), Violation> {
        let index = self.next;
        if next >> self.log_size != 0 {
            let rule = Rule::AtMost((1 << self.log_size) - 1);
            return Err(Violation::new("index of the next tag", next, rule));
        }
        if self.tags.iter().any(|tag| tag.index == index) {
            return Err(Violation::new("index of the tag", index, Rule::Free));
        }
        let active = self.all_unexpected_seen();
        self.next = next;
        self.tags.push(Tag {
            index,
            tag,
            mask,
            active,
            buffer,
        });
        Ok(())
    }

    /// Removes a tag. Returns false if there is no tag at this index.
    pub(super) fn remove(&mut self, index: u16) -> bool {
        let before = self.tags.len();
        self.tags.retain(|tag| tag.index != index);
        self.tags.len() != before
    }

    /// Returns the list position of the first tag that a message matches.
    pub(super) fn find(&self, message_tag: u64) -> Option<usize> {
        let matches = |tag: &Tag| tag.active && message_tag & tag.mask == tag.tag;
        self.tags.iter().position(matches)
    }
}

/// Tag-matching state of a receive.
#[derive(Debug, Clone)]
pub(crate) enum TaggedReceive {
    /// The message is received into a WQE; holds the operation of its completion.
    Wqe(u8),
    /// The message is received into the buffer of a tag.
    Buffer(Box<TagMatch>),
}

/// A message that matched a tag.
#[derive(Debug, Clone)]
pub(crate) struct TagMatch {
    pub(super) header: [u8; TMH_SIZE],
    /// The message has a single packet, and completes once.
    pub(super) single_packet: bool,
    /// Address, key and length of the sender's memory, if the device transfers it.
    pub(super) transfer: Option<(u64, u32, u32)>,
    /// A rendezvous that software has to transfer.
    pub(super) software: bool,
}

impl TaggedReceive {
    /// Returns the fields of the CQE of a message that is received into a WQE.
    pub(super) fn fields(&self) -> Option<TagFields> {
        match self {
            TaggedReceive::Wqe(operation) => Some(TagFields::new(*operation)),
            TaggedReceive::Buffer(_) => None,
        }
    }

    /// Returns the part of a message's data that is stored, and its offset in the
    /// buffers.
    pub(super) fn stored<'a>(&self, offset: u32, data: &'a [u8]) -> (u32, &'a [u8]) {
        match self {
            TaggedReceive::Wqe(_) => (offset, data),
            TaggedReceive::Buffer(tagged) if tagged.transfer.is_some() => (0, &[]),
            TaggedReceive::Buffer(_) => {
                let skipped = TMH_SIZE.saturating_sub(offset as usize).min(data.len());
                (offset.saturating_sub(TMH_SIZE as u32), &data[skipped..])
            }
        }
    }
}

/// Fields of tag matching in a CQE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TagFields {
    /// The header of the message, or the result of a list operation.
    pub(crate) header: [u8; TMH_SIZE],
    pub(crate) operation: u8,
    /// Index of the tag.
    pub(crate) index: u16,
}

impl TagFields {
    pub(super) fn new(operation: u8) -> TagFields {
        TagFields {
            header: [0; TMH_SIZE],
            operation,
            index: 0,
        }
    }

    /// Returns whether the first bytes of the CQE are not free for data.
    pub(super) fn has_header(&self) -> bool {
        !matches!(self.operation, app::UNEXPECTED | app::NO_TAG)
    }
}
