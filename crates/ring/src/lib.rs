//! Rings shared with a kernel driver: the mapping, the index protocol, and
//! every atomic and barrier of the data path.
//!
//! A ring is a header with two indices and an array of entries. One side
//! writes entries and moves the producer index; the other reads them and moves
//! the consumer index. Who is on the other side (here the rdma_rxe driver) is
//! untrusted: an index is masked on every read, the geometry is checked
//! against the mapping once and never read again, and no reference to an entry
//! is ever made. The meaning of entries belongs to the device crates.
//!
//! - [`order`]: the barriers, by purpose;
//! - [`Header`], [`Indices`]: the protocol on plain index values;
//! - [`Ring`]: header and entries in a [`Mapping`];
//! - [`Producer`], [`Consumer`]: the two roles that a process plays;
//! - [`IndexCheck`]: emptiness of a ring, without the consumer's lock;
//! - [`OwnerCheck`]: the same for a queue with owner bits;
//! - [`BlueFlame`]: doorbell register that also takes whole WQEs;
//! - [`DeviceWords`]: device memory mapped into the process;
//! - [`ReadOnlyMapping`]: counters and records that a device or a driver changes;
//! - [`DoorbellRecord`], [`Owner`]: words of a queue in the process's memory that
//!   synchronise it with a device;
//! - [`write_pair`], [`copy_short`]: how entries are written;
//! - [`Outstanding`]: identifiers of outstanding work requests;
//! - [`BiasedLock`]: lock of a shared queue, nearly free for a thread that uses it
//!   alone; [`SpinLock`] below it;
//! - [`Sequences`], [`Epoch`], [`Hint`]: state that threads of one process share
//!   about a queue;
//! - [`copy`]: copies from and to memory that others access;
//! - [`FrameSender`], [`FrameReceiver`]: frames from one process to another;
//!   [`FrameProducer`], [`FrameConsumer`]: their indices;
//! - [`Sleeper`]: whether a thread that looks for doorbells sleeps;
//! - [`cold_path`]: hint that a branch is unlikely.

mod asymmetric;
mod biased;
#[cfg(not(loom))]
mod blue_flame;
mod consumer;
#[cfg(not(loom))]
pub mod copy;
#[cfg(not(loom))]
mod device_words;
mod frame_index;
#[cfg(not(loom))]
mod frame_ring;
mod header;
mod hint;
mod index_check;
mod lock;
#[cfg(not(loom))]
mod mapping;
pub mod order;
mod outstanding;
mod owner_check;
mod pair;
mod primitive;
mod producer;
#[cfg(not(loom))]
mod read_only_mapping;
mod record;
#[cfg(not(loom))]
mod ring;
mod sequence;
mod short;
mod sleeper;
mod thread;

pub use biased::BiasedLock;
#[cfg(not(loom))]
pub use blue_flame::BlueFlame;
pub use consumer::{Consumer, Span};
#[cfg(not(loom))]
pub use device_words::DeviceWords;
pub use frame_index::{FrameConsumer, FrameHeader, FrameProducer, ProtocolViolation};
#[cfg(not(loom))]
pub use frame_ring::{FrameReceiver, FrameSender};
pub use header::{Header, Indices};
pub use hint::cold_path;
pub use index_check::IndexCheck;
pub use lock::SpinLock;
#[cfg(not(loom))]
pub use mapping::{Mapping, Retired};
pub use outstanding::{Outstanding, OutstandingRequest, OutstandingSlots};
pub use owner_check::OwnerCheck;
pub use pair::write_pair;
pub use producer::Producer;
#[cfg(not(loom))]
pub use read_only_mapping::ReadOnlyMapping;
pub use record::{DoorbellRecord, Owner};
#[cfg(not(loom))]
pub use ring::{GeometryError, Ring, Slots};
pub use sequence::{Epoch, Hint, Sequences};
pub use short::{SHORT, copy_short};
pub use sleeper::Sleeper;
