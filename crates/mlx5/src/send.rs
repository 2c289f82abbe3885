//! The send queue's writer.
//!
//! A batch: [`SendQueue::begin`]; for each work request [`SendQueue::open`],
//! the operation's own fields and its data through [`Wqe`], and
//! [`SendQueue::accept`]; at the end [`SendQueue::publish`] once, which rings
//! too. What was not accepted and published never happened, so a batch is
//! aborted by forgetting it. [`SendQueue::push_one`] is the quick way for a
//! work request of one element.
//!
//! A work request is a row of segments of 16 bytes, in the order control,
//! address (datagrams, XRC), remote memory, atomic operands, data; the queue is a
//! ring of blocks of four. A work request begins with a block and may go on at
//! the ring's beginning; a segment does not straddle the end, inline data may.

pub(crate) mod keys;
mod one;
mod wqe;

pub use keys::{Bind, LONGEST_WINDOW, WindowKind};
pub use one::One;
pub use wqe::Wqe;

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{BlueFlame, DoorbellRecord};

use crate::abi::{
    BLOCK, CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED, ControlSegment, SEGMENT,
};
use crate::context::Register;
use crate::operation::Form;
use crate::{Opcode, PostError, SendFlags, Service, Work};

/// One more than the longest scatter/gather element: its length has 31 bits.
pub const MAX_SEGMENT: u32 = 1 << 31;

/// Segments of a block.
const PER_BLOCK: u32 = (BLOCK / SEGMENT) as u32;

/// A send queue.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates or calls
/// the system; none locks, but [`SendQueue::publish`] on a register that other
/// queues use too.
#[derive(Debug)]
pub struct SendQueue {
    /// Where the blocks are.
    blocks: NonNull<u8>,
    /// One less than the queue's bytes.
    mask: u32,
    /// Blocks that the device has been given, ever; 16 bits of it are told.
    posted: u32,
    /// Work requests that the device has been given, ever.
    count: u32,
    /// Where the next work request of the batch begins, in blocks.
    next: u32,
    /// Work requests of the batch.
    batch: u32,
    /// Fence bits of the next work request; and of the first of the next batch.
    fence: u8,
    fence_posted: u8,
    open: Open,
    /// Where the work request that was accepted last begins, in blocks, and
    /// its segments: the one opened last may have been refused.
    accepted: (u32, u32),
    capacity: u32,
    max_sge: u32,
    max_inline: u32,
    qp_num: u32,
    service: Service,
    /// Every work request completes visibly.
    signal_all: bool,
    record: DoorbellRecord,
    register: Register,
    work: Arc<Work>,
}

/// The work request that was opened last.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Where it begins, in blocks.
    at: u32,
    /// Where its data begins, in segments.
    data_at: u32,
    /// Segments that it has so far.
    segments: u32,
    form: Form,
    wr_id: u64,
}

// SAFETY: the memory belongs to `work`, and is written under `&mut`.
unsafe impl Send for SendQueue {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for SendQueue {}

impl SendQueue {
    /// The writer over a queue pair's send queue, which may have none.
    pub(crate) fn new(work: Arc<Work>, qp_num: u32, signal_all: bool, register: Register) -> Self {
        Self {
            blocks: work.send_at(),
            mask: (work.send.bytes() as u32).saturating_sub(1),
            posted: 0,
            count: 0,
            next: 0,
            batch: 0,
            fence: 0,
            fence_posted: 0,
            open: Open {
                at: 0,
                data_at: 1,
                segments: 1,
                form: Form::NONE,
                wr_id: 0,
            },
            accepted: (0, 0),
            capacity: work.send.capacity,
            max_sge: work.send.max_sge,
            max_inline: work.send.max_inline,
            qp_num,
            service: work.service,
            signal_all,
            record: work.memory.records.record(1),
            register,
            work,
        }
    }

    /// Work requests that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Scatter/gather elements that a work request holds at most.
    #[inline(always)]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Whether work requests may change memory keys ([`crate::QpOptions::keys`]):
    /// not if the device's entries are too short for one.
    pub fn changes_keys(&self) -> bool {
        self.work.send.keys
    }

    /// The queue pair has been reset: starts anew. Its completions have been
    /// taken out before ([`crate::CompletionRing::clean`]).
    pub fn reset(&mut self) {
        (self.posted, self.count, self.next, self.batch) = (0, 0, 0, 0);
        (self.fence, self.fence_posted) = (0, 0);
        self.work.sends.reset();
        self.record.publish(0);
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.next = self.posted;
        self.batch = 0;
        self.fence = self.fence_posted;
    }

    /// Gives the batch up, so that no completion finds anything of it, whatever
    /// the device says. A batch of which nothing was accepted may just be
    /// forgotten.
    #[cold]
    pub fn abandon(&mut self) {
        for block in 0..self.next.wrapping_sub(self.posted) {
            let slot = self.posted.wrapping_add(block);
            self.work.sends.note(slot, 0, self.count);
        }
        self.begin();
    }

