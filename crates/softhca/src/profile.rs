//! HCA profiles: tables of capabilities.
//!
//! The driver queries capabilities in groups of 256 bytes (4,096 for flow tables).
//! A profile is a list of field values in those groups; all other fields are zero,
//! that is, absent. Offsets and meanings are those of the capability structures in
//! Linux's `mlx5_ifc.h`.

use crate::bits::{Field, field, flag};
use crate::command::general::{ADDRESS_TO_QP, LOG_RESERVED_QPNS, RESERVED_QPN, SCHEDULING_ELEMENT};
use crate::command::{dct, scheduling};
use crate::engine::device_memory::MemicOperation;
use crate::engine::{compression, copy, device_memory};

/// The link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortKind {
    /// An InfiniBand port: LIDs; IPoIB is its only network device.
    InfiniBand,
    /// An Ethernet port: a network device and RoCE.
    Ethernet,
}

/// A capability group, by its number in QUERY_HCA_CAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Group {
    General = 0,
    EthernetOffloads = 1,
    OnDemandPaging = 2,
    Atomic = 3,
    Roce = 4,
    FlowTable = 7,
    Qos = 12,
    DeviceMemory = 15,
    General2 = 32,
}

impl Group {
    /// All groups that profiles have.
    pub const ALL: [Group; 9] = [
        Group::General,
        Group::EthernetOffloads,
        Group::OnDemandPaging,
        Group::Atomic,
        Group::Roce,
        Group::FlowTable,
        Group::Qos,
        Group::DeviceMemory,
        Group::General2,
    ];

    /// The size of the group in bytes.
    pub fn size(self) -> usize {
        match self {
            Group::FlowTable => 4096,
            _ => 256,
        }
    }
}

/// The capabilities that the driver may change with SET_HCA_CAP. The driver sends
/// the whole group, with zeros in fields that it does not set.
pub const WRITABLE: &[(Group, Field)] = &[
    (Group::General, cap::LOG_MAX_QP),
    (Group::General, cap::PKEY_TABLE_SIZE),
    (Group::General, cap::CMDIF_CHECKSUM),
    (Group::General, cap::LOG_UAR_PAGE_SZ),
    (Group::General, cap::ROCE),
    (Group::Atomic, cap::ATOMIC_ENDIANNESS_MODE),
    (Group::Roce, cap::SW_R_ROCE_SRC_UDP_PORT),
];

/// Fields of the capability groups.
pub mod cap {
    use super::*;

