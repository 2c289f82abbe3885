//! Completion queues: creation, polling in both styles, notification.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::hint::cold_path;
use core::mem::{ManuallyDrop, MaybeUninit};

use ring::{BiasedLock, Peek, Retired, Span};
use rxe::{CompletionQueue, CompletionRing, WorkCompletion};
use uverbs::{CqFlags, CqHandle, CqInit};

use crate::abi::*;
use crate::access::{Access, Shared, Single};
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, thread_domain_of};

/// What rxe's completions can say.
const WC_FLAGS: u64 = IBV_WC_STANDARD_FLAGS;

/// `IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN`.
const KERNEL_IGNORE_OVERRUN: u32 = 1 << 1;

/// A completion queue.
#[repr(C)]
struct Cq {
    public: verbs_cq,
    /// One caller at a time by the application's promise: no lock.
    single: bool,
    lock: BiasedLock,
    peek: Peek,
    /// Under the lock, like all cells below.
    ring: UnsafeCell<CompletionRing>,
    /// Where the batch between start_poll and end_poll stands.
    span: UnsafeCell<Span>,
    /// The completion there.
    entry: UnsafeCell<*const WorkCompletion>,
    retired: UnsafeCell<Vec<Retired>>,
    /// Destroyed by `destroy_cq` through its handle, never dropped.
    object: ManuallyDrop<uverbs::Cq<CtxRef>>,
    _pd: PdRef,
}

const _: () = {
    assert!(core::mem::offset_of!(Cq, public) == 0);
    // What the driver writes is what the application reads.
    assert!(size_of::<ibv_wc>() == size_of::<WorkCompletion>());
    assert!(align_of::<ibv_wc>() == align_of::<WorkCompletion>());
};

/// # Safety
/// `cq` is a live completion queue of this provider.
#[inline(always)]
unsafe fn cq_of<'a, T>(cq: *mut T) -> &'a Cq {
    // SAFETY: every ibv_cq and ibv_cq_ex that this provider hands out begins
    // a Cq.
    unsafe { &*cq.cast::<Cq>() }
}

impl Cq {
    fn enter(&self) {
        if !self.single {
            Shared::enter(&self.lock);
        }
    }

    fn leave(&self) {
        if !self.single {
            Shared::leave(&self.lock);
        }
    }
}

