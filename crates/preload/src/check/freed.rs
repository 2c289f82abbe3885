//! Memory that is freed: by the provider, which is deferred, and by the program.
//!
//! libibverbs' objects are in memory that the provider frees when they are destroyed. The last
//! ones are kept for a time, so that a use of an object that was destroyed reads what it was:
//! it is reported and refused then, and does not crash. What the program frees is looked for among
//! the buffers in flight.

use std::collections::{HashSet, VecDeque};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, TryLockError};

use super::{receiving, relocations, shared, watched};
use crate::explain::{Origin, lock};
use crate::{internal, promises, real};

/// Number of allocations that are kept.
const MAX_KEPT: usize = 256;
/// Longest allocation that may be an object; longer ones are queues.
const LONGEST_OBJECT: usize = 32 << 10;

/// Addresses of allocations that are kept, oldest first.
static KEPT: Mutex<VecDeque<usize>> = Mutex::new(VecDeque::new());

/// Called by the provider instead of the C library's function.
unsafe extern "C" fn free(allocation: *mut c_void) {
    let address = allocation.expose_provenance();
    promises::freed(address);
    let mut due = allocation;
    // SAFETY: an allocation of the C library, or null, for which the function returns 0.
    let size = unsafe { libc::malloc_usable_size(allocation) };
    if (1..=LONGEST_OBJECT).contains(&size) {
        let kept = match KEPT.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(kept)) => Some(kept.into_inner()),
            // Of another thread, or in a child of fork of one that is not there.
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut kept) = kept {
            kept.push_back(address);
            let oldest = (kept.len() > MAX_KEPT).then(|| kept.pop_front()).flatten();
            due = oldest.map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut);
        }
    }
    // SAFETY: the provider passes an allocation that it uses no more, or has passed this one
    // before.
    unsafe { libc::free(due) };
}

/// Where providers are loaded whose memory is deferred.
static PROVIDERS: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
/// Where other files are loaded, which were changed.
static PROGRAM: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
/// The process whose frees are noted: a child of fork has a copy of the buffers, and perhaps of
/// their locks.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Defers what a provider frees, given one of its functions. Each provider is changed once.
pub(crate) fn defer(function: *const c_void) {
    relocations::replace_free(free, &mut |base, has| {
        let is_new = |base| {
            lock(&PROVIDERS)
                .get_or_insert_with(HashSet::new)
                .insert(base)
        };
        has(function.addr()) && is_new(base)
    });
}

/// From now on notes what the program and its libraries free, those that are loaded now: it is
/// called again for others. Not if the program has an allocator that does not tell the size of
/// allocations.
pub(super) fn note_program() {
    let functions = [
        libc::free as *const c_void,
        libc::malloc_usable_size as *const c_void,
    ];
    if file_of(functions[0]).is_none_or(|file| file_of(functions[1]) != Some(file)) {
        return;
    }
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    let own = [functions[0], free_of_program as *const c_void];
    relocations::replace_free(free_of_program, &mut |base, has| {
        let is_provider = (lock(&PROVIDERS).as_ref()).is_some_and(|it| it.contains(&base));
        let is_own = own.iter().any(|it| has(it.addr()));
        let is_new = |base| lock(&PROGRAM).get_or_insert_with(HashSet::new).insert(base);
        !is_provider && !is_own && is_new(base)
    });
}

/// Returns where the file is loaded that has a function.
fn file_of(function: *const c_void) -> Option<usize> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the call writes to a variable of this function, for which zero is a value.
    let found = unsafe {
        let has_found = libc::dladdr(function, found.as_mut_ptr()) != 0;
        has_found.then_some(found.assume_init())
    };
    found.map(|it| it.dli_fbase.addr())
}

/// Called by the program instead of the C library's function.
unsafe extern "C" fn free_of_program(allocation: *mut c_void) {
    if !allocation.is_null() && !internal::is_internal() && !internal::is_in_handler() {
        // SAFETY: an allocation, which the program is about to free.
        let length = unsafe { libc::malloc_usable_size(allocation) };
        let start = allocation.expose_provenance() as u64;
        note(&(start..start.saturating_add(length as u64)));
    }
    // SAFETY: guaranteed by the caller.
    unsafe { libc::free(allocation) };
}

/// Notes that the program frees memory.
fn note(memory: &Range<u64>) {
    let is_in_flight = watched::may_be_in_flight(memory) || receiving::may_be_posted(memory);
    if !is_in_flight || PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let errno = real::errno();
    {
        let _scope = internal::enter();
        // Before locks are taken: walking the stack may need those of the loader.
        let freed = Origin::here();
        watched::freed(memory, &freed);
        receiving::freed(memory, &freed);
        shared::freed(memory, &freed);
    }
    real::set_errno(errno);
}
