//! Constants of work completions and of CQEs.

/// `enum ibv_wc_opcode`.
pub(crate) mod opcode {
    pub const SEND: u32 = 0;
    pub const RDMA_WRITE: u32 = 1;
    pub const RDMA_READ: u32 = 2;
    pub const COMP_SWAP: u32 = 3;
    pub const FETCH_ADD: u32 = 4;
    pub const BIND_MW: u32 = 5;
    pub const LOCAL_INV: u32 = 6;
    pub const TSO: u32 = 7;
    /// `IBV_WC_DRIVER1`: the layout of a memory key.
    pub const KEY_LAYOUT: u32 = 135;
    /// `IBV_WC_DRIVER3`: a copy in local memory.
    pub const MEMCPY: u32 = 137;
    /// `IBV_WC_DRIVER2`: a WQE that the program has made.
    pub const RAW_WQE: u32 = 136;
    pub const RECV: u32 = 128;
    pub const RECV_RDMA_WITH_IMM: u32 = 129;
    pub const TM_ADD: u32 = 130;
    pub const TM_DEL: u32 = 131;
    pub const TM_SYNC: u32 = 132;
    pub const TM_RECV: u32 = 133;
    pub const TM_NO_TAG: u32 = 134;
}

/// `enum ibv_wc_flags`.
pub(crate) mod flags {
    pub const GRH: u32 = 1 << 0;
    pub const WITH_IMM: u32 = 1 << 1;
    pub const IP_CSUM_OK: u32 = 1 << 2;
    pub const WITH_INV: u32 = 1 << 3;
    pub const TM_SYNC_REQ: u32 = 1 << 4;
    pub const TM_MATCH: u32 = 1 << 5;
    pub const TM_DATA_VALID: u32 = 1 << 6;
}

/// `enum ibv_wc_status`.
pub(crate) mod status {
    pub const LOC_LEN_ERR: u32 = 1;
    pub const LOC_QP_OP_ERR: u32 = 2;
    pub const LOC_PROT_ERR: u32 = 4;
    pub const WR_FLUSH_ERR: u32 = 5;
    pub const MW_BIND_ERR: u32 = 6;
    pub const BAD_RESP_ERR: u32 = 7;
    pub const LOC_ACCESS_ERR: u32 = 8;
    pub const REM_INV_REQ_ERR: u32 = 9;
    pub const REM_ACCESS_ERR: u32 = 10;
    pub const REM_OP_ERR: u32 = 11;
    pub const RETRY_EXC_ERR: u32 = 12;
    pub const RNR_RETRY_EXC_ERR: u32 = 13;
    pub const REM_ABORT_ERR: u32 = 16;
    pub const GENERAL_ERR: u32 = 21;
    pub const TM_ERR: u32 = 22;
    pub const TM_RNDV_INCOMPLETE: u32 = 23;
}

/// Syndromes of error CQEs (`MLX5_CQE_SYNDROME_...`).
pub(crate) mod syndrome {
    pub const LOCAL_LENGTH: u8 = 0x01;
    pub const LOCAL_QP_OP: u8 = 0x02;
    pub const LOCAL_PROT: u8 = 0x04;
    pub const WR_FLUSH: u8 = 0x05;
    pub const MW_BIND: u8 = 0x06;
    pub const BAD_RESP: u8 = 0x10;
    pub const LOCAL_ACCESS: u8 = 0x11;
    pub const REMOTE_INVAL_REQ: u8 = 0x12;
    pub const REMOTE_ACCESS: u8 = 0x13;
    pub const REMOTE_OP: u8 = 0x14;
    pub const RETRY_EXCEEDED: u8 = 0x15;
    pub const RNR_RETRY_EXCEEDED: u8 = 0x16;
    pub const REMOTE_ABORTED: u8 = 0x22;
    /// With [`REMOTE_ABORTED`], the vendor's part
    /// (`MLX5_CQE_VENDOR_SYNDROME_ODP_PFAULT`).
    pub const VENDOR_PAGE_FAULT: u8 = 0x93;
}

/// The status for a syndrome; a general error for an unknown one.
pub(crate) fn status_of(syndrome: u8) -> u32 {
    match syndrome {
        syndrome::LOCAL_LENGTH => status::LOC_LEN_ERR,
        syndrome::LOCAL_QP_OP => status::LOC_QP_OP_ERR,
        syndrome::LOCAL_PROT => status::LOC_PROT_ERR,
        syndrome::WR_FLUSH => status::WR_FLUSH_ERR,
        syndrome::MW_BIND => status::MW_BIND_ERR,
        syndrome::BAD_RESP => status::BAD_RESP_ERR,
        syndrome::LOCAL_ACCESS => status::LOC_ACCESS_ERR,
        syndrome::REMOTE_INVAL_REQ => status::REM_INV_REQ_ERR,
        syndrome::REMOTE_ACCESS => status::REM_ACCESS_ERR,
        syndrome::REMOTE_OP => status::REM_OP_ERR,
        syndrome::RETRY_EXCEEDED => status::RETRY_EXC_ERR,
        syndrome::RNR_RETRY_EXCEEDED => status::RNR_RETRY_EXC_ERR,
        syndrome::REMOTE_ABORTED => status::REM_ABORT_ERR,
        _ => status::GENERAL_ERR,
    }
}
