//! Driver data of commands, and queue entries.
//!
//! Facts from the kernel's include/uapi/rdma/mlx5-abi.h (driver data, native
//! byte order) and rdma-core's public mlx5dv.h (entries, big-endian).

#[cfg(test)]
mod c_headers;

use std::mem::offset_of;

/// Driver input to GET_CONTEXT (`struct mlx5_ib_alloc_ucontext_req_v2`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocUcontextReq {
    pub total_num_bfregs: u32,
    pub num_low_latency_bfregs: u32,
    pub flags: u32,
    pub comp_mask: u32,
    pub max_cqe_version: u8,
    pub reserved0: u8,
    pub reserved1: u16,
    pub reserved2: u32,
    pub lib_caps: u64,
}

/// `MLX5_IB_ALLOC_UCTX_DEVX`: the context may use DevX.
pub const ALLOC_UCTX_DEVX: u32 = 1 << 0;

/// `MLX5_LIB_CAP_4K_UAR`: several UARs in a page are understood.
pub const LIB_CAP_4K_UAR: u64 = 1 << 0;
/// `MLX5_LIB_CAP_DYN_UAR`: UARs are allocated by the process, none are given.
pub const LIB_CAP_DYN_UAR: u64 = 1 << 1;

/// Driver response to GET_CONTEXT (`struct mlx5_ib_alloc_ucontext_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocUcontextResp {
    pub qp_tab_size: u32,
    pub bf_reg_size: u32,
    pub tot_bfregs: u32,
    pub cache_line_size: u32,
    pub max_sq_desc_sz: u16,
    pub max_rq_desc_sz: u16,
    pub max_send_wqebb: u32,
    pub max_recv_wr: u32,
    pub max_srq_recv_wr: u32,
    pub num_ports: u16,
    pub flow_action_flags: u16,
    pub comp_mask: u32,
    pub response_length: u32,
    pub cqe_version: u8,
    pub cmds_supp_uhw: u8,
    pub eth_min_inline: u8,
    pub clock_info_versions: u8,
    pub hca_core_clock_offset: u64,
    pub log_uar_size: u32,
    pub num_uars_per_page: u32,
    pub num_dyn_bfregs: u32,
    pub dump_fill_mkey: u32,
}

/// Bit of [`AllocUcontextResp::comp_mask`]: `hca_core_clock_offset` is there
/// (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET`).
pub const HAS_CORE_CLOCK: u32 = 1 << 0;
/// Bit of [`AllocUcontextResp::comp_mask`]: `dump_fill_mkey` is there
/// (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_DUMP_FILL_MKEY`).
pub const HAS_NULL_KEY: u32 = 1 << 1;
/// Bit of [`AllocUcontextResp::comp_mask`]: queue pairs have enhanced connection options
/// (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE`).
pub const HAS_ECE: u32 = 1 << 2;
/// Bit of [`AllocUcontextResp::comp_mask`]: queue pairs can leave the state SQD for RTS
/// (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_SQD2RTS`).
pub const HAS_SQD2RTS: u32 = 1 << 3;
/// Bit of [`AllocUcontextResp::comp_mask`]: the low bits of keys can be changed
/// (`MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_MKEY_UPDATE_TAG`).
pub const HAS_MKEY_UPDATE_TAG: u32 = 1 << 5;
/// Bit of [`AllocUcontextResp::clock_info_versions`] for [`ClockInfo`]
/// (`1 << MLX5_IB_CLOCK_INFO_V1`).
pub const CLOCK_INFO_V1: u8 = 1 << 0;

/// [`AllocUcontextResp::eth_min_inline`]: WQEs of raw packets need no headers
/// (`MLX5_USER_INLINE_MODE_NONE`). Any other value, also of a kernel without the field,
/// asks for those of Ethernet.
pub const INLINE_MODE_NONE: u8 = 1;

