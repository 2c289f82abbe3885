//! What the data path writes work requests through: the queues of a device, as
//! far as lists (`post`) and function calls (`wr_ex`) use them alike.

use core::ffi::c_int;

use uverbs::{Opcode, SendFlags, Sge};

use crate::abi::*;

/// A send queue's writer. One caller at a time; errors are errnos.
pub trait Sends: 'static {
    /// A work request that is being written.
    type Entry<'q>: Entry
    where
        Self: 'q;

    /// Starts a batch. A batch before it that was not published is gone.
    fn begin(&mut self);

    /// The batch that was begun is not going to be published.
    fn abandon(&mut self) {}

    /// Opens an entry for an operation.
    fn open(
        &mut self,
        wr_id: u64,
        opcode: Opcode,
        flags: SendFlags,
    ) -> Result<Self::Entry<'_>, c_int>;

    /// Makes the opened entry part of the batch.
    fn accept(&mut self);

    /// The entry accepted last in this batch, if there is one.
    fn last(&mut self) -> Option<Self::Entry<'_>>;

    /// The last entry's data was set after it was accepted.
    fn settle(&mut self) {}

    /// Hands the batch to the device. Returns whether there was anything.
    ///
    /// # Safety
    /// The memory that the work requests name is used as their operations
    /// demand until they have completed.
    unsafe fn publish(&mut self) -> bool;

    /// Scatter/gather elements that an entry holds at most.
    fn max_sge(&self) -> u32;
}

/// A send work request that is being written.
pub trait Entry {
    /// Does the device take an atomic of these operands? Some leave it to the
    /// completion.
    fn takes_atomic(_remote_addr: u64, _list: &[Sge]) -> bool {
        true
    }

    /// Scatter/gather elements that it holds at most.
    fn max_sge(&mut self) -> u32;

    /// Immediate data (big-endian), or the key to invalidate.
    fn immediate_or_key(&mut self, value: u32);

    /// Remote memory of a write or a read.
    fn rdma(&mut self, remote_addr: u64, rkey: u32);

    /// Remote memory and operands of an atomic.
    fn atomic(&mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64);

    /// Where a datagram goes.
    ///
    /// # Safety
    /// `ah` is a live address handle of the queue pair's context.
    unsafe fn ud(&mut self, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32);

    /// The peer's shared receive queue that it goes to, of an XRC initiator.
    #[inline(always)]
    fn xrc(&mut self, _remote_srqn: u32) {}

    /// Binds a memory window.
    ///
    /// # Safety
    /// `mw` is null or live, and so is the region of `info`.
    unsafe fn bind_window(
        &mut self,
        mw: *mut ibv_mw,
        rkey: u32,
        info: &ibv_mw_bind_info,
    ) -> Result<(), c_int>;

    /// No data.
    fn no_data(&mut self);

    /// Data copied now from pieces, each a pointer and a length in bytes.
    ///
    /// # Safety
    /// Each piece is readable.
    unsafe fn inline(
        &mut self,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) -> Result<(), c_int>;

    /// Data gathered from, or scattered to, a list.
    fn gather(&mut self, list: &[Sge]) -> Result<(), c_int>;

    /// As [`Entry::gather`], of one element.
    fn gather_one(&mut self, sge: Sge) -> Result<(), c_int> {
        self.gather(&[sge])
    }

    /// Says whether the data is inline, against the flags given when it was
    /// opened; of no matter to a device that sees it by the entry.
    fn set_inline_flag(&mut self, _inline: bool) {}
}

/// A receive queue's writer. One caller at a time; errors are errnos.
pub trait Receives: Sized + 'static {
    /// The quick way to write a batch.
    type Quick<'q>: ReceivesQuickly;

    /// Starts a batch.
    ///
    /// # Safety
    /// The caller has the queue's lock ([`Receiver::lock`](crate::post::Receiver))
    /// or the application's promise in its place, until the batch is published.
    unsafe fn begin(&mut self) -> Self::Quick<'_>;

    /// Adds a receive to the batch.
    ///
    /// # Safety
    /// As for [`Receives::begin`].
    unsafe fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), c_int>;

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// As for [`Receives::begin`]. The memory of every list is left alone until
    /// its receive has completed.
    unsafe fn publish(&mut self);

    /// Scatter elements that a receive has at most.
    fn max_sge(&self) -> u32;
}

/// The quick way to write a batch of receives, of which nearly all have one
/// element. Where the batch ends need not be in memory meanwhile.
pub trait ReceivesQuickly {
    /// Adds a receive of one element. False, and nothing is done, if that takes
    /// a closer look: [`Receives::push`] says what is wrong, if anything is.
    fn push_one(&mut self, wr_id: u64, sge: &Sge) -> bool;

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// As for [`Receives::publish`].
    unsafe fn publish(self);

