//! Words that two threads of one process share beside a queue.

use crossbeam_utils::CachePadded;

use crate::order;
use crate::primitive::{AtomicU32, Ordering};

/// The two counters of a bounded queue between one producing and one consuming
/// thread: how many entries were ever produced, and how many consumed.
///
/// They run freely and wrap; the difference is the number of entries that are
/// there. Each side publishes its own counter and looks at the other's: an
/// acquire or a release, never a read-modify-write. What the entries are, and
/// that there is only one caller on either side, is the owner's affair.
#[derive(Debug)]
pub struct Sequences {
    produced: CachePadded<AtomicU32>,
    consumed: CachePadded<AtomicU32>,
}

impl Default for Sequences {
    fn default() -> Self {
        Self::new()
    }
}

impl Sequences {
    /// Counters of an empty queue.
    pub fn new() -> Self {
        Self::starting_at(0)
    }

    /// Counters of an empty queue that has seen `count` entries.
    pub fn starting_at(count: u32) -> Self {
        Self {
            produced: CachePadded::new(AtomicU32::new(count)),
            consumed: CachePadded::new(AtomicU32::new(count)),
        }
    }

    /// For the consumer: what has been produced, entries included.
    #[inline(always)]
    pub fn produced(&self) -> u32 {
        order::from_device(&self.produced)
    }

    /// For the producer: what has been consumed; those places are free.
    #[inline(always)]
    pub fn consumed(&self) -> u32 {
        order::from_device(&self.consumed)
    }

    /// The producer reads its own counter back.
    #[inline(always)]
    pub fn own_produced(&self) -> u32 {
        order::own(&self.produced)
    }

    /// The consumer reads its own counter back.
    #[inline(always)]
    pub fn own_consumed(&self) -> u32 {
        order::own(&self.consumed)
    }

    /// The producer hands over all entries before `count`.
    #[inline(always)]
    pub fn publish_produced(&self, count: u32) {
        order::to_device(&self.produced, count);
    }

    /// The consumer gives back all places before `count`.
    #[inline(always)]
    pub fn publish_consumed(&self, count: u32) {
        order::to_device(&self.consumed, count);
    }
}

/// A count of changes that a reader compares with the one it saw last: "is what
/// I copied still so?" costs it one load, and no lock.
#[derive(Debug)]
pub struct Epoch {
    changes: AtomicU32,
}

impl Default for Epoch {
    fn default() -> Self {
        Self::new()
    }
}

impl Epoch {
    /// No change so far.
    pub fn new() -> Self {
        Self {
            changes: AtomicU32::new(0),
        }
    }

    /// The count now. Changes made before it was raised to this are seen.
    #[inline(always)]
    pub fn now(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Something has changed. Called after the change, by any thread.
    pub fn advance(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// A small number that says how something stands, set and looked at by any
/// thread. It orders nothing: it is a hint, and what it says may be over.
#[derive(Debug)]
pub struct Hint {
    value: AtomicU32,
}

impl Hint {
    /// A hint that says `value`.
    pub fn new(value: u32) -> Self {
        Self {
            value: AtomicU32::new(value),
        }
    }

    /// What was said last.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        self.value.load(Ordering::Relaxed)
    }

    /// Says `value` from now on.
    #[inline(always)]
    pub fn set(&self, value: u32) {
        self.value.store(value, Ordering::Relaxed);
    }
}
