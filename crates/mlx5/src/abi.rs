//! Queue entries, big-endian, from rdma-core's public mlx5dv.h. Driver data of commands:
//! `mlx5_abi`.

#[cfg(test)]
mod c_headers;

use std::mem::offset_of;

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
pub struct WqeAddressVector {
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

const _: () = {
    assert!(size_of::<ControlSegment>() == SEGMENT);
    assert!(offset_of!(ControlSegment, fm_ce_se) == 11);
    assert!(size_of::<DataSegment>() == SEGMENT);
    assert!(size_of::<NextSegment>() == SEGMENT);
    assert!(size_of::<UmrSegment>() == 48);
    assert!(offset_of!(UmrSegment, mkey_mask) == 8);
    assert!(size_of::<KeySegment>() == 64);
    assert!(offset_of!(KeySegment, start_addr) == 16);
    assert!(offset_of!(KeySegment, log_page_size) == 59);
    assert!(size_of::<WqeAddressVector>() == 48);
    assert!(offset_of!(WqeAddressVector, rmac) == 20);
    assert!(offset_of!(WqeAddressVector, rgid) == 32);
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
