//! Work requests that change a list of tags.

use uverbs::Sge;

use super::{BLOCK, PER_BLOCK, SendQueue, element};
use crate::PostError;
use crate::abi::{INVALID_LKEY, TagSegment, opcode};
use crate::operation::OperationFormat;

/// Segments of a work request, without the tag's memory.
const SEGMENTS: u32 = 3;

impl SendQueue {
    /// Adds a change of tags to the batch, with the memory of an added tag, if it has any.
    /// Returns its block.
    ///
    /// # Errors
    /// [`PostError::Full`].
    pub(crate) fn push_tag(
        &mut self,
        wr_id: u64,
        change: TagSegment,
        memory: Option<Option<Sge>>,
    ) -> Result<u32, PostError> {
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let format = OperationFormat {
            control_word: u64::from(opcode::TAG_MATCHING) << 32 | u64::from(SEGMENTS),
            ..OperationFormat::NONE
        };
        // The tag list tracks its completion.
        let control = self.control(self.next, &format, memory.is_some().into(), 0, 0);
        // SAFETY: 32 bytes without padding are two segments.
        let change: [[u64; 2]; 2] = unsafe { std::mem::transmute(change) };
        let mut to = self.writer();
        to.put(control);
        change.into_iter().for_each(|part| to.put(part));
        match memory {
            Some(Some(sge)) => to.put(element(&sge, sge.length)),
            Some(None) => to.put(element(
                &Sge {
                    lkey: INVALID_LKEY,
                    ..Sge::default()
                },
                0,
            )),
            None => {}
        }
        let block = (self.offset(self.next) / BLOCK) as u32;
        const { assert!(SEGMENTS < PER_BLOCK) };
        self.advance(self.next, control[0], wr_id, 1);
        // Marked: only the tag list completes it.
        self.queues.sends.post_marked(block, wr_id, self.wr_count);
        Ok(block)
    }

    /// Completes the work request in `block`, and all before it.
    pub(crate) fn complete(&self, block: u32) {
        if let Some(found) = self.queues.sends.find_marked(block) {
            self.queues.sends.complete(found);
        }
    }
}
