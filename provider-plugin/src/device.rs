//! Devices: libibverbs's structure for each, and queries.

use core::ffi::{CStr, c_int};
use core::mem::{offset_of, size_of};

use uverbs::{DeviceAttr, DeviceAttrEx, Udata};
use zerocopy::FromZeros;

use crate::abi::*;
use crate::alloc::try_box_zeroed;
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;

/// `verbs_device_ops.alloc_device`. libibverbs fills the structure.
pub unsafe extern "C" fn alloc_device(sysfs: *mut verbs_sysfs_dev) -> *mut verbs_device {
    entry::pointer(|| {
        if !sysfs.is_null() {
            // SAFETY: libibverbs passes a device that it found, with its name
            // in an array that is NUL-terminated.
            let name = unsafe { CStr::from_ptr((&raw const (*sysfs).ibdev_name).cast()) };
            tracing::info!(device = %name.to_string_lossy(), "serves");
        }
        // SAFETY: every member of verbs_device may be zero.
        unsafe { try_box_zeroed::<verbs_device>() }.map(Box::into_raw)
    })
}

/// `verbs_device_ops.uninit_device`.
pub unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: libibverbs passes what alloc_device returned, once.
    entry::unit(|| drop(unsafe { Box::from_raw(device) }));
}

/// Queries of a device.
pub trait QueryOps {
    /// Adds the attributes of device-specific features.
    fn add_device_attributes(
        _ctx: &CtxRef,
        _from: &DeviceAttrEx,
        _attr: &mut ibv_device_attr_ex,
    ) -> Result<(), Errno> {
        Ok(())
    }
}

