//! The data path without ownership tracking, with no cost beyond the device's queues.
//!
//! The halves of a queue pair give access to their queues ([`SendHalf::raw`],
//! [`RecvHalf::raw`]), and a completion queue is read by
//! [`CompletionQueue::poll_raw`]. The caller chooses work request identifiers and is
//! responsible for the memory, so publishing is `unsafe`.
//!
//! A send work request is a value, [`SendRequest`], which is pushed to the queue
//! and published:
//!
//! ```no_run
//! # unsafe fn f(half: &mut ringverbs::qp::SendHalf, sge: ringverbs::raw::Sge,
//! #     there: ringverbs::RemoteAddr) -> Result<(), ringverbs::Error> {
//! use ringverbs::raw::{Flags, SendRequest};
//! let mut queue = half.raw();
//! let write = SendRequest::write(1, there).immediate(7).flags(Flags::SIGNALED);
//! queue.push(&write.sges(&[sge]))?;
//! // SAFETY: the memory of `sge` stays until the completion of 1 is read.
//! unsafe { queue.publish()? };
//! # Ok(()) }
//! ```
//!
//! Operands are arguments of the operation's constructor, so leaving one out does
//! not compile:
//!
//! ```compile_fail,E0061
//! use ringverbs::raw::SendRequest;
//! let write = SendRequest::write(1);
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
pub use send::{SendQueue, SendRequest, WindowBind};

use crate::memory::{Buffer, MemorySlice};

/// Flags of a send work request. `INLINE` is ignored: see
/// [`SendRequest::inline`].
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
