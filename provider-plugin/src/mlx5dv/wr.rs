//! Device-specific work requests of `ibv_wr_*`.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{NonNull, null_mut};
use core::slice;

use mlx5::{Address, KeyLayout, KeyProtection, LayoutChange, PostError, SendQueue};
use uverbs::{Destination, SendFlags, Sge};

use super::abi::*;
use super::mkey::Mkey;
use super::protection::{Protection, encryption, signatures};
use super::{exported, is_ours};
use crate::abi::{ibv_ah, ibv_qp_ex, ibv_sge};
use crate::ah::ah_of;
use crate::context::CtxRef;
use crate::mlx5::Mlx5;
use crate::mlx5::key_config::{CompleteChange, KeyConfig};
use crate::mlx5::qp::Qp;
use crate::qp::Addressing;
use crate::wr_ex::{
    fail, idle_queue, push_by, set_destination, wr_complete, wr_start, write_destination,
};

exported! {
    /// `mlx5dv_qp_ex_from_ibv_qp_ex`: the functions of a queue pair that was created
    /// with `send_ops_flags`. Those that are missing are null.
    fn mlx5dv_qp_ex_from_ibv_qp_ex(qp: *mut ibv_qp_ex) -> *mut mlx5dv_qp_ex
    where is_ours((*qp).qp_base.context), else null_mut() => {
        // SAFETY: a live queue pair of ours, of which no part is read.
        unsafe { &raw mut (*qp.cast::<Qp>()).device_data.functions.public }
    }
}

/// The functions of a queue pair, by which it is found.
#[repr(C)]
pub struct Functions {
    /// Distinguishes them from libmlx5's, which follow libmlx5's data of the queue pair.
    mark: *const u8,
    pub public: mlx5dv_qp_ex,
}

/// The target of [`Functions::mark`].
static MARK: u8 = 0;

impl Functions {
    /// Those functions.
    pub fn new(public: mlx5dv_qp_ex) -> Self {
        Self {
            mark: &raw const MARK,
            public,
        }
    }
}

/// Returns whether the functions are of a queue pair of ours.
///
/// # Safety
/// They are of a live queue pair, ours or libmlx5's.
pub(super) unsafe fn is_functions(functions: *const mlx5dv_qp_ex) -> bool {
    const BEFORE: usize = offset_of!(Functions, public);
    // SAFETY: as the caller says; a queue pair's data is before them in both.
    unsafe { *functions.byte_sub(BEFORE).cast::<*const u8>() == &raw const MARK }
}

impl mlx5dv_qp_ex {
    /// No functions.
    pub const NONE: Self = Self {
        comp_mask: 0,
        wr_set_dc_addr: None,
        wr_mr_interleaved: None,
        wr_mr_list: None,
        wr_mkey_configure: None,
        wr_set_mkey_access_flags: None,
        wr_set_mkey_layout_list: None,
        wr_set_mkey_layout_interleaved: None,
        wr_set_mkey_sig_block: None,
        wr_raw_wqe: None,
        wr_set_dc_addr_stream: None,
        wr_memcpy: None,
        wr_set_mkey_crypto: None,
    };

