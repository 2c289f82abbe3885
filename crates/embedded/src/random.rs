//! Random numbers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns a number that cannot be guessed.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A source of random numbers.
#[derive(Debug)]
pub(crate) enum Random {
    /// Numbers that cannot be guessed.
    Host,
    /// Numbers that a seed determines (splitmix64).
    Seeded(AtomicU64),
}

impl Random {
    /// Returns the numbers that a seed determines.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self::Seeded(AtomicU64::new(seed))
    }

    /// Returns another source of the same kind.
    pub(crate) fn split(&self) -> Self {
        match self {
            Self::Host => Self::Host,
            Self::Seeded(_) => Self::seeded(self.next()),
        }
    }

    /// Returns the next number.
    pub(crate) fn next(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = match self {
            Self::Host => return random(),
            Self::Seeded(state) => state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP),
        };
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}