/// Relation of the device's clock to the wall clock (`struct
/// mlx5_ib_clock_info`); mlx5_core updates it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockInfo {
    /// Odd during an update.
    pub sign: u32,
    /// Reserved.
    pub resv: u32,
    /// Wall clock time of the record in nanoseconds.
    pub nsec: u64,
    /// The device's time of the record in ticks.
    pub cycles: u64,
    /// The fraction of a nanosecond in `nsec`, scaled by `2^shift`.
    pub frac: u64,
    /// A tick in nanoseconds, scaled by `2^shift`.
    pub mult: u32,
    /// Binary logarithm of the scale.
    pub shift: u32,
    /// The bits of the device's time.
    pub mask: u64,
    /// Nanoseconds until which the record is updated.
    pub overflow_period: u64,
}

/// Driver response to ALLOC_PD (`struct mlx5_ib_alloc_pd_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocPdResp {
    pub pdn: u32,
}

/// Driver input to CREATE_CQ (`struct mlx5_ib_create_cq`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateCq {
    pub buf_addr: u64,
    pub db_addr: u64,
    pub cqe_size: u32,
    pub cqe_comp_en: u8,
    pub cqe_comp_res_format: u8,
    pub flags: u16,
    pub uar_page_index: u16,
    pub reserved0: u16,
    pub reserved1: u32,
}

/// `MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD`: CQEs are written whole.
pub const CQ_FLAG_CQE_128B_PAD: u16 = 1 << 0;

/// `MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX`: `uar_page_index` is the number of a
/// page of registers that was allocated, in which the queue is armed.
pub const CQ_FLAG_UAR_PAGE_INDEX: u16 = 1 << 1;

/// `MLX5_IB_CQE_RES_FORMAT_...`: contents of mini CQEs.
pub mod mini_format {
    pub const HASH: u8 = 1 << 0;
    pub const CHECKSUM: u8 = 1 << 1;
}

/// Driver response to CREATE_CQ (`struct mlx5_ib_create_cq_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateCqResp {
    pub cqn: u32,
    pub reserved: u32,
}

/// Driver input to RESIZE_CQ (`struct mlx5_ib_resize_cq`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ResizeCq {
    pub buf_addr: u64,
    pub cqe_size: u16,
    pub reserved0: u16,
    pub reserved1: u32,
}

/// Driver response to QUERY_DEVICE_EX (`struct mlx5_ib_query_device_resp`, its
/// beginning).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QueryDeviceResp {
    pub comp_mask: u32,
    pub response_length: u32,
    pub tso_caps: [u32; 2],
    pub rss_caps: [u64; 2],
    pub cqe_comp_caps: [u32; 2],
    pub packet_pacing_caps: [u32; 4],
    pub mlx5_ib_support_multi_pkt_send_wqes: u32,
    pub flags: u32,
    pub sw_parsing_caps: [u32; 2],
    pub striding_rq_caps: [u32; 6],
    pub tunnel_offloads_caps: u32,
    pub dci_streams_caps: [u8; 2],
    pub reserved: u16,
}

/// Bits of [`QueryDeviceResp::mlx5_ib_support_multi_pkt_send_wqes`]
/// (`enum mlx5_ib_mpw_caps`).
pub mod multi_packet {
    pub const ALLOWED: u32 = 1 << 1;
    pub const ENHANCED: u32 = 1 << 2;
}

/// Bits of [`QueryDeviceResp::flags`] (`MLX5_IB_QUERY_DEV_RESP_...`).
pub mod device_flag {
    pub const CQE_128B_COMP: u32 = 1 << 0;
    pub const CQE_128B_PAD: u32 = 1 << 1;
    pub const PACKET_BASED_CREDIT_MODE: u32 = 1 << 2;
    pub const SCAT2CQE_DCT: u32 = 1 << 3;
    pub const OOO_DP: u32 = 1 << 4;
}

/// A counter of a flow, and its kind (`struct mlx5_ib_flow_counters_desc`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterPoint {
    /// `enum ibv_counter_description`: 0 packets, 1 bytes.
    pub description: u32,
    /// The counter's number.
    pub index: u32,
}

/// The counters of a flow (`struct mlx5_ib_flow_counters_data`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CountersData {
    /// Address of the [`CounterPoint`]s.
    pub counters_data: u64,
    pub ncounters: u32,
    pub reserved: u32,
}

/// Driver input to CREATE_FLOW with counters (`struct mlx5_ib_create_flow`, with data of
/// one specification).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateFlow {
    pub ncounters_data: u32,
    pub reserved: u32,
    pub data: CountersData,
}

