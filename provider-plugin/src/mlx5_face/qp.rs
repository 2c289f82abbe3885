//! Queue pairs: creation, states, destruction.

use core::cell::{Cell, UnsafeCell};
use core::ffi::c_int;
use core::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use mlx5::{QueuePair, RecvQueue, Role, SendQueue, Work};
use ring::BiasedLock;
use uverbs::{CqHandle, QpCap, QpHandle, QpInit, QpType, SrqHandle, Udata};

use crate::abi::*;
use crate::access::locked;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::cq::cq_of;
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::layout;
use crate::mlx5_face::cq::Cq;
use crate::mlx5_face::{Mlx5, wr_ex};
use crate::pd::{PdRef, pd_of};
use crate::qp::{attr_from_c, attr_to_c, cap_to_c, known_mask};
use crate::srq::srq_of;

/// A queue pair.
#[repr(C)]
pub struct Qp {
    public: verbs_qp,
    /// One caller at a time by the application's promise: no locks.
    pub single: bool,
    /// Its sends name an address handle.
    pub datagram: bool,
    /// Guards `send` and `failed`.
    pub send_lock: BiasedLock,
    /// The first error of the batch between wr_start and wr_complete; EINVAL
    /// out of one.
    pub failed: Cell<c_int>,
    /// The send queue.
    pub send: UnsafeCell<SendQueue>,
    /// Guards `recv`.
    pub recv_lock: BiasedLock,
    /// The receive queue; none with a shared one.
    recv: UnsafeCell<Option<RecvQueue>>,
    /// Where it is, or null: what a posting thread asks before it has the lock
    /// must be no reference into the cell.
    recv_place: *mut RecvQueue,
    work: Arc<Work>,
    /// What the queue pair was made with, for a query.
    cap: QpCap,
    /// Destroyed by `destroy_qp` through its handle, never dropped.
    object: ManuallyDrop<uverbs::Qp<CtxRef>>,
    _pd: PdRef,
}

const _: () = assert!(core::mem::offset_of!(Qp, public) == 0);

/// The provider's view of a queue pair.
///
/// # Safety
/// `qp` is a live queue pair of an mlx5 context of ours.
#[inline(always)]
pub unsafe fn qp_of<'a, T>(qp: *mut T) -> &'a Qp {
    // SAFETY: every ibv_qp and ibv_qp_ex of such a context begins a Qp.
    unsafe { &*qp.cast::<Qp>() }
}

impl Qp {
    /// Can send work requests be posted in this state? (IBA 10.3.1.) The state
    /// is the one that libibverbs keeps.
    #[inline(always)]
    pub fn may_send(&self) -> bool {
        self.public.qp_ex.qp_base.state >= IBV_QPS_RTS
    }

    /// Can receive work requests be posted in this state?
    #[inline(always)]
    pub fn may_receive(&self) -> bool {
        self.public.qp_ex.qp_base.state != IBV_QPS_RESET
    }

    /// The receive queue, to be used under `recv_lock`; null if there is none.
    #[inline(always)]
    pub fn recv(&self) -> *mut RecvQueue {
        self.recv_place
    }

    /// Its completion queues, each once.
    ///
    /// # Safety
    /// They are live.
    unsafe fn cqs<'a>(&self) -> impl Iterator<Item = &'a Cq> {
        let base = &self.public.qp_ex.qp_base;
        let both = base.send_cq != base.recv_cq;
        // SAFETY: as the caller says.
        unsafe {
            [Some(cq_of(base.send_cq)), both.then(|| cq_of(base.recv_cq))]
                .into_iter()
                .flatten()
        }
    }
}

