//! Identifiers of work requests.

/// Bits of a sequence number.
const SEQUENCE_BITS: u32 = 24;
const SEQUENCE_MASK: u32 = (1 << SEQUENCE_BITS) - 1;
/// Bits of a queue's generation.
const GENERATION_BITS: u32 = 20;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;
const INDEX_BITS: u32 = 19;
/// Maximum number of queues of a registry.
pub(crate) const MAX_QUEUES: u32 = 1 << INDEX_BITS;
/// Maximum number of operations in flight on a queue: half of the sequence numbers, so that
/// stale ones are recognised.
pub(crate) const MAX_DEPTH: u32 = 1 << (SEQUENCE_BITS - 1);
const SHARED: u64 = 1 << 63;

/// A queue's slot in its registry, and the generation of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueId {
    /// Slot, less than [`MAX_QUEUES`].
    pub index: u32,
    /// Generation, 20 bits, from 1 on.
    pub generation: u32,
}

impl QueueId {
    /// Returns the identifier of the next queue in the same slot.
    pub fn successor(self) -> Self {
        let next = (self.generation + 1) & GENERATION_MASK;
        Self {
            index: self.index,
            // 0 stays free, so that an identifier of 0 names nothing.
            generation: next.max(1),
        }
    }

    /// Returns whether this may identify an earlier queue in the slot of `current`.
    pub fn precedes(self, current: Self) -> bool {
        let age = current.generation.wrapping_sub(self.generation) & GENERATION_MASK;
        self.index == current.index && self.generation != 0 && age < 1 << (GENERATION_BITS - 1)
    }

    /// Returns the prefix of the queue's work request identifiers.
    pub fn prefix(self, shared: bool) -> u64 {
        let shared = if shared { SHARED } else { 0 };
        shared
            | u64::from(self.index) << (GENERATION_BITS + SEQUENCE_BITS)
            | u64::from(self.generation) << SEQUENCE_BITS
    }
}

/// The identifier of a work request: a bit for shared receive queues, queue,
/// generation, sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkId(pub u64);

impl WorkId {
    /// Creates an identifier from a queue's prefix and the low 24 bits of a sequence number.
    #[inline]
    pub fn new(prefix: u64, sequence: u32) -> Self {
        Self(prefix | u64::from(sequence & SEQUENCE_MASK))
    }

    /// Returns the prefix of its queue.
    #[inline]
    pub fn prefix(self) -> u64 {
        self.0 & !u64::from(SEQUENCE_MASK)
    }

    /// Returns the queue's index in its registry; out of range for a shared receive queue.
    #[inline]
    pub fn own_index(self) -> usize {
        (self.0 >> (GENERATION_BITS + SEQUENCE_BITS)) as usize
    }

    /// Returns whether it belongs to a shared receive queue.
    #[inline]
    pub fn is_shared(self) -> bool {
        self.0 & SHARED != 0
    }

    /// Returns the queue.
    #[inline]
    pub fn queue(self) -> QueueId {
        QueueId {
            index: (self.0 >> (GENERATION_BITS + SEQUENCE_BITS)) as u32 & (MAX_QUEUES - 1),
            generation: (self.0 >> SEQUENCE_BITS) as u32 & GENERATION_MASK,
        }
    }

    /// Returns the low 24 bits of the sequence number.
    #[inline]
    pub fn sequence(self) -> u32 {
        self.0 as u32 & SEQUENCE_MASK
    }

    /// Returns the distance of this sequence number from `from`, modulo 2^24.
    #[inline]
    pub fn distance_from(self, from: u32) -> u32 {
        self.sequence().wrapping_sub(from) & SEQUENCE_MASK
    }
}

const _: () = assert!(1 + INDEX_BITS + GENERATION_BITS + SEQUENCE_BITS == 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifier_fields_round_trip() {
        for shared in [false, true] {
            for index in [0, 1, MAX_QUEUES - 1] {
                for generation in [1, GENERATION_MASK] {
                    for sequence in [0, 1, SEQUENCE_MASK] {
                        let queue = QueueId { index, generation };
                        let id = WorkId::new(queue.prefix(shared), sequence);
                        assert_eq!(id.is_shared(), shared);
                        assert_eq!(id.queue(), queue);
                        assert_eq!(id.sequence(), sequence);
                    }
                }
            }
        }
    }

    #[test]
    fn sequence_wrap_preserves_the_queue() {
        let queue = QueueId {
            index: 5,
            generation: 9,
        };
        let id = WorkId::new(queue.prefix(false), u32::MAX);
        assert_eq!(id.queue(), queue);
        assert_eq!(id.distance_from(u32::MAX - 1), 1);
        assert_eq!(
            WorkId::new(queue.prefix(false), 0).distance_from(u32::MAX),
            1
        );
    }

    /// All sequence numbers and their distances.
    #[test]
    fn distances_separate_outstanding_from_completed() {
        let prefix = QueueId {
            index: MAX_QUEUES - 1,
            generation: GENERATION_MASK,
        };
        let prefix = prefix.prefix(true);
        let step = if cfg!(miri) { 99_991 } else { 1 };
        for from in [0, SEQUENCE_MASK, SEQUENCE_MASK + 1, u32::MAX - 1] {
            for ahead in (0..=SEQUENCE_MASK).step_by(step) {
                let id = WorkId::new(prefix, from.wrapping_add(ahead));
                assert_eq!(id.distance_from(from), ahead, "{from:#x}");
                assert_eq!(id.prefix(), prefix);
            }
            // Completed operations are further away than the maximum depth.
            for behind in 1..=1000 {
                let id = WorkId::new(prefix, from.wrapping_sub(behind));
                assert!(id.distance_from(from) >= MAX_DEPTH);
            }
        }
    }

    /// Every generation is preceded by all earlier ones, and precedes none of them.
    #[test]
    fn generations_are_ordered() {
        let of = |generation| QueueId {
            index: 3,
            generation,
        };
        let step = if cfg!(miri) { 9_973 } else { 1 };
        for generation in (1..=GENERATION_MASK).step_by(step) {
            let old = of(generation);
            let mut new = old;
            for _ in 0..4 {
                assert!(old.precedes(new));
                new = new.successor();
                assert!(!new.precedes(old) && new.generation != 0);
            }
        }
    }

    #[test]
    fn generations_wrap_without_zero() {
        let last = QueueId {
            index: 1,
            generation: GENERATION_MASK,
        };
        let first = last.successor();
        assert_eq!(first.generation, 1);
        assert!(last.precedes(first));
        assert!(!first.precedes(last));
        let nobody = QueueId {
            index: 1,
            generation: 0,
        };
        assert!(!nobody.precedes(first));
    }
}
