//! The send queue.
//!
//! A batch is one [`SendQueue::push`] per work request, then one
//! [`SendQueue::publish`], which also rings the doorbell, or [`SendQueue::abort`].
//!
//! A WQE is a sequence of segments of 16 bytes: control, address (datagrams,
//! XRC), headers (raw packets, IPoIB), remote memory, atomic operands, data. The queue is a
//! ring of blocks of four segments. A WQE begins at a block and may wrap around the ring's
//! end; a segment does not straddle the end, inline data may.

mod cancel;
pub(crate) mod keys;
mod layouts;
pub(crate) mod packets;
mod tags;

pub use keys::LONGEST_WINDOW;
pub use layouts::{Interleaved, KeyLayout, LayoutChange};

use std::ptr::NonNull;
use std::sync::Arc;

use ring::{DoorbellRecord, OutstandingSlots, SHORT, cold_path, copy_short, write_pair};
use uverbs::Sge;

use crate::abi::{
    BLOCK, CONTROL_CQ_UPDATE, CONTROL_FENCE, CONTROL_SOLICITED, EXTENDED_AV, INLINE_SEGMENT,
    SEGMENT, opcode,
};
use crate::operation::{FastPath, ImmediateField, OPCODES, OperationFormat, SecondSegment};
use crate::plan::KeyChanges;
use crate::uar::DoorbellRegister;
use crate::{
    Address, Data, Destination, Opcode, Operands, PostError, QpQueues, RemoteMemory, SendFlags,
    SendWr, Service,
};

/// Exclusive limit of a scatter/gather element's length, which has 31 bits.
pub const MAX_SEGMENT: u32 = 1 << 31;

/// The segment count in a control segment's first 8 bytes.
const SEGMENTS: u32 = 0x3f;

/// Segments per block.
const PER_BLOCK: u32 = (BLOCK / SEGMENT) as u32;

/// The format and the control segment of a work request whose destination and data are
/// set by later calls, as with `ibv_wr_*`.
#[derive(Clone, Copy, Debug)]
pub struct OpenWqe {
    /// [`OperationFormat::NONE`] if the operation has no fast path or needs a fence.
    format: &'static OperationFormat,
    /// The second half of the control segment.
    control: u64,
}

impl Default for OpenWqe {
    fn default() -> Self {
        static NONE: OperationFormat = OperationFormat::NONE;
        Self {
            format: &NONE,
            control: 0,
        }
    }
}

/// A send queue.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates or makes a
/// system call. Only [`SendQueue::publish`] locks, on a UAR that other queues
/// share.
#[derive(Debug)]
pub struct SendQueue {
    /// Address of the blocks.
    blocks: NonNull<u8>,
    /// Size of the queue in bytes, less one.
    mask: u32,
    /// Index of the first block of the next work request; not masked.
    next: u32,
    /// The first 8 bytes of the last work request, which a doorbell carries.
    doorbell: u64,
    /// Number of work requests pushed so far, published or not.
    wr_count: u32,
    /// Value of `wr_count` at which the number of completed requests is read again.
    room_until: u32,
    /// Fence bits of the next work request.
    fence: u8,
    /// `next`, `wr_count` and `fence` as of the last published batch, to
    /// which [`SendQueue::abort`] returns.
    published_next: u32,
    published_wr_count: u32,
    published_fence: u8,
    capacity: u32,
    max_sge: u32,
    /// Maximum bytes of an element.
    longest: u32,
    max_inline: u32,
    /// Maximum bytes of one piece of inline data that is copied without a call.
    short_inline: u32,
    /// Segments of the longest work request that the queue was created for.
    longest_request: u32,
    /// Maximum elements of a key's layout.
    max_layout: u32,
    qp_num: u32,
    /// The QP number in a control segment's first 8 bytes.
    qpn: u64,
    service: Service,
    /// The formats of the service's operations.
    formats: &'static [OperationFormat; OPCODES],
    /// The control segment's flags, indexed by the three lowest send flags.
    flags: [u8; 8],
    record: DoorbellRecord,
    register: DoorbellRegister,
    /// The slots of `queues.sends`, one for each block.
    outstanding: OutstandingSlots,
    queues: Arc<QpQueues>,
}

// SAFETY: the memory belongs to `queues`, and is written under `&mut`.
unsafe impl Send for SendQueue {}
// SAFETY: public methods that take `&self` only read plain fields.
unsafe impl Sync for SendQueue {}

