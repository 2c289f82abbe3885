//! Send queue writer of the raw layer.

use std::marker::PhantomData;

use crate::device::{Doorbell, Opcode, Opened, SendFlags, SendWriter};
use crate::memory::MemorySlice;
use crate::operation::{self, RemoteAddr};
use crate::qp::{FlushRange, FlushTo, SendHalf, WITHOUT_WINDOWS};
use crate::raw::{Flags, Sge};
use crate::{AccessFlags, AddressHandle, Error, MemoryWindow, Result};

/// A send queue, borrowed from its half.
///
/// Entries are opened and finished one after another, then published together.
/// Entries that are not finished and published are discarded.
pub struct SendQueue<'h> {
    writer: SendWriter<'h>,
    doorbell: &'h mut Doorbell,
    /// The available operations as a bit set.
    operations: u32,
}

/// Returns the operation if not every queue has it. With an opcode that is known
/// at compile time, the check is mostly optimised out.
const fn rare(opcode: Opcode) -> Option<operation::Operation> {
    match opcode {
        Opcode::LOCAL_INV => Some(operation::Operation::LocalInvalidate),
        Opcode::BIND_MW => Some(operation::Operation::BindWindow),
        Opcode::ATOMIC_WRITE => Some(operation::Operation::AtomicWrite),
        Opcode::FLUSH => Some(operation::Operation::Flush),
        _ => None,
    }
}

#[cold]
fn refused(operation: operation::Operation) -> Error {
    match operation {
        operation::Operation::LocalInvalidate | operation::Operation::BindWindow => {
            Error::Invalid {
                what: WITHOUT_WINDOWS,
            }
        }
        _ => Error::Unsupported {
            what: "an operation that this device lacks",
        },
    }
}

impl SendHalf {
    /// Returns the queue without ownership tracking.
    #[inline(always)]
    pub fn raw(&mut self) -> SendQueue<'_> {
        let (queue, doorbell, operations) = self.lend();
        SendQueue {
            writer: queue.writer(),
            doorbell,
            operations,
        }
    }
}

/// The next segment is immediate data, followed by `Next`.
#[derive(Debug)]
pub struct Immediate<Next>(PhantomData<Next>);
/// The next segment is a key, followed by `Next`.
#[derive(Debug)]
pub struct Key<Next>(PhantomData<Next>);
/// The next segment is a key, of an operation without data.
#[derive(Debug)]
pub struct OnlyKey(());
/// The next segment is a remote address, followed by `Next`.
#[derive(Debug)]
pub struct Remote<Next>(PhantomData<Next>);
/// The next segment is the remote address and operands of an atomic, followed by
/// `Next`.
#[derive(Debug)]
pub struct Atomic<Next>(PhantomData<Next>);
/// The next segment is the path of a datagram, followed by `Next`.
#[derive(Debug)]
pub struct Path<Next>(PhantomData<Next>);
/// The next segment is the data.
#[derive(Debug)]
pub struct Data(());
/// The next segment is the remote address and value of an atomic write.
#[derive(Debug)]
pub struct Value(());
/// The next segment is the remote memory of a flush.
#[derive(Debug)]
pub struct Range(());
/// The next and last segment is the binding of a window.
#[derive(Debug)]
pub struct Binding(());
/// All segments are complete.
#[derive(Debug)]
pub struct Ready(());

mod sealed {
    pub trait Operation {
        const OPCODE: super::Opcode;
    }
}

/// An operation, described by its segments.
pub trait Operation: sealed::Operation {
    /// The segments, in order.
    type Segments;
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $opcode:ident, $segments:ty;)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(());
        impl sealed::Operation for $name {
            const OPCODE: Opcode = Opcode::$opcode;
        }
        impl Operation for $name {
            type Segments = $segments;
        }
    )+};
}