    /// Opens a work request for one operation, without data, remote memory or
    /// key so far. Every batch starts with [`SendQueue::begin`].
    ///
    /// # Errors
    /// [`PostError::Full`]: as many are outstanding as the queue holds.
    /// [`PostError::BadOperation`]: the service has no such operation, or the
    /// queue was made without room for it ([`crate::QpOptions`]).
    #[inline(always)]
    pub fn open(
        &mut self,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<Wqe<'_>, PostError> {
        let Some(form) = self.service.form(opcode) else {
            return Err(PostError::BadOperation);
        };
        if form.keys && !self.work.send.keys {
            return Err(PostError::BadOperation);
        }
        let mark = self.count.wrapping_add(self.batch).wrapping_add(1);
        if mark.wrapping_sub(self.work.sends.completed()) > self.capacity {
            return Err(PostError::Full);
        }
        let data_at = 1 + u32::from(form.before);
        self.open = Open {
            at: self.next,
            data_at,
            segments: data_at,
            form,
            wr_id,
        };
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let fence = if flags.contains(SendFlags::FENCE) {
            CONTROL_FENCE
        } else {
            self.fence
        };
        let signaled = self.signal_all || flags.contains(SendFlags::SIGNALED);
        let control = ControlSegment {
            opmod_idx_opcode: ((self.next & 0xffff) << 8 | u32::from(form.opcode)).to_be(),
            // Without the segments, whose number is not known yet.
            qpn_ds: (self.qp_num << 8).to_be(),
            signature: 0,
            dci_stream_channel_id: [0; 2],
            fm_ce_se: bit(signaled, CONTROL_CQ_UPDATE)
                | bit(flags.contains(SendFlags::SOLICITED), CONTROL_SOLICITED)
                | fence,
            imm: 0,
        };
        // SAFETY: a segment of the queue, aligned, that is not the device's:
        // there is room for a work request.
        unsafe { self.segment(0).cast().write(control) };
        if form.keys {
            self.begin_keys(opcode, mark);
        }
        Ok(self.opened())
    }

    /// The work request that was opened last, to go on writing it. Before it is
    /// accepted, or after, if no other was opened since: data may be given then
    /// too.
    #[inline(always)]
    pub fn opened(&mut self) -> Wqe<'_> {
        Wqe { queue: self }
    }

    /// Makes the opened work request part of the batch.
    #[inline(always)]
    pub fn accept(&mut self) {
        self.batch += 1;
        let mark = self.count.wrapping_add(self.batch);
        // Not before: one that is refused is not outstanding.
        self.work.sends.post(self.open.at, self.open.wr_id, mark);
        self.fence = self.open.form.fence_after;
        self.settle();
    }

    /// The work request accepted last in this batch, to set its data
    /// afterwards; none in a batch without any. [`SendQueue::settle`] follows.
    #[inline(always)]
    pub fn last(&mut self) -> Option<Wqe<'_>> {
        (self.batch != 0).then(|| self.opened())
    }

    /// The next work request begins behind what the last one has now.
    #[inline(always)]
    pub fn settle(&mut self) {
        let blocks = self.open.segments.div_ceil(PER_BLOCK);
        self.next = self.open.at.wrapping_add(blocks);
        self.accepted = (self.open.at, self.open.segments);
        // SAFETY: a word of the control segment that `open` has written.
        unsafe {
            let at = self.segment(0).add(offset_of!(ControlSegment, qpn_ds));
            let word = self.qp_num << 8 | self.open.segments;
            at.cast::<u32>().write(word.to_be());
        }
    }

    /// Hands the batch to the device, and rings. Returns whether there was
    /// anything.
    ///
    /// # Safety
    /// The memory that the batch's work requests name stays registered and is
    /// used as the operation demands (not written while it is sent from,
    /// neither read nor written while it is received into) until each has
    /// completed. An error of a caller of verbs, not of this crate, is to
    /// break that; the type system cannot see it from here.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> bool {
        let batch = self.batch;
        if batch == 0 {
            return false;
        }
        self.count = self.count.wrapping_add(batch);
        self.posted = self.next;
        self.batch = 0;
        self.fence_posted = self.fence;
        self.record.publish(self.posted & 0xffff);
        let register: &BlueFlame = self.register.get();
        let (at, segments) = self.accepted;
        let bytes = (segments * SEGMENT as u32) as usize;
        // SAFETY: the control segment of the work request that was accepted
        // last, which is aligned to a block.
        let first = unsafe { self.block(at, 0).read() };
        // A copy that only tells what the doorbell tells is not worth it.
        if batch == 1 && bytes > SEGMENT && bytes <= register.room() {
            let blocks = (0..bytes.div_ceil(BLOCK)).map(|block| self.block(at, block));
            // SAFETY: blocks of the queue.
            unsafe { register.copy(blocks) };
        } else {
            register.ring(first);
        }
        true
    }

    #[inline(always)]
    fn block(&self, at: u32, block: usize) -> NonNull<u64> {
        let offset = at.wrapping_add(block as u32).wrapping_mul(BLOCK as u32) & self.mask;
        // SAFETY: inside the queue, by the mask; with no queue, nothing is
        // opened, and the offset is 0.
        unsafe { self.blocks.add(offset as usize).cast() }
    }

    /// A segment of the opened work request.
    #[inline(always)]
    fn segment(&self, segment: u32) -> NonNull<u8> {
        let begin = self.open.at.wrapping_mul(BLOCK as u32);
        let offset = begin.wrapping_add(segment * SEGMENT as u32) & self.mask;
        // SAFETY: as in `block`.
        unsafe { self.blocks.add(offset as usize) }
    }
}
