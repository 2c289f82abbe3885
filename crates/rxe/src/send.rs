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
    /// Creates the writer of a queue that was mapped with [`SendQueue::ENTRY_SIZE`] and whose
    /// entries hold `max_sge` elements or `max_inline` bytes; both are limited by the entry
    /// size. A ring of smaller entries has no capacity.
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

    /// Minimum bytes of an entry: the fixed part, and one element or the value of an atomic
    /// write. (The driver rounds up to a power of two, so every entry has them.)
    pub const ENTRY_SIZE: usize = size_of::<SendWqe>() + size_of::<Sge>();

    /// Bytes of an entry for `max_sge` elements or `max_inline` bytes.
    pub const fn entry_size(max_sge: u32, max_inline: u32) -> usize {
        let list = max_sge as usize * size_of::<Sge>();
        let inline = max_inline as usize;
        let data = if list > inline { list } else { inline };
        let min_data = size_of::<Sge>();
        size_of::<SendWqe>() + if data > min_data { data } else { min_data }
    }

    /// Maximum number of outstanding work requests.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Maximum number of scatter/gather elements of a work request.
    #[inline]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Starts a batch, and discards one that was not published.
    #[inline]
    pub fn begin(&mut self) {
        self.abort();
    }

    /// Adds a work request to the batch.
    ///
    /// Operands are not checked against the opcode: the driver completes an unsupported work
    /// request with an error.
    ///
    /// # Errors
    /// [`PostError`]; the batch is unchanged.
    ///
    /// # Safety
    /// The memory of [`Data::Inline`] is readable.
    // Without `always` the work request is assembled in memory: 104 instructions, not 50,
    // for a send of a list.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
        // SAFETY: as the caller says.
        if unsafe { self.push_fast(wr, wr.data) } {
            return Ok(());
        }
        // Copied, so that the fast path keeps the caller's value in registers.
        let wr = *wr;
        // SAFETY: as the caller says.
        unsafe { self.push_slow(&wr) }
    }

    /// Fast path of [`SendQueue::push`]: a connected send, write or read of one element or one
    /// short piece of inline data, `data` instead of `wr.data`. It has no address, so `A` is
    /// any type. Returns false and does nothing if it does not apply.
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    // As `SendQueue::push`.
    #[inline(always)]
    pub unsafe fn push_fast<A>(&mut self, wr: &SendWr<'_, A>, data: Data<'_>) -> bool {
        let (Destination::Connected, Operands::None) = (&wr.destination, &wr.operands) else {
            return false;
        };
        let Some(after) = self.producer.next_if_room(self.next) else {
            return false;
        };
        let entry = self.entry();
        match data {
            Data::Sges([sge]) if sge.length < MAX_MESSAGE => {
                // SAFETY: the device does not own the entry, which has room for an element.
                unsafe {
                    write_header(entry, wr, false);
                    write_dma(entry, sge.length, 1);
                    entry.add(1).cast::<Sge>().write(*sge);
                }
            }
            Data::Inline([piece]) if piece.length <= self.short_inline => {
                // SAFETY: as above, with room for `short_inline` bytes; the piece is readable,
                // as the caller says.
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

    /// Slow path of [`SendQueue::push`]: any work request.
    ///
    /// # Errors
    /// As for [`SendQueue::push`].
    ///
    /// # Safety
    /// As for [`SendQueue::push`].
    #[inline(never)]
    pub unsafe fn push_slow(&mut self, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
        let after = self.producer.after(self.next).ok_or(PostError::Full)?;
        // SAFETY: the device does not own the entry, which has room for `max_sge` elements or
        // `max_inline` bytes, and at least one element, behind the fixed part; inline data is
        // readable, as the caller says.
        unsafe {
            let entry = self.entry();
            let data = entry.add(1).cast::<u8>();
            write_header(entry, wr, matches!(wr.data, Data::Inline(_)));
            write_destination(entry, wr);
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
        // SAFETY: `next` is always an index of the ring.
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
    /// Until a work request has completed, its memory stays registered and is used only as
    /// the operation permits: not written while the device reads it, neither read nor
    /// written while the device writes it. The caller of verbs ensures that; the type system
    /// cannot check it here.
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
unsafe fn write_header<A>(entry: *mut SendWqe, wr: &SendWr<'_, A>, inline: bool) {
    let mut flags = wr.flags;
    flags.set(SendFlags::INLINE, inline);
    // SAFETY: as the caller says.
    unsafe {
        (*entry).wr.wr_id = wr.wr_id;
        (*entry).wr.opcode = wr.opcode.0;
        (*entry).wr.send_flags = flags.bits();
        (*entry).wr.ex = wr.imm_or_key;
        let is_addressed = matches!(wr.destination, Destination::Datagram { .. });
        if !is_addressed && wr.opcode.0 & Opcode::SEND.0 == 0 {
            // Reads and writes lack this bit of the opcode. Sends have it, except
            // those that invalidate, for which the driver ignores these fields.
            (*entry).wr.wr.rdma.remote_addr = wr.remote.addr;
            (*entry).wr.wr.rdma.rkey = wr.remote.rkey;
            (*entry).iova = wr.remote.addr;
        }
    }
}

/// Writes the destination of a datagram.
///
/// # Safety
/// The entry is writable.
unsafe fn write_destination(entry: *mut SendWqe, wr: &SendWr<'_, u32>) {
    if let Destination::Datagram {
        address,
        remote_qpn,
        remote_qkey,
    } = wr.destination
    {
        // SAFETY: as the caller says.
        unsafe {
            let ud = &raw mut (*entry).wr.wr.ud;
            (*ud).remote_qpn = remote_qpn;
            (*ud).remote_qkey = remote_qkey;
            (*ud).pkey_index = 0;
            (*ud).reserved = 0;
            (*ud).ah_num = *address;
        }
    }
}

/// Writes the operands, if the operation has any. Returns the length of an operation whose
/// operands replace the data.
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
            // The device has no TSO.
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

/// Writes the length of the data, and the fields that the driver reads before it writes them.
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
        // Fast path.
        if let [sge] = list {
            to.write(*sge);
            return sge.length.into();
        }
        to.copy_from_nonoverlapping(list.as_ptr(), list.len());
    }
    list.iter().map(|sge| u64::from(sge.length)).sum()
}
