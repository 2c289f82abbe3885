//! The data path in: work requests as lists.
//!
//! No allocation, and no system call but one doorbell a list; a lock where
//! the queue is shared.
//!
//! Functions apart from the quick path are `extern "C"`, which says that they
//! do not unwind: so they can be jumped to, and the quick path needs no frame.

use core::ffi::c_int;
use core::ptr::NonNull;

use ring::BiasedLock;
use rxe::{
    BindMwWr, OneElement, Opcode, PostError, RecvQueue, Refused, SendFlags, SendQueue, SendWriter,
    Sge,
};

use crate::abi::*;
use crate::ah::ah_of;
use crate::entry;
use crate::errno::Errno;
use crate::qp::qp_of;
use crate::rxe_face::Rxe;
use crate::rxe_face::qp::Qp;
use crate::srq::srq_of;

const _: () = {
    assert!(size_of::<ibv_sge>() == size_of::<Sge>());
    assert!(align_of::<ibv_sge>() >= align_of::<Sge>());
};

/// A scatter list of the application, if it is no longer than `max`.
///
/// # Safety
/// `list` is readable for `num_sge` elements.
#[inline(always)]
unsafe fn scatter_list<'a>(
    list: *const ibv_sge,
    num_sge: c_int,
    max: u32,
) -> Result<&'a [Sge], c_int> {
    // A negative number is too large a one.
    let length = num_sge as u32;
    if length > max {
        return Err(libc::EINVAL);
    }
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: as the caller says; the two types are the same.
    Ok(unsafe { core::slice::from_raw_parts(list.cast::<Sge>(), length as usize) })
}

/// A work request of the C interface as the queue's quick way reads it.
struct Posted<'a>(&'a ibv_send_wr);

impl OneElement for Posted<'_> {
    #[inline(always)]
    fn wr_id(&self) -> u64 {
        self.0.wr_id
    }
    #[inline(always)]
    fn opcode(&self) -> Opcode {
        Opcode(self.0.opcode)
    }
    #[inline(always)]
    fn flags(&self) -> SendFlags {
        SendFlags::from_bits_retain(self.0.send_flags)
    }
    #[inline(always)]
    fn immediate_or_key(&self) -> u32 {
        self.0.imm_data
    }
    #[inline(always)]
    fn remote_addr(&self) -> u64 {
        // SAFETY: any bytes are an address.
        unsafe { self.0.wr.rdma.remote_addr }
    }
    #[inline(always)]
    fn rkey(&self) -> u32 {
        // SAFETY: any bytes are a key.
        unsafe { self.0.wr.rdma.rkey }
    }
    #[inline(always)]
    fn sge(&self) -> &Sge {
        // SAFETY: the work request says that it has one element, and the
        // application that it is there; the two types are the same.
        unsafe { &*self.0.sg_list.cast::<Sge>() }
    }
}

/// Adds a work request by the quick way, if it is one of nearly all.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write_quickly(writer: &mut SendWriter<'_>, plain: u32, wr: &ibv_send_wr) -> bool {
    if wr.opcode >= 32 || plain & 1 << wr.opcode == 0 || wr.num_sge != 1 {
        return false;
    }
    if wr.send_flags & IBV_SEND_INLINE != 0 {
        // SAFETY: the application says that the data is readable.
        unsafe { writer.push_one_inline(&Posted(wr)) }
    } else {
        writer.push_one(&Posted(wr))
    }
}

/// Adds any work request.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write_any(queue: &mut SendQueue, datagram: bool, wr: &ibv_send_wr) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    unsafe { try_write(queue, datagram, wr)? };
    queue.accept();
    Ok(())
}

/// # Safety
/// As for [`write_any`].
#[inline(always)]
unsafe fn try_write(queue: &mut SendQueue, datagram: bool, wr: &ibv_send_wr) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    let list = unsafe { scatter_list(wr.sg_list, wr.num_sge, queue.max_sge())? };
    let flags = SendFlags::from_bits_retain(wr.send_flags);
    let errno = |error: PostError| error.errno();
    let mut wqe = queue
        .open(wr.wr_id, Opcode(wr.opcode), flags)
        .map_err(errno)?;
    wqe.immediate_or_key(wr.imm_data);
    // SAFETY: the opcode says which member of each union the application set.
    unsafe {
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM if datagram => {
                let ud = wr.wr.ud;
                if ud.ah.is_null() {
                    return Err(libc::EINVAL);
                }
                wqe.ud(ah_of(ud.ah).ah_num, ud.remote_qpn, ud.remote_qkey);
            }
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => {}
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                wqe.rdma(wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let operands = wr.wr.atomic;
                let length: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
                if !operands.remote_addr.is_multiple_of(8) || length < 8 {
                    return Err(libc::EINVAL);
                }
                wqe.atomic(
                    operands.remote_addr,
                    operands.rkey,
                    operands.compare_add,
                    operands.swap,
                );
            }
            IBV_WR_BIND_MW => {
                if datagram || !list.is_empty() || wr.imm_data != 0 {
                    return Err(libc::EINVAL);
                }
                let bind = wr.extra.bind_mw;
                wqe.bind_mw(binding(bind.mw, bind.rkey, &bind.bind_info)?);
                return Ok(());
            }
            _ => return Err(libc::EINVAL),
        }
        if flags.contains(SendFlags::INLINE) {
            let pieces = list
                .iter()
                .map(|sge| (sge.addr as *const u8, sge.length as usize));
            // SAFETY: the application says that the pieces are readable.
            wqe.inline_raw(pieces)
        } else {
            wqe.sge_list(list)
        }
        .map(drop)
        .map_err(errno)
    }
}

