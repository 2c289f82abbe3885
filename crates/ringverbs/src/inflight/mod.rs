//! Operations in flight, and the memory that they own until they complete or
//! their queue is destroyed.
//!
//! ```text
//!   poster ──push──► OrderedTable (send or receive queue) ──retire──► poller of its CQ
//!   poster ──fill──► UnorderedTable (SRQ) ──────────────────remove──► poller of any CQ
//! ```
//!
//! A work request's identifier ([`WorkId`]) names queue, generation and sequence number. A
//! stale or invalid identifier matches no operation.

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

/// The fields of a posted operation except its memory.
pub(crate) struct PostedInfo {
    /// The user's token.
    pub token: u64,
    /// Objects other than its memory that it keeps alive.
    pub attachment: Attachment,
    /// The operation.
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
    /// Other objects that it keeps alive.
    pub attachment: Attachment,
    /// The operation.
    pub operation: Operation,
    /// Whether the library has signalled it to retire earlier operations; success is then not
    /// reported.
    pub unreported: bool,
}
