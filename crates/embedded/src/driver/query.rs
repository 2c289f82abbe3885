//! Queries of the device, its port and its GIDs.

use mlx5_abi::ids::{ATTR_QUERY_DRIVER_PORT, ATTR_QUERY_DRIVER_PORT_NUMBER};
use mlx5_abi::{
    CqeCompCaps, DciStreamsCaps, HASH_TOEPLITZ, QueryPort, StridingRqCaps, TsoCaps, device_flag,
    mini_format,
};
use mmap_rs::MmapOptions;
use roce::bits::get64;
use roce::fabric::subnet;
use softhca::card::Speed;
use softhca::command::opcode as op;
use softhca::layout::vport_state;
use softhca::rule::Rule;
use uverbs::QpType;
use uverbs::abi::ids::*;
use uverbs::abi::later::*;
use uverbs::abi::verbs::{GidEntry, QueryPortRespEx};
use uverbs::abi::write::{
    CqModerationCaps, ExQueryDeviceResp, OdpCaps, QueryDeviceResp, QueryPortResp, RssCaps, TmCaps,
};
use zerocopy::IntoBytes;

use crate::addresses::OTHERS_MAC;
use crate::driver::cause::{Class, Result, at_most, invalid, is, refuse, require};
use crate::driver::command::{Input, run};
use crate::driver::descriptors::ObjectChange;
use crate::driver::files::MEMORY_PAGES;
use crate::driver::gids::{mac_of, multicast_mac};
use crate::driver::queues::LOG_MAX_STREAMS;
use crate::driver::request::Request;
use crate::driver::srq::MAX_TAGS;
use crate::driver::state::State;
use crate::driver::work_queue::{HASH_FIELDS, LOG_MAX_TABLE, STRIDE_BYTES, STRIDES_PER_RECEIVE};
use crate::driver::writes::LONGEST_PERIOD;

/// `enum ib_port_state`, `ib_port_phys_state`.
const ACTIVE: u8 = 4;
const DOWN: u8 = 1;
const LINK_UP: u8 = 5;
const DISABLED: u8 = 3;
/// 4096 bytes, in MTU encoding.
const MTU_4096: u8 = 5;
const LINK_INFINIBAND: u8 = 1;
const LINK_ETHERNET: u8 = 2;

/// Length of an InfiniBand port's table of partition keys.
pub(crate) const PKEYS: u16 = 128;

impl State {
    /// Returns the MAC address of a destination.
    ///
    /// # Errors
    /// EHOSTUNREACH: the GID is not that of a device of this network.
    pub(crate) fn resolve(&self, gid: &[u8; 16]) -> Result<[u8; 6]> {
        if self.has_host_addresses() {
            // Also for the device's own address, which another process may share.
            return Ok(multicast_mac(gid).unwrap_or(OTHERS_MAC));
        }
        let own = self.hca.settings().mac;
        let mac = mac_of(gid, own)?;
        let is_multicast = mac[0] & 1 != 0;
        if !is_multicast && mac[..4] != own[..4] {
            let start = get64(gid, 0);
            return refuse(Class::Unreachable, "GID", start, Rule::Exists);
        }
        Ok(mac)
    }

    /// Returns the GID of an index, unless the entry is empty.
    pub(crate) fn gid_entry(&self, index: usize) -> Option<GidEntry> {
        let entry = self.gid_at(index)?;
        Some(GidEntry {
            gid: entry.gid,
            gid_index: index as u32,
            port_num: 1,
            gid_type: entry.gid_type,
            netdev_ifindex: self.interface,
        })
    }

    /// Returns the port's GIDs, with their types.
    fn gids(&self) -> Vec<GidEntry> {
        let indices = 0..self.gids.len();
        indices.filter_map(|index| self.gid_entry(index)).collect()
    }

    /// Returns the path MTU of the port, in MTU encoding.
    pub(crate) fn mtu(&self) -> u8 {
        self.hca.settings().mtu.code()
    }

    /// Returns whether the port is active.
    pub(crate) fn is_up(&mut self) -> Result<bool> {
        let output = run(&mut self.hca, &Input::new(op::QUERY_VPORT_STATE, 16), 16)?;
        Ok(vport_state::STATE.get(&output) != 0)
    }

