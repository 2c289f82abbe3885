//! Hooks in the functions of the provider, whichever copy of libibverbs the program has:
//! preloaded, opened at any time, under another name, linked statically.
//!
//! Programs do not call the provider by a symbol, but through the table of operations in the
//! context. CREATE_CQ carries the address of the `ibv_cq` as its user handle, and its context
//! is set before the command. After the command the entries of the table that are of interest,
//! and `start_poll` of an extended queue, lead to hooks of this library,
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
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, Once};

use embedded::ObjectChange;
use libc::{pthread_cond_t, pthread_mutex_t};
use uverbs::environment;

use crate::chaos;
use crate::check::{self, Completion, CompletionQueue};
use crate::config::print_error;
use crate::explain::{Explainer, Origin, lock, thread};
use crate::table::{self, Lookup, Object, ObjectKind};
use crate::{host, internal, posts, process, promises, record};

/// `struct ibv_context`.
#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    pub(crate) operations: [*mut c_void; 32],
    pub(crate) command_fd: c_int,
    events_fd: c_int,
    completion_vectors: c_int,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) abi_compat: usize,
}

/// The part of `struct ibv_cq_ex`, which begins as `struct ibv_cq`, up to `read_qp_num`.
/// Providers reserve it for either.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    channel: *mut c_void,
    program: *mut c_void,
    pub(crate) handle: u32,
    cqe: c_int,
    mutex: pthread_mutex_t,
    cond: pthread_cond_t,
    comp_events_completed: u32,
    async_events_completed: u32,
    comp_mask: u32,
    pub(crate) status: c_int,
    pub(crate) wr_id: u64,
    pub(crate) start_poll: *mut c_void,
    pub(crate) next_poll: *mut c_void,
    end_poll: *mut c_void,
    pub(crate) read_opcode: Option<ReadCompletion>,
    read_vendor_err: *mut c_void,
    pub(crate) read_byte_len: Option<ReadCompletion>,
    read_imm_data: *mut c_void,
    pub(crate) read_qp_num: Option<ReadCompletion>,
}

/// `struct ibv_srq`.
#[repr(C)]
pub(crate) struct SharedQueue {
    context: *mut Context,
    program: *mut c_void,
    pd: *mut c_void,
    handle: u32,
    mutex: pthread_mutex_t,
    cond: pthread_cond_t,
    events_completed: u32,
}

/// `struct ibv_wc`.
#[repr(C)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// Bit in the opcodes of completions of receives.
const RECEIVE: u32 = 1 << 7;

const _: () = assert!(size_of::<Wc>() == 48);

const _: () = assert!(offset_of!(Cq, handle) == 24);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(offset_of!(Cq, start_poll) == 144);
const _: () = assert!(offset_of!(Context, operations) + POLL_CQ * 8 == 96);
const _: () = assert!(offset_of!(Context, command_fd) == 264);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(offset_of!(Context, abi_compat) == 320);

/// Indices in `struct ibv_context_ops`.
pub(crate) const POLL_CQ: usize = 11;
const REQ_NOTIFY_CQ: usize = 12;

pub(crate) type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
pub(crate) type ReadCompletion = unsafe extern "C" fn(*mut c_void) -> u32;
pub(crate) type NextPoll = unsafe extern "C" fn(*mut c_void) -> c_int;
type EndPoll = unsafe extern "C" fn(*mut c_void);
pub(crate) type StartPoll = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

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

/// As above, if the program is checked.
static CHECKED_POLLS: Hooked = hooked!(checked_poll);
static CHECKED_EXTENDED_POLLS: Hooked = hooked!(checked_start_poll);
static NEXT_POLLS: Hooked = hooked!(next_poll);
static END_POLLS: Hooked = hooked!(end_poll);

/// As above, if fields that have no meaning are filled.
static FILLED_POLLS: Hooked = hooked!(filled_poll);

