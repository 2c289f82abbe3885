//! Rings shared with a kernel driver: the mapping, the index protocol, and
//! every atomic and barrier of the data path.
//!
//! A ring is a header with two indices and an array of entries. One side
//! writes entries and moves the producer index; the other reads them and moves
//! the consumer index. Who is on the other side (here the rdma_rxe driver) is
//! not trusted: an index is masked on every read, the geometry is checked
//! against the mapping once and never read again, and no reference to an entry
//! is ever made. What an entry means is the device crates' affair.
//!
//! - [`order`]: the barriers, by purpose;
//! - [`Header`], [`Indices`]: the protocol on plain index values;
//! - [`Ring`]: header and entries in a [`Mapping`];
//! - [`Producer`], [`Consumer`]: the two roles that a process plays;
//! - [`Peek`]: "is it empty?" without the consumer's lock;
//! - [`Glance`]: the same of a queue whose entries say whose they are;
//! - [`BlueFlame`]: a device's register that takes doorbells and whole entries;
//! - [`DeviceWords`]: a device's own memory, as far as the process sees it;
//! - [`Watched`]: counters and records that are read only, of a device or a
//!   driver that changes them;
//! - [`DoorbellRecord`], [`Owner`]: the words of a queue in the process's own
//!   memory by which it and a device keep in step;
//! - [`Outstanding`]: which work requests a device has, for the thread that
//!   posts and the one that reads completions;
//! - [`BiasedLock`]: what a shared queue is guarded with, nearly free for the
//!   thread that uses it alone; [`SpinLock`] below it;
//! - [`Sequences`], [`Epoch`], [`Hint`]: what threads of one process share
//!   beside a queue.

mod asymmetric;
mod biased;
#[cfg(not(loom))]
mod blue_flame;
mod consumer;
#[cfg(not(loom))]
mod device_words;
mod glance;
mod header;
mod lock;
#[cfg(not(loom))]
mod mapping;
pub mod order;
mod outstanding;
mod pair;
mod peek;
mod primitive;
mod producer;
mod record;
#[cfg(not(loom))]
mod ring;
mod sequence;
mod thread;
#[cfg(not(loom))]
mod watched;

pub use biased::BiasedLock;
#[cfg(not(loom))]
pub use blue_flame::BlueFlame;
pub use consumer::{Consumer, Span};
#[cfg(not(loom))]
pub use device_words::DeviceWords;
pub use glance::Glance;
pub use header::{Header, Indices};
pub use lock::SpinLock;
#[cfg(not(loom))]
pub use mapping::{Mapping, Retired};
pub use outstanding::{Found, Outstanding, OutstandingSlots};
pub use pair::write_pair;
pub use peek::Peek;
pub use producer::Producer;
pub use record::{DoorbellRecord, Owner};
#[cfg(not(loom))]
pub use ring::{GeometryError, Ring, Slots};
pub use sequence::{Epoch, Hint, Sequences};
#[cfg(not(loom))]
pub use watched::Watched;
