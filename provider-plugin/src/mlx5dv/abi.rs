//! Structures of `mlx5dv.h` (rdma-core 65). A member that older headers lack is accessed only
//! if the caller's `comp_mask` requests it.

mod protection;

pub use protection::*;

use core::ffi::{c_int, c_void};

use crate::abi::*;
use crate::mlx5::flow_action::ibv_flow_action;

/// `struct mlx5dv_cqe_comp_caps`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_cqe_comp_caps {
    pub max_num: u32,
    pub supported_format: u32,
}

/// `struct mlx5dv_context`, up to the members of rdma-core 44.
#[repr(C)]
pub struct mlx5dv_context {
    pub version: u8,
    pub flags: u64,
    /// Requested members, then the valid ones.
    pub comp_mask: u64,
    pub cqe_comp_caps: mlx5dv_cqe_comp_caps,
    pub sw_parsing_caps: [u32; 2],
    pub striding_rq_caps: [u32; 5],
    pub tunnel_offloads_caps: u32,
    pub max_dynamic_bfregs: u32,
    pub max_clock_info_update_nsec: u64,
    pub flow_action_flags: u32,
    pub dc_odp_caps: u32,
    pub hca_core_clock: *mut c_void,
    pub num_lag_ports: u8,
    pub sig_caps: mlx5dv_sig_caps,
    pub dci_streams_caps: [u8; 2],
    pub max_wr_memcpy_length: usize,
    pub crypto_caps: mlx5dv_crypto_caps,
    pub max_dc_rd_atom: u64,
    pub max_dc_init_rd_atom: u64,
    /// `struct mlx5dv_reg`: value and mask.
    pub reg_c0: [u32; 2],
    pub ooo_recv_wrs_caps: mlx5dv_ooo_recv_wrs_caps,
}

/// `struct mlx5dv_ooo_recv_wrs_caps`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct mlx5dv_ooo_recv_wrs_caps {
    pub max_rc: u32,
    pub max_xrc: u32,
    pub max_dct: u32,
    pub max_ud: u32,
    pub max_uc: u32,
}

/// Bits of [`mlx5dv_context::flags`].
pub mod context_flag {
    pub const CQE_V1: u64 = 1 << 0;
    pub const MPW_ALLOWED: u64 = 1 << 2;
    pub const ENHANCED_MPW: u64 = 1 << 3;
    pub const CQE_128B_COMP: u64 = 1 << 4;
    pub const CQE_128B_PAD: u64 = 1 << 5;
    pub const PACKET_BASED_CREDIT_MODE: u64 = 1 << 6;
    pub const BLUEFLAME: u64 = 1 << 8;
}

/// Bits of [`mlx5dv_context::comp_mask`].
pub mod context_mask {
    pub const CQE_COMPRESION: u64 = 1 << 0;
    pub const SWP: u64 = 1 << 1;
    pub const STRIDING_RQ: u64 = 1 << 2;
    pub const TUNNEL_OFFLOADS: u64 = 1 << 3;
    pub const DYN_BFREGS: u64 = 1 << 4;
    pub const CLOCK_INFO_UPDATE: u64 = 1 << 5;
    pub const FLOW_ACTION_FLAGS: u64 = 1 << 6;
    pub const DC_ODP_CAPS: u64 = 1 << 7;
    pub const HCA_CORE_CLOCK: u64 = 1 << 8;
    pub const NUM_LAG_PORTS: u64 = 1 << 9;
    pub const SIGNATURE_OFFLOAD: u64 = 1 << 10;
    pub const DCI_STREAMS: u64 = 1 << 11;
    pub const WR_MEMCPY_LENGTH: u64 = 1 << 12;
    pub const CRYPTO_OFFLOAD: u64 = 1 << 13;
    pub const MAX_DC_RD_ATOM: u64 = 1 << 14;
    pub const OOO_RECV_WRS: u64 = 1 << 16;
}

/// `struct mlx5dv_context_attr`, of `mlx5dv_open_device`.
#[repr(C)]
pub struct mlx5dv_context_attr {
    pub flags: u32,
    pub comp_mask: u64,
}

/// `MLX5DV_CONTEXT_FLAGS_DEVX`.
pub const CONTEXT_DEVX: u32 = 1 << 0;

/// `struct mlx5dv_ctx_allocators`.
#[repr(C)]
pub struct mlx5dv_ctx_allocators {
    pub alloc: Option<unsafe extern "C" fn(usize, *mut c_void) -> *mut c_void>,
    pub free: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    pub data: *mut c_void,
}

