//! Memory windows. Binding is a work request.

use core::ffi::c_int;

use uverbs::{MwHandle, MwType, Udata};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::{PdRef, pd_of};

/// A memory window.
#[repr(C)]
struct Mw {
    public: ibv_mw,
    _pd: PdRef,
}

const _: () = assert!(core::mem::offset_of!(Mw, public) == 0);

/// `ibv_alloc_mw`.
pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: u32) -> *mut ibv_mw {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::pointer(|| unsafe {
        let context = (*pd).context;
        let public = ibv_mw {
            context,
            pd,
            rkey: 0,
            handle: 0,
            type_: mw_type,
        };
        let mut mw = try_box(Mw {
            public,
            _pd: PdRef::new(pd),
        })
        .map_err(|(_, e)| e)?;
        let ctx = CtxRef::of(context);
        // The kernel's field has 8 bits; a larger value must not turn into
        // another type.
        let kernel_type = MwType(u8::try_from(mw_type).unwrap_or(u8::MAX));
        let (handle, rkey) =
            uverbs::mw::alloc(&ctx, pd_of(pd).handle(), kernel_type, Udata::none())?;
        mw.public.rkey = rkey;
        mw.public.handle = handle.0;
        Ok(Box::into_raw(mw).cast())
    })
}

/// `ibv_dealloc_mw`. The window is unchanged if the kernel refuses.
pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: libibverbs passes a live window of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*mw).context);
        let result = uverbs::mw::destroy(&ctx, MwHandle((*mw).handle));
        destroyed(result.map_err(Into::into))?;
        drop(Box::from_raw(mw.cast::<Mw>()));
        Ok(())
    })
}

/// `ibv_bind_mw`: binds a type 1 window, giving it its next remote key.
/// `post_send` is the device's.
///
/// # Safety
/// The queue pair and the window are live, and of that device.
#[inline]
pub unsafe fn bind(
    post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: as the caller says.
    entry::int(|| unsafe {
        let info = (*bind).bind_info;
        if info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0 {
            return Err(Errno::INVAL);
        }
        // ibv_inc_rkey: only the low 8 bits are the owner's to change.
        let rkey = (*mw).rkey & !0xff | (*mw).rkey.wrapping_add(1) & 0xff;
        // SAFETY: zeros are valid for a work request.
        let mut wr: ibv_send_wr = core::mem::zeroed();
        wr.wr_id = (*bind).wr_id;
        wr.opcode = IBV_WR_BIND_MW;
        wr.send_flags = (*bind).send_flags;
        wr.extra.bind_mw = ibv_send_wr_bind_mw {
            mw,
            rkey,
            bind_info: info,
        };
        let mut bad = core::ptr::null_mut();
        match post_send(qp, &mut wr, &mut bad) {
            0 => {
                // If the bind fails, the application restores the key.
                (*mw).rkey = rkey;
                Ok(())
            }
            errno => Err(Errno(errno)),
        }
    })
}
