//! Sharing of DevX objects and pages for virtio doorbells between contexts of one file, such
//! as those of processes that share it (`ibv_import_device`). An export is a description in
//! memory of the program, in libmlx5's layout, from which an import creates another handle.

use core::ffi::{c_int, c_void};
use core::ptr;

use mlx5::ioctl::devx::{DevxHandle, DevxObject, Umem, UmemHandle, Var, VarHandle};

use super::abi::*;
use super::devx::{DevxUmem, Object, VarPage, boxed};
use super::refused::{ringverbs_refused_nothing, ringverbs_refused_object};
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::context::CtxRef;
use crate::entry;

/// The beginning of `struct mlx5dv_devx_obj_attrs`. The other members describe the object for
/// libmlx5's direct rules; they are 0 for objects of the plugin.
#[repr(C)]
#[derive(Default)]
struct ObjectExport {
    handle: u32,
    for_rules: [u32; 7],
}

/// `struct mlx5dv_devx_umem_attrs`.
#[repr(C)]
#[derive(Default)]
struct MemoryExport {
    handle: u32,
    umem_id: u32,
}

/// `struct mlx5dv_var_attrs`.
#[repr(C)]
#[derive(Default)]
struct VarExport {
    handle: u32,
    page_id: u32,
    length: u32,
    mmap_off: libc::off_t,
}

const _: () = {
    assert!(size_of::<ObjectExport>() == 32);
    assert!(size_of::<MemoryExport>() == 8);
    assert!(size_of::<VarExport>() == 24);
};

/// `mlx5dv_get_export_sizes`, of any provider's context: `length` are the bytes of the
/// program's structure.
///
/// # Safety
/// Room for so many bytes.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn _mlx5dv_get_export_sizes(sizes: *mut mlx5dv_export_sizes, length: usize) {
    let known = mlx5dv_export_sizes {
        var_attrs_size: size_of::<VarExport>() as u32,
        devx_umem_attrs_size: size_of::<MemoryExport>() as u32,
        devx_obj_attrs_size: size_of::<ObjectExport>() as u32,
    };
    let bytes = length.min(size_of::<mlx5dv_export_sizes>());
    // SAFETY: as the caller says.
    unsafe {
        sizes.cast::<u8>().write_bytes(0, length);
        ptr::copy_nonoverlapping((&raw const known).cast::<u8>(), sizes.cast(), bytes);
    }
}

exported! {
    /// `mlx5dv_devx_obj_export`.
    fn mlx5dv_devx_obj_export(object: *mut Object, data: *mut c_void) -> c_int
    where is_ours((*object).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live object, and room for its description.
        entry::int(|| unsafe {
            data.cast::<ObjectExport>().write_unaligned(ObjectExport {
                handle: (*object).object.handle().0,
                ..ObjectExport::default()
            });
            Ok(())
        })
    }

    /// `mlx5dv_devx_obj_import`.
    fn mlx5dv_devx_obj_import(context: *mut ibv_context, data: *mut c_void) -> *mut Object
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and what an export has written.
        entry::pointer(|| unsafe {
            let handle = DevxHandle(data.cast::<ObjectExport>().read_unaligned().handle);
            let object = DevxObject::from_handle(&CtxRef::of(context), handle);
            boxed(Object { context, object })
        })
    }

    /// `mlx5dv_devx_obj_unimport`: the kernel's object stays.
    fn mlx5dv_devx_obj_unimport(object: *mut Object) -> ()
    where is_ours((*object).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_devx_obj_import` made, once.
        entry::unit(|| { unsafe { Box::from_raw(object) }.object.into_handle(); })
    }

    /// `mlx5dv_devx_umem_export`.
    fn mlx5dv_devx_umem_export(memory: *mut DevxUmem, data: *mut c_void) -> c_int
    where is_ours((*memory).context), else libc::EOPNOTSUPP => {
        // SAFETY: live memory, and room for its description.
        entry::int(|| unsafe {
            data.cast::<MemoryExport>().write_unaligned(MemoryExport {
                handle: (*memory).object.handle().0,
                umem_id: (*memory).public.umem_id,
            });
            Ok(())
        })
    }

    /// `mlx5dv_devx_umem_import`.
    fn mlx5dv_devx_umem_import(context: *mut ibv_context, data: *mut c_void) -> *mut DevxUmem
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and what an export has written.
        entry::pointer(|| unsafe {
            let from = data.cast::<MemoryExport>().read_unaligned();
            boxed(DevxUmem {
                public: mlx5dv_devx_umem { umem_id: from.umem_id },
                context,
                object: Umem::from_handle(&CtxRef::of(context), UmemHandle(from.handle)),
            })
        })
    }

    /// `mlx5dv_devx_umem_unimport`: the kernel's object stays.
    fn mlx5dv_devx_umem_unimport(memory: *mut DevxUmem) -> ()
    where is_ours((*memory).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_devx_umem_import` made, once.
        entry::unit(|| { unsafe { Box::from_raw(memory) }.object.into_handle(); })
    }

    /// `mlx5dv_var_export`.
    fn mlx5dv_var_export(var: *mut VarPage, data: *mut c_void) -> c_int
    where is_ours((*var).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live page, and room for its description.
        entry::int(|| unsafe {
            let public = &(*var).public;
            data.cast::<VarExport>().write_unaligned(VarExport {
                handle: (*var).object.handle().0,
                page_id: public.page_id,
                length: public.length,
                mmap_off: public.mmap_off,
            });
            Ok(())
        })
    }

    /// `mlx5dv_var_import`.
    fn mlx5dv_var_import(context: *mut ibv_context, data: *mut c_void) -> *mut VarPage
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and what an export has written.
        entry::pointer(|| unsafe {
            let from = data.cast::<VarExport>().read_unaligned();
            boxed(VarPage {
                public: mlx5dv_var {
                    page_id: from.page_id,
                    length: from.length,
                    mmap_off: from.mmap_off,
                    comp_mask: 0,
                },
                context,
                object: Var::from_handle(&CtxRef::of(context), VarHandle(from.handle)),
            })
        })
    }

    /// `mlx5dv_var_unimport`: the kernel's object stays.
    fn mlx5dv_var_unimport(var: *mut VarPage) -> ()
    where is_ours((*var).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_var_import` made, once.
        entry::unit(|| { unsafe { Box::from_raw(var) }.object.into_handle(); })
    }
}
