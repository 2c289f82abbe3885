//! Random numbers.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Returns a number that cannot be guessed.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
