//! Hooks in the functions of the provider, whichever copy of libibverbs the program has:
//! preloaded, opened at any time, under another name, linked statically.
//!
//! Programs do not call the provider by a symbol, but through the table of operations in the
//! context. CREATE_CQ carries the address of the `ibv_cq` as its user handle, and its context
//! is set before the command. After the command the entries of the table that are of interest
//! ([`CONTEXT_HOOKS`]), and `start_poll` of an extended queue, lead to hooks of this library,
//! which call the provider's functions.
//!
//! - **Polls** drive the devices: a polling program makes no system calls, so only the
//!   network's thread would, and on a busy host that runs only after the program's time slice.
//!   A poll that finds nothing takes a turn, and sleeps when there is nothing to do. Programs
//!   that read the queues themselves depend on the thread.
//! - **A request for notification** overwrites the record of an earlier one that the device has
//!   not read yet. One for solicited completions must not weaken it, so the device reads the
//!   records first.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use embedded::ObjectChange;
use libc::{pthread_cond_t, pthread_mutex_t};
use uverbs::environment;

use crate::config::print_error;
use crate::{posts, process};

/// The part of `struct ibv_context` that programs are compiled with.
#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    pub(crate) operations: [*mut c_void; 32],
    pub(crate) command_fd: c_int,
}

/// The part of `struct ibv_cq_ex`, which begins as `struct ibv_cq`, up to `start_poll`.
/// Providers reserve it for either.
#[repr(C)]
struct Cq {
    context: *mut Context,
    channel: *mut c_void,
    program: *mut c_void,
    handle: u32,
    cqe: c_int,
    mutex: pthread_mutex_t,
    cond: pthread_cond_t,
    comp_events_completed: u32,
    async_events_completed: u32,
    comp_mask: u32,
    status: c_int,
    wr_id: u64,
    start_poll: *mut c_void,
}

const _: () = assert!(offset_of!(Cq, handle) == 24);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(offset_of!(Cq, start_poll) == 144);
const _: () = assert!(offset_of!(Context, operations) + POLL_CQ * 8 == 96);
const _: () = assert!(offset_of!(Context, command_fd) == 264);

/// Indices in `struct ibv_context_ops`.
const POLL_CQ: usize = 11;
const REQ_NOTIFY_CQ: usize = 12;

type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type StartPoll = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// Maximum number of functions of one kind: providers in a process, times the variants of
/// `start_poll` that each chooses from.
const MAX_FUNCTIONS: usize = 32;

/// Functions of one kind, and the hooks that call them, in the same order.
pub(crate) struct Hooked<const MAX: usize = MAX_FUNCTIONS> {
    functions: [AtomicPtr<c_void>; MAX],
    hooks: [*const (); MAX],
}

// SAFETY: the hooks are addresses of functions.
unsafe impl<const MAX: usize> Sync for Hooked<MAX> {}

/// The functions `$hook::<0>` and so on.
macro_rules! hooked {
    ($hook:ident) => {
        hooked!($hook: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27
            28 29 30 31)
    };
    ($hook:ident: $($number:literal)*) => {
        $crate::hooks::Hooked::new([$($hook::<$number> as *const ()),*])
    };
}
pub(crate) use hooked;

static POLLS: Hooked = hooked!(poll);
static NOTIFICATIONS: Hooked = hooked!(notify);
static EXTENDED_POLLS: Hooked = hooked!(start_poll);

/// Entries of a context's table that are hooked.
static CONTEXT_HOOKS: [(usize, &Hooked); 2] = [(POLL_CQ, &POLLS), (REQ_NOTIFY_CQ, &NOTIFICATIONS)];

impl<const MAX: usize> Hooked<MAX> {
    pub(crate) const fn new(hooks: [*const (); MAX]) -> Self {
        Self {
            functions: [const { AtomicPtr::new(ptr::null_mut()) }; MAX],
            hooks,
        }
    }