/// Driver input to CREATE_SRQ (`struct mlx5_ib_create_srq`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateSrq {
    pub buf_addr: u64,
    pub db_addr: u64,
    pub flags: u32,
    pub reserved0: u32,
    pub uidx: u32,
    pub reserved1: u32,
}

/// Driver response to CREATE_SRQ (`struct mlx5_ib_create_srq_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateSrqResp {
    pub srqn: u32,
    pub reserved: u32,
}

/// Driver input to CREATE_QP (`struct mlx5_ib_create_qp`, of which kernels know
/// a beginning).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateQp {
    pub buf_addr: u64,
    pub db_addr: u64,
    pub sq_wqe_count: u32,
    pub rq_wqe_count: u32,
    pub rq_wqe_shift: u32,
    pub flags: u32,
    pub uidx: u32,
    pub bfreg_index: u32,
    /// Of a DC target; of raw packets the address of their send queue.
    pub access_key: u64,
    pub ece_options: u32,
    /// Logarithms, of a DC initiator.
    pub concurrent_streams: u8,
    pub errored_streams: u8,
    pub reserved: u16,
}

/// `MLX5_QP_FLAG_TUNNEL_OFFLOADS`: checksums and hashes of packets inside tunnels.
pub const QP_FLAG_TUNNEL_OFFLOADS: u32 = 1 << 2;
/// `MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC`: unicast packets of the same context are received.
pub const QP_FLAG_TIR_ALLOW_SELF_LB_UC: u32 = 1 << 6;
/// `MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC`: as [`QP_FLAG_TIR_ALLOW_SELF_LB_UC`], multicast packets.
pub const QP_FLAG_TIR_ALLOW_SELF_LB_MC: u32 = 1 << 7;
/// `MLX5_QP_FLAG_TYPE_DCT`: a DC target.
pub const QP_FLAG_TYPE_DCT: u32 = 1 << 4;

/// `MLX5_QP_FLAG_TYPE_DCI`: a DC initiator.
pub const QP_FLAG_TYPE_DCI: u32 = 1 << 5;

/// `MLX5_QP_FLAG_DCI_STREAM`: a DC initiator with streams.
pub const QP_FLAG_DCI_STREAM: u32 = 1 << 11;

/// `MLX5_QP_FLAG_SCATTER_CQE`: CQEs may carry data.
pub const QP_FLAG_SCATTER_CQE: u32 = 1 << 1;

/// `MLX5_QP_FLAG_ALLOW_SCATTER_CQE`: also where not every send is signalled.
pub const QP_FLAG_ALLOW_SCATTER_CQE: u32 = 1 << 8;

/// `MLX5_QP_FLAG_PACKET_BASED_CREDIT_MODE`: credits are counted by packets.
pub const QP_FLAG_PACKET_BASED_CREDIT_MODE: u32 = 1 << 9;

/// `MLX5_QP_FLAG_UAR_PAGE_INDEX`: `bfreg_index` is the number of a page of
/// registers that was allocated.
pub const QP_FLAG_UAR_PAGE_INDEX: u32 = 1 << 10;

/// Driver input to MODIFY_QP (`struct mlx5_ib_modify_qp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ModifyQp {
    pub comp_mask: u32,
    pub max_burst_sz: u32,
    pub typical_pkt_sz: u16,
    pub reserved: u16,
    pub ece_options: u32,
}

/// In [`ModifyQp::comp_mask`]: receives may be consumed in any order
/// (`MLX5_IB_MODIFY_QP_OOO_DP`).
pub const MODIFY_QP_OUT_OF_ORDER: u32 = 1 << 0;

/// Driver response to MODIFY_QP of a DC target (`struct mlx5_ib_modify_qp_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ModifyQpResp {
    pub response_length: u32,
    pub dctn: u32,
    pub ece_options: u32,
    pub reserved: u32,
}

/// Driver response to CREATE_QP (`struct mlx5_ib_create_qp_resp`, its
/// beginning).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateQpResp {
    pub bfreg_index: u32,
    pub ece_options: u32,
    pub comp_mask: u32,
    pub tirn: u32,
    pub tisn: u32,
    pub rqn: u32,
    pub sqn: u32,
    pub reserved1: u32,
    pub tir_icm_addr: u64,
}

