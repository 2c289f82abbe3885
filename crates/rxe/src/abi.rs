//! Queue entries and driver responses of rdma_rxe.
//!
//! Facts from the kernel's include/uapi/rdma/rdma_user_rxe.h. Native byte order
//! unless a field says otherwise. An entry of a completion queue is a
//! [`WorkCompletion`](uverbs::WorkCompletion), an element of a scatter list
//! (`struct rxe_sge`) an [`Sge`].

#[cfg(test)]
mod c_headers;

use std::mem::offset_of;

use uverbs::{Sge, Udata};

/// Progress of a work request through its data (`struct rxe_dma_info`); the
/// scatter list, or inline data, or the value of an atomic write follows.
#[repr(C)]
pub struct DmaInfo {
    pub length: u32,
    pub resid: u32,
    pub cur_sge: u32,
    pub num_sge: u32,
    pub sge_offset: u32,
    pub reserved: u32,
}

impl DmaInfo {
    /// Writes the state of a work request that has made no progress.
    ///
    /// # Safety
    /// `info` is valid for writes.
    #[inline]
    pub unsafe fn begin(info: *mut Self, length: u32, num_sge: u32) {
        // SAFETY: by contract; each store covers the member named and the one
        // behind it (asserted below), which becomes zero.
        unsafe {
            (*info).length = length;
            store_then_zero(&raw mut (*info).resid, length);
            store_then_zero(&raw mut (*info).num_sge, num_sge);
        }
    }
}

/// Writes `value` to a word and zero to the next, in one store.
///
/// # Safety
/// Two words at `to` are valid for writes.
#[inline]
unsafe fn store_then_zero(to: *mut u32, value: u32) {
    let mut both = [0; 8];
    both[..4].copy_from_slice(&value.to_ne_bytes());
    // SAFETY: by contract.
    unsafe { to.cast::<u64>().write_unaligned(u64::from_ne_bytes(both)) };
}

const _: () = {
    assert!(offset_of!(DmaInfo, cur_sge) == offset_of!(DmaInfo, resid) + 4);
    assert!(offset_of!(DmaInfo, sge_offset) == offset_of!(DmaInfo, num_sge) + 4);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RdmaWr {
    pub remote_addr: u64,
    pub rkey: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AtomicWr {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct FlushWr {
    pub remote_addr: u64,
    pub length: u32,
    pub rkey: u32,
    pub kind: u8,
    pub level: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UdWr {
    pub remote_qpn: u32,
    pub remote_qkey: u32,
    pub pkey_index: u16,
    pub reserved: u16,
    pub ah_num: u32,
    pub pad: [u32; 4],
    /// The address vector, for kernels without address handle numbers; not used.
    pub av: [u32; 22],
}

/// Operands of a memory window bind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BindMwWr {
    /// Where the window begins.
    pub addr: u64,
    /// Its length in bytes; 0 unbinds it.
    pub length: u64,
    /// Local key of the memory region.
    pub mr_lkey: u32,
    /// Current rkey of the window.
    pub mw_rkey: u32,
    /// New rkey of the window.
    pub rkey: u32,
    /// Access flags.
    pub access: u32,
}

/// Operands of an operation.
#[repr(C)]
pub union OperationWr {
    pub rdma: RdmaWr,
    pub atomic: AtomicWr,
    pub flush: FlushWr,
    pub ud: UdWr,
    pub mw: BindMwWr,
}

/// A send work request (`struct rxe_send_wr`).
#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub reserved: u32,
    pub opcode: u32,
    pub send_flags: u32,
    /// Immediate data (big-endian) or the key to invalidate.
    pub ex: u32,
    pub wr: OperationWr,
}

/// An entry of a send queue (`struct rxe_send_wqe`). The driver keeps its own
/// progress in it and sets `mask`, the sequence numbers and `ack_length`
/// itself before it reads them.
#[repr(C)]
pub struct SendWqe {
    pub wr: SendWr,
    pub status: u32,
    pub state: u32,
    pub iova: u64,
    pub mask: u32,
    pub first_psn: u32,
    pub last_psn: u32,
    pub ack_length: u32,
    pub ssn: u32,
    pub has_rd_atomic: u32,
    pub dma: DmaInfo,
}

/// An entry of a receive queue (`struct rxe_recv_wqe`).
#[repr(C)]
pub struct RecvWqe {
    pub wr_id: u64,
    pub reserved: u32,
    pub padding: u32,
    pub dma: DmaInfo,
}

/// Where to map a queue (`struct mminfo`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MmapInfo {
    pub offset: u64,
    pub size: u32,
    pub pad: u32,
}

/// Driver response to CREATE_QP (`struct rxe_create_qp_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateQpResp {
    pub recv: MmapInfo,
    pub send: MmapInfo,
}

/// Driver response to CREATE_SRQ (`struct rxe_create_srq_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateSrqResp {
    pub queue: MmapInfo,
    pub srq_num: u32,
    pub reserved: u32,
}

/// Driver input to MODIFY_SRQ (`struct rxe_modify_srq_cmd`): the driver writes
/// the new queue's [`MmapInfo`] to this address instead of to the response.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ModifySrqCmd {
    pub mmap_info_addr: u64,
}

/// Driver response to CREATE_AH (`struct rxe_create_ah_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateAhResp {
    pub ah_num: u32,
    pub reserved: u32,
}

/// Structures without padding that are valid for every bit pattern, to be
/// handed to the kernel as bytes.
///
/// # Safety
/// No padding, no invalid values.
pub(crate) unsafe trait Pod: Copy + Default {
    fn bytes(&self) -> &[u8] {
        // SAFETY: no padding, so every byte is initialised.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: no padding, and whatever is written is a valid value.
        unsafe { std::slice::from_raw_parts_mut((&raw mut *self).cast(), size_of::<Self>()) }
    }
}
// SAFETY: 8 + 4 + 4 bytes, integers only.
unsafe impl Pod for MmapInfo {}
// SAFETY: two `MmapInfo`.
unsafe impl Pod for CreateQpResp {}
// SAFETY: an `MmapInfo` and two u32.
unsafe impl Pod for CreateSrqResp {}
// SAFETY: one u64.
unsafe impl Pod for ModifySrqCmd {}
// SAFETY: two u32.
unsafe impl Pod for CreateAhResp {}

/// Driver data that is a response only.
pub(crate) fn response<T: Pod>(to: &mut T) -> Udata<'_> {
    // SAFETY: rxe takes no input for the commands that this is used with, so
    // no address is named.
    unsafe { Udata::new(&[], to.bytes_mut()) }
}

const _: () = {
    assert!(size_of::<Sge>() == 16);
    assert!(size_of::<DmaInfo>() == 24);
    assert!(size_of::<UdWr>() == 120);
    assert!(size_of::<SendWr>() == 144);
    assert!(offset_of!(SendWr, wr) == 24);
    assert!(offset_of!(SendWqe, status) == 144);
    assert!(offset_of!(SendWqe, iova) == 152);
    assert!(offset_of!(SendWqe, has_rd_atomic) == 180);
    assert!(offset_of!(SendWqe, dma) == 184);
    assert!(size_of::<SendWqe>() == 208);
    assert!(offset_of!(RecvWqe, dma) == 16);
    assert!(size_of::<RecvWqe>() == 40);
    assert!(size_of::<MmapInfo>() == 16);
    assert!(size_of::<CreateQpResp>() == 32);
    assert!(size_of::<CreateSrqResp>() == 24);
};
