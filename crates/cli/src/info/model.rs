//! Attributes of a device. Field names and values are those of ibv_devinfo, also
//! in JSON.

use ringverbs::Device;
use ringverbs::query::{
    DeviceAttr, DeviceAttrEx, DriverId, FoundDevice, GidEntry, Inspector, PORT_ACTIVE, PortAttr,
};
use serde::Serialize;

use super::names::{self, GidKind};
use crate::device;
use crate::error::Error;

/// A device and its ports.
#[derive(Debug, Serialize)]
pub struct DeviceInfo {
    pub hca_id: String,
    pub driver: String,
    pub char_device: String,
    pub transport: NamedValue<i32>,
    pub fw_ver: String,
    pub node_guid: String,
    pub sys_image_guid: String,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub board_id: Option<String>,
    pub phys_port_cnt: u8,
    pub attributes: Attributes,
    pub ports: Vec<PortInfo>,
}

/// A number and its name.
#[derive(Debug, Serialize)]
pub struct NamedValue<N> {
    pub value: N,
    pub name: &'static str,
}

/// A set of flags.
#[derive(Debug, Serialize)]
pub struct Flags {
    pub value: u64,
    pub names: Vec<&'static str>,
    /// The bits without a name.
    pub unknown: u64,
}

impl Flags {
    fn of(value: u64, table: &names::Bits) -> Self {
        let (names, unknown) = names::bits(value, table);
        Self {
            value,
            names,
            unknown,
        }
    }
}

/// Capabilities of a device.
#[derive(Debug, Serialize)]
pub struct Attributes {
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub device_cap_flags: Flags,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u32,
    pub max_ee_rd_atom: u32,
    pub max_res_rd_atom: u32,
    pub max_qp_init_rd_atom: u32,
    pub max_ee_init_rd_atom: u32,
    pub atomic_cap: NamedValue<u32>,
    pub max_ee: u32,
    pub max_rdd: u32,
    pub max_mw: u32,
    pub max_raw_ipv6_qp: u32,
    pub max_raw_ethy_qp: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_total_mcast_qp_attach: u32,
    pub max_ah: u32,
    pub max_fmr: u32,
    pub max_map_per_fmr: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub general_odp_caps: Flags,
    pub rc_odp_caps: Flags,
    pub uc_odp_caps: Flags,
    pub ud_odp_caps: Flags,
    pub xrc_odp_caps: Flags,
    pub completion_timestamp_mask: u64,
    pub hca_core_clock_khz: u64,
    pub raw_packet_caps: Flags,
    pub device_cap_flags_ex: Flags,
    pub rss_caps: RssCaps,
    pub max_wq_type_rq: u32,
    pub tm_caps: TagMatchingCaps,
    pub cq_moderation_caps: ModerationCaps,
    pub max_dm_size: u64,
    pub num_comp_vectors: u32,
    /// Capabilities that the driver reports in its own data; `None` for drivers whose data
    /// is not supported.
    pub driver_caps: Option<DriverCaps>,
}

/// Receive-side scaling capabilities that the kernel's core reports.
#[derive(Debug, Serialize)]
pub struct RssCaps {
    pub supported_qpts: u32,
    pub max_rwq_indirection_tables: u32,
    pub max_rwq_indirection_table_size: u32,
}

/// Tag matching capabilities.
#[derive(Debug, Serialize)]
pub struct TagMatchingCaps {
    pub max_rndv_hdr_size: u32,
    pub max_num_tags: u32,
    pub max_ops: u32,
    pub max_sge: u32,
    pub flags: Flags,
}

/// CQ moderation capabilities; the period is in microseconds.
#[derive(Debug, Serialize)]
pub struct ModerationCaps {
    pub max_cq_count: u16,
    pub max_cq_period: u16,
}

/// Capabilities that a driver reports in its own data.
#[derive(Debug, Default, Serialize)]
pub struct DriverCaps {
    pub max_tso: u32,
    pub rx_hash_function: u8,
    pub rx_hash_fields_mask: u64,
    pub qp_rate_limit_min_kbps: u32,
    pub qp_rate_limit_max_kbps: u32,
}

