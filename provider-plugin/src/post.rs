//! The data path in: work requests as lists.
//!
//! What a work request of the C interface says, and what is answered for one
//! that is not posted. How a device takes a whole list of sends is its face's.

use core::ffi::c_int;
use core::hint::cold_path;
use core::ptr::NonNull;

use ring::BiasedLock;
use uverbs::{OneElement, Opcode, SendFlags, Sge};

use crate::abi::*;
use crate::qp::{self, Qp, qp_of};
use crate::srq::{self, Srq, srq_of};
use crate::writers::{Entry, Receives, ReceivesQuickly, Sends};

const _: () = {
    assert!(size_of::<ibv_sge>() == size_of::<Sge>());
    assert!(align_of::<ibv_sge>() >= align_of::<Sge>());
};

/// A work request of the C interface, of one element, as the quick ways read it.
pub struct Posted<'a>(&'a ibv_send_wr);

impl<'a> Posted<'a> {
    /// # Safety
    /// The work request says that it has one element, and it is there.
    #[inline(always)]
    pub unsafe fn new(wr: &'a ibv_send_wr) -> Self {
        Self(wr)
    }
}

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
        // SAFETY: by the contract of `new`; the two types are the same.
        unsafe { &*self.0.sg_list.cast::<Sge>() }
    }
}

/// A scatter list of the application, if it is no longer than `max`.
///
/// # Safety
/// `list` is readable for `num_sge` elements.
#[inline(always)]
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

/// Writes any work request and adds it to the batch.
///
/// # Safety
/// The work request is the application's, with what its opcode needs.
#[inline(always)]
unsafe fn write<Q: Sends>(queue: &mut Q, datagram: bool, wr: &ibv_send_wr) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    unsafe { try_write(queue, datagram, wr)? };
    queue.accept();
    Ok(())
}

/// # Safety
/// As for [`write()`].
#[inline(always)]
unsafe fn try_write<Q: Sends>(
    queue: &mut Q,
    datagram: bool,
    wr: &ibv_send_wr,
) -> Result<(), c_int> {
    // A negative number is too large a one.
    let num_sge = wr.num_sge as u32 as usize;
    // SAFETY: as the caller says.
    let list = unsafe { scatter_list(wr.sg_list, num_sge, queue.max_sge())? };
    let flags = SendFlags::from_bits_retain(wr.send_flags);
    let mut entry = queue.open(wr.wr_id, Opcode(wr.opcode), flags)?;
    entry.immediate_or_key(wr.imm_data);
    entry.xrc(wr.xrc_remote_srqn);
    // SAFETY: the opcode says which member of each union the application set.
    unsafe {
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM if datagram => {
                let ud = wr.wr.ud;
                if ud.ah.is_null() {
                    return Err(libc::EINVAL);
                }
                entry.ud(ud.ah, ud.remote_qpn, ud.remote_qkey);
            }
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => {}
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                entry.rdma(wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let operands = wr.wr.atomic;
                if !Q::Entry::takes_atomic(operands.remote_addr, list) {
                    return Err(libc::EINVAL);
                }
                entry.atomic(
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
                return entry.bind_window(bind.mw, bind.rkey, &bind.bind_info);
            }
            _ => return Err(libc::EINVAL),
        }
        if flags.contains(SendFlags::INLINE) {
            let pieces = list
                .iter()
                .map(|sge| (sge.addr as *const u8, sge.length as usize));
            // SAFETY: the application says that the pieces are readable.
            entry.inline(pieces)
        } else {
            entry.gather(list)
        }
    }
}

/// Writes what is left of a list, from `next` on, which is moved on; the errno
/// is that of the work request that is `next` then.
///
/// # Safety
/// The list is the application's; in the critical section.
#[inline(always)]
pub unsafe fn write_list<Q: Sends>(
    queue: &mut Q,
    datagram: bool,
    next: &mut *mut ibv_send_wr,
) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    unsafe {
        while let Some(request) = next.as_ref() {
            write(queue, datagram, request)?;
            *next = request.next;
        }
    }
    Ok(())
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

/// Adds what is left of a list of receives; 0, or the errno of the first that
/// is refused, which is reported.
///
/// # Safety
/// The list is the application's; in the critical section.
#[inline(always)]
unsafe fn push_list<Q: Receives>(
    queue: &mut Q,
    mut next: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        while let Some(request) = next.as_ref() {
            let num_sge = request.num_sge as u32 as usize;
            let pushed = scatter_list(request.sg_list, num_sge, queue.max_sge())
                .and_then(|list| queue.push(request.wr_id, list));
            if let Err(errno) = pushed {
                report(next, bad_wr);
                return errno;
            }
            next = request.next;
        }
    }
    0
}

/// What receives are posted to: a queue pair, or a shared receive queue.
///
/// Passed on as it is, and asked again where need be: so the quick way keeps
/// nothing of it in registers.
pub trait Receiver {
    /// Its queue.
    type Queue: Receives;

