//! The send queue's writer.
//!
//! [`SendQueue::push`] encodes work requests into entries of the ring;
//! [`SendQueue::publish`] publishes all of them at once, after which one doorbell
//! ([`crate::Doorbell`]) is due. [`SendQueue::abort`] discards what was not
//! published.

use ring::{Producer, Ring, SHORT, copy_short};

use crate::abi::{AtomicWr, BindMwWr, DmaInfo, FlushWr, SendWqe};
use crate::{Data, Destination, Opcode, Operands, PostError, RemoteMemory, SendFlags, SendWr, Sge};

/// The longest message that rxe takes: 2 GiB (`RXE_PORT_MAX_MSG_SZ`).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// A mapped send queue.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates, locks or
/// calls the system.
#[derive(Debug)]
pub struct SendQueue {
    producer: Producer,
    ring: Ring,
    /// The slot that the next work request of the batch gets.
    next: usize,
    max_sge: u32,
    max_inline: u32,
    /// Inline data of one piece up to this size is copied without a call.
    short_inline: u32,
}

impl SendQueue {
    /// A writer over a queue that was mapped with [`SendQueue::ENTRY_SIZE`] and
    /// whose entries hold `max_sge` elements or `max_inline` bytes; both are
    /// cut to what the entry size allows. Over a ring of smaller entries it
    /// holds nothing.
    pub fn new(mut ring: Ring, max_sge: u32, max_inline: u32) -> Self {
        if ring.stride() < Self::ENTRY_SIZE {
            ring.seal();
        }
        let room = ring.stride().saturating_sub(size_of::<SendWqe>()) as u32;
        let producer = Producer::new(ring.indices());
        Self {
            next: producer.tail(),
            producer,
            max_sge: max_sge.min(room / size_of::<Sge>() as u32),
            max_inline: max_inline.min(room),
            short_inline: max_inline.min(room).min(SHORT),
            ring,
        }
    }

    /// Bytes that an entry must have at least: the fixed part, and one element
    /// or the value of an atomic write. (The driver rounds up to a power of
    /// two, so that every entry has them.)
    pub const ENTRY_SIZE: usize = size_of::<SendWqe>() + size_of::<Sge>();

    /// Bytes of an entry with so much data in it at most.
    pub const fn entry_size(max_sge: u32, max_inline: u32) -> usize {
        let list = max_sge as usize * size_of::<Sge>();
        let inline = max_inline as usize;
        let data = if list > inline { list } else { inline };
        let least = size_of::<Sge>();
        size_of::<SendWqe>() + if data > least { data } else { least }
    }

    /// Work requests that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Scatter/gather elements that an entry holds at most.
    #[inline]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Starts a batch; one that was not published is discarded.
    #[inline]
    pub fn begin(&mut self) {
        self.abort();
    }

