//! Attribute types shared by several objects. Bits and numbers are the
//! kernel's; libibverbs uses the same.

use bitflags::bitflags;

use crate::abi::write;
use crate::open_enum;

bitflags! {
    /// Access rights of a memory region, a memory window, or the peer of a
    /// queue pair.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: u32 {
        /// The device may write to the memory (receives, results of reads and
        /// atomics).
        const LOCAL_WRITE = 1 << 0;
        /// A peer may write. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may read.
        const REMOTE_READ = 1 << 2;
        /// A peer may execute atomics. Needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses are offsets from the region's start.
        const ZERO_BASED = 1 << 5;
        /// Pages are faulted in on demand instead of pinned.
        const ON_DEMAND = 1 << 6;
        /// The memory consists of huge pages.
        const HUGETLB = 1 << 7;
        /// A peer may flush to global visibility.
        const FLUSH_GLOBAL = 1 << 8;
        /// A peer may flush to persistence.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Writes may be reordered. Optional: ignored by devices without
        /// support.
        const RELAXED_ORDERING = 1 << 20;
        const _ = !0;
    }

    /// Creation flags of a completion queue.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct CqFlags: u32 {
        /// Completions carry the device's timestamp.
        const TIMESTAMP_COMPLETION = 1 << 0;
        /// The device does not check for overruns; the caller prevents them.
        const IGNORE_OVERRUN = 1 << 1;
        const _ = !0;
    }

    /// Creation flags of a queue pair.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpCreateFlags: u32 {
        /// Multicast packets that the queue pair itself sent are not received.
        const BLOCK_MULTICAST_LOOPBACK = 1 << 1;
        /// The frame check sequence is written to memory too.
        const SCATTER_FCS = 1 << 8;
        /// The VLAN header is removed.
        const CVLAN_STRIPPING = 1 << 9;
        /// Writes are padded to full cache lines.
        const PCI_WRITE_END_PADDING = 1 << 11;
        const _ = !0;
    }
}

open_enum! {
    /// Transport service of a queue pair.
    QpType(u32) {
        /// Reliable connection.
        RC = 2,
        /// Unreliable connection.
        UC = 3,
        /// Unreliable datagram.
        UD = 4,
        /// Raw Ethernet frames.
        RAW_PACKET = 8,
        /// Initiator side of extended reliable connection.
        XRC_INI = 9,
        /// Target side of extended reliable connection.
        XRC_TGT = 10,
        /// A driver-specific service.
        DRIVER = 0xff,
    }
}

open_enum! {
    /// State of a queue pair.
    QpState(u8) {
        /// Initial state.
        RESET = 0,
        /// Receives may be posted, but are not processed.
        INIT = 1,
        /// Ready to receive.
        RTR = 2,
        /// Ready to send.
        RTS = 3,
        /// Send queue drained or draining.
        SQD = 4,
        /// Send queue in error, receive queue not in error.
        SQE = 5,
        /// In error: outstanding work requests are flushed.
        ERR = 6,
    }
}

/// A global route header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalRoute {
    /// Destination GID, network byte order.
    pub dgid: [u8; 16],
    /// Flow label, 20 bits, host byte order.
    pub flow_label: u32,
    /// Index of the source GID in the port's table.
    pub sgid_index: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// Path to a peer: the address vector of an address handle or a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AhAttr {
    /// Global route; used if `is_global`.
    pub grh: GlobalRoute,
    /// Destination LID; unused on Ethernet.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of the source LID.
    pub src_path_bits: u8,
    /// Limit of the injection rate, as in `enum ib_rate`.
    pub static_rate: u8,
    /// Whether the global route is used; always true on Ethernet.
    pub is_global: bool,
    /// Port number, from 1.
    pub port_num: u8,
}

impl AhAttr {
    pub(crate) fn to_kernel(self) -> write::AhAttr {
        write::AhAttr {
            grh: write::GlobalRoute {
                dgid: self.grh.dgid,
                flow_label: self.grh.flow_label,
                sgid_index: self.grh.sgid_index,
                hop_limit: self.grh.hop_limit,
                traffic_class: self.grh.traffic_class,
                reserved: 0,
            },
            dlid: self.dlid,
            sl: self.sl,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: self.is_global.into(),
            port_num: self.port_num,
            reserved: 0,
        }
    }

    pub(crate) fn to_qp_dest(self) -> write::QpDest {
        write::QpDest {
            dgid: self.grh.dgid,
            flow_label: self.grh.flow_label,
            dlid: self.dlid,
            reserved: 0,
            sgid_index: self.grh.sgid_index,
            hop_limit: self.grh.hop_limit,
            traffic_class: self.grh.traffic_class,
            sl: self.sl,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: self.is_global.into(),
            port_num: self.port_num,
        }
    }

    pub(crate) fn from_qp_dest(dest: &write::QpDest) -> Self {
        Self {
            grh: GlobalRoute {
                dgid: dest.dgid,
                flow_label: dest.flow_label,
                sgid_index: dest.sgid_index,
                hop_limit: dest.hop_limit,
                traffic_class: dest.traffic_class,
            },
            dlid: dest.dlid,
            sl: dest.sl,
            src_path_bits: dest.src_path_bits,
            static_rate: dest.static_rate,
            is_global: dest.is_global != 0,
            port_num: dest.port_num,
        }
    }
}
