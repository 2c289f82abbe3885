//! Packet sequence numbers: 24 bits, compared modulo 2^24.

use core::fmt;

/// A packet sequence number (PSN).
///
/// Order is relative: of two numbers less than half the range apart, the one ahead
/// is later. [`Psn::distance`] gives that order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The number of distinct PSNs.
    pub const RANGE: u32 = 1 << 24;

    /// Creates a PSN from the low 24 bits of `value`; higher bits are ignored.
    #[inline]
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & (Self::RANGE - 1))
    }

    /// The value, 0 to 2^24-1.
    #[inline]
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The PSN `count` packets later.
    #[inline]
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// The PSN `count` packets earlier.
    #[inline]
    #[must_use]
    pub const fn minus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// The signed distance from `from` to `self`, -2^23 to 2^23-1; negative if
    /// `self` is earlier.
    #[inline]
    #[must_use]
    pub const fn distance(self, from: Self) -> i32 {
        // After the shift, bit 23 of the difference is the sign.
        (self.0.wrapping_sub(from.0) << 8) as i32 >> 8
    }

    /// Whether `self` is earlier than `other`.
    #[inline]
    #[must_use]
    pub const fn before(self, other: Self) -> bool {
        self.distance(other) < 0
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Psn;
    use proptest::prelude::*;

    #[test]
    fn wraps_at_24_bits() {
        let last = Psn::new(0xff_ffff);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).minus(1), last);
        assert!(last.before(Psn::new(0)));
        assert!(!Psn::new(0).before(last));
        assert_eq!(Psn::new(0).distance(last), 1);
        assert_eq!(Psn::new(0x80_0000).distance(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0x7f_ffff).distance(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0x0100_0001), Psn::new(1));
    }

    /// Tests every distance from both points where something wraps: the value, and
    /// the sign of a distance.
    #[test]
    fn every_distance_is_exact() {
        const HALF: i32 = 1 << 23;
        for start in [0x7f_ffff, 0xff_ffff].map(Psn::new) {
            for distance in -HALF..HALF {
                let there = start.plus(distance as u32);
                assert_eq!(there.distance(start), distance, "{start:?}");
                assert_eq!(there.before(start), distance < 0);
                assert_eq!(there.minus(distance as u32), start);
                // The reverse distance is negated, except for half the range, which
                // equals its negation.
                let back = if distance == -HALF {
                    distance
                } else {
                    -distance
                };
                assert_eq!(start.distance(there), back);
            }
        }
    }

    /// PSNs less than half the range apart are totally ordered, also across the
    /// wrap.
    #[test]
    fn psns_of_a_window_are_totally_ordered() {
        const WINDOW: u32 = 24;
        for middle in [0u32, 1 << 22, 1 << 23, 3 << 22] {
            let window = || (0..2 * WINDOW).map(|i| (i, Psn::new(middle).minus(WINDOW).plus(i)));
            for ((i, a), (j, b)) in window().flat_map(|a| window().map(move |b| (a, b))) {
                assert_eq!(a.before(b), i < j, "{a:?} {b:?}");
                assert_eq!(a == b, i == j);
                for (_, c) in window() {
                    assert_eq!(a.distance(b) + b.distance(c), a.distance(c));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn distance_inverts_plus(start: u32, count in 0u32..0x80_0000) {
            let start = Psn::new(start);
            prop_assert_eq!(start.plus(count).distance(start), count as i32);
            prop_assert_eq!(start.plus(count).minus(count), start);
        }
    }
}
