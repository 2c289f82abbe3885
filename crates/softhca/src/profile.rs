//! HCA profiles: capability fields and their values.
//!
//! The driver queries capabilities in groups of 256 bytes (4,096 for flow tables).
//! A profile (module `profiles` has all) is a list of field values in those groups;
//! all other fields are zero, that is, absent. Offsets and meanings are those of the
//! capability structures in Linux's `mlx5_ifc.h`.

use roce::bits::{Field, field, flag};

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
    Crypto = 26,
    General2 = 32,
}

impl Group {
    /// All groups that profiles have.
    pub const ALL: [Group; 10] = [
        Group::General,
        Group::EthernetOffloads,
        Group::OnDemandPaging,
        Group::Atomic,
        Group::Roce,
        Group::FlowTable,
        Group::Qos,
        Group::DeviceMemory,
        Group::Crypto,
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

    pub(crate) const LOG_MAX_SRQ_SZ: Field = field(0x10, 31, 24);
    pub(crate) const LOG_MAX_QP_SZ: Field = field(0x10, 23, 16);
    pub(crate) const LOG_MAX_QP: Field = field(0x10, 4, 0);
    pub(crate) const QP_DATA_IN_ORDER: Field = flag(0xc, 29);
    pub(crate) const ECE_SUPPORT: Field = flag(0x14, 28);
    pub(crate) const LOG_MAX_SRQ: Field = field(0x14, 20, 16);
    pub(crate) const LOG_MAX_CQ_SZ: Field = field(0x18, 23, 16);
    pub(crate) const LOG_MAX_CQ: Field = field(0x18, 4, 0);
    pub(crate) const LOG_MAX_EQ_SZ: Field = field(0x1c, 31, 24);
    pub(crate) const LOG_MAX_MKEY: Field = field(0x1c, 21, 16);
    pub(crate) const LOG_MAX_EQ: Field = field(0x1c, 3, 0);
    pub(crate) const MAX_INDIRECTION: Field = field(0x20, 31, 24);
    pub(crate) const FIXED_BUFFER_SIZE: Field = flag(0x20, 23);
    pub(crate) const LOG_MAX_MRW_SZ: Field = field(0x20, 22, 16);
    pub(crate) const LOG_MAX_KLM_LIST_SIZE: Field = field(0x20, 5, 0);
    pub(crate) const LOG_MAX_RA_REQ_QP: Field = field(0x28, 21, 16);
    pub(crate) const LOG_MAX_RA_RES_QP: Field = field(0x28, 5, 0);
    pub(crate) const GID_TABLE_SIZE: Field = field(0x2c, 15, 0);
    pub(crate) const OUT_OF_SEQ_CNT: Field = flag(0x30, 31);
    pub(crate) const VPORT_COUNTERS: Field = flag(0x30, 30);
    pub(crate) const RETRANSMISSION_Q_COUNTERS: Field = flag(0x30, 29);
    pub(crate) const MAX_QP_CNT: Field = field(0x30, 25, 16);
    pub(crate) const PKEY_TABLE_SIZE: Field = field(0x30, 15, 0);
    pub(crate) const IB_VIRT: Field = flag(0x34, 29);
    pub(crate) const NIC_FLOW_TABLE: Field = flag(0x34, 25);
    pub(crate) const LOCAL_CA_ACK_DELAY: Field = field(0x34, 20, 16);
    pub(crate) const PORT_TYPE: Field = field(0x34, 9, 8);
    pub(crate) const NUM_PORTS: Field = field(0x34, 7, 0);
    pub(crate) const LOG_MAX_MSG: Field = field(0x38, 28, 24);
    pub(crate) const MAX_TC: Field = field(0x38, 19, 16);
    pub(crate) const CQE_VERSION: Field = field(0x3c, 3, 0);
    pub(crate) const UMR_MODIFY_ENTITY_SIZE_DISABLED: Field = flag(0x40, 24);
    pub(crate) const CMDIF_CHECKSUM: Field = field(0x40, 15, 14);
    pub(crate) const SCTR_DATA_CQE: Field = flag(0x40, 10);
    pub(crate) const STRIDING_RQ: Field = flag(0x40, 30);
    pub(crate) const ETH_NET_OFFLOADS: Field = flag(0x40, 3);
    pub(crate) const ROCE: Field = flag(0x40, 2);
    pub(crate) const ATOMIC: Field = flag(0x40, 1);
    pub(crate) const CQ_OI: Field = flag(0x44, 31);
    pub(crate) const CQ_RESIZE: Field = flag(0x44, 30);
    pub(crate) const CQ_MODERATION: Field = flag(0x44, 29);
    pub(crate) const BLOCK_LB_MC: Field = flag(0x44, 23);
    pub(crate) const IMAICL: Field = flag(0x44, 14);
    pub(crate) const QKV: Field = flag(0x44, 9);
    pub(crate) const PKV: Field = flag(0x44, 8);
    pub(crate) const XRC: Field = flag(0x44, 3);
    pub(crate) const UD: Field = flag(0x44, 2);
    pub(crate) const UC: Field = flag(0x44, 1);
    pub(crate) const RC: Field = flag(0x44, 0);
    pub(crate) const LOG_PG_SZ: Field = field(0x48, 7, 0);
    pub(crate) const BF: Field = flag(0x4c, 31);
    pub(crate) const LOG_BF_REG_SIZE: Field = field(0x4c, 20, 16);
    pub(crate) const MAX_WQE_SZ_SQ: Field = field(0x50, 15, 0);
    pub(crate) const MAX_WQE_SZ_RQ: Field = field(0x54, 15, 0);
    pub(crate) const MAX_QP_MCG: Field = field(0x5c, 24, 0);
    pub(crate) const LOG_MAX_MCG: Field = field(0x60, 7, 0);
    pub(crate) const LOG_MAX_TRANSPORT_DOMAIN: Field = field(0x64, 28, 24);
    pub(crate) const LOG_MAX_PD: Field = field(0x64, 20, 16);
    pub(crate) const LOG_MAX_XRCD: Field = field(0x64, 4, 0);
    /// Services whose receives may be consumed in any order: UD, UC, XRC, DC, RC.
    pub(crate) const DP_ORDERING_OOO_ALL: Field = field(0x64, 15, 11);
    pub(crate) const LOG_MAX_RQ: Field = field(0x6c, 28, 24);
    pub(crate) const LOG_MAX_SQ: Field = field(0x6c, 20, 16);
    pub(crate) const LOG_MAX_TIR: Field = field(0x6c, 12, 8);
    pub(crate) const LOG_MAX_TIS: Field = field(0x6c, 4, 0);
    pub(crate) const BASIC_CYCLIC_RCV_WQE: Field = flag(0x70, 31);
    pub(crate) const LOG_MAX_RMP: Field = field(0x70, 28, 24);
    pub(crate) const LOG_MAX_RQT: Field = field(0x70, 20, 16);
    pub(crate) const LOG_MAX_RQT_SIZE: Field = field(0x70, 12, 8);
    pub(crate) const LOG_MAX_TIS_PER_SQ: Field = field(0x70, 4, 0);
    pub(crate) const LOG_MAX_STRIDE_SZ_RQ: Field = field(0x74, 28, 24);
    pub(crate) const LOG_MIN_STRIDE_SZ_RQ: Field = field(0x74, 20, 16);
    pub(crate) const LOG_MAX_STRIDE_SZ_SQ: Field = field(0x74, 12, 8);
    pub(crate) const LOG_MIN_STRIDE_SZ_SQ: Field = field(0x74, 4, 0);
    pub(crate) const LOG_MAX_WQ_SZ: Field = field(0x78, 4, 0);
    pub(crate) const SIG_CRC64_XP10: Field = flag(0x28, 24);
    pub(crate) const SIG_CRC32C: Field = flag(0x28, 23);
    pub(crate) const SIG_BLOCK_4048: Field = flag(0x3c, 15);
    pub(crate) const DRAIN_SIGERR: Field = flag(0x40, 16);
    pub(crate) const SIGERR_CQE: Field = flag(0x40, 13);
    pub(crate) const SHO: Field = flag(0x40, 8);
    pub(crate) const SIGERR_DOMAIN_AND_SIG_TYPE: Field = flag(0x90, 31);
    pub(crate) const AES_XTS_SINGLE_BLOCK_LE_TWEAK: Field = flag(0x7c, 14);
    pub(crate) const AES_XTS_MULTI_BLOCK_BE_TWEAK: Field = flag(0x7c, 13);
    pub(crate) const CRYPTO: Field = flag(0x8c, 22);
    pub(crate) const GENERAL_OBJECTS_LOW: Field = field(0x84, 31, 0);
    pub(crate) const LOG_MAX_NUM_DEKS: Field = field(0x4, 20, 16);
    pub(crate) const WRAPPED_CRYPTO_OPERATIONAL: Field = flag(0x0, 31);
    pub(crate) const WRAPPED_IMPORT_METHOD: Field = field(0x0, 7, 0);
    pub(crate) const NUM_NV_IMPORT_KEKS: Field = field(0x8, 15, 8);
    pub(crate) const NUM_NV_CREDENTIALS: Field = field(0x8, 7, 0);
    pub(crate) const DISABLE_LOCAL_LB_UC: Field = flag(0x7c, 30);
    pub(crate) const DISABLE_LOCAL_LB_MC: Field = flag(0x7c, 29);
    pub(crate) const LOG_MAX_VLAN_LIST: Field = field(0x7c, 20, 16);
    pub(crate) const LOG_MAX_CURRENT_MC_LIST: Field = field(0x7c, 12, 8);
    pub(crate) const LOG_MAX_CURRENT_UC_LIST: Field = field(0x7c, 4, 0);
    pub(crate) const LOG_MAX_L2_TABLE: Field = field(0x90, 28, 24);
    pub(crate) const LOG_UAR_PAGE_SZ: Field = field(0x90, 15, 0);
    pub(crate) const HCA_CAP_2: Field = flag(0x4, 31);
    pub(crate) const RTS2RTS_QP_UDP_SPORT: Field = flag(0x28, 14);
    pub(crate) const RTS2RTS_LAG_TX_PORT_AFFINITY: Field = flag(0x28, 13);
    pub(crate) const SHARED_OBJECTS: Field = flag(0x0, 15);
    pub(crate) const LAG_TX_PORT_AFFINITY: Field = flag(0x4c, 7);
    pub(crate) const NUM_LAG_PORTS: Field = field(0x4c, 3, 0);
    pub(crate) const GENERAL_OBJECTS_HIGH: Field = field(0x80, 31, 0);
    pub(crate) const LOG_MAX_UCTX: Field = field(0x8c, 28, 24);
    pub(crate) const DP_ORDERING_FORCE: Field = flag(0x10, 23);
    pub(crate) const LOG_RESERVED_QPN_GRANULARITY: Field = field(0x10, 12, 8);
    pub(crate) const DEVICE_FREQUENCY_MHZ: Field = field(0x98, 31, 0);
    pub(crate) const DEVICE_FREQUENCY_KHZ: Field = field(0x9c, 31, 0);

    pub(crate) const CQE_128_ALWAYS: Field = flag(0xb4, 2);
    pub(crate) const CQE_COMPRESSION_128: Field = flag(0xb4, 1);
    pub(crate) const CQE_COMPRESSION: Field = flag(0xb4, 0);
    pub(crate) const CQE_COMPRESSION_MAX_NUM: Field = field(0xb8, 15, 0);
    pub(crate) const TAG_MATCHING: Field = flag(0xbc, 15);
    pub(crate) const RNDV_OFFLOAD_RC: Field = flag(0xbc, 14);
    pub(crate) const LOG_TAG_MATCHING_LIST_SZ: Field = field(0xbc, 12, 8);
    pub(crate) const LOG_MAX_XRQ: Field = field(0xbc, 4, 0);
    pub(crate) const DUMP_FILL_MKEY: Field = flag(0x1c, 7);
    pub(crate) const UMR_EXTENDED_TRANSLATION_OFFSET: Field = flag(0x20, 7);
    pub(crate) const NULL_MKEY: Field = flag(0x20, 6);
    pub(crate) const PG: Field = flag(0x44, 24);

    /// Set if on-demand paging uses the memory scheme.
    pub const MEM_PAGE_FAULT: Field = flag(0xc0, 31);
    pub(crate) const MEM_ODP_RC: Field = field(0x50, 31, 26);
    pub(crate) const MEM_ODP_UD: Field = field(0x58, 31, 26);
    pub(crate) const MEM_ODP_XRC: Field = field(0x5c, 31, 26);

    /// On-demand paging for dynamic connections. Programs read `ODP_DC`, the field
    /// of the transport scheme.
    pub(crate) const MEM_ODP_DC: Field = field(0x60, 31, 26);
    pub(crate) const ODP_DC: Field = field(0x20, 31, 26);

    pub(crate) const DEVICE_MEMORY: Field = flag(0x34, 23);

    pub(crate) const LOG_DMA_MMO_MAX_SIZE: Field = field(0xc, 20, 16);
    pub(crate) const DMA_MMO_SQ: Field = flag(0x28, 12);
    pub(crate) const QPC_EXTENSION: Field = flag(0x24, 29);
    pub(crate) const QOS: Field = flag(0x40, 4);
    pub(crate) const DCT: Field = flag(0x40, 5);
    pub(crate) const LOG_MAX_RA_REQ_DC: Field = field(0x24, 21, 16);
    pub(crate) const LOG_MAX_RA_RES_DC: Field = field(0x24, 5, 0);
    pub(crate) const MAX_WQE_SZ_SQ_DC: Field = field(0x58, 15, 0);
    pub(crate) const LOG_MAX_DCI_STREAM_CHANNELS: Field = field(0xb0, 20, 16);
    pub(crate) const LOG_MAX_DCI_ERRORED_STREAMS: Field = field(0xb0, 12, 8);

    pub(crate) const NIC_SQ_SCHEDULING: Field = flag(0x0, 23);
    pub(crate) const NIC_BW_SHARE: Field = flag(0x0, 22);
    pub(crate) const NIC_RATE_LIMIT: Field = flag(0x0, 21);
    pub(crate) const NIC_QP_SCHEDULING: Field = flag(0x4, 30);
    pub(crate) const NIC_ELEMENT_TYPE: Field = field(0x20, 31, 16);
    pub(crate) const NIC_TSAR_TYPE: Field = field(0x20, 15, 0);

    pub(crate) const CSUM_CAP: Field = flag(0x0, 31);
    pub(crate) const VLAN_CAP: Field = flag(0x0, 30);
    pub(crate) const SELF_LB_EN_MODIFIABLE: Field = flag(0x0, 23);
    pub(crate) const MAX_LSO_CAP: Field = field(0x0, 20, 16);
    pub(crate) const WQE_INLINE_MODE: Field = field(0x0, 13, 12);
    pub(crate) const RSS_IND_TBL_CAP: Field = field(0x0, 11, 8);

    /// Byte order of atomics in memory: 0 big-endian, 1 that of the host.
    pub const ATOMIC_ENDIANNESS_MODE: Field = field(0x8, 31, 30);
    pub(crate) const ATOMIC_ENDIANNESS_MODE_1: Field = flag(0x8, 25);
    pub(crate) const ATOMIC_OPERATIONS: Field = field(0x10, 15, 0);
    pub(crate) const ATOMIC_SIZE_QP: Field = field(0x14, 15, 0);
    pub(crate) const ATOMIC_SIZE_DC: Field = field(0x18, 15, 0);

    pub(crate) const SW_R_ROCE_SRC_UDP_PORT: Field = flag(0x0, 27);
    pub(crate) const L3_TYPE: Field = field(0x10, 19, 16);
    pub(crate) const ROCE_VERSION: Field = field(0x10, 7, 0);
    pub(crate) const R_ROCE_DEST_UDP_PORT: Field = field(0x14, 15, 0);
    pub(crate) const R_ROCE_MAX_SRC_UDP_PORT: Field = field(0x18, 31, 16);
    pub(crate) const R_ROCE_MIN_SRC_UDP_PORT: Field = field(0x18, 15, 0);
    pub(crate) const ROCE_ADDRESS_TABLE_SIZE: Field = field(0x1c, 15, 0);

    pub(crate) const MEMIC: Field = flag(0x0, 31);
    pub(crate) const LOG_MAX_MEMIC_ALIGNMENT: Field = field(0x4, 7, 0);
    pub(crate) const MEMIC_INCREMENT_LENGTHS: Field = field(0x4, 31, 24);
    pub(crate) const MEMIC_TEST_AND_SET_LENGTHS: Field = field(0x4, 15, 8);
    pub(crate) const MEMIC_OPERATIONS: Field = field(0x40, 31, 0);
    pub(crate) const MEMIC_START_HIGH: Field = field(0x8, 31, 0);
    pub(crate) const MEMIC_START: Field = field(0xc, 31, 0);
    pub(crate) const MEMIC_BAR_SIZE: Field = field(0x10, 31, 0);
    pub(crate) const MEMIC_MOST: Field = field(0x14, 31, 0);

    // Flow tables for NIC receive.
    pub(crate) const FT_SUPPORT: Field = flag(0x40, 31);
    pub(crate) const FT_FLOW_MODIFY_EN: Field = flag(0x40, 28);
    pub(crate) const FT_MODIFY_ROOT: Field = flag(0x40, 27);
    pub(crate) const FT_IDENTIFIED_MISS: Field = flag(0x40, 26);
    pub(crate) const FT_MODIFY: Field = flag(0x40, 25);
    pub(crate) const FT_LOG_MAX_SIZE: Field = field(0x44, 29, 24);
    pub(crate) const FT_LOG_MAX_HEADER_CHANGES: Field = field(0x44, 23, 16);
    /// Maximum number of actions on headers.
    pub const FT_HEADER_CHANGE_ACTIONS: Field = field(0x44, 15, 8);
    pub(crate) const FT_MAX_LEVEL: Field = field(0x44, 7, 0);
    pub(crate) const FT_LOG_MAX_NUM: Field = field(0x4c, 7, 0);
    pub(crate) const FT_LOG_MAX_DESTINATION: Field = field(0x50, 7, 0);
    pub(crate) const FT_LOG_MAX_FLOW: Field = field(0x54, 7, 0);
    pub(crate) const FT_FIELDS: Field = field(0x60, 31, 0);
}

/// The value of a capability.
pub(crate) type Cap = (Group, Field, u32);

/// An HCA profile.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    /// The name on the command line.
    pub name: &'static str,
    /// A one-line description.
    pub about: &'static str,
    /// The link layer of the port.
    pub port: PortKind,
    pub(crate) caps: &'static [&'static [Cap]],
}

impl Profile {
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