/// Driver input to CREATE_QP of a queue pair whose packets work queues receive (`struct
/// mlx5_ib_create_qp_rss`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CreateQpRss {
    pub rx_hash_fields_mask: u64,
    pub rx_hash_function: u8,
    pub rx_key_len: u8,
    pub reserved: [u8; 6],
    pub rx_hash_key: [u8; 128],
    pub comp_mask: u32,
    pub flags: u32,
}

impl Default for CreateQpRss {
    fn default() -> Self {
        Self {
            rx_hash_fields_mask: 0,
            rx_hash_function: 0,
            rx_key_len: 0,
            reserved: [0; 6],
            rx_hash_key: [0; 128],
            comp_mask: 0,
            flags: 0,
        }
    }
}

/// Driver input to CREATE_WQ (`struct mlx5_ib_create_wq`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateWq {
    pub buf_addr: u64,
    pub db_addr: u64,
    pub rq_wqe_count: u32,
    pub rq_wqe_shift: u32,
    pub user_index: u32,
    pub flags: u32,
    pub comp_mask: u32,
    pub single_stride_log_num_of_bytes: u32,
    pub single_wqe_log_num_of_strides: u32,
    pub two_byte_shift_en: u32,
}

/// Bit of [`CreateWq::comp_mask`]: it has strides (`MLX5_IB_CREATE_WQ_STRIDING_RQ`).
pub const CREATE_WQ_STRIDES: u32 = 1 << 0;

/// Driver input to MODIFY_WQ (`struct mlx5_ib_modify_wq`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ModifyWq {
    pub comp_mask: u32,
    pub reserved: u32,
}

/// Driver response to CREATE_AH (`struct mlx5_ib_create_ah_resp`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateAhResp {
    pub response_length: u32,
    pub dmac: [u8; 6],
    pub reserved: [u8; 6],
}

/// The beginning of a send work request (`struct mlx5_wqe_ctrl_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlSegment {
    /// Modifier, index in blocks (16 bits), opcode.
    pub opmod_idx_opcode: u32,
    /// Queue pair number (24 bits), segments (6 bits).
    pub qpn_ds: u32,
    pub signature: u8,
    pub dci_stream_channel_id: [u8; 2],
    /// Fence, completion, solicited: the `CONTROL_...` bits.
    pub fm_ce_se: u8,
    pub imm: u32,
}

/// `MLX5_WQE_CTRL_CQ_UPDATE`: a completion is wanted.
pub const CONTROL_CQ_UPDATE: u8 = 2 << 2;
/// `MLX5_WQE_CTRL_SOLICITED`.
pub const CONTROL_SOLICITED: u8 = 1 << 1;
/// `MLX5_WQE_CTRL_FENCE`: after the reads and atomics before it.
pub const CONTROL_FENCE: u8 = 4 << 5;
/// `MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`: after the changes of keys before it.
pub const CONTROL_SMALL_FENCE: u8 = 1 << 5;

/// Local memory (`struct mlx5_wqe_data_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DataSegment {
    pub byte_count: u32,
    pub lkey: u32,
    pub addr: u64,
}

/// `MLX5_INLINE_SEG`: the byte count is of data that follows it at once.
pub const INLINE_SEGMENT: u32 = 1 << 31;
/// `MLX5_INVALID_LKEY`: ends a scatter list that is shorter than its entry.
pub const INVALID_LKEY: u32 = 0x100;

/// Change of a memory key (`struct mlx5_wqe_umr_ctrl_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UmrSegment {
    pub flags: u8,
    pub rsvd0: [u8; 3],
    pub klm_octowords: u16,
    pub translation_offset: u16,
    /// Changed members of the key's context.
    pub mkey_mask: u64,
    pub rsvd1: [u8; 32],
}

/// Bits of [`UmrSegment::flags`] (`MLX5_WQE_UMR_CTRL_FLAG_...`).
pub mod umr_flag {
    /// The key's translation follows in the WQE.
    pub const INLINE: u8 = 1 << 7;
    pub const CHECK_FREE: u8 = 1 << 5;
    pub const TRANSLATION_OFFSET: u8 = 1 << 4;
    pub const CHECK_QPN: u8 = 1 << 3;
}

