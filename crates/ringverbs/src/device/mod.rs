//! Devices. The kernel's driver id selects the [`Provider`] when a context is opened; the
//! provider creates the other objects.
//!
//! - `send`, `recv`, `completion`: an enum of the devices for each type of queue; each call
//!   dispatches once
//! - `rxe`, `mlx5`: a device's objects and queues
//!
//! Types of the device crates are private to this module.

/// Evaluates an expression with the value of an enum's variant. Each device has a line here
/// and one in each enum.
macro_rules! for_device {
    ($enum:expr, $device:ident => $expression:expr) => {
        match $enum {
            Self::Rxe($device) => $expression,
            Self::Mlx5($device) => $expression,
        }
    };
}

mod completion;
mod engine;
mod mlx5;
mod recv;
mod rxe;
mod send;

use uverbs::discovery::DriverId;
use uverbs::{ContextInfo, CqInit, PdHandle, QpCap, QpInit, SrqInit, Udata};

use crate::context::Ctx;
use crate::error::Result;
use crate::operation::Operation;

pub(crate) use completion::{DeviceCompletions, Entry};
pub(crate) use engine::{Deadline, Engine};
pub(crate) use recv::{RecvQueue, SharedRecvQueue};
pub(crate) use send::{Address, SendQueue, inline_piece};
pub(crate) use uverbs::{Data as SendData, Sge, WorkCompletion};

/// Operation codes and flags of send work requests, in the kernel's numbering.
pub(crate) use uverbs::{Opcode, SendFlags};

/// A send work request.
pub(crate) type SendWr<'a> = uverbs::SendWr<'a, Address>;

/// The maximum message length: 2 GiB (IBA 9.7.7).
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The flag of a completion whose message has invalidated a key. rdma_rxe reports the
/// kernel's bit (`IB_WC_WITH_INVALIDATE`), which differs from that of the C interface
/// (`IBV_WC_WITH_INV`); it uses neither bit for anything else.
pub(crate) const FLAG_INVALIDATED: u32 = 1 << 2 | 1 << 3;

/// The provider of a context's device.
pub(crate) enum Provider {
    /// Software; the kernel owns the queues.
    Rxe(rxe::Provider),
    /// ConnectX.
    Mlx5(mlx5::Provider),
}

/// A queue pair's queues.
pub(crate) struct QueuePair {
    /// Declared before the queues: destroyed first.
    pub object: uverbs::Qp<Ctx>,
    pub send: SendQueue,
    pub recv: Option<RecvQueue>,
    pub membership: Membership,
    /// The actual capacities.
    pub cap: QpCap,
}

/// The membership of a queue pair in its completion queues, for devices whose CQEs are
/// decoded with the queue pair. It ends at the latest on drop.
#[derive(Debug)]
pub(crate) struct Membership(Option<mlx5::Membership>);

/// The resources for the creation of a queue pair.
pub(crate) struct QpResources<'a> {
    /// The members of the completion queue of sends.
    pub send: &'a Members,
    /// The members of the completion queue of receives.
    pub recv: &'a Members,
    /// The shared receive queue.
    pub srq: Option<&'a SrqEntries>,
    /// Whether its work requests may change memory keys.
    pub keys: bool,
    /// Options of a raw packet queue pair.
    pub packets: Option<Packets>,
    /// The role in dynamic connections.
    pub dynamic: Option<Dynamic>,
    pub engine: Engine,
}

/// Options of a raw packet queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Packets {
    /// Whether the device computes and checks checksums.
    pub checksums: bool,
    /// Whether packets of the same context are received.
    pub own_frames: bool,
}

/// The role of a queue pair in dynamic connections.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Dynamic {
    Initiator,
    Target {
        /// The key that initiators need.
        access_key: u64,
    },
}

/// Moves a target of dynamic connections to another state. Returns its number on the
/// transition to RTR.
pub(crate) fn modify_target(
    target: &uverbs::Qp<Ctx>,
    attr: &uverbs::QpAttr,
    mask: uverbs::QpAttrMask,
) -> Result<Option<u32>> {
    let changes = ::mlx5::QpChanges::default();
    let (number, _) = ::mlx5::modify_dct(target, attr, mask, &changes)?;
    Ok(number)
}

/// The queue pairs of a completion queue, for devices whose CQEs are decoded with
/// the queue pair.
pub(crate) type Members = Option<std::sync::Arc<mlx5::Members>>;