/// Makes a completion queue whose kernel object names it by its address.
///
/// # Safety
/// `context` is open; `pd` is null or a live domain.
unsafe fn create(
    context: *mut ibv_context,
    init: CqInit,
    single: bool,
    pd: *mut ibv_pd,
) -> Result<Box<MaybeUninit<Cq>>, Errno> {
    let mut place = try_box(MaybeUninit::<Cq>::uninit()).map_err(|(_, errno)| errno)?;
    // SAFETY: as the caller says.
    let ctx = unsafe { CtxRef::of(context) };
    let init = CqInit {
        user_handle: place.as_ptr().expose_provenance() as u64,
        // SAFETY: the context is open.
        async_fd: Some(unsafe { (*context).async_fd }),
        ..init
    };
    let CompletionQueue {
        object,
        ring,
        peek,
        retired,
    } = CompletionQueue::create(&ctx, &init)?;
    // SAFETY: zeros are valid for the public part: null pointers, absent
    // functions, integers.
    let mut public: ibv_cq_ex = unsafe { core::mem::zeroed() };
    public.context = context;
    public.handle = object.handle().0;
    public.cqe = c_int::try_from(object.cqe()).unwrap_or(c_int::MAX);
    place.write(Cq {
        public: verbs_cq {
            cq_ex: ManuallyDrop::new(public),
        },
        single,
        lock: BiasedLock::new(),
        peek,
        span: UnsafeCell::new(Span { at: 0, end: 0 }),
        entry: UnsafeCell::new(core::ptr::null()),
        ring: UnsafeCell::new(ring),
        retired: UnsafeCell::new(retired),
        object: ManuallyDrop::new(object),
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    Ok(place)
}

/// Descriptor of a channel, if there is one.
///
/// # Safety
/// `channel` is null or live.
pub unsafe fn channel_fd(channel: *mut ibv_comp_channel) -> Option<c_int> {
    // SAFETY: as the caller says.
    unsafe { channel.as_ref() }.map(|channel| channel.fd)
}

/// `ibv_create_cq`.
pub unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: libibverbs passes an open context, and a live channel or null.
    entry::pointer(|| unsafe {
        let init = CqInit {
            // A negative number becomes one that the kernel refuses.
            cqe: cqe as u32,
            channel: channel_fd(channel),
            comp_vector: comp_vector as u32,
            ..CqInit::default()
        };
        let cq = create(context, init, false, core::ptr::null_mut())?;
        Ok(Box::into_raw(cq).cast())
    })
}

/// `ibv_create_cq_ex`. EOPNOTSUPP for fields, members and flags that rxe does
/// not have.
pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    const MEMBERS: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    // SAFETY: libibverbs passes an open context and the application's
    // attributes, of which only the announced members are read.
    entry::pointer(|| unsafe {
        let comp_mask = (*attr).comp_mask;
        let has = |member| comp_mask & member != 0;
        let flags = if has(IBV_CQ_INIT_ATTR_MASK_FLAGS) {
            (*attr).flags
        } else {
            0
        };
        let pd = if has(IBV_CQ_INIT_ATTR_MASK_PD) {
            (*attr).parent_domain
        } else {
            core::ptr::null_mut()
        };
        let wc_flags = (*attr).wc_flags;
        if comp_mask & !MEMBERS != 0 || flags & !FLAGS != 0 || wc_flags & !WC_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let kernel_flags = if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            KERNEL_IGNORE_OVERRUN
        } else {
            0
        };
        let init = CqInit {
            cqe: (*attr).cqe,
            channel: channel_fd((*attr).channel),
            comp_vector: (*attr).comp_vector,
            flags: CqFlags::from_bits_retain(kernel_flags),
            ..CqInit::default()
        };
        let single = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 || thread_domain_of(pd);
        let mut cq = create(context, init, single, pd)?;
        set_cursor(&mut cq.assume_init_mut().public.cq_ex, single, wc_flags);
        Ok(Box::into_raw(cq).cast())
    })
}

/// Sets the functions by which an application reads the queue: those for its
/// way of sharing, and only the fields that it asked for.
fn set_cursor(cq: &mut ibv_cq_ex, single: bool, wc_flags: u64) {
    if single {
        cq.start_poll = Some(start_poll::<Single>);
        cq.end_poll = Some(end_poll::<Single>);
    } else {
        cq.start_poll = Some(start_poll::<Shared>);
        cq.end_poll = Some(end_poll::<Shared>);
    }
    cq.next_poll = Some(next_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_wc_flags = Some(read_wc_flags);
    macro_rules! optional {
        ($($flag:ident => $field:ident;)+) => {
            $(if wc_flags & $flag != 0 { cq.$field = Some($field); })+
        };
    }
    optional! {
        IBV_WC_EX_WITH_BYTE_LEN => read_byte_len;
        IBV_WC_EX_WITH_IMM => read_imm_data;
        IBV_WC_EX_WITH_QP_NUM => read_qp_num;
        IBV_WC_EX_WITH_SRC_QP => read_src_qp;
        IBV_WC_EX_WITH_SLID => read_slid;
        IBV_WC_EX_WITH_SL => read_sl;
        IBV_WC_EX_WITH_DLID_PATH_BITS => read_dlid_path_bits;
    }
}

/// `ibv_destroy_cq`. EBUSY, and the queue lives on, while queue pairs use it.
/// Waits until the application has acknowledged every event that it read.
pub unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, which no other call uses
    // any more except those that acknowledge events.
    entry::int(|| unsafe {
        let ctx = CtxRef::of((*cq).context);
        match uverbs::cq::destroy(&ctx, CqHandle((*cq).handle)) {
            Ok(seen) => events::wait_cq(cq, seen.completion, seen.asynchronous),
            Err(error) => destroyed(Err(error.into()))?,
        }
        drop(Box::from_raw(cq.cast::<Cq>()));
        Ok(())
    })
}

