//! Port commands: the port as an InfiniBand port, as a network interface, and with
//! RoCE addresses.

use roce::bits::{Field, field, flag, get_array, get32, put_bytes, put32, put64};
use roce::fabric::subnet;
use roce::transport::Counters;

use super::load::object_number;
use crate::engine::core::{Core, RoceAddress};
use crate::engine::frame::{MULTICAST, UNICAST};
use crate::hca::Hca;
use crate::layout::{nic_vport_context, roce_addr_layout, vport_counter, vport_state};
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, no_object, refuse};

const CONTEXT: usize = 0x10;

const HAS_SMI: Field = flag(0x20, 30);
const PHYSICAL_STATE: Field = field(0x20, 15, 12);
const PORT_STATE: Field = field(0x20, 7, 4);
const VPORT_STATE: Field = field(0x20, 3, 0);
const SYSTEM_IMAGE_GUID: usize = 0x28;
const PORT_GUID: usize = 0x30;
const NODE_GUID: usize = 0x38;
const CAP_MASK1: usize = 0x40;
/// The capability bits that can be changed, or are being changed.
const CAP_MASK1_SELECT: usize = 0x44;
/// The presence of a communication manager, which the driver sets when one
/// registers.
const MODIFIABLE: u32 = 1 << 16;
const LID: Field = field(0x60, 31, 16);
const SUBNET_TIMEOUT: Field = field(0x60, 4, 0);
const SM_LID: Field = field(0x64, 31, 16);

// At the same place in the contexts of InfiniBand and Ethernet.
const QKEY_VIOLATIONS: Field = field(0x68, 31, 16);
const PKEY_VIOLATIONS: Field = field(0x68, 15, 0);

const DOWN: u32 = 1;
const ACTIVE: u32 = 4;
const PHYSICAL_DISABLED: u32 = 3;
const PHYSICAL_UP: u32 = 5;

const INDEX: Field = field(0xc, 15, 0);
/// Selects all entries of a table.
const ALL: u32 = 0xffff;
const GIDS: Field = field(0xc, 31, 16);
const DEFAULT_PKEY: u32 = 0xffff;

const LIST_TYPE: Field = field(0xc, 26, 24);
/// Disabled loopback: `UNICAST`, `MULTICAST`.
const NIC_DISABLE_LOOPBACK: Field = field(0x0, 2, 1);
const NIC_MTU: Field = field(0x24, 15, 0);
const NIC_LIST_TYPE: Field = field(0xf0, 26, 24);
const NIC_LIST_SIZE: Field = field(0xf0, 11, 0);
const NIC_ADDRESS: usize = 0xf4;
const LIST_UC: u32 = 0;

const SELECT_ADDRESS: u32 = 1 << 3;
const SELECT_MTU: u32 = 1 << 6;
const SELECT_LOOPBACK_MULTICAST: u32 = 1 << 10;
const SELECT_LOOPBACK_UNICAST: u32 = 1 << 11;

/// Ports of the bond (LAG).
pub(crate) const LAG_PORTS: u32 = 2;
/// The ports through which frames of the bond's ports leave.
const LAG_TX_REMAP_AFFINITY: [Field; LAG_PORTS as usize] = [field(0xc, 3, 0), field(0xc, 11, 8)];

impl<P: Platform> Core<P> {
    /// Reports a bond (LAG) that is not active, whose ports both work.
    pub(crate) fn query_lag(&self, output: &mut [u8]) -> Outcome {
        for (port, field) in (1..).zip(LAG_TX_REMAP_AFFINITY) {
            field.put(output, port);
        }
        Ok(())
    }

    pub(crate) fn query_hca_vport_context(&mut self, output: &mut [u8]) -> Outcome {
        let length = output.len();
        let Some(context) = output.get_mut(CONTEXT..) else {
            return Err(refuse(
                Status::BadOutputLength,
                "output",
                length,
                Rule::AtLeast(CONTEXT as u64),
            ));
        };
        let guid = self.settings.guid;
        HAS_SMI.put(context, 0);
        let (state, physical) = if self.link_up {
            (ACTIVE, PHYSICAL_UP)
        } else {
            (DOWN, PHYSICAL_DISABLED)
        };
        PHYSICAL_STATE.put(context, physical);
        PORT_STATE.put(context, state);
        VPORT_STATE.put(context, state);
        put64(context, SYSTEM_IMAGE_GUID, guid);
        put64(context, PORT_GUID, guid);
        put64(context, NODE_GUID, guid);
        put32(context, CAP_MASK1, self.port_capabilities);
        put32(context, CAP_MASK1_SELECT, MODIFIABLE);
        LID.put(context, u32::from(self.settings.lid));
        SM_LID.put(context, u32::from(subnet::LID));
        SUBNET_TIMEOUT.put(context, 18);
        Ok(())
    }

