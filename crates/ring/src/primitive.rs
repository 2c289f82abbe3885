//! The atomics that the rest of the crate uses: std's, or loom's when the
//! crate is built for model checking, so that the checked code is the shipped
//! code.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// Reads a word that nobody else writes meanwhile, as memory of its own: the
/// compiler may join the load with what is done to it.
///
/// # Safety
/// Every write to the word is ordered before or after this.
#[inline]
pub(crate) unsafe fn unshared(word: &AtomicU32) -> u32 {
    #[cfg(not(loom))]
    // SAFETY: readable by the reference; no race, by contract.
    unsafe {
        word.as_ptr().read()
    }
    #[cfg(loom)]
    // SAFETY: by contract; loom reports a race.
    unsafe {
        word.unsync_load()
    }
}