/// Returns the lists of hooks of polls.
fn polls() -> (&'static Hooked, &'static Hooked) {
    match (process::checks(), chaos::fills_fields()) {
        (true, _) => (&CHECKED_POLLS, &CHECKED_EXTENDED_POLLS),
        (false, true) => (&FILLED_POLLS, &EXTENDED_POLLS),
        (false, false) => (&POLLS, &EXTENDED_POLLS),
    }
}

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

    /// Returns the provider's function of the hook with this number.
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

/// Returns an entry of a table.
///
/// # Safety
/// The entry must be readable and writable, and only changed by atomic accesses.
pub(crate) unsafe fn load(entry: *mut *mut c_void) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    unsafe { AtomicPtr::from_ptr(entry) }.load(Ordering::Relaxed)
}

/// Returns the provider's function that polls, given what is called instead.
pub(crate) fn provider_of(function: *mut c_void) -> *mut c_void {
    let (polls, extended_polls) = polls();
    let all = [polls, extended_polls, &NEXT_POLLS];
    let function = all
        .iter()
        .fold(function, |function, hooked| hooked.provider_of(function));
    record::provider_of_poll(function)
}

/// Returns the handle of a shared receive queue, and the descriptor of its context.
///
/// # Safety
/// The queue must exist, and its context must be open.
pub(crate) unsafe fn shared_queue(queue: *const SharedQueue) -> (u32, RawFd) {
    // SAFETY: guaranteed by the caller.
    unsafe { ((*queue).handle, (*(*queue).context).command_fd) }
}

/// As above, of a completion queue.
///
/// # Safety
/// As above.
pub(crate) unsafe fn completion_queue(queue: *mut c_void) -> (u32, RawFd) {
    let queue = queue.cast::<Cq>();
    // SAFETY: guaranteed by the caller.
    unsafe { ((*queue).handle, (*(*queue).context).command_fd) }
}

