//! Devices as text: the lines of ibv_devinfo, with aligned values.

use std::fmt::Display;
use std::io::{self, Write};

use super::model::{Attributes, DeviceInfo, Flags, Gid, PortInfo};
use crate::escape::escaped;
use crate::out::{self, paint};

/// Column in which values start.
const COLUMN: usize = 36;

/// Prints the devices.
pub fn print(infos: &[DeviceInfo], verbose: bool) -> Result<(), crate::error::Error> {
    let mut out = out::stdout();
    for (number, info) in infos.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        device(&mut Printer(&mut out), info, verbose)?;
    }
    Ok(out.flush()?)
}

/// Writes fields, further values and remarks.
struct Printer<'w>(&'w mut dyn Write);

impl Printer<'_> {
    fn field(&mut self, indent: usize, key: &str, value: impl Display) -> io::Result<()> {
        self.styled_field(indent, key, escaped(value))
    }

    /// As [`field`](Self::field), for a value with styles.
    fn styled_field(&mut self, indent: usize, key: &str, value: impl Display) -> io::Result<()> {
        let key = format!("{:indent$}{key}:", "");
        writeln!(self.0, "{key:COLUMN$}{value}")
    }

    fn value(&mut self, value: &str) -> io::Result<()> {
        writeln!(self.0, "{:COLUMN$}{}", "", escaped(value))
    }

    fn remark(&mut self, remark: &str) -> io::Result<()> {
        writeln!(self.0, "  {}", paint(out::DIM, remark))
    }

    fn flags(&mut self, flags: &Flags) -> io::Result<()> {
        for name in &flags.names {
            self.value(name)?;
        }
        match flags.unknown {
            0 => Ok(()),
            unknown => self.value(&format!("Unknown flags: 0x{unknown:X}")),
        }
    }

    /// Prints the queue pair types of a bit mask of raw packet (8) and UD (4).
    fn queue_pair_types(&mut self, types: u32) -> io::Result<()> {
        writeln!(self.0, "    supported_qp:")?;
        self.flags(&Flags {
            value: types.into(),
            names: [(8, "SUPPORT_RAW_PACKET"), (4, "SUPPORT_UD")]
                .iter()
                .filter(|(number, _)| types >> number & 1 != 0)
                .map(|(_, name)| *name)
                .collect(),
            unknown: u64::from(types & !(1 << 8 | 1 << 4)),
        })
    }
}

fn device(printer: &mut Printer<'_>, info: &DeviceInfo, verbose: bool) -> io::Result<()> {
    printer.styled_field(0, "hca_id", paint(out::NAME, &info.hca_id))?;
    let transport = &info.transport;
    printer.field(
        2,
        "transport",
        format_args!("{} ({})", transport.name, transport.value),
    )?;
    printer.field(2, "fw_ver", &info.fw_ver)?;
    printer.field(2, "node_guid", &info.node_guid)?;
    printer.field(2, "sys_image_guid", &info.sys_image_guid)?;
    printer.field(2, "vendor_id", format_args!("0x{:04x}", info.vendor_id))?;
    printer.field(2, "vendor_part_id", info.vendor_part_id)?;
    printer.field(2, "hw_ver", format_args!("0x{:X}", info.hw_ver))?;
    if let Some(board_id) = &info.board_id {
        printer.field(2, "board_id", board_id)?;
    }
    printer.field(2, "phys_port_cnt", info.phys_port_cnt)?;
    if verbose {
        limits(printer, &info.attributes)?;
        capabilities(printer, &info.attributes)?;
    }
    for port_info in &info.ports {
        port(printer, port_info, transport.value == 0, verbose)?;
    }
    Ok(())
}

