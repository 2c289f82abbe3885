//! Names of numbers, as in ibv_devinfo.

use std::net::Ipv6Addr;

use ringverbs::query::{NodeType, PORT_ACTIVE};

/// Returns name and number of a device's transport (`enum ibv_transport_type`).
pub fn transport(node: NodeType) -> (&'static str, i32) {
    match node {
        NodeType::CA | NodeType::SWITCH | NodeType::ROUTER => ("InfiniBand", 0),
        NodeType::RNIC => ("iWARP", 1),
        NodeType::USNIC => ("usNIC", 2),
        NodeType::USNIC_UDP => ("usNIC UDP", 3),
        NodeType::UNSPECIFIED => ("unspecified", 4),
        _ => ("invalid transport", -1),
    }
}

/// Returns the name of a port's state (`enum ibv_port_state`).
pub fn port_state(state: u8) -> &'static str {
    match state {
        1 => "PORT_DOWN",
        2 => "PORT_INIT",
        3 => "PORT_ARMED",
        PORT_ACTIVE => "PORT_ACTIVE",
        _ => "invalid state",
    }
}

/// Returns the name of a port's physical state.
pub fn physical_state(state: u8) -> &'static str {
    match state {
        1 => "SLEEP",
        2 => "POLLING",
        3 => "DISABLED",
        // The spelling is ibv_devinfo's.
        4 => "PORT_CONFIGURATION TRAINNING",
        5 => "LINK_UP",
        6 => "LINK_ERROR_RECOVERY",
        7 => "PHY TEST",
        _ => "invalid physical state",
    }
}

/// Returns the name of an atomic capability (`enum ibv_atomic_cap`).
pub fn atomic_cap(cap: u32) -> &'static str {
    match cap {
        0 => "ATOMIC_NONE",
        1 => "ATOMIC_HCA",
        2 => "ATOMIC_GLOB",
        _ => "invalid atomic capability",
    }
}

/// Returns an MTU in bytes (`enum ibv_mtu`).
pub fn mtu(mtu: u8) -> Option<u32> {
    match mtu {
        1..=5 => Some(128 << mtu),
        _ => None,
    }
}

/// Returns the name of a link width.
pub fn width(width: u8) -> &'static str {
    match width {
        1 => "1",
        2 => "4",
        4 => "8",
        8 => "12",
        16 => "2",
        _ => "invalid width",
    }
}

/// Returns the name of a link speed.
pub fn speed(speed: u32) -> &'static str {
    match speed {
        1 => "2.5 Gbps",
        2 => "5.0 Gbps",
        4 | 8 => "10.0 Gbps",
        16 => "14.0 Gbps",
        32 => "25.0 Gbps",
        64 => "50.0 Gbps",
        128 => "100.0 Gbps",
        256 => "200.0 Gbps",
        _ => "invalid speed",
    }
}

/// Returns the name of a number of virtual lanes.
pub fn virtual_lanes(number: u8) -> &'static str {
    match number {
        1 => "1",
        2 => "2",
        3 => "4",
        4 => "8",
        5 => "15",
        _ => "invalid value",
    }
}

/// Returns the name of a link layer.
pub fn link_layer(layer: u8) -> &'static str {
    match layer {
        0 => "Unspecified",
        1 => "InfiniBand",
        2 => "Ethernet",
        _ => "Unknown",
    }
}

/// Formats a GUID, in network byte order, in four groups.
pub fn guid(guid: [u8; 8]) -> String {
    groups(&guid)
}

/// Formats a GID as ibv_devinfo does: RoCE v2 as an IPv6 address, others in
/// groups.
pub fn gid(gid: [u8; 16], kind: GidKind) -> String {
    match kind {
        GidKind::RoceV2 => Ipv6Addr::from(gid).to_string(),
        GidKind::InfiniBand | GidKind::RoceV1 => groups(&gid),
    }
}

fn groups(bytes: &[u8]) -> String {
    let groups = bytes.chunks_exact(2);
    let groups = groups.map(|pair| pair.iter().map(|byte| format!("{byte:02x}")).collect());
    groups.collect::<Vec<String>>().join(":")
}

/// The type of a GID (`enum ib_uverbs_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or iWARP.
    InfiniBand,
    /// RoCE v1.
    RoceV1,
    /// RoCE v2.
    RoceV2,
}

impl GidKind {
    /// Converts the kernel's code.
    pub fn from_kernel(kind: u32) -> Option<Self> {
        match kind {
            0 => Some(Self::InfiniBand),
            1 => Some(Self::RoceV1),
            2 => Some(Self::RoceV2),
            _ => None,
        }
    }

    /// Returns the name. ibv_devinfo shows it on Ethernet only, where no GID has the first
    /// type.
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        }
    }
}

