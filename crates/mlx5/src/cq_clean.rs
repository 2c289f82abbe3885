//! Attaching and detaching queue pairs, removing their CQEs, moving CQEs in a
//! resize.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode};
use crate::cqe::{CqeRef, is_receive};
use crate::memory::Entries;
use crate::qp_table::user_index;
use crate::tags::{may_be_tagged, takes_receive};
use crate::{CqeRing, CreateError, QpQueues, Role};

impl CqeRing {
    /// Adds a queue pair to the QP table, before it can have completions.
    ///
    /// # Errors
    /// [`CreateError::NoMemory`].
    pub fn attach(&mut self, queues: &Arc<QpQueues>, role: Role) -> Result<(), CreateError> {
        self.qps.insert(queues, role)
    }

    /// Removes the unread completions of a destroyed queue pair, and its entry in
    /// the QP table.
    pub fn detach(&mut self, queues: &QpQueues) {
        self.clean(queues);
        self.qps.remove(queues.user_index());
    }

    /// Removes the unread completions of a queue pair that was destroyed or
    /// reset; the others stay, in order.
    pub fn clean(&mut self, queues: &QpQueues) {
        if self.is_direct {
            return;
        }
        self.write_out();
        let first = self.position();
        let mut end = first;
        while end.wrapping_sub(first) < self.capacity() && self.written(end).is_some() {
            end = end.wrapping_add(1);
        }
        // From the last to the first: CQEs that stay move towards the end.
        let (mut from, mut to) = (end, end);
        while from != first {
            from = from.wrapping_sub(1);
            // SAFETY: it is an entry of this ring's.
            let cqe = unsafe { CqeRef::new(self.slot(from), true) };
            let op_own = cqe.copy().op_own;
            // A wrong signature names a key instead.
            let is_completion = op_own >> 4 != cqe_opcode::SIG_ERR;
            if is_completion && user_index(cqe.uidx_field()) == queues.user_index() {
                if let Some(shared) = &queues.shared {
                    let tagged = shared.has_tags() && may_be_tagged(cqe, op_own);
                    if is_receive(op_own) && (!tagged || takes_receive(cqe)) {
                        let mut receives = shared.enter();
                        // A receive that was posted again is not completed.
                        if !cqe.is_page_fault(op_own) || !receives.post_again(cqe.wqe_counter()) {
                            receives.take(cqe.wqe_counter());
                        }
                    }
                }
                continue;
            }
            to = to.wrapping_sub(1);
            if to != from {
                // The slot keeps its owner bit, which belongs to the round.
                let round = self.round(to);
                // SAFETY: the device does not own either entry.
                unsafe { self.copy_entry(self.slot(from), self.slot(to), round) };
            }
        }
        if to != first {
            self.resume_at(to);
        }
    }

    /// Moves unread CQEs to new memory of `1 << log2` entries, into which the
    /// device writes from now on. Returns whether the resize CQE, which ends the
    /// old entries, was found; the CQEs are moved in either case.
    pub(crate) fn move_to(&mut self, memory: Entries, log2: u32) -> bool {
        self.write_out();
        let format = self.format();
        let fields = Self::fields(&memory, format);
        let first = self.position();
        let mut from = first;
        let mut ended = false;
        while from.wrapping_sub(first) < self.capacity() {
            let Some((_, op_own)) = self.written(from) else {
                break;
            };
            if op_own >> 4 == cqe_opcode::RESIZE_CQ {
                ended = true;
                break;
            }
            let entry = self.slot(from);
            // The resize CQE counts as an entry, so all others move on by one.
            from = from.wrapping_add(1);
            let round = (from >> log2) as u8 & CQE_OWNER;
            let slot = (from & ((1 << log2) - 1)) as usize;
            // SAFETY: one of the new entries, by the mask. The device does not write to entries
            // that are not released to it.
            unsafe {
                let to = fields.add(slot << format.shift).cast();
                self.copy_entry(entry, to, round);
            }
        }
        self.resume_in(memory, log2, first.wrapping_add(1));
        ended
    }

    /// Copies an entry to a slot of round `round`.
    ///
    /// # Safety
    /// Both are entries of this format, the latter writable.
    unsafe fn copy_entry(&self, from: NonNull<Cqe>, to: NonNull<Cqe>, round: u8) {
        let (bytes, before) = (self.format().bytes(), self.format().before());
        // SAFETY: whole entries, as the caller says.
        unsafe {
            let (from, to) = (from.cast::<u8>().sub(before), to.cast::<u8>().sub(before));
            to.copy_from(from, bytes);
            let owner = to.add(before + offset_of!(Cqe, op_own));
            owner.write(owner.read() & !CQE_OWNER | round);
        }
    }
}
