//! Work requests that configure indirect memory keys: access rights, and the memory that
//! they map.
//!
//! The segments are those of a bind ([`super::keys`]), with as many elements as the
//! layout has, filled up to whole blocks.

use std::mem::offset_of;

use uverbs::{SendFlags, Sge};

use super::keys::{ANY_QP, LEADING_SEGMENTS, RIGHTS, VARIANT, rights};
use super::{PER_BLOCK, Segments, SendQueue, element, words};
use crate::abi::{
    CONTROL_CQ_UPDATE, CONTROL_SMALL_FENCE, KeySegment, UmrSegment, opcode as device,
};
use crate::abi::{umr_flag, umr_mask};
use crate::operation::OperationFormat;
use crate::protection::ProtectionChange;
use crate::wc::opcode;
use crate::{KeyProtection, PostError};

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

/// The memory that an indirect key maps. Its addresses begin at 0.
#[derive(Clone, Copy, Debug)]
pub enum KeyLayout<'a> {
    /// A list of elements, one after the other.
    List(&'a [Sge]),
    /// Interleaved parts: a stretch of each part in turn, repeatedly.
    Interleaved {
        /// The number of repetitions.
        repeat: u32,
        /// The parts.
        parts: &'a [Interleaved],
    },
}

/// A part of an interleaved layout: a number of bytes per repetition, then a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Interleaved {
    /// The first byte.
    pub addr: u64,
    /// Bytes per repetition.
    pub bytes: u32,
    /// Bytes of the gap.
    pub skip: u32,
    /// The key of the memory.
    pub lkey: u32,
}

impl Interleaved {
    /// Distance of repetitions in bytes; the segment has 16 bits for it.
    fn stride(&self) -> u64 {
        u64::from(self.bytes) + u64::from(self.skip)
    }

    fn segment(&self) -> [u64; 2] {
        // The bytes do not exceed the stride.
        let lengths = (self.stride() as u32) << 16 | self.bytes;
        [words(lengths, self.lkey), self.addr.to_be()]
    }
}

impl KeyLayout<'_> {
    /// Elements in the work request.
    #[inline]
    pub fn elements(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Interleaved { parts, .. } => parts.len() + 1,
        }
    }

    /// Bytes of the key.
    #[inline]
    fn bytes(&self) -> u64 {
        match *self {
            Self::List(list) => list.iter().map(|sge| u64::from(sge.length)).sum(),
            Self::Interleaved { repeat, parts } => repetition_bytes(parts) * u64::from(repeat),
        }
    }
}

/// Bytes of one repetition.
#[inline]
fn repetition_bytes(parts: &[Interleaved]) -> u64 {
    parts.iter().map(|part| u64::from(part.bytes)).sum()
}

impl SendQueue {
    /// Maximum elements of a layout; an interleaved one has one more element than parts. 0 if
    /// the queue was not created for layouts.
    pub fn max_layout(&self) -> u32 {
        self.max_layout
    }

    /// Adds a work request that changes an indirect key. Its completion has the opcode
    /// `IBV_WC_DRIVER1`.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] if the queue was not created for it,
    /// [`PostError::TooManySges`], [`PostError::Full`]; [`PostError::MessageTooLong`] for
    /// a part of more than 64 KiB with its gap.
    // Without `always` the change is passed in memory: 12 stores, which posting waits for.
    #[inline(always)]
    pub fn push_layout(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        change: &LayoutChange<'_>,
    ) -> Result<(), PostError> {
        self.push_with(wr_id, flags, change, None)
    }

    /// [`SendQueue::push_layout`] of a key with signatures or encryption. One with
    /// signatures takes up to three work requests, of which the last is signalled.
    ///
    /// # Errors
    /// As there; [`PostError::BadOperation`] for protection that is impossible.
    #[cold]
    #[inline(never)]
    pub fn push_protected(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        change: &LayoutChange<'_>,
        protection: &mut KeyProtection,
    ) -> Result<(), PostError> {
        if self.max_layout == 0 {
            return Err(PostError::BadOperation);
        }
        let length = change.layout.as_ref().map(KeyLayout::bytes);
        let extra = protection.change(length)?;
        let psvs = extra.psvs.iter().flatten().count();
        let free = self.capacity - self.wr_count.wrapping_sub(self.queues.sends.completed());
        if free <= psvs as u32 {
            return Err(PostError::Full);
        }
        let silent = flags & !SendFlags::SIGNALED;
        self.push_with(wr_id, flags, change, Some(&extra))?;
        for (n, (psv, value)) in extra.psvs.into_iter().flatten().enumerate() {
            let flags = if n + 1 == psvs { flags } else { silent };
            self.push_psv(wr_id, flags, psv, value);
        }
        Ok(())
    }

    /// Adds a work request that sets a PSV; there is room.
    fn push_psv(&mut self, wr_id: u64, flags: SendFlags, psv: u32, value: u64) {
        const FORMAT: OperationFormat = OperationFormat {
            control_word: (device::SET_PSV as u64) << 32 | 2,
            ..OperationFormat::NONE
        };
        let flags = self.fenced_flags(flags);
        let control = self.control(self.next, &FORMAT, 0, flags, 0);
        let mut to = self.writer();
        to.put(control);
        to.put([words(psv, 0), value.to_be()]);
        self.advance(self.next, control[0], wr_id, 1);
        self.fence = CONTROL_SMALL_FENCE;
    }

