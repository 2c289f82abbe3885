//! Send queue of the raw layer.

use uverbs::{Destination, Operands};

use crate::device::{self, Opcode, SendData, SendWr, inline_piece};
use crate::memory::MemorySlice;
use crate::operation::{Operation, RemoteAddr};
use crate::qp::{FlushRange, FlushTo, SendHalf, WITHOUT_WINDOWS};
use crate::raw::{Flags, Sge};
use crate::{AccessFlags, AddressHandle, Error, MemoryWindow, Result};

/// A send queue, borrowed from its half.
///
/// Requests are pushed one after another, then published together. Requests that
/// are not published are discarded.
pub struct SendQueue<'h> {
    queue: &'h mut device::SendQueue,
    /// The available operations as a bit set.
    operations: u32,
}

impl SendHalf {
    /// Returns the queue without ownership tracking.
    #[inline]
    pub fn raw(&mut self) -> SendQueue<'_> {
        let (queue, operations) = self.raw_queue();
        SendQueue { queue, operations }
    }
}

/// A send work request: an operation with its operands, flags and data.
///
/// Each operation has a constructor. Further fields are set by [`sges`](Self::sges) or
/// [`inline`](Self::inline), [`immediate`](Self::immediate), [`invalidate`](Self::invalidate) and
/// [`flags`](Self::flags).
#[derive(Clone, Copy, Debug)]
#[must_use = "a request is posted by SendQueue::push and publish"]
pub struct SendRequest<'a> {
    /// The work request, without inline data.
    wr: SendWr<'a>,
    inline: Option<&'a [u8]>,
    /// Immediate data or a key to invalidate was set on an operation without such a field.
    misplaced: bool,
}

impl<'a> SendRequest<'a> {
    #[inline]
    const fn new(wr_id: u64, opcode: Opcode) -> Self {
        Self {
            wr: SendWr::new(wr_id, opcode, Flags::empty()),
            inline: None,
            misplaced: false,
        }
    }

    #[inline]
    fn at(mut self, remote: RemoteAddr) -> Self {
        self.wr.remote = remote.into();
        self
    }

    #[inline]
    fn with(mut self, operands: Operands<'a>) -> Self {
        self.wr.operands = operands;
        self
    }

    /// Creates a send over a connection.
    #[inline]
    pub const fn send(wr_id: u64) -> Self {
        Self::new(wr_id, Opcode::SEND)
    }

    /// Creates a datagram to a queue pair, with its queue key.
    #[inline]
    pub fn send_to(wr_id: u64, path: &'a AddressHandle, qp_num: u32, qkey: u32) -> Self {
        let mut this = Self::new(wr_id, Opcode::SEND);
        this.wr.destination = Destination::Datagram {
            address: path.address(),
            remote_qpn: qp_num,
            remote_qkey: qkey,
        };
        this
    }

    /// Creates an RDMA write to remote memory.
    #[inline]
    pub fn write(wr_id: u64, to: RemoteAddr) -> Self {
        Self::new(wr_id, Opcode::RDMA_WRITE).at(to)
    }

    /// Creates an RDMA read of remote memory.
    #[inline]
    pub fn read(wr_id: u64, from: RemoteAddr) -> Self {
        Self::new(wr_id, Opcode::RDMA_READ).at(from)
    }

    /// Creates a compare-and-swap of 8 bytes of remote memory. The old value is stored in
    /// 8 bytes of local memory.
    #[inline]
    pub fn compare_swap(wr_id: u64, at: RemoteAddr, compare: u64, swap: u64) -> Self {
        let operands = Operands::Atomic {
            compare_add: compare,
            swap,
        };
        Self::new(wr_id, Opcode::ATOMIC_CMP_AND_SWP)
            .at(at)
            .with(operands)
    }

    /// Creates a fetch-and-add to 8 bytes of remote memory; the old value is stored as for
    /// [`compare_swap`](Self::compare_swap).
    #[inline]
    pub fn fetch_add(wr_id: u64, at: RemoteAddr, add: u64) -> Self {
        let operands = Operands::Atomic {
            compare_add: add,
            swap: 0,
        };
        Self::new(wr_id, Opcode::ATOMIC_FETCH_AND_ADD)
            .at(at)
            .with(operands)
    }