/// Returns what explains the process, and the number of the device of a completion queue; `None`
/// if nothing does, or it is no device of this process.
///
/// # Safety
/// As above.
unsafe fn explained(queue: *mut c_void) -> Option<(&'static Explainer, usize)> {
    let explainer = process::explainer()?;
    // SAFETY: guaranteed by the caller.
    let (_, fd) = unsafe { completion_queue(queue) };
    Some((explainer, table::device_of(fd)?))
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
    let (handle, fd) = unsafe { completion_queue(queue) };
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

/// Fills the fields that have no meaning in completions that were polled.
///
/// # Safety
/// `completions` must be the program's array of at least `found` completions.
unsafe fn fill_fields(completions: *mut c_void, found: c_int) {
    for number in 0..usize::try_from(found).unwrap_or(0) {
        // SAFETY: guaranteed by the caller; the provider has written so many.
        chaos::fill_fields(unsafe { &mut *completions.cast::<Wc>().add(number) });
    }
}

unsafe extern "C" fn filled_poll<const N: usize>(
    queue: *mut c_void,
    max: c_int,
    completions: *mut c_void,
) -> c_int {
    // SAFETY: as in `poll`.
    let provider: PollCq = unsafe { std::mem::transmute(FILLED_POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(queue, max, completions) };
    // SAFETY: as above.
    unsafe { fill_fields(completions, found) };
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

/// Returns the lock that is held while a queue is polled and its completions are checked: a
/// thread that polls a later one knows that the earlier ones are complete.
fn poll_turn(queue: *mut c_void) -> &'static Mutex<()> {
    static TURNS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];
    &TURNS[(queue.addr() >> 6) % TURNS.len()]
}

/// Checks completions that were polled, before the program has them.
///
/// # Safety
/// The queue must exist, and its context must be open.
unsafe fn check_completions(queue: *mut c_void, completions: impl Iterator<Item = Completion>) {
    if internal::is_in_handler() {
        if let Some(explainer) = process::explainer() {
            // Of any queue pair.
            explainer.objects.note_unseen(0);
        }
        return;
    }
    // SAFETY: guaranteed by the caller.
    let Some((explainer, device)) = (unsafe { explained(queue) }) else {
        return;
    };
    if let Some(checker) = &explainer.checker {
        let _scope = internal::enter();
        completions.for_each(|it| checker.completed(explainer, device, &it));
    }
}

/// Notes a promise of the program to use a completion queue by one thread at a time.
///
/// # Safety
/// The queue must exist, and its context must be open.
pub(crate) unsafe fn promise(queue: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    if let Some((_, _, known)) = unsafe { checked_queue(queue) } {
        known.promise();
    }
}

/// A call of `ibv_poll_cq` for a queue without a lock, until it ends.
struct PromisedCall {
    explainer: &'static Explainer,
    device: usize,
    queue: Arc<CompletionQueue>,
}

/// Notes a call of `ibv_poll_cq`, if the queue has no lock.
///
/// # Safety
/// As above.
unsafe fn begin_call(queue: *mut c_void) -> Option<PromisedCall> {
    if !promises::is_used() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let (explainer, device, queue) = unsafe { checked_queue(queue) }?;
    let begins = queue.is_promised() && {
        let _scope = internal::enter();
        queue.in_use.begin(thread(), Origin::here)
    };
    // Its end is noted only of a call that has begun.
    begins.then(|| PromisedCall {
        explainer,
        device,
        queue,
    })
}

impl Drop for PromisedCall {
    fn drop(&mut self) {
        let other = self.queue.in_use.end();
        if let Some((checker, other)) = self.explainer.checker.as_ref().zip(other) {
            let _scope = internal::enter();
            let what = "a single-threaded completion queue".to_owned();
            let call = (what, "ibv_poll_cq");
            checker.two_callers(self.explainer, self.device, call, None, other);
        }
    }
}

unsafe extern "C" fn checked_poll<const N: usize>(
    queue: *mut c_void,
    max: c_int,
    completions: *mut c_void,
) -> c_int {
    // SAFETY: as in `poll`.
    let provider: PollCq = unsafe { std::mem::transmute(CHECKED_POLLS.function(N)) };
    // SAFETY: the program passes a queue.
    if unsafe { is_destroyed(queue) } {
        return -libc::EINVAL;
    }
    // SAFETY: as above.
    let _call = unsafe { begin_call(queue) };
    let turn = match internal::is_in_handler() {
        false => Some(lock(poll_turn(queue))),
        // The handler may have interrupted who has it.
        true => poll_turn(queue).try_lock().ok(),
    };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(queue, max, completions) };
    // SAFETY: as above.
    unsafe { note_poll(queue, u32::try_from(found).unwrap_or_default()) };
    if found > 0 {
        let completion = |number: usize| {
            // SAFETY: the provider has written so many.
            let wc = unsafe { &*completions.cast::<Wc>().add(number) };
            Completion {
                wr_id: wc.wr_id,
                status: wc.status,
                is_receive: wc.opcode & RECEIVE != 0,
                qpn: Some(wc.qp_num),
            }
        };
        // SAFETY: the program passes a queue.
        unsafe { check_completions(queue, (0..found as usize).map(completion)) };
        if chaos::fills_fields() {
            // SAFETY: as above.
            unsafe { fill_fields(completions, found) };
        }
    }
    drop(turn);
    // SAFETY: the program passes a queue.
    match unsafe { polled(queue, found != 0) } {
        true => found,
        false => -libc::EIO,
    }
}

