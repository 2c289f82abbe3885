//! The send queue's writer.
//!
//! A batch: [`SendQueue::begin`]; for each work request [`SendQueue::open`],
//! the operation's own fields and its data through [`Wqe`], and
//! [`SendQueue::accept`]; at the end [`SendQueue::publish`] once, which rings
//! too. What was not accepted and published never happened, so a batch is
//! aborted by forgetting it.
//!
//! A work request is a row of segments of 16 bytes, in the order control,
//! address (datagrams), remote memory, atomic operands, data; the queue is a
//! ring of blocks of four. A work request begins with a block and may go on at
//! the ring's beginning; a segment does not straddle the end, inline data may.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{BlueFlame, DoorbellRecord};
use uverbs::Sge;

use crate::abi::{
    AddressVector, AtomicSegment, BLOCK, CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED,
    ControlSegment, DataSegment, EXTENDED_AV, INLINE_SEGMENT, RemoteSegment, SEGMENT,
};
use crate::context::Register;
use crate::operation::{Extra, Form};
use crate::{Address, Opcode, PostError, SendFlags, Service, Work};

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
    open: Open,
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
            open: Open {
                at: 0,
                data_at: 1,
                segments: 1,
                form: Form::NONE,
            },
            capacity: work.send.capacity,
            max_sge: work.send.max_sge,
            max_inline: work.send.max_inline,
            qp_num,
            service: work.service,
            signal_all,
            record: work.memory.record(1),
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

    /// The queue pair has been reset: starts anew. Its completions have been
    /// taken out before ([`crate::CompletionRing::clean`]).
    pub fn reset(&mut self) {
        (self.posted, self.count, self.next, self.batch) = (0, 0, 0, 0);
        self.work.sends.reset();
        self.record.publish(0);
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.next = self.posted;
        self.batch = 0;
    }

    /// Opens a work request for one operation, without data, remote memory or
    /// key so far. Every batch starts with [`SendQueue::begin`].
    ///
    /// # Errors
    /// [`PostError::Full`]: as many are outstanding as the queue holds.
    /// [`PostError::BadOperation`], [`PostError::Unsupported`].
    #[inline(always)]
    pub fn open(
        &mut self,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<Wqe<'_>, PostError> {
        let Some(form) = self.service.form(opcode) else {
            return Err(Self::refuse(opcode));
        };
        let mark = self.count.wrapping_add(self.batch).wrapping_add(1);
        if mark.wrapping_sub(self.work.sends.completed()) > self.capacity {
            return Err(PostError::Full);
        }
        let data_at = 1
            + u32::from(self.service == Service::Datagram) * 3
            + u32::from(form.remote)
            + u32::from(form.atomic);
        self.open = Open {
            at: self.next,
            data_at,
            segments: data_at,
            form,
        };
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let signaled = self.signal_all || flags.contains(SendFlags::SIGNALED);
        let control = ControlSegment {
            opmod_idx_opcode: ((self.next & 0xffff) << 8 | u32::from(form.opcode)).to_be(),
            // Without the segments, whose number is not known yet.
            qpn_ds: (self.qp_num << 8).to_be(),
            signature: 0,
            dci_stream_channel_id: [0; 2],
            fm_ce_se: bit(signaled, CONTROL_CQ_UPDATE)
                | bit(flags.contains(SendFlags::SOLICITED), CONTROL_SOLICITED)
                | bit(flags.contains(SendFlags::FENCE), CONTROL_FENCE),
            imm: 0,
        };
        // SAFETY: a segment of the queue, aligned, that is not the device's:
        // there is room for a work request.
        unsafe { self.segment(0).cast().write(control) };
        self.work.sends.post(self.next, wr_id, mark);
        Ok(self.opened())
    }

    #[cold]
    fn refuse(opcode: Opcode) -> PostError {
        match opcode {
            Opcode::LOCAL_INV | Opcode::BIND_MW => PostError::Unsupported,
            _ => PostError::BadOperation,
        }
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
        self.record.publish(self.posted & 0xffff);
        let register: &BlueFlame = self.register.get();
        let bytes = (self.open.segments * SEGMENT as u32) as usize;
        // SAFETY: the control segment of the work request that was accepted
        // last, which is aligned to a block.
        let first = unsafe { self.segment(0).cast::<u64>().read() };
        // A copy that only tells what the doorbell tells is not worth it.
        if batch == 1 && bytes > SEGMENT && bytes <= register.room() {
            let at = self.open.at;
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

/// One work request while it is written.
///
/// The setters of data ([`Wqe::sge_list`], [`Wqe::inline_raw`],
/// [`Wqe::no_data`]) exclude each other, the last one counts; without one
/// there is no data. Each setter of another kind writes its own segment, in
/// any order.
pub struct Wqe<'q> {
    queue: &'q mut SendQueue,
}

impl Wqe<'_> {
    #[inline(always)]
    fn queue(&mut self) -> &mut SendQueue {
        self.queue
    }

    /// Writes a segment of the work request.
    #[inline(always)]
    fn write<T>(&mut self, segment: u32, value: T) {
        const { assert!(size_of::<T>() == SEGMENT && align_of::<T>() <= SEGMENT) };
        // SAFETY: a whole segment of the queue, aligned, not the device's.
        unsafe { self.queue().segment(segment).cast::<T>().write(value) };
    }

    /// Where the segment for remote memory is.
    #[inline(always)]
    fn remote_at(&mut self) -> u32 {
        let open = self.queue().open;
        open.data_at - 1 - u32::from(open.form.atomic)
    }

    /// Immediate data, as it goes on the wire (big-endian), or the key to
    /// invalidate; which one, the operation says. Others ignore it.
    #[inline(always)]
    pub fn immediate_or_key(&mut self, value: u32) -> &mut Self {
        let queue = self.queue();
        let value = match queue.open.form.extra {
            Extra::Nothing => 0,
            Extra::Immediate => value,
            Extra::Key => value.to_be(),
        };
        // SAFETY: a word of the control segment.
        unsafe {
            let at = queue.segment(0).add(offset_of!(ControlSegment, imm));
            at.cast::<u32>().write(value);
        }
        self
    }

    /// Remote memory of a read or write; others have none, and ignore it.
    #[inline(always)]
    pub fn rdma(&mut self, remote_addr: u64, rkey: u32) -> &mut Self {
        if self.queue().open.form.remote {
            let at = self.remote_at();
            self.write(
                at,
                RemoteSegment {
                    raddr: remote_addr.to_be(),
                    rkey: rkey.to_be(),
                    reserved: 0,
                },
            );
        }
        self
    }

    /// Remote memory and operands of an atomic; `swap` is not used by
    /// fetch-and-add.
    #[inline(always)]
    pub fn atomic(
        &mut self,
        remote_addr: u64,
        rkey: u32,
        compare_add: u64,
        swap: u64,
    ) -> &mut Self {
        self.rdma(remote_addr, rkey);
        let open = self.queue().open;
        if open.form.atomic {
            let compares = open.form.opcode == crate::abi::opcode::ATOMIC_CS;
            let (swap_add, compare) = if compares {
                (swap, compare_add)
            } else {
                (compare_add, 0)
            };
            self.write(
                open.data_at - 1,
                AtomicSegment {
                    swap_add: swap_add.to_be(),
                    compare: compare.to_be(),
                },
            );
        }
        self
    }

    /// Where a datagram goes; others ignore it.
    #[inline(always)]
    pub fn ud(&mut self, address: &Address, remote_qpn: u32, remote_qkey: u32) -> &mut Self {
        if self.queue().service == Service::Datagram {
            let vector = AddressVector {
                qkey: remote_qkey.to_be(),
                dqp_dct: (remote_qpn & 0xff_ffff | EXTENDED_AV).to_be(),
                ..address.0
            };
            // SAFETY: 48 bytes are three segments.
            let parts: [[u64; 2]; 3] = unsafe { std::mem::transmute(vector) };
            for (at, part) in (1..).zip(parts) {
                self.write(at, part);
            }
        }
        self
    }

    /// No data.
    #[inline(always)]
    pub fn no_data(&mut self) -> &mut Self {
        let open = &mut self.queue().open;
        open.segments = open.data_at;
        self
    }

    /// Scatter/gather elements that the work request holds at most.
    #[inline(always)]
    pub fn max_sge(&mut self) -> u32 {
        self.queue().max_sge
    }

    /// Data gathered from, or scattered to, a list; elements of no bytes are
    /// left out.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::MessageTooLong`].
    #[inline(always)]
    pub fn sge_list(&mut self, list: &[Sge]) -> Result<(), PostError> {
        let queue = self.queue();
        if list.len() > queue.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let mut at = queue.open.data_at;
        let atomic = queue.open.form.atomic;
        for sge in list {
            if sge.length >= MAX_SEGMENT {
                return Err(PostError::MessageTooLong);
            }
            // No bytes would mean 2 GiB.
            if sge.length == 0 {
                continue;
            }
            let length = if atomic { 8 } else { sge.length };
            self.write(
                at,
                DataSegment {
                    byte_count: length.to_be(),
                    lkey: sge.lkey.to_be(),
                    addr: sge.addr.to_be(),
                },
            );
            at += 1;
        }
        self.queue().open.segments = at;
        Ok(())
    }

    /// Data copied now from pieces, each a pointer and a length in bytes.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`]; nothing is copied beyond what fits.
    /// [`PostError::BadOperation`] of an operation that reads.
    ///
    /// # Safety
    /// Each piece is readable.
    #[inline(always)]
    pub unsafe fn inline_raw(
        &mut self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<(), PostError> {
        let queue = self.queue();
        if queue.open.form.reads {
            return Err(PostError::BadOperation);
        }
        let begin = queue.open.at.wrapping_mul(BLOCK as u32);
        let data = begin.wrapping_add(queue.open.data_at * SEGMENT as u32);
        let mut length = 0usize;
        for (from, bytes) in pieces {
            // No sum that could wrap: `length` never exceeds `max_inline`.
            if bytes > queue.max_inline as usize - length {
                return Err(PostError::InlineTooLong);
            }
            // Behind the word that says how much it is.
            let at = data.wrapping_add(4 + length as u32) & queue.mask;
            let to_end = (queue.mask - at) as usize + 1;
            let first = bytes.min(to_end);
            // SAFETY: the piece is readable by this function's contract; there
            // is room for `max_inline` bytes, of which those past the queue's
            // end are at its beginning.
            unsafe {
                let to = queue.blocks.as_ptr();
                to.add(at as usize).copy_from_nonoverlapping(from, first);
                to.copy_from_nonoverlapping(from.add(first), bytes - first);
            }
            length += bytes;
        }
        let open = &mut queue.open;
        open.segments = open.data_at;
        if length != 0 {
            open.segments += (4 + length).div_ceil(SEGMENT) as u32;
            // SAFETY: the data's first word.
            unsafe {
                let at = queue.segment(queue.open.data_at).cast::<u32>();
                at.write((length as u32 | INLINE_SEGMENT).to_be());
            }
        }
        Ok(())
    }
}