operations! {
    /// A send over a connection.
    Send = SEND, Data;
    /// A send with immediate data.
    SendImmediate = SEND_WITH_IMM, Immediate<Data>;
    /// A send that invalidates a key of the peer.
    SendInvalidate = SEND_WITH_INV, Key<Data>;
    /// A datagram.
    SendTo = SEND, Path<Data>;
    /// A datagram with immediate data.
    SendToImmediate = SEND_WITH_IMM, Immediate<Path<Data>>;
    /// An RDMA write.
    Write = RDMA_WRITE, Remote<Data>;
    /// An RDMA write with immediate data.
    WriteImmediate = RDMA_WRITE_WITH_IMM, Immediate<Remote<Data>>;
    /// An RDMA read.
    Read = RDMA_READ, Remote<Data>;
    /// A compare-and-swap.
    CompareSwap = ATOMIC_CMP_AND_SWP, Atomic<Data>;
    /// A fetch-and-add; it uses the first operand.
    FetchAdd = ATOMIC_FETCH_AND_ADD, Atomic<Data>;
    /// An atomic write of 8 bytes
    /// ([`Context::can_write_atomically`](crate::Context::can_write_atomically)).
    AtomicWrite = ATOMIC_WRITE, Value;
    /// A flush ([`Context::can_flush`](crate::Context::can_flush)).
    Flush = FLUSH, Range;
    /// The invalidation of a local key.
    LocalInvalidate = LOCAL_INV, OnlyKey;
    /// The bind of a memory window.
    BindWindow = BIND_MW, Binding;
}

/// An entry of a send queue that still needs the segments `S`.
#[must_use = "an entry that is not finished is not posted"]
pub struct Wqe<'w, S> {
    opened: Opened<'w>,
    state: PhantomData<S>,
}

impl SendQueue<'_> {
    /// Opens the next entry for an operation.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Unsupported`] for an operation that the
    /// device lacks; [`Error::Invalid`] for one that changes a memory key, on a
    /// queue pair without
    /// [`memory_windows`](crate::qp::QueuePairBuilder::memory_windows).
    #[inline(always)]
    pub fn open<O: Operation>(&mut self, wr_id: u64, flags: Flags) -> Result<Wqe<'_, O::Segments>> {
        if let Some(operation) = rare(O::OPCODE)
            && self.operations & 1 << operation as u32 == 0
        {
            return Err(refused(operation));
        }
        let flags = flags.difference(SendFlags::INLINE);
        Ok(Wqe {
            opened: self.writer.open(wr_id, O::OPCODE, flags)?,
            state: PhantomData,
        })
    }

    /// Posts the finished entries, with one doorbell.
    ///
    /// # Errors
    /// [`Error::Doorbell`](crate::Error::Doorbell): they are posted nevertheless.
    /// (On a ConnectX, ENOMEM means that more are outstanding than the queue
    /// holds; the excess is posted by the next call.)
    ///
    /// # Safety
    /// The memory that the entries name stays registered until each has
    /// completed, and is used as the operation demands until then: not written
    /// while it is sent from, neither read nor written while it is received into.
    /// Address handles are kept as long. A window that is bound has no other bind
    /// in flight, of either layer, and gets none until [`Rebound::done`]. The
    /// completions are read by [`poll_raw`](crate::CompletionQueue::poll_raw) as
    /// long as operations of the safe layer are in flight on the same completion
    /// queue, because the safe layer would take an identifier for one of its own.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        if unsafe { self.writer.publish() } {
            self.doorbell.ring(|| self.writer.rewind())
        } else {
            Ok(())
        }
    }
}

impl<'w, S> Wqe<'w, S> {
    #[inline(always)]
    fn then<T>(self) -> Wqe<'w, T> {
        Wqe {
            opened: self.opened,
            state: PhantomData,
        }
    }
}

impl<'w, Next> Wqe<'w, Immediate<Next>> {
    /// Sets the immediate data, in host byte order.
    #[inline(always)]
    pub fn immediate(mut self, value: u32) -> Wqe<'w, Next> {
        self.opened.wqe().immediate_or_key(value.to_be());
        self.then()
    }
}

impl<'w, Next> Wqe<'w, Key<Next>> {
    /// Sets the key.
    #[inline(always)]
    pub fn key(mut self, rkey: u32) -> Wqe<'w, Next> {
        self.opened.wqe().immediate_or_key(rkey);
        self.then()
    }
}

impl<'w> Wqe<'w, OnlyKey> {
    /// Sets the key.
    #[inline(always)]
    pub fn key(mut self, rkey: u32) -> Wqe<'w, Ready> {
        let mut entry = self.opened.wqe();
        entry.immediate_or_key(rkey);
        entry.no_data();
        self.then()
    }
}

impl<'w, Next> Wqe<'w, Remote<Next>> {
    /// Sets the address of the remote memory.
    #[inline(always)]
    pub fn remote(mut self, at: RemoteAddr) -> Wqe<'w, Next> {
        self.opened.wqe().rdma(at);
        self.then()
    }
}

