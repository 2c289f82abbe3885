//! Outstanding work requests of a queue.

use std::ptr::NonNull;

use crate::primitive::{AtomicU32, AtomicU64, Ordering};

/// Identifiers of outstanding work requests, by the slot that their completions
/// name.
///
/// The thread that posts and the one that polls hold different locks, or none.
/// The poster's stores reach the poller through the device (WQE, doorbell, CQE);
/// in the other direction the count of completed work requests orders them.
///
/// Whatever slot a completion names, [`find`](Self::find) returns an outstanding
/// work request or nothing.
#[derive(Debug)]
pub struct Outstanding {
    slots: Box<[Slot]>,
    /// Number of slots less one.
    mask: usize,
    /// Number of completed work requests: `wr_count` of the last one.
    completed: AtomicU32,
    /// For a queue that completes in any order, used by the poller alone: the number of
    /// work requests completed together with all earlier ones, and the number of all
    /// completed ones.
    oldest: AtomicU32,
    finished: AtomicU32,
}

/// Sized so that the processor can store it by one instruction.
#[derive(Debug)]
#[repr(C, align(16))]
struct Slot {
    wr_id: AtomicU64,
    /// Number of completed work requests once this one completes.
    wr_count: AtomicU32,
    _rest: AtomicU32,
}

impl Slot {
    /// Stores both words, relaxed.
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    #[inline]
    fn store(&self, wr_id: u64, wr_count: u32) {
        self.wr_id.store(wr_id, Ordering::Relaxed);
        self.wr_count.store(wr_count, Ordering::Relaxed);
    }

