//! Completion queues.
//!
//! - [`CompletionQueue`] has one owner and polls without a lock or an atomic
//!   read-modify-write.
//! - [`SharedCompletionQueue`] may be polled by any thread, behind a lock that each
//!   call takes and releases.
//! - [`CompletionQueueRef`] is a handle for creating queue pairs on a queue that
//!   another thread polls.
//! - [`Completion`] is the result of an operation, with the memory that the operation
//!   owned.

mod cursor;
mod entry;
mod failed;
mod format;
mod handle;
mod queue;
mod reader;
mod shared;
mod shared_reader;
#[cfg(feature = "stream")]
mod stream;
mod time;
pub(crate) mod wait;

pub use cursor::{Cursor, CursorEntry, SuccessFields};
pub use entry::{Completion, Failure, Status, Success};
pub use failed::{ErrorEntry, ReadError, error_text, provider_error_text};
pub use format::{
    ContextEntry, ContextFormat, DataEntry, DataFormat, EntryFlags, Format, MessageEntry,
    MessageFormat, TaggedEntry, TaggedFormat,
};
pub use handle::CompletionQueueRef;
pub use queue::{CompletionQueue, CompletionQueueBuilder};
pub use reader::{CompletionReader, ReaderBuilder};
pub use shared::SharedCompletionQueue;

pub use shared_reader::SharedCompletionReader;
#[cfg(feature = "tokio")]
pub use stream::TokioReader;
#[cfg(feature = "stream")]
pub use stream::{CompletionStream, StreamItem};
#[cfg(feature = "tokio")]
pub(crate) use stream::{WaitFd, watch};
pub use time::{DeviceClock, Timestamp};
pub use wait::{MutexCond, Signaler, WaitObject, WaitSet, Waitable};

pub use crate::qp::{CompletionLevel, CompletionMethod, Drained, completion_method};
pub use crate::route_header::{ROUTE_HEADER, RawAddress, source_gid};

pub(crate) use queue::Shared;