impl SendQueue {
    /// Creates the writer of a queue pair's send queue, which may be empty.
    pub(crate) fn new(
        queues: Arc<QpQueues>,
        qp_num: u32,
        signal_all: bool,
        register: DoorbellRegister,
    ) -> Self {
        let longest_request = queues.send.blocks / queues.send.capacity.max(1) * PER_BLOCK;
        let longest_request = longest_request.min(SEGMENTS);
        Self {
            blocks: queues.send_at(),
            mask: (queues.send.bytes() as u32).saturating_sub(1),
            next: 0,
            doorbell: 0,
            wr_count: 0,
            room_until: queues.send.capacity,
            fence: 0,
            published_next: 0,
            published_wr_count: 0,
            published_fence: 0,
            capacity: queues.send.capacity,
            max_sge: queues.send.max_sge,
            longest: if queues.send.max_sge == 0 {
                0
            } else {
                MAX_SEGMENT - 1
            },
            max_inline: queues.send.max_inline,
            short_inline: queues.send.max_inline.min(SHORT),
            longest_request,
            max_layout: match queues.send.keys {
                KeyChanges::Layouts => {
                    longest_request.saturating_sub(keys::LEADING_SEGMENTS) / PER_BLOCK * PER_BLOCK
                }
                _ => 0,
            },
            qp_num,
            qpn: u64::from(qp_num << 8),
            service: queues.service,
            formats: queues.service.formats(queues.plain_packets()),
            flags: control_flags(signal_all),
            record: queues.memory.records.record(1),
            register,
            outstanding: queues.sends.slots(),
            queues,
        }
    }

    pub(crate) fn queues(&self) -> &QpQueues {
        &self.queues
    }

    pub(crate) fn register(&self) -> &DoorbellRegister {
        &self.register
    }

    /// Maximum number of outstanding work requests.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Maximum number of scatter/gather elements of a work request.
    #[inline]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Whether work requests may change memory keys ([`crate::QpOptions::keys`]).
    /// False if the device's maximum WQE size is too small for them.
    pub fn changes_keys(&self) -> bool {
        self.queues.send.keys != KeyChanges::None
    }

    /// Called after the queue pair was reset and its completions were removed
    /// ([`crate::CqeRing::clean`]).
    pub fn reset(&mut self) {
        (self.next, self.wr_count, self.fence) = (0, 0, 0);
        (
            self.published_next,
            self.published_wr_count,
            self.published_fence,
        ) = (0, 0, 0);
        self.room_until = self.capacity;
        self.queues.sends.reset();
        self.record.publish(0);
    }

    /// Starts a batch, and discards one that was neither published nor aborted.
    #[inline]
    pub fn begin(&mut self) {
        if self.wr_count != self.published_wr_count {
            self.abort();
        }
    }

    /// Discards the batch: no completion can match its work requests.
    #[cold]
    pub fn abort(&mut self) {
        for block in 0..self.next.wrapping_sub(self.published_next) {
            let slot = self.published_next.wrapping_add(block);
            self.queues.sends.note(slot, 0, self.published_wr_count);
        }
        (self.next, self.wr_count, self.fence) = (
            self.published_next,
            self.published_wr_count,
            self.published_fence,
        );
    }

    /// Publishes the batch to the device and rings the doorbell. Returns whether
    /// it had work requests.
    ///
    /// # Safety
    /// Until a work request has completed, its memory stays registered and is used only as
    /// the operation permits: not written while the device reads it, neither read nor
    /// written while the device writes it. The caller of verbs ensures that; the type system
    /// cannot check it here.
    #[inline]
    pub unsafe fn publish(&mut self) -> bool {
        // SAFETY: as the caller says.
        unsafe { self.publish_fast() || self.publish_slow() }
    }

    /// [`SendQueue::publish`] of any batch, without the fast path.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline]
    pub unsafe fn publish_slow(&mut self) -> bool {
        let batch = self.wr_count.wrapping_sub(self.published_wr_count);
        if batch != 0 {
            self.ring_slow(batch);
            (
                self.published_next,
                self.published_wr_count,
                self.published_fence,
            ) = (self.next, self.wr_count, self.fence);
        }
        batch != 0
    }

