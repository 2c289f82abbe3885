//! "Has the device written it?" without the reader's lock.

use std::ptr;

use crate::order;
use crate::primitive::{AtomicU8, AtomicUsize, Ordering};

/// Where the reader of a queue, whose entries say themselves whose they are,
/// will look next; for others to look there without the reader's lock.
///
/// Most polls find nothing; those need no lock. The answer is safe for the arm,
/// look, wait pattern: the device is told up to where completions were consumed
/// by whoever publishes that here, and raises an event at once for those that
/// are behind it.
///
/// A place that was looked at once must stay readable: see
/// [`crate::Mapping::retire_whole`].
#[derive(Debug, Default)]
pub struct Glance {
    /// The entry, whose alignment leaves the lowest bit for its owner bit; 0 if
    /// nothing may be called empty.
    next: AtomicUsize,
}

/// Entries are aligned to this.
const ALIGNMENT: usize = 64;

impl Glance {
    /// Nothing is called empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// The reader goes on at `entry`, aligned to 64 bytes, which will have the
    /// owner bit `round`. Called with the lock held.
    ///
    /// # Safety
    /// The entry stays readable for as long as this value is used, though what
    /// it has may change.
    #[inline(always)]
    pub unsafe fn publish(&self, entry: ptr::NonNull<u8>, round: u8) {
        let at = entry.as_ptr().expose_provenance();
        debug_assert!(at.is_multiple_of(ALIGNMENT));
        // Release: who finds it there finds it made.
        self.next
            .store(at | usize::from(round & 1), Ordering::Release);
    }

    /// Nothing is called empty any more, until the next [`Glance::publish`].
    /// Called with the lock held.
    #[inline(always)]
    pub fn suspend(&self) {
        self.next.store(0, Ordering::SeqCst);
    }

    /// Whether the queue is certainly empty. `false` means: take the lock and
    /// look there. `owner` is where in an entry the byte is that says whose it
    /// is; `written` says of that byte and the owner bit whether it is written.
    /// Any thread, no lock, no read-modify-write.
    #[inline(always)]
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
        // The last load stays behind the two above: both are acquires.
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
    fn what_is_written_is_not_empty() {
        let glance = Glance::new();
        let look = || glance.is_empty::<63>(|owner, round| owner & 1 == round);
        assert!(!look());
        let mut entry = Entry([0; 64]);
        for round in [0, 1] {
            for owner in [0, 1] {
                entry.0[63] = owner;
                // SAFETY: it lives until after the last look.
                unsafe { glance.publish(NonNull::from(&mut entry.0).cast(), round) };
                assert_eq!(look(), owner != round, "{owner} {round}");
            }
        }
        glance.suspend();
        assert!(!look());
    }
}