    pub(super) const LOG_MAX_SRQ_SZ: Field = field(0x10, 31, 24);
    pub(super) const LOG_MAX_QP_SZ: Field = field(0x10, 23, 16);
    pub(super) const LOG_MAX_QP: Field = field(0x10, 4, 0);
    pub(super) const LOG_MAX_SRQ: Field = field(0x14, 20, 16);
    pub(super) const LOG_MAX_CQ_SZ: Field = field(0x18, 23, 16);
    pub(super) const LOG_MAX_CQ: Field = field(0x18, 4, 0);
    pub(super) const LOG_MAX_EQ_SZ: Field = field(0x1c, 31, 24);
    pub(super) const LOG_MAX_MKEY: Field = field(0x1c, 21, 16);
    pub(super) const LOG_MAX_EQ: Field = field(0x1c, 3, 0);
    pub(super) const MAX_INDIRECTION: Field = field(0x20, 31, 24);
    pub(super) const FIXED_BUFFER_SIZE: Field = flag(0x20, 23);
    pub(super) const LOG_MAX_MRW_SZ: Field = field(0x20, 22, 16);
    pub(super) const LOG_MAX_KLM_LIST_SIZE: Field = field(0x20, 5, 0);
    pub(super) const LOG_MAX_RA_REQ_QP: Field = field(0x28, 21, 16);
    pub(super) const LOG_MAX_RA_RES_QP: Field = field(0x28, 5, 0);
    pub(super) const GID_TABLE_SIZE: Field = field(0x2c, 15, 0);
    pub(super) const OUT_OF_SEQ_CNT: Field = flag(0x30, 31);
    pub(super) const VPORT_COUNTERS: Field = flag(0x30, 30);
    pub(super) const RETRANSMISSION_Q_COUNTERS: Field = flag(0x30, 29);
    pub(super) const MAX_QP_CNT: Field = field(0x30, 25, 16);
    pub(super) const PKEY_TABLE_SIZE: Field = field(0x30, 15, 0);
    pub(super) const IB_VIRT: Field = flag(0x34, 29);
    pub(super) const NIC_FLOW_TABLE: Field = flag(0x34, 25);
    pub(super) const LOCAL_CA_ACK_DELAY: Field = field(0x34, 20, 16);
    pub(super) const PORT_TYPE: Field = field(0x34, 9, 8);
    pub(super) const NUM_PORTS: Field = field(0x34, 7, 0);
    pub(super) const LOG_MAX_MSG: Field = field(0x38, 28, 24);
    pub(super) const MAX_TC: Field = field(0x38, 19, 16);
    pub(super) const CQE_VERSION: Field = field(0x3c, 3, 0);
    pub(super) const UMR_MODIFY_ENTITY_SIZE_DISABLED: Field = flag(0x40, 24);
    pub(super) const CMDIF_CHECKSUM: Field = field(0x40, 15, 14);
    pub(super) const SCTR_DATA_CQE: Field = flag(0x40, 10);
    pub(super) const ETH_NET_OFFLOADS: Field = flag(0x40, 3);
    pub(super) const ROCE: Field = flag(0x40, 2);
    pub(super) const ATOMIC: Field = flag(0x40, 1);
    pub(super) const CQ_OI: Field = flag(0x44, 31);
    pub(super) const CQ_RESIZE: Field = flag(0x44, 30);
    pub(super) const CQ_MODERATION: Field = flag(0x44, 29);
    pub(super) const BLOCK_LB_MC: Field = flag(0x44, 23);
    pub(super) const IMAICL: Field = flag(0x44, 14);
    pub(super) const XRC: Field = flag(0x44, 3);
    pub(super) const UD: Field = flag(0x44, 2);
    pub(super) const UC: Field = flag(0x44, 1);
    pub(super) const RC: Field = flag(0x44, 0);
    pub(super) const LOG_PG_SZ: Field = field(0x48, 7, 0);
    pub(super) const BF: Field = flag(0x4c, 31);
    pub(super) const LOG_BF_REG_SIZE: Field = field(0x4c, 20, 16);
    pub(super) const MAX_WQE_SZ_SQ: Field = field(0x50, 15, 0);
    pub(super) const MAX_WQE_SZ_RQ: Field = field(0x54, 15, 0);
    pub(super) const MAX_QP_MCG: Field = field(0x5c, 24, 0);
    pub(super) const LOG_MAX_MCG: Field = field(0x60, 7, 0);
    pub(super) const LOG_MAX_TRANSPORT_DOMAIN: Field = field(0x64, 28, 24);
    pub(super) const LOG_MAX_PD: Field = field(0x64, 20, 16);
    pub(super) const LOG_MAX_XRCD: Field = field(0x64, 4, 0);
    pub(super) const LOG_MAX_RQ: Field = field(0x6c, 28, 24);
    pub(super) const LOG_MAX_SQ: Field = field(0x6c, 20, 16);
    pub(super) const LOG_MAX_TIR: Field = field(0x6c, 12, 8);
    pub(super) const LOG_MAX_TIS: Field = field(0x6c, 4, 0);
    pub(super) const BASIC_CYCLIC_RCV_WQE: Field = flag(0x70, 31);
    pub(super) const LOG_MAX_RMP: Field = field(0x70, 28, 24);
    pub(super) const LOG_MAX_RQT: Field = field(0x70, 20, 16);
    pub(super) const LOG_MAX_RQT_SIZE: Field = field(0x70, 12, 8);
    pub(super) const LOG_MAX_TIS_PER_SQ: Field = field(0x70, 4, 0);
    pub(super) const LOG_MAX_STRIDE_SZ_RQ: Field = field(0x74, 28, 24);
    pub(super) const LOG_MIN_STRIDE_SZ_RQ: Field = field(0x74, 20, 16);
    pub(super) const LOG_MAX_STRIDE_SZ_SQ: Field = field(0x74, 12, 8);
    pub(super) const LOG_MIN_STRIDE_SZ_SQ: Field = field(0x74, 4, 0);
    pub(super) const LOG_MAX_WQ_SZ: Field = field(0x78, 4, 0);
    pub(super) const DISABLE_LOCAL_LB_UC: Field = flag(0x7c, 30);
    pub(super) const DISABLE_LOCAL_LB_MC: Field = flag(0x7c, 29);
    pub(super) const LOG_MAX_VLAN_LIST: Field = field(0x7c, 20, 16);
    pub(super) const LOG_MAX_CURRENT_MC_LIST: Field = field(0x7c, 12, 8);
    pub(super) const LOG_MAX_CURRENT_UC_LIST: Field = field(0x7c, 4, 0);
    pub(super) const LOG_MAX_L2_TABLE: Field = field(0x90, 28, 24);
    pub(super) const LOG_UAR_PAGE_SZ: Field = field(0x90, 15, 0);
    pub(super) const HCA_CAP_2: Field = flag(0x4, 31);
    pub(super) const RTS2RTS_QP_UDP_SPORT: Field = flag(0x28, 14);
    pub(super) const GENERAL_OBJECTS_HIGH: Field = field(0x80, 31, 0);
    pub(super) const LOG_MAX_UCTX: Field = field(0x8c, 28, 24);
    pub(super) const LOG_RESERVED_QPN_GRANULARITY: Field = field(0x10, 12, 8);
    pub(super) const DEVICE_FREQUENCY_MHZ: Field = field(0x98, 31, 0);
    pub(super) const DEVICE_FREQUENCY_KHZ: Field = field(0x9c, 31, 0);

