//! Promises of the program to use an object by one thread at a time: thread domains, and
//! single-threaded completion queues. Providers have no lock for these objects.
//!
//! The functions that make them are hooked in the table of operations before the context, with
//! check only, when the context's first completion queue is created: promises before that are
//! not seen.

use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
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

/// `abi_compat` of a context that has a `struct verbs_context`, and where it is.
const IS_EXTENDED: usize = usize::MAX;
const ABI_COMPAT: usize =
    (offset_of!(Context, command_fd) + 12).next_multiple_of(8) + size_of::<libc::pthread_mutex_t>();
/// Size of `struct ibv_context`.
const CONTEXT: usize = ABI_COMPAT + size_of::<usize>();

#[cfg(target_arch = "x86_64")]
const _: () = assert!(ABI_COMPAT == 320);

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

/// Hooks the functions of a context.
///
/// # Safety
/// The context must exist, its tables be readable and writable, and only changed by atomic
/// accesses.
pub(crate) unsafe fn hook(context: *mut Context) {
    let word = |at: *mut u8| -> Option<usize> {
        let word = hooks::read::<usize>(at.expose_provenance())?;
        // SAFETY: any value is valid.
        Some(unsafe { word.assume_init() })
    };
    let base = context.cast::<u8>();
    if word(base.wrapping_add(ABI_COMPAT)) != Some(IS_EXTENDED) {
        return;
    }
    // The size of the structure, which ends with the context.
    let size = word(base.wrapping_sub(SIZE)).and_then(|size| size.checked_sub(CONTEXT));
    for (hooked, distance) in [
        (&COMPLETION_QUEUES, CREATE_CQ_EX),
        (&PARENT_DOMAINS, ALLOC_PARENT_DOMAIN),
    ] {
        if size.is_none_or(|size| size < distance) {
            continue;
        }
        let entry = base.wrapping_sub(distance).cast::<*mut c_void>();
        // SAFETY: an entry of the structure, by its size; otherwise guaranteed by the caller.
        unsafe { hooked.exchange(entry, hooks::load(entry)) };
    }
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
