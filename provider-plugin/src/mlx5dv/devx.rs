//! DevX: firmware commands (`mlx5dv_devx_*`), pages for virtio doorbells (VAR), packet pacing
//! entries.
//!
//! Each object has its context at the same place as libmlx5's object of that type, so that
//! objects of the other provider are recognized.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, null_mut};
use core::sync::atomic::{AtomicPtr, Ordering};
use std::os::fd::BorrowedFd;

use mlx5::DirectUar;
use mlx5::ioctl::UarKind;
use mlx5::ioctl::devx::{self, DevxObject, EventTarget, PacketPacing, Umem, UmemInit, Var};

use super::abi::*;
use super::refused::{
    ringverbs_refused_descriptor, ringverbs_refused_nothing, ringverbs_refused_object,
};
use super::{exported, is_ours};
use crate::abi::{ibv_context, ibv_cq, ibv_qp, ibv_rwq_ind_table, ibv_srq, ibv_wq};
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed};
use crate::entry;
use crate::errno::Errno;

/// `struct mlx5dv_devx_obj`.
#[repr(C)]
pub struct Object {
    pub(super) context: *mut ibv_context,
    pub(super) object: DevxObject<CtxRef>,
}

/// Registered memory: the result of `mlx5dv_devx_umem_reg`.
#[repr(C)]
pub struct DevxUmem {
    pub(super) public: mlx5dv_devx_umem,
    pub(super) context: *mut ibv_context,
    pub(super) object: Umem<CtxRef>,
}

/// A page of registers: the result of `mlx5dv_devx_alloc_uar`.
#[repr(C)]
pub struct DevxUar {
    public: mlx5dv_devx_uar,
    context: *mut ibv_context,
    uar: DirectUar<CtxRef>,
}

/// The page of doorbell registers that all callers of a context share, as libmlx5 has it:
/// null until the first one asks for it.
#[derive(Debug, Default)]
pub struct SharedUar(AtomicPtr<DevxUar>);

impl SharedUar {
    /// Returns the page, which `allocate` makes if there is none.
    ///
    /// # Errors
    /// Those of `allocate`.
    fn get(
        &self,
        allocate: impl FnOnce() -> Result<*mut DevxUar, Errno>,
    ) -> Result<*mut DevxUar, Errno> {
        let page = self.0.load(Ordering::Acquire);
        if !page.is_null() {
            return Ok(page);
        }
        let new = allocate()?;
        let order = (Ordering::AcqRel, Ordering::Acquire);
        match (self.0).compare_exchange(null_mut(), new, order.0, order.1) {
            Ok(_) => Ok(new),
            Err(page) => {
                // SAFETY: from `boxed`, and of this thread alone.
                drop(unsafe { Box::from_raw(new) });
                Ok(page)
            }
        }
    }

    /// Frees the page, before the context is closed.
    pub fn end(&self) {
        let page = self.0.swap(null_mut(), Ordering::AcqRel);
        if !page.is_null() {
            // SAFETY: from `boxed`; it is used by nobody after the context.
            drop(unsafe { Box::from_raw(page) });
        }
    }
}

/// Allocates a page of registers.
///
/// # Safety
/// An open context of ours.
unsafe fn allocate_uar(context: *mut ibv_context, kind: UarKind) -> Result<*mut DevxUar, Errno> {
    // SAFETY: as the caller says.
    let ctx = unsafe { CtxRef::of(context) };
    let uar = DirectUar::allocate(&ctx, kind)?;
    boxed(DevxUar {
        public: mlx5dv_devx_uar {
            reg_addr: uar.register().as_ptr().cast(),
            base_addr: uar.start().as_ptr().cast(),
            page_id: uar.location().page_id,
            mmap_off: uar.location().mmap_offset as libc::off_t,
            comp_mask: 0,
        },
        context,
        uar,
    })
}

/// A page for virtio doorbells: the result of `mlx5dv_alloc_var`.
#[repr(C)]
pub struct VarPage {
    pub(super) public: mlx5dv_var,
    pub(super) context: *mut ibv_context,
    pub(super) object: Var<CtxRef>,
}

