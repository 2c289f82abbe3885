//! The quick way for nearly all work requests: sends, writes and reads of one
//! element on a connection.
//!
//! What is unusual is left to [`SendQueue::open`]: nothing is done for it
//! here, so a caller tries this way first and takes the other one then.

use uverbs::Sge;

use super::{MAX_SEGMENT, SendQueue};
use crate::abi::{
    BLOCK, CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED, DataSegment, INLINE_SEGMENT,
    RemoteSegment, SEGMENT, opcode,
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
struct Short {
    opcode: u8,
    /// Segments before the data; 0: not done here.
    before: u8,
    /// Whether it reads, and so has no inline data.
    reads: bool,
    /// All bits, if there is immediate data.
    immediate: u32,
}

/// By the operation's number.
const OPERATIONS: [Short; 16] = {
    let none = Short {
        opcode: 0,
        before: 0,
        reads: false,
        immediate: 0,
    };
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

/// The control segment's bits, by the three lowest flags.
const CONTROL: [u8; 8] = {
    let mut all = [0; 8];
    let mut flags = 0;
    while flags < 8 {
        let set = flags as u32;
        if set & SendFlags::SIGNALED.bits() != 0 {
            all[flags] |= CONTROL_CQ_UPDATE;
        }
        if set & SendFlags::SOLICITED.bits() != 0 {
            all[flags] |= CONTROL_SOLICITED;
        }
        if set & SendFlags::FENCE.bits() != 0 {
            all[flags] |= CONTROL_FENCE;
        }
        flags += 1;
    }
    all
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

    /// # Safety
    /// With `INLINE` the element's memory is readable.
    #[inline(always)]
    unsafe fn push<const INLINE: bool>(&mut self, one: &One<'_>) -> bool {
        let Some(&short) = OPERATIONS.get(one.opcode.0 as usize) else {
            return false;
        };
        let length = one.sge.length;
        let at = self.next;
        let begin = at.wrapping_mul(BLOCK as u32) & self.mask;
        let mark = self.count.wrapping_add(self.batch).wrapping_add(1);
        let before = u32::from(short.before);
        let usual = before != 0
            && self.quick(short.reads)
            && mark.wrapping_sub(self.work.sends.completed()) <= self.capacity
            && length != 0
            && if INLINE {
                // In one piece, not over the end of the queue.
                !short.reads
                    && length <= self.max_inline
                    && begin + before * SEGMENT as u32 + 4 + length <= self.mask
            } else {
                length < MAX_SEGMENT && self.max_sge != 0
            };
        if !usual {
            return false;
        }
        let segments = before
            + if INLINE {
                (4 + length).div_ceil(SEGMENT as u32)
            } else {
                1
            };
        let flags = one.flags.bits();
        let fence = if flags & SendFlags::FENCE.bits() == 0 {
            self.fence
        } else {
            0
        };
        let all = if self.signal_all {
            CONTROL_CQ_UPDATE
        } else {
            0
        };
        let bits = CONTROL[(flags & 7) as usize] | all;
        let control = [
            ((at & 0xffff) << 8 | u32::from(short.opcode)).to_be(),
            (self.qp_num << 8 | segments).to_be(),
            u32::from(bits | fence).to_be(),
            one.immediate & short.immediate,
        ];
        // SAFETY: from `begin` on there is a work request's room that is not
        // the device's, aligned to a block. Three segments lie in its first
        // block; inline data, as was looked at above, in the queue.
        unsafe {
            let to = self.blocks.add(begin as usize);
            to.cast().write(control);
            if before == 2 {
                to.add(SEGMENT).cast().write(RemoteSegment {
                    raddr: one.remote_addr.to_be(),
                    rkey: one.rkey.to_be(),
                    reserved: 0,
                });
            }
            let data = to.add(before as usize * SEGMENT);
            if INLINE {
                data.cast::<u32>().write((length | INLINE_SEGMENT).to_be());
                // By its number alone, as the application gave it.
                let from = std::ptr::with_exposed_provenance::<u8>(one.sge.addr as usize);
                data.as_ptr()
                    .add(4)
                    .copy_from_nonoverlapping(from, length as usize);
            } else {
                data.cast().write(DataSegment {
                    byte_count: length.to_be(),
                    lkey: one.sge.lkey.to_be(),
                    addr: one.sge.addr.to_be(),
                });
            }
        }
        self.work.sends.post(at, one.wr_id, mark);
        self.batch += 1;
        self.fence = 0;
        self.accepted = (at, segments);
        self.next = at.wrapping_add(if INLINE {
            segments.div_ceil(super::PER_BLOCK)
        } else {
            1
        });
        true
    }

    /// Whether the service has the operation.
    #[inline(always)]
    fn quick(&self, reads: bool) -> bool {
        match self.service {
            Service::ReliableConnection => true,
            Service::UnreliableConnection => !reads,
            _ => false,
        }
    }
}