    pub(super) const CQE_128_ALWAYS: Field = flag(0xb4, 2);
    pub(super) const CQE_COMPRESSION_128: Field = flag(0xb4, 1);
    pub(super) const CQE_COMPRESSION: Field = flag(0xb4, 0);
    pub(super) const CQE_COMPRESSION_MAX_NUM: Field = field(0xb8, 15, 0);
    pub(super) const DUMP_FILL_MKEY: Field = flag(0x1c, 7);
    pub(super) const UMR_EXTENDED_TRANSLATION_OFFSET: Field = flag(0x20, 7);
    pub(super) const NULL_MKEY: Field = flag(0x20, 6);
    pub(super) const PG: Field = flag(0x44, 24);

    /// Set if on-demand paging uses the memory scheme.
    pub const MEM_PAGE_FAULT: Field = flag(0xc0, 31);
    pub(super) const MEM_ODP_RC: Field = field(0x50, 31, 26);
    pub(super) const MEM_ODP_UD: Field = field(0x58, 31, 26);
    pub(super) const MEM_ODP_XRC: Field = field(0x5c, 31, 26);

    /// On-demand paging for dynamic connections. Programs read `ODP_DC`, the field
    /// of the transport scheme.
    pub(super) const MEM_ODP_DC: Field = field(0x60, 31, 26);
    pub(super) const ODP_DC: Field = field(0x20, 31, 26);

    pub(super) const DEVICE_MEMORY: Field = flag(0x34, 23);

    pub(super) const LOG_DMA_MMO_MAX_SIZE: Field = field(0xc, 20, 16);
    pub(super) const DMA_MMO_SQ: Field = flag(0x28, 12);
    pub(super) const QPC_EXTENSION: Field = flag(0x24, 29);
    pub(super) const QOS: Field = flag(0x40, 4);
    pub(super) const DCT: Field = flag(0x40, 5);
    pub(super) const LOG_MAX_RA_REQ_DC: Field = field(0x24, 21, 16);
    pub(super) const LOG_MAX_RA_RES_DC: Field = field(0x24, 5, 0);
    pub(super) const MAX_WQE_SZ_SQ_DC: Field = field(0x58, 15, 0);
    pub(super) const LOG_MAX_DCI_STREAM_CHANNELS: Field = field(0xb0, 20, 16);
    pub(super) const LOG_MAX_DCI_ERRORED_STREAMS: Field = field(0xb0, 12, 8);

    pub(super) const NIC_SQ_SCHEDULING: Field = flag(0x0, 23);
    pub(super) const NIC_BW_SHARE: Field = flag(0x0, 22);
    pub(super) const NIC_RATE_LIMIT: Field = flag(0x0, 21);
    pub(super) const NIC_QP_SCHEDULING: Field = flag(0x4, 30);
    pub(super) const NIC_ELEMENT_TYPE: Field = field(0x20, 31, 16);
    pub(super) const NIC_TSAR_TYPE: Field = field(0x20, 15, 0);

