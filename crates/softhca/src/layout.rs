//! Formats of commands and contexts, named as in Linux's `mlx5_ifc.h`: for the device, and
//! for the driver in `crates/embedded`. Drivers of `crates/mlx5` have definitions of their
//! own, and tests count offsets by hand.
//!
//! Fields of a context count from its beginning; it begins at `AT` in its commands, and in
//! the answers to its queries.

#![allow(missing_docs, reason = "the names are those of mlx5_ifc.h")]

use roce::bits::{Field, field, flag};

/// Offset of the list of pages, with which most commands that create queues end.
pub const PAGE_LIST: usize = 0x110;

/// All commands and answers.
pub mod header {
    use super::*;

    pub const OPCODE: Field = field(0, 31, 16);
    /// The user context of the program whose command it is.
    pub const UID: Field = field(0, 15, 0);
    pub const TUNNELED: Field = field(4, 31, 16);
    pub const OP_MOD: Field = field(4, 15, 0);
    /// Of an answer.
    pub const STATUS: Field = field(0, 31, 24);
    /// The object number in most commands, and the new object's number in most answers.
    pub const NUMBER: Field = field(8, 23, 0);
    /// As [`NUMBER`], of objects of the type [`OBJ_TYPE`], flow counters and header changes.
    pub const OBJ_ID: Field = field(8, 31, 0);
    pub const OBJ_TYPE: Field = OP_MOD;
    /// As [`NUMBER`], of event queues and counter sets.
    pub const SHORT_NUMBER: Field = field(8, 7, 0);
}

/// Completion queue context.
pub mod cqc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const STATUS: Field = field(0, 31, 28);
    pub const DBR_UMEM_VALID: Field = flag(0, 25);
    pub const CQE_SZ: Field = field(0, 23, 21);
    pub const OI: Field = flag(0, 17);
    pub const CQE_COMPRESSION_EN: Field = flag(0, 14);
    pub const MINI_CQE_RES_FORMAT: Field = field(0, 13, 12);
    pub const CQE_COMPRESSION_LAYOUT: Field = field(0, 1, 0);
    pub const DBR_UMEM_ID: Field = field(0x4, 31, 0);
    pub const PAGE_OFFSET: Field = field(0x8, 11, 6);
    pub const LOG_CQ_SIZE: Field = field(0xc, 28, 24);
    pub const UAR_PAGE: Field = field(0xc, 23, 0);
    pub const C_EQN: Field = field(0x14, 7, 0);
    pub const LOG_PAGE_SIZE: Field = field(0x18, 28, 24);
    pub const CONSUMER_COUNTER: Field = field(0x28, 23, 0);
    pub const PRODUCER_COUNTER: Field = field(0x2c, 23, 0);
    pub const DBR_ADDR: usize = 0x38;
    // After the context.
    pub const CQ_UMEM_OFFSET: usize = AT + 0x40;
    pub const CQ_UMEM_ID: Field = field(AT + 0x48, 31, 0);
    pub const CQ_UMEM_VALID: Field = flag(AT + 0x4c, 31);

    /// Values of [`CQE_SZ`].
    pub mod cqe_sz {
        pub const BYTES_64: u32 = 0;
        pub const BYTES_128: u32 = 1;
        pub const BYTES_128_PAD: u32 = 2;
    }

    /// Values of [`MINI_CQE_RES_FORMAT`].
    pub mod mini_cqe {
        pub const HASH: u32 = 0;
        pub const CSUM: u32 = 1;
    }

    /// In `OP_MOD` of MODIFY_CQ: another buffer.
    pub const OP_MOD_RESIZE: u32 = 1;
}

/// Event queue context.
pub mod eqc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const PAGE_OFFSET: Field = field(0x8, 11, 6);
    pub const LOG_EQ_SIZE: Field = field(0xc, 28, 24);
    pub const UAR_PAGE: Field = field(0xc, 23, 0);
    pub const INTR: Field = field(0x14, 11, 0);
    pub const LOG_PAGE_SIZE: Field = field(0x18, 28, 24);
    pub const CONSUMER_COUNTER: Field = field(0x28, 23, 0);
    pub const PRODUCER_COUNTER: Field = field(0x2c, 23, 0);
    /// After the context.
    pub const EVENT_BITMASK: usize = AT + 0x48;
}

