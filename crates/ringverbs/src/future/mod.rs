//! A future for each operation.
//!
//! ```no_run
//! # async fn f(domain: ringverbs::ProtectionDomain, there: ringverbs::RemoteAddr)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! use ringverbs::Transport;
//! use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
//!
//! let queue = domain.context().completion_queue().entries(256);
//! # #[cfg(feature = "tokio")]
//! let cq = AsyncCompletionQueue::spawn(queue)?;
//! # #[cfg(not(feature = "tokio"))]
//! # let (cq, _) = AsyncCompletionQueue::new(queue)?;
//! let qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
//! let qp = AsyncQueuePair::new(qp, &cq).map_err(|(_, error)| error)?;
//! // ... connect ...
//! let buffer = domain.alloc(4096)?.into_buffer();
//! let buffer = qp.write(buffer, there).await?;
//! let message = qp.receive(buffer).await?;
//! println!("{} bytes", message.data.len());
//! # Ok(()) }
//! ```
//!
//! **Operations start immediately.** A method of [`AsyncQueuePair`] posts at once, in the
//! order of the calls, and returns a future that completes with the operation and returns
//! the memory: on success, or in an [`OperationError`].
//!
//! **Dropping a future frees nothing in flight.** The operation continues; its memory is
//! released, or returned to its pool, when its completion arrives. A message whose future
//! was dropped goes to the next future: see [`AsyncQueuePair::receive`].
//!
//! **Reading completions.** Polling any future reads the completion queue, and delivers the
//! completions to all futures. While the queue is empty, tasks sleep and a [`Driver`] waits
//! for the queue's file descriptor: a tokio task ([`AsyncCompletionQueue::spawn`]), a task
//! of another executor, or a thread. One driver serves any number of queue pairs. Without a
//! driver, or after it was dropped with its runtime, waiting tasks are polled repeatedly.
//!
//! **Threads.** All types here are `Send` and `Sync`: any number of tasks may use a queue
//! pair, and futures may be moved between threads.
//!
//! **Cost.** Posting takes two locks, a completion one lock, and polling its future one lock.
//! Memory is allocated only if more operations have futures than the queue pair was built
//! for, or the send queue is full.

#![forbid(unsafe_code)]

mod error;
#[cfg(feature = "tokio")]
mod on_tokio;
mod operation;
mod queue;
mod queue_pair;
mod slots;

pub use error::{Cause, OperationError};
pub use operation::{Message, Operation, Receive, Room};
pub use queue::{AsyncCompletionQueue, Driver, Readable};
pub use queue_pair::{AsyncBatch, AsyncQueuePair};

pub use crate::data::Owned;
