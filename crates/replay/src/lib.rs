//! Records of RDMA programs, as `ringverbs run --record` writes them: [`Record::read`], and
//! [`replay`] on an embedded device.
//!
//! ```text
//! lines ──► Record ── events by time ──► Player ──► World: objects on one device
//!                                          │
//!                                          └──► Outcome: what differs, what is left out
//! ```
//!
//! The processes of the records have one device, and contexts of their own. Payload is not in a
//! record: what is sent is zeros.

mod modification;
mod outcome;
mod player;
mod record;
mod world;

pub use outcome::{Difference, Failed, Outcome};
pub use player::{Options, ReplayError, replay};
pub use record::{
    Arguments, Call, Completion, DeviceCompletion, DevicePost, Event, Post, Record, RecordError,
    Remote, Sge,
};