/// A packet pacing entry: the result of `mlx5dv_pp_alloc`.
#[repr(C)]
pub struct PacketPacingEntry {
    public: mlx5dv_pp,
    context: *mut ibv_context,
    object: PacketPacing<CtxRef>,
}

/// An event channel: the result of `mlx5dv_devx_create_event_channel`.
#[repr(C)]
pub struct EventChannel {
    public: mlx5dv_devx_event_channel,
    context: *mut ibv_context,
}

const _: () = {
    assert!(offset_of!(Object, context) == 0);
    assert!(offset_of!(DevxUmem, context) == 8);
    assert!(offset_of!(DevxUar, context) == size_of::<mlx5dv_devx_uar>());
    assert!(offset_of!(EventChannel, context) == 8);
};

/// The handle of an object, for `mlx5dv_init_obj`.
///
/// # Safety
/// A live object of ours.
pub unsafe fn handle(object: *mut ContextFirst) -> u32 {
    // SAFETY: as the caller says.
    unsafe { (*object.cast::<Object>()).object.handle().0 }
}

/// The program's input; empty for null. It may overlap the output.
fn input(at: *const c_void, length: usize) -> *const [u8] {
    match at.is_null() {
        true => &[],
        false => ptr::slice_from_raw_parts(at.cast(), length),
    }
}

/// As [`input`], for the answer.
fn output(at: *mut c_void, length: usize) -> *mut [u8] {
    match at.is_null() {
        true => &mut [],
        false => ptr::slice_from_raw_parts_mut(at.cast(), length),
    }
}

/// Moves an object to the heap, for the program.
pub(super) fn boxed<T, P>(object: T) -> Result<*mut P, Errno> {
    let object = try_box(object).map_err(|(_, errno)| errno)?;
    Ok(Box::into_raw(object).cast())
}

/// Queries or modifies an object of verbs, or of DevX, by its handle.
macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident($object:ident: $type:ty) by $function:ident, of $context:expr, $handle:expr;)+) => {$(
        exported! {
            $(#[$doc])*
            fn $name(
                $object: *mut $type,
                request: *const c_void,
                request_length: usize,
                answer: *mut c_void,
                answer_length: usize
            ) -> c_int
            where is_ours($context), else libc::EOPNOTSUPP => {
                // SAFETY: a live object, and the program's command.
                entry::int(|| unsafe {
                    let ctx = CtxRef::of($context);
                    let request = input(request, request_length);
                    let answer = output(answer, answer_length);
                    Ok(devx::$function(&ctx, $handle, request, answer)?)
                })
            }
        }
    )+};
}

commands! {
    /// `mlx5dv_devx_obj_query`. EREMOTEIO if the device refuses the command; the output has
    /// its answer.
    mlx5dv_devx_obj_query(object: Object) by query, of (*object).context,
        (*object).object.handle().0;
    /// `mlx5dv_devx_obj_modify`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_obj_modify(object: Object) by modify, of (*object).context,
        (*object).object.handle().0;
    /// `mlx5dv_devx_cq_query`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_cq_query(cq: ibv_cq) by query, of (*cq).context, (*cq).handle;
    /// `mlx5dv_devx_cq_modify`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_cq_modify(cq: ibv_cq) by modify, of (*cq).context, (*cq).handle;
    /// `mlx5dv_devx_qp_query`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_qp_query(qp: ibv_qp) by query, of (*qp).context, (*qp).handle;
    /// `mlx5dv_devx_srq_query`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_srq_query(srq: ibv_srq) by query, of (*srq).context, (*srq).handle;
    /// `mlx5dv_devx_srq_modify`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_srq_modify(srq: ibv_srq) by modify, of (*srq).context, (*srq).handle;
    /// `mlx5dv_devx_wq_query`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_wq_query(wq: ibv_wq) by query, of (*wq).context, (*wq).handle;
    /// `mlx5dv_devx_wq_modify`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_wq_modify(wq: ibv_wq) by modify, of (*wq).context, (*wq).handle;
    /// `mlx5dv_devx_ind_tbl_query`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_ind_tbl_query(table: ibv_rwq_ind_table) by query, of (*table).context,
        (*table).ind_tbl_handle as u32;
    /// `mlx5dv_devx_ind_tbl_modify`, as [`mlx5dv_devx_obj_query`].
    mlx5dv_devx_ind_tbl_modify(table: ibv_rwq_ind_table) by modify, of (*table).context,
        (*table).ind_tbl_handle as u32;
}

