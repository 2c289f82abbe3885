//! XRC domains, which XRC targets and their SRQs share, in one process or in
//! several; opening existing targets.

use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr::null_mut;

use uverbs::{QpOpen, QpType, Udata, XrcdHandle, XrcdOpen};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::qp::{Domain, Qp, QpOps, init_qp};

/// The kernel's handle of a domain.
///
/// # Safety
/// `xrcd` is live, and of a context of ours.
pub unsafe fn handle(xrcd: *mut ibv_xrcd) -> XrcdHandle {
    // SAFETY: every ibv_xrcd that this provider hands out begins a verbs_xrcd.
    XrcdHandle(unsafe { (*xrcd.cast::<verbs_xrcd>()).handle })
}

/// `ibv_open_xrcd`. EINVAL without both members, EOPNOTSUPP with others.
pub unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    const MEMBERS: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    // SAFETY: libibverbs passes an open context of ours, the application its
    // attributes.
    entry::pointer(|| unsafe {
        let init = &*init;
        if init.comp_mask & !MEMBERS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if init.comp_mask != MEMBERS {
            return Err(Errno::INVAL);
        }
        let mut xrcd = try_box(verbs_xrcd {
            xrcd: ibv_xrcd { context },
            comp_mask: VERBS_XRCD_HANDLE,
            handle: 0,
        })
        .map_err(|(_, errno)| errno)?;
        let open = XrcdOpen {
            fd: borrowed(init.fd),
            oflags: init.oflags,
        };
        xrcd.handle = uverbs::xrcd::open(&CtxRef::of(context), &open, Udata::none())?.0;
        Ok(Box::into_raw(xrcd).cast())
    })
}

/// `ibv_close_xrcd`. EBUSY, and the domain is unchanged, while objects made in it
/// exist.
pub unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*xrcd).context);
        destroyed(uverbs::xrcd::destroy(&ctx, handle(xrcd)).map_err(Into::into))?;
        drop(Box::from_raw(xrcd.cast::<verbs_xrcd>()));
        Ok(())
    })
}

/// `ibv_open_qp`. EINVAL without a domain, a number, or a type; EOPNOTSUPP with other
/// members.
pub unsafe extern "C" fn open_qp<D: QpOps>(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    const REQUIRED: u32 = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    // SAFETY: libibverbs passes an open context of ours, the application its
    // attributes, which name a live domain.
    entry::pointer(|| unsafe {
        let open_attr = &*attr;
        if open_attr.comp_mask & !(REQUIRED | IBV_QP_OPEN_ATTR_CONTEXT) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if open_attr.comp_mask & REQUIRED != REQUIRED || open_attr.xrcd.is_null() {
            return Err(Errno::INVAL);
        }
        let storage = try_box(MaybeUninit::<Qp<D>>::uninit()).map_err(|(_, errno)| errno)?;
        let new_qp = D::open_qp(
            &CtxRef::of(context),
            &QpOpen {
                xrcd: handle(open_attr.xrcd),
                qpn: open_attr.qp_num,
                qp_type: QpType(open_attr.qp_type as _),
                user_handle: storage.as_ptr().expose_provenance() as u64,
            },
        )?;
        let domain = Domain {
            context,
            pd: null_mut(),
            xrcd: open_attr.xrcd,
        };
        let attr = ibv_qp_init_attr {
            qp_context: match open_attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT {
                0 => null_mut(),
                _ => open_attr.qp_context,
            },
            send_cq: null_mut(),
            recv_cq: null_mut(),
            srq: null_mut(),
            cap: ibv_qp_cap::default(),
            qp_type: open_attr.qp_type,
            sq_sig_all: 0,
        };
        let mut qp = init_qp::<D>(storage, domain, &attr, 0, new_qp);
        // Another process may have changed the state.
        qp.assume_init_mut().public.qp_ex.qp_base.state = IBV_QPS_UNKNOWN;
        Ok(Box::into_raw(qp).cast())
    })
}

const _: () = assert!(core::mem::offset_of!(verbs_xrcd, xrcd) == 0);