/// Queue pair context.
pub mod qpc {
    use super::*;

    /// Before the context.
    pub const OPT_PARAM_MASK: Field = field(0x10, 31, 0);
    /// Before the context, in CREATE_QP and transitions.
    pub const ECE: Field = field(0x14, 31, 0);
    pub const AT: usize = 0x18;
    pub const SIZE: usize = 0xe8;
    pub const STATE: Field = field(0, 31, 28);
    pub const LAG_TX_PORT_AFFINITY: Field = field(0, 27, 24);
    pub const ST: Field = field(0, 23, 16);
    pub const OFFLOAD_TYPE: Field = field(0, 7, 4);
    pub const BLOCK_LB_MC: Field = flag(0x4, 30);
    /// The queue pair stops (SQD) behind a wrong signature.
    pub const DRAIN_SIGERR: Field = flag(0x4, 26);
    /// Ordering of data is selected by `DP_ORDERING_1`, not by the port.
    pub const DP_ORDERING_FORCE: Field = flag(0x4, 24);
    pub const PD: Field = field(0x4, 23, 0);
    pub const MTU: Field = field(0x8, 31, 29);
    pub const LOG_RQ_SIZE: Field = field(0x8, 22, 19);
    pub const LOG_RQ_STRIDE: Field = field(0x8, 18, 16);
    pub const NO_SQ: Field = flag(0x8, 15);
    pub const LOG_SQ_SIZE: Field = field(0x8, 14, 11);
    pub const DATA_IN_ORDER: Field = flag(0x8, 5);
    pub const RLKY: Field = flag(0x8, 4);
    pub const COUNTER_SET_ID: Field = field(0xc, 31, 24);
    pub const UAR_PAGE: Field = field(0xc, 23, 0);
    pub const USER_INDEX: Field = field(0x10, 23, 0);
    pub const LOG_PAGE_SIZE: Field = field(0x14, 28, 24);
    pub const REMOTE_QPN: Field = field(0x14, 23, 0);
    /// [`ads`].
    pub const PRIMARY_ADDRESS_PATH: usize = 0x18;
    pub const LOG_SRA_MAX: Field = field(0x70, 23, 21);
    pub const RETRY_COUNT: Field = field(0x70, 18, 16);
    pub const RNR_RETRY: Field = field(0x70, 15, 13);
    pub const NEXT_SEND_PSN: Field = field(0x78, 23, 0);
    pub const LOG_NUM_DCI_STREAM_CHANNELS: Field = field(0x7c, 28, 24);
    pub const CQN_SND: Field = field(0x7c, 23, 0);
    pub const LOG_NUM_DCI_ERRORED_STREAMS: Field = field(0x80, 28, 24);
    pub const LOG_RRA_MAX: Field = field(0x90, 23, 21);
    pub const RRE: Field = flag(0x90, 15);
    pub const RWE: Field = flag(0x90, 14);
    pub const RAE: Field = flag(0x90, 13);
    /// `RRE`, `RWE`, `RAE`.
    pub const ACCESS: Field = field(0x90, 15, 13);
    pub const PAGE_OFFSET: Field = field(0x90, 11, 6);
    /// Receives are consumed in any order.
    pub const DP_ORDERING_1: Field = flag(0x90, 3);
    pub const MIN_RNR_NAK: Field = field(0x94, 28, 24);
    pub const NEXT_RCV_PSN: Field = field(0x94, 23, 0);
    pub const XRCD: Field = field(0x98, 23, 0);
    pub const CQN_RCV: Field = field(0x9c, 23, 0);
    pub const DBR_ADDR: usize = 0xa0;
    pub const Q_KEY: Field = field(0xa8, 31, 0);
    pub const RQ_TYPE: Field = field(0xac, 26, 24);
    pub const SRQN: Field = field(0xac, 23, 0);
    /// The block of the send queue at which the next work request begins.
    pub const HW_SQ_WQEBB_COUNTER: Field = field(0xb4, 31, 16);
    pub const CS_REQ: Field = field(0xc4, 15, 8);
    pub const CS_RES: Field = field(0xc4, 7, 0);
    pub const DBR_UMEM_VALID: Field = flag(0xd0, 28);
    pub const DBR_UMEM_ID: Field = field(0xe4, 31, 0);
    // After the context.
    pub const WQ_UMEM_OFFSET: usize = AT + SIZE;
    pub const WQ_UMEM_ID: Field = field(AT + SIZE + 0x8, 31, 0);
    pub const WQ_UMEM_VALID: Field = flag(AT + SIZE + 0xc, 31);

