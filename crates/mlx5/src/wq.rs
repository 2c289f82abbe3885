//! Work queues: receive queues that an indirection table names, and queue pairs whose
//! packets they receive.

use std::sync::Arc;

use mlx5_abi::{CREATE_WQ_STRIDES, CreateQpResp, CreateQpRss, CreateWq, ModifyWq};
use uverbs::{ContextRef, Qp, QpCap, QpInit, Udata, Wq, WqChange, WqInit};
use zerocopy::IntoBytes;

use crate::memory::{Purpose, QueueAllocator};
use crate::plan::{RecvPlan, SendPlan};
use crate::qp::{PacketObjects, PacketOptions};
use crate::{CreateError, DeviceContext, QpQueues, QueuePair, RecvQueue, Service};

/// Bytes of the longest key of a hash.
pub const MAX_HASH_KEY: usize = 128;

/// How the device chooses the work queue of a packet: by a hash of header fields.
#[derive(Clone, Copy, Debug, Default)]
pub struct PacketHash<'a> {
    /// The function (`enum ibv_rx_hash_function_flags`).
    pub function: u8,
    /// The fields (`enum ibv_rx_hash_fields`); none: all packets go to the first queue.
    pub fields: u64,
    /// The function's key, of at most [`MAX_HASH_KEY`] bytes.
    pub key: &'a [u8],
}

/// Strides of a work queue: each receive takes several packets, one after the other.
/// The program posts receives and reads completions itself ([`QpQueues`] tells where): a
/// receive begins with 16 bytes that are zero, a completion names the receive and the
/// stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Binary logarithm of a stride's bytes.
    pub log_bytes: u32,
    /// Binary logarithm of a receive's strides.
    pub log_count: u32,
    /// Two bytes are left before each packet.
    pub shift: bool,
}

/// A work queue. The parts are public so that the caller can put each under its own lock
/// or owner.
///
/// The caller attaches `queues` to the completion queue before the first use, and detaches
/// it after the queue is destroyed ([`crate::CqeRing::attach`]). The kernel object is
/// destroyed before the queue's memory is freed.
#[derive(Debug)]
pub struct WorkQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Wq<C>,
    /// The queue.
    pub recv: RecvQueue,
    /// The entry in the QP table.
    pub queues: Arc<QpQueues>,
}

impl<C: ContextRef> WorkQueue<C> {
    /// Creates a work queue. Its sizes are those of `recv`, at least the requested ones.
    /// With `checksums` its completions tell whether those of the packet are right. With
    /// `strides` only the program itself can use it. Its memory is the `allocator`'s, if that has any.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`], also for no receives; those of memory and of WQ_CREATE.
    /// Nothing is left behind.
    pub fn create(
        context: &C,
        device: &DeviceContext,
        init: &WqInit,
        checksums: bool,
        strides: Option<Strides>,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        if init.max_wr == 0 {
            return Err(CreateError::TooLarge { what: "max_wr" });
        }
        let cap = QpCap {
            max_recv_wr: init.max_wr,
            // The first 16 bytes of a receive with strides are as long as an element.
            max_recv_sge: match strides {
                None => init.max_sge,
                Some(_) => init.max_sge.max(1).saturating_add(1),
            },
            ..QpCap::default()
        };
        let recv = RecvPlan::new(&cap, &device.limits)?;
        let index = device.user_index()?;
        let send = SendPlan::default();
        let allocator = allocator.map(|allocator| (Purpose::WorkQueue, allocator));
        let mut queues = QpQueues::new(index, Service::Packet, send, recv, None, allocator)?;
        // Nothing is received before the queue is ready, which is when it is announced.
        queues.unannounced = None;
        queues.scatter_to_cqe = false;
        queues.set_checksums(checksums);
        let queues = Arc::new(queues);
        let request = CreateWq {
            buf_addr: queues.memory.entries.address(),
            db_addr: queues.memory.records.address(),
            rq_wqe_count: recv.entries,
            rq_wqe_shift: recv.shift,
            user_index: queues.user_index(),
            ..CreateWq::default()
        };
        let request = match strides {
            None => request,
            Some(strides) => CreateWq {
                comp_mask: CREATE_WQ_STRIDES,
                single_stride_log_num_of_bytes: strides.log_bytes,
                single_wqe_log_num_of_strides: strides.log_count,
                two_byte_shift_en: strides.shift.into(),
                ..request
            },
        };
        // SAFETY: the addresses are those of the queue's memory, which has that many
        // entries and two doorbell records, and is held for the object.
        let udata = unsafe { Udata::new(request.as_bytes(), &mut []) };
        let object = Wq::create(context, init, udata)?;
        queues.memory.hold_for(&object.existence());
        Ok(Self {
            object,
            recv: RecvQueue::new(Arc::clone(&queues)),
            queues,
        })
    }
}

/// Changes state or flags of a work queue. One that leaves [`WqState::RESET`](uverbs::WqState::RESET) is emptied
/// by the caller before ([`RecvQueue::reset`], [`crate::CqeRing::clean`]).
///
/// # Errors
/// As [`Wq::modify`].
pub fn modify_wq<C: ContextRef>(wq: &Wq<C>, change: &WqChange) -> Result<(), CreateError> {
    let request = ModifyWq::default();
    // SAFETY: it has no addresses.
    let udata = unsafe { Udata::new(request.as_bytes(), &mut []) };
    Ok(wq.modify(change, udata)?)
}

impl<C: ContextRef> QueuePair<C> {
    /// Creates a queue pair that sends nothing and whose packets the work queues of
    /// `init.table` receive.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`] for a key of more than [`MAX_HASH_KEY`] bytes; those of
    /// QP_CREATE. Nothing is left behind.
    pub fn create_rss(
        context: &C,
        device: &DeviceContext,
        init: &QpInit,
        hash: &PacketHash,
        options: PacketOptions,
    ) -> Result<Self, CreateError> {
        let mut request = CreateQpRss {
            rx_hash_fields_mask: hash.fields,
            rx_hash_function: hash.function,
            rx_key_len: hash.key.len() as u8,
            flags: options.flags(),
            ..CreateQpRss::default()
        };
        let key = request.rx_hash_key.get_mut(..hash.key.len());
        key.ok_or(CreateError::TooLarge {
            what: "the key of the hash",
        })?
        .copy_from_slice(hash.key);
        let mut answer = CreateQpResp::default();
        let mut made = Self::without_queues(context, device, || {
            // SAFETY: it has no addresses.
            let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
            Qp::create(context, init, udata)
        })?;
        made.packets = PacketObjects::from(&answer);
        Ok(made)
    }
}
