//! Work queues and their indirection tables.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::slice;
use std::sync::Arc;

use mlx5::{
    DirectRing, QpQueues, QueueAllocator, RecvQueue, Role, Strides, WorkQueue,
    modify_wq as modify_object,
};
use ring::BiasedLock;
use uverbs::{CqHandle, WqChange, WqHandle, WqInit, WqState, WqTableHandle};

use super::cq::Cq;
use super::memory::Allocators;
use super::qp::has_checksums;
use crate::abi::*;
use crate::access::locked;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed};
use crate::cq::cq_of;
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, pd_of};
use crate::post::{RecvQueueOwner, post_receives};

/// A work queue.
#[repr(C)]
pub struct Wq {
    /// The structure that libibverbs and applications use.
    public: ibv_wq,
    /// The application promised one caller at a time: no lock.
    pub single: bool,
    /// Guards `recv`.
    pub lock: BiasedLock,
    /// The queue.
    pub recv: UnsafeCell<RecvQueue>,
    queues: Arc<QpQueues>,
    object: uverbs::Wq<CtxRef>,
    _pd: PdRef,
}

impl Wq {
    /// The location of its entries.
    pub fn direct(&self) -> DirectRing {
        self.queues.direct()
    }
}

impl RecvQueueOwner for Wq {
    type Queue = RecvQueue;

    #[inline]
    fn lock(&self) -> &BiasedLock {
        &self.lock
    }
    #[inline]
    fn single(&self) -> bool {
        self.single
    }
}

/// The provider's view of a work queue.
///
/// # Safety
/// `wq` is a live work queue of a context of ours.
pub unsafe fn wq_of<'a>(wq: *mut ibv_wq) -> &'a Wq {
    const { assert!(core::mem::offset_of!(Wq, public) == 0) };
    // SAFETY: every ibv_wq of such a context begins a Wq.
    unsafe { &*wq.cast::<Wq>() }
}

/// `ibv_create_wq`. EOPNOTSUPP for unsupported flags, EINVAL for a type other than receives
/// and for 0 receives. Sets the actual sizes in `attr`. libibverbs initialises the mutex and
/// the condition.
pub unsafe extern "C" fn create_wq(
    _context: *mut ibv_context,
    attr: *mut ibv_wq_init_attr,
) -> *mut ibv_wq {
    // SAFETY: libibverbs passes the application's attributes, which name live objects of
    // ours.
    entry::pointer(|| unsafe { create(&mut *attr, None) })
}

/// As [`create_wq`], with strides. EINVAL for strides that the device does not support.
///
/// # Safety
/// The attributes name live objects of ours.
pub unsafe fn create(
    attr: &mut ibv_wq_init_attr,
    strides: Option<Strides>,
) -> Result<*mut ibv_wq, Errno> {
    if attr.comp_mask & !IBV_WQ_INIT_ATTR_FLAGS != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let flags = match attr.comp_mask & IBV_WQ_INIT_ATTR_FLAGS {
        0 => 0,
        _ => attr.create_flags,
    };
    if flags >= IBV_WQ_FLAGS_RESERVED {
        return Err(Errno::OPNOTSUPP);
    }
    if attr.wq_type != IBV_WQT_RQ || attr.pd.is_null() || attr.cq.is_null() {
        return Err(Errno::INVAL);
    }
    let mut storage = try_box(MaybeUninit::<Wq>::uninit()).map_err(|(_, errno)| errno)?;
    // SAFETY: as the caller says; a domain's context is open.
    let (domain, ctx, cq, context) = unsafe {
        let context = (*attr.pd).context;
        let cq: &Cq = cq_of(attr.cq);
        (pd_of(attr.pd), CtxRef::of(context), cq, context)
    };
    let init = WqInit {
        pd: domain.handle(),
        // SAFETY: as the caller says.
        cq: CqHandle(unsafe { (*attr.cq).handle }),
        max_wr: attr.max_wr,
        max_sge: attr.max_sge,
        flags,
        user_handle: storage.as_ptr().expose_provenance() as u64,
        // SAFETY: as above.
        async_fd: unsafe { borrowed((*context).async_fd) },
    };
    // SAFETY: as the caller says.
    let allocator = unsafe { Allocators::of(&ctx, attr.pd) };
    let allocator = allocator
        .as_ref()
        .map(|allocator| allocator as &dyn QueueAllocator);
    let device = ctx.mlx5()?;
    if let Some(strides) = strides {
        let [min_size, max_size, min_count, max_count, _] = device.features(&ctx)?.strides;
        let has_size = (min_size..=max_size).contains(&strides.log_bytes);
        if !has_size || !(min_count..=max_count).contains(&strides.log_count) {
            return Err(Errno::INVAL);
        }
    }
    let checksums = has_checksums(&ctx, IBV_DEVICE_RAW_IP_CSUM)?;
    let new_wq = WorkQueue::create(&ctx, device, &init, checksums, strides, allocator)?;
    cq.attach(&new_wq.queues, Role::RECEIVE)?;
    attr.max_wr = new_wq.recv.capacity();
    attr.max_sge = new_wq.recv.max_sge() - u32::from(strides.is_some());
    // SAFETY: zeros are valid for the public part: null pointers, absent functions,
    // integers.
    let mut public: ibv_wq = unsafe { core::mem::zeroed() };
    public.context = context;
    public.wq_context = attr.wq_context;
    public.pd = attr.pd;
    public.cq = attr.cq;
    public.wq_num = new_wq.object.wq_num();
    public.handle = new_wq.object.handle().0;
    public.wq_type = attr.wq_type;
    public.post_recv = Some(match strides {
        None => post_recv,
        Some(_) => refuse_recv,
    });
    storage.write(Wq {
        public,
        single: domain.has_thread_domain(),
        lock: BiasedLock::new(),
        recv: UnsafeCell::new(new_wq.recv),
        queues: new_wq.queues,
        object: new_wq.object,
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(attr.pd) },
    });
    Ok(Box::into_raw(storage).cast())
}