    /// Values of [`ST`].
    pub mod st {
        pub const RC: u32 = 0;
        pub const UC: u32 = 1;
        pub const UD: u32 = 2;
        pub const XRC: u32 = 3;
        /// The initiator of dynamic connections.
        pub const DCI: u32 = 5;
        pub const QP0: u32 = 7;
        pub const QP1: u32 = 8;
        /// For UMR work requests.
        pub const REG_UMR: u32 = 0xc;
    }

    /// Value of [`OFFLOAD_TYPE`]: the device transfers the data of rendezvous.
    pub const OFFLOAD_TYPE_RNDV: u32 = 1;

    /// Values of [`RQ_TYPE`].
    pub mod rq_type {
        pub const REGULAR: u32 = 0;
        pub const SRQ: u32 = 1;
        pub const ZERO_SIZE: u32 = 3;
    }

    /// Values of [`CS_REQ`] and [`CS_RES`].
    pub mod scatter {
        pub const RES_32: u32 = 0x1;
        pub const RES_64: u32 = 0x2;
        pub const REQ_32: u32 = 0x11;
        pub const REQ_64: u32 = 0x22;
    }

    /// Values of [`STATE`].
    pub mod state {
        pub const RST: u32 = 0;
        pub const INIT: u32 = 1;
        pub const RTR: u32 = 2;
        pub const RTS: u32 = 3;
        pub const SQER: u32 = 4;
        pub const SQD: u32 = 5;
        pub const ERR: u32 = 6;
    }

    /// Bits of [`OPT_PARAM_MASK`].
    pub mod optional {
        pub const RRE: u32 = 1 << 1;
        pub const RAE: u32 = 1 << 2;
        pub const RWE: u32 = 1 << 3;
        pub const PKEY_INDEX: u32 = 1 << 4;
        pub const Q_KEY: u32 = 1 << 5;
        pub const RNR_TIMEOUT: u32 = 1 << 6;
        pub const PRIMARY_PATH: u32 = 1 << 7;
        pub const SRA_MAX: u32 = 1 << 8;
        pub const RRA_MAX: u32 = 1 << 9;
        pub const DRAIN_SIGERR: u32 = 1 << 11;
        pub const RETRY_COUNT: u32 = 1 << 12;
        pub const RNR_RETRY: u32 = 1 << 13;
        pub const ACK_TIMEOUT: u32 = 1 << 14;
        pub const LAG_PORT: u32 = 1 << 15;
        pub const COUNTER_SET: u32 = 1 << 25;
    }
}

/// Address path of a queue pair.
pub mod ads {
    use super::*;

    pub const PKEY_INDEX: Field = field(0, 15, 0);
    pub const GRH: Field = flag(0x4, 23);
    pub const MLID: Field = field(0x4, 22, 16);
    pub const RLID: Field = field(0x4, 15, 0);
    pub const ACK_TIMEOUT: Field = field(0x8, 31, 27);
    pub const SRC_ADDR_INDEX: Field = field(0x8, 23, 16);
    pub const HOP_LIMIT: Field = field(0x8, 7, 0);
    pub const TCLASS: Field = field(0xc, 27, 20);
    pub const FLOW_LABEL: Field = field(0xc, 19, 0);
    pub const RGID_RIP: usize = 0x10;
    pub const UDP_SPORT: Field = field(0x20, 15, 0);
    pub const SL: Field = field(0x24, 27, 24);
    pub const VHCA_PORT_NUM: Field = field(0x24, 23, 16);
    pub const RMAC: usize = 0x26;
}

