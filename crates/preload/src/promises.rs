//! Promises of the program to use an object by one thread at a time: thread domains, and
//! single-threaded completion queues. Providers have no lock for these objects.
//!
//! The functions that make them are hooked in the table of operations before the context, with
//! check only. No command tells where a context is, but libibverbs initializes the context's
//! mutex by a function that this library interposes, before its first command:
//!
//! ```text
//! open ──► pthread_mutex_init ──► GET_CONTEXT ... ──► create_cq_ex is set ──► a command
//!          mutex_initialized      is it a context     by libibverbs, as       after_command
//!                                 with this fd?       the last function       hooks
//! ```
//!
//! The last command is one of `ibv_open_device` itself, for the descriptor of asynchronous events;
//! with old kernels, which return that with the context, the next one of this thread. A context
//! that was not found is hooked when its first completion queue is created.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::check;
use crate::explain::lock;
use crate::hooks::{self, Context, Hooked, hooked};
use crate::internal;

/// Distances of entries of `struct verbs_context`, which grows at its front, from its
/// `struct ibv_context`.
const SIZE: usize = 8;
const CREATE_CQ_EX: usize = 120;
const ALLOC_PARENT_DOMAIN: usize = 208;

/// `abi_compat` of a context that has a `struct verbs_context`.
const IS_EXTENDED: usize = usize::MAX;

type AllocParentDomain =
    unsafe extern "C" fn(*mut c_void, *const ParentDomainAttributes) -> *mut c_void;
type CreateCqEx = unsafe extern "C" fn(*mut c_void, *const CqAttributes) -> *mut c_void;

/// The beginning of `struct ibv_parent_domain_init_attr`.
#[repr(C)]
struct ParentDomainAttributes {
    pd: *mut c_void,
    td: *mut c_void,
}

/// `struct ibv_cq_init_attr_ex`.
#[repr(C)]
struct CqAttributes {
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut c_void,
    comp_vector: u32,
    wc_flags: u64,
    comp_mask: u32,
    flags: u32,
    /// With [`HAS_DOMAIN`].
    parent_domain: *mut c_void,
}

const _: () = assert!(offset_of!(CqAttributes, comp_mask) == 40);

/// Bits of `comp_mask`, and of `flags`.
const HAS_FLAGS: u32 = 1 << 0;
const HAS_DOMAIN: u32 = 1 << 1;
const SINGLE_THREADED: u32 = 1 << 0;

static PARENT_DOMAINS: Hooked<8> = hooked!(alloc_parent_domain: 0 1 2 3 4 5 6 7);
static COMPLETION_QUEUES: Hooked<8> = hooked!(create_cq_ex: 0 1 2 3 4 5 6 7);

/// Addresses of parent domains with a thread domain.
static DOMAINS: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
/// There is any promise.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Returns whether any promise was made.
pub(crate) fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// Returns whether objects of a protection domain have no lock.
pub(crate) fn is_unlocked(domain: *const c_void) -> bool {
    is_used() && (lock(&DOMAINS).as_ref()).is_some_and(|it| it.contains(&domain.addr()))
}

/// Called when the provider frees memory, perhaps that of a parent domain.
pub(crate) fn freed(address: usize) {
    // The lock is for calls outside of signal handlers. A thread that has it frees nothing of the
    // provider's.
    if is_used() && !internal::is_in_handler() {
        if let Some(domains) = &mut *lock(&DOMAINS) {
            domains.remove(&address);
        }
    }
}

/// Number of mutexes of a thread that are remembered. libibverbs initializes no other one between
/// that of a context and the first command.
const MAX_MUTEXES: usize = 8;

/// Contexts are looked for.
static IS_LOOKING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Addresses of the last mutexes that this thread has initialized since its last command, or
    /// close(2), and how many they were.
    static MUTEXES: Cell<([usize; MAX_MUTEXES], usize)> = const { Cell::new(([0; MAX_MUTEXES], 0)) };
    /// Descriptor and address of the context that this thread opens; 0 if none.
    static OPENING: Cell<(RawFd, usize)> = const { Cell::new((-1, 0)) };
}

/// Called when the program is checked, before it opens a context.
pub(crate) fn look_for_contexts() {
    IS_LOOKING.store(true, Ordering::Relaxed);
}

/// Called before the program, or a library of its, initializes a mutex.
#[inline]
pub(crate) fn mutex_initialized(mutex: usize) {
    if IS_LOOKING.load(Ordering::Relaxed) {
        remember(mutex);
    }
}

#[cold]
fn remember(mutex: usize) {
    let _ = MUTEXES.try_with(|mutexes| {
        let (mut addresses, count) = mutexes.get();
        addresses[count % MAX_MUTEXES] = mutex;
        mutexes.set((addresses, count.wrapping_add(1)));
    });
}

