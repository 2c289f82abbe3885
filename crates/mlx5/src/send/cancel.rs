//! Cancelling posted work requests of a queue that has stopped.

use std::mem::offset_of;

use super::{PER_BLOCK, SEGMENTS, SendQueue};
use crate::PostError;
use crate::abi::{ControlSegment, opcode};

impl SendQueue {
    /// Replaces the work requests with identifier `wr_id` by NOPs, from the block `from` on,
    /// at which the device has stopped. Their completions report the original opcodes.
    /// Returns their number.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] if the queue pair has no signature pipelining, or no work
    /// request begins at `from`.
    pub fn cancel(&mut self, from: u16, wr_id: u64) -> Result<u32, PostError> {
        const OPCODE: usize = offset_of!(ControlSegment, opmod_idx_opcode);
        const COUNT: usize = offset_of!(ControlSegment, qpn_ds);
        const IMMEDIATE: usize = offset_of!(ControlSegment, imm);
        const INDEX: u32 = 0xff_ff00;
        if !self.queues.sig_pipelining {
            return Err(PostError::BadOperation);
        }
        let end = self.published_next;
        let mut at = end.wrapping_sub(u32::from((end as u16).wrapping_sub(from)));
        let mut cancelled = 0;
        while at != end {
            let sends = &self.queues.sends;
            let found = sends.find(at).or_else(|| sends.find_marked(at));
            let found = found.ok_or(PostError::BadOperation)?;
            let block = self.block(at).cast::<u32>();
            let word = |offset: usize| {
                // SAFETY: a word of the block's first segment.
                u32::from_be(unsafe { block.byte_add(offset).read() })
            };
            let (first, segments) = (word(OPCODE), word(COUNT) & SEGMENTS);
            if found.wr_id == wr_id {
                // The device has not begun the work request. The poller reads the original
                // opcode from the immediate field after completion; a NOP has no immediate data.
                // SAFETY: as above.
                unsafe {
                    if first as u8 != opcode::NOP {
                        let original = u32::from(first as u8).to_be();
                        block.byte_add(IMMEDIATE).write(original);
                    }
                    let nop = first & INDEX | u32::from(opcode::NOP);
                    block.byte_add(OPCODE).write(nop.to_be());
                }
                cancelled += 1;
            }
            let blocks = segments.div_ceil(PER_BLOCK).max(1);
            if blocks > end.wrapping_sub(at) {
                return Err(PostError::BadOperation);
            }
            at = at.wrapping_add(blocks);
        }
        Ok(cancelled)
    }
}
