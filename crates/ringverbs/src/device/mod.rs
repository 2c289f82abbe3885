//! Devices. The kernel's driver id says which one it is when a context is opened
//! ([`Provider`]); objects are created accordingly.
//!
//! - `send`, `recv`, `completion`: an enum of the devices for each kind of queue;
//!   each call asks once which device it is
//! - `rxe`, `mlx5`: a device's objects and queues
//!
//! No type of a device crate leaves this module.

mod completion;
mod mlx5;
mod recv;
mod rxe;
mod send;

use uverbs::discovery::DriverId;
use uverbs::{ContextInfo, CqInit, PdHandle, QpCap, QpInit, SrqInit, SrqModify, Udata};

use crate::context::Ctx;
use crate::error::{Error, Result};
use crate::operation::Operation;

pub(crate) use completion::{CompletionRing, Entry};
pub(crate) use recv::{RecvQueue, RecvWriter, SharedRecvQueue};
pub(crate) use send::{Address, SendQueue, inline_piece};
pub(crate) use uverbs::{Data as SendData, Sge, WorkCompletion};

/// Operation codes and flags of send work requests, as the kernel numbers
/// them.
pub(crate) use uverbs::{Opcode, SendFlags};

/// A send work request.
pub(crate) type SendWr<'a> = uverbs::SendWr<'a, Address>;

/// The longest message that there is: 2 GiB (IBA 9.7.7).
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The flag of a completion that a key was invalidated. rdma_rxe passes on the
/// kernel's own bit (`IB_WC_WITH_INVALIDATE`), which is another than that of the
/// C interface (`IBV_WC_WITH_INV`); it sets neither for anything else.
pub(crate) const FLAG_INVALIDATED: u32 = 1 << 2 | 1 << 3;

/// The driver of a context's device.
pub(crate) enum Provider {
    /// Software; the kernel owns the queues.
    Rxe,
    /// ConnectX.
    Mlx5(mlx5::Provider),
}

/// A queue pair's queues.
pub(crate) struct QueuePair {
    /// Before the queues: destroyed first.
    pub object: uverbs::Qp<Ctx>,
    pub send: SendQueue,
    pub recv: Option<RecvQueue>,
    pub membership: Membership,
    /// Its capacities.
    pub cap: QpCap,
}

/// The membership of a queue pair in its completion queues, for devices whose
/// CQEs are decoded with the queue pair. It ends at the latest when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Membership(Option<mlx5::Membership>);

/// What a queue pair is created with.
pub(crate) struct QpResources<'a> {
    /// Of the completion queue of its sends.
    pub send: &'a Members,
    /// Of the completion queue of its receives.
    pub recv: &'a Members,
    /// Its shared receive queue.
    pub srq: Option<&'a SharedWork>,
    /// Whether its work requests may change memory keys.
    pub keys: bool,
}

/// The queue pairs of a completion queue, for devices whose CQEs are decoded with
/// the queue pair.
pub(crate) type Members = Option<std::sync::Arc<mlx5::Members>>;

/// What queue pairs need of a shared receive queue, for devices whose queues are
/// in the process's memory.
pub(crate) type SharedWork = Option<std::sync::Arc<::mlx5::SharedWork>>;

/// A completion queue as it was created.
pub(crate) struct CompletionQueue {
    /// Before the ring: destroyed first.
    pub object: uverbs::Cq<Ctx>,
    pub ring: CompletionRing,
    pub members: Members,
}

/// A shared receive queue as it was created.
pub(crate) struct SharedReceiveQueue {
    /// Before the queue: destroyed first.
    pub object: uverbs::Srq<Ctx>,
    pub recv: SharedRecvQueue,
    pub work: SharedWork,
}

/// An address handle as it was created.
#[derive(Debug)]
pub(crate) struct AddressHandle {
    /// `None` where the kernel has no such object (ConnectX on InfiniBand).
    pub object: Option<uverbs::Ah<Ctx>>,
    /// What datagrams carry.
    pub address: Address,
}

impl Provider {
    /// Whether there is code for a driver's devices.
    pub fn serves(driver: DriverId) -> bool {
        matches!(driver, DriverId::RXE | DriverId::MLX5)
    }

