//! Objects of ConnectX, whose queues are in the process's memory.

mod completion;
mod members;

use std::sync::Arc;

use ::mlx5::{DeviceContext, KeyChanges, Link, QpOptions, Role};
use uverbs::{
    ContextInfo, CqInit, Data, PdHandle, PostError, QpCap, QpInit, QpType, Sge, Srq, SrqInit,
    SrqModify, Udata,
};

pub(crate) use completion::Mlx5Completions;
pub(crate) use members::{Members, Membership};

use members::Armings;

use super::send::{addressed, message_length};
use super::{
    Address, AddressHandle, CompletionQueue, Engine, MAX_MESSAGE, QpResources, QueuePair, SendWr,
    SharedReceiveQueue,
};
use crate::context::Ctx;
use crate::error::{Error, Result};
use crate::operation::Operation;

/// A send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    queue: Box<::mlx5::SendQueue>,
    max_inline: u32,
    engine: Engine,
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
            Address::Mlx5(address) => Some(address),
            _ => None,
        })?;
        if let Data::Sges(list) = data {
            check_length(list)?;
        }
        // SAFETY: the caller's obligation.
        unsafe { self.queue.push_slow(&wr) }
    }

    /// # Safety
    /// As for the device crate's function.
    #[inline]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.queue.publish() };
        self.engine.doorbell_rung();
        Ok(())
    }

    pub fn abort(&mut self) {
        self.queue.abort();
    }

    pub fn reset(&mut self) {
        self.queue.reset();
    }

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

/// A receive queue of a queue pair.
#[derive(Debug)]
pub(crate) struct RecvQueue(::mlx5::RecvQueue);

impl RecvQueue {
    #[inline]
    pub fn begin(&mut self) {
        self.0.begin();
    }

    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        check_length(list)?;
        self.0.push(wr_id, list)
    }

    /// # Safety
    /// As for the device crate's function.
    #[inline]
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { self.0.publish() };
    }

    pub fn reset(&mut self) {
        self.0.reset();
    }

    pub fn announce(&mut self) {
        self.0.announce();
    }

    pub fn capacity(&self) -> u32 {
        self.0.capacity()
    }

    pub fn max_sge(&self) -> u32 {
        self.0.max_sge()
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SharedRecvQueue(::mlx5::SharedQueue);

impl SharedRecvQueue {
    /// Pushed requests that were not published stay in the batch.
    pub fn begin(&mut self) {}

    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        check_length(list)?;
        self.0.locked().push(wr_id, list)
    }

    /// # Safety
    /// As for the device crate's function.
    pub unsafe fn publish(&mut self) {
        // SAFETY: the caller's obligation.
        unsafe { self.0.locked().publish() };
    }

    pub fn capacity(&self) -> u32 {
        self.0.capacity()
    }

    pub fn max_sge(&self) -> u32 {
        self.0.max_sge()
    }

    pub fn modify(&mut self, object: &Srq<Ctx>, change: &SrqModify) -> Result<()> {
        if change.max_wr.is_some() {
            return Err(Error::Unsupported {
                what: "another size of a shared receive queue",
            });
        }
        Ok(object.modify(change, Udata::none())?)
    }
}

/// Checks that a message is not longer than 2 GiB. The device crate checks each SGE, but
/// not their sum.
#[inline]
fn check_length(list: &[Sge]) -> Result<(), PostError> {
    match list {
        [_, _, ..] if message_length(list) >= MAX_MESSAGE.into() => Err(PostError::MessageTooLong),
        _ => Ok(()),
    }
}

/// An open ConnectX.
pub(crate) struct Provider {
    device: Arc<DeviceContext>,
    armings: Arc<Armings>,
}

impl Provider {
    pub fn open(context: &uverbs::Context) -> Result<(ContextInfo, Self)> {
        let (info, device) = DeviceContext::open(context)?;
        let provider = Self {
            device: Arc::new(device),
            armings: Arc::default(),
        };
        Ok((info, provider))
    }

    /// Called when an event of the completion queue with that identifier was read.
    pub fn event_read(&self, queue: u64) {
        if let Some(arming) = self.armings.lock().get(&queue) {
            arming.event();
        }
    }

    pub fn alloc_pd(&self, context: &Ctx) -> Result<PdHandle> {
        Ok(::mlx5::alloc_pd(context)?.0)
    }

    pub fn operations(&self) -> u32 {
        !(1 << Operation::AtomicWrite as u32 | 1 << Operation::Flush as u32)
    }

