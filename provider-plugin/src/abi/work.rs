//! Work requests and work completions.

use core::ffi::{c_int, c_void};

use super::{ibv_ah, ibv_mr, ibv_mw};

/// One element of a scatter/gather list.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// One piece of inline data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_data_buf {
    pub addr: *mut c_void,
    pub length: usize,
}

/// The memory that a window is bound to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw_bind_info {
    pub mr: *mut ibv_mr,
    pub addr: u64,
    pub length: u64,
    /// `IBV_ACCESS_*`.
    pub mw_access_flags: u32,
}

/// `ibv_bind_mw`'s argument.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw_bind {
    pub wr_id: u64,
    /// `IBV_SEND_*`.
    pub send_flags: u32,
    pub bind_info: ibv_mw_bind_info,
}

/// Target of an RDMA read, write, flush.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// Target and operands of an atomic operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// Address of a datagram.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `ibv_send_wr.wr`: which member is valid follows from the opcode and the
/// type of the queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_target {
    pub rdma: ibv_send_wr_rdma,
    pub atomic: ibv_send_wr_atomic,
    pub ud: ibv_send_wr_ud,
}

/// Operands of `IBV_WR_BIND_MW`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_bind_mw {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

/// Operands of `IBV_WR_TSO`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_tso {
    pub hdr: *mut c_void,
    pub hdr_sz: u16,
    pub mss: u16,
}

/// The last, unnamed union of `ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_extra {
    pub bind_mw: ibv_send_wr_bind_mw,
    pub tso: ibv_send_wr_tso,
}

/// A send work request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    /// One of `IBV_WR_*`.
    pub opcode: u32,
    /// `IBV_SEND_*`.
    pub send_flags: u32,
    /// Immediate data in network byte order, or the rkey to invalidate
    /// (C: an unnamed union of `imm_data` and `invalidate_rkey`).
    pub imm_data: u32,
    pub wr: ibv_send_wr_target,
    /// C: `qp_type.xrc.remote_srqn`.
    pub xrc_remote_srqn: u32,
    /// C: the unnamed union of `bind_mw` and `tso`.
    pub extra: ibv_send_wr_extra,
}

/// A receive work request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// A work completion.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wc {
    pub wr_id: u64,
    /// One of `IBV_WC_*` status values.
    pub status: u32,
    /// One of `IBV_WC_*` opcodes.
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Immediate data in network byte order, or the invalidated rkey
    /// (C: an unnamed union of `imm_data` and `invalidated_rkey`).
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    /// `IBV_WC_*` flags.
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `ibv_start_poll`'s argument; no bit is defined.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_poll_cq_attr {
    pub comp_mask: u32,
}

/// A change of tags (`ibv_post_srq_ops`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_ops_wr {
    pub wr_id: u64,
    pub next: *mut ibv_ops_wr,
    /// One of `IBV_WR_TAG_*`.
    pub opcode: u32,
    /// `IBV_OPS_*`.
    pub flags: u32,
    pub tm: ibv_ops_tm,
}

/// C: `struct` without a name, in [`ibv_ops_wr`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_ops_tm {
    /// Unexpected messages that were handled.
    pub unexpected_cnt: u32,
    /// Set by an addition, read by a removal.
    pub handle: u32,
    pub add: ibv_ops_add,
}

/// C: `struct` without a name, in [`ibv_ops_tm`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_ops_add {
    pub recv_wr_id: u64,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub tag: u64,
    pub mask: u64,
}

/// What `ibv_wc_read_tm_info` fills; rxe has no tag matching.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_wc_tm_info {
    pub tag: u64,
    pub priv_: u32,
}
