//! Queue pairs: the kernel object and its mapped queues.

use uverbs::{ContextRef, PostSendDoorbell, Qp, QpInit};

use crate::abi::{self, CreateQpResp};
use crate::map::map_ring;
use crate::{CreateError, RecvQueue, SendQueue};

/// A queue pair. The parts are public so that the caller
/// can put each under its own lock or owner.
///
/// The kernel object is destroyed before the queues are unmapped.
#[derive(Debug)]
pub struct QueuePair<C: ContextRef> {
    /// The kernel object.
    pub object: Qp<C>,
    /// The send queue.
    pub send: SendQueue,
    /// The receive queue; none with a shared receive queue.
    pub recv: Option<RecvQueue>,
    /// The doorbell of the send queue.
    pub doorbell: PostSendDoorbell<C>,
}

impl<C: ContextRef> QueuePair<C> {
    /// Creates a queue pair and maps its queues. Its capacities are
    /// `object.cap()`, at least the requested ones.
    ///
    /// # Errors
    /// Those of CREATE_QP and of mapping; nothing is left behind.
    pub fn create(context: &C, init: &QpInit) -> Result<Self, CreateError> {
        let mut response = CreateQpResp::default();
        let object = Qp::create(context, init, abi::response(&mut response))?;
        let cap = object.cap();
        let recv = match init.srq {
            Some(_) => None,
            None => {
                let ring = map_ring(
                    context,
                    &response.recv,
                    RecvQueue::ENTRY_SIZE,
                    "receive queue",
                )?;
                Some(RecvQueue::new(ring, cap.max_recv_sge))
            }
        };
        let ring = map_ring(context, &response.send, SendQueue::ENTRY_SIZE, "send queue")?;
        Ok(Self {
            send: SendQueue::new(ring, cap.max_send_sge, cap.max_inline_data),
            recv,
            doorbell: PostSendDoorbell::new(context, object.handle()),
            object,
        })
    }
}
