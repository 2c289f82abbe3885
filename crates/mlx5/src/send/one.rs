//! The quick way for nearly all work requests: sends, writes and reads of one
//! element on a connection.
//!
//! What is unusual is left to [`SendQueue::open`]: nothing is done for it
//! here, so a caller tries this way first and takes the other one then.

use std::ptr::NonNull;

use ring::{as_one, write_pair};
use uverbs::Sge;

use super::copy::{segments_of, write_long, write_short};
use super::{PER_BLOCK, SendQueue};
use crate::abi::{BLOCK, CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED, SEGMENT, opcode};
use crate::recv::write_segment;
use crate::{OneElement, Opcode, SendFlags, Service};

/// How the device has an operation, each field as it is used: what is read where
/// it is used need not be kept.
#[derive(Clone, Copy)]
#[repr(align(16))]
pub(super) struct Short {
    /// The operation's number, where the control segment's first 8 bytes have
    /// it, and the segments before the data.
    form: u64,
    /// All bits, if there is immediate data.
    pub immediate: u32,
    /// Bytes before the data, of 1 or 2 segments; none: not done here.
    pub before: u16,
    /// It reads, and so has no inline data.
    reads: bool,
}

impl Short {
    /// Whether the segment of remote memory is before the data.
    #[inline(always)]
    pub fn is_remote(&self) -> bool {
        usize::from(self.before) == 2 * SEGMENT
    }

    /// Of an operation that is not done here.
    pub const NONE: Self = Self {
        form: 0,
        immediate: 0,
        before: 0,
        reads: false,
    };

    const fn new(opcode: u8, segments: u16) -> Self {
        assert!(segments == 1 || segments == 2);
        Self {
            form: (opcode as u64) << 32 | segments as u64,
            before: segments * SEGMENT as u16,
            ..Self::NONE
        }
    }

    const fn with_immediate(self) -> Self {
        Self {
            immediate: !0,
            ..self
        }
    }

    const fn that_reads(self) -> Self {
        Self {
            reads: true,
            ..self
        }
    }
}

/// By the operation's number.
pub(super) const OPERATIONS: [Short; 16] = {
    let mut all = [Short::NONE; 16];
    all[Opcode::SEND.0 as usize] = Short::new(opcode::SEND, 1);
    all[Opcode::SEND_WITH_IMM.0 as usize] = Short::new(opcode::SEND_IMM, 1).with_immediate();
    all[Opcode::RDMA_WRITE.0 as usize] = Short::new(opcode::RDMA_WRITE, 2);
    all[Opcode::RDMA_WRITE_WITH_IMM.0 as usize] =
        Short::new(opcode::RDMA_WRITE_IMM, 2).with_immediate();
    all[Opcode::RDMA_READ.0 as usize] = Short::new(opcode::RDMA_READ, 2).that_reads();
    all
};

/// The operations that go the quick way on a service, as bits; `inline`: those
/// of them that may have inline data.
pub(super) fn quick(service: Service, inline: bool) -> u16 {
    let reads = match service {
        Service::ReliableConnection => !inline,
        Service::UnreliableConnection => false,
        _ => return 0,
    };
    let is_quick = |it: &Short| it.before != 0 && (reads || !it.reads);
    let bit = |(n, it)| u16::from(is_quick(it)) << n;
    OPERATIONS.iter().enumerate().map(bit).sum()
}

/// Bytes of inline data that a work request may have which is posted alone, by its
/// operation: as many as the queue was made for and as fit into its one block. None
/// of those that do not go the quick way on a service.
pub(super) fn alone(service: Service, max_inline: u32) -> [u8; 16] {
    let quick = quick(service, true);
    std::array::from_fn(|operation| {
        let before = usize::from(OPERATIONS[operation].before);
        let room = BLOCK - before - size_of::<u32>();
        match quick >> operation & 1 {
            0 => 0,
            _ => room.min(max_inline as usize) as u8,
        }
    })
}

/// The control segment's bits, by the three lowest flags, in their word as it is
/// written; `all` work requests complete visibly, or those that ask for it.
pub(super) fn control(all: bool) -> [u32; 8] {
    std::array::from_fn(|flags| {
        let flags = SendFlags::from_bits_retain(flags as u32);
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let bits = bit(
            all || flags.contains(SendFlags::SIGNALED),
            CONTROL_CQ_UPDATE,
        ) | bit(flags.contains(SendFlags::SOLICITED), CONTROL_SOLICITED)
            | bit(flags.contains(SendFlags::FENCE), CONTROL_FENCE);
        u32::from(bits).to_be()
    })
}

