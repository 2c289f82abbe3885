//! Posting lists of work requests.
//!
//! `ibv_post_send` and `ibv_post_recv` convert and push the work requests of a
//! list one by one, and publish them together. They do not allocate. The only
//! system call is rdma_rxe's doorbell, once per list. They hold the queue's lock
//! unless the application promised one caller at a time.

use core::ffi::c_int;
use core::ptr::NonNull;

use ring::BiasedLock;
use uverbs::{Bind, Data, Destination, MwType, Opcode, Operands, RemoteMemory, SendFlags};
use uverbs::{SendWr, Sge};

use crate::abi::*;
use crate::access::Section;
use crate::ah::ah_of;
use crate::mw;
use crate::qp::{self, Addressing, Qp, qp_of};
use crate::srq::{self, Srq, srq_of};
use crate::writers::{RecvQueueOps, SendQueueOps};

const _: () = {
    assert!(size_of::<ibv_sge>() == size_of::<Sge>());
    assert!(align_of::<ibv_sge>() >= align_of::<Sge>());
};

/// Returns the application's scatter/gather list; EINVAL if it is longer than `max`.
///
/// # Safety
/// `list` is readable for `num_sge` elements.
#[inline]
pub unsafe fn scatter_list<'a>(
    list: *const ibv_sge,
    num_sge: usize,
    max: u32,
) -> Result<&'a [Sge], c_int> {
    if num_sge > max as usize {
        return Err(libc::EINVAL);
    }
    if num_sge == 0 {
        return Ok(&[]);
    }
    // SAFETY: as the caller says; the two types are the same.
    Ok(unsafe { core::slice::from_raw_parts(list.cast::<Sge>(), num_sge) })
}

/// Converts the members that all work requests share.
///
/// # Safety
/// The work request is the application's.
#[inline(always)]
unsafe fn common<'a, A>(wr: &'a ibv_send_wr, list: &'a [Sge]) -> SendWr<'a, A> {
    // SAFETY: any bytes are a valid address and key; operations without remote memory
    // ignore them.
    let rdma = unsafe { wr.wr.rdma };
    let flags = SendFlags::from_bits_retain(wr.send_flags);
    SendWr {
        imm_or_key: wr.imm_data,
        remote: RemoteMemory {
            addr: rdma.remote_addr,
            rkey: rdma.rkey,
        },
        data: match flags.contains(SendFlags::INLINE) {
            true => Data::Inline(list),
            false => Data::Sges(list),
        },
        ..SendWr::new(wr.wr_id, Opcode(wr.opcode), flags)
    }
}

/// Fast path of [`push`]: converts a work request of one element, without operands or
/// destination, and adds it to the batch. Returns false and pushes nothing if it does
/// not apply.
///
/// # Safety
/// As for [`push`].
#[inline(always)]
unsafe fn push_fast<D: qp::QpOps>(qp: &Qp<D>, queue: &mut D::SendQueue, wr: &ibv_send_wr) -> bool {
    // SAFETY: as the caller says; the application says that inline data is
    // readable.
    unsafe {
        if wr.num_sge != 1 || wr.opcode >= u16::BITS || qp.simple & 1 << wr.opcode == 0 {
            return false;
        }
        let common = common(wr, core::slice::from_ref(&*wr.sg_list.cast()));
        queue.push_fast(&common, common.data)
    }
}

/// Opcodes without operands, as a bit mask.
pub const SIMPLE: u16 = 1 << IBV_WR_SEND
    | 1 << IBV_WR_SEND_WITH_IMM
    | 1 << IBV_WR_SEND_WITH_INV
    | 1 << IBV_WR_LOCAL_INV
    | 1 << IBV_WR_RDMA_WRITE
    | 1 << IBV_WR_RDMA_WRITE_WITH_IMM
    | 1 << IBV_WR_RDMA_READ;

