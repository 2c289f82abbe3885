//! `driver.h`: what libibverbs shares with its providers only.

use core::ffi::{c_char, c_int, c_void};
#[cfg(target_arch = "x86_64")]
use core::mem::{offset_of, size_of};

use super::*;

pub const IBV_SYSFS_NAME_MAX: usize = 64;
pub const IBV_SYSFS_PATH_MAX: usize = 256;

/// A device as an application sees it.
#[repr(C)]
pub struct ibv_device {
    pub _ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; IBV_SYSFS_NAME_MAX],
    pub dev_name: [c_char; IBV_SYSFS_NAME_MAX],
    pub dev_path: [c_char; IBV_SYSFS_PATH_MAX],
    pub ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
}

/// A node of libibverbs's intrusive list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct list_node {
    pub next: *mut list_node,
    pub prev: *mut list_node,
}

/// A device as a provider sees it. The provider allocates it zeroed in
/// `alloc_device`; libibverbs fills it, the provider sets `core_support`.
#[repr(C)]
pub struct verbs_device {
    pub device: ibv_device,
    pub ops: *const verbs_device_ops,
    pub refcount: c_int,
    pub entry: list_node,
    pub sysfs: *mut verbs_sysfs_dev,
    pub core_support: u64,
}

/// A device found in sysfs or by netlink. What follows `ibdev_idx` moved.
#[repr(C)]
pub struct verbs_sysfs_dev {
    pub entry: list_node,
    pub provider_data: *mut c_void,
    pub match_: *const verbs_match_ent,
    pub flags: u32,
    pub sysfs_name: [c_char; IBV_SYSFS_NAME_MAX],
    pub sysfs_cdev: libc::dev_t,
    pub ibdev_name: [c_char; IBV_SYSFS_NAME_MAX],
    pub ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
    pub modalias: [c_char; 512],
    pub node_guid: u64,
    pub driver_id: u32,
    pub node_type: c_int,
    pub ibdev_idx: c_int,
}

pub const VERBS_MATCH_SENTINEL: u8 = 0;
pub const VERBS_MATCH_PCI: u8 = 1;
pub const VERBS_MATCH_MODALIAS: u8 = 2;
pub const VERBS_MATCH_DRIVER_ID: u8 = 3;

/// `verbs_match_ent.u`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union verbs_match_key {
    pub modalias: *const c_char,
    pub driver_id: u64,
}

/// One way to recognise a device.
#[repr(C)]
pub struct verbs_match_ent {
    pub driver_data: *mut c_void,
    pub u: verbs_match_key,
    pub vendor: u16,
    pub device: u16,
    pub kind: u8,
}

/// What a provider registers.
#[repr(C)]
pub struct verbs_device_ops {
    pub name: *const c_char,
    pub match_min_abi_version: u32,
    pub match_max_abi_version: u32,
    pub match_table: *const verbs_match_ent,
    pub static_providers: *const *const verbs_device_ops,
    pub match_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> bool>,
    pub alloc_context:
        Option<unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut c_void>,
    pub import_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut c_void>,
    pub alloc_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> *mut verbs_device>,
    pub uninit_device: Option<unsafe extern "C" fn(*mut verbs_device)>,
}

pub const IBV_MR_TYPE_MR: u32 = 0;
pub const IBV_MR_TYPE_NULL_MR: u32 = 1;
pub const IBV_MR_TYPE_IMPORTED_MR: u32 = 2;
pub const IBV_MR_TYPE_DMABUF_MR: u32 = 3;

/// A memory region with what libibverbs keeps beside the public part.
#[repr(C)]
pub struct verbs_mr {
    pub ibv_mr: ibv_mr,
    /// One of `IBV_MR_TYPE_*`; decides whether libibverbs undoes fork
    /// protection when the region goes.
    pub mr_type: u32,
    pub access: c_int,
}

/// A completion queue: public and extended part share their beginning.
#[repr(C)]
pub union verbs_cq {
    pub cq: core::mem::ManuallyDrop<ibv_cq>,
    pub cq_ex: core::mem::ManuallyDrop<ibv_cq_ex>,
}

/// A shared receive queue with what libibverbs keeps beside the public part.
#[repr(C)]
pub struct verbs_srq {
    pub srq: ibv_srq,
    /// One of `IBV_SRQT_*`.
    pub srq_type: u32,
    pub xrcd: *mut c_void,
    pub cq: *mut ibv_cq,
    pub srq_num: u32,
}

/// An XRC domain with its kernel handle.
#[repr(C)]
pub struct verbs_xrcd {
    pub xrcd: ibv_xrcd,
    pub comp_mask: u32,
    pub handle: u32,
}