/// `MLX5DV_CTX_ATTR_BUF_ALLOCATORS`.
pub const CTX_ATTR_BUF_ALLOCATORS: u32 = 1;

/// `struct mlx5dv_cq_init_attr`.
#[repr(C)]
pub struct mlx5dv_cq_init_attr {
    pub comp_mask: u64,
    pub cqe_comp_res_format: u8,
    pub flags: u32,
    pub cqe_size: u16,
}

/// Bits of [`mlx5dv_cq_init_attr::comp_mask`].
pub mod cq_mask {
    pub const COMPRESSED_CQE: u64 = 1 << 0;
    pub const FLAGS: u64 = 1 << 1;
    pub const CQE_SIZE: u64 = 1 << 2;
}

/// `MLX5DV_CQ_INIT_ATTR_FLAGS_CQE_PAD`.
pub const CQ_FLAG_CQE_PAD: u32 = 1 << 0;

/// `enum mlx5dv_cqe_comp_res_format`.
pub mod comp_format {
    pub const HASH: u8 = 1 << 0;
    pub const CSUM: u8 = 1 << 1;
}

/// `struct mlx5dv_qp_init_attr`.
#[repr(C)]
pub struct mlx5dv_qp_init_attr {
    pub comp_mask: u64,
    pub create_flags: u32,
    pub dc_init_attr: mlx5dv_dc_init_attr,
    pub send_ops_flags: u64,
}

/// `struct mlx5dv_dc_init_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct mlx5dv_dc_init_attr {
    pub dc_type: u32,
    /// Of an initiator `struct mlx5dv_dci_streams`: its first two bytes.
    pub dct_access_key: u64,
}

/// `enum mlx5dv_dc_type`.
pub mod dc_type {
    pub const DCT: u32 = 1;
    pub const DCI: u32 = 2;
}

/// Bits of [`mlx5dv_qp_init_attr::comp_mask`].
pub mod qp_mask {
    pub const QP_CREATE_FLAGS: u64 = 1 << 0;
    pub const DC: u64 = 1 << 1;
    pub const SEND_OPS_FLAGS: u64 = 1 << 2;
    pub const DCI_STREAMS: u64 = 1 << 3;
}

/// `enum mlx5dv_qp_create_send_ops_flags`.
pub mod send_ops {
    pub const MR_INTERLEAVED: u64 = 1 << 0;
    pub const MR_LIST: u64 = 1 << 1;
    pub const MKEY_CONFIGURE: u64 = 1 << 2;
    pub const RAW_WQE: u64 = 1 << 3;
    pub const MEMCPY: u64 = 1 << 4;
    /// Those that change memory keys.
    pub const KEYS: u64 = MR_INTERLEAVED | MR_LIST | MKEY_CONFIGURE;
    pub const ALL: u64 = KEYS | RAW_WQE | MEMCPY;
}

/// `struct mlx5dv_qp_ex`: functions for work requests of `ibv_wr_*`.
#[repr(C)]
pub struct mlx5dv_qp_ex {
    pub comp_mask: u64,
    pub wr_set_dc_addr: Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *mut ibv_ah, u32, u64)>,
    pub wr_mr_interleaved: Option<
        unsafe extern "C" fn(
            *mut mlx5dv_qp_ex,
            *mut mlx5dv_mkey,
            u32,
            u32,
            u16,
            *const mlx5dv_mr_interleaved,
        ),
    >,
    pub wr_mr_list:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *mut mlx5dv_mkey, u32, u16, *const ibv_sge)>,
    pub wr_mkey_configure: Option<
        unsafe extern "C" fn(*mut mlx5dv_qp_ex, *mut mlx5dv_mkey, u8, *const mlx5dv_mkey_conf_attr),
    >,
    pub wr_set_mkey_access_flags: Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, u32)>,
    pub wr_set_mkey_layout_list:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, u16, *const ibv_sge)>,
    pub wr_set_mkey_layout_interleaved:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, u32, u16, *const mlx5dv_mr_interleaved)>,
    pub wr_set_mkey_sig_block:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *const mlx5dv_sig_block_attr)>,
    pub wr_raw_wqe: Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *const c_void)>,
    pub wr_set_dc_addr_stream:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *mut ibv_ah, u32, u64, u16)>,
    pub wr_memcpy: Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, u32, u64, u32, u64, usize)>,
    pub wr_set_mkey_crypto:
        Option<unsafe extern "C" fn(*mut mlx5dv_qp_ex, *const mlx5dv_crypto_attr)>,
}

