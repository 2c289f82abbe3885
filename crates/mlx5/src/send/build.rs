//! The quick way for work requests that are told piece by piece: sends, writes
//! and reads on a connection, of no data, one element, or inline data that is
//! set after they have become part of the batch.
//!
//! Such a work request is complete as soon as it is built, and after each
//! setter. Whatever a setter here refuses is as it was before, for
//! [`SendQueue::last`] and the setters of [`super::Wqe`].

use ring::write_pair;
use uverbs::Sge;

use super::copy::{segments_of, write_long};
use super::one::{OPERATIONS, Short};
use super::{Built, PER_BLOCK, SEGMENTS, SendQueue};
use crate::abi::{BLOCK, SEGMENT, opcode};
use crate::operation::Form;
use crate::recv::write_segment;
use crate::{Opcode, SendFlags};

/// What an operation has besides its data. What it does not have is ignored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Besides {
    /// Immediate data, as it goes on the wire.
    pub immediate: u32,
    /// Remote memory.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
}

impl SendQueue {
    /// Whether [`SendQueue::build`] has operations here: on connections.
    pub fn builds(&self) -> bool {
        self.quick != 0
    }

    /// Adds a work request without data to the batch: as [`SendQueue::open`]
    /// and [`SendQueue::accept`]. False if the queue is full, the operation
    /// is none that is built here, or a fence is before it: then nothing was
    /// done, and it is theirs.
    #[inline(always)]
    pub fn build<const OPERATION: u32>(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        besides: Besides,
    ) -> bool {
        let short = const {
            match OPERATION {
                // What has another form is left to `open`.
                0..16 => OPERATIONS[OPERATION as usize],
                _ => Short::NONE,
            }
        };
        let usual = short.before != 0 && self.quick >> OPERATION & 1 != 0 && self.fence == 0;
        if !usual || !self.has_room(self.marked) {
            return false;
        }
        let at = self.next;
        let offset = self.offset(at);
        // SAFETY: a block of the queue that is not the device's: there is room
        // for a work request.
        let control = unsafe { self.blocks.add(offset).cast::<u64>() };
        let first = self.first(at, &short, 0);
        let second = self.second(flags, besides.immediate & short.immediate);
        // SAFETY: as above; the first two segments are in the block.
        unsafe {
            control.write(first.to_be());
            control.add(1).write(second);
            if short.is_remote() {
                let key = u64::from(besides.rkey) << 32;
                write_pair(control.add(2), besides.remote_addr.to_be(), key.to_be());
            }
        }
        self.marked = self.marked.wrapping_add(1);
        self.note(offset, wr_id, self.marked);
        self.accepted = at;
        self.next = at.wrapping_add(1);
        self.built = Some(Built { control, first });
        true
    }

    /// Sets the data of the batch's last work request to one element. False,
    /// and nothing was done, if that was not built here, or the element is
    /// empty or longer than any.
    #[inline(always)]
    pub fn set_one(&mut self, sge: Sge) -> bool {
        let Some(built) = self.built else {
            return false;
        };
        if sge.length.wrapping_sub(1) >= self.longest {
            return false;
        }
        let before = built.first as u32 & SEGMENTS;
        let (data, first) = (before as usize * SEGMENT / 8, built.first + 1);
        // SAFETY: `before` is 1 or 2, so the segment after it is in the block,
        // which is this batch's.
        unsafe {
            built.control.write(first.to_be());
            write_segment(built.control.add(data).cast(), &sge);
        }
        // However long it was.
        self.next = self.accepted.wrapping_add(1);
        true
    }

    /// Sets the data of the batch's last work request to a copy of `length`
    /// bytes. False, and nothing was done, if that was not built here, or reads,
    /// or there are none, too many, or so many that they do not lie in one piece.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    pub unsafe fn set_inline(&mut self, from: *const u8, length: usize) -> bool {
        let Some(built) = self.built else {
            return false;
        };
        let before = built.first as u32 & SEGMENTS;
        let reads = (built.first >> 32) as u8 == opcode::RDMA_READ;
        if reads || length.wrapping_sub(1) >= self.max_inline as usize {
            return false;
        }
        let data = before as usize * SEGMENT;
        if self.offset(self.accepted) + data + 4 + length > self.mask as usize + 1 {
            return false;
        }
        let length = length as u32;
        let more = segments_of(length);
        let blocks = (before + more).div_ceil(PER_BLOCK);
        self.next = self.accepted.wrapping_add(blocks);
        // SAFETY: not over the end of the queue, and no more than a work request
        // has room for; the bytes are readable, as the caller says.
        unsafe {
            built.control.write((built.first + u64::from(more)).to_be());
            // Last, so that a caller can end in it.
            write_long(built.control.byte_add(data), from, length);
        }
        true
    }

    /// Where a block is, in bytes.
    #[inline(always)]
    pub(super) fn offset(&self, at: u32) -> usize {
        (at.wrapping_mul(BLOCK as u32) & self.mask) as usize
    }

    /// The batch's last work request was built here: what the setters of
    /// [`super::Wqe`] know of it.
    #[cold]
    pub(super) fn reopen(&mut self, built: Built) {
        let before = built.first as u32 & SEGMENTS;
        // SAFETY: its control segment, which is this batch's.
        let now = u64::from_be(unsafe { built.control.read() });
        let opcode = (built.first >> 32) as u8;
        self.open.at = self.accepted;
        self.open.data_at = before;
        self.open.segments = now as u32 & SEGMENTS;
        self.open.form = Form {
            opcode,
            remote: before == 2,
            reads: opcode == opcode::RDMA_READ,
            before: before as u8 - 1,
            ..Form::NONE
        };
        self.built = None;
    }
}

const _: () = assert!(Opcode::SEND.0 < 16);