    /// Puts the hook into an entry that contains a function, unless that is a hook.
    ///
    /// # Safety
    /// The entry must be readable and writable, and only changed by atomic accesses.
    pub(crate) unsafe fn exchange(&self, entry: *mut *mut c_void, function: *mut c_void) {
        let Some(hook) = self.hook_of(function) else {
            return;
        };
        // SAFETY: guaranteed by the caller.
        let entry = unsafe { AtomicPtr::from_ptr(entry) };
        let order = Ordering::Relaxed;
        let _ = entry.compare_exchange(function, hook, order, order);
    }

    /// Returns the hook for a function; `None` if it is one, or if there are too many.
    fn hook_of(&self, function: *mut c_void) -> Option<*mut c_void> {
        if function.is_null() || self.hooks.contains(&function.cast_const().cast()) {
            return None;
        }
        let mut both = self.functions.iter().zip(self.hooks);
        let (_, hook) = both.find(|(known, _)| {
            let before = known.compare_exchange(
                ptr::null_mut(),
                function,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            before.is_ok() || before == Err(function)
        })?;
        Some(hook.cast_mut().cast())
    }

    pub(crate) fn function(&self, number: usize) -> *mut c_void {
        self.functions[number].load(Ordering::Relaxed)
    }

    /// Returns the provider's function, given what is called instead.
    pub(crate) fn provider_of(&self, called: *mut c_void) -> *mut c_void {
        let mut hooks = self.hooks.iter();
        let number = hooks.position(|hook| *hook == called.cast_const().cast());
        number.map_or(called, |number| self.function(number))
    }
}

/// Called after a poll of a queue. Returns false if it is a parent process's.
///
/// # Safety
/// The queue must exist, and its context must be open.
#[inline]
unsafe fn polled(queue: *mut c_void, found: bool) -> bool {
    if found {
        process::poll_succeeded();
        return true;
    }
    // SAFETY: guaranteed by the caller.
    let (handle, fd) = unsafe {
        let queue = queue.cast::<Cq>();
        ((*queue).handle, (*(*queue).context).command_fd)
    };
    process::idle(queue as usize, handle, fd)
}

unsafe extern "C" fn poll<const N: usize>(
    queue: *mut c_void,
    max: c_int,
    completions: *mut c_void,
) -> c_int {
    // SAFETY: the address of a provider's function of this type, stored before this function
    // was put into a table.
    let provider: PollCq = unsafe { std::mem::transmute(POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(queue, max, completions) };
    // SAFETY: the program passes a queue.
    match unsafe { polled(queue, found != 0) } {
        true => found,
        false => -libc::EIO,
    }
}

unsafe extern "C" fn start_poll<const N: usize>(
    queue: *mut c_void,
    attributes: *mut c_void,
) -> c_int {
    // SAFETY: as in `poll`.
    let provider: StartPoll = unsafe { std::mem::transmute(EXTENDED_POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue, attributes) };
    // SAFETY: the program passes a queue.
    match unsafe { polled(queue, result != libc::ENOENT) } {
        true => result,
        false => libc::EIO,
    }
}

unsafe extern "C" fn notify<const N: usize>(queue: *mut c_void, solicited_only: c_int) -> c_int {
    if solicited_only != 0 {
        process::read_armings();
    }
    // SAFETY: as in `poll`.
    let provider: ReqNotifyCq = unsafe { std::mem::transmute(NOTIFICATIONS.function(N)) };
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue, solicited_only) }
}

thread_local! {
    /// User handle of a completion queue that this thread has just created; 0 if none.
    static CREATED: Cell<u64> = const { Cell::new(0) };
}

/// Called in a command that creates a completion queue.
pub(crate) fn queue_created(user_handle: u64) {
    let _ = CREATED.try_with(|created| created.set(user_handle));
}

/// Reads memory of this process that may not be mapped; `None` if it is not.
pub(crate) fn read<T>(address: usize) -> Option<MaybeUninit<T>> {
    let mut value = MaybeUninit::<T>::uninit();
    let size = size_of::<T>();
    let to = libc::iovec {
        iov_base: value.as_mut_ptr().cast(),
        iov_len: size,
    };
    let from = libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(address),
        iov_len: size,
    };
    // SAFETY: `to` is the value's memory. The system reads `from`, and returns an error where
    // nothing can be read.
    let count = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    (count == size as isize).then_some(value)
}

