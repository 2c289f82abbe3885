//! The data path without ownership tracking, at the cost of the device's writer
//! and cursor alone.
//!
//! The halves of a queue pair give access to their queues ([`SendHalf::raw`],
//! [`RecvHalf::raw`]), and a completion queue is read by
//! [`CompletionQueue::poll_raw`]. Work request identifiers are the caller's. So
//! is the responsibility for the memory, which is why publishing is `unsafe`.
//!
//! A work request is built segment by segment, in an order that the compiler
//! checks:
//!
//! ```no_run
//! # unsafe fn f(half: &mut ringverbs::qp::SendHalf, sge: ringverbs::raw::Sge,
//! #     there: ringverbs::RemoteAddr) -> Result<(), ringverbs::Error> {
//! use ringverbs::raw::{Flags, WriteImmediate};
//! let mut queue = half.raw();
//! queue
//!     .open::<WriteImmediate>(1, Flags::SIGNALED)?
//!     .immediate(7)
//!     .remote(there)
//!     .sge(sge)?
//!     .finish();
//! // SAFETY: the memory of `sge` stays until the completion of 1 is read.
//! unsafe { queue.publish()? };
//! # Ok(()) }
//! ```
//!
//! Leaving a segment out does not compile:
//!
//! ```compile_fail,E0599
//! # fn f(half: &mut ringverbs::qp::SendHalf, sge: ringverbs::raw::Sge) {
//! use ringverbs::raw::{Flags, Write};
//! let mut queue = half.raw();
//! queue.open::<Write>(1, Flags::SIGNALED).unwrap().sge(sge).unwrap().finish();
//! # }
//! ```
//!
//! [`SendHalf::raw`]: crate::qp::SendHalf::raw
//! [`RecvHalf::raw`]: crate::qp::RecvHalf::raw
//! [`CompletionQueue::poll_raw`]: crate::CompletionQueue::poll_raw

mod completion;
mod recv;
mod send;

pub use completion::Entry;
pub use recv::RecvQueue;
pub use send::{
    Atomic, AtomicWrite, BindWindow, Binding, CompareSwap, Data, FetchAdd, Flush, Immediate, Key,
    LocalInvalidate, OnlyKey, Operation, Path, Range, Read, Ready, Rebound, Remote, Send,
    SendImmediate, SendInvalidate, SendQueue, SendTo, SendToImmediate, Value, Wqe, Write,
    WriteImmediate,
};

use crate::memory::{Buffer, MemorySlice};

/// Flags of a send work request. `INLINE` is set by [`Wqe::inline`].
pub use uverbs::SendFlags as Flags;
/// A scatter/gather element: address, length in bytes, lkey.
pub use uverbs::Sge;

impl Buffer {
    /// Returns the SGE of the bytes in use, for a raw work request.
    pub fn raw_sge(&self) -> Sge {
        Sge {
            addr: self.device_addr(),
            length: self.len() as u32,
            lkey: self.memory().lkey(),
        }
    }
}

impl MemorySlice {
    /// Returns the SGE of the slice, for a raw work request.
    pub fn raw_sge(&self) -> Sge {
        Sge {
            addr: self.device_addr(),
            length: self.len() as u32,
            lkey: self.memory().lkey(),
        }
    }
}
