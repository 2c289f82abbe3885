//! Shared receive queues.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{ManuallyDrop, MaybeUninit};

use ring::BiasedLock;
use uverbs::{SrqHandle, SrqInit, SrqKind, SrqModify};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, pd_of};
use crate::writers::Receives;

/// What a kind of device has for shared receive queues.
pub trait Device: Sized + 'static {
    /// The writer of receives.
    type SharedQueue: Receives;

    /// Makes the kernel object and its queue.
    fn make(ctx: &CtxRef, init: &SrqInit) -> Result<Made<Self>, Errno>;

    /// Changes the limit, the size, or both. Receives that are posted stay
    /// posted.
    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno>;
}

/// A shared receive queue that nobody uses yet.
pub struct Made<D: Device> {
    /// The kernel object.
    pub object: uverbs::Srq<CtxRef>,
    /// The queue.
    pub recv: D::SharedQueue,
    /// The number that the device knows it by.
    pub srq_num: u32,
    /// How many receives it holds.
    pub max_wr: u32,
    /// How many elements each may have.
    pub max_sge: u32,
}

/// A shared receive queue.
#[repr(C)]
pub struct Srq<D: Device> {
    public: verbs_srq,
    /// One caller at a time by the application's promise: no lock.
    pub single: bool,
    /// Guards `recv`.
    pub lock: BiasedLock,
    /// The queue.
    pub recv: UnsafeCell<D::SharedQueue>,
    /// Destroyed by `destroy_srq` through its handle, never dropped.
    pub object: ManuallyDrop<uverbs::Srq<CtxRef>>,
    _pd: PdRef,
}

/// The provider's view of a shared receive queue.
///
/// # Safety
/// `srq` is a live shared receive queue of a context of ours and of this kind
/// of device.
#[inline(always)]
pub unsafe fn srq_of<'a, D: Device>(srq: *mut ibv_srq) -> &'a Srq<D> {
    const { assert!(core::mem::offset_of!(Srq<D>, public) == 0) };
    // SAFETY: every ibv_srq of such a context begins an Srq.
    unsafe { &*srq.cast::<Srq<D>>() }
}

/// Makes a shared receive queue; `attr` gets the size that it has.
///
/// # Safety
/// `pd` is a live domain.
unsafe fn create<D: Device>(
    pd: *mut ibv_pd,
    srq_context: *mut core::ffi::c_void,
    attr: &mut ibv_srq_attr,
) -> Result<*mut ibv_srq, Errno> {
    let mut place = try_box(MaybeUninit::<Srq<D>>::uninit()).map_err(|(_, errno)| errno)?;
    // SAFETY: as the caller says.
    let (context, domain) = unsafe { ((*pd).context, pd_of(pd)) };
    // SAFETY: a domain's context is open.
    let (ctx, async_fd) = unsafe { (CtxRef::of(context), (*context).async_fd) };
    let init = SrqInit {
        pd: domain.handle(),
        user_handle: place.as_ptr().expose_provenance() as u64,
        max_wr: attr.max_wr,
        max_sge: attr.max_sge,
        limit: attr.srq_limit,
        kind: SrqKind::Basic,
        async_fd: Some(async_fd),
    };
    let made = D::make(&ctx, &init)?;
    attr.max_wr = made.max_wr;
    attr.max_sge = made.max_sge;
    // SAFETY: zeros are valid for the public part: null pointers, integers.
    let mut public: verbs_srq = unsafe { core::mem::zeroed() };
    public.srq.context = context;
    public.srq.srq_context = srq_context;
    public.srq.pd = pd;
    public.srq.handle = made.object.handle().0;
    public.srq_type = IBV_SRQT_BASIC;
    public.srq_num = made.srq_num;
    let srq = place.write(Srq {
        public,
        single: domain.has_thread_domain(),
        lock: BiasedLock::new(),
        recv: UnsafeCell::new(made.recv),
        object: ManuallyDrop::new(made.object),
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    // SAFETY: nobody uses the object yet.
    unsafe {
        events::init(&raw mut srq.public.srq.mutex, &raw mut srq.public.srq.cond);
    }
    Ok(Box::into_raw(place).cast())
}

/// `ibv_create_srq`.
pub unsafe extern "C" fn create_srq<D: Device>(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe { create::<D>(pd, (*init).srq_context, &mut (*init).attr) })
}

/// `ibv_create_srq_ex`. EOPNOTSUPP for types other than the basic one.
pub unsafe extern "C" fn create_srq_ex<D: Device>(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    const MEMBERS: u32 = (IBV_SRQ_INIT_ATTR_TM << 1) - 1;
    // SAFETY: the application passes its attributes, of which only the
    // announced members are read.
    entry::pointer(|| unsafe {
        let comp_mask = (*init).comp_mask;
        if comp_mask & !MEMBERS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            return Err(Errno::INVAL);
        }
        if comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && (*init).srq_type != IBV_SRQT_BASIC {
            return Err(Errno::OPNOTSUPP);
        }
        create::<D>((*init).pd, (*init).srq_context, &mut (*init).attr)
    })
}

/// `ibv_modify_srq`: the limit, the size, or both, as far as the device can.
pub unsafe extern "C" fn modify_srq<D: Device>(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours and the application's
    // attributes.
    entry::int(|| unsafe {
        let mask = mask as u32;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Errno::INVAL);
        }
        let asked = |bit, value| (mask & bit != 0).then_some(value);
        let change = SrqModify {
            max_wr: asked(IBV_SRQ_MAX_WR, (*attr).max_wr),
            limit: asked(IBV_SRQ_LIMIT, (*attr).srq_limit),
        };
        D::modify(srq_of(srq), &change)
    })
}

/// `ibv_query_srq`.
pub unsafe extern "C" fn query_srq<D: Device>(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours and room for the answer.
    entry::int(|| unsafe {
        let answer = srq_of::<D>(srq).object.query()?;
        *attr = ibv_srq_attr {
            max_wr: answer.max_wr,
            max_sge: answer.max_sge,
            srq_limit: answer.limit,
        };
        Ok(())
    })
}

/// `ibv_get_srq_num`.
pub unsafe extern "C" fn get_srq_num<D: Device>(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int {
    // SAFETY: the application passes a live queue of ours and room for the
    // answer.
    entry::int(|| unsafe {
        *srq_num = srq_of::<D>(srq).public.srq_num;
        Ok(())
    })
}

/// `ibv_destroy_srq`. EBUSY, and the queue lives on, while queue pairs use it.
/// Waits until the application has acknowledged every event that it read.
pub unsafe extern "C" fn destroy_srq<D: Device>(srq: *mut ibv_srq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, which no other call uses
    // any more except those that acknowledge events.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*srq).context);
        match uverbs::srq::destroy(&ctx, SrqHandle((*srq).handle)) {
            Ok(seen) => events::wait_srq(srq, seen),
            Err(error) => destroyed(Err(error.into()))?,
        }
        drop(Box::from_raw(srq.cast::<Srq<D>>()));
        Ok(())
    })
}
