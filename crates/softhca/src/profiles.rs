//! The profiles, and the values of their capabilities.

use crate::command::general::{ADDRESS_TO_QP, LOG_RESERVED_QPNS, RESERVED_QPN, SCHEDULING_ELEMENT};
use crate::command::protection::{ENCRYPTION_KEY, LOGIN, WRAPPED_AES};
use crate::command::{dct, vport};
use crate::engine::device_memory::MemicOperation;
use crate::engine::protection::LOG_MAX_ENCRYPTION_KEYS;
use crate::engine::{compression, copy, device_memory, header_change, scheduling, steering, tags};
use crate::profile::Group::{
    Atomic, Crypto, DeviceMemory, EthernetOffloads, FlowTable, General, General2, OnDemandPaging,
    Qos, Roce,
};
use crate::profile::cap::*;
use crate::profile::{Cap, PortKind, Profile};

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
    // Violations of queue and partition keys are counted.
    (General, QKV, 1),
    (General, PKV, 1),
    (General, XRC, 1),
    (General, UD, 1),
    (General, UC, 1),
    (General, RC, 1),
    (General, DCT, 1),
    (General, LOG_MAX_RA_REQ_DC, dct::LOG_MAX_READS),
    (General, LOG_MAX_RA_RES_DC, dct::LOG_MAX_READS),
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
    (General, CQE_COMPRESSION_MAX_NUM, compression::MAX_SESSION),
    (General, TAG_MATCHING, 1),
    (General, RNDV_OFFLOAD_RC, 1),
    (General, LOG_TAG_MATCHING_LIST_SZ, tags::LOG_MAX_TAGS),
    (General, LOG_MAX_XRQ, 16),
    (General, NULL_MKEY, 1),
    (General, DUMP_FILL_MKEY, 1),
    (General, DEVICE_MEMORY, 1),
    (DeviceMemory, MEMIC, 1),
    (DeviceMemory, LOG_MAX_MEMIC_ALIGNMENT, 6),
    (
        DeviceMemory,
        MEMIC_INCREMENT_LENGTHS,
        MemicOperation::OPERAND_SIZES,
    ),
    (
        DeviceMemory,
        MEMIC_TEST_AND_SET_LENGTHS,
        MemicOperation::OPERAND_SIZES,
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
    (General, STRIDING_RQ, 1),
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
    (FlowTable, FT_LOG_MAX_HEADER_CHANGES, 12),
    (
        FlowTable,
        FT_HEADER_CHANGE_ACTIONS,
        header_change::MAX_ACTIONS,
    ),
    (FlowTable, FT_MAX_LEVEL, 64),
    (FlowTable, FT_LOG_MAX_NUM, 16),
    (
        FlowTable,
        FT_LOG_MAX_DESTINATION,
        steering::LOG_DESTINATIONS,
    ),
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

/// Programs ask for on-demand paging of dynamic connections by a command. Linux has none
/// without UMR, but the embedded device has.
const ON_DEMAND_FOR_DC: &[Cap] = &[(OnDemandPaging, ODP_DC, 0b11_1111)];

/// Commands of programs (DevX): indirect memory keys filled in by UMR, reserved
/// queue pair numbers, rates; signatures and encryption of memory keys; and copies of memory
/// by the device (DMA_MMO).
const USER_CONTEXTS: &[Cap] = &[
    (General, LOG_MAX_UCTX, 15),
    (General, QP_DATA_IN_ORDER, 1),
    (General, DP_ORDERING_OOO_ALL, 0b1_1111),
    (General2, DP_ORDERING_FORCE, 1),
    (General, ECE_SUPPORT, 1),
    (General, RTS2RTS_QP_UDP_SPORT, 1),
    // Programs may refer to the driver's shared objects.
    (General, SHARED_OBJECTS, 1),
    // A function of a card whose two ports are a bond of the host.
    (General, RTS2RTS_LAG_TX_PORT_AFFINITY, 1),
    (General, LAG_TX_PORT_AFFINITY, 1),
    (General, NUM_LAG_PORTS, vport::LAG_PORTS),
    (General, HCA_CAP_2, 1),
    (
        General,
        GENERAL_OBJECTS_HIGH,
        1 << (RESERVED_QPN - 32) | 1 << (SCHEDULING_ELEMENT - 32) | 1 << (ADDRESS_TO_QP - 32),
    ),
    (General, GENERAL_OBJECTS_LOW, 1 << ENCRYPTION_KEY),
    (General, SHO, 1),
    (General, SIGERR_CQE, 1),
    (General, SIGERR_DOMAIN_AND_SIG_TYPE, 1),
    (General, SIG_BLOCK_4048, 1),
    (General, SIG_CRC32C, 1),
    (General, SIG_CRC64_XP10, 1),
    (General, DRAIN_SIGERR, 1),
    (General, CRYPTO, 1),
    (General, AES_XTS_SINGLE_BLOCK_LE_TWEAK, 1),
    (General, AES_XTS_MULTI_BLOCK_BE_TWEAK, 1),
    (Crypto, LOG_MAX_NUM_DEKS, LOG_MAX_ENCRYPTION_KEYS),
    (General, QPC_EXTENSION, 1),
    (General, DMA_MMO_SQ, 1),
    (General, LOG_DMA_MMO_MAX_SIZE, copy::LOG_MAX_LENGTH),
    (General, QOS, 1),
    (Qos, NIC_SQ_SCHEDULING, 1),
    (Qos, NIC_BW_SHARE, 1),
    (Qos, NIC_RATE_LIMIT, 1),
    (Qos, NIC_QP_SCHEDULING, 1),
    (Qos, NIC_ELEMENT_TYPE, scheduling::TYPES),
    (Qos, NIC_TSAR_TYPE, 1),
    (General2, LOG_RESERVED_QPN_GRANULARITY, LOG_RESERVED_QPNS),
];

/// Encryption keys are wrapped.
const WRAPPED_KEYS: &[Cap] = &[
    (
        General,
        GENERAL_OBJECTS_LOW,
        1 << ENCRYPTION_KEY | 1 << LOGIN,
    ),
    (Crypto, WRAPPED_CRYPTO_OPERATIONAL, 1),
    (Crypto, WRAPPED_IMPORT_METHOD, WRAPPED_AES),
    (Crypto, NUM_NV_IMPORT_KEKS, 1),
    (Crypto, NUM_NV_CREDENTIALS, 1),
];

/// Memory registration by command; no UMR.
const WITHOUT_UMR: &[Cap] = &[(General, UMR_MODIFY_ENTITY_SIZE_DISABLED, 1)];

/// The profile with DevX of one without.
const DEVX: &str = "-devx";

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
    Profile {
        name: "roce-wrapped",
        about: "as roce-umr, and encryption keys are wrapped",
        port: PortKind::Ethernet,
        caps: &[COMMON, ETHERNET, ON_DEMAND, USER_CONTEXTS, WRAPPED_KEYS],
    },
    Profile {
        name: "roce-devx",
        about: "as roce, and programs may issue commands (DevX)",
        port: PortKind::Ethernet,
        caps: &[
            COMMON,
            ETHERNET,
            WITHOUT_UMR,
            USER_CONTEXTS,
            ON_DEMAND_FOR_DC,
        ],
    },
    Profile {
        name: "ib-devx",
        about: "as ib, and programs may issue commands (DevX)",
        port: PortKind::InfiniBand,
        caps: &[
            COMMON,
            INFINIBAND,
            WITHOUT_UMR,
            USER_CONTEXTS,
            ON_DEMAND_FOR_DC,
        ],
    },
];

impl Profile {
    /// Returns the profile with this name.
    pub fn named(name: &str) -> Option<&'static Profile> {
        PROFILES.iter().find(|profile| profile.name == name)
    }

    /// Returns the profile with DevX; itself if it has no other.
    pub fn with_devx(&'static self) -> &'static Profile {
        let of = |profile: &&Profile| profile.name.strip_suffix(DEVX) == Some(self.name);
        PROFILES.iter().find(of).unwrap_or(self)
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
