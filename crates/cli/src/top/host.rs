//! Devices of the host, from sysfs, with the numbers of their objects from RDMA netlink.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use uverbs::discovery::netlink::{self, ObjectCounts};
use uverbs::kernel::RealKernel;

use crate::doctor::files::{names, text};

/// A device of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostDevice {
    pub name: String,
    /// Numbers of objects, of all processes and of the kernel; empty if they are not known.
    pub objects: BTreeMap<String, u64>,
    pub ports: Vec<HostPort>,
}

/// A port of a device of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostPort {
    pub number: u32,
    /// Such as ACTIVE.
    pub state: Option<String>,
    pub link_layer: Option<String>,
    pub rate: Option<String>,
    /// Its network interface.
    pub interface: Option<String>,
    /// By the names of the driver.
    pub counters: BTreeMap<String, u64>,
    /// When they were read, by the host's monotonic clock.
    #[serde(skip)]
    pub time: Duration,
}

/// A kind of traffic that ports count.
#[derive(Clone, Copy)]
pub enum Traffic {
    PacketsSent,
    PacketsReceived,
    BytesSent,
    BytesReceived,
}

impl Traffic {
    /// Returns the counters of it, of which a driver has one, with the unit of that.
    fn counters(self) -> &'static [(&'static str, u64)] {
        match self {
            // rdma_rxe, then those of InfiniBand.
            Self::PacketsSent => &[("sent_pkts", 1), ("port_xmit_packets", 1)],
            Self::PacketsReceived => &[("rcvd_pkts", 1), ("port_rcv_packets", 1)],
            Self::BytesSent => &[("port_xmit_data", 4)],
            Self::BytesReceived => &[("port_rcv_data", 4)],
        }
    }
}

impl HostPort {
    /// Returns how much was sent or received; `None` if the driver does not count it.
    pub fn traffic(&self, what: Traffic) -> Option<u64> {
        let mut counters = what.counters().iter();
        counters.find_map(|(name, unit)| Some(self.counters.get(*name)?.saturating_mul(*unit)))
    }

    /// Returns the counters that are not 0, other than those of packets and bytes.
    pub fn others(&self) -> impl Iterator<Item = (&str, u64)> {
        const TRAFFIC: [&str; 6] = [
            "sent_pkts",
            "rcvd_pkts",
            "port_xmit_packets",
            "port_rcv_packets",
            "port_xmit_data",
            "port_rcv_data",
        ];
        let is_other = |name: &str| {
            let of_kind = name.starts_with("unicast_") || name.starts_with("multicast_");
            // How long counters are cached.
            !TRAFFIC.contains(&name) && !of_kind && name != "lifespan"
        };
        let counters = self.counters.iter();
        let counters = counters.map(|(name, value)| (name.as_str(), *value));
        counters.filter(move |(name, value)| *value != 0 && is_other(name))
    }
}

/// Returns the devices.
pub fn devices() -> Vec<HostDevice> {
    let mut devices = devices_in(Path::new("/sys/class/infiniband"));
    if devices.is_empty() {
        return devices;
    }
    for ObjectCounts { device, counts } in netlink::object_counts(&RealKernel).unwrap_or_default() {
        let mut found = devices.iter_mut().filter(|it| it.name == device);
        found
            .by_ref()
            .for_each(|it| it.objects.extend(counts.clone()));
    }
    devices
}

fn devices_in(class: &Path) -> Vec<HostDevice> {
    let device = |name: String| {
        let directory = class.join(&name);
        let ports = names(&directory.join("ports")).into_iter();
        let ports = ports.filter_map(|port| port_in(&directory, port.parse().ok()?));
        let mut ports: Vec<HostPort> = ports.collect();
        ports.sort_unstable_by_key(|port| port.number);
        HostDevice {
            name,
            objects: BTreeMap::new(),
            ports,
        }
    };
    names(class).into_iter().map(device).collect()
}