/// Reports a poll of a queue that was destroyed, of which the memory is kept. Returns whether it
/// is one.
///
/// # Safety
/// The queue must exist, or its memory.
unsafe fn is_destroyed(queue: *mut c_void) -> bool {
    let has_any = |it: &'static Explainer| it.objects.has_destroyed_queues();
    if !process::explainer().is_some_and(has_any) || internal::is_in_handler() {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    let Some((explainer, device)) = (unsafe { explained(queue) }) else {
        return false;
    };
    let _scope = internal::enter();
    explainer.poll_of_destroyed(device, queue.addr() as u64)
}

/// Checks the current completion of an extended queue, whose lock the provider holds.
///
/// # Safety
/// The queue must exist, have a current completion, and its context must be open.
unsafe fn check_current(queue: *mut c_void) {
    // SAFETY: guaranteed by the caller. The functions read the current completion.
    unsafe {
        let cq = queue.cast::<Cq>();
        let status = (*cq).status;
        let opcode = (*cq).read_opcode.filter(|_| status == 0);
        let completion = Completion {
            wr_id: (*cq).wr_id,
            status: status as u32,
            is_receive: opcode.is_some_and(|read| read(queue) & RECEIVE != 0),
            qpn: (*cq).read_qp_num.map(|read| read(queue)),
        };
        check_completions(queue, [completion].into_iter());
    }
}

unsafe extern "C" fn checked_start_poll<const N: usize>(
    queue: *mut c_void,
    attributes: *mut c_void,
) -> c_int {
    // SAFETY: as in `poll`.
    let provider: StartPoll = unsafe { std::mem::transmute(CHECKED_EXTENDED_POLLS.function(N)) };
    // SAFETY: the program passes a queue.
    if unsafe { is_destroyed(queue) } {
        return libc::EINVAL;
    }
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue, attributes) };
    if result == 0 {
        // SAFETY: the program passes a queue.
        unsafe {
            begin_reading(queue);
            check_current(queue);
        }
    }
    // SAFETY: as above.
    unsafe { note_poll(queue, (result == 0).into()) };
    // SAFETY: the program passes a queue.
    match unsafe { polled(queue, result != libc::ENOENT) } {
        true => result,
        false => libc::EIO,
    }
}

unsafe extern "C" fn next_poll<const N: usize>(queue: *mut c_void) -> c_int {
    // SAFETY: as in `poll`.
    let provider: NextPoll = unsafe { std::mem::transmute(NEXT_POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue) };
    if result == 0 {
        // SAFETY: the program passes a queue.
        unsafe {
            check_current(queue);
            note_poll(queue, 1);
        }
    }
    result
}

unsafe extern "C" fn end_poll<const N: usize>(queue: *mut c_void) {
    // SAFETY: as in `poll`.
    let provider: EndPoll = unsafe { std::mem::transmute(END_POLLS.function(N)) };
    // SAFETY: the program passes a queue.
    if let Some((_, _, known)) = unsafe { checked_queue(queue) } {
        known.end_reading();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { provider(queue) };
}

/// Notes that this thread reads the completions of an extended queue, of which it has the lock if
/// there is one.
///
/// # Safety
/// The queue must exist, and its context must be open.
unsafe fn begin_reading(queue: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    let Some((explainer, device, known)) = (unsafe { checked_queue(queue) }) else {
        return;
    };
    let Some(other) = known.begin_reading(thread()) else {
        return;
    };
    if let Some(checker) = &explainer.checker {
        let _scope = internal::enter();
        checker.two_readers(explainer, device, &known, other);
    }
}

/// Returns a completion queue that is checked, with its device; `None` if it is not known, or in
/// a signal handler.
///
/// # Safety
/// The queue must exist, and its context must be open.
unsafe fn checked_queue(
    queue: *mut c_void,
) -> Option<(&'static Explainer, usize, Arc<CompletionQueue>)> {
    if internal::is_in_handler() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let (explainer, device) = unsafe { explained(queue) }?;
    let _scope = internal::enter();
    let known = (explainer.objects).completion_queue(device, queue.addr() as u64)?;
    Some((explainer, device, known))
}

/// Notes a request for an event of any completion, if advice is asked for.
///
/// # Safety
/// The queue must exist, and its context must be open.
unsafe fn note_request(queue: *mut c_void) {
    if !process::explainer().is_some_and(Explainer::advises) {
        return;
    }
    // SAFETY: guaranteed by the caller.
    let Some((_, device, known)) = (unsafe { checked_queue(queue) }) else {
        return;
    };
    // SAFETY: the queue's channel exists as long as it. The descriptor follows the context.
    let channel = unsafe {
        let channel = (*queue.cast::<Cq>()).channel.cast::<*mut c_void>();
        (!channel.is_null()).then(|| *channel.add(1).cast::<c_int>())
    };
    let Some(Lookup::Open(channel)) = channel.map(table::find) else {
        return;
    };
    let _scope = internal::enter();
    let device = process::ready_devices().get(device);
    let unread = device.and_then(|it| it.unread_completions(known.number));
    let unread = unread.unwrap_or_default();
    (known.notification).requested(channel.fd, unread, Origin::here);
}

/// Notes a poll that has found so many completions, if advice is asked for.
///
/// # Safety
/// As above.
unsafe fn note_poll(queue: *mut c_void, found: u32) {
    if !process::explainer().is_some_and(Explainer::advises) {
        return;
    }
    // SAFETY: guaranteed by the caller.
    if let Some((_, _, known)) = unsafe { checked_queue(queue) } {
        known.notification.polled(thread(), found);
    }
}

unsafe extern "C" fn notify<const N: usize>(queue: *mut c_void, solicited_only: c_int) -> c_int {
    if solicited_only != 0 {
        process::read_armings();
    } else {
        // SAFETY: the program passes a queue.
        unsafe { note_request(queue) };
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
    // SAFETY: the value's memory.
    unsafe { read_into(value.as_mut_ptr().cast(), address, size_of::<T>()) }.then_some(value)
}

/// As above, a number of bytes.
pub(crate) fn read_bytes(address: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0_u8; length];
    let address = usize::try_from(address).ok()?;
    // SAFETY: the vector's memory.
    unsafe { read_into(bytes.as_mut_ptr().cast(), address, length) }.then_some(bytes)
}

/// As above, into memory; returns false if not all is mapped.
///
/// # Safety
/// So many bytes must be writable.
unsafe fn read_into(to: *mut c_void, address: usize, length: usize) -> bool {
    let to = libc::iovec {
        iov_base: to,
        iov_len: length,
    };
    let from = libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(address),
        iov_len: length,
    };
    // SAFETY: `to` is guaranteed by the caller. The system reads `from`, and returns an error
    // where nothing can be read.
    let count = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    count == length as isize
}

