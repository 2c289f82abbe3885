//! Memory that verbs cannot describe: device memory by type, DMA buffers by another path.

use core::ffi::{c_char, c_int};
use core::ops::RangeInclusive;
use core::slice;

use mlx5::ioctl::{data_direct_access, data_direct_path};

use super::abi::*;
use super::refused::ringverbs_refused_object;
use super::{exported, is_ours};
use crate::abi::*;
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;
use crate::mlx5::dm;
use crate::mr::register_dmabuf;

exported! {
    /// `mlx5dv_alloc_dm`, also of memory for flow steering, which only the device accesses.
    fn mlx5dv_alloc_dm(
        context: *mut ibv_context,
        attr: *mut ibv_alloc_dm_attr,
        mlx5_attr: *mut mlx5dv_alloc_dm_attr
    ) -> *mut ibv_dm
    where is_ours(context), else ringverbs_refused_object().cast() => {
        const MEMIC: u32 = 0;
        /// For rules, changes of headers and their patterns, and headers to add.
        const STEERING: RangeInclusive<u32> = 1..=4;
        // SAFETY: the application's attributes.
        let (kind, comp_mask) = unsafe { ((*mlx5_attr).kind, (*mlx5_attr).comp_mask) };
        match (kind, comp_mask) {
            // SAFETY: the arguments of that function.
            (MEMIC, 0) => unsafe { dm::alloc_dm(context, attr) },
            (kind, 0) if STEERING.contains(&kind) => {
                // SAFETY: as above.
                unsafe { dm::alloc_steering(context, attr, kind) }
            }
            (kind, _) if kind <= *STEERING.end() => entry::pointer(|| Err(Errno::INVAL)),
            _ => ringverbs_refused_object().cast(),
        }
    }

    /// `mlx5dv_reg_dmabuf_mr`, with driver-specific access flags: the direct path to a GPU's
    /// memory, by another PCI function. The kernel's error without support.
    fn mlx5dv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
        mlx5_access: c_int
    ) -> *mut ibv_mr
    where is_ours((*pd).context), else ringverbs_refused_object().cast() => {
        let driver_access = data_direct_access(mlx5_access as u32);
        // SAFETY: a live domain of ours.
        entry::pointer(|| unsafe {
            register_dmabuf(pd, offset, length, iova, fd, access, Some(driver_access))
        })
    }

    /// `mlx5dv_get_data_direct_sysfs_path`: the sysfs path of that PCI function,
    /// NUL-terminated. ENODEV if the device has none, ENOSPC if the buffer is too small.
    fn mlx5dv_get_data_direct_sysfs_path(
        context: *mut ibv_context,
        path: *mut c_char,
        length: usize
    ) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context of ours, and the application's room.
        entry::int(|| unsafe {
            let room = match length {
                0 => &mut [],
                _ => slice::from_raw_parts_mut(path.cast(), length),
            };
            Ok(data_direct_path(&CtxRef::of(context), room)?)
        })
    }
}