    /// Fast path of [`SendQueue::publish`]: one work request of one block, by
    /// BlueFlame. Returns false if it does not apply; the batch is not published.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish_fast(&mut self) -> bool {
        let (next, wr_count, fence) = (self.next, self.wr_count, self.fence);
        if wr_count.wrapping_sub(self.published_wr_count) != 1
            || !(2..=PER_BLOCK).contains(&self.segments())
        {
            return false;
        }
        self.record.publish(next & 0xffff);
        // SAFETY: a block of the queue.
        let copied = unsafe {
            self.register
                .get()
                .try_copy_one(self.block(self.published_next))
        };
        if copied {
            (
                self.published_next,
                self.published_wr_count,
                self.published_fence,
            ) = (next, wr_count, fence);
        }
        copied
    }

    /// Number of segments of the last work request.
    #[inline]
    fn segments(&self) -> u32 {
        u64::from_be(self.doorbell) as u32 & SEGMENTS
    }

    /// Slow path of the doorbell, for a batch of `batch` work requests: rings, or copies a
    /// WQE of any length to the UAR; waits for the lock of a shared UAR.
    #[inline(never)]
    fn ring_slow(&self, batch: u32) {
        self.record.publish(self.next & 0xffff);
        let (register, segments) = (self.register.get(), self.segments());
        // BlueFlame of a single control segment saves nothing over a doorbell.
        if batch != 1 || segments == 1 {
            return register.ring(self.doorbell);
        }
        let blocks = segments.div_ceil(PER_BLOCK);
        let blocks = (0..blocks).map(|block| self.block(self.published_next.wrapping_add(block)));
        // SAFETY: blocks of the queue.
        unsafe { register.copy(blocks) };
    }

    /// Whether there is room for one more work request.
    #[inline]
    fn has_room(&mut self) -> bool {
        if self.wr_count != self.room_until {
            return true;
        }
        // Read the number of completed work requests again. Inline, because a call
        // would make the callers save registers.
        cold_path();
        let completed = self.queues.sends.completed();
        self.room_until = completed.wrapping_add(self.capacity);
        self.wr_count != self.room_until
    }

    /// Byte offset of a block.
    #[inline]
    fn offset(&self, at: u32) -> usize {
        (at.wrapping_mul(BLOCK as u32) & self.mask) as usize
    }

    #[inline]
    fn block(&self, at: u32) -> NonNull<u64> {
        // SAFETY: the mask keeps it inside the queue; of an empty queue it is 0.
        unsafe { self.blocks.add(self.offset(at)).cast() }
    }

    /// Adds a work request to the batch.
    ///
    /// # Errors
    /// [`PostError`]; the batch is unchanged.
    ///
    /// # Safety
    /// The memory of [`Data::Inline`] is readable; of raw packets, whose headers become
    /// part of the WQE, also that of [`Data::Sges`].
    // Without `always` the work request is passed in memory, which costs 26
    // instructions per send of a batch.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_, Address>) -> Result<(), PostError> {
        // SAFETY: as the caller says.
        if unsafe { self.push_fast(wr, wr.data) } {
            return Ok(());
        }
        // Copied, so that the fast path keeps the caller's value in registers.
        let wr = *wr;
        // SAFETY: as the caller says.
        unsafe { self.push_slow(&wr) }
    }

    /// Fast path of [`SendQueue::push`]: a send, write or read on RC or UC, or a packet
    /// whose headers are not in the WQE, of one element or one short piece of inline data,
    /// that needs no fence and does not wrap around the queue's end. `data` replaces
    /// `wr.data`, so that `wr` need not be copied; an address is not read, so `A` is any
    /// type. Returns false and pushes nothing if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    // Without `always` the work request is passed in memory: 54 instructions of a raw
    // send.
    #[inline(always)]
    pub unsafe fn push_fast<A>(&mut self, wr: &SendWr<'_, A>, data: Data<'_>) -> bool {
        let Some(format) = self.formats.get(wr.opcode.0 as usize) else {
            return false;
        };
        if format.fast != FastPath::Plain || self.fence != 0 {
            return false;
        }
        let control = |queue: &Self| queue.control_fast(format, wr.flags, wr.imm_or_key);
        // SAFETY: as the caller says.
        unsafe { self.push_plain(format, control, wr, data) }
    }

    /// Opens the batch's next work request.
    #[inline]
    pub fn open(&self, opcode: Opcode, flags: SendFlags, imm_or_key: u32) -> OpenWqe {
        match self.formats.get(opcode.0 as usize) {
            Some(format) if self.fence == 0 => OpenWqe {
                format,
                control: self.control_fast(format, flags, imm_or_key),
            },
            _ => {
                cold_path();
                OpenWqe::default()
            }
        }
    }

    /// The second half of the control segment of an operation with a fast path.
    #[inline]
    fn control_fast(&self, format: &OperationFormat, flags: SendFlags, imm_or_key: u32) -> u64 {
        let immediate = match format.immediate {
            ImmediateField::Data => imm_or_key,
            _ => 0,
        };
        second_half(self.control_flags(flags), immediate)
    }

    /// [`SendQueue::push_fast`] of the work request that `open_wqe` opened.
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    // Without `always` the work request is passed in memory: 31 instructions of a send.
    #[inline(always)]
    pub unsafe fn push_open_wqe(
        &mut self,
        open_wqe: OpenWqe,
        wr: &SendWr<'_, Address>,
        data: Data<'_>,
    ) -> bool {
        // SAFETY: as the caller says.
        open_wqe.format.fast == FastPath::Plain
            && unsafe { self.push_plain(open_wqe.format, |_| open_wqe.control, wr, data) }
    }

    /// [`SendQueue::push_fast`] of an operation that qualifies for it. `control` is the
    /// second half of the control segment.
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    // Without `always` the work request is passed in memory: 42 instructions of a send.
    #[inline(always)]
    unsafe fn push_plain<A>(
        &mut self,
        format: &OperationFormat,
        control: impl FnOnce(&Self) -> u64,
        wr: &SendWr<'_, A>,
        data: Data<'_>,
    ) -> bool {
        let at = self.next;
        let (first, blocks) = match data {
            Data::Sges([sge]) => {
                if sge.length.wrapping_sub(1) >= self.longest || !self.has_room() {
                    return false;
                }
                // SAFETY: at most three segments of the block are written.
                unsafe {
                    let (first, to) = self.write_header(at, format, control(self), wr, 1);
                    put(to, element(sge, sge.length));
                    (first, 1)
                }
            }
            Data::Inline([piece]) if !format.returns_data => {
                let data_segments = inline_segments(piece.length);
                let segments = u32::from(format.leading_segments) + data_segments;
                let end = self.offset(at) + segments as usize * SEGMENT;
                if piece.length.wrapping_sub(1) >= self.short_inline
                    || end > self.mask as usize + 1
                    || !self.has_room()
                {
                    return false;
                }
                let from = std::ptr::with_exposed_provenance(piece.addr as usize);
                // SAFETY: the WQE has room for `short_inline` bytes and does not wrap;
                // the piece is readable, as the caller says.
                unsafe {
                    let (first, to) =
                        self.write_header(at, format, control(self), wr, data_segments);
                    put_inline(to, from, piece.length);
                    (first, segments.div_ceil(PER_BLOCK))
                }
            }
            _ => return false,
        };
        self.advance(at, first, wr.wr_id, blocks);
        true
    }

    /// Writes the address of the batch's next work request, whose destination is then
    /// [`Destination::InWqe`]: of a datagram, or of a DC initiator without a stream.
    /// Returns false and writes nothing if it does not apply, or the queue is full.
    #[inline]
    pub fn write_address(&mut self, destination: Destination<'_, Address>) -> bool {
        let applies = matches!(
            (self.service, destination),
            (Service::DcInitiator, Destination::Dc { stream: 0, .. })
                | (Service::Datagram, Destination::Datagram { .. })
        );
        if !applies || !self.has_room() {
            return false;
        }
        let Some((address, _)) = self.address(destination) else {
            return false;
        };
        let mut to = self.block(self.next).cast::<u8>();
        for part in address {
            // SAFETY: the three segments of the block after the control segment; there is
            // room for a work request.
            unsafe {
                to = to.add(SEGMENT);
                put(to, part);
            }
        }
        true
    }

    /// [`SendQueue::push_open_wqe`] of one element, after [`SendQueue::write_address`] has
    /// returned true and with no other work request pushed in between.
    #[inline]
    pub fn push_addressed(
        &mut self,
        open_wqe: OpenWqe,
        wr: &SendWr<'_, Address>,
        sge: &Sge,
    ) -> bool {
        let format = open_wqe.format;
        if format.fast != FastPath::Addressed || sge.length.wrapping_sub(1) >= self.longest {
            return false;
        }
        debug_assert!(self.has_room());
        let (at, data) = (self.next, element(sge, sge.length));
        // SAFETY: the WQE has two blocks; control segment and address fill the first.
        unsafe {
            let first = self.first_half(at, format, 1);
            put(self.block(at).cast(), [first, open_wqe.control]);
            let mut to = self.block(at.wrapping_add(1)).cast();
            if format.second == SecondSegment::Remote {
                put(to, remote(wr.remote));
                to = to.add(SEGMENT);
            }
            put(to, data);
            self.advance(at, first, wr.wr_id, 2);
        }
        true
    }

    /// Slow path of [`SendQueue::push`]: any work request.
    ///
    /// # Errors
    /// As for [`SendQueue::push`].
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    #[inline(never)]
    pub unsafe fn push_slow(&mut self, wr: &SendWr<'_, Address>) -> Result<(), PostError> {
        let format = match self.formats.get(wr.opcode.0 as usize) {
            Some(format)
                if format.control_word != 0 && (!format.changes_keys || self.changes_keys()) =>
            {
                format
            }
            _ => return Err(PostError::BadOperation),
        };
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let data_segments = self.data_segments(format, wr.data)?;
        if format.changes_keys {
            return self.push_keys(format, wr);
        }
        if self.service.has_packets() {
            // SAFETY: as the caller says.
            return unsafe { self.push_packet(format, wr) };
        }
        let segments = u32::from(format.leading_segments) + data_segments;
        let mut control = self.control_slow(format, wr, data_segments);
        if let Destination::Dc { stream, .. } = wr.destination {
            control[1] |= control_stream(stream);
        }
        let mut to = self.writer();
        to.put(control);
        match (self.service, wr.destination) {
            (Service::Datagram | Service::DcInitiator, Destination::InWqe) => {
                to.skip(self.service.address().into());
            }
            (Service::Datagram | Service::DcInitiator, destination) => {
                let address = self.address(destination);
                let (address, _) = address.ok_or(PostError::BadOperation)?;
                address.into_iter().for_each(|part| to.put(part));
            }
            (Service::XrcInitiator, Destination::Xrc { remote_srqn }) => {
                to.put([words(remote_srqn, 0), 0]);
            }
            (Service::XrcInitiator, _) => return Err(PostError::BadOperation),
            _ => {}
        }
        if format.second == SecondSegment::Remote {
            to.put(remote(wr.remote));
        }
        if format.atomic {
            let Operands::Atomic { compare_add, swap } = wr.operands else {
                return Err(PostError::BadOperation);
            };
            let (swap_add, compare) = if format.opcode == opcode::ATOMIC_CS {
                (swap, compare_add)
            } else {
                (compare_add, 0)
            };
            to.put([swap_add.to_be(), compare.to_be()]);
        }
        match wr.data {
            // A length of 0 means 2 GiB to the device.
            Data::Sges(list) => (list.iter().filter(|sge| sge.length != 0))
                .for_each(|sge| to.put(element(sge, if format.atomic { 8 } else { sge.length }))),
            // SAFETY: readable, as the caller says.
            Data::Inline(pieces) => unsafe { to.put_inline(pieces.iter().copied()) },
        }
        self.advance(
            self.next,
            control[0],
            wr.wr_id,
            segments.div_ceil(PER_BLOCK),
        );
        self.fence = format.fence_after;
        Ok(())
    }

    /// Adds a raw WQE of the program to the batch; its control segment gives the number of
    /// segments. Index and queue pair number are set here, all other fields are the
    /// program's. Its completion has the opcode `IBV_WC_DRIVER2`.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] if the queue was not created for raw WQEs, or the WQE has
    /// no segments or more than the longest work request of this queue; [`PostError::Full`].
    ///
    /// # Safety
    /// `wqe` is readable for a control segment and for the segments that it counts.
    /// The device may do what the WQE says.
    pub unsafe fn push_raw(&mut self, wr_id: u64, wqe: *const u8) -> Result<(), PostError> {
        let wqe = wqe.cast::<[u64; 2]>();
        // SAFETY: as the caller says. Read once, since the program may change it.
        let [first, second] = unsafe { wqe.read_unaligned() };
        let first = u64::from_be(first);
        let segments = first as u32 & SEGMENTS;
        if !self.queues.raw_wqe || segments == 0 || segments > self.longest_request {
            return Err(PostError::BadOperation);
        }
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let index = u64::from(self.next & 0xffff) << 40;
        let first = first & 0xff00_00ff_0000_003f | index | self.qpn;
        let control = [first.to_be(), second];
        let mut to = self.writer();
        to.put(control);
        for segment in 1..segments as usize {
            // SAFETY: as the caller says.
            to.put(unsafe { wqe.add(segment).read_unaligned() });
        }
        let at = self.next;
        self.advance(at, control[0], wr_id, segments.div_ceil(PER_BLOCK));
        let slot = (self.offset(at) / BLOCK) as u32;
        self.queues.sends.post_marked(slot, wr_id, self.wr_count);
        self.fence = 0;
        Ok(())
    }

    /// Adds a work request that copies `length` bytes, up to 2 GiB, in local memory.
    /// `scratch` is 64 bytes that the device may write to. Its completion has the opcode
    /// `IBV_WC_DRIVER3`.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] if the queue was not created for it;
    /// [`PostError::MessageTooLong`], [`PostError::Full`].
    pub fn push_memcpy(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        [to, from]: [(u64, u32); 2],
        length: u32,
        scratch: (u64, u32),
    ) -> Result<(), PostError> {
        /// The opcode MMO with the opcode modifier for a copy.
        const COPY: u64 = (1 << 24 | opcode::MMO as u64) << 32;
        if !self.queues.memcpy {
            return Err(PostError::BadOperation);
        }
        if !(1..=MAX_SEGMENT).contains(&length) {
            return Err(PostError::MessageTooLong);
        }
        if !self.has_room() {
            return Err(PostError::Full);
        }
        let format = OperationFormat {
            control_word: COPY | 4,
            ..OperationFormat::NONE
        };
        let flags = self.control_flags(flags) | self.fence;
        let control = self.control(self.next, &format, 0, flags, 0);
        // The device takes a length of 0 as 2 GiB.
        let length = length & !MAX_SEGMENT;
        let segment =
            |(addr, lkey): (u64, u32), length| element(&Sge { addr, length, lkey }, length);
        let mut writer = self.writer();
        writer.put(control);
        writer.put(segment(scratch, 0));
        writer.put(segment(from, length));
        writer.put(segment(to, length));
        self.advance(self.next, control[0], wr_id, 1);
        self.fence = 0;
        Ok(())
    }

    /// Returns the segments of an address, and its stream; `None` if the service does not
    /// support the destination.
    #[inline(always)]
    fn address(&self, destination: Destination<'_, Address>) -> Option<([[u64; 2]; 3], u16)> {
        let (address, number, key, stream) = match (self.service, destination) {
            (
                Service::DcInitiator,
                Destination::Dc {
                    address,
                    remote_dctn,
                    access_key,
                    stream,
                },
            ) => (address, remote_dctn, access_key, stream),
            (
                Service::Datagram | Service::Underlay,
                Destination::Datagram {
                    address,
                    remote_qpn,
                    remote_qkey,
                },
            ) => (address, remote_qpn, u64::from(remote_qkey) << 32, 0),
            _ => return None,
        };
        // SAFETY: 48 bytes without padding are three segments.
        let [[_, rest], second, third]: [[u64; 2]; 3] = unsafe { std::mem::transmute(address.0) };
        // The number is not part of the address vector.
        let number = words(number & 0xff_ffff | EXTENDED_AV, 0);
        let segments = [[key.to_be(), number | rest], second, third];
        Some((segments, stream))
    }

    /// Returns the number of data segments; checks the limits.
    fn data_segments(&self, format: &OperationFormat, data: Data<'_>) -> Result<u32, PostError> {
        match data {
            Data::Sges(list) if list.len() > self.max_sge as usize => Err(PostError::TooManySges),
            Data::Sges([]) => Ok(0),
            _ if format.changes_keys => Err(PostError::BadOperation),
            Data::Sges(list) if list.iter().any(|sge| sge.length >= MAX_SEGMENT) => {
                Err(PostError::MessageTooLong)
            }
            Data::Sges(list) => Ok(list.iter().filter(|sge| sge.length != 0).count() as u32),
            Data::Inline(_) if format.returns_data => Err(PostError::BadOperation),
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

    /// Writes the control segment, whose second half is `control`, and the second segment
    /// if there is one, of a WQE without an address. Returns its first 8 bytes and the
    /// position of its data.
    ///
    /// # Safety
    /// There is room for a WQE at `at`.
    // Without `always` the work request is passed in memory: 30 instructions.
    #[inline(always)]
    unsafe fn write_header<A>(
        &self,
        at: u32,
        format: &OperationFormat,
        control: u64,
        wr: &SendWr<'_, A>,
        data_segments: u32,
    ) -> (u64, NonNull<u8>) {
        // SAFETY: as the caller says; the block has room for three segments.
        unsafe {
            let first = self.first_half(at, format, data_segments);
            let mut to = self.blocks.add(self.offset(at));
            put(to, [first, control]);
            to = to.add(SEGMENT);
            match format.second {
                SecondSegment::None => {}
                SecondSegment::Remote => {
                    put(to, remote(wr.remote));
                    to = to.add(SEGMENT);
                }
                SecondSegment::Ethernet => {
                    put(to, packets::segment(wr.flags));
                    to = to.add(SEGMENT);
                }
            }
            (first, to)
        }
    }

    /// The control segment of the next work request, for any operation.
    fn control_slow(
        &self,
        format: &OperationFormat,
        wr: &SendWr<'_, Address>,
        data_segments: u32,
    ) -> [u64; 2] {
        let immediate = match format.immediate {
            ImmediateField::Unused => 0,
            ImmediateField::Data => wr.imm_or_key,
            ImmediateField::Key => wr.imm_or_key.to_be(),
        };
        let flags = self.fenced_flags(wr.flags);
        self.control(self.next, format, data_segments, flags, immediate)
    }

    /// The control segment's flags of the next work request, for any operation.
    fn fenced_flags(&self, flags: SendFlags) -> u8 {
        let fence = match flags.contains(SendFlags::FENCE) {
            // `IBV_SEND_FENCE` is stronger.
            true => 0,
            false => self.fence,
        };
        self.control_flags(flags) | fence
    }

    #[inline(always)]
    fn control_flags(&self, flags: SendFlags) -> u8 {
        self.flags[(flags.bits() & 7) as usize]
    }

    /// The control segment of a work request at `at`; `immediate` is in wire order.
    #[inline(always)]
    fn control(
        &self,
        at: u32,
        format: &OperationFormat,
        data_segments: u32,
        flags: u8,
        immediate: u32,
    ) -> [u64; 2] {
        let first = self.first_half(at, format, data_segments);
        [first, second_half(flags, immediate)]
    }

    /// The first half of a control segment.
    #[inline]
    fn first_half(&self, at: u32, format: &OperationFormat, data_segments: u32) -> u64 {
        let index = u64::from(at & 0xffff) << 40;
        // No two summands have a bit in common.
        let first = format.control_word + index + u64::from(data_segments) + self.qpn;
        first.to_be()
    }

    /// Adds the work request written at `at`, which begins with `first`, to the batch.
    #[inline(always)]
    fn advance(&mut self, at: u32, first: u64, wr_id: u64, blocks: u32) {
        let wr_count = self.wr_count.wrapping_add(1);
        // SAFETY: `queues` owns one slot per block and outlives this queue.
        unsafe {
            self.outstanding
                .post(self.offset(at) / BLOCK, wr_id, wr_count)
        };
        self.wr_count = wr_count;
        self.doorbell = first;
        self.next = at.wrapping_add(blocks);
    }

    /// Returns the writer of the next work request, for which there is room.
    fn writer(&self) -> Segments {
        Segments {
            blocks: self.blocks,
            mask: self.mask as usize,
            at: self.offset(self.next),
        }
    }
}

/// Writer of a WQE's segments, in order, around the queue's end.
struct Segments {
    blocks: NonNull<u8>,
    /// Bytes of the queue less one; the queue is not empty.
    mask: usize,
    at: usize,
}

impl Segments {
    /// Writes the next segment.
    #[inline]
    fn put(&mut self, segment: [u64; 2]) {
        // SAFETY: the mask keeps the segment inside the queue. The device does not
        // own it: a work request writes no more segments than it has room for.
        unsafe { put(self.blocks.add(self.at & self.mask), segment) };
        self.at += SEGMENT;
    }

    /// Skips segments that are already written.
    fn skip(&mut self, segments: usize) {
        self.at += segments * SEGMENT;
    }

    /// Writes the segments of a whole block, at the beginning of one.
    #[inline]
    fn put_block(&mut self, block: [[u64; 2]; PER_BLOCK as usize]) {
        self.put_each(|n| block[n]);
    }

    /// [`Segments::put_block`], with a function that returns each segment.
    #[inline]
    fn put_each(&mut self, segment: impl Fn(usize) -> [u64; 2]) {
        // SAFETY: as in `put`; the end of the queue is that of a block.
        unsafe {
            let to = self.blocks.add(self.at & self.mask);
            for n in 0..PER_BLOCK as usize {
                put(to.add(n * SEGMENT), segment(n));
            }
        }
        self.at += BLOCK;
    }

    /// Writes inline data, which is last: its length, the pieces, and zeros up to
    /// the end of the last segment.
    ///
    /// # Safety
    /// The pieces are readable.
    unsafe fn put_inline(&mut self, pieces: impl Iterator<Item = Sge> + Clone) {
        let length: u32 = pieces.clone().map(|piece| piece.length).sum();
        if length == 0 {
            return;
        }
        let header = (length | INLINE_SEGMENT).to_be_bytes();
        // SAFETY: the header has that length; the caller guarantees the pieces.
        unsafe {
            self.copy(header.as_ptr(), header.len());
            for piece in pieces {
                self.copy_piece(piece.addr, piece.length as usize);
            }
        }
        self.fill_segment();
    }

    /// Writes zeros up to the end of the last segment.
    fn fill_segment(&mut self) {
        let rest = self.at.next_multiple_of(SEGMENT) - self.at;
        // SAFETY: zeros of that length.
        unsafe { self.copy([0; SEGMENT].as_ptr(), rest) };
    }

    /// Copies memory of the program.
    ///
    /// # Safety
    /// The memory is readable.
    unsafe fn copy_piece(&mut self, addr: u64, length: usize) {
        let from = std::ptr::with_exposed_provenance(addr as usize);
        // SAFETY: as the caller says.
        unsafe { self.copy(from, length) };
    }

    /// Copies bytes, around the queue's end.
    ///
    /// # Safety
    /// `from` is readable for `length` bytes.
    unsafe fn copy(&mut self, from: *const u8, length: usize) {
        let at = self.at & self.mask;
        let before_end = length.min(self.mask + 1 - at);
        // SAFETY: as in `put`; bytes past the queue's end wrap to its beginning.
        unsafe {
            let to = self.blocks.as_ptr();
            to.add(at).copy_from_nonoverlapping(from, before_end);
            to.copy_from_nonoverlapping(from.add(before_end), length - before_end);
        }
        self.at += length;
    }
}

/// The second half of a control segment; `immediate` is in wire order.
#[inline]
fn second_half(flags: u8, immediate: u32) -> u64 {
    let [a, b, c, d] = immediate.to_ne_bytes();
    u64::from_ne_bytes([0, 0, 0, flags, a, b, c, d])
}

/// The stream field of the second half of a control segment.
fn control_stream(stream: u16) -> u64 {
    let [a, b] = stream.to_be_bytes();
    u64::from_ne_bytes([0, a, b, 0, 0, 0, 0, 0])
}

/// Writes a segment by one store. The BlueFlame copy loads the same 16 bytes at
/// once, so that the processor can forward the store to that load.
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
pub(crate) fn words(first: u32, second: u32) -> u64 {
    (u64::from(first) << 32 | u64::from(second)).to_be()
}

/// The segment of remote memory: address, key.
#[inline]
fn remote(memory: RemoteMemory) -> [u64; 2] {
    [memory.addr.to_be(), words(memory.rkey, 0)]
}

/// The segment of a scatter/gather element ([`crate::abi::DataSegment`]).
#[inline]
fn element(sge: &Sge, length: u32) -> [u64; 2] {
    [words(length, sge.lkey), sge.addr.to_be()]
}

/// Number of segments of `length` bytes of inline data and their 4-byte header.
#[inline]
fn inline_segments(length: u32) -> u32 {
    (4 + length).div_ceil(SEGMENT as u32)
}

/// Writes inline data of one piece: its length, the data, and zeros up to the end
/// of the last segment.
///
/// # Safety
/// `to` is writable for the segments, and aligned to one; `from` is readable for
/// `length` bytes, at most [`SHORT`].
#[inline]
unsafe fn put_inline(to: NonNull<u8>, from: *const u8, length: u32) {
    let bytes = length as usize;
    // SAFETY: as the caller says. The last segment is cleared first, so the padding is zero.
    unsafe {
        put(to.add((bytes + 3) / SEGMENT * SEGMENT), [0; 2]);
        to.cast().write((length | INLINE_SEGMENT).to_be());
        copy_short(to.add(4).as_ptr(), from, bytes);
    }
}

/// The control segment's flags, by the three lowest send flags; with `all`, every
/// work request is signalled.
fn control_flags(all: bool) -> [u8; 8] {
    std::array::from_fn(|flags| {
        let flags = SendFlags::from_bits_retain(flags as u32);
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        bit(
            all || flags.contains(SendFlags::SIGNALED),
            CONTROL_CQ_UPDATE,
        ) | bit(flags.contains(SendFlags::SOLICITED), CONTROL_SOLICITED)
            | bit(flags.contains(SendFlags::FENCE), CONTROL_FENCE)
    })
}

const _: () = {
    let three = SendFlags::SIGNALED.bits() | SendFlags::SOLICITED.bits() | SendFlags::FENCE.bits();
    assert!(three == 7);
};