/// `verbs_xrcd.comp_mask`: `handle` is set.
pub const VERBS_XRCD_HANDLE: u32 = 1 << 0;
/// `verbs_qp.comp_mask`: the queue pair belongs to an XRC domain.
pub const VERBS_QP_XRCD: u32 = 1 << 0;
/// `verbs_qp.comp_mask`: `ibv_qp_to_qp_ex` may hand out the extended part.
pub const VERBS_QP_EX: u32 = 1 << 1;

/// A queue pair, large enough for every supported release.
///
/// What follows `qp_ex` is, depending on the release, up to two more
/// functions, then `comp_mask: u32` and `xrcd: pointer`. Use
/// [`Layout`](crate::layout::Layout) to reach them.
#[repr(C)]
pub struct verbs_qp {
    pub qp_ex: ibv_qp_ex,
    /// `wr_atomic_write`, `wr_flush`, `comp_mask`, `xrcd` in the newest
    /// layout; earlier ones use less of it.
    pub(crate) tail: [usize; 4],
}

// Sizes and offsets that libibverbs agrees on, taken from pahole on every
// sampled release (see tests/data). Other architectures have other pthread
// types; there only the order of the members matters, which is the same.
#[cfg(target_arch = "x86_64")]
const _: () = {
    assert!(size_of::<ibv_device>() == 664);
    assert!(offset_of!(verbs_device, ops) == 664);
    assert!(offset_of!(verbs_device, refcount) == 672);
    assert!(offset_of!(verbs_device, entry) == 680);
    assert!(offset_of!(verbs_device, sysfs) == 696);
    assert!(offset_of!(verbs_device, core_support) == 704);
    assert!(size_of::<verbs_device>() == 712);
    assert!(offset_of!(verbs_sysfs_dev, sysfs_name) == 36);
    assert!(offset_of!(verbs_sysfs_dev, sysfs_cdev) == 104);
    assert!(offset_of!(verbs_sysfs_dev, modalias) == 432);
    assert!(offset_of!(verbs_sysfs_dev, driver_id) == 952);
    assert!(offset_of!(verbs_sysfs_dev, ibdev_idx) == 960);
    assert!(size_of::<verbs_match_ent>() == 24);
    assert!(offset_of!(verbs_match_ent, kind) == 20);
    assert!(size_of::<verbs_device_ops>() == 72);
    assert!(offset_of!(verbs_device_ops, match_table) == 16);
    assert!(offset_of!(verbs_device_ops, alloc_context) == 40);
    assert!(offset_of!(verbs_device_ops, uninit_device) == 64);
    assert!(size_of::<ibv_context>() == 328);
    assert!(offset_of!(ibv_context, cmd_fd) == 264);
    assert!(size_of::<ibv_mr>() == 48);
    assert!(size_of::<verbs_mr>() == 56);
    assert!(offset_of!(verbs_mr, access) == 52);
    assert!(size_of::<ibv_cq_ex>() == 288);
    assert!(offset_of!(ibv_cq_ex, comp_mask) == offset_of!(ibv_cq, async_events_completed) + 4);
    assert!(offset_of!(ibv_cq_ex, start_poll) == 144);
    assert!(size_of::<verbs_cq>() == 288);
    assert!(size_of::<ibv_srq>() == 128);
    assert!(size_of::<verbs_srq>() == 160);
    assert!(offset_of!(verbs_srq, srq_num) == 152);
    assert!(offset_of!(verbs_xrcd, handle) == 12);
    assert!(offset_of!(ibv_qp_open_attr, xrcd) == 8);
    assert!(offset_of!(ibv_qp_open_attr, qp_type) == 24);
    assert!(size_of::<ibv_qp>() == 160);
    assert!(offset_of!(ibv_qp_ex, comp_mask) == 160);
    assert!(offset_of!(ibv_qp_ex, wr_atomic_cmp_swp) == 184);
    assert!(offset_of!(ibv_qp_ex, wr_abort) == 336);
    assert!(size_of::<ibv_qp_ex>() == 344);
    assert!(size_of::<verbs_qp>() == 376);
    assert!(size_of::<ibv_wc>() == 48);
    assert!(offset_of!(ibv_wc, wc_flags) == 36);
    assert!(offset_of!(ibv_wc, dlid_path_bits) == 45);
    assert!(size_of::<ibv_send_wr>() == 128);
    assert!(offset_of!(ibv_send_wr, wr) == 40);
    assert!(offset_of!(ibv_send_wr, xrc_remote_srqn) == 72);
    assert!(offset_of!(ibv_send_wr, extra) == 80);
};