/// Context of a DC target.
pub mod dctc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const SIZE: usize = 0x40;
    pub const STATE: Field = field(0, 27, 24);
    /// As in [`qpc`].
    pub const DP_ORDERING_FORCE: Field = flag(0x4, 24);
    pub const USER_INDEX: Field = field(0x4, 23, 0);
    pub const CQN: Field = field(0x8, 23, 0);
    pub const COUNTER_SET_ID: Field = field(0xc, 31, 24);
    pub const RRE: Field = flag(0xc, 19);
    pub const RWE: Field = flag(0xc, 18);
    pub const RAE: Field = flag(0xc, 17);
    pub const RLKY: Field = flag(0xc, 14);
    pub const DP_ORDERING_1: Field = flag(0xc, 11);
    pub const CS_RES: Field = field(0x10, 23, 16);
    pub const MIN_RNR_NAK: Field = field(0x10, 12, 8);
    pub const SRQN: Field = field(0x14, 23, 0);
    pub const PD: Field = field(0x18, 23, 0);
    pub const TCLASS: Field = field(0x1c, 31, 24);
    pub const FLOW_LABEL: Field = field(0x1c, 19, 0);
    pub const DC_ACCESS_KEY: usize = 0x20;
    pub const MTU: Field = field(0x28, 26, 24);
    pub const PORT: Field = field(0x28, 23, 16);
    pub const PKEY_INDEX: Field = field(0x28, 15, 0);
    pub const MY_ADDR_INDEX: Field = field(0x2c, 23, 16);
    pub const HOP_LIMIT: Field = field(0x2c, 7, 0);
}

/// Context of an XRC SRQ.
pub mod xrc_srqc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const STATE: Field = field(0, 31, 28);
    pub const LOG_XRC_SRQ_SIZE: Field = field(0, 27, 24);
    pub const RLKY: Field = flag(0x4, 28);
    pub const LOG_RQ_STRIDE: Field = field(0x4, 26, 24);
    pub const XRCD: Field = field(0x4, 23, 0);
    pub const PAGE_OFFSET: Field = field(0x8, 31, 26);
    pub const DBR_UMEM_VALID: Field = flag(0x8, 24);
    pub const CQN: Field = field(0x8, 23, 0);
    pub const DBR_UMEM_ID: Field = field(0xc, 31, 0);
    pub const USER_INDEX_EQUAL_XRC_SRQN: Field = flag(0x10, 31);
    pub const LOG_PAGE_SIZE: Field = field(0x10, 29, 24);
    pub const USER_INDEX: Field = field(0x10, 23, 0);
    pub const PD: Field = field(0x18, 23, 0);
    pub const LWM: Field = field(0x1c, 31, 16);
    pub const WQE_CNT: Field = field(0x1c, 15, 0);
    pub const DB_RECORD_ADDR: usize = 0x28;
    // After the context.
    pub const XRC_SRQ_UMEM_OFFSET: usize = AT + 0x40;
    pub const XRC_SRQ_UMEM_ID: Field = field(AT + 0x48, 31, 0);
    pub const XRC_SRQ_UMEM_VALID: Field = flag(AT + 0x4c, 31);
}

/// Context of a receive memory pool, which is an SRQ of verbs.
pub mod rmpc {
    use super::*;

    /// Before the context, in MODIFY_RMP.
    pub const MODIFY_BITMASK: usize = 0x14;
    pub const AT: usize = 0x20;
    pub const STATE: Field = field(0, 23, 20);
    /// [`wq`].
    pub const WQ: usize = 0x30;
}

/// The limit of ARM_RQ and ARM_XRC_SRQ.
pub mod arm_rq {
    use super::*;

    pub const LWM: Field = field(0xc, 15, 0);
}

/// Work queue of a receive memory pool, a receive queue, a send queue or an XRQ.
pub mod wq {
    use super::*;

    pub const WQ_TYPE: Field = field(0, 31, 28);
    pub const PAGE_OFFSET: Field = field(0x4, 20, 16);
    pub const LWM: Field = field(0x4, 15, 0);
    pub const PD: Field = field(0x8, 23, 0);
    pub const UAR_PAGE: Field = field(0xc, 23, 0);
    pub const DBR_ADDR: usize = 0x10;
    pub const LOG_WQ_STRIDE: Field = field(0x20, 19, 16);
    pub const LOG_WQ_PG_SZ: Field = field(0x20, 12, 8);
    pub const LOG_WQ_SZ: Field = field(0x20, 4, 0);
    pub const DBR_UMEM_VALID: Field = flag(0x24, 31);
    pub const WQ_UMEM_VALID: Field = flag(0x24, 30);
    /// Less the least number, as the size of a stride.
    pub const LOG_WQE_NUM_OF_STRIDES: Field = field(0x24, 11, 8);
    pub const TWO_BYTE_SHIFT_EN: Field = flag(0x24, 7);
    pub const LOG_WQE_STRIDE_SIZE: Field = field(0x24, 2, 0);
    pub const DBR_UMEM_ID: Field = field(0x28, 31, 0);
    pub const WQ_UMEM_ID: Field = field(0x2c, 31, 0);
    pub const WQ_UMEM_OFFSET: usize = 0x30;