    /// Stores both words, relaxed, by one instruction: posting is bound by its
    /// stores.
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    #[inline]
    fn store(&self, wr_id: u64, wr_count: u32) {
        const _: () = assert!(size_of::<Slot>() == 16);
        let pair = crate::pair::pair_of(wr_id, u64::from(wr_count));
        // SAFETY: the slot is 16 bytes of atomics, aligned to 16; for other
        // threads this is two relaxed stores, since the processor tears neither
        // word.
        unsafe {
            core::arch::asm!(
                "movaps xmmword ptr [{slot}], {pair}",
                slot = in(reg) self,
                pair = in(xmm_reg) pair,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Flag in the count of a marked work request. The count then never counts as
/// outstanding, since queues have fewer slots than this.
const MARK: u32 = 1 << 31;

/// Flag in the count of a marked work request that completed before an older one.
const DONE: u32 = 1 << 30;

/// An outstanding work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutstandingRequest {
    /// Its identifier.
    pub wr_id: u64,
    wr_count: u32,
}

impl Outstanding {
    /// Creates a table of `slots` slots, rounded up to a power of two; `None` if
    /// memory is short.
    pub fn new(slots: u32) -> Option<Self> {
        let slots = slots.max(1).checked_next_power_of_two()? as usize;
        let mut all = Vec::new();
        all.try_reserve_exact(slots).ok()?;
        all.extend((0..slots).map(|_| Slot {
            wr_id: AtomicU64::new(0),
            wr_count: AtomicU32::new(0),
            _rest: AtomicU32::new(0),
        }));
        Some(Self {
            slots: all.into_boxed_slice(),
            mask: slots - 1,
            completed: AtomicU32::new(0),
            oldest: AtomicU32::new(0),
            finished: AtomicU32::new(0),
        })
    }

    #[inline]
    fn slot(&self, slot: u32) -> &Slot {
        // SAFETY: the number of slots is a power of two, so the mask keeps any
        // number in bounds.
        unsafe { self.slots.get_unchecked(slot as usize & self.mask) }
    }

    /// Records a work request, the `wr_count`th of the queue. Called by the poster,
    /// before the device sees the work request.
    #[inline]
    pub fn post(&self, slot: u32, wr_id: u64, wr_count: u32) {
        // Relaxed: the device orders this before the poller's loads.
        self.slot(slot).store(wr_id, wr_count);
    }

    /// Returns the slots, for a poster that keeps slot numbers in bounds itself.
    pub fn slots(&self) -> OutstandingSlots {
        OutstandingSlots {
            first: NonNull::from(&*self.slots).cast(),
        }
    }

    /// Returns the work request in a slot, if one is outstanding there. Called by the
    /// poller.
    #[inline]
    pub fn find(&self, slot: u32) -> Option<OutstandingRequest> {
        let slot = self.slot(slot);
        let wr_count = slot.wr_count.load(Ordering::Relaxed);
        self.is_outstanding(wr_count).then(|| OutstandingRequest {
            wr_id: slot.wr_id.load(Ordering::Relaxed),
            wr_count,
        })
    }

    /// Returns whether the work request of that count is outstanding: it is at most
    /// as many completions ahead as there are slots.
    #[inline]
    fn is_outstanding(&self, wr_count: u32) -> bool {
        let ahead = wr_count.wrapping_sub(self.completed.load(Ordering::Relaxed));
        ahead.wrapping_sub(1) < self.slots.len() as u32
    }

    /// As [`post`](Self::post), of a work request that only
    /// [`find_marked`](Self::find_marked) finds.
    pub fn post_marked(&self, slot: u32, wr_id: u64, wr_count: u32) {
        self.post(slot, wr_id, wr_count ^ MARK);
    }

    /// As [`find`](Self::find), for those of [`post_marked`](Self::post_marked).
    pub fn find_marked(&self, slot: u32) -> Option<OutstandingRequest> {
        let slot = self.slot(slot);
        let wr_count = slot.wr_count.load(Ordering::Relaxed) ^ MARK;
        self.is_outstanding(wr_count).then(|| OutstandingRequest {
            wr_id: slot.wr_id.load(Ordering::Relaxed),
            wr_count,
        })
    }

    /// As [`find_marked`](Self::find_marked), of a queue that completes in any order
    /// ([`complete_any`](Self::complete_any)).
    pub fn find_any(&self, slot: u32) -> Option<OutstandingRequest> {
        let slot = self.slot(slot);
        let wr_count = slot.wr_count.load(Ordering::Relaxed) ^ MARK;
        let ahead = wr_count.wrapping_sub(self.oldest.load(Ordering::Relaxed));
        let outstanding = ahead.wrapping_sub(1) < self.slots.len() as u32;
        outstanding.then(|| OutstandingRequest {
            wr_id: slot.wr_id.load(Ordering::Relaxed),
            wr_count,
        })
    }

    /// Marks one work request as completed, of a queue that completes in any order. All
    /// are posted by [`post_marked`](Self::post_marked), the n-th to slot n - 1, and only
    /// while fewer than half of the slots are ahead of [`completed`](Self::completed).
    /// Called by the poller.
    ///
    /// `completed` is at most half of the slots ahead of the oldest outstanding work
    /// request, so that its slot is not used again.
    pub fn complete_any(&self, found: OutstandingRequest) {
        let done = found.wr_count ^ MARK ^ DONE;
        let slot = self.slot(found.wr_count.wrapping_sub(1));
        slot.wr_count.store(done, Ordering::Relaxed);
        let mut oldest = self.oldest.load(Ordering::Relaxed);
        loop {
            let next = oldest.wrapping_add(1);
            let count = self.slot(oldest).wr_count.load(Ordering::Relaxed);
            if count != next ^ MARK ^ DONE {
                break;
            }
            oldest = next;
        }
        let finished = self.finished.load(Ordering::Relaxed).wrapping_add(1);
        self.oldest.store(oldest, Ordering::Relaxed);
        self.finished.store(finished, Ordering::Relaxed);
        let ahead = finished
            .wrapping_sub(oldest)
            .min(self.slots.len() as u32 / 2);
        // Release: see `complete`.
        (self.completed).store(oldest.wrapping_add(ahead), Ordering::Release);
    }

    /// Marks a work request and all posted before it as completed; their slots may
    /// be reused. Called by the poller.
    #[inline]
    pub fn complete(&self, found: OutstandingRequest) {
        // Release: reads of the slot and of the WQE precede the poster's reuse of
        // them.
        self.completed.store(found.wr_count, Ordering::Release);
    }

    /// Stores a value in a further slot that a work request occupies, in addition
    /// to the one that its completion names. `wr_count` is that of the work request.
    /// Called by the poster.
    #[inline]
    pub fn note(&self, slot: u32, value: u64, wr_count: u32) {
        // The count of the previous round, so that `find` finds nothing here.
        let wr_count = wr_count.wrapping_sub(self.slots.len() as u32);
        self.post(slot, value, wr_count);
    }

    /// Returns the value stored by [`note`](Self::note). Called by the poller.
    #[inline]
    pub fn noted(&self, slot: u32) -> u64 {
        self.slot(slot).wr_id.load(Ordering::Relaxed)
    }

    /// Returns the number of completed work requests. Called by the poster.
    #[inline]
    pub fn completed(&self) -> u32 {
        // Acquire: see `complete`.
        self.completed.load(Ordering::Acquire)
    }

    /// Empties the table, for a queue that was reset. No other thread may use it
    /// meanwhile.
    pub fn reset(&self) {
        for slot in &self.slots {
            slot.wr_count.store(0, Ordering::Relaxed);
        }
        self.oldest.store(0, Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
        self.completed.store(0, Ordering::Release);
    }
}

/// The slots of an [`Outstanding`].
#[derive(Clone, Copy, Debug)]
pub struct OutstandingSlots {
    first: NonNull<Slot>,
}

// SAFETY: the slots consist of atomics.
unsafe impl Send for OutstandingSlots {}
// SAFETY: as above.
unsafe impl Sync for OutstandingSlots {}

impl OutstandingSlots {
    /// As [`Outstanding::post`].
    ///
    /// # Safety
    /// The [`Outstanding`] must still exist, not have moved, and have more than
    /// `slot` slots.
    #[inline]
    pub unsafe fn post(self, slot: usize, wr_id: u64, wr_count: u32) {
        // SAFETY: guaranteed by the caller. Relaxed: see `Outstanding::post`.
        unsafe { self.first.add(slot).as_ref() }.store(wr_id, wr_count);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn complete(all: &Outstanding, slot: u32) -> Option<u64> {
        let found = all.find(slot)?;
        all.complete(found);
        Some(found.wr_id)
    }

    #[test]
    fn find_returns_outstanding_requests() {
        let all = Outstanding::new(5).unwrap();
        assert_eq!(all.find(0), None);
        for slot in 0..6 {
            all.post(slot, u64::from(slot) + 100, slot + 1);
        }
        assert_eq!(complete(&all, 2), Some(102));
        assert_eq!(all.completed(), 3);
        // Earlier work requests completed with it.
        for slot in [0, 1, 2, 6, 7, 8] {
            assert_eq!(complete(&all, slot), None, "{slot}");
        }
        // Any number is inside.
        assert_eq!(complete(&all, u32::MAX - 7 + 5), Some(105));
        assert_eq!(all.completed(), 6);
        all.reset();
        assert_eq!((all.completed(), all.find(5)), (0, None));
    }

    #[test]
    fn marked_requests_are_found_as_such() {
        let all = Outstanding::new(4).unwrap();
        for round in 0..5u32 {
            for n in 0..4 {
                let wr_count = round * 4 + n + 1;
                match n % 2 {
                    0 => all.post(n, n.into(), wr_count),
                    _ => all.post_marked(n, n.into(), wr_count),
                }
            }
            for n in 0..4 {
                let (plain, marked) = (all.find(n), all.find_marked(n));
                assert_eq!(
                    (plain.is_some(), marked.is_some()),
                    (n % 2 == 0, n % 2 == 1)
                );
                let found = plain.or(marked).unwrap();
                assert_eq!(found.wr_id, u64::from(n));
                all.complete(found);
                assert_eq!(all.completed(), round * 4 + n + 1);
                assert_eq!((all.find(n), all.find_marked(n)), (None, None));
            }
        }
    }

    #[test]
    fn requests_complete_in_any_order() {
        const SLOTS: u32 = 8;
        let all = Outstanding::new(SLOTS).unwrap();
        let (mut posted, mut finished) = (0u32, 0);
        let mut outstanding: Vec<u32> = Vec::new();
        let mut random = 1u32;
        let mut waited = 0;
        for _ in 0..10_000 {
            while posted != all.completed().wrapping_add(SLOTS / 2) {
                let oldest = outstanding.iter().min().map_or(posted, |oldest| *oldest);
                assert!(posted - oldest < SLOTS, "the slot is in use");
                all.post_marked(posted % SLOTS, u64::from(posted), posted + 1);
                outstanding.push(posted);
                posted += 1;
            }
            assert!(outstanding.len() <= SLOTS as usize / 2);
            waited = waited.max(SLOTS as usize / 2 - outstanding.len());
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let n = outstanding.swap_remove((random >> 16) as usize % outstanding.len());
            assert_eq!(all.find(n), None);
            let found = all.find_any(n).unwrap();
            assert_eq!(found.wr_id, u64::from(n));
            all.complete_any(found);
            finished += 1;
            for slot in 0..SLOTS {
                let is = outstanding.iter().any(|n| n % SLOTS == slot);
                assert_eq!(all.find_any(slot).is_some(), is, "{slot}");
            }
        }
        assert_eq!(posted - finished, outstanding.len() as u32);
        assert!(waited > 0, "the oldest was never overtaken by all others");
        all.reset();
        assert_eq!((all.completed(), all.find_any(0)), (0, None));
    }

    #[test]
    fn note_is_not_outstanding() {
        let all = Outstanding::new(4).unwrap();
        for round in 0..5u32 {
            // Two work requests, each of two slots.
            for n in 0..2 {
                let wr_count = round * 2 + n + 1;
                all.post(n * 2, 100 + u64::from(wr_count), wr_count);
                all.note(n * 2 + 1, 7 + u64::from(n), wr_count);
            }
            for n in 0..2 {
                assert_eq!((all.find(1), all.find(3)), (None, None));
                assert_eq!(all.noted(n * 2 + 1), 7 + u64::from(n));
                complete(&all, n * 2).unwrap();
            }
        }
    }

    #[test]
    fn counts_wrap() {
        let all = Outstanding::new(4).unwrap();
        all.post(0, 1, u32::MAX);
        // As if so many work requests had completed.
        all.completed.store(u32::MAX - 1, Ordering::Relaxed);
        all.post(1, 2, 0);
        all.post(2, 3, 1);
        assert_eq!(complete(&all, 0), Some(1));
        assert_eq!(complete(&all, 1), Some(2));
        assert_eq!(complete(&all, 2), Some(3));
        assert_eq!(complete(&all, 3), None);
    }

    #[test]
    fn zero_slots_become_one_and_too_many_are_refused() {
        assert_eq!(Outstanding::new(0).unwrap().slots.len(), 1);
        assert!(Outstanding::new(u32::MAX).is_none());
    }
}
