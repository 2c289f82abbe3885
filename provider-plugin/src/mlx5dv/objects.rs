//! `mlx5dv_init_obj`: the addresses of an object's queues, for a program that accesses them
//! itself.

use core::ffi::{c_int, c_void};
use core::ptr::{NonNull, null_mut};

use mlx5::DirectRing;

use super::abi::*;
use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::access::locked;
use crate::ah::ah_of;
use crate::context::CtxRef;
use crate::cq::cq_of;
use crate::entry;
use crate::errno::Errno;
use crate::mlx5::wq::wq_of;
use crate::mlx5::{Mlx5, dm};
use crate::pd::pd_of;
use crate::qp::qp_of;
use crate::srq::srq_of;

exported! {
    /// Describes the objects that `kinds` names, up to the first error.
    fn mlx5dv_init_obj(object: *mut mlx5dv_obj, kinds: u64) -> c_int
    where is_ours(context(object, kinds)), else libc::EOPNOTSUPP => {
        // SAFETY: as the caller says, with objects of ours.
        entry::int(|| unsafe { describe(object, kinds) })
    }
}

/// `mlx5dv_init_obj` of version MLX5_1.0, in which a CQ's UAR is a pointer to its
/// address.
///
/// # Safety
/// As of libmlx5's function of that name.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn ringverbs_mlx5dv_init_obj_1_0(
    object: *mut mlx5dv_obj,
    kinds: u64,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let status = mlx5dv_init_obj(object, kinds);
        if status == 0 && kinds & obj::CQ != 0 {
            let cq = &(*object).cq;
            if let Ok(device) = CtxRef::of((*cq.object).context).mlx5() {
                (*cq.out).cq_uar = device.direct_cq_uar_ptr().as_ptr().cast();
            }
        }
        status
    }
}

/// The context of the first object.
///
/// # Safety
/// The objects that `kinds` names are live.
unsafe fn context(object: *mut mlx5dv_obj, kinds: u64) -> *mut ibv_context {
    // SAFETY: as the caller says. Null stands for an object that is missing.
    unsafe {
        macro_rules! first {
            ($($kind:ident $member:ident)+) => {
                $(if kinds & obj::$kind != 0 {
                    return (*object).$member.object.as_ref()
                        .map_or(core::ptr::null_mut(), |object| object.context);
                })+
            };
        }
        first! { QP qp CQ cq SRQ srq RWQ rwq DM dm AH ah PD pd DEVX devx }
    }
    core::ptr::null_mut()
}

fn pointer<T>(to: NonNull<u8>) -> *mut T {
    to.as_ptr().cast()
}

fn queue(ring: &DirectRing) -> mlx5dv_queue {
    mlx5dv_queue {
        buf: pointer(ring.entries),
        wqe_cnt: ring.count,
        stride: ring.stride,
    }
}

/// # Safety
/// The objects that `kinds` names are live and ours, and with each is room for its
/// description.
unsafe fn describe(object: *const mlx5dv_obj, kinds: u64) -> Result<(), Errno> {
    const KNOWN: u64 =
        obj::QP | obj::CQ | obj::SRQ | obj::RWQ | obj::DM | obj::AH | obj::PD | obj::DEVX;
    // SAFETY: as the caller says. Members that a header may lack are written only
    // if they are requested.
    unsafe {
        macro_rules! each {
            ($($kind:ident $member:ident: $function:ident;)+) => {
                $(if kinds & obj::$kind != 0 {
                    let DescribedObject { object, out } = &(*object).$member;
                    if object.is_null() || out.is_null() {
                        return Err(Errno::INVAL);
                    }
                    $function(*object, *out)?;
                })+
            };
        }
        each! {
            QP qp: qp; CQ cq: cq; SRQ srq: srq; RWQ rwq: rwq; DM dm: dm; AH ah: ah; PD pd: pd; DEVX devx: devx;
        }
    }
    if kinds & !KNOWN != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(())
}

