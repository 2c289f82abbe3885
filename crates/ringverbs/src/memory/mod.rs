//! Memory that the device may touch.
//!
//! Who may touch what, and when, decides its type:
//!
//! - [`Region`] is cut into [`Buffer`]s: ordinary bytes, exclusively owned.
//!   Only operations posted here touch them, and a posted operation owns its
//!   buffer until it has completed.

mod buffer;
mod region;

pub use buffer::Buffer;
pub use region::Region;
pub(crate) use region::Registered;