/// Called after a command of this thread on a descriptor of a device: hooks the functions of its
/// context, if this thread has just opened it.
#[inline]
pub(crate) fn after_command(fd: RawFd) {
    if IS_LOOKING.load(Ordering::Relaxed) {
        look(fd);
    }
}

#[cold]
fn look(fd: RawFd) {
    let mutexes = MUTEXES.try_with(|mutexes| mutexes.replace(([0; MAX_MUTEXES], 0)));
    let Ok((mutexes, count)) = mutexes else {
        return;
    };
    let (opened, address) = OPENING.try_with(Cell::get).unwrap_or((-1, 0));
    let new =
        (mutexes.iter().take(count)).map(|mutex| mutex.wrapping_sub(offset_of!(Context, mutex)));
    let known = (opened == fd && address != 0).then_some(address);
    let Some(address) = new.chain(known).find(|address| is_context(*address, fd)) else {
        return;
    };
    // SAFETY: this thread has initialized the mutex and not closed the descriptor since, so that
    // it is a context of libibverbs, which exists. Until it is open no other thread has it; then
    // libibverbs writes the tables no more.
    let is_hooked = unsafe { hook(ptr::with_exposed_provenance_mut(address)) };
    let opening = match is_hooked {
        true => (-1, 0),
        false => (fd, address),
    };
    let _ = OPENING.try_with(|it| it.set(opening));
}

/// Called when this thread closes a descriptor.
#[inline]
pub(crate) fn closed(fd: RawFd) {
    // This library closes files of its own in a command.
    if IS_LOOKING.load(Ordering::Relaxed) && !internal::is_internal() {
        let _ = MUTEXES.try_with(|it| it.set(([0; MAX_MUTEXES], 0)));
        let _ = OPENING.try_with(|it| {
            if it.get().0 == fd {
                it.set((-1, 0));
            }
        });
    }
}

/// Returns whether there is an extended context with a descriptor at an address.
fn is_context(address: usize, fd: RawFd) -> bool {
    if address % align_of::<Context>() != 0 {
        return false;
    }
    hooks::read::<Context>(address).is_some_and(|context| {
        // SAFETY: all members may have any value.
        let context = unsafe { context.assume_init() };
        (context.command_fd, context.abi_compat) == (fd, IS_EXTENDED)
    })
}

/// Hooks the functions of a context. Returns false if it is not open yet, or has none of them.
///
/// # Safety
/// The context must exist, its tables be readable and writable, and only changed by atomic
/// accesses, or in calls of this thread.
pub(crate) unsafe fn hook(context: *mut Context) -> bool {
    let word = |address: *mut u8| -> Option<usize> {
        let word = hooks::read::<usize>(address.expose_provenance())?;
        // SAFETY: any value is valid.
        Some(unsafe { word.assume_init() })
    };
    let base = context.cast::<u8>();
    if word(base.wrapping_add(offset_of!(Context, abi_compat))) != Some(IS_EXTENDED) {
        return false;
    }
    // The size of the structure, which ends with the context.
    let size =
        word(base.wrapping_sub(SIZE)).and_then(|size| size.checked_sub(size_of::<Context>()));
    let has = |distance: usize| size.is_some_and(|size| size >= distance);
    // libibverbs sets it after all others.
    if !has(CREATE_CQ_EX) || word(base.wrapping_sub(CREATE_CQ_EX)).is_none_or(|it| it == 0) {
        return false;
    }
    for (hooked, distance) in [
        (&COMPLETION_QUEUES, CREATE_CQ_EX),
        (&PARENT_DOMAINS, ALLOC_PARENT_DOMAIN),
    ] {
        if has(distance) {
            let entry = base.wrapping_sub(distance).cast::<*mut c_void>();
            // SAFETY: an entry of the structure, by its size; otherwise guaranteed by the caller.
            unsafe { hooked.exchange(entry, hooks::load(entry)) };
        }
    }
    true
}

