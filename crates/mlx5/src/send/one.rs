//! The quick way for nearly all work requests: sends, writes and reads of one
//! element on a connection.
//!
//! What is unusual is left to [`SendQueue::open`]: nothing is done for it
//! here, so a caller tries this way first and takes the other one then.

use std::hint::cold_path;

use uverbs::Sge;

use super::{PER_BLOCK, SendQueue};
use crate::abi::{
    CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED, INLINE_SEGMENT, SEGMENT, opcode,
};
use crate::{Opcode, SendFlags, Service};

/// A work request of one element. What the operation does not have is ignored.
#[derive(Clone, Copy, Debug)]
pub struct One<'a> {
    /// The identifier.
    pub wr_id: u64,
    /// The operation.
    pub opcode: Opcode,
    /// Its flags.
    pub flags: SendFlags,
    /// Immediate data, as it goes on the wire.
    pub immediate: u32,
    /// Remote memory.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
    /// The element.
    pub sge: &'a Sge,
}

/// How the device has an operation.
#[derive(Clone, Copy)]
pub(super) struct Short {
    opcode: u8,
    /// Segments before the data; 0: not done here.
    pub before: u8,
    /// Whether it reads, and so has no inline data.
    pub reads: bool,
    /// All bits, if there is immediate data.
    pub immediate: u32,
}

impl Short {
    /// Of an operation that is not done here.
    pub const NONE: Self = Self {
        opcode: 0,
        before: 0,
        reads: false,
        immediate: 0,
    };
}

/// By the operation's number.
pub(super) const OPERATIONS: [Short; 16] = {
    let none = Short::NONE;
    let mut all = [none; 16];
    all[Opcode::SEND.0 as usize] = Short {
        opcode: opcode::SEND,
        before: 1,
        ..none
    };
    all[Opcode::SEND_WITH_IMM.0 as usize] = Short {
        opcode: opcode::SEND_IMM,
        before: 1,
        immediate: !0,
        ..none
    };
    all[Opcode::RDMA_WRITE.0 as usize] = Short {
        opcode: opcode::RDMA_WRITE,
        before: 2,
        ..none
    };
    all[Opcode::RDMA_WRITE_WITH_IMM.0 as usize] = Short {
        opcode: opcode::RDMA_WRITE_IMM,
        before: 2,
        immediate: !0,
        ..none
    };
    all[Opcode::RDMA_READ.0 as usize] = Short {
        opcode: opcode::RDMA_READ,
        before: 2,
        reads: true,
        ..none
    };
    all
};

/// The control segment's bits, by the three lowest flags; `all` work requests
/// complete visibly, or those that ask for it.
pub(super) fn control(all: bool) -> [u8; 8] {
    std::array::from_fn(|flags| {
        let flags = SendFlags::from_bits_retain(flags as u32);
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        bit(
            all || flags.contains(SendFlags::SIGNALED),
            CONTROL_CQ_UPDATE,
        ) | bit(flags.contains(SendFlags::SOLICITED), CONTROL_SOLICITED)
            | bit(flags.contains(SendFlags::FENCE), CONTROL_FENCE)
    })
}

const _: () = {
    let three = SendFlags::SIGNALED.bits() | SendFlags::SOLICITED.bits() | SendFlags::FENCE.bits();
    assert!(three == 7);
};

impl SendQueue {
    /// Adds a work request to the batch; false if it is not one of nearly all,
    /// and then nothing was done.
    #[inline(always)]
    pub fn push_one(&mut self, one: &One<'_>) -> bool {
        // SAFETY: no data is read.
        unsafe { self.push::<false>(one) }
    }

    /// As [`SendQueue::push_one`], with the data copied now.
    ///
    /// # Safety
    /// The element's memory is readable.
    #[inline(always)]
    pub unsafe fn push_one_inline(&mut self, one: &One<'_>) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.push::<true>(one) }
    }

    /// Posts a list of one work request: [`SendQueue::begin`],
    /// [`SendQueue::push_one`] and [`SendQueue::publish`] in one. False if it is
    /// not one of nearly all, and then nothing was done.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline(always)]
    pub unsafe fn post_one(&mut self, one: &One<'_>) -> bool {
        // SAFETY: no data is read; as the caller says.
        unsafe { self.post::<false>(one) }
    }

    /// As [`SendQueue::post_one`], with the data copied now.
    ///
    /// # Safety
    /// As there, and the element's memory is readable.
    #[inline(always)]
    pub unsafe fn post_one_inline(&mut self, one: &One<'_>) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.post::<true>(one) }
    }

    /// # Safety
    /// With `INLINE` the element's memory is readable.
    #[inline(always)]
    unsafe fn push<const INLINE: bool>(&mut self, one: &One<'_>) -> bool {
        let (at, mark, fence) = (self.next, self.marked, self.fence);
        // SAFETY: as the caller says.
        let Some(segments) = (unsafe { self.write_one::<INLINE>(one, at, mark, fence) }) else {
            return false;
        };
        self.marked = mark.wrapping_add(1);
        self.no_fence();
        self.accepted = at;
        self.next = at.wrapping_add(blocks::<INLINE>(segments));
        true
    }

