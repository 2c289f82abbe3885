//! The values of attributes that differ between processes, or change.

use std::fmt::Write as _;

use nix::net::if_::if_indextoname;

use super::attributes::{CM_MESSAGES, HW_COUNTERS, PORT_COUNTERS};
use super::files::{self, GidAttribute};
use crate::Embedded;

/// The state of a port: its numbers and names.
#[derive(Clone, Copy, Debug)]
pub struct PortState {
    /// `enum ib_port_state`.
    pub logical: (u8, &'static str),
    /// `enum ib_port_phys_state`.
    pub physical: (u8, &'static str),
}

/// Returns the state of the port of a device.
pub fn port_state(device: &Embedded) -> PortState {
    match device.is_active() {
        true => PortState {
            logical: (4, "ACTIVE"),
            physical: (5, "LinkUp"),
        },
        false => PortState {
            logical: (1, "DOWN"),
            physical: (3, "Disabled"),
        },
    }
}

/// Returns the content of a dynamic attribute of a device; `None` for one that an empty entry of
/// the GID table does not have. `interface` is the name of its network interface, if that is
/// not the host's.
pub fn content(device: &Embedded, interface: Option<&str>, name: &str) -> Option<String> {
    if let Some((attribute, index)) = GidAttribute::named(name) {
        let entry = device.gid_entry(index);
        let text = match attribute {
            GidAttribute::Gid => words(&entry.unwrap_or_default().gid),
            // `ib_uverbs_gid_type`.
            GidAttribute::Type if entry?.gid_type == 2 => "RoCE v2".to_owned(),
            GidAttribute::Type => "IB/RoCE v1".to_owned(),
            GidAttribute::Interface => {
                entry?;
                if let Some(interface) = interface {
                    return Some(interface.to_owned() + "\n");
                }
                let index = Some(entry?.netdev_ifindex).filter(|index| *index != 0)?;
                if_indextoname(index).ok()?.into_string().ok()?
            }
        };
        return Some(text + "\n");
    }
    if let Some((directory, counter)) = files::counter(name) {
        let management = || device.management_counters();
        let counters: &[_] = match directory {
            "hw_counters" => &hw_counters(device),
            "counters" => &port_counters(device),
            "cm_tx_msgs" => &messages(management().sent),
            "cm_tx_retries" => &messages(management().retries),
            "cm_rx_msgs" => &messages(management().received),
            _ => &messages(management().duplicates),
        };
        let (_, value) = counters.iter().find(|(name, _)| *name == counter)?;
        return Some(format!("{value}\n"));
    }
    let mut content = match name {
        "node_guid" | "sys_image_guid" => words(&device.node_guid().to_be_bytes()),
        "ports/1/state" => {
            let (number, name) = port_state(device).logical;
            format!("{number}: {name}")
        }
        "ports/1/phys_state" => {
            let (number, name) = port_state(device).physical;
            format!("{number}: {name}")
        }
        "node_desc" => format!("ringverbs embedded device {}", device.number()),
        _ => format!("{:#x}", device.lid()),
    };
    content.push('\n');
    Some(content)
}

/// Returns the counters in `hw_counters`, in mlx5_ib's order.
pub fn hw_counters(device: &Embedded) -> [(&'static str, u64); 14] {
    let (counters, queues) = (device.counters(), device.queue_counters());
    let values = [
        queues.rx_write_requests.into(),
        queues.rx_read_requests.into(),
        queues.rx_atomic_requests.into(),
        0,
        queues.out_of_buffer.into(),
        queues.out_of_sequence.into(),
        queues.duplicate_request.into(),
        queues.rnr_nak_retry_err.into(),
        queues.packet_seq_err.into(),
        queues.implied_nak_seq_err.into(),
        queues.local_ack_timeout_err.into(),
        counters.cnps_handled,
        counters.marked,
        counters.cnps_sent,
    ];
    std::array::from_fn(|index| (HW_COUNTERS[index], values[index]))
}

/// Returns counters of the connection manager's messages.
fn messages(values: [u64; 11]) -> [(&'static str, u64); 11] {
    std::array::from_fn(|index| (CM_MESSAGES[index], values[index]))
}

/// Returns the counters of the port that count. Data is in words of four bytes.
fn port_counters(device: &Embedded) -> [(&'static str, u64); 9] {
    let counters = device.counters();
    let (received, sent) = (counters.packets_received, counters.packets_sent);
    let values = [
        device.link_downed(),
        counters.multicasts_received,
        counters.multicasts_sent,
        counters.bytes_received / 4,
        received,
        counters.bytes_sent / 4,
        sent,
        received - counters.multicasts_received,
        sent - counters.multicasts_sent,
    ];
    std::array::from_fn(|index| (PORT_COUNTERS[index], values[index]))
}

/// Formats 16-bit words separated by colons.
fn words(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (at, byte) in bytes.iter().enumerate() {
        if at != 0 && at % 2 == 0 {
            text.push(':');
        }
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guid_is_four_words() {
        assert_eq!(
            words(&0x1122_3344_5566_7788_u64.to_be_bytes()),
            "1122:3344:5566:7788"
        );
    }
}
