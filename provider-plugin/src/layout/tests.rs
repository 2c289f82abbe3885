//! The table against pahole's numbers, and against the C headers.

use core::mem::{offset_of, size_of};

use super::*;
use crate::abi::*;

const DATA: &str = include_str!("../../tests/data/rdma-core-layouts.txt");

struct Struct {
    name: &'static str,
    size: usize,
    members: Vec<(&'static str, usize, usize)>, // name, offset, size
}

impl Struct {
    fn offset(&self, member: &str) -> Option<usize> {
        self.members.iter().find(|m| m.0 == member).map(|m| m.1)
    }
}

struct Sampled {
    pabi: u32,
    releases: Vec<u32>,
    structs: Vec<Struct>,
}

impl Sampled {
    fn get(&self, name: &str) -> &Struct {
        self.structs
            .iter()
            .find(|s| s.name == name)
            .unwrap_or_else(|| panic!("no {name}"))
    }
}

fn sampled() -> Vec<Sampled> {
    let mut out: Vec<Sampled> = Vec::new();
    for line in DATA.lines().filter(|l| !l.starts_with('#')) {
        let words: Vec<&'static str> = line.split(' ').collect();
        match words[0] {
            "layout" => out.push(Sampled {
                pabi: words[1].parse().unwrap(),
                releases: words[2..]
                    .iter()
                    .map(|r| r.split('.').next().unwrap().parse().unwrap())
                    .collect(),
                structs: Vec::new(),
            }),
            "struct" => out.last_mut().unwrap().structs.push(Struct {
                name: words[1],
                size: words[2].parse().unwrap(),
                members: Vec::new(),
            }),
            _ => out
                .last_mut()
                .unwrap()
                .structs
                .last_mut()
                .unwrap()
                .members
                .push((
                    words[2],
                    words[0].parse().unwrap(),
                    words[1].parse().unwrap(),
                )),
        }
    }
    out
}

/// Each sampled release with its layout.
fn with_layouts() -> Vec<(Sampled, &'static Layout)> {
    let mut out = Vec::new();
    for i in 0..sampled().len() {
        for j in 0..sampled()[i].releases.len() {
            let sample = sampled().swap_remove(i);
            let release = sample.releases[j];
            let layout = Layout::of_release(release).unwrap_or_else(|| panic!("no {release}"));
            out.push((sample, layout));
        }
    }
    out
}

#[test]
fn every_layout_is_sampled_and_every_release_has_one() {
    let samples = with_layouts();
    for layout in LAYOUTS {
        assert!(
            samples.iter().any(|(_, l)| *l == layout),
            "{layout} is not in the data"
        );
    }
    for (sample, layout) in &samples {
        assert_eq!(sample.pabi, layout.pabi);
    }
    assert_eq!(Layout::of_release(33), None);
    assert_eq!(Layout::of_release(66), None);
    for release in 34..=65 {
        assert!(Layout::of_release(release).is_some(), "release {release}");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn moving_members_match_the_headers() {
    for (sample, layout) in with_layouts() {
        let ops = sample.get("verbs_context_ops");
        assert_eq!(layout.op_count() * size_of::<usize>(), ops.size, "{layout}");
        for (index, name) in layout.ops().enumerate() {
            assert_eq!(
                ops.offset(name),
                Some(index * size_of::<usize>()),
                "{layout}: {name}"
            );
            assert_eq!(layout.op_index(name), Some(index));
        }
        let context = sample.get("verbs_context");
        assert_eq!(layout.context_size(), context.size, "{layout}");
        assert_eq!(
            Some(layout.context_offset()),
            context.offset("context"),
            "{layout}"
        );
        assert_eq!(
            Some(layout.context_offset() - 8),
            context.offset("sz"),
            "{layout}"
        );
        let qp = sample.get("verbs_qp");
        assert_eq!(layout.qp_size(), qp.size, "{layout}");
        assert!(qp.size <= size_of::<verbs_qp>());
        assert_eq!(
            Some(layout.qp_comp_mask_offset()),
            qp.offset("comp_mask"),
            "{layout}"
        );
        let qp_ex = sample.get("ibv_qp_ex");
        let atomic_write = layout
            .has_wr_atomic_write()
            .then_some(size_of::<ibv_qp_ex>());
        assert_eq!(qp_ex.offset("wr_atomic_write"), atomic_write, "{layout}");
        let flush = layout.has_wr_flush().then_some(size_of::<ibv_qp_ex>() + 8);
        assert_eq!(qp_ex.offset("wr_flush"), flush, "{layout}");
        let sysfs = sample.get("verbs_sysfs_dev");
        assert_eq!(
            layout.sysfs_num_ports_offset(),
            sysfs.offset("num_ports"),
            "{layout}"
        );
    }
}

/// Compares members of one of our structures with every sampled release.
macro_rules! same_everywhere {
    ($t:ty as $c:literal { $($field:ident $(= $cname:literal)?),* $(,)? }) => {
        for (sample, layout) in with_layouts() {
            let c = sample.get($c);
            $({
                #[allow(unused_mut, unused_assignments)]
                let mut name = stringify!($field);
                $(name = $cname;)?
                assert_eq!(Some(offset_of!($t, $field)), c.offset(name), "{layout}: {name}");
            })*
            assert_eq!(size_of::<$t>(), c.size, "{layout}: {}", $c);
        }
    };
}

#[test]
#[cfg(target_arch = "x86_64")]
fn fixed_members_match_the_headers() {
    same_everywhere!(verbs_device_ops as "verbs_device_ops" {
        name, match_min_abi_version, match_max_abi_version, match_table, static_providers,
        match_device, alloc_context, import_context, alloc_device, uninit_device,
    });
    same_everywhere!(verbs_device as "verbs_device" {
        device, ops, refcount, entry, sysfs, core_support,
    });
    same_everywhere!(verbs_match_ent as "verbs_match_ent" {
        driver_data, u, vendor, device, kind,
    });
    same_everywhere!(verbs_mr as "verbs_mr" { ibv_mr, mr_type, access });
    same_everywhere!(verbs_srq as "verbs_srq" { srq, srq_type, xrcd, cq, srq_num });
    same_everywhere!(verbs_cq as "verbs_cq" {});
    same_everywhere!(ibv_cq_ex as "ibv_cq_ex" {
        context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
        async_events_completed, comp_mask, status, wr_id, start_poll, next_poll, end_poll,
        read_opcode, read_vendor_err, read_byte_len, read_imm_data, read_qp_num, read_src_qp,
        read_wc_flags, read_slid, read_sl, read_dlid_path_bits, read_completion_ts, read_cvlan,
        read_flow_tag, read_tm_info, read_completion_wallclock_ns,
    });
    same_everywhere!(ibv_wc as "ibv_wc" {
        wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags, pkey_index, slid,
        sl, dlid_path_bits,
    });
    same_everywhere!(ibv_send_wr as "ibv_send_wr" {
        wr_id, next, sg_list, num_sge, opcode, send_flags, wr, xrc_remote_srqn = "qp_type",
    });
    for (sample, layout) in with_layouts() {
        let c = sample.get("ibv_qp_ex");
        macro_rules! check {
            ($($f:ident),*) => { $(assert_eq!(
                Some(offset_of!(ibv_qp_ex, $f)), c.offset(stringify!($f)), "{layout}"
            );)* };
        }
        check!(
            qp_base,
            comp_mask,
            wr_id,
            wr_flags,
            wr_atomic_cmp_swp,
            wr_atomic_fetch_add,
            wr_bind_mw,
            wr_local_inv,
            wr_rdma_read,
            wr_rdma_write,
            wr_rdma_write_imm,
            wr_send,
            wr_send_imm,
            wr_send_inv,
            wr_send_tso,
            wr_set_ud_addr,
            wr_set_xrc_srqn,
            wr_set_inline_data,
            wr_set_inline_data_list,
            wr_set_sge,
            wr_set_sge_list,
            wr_start,
            wr_complete,
            wr_abort
        );
        let c = sample.get("verbs_sysfs_dev");
        for (ours, theirs) in [
            (offset_of!(verbs_sysfs_dev, flags), "flags"),
            (offset_of!(verbs_sysfs_dev, sysfs_cdev), "sysfs_cdev"),
            (offset_of!(verbs_sysfs_dev, modalias), "modalias"),
            (offset_of!(verbs_sysfs_dev, node_guid), "node_guid"),
            (offset_of!(verbs_sysfs_dev, driver_id), "driver_id"),
            (offset_of!(verbs_sysfs_dev, ibdev_idx), "ibdev_idx"),
        ] {
            assert_eq!(Some(ours), c.offset(theirs), "{layout}: {theirs}");
        }
    }
}

#[test]
fn comp_mask_and_new_operations_land_in_their_words() {
    unsafe extern "C" fn aw(_: *mut ibv_qp_ex, _: u32, _: u64, _: *const core::ffi::c_void) {}
    unsafe extern "C" fn fl(_: *mut ibv_qp_ex, _: u32, _: u64, _: usize, _: u8, _: u8) {}
    for layout in LAYOUTS {
        // SAFETY: every member of verbs_qp may be zero.
        let mut qp: verbs_qp = unsafe { core::mem::zeroed() };
        layout.set_qp_comp_mask(&mut qp, VERBS_QP_EX);
        assert_eq!(
            layout.set_wr_atomic_write(&mut qp, Some(aw)),
            layout.first >= 44
        );
        assert_eq!(layout.set_wr_flush(&mut qp, Some(fl)), layout.first >= 45);
        assert_eq!(layout.qp_comp_mask(&qp), VERBS_QP_EX, "{layout}");
        let at = layout.qp_comp_mask_offset();
        // SAFETY: the offset of a u32 inside verbs_qp, initialised above.
        let raw = unsafe { (&raw const qp).cast::<u8>().add(at).cast::<u32>().read() };
        assert_eq!(raw, VERBS_QP_EX, "{layout}");
        assert!(layout.qp_size() <= size_of::<verbs_qp>());
    }
}
