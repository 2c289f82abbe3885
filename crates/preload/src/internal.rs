//! System calls and descriptors of the library itself.
//!
//! Code of the devices calls the same interposed functions as the program. Descriptors that
//! it opens get high numbers and are marked, so that a program that closes all descriptors
//! spares them. Its waits do not wake the devices.

use std::cell::Cell;
use std::ffi::c_int;

use crate::{real, table};

thread_local! {
    static INSIDE: Cell<Inside> = const { Cell::new(Inside { depth: 0, cancel_state: 0, interrupted: false }) };
}

thread_local! {
    static HANDLER: Cell<Option<HandlerFrame>> = const { Cell::new(None) };
}

/// Where a signal handler of the program runs.
#[derive(Clone, Copy)]
struct HandlerFrame {
    /// An address in the frame of its caller.
    address: usize,
    /// It has the stack of sigaltstack(2).
    has_own_stack: bool,
}

/// While it exists, a signal handler of the program runs in this thread.
pub(crate) struct HandlerScope(Option<HandlerFrame>);

/// Called when a signal handler of the program begins.
pub(crate) fn enter_handler() -> HandlerScope {
    let local = 0;
    let frame = HandlerFrame {
        address: (&raw const local).addr(),
        has_own_stack: is_on_own_stack(),
    };
    let before = HANDLER.try_with(|handler| handler.replace(Some(frame)));
    HandlerScope(before.unwrap_or_default())
}

impl Drop for HandlerScope {
    fn drop(&mut self) {
        let _ = HANDLER.try_with(|handler| handler.set(self.0));
    }
}

/// Returns whether this thread runs on the stack of sigaltstack(2).
fn is_on_own_stack() -> bool {
    let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: the call writes to a variable of this function, for which zero is a value.
    let stack = unsafe {
        libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr());
        stack.assume_init()
    };
    stack.ss_flags & libc::SS_ONSTACK != 0
}

/// Returns whether this thread runs a signal handler of the program. It may have interrupted any
/// code, such as malloc(3): nothing may be allocated, and no lock waited for. Costs a load
/// outside of handlers.
#[inline]
pub(crate) fn is_in_handler() -> bool {
    HANDLER
        .try_with(Cell::get)
        .is_ok_and(|handler| handler.is_some_and(is_still_in))
}

/// Returns whether a handler has not been left by siglongjmp(3).
#[cold]
fn is_still_in(handler: HandlerFrame) -> bool {
    let local = 0;
    let is_in = match handler.has_own_stack {
        true => is_on_own_stack(),
        // Stacks grow downwards.
        false => (&raw const local).addr() < handler.address,
    };
    if !is_in {
        let _ = HANDLER.try_with(|handler| handler.set(None));
    }
    is_in
}

