//! Shared receive queues.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::MaybeUninit;

use ring::BiasedLock;
use uverbs::{CqHandle, SrqInit, SrqKind, SrqModify};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed, require_handle};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, pd_of};
use crate::post::RecvQueueOwner;
use crate::writers::RecvQueueOps;

/// What a device implements for shared receive queues.
pub trait SrqOps: Sized + 'static {
    /// The writer of receives.
    type SharedQueue: RecvQueueOps;
    /// The device's other data of a shared receive queue.
    type SrqData;

    /// Whether the device has XRC.
    const XRC: bool = false;
    /// Whether the device has tag matching.
    const TAGS: bool = false;
    /// Whether polling takes the lock too. A thread domain then does not make the lock
    /// unnecessary.
    const SHARES_LOCK: bool = false;

    /// Creates the kernel object and its queue. `cq` is the completion queue of an XRC SRQ,
    /// or one with tag matching.
    ///
    /// # Safety
    /// `cq` is null or a live completion queue of the context.
    unsafe fn make(
        ctx: &CtxRef,
        init: &SrqInit,
        cq: *mut ibv_cq,
        domain: *mut ibv_pd,
    ) -> Result<NewSrq<Self>, Errno>;

    /// Creates the queue pair through which tags are changed. At most `max_ops` changes are
    /// outstanding.
    ///
    /// # Safety
    /// The queue is live, and not used yet.
    unsafe fn make_tag_qp(_srq: *mut ibv_srq, _max_ops: u32) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Guards the queue.
    #[inline]
    fn lock(srq: &Srq<Self>) -> &BiasedLock {
        &srq.lock
    }

    /// Called before the kernel object is destroyed. On an error it is not destroyed.
    ///
    /// # Safety
    /// The completion queue of an SRQ that has one is live. Nothing else uses the SRQ.
    unsafe fn before_destroy(_srq: &Srq<Self>) -> Result<(), Errno> {
        Ok(())
    }

    /// Called after the kernel object was destroyed.
    ///
    /// # Safety
    /// The completion queue of an SRQ that has one is live.
    unsafe fn srq_destroyed(_srq: &Srq<Self>) {}

    /// Changes the limit, the size, or both. Posted receives stay posted.
    fn modify(srq: &Srq<Self>, change: &SrqModify) -> Result<(), Errno>;
}

/// A new shared receive queue.
pub struct NewSrq<D: SrqOps> {
    /// The kernel object.
    pub object: uverbs::Srq<CtxRef>,
    /// The queue.
    pub recv: D::SharedQueue,
    /// The SRQ number.
    pub srq_num: u32,
    /// How many receives it holds.
    pub max_wr: u32,
    /// How many elements each may have.
    pub max_sge: u32,
    /// The device's other data.
    pub device_data: D::SrqData,
}

/// A shared receive queue.
#[repr(C)]
pub struct Srq<D: SrqOps> {
    /// What libibverbs and applications see.
    pub public: verbs_srq,
    /// The application promised one caller at a time: no lock.
    pub single: bool,
    /// Guards `recv`, unless [`SrqOps::lock`] returns another lock.
    pub lock: BiasedLock,
    /// The queue.
    pub recv: UnsafeCell<D::SharedQueue>,
    /// The device's other data.
    pub device_data: D::SrqData,
    pub object: uverbs::Srq<CtxRef>,
    _pd: PdRef,
}

impl<D: SrqOps> RecvQueueOwner for Srq<D> {
    type Queue = D::SharedQueue;

    #[inline]
    fn lock(&self) -> &BiasedLock {
        D::lock(self)
    }
    #[inline]
    fn single(&self) -> bool {
        self.single
    }
}

/// The provider's view of a shared receive queue.
///
/// # Safety
/// `srq` is a live shared receive queue of a context of ours and of this kind
/// of device.
#[inline]
pub unsafe fn srq_of<'a, D: SrqOps>(srq: *mut ibv_srq) -> &'a Srq<D> {
    const { assert!(core::mem::offset_of!(Srq<D>, public) == 0) };
    // SAFETY: every ibv_srq of such a context begins an Srq.
    unsafe { &*srq.cast::<Srq<D>>() }
}