/// A port and its GIDs.
#[derive(Debug, Serialize)]
pub struct PortInfo {
    pub port: u8,
    pub state: NamedValue<u8>,
    pub max_mtu: Mtu,
    pub active_mtu: Mtu,
    pub sm_lid: u16,
    pub port_lid: u16,
    pub port_lmc: u8,
    pub link_layer: NamedValue<u8>,
    pub max_msg_sz: u32,
    pub port_cap_flags: u32,
    pub port_cap_flags2: u16,
    pub max_vl_num: NamedValue<u8>,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub sm_sl: u8,
    pub pkey_tbl_len: u16,
    pub gid_tbl_len: u32,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: NamedValue<u8>,
    pub active_speed: NamedValue<u32>,
    pub phys_state: NamedValue<u8>,
    pub gids: Vec<Gid>,
}

/// An MTU (`enum ibv_mtu`).
#[derive(Debug, Serialize)]
pub struct Mtu {
    pub value: u8,
    /// `None` if the code is invalid.
    pub bytes: Option<u32>,
}

impl Mtu {
    fn of(value: u8) -> Self {
        Self {
            value,
            bytes: names::mtu(value),
        }
    }
}

/// An entry of the GID table that is in use.
#[derive(Debug, Serialize)]
pub struct Gid {
    pub index: u32,
    pub gid: String,
    #[serde(rename = "type")]
    pub kind: Option<&'static str>,
    /// The index of the GID's network interface; 0 if there is none.
    pub ifindex: u32,
}

impl DeviceInfo {
    /// Opens the device and queries it, with one port or all.
    pub fn query(device: &Device, port: Option<u8>) -> Result<Self, Error> {
        let context = device::inspect(device)?;
        let device = device.found();
        let error = || Error::verb(format!("querying {}", device.name));
        let ex = context.query_device_ex().map_err(error())?;
        let attr = ex.base;
        if let Some(port) = port.filter(|port| *port > attr.phys_port_cnt) {
            return Err(Error::NoSuchPort {
                device: device.name.clone(),
                port,
                ports: attr.phys_port_cnt,
            });
        }
        let ports =
            (1..=attr.phys_port_cnt).filter(|number| port.is_none_or(|port| port == *number));
        let ports = ports
            .map(|port| {
                let error = || Error::verb(format!("querying port {port} of {}", device.name));
                PortInfo::query(&context, port).map_err(error())
            })
            .collect::<Result<_, Error>>()?;
        let (transport, transport_number) = names::transport(device.node_type);
        Ok(Self {
            hca_id: device.name.clone(),
            driver: device::driver_name(device.driver_id),
            char_device: device.device_path(),
            transport: NamedValue {
                value: transport_number,
                name: transport,
            },
            fw_ver: firmware_version(device.driver_id, attr.fw_ver),
            node_guid: names::guid(attr.node_guid),
            sys_image_guid: names::guid(attr.sys_image_guid),
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            hw_ver: attr.hw_ver,
            board_id: board_id(device),
            phys_port_cnt: attr.phys_port_cnt,
            attributes: Attributes::of(device.driver_id, &attr, &ex, context.num_comp_vectors()),
            ports,
        })
    }
}

/// Returns the firmware version in the format of the device's stock provider.
fn firmware_version(driver: DriverId, raw: u64) -> String {
    let [major, minor, sub] = [32, 16, 0].map(|shift| raw >> shift & 0xffff);
    match driver {
        DriverId::MLX5 => format!("{major}.{minor}.{sub:04}"),
        DriverId::MLX4 => format!("{major}.{minor}.{sub:03}"),
        _ => format!("{major}.{minor}.{sub}"),
    }
}

fn board_id(device: &FoundDevice) -> Option<String> {
    let text = std::fs::read_to_string(format!("{}/board_id", device.ibdev_path)).ok()?;
    let text = text.trim_end_matches('\n');
    (!text.is_empty()).then(|| text.to_owned())
}

