//! DMA handles (rdma-core 59, Linux 6.17): cache hints for the registration of regions.

use core::ffi::c_int;

use uverbs::DmahHandle;
use uverbs::dmah::{self, DmahInit};

use crate::abi::ibv_context;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::mr::unsupported;

/// `struct ibv_dmah_init_attr`.
#[repr(C)]
pub struct ibv_dmah_init_attr {
    pub comp_mask: u32,
    pub cpu_id: u32,
    pub ph: u8,
    pub tph_mem_type: u8,
}

/// `IBV_DMAH_INIT_ATTR_MASK_...`: bits of [`ibv_dmah_init_attr::comp_mask`].
mod mask {
    pub const CPU_ID: u32 = 1 << 0;
    pub const PH: u32 = 1 << 1;
    pub const TPH_MEM_TYPE: u32 = 1 << 2;
}

/// `struct ibv_dmah`, and what follows it in libibverbs.
#[repr(C)]
pub struct ibv_dmah {
    context: *mut ibv_context,
    handle: u32,
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(ibv_dmah_init_attr, cpu_id) == 4);
    assert!(offset_of!(ibv_dmah_init_attr, ph) == 8);
    assert!(offset_of!(ibv_dmah_init_attr, tph_mem_type) == 9);
};

/// The kernel's handle.
///
/// # Safety
/// Null, or a live handle of ours.
pub unsafe fn handle(dmah: *mut ibv_dmah) -> Result<DmahHandle, Errno> {
    // SAFETY: as the caller says.
    unsafe { dmah.as_ref() }.map_or(Err(Errno::INVAL), |dmah| Ok(DmahHandle(dmah.handle)))
}

/// `ibv_alloc_dmah`. EINVAL without a processing hint, and for a processor without a type of
/// memory.
pub unsafe extern "C" fn alloc_dmah(
    context: *mut ibv_context,
    attr: *mut ibv_dmah_init_attr,
) -> *mut ibv_dmah {
    const STEERING: u32 = mask::CPU_ID | mask::TPH_MEM_TYPE;
    // SAFETY: libibverbs passes an open context of ours and the application's attributes.
    entry::pointer(|| unsafe {
        let attr = &*attr;
        if attr.comp_mask & !(STEERING | mask::PH) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let steering = match attr.comp_mask & STEERING {
            0 => None,
            STEERING => Some((attr.cpu_id, attr.tph_mem_type)),
            _ => return Err(Errno::INVAL),
        };
        if attr.comp_mask & mask::PH == 0 {
            return Err(Errno::INVAL);
        }
        let mut dmah = try_box(ibv_dmah { context, handle: 0 }).map_err(|(_, errno)| errno)?;
        let init = DmahInit {
            steering,
            hint: attr.ph,
        };
        dmah.handle = dmah::alloc(&CtxRef::of(context), &init)
            .map_err(unsupported)?
            .0;
        Ok(Box::into_raw(dmah))
    })
}

/// `ibv_dealloc_dmah`. EBUSY, and it stays, while a region uses it.
pub unsafe extern "C" fn dealloc_dmah(dmah: *mut ibv_dmah) -> c_int {
    // SAFETY: libibverbs passes a live handle of ours.
    entry::int(|| unsafe {
        let freed = dmah::free(&CtxRef::of((*dmah).context), handle(dmah)?);
        destroyed(freed.map_err(Into::into))?;
        drop(Box::from_raw(dmah));
        Ok(())
    })
}
