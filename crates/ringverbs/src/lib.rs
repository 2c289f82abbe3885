//! RDMA verbs in Rust, without a C library.
//!
//! ```text
//! devices() ─► Device ─► Context ─► ProtectionDomain ─► Region ─► Buffer
//!                           │              └──────────► QueuePair ─── posts Buffers
//!                           └─► CompletionQueue ◄──────────┘     ─── returns Buffers
//! ```
//!
//! The crate calls the kernel directly (ioctl on the uverbs device). The data path
//! is in userspace: posting and polling do not allocate, and make no system call if
//! the device does not require one. There are three exceptions: a bind of a memory
//! window allocates a record, the first completion of a queue pair may enlarge its
//! completion queue's table of queue pairs, and a loop of empty polls of an embedded
//! device sleeps.
//!
//! **Safe by ownership.** A posted operation owns its memory until its completion
//! is read or its queue pair is destroyed. Handles can be dropped or forgotten in
//! any order: each keeps alive the objects that it depends on.
//!
//! Misuse does not compile. For example, a buffer in flight cannot be accessed:
//!
//! ```compile_fail,E0382
//! # fn f(qp: &mut ringverbs::QueuePair, mut buffer: ringverbs::Buffer) {
//! qp.send(buffer, 1).unwrap();
//! buffer[0] = 1;
//! # }
//! ```
//!
//! `docs/internals/soundness.md` lists all guarantees with their tests: memory that
//! a peer may write is never a slice, a completion entry does not outlive its batch,
//! and so on. `docs/guide.md` introduces the API step by step.
//!
//! **Threads.** Control path handles (`Context`, `ProtectionDomain`,
//! [`CompletionQueueRef`]) can be used from any thread. [`CompletionQueue`] and
//! [`QueuePair`] are `Send` and have one owner at a time.
//!
//! **Dynamic connections, raw packets.** [`dynamic`] has reliable queue pairs that
//! send to any target; [`packet`] sends and receives whole Ethernet frames.
//!
//! **Async.** [`future`] has a future for each operation.

#![allow(
    clippy::result_large_err,
    reason = "the error returns the handle that could not be closed, off the data path"
)]

mod ah;
mod async_event;
mod channel;
#[cfg(feature = "embedded")]
pub mod check;
pub mod cm;
pub mod completion;
mod context;
mod data;
mod device;
pub mod dynamic;
mod error;
pub mod future;
pub mod handshake;
mod inflight;
mod memory;
mod mw;
mod operation;
pub mod packet;
mod pd;
pub mod qp;
pub mod query;
pub mod raw;
mod remote_memory;
mod route_header;
#[cfg(feature = "serde")]
mod serialize;
mod srq;
pub mod stream;
pub mod tcp;

pub use ah::AddressHandle;
pub use async_event::{AsyncEvent, AsyncEventType, AsyncEvents, EventSource};
pub use channel::{ChannelEvent, CompletionChannel};
pub use completion::{
    Completion, CompletionQueue, CompletionQueueBuilder, CompletionQueueRef, Cursor, CursorEntry,
    Failure, SharedCompletionQueue, Status, Success,
};
pub use context::{Context, Device, devices};
pub use data::{Inline, Payload, Sink, Source};
pub use error::{CloseError, Error, Result};
pub use memory::{
    Advisable, Buffer, BufferPool, ForeignRegion, MemorySlice, PoolBuffer, Region, Registration,
    RemoteRegion, SharedBuffer,
};
pub use mw::{MemoryWindow, WindowType};
pub use operation::{Operation, RemoteAddr};
pub use packet::{Frame, PacketQueue};
pub use pd::ProtectionDomain;
pub use qp::{
    BatchError, ConnectOptions, Endpoint, FlushRange, FlushTo, LocalAddress, PortAddress,
    PostError, QueuePair, Transport, WorkRequest,
};
pub use query::{Gid, GidEntry};
pub use remote_memory::RemoteMemory;
pub use srq::{SharedReceiveQueue, SharedReceiveQueueBuilder};

pub use uverbs::{AccessFlags, Advice, AdviseFlags, AhAttr, GlobalRoute};
// Kernel commands that take an object's handle are not exported: they would change
// an object without its owner's knowledge.
pub use uverbs::{Command, Errno, Error as KernelError};

/// Compiles the guide's snippets as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide.md")]
struct Guide;

/// Compiles the snippets of the page on futures.
#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../../../docs/async.md")]
struct Async;