#[derive(Clone, Copy)]
struct Inside {
    /// Number of scopes.
    depth: u32,
    /// Whether the program allows the cancellation of this thread, while there are scopes.
    cancel_state: c_int,
    /// A signal handler of the program interrupts code of the devices.
    interrupted: bool,
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Sets whether this thread may be cancelled, and returns what was set before.
fn set_cancel_state(state: c_int) -> c_int {
    let mut before = 0;
    // SAFETY: the value before is written to a variable of this function. A request that
    // was made meanwhile takes effect in the next cancellation point, outside of this call.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// While it exists, this thread runs code of the devices. It is not cancelled in calls to the
/// C library, which would unwind that code.
pub(crate) struct InternalScope(());

/// Enters code of the devices.
pub(crate) fn enter() -> InternalScope {
    enter_scope();
    InternalScope(())
}

impl Drop for InternalScope {
    fn drop(&mut self) {
        leave_scope();
    }
}

/// While it exists, this thread runs no code of the devices, but may be called by it.
pub(crate) struct SuspendedScope(Option<Inside>);

/// Leaves code of the devices, which calls the C library for the program.
pub(crate) fn suspend() -> SuspendedScope {
    leave(false)
}

/// Called when a signal handler of the program begins.
pub(crate) fn interrupt() -> SuspendedScope {
    leave(true)
}

fn leave(interrupted: bool) -> SuspendedScope {
    let outside = Inside {
        depth: 0,
        cancel_state: 0,
        interrupted,
    };
    if !is_internal() {
        return SuspendedScope(None);
    }
    let inside = INSIDE.try_with(|inside| inside.replace(outside)).ok();
    if let Some(inside) = &inside {
        set_cancel_state(inside.cancel_state);
    }
    SuspendedScope(inside)
}

impl Drop for SuspendedScope {
    fn drop(&mut self) {
        if let Some(inside) = self.0 {
            set_cancel_state(PTHREAD_CANCEL_DISABLE);
            let _ = INSIDE.try_with(|it| it.set(inside));
        }
    }
}

/// As [`enter`], until [`leave_scope`] or the end of the thread.
pub(crate) fn enter_scope() {
    // Fails in a thread that is ending, which opens nothing.
    let _ = INSIDE.try_with(|inside| {
        let Inside {
            depth,
            mut cancel_state,
            ..
        } = inside.get();
        if depth == 0 {
            cancel_state = set_cancel_state(PTHREAD_CANCEL_DISABLE);
        }
        inside.set(Inside {
            depth: depth + 1,
            cancel_state,
            interrupted: false,
        });
    });
}

/// Leaves code of the devices.
pub(crate) fn leave_scope() {
    let _ = INSIDE.try_with(|inside| {
        let Inside {
            depth,
            cancel_state,
            ..
        } = inside.get();
        if depth == 1 {
            set_cancel_state(cancel_state);
        }
        inside.set(Inside {
            depth: depth.saturating_sub(1),
            cancel_state,
            interrupted: false,
        });
    });
}

/// Returns whether this thread runs code of the devices.
#[inline]
pub(crate) fn is_internal() -> bool {
    INSIDE.try_with(|inside| inside.get().depth).unwrap_or(0) != 0
}

/// Returns whether this thread runs a signal handler of the program that interrupts code of the
/// devices.
pub(crate) fn is_interrupted() -> bool {
    INSIDE
        .try_with(|inside| inside.get().interrupted)
        .unwrap_or(false)
}

/// Returns whether this thread may drive the devices: it runs none of their code, nor a signal
/// handler that interrupts such code, which may hold their locks.
#[inline]
pub(crate) fn may_drive() -> bool {
    let outside = |inside: &Cell<Inside>| {
        let Inside {
            depth, interrupted, ..
        } = inside.get();
        depth == 0 && !interrupted
    };
    INSIDE.try_with(outside).unwrap_or(true)
}

/// Largest number of a descriptor above which the library's own are. It is small, since the
/// kernel copies the table up to the largest descriptor in each fork.
const MAX_FLOOR: libc::rlim_t = 3072;

/// Returns the lowest number of the library's own descriptors: they are in the upper quarter of
/// the program's limit, so that the program gets the numbers that it would get otherwise.
fn floor() -> c_int {
    let mut limit = libc::rlimit {
        rlim_cur: 1024,
        rlim_max: 0,
    };
    // SAFETY: the limit is writable.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (limit.rlim_cur - limit.rlim_cur / 4).min(MAX_FLOOR) as c_int
}

/// Moves a new descriptor of the library itself to a high number. Returns the descriptor, the
/// same one if there is no room.
#[cold]
fn move_up(fd: c_int) -> c_int {
    let floor = floor();
    if fd >= floor {
        return fd;
    }
    let errno = real::errno();
    // SAFETY: no pointer is passed.
    let moved = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor as usize) };
    if moved < 0 {
        real::set_errno(errno);
        return fd;
    }
    // SAFETY: the descriptor is new, and nothing else knows it.
    unsafe { real::close(fd) };
    moved
}

/// Moves and marks a new descriptor if code of the devices has opened it. Returns the
/// descriptor.
#[inline]
pub(crate) fn mark_internal(fd: c_int) -> c_int {
    if fd < 0 || !is_internal() {
        return fd;
    }
    let fd = move_up(fd);
    table::set_internal(fd, true);
    fd
}

/// As [`mark_internal`], of two descriptors.
///
/// # Safety
/// Both are readable and writable.
pub(crate) unsafe fn mark_internal_pair(fds: *mut c_int) {
    for at in 0..2 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let fd = fds.add(at);
            fd.write(mark_internal(fd.read()));
        }
    }
}

/// As [`mark_internal`], of the descriptors that a message contains.
///
/// # Safety
/// The message was received, and its control data is writable.
pub(crate) unsafe fn mark_internal_rights(message: &libc::msghdr) {
    if !is_internal() || message.msg_controllen == 0 {
        return;
    }
    // SAFETY: guaranteed by the caller; the macros stay within the control data.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let length = control.cmsg_len - libc::CMSG_LEN(0) as usize;
                let fds = libc::CMSG_DATA(header).cast::<c_int>();
                for at in 0..length / size_of::<c_int>() {
                    let fd = fds.add(at);
                    fd.write_unaligned(mark_internal(fd.read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}