/// Makes a queue pair; `attr.cap` gets the sizes that it has.
///
/// # Safety
/// The attributes name live objects of one context.
unsafe fn create(
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
    comp_mask: u32,
) -> Result<Box<MaybeUninit<Qp>>, Errno> {
    let mut place = try_box(MaybeUninit::<Qp>::uninit()).map_err(|(_, errno)| errno)?;
    // SAFETY: as the caller says.
    let (context, domain) = unsafe { ((*pd).context, pd_of(pd)) };
    // SAFETY: a domain's context is open.
    let (ctx, async_fd) = unsafe { (CtxRef::of(context), (*context).async_fd) };
    // SAFETY: null or live, as the caller says.
    let (send_cq, recv_cq, srq) = unsafe {
        (
            attr.send_cq.as_ref().map(|cq| CqHandle(cq.handle)),
            attr.recv_cq.as_ref().map(|cq| CqHandle(cq.handle)),
            attr.srq.as_ref().map(|srq| SrqHandle(srq.handle)),
        )
    };
    if send_cq.is_none() || recv_cq.is_none() {
        return Err(Errno::INVAL);
    }
    // SAFETY: live, and of this context.
    let shared = srq.map(|_| unsafe {
        let own = srq_of::<Mlx5>(attr.srq);
        locked(own.single, &own.lock, || {
            Arc::clone((*own.recv.get()).work())
        })
    });
    let cap = &attr.cap;
    let init = QpInit {
        qp_type: QpType(attr.qp_type as _),
        pd: Some(domain.handle()),
        send_cq,
        recv_cq,
        srq,
        cap: QpCap {
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge,
            max_inline_data: cap.max_inline_data,
        },
        sq_sig_all: attr.sq_sig_all != 0,
        user_handle: place.as_ptr().expose_provenance() as u64,
        async_fd: Some(async_fd),
        ..QpInit::default()
    };
    let QueuePair {
        object,
        send,
        recv,
        work,
        cap,
    } = QueuePair::create(&ctx, ctx.mlx5()?, &init, shared)?;
    // SAFETY: live, as the caller says. It can have no completions yet.
    unsafe {
        cq_of::<Mlx5, _>(attr.send_cq).attach(&work, Role::SEND)?;
        if let Err(errno) = cq_of::<Mlx5, _>(attr.recv_cq).attach(&work, Role::RECEIVE) {
            cq_of::<Mlx5, _>(attr.send_cq).detach(&work);
            return Err(errno);
        }
    }
    attr.cap = cap_to_c(&cap);
    // SAFETY: zeros are valid for the public part: null pointers, absent
    // functions, integers.
    let mut public: verbs_qp = unsafe { core::mem::zeroed() };
    let base = &mut public.qp_ex.qp_base;
    base.context = context;
    base.qp_context = attr.qp_context;
    base.pd = pd;
    base.send_cq = attr.send_cq;
    base.recv_cq = attr.recv_cq;
    base.srq = attr.srq;
    base.handle = object.handle().0;
    base.qp_num = object.qp_num();
    base.state = IBV_QPS_RESET;
    base.qp_type = attr.qp_type;
    layout::current().set_qp_comp_mask(&mut public, comp_mask);
    let qp = place.write(Qp {
        public,
        single: domain.has_thread_domain(),
        datagram: attr.qp_type == IBV_QPT_UD,
        send_lock: BiasedLock::new(),
        failed: Cell::new(libc::EINVAL),
        send: UnsafeCell::new(send),
        recv_lock: BiasedLock::new(),
        recv: UnsafeCell::new(recv),
        recv_place: core::ptr::null_mut(),
        work,
        cap,
        object: ManuallyDrop::new(object),
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    // SAFETY: nobody uses the object yet; it stays where it is.
    if let Some(recv) = unsafe { &mut *qp.recv.get() } {
        qp.recv_place = recv;
    }
    let base = &raw mut qp.public.qp_ex.qp_base;
    // SAFETY: nobody uses the object yet.
    unsafe { events::init(&raw mut (*base).mutex, &raw mut (*base).cond) };
    Ok(place)
}

/// `ibv_create_qp`. EOPNOTSUPP for types other than RC, UC and UD.
pub unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe { Ok(Box::into_raw(create(pd, &mut *attr, 0)?).cast()) })
}

/// `ibv_create_qp_ex`. EOPNOTSUPP for attributes, flags and operations that
/// are not done for this type of queue pair.
pub unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const MEMBERS: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // SAFETY: libibverbs passes the application's attributes, of which only
    // the announced members are read. They begin as `ibv_qp_init_attr` does
    // (asserted in `crate::qp`).
    entry::pointer(|| unsafe {
        let comp_mask = (*attr).comp_mask;
        let has = |member| comp_mask & member != 0;
        if comp_mask & !MEMBERS != 0
            || has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && (*attr).create_flags != 0
        {
            return Err(Errno::OPNOTSUPP);
        }
        let operations = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
            let asked = (*attr).send_ops_flags;
            if asked & !wr_ex::operations((*attr).qp_type) != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Some(asked)
        } else {
            None
        };
        if !has(IBV_QP_INIT_ATTR_PD) || (*attr).pd.is_null() {
            return Err(Errno::INVAL);
        }
        let mut qp = create((*attr).pd, &mut *attr.cast(), VERBS_QP_EX)?;
        if let Some(operations) = operations {
            let qp = qp.assume_init_mut();
            wr_ex::set_functions(&mut qp.public, operations, qp.single);
        }
        Ok(Box::into_raw(qp).cast())
    })
}

/// `ibv_modify_qp`. libibverbs keeps the state.
pub unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and the
    // application's attributes, of which the kernel uses those in the mask.
    entry::int(|| unsafe {
        let known = known_mask(mask)?;
        let from = &*attr;
        let own = qp_of(qp);
        own.object
            .modify(&attr_from_c(from), known, Udata::none())?;
        if mask as u32 & IBV_QP_STATE != 0 && from.qp_state == IBV_QPS_RESET {
            // The device counts from 0 again.
            for cq in own.cqs() {
                cq.clean(&own.work);
            }
            locked(own.single, &own.send_lock, || (*own.send.get()).reset());
            if let Some(recv) = own.recv().as_mut() {
                locked(own.single, &own.recv_lock, || recv.reset());
            }
        }
        Ok(())
    })
}

/// `ibv_query_qp`.
pub unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and room for the
    // answers.
    entry::int(|| unsafe {
        let own = qp_of(qp);
        let (mut from, made) = own.object.query(known_mask(mask)?)?;
        // The kernel does not know how the queues are laid out.
        from.cap = own.cap;
        attr_to_c(&from, &mut *attr);
        *init = ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: cap_to_c(&own.cap),
            qp_type: (*qp).qp_type,
            sq_sig_all: made.sq_sig_all.into(),
        };
        Ok(())
    })
}

/// `ibv_destroy_qp`. EBUSY, and the queue pair lives on, while it is in a
/// multicast group. Waits until the application has acknowledged every event
/// that it read. Its completions that were not read are gone.
pub unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, which no other call
    // uses any more except those that acknowledge events; its completion
    // queues are live as long as it is.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*qp).context);
        let own = qp_of(qp);
        match uverbs::qp::destroy(&ctx, QpHandle((*qp).handle)) {
            Ok(seen) => events::wait_qp(qp, seen),
            Err(error) => destroyed(Err(error.into()))?,
        }
        for cq in own.cqs() {
            cq.detach(&own.work);
        }
        drop(Box::from_raw(qp.cast::<Qp>()));
        Ok(())
    })
}