/// Bits of [`UmrSegment::mkey_mask`] (`MLX5_WQE_UMR_CTRL_MKEY_MASK_...`).
pub mod umr_mask {
    pub const LEN: u64 = 1 << 0;
    pub const SIG_ERR: u64 = 1 << 9;
    pub const BSF_ENABLE: u64 = 1 << 12;
    pub const START_ADDR: u64 = 1 << 6;
    pub const MKEY: u64 = 1 << 13;
    pub const QPN: u64 = 1 << 14;
    pub const LOCAL_WRITE: u64 = 1 << 18;
    pub const REMOTE_READ: u64 = 1 << 19;
    pub const REMOTE_WRITE: u64 = 1 << 20;
    pub const ATOMIC: u64 = 1 << 21;
    pub const FREE: u64 = 1 << 29;
}

/// A memory key's context (`struct mlx5_wqe_mkey_context_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KeySegment {
    pub free: u8,
    pub reserved1: u8,
    pub access_flags: u8,
    pub sf: u8,
    pub qpn_mkey: u32,
    pub reserved2: u32,
    pub flags_pd: u32,
    pub start_addr: u64,
    pub len: u64,
    pub bsf_octword_size: u32,
    pub reserved3: [u32; 4],
    pub translations_octword_size: u32,
    pub reserved4: [u8; 3],
    pub log_page_size: u8,
    pub reserved: u32,
}

/// `MLX5_WQE_MKEY_CONTEXT_FREE`: the key is invalid.
pub const KEY_FREE: u8 = 1 << 6;
/// Bits of [`KeySegment::access_flags`]
/// (`MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_...`).
pub mod key_access {
    pub const ATOMIC: u8 = 1 << 6;
    pub const REMOTE_WRITE: u8 = 1 << 5;
    pub const REMOTE_READ: u8 = 1 << 4;
    pub const LOCAL_WRITE: u8 = 1 << 3;
}

/// The address of a datagram (`struct mlx5_wqe_av`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// The queue key, or the upper half of a DC target's access key.
    pub qkey: u32,
    /// The access key's lower half.
    pub low_key: u32,
    pub dqp_dct: u32,
    pub stat_rate_sl: u8,
    pub fl_mlid: u8,
    pub rlid: [u8; 2],
    pub reserved0: [u8; 4],
    pub rmac: [u8; 6],
    pub tclass: u8,
    pub hop_limit: u8,
    pub grh_gid_fl: u32,
    pub rgid: [u8; 16],
}

/// `MLX5_EXTENDED_UD_AV`: the address vector has its second half.
pub const EXTENDED_AV: u32 = 1 << 31;

/// The beginning of an entry of a shared receive queue
/// (`struct mlx5_wqe_srq_next_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct NextSegment {
    pub rsvd0: [u8; 2],
    pub next_wqe_index: u16,
    pub signature: u8,
    pub rsvd1: [u8; 11],
}

/// Change of a list of tags (`struct mlx5_wqe_tm_seg`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TagSegment {
    /// [`tag_change`], in the upper half.
    pub opcode: u8,
    /// [`tag_flag`].
    pub flags: u8,
    pub index: u16,
    pub rsvd0: [u8; 2],
    /// Unexpected messages that were handled.
    pub sw_cnt: u16,
    pub rsvd1: [u8; 8],
    pub append_tag: u64,
    pub append_mask: u64,
}

/// Opcodes of [`TagSegment`] (`MLX5_TM_OPCODE_...` of rdma-core's provider).
pub mod tag_change {
    pub const NOP: u8 = 0;
    pub const APPEND: u8 = 1;
    pub const REMOVE: u8 = 2;
}

/// Bits of [`TagSegment::flags`] (`MLX5_SRQ_FLAG_TM_...` of rdma-core's provider).
pub mod tag_flag {
    /// `sw_cnt` is there.
    pub const SW_CNT: u8 = 1 << 6;
    pub const CQE_REQ: u8 = 1 << 7;
}

