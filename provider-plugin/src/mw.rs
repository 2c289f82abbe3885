//! Memory windows. Binding is a work request: see the post operations.

use core::ffi::c_int;

use uverbs::{MwHandle, MwType, Udata};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
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

/// `ibv_dealloc_mw`. The window lives on if the kernel refuses.
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
