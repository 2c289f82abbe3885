//! Completion queues: creation, polling in both styles, notification.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use mlx5::{Arming, CompletionError, CompletionQueue, CompletionRing, Role, Work, WorkCompletion};
use ring::BiasedLock;
use uverbs::{CqFlags, CqHandle, CqInit};

use crate::abi::*;
use crate::access::{Access, Shared, Single, locked};
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::cq::channel_fd;
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, thread_domain_of};

/// Fields of a completion that can be asked for.
const WC_FLAGS: u64 = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;

/// `IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN`.
const KERNEL_IGNORE_OVERRUN: u32 = 1 << 1;

/// A completion queue.
#[repr(C)]
pub struct Cq {
    public: verbs_cq,
    /// One caller at a time by the application's promise: no lock.
    single: bool,
    lock: BiasedLock,
    /// Under the lock, like all cells below.
    ring: UnsafeCell<CompletionRing>,
    /// The completion between start_poll and end_poll.
    current: UnsafeCell<WorkCompletion>,
    /// Asks for events; any thread.
    arming: Arming,
    /// Destroyed by `destroy_cq` through its handle, never dropped.
    object: ManuallyDrop<uverbs::Cq<CtxRef>>,
    _pd: PdRef,
}

const _: () = {
    assert!(core::mem::offset_of!(Cq, public) == 0);
    assert!(size_of::<ibv_wc>() == size_of::<WorkCompletion>());
    assert!(align_of::<ibv_wc>() == align_of::<WorkCompletion>());
};

/// # Safety
/// `cq` is a live completion queue of an mlx5 context of ours.
#[inline(always)]
pub unsafe fn cq_of<'a, T>(cq: *mut T) -> &'a Cq {
    // SAFETY: every ibv_cq and ibv_cq_ex of such a context begins a Cq.
    unsafe { &*cq.cast::<Cq>() }
}

impl Cq {
    /// Runs `f` on the ring, for itself.
    fn with<R>(&self, f: impl FnOnce(&mut CompletionRing) -> R) -> R {
        locked(self.single, &self.lock, || {
            // SAFETY: in the critical section.
            f(unsafe { &mut *self.ring.get() })
        })
    }

    /// Completions of a queue pair will be found here.
    pub fn attach(&self, work: &Arc<Work>, role: Role) -> Result<(), Errno> {
        Ok(self.with(|ring| ring.attach(work, role))?)
    }

    /// Those of a queue pair that is gone will not.
    pub fn detach(&self, work: &Work) {
        self.with(|ring| ring.detach(work));
    }

    /// A queue pair was reset: what it has here is gone.
    pub fn clean(&self, work: &Work) {
        self.with(|ring| ring.clean(work));
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
        arming,
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
        ring: UnsafeCell::new(ring),
        current: UnsafeCell::default(),
        arming,
        object: ManuallyDrop::new(object),
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    Ok(place)
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
            // A negative number becomes one that is refused.
            cqe: cqe as u32,
            channel: channel_fd(channel),
            comp_vector: comp_vector as u32,
            ..CqInit::default()
        };
        let cq = create(context, init, false, core::ptr::null_mut())?;
        Ok(Box::into_raw(cq).cast())
    })
}

/// `ibv_create_cq_ex`. EOPNOTSUPP for fields, members and flags that are not
/// done.
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
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP => read_completion_ts;
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

/// `ibv_req_notify_cq`: no system call, and not the queue's lock, so that it
/// may be called between ibv_start_poll and ibv_end_poll.
pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the application passes a live queue of ours.
    entry::int(|| unsafe {
        let device = CtxRef::of((*cq).context).mlx5()?;
        let register = device.arm_register();
        cq_of(cq).arming.arm(register, solicited_only != 0);
        Ok(())
    })
}

/// `verbs_context_ops.cq_event`: libibverbs has read an event of the queue.
pub unsafe extern "C" fn cq_event(cq: *mut ibv_cq) {
    // SAFETY: libibverbs passes a live queue of ours.
    entry::unit(|| unsafe { cq_of(cq) }.arming.event());
}

/// `ibv_poll_cq`: takes up to `num_entries` completions, in order, each once.
/// Negative for a completion that makes no sense, which is passed over.
///
/// No allocation, no system call; a lock if several threads poll the queue.
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the application passes a live queue of ours, and room for
    // `num_entries` completions.
    unsafe {
        let own = cq_of(cq);
        if own.single {
            return take(own, num_entries, wc);
        }
        own.lock.lock();
        let taken = take(own, num_entries, wc);
        own.lock.unlock();
        taken
    }
}

/// # Safety
/// As for [`poll_cq`]; the queue's critical section has been entered.
#[inline(always)]
unsafe fn take(own: &Cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if num_entries <= 0 {
        return 0;
    }
    // SAFETY: as the caller says; the two types are the same. What the work
    // requests name, the application has answered for when it posted them.
    unsafe {
        let out = wc.cast::<MaybeUninit<WorkCompletion>>();
        let out = core::slice::from_raw_parts_mut(out, num_entries as usize);
        match (*own.ring.get()).take(out) {
            Ok(taken) => taken as c_int,
            Err(error) => senseless(error),
        }
    }
}

/// Negative, for a completion that makes no sense.
#[cold]
#[inline(never)]
fn senseless(error: CompletionError) -> c_int {
    tracing::error!(%error, "the device");
    -libc::EIO
}

/// ENOENT, as ibv_start_poll(3) has it, also in `errno`.
#[cold]
extern "C" fn no_entry() -> c_int {
    Errno(libc::ENOENT).set();
    libc::ENOENT
}

/// Takes the next completion and shows it; EIO for one that makes no sense.
///
/// # Safety
/// The queue's critical section has been entered.
#[inline(always)]
unsafe fn show_next(cq: *mut ibv_cq_ex, own: &Cq) -> c_int {
    // SAFETY: in the critical section, so the cells are this caller's, and the
    // public members are as the interface has it.
    unsafe {
        match (*own.ring.get()).read() {
            Some(Ok(wc)) => {
                (*cq).status = wc.status;
                (*cq).wr_id = wc.wr_id;
                *own.current.get() = wc;
                0
            }
            Some(Err(error)) => -senseless(error),
            None => no_entry(),
        }
    }
}

unsafe extern "C" fn start_poll<A: Access>(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: the application passes a live queue of ours and its attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            return libc::EINVAL;
        }
        let own = cq_of(cq);
        A::enter(&own.lock);
        let shown = show_next(cq, own);
        if shown != 0 {
            // What was passed over is consumed.
            if shown != libc::ENOENT {
                (*own.ring.get()).publish();
            }
            A::leave(&own.lock);
        }
        shown
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe { show_next(cq, cq_of(cq)) }
}

unsafe extern "C" fn end_poll<A: Access>(cq: *mut ibv_cq_ex) {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe {
        let own = cq_of(cq);
        (*own.ring.get()).publish();
        A::leave(&own.lock);
    }
}

unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the application is between start_poll and end_poll.
    unsafe { (*cq_of(cq).ring.get()).time() }
}

/// Functions that read a field of the completion under the cursor.
macro_rules! readers {
    ($($name:ident: $field:ident -> $type:ty;)+) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the application is between start_poll and end_poll.
            unsafe { (*cq_of(cq).current.get()).$field.into() }
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