/// Returns the file that has a function.
pub(crate) fn file_of(function: *const c_void) -> Option<libc::Dl_info> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the call looks the address up, and fills the structure if it returns nonzero.
    (unsafe { libc::dladdr(function, found.as_mut_ptr()) } != 0)
        // SAFETY: zeros are valid for pointers.
        .then(|| unsafe { found.assume_init() })
}

/// Called after a command of the program on a descriptor of a device: hooks the functions for a
/// queue that it has created.
pub(crate) fn after_command(fd: RawFd, device: usize) {
    if let Some(explainer) = process::explainer() {
        for change in explainer.after_command(device) {
            let ObjectChange::QueuePairModified { number, .. } = change else {
                continue;
            };
            if let Some(queue_pair) = explainer.objects.queue_pair(device, number) {
                posts::hook_builders(fd, queue_pair.user_handle, number);
            }
        }
    }
    let queue = CREATED.try_with(Cell::take).unwrap_or_default() as usize;
    if queue == 0 || queue % align_of::<Cq>() != 0 {
        return;
    }
    // A program that makes the system calls itself may have any user handle: it is the address
    // of an `ibv_cq` if that has a context with this descriptor.
    let Some(cq) = read::<Cq>(queue) else { return };
    // SAFETY: all members may have any value.
    let (context, extended) = unsafe {
        let cq = cq.as_ptr();
        ((*cq).context, (*cq).start_poll)
    };
    if !context.is_aligned() {
        return;
    }
    let Some(table) = read::<Context>(context.expose_provenance()) else {
        return;
    };
    // SAFETY: all members may have any value.
    let table = unsafe { table.assume_init() };
    if table.command_fd != fd {
        return;
    }
    let poll = table.operations[POLL_CQ];
    let provider = POLLS.provider_of(poll);
    if provider == poll {
        // The context's first queue.
        check_provider(provider);
    }
    // SAFETY: within the context.
    let entry = |index: usize| unsafe { &raw mut (*context).operations[index] };
    for (index, hooked) in CONTEXT_HOOKS {
        // SAFETY: the entry is readable, and libibverbs, whose structure it is in, writes it
        // no more. The program waits for the command, so that the queue and its context exist.
        unsafe { hooked.exchange(entry(index), table.operations[index]) };
    }
    if process::explainer().is_some() {
        for (index, hooked) in posts::CONTEXT_HOOKS {
            // SAFETY: as above.
            unsafe { hooked.exchange(entry(index), table.operations[index]) };
        }
    }
    if extended.is_null() {
        return;
    }
    // A queue that is not extended may have something else there.
    let file = |function| file_of(function).map(|it| it.dli_fbase);
    let base = file(EXTENDED_POLLS.provider_of(extended));
    if base.is_some() && base == file(provider) {
        let cq = ptr::with_exposed_provenance_mut::<Cq>(queue);
        // SAFETY: within the queue.
        let entry = unsafe { &raw mut (*cq).start_poll };
        // SAFETY: as above.
        unsafe { EXTENDED_POLLS.exchange(entry, extended) };
    }
}

/// Reports, once, that another provider than ours serves a program for which `ringverbs run
/// --devices mlx5` asks for ours: one that its own libibverbs brings with it.
fn check_provider(function: *const c_void) {
    static REPORTED: Once = Once::new();
    let Some(provider) = file_of(function).filter(|it| !it.dli_fname.is_null()) else {
        return;
    };
    // SAFETY: the loader's name of a file that is loaded.
    let name = unsafe { CStr::from_ptr(provider.dli_fname) }.to_string_lossy();
    let file = name.rsplit('/').next().unwrap_or_default();
    if file.starts_with("libringverbs") {
        return;
    }
    REPORTED.call_once(|| {
        let devices = environment::variable("RINGVERBS_DEVICES").unwrap_or_default();
        if (devices.to_string_lossy().split(',')).any(|device| device == "mlx5") {
            print_error(&format!(
                "{name} serves the device, not ringverbs: this program brings its own provider"
            ));
        }
    });
}