    /// Creates an atomic write of 8 bytes to an address that is a multiple of 8
    /// ([`Context::can_write_atomically`](crate::Context::can_write_atomically)).
    #[inline]
    pub fn atomic_write(wr_id: u64, to: RemoteAddr, value: [u8; 8]) -> Self {
        Self::new(wr_id, Opcode::ATOMIC_WRITE)
            .at(to)
            .with(Operands::AtomicWrite(value))
    }

    /// Creates a flush of remote memory with placement type `to`
    /// ([`Context::can_flush_to`](crate::Context::can_flush_to)).
    #[inline]
    pub fn flush(wr_id: u64, at: RemoteAddr, range: FlushRange, to: FlushTo) -> Self {
        let (length, level) = range.encode();
        let operands = Operands::Flush {
            length,
            placement: to.encode(),
            level,
        };
        Self::new(wr_id, Opcode::FLUSH).at(at).with(operands)
    }

    /// Creates an invalidation of a local key.
    #[inline]
    pub const fn local_invalidate(wr_id: u64, rkey: u32) -> Self {
        let mut this = Self::new(wr_id, Opcode::LOCAL_INV);
        this.wr.imm_or_key = rkey;
        this
    }

    /// Creates a bind of a memory window.
    #[inline]
    pub fn bind_window(wr_id: u64, bind: &'a WindowBind) -> Self {
        Self::new(wr_id, Opcode::BIND_MW).with(Operands::Bind(&bind.operands))
    }

    /// Sets the flags; default: none.
    #[inline]
    pub const fn flags(mut self, flags: Flags) -> Self {
        self.wr.flags = flags;
        self
    }

    /// Sets the data to the memory of a list of SGEs; default: no data.
    #[inline]
    pub const fn sges(mut self, list: &'a [Sge]) -> Self {
        self.wr.data = SendData::Sges(list);
        self.inline = None;
        self
    }

    /// Sets the data to `bytes`, which are copied by the push.
    #[inline]
    pub const fn inline(mut self, bytes: &'a [u8]) -> Self {
        self.inline = Some(bytes);
        self
    }

    /// Adds immediate data, in host byte order, to a send, datagram or write.
    /// With any other operation the push is refused.
    #[inline]
    pub const fn immediate(mut self, value: u32) -> Self {
        match self.wr.opcode {
            Opcode::SEND | Opcode::SEND_WITH_IMM => self.wr.opcode = Opcode::SEND_WITH_IMM,
            Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_WITH_IMM => {
                self.wr.opcode = Opcode::RDMA_WRITE_WITH_IMM;
            }
            _ => self.misplaced = true,
        }
        self.wr.imm_or_key = value.to_be();
        self
    }

    /// Makes a send over a connection invalidate `rkey`, a key of the peer. With
    /// any other operation, and with immediate data, the push is refused.
    #[inline]
    pub const fn invalidate(mut self, rkey: u32) -> Self {
        match (self.wr.opcode, self.wr.destination) {
            (Opcode::SEND | Opcode::SEND_WITH_INV, Destination::Connected) => {
                self.wr.opcode = Opcode::SEND_WITH_INV;
            }
            _ => self.misplaced = true,
        }
        self.wr.imm_or_key = rkey;
        self
    }
}

/// Returns the operation if it is optional for a queue. For an opcode known at compile
/// time, the check is mostly optimised out.
#[inline]
const fn optional_operation(opcode: Opcode) -> Option<Operation> {
    match opcode {
        Opcode::LOCAL_INV => Some(Operation::LocalInvalidate),
        Opcode::BIND_MW => Some(Operation::BindWindow),
        Opcode::ATOMIC_WRITE => Some(Operation::AtomicWrite),
        Opcode::FLUSH => Some(Operation::Flush),
        _ => None,
    }
}

#[cold]
fn refused(operation: Operation) -> Error {
    match operation {
        Operation::LocalInvalidate | Operation::BindWindow => Error::Invalid {
            what: WITHOUT_WINDOWS,
        },
        _ => Error::Unsupported {
            what: operation.plural(),
        },
    }
}

#[cold]
fn misplaced() -> Error {
    Error::Invalid {
        what: "immediate data, or a key to invalidate, of an operation that has none",
    }
}

