//! Ranges of addresses, which may overlap.

use std::collections::BTreeMap;
use std::ops::Range;

/// Values by ranges.
#[derive(Debug)]
pub(super) struct Ranges<T> {
    /// With the end of each, by its key.
    values: BTreeMap<Key, (u64, T)>,
    /// Maximum length, since there were none.
    longest: u64,
    next: u64,
}

/// The start of a range, and a number.
pub(super) type Key = (u64, u64);

impl<T> Ranges<T> {
    pub(super) const fn new() -> Self {
        Self {
            values: BTreeMap::new(),
            longest: 0,
            next: 0,
        }
    }

    pub(super) fn insert(&mut self, range: Range<u64>, value: T) -> Key {
        if self.values.is_empty() {
            self.longest = 0;
        }
        self.longest = self.longest.max(range.end.saturating_sub(range.start));
        let key = (range.start, self.next);
        self.next += 1;
        self.values.insert(key, (range.end, value));
        key
    }

    pub(super) fn remove(&mut self, key: Key) {
        self.values.remove(&key);
    }

    /// Returns the values of ranges that overlap one.
    pub(super) fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = &T> {
        let first = range.start.saturating_sub(self.longest);
        let values = self.values.range((first, 0)..(range.end, 0));
        let values = values.filter(move |(_, (end, _))| range.start < *end);
        values.map(|(_, (_, value))| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_are_found() {
        let mut ranges = Ranges::new();
        let long = ranges.insert(100..1000, "long");
        ranges.insert(100..110, "short");
        ranges.insert(500..600, "middle");
        let found = |ranges: &Ranges<_>, range| Vec::from_iter(ranges.overlapping(range).copied());
        assert_eq!(found(&ranges, 0..100), Vec::<&str>::new());
        assert_eq!(found(&ranges, 109..200), ["long", "short"]);
        assert_eq!(found(&ranges, 599..2000), ["long", "middle"]);
        ranges.remove(long);
        assert_eq!(found(&ranges, 599..2000), ["middle"]);
        assert_eq!(found(&ranges, 600..2000), Vec::<&str>::new());
    }
}