/// What a memory window is to be bound to; without a region, to nothing.
///
/// # Safety
/// `mw` is null or live, and so is the region of `info`.
pub unsafe fn binding(
    mw: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<BindMwWr, c_int> {
    // SAFETY: as the caller says.
    let (mw, mr) = unsafe { (mw.as_ref(), info.mr.as_ref()) };
    let (Some(mw), true) = (mw, mr.is_some() || info.length == 0) else {
        return Err(libc::EINVAL);
    };
    Ok(BindMwWr {
        addr: info.addr,
        length: info.length,
        mr_lkey: mr.map_or(0, |mr| mr.lkey),
        mw_rkey: mw.rkey,
        rkey,
        access: info.mw_access_flags,
    })
}

/// `ibv_post_send`. On an error `*bad_wr` is the first work request that was
/// not posted; those before it were.
///
/// EINVAL for a bad work request or a state that does not send, ENOMEM for a
/// full queue, what the doorbell says if the device is gone.
pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own; the send queue is this call's once the lock is
    // taken or the application has promised it.
    unsafe {
        let own: &Qp = qp_of(qp);
        if wr.is_null() {
            return refuse(wr, bad_wr);
        }
        // Whatever takes longer goes on in a function of its own, so that this
        // one saves no registers.
        if !own.send_lock.try_quick() && !own.single {
            return post_shared(own, wr, bad_wr);
        }
        // Of a queue pair with one owner nobody took it: a plain store, less
        // than to ask.
        post(own, wr, bad_wr, BiasedLock::unlock_quick)
    }
}

/// [`post_send`] of a thread that is not the only one to post here.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_shared(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        if !own.send_lock.try_spin() {
            return post_contended(own, wr, bad_wr);
        }
        post(own, wr, bad_wr, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// As for [`post_send`].
#[cold]
#[inline(never)]
unsafe extern "C" fn post_contended(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    own.send_lock.lock_shared();
    // SAFETY: as the caller says.
    unsafe {
        let _ = (*own.send.get()).begin().keep();
        post_rest(own, wr, wr, bad_wr)
    }
}

/// Posts a list in the critical section that was entered, and leaves it.
///
/// # Safety
/// As for [`post_send`].
#[inline(always)]
unsafe fn post(
    own: &Qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
    leave: fn(&BiasedLock),
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let plain = own.plain();
        let mut writer = (*own.send.get()).begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if !write_quickly(&mut writer, plain, request) {
                let _ = writer.keep();
                return post_rest(own, wr, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the work requests name is the application's affair.
        writer.publish();
        leave(&own.send_lock);
        match own.besides.doorbell.ring() {
            Ok(()) => 0,
            Err(refused) => unheard(refused, wr, bad_wr),
        }
    }
}

/// EINVAL, and the first work request is the bad one.
///
/// # Safety
/// `bad_wr` is null or writable.
#[cold]
#[inline(never)]
pub unsafe extern "C" fn refuse<T>(wr: *mut T, bad_wr: *mut *mut T) -> c_int {
    // SAFETY: as the caller says.
    unsafe { report(wr, bad_wr) };
    libc::EINVAL
}

/// Says which work request was not posted.
///
/// # Safety
/// `bad_wr` is null or writable.
pub unsafe fn report<T>(wr: *mut T, bad_wr: *mut *mut T) {
    if let Some(place) = NonNull::new(bad_wr) {
        // SAFETY: as the caller says.
        unsafe { place.write(wr) };
    }
}

/// The kernel would not hear of the work requests that are in the queue: none
/// of the list may be counted on, so the first is the bad one.
///
/// # Safety
/// `bad_wr` is null or writable.
#[cold]
#[inline(never)]
unsafe extern "C" fn unheard(
    refused: Refused,
    first: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { report(first, bad_wr) };
    refused.errno().raw()
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs; `first` is the list's beginning.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe extern "C" fn post_rest(
    own: &Qp,
    first: *mut ibv_send_wr,
    mut next: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.send.get();
        let mut result = if own.may_send() {
            Ok(())
        } else {
            Err(libc::EINVAL)
        };
        while let (Ok(()), Some(request)) = (result, next.as_ref()) {
            result = write_any(queue, own.datagram, request);
            if result.is_err() {
                break;
            }
            next = request.next;
        }
        // SAFETY: what the work requests name is the application's affair.
        let any = queue.publish();
        if !own.single {
            own.send_lock.unlock();
        }
        if any && let Err(refused) = own.besides.doorbell.ring() {
            return unheard(refused, first, bad_wr);
        }
        result.map_or_else(
            |errno| {
                report(next, bad_wr);
                errno
            },
            |()| 0,
        )
    }
}

/// Posts a list of receives.
///
/// # Safety
/// The list is the application's; the queue is this call's once the lock is
/// taken or the application has promised it (`single`).
#[inline(always)]
unsafe fn post_receives(
    single: bool,
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        if !lock.try_quick() && !single {
            return receive_shared(lock, queue, wr, bad_wr);
        }
        // As in `post_send`: taken or not.
        receive(single, lock, queue, wr, bad_wr, BiasedLock::unlock_quick)
    }
}