/// `struct mlx5dv_mkey`.
#[repr(C)]
pub struct mlx5dv_mkey {
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct mlx5dv_mkey_init_attr`.
#[repr(C)]
pub struct mlx5dv_mkey_init_attr {
    pub pd: *mut ibv_pd,
    pub create_flags: u32,
    pub max_entries: u16,
}

/// Bits of [`mlx5dv_mkey_init_attr::create_flags`].
pub mod mkey_flag {
    pub const INDIRECT: u32 = 1 << 0;
    pub const BLOCK_SIGNATURE: u32 = 1 << 1;
    pub const CRYPTO: u32 = 1 << 2;
    pub const UPDATE_TAG: u32 = 1 << 3;
    pub const REMOTE_INVALIDATE: u32 = 1 << 4;
}

/// `struct mlx5dv_mkey_conf_attr`.
#[repr(C)]
pub struct mlx5dv_mkey_conf_attr {
    pub conf_flags: u32,
    pub comp_mask: u64,
}

/// `MLX5DV_MKEY_CONF_FLAG_RESET_SIG_ATTR`.
pub const CONF_RESET_SIG_ATTR: u32 = 1 << 0;

/// `struct mlx5dv_mr_interleaved`.
#[allow(non_camel_case_types)]
pub type mlx5dv_mr_interleaved = mlx5::Interleaved;

/// `struct mlx5dv_sched_attr`.
#[repr(C)]
pub struct mlx5dv_sched_attr {
    pub parent: *const super::scheduling::Element,
    pub flags: u32,
    pub bw_share: u32,
    pub max_avg_bw: u32,
    pub comp_mask: u64,
}

/// Bits of [`mlx5dv_sched_attr::flags`].
pub mod sched_flag {
    pub const BW_SHARE: u32 = 1 << 0;
    pub const MAX_AVG_BW: u32 = 1 << 1;
}

/// Bits of [`mlx5dv_qp_init_attr::create_flags`].
pub mod qp_flag {
    pub const TUNNEL_OFFLOADS: u32 = 1 << 0;
    pub const TIR_ALLOW_SELF_LOOPBACK_UC: u32 = 1 << 1;
    pub const TIR_ALLOW_SELF_LOOPBACK_MC: u32 = 1 << 2;
    pub const DISABLE_SCATTER_TO_CQE: u32 = 1 << 3;
    pub const ALLOW_SCATTER_TO_CQE: u32 = 1 << 4;
    pub const PACKET_BASED_CREDIT_MODE: u32 = 1 << 5;
    pub const SIG_PIPELINING: u32 = 1 << 6;
    pub const OOO_DP: u32 = 1 << 7;
}

/// Entries of a queue in [`mlx5dv_qp`].
#[repr(C)]
pub struct mlx5dv_queue {
    pub buf: *mut c_void,
    pub wqe_cnt: u32,
    pub stride: u32,
}

/// A doorbell register in [`mlx5dv_qp`].
#[repr(C)]
pub struct mlx5dv_bf {
    pub reg: *mut c_void,
    pub size: u32,
}

/// `struct mlx5dv_qp`.
#[repr(C)]
pub struct mlx5dv_qp {
    pub dbrec: *mut u32,
    pub sq: mlx5dv_queue,
    pub rq: mlx5dv_queue,
    pub bf: mlx5dv_bf,
    /// Requested members, then the valid ones.
    pub comp_mask: u64,
    pub uar_mmap_offset: libc::off_t,
    pub tirn: u32,
    pub tisn: u32,
    pub rqn: u32,
    pub sqn: u32,
    pub tir_icm_addr: u64,
}

/// `MLX5DV_QP_MASK_UAR_MMAP_OFFSET`.
pub const QP_MASK_UAR_MMAP_OFFSET: u64 = 1 << 0;
/// `MLX5DV_QP_MASK_RAW_QP_HANDLES`.
pub const QP_MASK_RAW_QP_HANDLES: u64 = 1 << 1;
/// `MLX5DV_QP_MASK_RAW_QP_TIR_ADDR`.
pub const QP_MASK_RAW_QP_TIR_ADDR: u64 = 1 << 2;

/// `struct mlx5dv_cq`.
#[repr(C)]
pub struct mlx5dv_cq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub cqe_cnt: u32,
    pub cqe_size: u32,
    pub cq_uar: *mut c_void,
    pub cqn: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_srq`.
#[repr(C)]
pub struct mlx5dv_srq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub stride: u32,
    pub head: u32,
    pub tail: u32,
    pub comp_mask: u64,
    pub srqn: u32,
}

