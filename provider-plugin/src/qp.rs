//! Queue pairs: creation, states, destruction.

use core::cell::{Cell, UnsafeCell};
use core::ffi::c_int;
use core::mem::{ManuallyDrop, MaybeUninit};

use ring::BiasedLock;
use uverbs::{
    AccessFlags, AhAttr, CqHandle, QpAttr, QpAttrMask, QpCap, QpHandle, QpInit, QpState, QpType,
    SrqHandle, Udata,
};

use crate::abi::*;
use crate::ah::address;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::layout;
use crate::pd::{PdRef, pd_of};
use crate::writers::{Receives, Sends};
use crate::{cq, srq, wr_ex};

/// What a kind of device has for queue pairs.
pub trait Device: cq::Device + srq::Device {
    /// The writer of sends.
    type SendQueue: Sends;
    /// The writer of receives.
    type RecvQueue: Receives;
    /// What else a queue pair has; read by any thread.
    type Besides;

    /// Makes the kernel object and its queues. `operations` are those
    /// (`IBV_QP_EX_WITH_*`) that will be posted, if the application has said.
    ///
    /// # Safety
    /// The attributes name live objects of the context.
    unsafe fn make_qp(
        ctx: &CtxRef,
        attr: &ibv_qp_init_attr,
        init: &QpInit,
        operations: Option<u64>,
    ) -> Result<Made<Self>, Errno>;

    /// The queue pair is where it stays; nobody uses it yet.
    fn placed(_besides: &mut Self::Besides) {}

    /// A command has put the queue pair into a state.
    ///
    /// # Safety
    /// The queue pair is live.
    unsafe fn changed(qp: &Qp<Self>, state: u32);

    /// The sizes of the queue pair, if the kernel does not know them.
    fn sizes(qp: &Qp<Self>) -> Option<QpCap>;

    /// The kernel object is gone, the queue pair goes next.
    ///
    /// # Safety
    /// The completion queues are live.
    unsafe fn gone(_qp: &Qp<Self>) {}

    /// Tells the device of a batch that was published, where publishing does
    /// not; an errno. Outside of the critical section.
    fn ring(_qp: &Qp<Self>) -> c_int {
        0
    }

    /// The operations (`IBV_QP_EX_WITH_*`) that a type of queue pair has
    /// besides those of all devices.
    fn more_operations(_qp_type: u32) -> u64 {
        0
    }

    /// Sets the functions for those of them that the application asked for.
    fn set_more(_qp: &mut verbs_qp, _asked: u64) {}
}

/// A queue pair that nobody uses yet.
pub struct Made<D: Device> {
    /// The kernel object.
    pub object: uverbs::Qp<CtxRef>,
    /// The send queue.
    pub send: D::SendQueue,
    /// The receive queue; none with a shared one.
    pub recv: Option<D::RecvQueue>,
    /// What else there is.
    pub besides: D::Besides,
    /// The sizes that it has.
    pub cap: QpCap,
}

/// A queue pair.
#[repr(C)]
pub struct Qp<D: Device> {
    /// What libibverbs and applications see.
    pub public: verbs_qp,
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
    pub send: UnsafeCell<D::SendQueue>,
    /// What else the device has.
    pub besides: D::Besides,
    /// Guards `recv`.
    pub recv_lock: BiasedLock,
    /// The receive queue; none with a shared one.
    recv: UnsafeCell<Option<D::RecvQueue>>,
    /// Where it is, or null: what a posting thread asks before it has the lock
    /// must be no reference into the cell.
    recv_place: *mut D::RecvQueue,
    /// Destroyed by `destroy_qp` through its handle, never dropped.
    object: ManuallyDrop<uverbs::Qp<CtxRef>>,
    _pd: PdRef,
}

/// The provider's view of a queue pair.
///
/// # Safety
/// `qp` is a live queue pair of a context of ours and of this kind of device.
#[inline(always)]
pub unsafe fn qp_of<'a, D: Device, T>(qp: *mut T) -> &'a Qp<D> {
    const { assert!(core::mem::offset_of!(Qp<D>, public) == 0) };
    // SAFETY: every ibv_qp and ibv_qp_ex of such a context begins a Qp.
    unsafe { &*qp.cast::<Qp<D>>() }
}

