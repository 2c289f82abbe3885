//! Memory that the device may touch.
//!
//! Who may touch what, and when, decides its type:
//!
//! - [`Region`] is cut into [`Buffer`]s: ordinary bytes, exclusively owned.
//!   Only operations posted here touch them, and a posted operation owns its
//!   buffer until it has completed;
//! - [`RemoteRegion`]: peers may touch it at any time, so it is never a slice;
//! - [`ForeignRegion`]: somebody else's memory, registered in `unsafe`.

mod advise;
mod buffer;
mod bytes;
mod region;
mod registered;
mod remote;

pub use advise::Advisable;
pub use buffer::Buffer;
pub use region::Region;
pub(crate) use registered::Registered;
pub use remote::{ForeignRegion, MemorySlice, RemoteRegion};
