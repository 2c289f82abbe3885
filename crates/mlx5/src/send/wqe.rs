//! A work request's own fields and its data.

use std::mem::offset_of;

use uverbs::Sge;

use super::copy::segments_of;
use super::{MAX_SEGMENT, SendQueue};
use crate::abi::{
    AddressVector, AtomicSegment, BLOCK, ControlSegment, DataSegment, EXTENDED_AV, INLINE_SEGMENT,
    RemoteSegment, SEGMENT, XrcSegment,
};
use crate::operation::Extra;
use crate::{Address, PostError, Service};

/// One work request while it is written.
///
/// The setters of data ([`Wqe::sge_list`], [`Wqe::inline_raw`],
/// [`Wqe::no_data`]) exclude each other, the last one counts; without one
/// there is no data. Each setter of another kind writes its own segment, in
/// any order.
pub struct Wqe<'q> {
    pub(super) queue: &'q mut SendQueue,
}

impl Wqe<'_> {
    #[inline(always)]
    pub(super) fn queue(&mut self) -> &mut SendQueue {
        self.queue
    }

    /// Writes a segment of the work request.
    #[inline(always)]
    pub(super) fn write<T>(&mut self, segment: u32, value: T) {
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

    /// The shared receive queue of the peer's that it goes to, of an XRC
    /// initiator; others ignore it.
    #[inline(always)]
    pub fn xrc(&mut self, remote_srqn: u32) -> &mut Self {
        let queue = self.queue();
        if queue.service == Service::XrcInitiator && !queue.open.form.keys {
            self.write(
                1,
                XrcSegment {
                    srqn: remote_srqn.to_be(),
                    reserved: [0; 3],
                },
            );
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
    /// [`PostError::TooManySges`], [`PostError::MessageTooLong`];
    /// [`PostError::BadOperation`] of an operation that changes keys, unless the
    /// list is empty.
    #[inline(always)]
    pub fn sge_list(&mut self, list: &[Sge]) -> Result<(), PostError> {
        let queue = self.queue();
        if list.len() > queue.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        if queue.open.form.keys {
            return if list.is_empty() {
                Ok(())
            } else {
                Err(PostError::BadOperation)
            };
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
    /// [`PostError::BadOperation`] of an operation that reads, or changes keys.
    ///
    /// # Safety
    /// Each piece is readable.
    #[inline(always)]
    pub unsafe fn inline_raw(
        &mut self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<(), PostError> {
        let queue = self.queue();
        if queue.open.form.reads || queue.open.form.keys {
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
            open.segments += segments_of(length as u32);
            // SAFETY: the data's first word.
            unsafe {
                let at = queue.segment(queue.open.data_at).cast::<u32>();
                at.write((length as u32 | INLINE_SEGMENT).to_be());
            }
        }
        Ok(())
    }
}