unsafe extern "C" fn alloc_parent_domain<const N: usize>(
    context: *mut c_void,
    attributes: *const ParentDomainAttributes,
) -> *mut c_void {
    // SAFETY: the address of a provider's function of this type, stored before this function
    // was put into a table.
    let provider: AllocParentDomain = unsafe { std::mem::transmute(PARENT_DOMAINS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let domain = unsafe { provider(context, attributes) };
    // SAFETY: the provider has read it.
    if !domain.is_null() && !unsafe { (*attributes).td }.is_null() {
        let _scope = internal::enter();
        // Its memory may be that of another domain before there is a completion queue.
        check::defer_freeing(provider as *const c_void);
        let domains = &mut *lock(&DOMAINS);
        domains
            .get_or_insert_with(HashSet::new)
            .insert(domain.addr());
        IS_USED.store(true, Ordering::Relaxed);
    }
    domain
}

unsafe extern "C" fn create_cq_ex<const N: usize>(
    context: *mut c_void,
    attributes: *const CqAttributes,
) -> *mut c_void {
    // SAFETY: as above.
    let provider: CreateCqEx = unsafe { std::mem::transmute(COMPLETION_QUEUES.function(N)) };
    // SAFETY: guaranteed by the caller.
    let queue = unsafe { provider(context, attributes) };
    if queue.is_null() {
        return queue;
    }
    // SAFETY: the provider has read it; the domain only if the mask says that it is there.
    let is_promised = unsafe {
        let mask = (*attributes).comp_mask;
        mask & HAS_FLAGS != 0 && (*attributes).flags & SINGLE_THREADED != 0
            || mask & HAS_DOMAIN != 0 && is_unlocked((*attributes).parent_domain)
    };
    if is_promised {
        IS_USED.store(true, Ordering::Relaxed);
        // SAFETY: the queue was created.
        unsafe { hooks::promise(queue) };
    }
    queue
}

/// The thread that uses an object without a lock.
///
/// A thread that meets another one in a call leaves its own for that to find: the other one is
/// certain then to be in its call, which it may have left by a jump.
#[derive(Debug, Default)]
pub(crate) struct InUse {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// 0 if none.
    thread: c_int,
    /// The first call of another thread meanwhile.
    other: Option<check::Origin>,
    is_reported: bool,
}

impl InUse {
    /// Notes that a thread begins to use the object, by a call that is described if another one
    /// uses it. Returns whether it ends by [`Self::end`].
    pub(crate) fn begin(&self, thread: c_int, call: impl FnOnce() -> check::Origin) -> bool {
        let state = &mut *lock(&self.state);
        if state.thread == 0 || state.thread == thread {
            (state.thread, state.other) = (thread, None);
            return true;
        }
        if state.other.is_none() && !state.is_reported {
            state.other = Some(call());
        }
        false
    }

    /// Notes that the thread uses it no more. Returns the call of another one meanwhile, once.
    pub(crate) fn end(&self) -> Option<check::Origin> {
        let state = &mut *lock(&self.state);
        state.thread = 0;
        let other = state.other.take();
        state.is_reported |= other.is_some();
        other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use check::Origin;

    /// Words of a made-up `struct verbs_context` before its context.
    const BEFORE: usize = 32;

    unsafe extern "C" fn provider() {}

    #[test]
    fn contexts_are_found_while_they_are_opened() {
        const FD: RawFd = 3;
        look_for_contexts();
        let mut memory = [0_usize; BEFORE + size_of::<Context>() / 8];
        let base = memory.as_mut_ptr().wrapping_add(BEFORE);
        let context = base.cast::<Context>();
        let entry = |distance: usize| base.wrapping_byte_sub(distance);
        let function = (provider as *const ()).addr();
        // SAFETY: the memory is that of the context, and of what is before it.
        let read = |distance: usize| unsafe { entry(distance).read() };
        let initialize = || {
            // SAFETY: as above.
            unsafe {
                (*context).command_fd = FD;
                (*context).abi_compat = IS_EXTENDED;
                entry(SIZE).write(BEFORE * 8 + size_of::<Context>());
                entry(ALLOC_PARENT_DOMAIN).write(function);
                entry(CREATE_CQ_EX).write(0);
            }
            for other in 0..2 * MAX_MUTEXES {
                mutex_initialized(other);
            }
            mutex_initialized(base.expose_provenance() + offset_of!(Context, mutex));
            mutex_initialized(1);
        };
        let is_hooked = || {
            let hooked = [ALLOC_PARENT_DOMAIN, CREATE_CQ_EX].map(|it| read(it) != function);
            assert_eq!(hooked[0], hooked[1]);
            hooked[0]
        };
        // SAFETY: as above.
        let open = || unsafe { entry(CREATE_CQ_EX).write(function) };

        initialize();
        {
            // Of a command that closes files of its own.
            let _scope = internal::enter();
            closed(9);
            after_command(FD);
        }
        assert_eq!(read(ALLOC_PARENT_DOMAIN), function);
        open();
        after_command(FD + 1);
        assert!(!is_hooked());
        after_command(FD);
        assert!(is_hooked());
        // Once.
        initialize();
        closed(9);
        open();
        after_command(FD);
        assert!(!is_hooked());
        // The program closes it before it is open.
        initialize();
        after_command(FD);
        closed(FD);
        open();
        after_command(FD);
        assert!(!is_hooked());
    }

    #[test]
    fn two_threads_at_once_are_found() {
        let object = InUse::default();
        let begin = |thread| object.begin(thread, Origin::here);
        // One after the other.
        assert!(begin(1) && object.end().is_none());
        assert!(begin(2) && object.end().is_none());
        // A thread that has left a call by a jump.
        assert!(begin(1) && !begin(2));
        assert!(begin(1) && object.end().is_none());
        assert!(begin(1) && !begin(2) && !begin(3));
        assert!(object.end().is_some());
        // Reported once.
        assert!(begin(1) && !begin(2) && object.end().is_none());
    }
}