    pub fn max_window_length(&self) -> u64 {
        ::mlx5::LONGEST_WINDOW
    }

    pub fn capacities(&self, created: QpCap) -> Option<QpCap> {
        Some(created)
    }

    pub fn queue_pair(
        &self,
        context: &Ctx,
        init: &QpInit,
        resources: &QpResources<'_>,
    ) -> Result<QueuePair> {
        let (Some(sends), Some(receives_at)) = (resources.send, resources.recv) else {
            return Err(Error::WrongDomain {
                what: "completion queue",
            });
        };
        let shared = match resources.srq {
            None => None,
            Some(Some(entries)) => Some(Arc::clone(entries)),
            Some(None) => {
                return Err(Error::WrongDomain {
                    what: "shared receive queue",
                });
            }
        };
        // No data in CQEs: they may be read when the memory no longer belongs to the device.
        let options = QpOptions {
            keys: match resources.keys {
                true => KeyChanges::Windows,
                false => KeyChanges::None,
            },
            scatter_to_cqe: false,
            checksums: resources.packets.is_some_and(|packets| packets.checksums),
            packets: {
                let own = resources.packets.is_some_and(|packets| packets.own_frames);
                ::mlx5::PacketOptions {
                    self_loopback_unicast: own,
                    self_loopback_multicast: own,
                    ..Default::default()
                }
            },
            dc_type: resources.dynamic.map(|dynamic| match dynamic {
                super::Dynamic::Initiator => ::mlx5::DcType::Initiator { streams: None },
                super::Dynamic::Target { access_key } => ::mlx5::DcType::Target { access_key },
            }),
            ..QpOptions::default()
        };
        let device = &self.device;
        let created =
            ::mlx5::QueuePair::create_with(context, device, init, shared, &options, None, None)
                .map_err(|error| self.too_large(error, init, resources.keys))?;
        let datagram = init.qp_type == QpType::UD;
        if resources.keys && !datagram && !created.send.changes_keys() && init.cap.max_send_wr != 0
        {
            return Err(Error::Unsupported {
                what: "memory windows",
            });
        }
        let mut members = vec![(Arc::clone(sends), Role::SEND)];
        if Arc::ptr_eq(sends, receives_at) {
            members[0].1 |= Role::RECEIVE;
        } else {
            members.push((Arc::clone(receives_at), Role::RECEIVE));
        }
        Ok(QueuePair {
            object: created.object,
            send: super::SendQueue::Mlx5(SendQueue {
                queue: Box::new(created.send),
                max_inline: created.cap.max_inline_data,
                engine: resources.engine.clone(),
            }),
            recv: created
                .recv
                .map(|queue| super::RecvQueue::Mlx5(RecvQueue(queue))),
            membership: super::Membership(Some(Membership::new(members, created.queues))),
            cap: created.cap,
        })
    }

    /// Builds the error for the size of a queue pair that is too large.
    fn too_large(&self, error: ::mlx5::CreateError, init: &QpInit, keys: bool) -> Error {
        let ::mlx5::CreateError::TooLarge { what } = error else {
            return error.into();
        };
        let (cap, limits) = (&init.cap, &self.device.limits);
        let rounded = |most: u32| most.checked_ilog2().map_or(0, |log2| 1 << log2);
        // Bytes of an entry after the longest segments in front of the data.
        let room = limits.max_send_entry.saturating_sub(64) as u32;
        let elements = cap.max_send_sge.saturating_mul(16).max(cap.max_inline_data);
        let least = if keys { 3 } else { 1 };
        let blocks = elements.saturating_add(48).div_ceil(64).max(least);
        let (what, asked, allowed) = match what {
            "max_send_wr" => (
                "depth of a send queue",
                cap.max_send_wr,
                rounded(limits.max_send_blocks.min(1 << 15)) / blocks,
            ),
            "max_recv_wr" => (
                "depth of a receive queue",
                cap.max_recv_wr,
                rounded(limits.max_recv_wr),
            ),
            "max_send_sge" => ("pieces of a send", cap.max_send_sge, room / 16),
            "max_recv_sge" => (
                "pieces of a receive",
                cap.max_recv_sge,
                limits.max_recv_entry as u32 / 16,
            ),
            "max_inline_data" => ("bytes of inline data", cap.max_inline_data, room - 4),
            what => (what, u32::MAX, 0),
        };
        Error::Limit {
            what,
            asked: asked.into(),
            allowed: allowed.into(),
        }
    }

