//! Work requests that configure indirect memory keys: rights, and of which memory they
//! are a view.
//!
//! The segments are those of a bind ([`super::keys`]), with as many elements as the
//! layout has, filled up to whole blocks.

use uverbs::{SendFlags, SendWr, Sge};

use super::keys::{ANY_QP, LEADING_SEGMENTS, RIGHTS, VARIANT, rights};
use super::{PER_BLOCK, SendQueue, element, words};
use crate::abi::{KeySegment, UmrSegment, umr_flag, umr_mask};
use crate::plan::KeyChanges;
use crate::wc::opcode;
use crate::{Opcode, PostError};

/// A change of an indirect key ([`IndirectKey`](crate::commands::IndirectKey)).
#[derive(Clone, Copy, Debug)]
pub struct LayoutChange<'a> {
    /// The key. Its low 8 bits may be new.
    pub key: u32,
    /// The new rights, as bits of `enum ibv_access_flags`.
    pub access: Option<u32>,
    /// The new layout.
    pub layout: Option<KeyLayout<'a>>,
}

/// Of which memory a key is a view. Its addresses begin at 0.
#[derive(Clone, Copy, Debug)]
pub enum KeyLayout<'a> {
    /// Of these pieces, one after the other.
    List(&'a [Sge]),
    /// Of one stretch of each part in turns, so many times.
    Interleaved {
        /// How often.
        repeat: u32,
        /// The parts.
        parts: &'a [Interleaved],
    },
}

/// A part of an interleaved layout: in each turn so many bytes, and then a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Interleaved {
    /// The first byte.
    pub addr: u64,
    /// Bytes in each turn.
    pub bytes: u32,
    /// Bytes of the gap.
    pub skip: u32,
    /// The key of the memory.
    pub lkey: u32,
}

impl Interleaved {
    /// The segment, which has 16 bits for the bytes and for the distance of turns.
    fn segment(&self) -> Result<[u64; 2], PostError> {
        let stride = self.bytes.checked_add(self.skip);
        let stride = stride.and_then(|stride| u16::try_from(stride).ok());
        let stride = stride.ok_or(PostError::MessageTooLong)?;
        // The bytes are no more than the distance.
        let lengths = u32::from(stride) << 16 | self.bytes;
        Ok([words(lengths, self.lkey), self.addr.to_be()])
    }
}

impl KeyLayout<'_> {
    /// Elements in the work request.
    fn elements(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Interleaved { parts, .. } => parts.len() + 1,
        }
    }

    /// Bytes of the view.
    fn length(&self) -> u64 {
        match self {
            Self::List(list) => list.iter().map(|sge| u64::from(sge.length)).sum(),
            Self::Interleaved { repeat, parts } => {
                let turn: u64 = parts.iter().map(|part| u64::from(part.bytes)).sum();
                turn * u64::from(*repeat)
            }
        }
    }
}

impl SendQueue {
    /// Elements that a layout may have; an interleaved one has one more than parts.
    pub fn max_layout(&self) -> u32 {
        match self.work.send.keys {
            KeyChanges::Layouts => self.longest_request().saturating_sub(LEADING_SEGMENTS) / 4 * 4,
            _ => 0,
        }
    }

    /// Adds a work request that changes an indirect key. Its completion has the opcode
    /// `IBV_WC_DRIVER1`.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] if the queue was not made for it,
    /// [`PostError::TooManySges`], [`PostError::Full`]; [`PostError::MessageTooLong`] for
    /// a part of more than 64 KiB with its gap.
    pub fn push_layout(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        change: &LayoutChange<'_>,
    ) -> Result<(), PostError> {
        /// The operation of an interleaved layout.
        const REPEAT: u32 = 0x400;
        if self.work.send.keys != KeyChanges::Layouts {
            return Err(PostError::BadOperation);
        }
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let count = change.layout.map_or(0, |layout| layout.elements());
        if count > self.max_layout() as usize {
            return Err(PostError::TooManySges);
        }
        let padded = (count as u32).next_multiple_of(4);
        let mut changes = umr_mask::FREE | umr_mask::MKEY;
        let mut key = KeySegment {
            qpn_mkey: (ANY_QP | change.key & VARIANT).to_be(),
            ..KeySegment::default()
        };
        if let Some(access) = change.access {
            changes |= RIGHTS;
            key.access_flags = rights(access);
        }
        if let Some(layout) = change.layout {
            // First, since it bounds the length.
            if let KeyLayout::Interleaved { parts, .. } = layout {
                parts.iter().try_for_each(|part| part.segment().map(drop))?;
            }
            changes |= umr_mask::LEN;
            key.len = layout.length().to_be();
        }
        let update = UmrSegment {
            flags: umr_flag::INLINE,
            klm_octowords: (padded as u16).to_be(),
            mkey_mask: changes.to_be(),
            ..UmrSegment::default()
        };
        // SAFETY: 48 bytes without padding are three segments.
        let update: [[u64; 2]; 3] = unsafe { std::mem::transmute(update) };
        // SAFETY: 64 bytes without padding are four.
        let key: [[u64; 2]; 4] = unsafe { std::mem::transmute(key) };
        let format = &self.formats[Opcode::BIND_MW.0 as usize];
        let named = SendWr {
            imm_or_key: change.key,
            ..SendWr::new(wr_id, Opcode::BIND_MW, flags)
        };
        let control = self.control_slow(format, &named, padded);
        let mut to = self.writer();
        to.put(control);
        (update.into_iter().chain(key)).for_each(|part| to.put(part));
        match change.layout {
            None => {}
            Some(KeyLayout::List(list)) => {
                list.iter().for_each(|sge| to.put(element(sge, sge.length)));
            }
            Some(KeyLayout::Interleaved { repeat, parts }) => {
                let turn = parts
                    .iter()
                    .fold(0u32, |sum, part| sum.wrapping_add(part.bytes));
                to.put([words(turn, REPEAT), words(repeat, parts.len() as u32)]);
                for part in parts {
                    to.put(part.segment()?);
                }
            }
        }
        (count as u32..padded).for_each(|_| to.put([0; 2]));
        let second = self.next.wrapping_add(1);
        let blocks = (LEADING_SEGMENTS + padded).div_ceil(PER_BLOCK);
        self.advance(self.next, control[0], wr_id, blocks);
        self.work
            .sends
            .note(second, opcode::KEY_LAYOUT.into(), self.wr_count);
        self.fence = format.fence_after;
        Ok(())
    }
}
