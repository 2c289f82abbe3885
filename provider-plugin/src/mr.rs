//! Memory regions.

use core::ffi::{c_int, c_void};

use uverbs::dmah::{DmahMrInit, Source};
use uverbs::driver::DriverInput;
use uverbs::mr::MrKeys;
use uverbs::{AccessFlags, DmMrInit, DmabufMrInit, MrHandle, MrInit, Rereg, Sge, Udata};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed};
use crate::dmah;
use crate::entry;
use crate::errno::Errno;
use crate::pd::{PdRef, pd_of};

/// A memory region.
#[repr(C)]
struct Mr {
    /// The part that libibverbs and applications see.
    verbs: verbs_mr,
    pd: PdRef,
}

const _: () = assert!(core::mem::offset_of!(Mr, verbs) == 0);

/// An empty region of a domain, allocated before the command, so that nothing can
/// fail after it.
///
/// # Safety
/// `pd` is a live domain of ours.
unsafe fn new_mr(pd: *mut ibv_pd, mr_type: u32, access: c_int) -> Result<Box<Mr>, Errno> {
    // SAFETY: as the caller says.
    let (context, pd_ref) = unsafe { ((*pd).context, PdRef::new(pd)) };
    let ibv_mr = ibv_mr {
        context,
        pd,
        addr: core::ptr::null_mut(),
        length: 0,
        handle: 0,
        lkey: 0,
        rkey: 0,
    };
    try_box(Mr {
        verbs: verbs_mr {
            ibv_mr,
            mr_type,
            access,
        },
        pd: pd_ref,
    })
    .map_err(|(_, e)| e)
}

/// Fills the public part from the kernel's answer.
fn finish(mut mr: Box<Mr>, (handle, keys): (MrHandle, MrKeys)) -> *mut ibv_mr {
    let public = &mut mr.verbs.ibv_mr;
    public.handle = handle.0;
    public.lkey = keys.lkey;
    public.rkey = keys.rkey;
    Box::into_raw(mr).cast()
}

/// Returns whether a window with this access may be bound to the region
/// (IBA 10.6.7.2, C10-73 and C10-74), for devices that do not check
/// it. The rights of an imported region are unknown.
#[cold]
pub fn may_be_bound(mr: &verbs_mr, access: u32) -> bool {
    let writes = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    let needed = match writes {
        true => IBV_ACCESS_MW_BIND | IBV_ACCESS_LOCAL_WRITE,
        false => IBV_ACCESS_MW_BIND,
    };
    mr.mr_type == IBV_MR_TYPE_IMPORTED_MR || mr.access as u32 & needed == needed
}

/// On-demand access to all of memory: length SIZE_MAX at address 0.
fn kernel_length(addr: *mut c_void, length: usize, access: c_int) -> Result<u64, Errno> {
    if access as u32 & IBV_ACCESS_ON_DEMAND != 0 && length == usize::MAX && !addr.is_null() {
        return Err(Errno::INVAL);
    }
    Ok(length as u64)
}

/// Converts the kernel's error for an unknown method to EOPNOTSUPP, as the manual
/// pages promise.
pub fn unsupported(error: uverbs::Error) -> Errno {
    match Errno::from(error) {
        Errno(libc::EPROTONOSUPPORT | libc::ENOTTY | libc::ENOSYS) => Errno::OPNOTSUPP,
        errno => errno,
    }
}

/// `ibv_reg_mr`, `ibv_reg_mr_iova`: `iova` is the address by which peers and
/// work requests name the start of the region.
pub unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::pointer(|| unsafe { register(pd, addr, length, iova, access) })
}

/// # Safety
/// `pd` is a live domain of ours; the application keeps the memory mapped
/// while the region lives.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> Result<*mut ibv_mr, Errno> {
    let init = MrInit {
        // SAFETY: live, as the caller says.
        pd: unsafe { pd_of(pd) }.handle(),
        addr: addr as u64,
        length: kernel_length(addr, length, access)?,
        iova,
        access: AccessFlags::from_bits_retain(access as u32),
    };
    // SAFETY: as the caller says.
    let mr = unsafe { new_mr(pd, IBV_MR_TYPE_MR, access)? };
    // SAFETY: the domain's context is open.
    let ctx = unsafe { CtxRef::of(mr.verbs.ibv_mr.context) };
    // SAFETY: the application keeps the memory mapped, by verbs' contract.
    let kernel = unsafe { uverbs::mr::register(&ctx, &init, Udata::none())? };
    Ok(finish(mr, kernel))
}

