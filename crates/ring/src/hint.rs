//! Hints to the compiler.

/// Marks the calling branch as unlikely. The function of this name in std requires a newer
/// compiler than the oldest supported one.
#[cold]
#[inline]
pub const fn cold_path() {}
