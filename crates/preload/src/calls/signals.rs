//! Signal actions and masks: [`fault`] keeps the program's actions for faults. And jumps, by
//! which signal handlers leave calls that wait.

use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{siginfo_t, sigset_t};

use super::{export, failed};
use crate::{config, fault, internal, paths, real, record};

const SIG_HOLD: usize = 2;

/// Returns a set without the signals of faults: one of a doorbell while they are blocked would
/// end the process.
///
/// # Safety
/// The set must be readable, or the pointer null.
unsafe fn without_faults(set: *const sigset_t) -> Option<sigset_t> {
    // SAFETY: guaranteed by the caller.
    let mut set = unsafe { *set.as_ref()? };
    for number in fault::SIGNALS {
        // SAFETY: an initialized set.
        unsafe { libc::sigdelset(&raw mut set, number) };
    }
    Some(set)
}

/// The signals of faults in the masks of `sigblock`.
fn fault_bits() -> c_int {
    fault::SIGNALS
        .iter()
        .fold(0, |mask, it| mask | 1 << (it - 1))
}

/// The program's handlers of signals other than those of faults, which [`on_signal`] calls.
static HANDLERS: [AtomicUsize; 65] = [const { AtomicUsize::new(0) }; 65];

/// Calls the program's handler, which may interrupt code of the devices: what it opens is the
/// program's.
extern "C-unwind" fn on_signal(number: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let handler = handler_of(number).map_or(0, |handler| handler.load(Ordering::Relaxed));
    if handler == 0 {
        return;
    }
    type Handler = extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);
    // SAFETY: the program has given this function for the signal. One without SA_SIGINFO
    // ignores the other arguments.
    let handler = unsafe { mem::transmute::<usize, Handler>(handler) };
    let _program = internal::interrupt();
    let _handler = internal::enter_handler();
    handler(number, info, context);
}

fn handler_of(number: c_int) -> Option<&'static AtomicUsize> {
    HANDLERS.get(usize::try_from(number).ok()?)
}

/// Sets or queries a handler by `exchange`, which gets the one for the C library, and returns
/// the one before; both are translated. Signals are only handled with devices.
fn exchange_handler(
    number: c_int,
    new: Option<usize>,
    exchange: impl FnOnce(Option<usize>) -> usize,
) -> usize {
    let Some(handler) = handler_of(number).filter(|_| config::get().is_some() || record::is_on())
    else {
        return exchange(new);
    };
    let ours = on_signal as extern "C-unwind" fn(_, _, _) as usize;
    let before = handler.load(Ordering::Relaxed);
    let special = [libc::SIG_DFL, libc::SIG_IGN, libc::SIG_ERR, SIG_HOLD];
    let new = new.map(|new| {
        if special.contains(&new) {
            return new;
        }
        handler.store(new, Ordering::Relaxed);
        ours
    });
    match exchange(new) {
        found if found == ours => before,
        found => found,
    }
}

/// Called before a jump, which leaves calls of this library if it is out of a signal handler.
fn leave_calls() {
    paths::left_by_jump();
    if !internal::is_internal() && !internal::is_interrupted() {
        embedded::abandon_waits();
    }
}

/// As sigaction(2), with the handlers translated.
///
/// # Safety
/// As of that function.
unsafe fn exchange_action(
    number: c_int,
    mut new: Option<libc::sigaction>,
    old: *mut libc::sigaction,
) -> c_int {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    let mut result = 0;
    let handler = new.map(|new| new.sa_sigaction);
    let before = exchange_handler(number, handler, |handler| {
        if let (Some(new), Some(handler)) = (&mut new, handler) {
            new.sa_sigaction = handler;
        }
        // SAFETY: guaranteed by the caller. Zero is a value of each field.
        unsafe {
            result = real::sigaction(number, pointer(&new), found.as_mut_ptr());
            found.assume_init().sa_sigaction
        }
    });
    if result == 0 && !old.is_null() {
        // SAFETY: initialized by the call; the rest is guaranteed by the caller.
        unsafe {
            (*found.as_mut_ptr()).sa_sigaction = before;
            old.write(found.assume_init());
        }
    }
    result
}

fn pointer<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(ptr::null(), ptr::from_ref)
}

