//! Device memory: allocation, copies, registration; and the null region.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use mlx5::{CopyError, DeviceBytes, DeviceMemory, ioctl};
use uverbs::{AccessFlags, DmHandle, DmMrInit};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::mr;
use crate::pd::pd_of;

/// Device memory.
#[repr(C)]
struct Dm {
    /// The structure of applications.
    public: ibv_dm,
    memory: DmKind,
    /// Its mappings for operations.
    operations: Mutex<Vec<DeviceBytes>>,
}

const _: () = assert!(core::mem::offset_of!(Dm, public) == 0);

enum DmKind {
    /// Mapped memory, which the processor accesses too.
    Mapped(DeviceBytes),
    /// Memory for flow steering, with its address in the device.
    Steering { address: u64, length: u64 },
}

impl Dm {
    /// EINVAL for memory of flow steering.
    fn bytes(&self) -> Result<&DeviceBytes, Errno> {
        match &self.memory {
            DmKind::Mapped(bytes) => Ok(bytes),
            DmKind::Steering { .. } => Err(Errno::INVAL),
        }
    }
}

/// The provider's view of device memory.
///
/// # Safety
/// `dm` is live, and of a context of ours.
unsafe fn dm_of<'a>(dm: *mut ibv_dm) -> &'a Dm {
    // SAFETY: every ibv_dm that this provider hands out begins a Dm.
    unsafe { &*dm.cast::<Dm>() }
}

/// The location of device memory.
pub struct DmDescription {
    /// The first mapped byte, if it is mapped.
    pub start: Option<NonNull<u8>>,
    /// Length in bytes.
    pub length: u64,
    /// The address in the device, of memory for flow steering; otherwise 0.
    pub address: u64,
}

/// Describes device memory.
///
/// # Safety
/// As of [`dm_of`].
pub unsafe fn describe(dm: *mut ibv_dm) -> DmDescription {
    // SAFETY: as the caller says.
    match &unsafe { dm_of(dm) }.memory {
        DmKind::Mapped(bytes) => {
            let (start, length) = bytes.direct();
            DmDescription {
                start: Some(start),
                length: length as u64,
                address: 0,
            }
        }
        DmKind::Steering { address, length } => DmDescription {
            start: None,
            length: *length,
            address: *address,
        },
    }
}

/// Maps device memory for an operation, until it is freed.
///
/// # Safety
/// As of [`dm_of`].
pub unsafe fn map_operation(ibdm: *mut ibv_dm, operation: u8) -> Result<NonNull<u8>, Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let (dm, ctx) = (dm_of(ibdm), CtxRef::of((*ibdm).context));
        let handle = DmHandle((*ibdm).handle);
        let bytes = dm.bytes()?.for_operation(&ctx, handle, operation)?;
        let at = bytes.direct().0;
        let mut all = dm.operations.lock().unwrap_or_else(PoisonError::into_inner);
        all.try_reserve(1).map_err(|_| Errno::NOMEM)?;
        all.push(bytes);
        Ok(at)
    }
}

/// Creates the C object of device memory with a kernel handle.
fn new_dm(
    context: *mut ibv_context,
    handle: DmHandle,
    memory: DmKind,
) -> Result<*mut ibv_dm, Errno> {
    let mapped = matches!(memory, DmKind::Mapped(_));
    let dm = Dm {
        public: ibv_dm {
            context,
            memcpy_to_dm: mapped.then_some(memcpy_to_dm as _),
            memcpy_from_dm: mapped.then_some(memcpy_from_dm as _),
            comp_mask: IBV_DM_MASK_HANDLE,
            handle: handle.0,
        },
        memory,
        operations: Mutex::default(),
    };
    Ok(Box::into_raw(try_box(dm).map_err(|(_, errno)| errno)?).cast())
}

/// `ibv_alloc_dm`. EINVAL for more than the device has in all, and for
/// attributes that are not defined yet.
pub unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: libibverbs passes an open context of ours, the application its
    // attributes.
    entry::pointer(|| unsafe {
        let attr = &*attr;
        if attr.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        let ctx = CtxRef::of(context);
        let new_dm_object = DeviceMemory::allocate(&ctx, attr.length as u64, attr.log_align_req)?;
        let dm = new_dm(
            context,
            new_dm_object.object.handle(),
            DmKind::Mapped(new_dm_object.bytes),
        )?;
        new_dm_object.object.into_handle();
        Ok(dm)
    })
}