    /// The functions of a queue pair that was created for `operations`.
    pub fn of(addressing: Addressing, operations: u64) -> Self {
        let mut functions = Self::NONE;
        if addressing == Addressing::Dc {
            functions.wr_set_dc_addr = Some(wr_set_dc_addr);
            functions.wr_set_dc_addr_stream = Some(wr_set_dc_addr_stream);
        }
        let has = |operation| operations & operation != 0;
        if has(send_ops::RAW_WQE) {
            functions.wr_raw_wqe = Some(wr_raw_wqe);
        }
        if has(send_ops::MEMCPY) {
            functions.wr_memcpy = Some(wr_memcpy);
        }
        if has(send_ops::MR_INTERLEAVED) {
            functions.wr_mr_interleaved = Some(wr_mr_interleaved);
        }
        if has(send_ops::MR_LIST) {
            functions.wr_mr_list = Some(wr_mr_list);
        }
        if has(send_ops::MKEY_CONFIGURE) {
            functions.wr_mkey_configure = Some(wr_mkey_configure);
            functions.wr_set_mkey_access_flags = Some(wr_set_mkey_access_flags);
            functions.wr_set_mkey_layout_list = Some(wr_set_mkey_layout_list);
            functions.wr_set_mkey_layout_interleaved = Some(wr_set_mkey_layout_interleaved);
            functions.wr_set_mkey_sig_block = Some(wr_set_mkey_sig_block);
            functions.wr_set_mkey_crypto = Some(wr_set_mkey_crypto);
        }
        functions
    }
}

/// Sets the functions that open and publish the batches of a queue pair that changes keys. A
/// change does not outlive its batch, since its key might be destroyed.
pub(crate) fn set_batch_functions(qp: &mut ibv_qp_ex) {
    qp.wr_start = Some(wr_start_configuring);
    qp.wr_complete = Some(wr_complete_configuring);
}

unsafe extern "C" fn wr_start_configuring(qp: *mut ibv_qp_ex) {
    // SAFETY: a live queue pair of ours, whose change is this caller's after `wr_start`.
    unsafe {
        wr_start::<Mlx5>(qp);
        key_config(qp).discard();
    }
}

/// A change whose setters are missing fails the batch: EINVAL.
unsafe extern "C" fn wr_complete_configuring(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the application is after wr_start.
    unsafe {
        if key_config(qp).is_open() {
            fail::<Mlx5>(qp, libc::EINVAL);
        }
        wr_complete::<Mlx5>(qp)
    }
}

/// The queue pair that has the functions.
///
/// # Safety
/// What [`mlx5dv_qp_ex_from_ibv_qp_ex`] has returned for a live queue pair.
pub(super) unsafe fn queue_pair(functions: *mut mlx5dv_qp_ex) -> *mut ibv_qp_ex {
    const AT: usize = offset_of!(Qp, device_data.functions.public);
    // SAFETY: as the caller says; the queue pair begins with its public part.
    unsafe { functions.byte_sub(AT).cast() }
}

unsafe extern "C" fn wr_set_dc_addr(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
) {
    // SAFETY: as the caller says.
    unsafe { set_target(functions, ah, remote_dctn, access_key, 0) };
}

unsafe extern "C" fn wr_set_dc_addr_stream(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
    stream: u16,
) {
    // SAFETY: as the caller says.
    unsafe { set_target(functions, ah, remote_dctn, access_key, stream) };
}

/// Sets the target of the open work request.
///
/// # Safety
/// The application is between wr_start and wr_complete of the queue pair, and passes an
/// address handle that lives until the work request is posted.
#[inline]
unsafe fn set_target(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
    stream: u16,
) {
    // SAFETY: as the caller says.
    unsafe {
        let placed = !ah.is_null()
            && write_destination::<Mlx5>(
                queue_pair(functions),
                target(ah, remote_dctn, access_key, stream),
            );
        if !placed {
            set_target_slow(functions, ah, remote_dctn, access_key, stream);
        }
    }
}

/// Slow path of [`set_target`].
///
/// # Safety
/// As for [`set_target`].
#[cold]
#[inline(never)]
unsafe extern "C" fn set_target_slow(
    functions: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
    stream: u16,
) {
    // SAFETY: as the caller says.
    unsafe {
        let target = (!ah.is_null()).then(|| target(ah, remote_dctn, access_key, stream));
        set_destination::<Mlx5>(queue_pair(functions), target);
    }
}