impl SendQueue<'_> {
    /// Adds a request to the batch.
    ///
    /// # Errors
    /// [`Error::QueueFull`]: the queue is full of outstanding requests.
    /// [`Error::Limit`]: more SGEs or inline data than the queue pair supports, or
    /// a message above 2 GiB. [`Error::Unsupported`]: an operation that the device
    /// lacks. [`Error::Invalid`]: an operation that the queue pair does not have,
    /// or that changes a memory key, on a queue pair without
    /// [`memory_windows`](crate::qp::QueuePairBuilder::memory_windows);
    /// immediate data, or a key, of an operation that has none.
    /// [`Error::WrongDomain`]: an address handle of another device.
    /// The batch is unchanged.
    #[inline(always)]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<()> {
        if let Some(operation) = optional_operation(request.wr.opcode) {
            if self.operations & 1 << operation as u32 == 0 {
                return Err(refused(operation));
            }
        }
        if request.misplaced {
            return Err(misplaced());
        }
        match request.inline {
            // SAFETY: there is no inline data.
            None => unsafe { self.queue.push(&request.wr, request.wr.data) },
            Some(bytes) => {
                let piece = [inline_piece(bytes)];
                // SAFETY: a slice is readable.
                unsafe { self.queue.push(&request.wr, SendData::Inline(&piece)) }
            }
        }
    }

    /// Posts the batch, with one doorbell.
    ///
    /// # Errors
    /// [`Error::Doorbell`](crate::Error::Doorbell) on rdma_rxe, whose doorbell is a system
    /// call: the batch is posted nevertheless.
    ///
    /// # Safety
    /// The memory that the requests name stays registered until each has
    /// completed, and is used as the operation demands until then: not written
    /// while it is sent from, neither read nor written while it is received into.
    /// Address handles are kept as long. For a window that is bound, no other bind is
    /// posted, on either layer, from the creation of its [`WindowBind`] until
    /// [`WindowBind::done`], and none is in flight. The completions are read by
    /// [`poll_raw`](crate::CompletionQueue::poll_raw) as long as operations of the
    /// safe layer are in flight on the same completion queue, because the safe layer would
    /// mistake an identifier for its own.
    #[inline]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.publish() }
    }
}

/// A bind of a memory window by the raw layer, whose outcome the caller reports. Drop it
/// if the bind was not published or has failed: the window then keeps its previous key.
///
/// ```no_run
/// # fn f(qp: &mut ringverbs::QueuePair, window: &ringverbs::MemoryWindow,
/// #     to: &ringverbs::MemorySlice) -> Result<(), ringverbs::Error> {
/// use ringverbs::AccessFlags;
/// use ringverbs::raw::{Flags, SendRequest, WindowBind};
/// let bind = WindowBind::new(window, to, AccessFlags::REMOTE_READ)?;
/// let mut queue = qp.raw_send();
/// queue.push(&SendRequest::bind_window(1, &bind).flags(Flags::SIGNALED))?;
/// // SAFETY: the window has no other bind in flight.
/// unsafe { queue.publish()? };
/// // ... the successful completion of 1 is read ...
/// // SAFETY: it was.
/// unsafe { bind.done() };
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the window has its new key after `done`"]
pub struct WindowBind {
    window: MemoryWindow,
    to: MemorySlice,
    operands: uverbs::Bind,
}

impl WindowBind {
    /// Prepares a bind of `window` to `to`, with the access rights `access` for peers. From
    /// now on the window keeps the region of `to` alive, whether or not the bind is
    /// published; its key changes with [`WindowBind::done`].
    ///
    /// # Errors
    /// [`Error::Limit`] for a range longer than the device's windows can span;
    /// [`Error::Invalid`] for a region without `MW_BIND`, or access that the
    /// region or a window does not allow.
    pub fn new(window: &MemoryWindow, to: &MemorySlice, access: AccessFlags) -> Result<Self> {
        window.check(Some(to), access)?;
        Ok(Self {
            operands: window.raw_binding(to, access),
            window: window.clone(),
            to: to.clone(),
        })
    }

    /// Returns the key that the bind gives the window.
    pub fn rkey(&self) -> u32 {
        self.operands.rkey
    }

    /// Gives the window its new key, and releases the regions that it was bound
    /// to before.
    ///
    /// # Safety
    /// The bind's successful completion was read, and no other bind of the window
    /// was posted since.
    pub unsafe fn done(self) {
        // SAFETY: the caller's obligation.
        unsafe { self.window.is_bound(&self.to, self.operands.rkey) };
    }
}
