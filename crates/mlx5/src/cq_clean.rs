//! Attaching, detaching and cleaning up after queue pairs; moving the entries
//! when a completion queue is resized.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode};
use crate::cqe::{CqeRef, is_receive};
use crate::memory::Entries;
use crate::qp_table::user_index;
use crate::{CompletionRing, CreateError, Role, Work};

impl CompletionRing {
    /// Completions of `work` will be found here. Before its queue pair can
    /// have any.
    ///
    /// # Errors
    /// [`CreateError::NoMemory`].
    pub fn attach(&mut self, work: &Arc<Work>, role: Role) -> Result<(), CreateError> {
        self.qps.insert(work, role)
    }

    /// Takes out what completions of `work` are still here, and forgets it.
    /// After its queue pair is gone.
    pub fn detach(&mut self, work: &Work) {
        self.clean(work);
        self.qps.remove(work.user_index());
    }

    /// Takes out what completions of `work` are still here; the others stay,
    /// in order. After its queue pair is gone, or reset.
    pub fn clean(&mut self, work: &Work) {
        self.write_out();
        let first = self.position();
        let mut end = first;
        while end.wrapping_sub(first) < self.capacity() && self.written(end).is_some() {
            end = end.wrapping_add(1);
        }
        // From the last to the first: those that stay move up.
        let (mut from, mut to) = (end, end);
        while from != first {
            from = from.wrapping_sub(1);
            // SAFETY: it is an entry of this ring's.
            let cqe = unsafe { CqeRef::new(self.slot(from), true) };
            let op_own = cqe.copy().op_own;
            if user_index(cqe.uidx_field()) == work.user_index() {
                if let Some(shared) = &work.shared
                    && is_receive(op_own)
                {
                    let mut receives = shared.enter();
                    // One that was given back is not done.
                    if !cqe.is_page_fault(op_own) || !receives.post_again(cqe.wqe_counter()) {
                        receives.take(cqe.wqe_counter());
                    }
                }
                continue;
            }
            to = to.wrapping_sub(1);
            if to != from {
                // The place keeps its owner bit: it belongs to the round.
                let round = self.round(to);
                // SAFETY: both entries are this side's.
                unsafe { self.copy_entry(self.slot(from), self.slot(to), round) };
            }
        }
        if to != first {
            self.resume_at(to);
        }
    }

    /// Goes on in other memory, of `1 << log2` entries, to which the device has
    /// been told to write: what is unread moves there. Whether the old entries
    /// have the mark by which the device ends them; without it, what was there
    /// has been moved all the same.
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
            // The mark takes a place of its own, so all others move on by one.
            from = from.wrapping_add(1);
            let round = (from >> log2) as u8 & CQE_OWNER;
            let slot = (from & ((1 << log2) - 1)) as usize;
            // SAFETY: one of the new entries, by the mask. What is not consumed
            // is this side's: the device has been told that there is room for
            // it, and for no more.
            unsafe {
                let to = fields.add(slot << format.shift).cast();
                self.copy_entry(entry, to, round);
            }
        }
        self.resume_in(memory, log2, first.wrapping_add(1));
        ended
    }

    /// Copies an entry, by its fields, to a place of the round `round`.
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