    /// Values of [`WQ_TYPE`].
    pub mod wq_type {
        pub const CYCLIC: u32 = 1;
        pub const LINKED_LIST_STRIDING: u32 = 2;
        pub const CYCLIC_STRIDING: u32 = 3;
    }
}

/// Context of an XRQ: an SRQ with tag matching.
pub mod xrqc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const TOPOLOGY: Field = field(0, 11, 8);
    pub const OFFLOAD: Field = field(0, 3, 0);
    pub const USER_INDEX: Field = field(0x4, 23, 0);
    pub const CQN: Field = field(0x8, 23, 0);
    pub const LOG_MATCHING_LIST_SZ: Field = field(0x20, 31, 28);
    pub const APPEND_NEXT_INDEX: Field = field(0x20, 15, 0);
    pub const SW_PHASE_CNT: Field = field(0x24, 31, 16);
    pub const HW_PHASE_CNT: Field = field(0x24, 15, 0);
    /// [`wq`].
    pub const WQ: usize = 0x80;
    /// Distance of its pages from [`PAGE_LIST`].
    pub const PAGE_LIST_SHIFT: usize = AT + WQ - super::rmpc::AT - super::rmpc::WQ;

    /// Value of [`TOPOLOGY`].
    pub const TOPOLOGY_TAG_MATCHING: u32 = 1;
    /// Value of [`OFFLOAD`]: the device transfers rendezvous.
    pub const OFFLOAD_RNDV: u32 = 1;
}

/// Context of a receive queue of packets.
pub mod rqc {
    use super::*;

    /// Before the context, in MODIFY_RQ: the state before, and which properties change.
    pub const RQ_STATE: Field = field(0x8, 31, 28);
    pub const MODIFY_BITMASK: usize = 0x10;
    pub const MODIFY_VSD: u64 = 1 << 1;
    pub const MODIFY_COUNTER_SET: u64 = 1 << 3;
    pub const AT: usize = 0x20;
    pub const SIZE: usize = 0xf0;
    pub const RLKY: Field = flag(0, 31);
    /// VLAN tags of received frames are not removed.
    pub const VSD: Field = flag(0, 28);
    pub const STATE: Field = field(0, 23, 20);
    /// WQEs are completed in the error state.
    pub const FLUSH_IN_ERROR_EN: Field = flag(0, 18);
    pub const USER_INDEX: Field = field(0x4, 23, 0);
    pub const CQN: Field = field(0x8, 23, 0);
    pub const COUNTER_SET_ID: Field = field(0xc, 31, 24);
    /// [`wq`].
    pub const WQ: usize = 0x30;

    /// Values of [`STATE`], also of send queues and receive memory pools.
    pub mod state {
        pub const RST: u32 = 0;
        pub const RDY: u32 = 1;
        pub const ERR: u32 = 3;
    }
}

/// Context of a send queue of packets.
pub mod sqc {
    use super::*;

    pub use super::rqc::{AT, CQN, RLKY, SIZE, STATE, USER_INDEX, WQ};
    pub const FLUSH_IN_ERROR_EN: Field = flag(0, 28);
    pub const TIS_LST_SZ: Field = field(0x20, 31, 16);
    /// The first TIS of the list.
    pub const TIS_NUM_0: Field = field(0x2c, 23, 0);
}

/// Context of a TIR: a destination of received packets.
pub mod tirc {
    use super::*;