/// Converts a 32-bit limit of the kernel to a signed one; saturates.
fn limit(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// The firmware version as text: three numbers of 16 bits.
fn fw_ver(raw: u64) -> [u8; 64] {
    use std::io::Write;
    let mut text = [0u8; 64];
    let part = |shift: u32| (raw >> shift) & 0xffff;
    // At most 17 of the 64 bytes; the rest stays zero, which ends the text.
    let _ = write!(&mut text[..63], "{}.{}.{}", part(32), part(16), part(0));
    text
}

fn basic(from: &DeviceAttr) -> ibv_device_attr {
    ibv_device_attr {
        fw_ver: fw_ver(from.fw_ver),
        node_guid: u64::from_ne_bytes(from.node_guid),
        sys_image_guid: u64::from_ne_bytes(from.sys_image_guid),
        max_mr_size: from.max_mr_size,
        page_size_cap: from.page_size_cap,
        vendor_id: from.vendor_id,
        vendor_part_id: from.vendor_part_id,
        hw_ver: from.hw_ver,
        max_qp: limit(from.max_qp),
        max_qp_wr: limit(from.max_qp_wr),
        device_cap_flags: from.device_cap_flags,
        max_sge: limit(from.max_sge),
        max_sge_rd: limit(from.max_sge_rd),
        max_cq: limit(from.max_cq),
        max_cqe: limit(from.max_cqe),
        max_mr: limit(from.max_mr),
        max_pd: limit(from.max_pd),
        max_qp_rd_atom: limit(from.max_qp_rd_atom),
        max_ee_rd_atom: limit(from.max_ee_rd_atom),
        max_res_rd_atom: limit(from.max_res_rd_atom),
        max_qp_init_rd_atom: limit(from.max_qp_init_rd_atom),
        max_ee_init_rd_atom: limit(from.max_ee_init_rd_atom),
        atomic_cap: from.atomic_cap,
        max_ee: limit(from.max_ee),
        max_rdd: limit(from.max_rdd),
        max_mw: limit(from.max_mw),
        max_raw_ipv6_qp: limit(from.max_raw_ipv6_qp),
        max_raw_ethy_qp: limit(from.max_raw_ethy_qp),
        max_mcast_grp: limit(from.max_mcast_grp),
        max_mcast_qp_attach: limit(from.max_mcast_qp_attach),
        max_total_mcast_qp_attach: limit(from.max_total_mcast_qp_attach),
        max_ah: limit(from.max_ah),
        max_fmr: limit(from.max_fmr),
        max_map_per_fmr: limit(from.max_map_per_fmr),
        max_srq: limit(from.max_srq),
        max_srq_wr: limit(from.max_srq_wr),
        max_srq_sge: limit(from.max_srq_sge),
        max_pkeys: from.max_pkeys,
        local_ca_ack_delay: from.local_ca_ack_delay,
        phys_port_cnt: from.phys_port_cnt,
    }
}

/// The kernel's answer without device-specific features: raw packets, work queues and RSS,
/// tag matching. Attributes that the kernel does not report are zero.
fn extended(from: &DeviceAttrEx, num_ports: u32) -> ibv_device_attr_ex {
    ibv_device_attr_ex {
        orig_attr: basic(&from.base),
        comp_mask: 0,
        odp_caps: ibv_odp_caps {
            general_caps: from.odp_caps.general_caps,
            rc_odp_caps: from.odp_caps.rc_odp_caps,
            uc_odp_caps: from.odp_caps.uc_odp_caps,
            ud_odp_caps: from.odp_caps.ud_odp_caps,
        },
        completion_timestamp_mask: from.timestamp_mask,
        hca_core_clock: from.hca_core_clock,
        device_cap_flags_ex: from.device_cap_flags_ex,
        tso_caps: ibv_tso_caps::default(),
        rss_caps: ibv_rss_caps::default(),
        max_wq_type_rq: 0,
        packet_pacing_caps: ibv_packet_pacing_caps::default(),
        raw_packet_caps: 0,
        tm_caps: ibv_tm_caps::default(),
        cq_mod_caps: ibv_cq_moderation_caps {
            max_cq_count: from.cq_moderation_caps.max_cq_moderation_count,
            max_cq_period: from.cq_moderation_caps.max_cq_moderation_period,
        },
        max_dm_size: from.max_dm_size,
        pci_atomic_caps: ibv_pci_atomic_caps::default(),
        xrc_odp_caps: from.xrc_odp_caps,
        phys_port_cnt_ex: if num_ports != 0 {
            num_ports
        } else {
            from.base.phys_port_cnt.into()
        },
    }
}

/// The port count that libibverbs has from netlink; 0 if it has none.
///
/// # Safety
/// `context` is an open context of ours.
unsafe fn num_ports(context: *mut ibv_context) -> u32 {
    let layout = crate::layout::current();
    let Some(offset) = layout.sysfs_num_ports_offset() else {
        return 0;
    };
    // SAFETY: a context's device is a live verbs_device of ours, whose sysfs
    // entry, where there is one, is laid out as in this release.
    unsafe {
        let sysfs = (*(*context).device.cast::<verbs_device>()).sysfs;
        if sysfs.is_null() {
            0
        } else {
            sysfs.byte_add(offset).cast::<u32>().read()
        }
    }
}

/// `ibv_query_device` and `ibv_query_device_ex`: fills `attr_size` bytes, the
/// length of the structure that the application was built with.
pub unsafe extern "C" fn query_device_ex<D: QueryOps>(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    // SAFETY: libibverbs passes an open context of ours; the application a
    // structure of `attr_size` bytes, and an input or NULL.
    entry::int(|| unsafe {
        if !input.is_null() && (*input).comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        if attr_size < size_of::<ibv_device_attr>() {
            return Err(Errno::INVAL);
        }
        attr.cast::<u8>().write_bytes(0, attr_size);
        let ctx = CtxRef::of(context);
        let mut from = DeviceAttrEx::new_zeroed();
        if attr_size == size_of::<ibv_device_attr>() {
            from.base = ctx.query_device()?;
        } else {
            match ctx.query_device_ex(Udata::none()) {
                Ok(answer) => from = answer,
                Err(error) => match Errno::from(error) {
                    Errno(libc::EOPNOTSUPP | libc::ENOSYS) => from.base = ctx.query_device()?,
                    errno => return Err(errno),
                },
            }
        }
        let mut full = extended(&from, num_ports(context));
        D::add_device_attributes(&ctx, &from, &mut full)?;
        let length = attr_size.min(size_of::<ibv_device_attr_ex>());
        attr.cast::<u8>()
            .copy_from_nonoverlapping((&raw const full).cast(), length);
        Ok(())
    })
}

const _: () = {
    assert!(offset_of!(ibv_device_attr_ex, orig_attr) == 0);
    assert!(size_of::<ibv_device_attr>() == 232);
    assert!(offset_of!(ibv_device_attr_ex, odp_caps) == 240);
    assert!(offset_of!(ibv_device_attr_ex, phys_port_cnt_ex) == 396);
    // active_speed_ex, where the release has it, follows at once.
    assert!(size_of::<ibv_port_attr>() == 52);
};

/// `ibv_query_port`. libibverbs has cleared the structure.
pub unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: libibverbs passes an open context of ours and a structure of its
    // own release's length.
    entry::int(|| unsafe {
        let answer = CtxRef::of(context).query_port(port)?;
        let from = &answer.legacy;
        let to = &mut *attr;
        to.state = from.state.into();
        to.max_mtu = from.max_mtu.into();
        to.active_mtu = from.active_mtu.into();
        to.gid_tbl_len = limit(from.gid_tbl_len);
        to.port_cap_flags = from.port_cap_flags;
        to.max_msg_sz = from.max_msg_sz;
        to.bad_pkey_cntr = from.bad_pkey_cntr;
        to.qkey_viol_cntr = from.qkey_viol_cntr;
        to.pkey_tbl_len = from.pkey_tbl_len;
        to.lid = from.lid;
        to.sm_lid = from.sm_lid;
        to.lmc = from.lmc;
        to.max_vl_num = from.max_vl_num;
        to.sm_sl = from.sm_sl;
        to.subnet_timeout = from.subnet_timeout;
        to.init_type_reply = from.init_type_reply;
        to.active_width = from.active_width;
        to.active_speed = from.active_speed;
        to.phys_state = from.phys_state;
        to.link_layer = from.link_layer;
        to.flags = from.flags;
        to.port_cap_flags2 = answer.port_cap_flags2;
        if crate::layout::current().port_attr_has_active_speed_ex() {
            attr.add(1).cast::<u32>().write(answer.active_speed_ex);
        }
        Ok(())
    })
}

