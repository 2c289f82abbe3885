//! Address handles.

use core::ffi::c_int;

use mlx5::{Address, AddressHandle, Link};
use uverbs::{AhAttr, AhHandle};

use crate::abi::*;
use crate::ah::address;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::{PdRef, pd_of};

/// `IBV_LINK_LAYER_ETHERNET`.
const ETHERNET: u8 = 2;
/// `IBV_GID_TYPE_ROCE_V2` of the kernel's GID entries.
const ROCE_V2: u32 = 2;

/// An address handle.
#[repr(C)]
pub struct Ah {
    public: ibv_ah,
    /// What a datagram's work request carries.
    pub address: Address,
    /// The kernel has one too.
    known: bool,
    _pd: PdRef,
}

const _: () = assert!(core::mem::offset_of!(Ah, public) == 0);

/// The provider's view of an address handle.
///
/// # Safety
/// `ah` is a live address handle of an mlx5 context of ours.
#[inline(always)]
pub unsafe fn ah_of<'a>(ah: *mut ibv_ah) -> &'a Ah {
    // SAFETY: every ibv_ah of such a context begins an Ah.
    unsafe { &*ah.cast::<Ah>() }
}

/// What the path leads over.
fn link(ctx: &uverbs::Context, attr: &AhAttr) -> Result<Link, Errno> {
    let port = ctx.query_port(attr.port_num)?;
    if port.legacy.link_layer != ETHERNET {
        return Ok(Link::InfiniBand);
    }
    if !attr.is_global {
        return Err(Errno::INVAL);
    }
    let index = attr.grh.sgid_index.into();
    let gid = ctx.query_gid_entry(attr.port_num.into(), index)?;
    Ok(Link::Ethernet {
        udp: gid.gid_type == ROCE_V2,
    })
}

/// `ibv_create_ah`.
pub unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe {
        let context = (*pd).context;
        let ctx = CtxRef::of(context);
        let attr = address(&*attr);
        let link = link(&ctx, &attr)?;
        let made = AddressHandle::create(&ctx, pd_of(pd).handle(), &attr, 0, link)?;
        let mut ah = try_box(Ah {
            public: ibv_ah {
                context,
                pd,
                handle: 0,
            },
            address: made.address,
            known: made.object.is_some(),
            _pd: PdRef::new(pd),
        })
        .map_err(|(_, e)| e)?;
        if let Some(object) = made.object {
            ah.public.handle = object.into_handle().0;
        }
        Ok(Box::into_raw(ah).cast())
    })
}

/// `ibv_destroy_ah`. The handle lives on if the kernel refuses.
pub unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: libibverbs passes a live address handle of ours.
    entry::int(|| unsafe {
        if ah_of(ah).known {
            let ctx = CtxRef::of((*ah).context);
            let result = uverbs::ah::destroy(&ctx, AhHandle((*ah).handle));
            destroyed(result.map_err(Into::into))?;
        }
        drop(Box::from_raw(ah.cast::<Ah>()));
        Ok(())
    })
}