    /// Before the context, in MODIFY_TIR.
    pub const MODIFY_SELF_LB_EN: Field = flag(0x14, 4);
    pub const AT: usize = 0x20;
    pub const SIZE: usize = 0xf0;
    pub const DISP_TYPE: Field = field(0x4, 31, 28);
    pub const INLINE_RQN: Field = field(0x1c, 23, 0);
    pub const INDIRECT_TABLE: Field = field(0x20, 23, 0);
    pub const RX_HASH_FN: Field = field(0x24, 31, 28);
    /// Linux calls this field `self_lb_block`, but sets the bits of the frames that pass:
    /// for its loopback test, and where the interface receives its own frames.
    pub const SELF_LB_BLOCK: Field = field(0x24, 25, 24);
    pub const TRANSPORT_DOMAIN: Field = field(0x24, 23, 0);
    pub const RX_HASH_TOEPLITZ_KEY: usize = 0x28;
    // Fields that the hash covers.
    pub const L3_PROT_TYPE: Field = flag(0x50, 31);
    pub const L4_PROT_TYPE: Field = flag(0x50, 30);
    pub const SELECTED_FIELDS: Field = field(0x50, 29, 0);

    /// Value of [`DISP_TYPE`].
    pub const DISP_TYPE_INDIRECT: u32 = 1;
    /// Value of [`RX_HASH_FN`].
    pub const RX_HASH_FN_TOEPLITZ: u32 = 2;
}

/// Context of a TIS: the interface of send queues of packets.
pub mod tisc {
    use super::*;

    /// Before the context, in MODIFY_TIS.
    pub const MODIFY_LAG_TX_PORT_AFFINITY: Field = flag(0x14, 2);
    pub const AT: usize = 0x20;
    /// In the answer of QUERY_TIS.
    pub const QUERIED_AT: usize = 0x10;
    pub const SIZE: usize = 0xf0;
    pub const LAG_TX_PORT_AFFINITY: Field = field(0, 27, 24);
    pub const TRANSPORT_DOMAIN: Field = field(0x24, 23, 0);
}

/// Context of an RQT: an indirection table of receive queues.
pub mod rqtc {
    use super::*;

    pub const AT: usize = 0x20;
    pub const RQT_MAX_SIZE: Field = field(0x14, 15, 0);
    pub const RQT_ACTUAL_SIZE: Field = field(0x18, 15, 0);
    pub const RQ_NUM: usize = 0xf0;
}

/// Memory key context.
pub mod mkc {
    use super::*;

    pub const AT: usize = 0x10;
    pub const SIZE: usize = 0x40;
    pub const FREE: Field = flag(0, 30);
    pub const ACCESS_MODE_4_2: Field = field(0, 28, 26);
    pub const UMR_EN: Field = flag(0, 15);
    /// Atomics, remote and local access.
    pub const A: Field = flag(0, 14);
    pub const RW: Field = flag(0, 13);
    pub const RR: Field = flag(0, 12);
    pub const LW: Field = flag(0, 11);
    pub const LR: Field = flag(0, 10);
    /// All of them: `A` is the highest bit.
    pub const ACCESS: Field = field(0, 14, 10);
    pub const ACCESS_MODE_1_0: Field = field(0, 9, 8);
    pub const QPN: Field = field(0x4, 31, 8);
    pub const MKEY_7_0: Field = field(0x4, 7, 0);
    /// The key covers the whole address space.
    pub const LENGTH64: Field = flag(0xc, 31);
    pub const BSF_EN: Field = flag(0xc, 30);
    /// The number of expected signature errors.
    pub const EXPECTED_SIGERR_COUNT: Field = flag(0xc, 26);
    /// A peer may invalidate the key.
    pub const EN_RINVAL: Field = flag(0xc, 24);
    pub const PD: Field = field(0xc, 23, 0);
    pub const START_ADDR: usize = 0x10;
    pub const LEN: usize = 0x18;
    pub const BSF_OCTWORD_SIZE: Field = field(0x20, 31, 0);
    pub const TRANSLATIONS_OCTWORD_SIZE: Field = field(0x34, 31, 0);
    pub const LOG_PAGE_SIZE: Field = field(0x38, 5, 0);
    /// Before the context: the pages have access bits; otherwise all are present.
    pub const PG_ACCESS: Field = flag(0xc, 31);
    /// Before the context: the memory of a program, in place of a list of pages.
    pub const MKEY_UMEM_VALID: Field = flag(0xc, 30);
    // After the context.
    pub const TRANSLATIONS_OCTWORD_ACTUAL_SIZE: Field = field(AT + 0x50, 31, 0);
    pub const MKEY_UMEM_ID: Field = field(AT + 0x54, 31, 0);
    pub const MKEY_UMEM_OFFSET: usize = AT + 0x58;

