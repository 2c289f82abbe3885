//! The send queue's writer.
//!
//! A batch: [`SendQueue::begin`]; for each work request [`SendQueue::open`],
//! the operation's own fields and its data through [`Wqe`], and
//! [`SendQueue::accept`]; at the end [`SendQueue::publish`] once, which rings
//! too. What was not accepted and published never happened, so a batch is
//! aborted by forgetting it. Quick ways for nearly all work requests, those of
//! one element on a connection: [`SendQueue::push_one`] in a batch,
//! [`SendQueue::post_one`] alone, and [`SendQueue::build`] for one whose data is
//! set afterwards.
//!
//! A work request is a row of segments of 16 bytes, in the order control,
//! address (datagrams, XRC), remote memory, atomic operands, data; the queue is a
//! ring of blocks of four. A work request begins with a block and may go on at
//! the ring's beginning; a segment does not straddle the end, inline data may.

mod build;
mod copy;
mod encode;
pub(crate) mod keys;
mod one;
mod wqe;

pub use build::Besides;
pub use keys::{Bind, LONGEST_WINDOW, WindowKind};
pub use one::PostedOne;
pub use wqe::Wqe;

use std::hint::cold_path;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, OutstandingSlots};

use crate::abi::{BLOCK, ControlSegment, SEGMENT};
use crate::operation::{Form, OPCODES};
use crate::registers::Register;
use crate::{Opcode, PostError, SendFlags, Service, Work};

/// One more than the longest scatter/gather element: its length has 31 bits.
pub const MAX_SEGMENT: u32 = 1 << 31;

/// The bits of a control segment's first 8 bytes that say how many segments
/// there are.
const SEGMENTS: u32 = 0x3f;

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
    /// Those, and the batch's.
    marked: u32,
    /// As many may be given before it is to be asked again how many have
    /// completed.
    room_until: u32,
    /// Where the next work request of the batch begins, in blocks.
    next: u32,
    /// Fence bits of the next work request; and of the first of the next batch.
    fence: u8,
    fence_posted: u8,
    /// One that was built quickly, and is the batch's last.
    built: Option<Built>,
    open: Open,
    /// Where the work request that was accepted last begins, in blocks: the one
    /// opened last may have been refused.
    accepted: u32,
    capacity: u32,
    max_sge: u32,
    /// Bytes of the longest element, if there may be one.
    longest: u32,
    max_inline: u32,
    qp_num: u32,
    service: Service,
    /// How the service has each operation.
    forms: &'static [Form; OPCODES],
    /// The operations that go the quick way, as bits; and those of them that
    /// may have inline data.
    quick: u16,
    quick_inline: u16,
    /// By operation, bytes of inline data that one posted alone may have, to go the
    /// quick way ([`one::alone`]); none while `fence_posted` says something.
    inline_alone: [u8; 16],
    /// The control segment's bits, by the three lowest flags, in their word.
    control: [u32; 8],
    /// The number in a control segment's first 8 bytes.
    qpn: u64,
    record: DoorbellRecord,
    register: Register,
    /// Those of `work.sends`: one for each block.
    outstanding: OutstandingSlots,
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