/// The beginning of a CQE of a change of tags (`struct mlx5_tm_cqe`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TagCqe {
    pub success: u32,
    /// Unexpected messages that the device counts as handled.
    pub hw_phase_cnt: u16,
    pub rsvd0: [u8; 12],
}

/// `MLX5_TMC_SUCCESS`, of [`TagCqe::success`].
pub const TAG_SUCCESS: u32 = 1 << 31;

/// The header of a message with a tag, with which its CQE begins (`struct ibv_tmh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TagHeader {
    pub opcode: u8,
    pub reserved: [u8; 3],
    pub app_ctx: u32,
    pub tag: u64,
}

/// [`Cqe::app`] of tag matching.
pub const APP_TAG_MATCHING: u8 = 1;

/// [`Cqe::app_op`] of tag matching (`MLX5_CQE_APP_OP_TM_...` of rdma-core's provider).
pub mod tag_op {
    pub const CONSUMED: u8 = 0x1;
    pub const EXPECTED: u8 = 0x2;
    pub const UNEXPECTED: u8 = 0x3;
    pub const NO_TAG: u8 = 0x4;
    pub const APPEND: u8 = 0x5;
    pub const REMOVE: u8 = 0x6;
    pub const NOOP: u8 = 0x7;
    pub const CONSUMED_SW_RNDV: u8 = 0x9;
    pub const CONSUMED_MSG: u8 = 0xa;
    pub const CONSUMED_MSG_SW_RNDV: u8 = 0xb;
    pub const CANCELED: u8 = 0xc;
}

/// A completion (`struct mlx5_cqe64`), whose timestamp is read as one number.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cqe {
    pub rsvd0: [u8; 2],
    pub wqe_id: u16,
    pub rsvd4: [u8; 13],
    pub ml_path: u8,
    pub rsvd20: [u8; 4],
    pub slid: u16,
    pub flags_rqpn: u32,
    pub hds_ip_ext: u8,
    pub l4_hdr_type_etc: u8,
    pub vlan_info: u16,
    pub srqn_uidx: u32,
    pub imm_inval_pkey: u32,
    pub app: u8,
    pub app_op: u8,
    pub app_info: u16,
    pub byte_cnt: u32,
    /// Of an error, its last two bytes are the vendor's syndrome and the
    /// syndrome (`struct mlx5_err_cqe`).
    pub timestamp: [u8; 8],
    pub sop_drop_qpn: u32,
    pub wqe_counter: u16,
    pub signature: u8,
    pub op_own: u8,
}

/// Where an error's syndromes are in [`Cqe::timestamp`].
pub const VENDOR_SYNDROME: usize = 6;
/// As [`VENDOR_SYNDROME`].
pub const SYNDROME: usize = 7;

/// The CQE of a wrong signature, which names a memory key and no queue pair
/// (libmlx5's `struct mlx5_sigerr_cqe`).
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub struct SignatureErrorCqe {
    pub rsvd0: [u32; 4],
    pub expected_trans_sig: u32,
    pub actual_trans_sig: u32,
    pub expected_ref_tag: u32,
    pub actual_ref_tag: u32,
    pub syndrome: u16,
    pub sig_type: u8,
    pub domain: u8,
    pub mkey: u32,
    pub sig_err_offset: u64,
    pub rsvd48: [u8; 14],
    pub signature: u8,
    pub op_own: u8,
}

const _: () = {
    assert!(size_of::<SignatureErrorCqe>() == size_of::<Cqe>());
    assert!(std::mem::offset_of!(SignatureErrorCqe, syndrome) == 32);
    assert!(std::mem::offset_of!(SignatureErrorCqe, sig_err_offset) == 40);
    assert!(std::mem::offset_of!(SignatureErrorCqe, op_own) == std::mem::offset_of!(Cqe, op_own));
};

/// Bits of [`Cqe::hds_ip_ext`]: the checksums of IP and of TCP or UDP are right
/// (`MLX5_CQE_L3_OK`, `MLX5_CQE_L4_OK`).
pub const CHECKSUMS_OK: u8 = 1 << 1 | 1 << 2;
/// The third and fourth bit of [`Cqe::l4_hdr_type_etc`] for IPv4
/// (`MLX5_CQE_L3_HDR_TYPE_IPV4`).
pub const LAYER3_IPV4: u8 = 2;