/// The type of a shared receive queue, and the attributes of that type only; null and 0 for
/// other types.
struct SrqTypeAttr {
    srq_type: u32,
    xrcd: *mut ibv_xrcd,
    cq: *mut ibv_cq,
    tm_cap: ibv_tm_cap,
}

impl SrqTypeAttr {
    const BASIC: Self = Self {
        srq_type: IBV_SRQT_BASIC,
        xrcd: core::ptr::null_mut(),
        cq: core::ptr::null_mut(),
        tm_cap: ibv_tm_cap {
            max_num_tags: 0,
            max_ops: 0,
        },
    };
}

/// Creates a shared receive queue, and sets `attr` to its actual size.
///
/// # Safety
/// `pd` is a live domain; the objects of `type_attr` are null or live.
unsafe fn create<D: SrqOps>(
    pd: *mut ibv_pd,
    srq_context: *mut core::ffi::c_void,
    attr: &mut ibv_srq_attr,
    type_attr: SrqTypeAttr,
) -> Result<*mut ibv_srq, Errno> {
    let mut storage = try_box(MaybeUninit::<Srq<D>>::uninit()).map_err(|(_, errno)| errno)?;
    // SAFETY: as the caller says.
    let (context, domain) = unsafe { ((*pd).context, pd_of(pd)) };
    // SAFETY: a domain's context is open.
    let (ctx, async_fd) = unsafe { (CtxRef::of(context), borrowed((*context).async_fd)) };
    // SAFETY: null or live, as the caller says.
    let kind = match (type_attr.srq_type, unsafe { type_attr.cq.as_ref() }) {
        (IBV_SRQT_BASIC, _) => SrqKind::Basic,
        (IBV_SRQT_XRC, Some(cq)) => SrqKind::Xrc {
            // SAFETY: live, as the caller says.
            xrcd: unsafe { crate::xrc::handle(type_attr.xrcd) },
            cq: CqHandle(cq.handle),
        },
        (_, Some(cq)) => SrqKind::TagMatching {
            cq: CqHandle(cq.handle),
            max_num_tags: type_attr.tm_cap.max_num_tags,
        },
        (_, None) => return Err(Errno::INVAL),
    };
    let init = SrqInit {
        pd: domain.handle(),
        user_handle: storage.as_ptr().expose_provenance() as u64,
        max_wr: attr.max_wr,
        max_sge: attr.max_sge,
        limit: attr.srq_limit,
        kind,
        async_fd,
    };
    // SAFETY: as the caller says.
    let new_srq = unsafe { D::make(&ctx, &init, type_attr.cq, pd)? };
    attr.max_wr = new_srq.max_wr;
    attr.max_sge = new_srq.max_sge;
    // SAFETY: zeros are valid for the public part: null pointers, integers.
    let mut public: verbs_srq = unsafe { core::mem::zeroed() };
    public.srq.context = context;
    public.srq.srq_context = srq_context;
    public.srq.pd = pd;
    public.srq.handle = new_srq.object.handle().0;
    public.srq_type = type_attr.srq_type;
    public.xrcd = type_attr.xrcd.cast();
    public.cq = type_attr.cq;
    public.srq_num = new_srq.srq_num;
    let srq = storage.write(Srq {
        public,
        single: domain.has_thread_domain() && !D::SHARES_LOCK,
        lock: BiasedLock::new(),
        recv: UnsafeCell::new(new_srq.recv),
        device_data: new_srq.device_data,
        object: new_srq.object,
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    // SAFETY: the object is not used yet.
    unsafe {
        events::init(&raw mut srq.public.srq.mutex, &raw mut srq.public.srq.cond);
    }
    // From here on `destroy_srq` frees it.
    let srq: *mut ibv_srq = Box::into_raw(storage).cast();
    if type_attr.srq_type == IBV_SRQT_TM {
        // SAFETY: a live queue, which is not used yet.
        unsafe {
            if let Err(errno) = D::make_tag_qp(srq, type_attr.tm_cap.max_ops) {
                destroy_srq::<D>(srq);
                return Err(errno);
            }
        }
    }
    Ok(srq)
}

/// `ibv_create_srq`.
pub unsafe extern "C" fn create_srq<D: SrqOps>(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe {
        create::<D>(
            pd,
            (*init).srq_context,
            &mut (*init).attr,
            SrqTypeAttr::BASIC,
        )
    })
}

/// `ibv_create_srq_ex`. EOPNOTSUPP for types that the device does not have; EINVAL if an
/// attribute that the type requires is missing. Tag matching requires a completion queue
/// with a cursor.
pub unsafe extern "C" fn create_srq_ex<D: SrqOps>(
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
        let srq_type = match comp_mask & IBV_SRQ_INIT_ATTR_TYPE {
            0 => IBV_SRQT_BASIC,
            _ => (*init).srq_type,
        };
        let has = |members| comp_mask & members == members;
        let type_attr = match srq_type {
            IBV_SRQT_BASIC => SrqTypeAttr::BASIC,
            IBV_SRQT_XRC if D::XRC => {
                let complete = has(IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ);
                if !complete || (*init).xrcd.is_null() {
                    return Err(Errno::INVAL);
                }
                SrqTypeAttr {
                    srq_type,
                    xrcd: (*init).xrcd,
                    cq: (*init).cq,
                    ..SrqTypeAttr::BASIC
                }
            }
            IBV_SRQT_TM if D::TAGS => {
                let complete = has(IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM);
                // SAFETY: null or a live queue of ours, which begins with an ibv_cq_ex.
                let has_cursor = complete
                    && (*init)
                        .cq
                        .cast::<ibv_cq_ex>()
                        .as_ref()
                        .is_some_and(|cq| cq.start_poll.is_some());
                if !has_cursor {
                    return Err(Errno::INVAL);
                }
                SrqTypeAttr {
                    srq_type,
                    cq: (*init).cq,
                    tm_cap: (*init).tm_cap,
                    ..SrqTypeAttr::BASIC
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        };
        create::<D>(
            (*init).pd,
            (*init).srq_context,
            &mut (*init).attr,
            type_attr,
        )
    })
}

/// `ibv_modify_srq`: the limit, the size, or both, as far as the device can.
pub unsafe extern "C" fn modify_srq<D: SrqOps>(
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
        let if_set = |bit, value| (mask & bit != 0).then_some(value);
        let change = SrqModify {
            max_wr: if_set(IBV_SRQ_MAX_WR, (*attr).max_wr),
            limit: if_set(IBV_SRQ_LIMIT, (*attr).srq_limit),
        };
        D::modify(srq_of(srq), &change)
    })
}

/// `ibv_query_srq`.
pub unsafe extern "C" fn query_srq<D: SrqOps>(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
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
pub unsafe extern "C" fn get_srq_num<D: SrqOps>(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int {
    // SAFETY: the application passes a live queue of ours and room for the
    // answer.
    entry::int(|| unsafe {
        *srq_num = srq_of::<D>(srq).public.srq_num;
        Ok(())
    })
}

/// `ibv_destroy_srq`. EBUSY, and the queue is unchanged, while queue pairs use it.
/// Waits until the application has acknowledged every event that it read.
pub unsafe extern "C" fn destroy_srq<D: SrqOps>(ibsrq: *mut ibv_srq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, which no other call uses
    // any more except those that acknowledge events.
    entry::int(|| unsafe {
        let srq: &Srq<D> = srq_of(ibsrq);
        require_handle((*ibsrq).handle, srq.object.handle().0)?;
        D::before_destroy(srq)?;
        match srq.object.destroy() {
            Ok(events_reported) => events::wait_srq(ibsrq, events_reported),
            Err(error) => destroyed(Err(error.into()))?,
        }
        D::srq_destroyed(srq_of(ibsrq));
        drop(Box::from_raw(ibsrq.cast::<Srq<D>>()));
        Ok(())
    })
}