    /// Makes the kernel's context for an open device of a driver.
    pub fn open(context: &uverbs::Context, driver: DriverId) -> Result<(ContextInfo, Self)> {
        if driver == DriverId::MLX5 {
            let (info, provider) = mlx5::Provider::open(context)?;
            return Ok((info, Self::Mlx5(provider)));
        }
        Ok((context.get_context(Udata::none())?, Self::Rxe))
    }

    pub fn alloc_pd(&self, context: &Ctx) -> Result<PdHandle> {
        match self {
            Self::Rxe => Ok(uverbs::pd::alloc(context, Udata::none())?),
            Self::Mlx5(_) => Ok(::mlx5::alloc_pd(context)?),
        }
    }

    pub fn queue_pair(
        &self,
        context: &Ctx,
        init: &QpInit,
        resources: &QpResources<'_>,
    ) -> Result<QueuePair> {
        match self {
            Self::Rxe => rxe::queue_pair(context, init),
            Self::Mlx5(provider) => provider.queue_pair(context, init, resources),
        }
    }

    /// `timed`: with timestamps.
    pub fn completion_queue(
        &self,
        context: &Ctx,
        init: &CqInit,
        timed: bool,
    ) -> Result<CompletionQueue> {
        match self {
            Self::Rxe if timed => Err(Error::Unsupported {
                what: "timestamps of completions",
            }),
            Self::Rxe => rxe::completion_queue(context, init),
            Self::Mlx5(provider) => provider.completion_queue(context, init),
        }
    }

    pub fn shared_receive_queue(
        &self,
        context: &Ctx,
        init: &SrqInit,
    ) -> Result<SharedReceiveQueue> {
        match self {
            Self::Rxe => rxe::shared_receive_queue(context, init),
            Self::Mlx5(provider) => provider.shared_receive_queue(context, init),
        }
    }

    pub fn address_handle(
        &self,
        context: &Ctx,
        pd: PdHandle,
        attr: &uverbs::AhAttr,
    ) -> Result<AddressHandle> {
        match self {
            Self::Rxe => rxe::address_handle(context, pd, attr),
            Self::Mlx5(provider) => provider.address_handle(context, pd, attr),
        }
    }

    /// The operations that the device has, and that there is code for, as a set
    /// of bits.
    pub fn operations(&self) -> u32 {
        const fn bit(operation: Operation) -> u32 {
            1 << operation as u32
        }
        match self {
            Self::Rxe => u32::MAX,
            Self::Mlx5(_) => !(bit(Operation::AtomicWrite) | bit(Operation::Flush)),
        }
    }

    /// Whether that one is among them.
    pub fn has(&self, operation: Operation) -> bool {
        self.operations() & 1 << operation as u32 != 0
    }

    /// The longest memory window, in bytes.
    pub fn longest_window(&self) -> u64 {
        match self {
            Self::Rxe => u64::MAX,
            Self::Mlx5(_) => ::mlx5::LONGEST_WINDOW,
        }
    }

    /// The driver's word on the sizes of a queue pair is kept; where it has
    /// none, these are they.
    pub fn sizes(&self, made: QpCap) -> Option<QpCap> {
        match self {
            Self::Rxe => None,
            Self::Mlx5(_) => Some(made),
        }
    }

    /// An event of the completion queue of that number was read.
    #[inline]
    pub fn seen_event(&self, queue: u64) {
        match self {
            Self::Rxe => {}
            Self::Mlx5(provider) => provider.seen_event(queue),
        }
    }
}

impl AddressHandle {
    /// Destroys it.
    pub fn destroy(self) -> Result<(), (Self, uverbs::Error)> {
        let Self { object, address } = self;
        match object.map(uverbs::Ah::destroy) {
            None | Some(Ok(())) => Ok(()),
            Some(Err((object, error))) => {
                let this = Self {
                    object: Some(object),
                    address,
                };
                Err((this, error))
            }
        }
    }
}

impl SharedReceiveQueue {
    pub fn modify(
        object: &uverbs::Srq<Ctx>,
        recv: &mut SharedRecvQueue,
        change: &SrqModify,
    ) -> Result<()> {
        match recv {
            SharedRecvQueue::Rxe(queue) => {
                Ok(::rxe::SharedReceiveQueue::modify(object, queue, change)?)
            }
            SharedRecvQueue::Mlx5(_) if change.max_wr.is_some() => Err(Error::Unsupported {
                what: "another size of a shared receive queue",
            }),
            SharedRecvQueue::Mlx5(_) => Ok(object.modify(change, Udata::none())?),
        }
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
