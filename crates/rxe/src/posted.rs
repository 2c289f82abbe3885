//! What was posted, read where it lies: for who takes work requests in the
//! driver's place.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::abi::{BindMwWr, SendWqe};
use crate::{Opcode, SendFlags, Sge};

/// A send work request in a ring.
#[derive(Clone, Copy)]
pub struct PostedSend<'r> {
    entry: NonNull<SendWqe>,
    ring: PhantomData<&'r [u8]>,
}

/// Reads one field of the entry.
macro_rules! get {
    ($this:expr, $($field:ident).+) => {
        // SAFETY: whole and aligned (`at`); any bits are a value.
        unsafe { (&raw const (*$this.entry.as_ptr()).$($field).+).read() }
    };
}

impl<'r> PostedSend<'r> {
    /// The work request in the slot at `slot`.
    ///
    /// # Safety
    /// A [`crate::SendQueue`] has written it there and published it, and nobody
    /// writes to it during `'r`.
    #[inline(always)]
    pub unsafe fn at(slot: NonNull<u8>) -> Self {
        Self {
            entry: slot.cast(),
            ring: PhantomData,
        }
    }

    /// Its identifier.
    #[inline(always)]
    pub fn wr_id(&self) -> u64 {
        get!(self, wr.wr_id)
    }

    /// What is to be done.
    #[inline(always)]
    pub fn opcode(&self) -> Opcode {
        Opcode(get!(self, wr.opcode))
    }

    /// How.
    #[inline(always)]
    pub fn flags(&self) -> SendFlags {
        SendFlags::from_bits_retain(get!(self, wr.send_flags))
    }

    /// As [`crate::Wqe::immediate_or_key`].
    #[inline(always)]
    pub fn immediate_or_key(&self) -> u32 {
        get!(self, wr.ex)
    }

    /// Address and key of remote memory, of a read or write.
    #[inline(always)]
    pub fn rdma(&self) -> (u64, u32) {
        (
            get!(self, wr.wr.rdma.remote_addr),
            get!(self, wr.wr.rdma.rkey),
        )
    }

    /// Address and key of remote memory, and the operands, of an atomic.
    pub fn atomic(&self) -> (u64, u32, u64, u64) {
        (
            get!(self, wr.wr.atomic.remote_addr),
            get!(self, wr.wr.atomic.rkey),
            get!(self, wr.wr.atomic.compare_add),
            get!(self, wr.wr.atomic.swap),
        )
    }

    /// Address handle, queue pair and queue key, of a datagram.
    pub fn ud(&self) -> (u32, u32, u32) {
        (
            get!(self, wr.wr.ud.ah_num),
            get!(self, wr.wr.ud.remote_qpn),
            get!(self, wr.wr.ud.remote_qkey),
        )
    }

    /// Operands of a memory window's binding.
    pub fn bind_mw(&self) -> BindMwWr {
        get!(self, wr.wr.mw)
    }

    /// Its data, if it is no inline data.
    #[inline(always)]
    pub fn list(&self) -> &'r [Sge] {
        let count = get!(self, dma.num_sge) as usize;
        // SAFETY: the elements that the writer has put behind the fixed part;
        // nobody writes to them (`at`).
        unsafe { std::slice::from_raw_parts(self.entry.as_ptr().add(1).cast(), count) }
    }

    /// Its inline data.
    #[inline(always)]
    pub fn inline(&self) -> &'r [u8] {
        let length = get!(self, dma.length) as usize;
        // SAFETY: as in `list`.
        unsafe { std::slice::from_raw_parts(self.entry.as_ptr().add(1).cast(), length) }
    }
}
