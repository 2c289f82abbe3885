//! Attributes of sysfs that have the same content in all processes, as mlx5_ib has them over
//! the same device.

use std::fs;

use softhca::card::{Card, Speed};

use super::function::Function;
use super::node::Place;

/// Counters that do not count.
const ZERO: &str = "0";

/// Attributes of a device.
pub const DEVICE: [(&str, &str); 4] = [
    ("node_type", "1: CA"),
    ("fw_pages", "64"),
    ("reg_pages", "0"),
    ("ports/1/hw_counters/lifespan", "12"),
];

/// Returns attributes of a device that its card decides.
pub fn of_card(card: &Card) -> [(&'static str, String); 5] {
    [
        ("hw_rev", format!("{:x}", card.hardware_version)),
        ("hca_type", card.type_text()),
        ("board_id", card.board_id.to_owned()),
        ("fw_ver", card.firmware_text()),
        ("ports/1/rate", card.speed.text().to_owned()),
    ]
}

/// Directories of counters of a port, with the counters of each.
const COUNTERS: [(&str, &[&str]); 6] = [
    ("cm_rx_duplicates", &CM_MESSAGES),
    ("cm_rx_msgs", &CM_MESSAGES),
    ("cm_tx_msgs", &CM_MESSAGES),
    ("cm_tx_retries", &CM_MESSAGES),
    (
        "counters",
        &[
            "VL15_dropped",
            "excessive_buffer_overrun_errors",
            "link_downed",
            "link_error_recovery",
            "local_link_integrity_errors",
            "multicast_rcv_packets",
            "multicast_xmit_packets",
            "port_rcv_constraint_errors",
            "port_rcv_data",
            "port_rcv_errors",
            "port_rcv_packets",
            "port_rcv_remote_physical_errors",
            "port_rcv_switch_relay_errors",
            "port_xmit_constraint_errors",
            "port_xmit_data",
            "port_xmit_discards",
            "port_xmit_packets",
            "port_xmit_wait",
            "symbol_error",
            "unicast_rcv_packets",
            "unicast_xmit_packets",
        ],
    ),
    ("hw_counters", &HW_COUNTERS),
];

/// Counters in `counters` that count; the others are 0.
pub const PORT_COUNTERS: [&str; 9] = [
    "link_downed",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_data",
    "port_rcv_packets",
    "port_xmit_data",
    "port_xmit_packets",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
];

/// Counters of the device, in its order.
pub const HW_COUNTERS: [&str; 14] = [
    "rx_write_requests",
    "rx_read_requests",
    "rx_atomic_requests",
    "rx_dct_connect",
    "out_of_buffer",
    "out_of_sequence",
    "duplicate_request",
    "rnr_nak_retry_err",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "np_cnp_sent",
];

/// Messages of the connection manager, in the order of their attributes.
pub const CM_MESSAGES: [&str; 11] = [
    "req", "mra", "rej", "rep", "rtu", "dreq", "drep", "sidr_req", "sidr_rep", "lap", "apr",
];

/// Returns the counters of a port, with their values.
pub fn counters() -> impl Iterator<Item = (String, &'static str)> {
    let named = |(directory, names): (&'static str, &'static [&'static str])| {
        (names.iter()).map(move |name| (format!("ports/1/{directory}/{name}"), ZERO))
    };
    COUNTERS.into_iter().flat_map(named)
}

/// Returns the PCI function of a device.
pub fn function(ethernet: bool, card: &Card) -> Function {
    Function {
        model: (0x15b3, card.part_id),
        subsystem: card.subsystem_id,
        class: if ethernet { 0x02_0000 } else { 0x02_0700 },
        generation: match card.speed {
            Speed::Edr => 3,
            Speed::Hdr => 4,
            Speed::Ndr => 5,
        },
        is_bridge: false,
        buses: None,
    }
}

/// Returns the attributes of the PCI device with this name.
pub fn pci(place: &Place, function: &Function, card: &Card) -> Vec<(&'static str, String)> {
    let class = format!("{:06x}", function.class);
    let (device, subsystem) = (card.part_id, card.subsystem_id);
    let modalias = format!(
        "pci:v000015B3d{device:08X}sv000015B3sd{subsystem:08X}bc{}sc{}i{}",
        &class[..2],
        &class[2..4],
        &class[4..]
    );
    let processors = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let processors = match (&place.processors, processors.trim()) {
        (Some(list), _) => list,
        (None, "") => "0",
        (None, list) => list,
    };
    let name = place.name();
    let uevent = format!(
        "DRIVER=mlx5_core\nPCI_CLASS={}\nPCI_ID=15B3:{device:04X}\n\
         PCI_SUBSYS_ID=15B3:{subsystem:04X}\n\
         PCI_SLOT_NAME={name}\nMODALIAS={modalias}",
        &class[1..]
    );
    let fixed = [
        ("ari_enabled", "0"),
        ("broken_parity_status", "0"),
        ("consistent_dma_mask_bits", "64"),
        ("d3cold_allowed", "0"),
        ("dma_mask_bits", "64"),
        ("driver_override", "(null)"),
        ("enable", "1"),
        ("irq", "0"),
        ("msi_bus", "1"),
        ("power_state", "D0"),
        ("revision", "0x00"),
        ("subsystem_vendor", "0x15b3"),
        ("vendor", "0x15b3"),
    ];
    let mut all = Vec::from(fixed.map(|(name, content)| (name, content.to_owned())));
    all.extend([
        ("class", format!("0x{class}")),
        ("device", format!("{device:#06x}")),
        ("subsystem_device", format!("{subsystem:#06x}")),
        ("local_cpulist", processors.to_owned()),
        ("local_cpus", mask(processors)),
        ("modalias", modalias),
        ("numa_node", place.numa_node.to_string()),
        ("resource", function.resource()),
        ("uevent", uevent),
    ]);
    let link = card.speed.pci_link();
    for name in ["current_link_speed", "max_link_speed"] {
        all.push((name, format!("{link} PCIe")));
    }
    for name in ["current_link_width", "max_link_width"] {
        all.push((name, "16".to_owned()));
    }
    all
}

/// Converts a list of processors, such as `0-2,4`, to a mask in words of 32 bits. Malformed
/// parts are ignored.
pub fn mask(list: &str) -> String {
    const MAX_PROCESSORS: usize = 1 << 16;
    let mut words = vec![0u32];
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            continue;
        };
        for number in first..=last.min(MAX_PROCESSORS) {
            if words.len() <= number / 32 {
                words.resize(number / 32 + 1, 0);
            }
            words[number / 32] |= 1 << (number % 32);
        }
    }
    let mut words = words.iter().rev();
    let first = words.next().map(|word| format!("{word:x}"));
    let rest = words.map(|word| format!("{word:08x}"));
    first.into_iter().chain(rest).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_a_bit_for_each_processor() {
        assert_eq!(mask("0-1"), "3");
        assert_eq!(mask("0,2-3"), "d");
        assert_eq!(mask("1,33"), "2,00000002");
        assert_eq!(mask("x,7-,5-3"), "0");
    }
}