impl<D: Device> Qp<D> {
    /// Can send work requests be posted in this state? (IBA 10.3.1: from
    /// "ready to send" on; in the error states they are flushed.)
    ///
    /// The state is the one that libibverbs keeps; the device may have moved
    /// on to an error state, where posting is allowed too.
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
    pub fn recv(&self) -> *mut D::RecvQueue {
        self.recv_place
    }
}

/// Makes a queue pair; `attr.cap` gets the sizes that it has.
///
/// # Safety
/// The attributes name live objects of one context.
unsafe fn create<D: Device>(
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
    comp_mask: u32,
    operations: Option<u64>,
) -> Result<Box<MaybeUninit<Qp<D>>>, Errno> {
    let mut place = try_box(MaybeUninit::<Qp<D>>::uninit()).map_err(|(_, errno)| errno)?;
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
    // SAFETY: as the caller says.
    let made = unsafe { D::make_qp(&ctx, attr, &init, operations)? };
    attr.cap = cap_to_c(&made.cap);
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
    base.handle = made.object.handle().0;
    base.qp_num = made.object.qp_num();
    base.state = IBV_QPS_RESET;
    base.qp_type = attr.qp_type;
    layout::current().set_qp_comp_mask(&mut public, comp_mask);
    let qp = place.write(Qp {
        public,
        single: domain.has_thread_domain(),
        datagram: attr.qp_type == IBV_QPT_UD,
        send_lock: BiasedLock::new(),
        failed: Cell::new(libc::EINVAL),
        send: UnsafeCell::new(made.send),
        besides: made.besides,
        recv_lock: BiasedLock::new(),
        recv: UnsafeCell::new(made.recv),
        recv_place: core::ptr::null_mut(),
        object: ManuallyDrop::new(made.object),
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    // SAFETY: nobody uses the object yet; it stays where it is.
    if let Some(recv) = unsafe { &mut *qp.recv.get() } {
        qp.recv_place = recv;
    }
    D::placed(&mut qp.besides);
    let base = &raw mut qp.public.qp_ex.qp_base;
    // SAFETY: nobody uses the object yet.
    unsafe { events::init(&raw mut (*base).mutex, &raw mut (*base).cond) };
    Ok(place)
}

/// `ibv_create_qp`.
pub unsafe extern "C" fn create_qp<D: Device>(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe { Ok(Box::into_raw(create::<D>(pd, &mut *attr, 0, None)?).cast()) })
}

/// `ibv_create_qp_ex`. EOPNOTSUPP for attributes, flags and operations that
/// the device does not have for this type of queue pair.
pub unsafe extern "C" fn create_qp_ex<D: Device>(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const MEMBERS: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // SAFETY: libibverbs passes the application's attributes, of which only
    // the announced members are read. They begin as `ibv_qp_init_attr` does.
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
            if asked & !wr_ex::operations::<D>((*attr).qp_type) != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Some(asked)
        } else {
            None
        };
        if !has(IBV_QP_INIT_ATTR_PD) || (*attr).pd.is_null() {
            return Err(Errno::INVAL);
        }
        let mut qp = create::<D>((*attr).pd, &mut *attr.cast(), VERBS_QP_EX, operations)?;
        if let Some(operations) = operations {
            let qp = qp.assume_init_mut();
            wr_ex::set_functions::<D>(&mut qp.public, operations, qp.single);
        }
        Ok(Box::into_raw(qp).cast())
    })
}

const _: () = {
    use core::mem::offset_of;
    // The basic attributes are the extended ones' beginning.
    assert!(offset_of!(ibv_qp_init_attr_ex, cap) == offset_of!(ibv_qp_init_attr, cap));
    assert!(
        offset_of!(ibv_qp_init_attr_ex, sq_sig_all) == offset_of!(ibv_qp_init_attr, sq_sig_all)
    );
};

/// Capacities as the C interface has them.
fn cap_to_c(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

fn address_to_c(from: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.grh.dgid },
            flow_label: from.grh.flow_label,
            sgid_index: from.grh.sgid_index,
            hop_limit: from.grh.hop_limit,
            traffic_class: from.grh.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global.into(),
        port_num: from.port_num,
    }
}