    pub(crate) fn query_port(&mut self, request: &mut Request) -> Result<()> {
        is(
            "port_num",
            request.constant::<u8>(ATTR_QUERY_PORT_PORT_NUM)?,
            1,
        )?;
        let ethernet = self.is_ethernet();
        let up = self.is_up()?;
        let lid = if ethernet { 0 } else { self.hca.settings().lid };
        let counters = self.hca.transport_counters();
        // 16 bits, which stick at their maximum.
        let stuck = |count: u64| count.min(u16::MAX.into()) as u32;
        let legacy = QueryPortResp {
            // Ethernet: connection management, IP-based GIDs. InfiniBand: the
            // capabilities that the port reports.
            port_cap_flags: if ethernet { 0x0401_0000 } else { 0x0251_0868 },
            max_msg_sz: 1 << 30,
            gid_tbl_len: self.gid_table_length() as u32,
            // The context of an Ethernet port has none (`mlx5_query_port_roce`).
            bad_pkey_cntr: if ethernet {
                0
            } else {
                stuck(counters.pkey_violations)
            },
            qkey_viol_cntr: stuck(counters.qkey_violations),
            pkey_tbl_len: if ethernet { 1 } else { PKEYS },
            lid,
            sm_lid: if ethernet { 0 } else { subnet::LID },
            state: if up { ACTIVE } else { DOWN },
            max_mtu: MTU_4096,
            active_mtu: self.mtu(),
            max_vl_num: if ethernet { 0 } else { 1 },
            subnet_timeout: if ethernet { 0 } else { 18 },
            // 4X.
            active_width: 2,
            active_speed: self.speed().code(),
            phys_state: if up { LINK_UP } else { DISABLED },
            link_layer: if ethernet {
                LINK_ETHERNET
            } else {
                LINK_INFINIBAND
            },
            flags: u8::from(ethernet),
            ..QueryPortResp::default()
        };
        let answer = QueryPortRespEx {
            legacy,
            ..QueryPortRespEx::default()
        };
        request.answer_struct(ATTR_QUERY_PORT_RESP, &answer);
        Ok(())
    }

    fn speed(&self) -> Speed {
        self.hca.settings().card.speed
    }

    /// Answers `mlx5dv_query_port`: no attribute is valid, since there is no switch.
    pub(crate) fn query_driver_port(request: &mut Request) -> Result<()> {
        let port: u32 = request.value(ATTR_QUERY_DRIVER_PORT_NUMBER)?;
        is("port_num", port, 1)?;
        request.answer_struct(ATTR_QUERY_DRIVER_PORT, &QueryPort::default());
        Ok(())
    }

    pub(crate) fn query_port_speed(&self, request: &mut Request) -> Result<()> {
        let port: u32 = request.constant(ATTR_QUERY_PORT_SPEED_PORT_NUM)?;
        is("port_num", port, 1)?;
        // In units of 100 Mbit/s.
        let speed = 10 * u64::from(self.speed().gigabits());
        request.answer(ATTR_QUERY_PORT_SPEED_RESP, &speed);
        Ok(())
    }

    pub(crate) fn query_gid_table(&mut self, request: &mut Request) -> Result<()> {
        request.flags(ATTR_QUERY_GID_TABLE_FLAGS, 0)?;
        let size: usize = request.constant(ATTR_QUERY_GID_TABLE_ENTRY_SIZE)?;
        let gids = self.gids();
        let room = request.room(ATTR_QUERY_GID_TABLE_RESP_ENTRIES);
        let Some(entries) = room.checked_div(size) else {
            return invalid("entry_size", size, Rule::NonZero);
        };
        let least = Rule::AtLeast(gids.len() as u64);
        require(entries >= gids.len(), "entries", entries, least)?;
        // Each entry has the size that the caller passed.
        let mut entries = Vec::new();
        for gid in &gids {
            let known = size.min(size_of::<GidEntry>());
            entries.extend_from_slice(&gid.as_bytes()[..known]);
            entries.resize(entries.len() - known + size, 0);
        }
        request.put(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, &entries);
        let count = gids.len() as u64;
        request.answer(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &count);
        self.note_gid_query(None);
        Ok(())
    }

    pub(crate) fn query_gid_entry(&mut self, request: &mut Request) -> Result<()> {
        request.flags(ATTR_QUERY_GID_ENTRY_FLAGS, 0)?;
        let index: u32 = request.constant(ATTR_QUERY_GID_ENTRY_GID_INDEX)?;
        let port: u32 = request.constant(ATTR_QUERY_GID_ENTRY_PORT)?;
        is("port", port, 1)?;
        at_most("gid_index", index, self.gid_table_length() as u64 - 1)?;
        let Some(entry) = self.gid_entry(index as usize) else {
            return refuse(Class::NoData, "gid_index", index, Rule::Exists);
        };
        request.answer_struct(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &entry);
        self.note_gid_query(Some(index));
        Ok(())
    }

