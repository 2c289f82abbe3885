//! Device accesses to memory that the program has unmapped, protected or truncated by calls
//! that `calls::memory` does not see.
//!
//! A card pins registered memory. Here a device access to such memory is a fault of this
//! process: the handler makes the page accessible, or maps an empty one in its place, and the
//! access is repeated. All other faults are the program's: its actions for SIGSEGV and SIGBUS
//! are kept here, and executed as the kernel would.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use crate::real::{self, errno, set_errno};
use crate::{check, doorbells, internal, own};

static PAGE: AtomicUsize = AtomicUsize::new(4096);
/// The signals of faults.
pub(crate) const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// The program's actions for them; `None` before the handler is installed.
static PROGRAM_ACTIONS: [AtomicCell<Option<libc::sigaction>>; SIGNALS.len()] =
    [const { AtomicCell::new(None) }; SIGNALS.len()];

/// Returns the program's action for a signal; `None` for signals that are not handled here.
fn program_action(number: c_int) -> Option<&'static AtomicCell<Option<libc::sigaction>>> {
    let index = SIGNALS.iter().position(|signal| *signal == number)?;
    PROGRAM_ACTIONS.get(index)
}

/// Returns the length of a page.
pub(crate) fn page_size() -> usize {
    PAGE.load(Ordering::Relaxed)
}

/// Stores the program's action, and returns the one before it.
fn swap_program_action(number: c_int, action: libc::sigaction) -> Option<libc::sigaction> {
    // A handler on this thread would deadlock.
    let _blocked = SignalBlock::all();
    program_action(number)?.swap(Some(action))
}

/// Blocks all signals in this thread while it exists.
pub(crate) struct SignalBlock(libc::sigset_t);

impl SignalBlock {
    pub(crate) fn all() -> Self {
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

/// Returns the address of the handler.
fn handler() -> usize {
    let handler: extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_fault;
    handler as usize
}

/// Returns whether the handler is that of SIGSEGV, and no other by a call that was not seen.
pub(crate) fn is_installed() -> bool {
    let mut now = simple_action(libc::SIG_DFL, 0);
    // SAFETY: a query, for which the action is writable.
    let result = unsafe { real::sigaction(libc::SIGSEGV, ptr::null(), &raw mut now) };
    result == 0 && now.sa_sigaction == handler()
}

/// Returns the address of the instruction at which a handler was called.
///
/// # Safety
/// The argument must be the context of a handler of this thread.
pub(crate) unsafe fn instruction(context: *mut c_void) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { *instruction_mut(context) as usize }
}

/// Whether [`is_write`] is known.
pub(crate) const TELLS_WRITES: bool = cfg!(target_arch = "x86_64");

/// Returns whether the fault for which a handler was called is that of a write.
///
/// # Safety
/// As above.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn is_write(context: *mut c_void) -> bool {
    /// Bit of a page fault's error code.
    const WRITE: libc::greg_t = 1 << 1;
    // SAFETY: guaranteed by the caller.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & WRITE != 0
}

/// As above, where nothing is protected against reads.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn is_write(_: *mut c_void) -> bool {
    true
}

/// As [`instruction`], to be changed.
///
/// # Safety
/// As above; the context must outlive the result.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn instruction_mut<'a>(context: *mut c_void) -> &'a mut libc::greg_t {
    // SAFETY: guaranteed by the caller.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] }
}

/// As above, to be changed.
///
/// # Safety
/// As above; the context must outlive the result.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn instruction_mut<'a>(context: *mut c_void) -> &'a mut u64 {
    // SAFETY: guaranteed by the caller.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc }
}

/// Installs the handler, once there are devices.
pub(crate) fn install() {
    // SAFETY: a query of a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    PAGE.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
    // The program's handler may ring a doorbell, or leave by longjmp(3) and do so then.
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    let ours = simple_action(handler(), flags);
    for number in SIGNALS {
        if program_action(number).is_some_and(|action| action.load().is_some()) {
            continue;
        }
        let mut before = simple_action(libc::SIG_DFL, 0);
        // SAFETY: both actions are initialized.
        if unsafe { real::sigaction(number, &raw const ours, &raw mut before) } == 0 {
            swap_program_action(number, before);
        }
    }
}

/// Sets or queries the program's action for a fault; `None` for other signals, which the C
/// library handles.
pub(crate) fn exchange(number: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let now = program_action(number)?.load()?;
    match new {
        Some(new) => swap_program_action(number, *new),
        None => Some(now),
    }
}

