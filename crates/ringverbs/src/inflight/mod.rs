//! What is in flight: the resources that posted operations own until they are
//! completed or their queue is gone.
//!
//! ```text
//!   poster ──push──► OrderedTable (a send or receive queue's) ──retire──► poller of its CQ
//!   poster ──insert─► UnorderedTable (a shared receive queue's) ──remove──► poller of any CQ
//! ```
//!
//! A work request's identifier ([`WorkId`]) names queue, generation and
//! sequence number. A stale or invented one matches no operation.

mod id;
mod ordered;
mod reaper;
mod registry;
mod unordered;

pub(crate) use id::{MAX_DEPTH, WorkId};
pub(crate) use ordered::{OrderedTable, OrderedWriter, Retired};
pub(crate) use reaper::{Reaper, Unmatched};
pub(crate) use registry::{Lookup, Registry};
pub(crate) use unordered::UnorderedTable;

use crate::data::Payload;
use crate::operation::Operation;
use crate::qp::Attachment;

/// A posted operation without its memory.
pub(crate) struct PostedInfo {
    /// The user's token.
    pub token: u64,
    /// What must stay alive besides its memory.
    pub attachment: Attachment,
    /// What was asked for.
    pub operation: Operation,
    /// As [`Posted::unreported`].
    pub unreported: bool,
}

/// A posted operation.
#[derive(Debug)]
pub(crate) struct Posted {
    /// The user's token.
    pub token: u64,
    /// Its memory.
    pub payload: Payload,
    /// What else must stay alive until it is done.
    pub attachment: Attachment,
    /// What was asked for.
    pub operation: Operation,
    /// Its success is signalled only to retire those before it, and is not
    /// reported.
    pub unreported: bool,
}
