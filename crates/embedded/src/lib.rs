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
mod capture;
mod cleanup;
mod cm;
mod directory;
mod drive;
mod driver;
mod file_size;
mod first_time;
#[cfg(any(test, feature = "test-utils"))]
pub mod hostile;
mod links;
mod management;
mod peers;
mod poll;
mod random;
mod readiness;
mod runtime;
mod scope;
mod suppressions;
pub mod sysfs;
mod user;
mod wires;

pub use capture::{
    CaptureEnd, CaptureOptionError, CaptureOptions, CaptureRing, CaptureSnap, process_path,
};
pub use cleanup::abandon_waits;
pub use cm::{ConnectionId, InheritedChannel, ManagementCounters};
pub use directory::Sharing;
pub use drive::Drive;
pub use driver::cause;
pub use driver::descriptors::{Descriptors, ObjectChange, QueuePairAttributes};
pub use driver::file_limit::FileSizeLimit;
pub use driver::files::UarCounts;
pub use driver::gids::{GidTable, GidTableError};
pub use driver::inherited::InheritedContext;
pub use driver::memory::{
    AccessObserver, GatherObserver, ScatterObserver, last_accesses, observe_data,
    observe_peer_accesses,
};
pub use driver::moved::may_be_registered;
pub use driver::pinned::Loss;
pub use file_size::file_size_limit;
pub use runtime::capture_control::{CaptureAnswer, CaptureState};
pub use runtime::check::{CheckRule, ProgramError};
pub use runtime::control::RunningProcesses;
pub use runtime::embedded::{Activity, Embedded};
pub use runtime::exit_flush::flush_before_exit;
pub use runtime::fault_record::{FaultRecord, FaultRecordEnd};
pub use runtime::faults::{FaultAnswer, FaultCounts, FaultState};
pub use runtime::network::Network;
pub use runtime::pinning::{has_registered, keep_registered, move_registered, protect_registered};
pub use runtime::reasons::ReasonHandler;
pub use runtime::resources::{QueuePairResource, Resource, ResourceKind};
pub use runtime::runner::{DoorbellGuard, guard_doorbells};
pub use runtime::status::{CompletionQueueStatus, DeviceStatus, ProcessStatus, QueuePairStatus};
pub use runtime::time::Limit;
pub use runtime::usage;
pub use scope::set_scope_hooks;
pub use suppressions::Suppressions;
pub use wires::reason_datagram::PeerFailure;
pub use {roce, softhca};

use uverbs::Errno;

/// Result of a command.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Returns the name of this process's program, as the system keeps it: its first 15 bytes.
fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end_matches('\n').to_owned()
}

/// Returns an error number as an error.
pub(crate) fn refuse<T>(errno: i32) -> Result<T> {
    Err(Errno::new(errno))
}
