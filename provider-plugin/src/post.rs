//! The data path in: work requests as lists.
//!
//! No allocation, and no system call but one doorbell a list; a lock where
//! the queue is shared.

use core::ffi::c_int;
use core::ptr::NonNull;

use rxe::{
    BindMwWr, OneElement, Opcode, PostError, RecvQueue, SendFlags, SendState, SendWriter, Sge,
};

use crate::abi::*;
use crate::ah::ah_of;
use crate::qp::qp_of;
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

/// Opcodes that have a remote address and key, or nothing, besides their data
/// (all but datagrams), as a set of bits.
pub const PLAIN: u32 = 1 << IBV_WR_SEND
    | 1 << IBV_WR_SEND_WITH_IMM
    | 1 << IBV_WR_SEND_WITH_INV
    | 1 << IBV_WR_RDMA_WRITE
    | 1 << IBV_WR_RDMA_WRITE_WITH_IMM
    | 1 << IBV_WR_RDMA_READ;

/// Writes one work request to the next entry of the queue: nearly every one
/// there is by the short way, the others by [`write_any`].
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write(
    writer: &mut SendWriter<'_>,
    plain: u32,
    wr: &ibv_send_wr,
) -> Result<(), c_int> {
    let is_plain = wr.opcode < 32 && plain & 1 << wr.opcode != 0;
    if is_plain && wr.num_sge == 1 {
        // SAFETY: one element, by its number; any bytes are a remote address
        // and key, and a send, which has none, does not use them.
        let (sge, remote) = unsafe { (wr.sg_list.cast::<Sge>().read(), wr.wr.rdma) };
        let request = OneElement {
            wr_id: wr.wr_id,
            opcode: Opcode(wr.opcode),
            flags: SendFlags::from_bits_retain(wr.send_flags),
            immediate_or_key: wr.imm_data,
            remote_addr: remote.remote_addr,
            rkey: remote.rkey,
            sge,
        };
        let pushed = if request.flags.contains(SendFlags::INLINE) {
            // SAFETY: the application says that the data is readable.
            unsafe { writer.push_one_inline(&request) }
        } else {
            writer.push_one(&request)
        };
        return pushed.map_err(|error| error.errno());
    }
    let datagram = plain == 0;
    // By value in and out, so that the writer can live in registers here.
    // SAFETY: as the caller says.
    let (next, result) = unsafe { write_any(writer.state(), datagram, wr) };
    writer.set_state(next);
    result
}

/// Writes any work request to the next entry of the queue.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(never)]
unsafe fn write_any(
    state: SendState,
    datagram: bool,
    wr: &ibv_send_wr,
) -> (SendState, Result<(), c_int>) {
    let mut writer = SendWriter::from_state(state);
    // SAFETY: as the caller says.
    let result = unsafe { try_write(&mut writer, datagram, wr) };
    if result.is_ok() {
        writer.accept();
    }
    (writer.state(), result)
}

/// # Safety
/// As for [`write_any`].
unsafe fn try_write(
    writer: &mut SendWriter<'_>,
    datagram: bool,
    wr: &ibv_send_wr,
) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    let list = unsafe { scatter_list(wr.sg_list, wr.num_sge, writer.max_sge())? };
    let flags = SendFlags::from_bits_retain(wr.send_flags);
    let errno = |error: PostError| error.errno();
    let mut wqe = writer
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
        if bad_wr.is_null() {
            return libc::EINVAL;
        }
        let qp = qp_of(qp);
        *bad_wr = wr;
        if wr.is_null() || !qp.may_send() {
            return libc::EINVAL;
        }
        if !qp.single {
            qp.send_lock.lock();
        }
        let queue = &mut *qp.send.get();
        queue.begin();
        let mut writer = queue.writer();
        let plain = qp.plain;
        let mut next = wr;
        let mut result = 0;
        while let Some(request) = next.as_ref() {
            if let Err(errno) = write(&mut writer, plain, request) {
                result = errno;
                break;
            }
            next = request.next;
        }
        writer.keep();
        // SAFETY: what the work requests name is the application's affair.
        let any = queue.publish();
        if !qp.single {
            qp.send_lock.unlock();
        }
        *bad_wr = next;
        if any && let Err(errno) = qp.doorbell.ring() {
            return doorbell_failed(wr, bad_wr, errno.raw());
        }
        result
    }
}

/// The work requests are in the queue, but the kernel would not hear of them:
/// none of them may be counted on.
///
/// # Safety
/// `bad_wr` is writable.
#[cold]
unsafe fn doorbell_failed(
    first: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
    errno: c_int,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { *bad_wr = first };
    errno
}

/// Posts a list of receives, under the lock that the caller holds. Returns the
/// first that was not posted, and why.
///
/// # Safety
/// The list is the application's.
#[inline(always)]
unsafe fn post_receives(
    queue: &mut RecvQueue,
    wr: *mut ibv_recv_wr,
) -> Result<(), (*mut ibv_recv_wr, c_int)> {
    // SAFETY: as the caller says.
    unsafe {
        let mut writer = queue.begin();
        let mut next = wr;
        let mut result = Ok(());
        while let Some(request) = next.as_ref() {
            let pushed =
                scatter_list(request.sg_list, request.num_sge, writer.max_sge()).and_then(|list| {
                    writer
                        .push(request.wr_id, list)
                        .map_err(|error| error.errno())
                });
            if let Err(errno) = pushed {
                result = Err((next, errno));
                break;
            }
            next = request.next;
        }
        writer.keep();
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        result
    }
}

/// Ends a receive verb.
///
/// # Safety
/// `bad_wr` is null or writable.
#[inline(always)]
unsafe fn end_receives(
    result: Result<(), (*mut ibv_recv_wr, c_int)>,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    match result {
        Ok(()) => 0,
        Err((bad, errno)) => {
            if let Some(place) = NonNull::new(bad_wr) {
                // SAFETY: as the caller says.
                unsafe { place.write(bad) };
            }
            errno
        }
    }
}

/// `ibv_post_recv`. EINVAL for a bad work request, the RESET state, or a
/// queue pair with a shared receive queue; ENOMEM for a full queue.
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own; the queue is this call's once the lock is
    // taken or the application has promised it.
    unsafe {
        let qp = qp_of(qp);
        if wr.is_null() || !qp.may_receive() {
            return end_receives(Err((wr, libc::EINVAL)), bad_wr);
        }
        if !qp.single {
            qp.recv_lock.lock();
        }
        let result = match &mut *qp.recv.get() {
            Some(queue) => post_receives(queue, wr),
            None => Err((wr, libc::EINVAL)),
        };
        if !qp.single {
            qp.recv_lock.unlock();
        }
        end_receives(result, bad_wr)
    }
}

/// `ibv_post_srq_recv`. EINVAL for a bad work request, ENOMEM for a full
/// queue.
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe {
        let srq = srq_of(srq);
        if !srq.single {
            srq.lock.lock();
        }
        let result = post_receives(&mut *srq.recv.get(), wr);
        if !srq.single {
            srq.lock.unlock();
        }
        end_receives(result, bad_wr)
    }
}