    pub(crate) fn modify_hca_vport_context(&mut self, input: &[u8]) -> Outcome {
        let changed = get32(input, CONTEXT + CAP_MASK1_SELECT) & MODIFIABLE;
        let new = get32(input, CONTEXT + CAP_MASK1);
        self.port_capabilities = self.port_capabilities & !changed | new & changed;
        Ok(())
    }

    /// The port's GID: the subnet prefix and its GUID.
    pub(crate) fn port_gid(&self) -> [u8; 16] {
        subnet::gid(self.settings.guid)
    }

    pub(crate) fn query_hca_vport_gid(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        match INDEX.get(input) {
            0 | ALL => {
                GIDS.put(output, 1);
                let gid = self.port_gid();
                put_bytes(output, CONTEXT, &gid);
                Ok(())
            }
            index if index < 8 => {
                GIDS.put(output, 1);
                Ok(())
            }
            _ => Err(refuse(
                Status::BadIndex,
                "gid_index",
                INDEX.get(input),
                Rule::AtMost(7),
            )),
        }
    }

    pub(crate) fn query_hca_vport_pkey(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        // The first entry is the default partition; the others are empty.
        if matches!(INDEX.get(input), 0 | ALL) {
            put32(output, CONTEXT, DEFAULT_PKEY);
        }
        Ok(())
    }

    pub(crate) fn query_vport_state(&mut self, output: &mut [u8]) -> Outcome {
        vport_state::ADMIN_STATE.put(output, 1);
        vport_state::STATE.put(output, u32::from(self.link_up));
        Ok(())
    }

    pub(crate) fn query_nic_vport_context(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let list = LIST_TYPE.get(input);
        let guid = self.settings.guid;
        let length = output.len();
        let Some(context) = output.get_mut(CONTEXT..) else {
            return Err(refuse(
                Status::BadOutputLength,
                "output",
                length,
                Rule::AtLeast(CONTEXT as u64),
            ));
        };
        NIC_DISABLE_LOOPBACK.put(context, self.nic.disabled_loopback);
        nic_vport_context::ROCE_EN.put(context, u32::from(self.nic.roce));
        NIC_MTU.put(context, self.nic.mtu);
        put64(context, SYSTEM_IMAGE_GUID, guid);
        put64(context, PORT_GUID, guid);
        put64(context, NODE_GUID, guid);
        NIC_LIST_TYPE.put(context, list);
        NIC_LIST_SIZE.put(context, u32::from(list == LIST_UC));
        put_bytes(context, NIC_ADDRESS + 2, &self.nic.mac);
        if list == LIST_UC {
            put_bytes(context, NIC_ADDRESS + 12 + 2, &self.nic.mac);
        }
        Ok(())
    }

    pub(crate) fn modify_nic_vport_context(&mut self, input: &[u8]) -> Outcome {
        let select = nic_vport_context::FIELD_SELECT.get(input);
        let context = &input[nic_vport_context::AT.min(input.len())..];
        if select & nic_vport_context::SELECT_ROCE_EN != 0 {
            self.nic.roce = nic_vport_context::ROCE_EN.is_set(context);
        }
        if select & SELECT_MTU != 0 {
            self.nic.mtu = NIC_MTU.get(context);
        }
        for (selected, of) in [
            (SELECT_LOOPBACK_UNICAST, UNICAST),
            (SELECT_LOOPBACK_MULTICAST, MULTICAST),
        ] {
            if select & selected != 0 {
                let off = NIC_DISABLE_LOOPBACK.get(context) & of;
                self.nic.disabled_loopback = self.nic.disabled_loopback & !of | off;
            }
        }
        if select & SELECT_ADDRESS != 0 {
            self.nic.mac = get_array(context, NIC_ADDRESS + 2);
        }
        Ok(())
    }

    pub(crate) fn query_roce_address(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let index = roce_addr_layout::ROCE_ADDRESS_INDEX.get(input) as usize;
        let Some(entry) = self.roce_addresses.get(index) else {
            return Err(refuse(
                Status::BadIndex,
                "roce_address_index",
                index,
                Rule::AtMost(self.roce_addresses.len() as u64 - 1),
            ));
        };
        if let Some(address) = entry {
            let length = output.len();
            let Some(out) = output.get_mut(CONTEXT..) else {
                return Err(refuse(
                    Status::BadOutputLength,
                    "output",
                    length,
                    Rule::AtLeast(CONTEXT as u64),
                ));
            };
            put_bytes(out, 0, &address.gid);
            put_bytes(out, roce_addr_layout::SOURCE_MAC, &address.mac);
            if let Some(vlan) = address.vlan {
                roce_addr_layout::VLAN_VALID.put(out, 1);
                roce_addr_layout::VLAN_ID.put(out, u32::from(vlan));
            }
            roce_addr_layout::ROCE_VERSION.put(out, u32::from(address.version));
        }
        Ok(())
    }
}

