//! Queue pairs 1 of the devices of a simulated network.
//!
//! Management datagrams are packets of the network as all others, so that its faults and captures
//! see them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use roce::packet::{Grh, Link, LinkKind, Packet, Path, Pool, Psn, Template, View};

use crate::management::DropCause;
use crate::runtime::device::Device;
use crate::wires::agent::{self, Agents, Outgoing, Peer, PortAddress};

/// Queue pairs 1 of a network's devices.
pub(crate) struct Nodes {
    agents: Agents,
    pool: Pool,
    /// Sequence number of the next datagram.
    psn: AtomicU32,
}

/// The addresses of a device.
struct NodeAddress {
    mac: [u8; 6],
    lid: u16,
    gid: [u8; 16],
}

fn address(device: &Device) -> NodeAddress {
    let state = device.lock_for_turn();
    let settings = state.hca.settings();
    NodeAddress {
        mac: settings.mac,
        lid: settings.lid,
        gid: state.gid(),
    }
}

impl Nodes {
    pub(crate) fn new(agents: Agents, pool: Pool) -> Self {
        Self {
            agents,
            pool,
            psn: AtomicU32::new(0),
        }
    }

    /// Handles what has arrived at the devices, and sends what the agents have for them. Returns
    /// whether there was anything.
    pub(crate) fn exchange(&self, devices: &[Arc<Device>], now: u64) -> bool {
        let mut any = false;
        for (number, device) in devices.iter().enumerate() {
            loop {
                let arrived = device.lock_for_turn().hca.next_management();
                let Some(packet) = arrived else { break };
                self.receive(devices, number as u16, &packet);
                any = true;
            }
        }
        while let Some(datagram) = self.agents.pop() {
            self.send(devices, now, &datagram);
            any = true;
        }
        any
    }

    fn receive(&self, devices: &[Arc<Device>], local: u16, packet: &Packet) {
        let Ok(view) = View::parse_packet(packet) else {
            return self.agents.drop_datagram(DropCause::Packet);
        };
        let Some(bytes) = agent::management(&view) else {
            return self.agents.drop_datagram(DropCause::Packet);
        };
        let lid = match view.network.link {
            Link::Ib { slid, .. } => slid,
            _ => 0,
        };
        let is_sender = |device: &Arc<Device>| match view.network.link {
            Link::Ib { slid, .. } => address(device).lid == slid,
            Link::Ether { smac, .. } => address(device).mac == smac,
            Link::Ip => false,
        };
        let Some(remote) = devices.iter().position(is_sender) else {
            return self.agents.drop_datagram(DropCause::Sender);
        };
        let remote = remote as u16;
        let port = PortAddress {
            ethernet: packet.kind() == LinkKind::Ethernet,
            gid: view.network.sgid(view.frame).unwrap_or_default(),
            lid,
        };
        let peer = Peer::Node { local, remote };
        self.agents.receive(peer, port, bytes);
    }

    fn send(&self, devices: &[Arc<Device>], now: u64, datagram: &Outgoing) {
        let Peer::Node { local, remote } = datagram.to else {
            return;
        };
        let [from, to] = [local, remote].map(|number| devices.get(usize::from(number)));
        let (Some(device), Some(to)) = (from, to) else {
            return;
        };
        let [from, to] = [address(device), address(to)];
        let path = match datagram.port.ethernet {
            true => Path::roce_v2(from.mac, to.mac, from.gid, to.gid),
            false => Path {
                grh: Some(Grh {
                    sgid: from.gid,
                    dgid: to.gid,
                    hop_limit: 1,
                    ..Grh::default()
                }),
                ..Path::ib(from.lid, to.lid)
            },
        };
        let psn = Psn::new(self.psn.fetch_add(1, Ordering::Relaxed));
        let packet = agent::packet(&self.pool, &Template::new(&path), psn, &datagram.bytes);
        device.lock_for_turn().hca.send_management(now, packet);
    }
}