const _: () = {
    let three = SendFlags::SIGNALED.bits() | SendFlags::SOLICITED.bits() | SendFlags::FENCE.bits();
    assert!(three == 7);
};

/// What has become of a work request that was to be posted by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum PostedOne {
    /// It is not one of nearly all: nothing was done.
    No,
    /// The device has been told.
    Told,
    /// It is posted, but takes longer to tell: [`SendQueue::tell_posted`] is
    /// called next. Apart, so that whoever needs it not saves no registers.
    Written,
}

/// A work request that is written but for its inline data: they are copied when
/// all else is done, and few values are kept.
struct Written {
    /// Its first segment.
    control: NonNull<u64>,
    segments: u32,
    /// Where its data begins; inline data, with the word that says how much.
    data: NonNull<u64>,
    /// How much, as there is room for: whoever is asked again may say another
    /// length.
    length: u32,
}

impl Written {
    /// Copies inline data; those of a work request that is posted `ALONE` are in
    /// its first block.
    ///
    /// # Safety
    /// What was written for it is not the device's yet; with `INLINE` the
    /// element's memory is readable.
    #[inline(always)]
    unsafe fn copy<const INLINE: bool, const ALONE: bool>(&self, sge: &Sge) {
        if INLINE {
            // By its number alone, as the application gave it.
            let from = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
            // SAFETY: as the caller says; there is room for so many bytes, which
            // are some.
            unsafe {
                if ALONE {
                    write_short(self.data, from, self.length);
                } else {
                    write_long(self.data, from, self.length);
                }
            }
        }
    }
}

impl SendQueue {
    /// Adds a work request to the batch; false if it is not one of nearly all,
    /// and then nothing was done.
    #[inline(always)]
    pub fn push_one(&mut self, one: &impl OneElement) -> bool {
        // SAFETY: no data is read.
        unsafe { self.push_element::<false>(one) }
    }