/// As [`exchange`], for `signal` and the like.
pub(crate) fn exchange_handler(number: c_int, handler: usize, flags: c_int) -> Option<usize> {
    let before = exchange(number, Some(&simple_action(handler, flags)))?;
    Some(before.sa_sigaction)
}

extern "C-unwind" fn on_fault(number: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    /// Codes of SIGSEGV: an address without a mapping, one that is protected; of SIGBUS: one
    /// beyond the end of the file.
    const SEGV_MAPERR: c_int = 1;
    const SEGV_ACCERR: c_int = 2;
    const BUS_ADRERR: c_int = 2;
    let before = errno();
    // SAFETY: the kernel passes the information of a fault.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == SEGV_ACCERR && doorbells::unprotect(address) {
        return set_errno(before);
    }
    let is_protected = number == libc::SIGSEGV && code == SEGV_ACCERR;
    // SAFETY: the kernel passes the context.
    if is_protected && unsafe { check::on_fault(address, context) } {
        return set_errno(before);
    }
    // SAFETY: the kernel passes the context.
    if unsafe { check::recover(context) } {
        return;
    }
    let accessed = || {
        embedded::last_accesses()
            .iter()
            .any(|range| range.contains(&address))
    };
    let is_device = internal::is_internal() && accessed();
    let mended = is_device
        && match (number, code) {
            (libc::SIGSEGV, SEGV_MAPERR) => map(address, libc::MAP_FIXED_NOREPLACE),
            (libc::SIGSEGV, SEGV_ACCERR) => allow_access(address),
            (libc::SIGBUS, BUS_ADRERR) => map(address, libc::MAP_FIXED),
            _ => false,
        };
    if !mended {
        forward_signal(number, code, info, context);
    }
    set_errno(before);
}

/// Permits access to a page. Returns whether that succeeded.
fn allow_access(address: usize) -> bool {
    let page = page_size();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the memory is the program's, which has registered it for such an access.
    unsafe { own::syscall(libc::SYS_mprotect, address & !(page - 1), page, protection) == 0 }
}

/// Maps an empty page at an address that has none. Returns whether the address is mapped now.
fn map(address: usize, placement: c_int) -> bool {
    let page = PAGE.load(Ordering::Relaxed);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | placement;
    // SAFETY: nothing but a device can access an address without a page.
    let mapped = unsafe {
        let at = address & !(page - 1);
        own::syscall(libc::SYS_mmap, at, page, protection, flags, -1, 0)
    };
    // EEXIST: another thread was first.
    mapped != -1 || errno() == libc::EEXIST
}

/// Number of faults within each other in handlers that do not allow that, after which the
/// process ends: the kernel would end it at the first, but handlers that were left by longjmp(3)
/// are not told from others.
const MAX_NESTED: u32 = 16;

thread_local! {
    /// The address of the frame that called the program's handler last, and how many such
    /// frames may be above it.
    static HANDLING: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
}

/// Executes the program's action, as the kernel would, except that the signals of faults are
/// never blocked.
fn forward_signal(number: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let default = simple_action(libc::SIG_DFL, 0);
    let action = program_action(number).and_then(AtomicCell::load);
    let action = action.unwrap_or(default);
    let is_fault = code > 0;
    if action.sa_sigaction == libc::SIG_IGN && !is_fault {
        return;
    }
    let frame = ptr::from_ref(&action).addr();
    let outer = HANDLING.try_with(Cell::get).unwrap_or_default();
    let depth = if frame < outer.0 { outer.1 + 1 } else { 1 };
    let too_deep = depth > MAX_NESTED && action.sa_flags & libc::SA_NODEFER == 0;
    if too_deep || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
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
        swap_program_action(number, default);
    }
    let _ = HANDLING.try_with(|it| it.set((frame, depth)));
    // SAFETY: the sets are initialized; the program has given this function for signals,
    // of the type that the flag tells.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const action.sa_mask, ptr::null_mut());
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            let handler = std::mem::transmute::<usize, Handler>(action.sa_sigaction);
            handler(number, info, context);
        } else {
            type Handler = extern "C-unwind" fn(c_int);
            let handler = std::mem::transmute::<usize, Handler>(action.sa_sigaction);
            handler(number);
        }
    }
    let _ = HANDLING.try_with(|it| it.set(outer));
}
