//! Completion queues: creation, destruction, notification, and the readers of
//! fields. Polling is implemented by each device.

use core::ffi::c_int;
use core::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::BorrowedFd;

use ring::BiasedLock;
use uverbs::{CqFlags, CqInit, WorkCompletion};

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed, require_handle};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::pd::{PdRef, thread_domain_of};

/// Operations of a device on completion queues.
pub trait CqOps: Sized + 'static {
    /// The reader of completions. Its cells are guarded by the queue's lock.
    type Completions;
    /// The device's options of a queue; the default is that of verbs.
    type CqOptions: Default;

    /// Supported fields of a completion (`IBV_WC_EX_WITH_*`).
    fn wc_flags(ctx: &CtxRef) -> u64;

    /// Creates the kernel object and its queue. `domain` is its parent domain, or
    /// null.
    ///
    /// # Safety
    /// The domain is null or live, and outlives the queue.
    unsafe fn make_cq(
        ctx: &CtxRef,
        init: &CqInit,
        options: &Self::CqOptions,
        domain: *mut ibv_pd,
    ) -> Result<(uverbs::Cq<CtxRef>, Self::Completions), Errno>;

    /// Requests an event for the next completion, or the next solicited one. Any
    /// thread, also between ibv_start_poll and ibv_end_poll.
    fn arm(cq: &Cq<Self>, solicited_only: bool) -> Result<(), Errno>;

    /// The functions of the cursor.
    const CURSOR: Cursor;

    /// Sets the functions that read the requested fields.
    fn set_readers(cq: &mut ibv_cq_ex, wc_flags: u64);
}

/// Reads a field of the completion under the cursor. Called with a live queue of ours,
/// between `ibv_start_poll` and `ibv_end_poll`.
type Reader<T> = unsafe extern "C" fn(*mut ibv_cq_ex) -> T;

/// Functions of `ibv_cq_ex` that read fields.
pub struct Readers {
    /// `ibv_wc_read_opcode`.
    pub opcode: Reader<u32>,
    /// `ibv_wc_read_vendor_err`.
    pub vendor_err: Reader<u32>,
    /// `ibv_wc_read_wc_flags`.
    pub wc_flags: Reader<u32>,
    /// `ibv_wc_read_byte_len`.
    pub byte_len: Reader<u32>,
    /// `ibv_wc_read_imm_data`.
    pub imm_data: Reader<u32>,
    /// `ibv_wc_read_qp_num`.
    pub qp_num: Reader<u32>,
    /// `ibv_wc_read_src_qp`.
    pub src_qp: Reader<u32>,
    /// `ibv_wc_read_slid`.
    pub slid: Reader<u32>,
    /// `ibv_wc_read_sl`.
    pub sl: Reader<u8>,
    /// `ibv_wc_read_dlid_path_bits`.
    pub dlid_path_bits: Reader<u8>,
}

impl Readers {
    /// Sets the functions for the requested fields, of the fields that every queue has.
    pub fn set(&self, cq: &mut ibv_cq_ex, wc_flags: u64) {
        cq.read_opcode = Some(self.opcode);
        cq.read_vendor_err = Some(self.vendor_err);
        cq.read_wc_flags = Some(self.wc_flags);
        macro_rules! optional {
            ($($flag:ident => $field:ident, $reader:ident;)+) => {
                $(if wc_flags & $flag != 0 { cq.$field = Some(self.$reader); })+
            };
        }
        optional! {
            IBV_WC_EX_WITH_BYTE_LEN => read_byte_len, byte_len;
            IBV_WC_EX_WITH_IMM => read_imm_data, imm_data;
            IBV_WC_EX_WITH_QP_NUM => read_qp_num, qp_num;
            IBV_WC_EX_WITH_SRC_QP => read_src_qp, src_qp;
            IBV_WC_EX_WITH_SLID => read_slid, slid;
            IBV_WC_EX_WITH_SL => read_sl, sl;
            IBV_WC_EX_WITH_DLID_PATH_BITS => read_dlid_path_bits, dlid_path_bits;
        }
    }
}

/// Functions of `ibv_cq_ex`. Each is called with a live queue of ours, the
/// latter two between `ibv_start_poll` and `ibv_end_poll`.
pub struct Cursor {
    /// `ibv_start_poll`.
    pub start_poll: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int,
    /// `ibv_next_poll`.
    pub next_poll: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int,
    /// `ibv_end_poll`.
    pub end_poll: unsafe extern "C" fn(*mut ibv_cq_ex),
}

