//! Words that threads of one process share about a queue.

use crossbeam_utils::CachePadded;

use crate::order;
use crate::primitive::{AtomicU32, Ordering};

/// The two counters of a bounded queue between one producing and one consuming
/// thread: how many entries were ever produced, and how many consumed.
///
/// They run freely and wrap; the difference is the number of entries that are
/// there. Each side publishes its own counter and reads the other's: an acquire or
/// a release, never a read-modify-write. The owner must let in one caller on either
/// side.
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

    /// Returns the number produced, for the consumer: those entries are visible.
    #[inline]
    pub fn produced(&self) -> u32 {
        order::from_device(&self.produced)
    }

    /// Returns the number consumed, for the producer: those slots are free.
    #[inline]
    pub fn consumed(&self) -> u32 {
        order::from_device(&self.consumed)
    }

    /// Returns the producer's own counter.
    #[inline]
    pub fn own_produced(&self) -> u32 {
        order::own(&self.produced)
    }

    /// Returns the consumer's own counter.
    #[inline]
    pub fn own_consumed(&self) -> u32 {
        order::own(&self.consumed)
    }

    /// Publishes all entries before `count` to the consumer.
    #[inline]
    pub fn publish_produced(&self, count: u32) {
        order::to_device(&self.produced, count);
    }

    /// Releases all slots before `count` to the producer.
    #[inline]
    pub fn publish_consumed(&self, count: u32) {
        order::to_device(&self.consumed, count);
    }
}

/// A count of changes. A reader compares it with the count it saw last: checking
/// whether its copy is current takes one load and no lock.
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
    /// Creates a count of zero.
    pub fn new() -> Self {
        Self {
            changes: AtomicU32::new(0),
        }
    }

    /// Returns the count. Changes made before it was reached are visible.
    #[inline]
    pub fn now(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Counts a change. Called after the change, by any thread.
    pub fn advance(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// A number that any thread sets and reads. It orders nothing, and may be outdated.
#[derive(Debug)]
pub struct Hint {
    value: AtomicU32,
}

impl Hint {
    /// Creates a hint.
    pub fn new(value: u32) -> Self {
        Self {
            value: AtomicU32::new(value),
        }
    }

    /// Returns the last value.
    #[inline]
    pub fn get(&self) -> u32 {
        self.value.load(Ordering::Relaxed)
    }

    /// Sets the value.
    #[inline]
    pub fn set(&self, value: u32) {
        self.value.store(value, Ordering::Relaxed);
    }
}
