//! What is done to a completion queue besides reading it: queue pairs come and
//! go, and its entries move to other memory.

use std::sync::Arc;

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode};
use crate::work::QueueMemory;
use crate::{CompletionRing, CreateError, Role, Work};

impl CompletionRing {
    /// Completions of `work` will be found here. Before its queue pair can
    /// have any.
    ///
    /// # Errors
    /// [`CreateError::NoMemory`].
    pub fn attach(&mut self, work: &Arc<Work>, role: Role) -> Result<(), CreateError> {
        self.directory.insert(work, role)
    }

    /// Takes out what completions of `work` are still here, and forgets it.
    /// After its queue pair is gone.
    pub fn detach(&mut self, work: &Work) {
        self.clean(work);
        self.directory.remove(work.user_index());
    }

    /// Takes out what completions of `work` are still here; the others stay,
    /// in order. After its queue pair is gone, or reset.
    pub fn clean(&mut self, work: &Work) {
        let user_index = work.user_index();
        let first = self.position();
        let mut end = first;
        while end.wrapping_sub(first) < self.capacity() && self.written(end).is_some() {
            end = end.wrapping_add(1);
        }
        // From the last to the first: those that stay move up.
        let (mut from, mut to) = (end, end);
        while from != first {
            from = from.wrapping_sub(1);
            // SAFETY: an entry that the device has written, and that is not
            // consumed.
            let cqe = unsafe { self.slot(from).read() };
            if cqe.user_index() == user_index {
                if let Some(shared) = &work.shared
                    && cqe.is_receive()
                {
                    let slot = u16::from_be(cqe.wqe_counter);
                    if shared.find(slot).is_some() {
                        shared.free(slot);
                    }
                }
                continue;
            }
            to = to.wrapping_sub(1);
            if to != from {
                // The place keeps its owner bit: it belongs to the round.
                let slot = self.slot(to);
                // SAFETY: as above, this side's.
                unsafe {
                    let owner = slot.read().op_own & CQE_OWNER;
                    slot.write(Cqe {
                        op_own: cqe.op_own & !CQE_OWNER | owner,
                        ..cqe
                    });
                }
            }
        }
        if to != first {
            self.go_on_at(to);
        }
    }

    /// Goes on in other memory, of `1 << log2` entries, to which the device has
    /// been told to write: what is unread moves there. Whether the old entries
    /// have the mark by which the device ends them; without it, what was there
    /// has been moved all the same.
    pub(crate) fn move_to(&mut self, memory: QueueMemory, log2: u32) -> bool {
        let first = self.position();
        let mut from = first;
        let mut ended = false;
        while from.wrapping_sub(first) < self.capacity() {
            let Some(entry) = self.written(from) else {
                break;
            };
            // SAFETY: an entry that the device has written, and that is not
            // consumed.
            let cqe = unsafe { entry.read() };
            if cqe.opcode() == cqe_opcode::RESIZE_CQ {
                ended = true;
                break;
            }
            // The mark takes a place of its own, so all others move on by one.
            from = from.wrapping_add(1);
            let round = (from >> log2) as u8 & CQE_OWNER;
            let slot = (from & ((1 << log2) - 1)) as usize;
            // SAFETY: one of the new entries, by the mask. What is not consumed
            // is this side's: the device has been told that there is room for
            // it, and for no more.
            unsafe {
                memory.entries().cast::<Cqe>().add(slot).write(Cqe {
                    op_own: cqe.op_own & !CQE_OWNER | round,
                    ..cqe
                });
            }
        }
        self.go_on_in(memory, log2, first.wrapping_add(1));
        ended
    }
}
