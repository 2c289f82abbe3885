//! A ConnectX in this process: the engine of crates/softhca behind the kernel's
//! uverbs interface. The driver of the real device can use it unchanged,
//! without root, kernel module or hardware.
//!
//! ```text
//! uverbs::Context ── Kernel ──► Embedded ── commands ──► softhca::Hca
//!      │                            ▲                        │
//!  queues in memory ◄── doorbell records, entries, completions ┘
//! ```
//!
//! An [`Embedded`] is one HCA; a [`Network`] connects several, or one to those of other
//! processes or hosts. [`Embedded::context`] returns an ordinary context: the
//! calling thread executes its commands, and events are read from descriptors
//! that support poll and epoll. Queues need no system calls: the engine polls
//! the doorbell records.
//!
//! [`Drive`] selects what runs the engine: a dedicated thread, whose sleeps
//! grow longer while it is idle, or the caller.
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

mod addresses;
mod cleanup;
mod cm;
mod command;
mod connections;
mod counters;
mod descriptors;
mod device;
mod device_memory;
mod devx;
mod directory;
mod drive;
mod driver_ids;
mod dynamic;
mod embedded;
mod event;
mod exit_flush;
mod files;
mod flow;
mod frames;
mod gids;
#[cfg(any(test, feature = "test-utils"))]
pub mod hostile;
mod kernel;
mod matcher;
mod memory;
mod methods;
mod network;
mod object;
mod packet;
mod pages;
mod pinned;
mod pinning;
mod poll;
mod programs;
mod qp;
mod query;
mod queues;
mod random;
mod readiness;
mod region;
mod request;
mod resources;
mod runner;
mod scope;
mod segment;
mod spec;
mod state;
mod subscriptions;
mod time;
mod udp;
pub mod usage;
mod user;
mod wait;
mod watch;
mod wire;
mod work_queue;
mod writes;
mod xrc;

pub use cleanup::abandon_waits;
pub use cm::ConnectionId;
pub use descriptors::Descriptors;
pub use directory::Sharing;
pub use drive::Drive;
pub use embedded::Embedded;
pub use exit_flush::flush_before_exit;
pub use files::UarCounts;
pub use gids::{GidTable, GidTableError};
pub use memory::last_accesses;
pub use network::Network;
pub use pinned::{Loss, may_be_registered};
pub use pinning::{has_registered, keep_registered, move_registered, protect_registered};
pub use resources::{QueuePairResource, Resource, ResourceKind};
pub use runner::{DoorbellGuard, guard_doorbells};
pub use scope::set_scope_hooks;
pub use softhca;
pub use time::Limit;

use uverbs::Errno;

/// Result of a command.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Returns an error number as an error.
pub(crate) fn refuse<T>(errno: i32) -> Result<T> {
    Err(Errno::new(errno))
}