fn limits(printer: &mut Printer<'_>, attr: &Attributes) -> io::Result<()> {
    printer.field(2, "max_mr_size", format_args!("{:#x}", attr.max_mr_size))?;
    printer.field(
        2,
        "page_size_cap",
        format_args!("{:#x}", attr.page_size_cap),
    )?;
    printer.field(2, "max_qp", attr.max_qp)?;
    printer.field(2, "max_qp_wr", attr.max_qp_wr)?;
    printer.field(
        2,
        "device_cap_flags",
        format_args!("0x{:08x}", attr.device_cap_flags.value),
    )?;
    printer.flags(&attr.device_cap_flags)?;
    let numbers = [
        ("max_sge", attr.max_sge),
        ("max_sge_rd", attr.max_sge_rd),
        ("max_cq", attr.max_cq),
        ("max_cqe", attr.max_cqe),
        ("max_mr", attr.max_mr),
        ("max_pd", attr.max_pd),
        ("max_qp_rd_atom", attr.max_qp_rd_atom),
        ("max_ee_rd_atom", attr.max_ee_rd_atom),
        ("max_res_rd_atom", attr.max_res_rd_atom),
        ("max_qp_init_rd_atom", attr.max_qp_init_rd_atom),
        ("max_ee_init_rd_atom", attr.max_ee_init_rd_atom),
    ];
    for (key, value) in numbers {
        printer.field(2, key, value)?;
    }
    let atomic = &attr.atomic_cap;
    printer.field(
        2,
        "atomic_cap",
        format_args!("{} ({})", atomic.name, atomic.value),
    )?;
    let numbers = [
        ("max_ee", attr.max_ee),
        ("max_rdd", attr.max_rdd),
        ("max_mw", attr.max_mw),
        ("max_raw_ipv6_qp", attr.max_raw_ipv6_qp),
        ("max_raw_ethy_qp", attr.max_raw_ethy_qp),
        ("max_mcast_grp", attr.max_mcast_grp),
        ("max_mcast_qp_attach", attr.max_mcast_qp_attach),
        ("max_total_mcast_qp_attach", attr.max_total_mcast_qp_attach),
        ("max_ah", attr.max_ah),
        ("max_fmr", attr.max_fmr),
    ];
    for (key, value) in numbers {
        printer.field(2, key, value)?;
    }
    if attr.max_fmr != 0 {
        printer.field(2, "max_map_per_fmr", attr.max_map_per_fmr)?;
    }
    printer.field(2, "max_srq", attr.max_srq)?;
    if attr.max_srq != 0 {
        printer.field(2, "max_srq_wr", attr.max_srq_wr)?;
        printer.field(2, "max_srq_sge", attr.max_srq_sge)?;
    }
    printer.field(2, "max_pkeys", attr.max_pkeys)?;
    printer.field(2, "local_ca_ack_delay", attr.local_ca_ack_delay)
}

fn capabilities(printer: &mut Printer<'_>, attr: &Attributes) -> io::Result<()> {
    printer.field(2, "general_odp_caps", "")?;
    printer.flags(&attr.general_odp_caps)?;
    for (key, caps) in [
        ("rc_odp_caps", &attr.rc_odp_caps),
        ("uc_odp_caps", &attr.uc_odp_caps),
        ("ud_odp_caps", &attr.ud_odp_caps),
        ("xrc_odp_caps", &attr.xrc_odp_caps),
    ] {
        printer.field(2, key, "")?;
        match caps.value {
            0 => printer.value("NO SUPPORT")?,
            _ => printer.flags(caps)?,
        }
    }
    match attr.completion_timestamp_mask {
        0 => printer.remark("completion_timestamp_mask not supported")?,
        mask => printer.field(
            2,
            "completion timestamp_mask",
            format_args!("0x{mask:016x}"),
        )?,
    }
    match attr.hca_core_clock_khz {
        0 => printer.remark("core clock not supported")?,
        clock => printer.field(2, "hca_core_clock", format_args!("{clock}kHZ"))?,
    }
    if attr.raw_packet_caps.value != 0 {
        printer.field(2, "raw packet caps", "")?;
        printer.flags(&attr.raw_packet_caps)?;
    }
    let ex = &attr.device_cap_flags_ex;
    printer.field(2, "device_cap_flags_ex", format_args!("0x{:X}", ex.value))?;
    printer.flags(ex)?;
    if let Some(caps) = &attr.driver_caps {
        printer.field(2, "tso_caps", "")?;
        printer.field(4, "max_tso", caps.max_tso)?;
    }
    rss(printer, attr)?;
    printer.field(2, "max_wq_type_rq", attr.max_wq_type_rq)?;
    if let Some(caps) = &attr.driver_caps {
        printer.field(2, "packet_pacing_caps", "")?;
        printer.field(
            4,
            "qp_rate_limit_min",
            format_args!("{}kbps", caps.qp_rate_limit_min_kbps),
        )?;
        printer.field(
            4,
            "qp_rate_limit_max",
            format_args!("{}kbps", caps.qp_rate_limit_max_kbps),
        )?;
    }
    match attr.tm_caps.max_num_tags {
        0 => printer.remark("tag matching not supported")?,
        tags => {
            printer.field(2, "max_rndv_hdr_size", attr.tm_caps.max_rndv_hdr_size)?;
            printer.field(2, "max_num_tags", tags)?;
            printer.field(2, "max_ops", attr.tm_caps.max_ops)?;
            printer.field(2, "max_sge", attr.tm_caps.max_sge)?;
            printer.field(2, "flags", "")?;
            printer.flags(&attr.tm_caps.flags)?;
        }
    }
    let moderation = &attr.cq_moderation_caps;
    if moderation.max_cq_count != 0 && moderation.max_cq_period != 0 {
        printer.field(2, "cq moderation caps", "")?;
        printer.field(4, "max_cq_count", moderation.max_cq_count)?;
        printer.field(
            4,
            "max_cq_period",
            format_args!("{} us", moderation.max_cq_period),
        )?;
    }
    if attr.max_dm_size != 0 {
        printer.field(
            2,
            "maximum available device memory",
            format_args!("{}Bytes", attr.max_dm_size),
        )?;
    }
    printer.field(2, "num_comp_vectors", attr.num_comp_vectors)
}

