//! The writer that `SendQueue::push` replaces.

use std::ptr::NonNull;

use super::{MAX_MESSAGE, SendQueue};
use crate::abi::{AtomicWr, BindMwWr, DmaInfo, FlushWr, SendWqe};
use crate::{OneElement, Opcode, PostError, SendFlags, Sge};

impl SendQueue {
    /// The same for a device that rdma_rxe's driver does not drive and that
    /// counts a message's bytes in 31 bits: [`MAX_MESSAGE`] are too many.
    pub fn without_longest(self) -> Self {
        Self {
            takes_longest: false,
            ..self
        }
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) -> SendWriter<'_> {
        SendWriter {
            next: self.producer.tail(),
            queue: self,
        }
    }

    /// As [`Producer::rewind`].
    #[inline(always)]
    pub fn rewind(&mut self) {
        self.producer.rewind();
        self.next = self.producer.tail();
    }

    /// Opens the next entry for one operation, without data, remote address
    /// or key so far. Every batch starts with [`SendQueue::begin`].
    ///
    /// # Errors
    /// [`PostError::Full`]: as many work requests are outstanding as the
    /// queue holds.
    #[inline(always)]
    pub fn open(
        &mut self,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<Wqe<'_>, PostError> {
        // SAFETY: `next` only ever is from the indices of the ring.
        let (wqe, _) = unsafe { self.open_at(self.next, wr_id, opcode, flags) }?;
        Ok(wqe)
    }

    /// Opens the entry at `at`, and says where the one after it is.
    ///
    /// # Safety
    /// `at` is from the indices of the ring.
    #[inline(always)]
    unsafe fn open_at(
        &mut self,
        at: usize,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<(Wqe<'_>, usize), PostError> {
        let after = self.producer.after(at).ok_or(PostError::Full)?;
        // SAFETY: by contract.
        let mut wqe = unsafe { self.wqe_at(at) };
        wqe.begin(wr_id, opcode, flags);
        Ok((wqe, after))
    }

    /// Makes the opened entry part of the batch.
    #[inline(always)]
    pub fn accept(&mut self) {
        self.next = self.producer.indices().next(self.next);
    }

    /// The entry at `at`, which is not the device's.
    ///
    /// # Safety
    /// `at` is from the indices of the ring.
    #[inline(always)]
    unsafe fn wqe_at(&self, at: usize) -> Wqe<'_> {
        Wqe {
            // SAFETY: by contract.
            entry: unsafe { self.ring.slots().slot_inside(at) }.cast(),
            max_sge: self.max_sge,
            max_inline: self.max_inline,
            queue: self,
        }
    }

    /// The entry accepted last in this batch, to set its data afterwards;
    /// none in a batch without entries.
    #[inline(always)]
    pub fn last(&mut self) -> Option<Wqe<'_>> {
        if self.next == self.producer.tail() {
            return None;
        }
        let last = self.producer.indices().prev(self.next);
        // SAFETY: just taken from the indices.
        Some(unsafe { self.wqe_at(last) })
    }
}

/// The quick way to add the commonest work requests to a batch.
///
/// It keeps where the batch stands to itself, and so in a register;
/// [`SendWriter::keep`] puts it back.
pub struct SendWriter<'q> {
    next: usize,
    queue: &'q mut SendQueue,
}

impl<'q> SendWriter<'q> {
    /// Adds a send, write or read of one element to the batch. False, and
    /// nothing is done, if that takes a closer look: go on with
    /// [`SendQueue::open`], which says what is wrong, if anything is.
    #[inline(always)]
    pub fn push_one(&mut self, wr: &impl OneElement) -> bool {
        let Some((mut wqe, next)) = self.open_one(wr) else {
            return false;
        };
        let sge = wr.sge();
        let length = sge.length;
        // The longest message that there is, too, takes the closer look.
        if length >= MAX_MESSAGE {
            return false;
        }
        wqe.length(length, 1);
        // SAFETY: every entry has room for an element (`SendQueue::ENTRY_SIZE`).
        unsafe { wqe.data().cast::<Sge>().copy_from_nonoverlapping(sge, 1) };
        self.next = next;
        true
    }