/// # Safety
/// An address handle that lives until the work request is posted.
unsafe fn target(
    ah: *mut ibv_ah,
    remote_dctn: u32,
    access_key: u64,
    stream: u16,
) -> Destination<'static, Address> {
    Destination::Dc {
        // SAFETY: as the caller says.
        address: unsafe { &ah_of::<Mlx5>(ah).address },
        remote_dctn,
        access_key,
        stream,
    }
}

unsafe extern "C" fn wr_raw_wqe(functions: *mut mlx5dv_qp_ex, wqe: *const c_void) {
    // SAFETY: the application is between wr_start and wr_complete of the queue pair,
    // and passes a whole WQE.
    unsafe {
        push_by::<Mlx5>(queue_pair(functions), |queue, wr_id| {
            queue.push_raw(wr_id, wqe.cast()).map_err(PostError::errno)
        });
    }
}

unsafe extern "C" fn wr_memcpy(
    functions: *mut mlx5dv_qp_ex,
    to_lkey: u32,
    to: u64,
    from_lkey: u32,
    from: u64,
    length: usize,
) {
    // SAFETY: the application is between wr_start and wr_complete of the queue pair.
    unsafe {
        let qp = queue_pair(functions);
        let Some(memcpy) = &(*qp.cast::<Qp>()).device_data.memcpy else {
            return;
        };
        push_by::<Mlx5>(qp, |queue, wr_id| {
            let length = (length as u64 <= memcpy.max_length).then_some(length);
            let length = length.and_then(|length| u32::try_from(length).ok());
            let flags = SendFlags::from_bits_retain((*qp).wr_flags);
            let places = [(to, to_lkey), (from, from_lkey)];
            queue
                .push_memcpy(
                    wr_id,
                    flags,
                    places,
                    length.ok_or(libc::EINVAL)?,
                    memcpy.scratch(),
                )
                .map_err(PostError::errno)
        });
    }
}

/// The queue pair's change of a key.
///
/// # Safety
/// The application is between wr_start and wr_complete of the queue pair, and no other
/// reference to it exists.
unsafe fn key_config<'a>(qp: *mut ibv_qp_ex) -> &'a mut KeyConfig {
    // SAFETY: as the caller says.
    unsafe { &mut *(*qp.cast::<Qp>()).device_data.key_config.get() }
}

/// Sets the layout of a key's change, and posts the change if it is complete.
///
/// # Safety
/// The application is between wr_start and wr_complete of the queue pair.
// `always` as of `SendQueue::push_layout`.
#[inline(always)]
unsafe fn set_layout(qp: *mut ibv_qp_ex, layout: KeyLayout<'_>) {
    // SAFETY: as the caller says.
    unsafe {
        if let Some(queue) = idle_queue::<Mlx5>(qp) {
            if let Some(complete) = key_config(qp).set_layout_fast(layout) {
                if let Err(errno) = push(queue, complete) {
                    fail::<Mlx5>(qp, errno);
                }
                return;
            }
        }
        // Copied, so that the fast path keeps the caller's value in registers.
        let copy = layout;
        set_layout_slow(qp, &copy);
    }
}

/// Slow path of [`set_layout`]: any setter, any key.
///
/// # Safety
/// As for [`set_layout`].
#[cold]
#[inline(never)]
unsafe fn set_layout_slow(qp: *mut ibv_qp_ex, layout: &KeyLayout<'_>) {
    // SAFETY: as the caller says.
    unsafe {
        push_by::<Mlx5>(qp, |queue, _| {
            let config = key_config(qp);
            let protection = config.protection;
            match config.set_layout(*layout)? {
                Some(complete) => push_slow(queue, complete, protection),
                None => Ok(()),
            }
        });
    }
}

/// Slow path of [`push`]: a change of a key with protection, or with a copied layout.
/// `protection` is that of its key.
#[cold]
fn push_slow(
    queue: &mut SendQueue,
    change: CompleteChange<'_>,
    protection: Option<NonNull<Protection>>,
) -> Result<(), c_int> {
    match protection {
        None => push(queue, change),
        Some(key) => {
            let (wr_id, flags, change) = change;
            // SAFETY: the key is live while it is configured.
            let mut state = unsafe { key.as_ref() }.lock();
            posted(queue.push_protected(wr_id, flags, &change, &mut state))
        }
    }
}