    /// Values of [`ACCESS_MODE_4_2`] and [`ACCESS_MODE_1_0`].
    pub mod access_mode {
        pub const PA: u32 = 0;
        pub const MTT: u32 = 1;
        pub const KLMS: u32 = 2;
        pub const KSM: u32 = 3;
        pub const MEMIC: u32 = 5;
    }
}

/// The answer of CREATE_PSV.
pub mod psv {
    use super::*;

    pub const PSV0_INDEX: Field = field(0x10, 23, 0);
    /// Bytes of the answer.
    pub const SIZE: usize = 0x20;
}

/// The answer of QUERY_VPORT_COUNTER: packets and bytes at each offset.
pub mod vport_counter {
    pub const RECEIVED_IB_UNICAST: usize = 0x30;
    pub const TRANSMITTED_IB_UNICAST: usize = 0x40;
    pub const RECEIVED_IB_MULTICAST: usize = 0x50;
    pub const TRANSMITTED_IB_MULTICAST: usize = 0x60;
    pub const RECEIVED_ETH_UNICAST: usize = 0x90;
    pub const TRANSMITTED_ETH_UNICAST: usize = 0xa0;
}

/// QUERY_Q_COUNTER.
pub mod q_counter {
    use super::*;

    pub const CLEAR: Field = flag(0x18, 31);
    pub const COUNTER_SET_ID: Field = field(0x1c, 7, 0);
}

/// CREATE_UMEM.
pub mod umem {
    use super::*;

    pub const LOG_PAGE_SIZE: Field = field(0x20, 4, 0);
    pub const PAGE_OFFSET: Field = field(0x24, 31, 0);
    pub const NUM_OF_MTT: usize = 0x28;
    pub const MTT: usize = 0x30;
}

/// Flow tables, groups and rules.
pub mod flow {
    use super::*;

    pub const TABLE_TYPE: Field = field(0x10, 31, 24);
    pub const TABLE_ID: Field = field(0x14, 23, 0);
    pub const GROUP_ID: Field = field(0x18, 31, 0);
    // Of CREATE_FLOW_GROUP.
    pub const MATCH_CRITERIA_ENABLE: Field = field(0x3c, 7, 0);
    pub const MATCH_CRITERIA: usize = 0x40;
    // Of SET_FLOW_TABLE_ENTRY.
    pub const FLOW_INDEX: Field = field(0x20, 31, 0);
    pub const FTE_GROUP_ID: Field = field(0x44, 31, 0);
    pub const FLOW_TAG: Field = field(0x48, 23, 0);
    pub const ACTION: Field = field(0x4c, 15, 0);
    pub const DESTINATION_LIST_SIZE: Field = field(0x50, 23, 0);
    pub const FLOW_COUNTER_LIST_SIZE: Field = field(0x54, 23, 0);
    pub const MODIFY_HEADER_ID: Field = field(0x5c, 31, 0);
    pub const MATCH_VALUE: usize = 0x80;
    pub const DESTINATION: usize = 0x340;
    // Of QUERY_FLOW_COUNTER, and its answer.
    pub const FLOW_COUNTER_ID: Field = field(0x1c, 31, 0);
    pub const CLEAR: Field = flag(0x18, 31);
    pub const FLOW_STATISTICS: usize = 0x10;
    // Of ALLOC_MODIFY_HEADER_CONTEXT.
    pub const NUM_OF_ACTIONS: Field = field(0xc, 7, 0);
    pub const ACTIONS: usize = 0x10;

    /// Bits of [`ACTION`].
    pub mod action {
        pub const DROP: u32 = 1 << 1;
        pub const FWD_DEST: u32 = 1 << 2;
        pub const COUNT: u32 = 1 << 3;
        pub const MOD_HDR: u32 = 1 << 6;
    }

    /// Types of destinations, in the highest byte of an entry of [`DESTINATION`].
    pub mod destination {
        pub const FLOW_TABLE: u32 = 1;
        pub const TIR: u32 = 2;
    }
}

/// Headers that rules match, without those of tunnels.
pub mod fte_match_set_lyr_2_4 {
    use super::*;