impl<'w, Next> Wqe<'w, Atomic<Next>> {
    /// Sets the address of the remote memory, the operand to compare or add, and
    /// the value to swap in.
    #[inline(always)]
    pub fn operands(mut self, at: RemoteAddr, compare_add: u64, swap: u64) -> Wqe<'w, Next> {
        self.opened.wqe().atomic(at, compare_add, swap);
        self.then()
    }
}

impl<'w> Wqe<'w, Value> {
    /// Sets the address of the remote memory, a multiple of 8, and the value to
    /// write.
    #[inline(always)]
    pub fn value(mut self, at: RemoteAddr, value: [u8; 8]) -> Wqe<'w, Ready> {
        self.opened.wqe().atomic_write(at, value);
        self.then()
    }
}

impl<'w> Wqe<'w, Range> {
    /// Sets the remote memory of a flush and how far it makes earlier writes take
    /// effect.
    #[inline(always)]
    pub fn range(mut self, at: RemoteAddr, range: FlushRange, to: FlushTo) -> Wqe<'w, Ready> {
        let (length, level) = range.encode();
        self.opened.wqe().flush(at, length, to.encode(), level);
        self.then()
    }
}

impl Wqe<'_, Binding> {
    /// Sets the target of the bind and the access rights of peers, and finishes
    /// the entry. From now on the window keeps the region of `to` alive, whether
    /// this is published or not; its key changes with [`Rebound::done`], before
    /// which it must not be bound again.
    ///
    /// # Errors
    /// [`Error::Limit`] for a range longer than the device's windows can span;
    /// [`Error::Invalid`] for a region without `MW_BIND`, or access that the
    /// region or a window does not allow.
    #[inline]
    pub fn bind(
        mut self,
        window: &MemoryWindow,
        to: &MemorySlice,
        access: AccessFlags,
    ) -> Result<Rebound> {
        window.check(Some(to), access)?;
        let bind = window.raw_binding(to, access);
        self.opened.wqe().bind_window(bind);
        self.opened.accept();
        Ok(Rebound {
            window: window.clone(),
            to: to.clone(),
            rkey: bind.rkey,
        })
    }
}

/// A written bind, whose outcome this layer does not learn. Drop it if the bind
/// was not published or has failed: the window then keeps its previous key.
#[derive(Debug)]
#[must_use = "the window has its new key when it is told that the bind is done"]
pub struct Rebound {
    window: MemoryWindow,
    to: MemorySlice,
    rkey: u32,
}

impl Rebound {
    /// Returns the key that the bind gives the window.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Gives the window its new key, and releases the regions that it was bound
    /// to before.
    ///
    /// # Safety
    /// The bind's successful completion was read, and no other bind of the window
    /// was posted since.
    pub unsafe fn done(self) {
        // SAFETY: the caller's obligation.
        unsafe { self.window.is_bound(&self.to, self.rkey) };
    }
}

impl<'w, Next> Wqe<'w, Path<Next>> {
    /// Sets the path, queue pair number and queue key of a datagram.
    #[inline(always)]
    pub fn to(mut self, path: &AddressHandle, qp_num: u32, qkey: u32) -> Wqe<'w, Next> {
        self.opened.wqe().datagram(path.number(), qp_num, qkey);
        self.then()
    }
}

impl<'w> Wqe<'w, Data> {
    /// Sets the data to one SGE.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) above 2 GiB.
    #[inline(always)]
    pub fn sge(mut self, sge: Sge) -> Result<Wqe<'w, Ready>> {
        self.opened.wqe().sge(sge)?;
        Ok(self.then())
    }

    /// Sets the data to a list of SGEs.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) for more SGEs than the queue pair
    /// supports, or above 2 GiB.
    #[inline(always)]
    pub fn sge_list(mut self, list: &[Sge]) -> Result<Wqe<'w, Ready>> {
        self.opened.wqe().sge_list(list)?;
        Ok(self.then())
    }

    /// Sets the data inline: it is copied now.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) for more bytes than the queue pair
    /// supports.
    #[inline(always)]
    pub fn inline(mut self, bytes: &[u8]) -> Result<Wqe<'w, Ready>> {
        let mut entry = self.opened.wqe();
        entry.set_inline();
        entry.inline(bytes)?;
        Ok(self.then())
    }

    /// Sets no data.
    #[inline(always)]
    pub fn no_data(mut self) -> Wqe<'w, Ready> {
        self.opened.wqe().no_data();
        self.then()
    }
}

impl Wqe<'_, Ready> {
    /// Finishes the entry and adds it to the batch.
    #[inline(always)]
    pub fn finish(self) {
        self.opened.accept();
    }
}