    pub(super) const CSUM_CAP: Field = flag(0x0, 31);
    pub(super) const VLAN_CAP: Field = flag(0x0, 30);
    pub(super) const SELF_LB_EN_MODIFIABLE: Field = flag(0x0, 23);
    pub(super) const MAX_LSO_CAP: Field = field(0x0, 20, 16);
    pub(super) const WQE_INLINE_MODE: Field = field(0x0, 13, 12);
    pub(super) const RSS_IND_TBL_CAP: Field = field(0x0, 11, 8);

    /// Byte order of atomics in memory: 0 big-endian, 1 that of the host.
    pub const ATOMIC_ENDIANNESS_MODE: Field = field(0x8, 31, 30);
    pub(super) const ATOMIC_ENDIANNESS_MODE_1: Field = flag(0x8, 25);
    pub(super) const ATOMIC_OPERATIONS: Field = field(0x10, 15, 0);
    pub(super) const ATOMIC_SIZE_QP: Field = field(0x14, 15, 0);
    pub(super) const ATOMIC_SIZE_DC: Field = field(0x18, 15, 0);

    pub(super) const SW_R_ROCE_SRC_UDP_PORT: Field = flag(0x0, 27);
    pub(super) const L3_TYPE: Field = field(0x10, 19, 16);
    pub(super) const ROCE_VERSION: Field = field(0x10, 7, 0);
    pub(super) const R_ROCE_DEST_UDP_PORT: Field = field(0x14, 15, 0);
    pub(super) const R_ROCE_MAX_SRC_UDP_PORT: Field = field(0x18, 31, 16);
    pub(super) const R_ROCE_MIN_SRC_UDP_PORT: Field = field(0x18, 15, 0);
    pub(super) const ROCE_ADDRESS_TABLE_SIZE: Field = field(0x1c, 15, 0);

    pub(super) const MEMIC: Field = flag(0x0, 31);
    pub(super) const LOG_MAX_MEMIC_ALIGNMENT: Field = field(0x4, 7, 0);
    pub(super) const MEMIC_INCREMENT_LENGTHS: Field = field(0x4, 31, 24);
    pub(super) const MEMIC_TEST_AND_SET_LENGTHS: Field = field(0x4, 15, 8);
    pub(super) const MEMIC_OPERATIONS: Field = field(0x40, 31, 0);
    pub(super) const MEMIC_START_HIGH: Field = field(0x8, 31, 0);
    pub(super) const MEMIC_START: Field = field(0xc, 31, 0);
    pub(super) const MEMIC_BAR_SIZE: Field = field(0x10, 31, 0);
    pub(super) const MEMIC_MOST: Field = field(0x14, 31, 0);

    // Flow tables for NIC receive.
    pub(super) const FT_SUPPORT: Field = flag(0x40, 31);
    pub(super) const FT_FLOW_MODIFY_EN: Field = flag(0x40, 28);
    pub(super) const FT_MODIFY_ROOT: Field = flag(0x40, 27);
    pub(super) const FT_IDENTIFIED_MISS: Field = flag(0x40, 26);
    pub(super) const FT_MODIFY: Field = flag(0x40, 25);
    pub(super) const FT_LOG_MAX_SIZE: Field = field(0x44, 29, 24);
    pub(super) const FT_MAX_LEVEL: Field = field(0x44, 7, 0);
    pub(super) const FT_LOG_MAX_NUM: Field = field(0x4c, 7, 0);
    pub(super) const FT_LOG_MAX_DESTINATION: Field = field(0x50, 7, 0);
    pub(super) const FT_LOG_MAX_FLOW: Field = field(0x54, 7, 0);
    pub(super) const FT_FIELDS: Field = field(0x60, 31, 0);
}

use Group::{
    Atomic, DeviceMemory, EthernetOffloads, FlowTable, General, General2, OnDemandPaging, Qos, Roce,
};
use cap::*;

type Cap = (Group, Field, u32);

