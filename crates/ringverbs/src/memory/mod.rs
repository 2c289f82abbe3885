//! Memory regions and buffers.
//!
//! The type tells who may access the memory, and when:
//!
//! - [`Region`] is split into [`Buffer`]s: ordinary bytes, exclusively owned.
//!   Only operations posted by this process access them, and a posted operation
//!   owns its buffer until it completes.
//! - [`BufferPool`] has buffers that return to it when they are dropped. A
//!   [`SharedBuffer`] is only read, by any number of operations.
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

pub use advise::Advisable;
pub use buffer::Buffer;
pub use pool::{BufferPool, PoolBuffer, SharedBuffer};
pub use region::Region;
pub(crate) use registered::Registered;
pub use remote::{ForeignRegion, MemorySlice, RemoteRegion};