/// `ibv_query_port_speed`: in units of 100 Mbit/s. EOPNOTSUPP or EPROTONOSUPPORT
/// if the driver or kernel does not report it; `speed` is unchanged then.
pub unsafe extern "C" fn query_port_speed(
    context: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: libibverbs passes an open context of ours, the application a place
    // for the answer.
    entry::int(|| unsafe {
        speed.write(CtxRef::of(context).query_port_speed(port)?);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_firmware_version_is_text() {
        let text = |raw| {
            let bytes = fw_ver(raw);
            let end = bytes.iter().position(|b| *b == 0).unwrap();
            String::from_utf8(bytes[..end].to_vec()).unwrap()
        };
        assert_eq!(text(0), "0.0.0");
        assert_eq!(text(0x0001_0002_0003), "1.2.3");
        assert_eq!(text(u64::MAX), "65535.65535.65535");
    }

    #[test]
    fn limits_saturate() {
        assert_eq!(limit(7), 7);
        assert_eq!(limit(u32::MAX), c_int::MAX);
    }

    #[test]
    fn unsupported_features_are_not_reported() {
        let mut from = DeviceAttrEx::new_zeroed();
        from.raw_packet_caps = 7;
        from.max_wq_type_rq = 8;
        from.rss_caps.supported_qpts = 1 << 8;
        from.tm_caps.max_num_tags = 127;
        from.hca_core_clock = 1_000_000;
        let told = extended(&from, 1);
        assert_eq!((told.raw_packet_caps, told.max_wq_type_rq), (0, 0));
        assert_eq!(told.rss_caps.supported_qpts, 0);
        assert_eq!(told.tm_caps.max_num_tags, 0);
        assert_eq!(told.hca_core_clock, 1_000_000);
    }

    #[test]
    fn the_port_count_of_netlink_takes_precedence() {
        let mut from = DeviceAttrEx::new_zeroed();
        from.base.phys_port_cnt = 255;
        assert_eq!(extended(&from, 300).phys_port_cnt_ex, 300);
        assert_eq!(extended(&from, 0).phys_port_cnt_ex, 255);
        assert_eq!(extended(&from, 300).orig_attr.phys_port_cnt, 255);
    }
}