/// Capabilities of every profile.
const COMMON: &[Cap] = &[
    (General, LOG_MAX_SRQ_SZ, 15),
    (General, LOG_MAX_QP_SZ, 15),
    (General, LOG_MAX_QP, 17),
    (General, LOG_MAX_SRQ, 16),
    (General, LOG_MAX_CQ_SZ, 22),
    (General, LOG_MAX_CQ, 16),
    (General, LOG_MAX_EQ_SZ, 22),
    (General, LOG_MAX_MKEY, 22),
    (General, LOG_MAX_EQ, 6),
    (General, MAX_INDIRECTION, 4),
    (General, FIXED_BUFFER_SIZE, 1),
    (General, LOG_MAX_MRW_SZ, 64),
    (General, LOG_MAX_KLM_LIST_SIZE, 16),
    (General, LOG_MAX_RA_REQ_QP, 4),
    (General, LOG_MAX_RA_RES_QP, 4),
    (General, OUT_OF_SEQ_CNT, 1),
    (General, VPORT_COUNTERS, 1),
    (General, RETRANSMISSION_Q_COUNTERS, 1),
    (General, MAX_QP_CNT, 128),
    (General, LOCAL_CA_ACK_DELAY, 16),
    (General, NUM_PORTS, 1),
    (General, LOG_MAX_MSG, 30),
    (General, CQE_VERSION, 1),
    (General, SCTR_DATA_CQE, 1),
    (General, ATOMIC, 1),
    (General, CQ_OI, 1),
    (General, CQ_RESIZE, 1),
    (General, CQ_MODERATION, 1),
    (General, BLOCK_LB_MC, 1),
    (General, IMAICL, 1),
    (General, XRC, 1),
    (General, UD, 1),
    (General, UC, 1),
    (General, RC, 1),
    (General, DCT, 1),
    (General, LOG_MAX_RA_REQ_DC, dct::LOG_MOST_READS),
    (General, LOG_MAX_RA_RES_DC, dct::LOG_MOST_READS),
    (General, MAX_WQE_SZ_SQ_DC, 1024),
    (General, LOG_MAX_DCI_STREAM_CHANNELS, 6),
    (General, LOG_MAX_DCI_ERRORED_STREAMS, 6),
    (General, LOG_PG_SZ, 12),
    (General, BF, 1),
    (General, LOG_BF_REG_SIZE, 9),
    (General, MAX_WQE_SZ_SQ, 1024),
    (General, MAX_WQE_SZ_RQ, 512),
    (General, MAX_QP_MCG, 240),
    (General, LOG_MAX_MCG, 12),
    (General, LOG_MAX_TRANSPORT_DOMAIN, 16),
    (General, LOG_MAX_PD, 16),
    (General, LOG_MAX_XRCD, 16),
    (General, LOG_MAX_RQ, 16),
    (General, LOG_MAX_SQ, 16),
    (General, LOG_MAX_TIR, 16),
    (General, LOG_MAX_TIS, 16),
    (General, BASIC_CYCLIC_RCV_WQE, 1),
    (General, LOG_MAX_RMP, 16),
    (General, LOG_MAX_RQT, 16),
    (General, LOG_MAX_RQT_SIZE, 12),
    (General, LOG_MAX_TIS_PER_SQ, 3),
    (General, LOG_MAX_STRIDE_SZ_RQ, 9),
    (General, LOG_MIN_STRIDE_SZ_RQ, 4),
    (General, LOG_MAX_STRIDE_SZ_SQ, 6),
    (General, LOG_MIN_STRIDE_SZ_SQ, 6),
    (General, LOG_MAX_WQ_SZ, 15),
    // The timer counts nanoseconds.
    (General, DEVICE_FREQUENCY_MHZ, 1000),
    (General, DEVICE_FREQUENCY_KHZ, 1_000_000),
    (General, CQE_128_ALWAYS, 1),
    (General, CQE_COMPRESSION_128, 1),
    (General, CQE_COMPRESSION, 1),
    (General, CQE_COMPRESSION_MAX_NUM, compression::MOST),
    (General, NULL_MKEY, 1),
    (General, DUMP_FILL_MKEY, 1),
    (General, DEVICE_MEMORY, 1),
    (DeviceMemory, MEMIC, 1),
    (DeviceMemory, LOG_MAX_MEMIC_ALIGNMENT, 6),
    (
        DeviceMemory,
        MEMIC_INCREMENT_LENGTHS,
        MemicOperation::LENGTHS,
    ),
    (
        DeviceMemory,
        MEMIC_TEST_AND_SET_LENGTHS,
        MemicOperation::LENGTHS,
    ),
    (DeviceMemory, MEMIC_OPERATIONS, MemicOperation::ALL),
    (
        DeviceMemory,
        MEMIC_START_HIGH,
        (device_memory::START >> 32) as u32,
    ),
    (DeviceMemory, MEMIC_START, device_memory::START as u32),
    (DeviceMemory, MEMIC_BAR_SIZE, device_memory::SIZE as u32),
    (DeviceMemory, MEMIC_MOST, device_memory::SIZE as u32),
    (Atomic, ATOMIC_ENDIANNESS_MODE_1, 1),
    // Compare and swap, and fetch and add, of 8 bytes.
    (Atomic, ATOMIC_OPERATIONS, 0b11),
    (Atomic, ATOMIC_SIZE_QP, 1 << 3),
    (Atomic, ATOMIC_SIZE_DC, 1 << 3),
];