/// Bits of [`Cqe::op_own`] with the format of the CQE.
pub const CQE_FORMAT: u8 = 0xc;
/// Of those, a compressed session.
pub const CQE_TITLE: u8 = 0xc;
/// Number of mini CQEs in an array ([`MiniCqe`]).
pub const MINI_ARRAY: usize = 8;

/// A mini CQE (the kernel's `struct mlx5_mini_cqe8`, which no user header has).
/// The names of the first word's members are those of a send; for a receive it is
/// a hash or checksum, which is not used.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MiniCqe {
    pub wqe_counter: u16,
    pub opcode: u8,
    pub reserved: u8,
    pub byte_cnt: u32,
}

/// Opcodes of send work requests (`MLX5_OPCODE_...`).
pub mod opcode {
    pub const NOP: u8 = 0x00;
    pub const SEND_INVAL: u8 = 0x01;
    pub const RDMA_WRITE: u8 = 0x08;
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    pub const SEND: u8 = 0x0a;
    pub const SEND_IMM: u8 = 0x0b;
    pub const TSO: u8 = 0x0e;
    pub const RDMA_READ: u8 = 0x10;
    pub const ATOMIC_CS: u8 = 0x11;
    pub const ATOMIC_FA: u8 = 0x12;
    pub const SET_PSV: u8 = 0x20;
    pub const UMR: u8 = 0x25;
    pub const TAG_MATCHING: u8 = 0x28;
    pub const MMO: u8 = 0x2f;
}

/// CQE opcodes, in the high half of the last byte (`MLX5_CQE_...`).
pub mod cqe_opcode {
    pub const REQ: u8 = 0;
    pub const RESP_WR_IMM: u8 = 1;
    pub const RESP_SEND: u8 = 2;
    pub const RESP_SEND_IMM: u8 = 3;
    pub const RESP_SEND_INV: u8 = 4;
    /// The end of a resized queue's old entries.
    pub const RESIZE_CQ: u8 = 5;
    /// Of tag matching, not of a message.
    pub const NO_PACKET: u8 = 6;
    /// A wrong signature ([`SignatureErrorCqe`](super::SignatureErrorCqe)).
    pub const SIG_ERR: u8 = 12;
    pub const REQ_ERR: u8 = 13;
    pub const RESP_ERR: u8 = 14;
    pub const INVALID: u8 = 15;
}

/// `MLX5_CQE_OWNER_MASK`.
pub const CQE_OWNER: u8 = 1;
/// `MLX5_CQE_..._SE`: the peer asked for an event.
pub const CQE_SOLICITED: u8 = 0x2;
/// `MLX5_INLINE_SCATTER_32`: up to 32 bytes of data begin the completion.
pub const CQE_SCATTER_32: u8 = 0x4;
/// `MLX5_INLINE_SCATTER_64`: data before a completion, of 128 bytes in all.
pub const CQE_SCATTER_64: u8 = 0x8;

/// Bytes of a send queue's block.
pub const BLOCK: usize = 64;
/// Bytes of a segment, in which a work request is counted.
pub const SEGMENT: usize = 16;

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
// SAFETY: integers; the members' sizes add up to the structure's (asserted
// below).
unsafe impl Pod for AllocUcontextReq {}
// SAFETY: as above.
unsafe impl Pod for AllocUcontextResp {}
// SAFETY: one u32.
unsafe impl Pod for AllocPdResp {}
// SAFETY: as the first.
unsafe impl Pod for CreateCq {}
// SAFETY: four u32, two u64, seventeen u32, two u8, a u16: no padding, as asserted
// below.
unsafe impl Pod for QueryDeviceResp {}
// SAFETY: two u32.
unsafe impl Pod for CreateCqResp {}
// SAFETY: a u64, two u16, a u32.
unsafe impl Pod for ResizeCq {}
// SAFETY: two u32, a u64, two u32.
unsafe impl Pod for CreateFlow {}
// SAFETY: two u64 and four u32.
unsafe impl Pod for CreateSrq {}
// SAFETY: two u32.
unsafe impl Pod for CreateSrqResp {}
// SAFETY: two u64, six u32, a u64, a u32, two u8, a u16.
unsafe impl Pod for CreateQp {}
// SAFETY: two u32, two u16, a u32.
unsafe impl Pod for ModifyQp {}
// SAFETY: four u32.
unsafe impl Pod for ModifyQpResp {}
// SAFETY: eight u32 and a u64.
unsafe impl Pod for CreateQpResp {}
// SAFETY: a u64, eight bytes, 128 bytes, two u32.
unsafe impl Pod for CreateQpRss {}
// SAFETY: two u64, eight u32.
unsafe impl Pod for CreateWq {}
// SAFETY: two u32.
unsafe impl Pod for ModifyWq {}
// SAFETY: a u32 and twelve bytes.
unsafe impl Pod for CreateAhResp {}