/// Names of bits.
pub type Bits = [(u64, &'static str)];

/// `device_cap_flags` (`enum ibv_device_cap_flags`).
pub const DEVICE_CAPS: &Bits = &[
    (1, "RESIZE_MAX_WR"),
    (1 << 1, "BAD_PKEY_CNTR"),
    (1 << 2, "BAD_QKEY_CNTR"),
    (1 << 3, "RAW_MULTI"),
    (1 << 4, "AUTO_PATH_MIG"),
    (1 << 5, "CHANGE_PHY_PORT"),
    (1 << 6, "UD_AV_PORT_ENFORCE"),
    (1 << 7, "CURR_QP_STATE_MOD"),
    (1 << 8, "SHUTDOWN_PORT"),
    (1 << 9, "INIT_TYPE"),
    (1 << 10, "PORT_ACTIVE_EVENT"),
    (1 << 11, "SYS_IMAGE_GUID"),
    (1 << 12, "RC_RNR_NAK_GEN"),
    (1 << 13, "SRQ_RESIZE"),
    (1 << 14, "N_NOTIFY_CQ"),
    (1 << 17, "MEM_WINDOW"),
    (1 << 18, "UD_IP_CSUM"),
    (1 << 20, "XRC"),
    (1 << 21, "MEM_MGT_EXTENSIONS"),
    (1 << 23, "MEM_WINDOW_TYPE_2A"),
    (1 << 24, "MEM_WINDOW_TYPE_2B"),
    (1 << 25, "RC_IP_CSUM"),
    (1 << 26, "RAW_IP_CSUM"),
    (1 << 29, "MANAGED_FLOW_STEERING"),
];

/// Upper half of `device_cap_flags_ex`.
pub const DEVICE_CAPS_EX: &Bits = &[
    (1 << 34, "RAW_SCATTER_FCS"),
    (1 << 36, "PCI_WRITE_END_PADDING"),
    (1 << 41, "CC_DMA_BOUNCE"),
];

/// `general_odp_caps`.
pub const ODP_GENERAL: &Bits = &[(1, "ODP_SUPPORT"), (1 << 1, "ODP_SUPPORT_IMPLICIT")];

/// On-demand paging of a transport.
pub const ODP_TRANSPORT: &Bits = &[
    (1, "SUPPORT_SEND"),
    (1 << 1, "SUPPORT_RECV"),
    (1 << 2, "SUPPORT_WRITE"),
    (1 << 3, "SUPPORT_READ"),
    (1 << 4, "SUPPORT_ATOMIC"),
    (1 << 5, "SUPPORT_SRQ"),
    (1 << 6, "SUPPORT_FLUSH"),
    (1 << 7, "SUPPORT_ATOMIC_WRITE"),
];

/// Raw packet capabilities.
pub const RAW_PACKET: &Bits = &[
    (1, "C-VLAN stripping offload"),
    (1 << 1, "Scatter FCS offload"),
    (1 << 2, "IP csum offload"),
    (1 << 3, "Delay drop"),
];

/// Tag matching capabilities.
pub const TAG_MATCHING: &Bits = &[(1, "IBV_TM_CAP_RC")];

/// Returns the names of the bits that are set, and the remaining bits.
pub fn bits(word: u64, names: &Bits) -> (Vec<&'static str>, u64) {
    let set = names.iter().filter(|(bit, _)| word & bit != 0);
    let known = names.iter().fold(0, |known, (bit, _)| known | bit);
    (set.map(|(_, name)| *name).collect(), word & !known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_and_gids_have_ibv_devinfos_format() {
        assert_eq!(
            guid([0x50, 0x54, 0, 0xff, 0xfe, 1, 2, 3]),
            "5054:00ff:fe01:0203"
        );
        let mut mapped = [0; 16];
        mapped[10..].copy_from_slice(&[0xff, 0xff, 192, 168, 77, 1]);
        assert_eq!(gid(mapped, GidKind::RoceV2), "::ffff:192.168.77.1");
        assert_eq!(
            gid(mapped, GidKind::RoceV1),
            "0000:0000:0000:0000:0000:ffff:c0a8:4d01"
        );
        let mut link_local = [0; 16];
        link_local[..2].copy_from_slice(&[0xfe, 0x80]);
        link_local[15] = 1;
        assert_eq!(gid(link_local, GidKind::RoceV2), "fe80::1");
    }

    #[test]
    fn bits_without_a_name_are_returned() {
        assert_eq!(bits(0b101, ODP_GENERAL), (vec!["ODP_SUPPORT"], 0b100));
        assert_eq!(bits(0, ODP_GENERAL), (vec![], 0));
    }

    #[test]
    fn every_number_has_a_name_or_is_invalid() {
        for number in 0..=u8::MAX {
            assert!(!port_state(number).is_empty());
            assert!(!physical_state(number).is_empty());
            assert!(!width(number).is_empty());
            assert!(!speed(number.into()).is_empty());
            assert!(!virtual_lanes(number).is_empty());
            assert!(!link_layer(number).is_empty());
            assert!(!atomic_cap(number.into()).is_empty());
        }
        assert_eq!([0, 1, 5, 6].map(mtu), [None, Some(256), Some(4096), None]);
    }
}
