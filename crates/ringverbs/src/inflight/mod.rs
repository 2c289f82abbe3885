//! What is in flight: the resources that posted operations own until they are
//! completed or their queue is gone.
//!
//! ```text
//!   poster ──push──► Fifo (a send or receive queue's) ──retire──► poller of its CQ
//!   poster ──insert─► Slab (a shared receive queue's) ──remove──► poller of any CQ
//! ```
//!
//! A work request's identifier ([`WorkId`]) names queue, generation and
//! sequence number, so that a completion finds its operation, and one that is
//! out of date, or made up, finds nothing.

mod fifo;
mod id;
mod reaper;
mod registry;
mod slab;

pub(crate) use fifo::{Fifo, FifoWriter, Retired};
pub(crate) use id::{MAX_DEPTH, WorkId};
pub(crate) use reaper::{Nothing, Reaper};
pub(crate) use registry::{Found, Registry};
pub(crate) use slab::Slab;

use crate::data::Payload;
use crate::operation::Operation;
use crate::qp::Companion;

/// What is noted of an operation that is posted, but its memory.
pub(crate) struct Note {
    /// The user's token.
    pub token: u64,
    /// What must stay alive besides its memory.
    pub companion: Companion,
    /// What was asked for.
    pub operation: Operation,
    /// As [`Posted::quiet`].
    pub quiet: bool,
}

/// A posted operation's own.
#[derive(Debug)]
pub(crate) struct Posted {
    /// The user's token.
    pub token: u64,
    /// Its memory.
    pub payload: Payload,
    /// What else must stay alive until it is done.
    pub companion: Companion,
    /// What was asked for.
    pub operation: Operation,
    /// Its success is signalled only to retire those before it; the user did
    /// not ask to hear of it.
    pub quiet: bool,
}