fn posted(result: Result<(), PostError>) -> Result<(), c_int> {
    result.map_err(|error| match error {
        PostError::TooManySges => libc::ENOMEM,
        error => error.errno(),
    })
}

/// Posts a complete change.
// `always` as of `SendQueue::push_layout`.
#[inline(always)]
fn push(queue: &mut SendQueue, (wr_id, flags, change): CompleteChange<'_>) -> Result<(), c_int> {
    posted(queue.push_layout(wr_id, flags, &change))
}

/// Posts a whole change of a key.
///
/// # Safety
/// A live key, and a queue pair between wr_start and wr_complete.
// `always` as of `SendQueue::push_layout`.
#[inline(always)]
unsafe fn change_key(
    queue: &mut SendQueue,
    qp: *mut ibv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    access: u32,
    layout: KeyLayout<'_>,
) -> Result<(), c_int> {
    // SAFETY: as the caller says; the public members are its own.
    let (wr_id, flags, key) = unsafe {
        key_config(qp).discard();
        let mkey_data = &*mkey.cast::<Mkey>();
        let key = (*mkey).lkey;
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        // One slow path for all other cases: several calls would cost registers.
        if !flags.contains(SendFlags::INLINE)
            || key & 0xff != 0
            || layout.elements() >= mkey_data.plain_limit()
        {
            return change_slow(queue, qp, mkey, access, layout);
        }
        ((*qp).wr_id, flags, key)
    };
    check_access(access)?;
    let change = LayoutChange {
        key,
        access: Some(access),
        layout: Some(layout),
    };
    push(queue, (wr_id, flags, change))
}

/// Slow path of [`change_key`]: a key with protection or a new variant.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe fn change_slow(
    queue: &mut SendQueue,
    qp: *mut ibv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    access: u32,
    layout: KeyLayout<'_>,
) -> Result<(), c_int> {
    // SAFETY: as the caller says; the public members are its own.
    let (wr_id, flags, (key, mkey_data)) = unsafe {
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        ((*qp).wr_id, flags, key_of(qp, mkey)?)
    };
    check_access(access)?;
    if layout.elements() > mkey_data.entries().into() {
        return Err(libc::ENOMEM);
    }
    let change = LayoutChange {
        key,
        access: Some(access),
        layout: Some(layout),
    };
    if let Some(protection) = mkey_data.protection() {
        open_protected(protection, 0);
    }
    let protection = mkey_data.protection().map(NonNull::from);
    push_slow(queue, (wr_id, flags, change), protection)
}

/// Returns the key to change, with its new variant. Changes of keys are posted inline.
///
/// # Safety
/// A live key, and a queue pair between wr_start and wr_complete.
unsafe fn key_of<'a>(qp: *mut ibv_qp_ex, mkey: *mut mlx5dv_mkey) -> Result<(u32, &'a Mkey), c_int> {
    // SAFETY: as the caller says.
    unsafe {
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        let key = (*mkey).lkey;
        if !flags.contains(SendFlags::INLINE) || (key & 0xff != 0 && !changes_tags(qp)) {
            return Err(libc::EOPNOTSUPP);
        }
        Ok((key, &*mkey.cast::<Mkey>()))
    }
}

/// Returns whether the variant of a key, its low 8 bits, may be changed.
///
/// # Safety
/// A live queue pair.
#[cold]
unsafe fn changes_tags(qp: *mut ibv_qp_ex) -> bool {
    // SAFETY: as the caller says.
    let ctx = unsafe { CtxRef::of((*qp).qp_base.context) };
    ctx.mlx5().is_ok_and(|device| device.changes_key_tags())
}