/// A completion queue.
#[repr(C)]
pub struct Cq<D: CqOps> {
    public: verbs_cq,
    /// The application promised one caller at a time: no lock.
    pub single: bool,
    /// Guards the cells of `completions`.
    pub lock: BiasedLock,
    /// The reader.
    pub completions: D::Completions,
    pub object: uverbs::Cq<CtxRef>,
    _pd: PdRef,
}

const _: () = {
    // The driver writes the structure that the application reads.
    assert!(size_of::<ibv_wc>() == size_of::<WorkCompletion>());
    assert!(align_of::<ibv_wc>() == align_of::<WorkCompletion>());
};

impl<D: CqOps> Cq<D> {
    /// Enters the queue's critical section.
    #[inline]
    pub fn lock(&self) {
        if !self.single {
            self.lock.lock();
        }
    }

    /// Leaves the critical section.
    #[inline]
    pub fn unlock(&self) {
        if !self.single {
            self.lock.unlock();
        }
    }
}

/// The provider's view of a completion queue.
///
/// # Safety
/// `cq` is a live completion queue of a context of ours and of this kind of
/// device.
#[inline]
pub unsafe fn cq_of<'a, D: CqOps, T>(cq: *mut T) -> &'a Cq<D> {
    const { assert!(core::mem::offset_of!(Cq<D>, public) == 0) };
    // SAFETY: every ibv_cq and ibv_cq_ex of such a context begins a Cq.
    unsafe { &*cq.cast::<Cq<D>>() }
}

/// Creates a completion queue. Its address is the kernel object's user handle; what it has of
/// `public` and its context are there before the command, as with C providers.
///
/// # Safety
/// `context` is open; `pd` is null or a live domain.
unsafe fn create<D: CqOps>(
    context: *mut ibv_context,
    mut public: ibv_cq_ex,
    init: CqInit,
    options: &D::CqOptions,
    single: bool,
    pd: *mut ibv_pd,
) -> Result<Box<MaybeUninit<Cq<D>>>, Errno> {
    let mut storage = try_box(MaybeUninit::<Cq<D>>::uninit()).map_err(|(_, errno)| errno)?;
    public.context = context;
    let cq = storage.as_mut_ptr();
    // SAFETY: the storage has room for each field, and is not shared.
    unsafe {
        (&raw mut (*cq).public).write(verbs_cq {
            cq_ex: ManuallyDrop::new(public),
        });
    }
    // SAFETY: as the caller says.
    let ctx = unsafe { CtxRef::of(context) };
    let init = CqInit {
        user_handle: storage.as_ptr().expose_provenance() as u64,
        // SAFETY: the context is open.
        async_fd: unsafe { borrowed((*context).async_fd) },
        ..init
    };
    // SAFETY: as the caller says; `_pd` below keeps it.
    let (object, completions) = unsafe { D::make_cq(&ctx, &init, options, pd)? };
    let entries = c_int::try_from(object.cqe()).unwrap_or(c_int::MAX);
    // SAFETY: as above; the public part is initialized, and keeps what was put into it
    // meanwhile. `pd` is as the caller says.
    unsafe {
        let public = &mut *(*cq).public.cq;
        public.handle = object.handle().0;
        public.cqe = entries;
        (&raw mut (*cq).single).write(single);
        (&raw mut (*cq).lock).write(BiasedLock::new());
        (&raw mut (*cq).completions).write(completions);
        (&raw mut (*cq).object).write(object);
        (&raw mut (*cq)._pd).write(PdRef::new(pd));
    }
    Ok(storage)
}

/// Returns a public part without functions.
fn empty_public() -> ibv_cq_ex {
    // SAFETY: zeros are valid: null pointers, absent functions, integers.
    unsafe { core::mem::zeroed() }
}

/// The descriptor of a completion channel; `None` for null.
///
/// # Safety
/// `channel` is null or live, and stays so for `'a`.
pub unsafe fn channel_fd<'a>(channel: *mut ibv_comp_channel) -> Option<BorrowedFd<'a>> {
    // SAFETY: as the caller says.
    unsafe { channel.as_ref() }.and_then(|channel| unsafe { borrowed(channel.fd) })
}

/// `ibv_create_cq`.
pub unsafe extern "C" fn create_cq<D: CqOps>(
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
        let options = D::CqOptions::default();
        let no_pd = core::ptr::null_mut();
        let cq = create::<D>(context, empty_public(), init, &options, false, no_pd)?;
        Ok(Box::into_raw(cq).cast())
    })
}

