//! rdma_rxe: the format of its queues, and the data path.
//!
//! - [`SendQueue`], [`RecvQueue`]: writers of work requests;
//! - [`WcRing`]: the cursor over work completions;
//! - [`QueuePair`], [`SharedReceiveQueue`], [`CompletionQueue`],
//!   [`AddressHandle`]: the kernel objects with their mapped queues;
//! - [`inspect`]: decoding of a copy of a queue, for tools;
//! - `abi`: the layout of entries and driver responses.
//!
//! An RDMA write: [`SendQueue::push`] fills an entry in place,
//! [`SendQueue::publish`] moves the producer index (`ring`), the doorbell is
//! one system call (`uverbs`); its completion is read by
//! [`WcRing::available`] and [`WcRing::entry`].

mod abi;
mod ah;
mod cq;
mod cq_ring;
mod error;
pub mod inspect;
mod map;
mod qp;
mod recv;
mod send;
mod srq;

pub use ah::AddressHandle;
pub use cq::CompletionQueue;
pub use cq_ring::{Entry, WcRing};
pub use error::CreateError;
pub use qp::QueuePair;
pub use recv::RecvQueue;
pub use ring::Span;
pub use send::{MAX_MESSAGE, SendQueue};
pub use srq::SharedReceiveQueue;
/// What all devices share: [`WorkCompletion`] is the entry of a completion
/// queue as rxe writes it, [`Sge`] an element of its scatter lists.
pub use uverbs::{
    Bind, Data, Destination, Opcode, Operands, PostError, RemoteMemory, SendFlags, SendWr, Sge,
    WorkCompletion,
};
/// The doorbell of a send queue, a system call.
pub use uverbs::{DirectDoorbell, DoorbellError, PostSendDoorbell as Doorbell};