/// Converts a work request and adds it to the batch.
///
/// # Safety
/// The work request is the application's, with the members that its opcode requires; the
/// caller is in the critical section.
unsafe fn push<D: qp::QpOps>(
    qp: &Qp<D>,
    queue: &mut D::SendQueue,
    wr: &ibv_send_wr,
) -> Result<(), c_int> {
    let bound;
    // SAFETY: the opcode determines the member of each union that the application set, and
    // its objects are live.
    unsafe {
        // A negative number becomes one that is too large.
        let num_sge = wr.num_sge as u32 as usize;
        let list = scatter_list(wr.sg_list, num_sge, queue.max_sge())?;
        let mut common = common(wr, list);
        match qp.addressing {
            Addressing::Connected => {}
            Addressing::Datagram => {
                if matches!(wr.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM) {
                    let ud = wr.wr.ud;
                    if ud.ah.is_null() {
                        return Err(libc::EINVAL);
                    }
                    common.destination = Destination::Datagram {
                        address: &ah_of::<D>(ud.ah).address,
                        remote_qpn: ud.remote_qpn,
                        remote_qkey: ud.remote_qkey,
                    };
                }
            }
            Addressing::Xrc => {
                common.destination = Destination::Xrc {
                    remote_srqn: wr.xrc_remote_srqn,
                };
            }
            // `ibv_send_wr` has no field for the destination.
            Addressing::Dc => return Err(libc::EINVAL),
        }
        match wr.opcode {
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = wr.wr.atomic;
                if !D::accepts_atomic(atomic.remote_addr, list) {
                    return Err(libc::EINVAL);
                }
                common.remote.rkey = atomic.rkey;
                common.operands = Operands::Atomic {
                    compare_add: atomic.compare_add,
                    swap: atomic.swap,
                };
            }
            IBV_WR_BIND_MW => {
                let datagram = qp.addressing == Addressing::Datagram;
                if datagram || wr.num_sge != 0 || wr.imm_data != 0 {
                    return Err(libc::EINVAL);
                }
                let bind = wr.extra.bind_mw;
                bound = window_bind::<D>(bind.mw, bind.rkey, &bind.bind_info)?;
                common.operands = Operands::Bind(&bound);
            }
            IBV_WR_TSO => {
                let tso = wr.extra.tso;
                common.operands = Operands::Tso {
                    headers: tso.hdr.expose_provenance() as u64,
                    length: tso.hdr_sz,
                    mss: tso.mss,
                };
            }
            opcode if opcode >= u16::BITS || SIMPLE & 1 << opcode == 0 => return Err(libc::EINVAL),
            _ => {}
        }
        // SAFETY: the application says that inline data is readable.
        queue.push(&common)
    }
}

/// Converts the bind of a memory window; without a region, it is an unbind.
///
/// # Safety
/// The window and the region are null or live.
pub unsafe fn window_bind<D: qp::QpOps>(
    mw: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<Bind, c_int> {
    // SAFETY: as the caller says; regions are ours, so each is a `verbs_mr`.
    let (mw, mr) = unsafe { (mw.as_ref(), info.mr.cast::<verbs_mr>().as_ref()) };
    let mw = mw.ok_or(libc::EINVAL)?;
    let accepts = |mr| info.length == 0 || D::accepts_bind(mr, info.mw_access_flags);
    if !mr.map_or(info.length == 0, accepts) {
        return Err(libc::EINVAL);
    }
    Ok(Bind {
        window_rkey: mw.rkey,
        rkey,
        window_type: MwType(u8::try_from(mw.type_).unwrap_or(u8::MAX)),
        // SAFETY: the public part.
        lkey: unsafe { info.mr.as_ref() }.map_or(0, |mr| mr.lkey),
        addr: info.addr,
        length: info.length,
        access: info.mw_access_flags,
    })
}

/// `ibv_post_send`. On an error `*bad_wr` is the first work request that was not posted;
/// the work requests before it were. If the doorbell failed, `*bad_wr` is the first of the
/// list.
///
/// EINVAL for a bad work request or a state that does not send, ENOMEM for a full
/// queue, EOPNOTSUPP for a memory window that the device cannot bind, the
/// doorbell's error if the device was removed.
pub unsafe extern "C" fn post_send<D: qp::QpOps>(
    ibqp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // its own work requests; the critical section makes the send queue exclusive.
    unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        if wr.is_null() || !qp.may_send() {
            return refuse(wr, bad_wr, libc::EINVAL);
        }
        let Some(section) = Section::try_enter(qp.single, &qp.send_lock) else {
            return post_send_slow(qp, wr, wr, bad_wr, None);
        };
        // Fast path: work requests of one element. A call that is not a tail call would make
        // the function save registers.
        let queue = &mut *qp.send.get();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if !push_fast(qp, queue, request) {
                return post_send_slow(qp, next, wr, bad_wr, Some(section));
            }
            next = request.next;
        }
        // SAFETY: the application keeps the memory of its work requests valid.
        if !queue.publish_fast() {
            return post_send_slow(qp, next, wr, bad_wr, Some(section));
        }
        drop(section);
        match D::ring(qp) {
            0 => 0,
            errno => refuse(wr, bad_wr, errno),
        }
    }
}