const INFINIBAND: &[Cap] = &[
    (General, PORT_TYPE, 0),
    (General, IB_VIRT, 1),
    (General, GID_TABLE_SIZE, 0),
];

const ETHERNET: &[Cap] = &[
    (General, PORT_TYPE, 1),
    (General, ROCE, 1),
    (General, ETH_NET_OFFLOADS, 1),
    (General, NIC_FLOW_TABLE, 1),
    (General, GID_TABLE_SIZE, 4),
    (General, MAX_TC, 8),
    // Loopback of the interface's own frames can be disabled.
    (General, DISABLE_LOCAL_LB_UC, 1),
    (General, DISABLE_LOCAL_LB_MC, 1),
    (General, LOG_MAX_VLAN_LIST, 5),
    (General, LOG_MAX_CURRENT_MC_LIST, 6),
    (General, LOG_MAX_CURRENT_UC_LIST, 6),
    (General, LOG_MAX_L2_TABLE, 7),
    (EthernetOffloads, CSUM_CAP, 1),
    (EthernetOffloads, VLAN_CAP, 1),
    (EthernetOffloads, SELF_LB_EN_MODIFIABLE, 1),
    (EthernetOffloads, MAX_LSO_CAP, 16),
    // Inline headers are not required in work requests.
    (EthernetOffloads, WQE_INLINE_MODE, 2),
    (EthernetOffloads, RSS_IND_TBL_CAP, 7),
    // RoCE v1 and v2, over IPv4 and IPv6.
    (Roce, ROCE_VERSION, 0b101),
    (Roce, L3_TYPE, 0b110),
    (Roce, R_ROCE_DEST_UDP_PORT, 4791),
    (Roce, R_ROCE_MIN_SRC_UDP_PORT, 0xc000),
    (Roce, R_ROCE_MAX_SRC_UDP_PORT, 0xffff),
    (Roce, ROCE_ADDRESS_TABLE_SIZE, 128),
    (FlowTable, FT_SUPPORT, 1),
    (FlowTable, FT_FLOW_MODIFY_EN, 1),
    (FlowTable, FT_MODIFY_ROOT, 1),
    (FlowTable, FT_IDENTIFIED_MISS, 1),
    (FlowTable, FT_MODIFY, 1),
    (FlowTable, FT_LOG_MAX_SIZE, 16),
    (FlowTable, FT_MAX_LEVEL, 64),
    (FlowTable, FT_LOG_MAX_NUM, 16),
    (FlowTable, FT_LOG_MAX_DESTINATION, 8),
    (FlowTable, FT_LOG_MAX_FLOW, 16),
    (FlowTable, FT_FIELDS, 0xffff_ffff),
];

/// On-demand paging. It requires memory keys that work requests change (UMR).
const ON_DEMAND: &[Cap] = &[
    (General, PG, 1),
    (General, UMR_EXTENDED_TRANSLATION_OFFSET, 1),
    (OnDemandPaging, MEM_PAGE_FAULT, 1),
    // Send, receive, write, read, atomic, SRQ receive.
    (OnDemandPaging, MEM_ODP_RC, 0b11_1111),
    (OnDemandPaging, MEM_ODP_UD, 0b10_0000),
    (OnDemandPaging, MEM_ODP_XRC, 0b11_1111),
    (OnDemandPaging, MEM_ODP_DC, 0b11_1111),
    (OnDemandPaging, ODP_DC, 0b11_1111),
];