    /// As [`SendWriter::push_one`], with the element's data copied now.
    ///
    /// # Safety
    /// The element is readable.
    #[inline(always)]
    pub unsafe fn push_one_inline(&mut self, wr: &impl OneElement) -> bool {
        let Some((mut wqe, next)) = self.open_one(wr) else {
            return false;
        };
        let sge = wr.sge();
        if sge.length > self.queue.max_inline {
            return false;
        }
        wqe.length(sge.length, 0);
        // SAFETY: readable by contract; room for `max_inline` bytes; and
        // `quick_inline` is no more than either limit.
        unsafe {
            wqe.data()
                .copy_from_nonoverlapping(sge.addr as *const u8, sge.length as usize)
        };
        self.next = next;
        true
    }

    #[inline(always)]
    fn open_one(&self, wr: &impl OneElement) -> Option<(Wqe<'_>, usize)> {
        let next = self.queue.producer.after_if_room(self.next)?;
        // SAFETY: `next` only ever is from the indices of the queue's ring.
        let mut wqe = unsafe { self.queue.wqe_at(self.next) };
        wqe.begin(wr.wr_id(), wr.opcode(), wr.flags());
        wqe.immediate_or_key(wr.immediate_or_key());
        // Of a send the driver reads no remote memory. Reads and writes have
        // not this bit of the opcode, sends have it (but those that
        // invalidate, which are rare).
        if wr.opcode().0 & Opcode::SEND.0 == 0 {
            wqe.rdma(wr.remote_addr(), wr.rkey());
        }
        Some((wqe, next))
    }

    /// Opens the next entry, as [`SendQueue::open`] does.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn open(
        &mut self,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<Opened<'_>, PostError> {
        // SAFETY: as in `open_one`.
        let (wqe, after) = unsafe { self.queue.open_at(self.next, wr_id, opcode, flags) }?;
        Ok(Opened {
            wqe,
            next: &mut self.next,
            after,
        })
    }

    /// As [`Producer::rewind`].
    #[inline(always)]
    pub fn rewind(&mut self) {
        self.queue.producer.rewind();
        self.next = self.queue.producer.tail();
    }

    /// Work requests that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// Hands what was accepted to the device, and goes on with the next batch.
    /// Returns whether there was anything; only then is a doorbell due.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish_any(&mut self) -> bool {
        self.queue.next = self.next;
        // SAFETY: as the caller says.
        unsafe { self.queue.publish() }
    }

    /// Hands the batch to the device, with at least one work request in it.
    ///
    /// # Safety
    /// As for [`SendQueue::publish`].
    #[inline(always)]
    pub unsafe fn publish(self) {
        self.queue.producer.publish(self.next);
    }

    /// Ends the quick way; the batch is the queue's, to go on with or to
    /// publish.
    #[inline(always)]
    pub fn keep(self) -> &'q mut SendQueue {
        self.queue.next = self.next;
        self.queue
    }
}

/// An entry that a [`SendWriter`] has opened; forgotten unless accepted.
pub struct Opened<'w> {
    /// The entry.
    pub wqe: Wqe<'w>,
    next: &'w mut usize,
    after: usize,
}

impl Opened<'_> {
    /// Makes it part of the batch.
    #[inline(always)]
    pub fn accept(self) {
        *self.next = self.after;
    }
}

/// One entry of a send queue while it is written.
///
/// The setters of data ([`Wqe::sge`], [`Wqe::sge_list`], [`Wqe::inline`],
/// [`Wqe::inline_raw`], [`Wqe::no_data`]) exclude each other, the last one
/// counts; one of them must be called for every operation that is posted.
pub struct Wqe<'q> {
    entry: NonNull<SendWqe>,
    max_sge: u32,
    max_inline: u32,
    queue: &'q SendQueue,
}