    /// Adds a work request to the batch.
    ///
    /// Operands are not checked against the opcode: the driver completes with
    /// an error what it cannot do.
    ///
    /// # Errors
    /// [`PostError`]; the batch is as it was.
    ///
    /// # Safety
    /// The memory of [`Data::Inline`] is readable.
    // Otherwise it is a function, and the caller's value is assembled in memory:
    // 104 instructions, not 50, for a send of a list.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
        // SAFETY: as the caller says.
        if unsafe { self.push_fast(wr, wr.data) } {
            return Ok(());
        }
        // A copy, so that the caller's value needs no memory for the fast path.
        let wr = *wr;
        // SAFETY: as the caller says.
        unsafe { self.push_slow(&wr) }
    }

    /// Fast path of [`SendQueue::push`]: a connection's send, write or read of one
    /// element or one short piece of inline data, `data` in the place of `wr.data`.
    /// False, and nothing was done, if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    // As `SendQueue::push`.
    #[inline(always)]
    pub unsafe fn push_fast(&mut self, wr: &SendWr<'_, u32>, data: Data<'_>) -> bool {
        let (Destination::Connected, Operands::None) = (wr.destination, wr.operands) else {
            return false;
        };
        let Some(after) = self.producer.next_if_room(self.next) else {
            return false;
        };
        let entry = self.entry();
        match data {
            Data::Sges([sge]) if sge.length < MAX_MESSAGE => {
                // SAFETY: an entry that is not the device's, with room for an element.
                unsafe {
                    write_header(entry, wr, false);
                    write_dma(entry, sge.length, 1);
                    entry.add(1).cast::<Sge>().write(*sge);
                }
            }
            Data::Inline([piece]) if piece.length <= self.short_inline => {
                // SAFETY: the same, with room for so many bytes; they are readable, as
                // the caller says.
                unsafe {
                    write_header(entry, wr, true);
                    write_dma(entry, piece.length, 0);
                    let to = entry.add(1).cast();
                    copy_short(to, piece.addr as *const u8, piece.length as usize);
                }
            }
            _ => return false,
        }
        self.next = after;
        true
    }

    /// [`SendQueue::push`] of any work request.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn push_slow(&mut self, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
        let after = self.producer.after(self.next).ok_or(PostError::Full)?;
        // SAFETY: an entry of the ring that is not the device's, with room for
        // `max_sge` elements and `max_inline` bytes behind the fixed part, and at
        // least for one element; inline data is readable, as the caller says.
        unsafe {
            let entry = self.entry();
            let data = entry.add(1).cast::<u8>();
            write_header(entry, wr, matches!(wr.data, Data::Inline(_)));
            let (bytes, num_sge) = match (write_operands(entry, wr), wr.data) {
                (Some(bytes), _) => (bytes, 0),
                (None, Data::Sges(list)) => {
                    (self.write_sges(data.cast(), list)?, list.len() as u32)
                }
                (None, Data::Inline(pieces)) => (self.write_inline(data, pieces)?, 0),
            };
            write_dma(entry, bytes, num_sge);
        }
        self.next = after;
        Ok(())
    }

    /// The next entry.
    #[inline]
    fn entry(&self) -> *mut SendWqe {
        // SAFETY: `next` only ever is from the indices of the ring.
        unsafe { self.ring.slots().slot_inside(self.next) }
            .cast()
            .as_ptr()
    }

    /// Writes a scatter/gather list. Returns its bytes.
    ///
    /// # Safety
    /// There is room for `max_sge` elements.
    unsafe fn write_sges(&self, to: *mut Sge, list: &[Sge]) -> Result<u32, PostError> {
        if list.len() > self.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        // SAFETY: as the caller says.
        match unsafe { copy_sges(to, list) } {
            bytes if bytes > u64::from(MAX_MESSAGE) => Err(PostError::MessageTooLong),
            bytes => Ok(bytes as u32),
        }
    }

    /// Copies inline data. Returns its bytes.
    ///
    /// # Safety
    /// The pieces are readable; there is room for `max_inline` bytes.
    unsafe fn write_inline(&self, to: *mut u8, pieces: &[Sge]) -> Result<u32, PostError> {
        let mut length = 0;
        for piece in pieces {
            if piece.length > self.max_inline - length {
                return Err(PostError::InlineTooLong);
            }
            // SAFETY: readable, as the caller says, and there is room.
            unsafe {
                to.add(length as usize)
                    .copy_from_nonoverlapping(piece.addr as *const u8, piece.length as usize);
            }
            length += piece.length;
        }
        Ok(length)
    }

    /// Publishes the batch to the device. Returns whether it had work requests;
    /// only then is a doorbell due.
    ///
    /// # Safety
    /// The memory that the batch's work requests name stays registered and is
    /// used as the operation demands (not written while it is sent from,
    /// neither read nor written while it is received into) until each has
    /// completed. The caller of verbs must ensure that; the type system cannot
    /// check it here.
    #[inline]
    pub unsafe fn publish(&mut self) -> bool {
        let any = self.next != self.producer.tail();
        if any {
            self.producer.publish(self.next);
        }
        any
    }

    /// Discards the batch.
    #[inline]
    pub fn abort(&mut self) {
        self.next = self.producer.tail();
    }
}