/// `ibv_reg_dmabuf_mr`.
pub unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::pointer(|| unsafe { register_dmabuf(pd, offset, length, iova, fd, access, None) })
}

/// `driver_access` are driver-specific access flags.
///
/// # Safety
/// `pd` is a live domain of ours.
pub unsafe fn register_dmabuf(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
    driver_access: Option<DriverInput>,
) -> Result<*mut ibv_mr, Errno> {
    let init = DmabufMrInit {
        // SAFETY: live, as the caller says.
        pd: unsafe { pd_of(pd) }.handle(),
        offset,
        length: length as u64,
        iova,
        // SAFETY: the application's, open during the call.
        fd: unsafe { borrowed(fd) },
        access: AccessFlags::from_bits_retain(access as u32),
        driver_access,
    };
    // SAFETY: as the caller says.
    let mut mr = unsafe { new_mr(pd, IBV_MR_TYPE_DMABUF_MR, access)? };
    mr.verbs.ibv_mr.addr = offset as usize as *mut c_void;
    mr.verbs.ibv_mr.length = length;
    // SAFETY: the domain's context is open.
    let ctx = unsafe { CtxRef::of(mr.verbs.ibv_mr.context) };
    let kernel = uverbs::mr::register_dmabuf(&ctx, &init, Udata::none()).map_err(unsupported)?;
    Ok(finish(mr, kernel))
}

/// Registers a part of device memory, whose addresses count from 0.
///
/// # Safety
/// `pd` is a live domain of ours.
pub unsafe fn register_dm(pd: *mut ibv_pd, init: &DmMrInit) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: as the caller says.
    let mut mr = unsafe { new_mr(pd, IBV_MR_TYPE_MR, init.access.bits() as i32)? };
    mr.verbs.ibv_mr.length = init.length as usize;
    // SAFETY: the domain's context is open.
    let ctx = unsafe { CtxRef::of(mr.verbs.ibv_mr.context) };
    let kernel = uverbs::mr::register_dm(&ctx, init).map_err(unsupported)?;
    Ok(finish(mr, kernel))
}

/// `ibv_alloc_null_mr` of a device with this null key: writes to it are
/// discarded, and reads return zeros.
///
/// # Safety
/// `pd` is a live domain of ours.
pub unsafe fn null_region(pd: *mut ibv_pd, lkey: u32) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: as the caller says.
    let mut mr = unsafe { new_mr(pd, IBV_MR_TYPE_NULL_MR, 0)? };
    mr.verbs.ibv_mr.length = usize::MAX;
    mr.verbs.ibv_mr.lkey = lkey;
    Ok(Box::into_raw(mr).cast())
}

/// `ibv_reg_mr_ex`: the same two kinds of region by one call, also with a DMA handle.
/// libibverbs has resolved `IBV_REG_MR_MASK_BUF` before.
pub unsafe extern "C" fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    const KNOWN: u64 = IBV_REG_MR_MASK_IOVA
        | IBV_REG_MR_MASK_ADDR
        | IBV_REG_MR_MASK_FD
        | IBV_REG_MR_MASK_FD_OFFSET
        | IBV_REG_MR_MASK_DMAH;
    // SAFETY: libibverbs passes a live domain of ours and full attributes.
    entry::pointer(|| unsafe {
        let attr = &*attr;
        if attr.comp_mask & !KNOWN != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let has = |mask: u64| attr.comp_mask & mask != 0;
        let fd_based = has(IBV_REG_MR_MASK_FD);
        if has(IBV_REG_MR_MASK_FD_OFFSET) != fd_based || has(IBV_REG_MR_MASK_ADDR) == fd_based {
            return Err(Errno::INVAL);
        }
        if has(IBV_REG_MR_MASK_DMAH) {
            return register_with_handle(pd, attr);
        }
        match (fd_based, has(IBV_REG_MR_MASK_IOVA)) {
            (true, true) => register_dmabuf(
                pd,
                attr.fd_offset,
                attr.length,
                attr.iova,
                attr.fd,
                attr.access,
                None,
            ),
            (true, false) => Err(Errno::INVAL),
            (false, true) => register(pd, attr.addr, attr.length, attr.iova, attr.access),
            (false, false) => register(pd, attr.addr, attr.length, attr.addr as u64, attr.access),
        }
    })
}