/// Assigns to fields of the entry.
macro_rules! set {
    ($wqe:expr, $($field:ident).+ = $value:expr) => {
        // SAFETY: the entry lies in the mapping, whole and aligned, and the
        // device does not read it before it is published (`SendQueue::open`).
        unsafe { (*$wqe.entry.as_ptr()).$($field).+ = $value }
    };
}

impl Wqe<'_> {
    /// The same entry, for a while.
    #[inline(always)]
    pub fn reborrow(&mut self) -> Wqe<'_> {
        Wqe {
            entry: self.entry,
            max_sge: self.max_sge,
            max_inline: self.max_inline,
            queue: self.queue,
        }
    }

    /// Writes what every operation has at the beginning of the entry.
    ///
    /// All fields are written as far as can be in the order of their addresses:
    /// an entry has three cache lines in use, none of which is near, and going
    /// to and fro between them takes twice as long.
    #[inline(always)]
    fn begin(&mut self, wr_id: u64, opcode: Opcode, flags: SendFlags) {
        set!(self, wr.wr_id = wr_id);
        set!(self, wr.opcode = opcode.0);
        set!(self, wr.send_flags = flags.bits());
    }

    /// Scatter/gather elements that the entry holds at most.
    #[inline(always)]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Bytes of inline data that the entry holds at most.
    #[inline(always)]
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// Immediate data, as it goes on the wire (big-endian), or the key to
    /// invalidate: both have the same place.
    #[inline(always)]
    pub fn immediate_or_key(&mut self, value: u32) -> &mut Self {
        set!(self, wr.ex = value);
        self
    }

    /// Remote memory of a read or write.
    #[inline(always)]
    pub fn rdma(&mut self, remote_addr: u64, rkey: u32) -> &mut Self {
        set!(self, wr.wr.rdma.remote_addr = remote_addr);
        set!(self, wr.wr.rdma.rkey = rkey);
        set!(self, iova = remote_addr);
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
        set!(
            self,
            wr.wr.atomic = AtomicWr {
                remote_addr,
                compare_add,
                swap,
                rkey,
                reserved: 0
            }
        );
        set!(self, iova = remote_addr);
        self
    }

    /// Remote memory and value of an atomic write, in place of data.
    #[inline(always)]
    pub fn atomic_write(&mut self, remote_addr: u64, rkey: u32, value: [u8; 8]) -> &mut Self {
        self.rdma(remote_addr, rkey);
        // SAFETY: entries have `SendQueue::ENTRY_SIZE` bytes, by `Ring::new`.
        unsafe { self.data().cast::<[u8; 8]>().write(value) };
        self.length(8, 0);
        self
    }

    /// Remote memory of a flush, its kind (global visibility 1, persistence
    /// 2) and selectivity level (range 0, whole region 1), in place of data.
    #[inline(always)]
    pub fn flush(
        &mut self,
        remote_addr: u64,
        rkey: u32,
        length: u32,
        kind: u8,
        level: u8,
    ) -> &mut Self {
        set!(
            self,
            wr.wr.flush = FlushWr {
                remote_addr,
                length,
                rkey,
                kind,
                level
            }
        );
        set!(self, iova = remote_addr);
        self.length(length, 0);
        self
    }

    /// The memory window to bind, in place of data.
    #[inline(always)]
    pub fn bind_mw(&mut self, bind: BindMwWr) -> &mut Self {
        set!(self, wr.wr.mw = bind);
        self.length(0, 0);
        self
    }

    /// Destination of a datagram: address handle number, queue pair and key.
    #[inline(always)]
    pub fn ud(&mut self, ah_num: u32, remote_qpn: u32, remote_qkey: u32) -> &mut Self {
        set!(self, wr.wr.ud.remote_qpn = remote_qpn);
        set!(self, wr.wr.ud.remote_qkey = remote_qkey);
        set!(self, wr.wr.ud.pkey_index = 0);
        set!(self, wr.wr.ud.reserved = 0);
        set!(self, wr.wr.ud.ah_num = ah_num);
        self
    }

    /// No data.
    #[inline(always)]
    pub fn no_data(&mut self) -> &mut Self {
        self.length(0, 0);
        self
    }

    /// Data in one element; of no bytes, it is left out. Returns the bytes.
    ///
    /// # Errors
    /// As [`Wqe::sge_list`].
    #[inline(always)]
    pub fn sge(&mut self, sge: Sge) -> Result<u32, PostError> {
        let count = u32::from(sge.length != 0);
        if count > self.max_sge {
            return Err(PostError::TooManySges);
        }
        if sge.length >= MAX_MESSAGE && !self.takes(sge.length.into()) {
            return Err(PostError::MessageTooLong);
        }
        self.length(sge.length, count);
        // Also if it is left out: room for it there is in every entry.
        // SAFETY: `SendQueue::ENTRY_SIZE`.
        unsafe { self.data().cast::<Sge>().write(sge) };
        Ok(sge.length)
    }

    /// Whether a message of so many bytes can be, of as many as there are at
    /// most, or more.
    #[cold]
    fn takes(&self, bytes: u64) -> bool {
        bytes == u64::from(MAX_MESSAGE) && self.queue.takes_longest
    }

    /// Data gathered from (or scattered to) a list. Returns the bytes in all.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::MessageTooLong`].
    #[inline(always)]
    pub fn sge_list(&mut self, list: &[Sge]) -> Result<u32, PostError> {
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        // SAFETY: room for `max_sge` elements behind the fixed part.
        let total = unsafe { super::copy_sges(self.data().cast(), list) };
        if total >= u64::from(MAX_MESSAGE) && !self.takes(total) {
            return Err(PostError::MessageTooLong);
        }
        self.length(total as u32, list.len() as u32);
        Ok(total as u32)
    }

    /// Data copied from `bytes` now. Returns how many.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`].
    #[inline(always)]
    pub fn inline(&mut self, bytes: &[u8]) -> Result<u32, PostError> {
        // SAFETY: a slice is readable for its length.
        unsafe { self.inline_raw([(bytes.as_ptr(), bytes.len())].into_iter()) }
    }

    /// Data copied now from pieces, each a pointer and a length in bytes.
    /// Returns the bytes in all.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`]; nothing is copied beyond what fits.
    ///
    /// # Safety
    /// Each piece is readable.
    #[inline(always)]
    pub unsafe fn inline_raw(
        &mut self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<u32, PostError> {
        let mut length = 0usize;
        for (from, bytes) in pieces {
            // No sum that could wrap: `length` never exceeds `max_inline`.
            if bytes > self.max_inline as usize - length {
                return Err(PostError::InlineTooLong);
            }
            // SAFETY: the piece is readable by this function's contract, and
            // there is room for `max_inline` bytes behind the fixed part.
            unsafe { std::ptr::copy_nonoverlapping(from, self.data().add(length), bytes) };
            length += bytes;
        }
        self.length(length as u32, 0);
        Ok(length as u32)
    }

    /// Says whether the data is inline, against the flags given at
    /// [`SendQueue::open`].
    #[inline(always)]
    pub fn set_inline_flag(&mut self, inline: bool) {
        // SAFETY: as in `set!`; written by `open` before.
        let flags = unsafe { (*self.entry.as_ptr()).wr.send_flags };
        let bit = SendFlags::INLINE.bits();
        set!(
            self,
            wr.send_flags = if inline { flags | bit } else { flags & !bit }
        );
    }

    /// Writes the amount of data, and what else every operation has.
    #[inline(always)]
    fn length(&mut self, bytes: u32, num_sge: u32) {
        // What the driver left there from the entry's last use, and neither
        // sets itself before reading it nor leaves at zero.
        set!(self, status = 0);
        set!(self, state = 0);
        // SAFETY: as in `set!`.
        unsafe { DmaInfo::begin(&raw mut (*self.entry.as_ptr()).dma, bytes, num_sge) }
    }

    /// What follows the fixed part.
    #[inline(always)]
    fn data(&self) -> *mut u8 {
        // SAFETY: the entry's size is at least that of the fixed part.
        unsafe { self.entry.as_ptr().add(1).cast() }
    }
}
