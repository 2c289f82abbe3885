//! Objects of rdma_rxe, whose queues are allocated by the kernel and mapped.

use ring::{IndexCheck, Retired, Span};
use uverbs::{
    Cq, CqInit, Data, PdHandle, PostError, QpCap, QpInit, Sge, Srq, SrqInit, SrqModify, Udata,
};

use super::send::addressed;
use super::{
    Address, AddressHandle, CompletionQueue, Entry, Membership, QpResources, QueuePair, SendWr,
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

/// Notifies the kernel of posted work requests.
#[derive(Debug)]
enum Doorbell {
    /// A system call to the real kernel.
    Direct(::rxe::DirectDoorbell),
    /// A command to any kernel.
    Kernel(::rxe::Doorbell<Ctx>),
}

impl SendQueue {
    #[inline]
    pub fn begin(&mut self) {
        self.queue.begin();
    }

    /// # Safety
    /// Inline data is readable.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_>, data: Data<'_>) -> Result<(), PostError> {
        // SAFETY: the caller's obligation.
        if unsafe { self.queue.push_fast(wr, data) } {
            return Ok(());
        }
        let wr = addressed(wr, data, |address| match address {
            Address::Rxe(number) => Some(number),
            _ => None,
        })?;
        // SAFETY: the caller's obligation.
        unsafe { self.queue.push_slow(&wr) }
    }

    /// # Safety
    /// As for the device crate's function.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        if !unsafe { self.queue.publish() } {
            return Ok(());
        }
        let result = match &self.doorbell {
            Doorbell::Direct(doorbell) => doorbell.ring().map_err(|refused| refused.errno()),
            Doorbell::Kernel(doorbell) => doorbell.ring(),
        };
        result.map_err(|errno| Error::Doorbell { errno: errno.raw() })
    }

    pub fn abort(&mut self) {
        self.queue.abort();
    }

    /// The kernel has reset the indices of its ring.
    pub fn reset(&mut self) {}

    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    #[inline]
    pub fn max_sge(&self) -> u32 {
        self.queue.max_sge()
    }

    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }
}

/// A mapped completion queue.
#[derive(Debug)]
pub(crate) struct RxeCompletions {
    ring: ::rxe::WcRing,
    index_check: IndexCheck,
    /// Mappings that a resize has replaced.
    retired: Vec<Retired>,
}

impl RxeCompletions {
    #[inline]
    pub fn available(&mut self, _report: bool) -> Span {
        self.ring.available()
    }

    pub fn unreleased(&self) -> Span {
        self.ring.available()
    }

    #[inline]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        let at = self.ring.entry(span).as_ptr();
        // SAFETY: an entry of the ring, which stays mapped while `self` is borrowed.
        unsafe { Entry::new(at) }
    }

    /// # Safety
    /// As for the device crate's function: the span is from this ring, and valid.
    #[inline]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        // SAFETY: the caller's obligation.
        let at = unsafe { self.ring.entry_inside(span) }.as_ptr();
        // SAFETY: as in `entry`.
        unsafe { Entry::new(at) }
    }

    #[inline]
    pub fn limit(&self, span: &mut Span, max: usize) -> usize {
        let indices = self.ring.consumer().indices();
        if max == 1 {
            // Avoids the shifts of `distance`, which cost more than the rest.
            span.end = indices.next(span.at);
            return 1;
        }
        let count = indices.distance(span.at, span.end).min(max);
        span.end = indices.advance(span.at, count);
        count
    }

    #[inline]
    pub fn advance(&self, span: &mut Span) {
        span.at = self.ring.consumer().indices().next(span.at);
    }

    #[inline]
    pub fn release(&mut self, span: &Span) {
        self.ring.consumer().release(span.at);
    }

    pub fn arm_and_check(&mut self, object: &Cq<Ctx>, solicited_only: bool) -> Result<bool> {
        (self.ring.consumer()).arm_and_check(|| Ok(object.req_notify(solicited_only)?))
    }

    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    pub fn resize(&mut self, object: &Cq<Ctx>, cqe: u32) -> Result<u32> {
        let (ring, retired) = (&mut self.ring, &mut self.retired);
        Ok(::rxe::CompletionQueue::resize(
            object,
            ring,
            &self.index_check,
            retired,
            cqe,
        )?)
    }
}