    fn note_gid_query(&mut self, index: Option<u32>) {
        if let Some(changes) = &mut self.objects.changes {
            changes.push(ObjectChange::GidQueried { index });
        }
    }

    fn device(&self) -> QueryDeviceResp {
        // `enum ib_uverbs_device_cap_flags`: those that a ConnectX has, except automatic path
        // migration. The promises of each are tested.
        const BAD_PKEY_COUNTER: u32 = 1 << 1;
        const BAD_QKEY_COUNTER: u32 = 1 << 2;
        const PATH_MIGRATION: u32 = 1 << 4;
        // As the driver says of every device.
        const CHANGE_PHYSICAL_PORT: u32 = 1 << 5;
        const PORT_ACTIVE_EVENT: u32 = 1 << 10;
        const SYSTEM_IMAGE_GUID: u32 = 1 << 11;
        const RNR_NAK_GENERATION: u32 = 1 << 12;
        const WINDOWS: u32 = 1 << 17 | 1 << 24;
        const XRC: u32 = 1 << 20;
        // Invalidation, local and by sends; type 2 windows.
        const MEMORY_MANAGEMENT: u32 = 1 << 21;
        const RAW_CHECKSUMS: u32 = 1 << 26;
        const FLOW_STEERING: u32 = 1 << 29;
        let packets = match self.has_packets() {
            true => RAW_CHECKSUMS | FLOW_STEERING,
            false => 0,
        };
        let card = self.hca.settings().card;
        let [major, minor, patch] = card.firmware.map(u64::from);
        let migration = if card.path_migration {
            PATH_MIGRATION
        } else {
            0
        };
        let guid = self.node_guid.to_be_bytes();
        QueryDeviceResp {
            fw_ver: major << 32 | minor << 16 | patch,
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: u64::MAX,
            page_size_cap: !0xfff,
            vendor_id: 0x2c9,
            vendor_part_id: card.part_id.into(),
            hw_ver: card.hardware_version,
            max_qp: card.max_queue_pairs(),
            // Of the longest WQEs, as Linux computes it; queues of shorter ones may be longer.
            max_qp_wr: 1 << 13,
            device_cap_flags: BAD_PKEY_COUNTER
                | BAD_QKEY_COUNTER
                | CHANGE_PHYSICAL_PORT
                | PORT_ACTIVE_EVENT
                | SYSTEM_IMAGE_GUID
                | RNR_NAK_GENERATION
                | WINDOWS
                | XRC
                | MEMORY_MANAGEMENT
                | migration
                | packets,
            max_mw: card.max_keys(),
            max_sge: 30,
            max_sge_rd: 30,
            max_cq: card.max_completion_queues(),
            max_cqe: (1 << 22) - 1,
            max_mr: card.max_keys(),
            max_pd: card.max_domains(),
            max_qp_rd_atom: 16,
            max_res_rd_atom: 16 * card.max_queue_pairs(),
            max_qp_init_rd_atom: 16,
            // IB_ATOMIC_HCA, as of a ConnectX: UCX offers atomics for no other value.
            atomic_cap: 1,
            max_mcast_grp: card.max_groups(),
            max_mcast_qp_attach: 240,
            max_total_mcast_qp_attach: 240 * card.max_groups(),
            max_ah: i32::MAX as u32,
            max_srq: card.max_shared_queues(),
            max_srq_wr: (1 << 15) - 1,
            max_srq_sge: 31,
            max_pkeys: PKEYS,
            local_ca_ack_delay: 16,
            phys_port_cnt: 1,
            ..QueryDeviceResp::default()
        }
    }

    pub(crate) fn query_device(&mut self, request: &mut Request) {
        let answer = self.device();
        request.core_answer(&answer);
    }

