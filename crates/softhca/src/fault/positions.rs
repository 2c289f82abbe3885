//! Positions of packets, requests and calls.

use std::fmt;
use std::ops::RangeInclusive;

/// Positions from 1: ranges in ascending order that have nothing in common. By default all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positions(Vec<RangeInclusive<u64>>);

impl Default for Positions {
    fn default() -> Self {
        Self::range(1..=u64::MAX)
    }
}

impl Positions {
    /// Returns those of one range.
    #[must_use]
    pub fn range(range: RangeInclusive<u64>) -> Self {
        Self(vec![range])
    }

    /// Returns those of ranges that are not empty; `None` if they are not in order.
    pub(super) fn new(ranges: Vec<RangeInclusive<u64>>) -> Option<Self> {
        let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
        let is_ordered = pairs.all(|(one, next)| one.end() < next.start());
        is_ordered.then_some(Self(ranges))
    }

    /// Returns whether these are all positions.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.0 == [1..=u64::MAX]
    }

    /// Returns whether a position is one of them.
    #[must_use]
    pub fn contains(&self, position: u64) -> bool {
        let at = self.0.partition_point(|range| *range.end() < position);
        self.0
            .get(at)
            .is_some_and(|range| range.contains(&position))
    }

    /// Returns the last one.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.0.last().map_or(0, |range| *range.end())
    }

    /// Adds a position that is not before the last one.
    pub(super) fn push(&mut self, position: u64) {
        let last = self.last();
        match self.0.last_mut() {
            Some(_) if position <= last => {}
            Some(range) if position - 1 == last => *range = *range.start()..=position,
            _ => self.0.push(position..=position),
        }
    }
}

impl fmt::Display for Positions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match (*range.start(), *range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, u64::MAX) => write!(f, "{comma}{first}..")?,
                (first, last) => write!(f, "{comma}{first}..{last}")?,
            }
        }
        Ok(())
    }
}