/// Registers memory of either kind with a DMA handle.
///
/// # Safety
/// As [`register`]; the attributes have been checked, and name a live handle.
unsafe fn register_with_handle(
    pd: *mut ibv_pd,
    attr: &ibv_mr_init_attr,
) -> Result<*mut ibv_mr, Errno> {
    let has = |mask: u64| attr.comp_mask & mask != 0;
    let iova = match (has(IBV_REG_MR_MASK_FD), has(IBV_REG_MR_MASK_IOVA)) {
        (_, true) => attr.iova,
        (false, false) => attr.addr as u64,
        (true, false) => return Err(Errno::INVAL),
    };
    // SAFETY: as the caller says; the descriptor is open during the call.
    let (source, mr, dmah) = unsafe {
        let dmah = dmah::handle(attr.dmah)?;
        if has(IBV_REG_MR_MASK_FD) {
            let fd = borrowed(attr.fd).ok_or(Errno(libc::EBADF))?;
            let mr = new_mr(pd, IBV_MR_TYPE_DMABUF_MR, attr.access)?;
            (Source::Dmabuf(fd, attr.fd_offset), mr, dmah)
        } else {
            let mr = new_mr(pd, IBV_MR_TYPE_MR, attr.access)?;
            (Source::Memory(attr.addr as u64), mr, dmah)
        }
    };
    let init = DmahMrInit {
        // SAFETY: live, as the caller says.
        pd: unsafe { pd_of(pd) }.handle(),
        dmah,
        source,
        length: match source {
            Source::Memory(_) => kernel_length(attr.addr, attr.length, attr.access)?,
            Source::Dmabuf(..) => attr.length as u64,
        },
        iova,
        access: AccessFlags::from_bits_retain(attr.access as u32),
    };
    // SAFETY: the domain's context is open.
    let ctx = unsafe { CtxRef::of(mr.verbs.ibv_mr.context) };
    // SAFETY: the application keeps the memory mapped, by verbs' contract.
    let kernel = unsafe { uverbs::dmah::register(&ctx, &init) }.map_err(unsupported)?;
    Ok(finish(mr, kernel))
}

/// `ibv_rereg_mr`. libibverbs has checked the flags, and changes address,
/// length and domain of the public part afterwards.
pub unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: libibverbs passes a live region of ours, and a live domain if
    // the flags say that it changes.
    entry::int(|| unsafe {
        let mr = &mut *mr.cast::<Mr>();
        let has = |flag: u32| flags as u32 & flag != 0;
        let change_pd = has(IBV_REREG_MR_CHANGE_PD);
        let new_pd = match change_pd {
            true if pd.is_null() => return Err(Errno::INVAL),
            true => Some(pd_of(pd).handle()),
            false => None,
        };
        let rereg = Rereg {
            translation: has(IBV_REREG_MR_CHANGE_TRANSLATION).then_some((
                addr as u64,
                length as u64,
                addr as u64,
            )),
            pd: new_pd,
            access: has(IBV_REREG_MR_CHANGE_ACCESS)
                .then_some(AccessFlags::from_bits_retain(access as u32)),
        };
        let ctx = CtxRef::of(mr.verbs.ibv_mr.context);
        let public = &mut mr.verbs.ibv_mr;
        let keys = uverbs::mr::rereg(&ctx, MrHandle(public.handle), &rereg, Udata::none())?;
        public.lkey = keys.lkey;
        public.rkey = keys.rkey;
        if change_pd {
            public.context = (*pd).context;
            mr.pd = PdRef::new(pd);
        }
        if has(IBV_REREG_MR_CHANGE_ACCESS) {
            mr.verbs.access = access;
        }
        Ok(())
    })
}

