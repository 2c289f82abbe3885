//! Polling drives the devices.
//!
//! A program that polls needs no system call, so the device would run on its thread
//! alone: on a busy host that thread gets a processor only when the program's time
//! slice ends. `ibv_open_device` therefore puts a function before the provider's in
//! the context's table, through which `ibv_poll_cq` calls: a poll that finds nothing
//! works for the device, and sleeps when there is nothing to do. Programs that poll
//! in another way (`ibv_start_poll`, mlx5dv) depend on the thread.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::real::set_errno;
use crate::table::{Kind, Lookup, find};
use crate::world;

/// The part of `struct ibv_context` that programs are compiled with.
#[repr(C)]
struct Context {
    device: *mut c_void,
    operations: [*mut c_void; 32],
    command_fd: c_int,
}

/// Place of `poll_cq` in `struct ibv_context_ops`.
const POLL_CQ: usize = 11;

const _: () = assert!(std::mem::offset_of!(Context, operations) + POLL_CQ * 8 == 96);
const _: () = assert!(std::mem::offset_of!(Context, command_fd) == 264);

type OpenDevice = unsafe extern "C" fn(*mut c_void) -> *mut Context;
type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;

/// Providers whose contexts a process can have.
const PROVIDERS: usize = 4;

/// Their functions.
static POLLS: [AtomicPtr<c_void>; PROVIDERS] =
    [const { AtomicPtr::new(ptr::null_mut()) }; PROVIDERS];

/// What is put before them, in the same order.
static DRIVING: [PollCq; PROVIDERS] = [poll::<0>, poll::<1>, poll::<2>, poll::<3>];

unsafe extern "C" fn poll<const N: usize>(
    cq: *mut c_void,
    most: c_int,
    completions: *mut c_void,
) -> c_int {
    let provider = POLLS[N].load(Ordering::Relaxed);
    // SAFETY: the address of a provider's `poll_cq`, stored before this function was
    // put into a table.
    let provider: PollCq = unsafe { std::mem::transmute(provider) };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(cq, most, completions) };
    if found == 0 {
        world::idle();
    } else {
        world::found();
    }
    found
}

/// Puts a driving function before the provider's.
///
/// # Safety
/// The context must be open and not yet be used.
unsafe fn drive(context: *mut Context) {
    // SAFETY: guaranteed by the caller.
    let command_fd = unsafe { (*context).command_fd };
    match find(command_fd) {
        Lookup::Open(object) if matches!(object.kind, Kind::Device(_)) => {}
        _ => return,
    }
    // SAFETY: guaranteed by the caller.
    let entry = unsafe { &raw mut (*context).operations[POLL_CQ] };
    // SAFETY: as above.
    let provider = unsafe { entry.read() };
    for (known, driving) in POLLS.iter().zip(DRIVING) {
        let (order, null) = (Ordering::Relaxed, ptr::null_mut());
        let before = known.compare_exchange(null, provider, order, order);
        if before.is_ok() || before == Err(provider) {
            // SAFETY: as above; the function has the entry's type.
            unsafe { entry.write(driving as *mut c_void) };
            return;
        }
    }
}

/// Returns libibverbs' function, however the library was loaded.
fn next() -> Option<OpenDevice> {
    const NAME: &CStr = c"ibv_open_device";
    // SAFETY: a library that is loaded already runs nothing; a handle of it is kept.
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
    let Some(next) = next() else {
        set_errno(libc::ENOSYS);
        return ptr::null_mut();
    };
    // SAFETY: guaranteed by the caller.
    let context = unsafe { next(device) };
    if !context.is_null() {
        // SAFETY: the context is new.
        unsafe { drive(context) };
    }
    context
}
