//! Shared receive queues: kernel objects.

use std::sync::Arc;

use mlx5_abi::{CreateSrq, CreateSrqResp};
use uverbs::{ContextRef, Srq, SrqInit, SrqKind, Udata};
use zerocopy::IntoBytes;

use crate::memory::QueueAllocator;
use crate::plan::{RecvPlan, SendPlan};
use crate::shared::{SharedQueue, SrqEntries};
use crate::{CreateError, DeviceContext, QpQueues, Service};

/// A shared receive queue. The parts are public; the queue has its own
/// lock ([`SrqEntries::lock`]).
#[derive(Debug)]
pub struct SharedReceiveQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Srq<C>,
    /// The queue.
    pub recv: SharedQueue,
    /// The SRQ number, by which XRC initiators name it.
    pub srq_num: u32,
    /// For an XRC SRQ or one with tag matching, its entry in the QP table: its receives
    /// complete to a separate completion queue, and CQEs name the SRQ instead of a queue pair.
    /// The caller attaches it before the first use, and detaches it after the queue is
    /// destroyed ([`crate::CqeRing::attach`]).
    pub xrc: Option<Arc<QpQueues>>,
}

impl<C: ContextRef> SharedReceiveQueue<C> {
    /// Creates a shared receive queue; its sizes are those of `recv`.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`]; those of memory and of CREATE_SRQ. Nothing is left behind.
    pub fn create(
        context: &C,
        device: &DeviceContext,
        init: &SrqInit,
    ) -> Result<Self, CreateError> {
        Self::create_with(context, device, init, None)
    }

    /// As [`SharedReceiveQueue::create`], in the `allocator`'s memory, if that has
    /// any.
    ///
    /// # Errors
    /// As there.
    pub fn create_with(
        context: &C,
        device: &DeviceContext,
        init: &SrqInit,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        let entries = SrqEntries::new(init.max_wr, init.max_sge, &device.limits, allocator)?;
        let entries = Arc::new(match init.kind {
            SrqKind::TagMatching { max_num_tags, .. } => entries.with_tags(max_num_tags)?,
            _ => entries,
        });
        // Polling treats it as a queue pair with only receives of a shared queue.
        let xrc = match init.kind {
            SrqKind::Xrc { .. } | SrqKind::TagMatching { .. } => Some(Arc::new(QpQueues::new(
                device.user_index()?,
                Service::Target,
                SendPlan::default(),
                RecvPlan::default(),
                Some(Arc::clone(&entries)),
                None,
            )?)),
            _ => None,
        };
        let request = CreateSrq {
            uidx: xrc.as_ref().map_or(0, |xrc| xrc.user_index()),
            buf_addr: entries.memory().entries.address(),
            db_addr: entries.memory().records.address(),
            ..CreateSrq::default()
        };
        let mut answer = CreateSrqResp::default();
        let init = SrqInit {
            // The driver computes the memory's size from these, as above.
            max_wr: entries.capacity(),
            max_sge: entries.max_sge(),
            ..*init
        };
        // SAFETY: the addresses are those of the queue's memory, which has that
        // many entries and two doorbell records, and is held for the object.
        let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
        let object = Srq::create(context, &init, udata)?;
        entries.memory().hold_for(&object.existence());
        Ok(Self {
            object,
            recv: SharedQueue::new(entries),
            srq_num: answer.srqn,
            xrc,
        })
    }
}