/// [`post_receives`] of a thread that is not the only one to post here.
///
/// # Safety
/// As for [`post_receives`].
#[inline(never)]
unsafe extern "C" fn receive_shared(
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        if !lock.try_spin() {
            return receive_contended(lock, queue, wr, bad_wr);
        }
        receive(false, lock, queue, wr, bad_wr, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// As for [`post_receives`].
#[cold]
#[inline(never)]
unsafe extern "C" fn receive_contended(
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    lock.lock_shared();
    // SAFETY: as the caller says.
    unsafe {
        let _ = (*queue).begin().keep();
        receive_rest(false, lock, queue, wr, bad_wr)
    }
}

/// Posts a list of receives in the critical section that was entered, and
/// leaves it.
///
/// # Safety
/// As for [`post_receives`].
#[inline(always)]
unsafe fn receive(
    single: bool,
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    leave: fn(&BiasedLock),
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let mut writer = (*queue).begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            let pushed = request.num_sge == 1
                && writer.push_one(request.wr_id, &*request.sg_list.cast::<Sge>());
            if !pushed {
                let _ = writer.keep();
                return receive_rest(single, lock, queue, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the receives name is the application's affair.
        writer.publish();
        leave(lock);
        0
    }
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs.
///
/// # Safety
/// As for [`post_receives`].
#[inline(never)]
unsafe extern "C" fn receive_rest(
    single: bool,
    lock: &BiasedLock,
    queue: *mut RecvQueue,
    mut next: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *queue;
        let mut result = 0;
        while let Some(request) = next.as_ref() {
            let pushed =
                scatter_list(request.sg_list, request.num_sge, queue.max_sge()).and_then(|list| {
                    queue
                        .push(request.wr_id, list)
                        .map_err(|error| error.errno())
                });
            if let Err(errno) = pushed {
                report(next, bad_wr);
                result = errno;
                break;
            }
            next = request.next;
        }
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        if !single {
            lock.unlock();
        }
        result
    }
}

/// `ibv_post_recv`. EINVAL for a bad work request, the RESET state, or a
/// queue pair with a shared receive queue; ENOMEM for a full queue. On an
/// error `*bad_wr` is the first that was not posted; those before it were.
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own.
    unsafe {
        let own: &Qp = qp_of(qp);
        let queue = own.recv();
        if wr.is_null() || queue.is_null() || !own.may_receive() {
            return refuse(wr, bad_wr);
        }
        post_receives(own.single, &own.recv_lock, queue, wr, bad_wr)
    }
}

/// `ibv_post_srq_recv`. EINVAL for a bad work request, ENOMEM for a full
/// queue; `*bad_wr` as with [`post_recv`].
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe {
        let own = srq_of::<Rxe>(srq);
        post_receives(own.single, &own.lock, own.recv.get(), wr, bad_wr)
    }
}

/// `ibv_bind_mw`: binds a type 1 window, giving it its next remote key.
pub unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the application passes a live queue pair and window of ours and
    // its arguments.
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
                // If the binding fails, the application takes this back.
                (*mw).rkey = rkey;
                Ok(())
            }
            errno => Err(Errno(errno)),
        }
    })
}