/// `ibv_resize_cq`. Completions that are in the queue stay in it.
pub unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::int(|| unsafe {
        let own = cq_of(cq);
        own.enter();
        let resized = CompletionQueue::resize(
            &own.object,
            &mut *own.ring.get(),
            &own.peek,
            &mut *own.retired.get(),
            cqe as u32,
        );
        if let Ok(cqe) = resized {
            (*cq).cqe = c_int::try_from(cqe).unwrap_or(c_int::MAX);
        }
        own.leave();
        resized.map(drop).map_err(Into::into)
    })
}

/// `ibv_modify_cq`.
pub unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    const MODERATE: u32 = 1 << 0;
    // SAFETY: libibverbs passes a live queue of ours and the application's
    // attributes.
    entry::int(|| unsafe {
        if (*attr).attr_mask != MODERATE {
            return Err(Errno::INVAL);
        }
        let moderate = (*attr).moderate;
        cq_of(cq)
            .object
            .modify_moderation(moderate.cq_count, moderate.cq_period)
            .map_err(Into::into)
    })
}

/// `ibv_req_notify_cq`.
pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the application passes a live queue of ours.
    entry::int(|| unsafe {
        cq_of(cq)
            .object
            .req_notify(solicited_only != 0)
            .map_err(Into::into)
    })
}

/// `ibv_poll_cq`: takes up to `num_entries` completions, in order, each once.
///
/// No allocation, no system call; a lock if several threads poll the queue and
/// it is not empty.
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the application passes a live queue of ours, and room for
    // `num_entries` completions.
    unsafe {
        let own = cq_of(cq);
        if own.single {
            return poll::<Single>(own, num_entries, wc);
        }
        if own.peek.is_empty() {
            return 0;
        }
        if !own.lock.try_quick() {
            return poll_shared(own, num_entries, wc);
        }
        poll::<Shared>(own, num_entries, wc)
    }
}

/// The poll of a queue that may have something; apart, so that the poll of an
/// empty one saves no registers.
///
/// # Safety
/// As for [`poll_cq`]; the queue's critical section has been entered.
#[inline(never)]
unsafe extern "C" fn poll<A: Access>(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as the caller says.
    let taken = unsafe { take(own, num_entries, wc) };
    A::leave_quick(&own.lock);
    taken
}

/// [`poll_cq`] of a thread that is not the only one to poll here.
///
/// # Safety
/// As for [`poll_cq`].
#[inline(never)]
unsafe extern "C" fn poll_shared(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if !own.lock.try_spin() {
        // SAFETY: as the caller says.
        return unsafe { poll_contended(own, num_entries, wc) };
    }
    // SAFETY: as the caller says; in the critical section.
    let taken = unsafe { take(own, num_entries, wc) };
    own.lock.unlock_spin();
    taken
}

/// # Safety
/// As for [`poll_cq`].
#[cold]
#[inline(never)]
unsafe extern "C" fn poll_contended(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    own.lock.lock_shared();
    // SAFETY: as the caller says; in the critical section.
    let taken = unsafe { take(own, num_entries, wc) };
    own.lock.unlock();
    taken
}

/// # Safety
/// As for [`poll_cq`]; the queue's critical section has been entered.
#[inline(always)]
unsafe fn take(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if num_entries <= 0 {
        return 0;
    }
    // SAFETY: as the caller says; any bytes are a completion, and the two
    // types are the same.
    unsafe {
        let ring = &*own.ring.get();
        let out = wc.cast::<MaybeUninit<WorkCompletion>>();
        if num_entries == 1 {
            return ring.take_one(&mut *out).into();
        }
        ring.take(core::slice::from_raw_parts_mut(out, num_entries as usize)) as c_int
    }
}