    pub const SMAC: usize = 0x0;
    pub const ETHERTYPE: usize = 0x6;
    pub const DMAC: usize = 0x8;
    /// Priority, CFI and number of the VLAN.
    pub const FIRST_VLAN: usize = 0xe;
    pub const IP_PROTOCOL: Field = field(0x10, 31, 24);
    /// `ip_dscp`, `ip_ecn`.
    pub const TRAFFIC_CLASS: Field = field(0x10, 23, 16);
    pub const CVLAN_TAG: Field = flag(0x10, 15);
    pub const FRAG: Field = flag(0x10, 13);
    pub const IP_VERSION: Field = field(0x10, 12, 9);
    pub const TCP_FLAGS: Field = field(0x10, 8, 0);
    pub const TCP_SPORT: usize = 0x14;
    pub const IPV4_IHL: Field = field(0x18, 15, 12);
    pub const TTL_HOPLIMIT: Field = field(0x18, 7, 0);
    pub const UDP_SPORT: usize = 0x1c;
    pub const SRC_IPV6: usize = 0x20;
    pub const SRC_IPV4: usize = 0x2c;
    pub const DST_IPV6: usize = 0x30;
    pub const DST_IPV4: usize = 0x3c;
}

/// The port of the network interface, in QUERY_VPORT_STATE.
pub mod vport_state {
    use super::*;

    pub const ADMIN_STATE: Field = field(0xc, 7, 4);
    pub const STATE: Field = field(0xc, 3, 0);
}

/// Context of the network interface.
pub mod nic_vport_context {
    use super::*;

    /// In MODIFY_NIC_VPORT_CONTEXT, whose answer to a query has it elsewhere.
    pub const AT: usize = 0x100;
    pub const ROCE_EN: Field = flag(0, 0);
    /// Before the context.
    pub const FIELD_SELECT: Field = field(0xc, 31, 0);
    /// Bit of [`FIELD_SELECT`].
    pub const SELECT_ROCE_EN: u32 = 1 << 1;
}

/// An entry of the table of RoCE addresses.
pub mod roce_addr_layout {
    use super::*;

    /// Before the entry, in SET_ROCE_ADDRESS.
    pub const ROCE_ADDRESS_INDEX: Field = field(0x8, 31, 16);
    pub const AT: usize = 0x10;
    pub const SOURCE_L3_ADDRESS: usize = 0;
    pub const VLAN_VALID: Field = flag(0x10, 28);
    pub const VLAN_ID: Field = field(0x10, 27, 16);
    pub const SOURCE_MAC: usize = 0x12;
    pub const ROCE_VERSION: Field = field(0x18, 7, 0);
}

/// ACCESS_REGISTER, and the register of a port's administrative state.
pub mod access_register {
    use super::*;

    pub const REGISTER_ID: Field = field(0x8, 15, 0);
    pub const REGISTER_DATA: usize = 0x10;
    /// In the register's data.
    pub const PAOS_ADMIN_STATUS: Field = field(0, 11, 8);
}

/// QUERY_HCA_CAP and SET_HCA_CAP.
pub mod hca_cap {
    use super::*;

    /// The group of capabilities, in [`header::OP_MOD`].
    pub const GROUP: Field = field(0x4, 15, 1);
    pub const AT: usize = 0x10;
}

/// Declares the constants of event types, and a list of them for tests.
macro_rules! event_types {
    ($($name:ident = $number:literal;)+) => {
        /// Event types.
        #[allow(missing_docs)]
        pub mod event {
            $(pub const $name: u8 = $number;)+

            /// All of them, with their names.
            #[cfg(test)]
            pub(crate) const ALL: &[(&str, u8)] = &[$((stringify!($name), $number)),+];
        }
    };
}

event_types! {
    COMPLETION = 0x00;
    COMM_EST = 0x02;
    SQ_DRAINED = 0x03;
    CQ_ERROR = 0x04;
    WQ_CATASTROPHIC = 0x05;
    INTERNAL_ERROR = 0x08;
    PORT_CHANGE = 0x09;
    COMMAND = 0x0a;
    PAGE_FAULT = 0x0c;
    WQ_INVALID_REQUEST = 0x10;
    WQ_ACCESS = 0x11;
    SRQ_CATASTROPHIC = 0x12;
    SRQ_LAST_WQE = 0x13;
    SRQ_LIMIT = 0x14;
    DCT_DRAINED = 0x1c;
}
