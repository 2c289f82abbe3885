//! rdma_rxe's objects: the kernel makes the queues, and they are mapped.

use uverbs::{CqInit, PdHandle, QpInit, SrqInit};

use super::{
    AddressHandle, Attachment, CompletionQueue, CompletionRing, Doorbell, QueuePair, RecvQueue,
    SendQueue, SharedReceiveQueue, SharedRecvQueue,
};
use crate::context::Ctx;
use crate::error::{Error, Result};

pub(super) fn queue_pair(context: &Ctx, init: &QpInit) -> Result<QueuePair> {
    let made = ::rxe::QueuePair::create(context, init)?;
    // SAFETY: the queue pair, and so its doorbell, does not outlive the
    // context that it keeps.
    let direct = unsafe { made.doorbell.direct() };
    Ok(QueuePair {
        cap: made.object.cap(),
        object: made.object,
        send: SendQueue(made.send),
        recv: made.recv.map(RecvQueue::Rxe),
        doorbell: match direct {
            Some(direct) => Doorbell::Direct(direct),
            None => Doorbell::Kernel(made.doorbell),
        },
        attachment: Attachment(None),
    })
}

pub(super) fn completion_queue(context: &Ctx, init: &CqInit) -> Result<CompletionQueue> {
    let made = ::rxe::CompletionQueue::create(context, init)?;
    Ok(CompletionQueue {
        object: made.object,
        ring: CompletionRing::new(made.ring, None),
        peek: made.peek,
        completers: None,
    })
}

pub(super) fn shared_receive_queue(context: &Ctx, init: &SrqInit) -> Result<SharedReceiveQueue> {
    let made = ::rxe::SharedReceiveQueue::create(context, init)?;
    Ok(SharedReceiveQueue {
        object: made.object,
        recv: SharedRecvQueue::Rxe(made.recv),
        work: None,
    })
}

pub(super) fn address_handle(
    context: &Ctx,
    pd: PdHandle,
    attr: &uverbs::AhAttr,
) -> Result<AddressHandle> {
    let made = ::rxe::AddressHandle::create(context, pd, attr, 0)?;
    Ok(AddressHandle {
        object: Some(made.object),
        number: made.ah_num,
        place: None,
    })
}

impl From<::rxe::CreateError> for Error {
    fn from(error: ::rxe::CreateError) -> Self {
        use ::rxe::CreateError;
        match error {
            CreateError::Command(error) => Self::Kernel(error),
            CreateError::Map { queue, error } => Self::Map { what: queue, error },
            CreateError::Geometry { queue, error } => Self::Driver {
                what: queue,
                message: error.to_string(),
            },
            CreateError::NoMemory => Self::NoMemory,
            CreateError::NoAddressHandleNumber => Self::Unsupported {
                what: "address handles by number; rdma_rxe of Linux 6.1 or later has them",
            },
            other => Self::Driver {
                what: "driver",
                message: other.to_string(),
            },
        }
    }
}