/// A work request that [`SendQueue::build`] has made.
#[derive(Clone, Copy, Debug)]
struct Built {
    /// Its control segment; its data follows in the same block.
    control: NonNull<u64>,
    /// The first 8 bytes of it, in this machine's order, with the segments of
    /// no data.
    first: u64,
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
            marked: 0,
            room_until: work.send.capacity,
            next: 0,
            fence: 0,
            fence_posted: 0,
            built: None,
            open: Open {
                at: 0,
                data_at: 1,
                segments: 1,
                form: Form::NONE,
                wr_id: 0,
            },
            accepted: 0,
            capacity: work.send.capacity,
            max_sge: work.send.max_sge,
            longest: if work.send.max_sge == 0 {
                0
            } else {
                MAX_SEGMENT - 1
            },
            max_inline: work.send.max_inline,
            qp_num,
            service: work.service,
            forms: work.service.forms(),
            quick: one::quick(work.service, false),
            quick_inline: one::quick(work.service, true),
            inline_alone: one::alone(work.service, work.send.max_inline),
            control: one::control(signal_all),
            qpn: u64::from(qp_num << 8),
            record: work.memory.records.record(1),
            register,
            outstanding: work.sends.slots(),
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
        (self.posted, self.count, self.next, self.marked) = (0, 0, 0, 0);
        self.room_until = self.capacity;
        (self.fence, self.built) = (0, None);
        self.fence_is(0);
        self.work.sends.reset();
        self.record.publish(0);
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.next = self.posted;
        self.marked = self.count;
        self.fence = self.fence_posted;
        self.built = None;
    }

    /// Gives the batch up, so that no completion finds anything of it, whatever
    /// the device says. A batch of which nothing was accepted may just be
    /// forgotten.
    #[cold]
    pub fn abort(&mut self) {
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
        if !self.has_room(self.marked) {
            return Err(PostError::Full);
        }
        let mark = self.marked.wrapping_add(1);
        self.built = None;
        let data_at = 1 + u32::from(form.before);
        self.open = Open {
            at: self.next,
            data_at,
            segments: data_at,
            form,
            wr_id,
        };
        let fence = one::fence_unless(self.fence, flags);
        let control = ControlSegment {
            opmod_idx_opcode: ((self.next & 0xffff) << 8 | u32::from(form.opcode)).to_be(),
            // Without the segments, whose number is not known yet.
            qpn_ds: (self.qp_num << 8).to_be(),
            signature: 0,
            dci_stream_channel_id: [0; 2],
            fm_ce_se: u32::from_be(self.control[(flags.bits() & 7) as usize]) as u8 | fence,
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
        self.marked = self.marked.wrapping_add(1);
        // Not before: one that is refused is not outstanding.
        let offset = self.offset(self.open.at);
        self.note(offset, self.open.wr_id, self.marked);
        self.fence = self.open.form.fence_after;
        self.settle();
    }

    /// The work request accepted last in this batch, to set its data
    /// afterwards; none in a batch without any. [`SendQueue::settle`] follows.
    #[inline(always)]
    pub fn last(&mut self) -> Option<Wqe<'_>> {
        if self.marked == self.count {
            return None;
        }
        if let Some(built) = self.built {
            self.reopen(built);
        }
        Some(self.opened())
    }

    /// The next work request begins behind what the last one has now.
    #[inline(always)]
    pub fn settle(&mut self) {
        let blocks = self.open.segments.div_ceil(PER_BLOCK);
        self.next = self.open.at.wrapping_add(blocks);
        self.accepted = self.open.at;
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
        let batch = self.marked.wrapping_sub(self.count);
        if batch == 0 {
            return false;
        }
        self.count = self.marked;
        self.built = None;
        self.posted = self.next;
        if self.fence != self.fence_posted {
            cold_path();
            self.fence_is(self.fence);
        }
        self.record.publish(self.posted & 0xffff);
        if batch == 1 {
            self.tell();
        } else {
            self.register.get().ring(self.first_of_last());
        }
        true
    }

    /// What is posted next has this fence: with one it does not go the quick way.
    fn fence_is(&mut self, fence: u8) {
        self.fence_posted = fence;
        self.inline_alone = match fence {
            0 => one::alone(self.service, self.max_inline),
            _ => [0; 16],
        };
    }

    /// The first 8 bytes of the work request that was accepted last.
    #[inline(always)]
    fn first_of_last(&self) -> u64 {
        // SAFETY: its control segment, which is aligned to a block.
        unsafe { self.block(self.accepted, 0).read() }
    }

    /// Writes the work request that was accepted last to the register, or rings.
    #[inline(always)]
    fn tell(&self) {
        let (register, at) = (self.register.get(), self.accepted);
        let first = self.first_of_last();
        let segments = u64::from_be(first) as u32 & SEGMENTS;
        // A copy that only tells what the doorbell tells is not worth it.
        if segments == 1 {
            register.ring(first);
            return;
        }
        // SAFETY: one of the queue's.
        let told =
            segments <= PER_BLOCK && unsafe { register.try_copy_one::<false>(self.block(at, 0)) };
        if !told {
            self.copy_several(at, segments);
        }
    }

    /// Writes a work request of any length to any register, or rings.
    #[inline(never)]
    fn copy_several(&self, at: u32, segments: u32) {
        let blocks = (0..segments.div_ceil(PER_BLOCK)).map(|n| self.block(at, n as usize));
        // SAFETY: blocks of the queue.
        unsafe { self.register.get().copy(blocks) };
    }

    /// Whether there is room for one more work request than `mark`, those of
    /// the batch among them.
    #[inline(always)]
    fn has_room(&mut self, mark: u32) -> bool {
        if mark != self.room_until {
            return true;
        }
        // What was known of is used up. Here, and not in a function of its own,
        // for which callers would save registers.
        cold_path();
        let completed = self.work.sends.completed();
        self.room_until = completed.wrapping_add(self.capacity);
        mark != self.room_until
    }

    /// Takes note of the work request that begins at `offset`.
    #[inline(always)]
    fn note(&self, offset: usize, wr_id: u64, mark: u32) {
        // SAFETY: there is a slot for each block, which stay with `work`; without
        // any, the offset is 0, and there is one.
        unsafe { self.outstanding.post(offset / BLOCK, wr_id, mark) };
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
