//! Hints to the compiler.

/// Marks the branch that calls it as unlikely: std's function of this name is
/// newer than the oldest compiler that is supported.
#[cold]
#[inline]
pub const fn cold_path() {}