/// A receive queue, of a queue pair or shared.
#[derive(Debug)]
pub(crate) struct RecvQueue(::rxe::RecvQueue);

impl RecvQueue {
    #[inline]
    pub fn begin(&mut self) {
        self.0.begin();
    }

    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        self.0.push(wr_id, list)
    }

    /// # Safety
    /// As for the device crate's function.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { self.0.publish() };
    }

    /// The kernel has reset the indices of its ring.
    pub fn reset(&mut self) {}

    pub fn capacity(&self) -> u32 {
        self.0.capacity()
    }

    pub fn max_sge(&self) -> u32 {
        self.0.max_sge()
    }

    pub fn modify(&mut self, object: &Srq<Ctx>, change: &SrqModify) -> Result<()> {
        let queue = &mut self.0;
        Ok(::rxe::SharedReceiveQueue::modify(object, queue, change)?)
    }
}

/// The provider; it has no state.
pub(crate) struct Provider;

impl Provider {
    pub fn alloc_pd(&self, context: &Ctx) -> Result<PdHandle> {
        Ok(uverbs::pd::alloc(context, Udata::none())?)
    }

    pub fn operations(&self) -> u32 {
        u32::MAX
    }

    pub fn max_window_length(&self) -> u64 {
        u64::MAX
    }

    pub fn capacities(&self, _created: QpCap) -> Option<QpCap> {
        None
    }

    pub fn event_read(&self, _queue: u64) {}

    pub fn queue_pair(
        &self,
        context: &Ctx,
        init: &QpInit,
        resources: &QpResources<'_>,
    ) -> Result<QueuePair> {
        let lacks = match (resources.packets, resources.dynamic) {
            (Some(_), _) => Some("raw packets"),
            (_, Some(_)) => Some("dynamic connections"),
            (None, None) => None,
        };
        if let Some(what) = lacks {
            return Err(Error::Unsupported { what });
        }
        let created = ::rxe::QueuePair::create(context, init)?;
        // SAFETY: the queue pair holds the context, so the doorbell does not outlive it.
        let direct = unsafe { created.doorbell.direct() };
        let cap = created.object.cap();
        Ok(QueuePair {
            object: created.object,
            send: super::SendQueue::Rxe(SendQueue {
                queue: created.send,
                doorbell: match direct {
                    Some(direct) => Doorbell::Direct(direct),
                    None => Doorbell::Kernel(created.doorbell),
                },
                max_inline: cap.max_inline_data,
            }),
            recv: created
                .recv
                .map(|queue| super::RecvQueue::Rxe(RecvQueue(queue))),
            cap,
            membership: Membership(None),
        })
    }

    pub fn completion_queue(
        &self,
        context: &Ctx,
        init: &CqInit,
        has_timestamps: bool,
    ) -> Result<CompletionQueue> {
        if has_timestamps {
            return Err(Error::Unsupported {
                what: "timestamps of completions",
            });
        }
        let created = ::rxe::CompletionQueue::create(context, init)?;
        Ok(CompletionQueue {
            object: created.object,
            ring: super::DeviceCompletions::Rxe(RxeCompletions {
                ring: created.ring,
                index_check: created.index_check,
                retired: Vec::new(),
            }),
            members: None,
        })
    }

    pub fn shared_receive_queue(
        &self,
        context: &Ctx,
        init: &SrqInit,
    ) -> Result<SharedReceiveQueue> {
        let created = ::rxe::SharedReceiveQueue::create(context, init)?;
        Ok(SharedReceiveQueue {
            object: created.object,
            recv: SharedRecvQueue::Rxe(RecvQueue(created.recv)),
            entries: None,
        })
    }

    pub fn address_handle(
        &self,
        context: &Ctx,
        pd: PdHandle,
        attr: &uverbs::AhAttr,
    ) -> Result<AddressHandle> {
        let created = ::rxe::AddressHandle::create(context, pd, attr, 0)?;
        Ok(AddressHandle {
            object: Some(created.object),
            address: Address::Rxe(created.ah_num),
        })
    }
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