/// Writes the fields of every work request, and a datagram's destination or the
/// remote memory of a read or write.
///
/// Entries are written in address order: alternating between their three cache
/// lines takes twice as long. Only fields that the driver reads for the operation
/// are written.
///
/// # Safety
/// The entry is writable.
// As `SendQueue::push`.
#[inline(always)]
unsafe fn write_header(entry: *mut SendWqe, wr: &SendWr<'_, u32>, inline: bool) {
    let mut flags = wr.flags;
    flags.set(SendFlags::INLINE, inline);
    // SAFETY: as the caller says.
    unsafe {
        (*entry).wr.wr_id = wr.wr_id;
        (*entry).wr.opcode = wr.opcode.0;
        (*entry).wr.send_flags = flags.bits();
        (*entry).wr.ex = wr.imm_or_key;
        if let Destination::Datagram {
            address,
            remote_qpn,
            remote_qkey,
        } = wr.destination
        {
            let ud = &raw mut (*entry).wr.wr.ud;
            (*ud).remote_qpn = remote_qpn;
            (*ud).remote_qkey = remote_qkey;
            (*ud).pkey_index = 0;
            (*ud).reserved = 0;
            (*ud).ah_num = *address;
        } else if wr.opcode.0 & Opcode::SEND.0 == 0 {
            // Reads and writes lack this bit of the opcode. Sends have it, except
            // those that invalidate, for which the driver ignores these fields.
            (*entry).wr.wr.rdma.remote_addr = wr.remote.addr;
            (*entry).wr.wr.rdma.rkey = wr.remote.rkey;
            (*entry).iova = wr.remote.addr;
        }
    }
}

/// Writes the operands of an operation that has some. Returns its bytes, if it
/// has no data besides.
///
/// # Safety
/// The entry is writable.
unsafe fn write_operands(entry: *mut SendWqe, wr: &SendWr<'_, u32>) -> Option<u32> {
    let RemoteMemory { addr, rkey } = wr.remote;
    // SAFETY: as the caller says; the value of an atomic write follows the fixed
    // part, as an element would.
    unsafe {
        let operation = &raw mut (*entry).wr.wr;
        match wr.operands {
            // The device divides no packets.
            Operands::None | Operands::Tso { .. } => None,
            Operands::Atomic { compare_add, swap } => {
                (*operation).atomic = AtomicWr {
                    remote_addr: addr,
                    compare_add,
                    swap,
                    rkey,
                    reserved: 0,
                };
                (*entry).iova = addr;
                None
            }
            Operands::AtomicWrite(value) => {
                (*operation).rdma.remote_addr = addr;
                (*operation).rdma.rkey = rkey;
                (*entry).iova = addr;
                entry.add(1).cast::<[u8; 8]>().write(value);
                Some(8)
            }
            Operands::Flush {
                length,
                placement,
                level,
            } => {
                (*operation).flush = FlushWr {
                    remote_addr: addr,
                    length,
                    rkey,
                    kind: placement,
                    level,
                };
                (*entry).iova = addr;
                Some(length)
            }
            Operands::Bind(bind) => {
                (*operation).mw = BindMwWr {
                    addr: bind.addr,
                    length: bind.length,
                    mr_lkey: bind.lkey,
                    mw_rkey: bind.window_rkey,
                    rkey: bind.rkey,
                    access: bind.access,
                };
                Some(0)
            }
        }
    }
}

/// Writes the amount of data, and the driver's fields that it neither sets before
/// it reads them nor leaves at zero.
///
/// # Safety
/// The entry is writable.
#[inline]
unsafe fn write_dma(entry: *mut SendWqe, bytes: u32, num_sge: u32) {
    // SAFETY: as the caller says.
    unsafe {
        (*entry).status = 0;
        (*entry).state = 0;
        DmaInfo::begin(&raw mut (*entry).dma, bytes, num_sge);
    }
}

/// Copies a scatter list. Returns its bytes.
///
/// # Safety
/// `to` has room for the list.
#[inline]
pub(crate) unsafe fn copy_sges(to: *mut Sge, list: &[Sge]) -> u64 {
    // SAFETY: by contract.
    unsafe {
        // The common case.
        if let [sge] = list {
            to.write(*sge);
            return sge.length.into();
        }
        to.copy_from_nonoverlapping(list.as_ptr(), list.len());
    }
    list.iter().map(|sge| u64::from(sge.length)).sum()
}
