//! Threads of the devices, and what encloses code of the devices that nobody calls.

use std::sync::OnceLock;

/// The functions set by [`set_scope_hooks`].
static SCOPE_HOOKS: OnceLock<[fn(); 2]> = OnceLock::new();

/// Sets functions that a thread calls where code of the devices begins and ends, if nobody
/// calls that code: the threads of every network when they start, and the flush at exit. Only
/// the first call has an effect.
pub fn set_scope_hooks(enter: fn(), leave: fn()) {
    let _ = SCOPE_HOOKS.set([enter, leave]);
}

/// Runs code of the devices that nobody calls.
pub(crate) fn in_scope<T>(run: impl FnOnce() -> T) -> T {
    let Some([enter, leave]) = SCOPE_HOOKS.get() else {
        return run();
    };
    enter();
    let result = run();
    leave();
    result
}

/// Initializes a new thread of a network.
pub(crate) fn init_thread() {
    if let Some([enter, _]) = SCOPE_HOOKS.get() {
        enter();
    }
    request_short_slice();
}

/// `struct sched_attr` of `linux/sched/types.h`, first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<SchedAttr>() == 48);

/// Asks the kernel to schedule this thread soon after it wakes: a timer slack of
/// 1 µs and, under SCHED_OTHER on Linux 6.12 and later, a time slice of 0.1 ms, with
/// which it preempts threads that have longer slices. Its share of the processor does not
/// change. Both settings are permanent.
pub(crate) fn request_short_slice() {
    const SLICE: u64 = 100_000;
    let mut attr = SchedAttr::default();
    let size = size_of::<SchedAttr>() as u32;
    // SAFETY: PR_SET_TIMERSLACK takes nanoseconds; sched_getattr writes at most
    // `size` bytes, and sched_setattr reads them.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64);
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) != 0 {
            return;
        }
        // An older kernel reports a slice of 0.
        if attr.policy == libc::SCHED_OTHER as u32 && attr.runtime > SLICE {
            attr.runtime = SLICE;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}