export! {
    pthread_sigmask(how: c_int, set: *const sigset_t, before: *mut sigset_t) -> c_int {
        if how == libc::SIG_UNBLOCK {
            // SAFETY: guaranteed by the caller.
            return unsafe { real::pthread_sigmask(how, set, before) };
        }
        // SAFETY: guaranteed by the caller.
        let set = unsafe { without_faults(set) };
        // SAFETY: guaranteed by the caller.
        unsafe { real::pthread_sigmask(how, pointer(&set), before) }
    }

    sigprocmask(how: c_int, set: *const sigset_t, before: *mut sigset_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        match unsafe { pthread_sigmask(how, set, before) } {
            0 => 0,
            errno => failed(errno),
        }
    }

    sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        // SAFETY: guaranteed by the caller.
        let mut action = unsafe { new.as_ref().copied() };
        if let Some(action) = &mut action {
            // SAFETY: an initialized set.
            if let Some(mask) = unsafe { without_faults(&raw const action.sa_mask) } {
                action.sa_mask = mask;
            }
        }
        // SAFETY: guaranteed by the caller.
        match fault::exchange(number, action.as_ref()) {
            // SAFETY: guaranteed by the caller.
            None => unsafe { exchange_action(number, action, old) },
            Some(before) => {
                if !old.is_null() {
                    // SAFETY: guaranteed by the caller.
                    unsafe { old.write(before) };
                }
                0
            }
        }
    }

    signal = ssignal (number: c_int, handler: usize) -> usize {
        match fault::exchange_handler(number, handler, libc::SA_RESTART) {
            None => exchange_handler(number, Some(handler), |handler| {
                // SAFETY: guaranteed by the caller.
                unsafe { real::signal(number, handler.unwrap_or_default()) }
            }),
            Some(before) => before,
        }
    }

    bsd_signal(number: c_int, handler: usize) -> usize {
        // SAFETY: guaranteed by the caller.
        unsafe { signal(number, handler) }
    }

    __sysv_signal = sysv_signal (number: c_int, handler: usize) -> usize {
        let flags = libc::SA_RESETHAND | libc::SA_NODEFER;
        match fault::exchange_handler(number, handler, flags) {
            None => exchange_handler(number, Some(handler), |handler| {
                // SAFETY: guaranteed by the caller.
                unsafe { real::__sysv_signal(number, handler.unwrap_or_default()) }
            }),
            Some(before) => before,
        }
    }

    sigset(number: c_int, handler: usize) -> usize {
        if handler == SIG_HOLD && fault::SIGNALS.contains(&number) {
            return fault::exchange(number, None).map_or(libc::SIG_DFL, |it| it.sa_sigaction);
        }
        match fault::exchange_handler(number, handler, 0) {
            None => exchange_handler(number, Some(handler), |handler| {
                // SAFETY: guaranteed by the caller.
                unsafe { real::sigset(number, handler.unwrap_or_default()) }
            }),
            Some(before) => before,
        }
    }

    sigignore(number: c_int) -> c_int {
        match fault::exchange_handler(number, libc::SIG_IGN, 0) {
            // SAFETY: no pointer is passed.
            None => unsafe { real::sigignore(number) },
            Some(_) => 0,
        }
    }

    sighold(number: c_int) -> c_int {
        match fault::SIGNALS.contains(&number) {
            true => 0,
            // SAFETY: no pointer is passed.
            false => unsafe { real::sighold(number) },
        }
    }

    sigblock(mask: c_int) -> c_int {
        // SAFETY: no pointer is passed.
        unsafe { real::sigblock(mask & !fault_bits()) }
    }

    sigsetmask(mask: c_int) -> c_int {
        // SAFETY: no pointer is passed.
        unsafe { real::sigsetmask(mask & !fault_bits()) }
    }

    pthread_attr_setsigmask_np(attributes: *mut c_void, mask: *const sigset_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        let mask = unsafe { without_faults(mask) };
        // SAFETY: guaranteed by the caller.
        unsafe { real::pthread_attr_setsigmask_np(attributes, pointer(&mask)) }
    }

    longjmp(environment: *mut c_void, value: c_int) -> c_int {
        leave_calls();
        // SAFETY: guaranteed by the caller.
        unsafe { real::longjmp(environment, value) }
    }

    _longjmp(environment: *mut c_void, value: c_int) -> c_int {
        leave_calls();
        // SAFETY: guaranteed by the caller.
        unsafe { real::_longjmp(environment, value) }
    }

    siglongjmp(environment: *mut c_void, value: c_int) -> c_int {
        leave_calls();
        // SAFETY: guaranteed by the caller.
        unsafe { real::siglongjmp(environment, value) }
    }

    __longjmp_chk(environment: *mut c_void, value: c_int) -> c_int {
        leave_calls();
        // SAFETY: guaranteed by the caller.
        unsafe { real::__longjmp_chk(environment, value) }
    }
}