    /// Ends the quick way: the batch goes on by [`Receives`].
    fn keep(self);
}

/// Implements [`Sends`] by a queue's methods of the same names, and by what is
/// given.
macro_rules! sends {
    ($queue:ident, $entry:ident, { $($given:item)* }) => {
        impl $crate::writers::Sends for $queue {
            type Entry<'q> = $entry<'q>;

            #[inline(always)]
            fn open(
                &mut self,
                wr_id: u64,
                opcode: uverbs::Opcode,
                flags: uverbs::SendFlags,
            ) -> Result<$entry<'_>, c_int> {
                $queue::open(self, wr_id, opcode, flags).map_err(|error| error.errno())
            }
            #[inline(always)]
            fn accept(&mut self) {
                $queue::accept(self);
            }
            #[inline(always)]
            fn last(&mut self) -> Option<$entry<'_>> {
                $queue::last(self)
            }
            #[inline(always)]
            unsafe fn publish(&mut self) -> bool {
                // SAFETY: as the caller says.
                unsafe { $queue::publish(self) }
            }
            #[inline(always)]
            fn max_sge(&self) -> u32 {
                $queue::max_sge(self)
            }
            $($given)*
        }
    };
}
pub(crate) use sends;

/// Implements [`Entry`], likewise.
macro_rules! entry {
    ($entry:ident, { $($given:item)* }) => {
        impl $crate::writers::Entry for $entry<'_> {
            #[inline(always)]
            fn max_sge(&mut self) -> u32 {
                $entry::max_sge(self)
            }
            #[inline(always)]
            fn immediate_or_key(&mut self, value: u32) {
                $entry::immediate_or_key(self, value);
            }
            #[inline(always)]
            fn rdma(&mut self, remote_addr: u64, rkey: u32) {
                $entry::rdma(self, remote_addr, rkey);
            }
            #[inline(always)]
            fn atomic(&mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) {
                $entry::atomic(self, remote_addr, rkey, compare_add, swap);
            }
            #[inline(always)]
            fn no_data(&mut self) {
                $entry::no_data(self);
            }
            #[inline(always)]
            unsafe fn inline(
                &mut self,
                pieces: impl Iterator<Item = (*const u8, usize)>,
            ) -> Result<(), c_int> {
                // SAFETY: as the caller says.
                let copied = unsafe { self.inline_raw(pieces) };
                copied.map(drop).map_err(|error| error.errno())
            }
            #[inline(always)]
            fn gather(&mut self, list: &[uverbs::Sge]) -> Result<(), c_int> {
                let gathered = self.sge_list(list);
                gathered.map(drop).map_err(|error| error.errno())
            }
            $($given)*
        }
    };
}
pub(crate) use entry;

/// Implements [`Receives`] and [`ReceivesQuickly`], likewise.
macro_rules! receives {
    // Of methods that ask for the lock, and of those that do not.
    (@ locked $call:expr) => {
        // SAFETY: as the caller says.
        unsafe { $call }
    };
    (@ $call:expr) => {
        $call
    };
    ($queue:ident, $quick:ident $(, $locked:ident)?) => {
        impl $crate::writers::Receives for $queue {
            type Quick<'q> = $quick<'q>;

            #[inline(always)]
            unsafe fn begin(&mut self) -> $quick<'_> {
                $crate::writers::receives!(@ $($locked)? $queue::begin(self))
            }
            #[inline(always)]
            unsafe fn push(&mut self, wr_id: u64, list: &[uverbs::Sge]) -> Result<(), c_int> {
                let pushed = $crate::writers::receives!(@ $($locked)? $queue::push(self, wr_id, list));
                pushed.map_err(|error| error.errno())
            }
            #[inline(always)]
            unsafe fn publish(&mut self) {
                // SAFETY: as the caller says.
                unsafe { $queue::publish(self) }
            }
            #[inline(always)]
            fn max_sge(&self) -> u32 {
                $queue::max_sge(self)
            }
        }

        impl $crate::writers::ReceivesQuickly for $quick<'_> {
            #[inline(always)]
            fn push_one(&mut self, wr_id: u64, sge: &uverbs::Sge) -> bool {
                $quick::push_one(self, wr_id, sge)
            }
            #[inline(always)]
            unsafe fn publish(self) {
                // SAFETY: as the caller says.
                unsafe { $quick::publish(self) }
            }
            #[inline(always)]
            fn keep(self) {
                let _ = $quick::keep(self);
            }
        }
    };
}
pub(crate) use receives;