fn rss(printer: &mut Printer<'_>, attr: &Attributes) -> io::Result<()> {
    let rss = &attr.rss_caps;
    printer.field(2, "rss_caps", "")?;
    printer.field(
        4,
        "max_rwq_indirection_tables",
        rss.max_rwq_indirection_tables,
    )?;
    printer.field(
        4,
        "max_rwq_indirection_table_size",
        rss.max_rwq_indirection_table_size,
    )?;
    if let Some(caps) = &attr.driver_caps {
        printer.field(
            4,
            "rx_hash_function",
            format_args!("{:#x}", caps.rx_hash_function),
        )?;
        printer.field(
            4,
            "rx_hash_fields_mask",
            format_args!("0x{:X}", caps.rx_hash_fields_mask),
        )?;
    }
    match rss.supported_qpts {
        0 => Ok(()),
        types => printer.queue_pair_types(types),
    }
}

fn port(
    printer: &mut Printer<'_>,
    port: &PortInfo,
    infiniband: bool,
    verbose: bool,
) -> io::Result<()> {
    printer.field(4, "port", port.port)?;
    let style = if port.is_active() {
        out::GOOD
    } else {
        out::WARN
    };
    printer.styled_field(
        6,
        "state",
        format_args!("{} ({})", paint(style, port.state.name), port.state.value),
    )?;
    for (key, mtu) in [("max_mtu", &port.max_mtu), ("active_mtu", &port.active_mtu)] {
        match mtu.bytes {
            Some(bytes) => printer.field(6, key, format_args!("{bytes} ({})", mtu.value))?,
            None => printer.field(6, key, format_args!("invalid MTU ({})", mtu.value))?,
        }
    }
    printer.field(6, "sm_lid", port.sm_lid)?;
    printer.field(6, "port_lid", port.port_lid)?;
    printer.field(6, "port_lmc", format_args!("0x{:02x}", port.port_lmc))?;
    printer.field(6, "link_layer", port.link_layer.name)?;
    if !verbose {
        return Ok(());
    }
    printer.field(6, "max_msg_sz", format_args!("{:#x}", port.max_msg_sz))?;
    printer.field(
        6,
        "port_cap_flags",
        format_args!("0x{:08x}", port.port_cap_flags),
    )?;
    printer.field(
        6,
        "port_cap_flags2",
        format_args!("0x{:04x}", port.port_cap_flags2),
    )?;
    let lanes = &port.max_vl_num;
    printer.field(
        6,
        "max_vl_num",
        format_args!("{} ({})", lanes.name, lanes.value),
    )?;
    printer.field(
        6,
        "bad_pkey_cntr",
        format_args!("{:#x}", port.bad_pkey_cntr),
    )?;
    printer.field(
        6,
        "qkey_viol_cntr",
        format_args!("{:#x}", port.qkey_viol_cntr),
    )?;
    printer.field(6, "sm_sl", port.sm_sl)?;
    printer.field(6, "pkey_tbl_len", port.pkey_tbl_len)?;
    printer.field(6, "gid_tbl_len", port.gid_tbl_len)?;
    printer.field(6, "subnet_timeout", port.subnet_timeout)?;
    printer.field(6, "init_type_reply", port.init_type_reply)?;
    let width = &port.active_width;
    printer.field(
        6,
        "active_width",
        format_args!("{}X ({})", width.name, width.value),
    )?;
    let speed = &port.active_speed;
    printer.field(
        6,
        "active_speed",
        format_args!("{} ({})", speed.name, speed.value),
    )?;
    if infiniband {
        let state = &port.phys_state;
        printer.field(
            6,
            "phys_state",
            format_args!("{} ({})", state.name, state.value),
        )?;
    }
    for gid in &port.gids {
        gid_line(printer, gid, port.link_layer.value)?;
    }
    Ok(())
}

fn gid_line(printer: &mut Printer<'_>, gid: &Gid, link_layer: u8) -> io::Result<()> {
    let key = format!("GID[{:3}]", gid.index);
    match (link_layer, gid.kind) {
        // Ethernet: RoCE has two kinds.
        (2, Some("InfiniBand")) => printer.field(6, &key, format_args!("{}, RoCE v1", gid.gid)),
        (2, Some(kind)) => printer.field(6, &key, format_args!("{}, {kind}", gid.gid)),
        (_, Some(_)) => printer.field(6, &key, &gid.gid),
        (_, None) => printer.field(6, &key, format_args!("{}, unknown type", gid.gid)),
    }
}
