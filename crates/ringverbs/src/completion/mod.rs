//! Completion queues.
//!
//! - [`CompletionQueue`]: one owner; polls without a lock or an atomic
//!   read-modify-write;
//! - [`SharedCompletionQueue`]: the same for any thread, behind a lock that is
//!   taken and released within each call;
//! - [`Completion`]: what became of an operation, with everything that it
//!   owned.

mod entry;
mod queue;
mod shared;

pub use entry::{Completion, Failure, Status, Success};
pub use queue::{CompletionQueue, CompletionQueueBuilder};
pub use shared::SharedCompletionQueue;

pub(crate) use queue::Shared;