    pub fn completion_queue(
        &self,
        context: &Ctx,
        init: &CqInit,
        _timed: bool,
    ) -> Result<CompletionQueue> {
        let created = ::mlx5::CompletionQueue::create(context, &self.device, init);
        let created = created.map_err(|error| too_many_entries(error, init.cqe))?;
        let entries = created.object.cqe();
        let ring = Mlx5Completions::new(
            (created.ring, created.arming),
            entries,
            init.user_handle,
            Arc::clone(&self.device),
            &self.armings,
        );
        let members = Arc::clone(ring.members());
        Ok(CompletionQueue {
            object: created.object,
            ring: super::DeviceCompletions::Mlx5(Box::new(ring)),
            members: Some(members),
        })
    }

    pub fn shared_receive_queue(
        &self,
        context: &Ctx,
        init: &SrqInit,
    ) -> Result<SharedReceiveQueue> {
        let created = ::mlx5::SharedReceiveQueue::create(context, &self.device, init);
        let created = created.map_err(|error| match error {
            ::mlx5::CreateError::TooLarge { what: "max_sge" } => Error::Limit {
                what: "pieces of a shared receive",
                asked: init.max_sge.into(),
                allowed: (self.device.limits.max_recv_entry as u64 / 16).saturating_sub(1),
            },
            ::mlx5::CreateError::TooLarge { .. } => Error::Limit {
                what: "depth of a shared receive queue",
                asked: init.max_wr.into(),
                // One entry is never posted.
                allowed: u64::from(self.device.limits.max_srq_wr.min(1 << 15)).saturating_sub(1),
            },
            error => error.into(),
        })?;
        let entries = Arc::clone(created.recv.entries());
        Ok(SharedReceiveQueue {
            recv: super::SharedRecvQueue::Mlx5(SharedRecvQueue(created.recv)),
            object: created.object,
            entries: Some(entries),
        })
    }

    pub fn address_handle(
        &self,
        context: &Ctx,
        pd: PdHandle,
        attr: &uverbs::AhAttr,
    ) -> Result<AddressHandle> {
        let created = ::mlx5::AddressHandle::create(context, pd, attr, 0, link(context, attr)?)?;
        Ok(AddressHandle {
            object: created.object,
            address: Address::Mlx5(created.address),
        })
    }
}

pub(super) fn too_many_entries(error: ::mlx5::CreateError, asked: u32) -> Error {
    match error {
        ::mlx5::CreateError::TooLarge { .. } => Error::Limit {
            what: "entries of a completion queue",
            asked: asked.into(),
            // The format limits the number to 24 bits; the kernel knows the device's
            // own limit.
            allowed: (1 << 24) - 1,
        },
        error => error.into(),
    }
}

/// `IBV_LINK_LAYER_ETHERNET`.
const ETHERNET: u8 = 2;
/// `IBV_GID_TYPE_ROCE_V2` of the kernel's GID entries.
const ROCE_V2: u32 = 2;

/// Returns the link type of a path.
fn link(context: &Ctx, attr: &uverbs::AhAttr) -> Result<Link> {
    if context.query_port(attr.port_num)?.legacy.link_layer != ETHERNET {
        return Ok(Link::InfiniBand);
    }
    if !attr.is_global {
        return Err(Error::Invalid {
            what: "a path on Ethernet needs a global route",
        });
    }
    let index = attr.grh.sgid_index.into();
    let gid = context.query_gid_entry(attr.port_num.into(), index)?;
    Ok(Link::Ethernet {
        udp: gid.gid_type == ROCE_V2,
    })
}

impl From<::mlx5::CreateError> for Error {
    fn from(error: ::mlx5::CreateError) -> Self {
        use ::mlx5::CreateError;
        match error {
            CreateError::Command(error) => Self::Kernel(error),
            CreateError::Map { error, .. } => Self::Map {
                what: "device's registers",
                error,
            },
            CreateError::Memory { queue, error } => Self::Map { what: queue, error },
            CreateError::BadAnswer { what } => Self::Driver {
                what: "driver's answer",
                message: format!("{what} is malformed"),
            },
            CreateError::Unsupported { what } => Self::Unsupported { what },
            CreateError::NoMemory => Self::NoMemory,
            other => Self::Driver {
                what: "driver",
                message: other.to_string(),
            },
        }
    }
}