/// Returns the number of entries of a completion queue.
///
/// # Safety
/// The queue must exist.
pub(crate) unsafe fn entries_of(queue: *mut c_void) -> u32 {
    // SAFETY: guaranteed by the caller.
    u32::try_from(unsafe { (*queue.cast::<Cq>()).cqe }).unwrap_or_default()
}

/// Offset in a completion queue of libibverbs of the number of its entries, an `int`.
pub(crate) const ENTRIES: usize = offset_of!(Cq, cqe);

/// Returns a counter at an offset in an object of libibverbs, by the object's user handle; `None`
/// if it is none of the context with this descriptor.
fn counter(fd: RawFd, user_handle: u64, offset: usize) -> Option<u32> {
    let object = usize::try_from(user_handle).ok()?;
    if object == 0 || object % align_of::<Cq>() != 0 {
        return None;
    }
    // Each begins with its context.
    // SAFETY: an address may have any value.
    let context = unsafe { read::<usize>(object)?.assume_init() };
    // SAFETY: all members may have any value.
    let context = unsafe { read::<Context>(context)?.assume_init() };
    // SAFETY: as above.
    let counter = unsafe { read::<u32>(object.checked_add(offset)?)?.assume_init() };
    (context.command_fd == fd).then_some(counter)
}

/// Returns the number of completion events that were acknowledged of a queue of libibverbs, by
/// its user handle; `None` if it is none.
pub(crate) fn acknowledged_events(fd: RawFd, user_handle: u64) -> Option<u32> {
    counter(fd, user_handle, offset_of!(Cq, comp_events_completed))
}

/// Returns the number of asynchronous events that were acknowledged of an object of libibverbs, by
/// its type and its user handle; `None` if it is none.
pub(crate) fn acknowledged_asynchronous(fd: RawFd, name: &str, user_handle: u64) -> Option<u32> {
    let offset = match name {
        "queue pair" => posts::EVENTS_OF_QUEUE_PAIR,
        "completion queue" => offset_of!(Cq, async_events_completed),
        "shared receive queue" => offset_of!(SharedQueue, events_completed),
        _ => return None,
    };
    counter(fd, user_handle, offset)
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
        let changes = explainer.after_command(fd, device);
        hook_builders(explainer, (fd, device), &changes);
    }
    promises::after_command(fd);
    hook_created(fd, true);
}