    /// Guards the queue.
    fn lock(&self) -> &BiasedLock;
    /// One caller at a time by the application's promise: no lock.
    fn single(&self) -> bool;
    /// Where the queue is; null if there is none.
    fn queue(&self) -> *mut Self::Queue;
}

/// Posts a list of receives.
///
/// # Safety
/// `queue` is its queue; the list is the application's. The queue is this call's
/// once the lock is taken or the application has promised it.
#[inline(always)]
unsafe fn receives<R: Receiver>(
    own: &R,
    queue: *mut R::Queue,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        // Whatever takes longer goes on in a function of its own, so that this
        // one saves no registers.
        if !own.single() && !own.lock().try_quick() {
            return receive_shared(own, wr, bad_wr);
        }
        if !(*wr).next.is_null() {
            // So that one alone is all in a row.
            cold_path();
            return receive_several(own, wr, bad_wr);
        }
        let mut batch = (*queue).begin();
        if !push_quickly(&mut batch, &*wr) {
            batch.keep();
            return receive_rest(own, wr, bad_wr);
        }
        // SAFETY: what the receive names is the application's affair.
        batch.publish();
        // Of a queue with one owner nobody took it: a plain store to leave,
        // less than to ask.
        own.lock().unlock_quick();
        0
    }
}

/// [`receives`] of more than one, in the critical section that was entered.
///
/// # Safety
/// As for [`receives`].
#[inline(never)]
unsafe extern "C" fn receive_several<R: Receiver>(
    own: &R,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { receive(own, wr, bad_wr, BiasedLock::unlock_quick) }
}

/// [`receives`] of a thread that is not the only one to post here.
///
/// # Safety
/// As for [`receives`].
#[inline(never)]
unsafe extern "C" fn receive_shared<R: Receiver>(
    own: &R,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        if !own.lock().try_spin() {
            return receive_contended(own, wr, bad_wr);
        }
        receive(own, wr, bad_wr, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// As for [`receives`].
#[cold]
#[inline(never)]
unsafe extern "C" fn receive_contended<R: Receiver>(
    own: &R,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    own.lock().lock_shared();
    // SAFETY: as the caller says.
    unsafe {
        (*own.queue()).begin().keep();
        receive_rest(own, wr, bad_wr)
    }
}

/// Adds a receive to the batch by the quick way, if it is one of nearly all.
///
/// # Safety
/// The work request is the application's.
#[inline(always)]
unsafe fn push_quickly(batch: &mut impl ReceivesQuickly, wr: &ibv_recv_wr) -> bool {
    // SAFETY: the application says that the element is there; the two types are
    // the same.
    wr.num_sge == 1 && batch.push_one(wr.wr_id, unsafe { &*wr.sg_list.cast::<Sge>() })
}

/// Posts a list of receives in the critical section that was entered, and
/// leaves it.
///
/// # Safety
/// As for [`receives`].
#[inline(always)]
unsafe fn receive<R: Receiver>(
    own: &R,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    leave: fn(&BiasedLock),
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let mut batch = (*own.queue()).begin();
        let mut next = wr;
        while let Some(request) = next.as_ref() {
            if !push_quickly(&mut batch, request) {
                batch.keep();
                return receive_rest(own, next, bad_wr);
            }
            next = request.next;
        }
        // SAFETY: what the receives name is the application's affair.
        batch.publish();
        leave(own.lock());
        0
    }
}

/// Posts what is left of a list from `next` on, in the critical section that
/// was entered, in any way that it needs.
///
/// # Safety
/// As for [`receives`].
#[inline(never)]
unsafe extern "C" fn receive_rest<R: Receiver>(
    own: &R,
    next: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let queue = &mut *own.queue();
        let result = push_list(queue, next, bad_wr);
        // SAFETY: what the receives name is the application's affair.
        queue.publish();
        if !own.single() {
            own.lock().unlock();
        }
        result
    }
}

/// `ibv_post_recv`. EINVAL for a bad work request, the RESET state, or a
/// queue pair with a shared receive queue; ENOMEM for a full queue. On an
/// error `*bad_wr` is the first that was not posted; those before it were.
pub unsafe extern "C" fn post_recv<D: qp::Device>(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue pair of ours and a list of
    // work requests of its own.
    unsafe {
        let own: &Qp<D> = qp_of(qp);
        let queue = own.receiving();
        if wr.is_null() || queue.is_null() {
            return refuse(wr, bad_wr);
        }
        receives(own, queue, wr, bad_wr)
    }
}

/// `ibv_post_srq_recv`. EINVAL for a bad work request, ENOMEM for a full
/// queue; `*bad_wr` as with [`post_recv`].
pub unsafe extern "C" fn post_srq_recv<D: srq::Device>(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe {
        let own: &Srq<D> = srq_of(srq);
        if wr.is_null() {
            return refuse(wr, bad_wr);
        }
        receives(own, own.queue(), wr, bad_wr)
    }
}
