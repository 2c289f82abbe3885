//! The encoder of send work requests.
//!
//! A WQE is a row of segments of 16 bytes, in the order control, address
//! (datagrams, XRC), remote memory, atomic operands, data. It begins with a block
//! of the queue and may go on at the queue's beginning; a segment does not straddle
//! the end, inline data may.

use std::ptr::NonNull;

use ring::write_pair;
use uverbs::Sge;

use super::{MAX_SEGMENT, PER_BLOCK, SendQueue};
use crate::abi::{AddressVector, EXTENDED_AV, INLINE_SEGMENT, SEGMENT, opcode};
use crate::operation::{Extra, Form};
use crate::{
    Address, Data, Destination, Operands, PostError, RemoteMemory, SendFlags, SendWr, Service,
};

impl SendQueue {
    /// Adds a work request to the batch.
    ///
    /// # Errors
    /// [`PostError`]; the batch is as it was.
    ///
    /// # Safety
    /// The memory of [`Data::Inline`] is readable.
    // Without `always` a face calls it with the work request in memory: 26
    // instructions of a send in a batch.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_, Address>) -> Result<(), PostError> {
        // Fast path: a connection's send, write or read of one element or one piece
        // of inline data, with no fence before it, that does not reach over the
        // queue's end.
        if let Some(form) = self.forms.get(wr.opcode.0 as usize)
            && form.short
            && self.fence == 0
        {
            let at = self.next;
            match wr.data {
                Data::Sges([sge])
                    if sge.length.wrapping_sub(1) < self.longest && self.has_room(self.marked) =>
                {
                    // SAFETY: of the block, three segments at most are written.
                    unsafe { put(self.short_head(at, form, wr, 1), data(sge, sge.length)) };
                    self.advance(at, wr.wr_id, 1);
                    return Ok(());
                }
                Data::Inline([piece])
                    if piece.length.wrapping_sub(1) < self.max_inline && !form.reads =>
                {
                    let data_segments = inline_segments(piece.length);
                    let segments = 1 + u32::from(form.before) + data_segments;
                    let end = self.offset(at) + segments as usize * SEGMENT;
                    if end <= self.mask as usize + 1 && self.has_room(self.marked) {
                        let from = std::ptr::with_exposed_provenance(piece.addr as usize);
                        // SAFETY: the WQE has room for `max_inline` bytes, and is in
                        // one piece; they are readable, as the caller says.
                        unsafe {
                            let to = self.short_head(at, form, wr, data_segments);
                            put_inline(to, from, piece.length);
                        }
                        self.advance(at, wr.wr_id, segments.div_ceil(PER_BLOCK));
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
        // A copy, so that the caller's value needs no memory for the fast path.
        let wr = *wr;
        // SAFETY: as the caller says.
        unsafe { self.push_any(&wr) }
    }

    /// [`SendQueue::push`] of any work request.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    pub(crate) unsafe fn push_any(&mut self, wr: &SendWr<'_, Address>) -> Result<(), PostError> {
        let form = match self.forms.get(wr.opcode.0 as usize) {
            Some(form) if form.head != 0 && (!form.keys || self.work.send.keys) => form,
            _ => return Err(PostError::BadOperation),
        };
        if !self.has_room(self.marked) {
            return Err(PostError::Full);
        }
        let data_segments = self.data_segments(form, wr.data)?;
        if form.keys {
            return self.push_keys(form, wr);
        }
        let segments = 1 + u32::from(form.before) + data_segments;
        let mut to = self.segments();
        to.put(self.control_any(form, wr, data_segments));
        match (self.service, wr.destination) {
            (
                Service::Datagram,
                Destination::Datagram {
                    address,
                    remote_qpn,
                    remote_qkey,
                },
            ) => {
                let vector = AddressVector {
                    qkey: remote_qkey.to_be(),
                    dqp_dct: (remote_qpn & 0xff_ffff | EXTENDED_AV).to_be(),
                    ..address.0
                };
                // SAFETY: 48 bytes without padding are three segments.
                let parts: [[u64; 2]; 3] = unsafe { std::mem::transmute(vector) };
                parts.into_iter().for_each(|part| to.put(part));
            }
            (Service::XrcInitiator, Destination::Xrc { remote_srqn }) => {
                to.put([words(remote_srqn, 0), 0]);
            }
            (Service::Datagram | Service::XrcInitiator, _) => return Err(PostError::BadOperation),
            _ => {}
        }
        if form.remote {
            to.put(remote(wr.remote));
        }
        if form.atomic {
            let Operands::Atomic { compare_add, swap } = wr.operands else {
                return Err(PostError::BadOperation);
            };
            let (swap_add, compare) = if form.opcode == opcode::ATOMIC_CS {
                (swap, compare_add)
            } else {
                (compare_add, 0)
            };
            to.put([swap_add.to_be(), compare.to_be()]);
        }
        match wr.data {
            // A length of 0 means 2 GiB to the device.
            Data::Sges(list) => (list.iter().filter(|sge| sge.length != 0))
                .for_each(|sge| to.put(data(sge, if form.atomic { 8 } else { sge.length }))),
            // SAFETY: readable, as the caller says.
            Data::Inline(pieces) => unsafe { to.put_inline(pieces) },
        }
        self.advance(self.next, wr.wr_id, segments.div_ceil(PER_BLOCK));
        self.fence = form.fence_after;
        Ok(())
    }

    /// Segments of the data, if a work request may have it.
    fn data_segments(&self, form: &Form, data: Data<'_>) -> Result<u32, PostError> {
        match data {
            Data::Sges(list) if list.len() > self.max_sge as usize => Err(PostError::TooManySges),
            Data::Sges([]) => Ok(0),
            _ if form.keys => Err(PostError::BadOperation),
            Data::Sges(list) if list.iter().any(|sge| sge.length >= MAX_SEGMENT) => {
                Err(PostError::MessageTooLong)
            }
            Data::Sges(list) => Ok(list.iter().filter(|sge| sge.length != 0).count() as u32),
            Data::Inline(_) if form.reads => Err(PostError::BadOperation),
            Data::Inline(pieces) => {
                let rest = (pieces.iter())
                    .try_fold(self.max_inline, |room, piece| {
                        room.checked_sub(piece.length)
                    })
                    .ok_or(PostError::InlineTooLong)?;
                match self.max_inline - rest {
                    0 => Ok(0),
                    length => Ok(inline_segments(length)),
                }
            }
        }
    }

    /// Writes the control segment, and the remote segment if there is one, of a WQE
    /// without an address; where its data begins.
    ///
    /// # Safety
    /// There is room for a WQE at `at`.
    // Without `always`, the work request is in memory for it: 30 instructions.
    #[inline(always)]
    unsafe fn short_head(
        &self,
        at: u32,
        form: &Form,
        wr: &SendWr<'_, Address>,
        data_segments: u32,
    ) -> NonNull<u8> {
        let immediate = match form.extra {
            Extra::Immediate => wr.imm_or_key,
            _ => 0,
        };
        // SAFETY: the beginning of a block, in which three segments have room.
        unsafe {
            let to = self.blocks.add(self.offset(at));
            put(
                to,
                self.control(
                    at,
                    form,
                    data_segments,
                    self.control_flags(wr.flags),
                    immediate,
                ),
            );
            if !form.remote {
                return to.add(SEGMENT);
            }
            put(to.add(SEGMENT), remote(wr.remote));
            to.add(2 * SEGMENT)
        }
    }

    /// The control segment of the next work request, whatever it is.
    pub(super) fn control_any(
        &self,
        form: &Form,
        wr: &SendWr<'_, Address>,
        data_segments: u32,
    ) -> [u64; 2] {
        let fence = match wr.flags.contains(SendFlags::FENCE) {
            // Its own fence is the stronger one.
            true => 0,
            false => self.fence,
        };
        let extra = match form.extra {
            Extra::Nothing => 0,
            Extra::Immediate => wr.imm_or_key,
            Extra::Key => wr.imm_or_key.to_be(),
        };
        let flags = self.control_flags(wr.flags) | fence;
        self.control(self.next, form, data_segments, flags, extra)
    }

    #[inline(always)]
    fn control_flags(&self, flags: SendFlags) -> u8 {
        u32::from_be(self.control[(flags.bits() & 7) as usize]) as u8
    }

    /// A control segment, of a work request at `at`; `extra` is as it is written.
    #[inline(always)]
    fn control(&self, at: u32, form: &Form, data_segments: u32, flags: u8, extra: u32) -> [u64; 2] {
        let index = u64::from(at & 0xffff) << 40;
        let first = index | (form.head + u64::from(data_segments)) | self.qpn;
        let [a, b, c, d] = extra.to_ne_bytes();
        let second = u64::from_ne_bytes([0, 0, 0, flags, a, b, c, d]);
        [first.to_be(), second]
    }

    /// Makes the work request that was written at `at` part of the batch.
    #[inline(always)]
    pub(super) fn advance(&mut self, at: u32, wr_id: u64, blocks: u32) {
        let mark = self.marked.wrapping_add(1);
        self.note(self.offset(at), wr_id, mark);
        self.marked = mark;
        self.accepted = at;
        self.next = at.wrapping_add(blocks);
    }

    /// The segments of the next work request, for which there is room.
    pub(super) fn segments(&self) -> Segments {
        Segments {
            blocks: self.blocks,
            mask: self.mask as usize,
            at: self.offset(self.next),
        }
    }
}

/// The segments of a WQE while they are written, in order, around the queue's end.
pub(super) struct Segments {
    blocks: NonNull<u8>,
    /// One less than the queue's bytes, which are some.
    mask: usize,
    at: usize,
}

impl Segments {
    /// Writes the next segment.
    #[inline]
    pub(super) fn put(&mut self, segment: [u64; 2]) {
        // SAFETY: a whole segment of the queue, by the mask, that is not the
        // device's: no more are written than a work request has room for.
        unsafe { put(self.blocks.add(self.at & self.mask), segment) };
        self.at += SEGMENT;
    }

    /// Writes inline data, which is last: how much it is, the pieces, and zeros up to
    /// the end of the last segment.
    ///
    /// # Safety
    /// The pieces are readable.
    unsafe fn put_inline(&mut self, pieces: &[Sge]) {
        let length: u32 = pieces.iter().map(|piece| piece.length).sum();
        if length == 0 {
            return;
        }
        let header = (length | INLINE_SEGMENT).to_be_bytes();
        // SAFETY: the header and the zeros are as long as is said; of the pieces the
        // caller says so.
        unsafe {
            self.copy(header.as_ptr(), header.len());
            for piece in pieces {
                let from = std::ptr::with_exposed_provenance(piece.addr as usize);
                self.copy(from, piece.length as usize);
            }
            let rest = self.at.next_multiple_of(SEGMENT) - self.at;
            self.copy([0; SEGMENT].as_ptr(), rest);
        }
    }

    /// # Safety
    /// `from` is readable for `length` bytes.
    unsafe fn copy(&mut self, from: *const u8, length: usize) {
        let at = self.at & self.mask;
        let now = length.min(self.mask + 1 - at);
        // SAFETY: as in `put`; what is past the queue's end is at its beginning.
        unsafe {
            let to = self.blocks.as_ptr();
            to.add(at).copy_from_nonoverlapping(from, now);
            to.copy_from_nonoverlapping(from.add(now), length - now);
        }
        self.at += length;
    }
}

/// Writes a segment by one store: a copy to the UAR reads it so, and a processor
/// forwards a store only to a read of the same bytes.
///
/// # Safety
/// `to` is writable for a segment, and aligned to one.
#[inline]
unsafe fn put(to: NonNull<u8>, [first, second]: [u64; 2]) {
    // SAFETY: as the caller says.
    unsafe { write_pair(to.cast(), first, second) };
}

/// Two fields of 32 bits, big-endian.
#[inline]
fn words(first: u32, second: u32) -> u64 {
    (u64::from(first) << 32 | u64::from(second)).to_be()
}

/// The segment of remote memory: address, key.
#[inline]
fn remote(memory: RemoteMemory) -> [u64; 2] {
    [memory.addr.to_be(), words(memory.rkey, 0)]
}

/// The segment of a scatter/gather element ([`crate::abi::DataSegment`]).
#[inline]
pub(super) fn data(sge: &Sge, length: u32) -> [u64; 2] {
    [words(length, sge.lkey), sge.addr.to_be()]
}

/// Segments of `length` bytes of inline data, with the word that says how much.
#[inline]
fn inline_segments(length: u32) -> u32 {
    (4 + length).div_ceil(SEGMENT as u32)
}

/// Writes inline data in one piece: how much it is, the data, and zeros up to the
/// end of the last segment.
///
/// # Safety
/// `to` is writable for the segments, and aligned to one; `from` is readable for
/// `length` bytes.
#[inline(never)]
unsafe fn put_inline(to: NonNull<u8>, from: *const u8, length: u32) {
    let bytes = length as usize;
    // SAFETY: as the caller says; first the last segment, of which the rest stays.
    unsafe {
        put(to.add((bytes + 3) / SEGMENT * SEGMENT), [0; 2]);
        to.cast().write((length | INLINE_SEGMENT).to_be());
        to.add(4).as_ptr().copy_from_nonoverlapping(from, bytes);
    }
}