    /// As [`SendQueue::push_one`], with the data copied now.
    ///
    /// # Safety
    /// The element's memory is readable.
    #[inline(always)]
    pub unsafe fn push_one_inline(&mut self, one: &impl OneElement) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.push_element::<true>(one) }
    }

    /// Posts a list of one work request: [`SendQueue::begin`],
    /// [`SendQueue::push_one`] and [`SendQueue::publish`] in one, if it is one of
    /// nearly all.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline(always)]
    pub unsafe fn post_one(&mut self, one: &impl OneElement) -> PostedOne {
        // SAFETY: no data is read; as the caller says.
        unsafe { self.post::<false>(one) }
    }

    /// As [`SendQueue::post_one`], with the data copied now.
    ///
    /// # Safety
    /// As there, and the element's memory is readable.
    #[inline(always)]
    pub unsafe fn post_one_inline(&mut self, one: &impl OneElement) -> PostedOne {
        // SAFETY: as the caller says.
        unsafe { self.post::<true>(one) }
    }

    /// # Safety
    /// With `INLINE` the element's memory is readable.
    #[inline(always)]
    unsafe fn push_element<const INLINE: bool>(&mut self, one: &impl OneElement) -> bool {
        let (at, mark) = (self.next, self.marked);
        if self.fence != 0 {
            return false;
        }
        let Some(written) = self.write_one::<INLINE, false>(one, at, mark) else {
            return false;
        };
        self.accepted = at;
        self.next = at.wrapping_add(blocks::<INLINE>(written.segments));
        // SAFETY: it was written just now; as the caller says.
        unsafe { written.copy::<INLINE, false>(one.sge()) };
        true
    }

    /// # Safety
    /// As for [`SendQueue::publish`]; with `INLINE` the element's memory is
    /// readable.
    #[inline(always)]
    unsafe fn post<const INLINE: bool>(&mut self, one: &impl OneElement) -> PostedOne {
        let (at, mark) = (self.posted, self.count);
        // Of inline data `inline_alone` says so.
        if !INLINE && self.fence_posted != 0 {
            return PostedOne::No;
        }
        let Some(written) = self.write_one::<INLINE, true>(one, at, mark) else {
            return PostedOne::No;
        };
        let next = at.wrapping_add(1);
        self.posted = next;
        // SAFETY: it was written just now; as the caller says.
        unsafe { written.copy::<INLINE, true>(one.sge()) };
        self.record.publish(next & 0xffff);
        let register = self.register.get();
        // SAFETY: one of the queue's, aligned to a block.
        if unsafe { register.try_copy_one::<true>(written.control) } {
            PostedOne::Told
        } else {
            self.accepted = at;
            PostedOne::Written
        }
    }

    /// Tells the device of what [`PostedOne::Written`] says.
    #[inline(never)]
    pub fn tell_posted(&mut self) {
        self.tell();
    }

    /// Writes a work request that begins at `at`, behind `mark` others and with
    /// no fence after them, but for inline data, and takes note of it. None if it
    /// is not one of nearly all; of those that are to be posted `ALONE`, those
    /// that have one block.
    #[inline(always)]
    fn write_one<const INLINE: bool, const ALONE: bool>(
        &mut self,
        one: &impl OneElement,
        at: u32,
        mark: u32,
    ) -> Option<Written> {
        let opcode = one.opcode().0;
        if opcode >= 16 {
            return None;
        }
        let is_in = |quick: u16| quick >> opcode & 1 != 0;
        let most = match (INLINE, ALONE) {
            (false, _) if is_in(self.quick) => self.longest,
            (true, false) if is_in(self.quick_inline) => self.max_inline,
            (true, true) => self.inline_alone[opcode as usize].into(),
            _ => return None,
        };
        let short = &OPERATIONS[opcode as usize];
        let length = one.sge().length;
        let usual = length.wrapping_sub(1) < most
            // In one piece, not over the end of the queue.
            && !(INLINE && !ALONE && {
                let from = self.offset(at) + usize::from(short.before);
                from + 4 + length as usize > self.mask as usize + 1
            })
            && self.has_room(mark);
        if !usual {
            return None;
        }
        // Not sooner, or it is kept meanwhile. Read, and not worked out from the
        // operation, which would be kept for that.
        // SAFETY: a field of a constant.
        let before = usize::from(unsafe { (&raw const short.before).read_volatile() });
        // Done with first, so that it is not kept.
        let mark = mark.wrapping_add(1);
        self.marked = mark;
        if ALONE {
            // No batch is under way.
            self.count = mark;
        }
        let offset = self.offset(at);
        self.note(offset, one.wr_id(), mark);
        let data_segments = if INLINE { segments_of(length) } else { 1 };
        let first = self.first(at, short, data_segments);
        // SAFETY: from `at` on there is a work request's room that is not the
        // device's, aligned to a block. Three segments lie in its first block;
        // inline data, as was looked at above, in the queue.
        unsafe {
            let to = as_one(self.blocks.add(offset).cast::<u64>());
            let immediate = one.immediate_or_key() & short.immediate;
            write_pair(to, first.to_be(), self.second(one.flags(), immediate));
            if before == 2 * SEGMENT {
                let key = u64::from(one.rkey()) << 32;
                write_pair(to.add(2), one.remote_addr().to_be(), key.to_be());
            }
            let data = to.byte_add(before);
            if !INLINE {
                let sge = one.sge();
                write_segment(data.cast(), &Sge { length, ..*sge });
            }
            Some(Written {
                control: to,
                segments: (before / SEGMENT) as u32 + data_segments,
                data,
                length,
            })
        }
    }

    /// The first 8 bytes of a control segment, in this machine's order.
    #[inline(always)]
    pub(super) fn first(&self, at: u32, short: &Short, data_segments: u32) -> u64 {
        let form = short.form + u64::from(data_segments);
        u64::from(at & 0xffff) << 40 | form | self.qpn
    }

    /// The other 8 bytes, as they are written.
    #[inline(always)]
    pub(super) fn second(&self, flags: SendFlags, immediate: u32) -> u64 {
        let bits = u64::from(self.control[(flags.bits() & 7) as usize]);
        let immediate = u64::from(immediate);
        // The bytes of the one and then of the other.
        if cfg!(target_endian = "little") {
            immediate << 32 | bits
        } else {
            bits << 32 | immediate
        }
    }
}

/// The fence bits that a work request has by what was before it, unless it asks
/// for more.
#[inline(always)]
pub(super) fn fence_unless(fence: u8, flags: SendFlags) -> u8 {
    if flags.contains(SendFlags::FENCE) {
        0
    } else {
        fence
    }
}

/// Blocks of a work request: without inline data, one.
#[inline(always)]
fn blocks<const INLINE: bool>(segments: u32) -> u32 {
    if INLINE {
        segments.div_ceil(PER_BLOCK)
    } else {
        1
    }
}