/// Allocates memory of a kind for flow steering.
///
/// # Safety
/// An open context of ours, and the application's attributes.
pub unsafe fn alloc_steering(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
    kind: u32,
) -> *mut ibv_dm {
    // SAFETY: as the caller says.
    entry::pointer(|| unsafe {
        let attr = &*attr;
        if attr.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        let (ctx, length) = (CtxRef::of(context), attr.length as u64);
        let new_dm_object = ioctl::dm::alloc_steering(&ctx, kind, length, attr.log_align_req)?;
        let (object, address) = new_dm_object;
        let dm = new_dm(
            context,
            object.handle(),
            DmKind::Steering { address, length },
        )?;
        object.into_handle();
        Ok(dm)
    })
}

/// `ibv_free_dm`. EBUSY, and the memory is unchanged, while a region of it is
/// registered.
pub unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: libibverbs passes live memory of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*dm).context);
        let result = uverbs::dm::destroy(&ctx, DmHandle((*dm).handle));
        destroyed(result.map_err(Into::into))?;
        drop(Box::from_raw(dm.cast::<Dm>()));
        Ok(())
    })
}

/// `ibv_import_dm`: another handle of device memory of the same file.
pub unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: libibverbs passes an open context of ours.
    entry::pointer(|| unsafe {
        let bytes = DeviceBytes::of(&CtxRef::of(context), DmHandle(handle))?;
        new_dm(context, DmHandle(handle), DmKind::Mapped(bytes))
    })
}

/// `ibv_unimport_dm`: frees the handle; the kernel's object stays.
pub unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: libibverbs passes an object of import_dm, once.
    entry::unit(|| drop(unsafe { Box::from_raw(dm.cast::<Dm>()) }));
}

/// `ibv_dm_export_dmabuf_fd`: exports the memory's pages as a DMA buffer, whose
/// descriptor the application closes; -1 and errno. EOPNOTSUPP or EPROTONOSUPPORT
/// if the driver or kernel cannot.
pub unsafe extern "C" fn dm_export_dmabuf_fd(dm: *mut ibv_dm) -> c_int {
    // SAFETY: libibverbs passes live memory of ours.
    entry::descriptor(|| unsafe {
        let ctx = CtxRef::of((*dm).context);
        Ok(dm_of(dm).bytes()?.export(&ctx)?.into_fd())
    })
}

/// Copies, if the memory is mapped; errno is not set, as with the stock provider.
///
/// # Safety
/// As of [`dm_of`].
unsafe fn copy(dm: *mut ibv_dm, copy: impl FnOnce(&DeviceBytes) -> Result<(), CopyError>) -> c_int {
    // SAFETY: as the caller says.
    match unsafe { dm_of(dm) }.bytes() {
        Ok(bytes) => copy(bytes).map_or_else(CopyError::errno, |()| 0),
        Err(errno) => errno.0,
    }
}

/// `ibv_memcpy_to_dm`: EFAULT beyond the memory, EINVAL for a range that is not whole 4-byte
/// words.
unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    host: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the application passes live memory of ours, and that many bytes
    // of its own.
    unsafe { copy(dm, |bytes| bytes.write(offset, host.cast(), length)) }
}

/// `ibv_memcpy_from_dm`: as [`memcpy_to_dm`].
unsafe extern "C" fn memcpy_from_dm(
    host: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: as in `memcpy_to_dm`.
    unsafe { copy(dm, |bytes| bytes.read(offset, host.cast(), length)) }
}

/// `ibv_reg_dm_mr`: EINVAL without `IBV_ACCESS_ZERO_BASED`, and for access that
/// device memory does not allow.
pub unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: u32,
) -> *mut ibv_mr {
    const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED
        | IBV_ACCESS_OPTIONAL_RANGE;
    // SAFETY: libibverbs passes a live domain and live memory of ours.
    entry::pointer(|| unsafe {
        if access & !KNOWN != 0 || access & IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVAL);
        }
        let init = DmMrInit {
            pd: pd_of(pd).handle(),
            dm: DmHandle((*dm).handle),
            offset,
            length: length as u64,
            access: AccessFlags::from_bits_retain(access),
        };
        mr::register_dm(pd, &init)
    })
}

/// `ibv_alloc_null_mr`. EOPNOTSUPP if the device has no null key.
pub unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::pointer(|| unsafe {
        let device = CtxRef::of((*pd).context).mlx5()?;
        mr::null_region(pd, device.null_key().ok_or(Errno::OPNOTSUPP)?)
    })
}