const _: () = {
    // 4 * 4 + 1 + 1 + 2 + 4 + 8: no padding.
    assert!(size_of::<AllocUcontextReq>() == 32);
    assert!(offset_of!(AllocUcontextReq, max_cqe_version) == 16);
    assert!(offset_of!(AllocUcontextReq, lib_caps) == 24);
    // 4 * 4 + 2 * 2 + 3 * 4 + 2 * 2 + 2 * 4 + 4 + 8 + 4 * 4: no padding.
    assert!(size_of::<AllocUcontextResp>() == 72);
    assert!(offset_of!(AllocUcontextResp, max_send_wqebb) == 20);
    assert!(offset_of!(AllocUcontextResp, cqe_version) == 44);
    assert!(offset_of!(AllocUcontextResp, hca_core_clock_offset) == 48);
    assert!(size_of::<ClockInfo>() == 56);
    assert!(size_of::<QueryDeviceResp>() == 104);
    assert!(offset_of!(QueryDeviceResp, dci_streams_caps) == 100);
    // 8 + 8 + 4 + 1 + 1 + 2 + 2 + 2 + 4: no padding.
    assert!(size_of::<CreateCq>() == 32);
    assert!(offset_of!(CreateCq, flags) == 22);
    assert!(size_of::<ResizeCq>() == 16);
    assert!(offset_of!(ResizeCq, cqe_size) == 8);
    assert!(size_of::<CreateSrq>() == 32);
    assert!(size_of::<CreateQp>() == 56);
    assert!(size_of::<CreateQpRss>() == 152);
    assert!(size_of::<CreateWq>() == 48);
    assert!(offset_of!(CreateQp, access_key) == 40);
    assert!(offset_of!(CreateQp, concurrent_streams) == 52);
    assert!(size_of::<ModifyQp>() == 16);
    assert!(size_of::<ModifyQpResp>() == 16);
    assert!(size_of::<CreateQpResp>() == 40);
    assert!(size_of::<CreateAhResp>() == 16);
    assert!(size_of::<ControlSegment>() == SEGMENT);
    assert!(offset_of!(ControlSegment, fm_ce_se) == 11);
    assert!(size_of::<DataSegment>() == SEGMENT);
    assert!(size_of::<NextSegment>() == SEGMENT);
    assert!(size_of::<UmrSegment>() == 48);
    assert!(offset_of!(UmrSegment, mkey_mask) == 8);
    assert!(size_of::<KeySegment>() == 64);
    assert!(offset_of!(KeySegment, start_addr) == 16);
    assert!(offset_of!(KeySegment, log_page_size) == 59);
    assert!(size_of::<AddressVector>() == 48);
    assert!(offset_of!(AddressVector, rmac) == 20);
    assert!(offset_of!(AddressVector, rgid) == 32);
    assert!(size_of::<TagSegment>() == 2 * SEGMENT);
    assert!(offset_of!(TagSegment, append_tag) == 16);
    assert!(size_of::<TagHeader>() == 16);
    assert!(size_of::<Cqe>() == 64);
    assert!(offset_of!(Cqe, srqn_uidx) == 32);
    assert!(offset_of!(Cqe, byte_cnt) == 44);
    assert!(offset_of!(Cqe, sop_drop_qpn) == 56);
    assert!(offset_of!(Cqe, op_own) == 63);
    assert!(size_of::<MiniCqe>() == 8);
    assert!(size_of::<[MiniCqe; MINI_ARRAY]>() == size_of::<Cqe>());
};