exported! {
    /// `mlx5dv_devx_qp_modify`: posting follows the new state.
    fn mlx5dv_devx_qp_modify(
        qp: *mut ibv_qp,
        request: *const c_void,
        request_length: usize,
        answer: *mut c_void,
        answer_length: usize
    ) -> c_int
    where is_ours((*qp).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live queue pair, and the program's command.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*qp).context);
            let request = input(request, request_length);
            // Before the answer, which may overwrite it.
            let state = state_after(&*request);
            let answer = output(answer, answer_length);
            devx::modify(&ctx, (*qp).handle, request, answer)?;
            if let Some(state) = state {
                crate::qp::set_state::<crate::mlx5::Mlx5>(qp, state);
            }
            Ok(())
        })
    }

    /// `mlx5dv_devx_general_cmd`. EREMOTEIO if the device refuses the command; the output has
    /// its answer.
    fn mlx5dv_devx_general_cmd(
        context: *mut ibv_context,
        request: *const c_void,
        request_length: usize,
        answer: *mut c_void,
        answer_length: usize
    ) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context, and the program's command.
        entry::int(|| unsafe {
            let request = input(request, request_length);
            let answer = output(answer, answer_length);
            Ok(devx::general(&CtxRef::of(context), request, answer)?)
        })
    }

    /// `mlx5dv_devx_obj_create`.
    fn mlx5dv_devx_obj_create(
        context: *mut ibv_context,
        request: *const c_void,
        request_length: usize,
        answer: *mut c_void,
        answer_length: usize
    ) -> *mut Object
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and the program's command.
        entry::pointer(|| unsafe {
            let request = input(request, request_length);
            let answer = output(answer, answer_length);
            let object = DevxObject::create(&CtxRef::of(context), request, answer)?;
            boxed(Object { context, object })
        })
    }

    /// `mlx5dv_devx_obj_destroy`. An object in use is unchanged.
    fn mlx5dv_devx_obj_destroy(object: *mut Object) -> c_int
    where is_ours((*object).context), else libc::EOPNOTSUPP => {
        // SAFETY: what `mlx5dv_devx_obj_create` made, once.
        entry::int(|| unsafe {
            destroyed((*object).object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(object));
            Ok(())
        })
    }

    /// `mlx5dv_devx_query_eqn`.
    fn mlx5dv_devx_query_eqn(context: *mut ibv_context, vector: u32, number: *mut u32) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context, and room for the answer.
        entry::int(|| unsafe {
            number.write(devx::query_eqn(&CtxRef::of(context), vector)?);
            Ok(())
        })
    }

    /// `mlx5dv_devx_umem_reg`.
    fn mlx5dv_devx_umem_reg(
        context: *mut ibv_context,
        addr: *mut c_void,
        length: usize,
        access: u32
    ) -> *mut DevxUmem
    where is_ours(context), else ringverbs_refused_object().cast() => {
        let init = UmemInit {
            addr: addr.expose_provenance() as u64,
            length: length as u64,
            access,
            page_sizes: None,
            dmabuf: None,
        };
        // SAFETY: an open context, and the program's memory.
        entry::pointer(|| unsafe { register(context, &init) })
    }

    /// `mlx5dv_devx_umem_reg_ex`. EOPNOTSUPP for members that are not known.
    fn mlx5dv_devx_umem_reg_ex(context: *mut ibv_context, attr: *mut mlx5dv_devx_umem_in)
        -> *mut DevxUmem
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and the program's attributes and memory.
        entry::pointer(|| unsafe {
            let attr = &*attr;
            if attr.comp_mask & !UMEM_MASK_DMABUF != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let dmabuf = match attr.comp_mask & UMEM_MASK_DMABUF {
                0 => None,
                _ => Some(borrowed(attr.dmabuf_fd).ok_or(Errno(libc::EBADF))?),
            };
            let init = UmemInit {
                addr: attr.addr.expose_provenance() as u64,
                length: attr.size as u64,
                access: attr.access,
                page_sizes: Some(attr.pgsz_bitmap),
                dmabuf,
            };
            register(context, &init)
        })
    }

    /// `mlx5dv_devx_umem_dereg`. Memory in use stays registered.
    fn mlx5dv_devx_umem_dereg(memory: *mut DevxUmem) -> c_int
    where is_ours((*memory).context), else libc::EOPNOTSUPP => {
        // SAFETY: what was registered, once.
        entry::int(|| unsafe {
            destroyed((*memory).object.destroy().map_err(Into::into))?;
            drop(Box::from_raw(memory));
            Ok(())
        })
    }

    /// `mlx5dv_devx_alloc_uar`: a page of registers; that of type NC is the same for all
    /// callers.
    fn mlx5dv_devx_alloc_uar(context: *mut ibv_context, flags: u32) -> *mut DevxUar
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context.
        entry::pointer(|| unsafe {
            let allocate = |kind| allocate_uar(context, kind);
            match flags {
                uar_type::BF => allocate(UarKind::BlueFlame),
                uar_type::NC => {
                    let shared = CtxRef::of(context).shared_uar();
                    shared.get(|| allocate(UarKind::Doorbells))
                }
                uar_type::NC_DEDICATED => allocate(UarKind::Doorbells),
                _ => Err(Errno::OPNOTSUPP),
            }
        })
    }

    /// `mlx5dv_devx_free_uar`: the shared page stays until the context is closed.
    fn mlx5dv_devx_free_uar(uar: *mut DevxUar) -> ()
    where is_ours((*uar).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_devx_alloc_uar` returned, once unless it is shared.
        entry::unit(|| unsafe {
            let shared = CtxRef::of((*uar).context).shared_uar();
            if shared.0.load(Ordering::Acquire) != uar {
                drop(Box::from_raw(uar));
            }
        })
    }

    /// `mlx5dv_devx_uar_export_dmabuf_fd`: a DMA buffer of the page.
    fn mlx5dv_devx_uar_export_dmabuf_fd(uar: *mut DevxUar) -> c_int
    where is_ours((*uar).context), else ringverbs_refused_descriptor() as c_int => {
        // SAFETY: a live page.
        entry::descriptor(|| unsafe { Ok((*uar).uar.export()?.into_fd()) })
    }

    /// `mlx5dv_alloc_var`.
    fn mlx5dv_alloc_var(context: *mut ibv_context, flags: u32) -> *mut VarPage
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context.
        entry::pointer(|| unsafe {
            if flags & !VAR_FLAG_TLP != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            let (object, location) = Var::alloc(&CtxRef::of(context), flags)?;
            boxed(VarPage {
                public: mlx5dv_var {
                    page_id: location.page_id,
                    length: location.mmap_length,
                    mmap_off: location.mmap_offset as libc::off_t,
                    comp_mask: 0,
                },
                context,
                object,
            })
        })
    }

    /// `mlx5dv_free_var`.
    fn mlx5dv_free_var(var: *mut VarPage) -> ()
    where is_ours((*var).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_alloc_var` made, once.
        entry::unit(|| drop(unsafe { Box::from_raw(var).object }))
    }

    /// `mlx5dv_pp_alloc`.
    fn mlx5dv_pp_alloc(
        context: *mut ibv_context,
        length: usize,
        limits: *const c_void,
        flags: u32
    ) -> *mut PacketPacingEntry
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context, and the program's limits.
        entry::pointer(|| unsafe {
            let limits = &*input(limits, length);
            let (object, index) = PacketPacing::alloc(&CtxRef::of(context), limits, flags)?;
            boxed(PacketPacingEntry {
                public: mlx5dv_pp { index },
                context,
                object,
            })
        })
    }

    /// `mlx5dv_pp_free`.
    fn mlx5dv_pp_free(pacing: *mut PacketPacingEntry) -> ()
    where is_ours((*pacing).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_pp_alloc` made, once.
        entry::unit(|| drop(unsafe { Box::from_raw(pacing).object }))
    }

    /// `mlx5dv_devx_create_cmd_comp`: a channel for answers of
    /// `mlx5dv_devx_obj_query_async`.
    fn mlx5dv_devx_create_cmd_comp(context: *mut ibv_context) -> *mut mlx5dv_devx_cmd_comp
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context.
        entry::pointer(|| unsafe {
            // By malloc: the library that destroys it, possibly libmlx5, calls free.
            let channel = libc::malloc(size_of::<mlx5dv_devx_cmd_comp>());
            let channel = channel.cast::<mlx5dv_devx_cmd_comp>();
            if channel.is_null() {
                return Err(Errno::NOMEM);
            }
            match devx::command_channel(&CtxRef::of(context)) {
                Ok(fd) => channel.write(mlx5dv_devx_cmd_comp { fd }),
                Err(error) => {
                    libc::free(channel.cast());
                    return Err(error.into());
                }
            }
            Ok(channel)
        })
    }

    /// `mlx5dv_devx_obj_query_async`.
    fn mlx5dv_devx_obj_query_async(
        object: *mut Object,
        request: *const c_void,
        request_length: usize,
        answer_length: usize,
        wr_id: u64,
        channel: *mut mlx5dv_devx_cmd_comp
    ) -> c_int
    where is_ours((*object).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live object and channel, and the program's command.
        entry::int(|| unsafe {
            let ctx = CtxRef::of((*object).context);
            let channel = borrowed((*channel).fd).ok_or(Errno::INVAL)?;
            let request = input(request, request_length);
            let handle = (*object).object.handle();
            Ok(devx::query_async(&ctx, handle, &*request, answer_length, wr_id, channel)?)
        })
    }

    /// `mlx5dv_devx_create_event_channel`.
    fn mlx5dv_devx_create_event_channel(context: *mut ibv_context, flags: u32)
        -> *mut EventChannel
    where is_ours(context), else ringverbs_refused_object().cast() => {
        // SAFETY: an open context.
        entry::pointer(|| unsafe {
            let fd = devx::event_channel(&CtxRef::of(context), flags)?;
            let result = boxed(EventChannel {
                public: mlx5dv_devx_event_channel { fd },
                context,
            });
            if result.is_err() {
                libc::close(fd);
            }
            result
        })
    }

    /// `mlx5dv_devx_destroy_event_channel`.
    fn mlx5dv_devx_destroy_event_channel(channel: *mut EventChannel) -> ()
    where is_ours((*channel).context), else ringverbs_refused_nothing() => {
        // SAFETY: what `mlx5dv_devx_create_event_channel` made, once.
        entry::unit(|| unsafe {
            libc::close((*channel).public.fd);
            drop(Box::from_raw(channel));
        })
    }

    /// `mlx5dv_devx_subscribe_devx_event`; `length` is the size of `events` in bytes.
    fn mlx5dv_devx_subscribe_devx_event(
        channel: *mut EventChannel,
        object: *mut Object,
        length: u16,
        events: *mut u16,
        cookie: u64
    ) -> c_int
    where is_ours((*channel).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live channel and object, and the program's numbers.
        entry::int(|| unsafe {
            let events = &*input(events.cast(), length.into());
            subscribe(channel, object, events, EventTarget::Cookie(cookie))
        })
    }

    /// `mlx5dv_devx_subscribe_devx_event_fd`.
    fn mlx5dv_devx_subscribe_devx_event_fd(
        channel: *mut EventChannel,
        fd: c_int,
        object: *mut Object,
        event: u16
    ) -> c_int
    where is_ours((*channel).context), else libc::EOPNOTSUPP => {
        // SAFETY: a live channel and object, and the program's descriptor.
        entry::int(|| unsafe {
            let fd: BorrowedFd<'_> = borrowed(fd).ok_or(Errno(libc::EBADF))?;
            subscribe(channel, object, &event.to_ne_bytes(), EventTarget::EventFd(fd))
        })
    }

    /// `mlx5dv_devx_get_event`: the number of bytes read, or -1.
    fn mlx5dv_devx_get_event(channel: *mut EventChannel, event: *mut c_void, length: usize)
        -> isize
    where is_ours((*channel).context), else ringverbs_refused_descriptor() => {
        // SAFETY: a live channel, and room for the event.
        unsafe { read_event((*channel).public.fd, event, length) }
    }
}

/// `mlx5dv_devx_destroy_cmd_comp`, of any provider's context.
///
/// # Safety
/// What `mlx5dv_devx_create_cmd_comp` made, once.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn mlx5dv_devx_destroy_cmd_comp(channel: *mut mlx5dv_devx_cmd_comp) {
    // SAFETY: as the caller says.
    unsafe {
        libc::close((*channel).fd);
        libc::free(channel.cast());
    }
}

/// `mlx5dv_devx_get_async_cmd_comp`, of any provider's context: reads an answer.
///
/// # Safety
/// A live channel, and room for the answer.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn mlx5dv_devx_get_async_cmd_comp(
    channel: *mut mlx5dv_devx_cmd_comp,
    answer: *mut c_void,
    length: usize,
) -> c_int {
    /// The identifier precedes the answer.
    const HEADER: isize = 8;
    // SAFETY: as the caller says.
    match unsafe { libc::read((*channel).fd, answer, length) } {
        ..0 => Errno::last().0,
        0..HEADER => libc::EINVAL,
        _ => 0,
    }
}

/// Reads an event; an event without its cookie is an error.
///
/// # Safety
/// An open channel, and room for the event.
unsafe fn read_event(fd: c_int, event: *mut c_void, length: usize) -> isize {
    const COOKIE: isize = 8;
    // SAFETY: as the caller says.
    match unsafe { libc::read(fd, event, length) } {
        ..0 => -1,
        0..COOKIE => {
            Errno::INVAL.set();
            -1
        }
        read => read,
    }
}

/// # Safety
/// An open context, and memory that commands may use.
unsafe fn register(context: *mut ibv_context, init: &UmemInit<'_>) -> Result<*mut DevxUmem, Errno> {
    // SAFETY: as the caller says.
    let (object, umem_id) = unsafe { Umem::register(&CtxRef::of(context), init)? };
    boxed(DevxUmem {
        public: mlx5dv_devx_umem { umem_id },
        context,
        object,
    })
}

/// # Safety
/// A live channel, and a live object or null.
unsafe fn subscribe(
    channel: *mut EventChannel,
    object: *mut Object,
    events: &[u8],
    target: EventTarget<'_>,
) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let ctx = CtxRef::of((*channel).context);
        let fd = borrowed((*channel).public.fd).ok_or(Errno::INVAL)?;
        let object = object.as_ref().map(|object| object.object.handle());
        Ok(devx::subscribe(&ctx, fd, object, events, target)?)
    }
}

/// The state of a queue pair after a command.
fn state_after(request: &[u8]) -> Option<u32> {
    use crate::abi::*;
    let opcode = u16::from_be_bytes(request.get(..2)?.try_into().ok()?);
    Some(match opcode {
        qp_command::RST2INIT | qp_command::INIT2INIT => IBV_QPS_INIT,
        qp_command::INIT2RTR => IBV_QPS_RTR,
        qp_command::RTR2RTS | qp_command::RTS2RTS | qp_command::SQERR2RTS | qp_command::SQD2RTS => {
            IBV_QPS_RTS
        }
        qp_command::TO_ERR => IBV_QPS_ERR,
        qp_command::TO_RST => IBV_QPS_RESET,
        _ => return None,
    })
}
