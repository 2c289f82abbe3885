//! Address handles.

use core::ffi::c_int;
use core::mem::MaybeUninit;

use uverbs::{AhAttr, AhHandle, GlobalRoute, PdHandle};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::pd::{PdRef, pd_of};

/// Operations of a device on address handles.
pub trait AhOps: Sized + 'static {
    /// The address in a datagram's work request.
    type Address: Copy + 'static;
    /// The device's other data of an address handle.
    type AhData: Default;

    /// Creates an address, and the kernel's object where the device has one.
    fn make_ah(
        ctx: &CtxRef,
        pd: PdHandle,
        attr: &AhAttr,
        user_handle: u64,
    ) -> Result<(Self::Address, Option<AhHandle>), Errno>;
}

/// An address handle.
#[repr(C)]
pub struct Ah<D: AhOps> {
    public: ibv_ah,
    /// The address in a datagram's work request.
    pub address: D::Address,
    /// The device's other data.
    pub device_data: D::AhData,
    /// The kernel's object, where the device has one.
    known: bool,
    _pd: PdRef,
}

/// The provider's view of an address handle.
///
/// # Safety
/// `ah` is a live address handle of a context of ours and of this kind of
/// device.
#[inline]
pub unsafe fn ah_of<'a, D: AhOps>(ah: *mut ibv_ah) -> &'a Ah<D> {
    const { assert!(core::mem::offset_of!(Ah<D>, public) == 0) };
    // SAFETY: every ibv_ah of such a context begins an Ah.
    unsafe { &*ah.cast::<Ah<D>>() }
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
pub unsafe extern "C" fn create_ah<D: AhOps>(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe {
        let context = (*pd).context;
        let mut storage = try_box(MaybeUninit::<Ah<D>>::uninit()).map_err(|(_, errno)| errno)?;
        let user_handle = storage.as_ptr().expose_provenance() as u64;
        let ctx = CtxRef::of(context);
        let attr = address(&*attr);
        let (address, object) = D::make_ah(&ctx, pd_of(pd).handle(), &attr, user_handle)?;
        storage.write(Ah {
            public: ibv_ah {
                context,
                pd,
                handle: object.map_or(0, |handle| handle.0),
            },
            address,
            device_data: D::AhData::default(),
            known: object.is_some(),
            _pd: PdRef::new(pd),
        });
        Ok(Box::into_raw(storage).cast())
    })
}

/// `ibv_destroy_ah`. The handle is unchanged if the kernel refuses.
pub unsafe extern "C" fn destroy_ah<D: AhOps>(ah: *mut ibv_ah) -> c_int {
    // SAFETY: libibverbs passes a live address handle of ours.
    entry::int(|| unsafe {
        if ah_of::<D>(ah).known {
            let ctx = CtxRef::of((*ah).context);
            let result = uverbs::ah::destroy(&ctx, AhHandle((*ah).handle));
            destroyed(result.map_err(Into::into))?;
        }
        drop(Box::from_raw(ah.cast::<Ah<D>>()));
        Ok(())
    })
}