    pub(crate) fn query_device_ex(&mut self, request: &mut Request) {
        /// `IB_RAW_PACKET_CAP_CVLAN_STRIPPING` and `IB_RAW_PACKET_CAP_IP_CSUM`.
        const PACKETS: u32 = 1 << 0 | 1 << 2;
        /// `IB_ODP_SUPPORT` and `IB_ODP_SUPPORT_IMPLICIT`; bits of operations: those of
        /// send, receive, write, read, atomics, and receives of a shared queue.
        const ODP: u64 = 0b11;
        const ODP_RC: u32 = 0b11_1111;
        const ODP_SEND: u32 = 1 << 0;
        /// A bit of types of queue pairs.
        const RAW_PACKET: u32 = 1 << QpType::RAW_PACKET.0;
        let has_packets = self.has_packets();
        let packets = |value: u32| if has_packets { value } else { 0 };
        let base = self.device();
        let answer = ExQueryDeviceResp {
            base,
            device_cap_flags_ex: base.device_cap_flags.into(),
            response_length: (request.room(ATTR_CORE_OUT)).min(size_of::<ExQueryDeviceResp>())
                as u32,
            odp_caps: OdpCaps {
                general_caps: ODP,
                rc_odp_caps: ODP_RC,
                ud_odp_caps: ODP_SEND,
                ..OdpCaps::default()
            },
            xrc_odp_caps: ODP_RC,
            max_dm_size: u64::from(MEMORY_PAGES) * MmapOptions::page_size() as u64,
            timestamp_mask: i64::MAX as u64,
            // The clock counts nanoseconds; this is its frequency in kHz.
            hca_core_clock: 1_000_000,
            rss_caps: RssCaps {
                supported_qpts: packets(RAW_PACKET),
                max_rwq_indirection_tables: packets(1 << 16),
                max_rwq_indirection_table_size: packets(1 << LOG_MAX_TABLE),
                reserved: 0,
            },
            max_wq_type_rq: packets(1 << 16),
            raw_packet_caps: packets(PACKETS),
            tm_caps: TmCaps {
                max_rndv_hdr_size: 64,
                max_num_tags: MAX_TAGS,
                // IB_TM_CAP_RNDV_RC
                flags: 1 << 0,
                max_ops: 1 << 15,
                max_sge: 1,
                reserved: 0,
            },
            cq_moderation_caps: CqModerationCaps {
                max_cq_moderation_count: u16::MAX,
                max_cq_moderation_period: LONGEST_PERIOD,
                reserved: 0,
            },
            ..ExQueryDeviceResp::default()
        };
        request.core_answer(&answer);
        /// The device's `cqe_compression_max_num`.
        const COMPRESSED_CQES: u32 = 64;
        let mut driver = mlx5_abi::QueryDeviceResp {
            response_length: size_of::<mlx5_abi::QueryDeviceResp>() as u32,
            cqe_comp_caps: CqeCompCaps {
                max_num: COMPRESSED_CQES,
                supported_format: u32::from(mini_format::HASH | mini_format::CSUM),
            },
            flags: device_flag::OOO_DP | device_flag::CQE_128B_COMP | device_flag::CQE_128B_PAD,
            dci_streams_caps: DciStreamsCaps {
                max_log_num_concurent: LOG_MAX_STREAMS,
                max_log_num_errored: LOG_MAX_STREAMS,
            },
            ..mlx5_abi::QueryDeviceResp::default()
        };
        if has_packets {
            driver.tso_caps = TsoCaps {
                max_tso: 1 << 16,
                supported_qpts: RAW_PACKET,
            };
            driver.rss_caps.rx_hash_fields_mask = HASH_FIELDS;
            driver.rss_caps.rx_hash_function = HASH_TOEPLITZ;
            driver.striding_rq_caps = StridingRqCaps {
                min_single_stride_log_num_of_bytes: *STRIDE_BYTES.start(),
                max_single_stride_log_num_of_bytes: *STRIDE_BYTES.end(),
                min_single_wqe_log_num_of_strides: *STRIDES_PER_RECEIVE.start(),
                max_single_wqe_log_num_of_strides: *STRIDES_PER_RECEIVE.end(),
                supported_qpts: RAW_PACKET,
                reserved: 0,
            };
        }
        request.driver_answer(&driver);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use roce::packet::gid_of_ip;

    use super::*;

    #[test]
    fn a_link_local_gid_contains_the_mac_address() {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[8..].copy_from_slice(&[0x00, 0x50, 0x53, 0xff, 0xfe, 0, 0, 1]);
        let own = [0x02, 0x50, 7, 8, 0, 9];
        let mac_of = |gid: &[u8; 16]| mac_of(gid, own).map_err(|error| error.errno().raw());
        assert_eq!(mac_of(&gid), Ok([0x02, 0x50, 0x53, 0, 0, 1]));
        gid[11] = 0;
        assert_eq!(mac_of(&gid), Err(libc::EHOSTUNREACH));
        gid[0] = 0xff;
        assert_eq!(mac_of(&gid), Ok([0x33, 0x33, 0xfe, 0, 0, 1]));
        let foreign = gid_of_ip(Ipv4Addr::LOCALHOST.into());
        assert_eq!(mac_of(&foreign), Err(libc::EHOSTUNREACH));
    }
}