/// The mask of attributes, of those that the plain commands know.
fn known_mask(mask: c_int) -> Result<QpAttrMask, Errno> {
    let mask = mask as u32;
    if mask >= IBV_QP_RATE_LIMIT {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(QpAttrMask::from_bits_retain(mask as _))
}

/// Converts the attributes of the C interface.
fn attr_from_c(from: &ibv_qp_attr) -> QpAttr {
    QpAttr {
        qp_state: QpState(from.qp_state as _),
        cur_qp_state: QpState(from.cur_qp_state as _),
        path_mtu: from.path_mtu as u8,
        path_mig_state: from.path_mig_state as u8,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: AccessFlags::from_bits_retain(from.qp_access_flags as _),
        ah_attr: address(&from.ah_attr),
        alt_ah_attr: address(&from.alt_ah_attr),
        cap: QpCap::default(),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify != 0,
        sq_draining: from.sq_draining != 0,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: 0,
    }
}

/// As [`attr_from_c`], the other way.
fn attr_to_c(from: &QpAttr, to: &mut ibv_qp_attr) {
    to.qp_state = from.qp_state.0 as u32;
    to.cur_qp_state = from.cur_qp_state.0 as u32;
    to.path_mtu = from.path_mtu.into();
    to.path_mig_state = from.path_mig_state.into();
    to.qkey = from.qkey;
    to.rq_psn = from.rq_psn;
    to.sq_psn = from.sq_psn;
    to.dest_qp_num = from.dest_qp_num;
    to.qp_access_flags = from.qp_access_flags.bits();
    to.cap = cap_to_c(&from.cap);
    to.ah_attr = address_to_c(&from.ah_attr);
    to.alt_ah_attr = address_to_c(&from.alt_ah_attr);
    to.pkey_index = from.pkey_index;
    to.alt_pkey_index = from.alt_pkey_index;
    to.sq_draining = from.sq_draining.into();
    to.max_rd_atomic = from.max_rd_atomic;
    to.max_dest_rd_atomic = from.max_dest_rd_atomic;
    to.min_rnr_timer = from.min_rnr_timer;
    to.port_num = from.port_num;
    to.timeout = from.timeout;
    to.retry_cnt = from.retry_cnt;
    to.rnr_retry = from.rnr_retry;
    to.alt_port_num = from.alt_port_num;
    to.alt_timeout = from.alt_timeout;
}

/// `ibv_modify_qp`. libibverbs keeps the state.
pub unsafe extern "C" fn modify_qp<D: Device>(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and the
    // application's attributes, of which the kernel uses those in the mask.
    entry::int(|| unsafe {
        let known = known_mask(mask)?;
        let from = &*attr;
        let own: &Qp<D> = qp_of(qp);
        own.object
            .modify(&attr_from_c(from), known, Udata::none())?;
        if mask as u32 & IBV_QP_STATE != 0 {
            D::changed(own, from.qp_state);
        }
        Ok(())
    })
}

/// `ibv_query_qp`.
pub unsafe extern "C" fn query_qp<D: Device>(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and room for the
    // answers.
    entry::int(|| unsafe {
        let own: &Qp<D> = qp_of(qp);
        let (mut from, mut made) = own.object.query(known_mask(mask)?)?;
        if let Some(cap) = D::sizes(own) {
            from.cap = cap;
            made.cap = cap;
        }
        attr_to_c(&from, &mut *attr);
        *init = ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: cap_to_c(&made.cap),
            qp_type: (*qp).qp_type,
            sq_sig_all: made.sq_sig_all.into(),
        };
        Ok(())
    })
}

/// `ibv_destroy_qp`. EBUSY, and the queue pair lives on, while it is in a
/// multicast group. Waits until the application has acknowledged every event
/// that it read.
pub unsafe extern "C" fn destroy_qp<D: Device>(qp: *mut ibv_qp) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, which no other call
    // uses any more except those that acknowledge events; its completion
    // queues are live as long as it is.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*qp).context);
        match uverbs::qp::destroy(&ctx, QpHandle((*qp).handle)) {
            Ok(seen) => events::wait_qp(qp, seen),
            Err(error) => destroyed(Err(error.into()))?,
        }
        D::gone(qp_of(qp));
        drop(Box::from_raw(qp.cast::<Qp<D>>()));
        Ok(())
    })
}
