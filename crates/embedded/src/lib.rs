//! A ConnectX in this process: crates/softhca's engine behind the kernel's
//! uverbs interface, so that what drives the real device drives it, without
//! root, kernel module or hardware.
//!
//! ```text
//! uverbs::Context ── Kernel ──► Embedded ── commands ──► softhca::Hca
//!      │                            ▲                        │
//!  queues in memory ◄── doorbell records, entries, completions ┘
//! ```
//!
//! An [`Embedded`] is one HCA; a [`Network`] joins several, also of several
//! processes. What
//! [`Embedded::context`] gives is a context like any other's: its commands are
//! carried out by the calling thread, events come through descriptors that poll
//! and epoll know. Queues work without system calls: the engine sees the
//! doorbell records move.
//!
//! Who runs the engine is chosen by [`Drive`]: a thread of its own, which
//! sleeps longer and longer while nothing happens, or the caller.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! let embedded = ringverbs_embedded::Embedded::new("ib")?;
//! let context = Arc::new(embedded.context()?);
//! let (info, device) = mlx5::DeviceContext::open(&context)?;
//! assert_eq!(info.num_comp_vectors, 4);
//! assert_eq!(context.query_port(1)?.legacy.lid, 1);
//! # Ok(())
//! # }
//! ```

mod cm;
mod command;
mod copy;
mod directory;
mod event;
mod files;
mod kernel;
mod leaving;
mod memory;
mod methods;
mod network;
mod object;
mod qp;
mod query;
mod queues;
mod region;
mod request;
mod runner;
mod segment;
mod spec;
mod state;
mod user;
mod watch;
mod writes;
mod xrc;

pub use directory::Sharing;
pub use network::{Drive, Embedded, Network};

use uverbs::Errno;

/// What commands end with.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Refuses with an error number.
pub(crate) fn refuse<T>(errno: i32) -> Result<T> {
    Err(Errno::new(errno))
}