/// Counters of 16 bits, which stick at their maximum.
fn stuck(count: u64) -> u32 {
    count.min(u16::MAX.into()) as u32
}

/// Adds the violations of queue keys to an answer with an Ethernet port's context.
pub(crate) fn put_qkey_violations(output: &mut [u8], counters: &Counters) {
    if let Some(context) = output.get_mut(CONTEXT..) {
        QKEY_VIOLATIONS.put(context, stuck(counters.qkey_violations));
    }
}

/// Adds the violations of queue and partition keys to an answer with an InfiniBand port's
/// context.
pub(crate) fn put_violations(output: &mut [u8], counters: &Counters) {
    put_qkey_violations(output, counters);
    if let Some(context) = output.get_mut(CONTEXT..) {
        PKEY_VIOLATIONS.put(context, stuck(counters.pkey_violations));
    }
}

impl<P: Platform> Hca<P> {
    /// Each traffic counter has packets and bytes. Whether a card counts the Ethernet header
    /// of RoCE packets is not known; here it does.
    pub(crate) fn query_vport_counter(&mut self, output: &mut [u8]) -> Outcome {
        let transport = self.transport.counters();
        let mut put = |at: usize, packets: u64, bytes: u64| {
            put64(output, at, packets);
            put64(output, at + 8, bytes);
        };
        put(
            vport_counter::RECEIVED_IB_UNICAST,
            transport.packets_received - transport.multicasts_received,
            transport.bytes_received - transport.multicast_bytes_received,
        );
        put(
            vport_counter::TRANSMITTED_IB_UNICAST,
            transport.packets_sent - transport.multicasts_sent,
            transport.bytes_sent - transport.multicast_bytes_sent,
        );
        put(
            vport_counter::RECEIVED_IB_MULTICAST,
            transport.multicasts_received,
            transport.multicast_bytes_received,
        );
        put(
            vport_counter::TRANSMITTED_IB_MULTICAST,
            transport.multicasts_sent,
            transport.multicast_bytes_sent,
        );
        let stats = &self.core.stats;
        let (received, sent) = (stats.ethernet_received, stats.ethernet_sent);
        put64(output, vport_counter::RECEIVED_ETH_UNICAST, received);
        put64(output, vport_counter::TRANSMITTED_ETH_UNICAST, sent);
        Ok(())
    }

    pub(crate) fn set_roce_address(&mut self, input: &[u8]) -> Outcome {
        let index = roce_addr_layout::ROCE_ADDRESS_INDEX.get(input) as usize;
        let at = &input[roce_addr_layout::AT.min(input.len())..];
        let Some(entry) = self.core.roce_addresses.get_mut(index) else {
            return Err(refuse(
                Status::BadIndex,
                "roce_address_index",
                index,
                Rule::Exists,
            ));
        };
        let gid: [u8; 16] = get_array(at, 0);
        // A zero GID removes the entry.
        *entry = (gid != [0; 16]).then(|| RoceAddress {
            gid,
            mac: get_array(at, roce_addr_layout::SOURCE_MAC),
            vlan: roce_addr_layout::VLAN_VALID
                .is_set(at)
                .then(|| roce_addr_layout::VLAN_ID.get(at) as u16),
            version: roce_addr_layout::ROCE_VERSION.get(at) as u8,
        });
        self.announce_addresses();
        Ok(())
    }

    pub(crate) fn attach_to_mcg(&mut self, input: &[u8]) -> Outcome {
        let qpn = object_number(input);
        if self.core.qp(qpn).is_none() {
            return Err(no_object("queue pair", qpn));
        }
        self.transport.attach(qpn, get_array(input, 0x10));
        self.announce_addresses();
        Ok(())
    }

    pub(crate) fn detach_from_mcg(&mut self, input: &[u8]) -> Outcome {
        self.transport
            .detach(object_number(input), get_array(input, 0x10));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `pkey_violation_counter` and `qkey_violation_counter` of `mlx5_ifc.h`.
    #[test]
    fn violations_are_counted_up_to_16_bits() {
        let counters = Counters {
            qkey_violations: 3,
            pkey_violations: 70_000,
            ..Counters::default()
        };
        let mut output = [0; 0x200];
        put_qkey_violations(&mut output, &counters);
        assert_eq!(output[0x78..0x7c], [0, 3, 0, 0]);
        put_violations(&mut output, &counters);
        assert_eq!(output[0x78..0x7c], [0, 3, 0xff, 0xff]);
        put_violations(&mut output[..0x10], &counters);
    }
}
