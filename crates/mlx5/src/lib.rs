//! ConnectX (mlx5): the format of its queues, and the data path.
//!
//! - [`DeviceContext`]: the driver's answers, and the device's UARs;
//! - [`SendQueue`], [`RecvQueue`], [`SharedQueue`]: writers of work requests;
//! - [`CqeRing`]: the reader of work completions;
//! - [`QueuePair`], [`SharedReceiveQueue`], [`CompletionQueue`],
//!   [`AddressHandle`]: the kernel objects with their queues;
//! - [`Clock`], [`WallClock`]: the device's clock, and its wall clock time;
//! - [`DeviceMemory`]: memory on the device;
//! - `abi`: the layout of entries; that of driver data is the crate `mlx5_abi`.
//!
//! The queues are the process's own memory. An RDMA write: [`SendQueue::push`]
//! encodes a [`SendWr`] in place, [`SendQueue::publish`] writes the doorbell
//! record and the UAR
//! (`ring`); its completion names a user index and a slot, from which
//! [`CqeRing::poll`] finds the work request's identifier.
//!
//! CQEs are untrusted: numbers are looked up or masked, unknown ones are typed
//! errors.

mod abi;
mod ah;
mod allocated_uars;
mod arming;
mod clock;
pub mod commands;
mod context;
mod cq;
mod cq_clean;
mod cq_ring;
mod cqe;
mod cursor;
mod direct;
mod dm;
mod error;
mod flow;
#[cfg(any(test, feature = "fake"))]
pub mod hostile;
pub mod ioctl;
mod memory;
mod operation;
mod plan;
mod protection;
mod qp;
mod qp_queues;
mod qp_table;
mod recv;
mod send;
mod session;
mod shared;
mod srq;
mod tags;
#[cfg(test)]
mod tests;
mod uar;
mod wc;
mod wq;

pub use ah::{Address, AddressHandle, Link};
pub use allocated_uars::{DirectUar, ThreadUar};
pub use arming::Arming;
pub use clock::{Clock, WallClock};
pub use context::{DeviceContext, Devx, Features, Limits};
pub use cq::{CompletionQueue, CqOptions, MiniFormat};
pub use cq_ring::{CqeRing, EmptyCheck};
pub use cqe::{CompletionSink, TimedCompletion};
pub use cursor::CursorEntry;
pub use direct::{DirectRegister, DirectRing};
pub use dm::{CopyError, DeviceBytes, DeviceMemory};
pub use error::{CompletionError, CreateError};
pub use flow::create_flow;
pub use memory::{CustomMemory, CustomRecordPages, Purpose, QueueAllocator};
pub use mlx5_abi::{ClockInfo, FlowCountersDesc as CounterPoint};
pub use operation::Service;
pub use plan::KeyChanges;
pub use protection::{
    BlockSignature, BlockSize, CrcKind, CryptoEngine, Encryption, Escape, KeyProtection,
    ProtectedKeys, Signature, SignatureDomain, SignatureError, SignatureField, T10Dif,
};
pub use qp::{
    DcType, DciStreams, PacketObjects, PacketOptions, QpChanges, QpOptions, QueuePair, TsoLimits,
    alloc_pd, find_pd, modify_dct, modify_qp,
};
pub use qp_queues::{QpQueues, Role};
pub use recv::RecvQueue;
pub use send::{
    Interleaved, KeyLayout, LONGEST_WINDOW, LayoutChange, MAX_SEGMENT, OpenWqe, SendQueue,
};
pub use shared::{LockedQueue, SharedQueue, SrqEntries};
pub use srq::SharedReceiveQueue;
pub use tags::{TagChange, TagOperation};
/// What all devices share.
pub use uverbs::{
    Bind, Data, Destination, MwType, Opcode, Operands, PostError, RemoteMemory, SendFlags, SendWr,
    Sge, WorkCompletion,
};
pub use wq::{MAX_HASH_KEY, PacketHash, Strides, WorkQueue, modify_wq};
