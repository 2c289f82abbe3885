//! ACCESS_REG: port and board registers.

use roce::bits::{Field, field, put_bytes, put32};

use super::OP_MOD;
use crate::hca::Hca;
use crate::layout::access_register;
use crate::platform::Platform;
use crate::profile::PortKind;
use crate::status::{Outcome, Rule, Status, invalid, refuse};

const WRITE: u32 = 0;

const PCAP: u32 = 0x5001;
const PMLP: u32 = 0x5002;
const PMTU: u32 = 0x5003;
const PTYS: u32 = 0x5004;
const PAOS: u32 = 0x5006;
const PFCC: u32 = 0x5007;
const PPCNT: u32 = 0x5008;
/// The group of counters; the rest of them are 0.
const PPCNT_GROUP: Field = field(0, 5, 0);
const INFINIBAND_PORT_COUNTERS: u32 = 0x20;
/// Sticks at its maximum.
const LINK_DOWNED: Field = field(8, 7, 0);
const PVLC: u32 = 0x500f;
const PCMR: u32 = 0x5041;
const PPLM: u32 = 0x5023;
const NODE_DESCRIPTION: u32 = 0x6001;
const HOST_ENDIANNESS: u32 = 0x7004;

const MTU_MAX: Field = field(4, 31, 16);
const MTU_ADMIN: Field = field(8, 31, 16);
const MTU_OPERATIONAL: Field = field(0xc, 31, 16);

const PTYS_PROTOCOL: Field = field(0, 2, 0);
const PTYS_ETHERNET: u32 = 4;
const PTYS_CAPABLE: usize = 0xc;
const PTYS_IB_CAPABLE: Field = field(0x10, 31, 0);
const PTYS_ADMIN: usize = 0x18;
const PTYS_IB_ADMIN: Field = field(0x1c, 31, 0);
const PTYS_OPERATIONAL: usize = 0x24;
const PTYS_IB_OPERATIONAL: Field = field(0x28, 31, 0);
/// 100GBASE-CR4.
const SPEED_100G: u32 = 1 << 20;
/// Width 4X in the high half, speed EDR in the low half.
const IB_4X_EDR: u32 = 1 << 2 << 16 | 1 << 5;

const VL_CAPABLE: Field = field(4, 3, 0);
const VL_ADMIN: Field = field(8, 3, 0);
const VL_OPERATIONAL: Field = field(0xc, 3, 0);

const OPERATIONAL_STATUS: Field = field(0, 3, 0);
const STATUS_UP: u32 = 1;
const STATUS_DOWN: u32 = 2;

impl<P: Platform> Hca<P> {
    pub(crate) fn access_register(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let register_input = &input[access_register::REGISTER_DATA.min(input.len())..];
        let write = OP_MOD.get(input) == WRITE;
        let register = access_register::REGISTER_ID.get(input);
        let length = output.len();
        let Some(out) = output.get_mut(access_register::REGISTER_DATA..) else {
            return Err(refuse(
                Status::BadOutputLength,
                "output",
                length,
                Rule::AtLeast(access_register::REGISTER_DATA as u64),
            ));
        };
        // The index fields of a register are returned as given.
        put_bytes(out, 0, register_input);
        match register {
            HOST_ENDIANNESS => Ok(()),
            NODE_DESCRIPTION => {
                if write {
                    let mut description = [0; 64];
                    put_bytes(&mut description, 0, register_input);
                    self.core.node_description = description;
                }
                put_bytes(out, 0, &self.core.node_description);
                Ok(())
            }
            PTYS => {
                let ethernet = PTYS_PROTOCOL.get(register_input) == PTYS_ETHERNET;
                if ethernet != (self.core.settings.profile.port == PortKind::Ethernet) {
                    return Err(invalid(
                        "proto_mask",
                        PTYS_PROTOCOL.get(register_input),
                        Rule::Supported,
                    ));
                }
                if ethernet {
                    for at in [PTYS_CAPABLE, PTYS_ADMIN, PTYS_OPERATIONAL] {
                        put32(out, at, SPEED_100G);
                    }
                } else {
                    for field in [PTYS_IB_CAPABLE, PTYS_IB_ADMIN, PTYS_IB_OPERATIONAL] {
                        field.put(out, IB_4X_EDR);
                    }
                }
                Ok(())
            }
            PMTU => {
                if write {
                    self.core.nic.port_mtu = MTU_ADMIN.get(register_input);
                }
                let (max, current) = match self.core.settings.profile.port {
                    PortKind::Ethernet => (MAX_FRAME, self.core.nic.port_mtu),
                    PortKind::InfiniBand => (4096, 4096),
                };
                MTU_MAX.put(out, max);
                MTU_ADMIN.put(out, current);
                MTU_OPERATIONAL.put(out, current);
                Ok(())
            }
            PVLC => {
                for field in [VL_CAPABLE, VL_ADMIN, VL_OPERATIONAL] {
                    field.put(out, 1);
                }
                Ok(())
            }
            PAOS => {
                if write {
                    let up = access_register::PAOS_ADMIN_STATUS.get(register_input) == STATUS_UP;
                    self.core.nic.admin_up = up;
                    self.update_link();
                }
                let status = |up| if up { STATUS_UP } else { STATUS_DOWN };
                access_register::PAOS_ADMIN_STATUS.put(out, status(self.core.nic.admin_up));
                OPERATIONAL_STATUS.put(out, status(self.core.link_up));
                Ok(())
            }
            PPCNT => {
                if PPCNT_GROUP.get(register_input) == INFINIBAND_PORT_COUNTERS {
                    let most = LINK_DOWNED.largest();
                    LINK_DOWNED.put(out, self.core.stats.link_downed.min(most.into()) as u32);
                }
                Ok(())
            }
            // These registers have no state.
            PCAP | PMLP | PFCC | PCMR | PPLM => Ok(()),
            _ => Err(invalid("register_id", register, Rule::Supported)),
        }
    }
}

/// The largest Ethernet frame without its FCS: the capacity of a packet buffer.
pub(crate) const MAX_FRAME: u32 = roce::packet::PACKET_CAPACITY as u32;