/// ENOENT, as ibv_start_poll(3) has it, also in `errno`.
#[cold]
extern "C" fn no_entry() -> c_int {
    Errno(libc::ENOENT).set();
    libc::ENOENT
}

/// Shows the completion that the cursor is on.
///
/// # Safety
/// The queue's critical section has been entered; the span is not empty, and
/// from [`CompletionRing::available`] or a step since it was entered.
#[inline(always)]
unsafe fn show(cq: *mut ibv_cq_ex, own: &Cq) -> c_int {
    // SAFETY: in the critical section, so the cells are this caller's, and the
    // public members are as the interface has it.
    unsafe {
        let entry = (*own.ring.get()).entry_inside(&*own.span.get());
        (*cq).status = entry.status();
        (*cq).wr_id = entry.wr_id();
        *own.entry.get() = entry.as_ptr();
    }
    0
}

unsafe extern "C" fn start_poll<A: Access>(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: the application passes a live queue of ours and its attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            cold_path();
            return libc::EINVAL;
        }
        let own = cq_of(cq);
        if !A::try_quick(&own.lock) {
            return start_shared(cq);
        }
        start(cq, own, A::leave_quick)
    }
}

/// [`start_poll`] of a thread that is not the only one to poll here.
///
/// # Safety
/// `cq` is a live queue of ours.
#[inline(never)]
unsafe extern "C" fn start_shared(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own = cq_of(cq);
        if !own.lock.try_spin() {
            return start_contended(cq);
        }
        start(cq, own, BiasedLock::unlock_spin)
    }
}

/// # Safety
/// `cq` is a live queue of ours.
#[cold]
#[inline(never)]
unsafe extern "C" fn start_contended(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own = cq_of(cq);
        own.lock.lock_shared();
        start(cq, own, BiasedLock::unlock)
    }
}

/// # Safety
/// The queue's critical section has been entered.
#[inline(always)]
unsafe fn start(cq: *mut ibv_cq_ex, own: &Cq, leave: fn(&BiasedLock)) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let span = (*own.ring.get()).available();
        if span.at == span.end {
            leave(&own.lock);
            return no_entry();
        }
        *own.span.get() = span;
        show(cq, own)
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let own = cq_of(cq);
        if !(*own.ring.get()).step_within(&mut *own.span.get()) {
            return next_beyond(cq);
        }
        show(cq, own)
    }
}

/// [`next_poll`] at the end of what was there when it was last looked.
///
/// # Safety
/// The application is between start_poll and end_poll.
#[cold]
#[inline(never)]
unsafe extern "C" fn next_beyond(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller says.
    unsafe {
        let own = cq_of(cq);
        // On ENOENT the cursor stays where it is: that completion, too, is
        // given back at end_poll.
        if !(*own.ring.get()).step(&mut *own.span.get()) {
            return no_entry();
        }
        show(cq, own)
    }
}

unsafe extern "C" fn end_poll<A: Access>(cq: *mut ibv_cq_ex) {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let own = cq_of(cq);
        (*own.ring.get()).release(&*own.span.get());
        A::leave(&own.lock);
    }
}

/// Functions that read a field of the completion under the cursor.
macro_rules! readers {
    ($($name:ident: $field:ident -> $type:ty;)+) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the application is between start_poll and end_poll, so
            // the entry is in the queue's memory; any bytes are a completion.
            unsafe { (&raw const (**cq_of(cq).entry.get()).$field).read().into() }
        }
    )+};
}

readers! {
    read_opcode: opcode -> u32;
    read_vendor_err: vendor_err -> u32;
    read_byte_len: byte_len -> u32;
    read_imm_data: ex -> u32;
    read_qp_num: qp_num -> u32;
    read_src_qp: src_qp -> u32;
    read_wc_flags: wc_flags -> u32;
    read_slid: slid -> u32;
    read_sl: sl -> u8;
    read_dlid_path_bits: dlid_path_bits -> u8;
}