    /// # Safety
    /// As for [`SendQueue::publish`]; with `INLINE` the element's memory is
    /// readable.
    #[inline(always)]
    unsafe fn post<const INLINE: bool>(&mut self, one: &One<'_>) -> bool {
        let (at, mark, fence) = (self.posted, self.count, self.fence_posted);
        // SAFETY: as the caller says.
        let Some(segments) = (unsafe { self.write_one::<INLINE>(one, at, mark, fence) }) else {
            return false;
        };
        self.count = mark.wrapping_add(1);
        // No batch is under way.
        self.marked = self.count;
        self.hand_over(at.wrapping_add(blocks::<INLINE>(segments)), 0);
        if segments <= PER_BLOCK {
            let block = self.block(at, 0);
            // SAFETY: one of the queue's.
            unsafe { self.register.get().copy_one(block) };
        } else {
            self.copy_several(at, segments);
        }
        true
    }

    /// Writes a work request that begins at `at`, behind `mark` others, and takes
    /// note of it; how many segments it has. None if it is not one of nearly all.
    ///
    /// # Safety
    /// What is from `at` on is not the device's, as far as there is room. With
    /// `INLINE` the element's memory is readable.
    #[inline(always)]
    unsafe fn write_one<const INLINE: bool>(
        &mut self,
        one: &One<'_>,
        at: u32,
        mark: u32,
        fence: u8,
    ) -> Option<u32> {
        let short = *OPERATIONS.get(one.opcode.0 as usize)?;
        let length = one.sge.length;
        let before = u32::from(short.before);
        let begin = self.offset(at);
        let most = if INLINE {
            self.max_inline
        } else {
            self.longest
        };
        let usual = before != 0
            && self.quick(short.reads)
            && length.wrapping_sub(1) < most
            // In one piece, not over the end of the queue.
            && !(INLINE
                && (short.reads
                    || begin + before as usize * SEGMENT + 4 + length as usize
                        > self.mask as usize + 1))
            && self.has_room(mark);
        if !usual {
            return None;
        }
        let segments = before
            + if INLINE {
                (4 + length).div_ceil(SEGMENT as u32)
            } else {
                1
            };
        let first = self.first(at, short, segments);
        let second = self.second(fence, one.flags, one.immediate & short.immediate);
        // SAFETY: from `begin` on there is a work request's room that is not
        // the device's, aligned to a block. Three segments lie in its first
        // block; inline data, as was looked at above, in the queue.
        unsafe {
            let to = self.blocks.add(begin).cast::<u64>();
            to.write(first.to_be());
            to.add(1).write(second);
            if before == 2 {
                to.add(2).write(one.remote_addr.to_be());
                to.add(3).write((u64::from(one.rkey) << 32).to_be());
            }
            let data = to.add(before as usize * SEGMENT / 8);
            if INLINE {
                data.cast::<u32>().write((length | INLINE_SEGMENT).to_be());
                // By its number alone, as the application gave it.
                let from = std::ptr::with_exposed_provenance::<u8>(one.sge.addr as usize);
                let to = data.cast::<u8>().as_ptr().add(4);
                to.copy_from_nonoverlapping(from, length as usize);
            } else {
                let head = u64::from(length) << 32 | u64::from(one.sge.lkey);
                data.write(head.to_be());
                data.add(1).write(one.sge.addr.to_be());
            }
        }
        self.work.sends.post(at, one.wr_id, mark.wrapping_add(1));
        Some(segments)
    }

    /// The first 8 bytes of a control segment, in this machine's order.
    #[inline(always)]
    pub(super) fn first(&self, at: u32, short: Short, segments: u32) -> u64 {
        let form = u64::from(short.opcode) << 32 | u64::from(segments);
        u64::from(at & 0xffff) << 40 | form | self.qpn
    }

    /// The other 8 bytes, as they are written.
    #[inline(always)]
    pub(super) fn second(&self, fence: u8, flags: SendFlags, immediate: u32) -> u64 {
        let mut bits = self.control[(flags.bits() & 7) as usize];
        if fence != 0 {
            cold_path();
            bits |= fence_unless(fence, flags);
        }
        let (bits, immediate) = (u64::from(u32::from(bits).to_be()), u64::from(immediate));
        // The bytes of the one and then of the other.
        if cfg!(target_endian = "little") {
            immediate << 32 | bits
        } else {
            bits << 32 | immediate
        }
    }

    /// A work request is part of the batch that is none after which there is a
    /// fence.
    #[inline(always)]
    pub(super) fn no_fence(&mut self) {
        if self.fence != 0 {
            cold_path();
            self.fence = 0;
        }
    }

    /// Whether the service has the operation.
    #[inline(always)]
    pub(super) fn quick(&self, reads: bool) -> bool {
        match self.service {
            Service::ReliableConnection => true,
            Service::UnreliableConnection => !reads,
            _ => false,
        }
    }
}

/// The fence bits that a work request has by what was before it, unless it asks
/// for more.
#[inline(always)]
pub(super) fn fence_unless(fence: u8, flags: SendFlags) -> u8 {
    if flags.contains(SendFlags::FENCE) {
        0
    } else {
        fence
    }
}

/// Blocks of a work request: without inline data, one.
#[inline(always)]
fn blocks<const INLINE: bool>(segments: u32) -> u32 {
    if INLINE {
        segments.div_ceil(PER_BLOCK)
    } else {
        1
    }
}