/// Commands of programs (DevX): indirect memory keys filled in by UMR, reserved
/// queue pair numbers, rates; and copies of memory by the device (DMA_MMO).
const USER_CONTEXTS: &[Cap] = &[
    (General, LOG_MAX_UCTX, 15),
    (General, RTS2RTS_QP_UDP_SPORT, 1),
    (General, HCA_CAP_2, 1),
    (
        General,
        GENERAL_OBJECTS_HIGH,
        1 << (RESERVED_QPN - 32) | 1 << (SCHEDULING_ELEMENT - 32) | 1 << (ADDRESS_TO_QP - 32),
    ),
    (General, QPC_EXTENSION, 1),
    (General, DMA_MMO_SQ, 1),
    (General, LOG_DMA_MMO_MAX_SIZE, copy::LOG_MOST),
    (General, QOS, 1),
    (Qos, NIC_SQ_SCHEDULING, 1),
    (Qos, NIC_BW_SHARE, 1),
    (Qos, NIC_RATE_LIMIT, 1),
    (Qos, NIC_QP_SCHEDULING, 1),
    (Qos, NIC_ELEMENT_TYPE, scheduling::TYPES),
    (Qos, NIC_TSAR_TYPE, 1),
    (General2, LOG_RESERVED_QPN_GRANULARITY, LOG_RESERVED_QPNS),
];

/// Memory registration by command; no UMR.
const WITHOUT_UMR: &[Cap] = &[(General, UMR_MODIFY_ENTITY_SIZE_DISABLED, 1)];

/// An HCA profile.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    /// The name on the command line.
    pub name: &'static str,
    /// A one-line description.
    pub about: &'static str,
    /// The link layer of the port.
    pub port: PortKind,
    caps: &'static [&'static [Cap]],
}

/// All profiles.
pub const PROFILES: &[Profile] = &[
    Profile {
        name: "roce",
        about: "an Ethernet port with RoCE v1 and v2",
        port: PortKind::Ethernet,
        caps: &[COMMON, ETHERNET, WITHOUT_UMR],
    },
    Profile {
        name: "ib",
        about: "an InfiniBand port, on a fabric with a subnet manager",
        port: PortKind::InfiniBand,
        caps: &[COMMON, INFINIBAND, WITHOUT_UMR],
    },
    Profile {
        name: "roce-umr",
        about: "as roce, and memory is registered by work requests (UMR), or on demand",
        port: PortKind::Ethernet,
        caps: &[COMMON, ETHERNET, ON_DEMAND, USER_CONTEXTS],
    },
    Profile {
        name: "ib-umr",
        about: "as ib, and memory is registered by work requests (UMR), or on demand",
        port: PortKind::InfiniBand,
        caps: &[COMMON, INFINIBAND, ON_DEMAND, USER_CONTEXTS],
    },
];

impl Profile {
    /// Returns the profile with this name.
    pub fn named(name: &str) -> Option<&'static Profile> {
        PROFILES.iter().find(|profile| profile.name == name)
    }

    /// Returns the content of a capability group.
    pub fn group(&self, group: Group) -> Vec<u8> {
        let mut bytes = vec![0; group.size()];
        for (of, field, value) in self.caps.iter().copied().flatten() {
            if *of == group {
                field.put(&mut bytes, *value);
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_fits_its_field() {
        for profile in PROFILES {
            for (group, field, value) in profile.caps.iter().copied().flatten() {
                let mut bytes = vec![0; group.size()];
                field.put(&mut bytes, *value);
                assert_eq!(field.get(&bytes), *value, "{} {field:?}", profile.name);
            }
        }
    }

    #[test]
    fn a_profile_is_found_by_its_name() {
        let ib = Profile::named("ib").unwrap();
        assert_eq!(ib.port, PortKind::InfiniBand);
        assert_eq!(PORT_TYPE.get(&ib.group(General)), 0);
        assert!(Profile::named("").is_none());
    }
}