    // `always` as of `push_layout`.
    #[inline(always)]
    fn push_with(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        change: &LayoutChange<'_>,
        extra: Option<&ProtectionChange>,
    ) -> Result<(), PostError> {
        /// The operation of an interleaved layout.
        const REPEAT: u32 = 0x400;
        let change_to = |length| (change.key, change.access, length);
        match change.layout {
            None => self.push_change(wr_id, flags, change_to(None), 0, extra, |_| ()),
            Some(KeyLayout::List(list)) => {
                let change = change_to(Some(KeyLayout::List(list).bytes()));
                self.push_change(wr_id, flags, change, list.len(), extra, |to| {
                    let segment = |sge: &Sge| element(sge, sge.length);
                    // A block at a time: 25 instructions of four elements.
                    let mut blocks = list.chunks_exact(PER_BLOCK as usize);
                    for block in &mut blocks {
                        to.put_each(|n| segment(&block[n]));
                    }
                    (blocks.remainder().iter()).for_each(|sge| to.put(segment(sge)));
                })
            }
            Some(KeyLayout::Interleaved { repeat, parts }) => {
                let strides = parts.iter().fold(0, |all, part| all | part.stride());
                if strides > u16::MAX.into() {
                    return Err(PostError::MessageTooLong);
                }
                let turn = repetition_bytes(parts);
                let change = change_to(Some(turn * u64::from(repeat)));
                self.push_change(wr_id, flags, change, parts.len() + 1, extra, |to| {
                    to.put([
                        words(turn as u32, REPEAT),
                        words(repeat, parts.len() as u32),
                    ]);
                    parts.iter().for_each(|part| to.put(part.segment()));
                })
            }
        }
    }

    /// [`SendQueue::push_layout`] of a key, its rights and its length. `put` writes the
    /// elements.
    // Without `always` a single function for all layouts checks the kind of each part.
    #[inline(always)]
    fn push_change(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        (key, access, length): (u32, Option<u32>, Option<u64>),
        elements: usize,
        extra: Option<&ProtectionChange>,
        put: impl FnOnce(&mut Segments),
    ) -> Result<(), PostError> {
        const FORMAT: OperationFormat = OperationFormat {
            control_word: (device::UMR as u64) << 32 | LEADING_SEGMENTS as u64,
            ..OperationFormat::NONE
        };
        if elements > self.max_layout as usize || self.max_layout == 0 {
            return Err(match self.max_layout {
                0 => PostError::BadOperation,
                _ => PostError::TooManySges,
            });
        }
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let padded = (elements as u32 + (PER_BLOCK - 1)) & !(PER_BLOCK - 1);
        // Without protection all of this is constant.
        let formats = extra.map_or(&[][..], ProtectionChange::formats);
        if !formats.is_empty() && padded as usize + formats.len() > self.max_layout as usize {
            return Err(PostError::TooManySges);
        }
        let mask = |changes: bool, mask: u64| if changes { mask } else { 0 };
        let changes = umr_mask::FREE
            | umr_mask::MKEY
            | extra.map_or(0, ProtectionChange::mask)
            | mask(access.is_some(), RIGHTS)
            | mask(length.is_some(), umr_mask::LEN);
        let at = self.next;
        let mut flags = self.fenced_flags(flags);
        if extra.is_some_and(ProtectionChange::sets_psvs) {
            flags &= !CONTROL_CQ_UPDATE;
        }
        let format_segments = formats.len() as u32;
        let control = self.control(at, &FORMAT, padded + format_segments, flags, key.to_be());
        let mut to = self.writer();
        // Before the segments are written, so that fewer values are live meanwhile.
        let blocks = (LEADING_SEGMENTS + padded + format_segments) / PER_BLOCK;
        self.advance(at, control[0], wr_id, blocks);
        let second = at.wrapping_add(1);
        (self.queues.sends).note(second, opcode::KEY_LAYOUT.into(), self.wr_count);
        self.fence = CONTROL_SMALL_FENCE;
        // `UmrSegment`, then `KeySegment`.
        let flags = u32::from(umr_flag::INLINE) << 24;
        let update = words(flags, padded << 16 | format_segments);
        to.put_block([control, [update, changes.to_be()], [0; 2], [0; 2]]);
        let rights = u32::from(rights(access.unwrap_or(0))) << 8;
        let length = length.unwrap_or(0).to_be();
        let key = words(rights, ANY_QP | key & VARIANT);
        let protection = words(0, extra.map_or(0, ProtectionChange::key_flags));
        to.put_block([[key, protection], [0, length], [0; 2], [0; 2]]);
        put(&mut to);
        (elements as u32..padded).for_each(|_| to.put([0; 2]));
        formats.iter().for_each(|segment| to.put(*segment));
        Ok(())
    }
}

const _: () = {
    assert!(LEADING_SEGMENTS == 2 * PER_BLOCK);
    assert!(offset_of!(UmrSegment, flags) == 0 && offset_of!(UmrSegment, klm_octowords) == 4);
    assert!(offset_of!(UmrSegment, mkey_mask) == 8);
    assert!(offset_of!(KeySegment, access_flags) == 2 && offset_of!(KeySegment, qpn_mkey) == 4);
    assert!(offset_of!(KeySegment, len) == 24);
};
