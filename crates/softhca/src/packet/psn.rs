//! Packet sequence numbers: 24 bits, compared over half their range.

use core::fmt;

/// A packet sequence number (PSN).
///
/// Order is relative: of two numbers less than half the range apart, the one
/// ahead is later. [`Psn::distance`] is that order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// How many numbers there are.
    pub const RANGE: u32 = 1 << 24;

    /// The number in the low 24 bits; what is above is ignored.
    #[inline]
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & (Self::RANGE - 1))
    }

    /// The number, 0 to 2^24-1.
    #[inline]
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// `count` numbers later.
    #[inline]
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// `count` numbers earlier.
    #[inline]
    #[must_use]
    pub const fn minus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// How far `self` is past `from`: negative if it is earlier, -2^23 to 2^23-1.
    #[inline]
    #[must_use]
    pub const fn distance(self, from: Self) -> i32 {
        // Shifted up, bit 23 of the difference is the sign.
        (self.0.wrapping_sub(from.0) << 8).cast_signed() >> 8
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

    proptest! {
        #[test]
        fn distance_undoes_plus(start: u32, count in 0u32..0x80_0000) {
            let start = Psn::new(start);
            prop_assert_eq!(start.plus(count).distance(start), count as i32);
            prop_assert_eq!(start.plus(count).minus(count), start);
        }
    }
}