/// The application's list.
///
/// # Safety
/// Readable for that many elements, which are of the same form.
unsafe fn list_of<'a, C, T>(list: *const C, count: u16) -> &'a [T] {
    const { assert!(size_of::<C>() == size_of::<T>() && align_of::<C>() >= align_of::<T>()) };
    match count {
        0 => &[],
        // SAFETY: as the caller says.
        _ => unsafe { slice::from_raw_parts(list.cast(), count.into()) },
    }
}

unsafe extern "C" fn wr_mkey_configure(
    functions: *mut mlx5dv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    setters: u8,
    attr: *const mlx5dv_mkey_conf_attr,
) {
    // SAFETY: the application is between wr_start and wr_complete of the queue pair, and
    // passes a live key and its attributes.
    unsafe {
        let qp = queue_pair(functions);
        let flags = SendFlags::from_bits_retain((*qp).wr_flags);
        let (key, mkey_data) = ((*mkey).lkey, &*mkey.cast::<Mkey>());
        // One slow path for all other cases, as a tail call: no registers are saved.
        if idle_queue::<Mlx5>(qp).is_none()
            || setters == 0
            || !flags.contains(SendFlags::INLINE)
            || (*attr).conf_flags != 0
            || (*attr).comp_mask != 0
            || key & 0xff != 0
            || mkey_data.plain_limit() == 0
        {
            return configure_slow(functions, mkey, setters, attr);
        }
        let config = key_config(qp);
        config.open((*qp).wr_id, flags, key, mkey_data.entries(), setters);
        config.protection = None;
    }
}

/// Slow path of [`wr_mkey_configure`]: after an open work request, or of any key.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe extern "C" fn configure_slow(
    functions: *mut mlx5dv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    setters: u8,
    attr: *const mlx5dv_mkey_conf_attr,
) {
    // SAFETY: as the caller says.
    unsafe {
        let qp = queue_pair(functions);
        push_by::<Mlx5>(qp, |queue, wr_id| {
            if (*attr).conf_flags & !CONF_RESET_SIG_ATTR != 0 || (*attr).comp_mask != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            let (key, mkey_data) = key_of(qp, mkey)?;
            let flags = SendFlags::from_bits_retain((*qp).wr_flags);
            let config = key_config(qp);
            config.open(wr_id, flags, key, mkey_data.entries(), setters);
            config.protection = mkey_data.protection().map(NonNull::from);
            if let Some(protection) = mkey_data.protection() {
                open_protected(protection, (*attr).conf_flags);
            }
            match setters {
                0 => push_slow(queue, config.complete(None), config.protection),
                _ => Ok(()),
            }
        });
    }
}

#[cold]
fn open_protected(protection: &Protection, flags: u32) {
    protection.lock().open(flags & CONF_RESET_SIG_ATTR != 0);
}

/// Sets a part of the key's protection, and posts the change if it is complete.
///
/// # Safety
/// As in `wr_mkey_configure`.
unsafe fn set_protection<T>(
    functions: *mut mlx5dv_qp_ex,
    value: impl FnOnce() -> Result<T, c_int>,
    set: impl FnOnce(&mut KeyProtection, T) -> Result<(), PostError>,
) {
    // SAFETY: as the caller says; the key is live while it is configured.
    unsafe {
        let qp = queue_pair(functions);
        push_by::<Mlx5>(qp, |queue, _| {
            let config = key_config(qp);
            let protection = config.open_protection()?;
            set(&mut protection.as_ref().lock(), value()?).map_err(PostError::errno)?;
            match config.set_protection()? {
                Some(complete) => push_slow(queue, complete, Some(protection)),
                None => Ok(()),
            }
        });
    }
}

unsafe extern "C" fn wr_set_mkey_sig_block(
    functions: *mut mlx5dv_qp_ex,
    attr: *const mlx5dv_sig_block_attr,
) {
    // SAFETY: as in `wr_mkey_configure`.
    unsafe {
        set_protection(
            functions,
            || signatures(&*attr),
            KeyProtection::set_signatures,
        )
    }
}