/// `ibv_dereg_mr`. The region is unchanged if the kernel refuses, as it does
/// (EINVAL or EBUSY) while a memory window is bound to it.
pub unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: libibverbs passes a live region of ours.
    entry::int(|| unsafe {
        // The null region has no kernel object.
        if (*mr).mr_type != IBV_MR_TYPE_NULL_MR {
            let public = &(*mr).ibv_mr;
            let ctx = CtxRef::of(public.context);
            let result = uverbs::mr::destroy(&ctx, MrHandle(public.handle));
            destroyed(result.map_err(Into::into))?;
        }
        drop(Box::from_raw(mr.cast::<Mr>()));
        Ok(())
    })
}

/// `ibv_import_mr`: another handle of a region of the same file.
pub unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::pointer(|| unsafe {
        let mut mr = new_mr(pd, IBV_MR_TYPE_IMPORTED_MR, 0)?;
        let ctx = CtxRef::of(mr.verbs.ibv_mr.context);
        let attr = uverbs::mr::query(&ctx, MrHandle(handle)).map_err(unsupported)?;
        let public = &mut mr.verbs.ibv_mr;
        public.handle = handle;
        public.lkey = attr.lkey;
        public.rkey = attr.rkey;
        public.length = usize::try_from(attr.length).unwrap_or(usize::MAX);
        Ok(Box::into_raw(mr).cast())
    })
}

/// `ibv_unimport_mr`: frees the handle; the kernel's object stays.
pub unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: libibverbs passes an object of import_mr, once.
    entry::unit(|| drop(unsafe { Box::from_raw(mr.cast::<Mr>()) }));
}

/// Elements that fit the 16-bit length of an attribute of a command.
const MAX_ADVICE: u32 = (u16::MAX as usize / size_of::<Sge>()) as u32;

/// `ibv_advise_mr`.
pub unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: u32,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // list of `num_sge` elements.
    entry::int(|| unsafe {
        let domain = pd_of(pd);
        let ctx = CtxRef::of(domain.public.context);
        let list: &[Sge] = match num_sge {
            0 => &[],
            _ if sg_list.is_null() || num_sge > MAX_ADVICE => return Err(Errno::INVAL),
            // The kernel's element has the layout of the public one, asserted
            // below.
            n => core::slice::from_raw_parts(sg_list.cast(), n as usize),
        };
        ctx.advise_mr(
            domain.handle(),
            uverbs::Advice(advice),
            uverbs::AdviseFlags::from_bits_retain(flags),
            list,
        )
        .map_err(unsupported)
    })
}

const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(align_of::<Sge>() <= align_of::<ibv_sge>());
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_needs_the_right_to_bind_and_to_write() {
        const BIND: u32 = IBV_ACCESS_MW_BIND;
        const WRITE: u32 = IBV_ACCESS_LOCAL_WRITE;
        for (access, window, good) in [
            (
                BIND | WRITE,
                IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
                true,
            ),
            (BIND, IBV_ACCESS_REMOTE_READ, true),
            (BIND, IBV_ACCESS_REMOTE_WRITE, false),
            (BIND, IBV_ACCESS_REMOTE_ATOMIC, false),
            (
                WRITE | IBV_ACCESS_REMOTE_WRITE,
                IBV_ACCESS_REMOTE_WRITE,
                false,
            ),
            (0, IBV_ACCESS_REMOTE_READ, false),
        ] {
            // SAFETY: a region is numbers and pointers that may be null.
            let mut mr: verbs_mr = unsafe { core::mem::zeroed() };
            mr.access = access as i32;
            assert_eq!(may_be_bound(&mr, window), good, "{access:#x} {window:#x}");
            mr.mr_type = IBV_MR_TYPE_IMPORTED_MR;
            assert!(may_be_bound(&mr, window));
        }
    }
}