/// # Safety
/// As of [`describe`], as for all below.
unsafe fn qp(object: *mut crate::abi::ibv_qp, out: *mut mlx5dv_qp) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let qp = qp_of::<Mlx5, _>(object);
        let (sends, receives, register) = locked(qp.single, &qp.send_lock, || {
            let send = &*qp.send.get();
            (
                send.direct(),
                send.direct_receives(),
                send.direct_register(),
            )
        });
        (*out).dbrec = pointer(sends.records);
        (*out).sq = queue(&sends);
        (*out).rq = queue(&receives);
        (*out).bf = mlx5dv_bf {
            reg: pointer(register.at),
            size: register.half,
        };
        let requested = (*out).comp_mask;
        if requested & QP_MASK_UAR_MMAP_OFFSET != 0 {
            (*out).uar_mmap_offset = register.file_offset as libc::off_t;
        }
        let packets = &qp.device_data.packets;
        if requested & QP_MASK_RAW_QP_HANDLES != 0 {
            (*out).tirn = packets.tir;
            (*out).tisn = packets.tis;
            (*out).rqn = packets.rq;
            (*out).sqn = packets.sq;
        }
        if requested & QP_MASK_RAW_QP_TIR_ADDR != 0 {
            (*out).tir_icm_addr = packets.tir_address;
        }
        const KNOWN: u64 =
            QP_MASK_UAR_MMAP_OFFSET | QP_MASK_RAW_QP_HANDLES | QP_MASK_RAW_QP_TIR_ADDR;
        (*out).comp_mask = requested & KNOWN;
    }
    Ok(())
}

unsafe fn cq(object: *mut crate::abi::ibv_cq, out: *mut mlx5dv_cq) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let cq: &crate::mlx5::cq::Cq = cq_of(object);
        let (ring, cqn) = cq.direct();
        out.write(mlx5dv_cq {
            buf: pointer(ring.entries),
            dbrec: pointer(ring.records),
            cqe_cnt: ring.count,
            cqe_size: ring.stride,
            cq_uar: pointer(cq.object.context().mlx5()?.direct_cq_uar()),
            cqn,
            comp_mask: 0,
        });
    }
    Ok(())
}

unsafe fn srq(object: *mut crate::abi::ibv_srq, out: *mut mlx5dv_srq) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let srq = srq_of::<Mlx5>(object);
        let (ring, head, tail) = (*srq.recv.get()).direct();
        (*out).buf = pointer(ring.entries);
        (*out).dbrec = pointer(ring.records);
        (*out).stride = ring.stride;
        (*out).head = head.into();
        (*out).tail = tail.into();
        let requested = (*out).comp_mask & SRQ_MASK_SRQN;
        if requested != 0 {
            (*out).srqn = srq.public.srq_num;
        }
        (*out).comp_mask = requested;
    }
    Ok(())
}

unsafe fn rwq(object: *mut crate::abi::ibv_wq, out: *mut mlx5dv_rwq) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let ring = wq_of(object).direct();
        out.write(mlx5dv_rwq {
            buf: pointer(ring.entries),
            dbrec: pointer(ring.records),
            wqe_cnt: ring.count,
            stride: ring.stride,
            comp_mask: 0,
        });
    }
    Ok(())
}

unsafe fn dm(object: *mut crate::abi::ibv_dm, out: *mut mlx5dv_dm) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let described = dm::describe(object);
        (*out).buf = described.start.map_or(null_mut(), pointer);
        (*out).length = described.length;
        // Later headers have the member.
        (*out).comp_mask &= DM_MASK_REMOTE_VA;
        if (*out).comp_mask != 0 {
            (*out).remote_va = described.address;
        }
    }
    Ok(())
}

unsafe fn ah(object: *mut crate::abi::ibv_ah, out: *mut mlx5dv_ah) -> Result<(), Errno> {
    // SAFETY: as the caller says; the vector stays where it is.
    unsafe {
        (*out).av = pointer::<c_void>(ah_of::<Mlx5>(object).address.direct());
        (*out).comp_mask = 0;
    }
    Ok(())
}

unsafe fn pd(object: *mut crate::abi::ibv_pd, out: *mut mlx5dv_pd) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        (*out).pdn = pd_of(object).number;
        (*out).comp_mask = 0;
    }
    Ok(())
}

unsafe fn devx(object: *mut ContextFirst, out: *mut mlx5dv_devx) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe { (*out).handle = super::devx::handle(object) };
    Ok(())
}