fn port_in(device: &Path, number: u32) -> Option<HostPort> {
    let directory = device.join("ports").join(number.to_string());
    let mut counters = BTreeMap::new();
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).ok()?.into();
    for group in ["counters", "hw_counters"] {
        let group = directory.join(group);
        for name in names(&group) {
            if let Some(value) = text(&group.join(&name)).and_then(|it| it.parse().ok()) {
                counters.insert(name, value);
            }
        }
    }
    let of = |name: &str| text(&directory.join(name)).filter(|it| !it.is_empty());
    // Such as "4: ACTIVE".
    let state = of("state").map(|it| match it.split_once(": ") {
        Some((_, name)) => name.to_owned(),
        None => it,
    });
    Some(HostPort {
        number,
        state,
        link_layer: of("link_layer"),
        rate: of("rate"),
        interface: of("gid_attrs/ndevs/0").or_else(|| text(&device.join("parent"))),
        counters,
        time,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The files of a port of rdma_rxe in Linux 6.12 that has exchanged some messages.
    const RXE: [(&str, &str); 22] = [
        ("state", "4: ACTIVE\n"),
        ("phys_state", "5: LinkUp\n"),
        ("link_layer", "Ethernet\n"),
        ("rate", "2.5 Gb/sec (1X SDR)\n"),
        ("gid_attrs/ndevs/0", "eth0\n"),
        ("gid_attrs/types/0", "RoCE v2\n"),
        ("hw_counters/ack_deferred", "0\n"),
        ("hw_counters/completer_retry_err", "0\n"),
        ("hw_counters/duplicate_request", "3\n"),
        ("hw_counters/lifespan", "10\n"),
        ("hw_counters/link_downed", "0\n"),
        ("hw_counters/out_of_seq_request", "0\n"),
        ("hw_counters/rcvd_pkts", "2014\n"),
        ("hw_counters/rcvd_rnr_err", "0\n"),
        ("hw_counters/rcvd_seq_err", "0\n"),
        ("hw_counters/rdma_recvs", "1000\n"),
        ("hw_counters/rdma_sends", "1000\n"),
        ("hw_counters/retry_exceeded_err", "0\n"),
        ("hw_counters/retry_rnr_exceeded_err", "0\n"),
        ("hw_counters/send_err", "0\n"),
        ("hw_counters/send_rnr_err", "0\n"),
        ("hw_counters/sent_pkts", "2017\n"),
    ];

    #[test]
    fn a_port_is_read_from_its_files() {
        let root = std::env::temp_dir().join(format!("ringverbs-top-{}", std::process::id()));
        let port = root.join("rxe0/ports/1");
        for (name, content) in RXE {
            let path = port.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        // Of a card, with a counter that cannot be read as a number.
        let card = root.join("mlx5_0/ports/1/counters");
        fs::create_dir_all(&card).unwrap();
        fs::write(card.join("port_xmit_data"), "256\n").unwrap();
        fs::write(card.join("port_xmit_discards"), "1\n").unwrap();
        fs::write(card.join("unicast_xmit_packets"), "2\n").unwrap();
        fs::write(card.join("symbol_error"), "N/A (no PMA)\n").unwrap();
        fs::create_dir_all(root.join("mlx5_0/ports/none")).unwrap();
        let devices = devices_in(&root);
        fs::remove_dir_all(&root).unwrap();
        let [mlx5, rxe] = &devices[..] else {
            panic!("{devices:?}");
        };
        assert_eq!((&*mlx5.name, &*rxe.name), ("mlx5_0", "rxe0"));
        let [port] = &rxe.ports[..] else {
            panic!("{rxe:?}");
        };
        assert_eq!(port.state.as_deref(), Some("ACTIVE"));
        assert_eq!(port.interface.as_deref(), Some("eth0"));
        assert_eq!(port.rate.as_deref(), Some("2.5 Gb/sec (1X SDR)"));
        assert_eq!(port.traffic(Traffic::PacketsSent), Some(2017));
        assert_eq!(port.traffic(Traffic::PacketsReceived), Some(2014));
        assert_eq!(port.traffic(Traffic::BytesSent), None);
        let others: Vec<(&str, u64)> = port.others().collect();
        let expected = [
            ("duplicate_request", 3),
            ("rdma_recvs", 1000),
            ("rdma_sends", 1000),
        ];
        assert_eq!(others, expected);
        let [port] = &mlx5.ports[..] else {
            panic!("{mlx5:?}");
        };
        assert_eq!(port.traffic(Traffic::BytesSent), Some(1024));
        assert_eq!(
            port.others().collect::<Vec<_>>(),
            [("port_xmit_discards", 1)]
        );
        assert_eq!((port.state.clone(), port.counters.len()), (None, 3));
        assert!(devices_in(Path::new("/nowhere/at/all")).is_empty());
    }
}
