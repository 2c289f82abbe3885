//! Interfaces of libfabric over ringverbs.
//!
//! - [`TaggedEndpoint`] receives messages by tag (`fi_tsend`, `fi_trecv`).
//! - [`MultiReceive`] receives many messages into one buffer (`FI_MULTI_RECV`).
//! - [`Counter`] counts completions in place of entries (`fi_cntr`).
//! - [`AddressVector`] numbers the peers of datagrams (`fi_av`).
//!
//! All are code over the public functions of [`ringverbs`]. An operation is recognised by the
//! [registration](ringverbs::Registration) of its memory, not by its token, which the program
//! chooses.

#![forbid(unsafe_code)]
#![allow(
    clippy::result_large_err,
    reason = "the error returns the memory or the handle, off the data path"
)]

mod address_vector;
mod counter;
mod deadline;
mod multi_receive;
mod tagged;

pub use address_vector::{AddressVector, Peer, PeerId, Sender};
pub use counter::{Counter, CounterError};
pub use multi_receive::{MultiMessage, MultiReceive, ReceivePoster};
pub use tagged::{Claimed, TagMatch, TaggedEndpoint};
