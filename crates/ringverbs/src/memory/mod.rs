//! Memory regions and buffers.
//!
//! The type determines who may access the memory, and when:
//!
//! - [`Region`] is split into [`Buffer`]s: ordinary bytes, exclusively owned. Only
//!   operations of this process access them, and a posted operation owns its buffer
//!   until it completes.
//! - [`BufferPool`] has buffers that return to the pool when they are dropped. A
//!   [`SharedBuffer`] is read-only, and may be used by any number of operations.
//! - [`RemoteRegion`] is memory that peers may access at any time, so it is never
//!   a slice.
//! - [`ForeignRegion`] is memory that the caller owns; registering it is
//!   `unsafe`.

mod advise;
mod buffer;
mod bytes;
mod pool;
mod region;
mod registered;
mod remote;

use std::ops::{Bound, Range, RangeBounds};

use crate::{Error, Result};

pub use advise::Advisable;
pub use buffer::{Buffer, Registration};
pub use pool::{BufferPool, PoolBuffer, SharedBuffer};
pub use region::Region;
pub(crate) use registered::Registered;
pub use remote::{ForeignRegion, MemorySlice, RemoteRegion};

/// Returns the range, checked against `len` bytes.
///
/// # Errors
/// [`Error::Limit`], with `what`, if the range exceeds `len`.
fn checked_range(
    what: &'static str,
    range: impl RangeBounds<usize>,
    len: usize,
) -> Result<Range<usize>> {
    let begin = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at.saturating_add(1),
        Bound::Excluded(&at) => at,
        Bound::Unbounded => len,
    };
    if begin > end || end > len {
        return Err(Error::Limit {
            what,
            asked: begin.max(end) as u64,
            allowed: len as u64,
        });
    }
    Ok(begin..end)
}
