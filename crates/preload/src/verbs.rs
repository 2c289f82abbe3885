//! Driving the devices from `ibv_poll_cq`, and reading requests for notification.
//!
//! A polling program makes no system calls, so only the network's thread would drive the
//! device, and on a busy host that thread runs only after the program's time slice.
//! Therefore `ibv_open_device` hooks the provider's `poll_cq` in the context's table of
//! operations: an empty poll drives the device, and sleeps when there is nothing to do.
//! Programs that poll in another way (`ibv_start_poll`, mlx5dv) depend on the thread.
//!
//! A request for notification overwrites the record of an earlier one that the device has
//! not read yet. One for solicited completions must not weaken it, so the device reads the
//! records first.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::process;
use crate::real::set_errno;
use crate::table::{Lookup, ObjectKind, find};

/// The part of `struct ibv_context` that programs are compiled with.
#[repr(C)]
struct Context {
    device: *mut c_void,
    operations: [*mut c_void; 32],
    command_fd: c_int,
}

/// Indices in `struct ibv_context_ops`.
const POLL_CQ: usize = 11;
const REQ_NOTIFY_CQ: usize = 12;

/// The part of `struct ibv_cq` that programs are compiled with.
#[repr(C)]
struct Cq {
    context: *const Context,
    channel: *mut c_void,
    program: *mut c_void,
    handle: u32,
}

const _: () = assert!(std::mem::offset_of!(Cq, handle) == 24);
const _: () = assert!(std::mem::offset_of!(Context, operations) + POLL_CQ * 8 == 96);
const _: () = assert!(std::mem::offset_of!(Context, command_fd) == 264);

type OpenDevice = unsafe extern "C" fn(*mut c_void) -> *mut Context;
type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;

/// Maximum number of providers in a process.
const MAX_PROVIDERS: usize = 4;

type Functions = [AtomicPtr<c_void>; MAX_PROVIDERS];

/// The functions of the providers.
static PROVIDER_POLL_CQ: Functions = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_PROVIDERS];
static PROVIDER_REQ_NOTIFY_CQ: Functions =
    [const { AtomicPtr::new(ptr::null_mut()) }; MAX_PROVIDERS];

/// The hooks, in the same order.
static HOOKS: [PollCq; MAX_PROVIDERS] = [poll::<0>, poll::<1>, poll::<2>, poll::<3>];
static NOTIFY_HOOKS: [ReqNotifyCq; MAX_PROVIDERS] =
    [notify::<0>, notify::<1>, notify::<2>, notify::<3>];

unsafe extern "C" fn poll<const N: usize>(
    cq: *mut c_void,
    max: c_int,
    completions: *mut c_void,
) -> c_int {
    let provider = PROVIDER_POLL_CQ[N].load(Ordering::Relaxed);
    // SAFETY: the address of a provider's `poll_cq`, stored before this function was
    // put into a table.
    let provider: PollCq = unsafe { std::mem::transmute(provider) };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(cq, max, completions) };
    if found == 0 {
        // SAFETY: the program passes a completion queue, whose context is open.
        let (handle, fd) = unsafe {
            let queue = cq.cast::<Cq>();
            ((*queue).handle, (*(*queue).context).command_fd)
        };
        process::idle(cq as usize, handle, fd);
    } else {
        process::poll_succeeded();
    }
    found
}

unsafe extern "C" fn notify<const N: usize>(cq: *mut c_void, solicited_only: c_int) -> c_int {
    if solicited_only != 0 {
        process::read_armings();
    }
    let provider = PROVIDER_REQ_NOTIFY_CQ[N].load(Ordering::Relaxed);
    // SAFETY: the address of a provider's `req_notify_cq`, stored before this function was
    // put into a table.
    let provider: ReqNotifyCq = unsafe { std::mem::transmute(provider) };
    // SAFETY: guaranteed by the caller.
    unsafe { provider(cq, solicited_only) }
}

/// Hooks functions of the provider.
///
/// # Safety
/// The context must be open and not yet be used.
unsafe fn hook_provider(context: *mut Context) {
    // SAFETY: guaranteed by the caller.
    let command_fd = unsafe { (*context).command_fd };
    match find(command_fd) {
        Lookup::Open(object) if matches!(object.kind, ObjectKind::Device(_)) => {}
        _ => return,
    }
    let hooks = HOOKS.map(|hook| hook as *mut c_void);
    let notify_hooks = NOTIFY_HOOKS.map(|hook| hook as *mut c_void);
    for (at, providers, hooks) in [
        (POLL_CQ, &PROVIDER_POLL_CQ, hooks),
        (REQ_NOTIFY_CQ, &PROVIDER_REQ_NOTIFY_CQ, notify_hooks),
    ] {
        // SAFETY: guaranteed by the caller.
        let entry = unsafe { &raw mut (*context).operations[at] };
        // SAFETY: as above.
        let provider = unsafe { entry.read() };
        for (known, hook) in providers.iter().zip(hooks) {
            let (order, null) = (Ordering::Relaxed, ptr::null_mut());
            let before = known.compare_exchange(null, provider, order, order);
            if before.is_ok() || before == Err(provider) {
                // SAFETY: as above; the function has the entry's type.
                unsafe { entry.write(hook) };
                break;
            }
        }
    }
}

/// Returns libibverbs' function, however the library was loaded.
fn real_open_device() -> Option<OpenDevice> {
    const NAME: &CStr = c"ibv_open_device";
    // SAFETY: opening a library that is already loaded runs no code of it.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), LOADED) };
    if library.is_null() {
        return None;
    }
    // SAFETY: names are NUL-terminated.
    let found = unsafe { libc::dlvsym(library, NAME.as_ptr(), c"IBVERBS_1.1".as_ptr()) };
    // SAFETY: the function of this name and version has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute(found) })
}

const LOADED: c_int = libc::RTLD_LAZY | libc::RTLD_NOLOAD;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut c_void) -> *mut Context {
    let Some(open_device) = real_open_device() else {
        set_errno(libc::ENOSYS);
        return ptr::null_mut();
    };
    // SAFETY: guaranteed by the caller.
    let context = unsafe { open_device(device) };
    if !context.is_null() {
        // SAFETY: the context is new.
        unsafe { hook_provider(context) };
    }
    context
}