/// `MLX5DV_SRQ_MASK_SRQN`.
pub const SRQ_MASK_SRQN: u64 = 1 << 0;

/// `struct mlx5dv_rwq`.
#[repr(C)]
pub struct mlx5dv_rwq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub wqe_cnt: u32,
    pub stride: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_striding_rq_init_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct mlx5dv_striding_rq_init_attr {
    pub single_stride_log_num_of_bytes: u32,
    pub single_wqe_log_num_of_strides: u32,
    pub two_byte_shift_en: u8,
}

/// `struct mlx5dv_wq_init_attr`.
#[repr(C)]
pub struct mlx5dv_wq_init_attr {
    pub comp_mask: u64,
    pub striding_rq_attrs: mlx5dv_striding_rq_init_attr,
}

/// `MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ`.
pub const WQ_MASK_STRIDES: u64 = 1 << 0;

/// `struct mlx5dv_dm`.
#[repr(C)]
pub struct mlx5dv_dm {
    pub buf: *mut c_void,
    pub length: u64,
    /// Requested members, then the valid ones.
    pub comp_mask: u64,
    pub remote_va: u64,
}

/// `MLX5DV_DM_MASK_REMOTE_VA`.
pub const DM_MASK_REMOTE_VA: u64 = 1 << 0;

/// `struct mlx5dv_steering_anchor_attr`.
#[repr(C)]
pub struct mlx5dv_steering_anchor_attr {
    pub ft_type: u32,
    pub priority: u16,
    pub comp_mask: u64,
}

/// `struct mlx5dv_steering_anchor`.
#[repr(C)]
pub struct mlx5dv_steering_anchor {
    pub id: u32,
}

/// `struct mlx5dv_ah`.
#[repr(C)]
pub struct mlx5dv_ah {
    pub av: *mut c_void,
    pub comp_mask: u64,
}

/// `struct mlx5dv_pd`.
#[repr(C)]
pub struct mlx5dv_pd {
    pub pdn: u32,
    pub comp_mask: u64,
}

/// An object and its description in [`mlx5dv_obj`].
#[repr(C)]
pub struct DescribedObject<In, Out> {
    pub object: *mut In,
    pub out: *mut Out,
}

/// `struct mlx5dv_obj`.
#[repr(C)]
pub struct mlx5dv_obj {
    pub qp: DescribedObject<ibv_qp, mlx5dv_qp>,
    pub cq: DescribedObject<ibv_cq, mlx5dv_cq>,
    pub srq: DescribedObject<ibv_srq, mlx5dv_srq>,
    pub rwq: DescribedObject<ibv_wq, mlx5dv_rwq>,
    pub dm: DescribedObject<ibv_dm, mlx5dv_dm>,
    pub ah: DescribedObject<ibv_ah, mlx5dv_ah>,
    pub pd: DescribedObject<ibv_pd, mlx5dv_pd>,
    pub devx: DescribedObject<ContextFirst, mlx5dv_devx>,
}

/// `struct mlx5dv_devx`.
#[repr(C)]
pub struct mlx5dv_devx {
    pub handle: u32,
}