/// Slow path of [`post_send`]: posts the rest of the list that begins with `wr`.
/// Waits for the critical section if it has not been entered.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe fn post_send_slow<D: qp::QpOps>(
    qp: &Qp<D>,
    rest: *mut ibv_send_wr,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
    section: Option<Section<'_>>,
) -> c_int {
    let section = section.unwrap_or_else(|| Section::enter(qp.single, &qp.send_lock));
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *qp.send.get();
        let mut next = rest;
        let mut refused = 0;
        while let Some(request) = next.as_ref() {
            if let Err(errno) = push(qp, queue, request) {
                refused = errno;
                break;
            }
            next = request.next;
        }
        // SAFETY: the application keeps the memory of its work requests valid.
        let any = queue.publish();
        drop(section);
        let doorbell_errno = if any { D::ring(qp) } else { 0 };
        if doorbell_errno != 0 {
            return refuse(wr, bad_wr, doorbell_errno);
        }
        if refused != 0 {
            return refuse(next, bad_wr, refused);
        }
        0
    }
}

/// Sets `*bad_wr` to the first work request that was not posted; returns the errno.
///
/// # Safety
/// `bad_wr` is null or writable.
#[cold]
pub unsafe fn refuse<T>(wr: *mut T, bad_wr: *mut *mut T, errno: c_int) -> c_int {
    if let Some(bad_wr) = NonNull::new(bad_wr) {
        // SAFETY: as the caller says.
        unsafe { bad_wr.write(wr) };
    }
    errno
}

/// `ibv_bind_mw`.
pub unsafe extern "C" fn bind_mw<D: qp::QpOps>(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the application passes a live queue pair and window of ours and
    // its arguments.
    unsafe { mw::bind(post_send::<D>, qp, mw, bind) }
}

/// An object to which receives are posted: a queue pair, a shared receive queue or a work
/// queue.
pub trait RecvQueueOwner {
    /// The receive queue.
    type Queue: RecvQueueOps;

    /// The lock that guards the queue.
    fn lock(&self) -> &BiasedLock;
    /// Whether the application promised one caller at a time: no lock.
    fn single(&self) -> bool;
}

/// Posts a list of receives.
///
/// # Safety
/// `queue` is null or the queue of `owner`; the list is the application's.
#[inline]
pub unsafe fn post_receives<R: RecvQueueOwner>(
    owner: &R,
    queue: *mut R::Queue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says; the critical section makes the queue exclusive.
    unsafe {
        if wr.is_null() || queue.is_null() {
            return refuse(wr, bad_wr, libc::EINVAL);
        }
        let Some(section) = Section::try_enter(owner.single(), owner.lock()) else {
            return post_recv_slow(owner, queue, wr, bad_wr, None);
        };
        // Fast path: receives of one element. A call that is not a tail call would make the
        // function save registers.
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            let pushed =
                request.num_sge == 1 && (*queue).push_fast(request.wr_id, &*request.sg_list.cast());
            if !pushed {
                return post_recv_slow(owner, queue, next, bad_wr, Some(section));
            }
            next = request.next;
        }
        // SAFETY: the application keeps the memory of its receives valid.
        (*queue).publish();
        drop(section);
        0
    }
}

/// Slow path of [`post_receives`]: posts the rest of a list. Waits for the critical section
/// if it has not been entered.
///
/// # Safety
/// As for [`post_receives`].
#[inline(never)]
unsafe fn post_recv_slow<R: RecvQueueOwner>(
    owner: &R,
    queue: *mut R::Queue,
    rest: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    section: Option<Section<'_>>,
) -> c_int {
    let section = section.unwrap_or_else(|| Section::enter(owner.single(), owner.lock()));
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *queue;
        let mut next = rest;
        let mut refused = 0;
        while let Some(request) = next.as_ref() {
            let num_sge = request.num_sge as u32 as usize;
            let pushed = scatter_list(request.sg_list, num_sge, queue.max_sge())
                .and_then(|list| queue.push(request.wr_id, list));
            if let Err(errno) = pushed {
                refused = errno;
                break;
            }
            next = request.next;
        }
        // SAFETY: the application keeps the memory of its receives valid.
        queue.publish();
        drop(section);
        if refused != 0 {
            return refuse(next, bad_wr, refused);
        }
        0
    }
}

/// `ibv_post_recv`. EINVAL for a bad work request, the RESET state, or a
/// queue pair with a shared receive queue; ENOMEM for a full queue. On an
/// error `*bad_wr` is the first that was not posted; those before it were.
pub unsafe extern "C" fn post_recv<D: qp::QpOps>(
    ibqp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own.
    unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        post_receives(qp, qp.receiving(), wr, bad_wr)
    }
}

/// `ibv_post_srq_recv`. EINVAL for a bad work request, ENOMEM for a full
/// queue; `*bad_wr` as with [`post_recv`].
pub unsafe extern "C" fn post_srq_recv<D: srq::SrqOps>(
    ibsrq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe {
        let srq: &Srq<D> = srq_of(ibsrq);
        post_receives(srq, srq.recv.get(), wr, bad_wr)
    }
}