/// `ibv_create_cq_ex`. EOPNOTSUPP for fields, members and flags that the
/// device does not have.
pub unsafe extern "C" fn create_cq_ex<D: CqOps>(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: libibverbs passes an open context and the application's attributes.
    entry::pointer(|| unsafe { create_cq_with::<D>(context, attr, &D::CqOptions::default()) })
}

/// As [`create_cq_ex`], with options of the device.
///
/// # Errors
/// As there.
///
/// # Safety
/// An open context of ours, and the application's attributes.
pub unsafe fn create_cq_with<D: CqOps>(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
    options: &D::CqOptions,
) -> Result<*mut ibv_cq_ex, Errno> {
    const MEMBERS: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    // SAFETY: libibverbs passes an open context and the application's
    // attributes, of which only the announced members are read.
    unsafe {
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
        if comp_mask & !MEMBERS != 0 || flags & !FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if wc_flags & !D::wc_flags(&CtxRef::of(context)) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let kernel_flags = if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            CqFlags::IGNORE_OVERRUN
        } else {
            CqFlags::empty()
        };
        let init = CqInit {
            cqe: (*attr).cqe,
            channel: channel_fd((*attr).channel),
            comp_vector: (*attr).comp_vector,
            flags: kernel_flags,
            ..CqInit::default()
        };
        let single = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 || thread_domain_of(pd);
        let mut public = empty_public();
        public.start_poll = Some(D::CURSOR.start_poll);
        public.next_poll = Some(D::CURSOR.next_poll);
        public.end_poll = Some(D::CURSOR.end_poll);
        D::set_readers(&mut public, wc_flags);
        let cq = create::<D>(context, public, init, options, single, pd)?;
        Ok(Box::into_raw(cq).cast())
    }
}

/// `ibv_destroy_cq`. EBUSY, and the queue is unchanged, while queue pairs use it.
/// Waits until the application has acknowledged every event that it read.
pub unsafe extern "C" fn destroy_cq<D: CqOps>(ibcq: *mut ibv_cq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, which no other call uses
    // any more except those that acknowledge events.
    entry::int(|| unsafe {
        let cq: &Cq<D> = cq_of(ibcq);
        require_handle((*ibcq).handle, cq.object.handle().0)?;
        match cq.object.destroy() {
            Ok(events_reported) => events::wait_cq(
                ibcq,
                events_reported.completion,
                events_reported.asynchronous,
            ),
            Err(error) => destroyed(Err(error.into()))?,
        }
        drop(Box::from_raw(ibcq.cast::<Cq<D>>()));
        Ok(())
    })
}

/// `ibv_modify_cq`.
pub unsafe extern "C" fn modify_cq<D: CqOps>(
    ibcq: *mut ibv_cq,
    attr: *mut ibv_modify_cq_attr,
) -> c_int {
    const MASK_MODERATION: u32 = 1 << 0;
    // SAFETY: libibverbs passes a live queue of ours and the application's
    // attributes.
    entry::int(|| unsafe {
        if (*attr).attr_mask != MASK_MODERATION {
            return Err(Errno::INVAL);
        }
        let moderate = (*attr).moderate;
        let cq: &Cq<D> = cq_of(ibcq);
        require_handle((*ibcq).handle, cq.object.handle().0)?;
        cq.object
            .modify_moderation(moderate.cq_count, moderate.cq_period)
            .map_err(Into::into)
    })
}

/// `ibv_req_notify_cq`.
pub unsafe extern "C" fn req_notify_cq<D: CqOps>(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the application passes a live queue of ours.
    entry::int(|| D::arm(unsafe { cq_of(cq) }, solicited_only != 0))
}

/// The application's array of completions; empty for a negative number.
///
/// # Safety
/// `wc` has room for `num_entries`.
#[inline]
pub unsafe fn wc_slice<'a>(
    wc: *mut ibv_wc,
    num_entries: c_int,
) -> &'a mut [MaybeUninit<WorkCompletion>] {
    if num_entries <= 0 {
        return &mut [];
    }
    // SAFETY: as the caller says; the two types are the same.
    unsafe { core::slice::from_raw_parts_mut(wc.cast(), num_entries as usize) }
}

/// ENOENT, as ibv_start_poll(3) has it, also in `errno`.
#[cold]
pub extern "C" fn no_entry() -> c_int {
    Errno(libc::ENOENT).set();
    libc::ENOENT
}
