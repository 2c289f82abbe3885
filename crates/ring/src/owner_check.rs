//! Emptiness of a queue with owner bits, without the consumer's lock.

use std::ptr;

use crate::order;
use crate::primitive::{AtomicU8, AtomicUsize, Ordering};

/// Checks whether a queue is empty, by the owner bit of the next entry to consume.
///
/// Most polls find an empty queue and need no lock. The result is safe for the arm,
/// check, wait pattern: the thread that publishes the next entry here also publishes the
/// consumer index to the device, and the device raises an event at once for completions
/// beyond it.
///
/// An entry must stay readable once it has been published: see
/// [`crate::Mapping::retire_whole`].
#[derive(Debug, Default)]
pub struct OwnerCheck {
    /// Address of the next entry; its lowest bit, which the alignment leaves free,
    /// is the owner bit that a new entry will have. 0 while suspended.
    next: AtomicUsize,
}

/// Alignment of entries.
const ALIGNMENT: usize = 64;

impl OwnerCheck {
    /// Creates a suspended check.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the next entry, aligned to 64 bytes, and the owner bit `round` that it
    /// will have. Called with the lock held.
    ///
    /// # Safety
    /// The entry must stay readable as long as this value is used; its content
    /// may change.
    #[inline]
    pub unsafe fn publish(&self, entry: ptr::NonNull<u8>, round: u8) {
        let at = entry.as_ptr().expose_provenance();
        debug_assert!(at % ALIGNMENT == 0);
        // Release: the entry's initialisation is visible to whoever loads it.
        self.next
            .store(at | usize::from(round & 1), Ordering::Release);
    }

    /// Makes [`is_empty`](Self::is_empty) return false until the next
    /// [`publish`](Self::publish). Called with the lock held.
    #[inline]
    pub fn suspend(&self) {
        self.next.store(0, Ordering::SeqCst);
    }

    /// Returns whether the queue is certainly empty; if not, take the lock to find
    /// out. `OWNER` is the offset of the owner byte in an entry; `written` tells
    /// from that byte and the expected owner bit whether the entry is new. Any
    /// thread, no lock, no read-modify-write.
    #[inline]
    pub fn is_empty<const OWNER: usize>(&self, written: impl FnOnce(u8, u8) -> bool) -> bool {
        const { assert!(OWNER < ALIGNMENT) };
        let next = self.next.load(Ordering::Acquire);
        if next == 0 {
            return false;
        }
        let round = (next & 1) as u8;
        let entry = ptr::with_exposed_provenance::<AtomicU8>(next & !(ALIGNMENT - 1));
        // SAFETY: readable, by the contract of `publish`.
        let owner = order::written_by_device(unsafe { &*entry.add(OWNER) });
        // Both loads above are acquires, so the last load follows them.
        !written(owner, round) && self.next.load(Ordering::Acquire) == next
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[repr(align(64))]
    struct Entry([u8; 64]);

    #[test]
    fn a_queue_with_a_new_entry_is_not_empty() {
        let check = OwnerCheck::new();
        let is_empty = || check.is_empty::<63>(|owner, round| owner & 1 == round);
        assert!(!is_empty());
        let mut entry = Entry([0; 64]);
        for round in [0, 1] {
            for owner in [0, 1] {
                entry.0[63] = owner;
                // SAFETY: it lives until after the last look.
                unsafe { check.publish(NonNull::from(&mut entry.0).cast(), round) };
                assert_eq!(is_empty(), owner != round, "{owner} {round}");
            }
        }
        check.suspend();
        assert!(!is_empty());
    }
}