/// The part of a shared receive queue that queue pairs need, for devices whose queues are in
/// the process's memory.
pub(crate) type SrqEntries = Option<std::sync::Arc<::mlx5::SrqEntries>>;

/// A new completion queue.
pub(crate) struct CompletionQueue {
    /// Declared before the ring: destroyed first.
    pub object: uverbs::Cq<Ctx>,
    pub ring: DeviceCompletions,
    pub members: Members,
}

/// A new shared receive queue.
pub(crate) struct SharedReceiveQueue {
    /// Declared before the queue: destroyed first.
    pub object: uverbs::Srq<Ctx>,
    pub recv: SharedRecvQueue,
    pub entries: SrqEntries,
}

/// A new address handle.
#[derive(Debug)]
pub(crate) struct AddressHandle {
    /// `None` where the kernel has no such object (ConnectX on InfiniBand).
    pub object: Option<uverbs::Ah<Ctx>>,
    /// The address that datagrams carry.
    pub address: Address,
}

impl Provider {
    /// Returns whether this crate supports a driver's devices.
    pub fn supports(driver: DriverId) -> bool {
        matches!(driver, DriverId::RXE | DriverId::MLX5)
    }

    /// Creates the kernel's context (GET_CONTEXT) for an open device of a driver.
    pub fn open(context: &uverbs::Context, driver: DriverId) -> Result<(ContextInfo, Self)> {
        if driver == DriverId::MLX5 {
            let (info, provider) = mlx5::Provider::open(context)?;
            return Ok((info, Self::Mlx5(provider)));
        }
        let info = context.get_context(Udata::none())?;
        Ok((info, Self::Rxe(rxe::Provider)))
    }

    pub fn alloc_pd(&self, context: &Ctx) -> Result<PdHandle> {
        for_device!(self, device => device.alloc_pd(context))
    }

    pub fn queue_pair(
        &self,
        context: &Ctx,
        init: &QpInit,
        resources: &QpResources<'_>,
    ) -> Result<QueuePair> {
        for_device!(self, device => device.queue_pair(context, init, resources))
    }

    /// Creates a completion queue, with timestamps if `has_timestamps` is set.
    pub fn completion_queue(
        &self,
        context: &Ctx,
        init: &CqInit,
        has_timestamps: bool,
    ) -> Result<CompletionQueue> {
        for_device!(self, device => device.completion_queue(context, init, has_timestamps))
    }

    pub fn shared_receive_queue(
        &self,
        context: &Ctx,
        init: &SrqInit,
    ) -> Result<SharedReceiveQueue> {
        for_device!(self, device => device.shared_receive_queue(context, init))
    }

    pub fn address_handle(
        &self,
        context: &Ctx,
        pd: PdHandle,
        attr: &uverbs::AhAttr,
    ) -> Result<AddressHandle> {
        for_device!(self, device => device.address_handle(context, pd, attr))
    }

    /// Returns the operations of the device as a bit set.
    pub fn operations(&self) -> u32 {
        for_device!(self, device => device.operations())
    }

    /// Returns whether the device has an operation.
    pub fn has(&self, operation: Operation) -> bool {
        self.operations() & 1 << operation as u32 != 0
    }

    /// Returns the maximum length of a memory window, in bytes.
    pub fn max_window_length(&self) -> u64 {
        for_device!(self, device => device.max_window_length())
    }

    /// Returns the capacities of a queue pair that was created with `created`; `None` if
    /// they must be queried from the kernel.
    pub fn capacities(&self, created: QpCap) -> Option<QpCap> {
        for_device!(self, device => device.capacities(created))
    }

    /// Called when an event of the completion queue with that identifier was read.
    #[inline]
    pub fn event_read(&self, queue: u64) {
        for_device!(self, device => device.event_read(queue));
    }
}

impl AddressHandle {
    /// Destroys the address handle.
    pub fn destroy(&self) -> Result<(), uverbs::Error> {
        self.object.as_ref().map_or(Ok(()), uverbs::Ah::destroy)
    }
}

impl Membership {
    /// Called when the queue pair was destroyed.
    pub fn end(&self) {
        if let Self(Some(membership)) = self {
            membership.end();
        }
    }

    /// Called when the queue pair is leaked.
    pub fn leak(&self) {
        if let Self(Some(membership)) = self {
            membership.leak();
        }
    }
}