impl Attributes {
    fn of(driver: DriverId, attr: &DeviceAttr, ex: &DeviceAttrEx, num_comp_vectors: u32) -> Self {
        let odp = |caps: u32| Flags::of(caps.into(), names::ODP_TRANSPORT);
        Self {
            max_mr_size: attr.max_mr_size,
            page_size_cap: attr.page_size_cap,
            max_qp: attr.max_qp,
            max_qp_wr: attr.max_qp_wr,
            device_cap_flags: Flags::of(attr.device_cap_flags.into(), names::DEVICE_CAPS),
            max_sge: attr.max_sge,
            max_sge_rd: attr.max_sge_rd,
            max_cq: attr.max_cq,
            max_cqe: attr.max_cqe,
            max_mr: attr.max_mr,
            max_pd: attr.max_pd,
            max_qp_rd_atom: attr.max_qp_rd_atom,
            max_ee_rd_atom: attr.max_ee_rd_atom,
            max_res_rd_atom: attr.max_res_rd_atom,
            max_qp_init_rd_atom: attr.max_qp_init_rd_atom,
            max_ee_init_rd_atom: attr.max_ee_init_rd_atom,
            atomic_cap: NamedValue {
                value: attr.atomic_cap,
                name: names::atomic_cap(attr.atomic_cap),
            },
            max_ee: attr.max_ee,
            max_rdd: attr.max_rdd,
            max_mw: attr.max_mw,
            max_raw_ipv6_qp: attr.max_raw_ipv6_qp,
            max_raw_ethy_qp: attr.max_raw_ethy_qp,
            max_mcast_grp: attr.max_mcast_grp,
            max_mcast_qp_attach: attr.max_mcast_qp_attach,
            max_total_mcast_qp_attach: attr.max_total_mcast_qp_attach,
            max_ah: attr.max_ah,
            max_fmr: attr.max_fmr,
            max_map_per_fmr: attr.max_map_per_fmr,
            max_srq: attr.max_srq,
            max_srq_wr: attr.max_srq_wr,
            max_srq_sge: attr.max_srq_sge,
            max_pkeys: attr.max_pkeys,
            local_ca_ack_delay: attr.local_ca_ack_delay,
            general_odp_caps: Flags::of(ex.odp_caps.general_caps, names::ODP_GENERAL),
            rc_odp_caps: odp(ex.odp_caps.rc_odp_caps),
            uc_odp_caps: odp(ex.odp_caps.uc_odp_caps),
            ud_odp_caps: odp(ex.odp_caps.ud_odp_caps),
            xrc_odp_caps: odp(ex.xrc_odp_caps),
            completion_timestamp_mask: ex.timestamp_mask,
            hca_core_clock_khz: ex.hca_core_clock,
            raw_packet_caps: Flags::of(ex.raw_packet_caps.into(), names::RAW_PACKET),
            // The lower half equals device_cap_flags.
            device_cap_flags_ex: {
                let upper = Flags::of(
                    ex.device_cap_flags_ex & !u64::from(u32::MAX),
                    names::DEVICE_CAPS_EX,
                );
                Flags {
                    value: ex.device_cap_flags_ex,
                    ..upper
                }
            },
            rss_caps: RssCaps {
                supported_qpts: ex.rss_caps.supported_qpts,
                max_rwq_indirection_tables: ex.rss_caps.max_rwq_indirection_tables,
                max_rwq_indirection_table_size: ex.rss_caps.max_rwq_indirection_table_size,
            },
            max_wq_type_rq: ex.max_wq_type_rq,
            tm_caps: TagMatchingCaps {
                max_rndv_hdr_size: ex.tm_caps.max_rndv_hdr_size,
                max_num_tags: ex.tm_caps.max_num_tags,
                max_ops: ex.tm_caps.max_ops,
                max_sge: ex.tm_caps.max_sge,
                flags: Flags::of(ex.tm_caps.flags.into(), names::TAG_MATCHING),
            },
            cq_moderation_caps: ModerationCaps {
                max_cq_count: ex.cq_moderation_caps.max_cq_moderation_count,
                max_cq_period: ex.cq_moderation_caps.max_cq_moderation_period,
            },
            max_dm_size: ex.max_dm_size,
            num_comp_vectors,
            // rxe has no such data, so these capabilities are absent.
            driver_caps: (driver == DriverId::RXE).then(DriverCaps::default),
        }
    }
}

