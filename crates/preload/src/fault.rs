//! Device accesses to memory that the program has unmapped.
//!
//! A card pins registered memory, so a program may unmap memory before deregistering it, as
//! UCX's registration cache does. Here a device access to such memory is a fault of this
//! process: the handler maps an empty page in its place, and the access is repeated. All
//! other faults are the program's: its action for SIGSEGV is kept here, and executed as the
//! kernel would.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use crate::internal;
use crate::real::{self, errno, set_errno};

static PAGE: AtomicUsize = AtomicUsize::new(4096);
/// The program's action; `None` before the handler is installed.
static PROGRAM_ACTION: AtomicCell<Option<libc::sigaction>> = AtomicCell::new(None);

/// Stores the program's action, and returns the one before it.
fn swap_program_action(action: libc::sigaction) -> Option<libc::sigaction> {
    // A handler on this thread would deadlock.
    let _blocked = SignalBlock::all();
    PROGRAM_ACTION.swap(Some(action))
}

/// Blocks all signals in this thread while it exists.
struct SignalBlock(libc::sigset_t);

impl SignalBlock {
    fn all() -> Self {
        // SAFETY: both sets are of this function, and written before they are read.
        unsafe {
            let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for SignalBlock {
    fn drop(&mut self) {
        // SAFETY: the set is initialized.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// Returns an action with a handler and an empty mask.
fn simple_action(handler: usize, flags: c_int) -> libc::sigaction {
    // SAFETY: zero is a value of each field.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    action
}

/// Installs the handler, once there are devices.
pub(crate) fn install() {
    if PROGRAM_ACTION.load().is_some() {
        return;
    }
    // SAFETY: a query of a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    PAGE.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_fault;
    let ours = simple_action(handler as usize, libc::SA_SIGINFO | libc::SA_ONSTACK);
    let mut before = simple_action(libc::SIG_DFL, 0);
    // SAFETY: both actions are initialized.
    if unsafe { real::sigaction(libc::SIGSEGV, &raw const ours, &raw mut before) } == 0 {
        swap_program_action(before);
    }
}

/// Sets or queries the program's action for SIGSEGV; `None` for other signals, which the C
/// library handles.
pub(crate) fn exchange(number: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    if number != libc::SIGSEGV {
        return None;
    }
    let now = PROGRAM_ACTION.load()?;
    match new {
        Some(new) => swap_program_action(*new),
        None => Some(now),
    }
}

/// As [`exchange`], for `signal`.
pub(crate) fn exchange_handler(number: c_int, handler: usize) -> Option<usize> {
    let before = exchange(number, Some(&simple_action(handler, libc::SA_RESTART)))?;
    Some(before.sa_sigaction)
}

extern "C" fn on_fault(number: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    /// The code of an address without a mapping.
    const SEGV_MAPERR: c_int = 1;
    let before = errno();
    // SAFETY: the kernel passes the information of a fault.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let accessed = || {
        embedded::last_accesses()
            .iter()
            .any(|range| range.contains(&address))
    };
    let is_device = internal::is_internal() && accessed();
    let mapped = code == SEGV_MAPERR && is_device && map(address);
    if !mapped {
        forward_signal(number, code, info, context);
    }
    set_errno(before);
}

/// Maps an empty page at an unmapped address. Returns whether the address is mapped now.
fn map(address: usize) -> bool {
    let page = PAGE.load(Ordering::Relaxed);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: by its flags, the call replaces no mapping. Nothing but a device accesses
    // an address that has none.
    let mapped = unsafe {
        let at = address & !(page - 1);
        libc::syscall(libc::SYS_mmap, at, page, protection, flags, -1, 0)
    };
    // EEXIST: another thread was first.
    mapped != -1 || errno() == libc::EEXIST
}

/// Executes the program's action, as the kernel would.
fn forward_signal(number: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let default = simple_action(libc::SIG_DFL, 0);
    let action = PROGRAM_ACTION.load().unwrap_or(default);
    let is_fault = code > 0;
    if action.sa_sigaction == libc::SIG_IGN && !is_fault {
        return;
    }
    if matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
        // SAFETY: the action is initialized. A fault occurs again, another signal is sent
        // again, and the default action ends the process.
        unsafe {
            real::sigaction(number, &raw const default, ptr::null_mut());
            if !is_fault {
                libc::raise(number);
            }
        }
        return;
    }
    if action.sa_flags & libc::SA_RESETHAND != 0 {
        swap_program_action(default);
    }
    // SAFETY: the sets are initialized; the program has given this function for signals,
    // of the type that the flag tells.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const action.sa_mask, ptr::null_mut());
        if action.sa_flags & libc::SA_NODEFER != 0 {
            let mut this = MaybeUninit::uninit();
            libc::sigemptyset(this.as_mut_ptr());
            libc::sigaddset(this.as_mut_ptr(), number);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, this.as_ptr(), ptr::null_mut());
        }
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            let handler = std::mem::transmute::<usize, Handler>(action.sa_sigaction);
            handler(number, info, context);
        } else {
            let handler = std::mem::transmute::<usize, extern "C" fn(c_int)>(action.sa_sigaction);
            handler(number);
        }
    }
}
