//! rdma_rxe's objects: the kernel makes the queues, and they are mapped.

use uverbs::{CqInit, PdHandle, PostError, QpInit, SendWr, SrqInit};

use super::{
    Address, AddressHandle, Attachment, CompletionQueue, CompletionRing, QueuePair, RecvQueue,
    SharedReceiveQueue, SharedRecvQueue,
};
use crate::context::Ctx;
use crate::error::{Error, Result};

/// A send queue with its doorbell.
#[derive(Debug)]
pub(crate) struct SendQueue {
    queue: ::rxe::SendQueue,
    doorbell: Doorbell,
    max_inline: u32,
}

/// Tells the kernel of posted work requests.
#[derive(Debug)]
enum Doorbell {
    /// A system call of the real kernel.
    Direct(::rxe::DirectDoorbell),
    /// The same of any kernel.
    Kernel(::rxe::Doorbell<Ctx>),
}

impl SendQueue {
    #[inline(always)]
    pub fn begin(&mut self) {
        self.queue.abort();
    }

    /// # Safety
    /// Inline data is readable.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.push(wr) }
    }

    /// # Safety
    /// As of the device crate's.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        if !unsafe { self.queue.publish() } {
            return Ok(());
        }
        let rung = match &self.doorbell {
            Doorbell::Direct(doorbell) => doorbell.ring().map_err(|refused| refused.errno()),
            Doorbell::Kernel(doorbell) => doorbell.ring(),
        };
        rung.map_err(|errno| Error::Doorbell { errno: errno.raw() })
    }

    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    #[inline(always)]
    pub fn max_sge(&self) -> u32 {
        self.queue.max_sge()
    }

    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }
}

pub(super) fn queue_pair(context: &Ctx, init: &QpInit) -> Result<QueuePair> {
    let made = ::rxe::QueuePair::create(context, init)?;
    // SAFETY: the queue pair, and so its doorbell, does not outlive the
    // context that it keeps.
    let direct = unsafe { made.doorbell.direct() };
    let cap = made.object.cap();
    Ok(QueuePair {
        object: made.object,
        send: super::SendQueue::Rxe(SendQueue {
            queue: made.send,
            doorbell: match direct {
                Some(direct) => Doorbell::Direct(direct),
                None => Doorbell::Kernel(made.doorbell),
            },
            max_inline: cap.max_inline_data,
        }),
        recv: made.recv.map(RecvQueue::Rxe),
        cap,
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
        address: Address::Rxe(made.ah_num),
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