unsafe extern "C" fn wr_set_mkey_crypto(
    functions: *mut mlx5dv_qp_ex,
    attr: *const mlx5dv_crypto_attr,
) {
    // SAFETY: as in `wr_mkey_configure`, with a live encryption key.
    unsafe {
        set_protection(
            functions,
            || encryption(&*attr),
            KeyProtection::set_encryption,
        )
    }
}

unsafe extern "C" fn wr_set_mkey_access_flags(functions: *mut mlx5dv_qp_ex, access: u32) {
    // SAFETY: as in `wr_mkey_configure`.
    unsafe {
        let qp = queue_pair(functions);
        let noted = idle_queue::<Mlx5>(qp).is_some()
            && check_access(access).is_ok()
            && key_config(qp).set_access_fast(access);
        if !noted {
            set_access_slow(functions, access);
        }
    }
}

/// Slow path of [`wr_set_mkey_access_flags`]: the rights complete the change.
///
/// # Safety
/// As there.
#[cold]
#[inline(never)]
unsafe extern "C" fn set_access_slow(functions: *mut mlx5dv_qp_ex, access: u32) {
    // SAFETY: as the caller says.
    unsafe {
        let qp = queue_pair(functions);
        push_by::<Mlx5>(qp, |queue, _| {
            check_access(access)?;
            let config = key_config(qp);
            let protection = config.protection;
            match config.set_access(access)? {
                Some(complete) => push_slow(queue, complete, protection),
                None => Ok(()),
            }
        });
    }
}

fn check_access(access: u32) -> Result<(), c_int> {
    use crate::abi::*;
    const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC;
    match access & !KNOWN {
        0 => Ok(()),
        _ => Err(libc::EINVAL),
    }
}

unsafe extern "C" fn wr_set_mkey_layout_list(
    functions: *mut mlx5dv_qp_ex,
    count: u16,
    list: *const ibv_sge,
) {
    // SAFETY: as in `wr_mkey_configure`; the list is the application's.
    unsafe {
        let qp = queue_pair(functions);
        set_layout(qp, KeyLayout::List(list_of::<_, Sge>(list, count)));
    }
}

unsafe extern "C" fn wr_set_mkey_layout_interleaved(
    functions: *mut mlx5dv_qp_ex,
    repeat: u32,
    count: u16,
    parts: *const mlx5dv_mr_interleaved,
) {
    // SAFETY: as in `wr_mkey_configure`; the parts are the application's.
    unsafe {
        let qp = queue_pair(functions);
        let parts = list_of(parts, count);
        set_layout(qp, KeyLayout::Interleaved { repeat, parts });
    }
}

unsafe extern "C" fn wr_mr_list(
    functions: *mut mlx5dv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    access: u32,
    count: u16,
    list: *const ibv_sge,
) {
    // SAFETY: as in `wr_mkey_configure`.
    unsafe {
        let qp = queue_pair(functions);
        let layout = KeyLayout::List(list_of::<_, Sge>(list, count));
        push_by::<Mlx5>(qp, |queue, _| change_key(queue, qp, mkey, access, layout));
    }
}

unsafe extern "C" fn wr_mr_interleaved(
    functions: *mut mlx5dv_qp_ex,
    mkey: *mut mlx5dv_mkey,
    access: u32,
    repeat: u32,
    count: u16,
    parts: *const mlx5dv_mr_interleaved,
) {
    // SAFETY: as in `wr_mkey_configure`.
    unsafe {
        let qp = queue_pair(functions);
        let parts = list_of(parts, count);
        let layout = KeyLayout::Interleaved { repeat, parts };
        push_by::<Mlx5>(qp, |queue, _| change_key(queue, qp, mkey, access, layout));
    }
}