/// `struct mlx5dv_devx_umem`.
#[repr(C)]
pub struct mlx5dv_devx_umem {
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`.
#[repr(C)]
pub struct mlx5dv_devx_umem_in {
    pub addr: *mut c_void,
    pub size: usize,
    pub access: u32,
    pub pgsz_bitmap: u64,
    pub comp_mask: u64,
    pub dmabuf_fd: c_int,
}

/// `MLX5DV_UMEM_MASK_DMABUF`.
pub const UMEM_MASK_DMABUF: u64 = 1 << 0;

/// `struct mlx5dv_devx_uar`.
#[repr(C)]
pub struct mlx5dv_devx_uar {
    pub reg_addr: *mut c_void,
    pub base_addr: *mut c_void,
    pub page_id: u32,
    pub mmap_off: libc::off_t,
    pub comp_mask: u64,
}

/// Kinds of [`mlx5dv_devx_uar`] (`MLX5DV_UAR_ALLOC_TYPE_...`).
pub mod uar_type {
    pub const BF: u32 = 0;
    pub const NC: u32 = 1;
    pub const NC_DEDICATED: u32 = 1 << 31;
}

/// `struct mlx5dv_var`.
#[repr(C)]
pub struct mlx5dv_var {
    pub page_id: u32,
    pub length: u32,
    pub mmap_off: libc::off_t,
    pub comp_mask: u64,
}

/// `MLX5DV_VAR_ALLOC_FLAG_TLP`.
pub const VAR_FLAG_TLP: u32 = 1 << 0;

/// `struct mlx5dv_export_sizes`.
#[repr(C)]
pub struct mlx5dv_export_sizes {
    pub var_attrs_size: u32,
    pub devx_umem_attrs_size: u32,
    pub devx_obj_attrs_size: u32,
}

/// `struct mlx5dv_pp`.
#[repr(C)]
pub struct mlx5dv_pp {
    pub index: u16,
}

/// `struct mlx5dv_devx_cmd_comp`.
#[repr(C)]
pub struct mlx5dv_devx_cmd_comp {
    pub fd: c_int,
}

/// `struct mlx5dv_devx_event_channel`.
#[repr(C)]
pub struct mlx5dv_devx_event_channel {
    pub fd: c_int,
}

/// Commands that change the state of a queue pair (`MLX5_CMD_OP_..._QP`).
pub mod qp_command {
    pub const RST2INIT: u16 = 0x502;
    pub const INIT2RTR: u16 = 0x503;
    pub const RTR2RTS: u16 = 0x504;
    pub const RTS2RTS: u16 = 0x505;
    pub const SQERR2RTS: u16 = 0x506;
    pub const TO_ERR: u16 = 0x507;
    pub const TO_RST: u16 = 0x50a;
    pub const SQD2RTS: u16 = 0x50c;
    pub const INIT2INIT: u16 = 0x50e;
}

/// The beginning of an object whose first member is its context.
#[repr(C)]
pub struct ContextFirst {
    pub context: *mut ibv_context,
}

/// `enum mlx5dv_obj_type`.
pub mod obj {
    pub const QP: u64 = 1 << 0;
    pub const CQ: u64 = 1 << 1;
    pub const SRQ: u64 = 1 << 2;
    pub const RWQ: u64 = 1 << 3;
    pub const DM: u64 = 1 << 4;
    pub const AH: u64 = 1 << 5;
    pub const PD: u64 = 1 << 6;
    pub const DEVX: u64 = 1 << 7;
}

/// `struct mlx5dv_clock_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct mlx5dv_clock_info {
    pub nsec: u64,
    pub last_cycles: u64,
    pub frac: u64,
    pub mult: u32,
    pub shift: u32,
    pub mask: u64,
}

/// `struct mlx5dv_flow_match_parameters`; so many bytes follow.
#[repr(C)]
pub struct mlx5dv_flow_match_parameters {
    pub match_sz: usize,
}

/// `struct mlx5dv_flow_matcher_attr`.
#[repr(C)]
pub struct mlx5dv_flow_matcher_attr {
    pub kind: u32,
    pub flags: u32,
    pub priority: u16,
    pub match_criteria_enable: u8,
    pub match_mask: *mut mlx5dv_flow_match_parameters,
    pub comp_mask: u64,
    pub ft_type: u32,
    pub ib_port: u32,
}

/// `MLX5DV_FLOW_MATCHER_MASK_FT_TYPE`.
pub const MATCHER_MASK_TABLE: u64 = 1 << 0;
/// `MLX5DV_FLOW_MATCHER_MASK_IB_PORT`.
pub const MATCHER_MASK_PORT: u64 = 1 << 1;

/// `struct mlx5dv_alloc_dm_attr`.
#[repr(C)]
pub struct mlx5dv_alloc_dm_attr {
    /// C: `type`.
    pub kind: u32,
    pub comp_mask: u64,
}

/// The first 16 bytes of `struct mlx5dv_flow_action_attr`.
#[repr(C)]
pub struct mlx5dv_flow_action_attr {
    pub kind: u32,
    pub value: FlowActionValue,
}

/// Which member is set, the action's type says.
#[repr(C)]
#[derive(Clone, Copy)]
pub union FlowActionValue {
    pub qp: *mut ibv_qp,
    pub object: *mut ContextFirst,
    pub action: *mut ibv_flow_action,
    pub tag: u32,
}

/// `enum mlx5dv_flow_action_type`.
pub mod action {
    pub const DEST_QP: u32 = 0;
    pub const DROP: u32 = 1;
    pub const FLOW_ACTION: u32 = 3;
    pub const TAG: u32 = 4;
    pub const DEST_DEVX: u32 = 5;
    pub const COUNTERS_DEVX: u32 = 6;
    pub const DEFAULT_MISS: u32 = 7;
    pub const COUNTERS_DEVX_WITH_OFFSET: u32 = 8;
}
