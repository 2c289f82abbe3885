//! The ioctl methods of mlx5_ib: UARs, DevX, the location of device
//! memory, and queries of objects that another process created through a shared
//! file.

pub mod devx;
pub mod dm;
#[cfg(any(test, feature = "fake"))]
mod fake;
pub mod flow;
pub mod ids;
mod query;
pub mod uar;

pub use dm::DmLocation;
#[cfg(any(test, feature = "fake"))]
pub use fake::METHODS;
pub use query::{query_context, query_pd, query_port};
pub use uar::{Uar, UarHandle, UarKind, UarLocation};