/// Hooks the builders of queue pairs that a command on a descriptor of a device has modified.
pub(crate) fn hook_builders(
    explainer: &Explainer,
    (fd, device): (RawFd, usize),
    changes: &[ObjectChange],
) {
    for change in changes {
        let ObjectChange::QueuePairModified { number, .. } = *change else {
            continue;
        };
        if let Some(queue_pair) = explainer.objects.queue_pair(device, number) {
            posts::hook_builders(fd, queue_pair.user_handle, number);
        }
    }
}

/// Hooks the functions for a queue that a command of this thread has created: those of the record,
/// and with `all` those that drive embedded devices and check the program.
pub(crate) fn hook_created(fd: RawFd, all: bool) {
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
    let provider = provider_of(poll);
    if record::is_on() {
        // SAFETY: libibverbs, whose structure the table is in, writes it no more. The program
        // waits for the command, so that the queue and its context exist.
        unsafe {
            record::hook_polls(context);
            record::hook_posts(context);
        }
    }
    if all {
        if provider == poll {
            // The context's first queue.
            if !host::is_on() {
                check_provider(provider);
            }
            if process::checks() {
                check::defer_freeing(provider);
            }
        }
        // SAFETY: as above.
        unsafe { hook_context(context) };
    }
    if extended.is_null() {
        return;
    }
    // A queue that is not extended may have something else there.
    let file = |function| file_of(function).map(|it| it.dli_fbase);
    let base = file(provider_of(extended));
    if base.is_some() && base == file(provider) {
        let cq = ptr::with_exposed_provenance_mut::<Cq>(queue);
        // SAFETY: the queue is extended, and the program waits for it.
        unsafe {
            if record::is_on() {
                record::hook_extended_queue(cq);
            }
            if all {
                hook_extended_queue(cq);
            }
        }
    }
}

/// Hooks the functions of a context's table.
///
/// # Safety
/// The table must be readable and writable, and only changed by atomic accesses.
unsafe fn hook_context(context: *mut Context) {
    let hook = |index: usize, exchange: &dyn Fn(*mut *mut c_void, *mut c_void)| {
        // SAFETY: guaranteed by the caller.
        let entry = unsafe { &raw mut (*context).operations[index] };
        // SAFETY: as above.
        exchange(entry, unsafe { load(entry) });
    };
    for (index, hooked) in [(POLL_CQ, polls().0), (REQ_NOTIFY_CQ, &NOTIFICATIONS)] {
        // SAFETY: guaranteed by the caller.
        hook(index, &|entry, function| unsafe {
            hooked.exchange(entry, function)
        });
    }
    if process::checks() {
        // SAFETY: guaranteed by the caller.
        unsafe { promises::hook(context) };
    }
    if process::explainer().is_some() {
        for (index, hooked) in posts::CONTEXT_HOOKS {
            // SAFETY: as above.
            hook(index, &|entry, function| unsafe {
                hooked.exchange(entry, function)
            });
        }
    }
}

/// Hooks the functions of an extended queue.
///
/// # Safety
/// The queue must be extended, and not be polled.
unsafe fn hook_extended_queue(queue: *mut Cq) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let entry = &raw mut (*queue).start_poll;
        polls().1.exchange(entry, load(entry));
        if process::checks() {
            let entry = &raw mut (*queue).next_poll;
            NEXT_POLLS.exchange(entry, load(entry));
            let entry = &raw mut (*queue).end_poll;
            END_POLLS.exchange(entry, load(entry));
        }
    }
}

/// Called before the program closes a descriptor, which is in no table any more.
pub(crate) fn before_close(object: &Arc<Object>) {
    // It may have duplicates.
    if let (ObjectKind::Device(device), 1) = (object.kind, Arc::strong_count(object)) {
        if let Some(explainer) = process::explainer() {
            explainer.context_closed(device, object.fd);
        }
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