/// `ibv_post_wq_recv`: as `ibv_post_recv`, in any state. Receives that are posted before
/// the queue becomes ready are discarded then, as with libmlx5.
unsafe extern "C" fn post_recv(
    ibwq: *mut ibv_wq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the application passes a live queue of ours and a list of work requests
    // of its own.
    unsafe {
        let wq = wq_of(ibwq);
        post_receives(wq, wq.recv.get(), wr, bad_wr)
    }
}

/// `ibv_post_wq_recv` of a queue with strides: EOPNOTSUPP. The program itself writes into the
/// queue.
unsafe extern "C" fn refuse_recv(
    _wq: *mut ibv_wq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: null, or the application's room.
    if let Some(bad_wr) = unsafe { bad_wr.as_mut() } {
        *bad_wr = wr;
    }
    libc::EOPNOTSUPP
}

/// `ibv_modify_wq`.
pub unsafe extern "C" fn modify_wq(ibwq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int {
    const MEMBERS: u32 = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE | IBV_WQ_ATTR_FLAGS;
    // SAFETY: libibverbs passes a live queue of ours, which no other call changes, and
    // the application's attributes.
    entry::int(|| unsafe {
        let wq = wq_of(ibwq);
        let attr = *attr;
        let has = |member| attr.attr_mask & member != 0;
        if attr.attr_mask & !MEMBERS != 0 {
            return Err(Errno::INVAL);
        }
        if has(IBV_WQ_ATTR_FLAGS) && attr.flags_mask >= IBV_WQ_FLAGS_RESERVED {
            return Err(Errno::OPNOTSUPP);
        }
        let change = WqChange {
            state: has(IBV_WQ_ATTR_STATE).then_some(WqState(attr.wq_state)),
            current: has(IBV_WQ_ATTR_CURR_STATE).then_some(WqState(attr.curr_wq_state)),
            flags: has(IBV_WQ_ATTR_FLAGS).then_some((attr.flags, attr.flags_mask)),
        };
        let ready = change.state == Some(WqState::READY);
        let state = WqState((*ibwq).state);
        if ready && change.current.is_some_and(|current| current != state) {
            return Err(Errno::INVAL);
        }
        if ready && state == WqState::RESET {
            // The device counts from 0.
            let cq: &Cq = cq_of((*ibwq).cq);
            cq.clean(&wq.queues);
            locked(wq.single, &wq.lock, || (*wq.recv.get()).reset());
        }
        modify_object(&wq.object, &change)?;
        if let Some(state) = change.state {
            (*ibwq).state = state.0;
        }
        Ok(())
    })
}

/// `ibv_destroy_wq`. EBUSY, and the queue is unchanged, while a table names it. Waits
/// until the application has acknowledged every event that it read.
pub unsafe extern "C" fn destroy_wq(ibwq: *mut ibv_wq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, which no other call uses any more
    // except those that acknowledge events; its completion queue is live as long.
    entry::int(|| unsafe {
        let wq = wq_of(ibwq);
        match wq.object.destroy() {
            Ok(events_reported) => events::wait_wq(ibwq, events_reported),
            Err(error) => destroyed(Err(error.into()))?,
        }
        let cq: &Cq = cq_of((*ibwq).cq);
        cq.detach(&wq.queues);
        drop(Box::from_raw(ibwq.cast::<Wq>()));
        Ok(())
    })
}

/// `ibv_create_rwq_ind_table`.
pub unsafe extern "C" fn create_rwq_ind_table(
    context: *mut ibv_context,
    attr: *mut ibv_rwq_ind_table_init_attr,
) -> *mut ibv_rwq_ind_table {
    /// More than any device supports.
    const MAX_LOG_SIZE: u32 = 16;
    // SAFETY: libibverbs passes an open context and the application's attributes, with
    // so many live queues of ours.
    entry::pointer(|| unsafe {
        let attr = *attr;
        if attr.comp_mask != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if attr.log_ind_tbl_size > MAX_LOG_SIZE {
            return Err(Errno::INVAL);
        }
        let ctx = CtxRef::of(context);
        let queues = slice::from_raw_parts(attr.ind_tbl, 1 << attr.log_ind_tbl_size);
        let mut handles = Vec::new();
        (handles.try_reserve_exact(queues.len())).map_err(|_| Errno::NOMEM)?;
        handles.extend(queues.iter().map(|wq| WqHandle((**wq).handle)));
        let table = ibv_rwq_ind_table {
            context,
            ind_tbl_handle: 0,
            ind_tbl_num: 0,
            comp_mask: 0,
        };
        let mut table = try_box(table).map_err(|(_, errno)| errno)?;
        let (handle, number) = uverbs::wq::create_table(&ctx, &handles)?;
        table.ind_tbl_handle = handle.0 as c_int;
        table.ind_tbl_num = number as c_int;
        Ok(Box::into_raw(table))
    })
}

/// `ibv_destroy_rwq_ind_table`. EBUSY, and the table is unchanged, while a queue pair
/// uses it.
pub unsafe extern "C" fn destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int {
    // SAFETY: libibverbs passes a live table of ours.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*table).context);
        let handle = WqTableHandle((*table).ind_tbl_handle as u32);
        let result = uverbs::wq::destroy_table(&ctx, handle);
        destroyed(result.map_err(Into::into))?;
        drop(Box::from_raw(table));
        Ok(())
    })
}
