//! Address handles.

use core::ffi::c_int;

use uverbs::{AhAttr, AhHandle, GlobalRoute};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::pd::{PdRef, pd_of};

/// An address handle.
#[repr(C)]
pub struct Ah {
    /// The part that applications see.
    pub public: ibv_ah,
    /// The number by which a datagram's work request names this handle; never
    /// 0.
    pub ah_num: u32,
    _pd: PdRef,
}

const _: () = assert!(core::mem::offset_of!(Ah, public) == 0);

/// The provider's view of an address handle.
///
/// # Safety
/// `ah` is a live address handle of this provider.
pub unsafe fn ah_of<'a>(ah: *mut ibv_ah) -> &'a Ah {
    // SAFETY: every ibv_ah that this provider hands out begins an Ah.
    unsafe { &*ah.cast::<Ah>() }
}

/// Converts the address vector of the C interface.
pub fn address(attr: &ibv_ah_attr) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid: attr.grh.dgid.raw,
            flow_label: attr.grh.flow_label,
            sgid_index: attr.grh.sgid_index,
            hop_limit: attr.grh.hop_limit,
            traffic_class: attr.grh.traffic_class,
        },
        dlid: attr.dlid,
        sl: attr.sl,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        is_global: attr.is_global != 0,
        port_num: attr.port_num,
    }
}

/// `ibv_create_ah`.
pub unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe {
        let context = (*pd).context;
        let public = ibv_ah {
            context,
            pd,
            handle: 0,
        };
        let mut ah = try_box(Ah {
            public,
            ah_num: 0,
            _pd: PdRef::new(pd),
        })
        .map_err(|(_, e)| e)?;
        let user_handle = (&raw const *ah) as u64;
        let ctx = CtxRef::of(context);
        let made =
            rxe::AddressHandle::create(&ctx, pd_of(pd).handle(), &address(&*attr), user_handle)?;
        ah.ah_num = made.ah_num;
        ah.public.handle = made.object.into_handle().0;
        Ok(Box::into_raw(ah).cast())
    })
}

/// `ibv_destroy_ah`. The handle lives on if the kernel refuses.
pub unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: libibverbs passes a live address handle of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*ah).context);
        let result = uverbs::ah::destroy(&ctx, AhHandle((*ah).handle));
        destroyed(result.map_err(Into::into))?;
        drop(Box::from_raw(ah.cast::<Ah>()));
        Ok(())
    })
}