impl PortInfo {
    /// Queries a port and its GID table.
    pub fn query(context: &Inspector, port: u8) -> ringverbs::Result<Self> {
        let PortAttr {
            legacy,
            port_cap_flags2,
            active_speed_ex,
            ..
        } = context.query_port(port)?;
        let speed = match active_speed_ex {
            0 => legacy.active_speed.into(),
            speed => speed,
        };
        let named = |value, name: fn(u8) -> &'static str| NamedValue {
            value,
            name: name(value),
        };
        Ok(Self {
            port,
            state: named(legacy.state, names::port_state),
            max_mtu: Mtu::of(legacy.max_mtu),
            active_mtu: Mtu::of(legacy.active_mtu),
            sm_lid: legacy.sm_lid,
            port_lid: legacy.lid,
            port_lmc: legacy.lmc,
            link_layer: named(legacy.link_layer, names::link_layer),
            max_msg_sz: legacy.max_msg_sz,
            port_cap_flags: legacy.port_cap_flags,
            port_cap_flags2,
            max_vl_num: named(legacy.max_vl_num, names::virtual_lanes),
            bad_pkey_cntr: legacy.bad_pkey_cntr,
            qkey_viol_cntr: legacy.qkey_viol_cntr,
            sm_sl: legacy.sm_sl,
            pkey_tbl_len: legacy.pkey_tbl_len,
            gid_tbl_len: legacy.gid_tbl_len,
            subnet_timeout: legacy.subnet_timeout,
            init_type_reply: legacy.init_type_reply,
            active_width: named(legacy.active_width, names::width),
            active_speed: NamedValue {
                value: speed,
                name: names::speed(speed),
            },
            phys_state: named(legacy.phys_state, names::physical_state),
            gids: gids(context, port)?,
        })
    }

    /// Returns whether the port can carry traffic.
    pub fn is_active(&self) -> bool {
        self.state.value == PORT_ACTIVE
    }
}

/// Returns the GIDs of a port that are not empty: like ibv_devinfo, those whose
/// lower half is not zero.
fn gids(context: &Inspector, port: u8) -> ringverbs::Result<Vec<Gid>> {
    let entries = context.gids()?.into_iter();
    let of_port = entries.filter(|entry| entry.port == port);
    Ok(of_port.filter_map(|entry| Gid::of(&entry)).collect())
}

impl Gid {
    fn of(entry: &GidEntry) -> Option<Self> {
        if entry.gid.0.iter().skip(8).all(|byte| *byte == 0) {
            return None;
        }
        let kind = GidKind::from_kernel(entry.gid_type);
        Some(Self {
            index: entry.index.into(),
            gid: names::gid(entry.gid.0, kind.unwrap_or(GidKind::InfiniBand)),
            kind: kind.map(GidKind::name),
            ifindex: entry.ifindex,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_versions_have_the_providers_format() {
        let raw = 20 << 32 | 31 << 16 | 14;
        assert_eq!(firmware_version(DriverId::MLX5, raw), "20.31.0014");
        assert_eq!(firmware_version(DriverId::RXE, 0), "0.0.0");
    }

    #[test]
    fn gid_is_empty_if_its_interface_id_is_zero() {
        let mut entry = GidEntry {
            gid: ringverbs::Gid::default(),
            port: 1,
            index: 0,
            gid_type: 0,
            ifindex: 0,
        };
        entry.gid.0[0] = 0xfe;
        assert!(Gid::of(&entry).is_none());
        entry.gid.0[15] = 1;
        entry.gid_type = 2;
        let gid = Gid::of(&entry).unwrap();
        assert_eq!((gid.gid.as_str(), gid.kind), ("fe00::1", Some("RoCE v2")));
        entry.gid_type = 77;
        assert_eq!(Gid::of(&entry).unwrap().kind, None);
    }
}
