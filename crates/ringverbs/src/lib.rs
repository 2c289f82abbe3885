//! RDMA verbs in Rust, without a C library.
//!
//! ```text
//! devices() ─► Device ─► Context ─► ProtectionDomain ─► Region ─► Buffer
//!                           │              └──────────► QueuePair ─── posts Buffers
//!                           └─► CompletionQueue ◄──────────┘     ─── gives them back
//! ```
//!
//! The kernel is asked directly (ioctl on the uverbs device), and the data path
//! is in this process: posting and polling allocate nothing and, as far as the
//! device allows, call nothing. (But for this: a request that binds a window
//! allocates what it keeps, and the first completion of a queue pair may enlarge
//! the list of those that its completion queue has met.)
//!
//! **Safe by ownership.** A posted operation owns its memory until its
//! completion is read or its queue pair is gone. All handles can be dropped, or
//! forgotten, in any order: what they need of each other they keep.
//!
//! What must not be possible does not compile. A buffer in flight cannot be
//! touched:
//!
//! ```compile_fail,E0382
//! # fn f(qp: &mut ringverbs::QueuePair, mut buffer: ringverbs::Buffer) {
//! qp.send(buffer, 1).unwrap();
//! buffer[0] = 1;
//! # }
//! ```
//!
//! Memory that a peer may write is no slice, an entry does not outlive its
//! batch, and so on: `docs/internals/soundness.md` has all promises, and the test
//! of each.
//! `docs/guide.md` leads from nothing to a program.
//!
//! **Threads.** Handles of the control path (`Context`, `ProtectionDomain`,
//! [`CompletionQueueRef`]) are for any thread. A [`CompletionQueue`] and a [`QueuePair`] have one owner at a
//! time and are `Send`.

#![allow(
    clippy::result_large_err,
    reason = "a handle that cannot be closed is given back, and that is no hot path"
)]

mod ah;
mod async_event;
mod channel;
pub mod cm;
pub mod completion;
mod context;
mod data;
mod device;
mod error;
mod inflight;
mod memory;
mod mw;
mod operation;
mod pd;
pub mod qp;
pub mod query;
pub mod raw;
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
pub use memory::{Advisable, Buffer, ForeignRegion, MemorySlice, Region, RemoteRegion};
pub use mw::{MemoryWindow, WindowType};
pub use operation::{Operation, RemoteAddr};
pub use pd::ProtectionDomain;
pub use qp::{
    BatchError, ConnectOptions, Endpoint, FlushRange, FlushTo, LocalAddress, PortAddress,
    PostError, QueuePair, Transport, WorkRequest,
};
pub use query::{Gid, GidEntry};
pub use srq::{SharedReceiveQueue, SharedReceiveQueueBuilder};

pub use uverbs::{AccessFlags, Advice, AdviseFlags, AhAttr, GlobalRoute};
// No command of the kernel's interface by an object's number is reachable from
// here: it would change an object behind the back of its owner.
pub use uverbs::{Command, Errno, Error as KernelError};

/// The guide's snippets, compiled as examples of the documentation are.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide.md")]
struct Guide;
