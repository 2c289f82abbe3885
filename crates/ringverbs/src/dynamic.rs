//! Dynamic connections (DC): reliable, and without a queue pair for each peer.
//!
//! A [`DcInitiator`] sends to any target: each operation has a [`DcAddress`], which
//! consists of the path to a port, the target's number and its key. A [`DcTarget`]
//! receives from any initiator that has the key, into a [`SharedReceiveQueue`], and gives
//! it access to memory by the keys of regions. The device connects as needed, so a
//! process with thousands of peers needs one initiator and one target.
//!
//! Supported by ConnectX and the embedded device; others return [`Error::Unsupported`].
//!
//! ```
//! use ringverbs::dynamic::DcAddress;
//! use ringverbs::{AccessFlags, Device, Inline, WorkRequest};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Device::embedded()?.open()?;
//! let (domain, local) = (context.alloc_pd()?, context.local_address(1)?);
//! let mut cq = context.completion_queue().build()?;
//!
//! const KEY: u64 = 0x1234;
//! let mut srq = domain.shared_receive_queue().build()?;
//! srq.receive(domain.alloc(64)?.into_buffer(), 1)?;
//! let target = domain.dc_target(&cq, &srq, KEY).build(&local)?;
//!
//! // The target's owner sends its number, key and port address to peers.
//! let path = domain.address_handle_to(&local, &local)?;
//! let address = DcAddress::new(path, target.number(), KEY)?;
//! let mut initiator = domain.dc_initiator(&cq).inline(16).build(&local)?;
//! initiator.post(WorkRequest::send(Inline(b"hello")).token(2), &address)?;
//! for _ in 0..2 {
//!     let mut done = cq.poll_until_one()?;
//!     done.result?;
//!     if let Some(buffer) = done.take_buffer() {
//!         assert_eq!(&buffer[..], b"hello");
//!     }
//! }
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

use std::fmt;

use uverbs::Destination;

use crate::completion::CompletionQueueRef;
use crate::data::Data;
use crate::device::{self, Dynamic};
use crate::pd::Identity;
use crate::qp::{
    AckTimeout, Batch, BatchError, LocalAddress, Mtu, PostError, QpAttr, QpAttrMask,
    QueuePairBuilder, RnrTimer, State, WorkRequest,
};
use crate::{
    AccessFlags, AddressHandle, CloseError, Error, ProtectionDomain, QueuePair, Result,
    SharedReceiveQueue,
};

/// The largest target number: 24 bits.
const LAST_NUMBER: u32 = 0xff_ffff;

/// The address of a target of dynamic connections: the path to its port, its number and
/// its key.
///
/// Clones refer to the same path. Operations in flight keep the path alive.
#[derive(Clone)]
pub struct DcAddress {
    path: AddressHandle,
    number: u32,
    key: u64,
}

impl DcAddress {
    /// Creates an address from the number and key of the target's owner.
    ///
    /// # Errors
    /// [`Error::Limit`] for a number of more than 24 bits.
    pub fn new(path: AddressHandle, number: u32, key: u64) -> Result<Self> {
        if number > LAST_NUMBER {
            return Err(Error::Limit {
                what: "number of a DC target",
                asked: number.into(),
                allowed: LAST_NUMBER.into(),
            });
        }
        Ok(Self { path, number, key })
    }

    /// Returns the path to the target's port.
    pub fn path(&self) -> &AddressHandle {
        &self.path
    }

    /// Returns the target's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn identity(&self) -> Identity {
        self.path.identity()
    }

    /// Returns the destination of a work request.
    pub(crate) fn destination(&self) -> Destination<'_, device::Address> {
        Destination::Dc {
            address: self.path.address(),
            remote_dctn: self.number,
            access_key: self.key,
            stream: 0,
        }
    }
}

impl fmt::Debug for DcAddress {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcAddress")
            .field("path", &self.path)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Builder of a [`DcInitiator`], from [`ProtectionDomain::dc_initiator`].
#[must_use]
pub struct DcInitiatorBuilder {
    builder: QueuePairBuilder,
    mtu: Mtu,
    ack_timeout: AckTimeout,
}

/// Builder of a [`DcTarget`], from [`ProtectionDomain::dc_target`].
#[must_use]
pub struct DcTargetBuilder {
    builder: QueuePairBuilder,
    mtu: Mtu,
    access: AccessFlags,
    rnr_timer: RnrTimer,
    key: u64,
}

impl ProtectionDomain {
    /// Returns a builder of an initiator of dynamic connections whose operations
    /// complete in `cq`.
    pub fn dc_initiator(&self, cq: impl Into<CompletionQueueRef>) -> DcInitiatorBuilder {
        DcInitiatorBuilder {
            builder: self.dynamic_queue_pair(Dynamic::Initiator, cq.into()),
            mtu: Mtu::Bytes4096,
            ack_timeout: AckTimeout::default(),
        }
    }

    /// Returns a builder of a target of dynamic connections. It takes receives from
    /// `srq`, which complete in `cq`, for initiators that have the key `key`.
    pub fn dc_target(
        &self,
        cq: impl Into<CompletionQueueRef>,
        srq: &SharedReceiveQueue,
        key: u64,
    ) -> DcTargetBuilder {
        let dynamic = Dynamic::Target { access_key: key };
        DcTargetBuilder {
            builder: self.dynamic_queue_pair(dynamic, cq.into()).srq(srq),
            mtu: Mtu::Bytes4096,
            access: AccessFlags::LOCAL_WRITE,
            rnr_timer: RnrTimer::default(),
            key,
        }
    }
}

impl DcInitiatorBuilder {
    /// Sets the minimum depth of the send queue, in operations; default 64.
    pub fn send_depth(mut self, operations: u32) -> Self {
        self.builder = self.builder.send_depth(operations);
        self
    }

    /// Sets the minimum number of pieces of memory per operation; default 1.
    pub fn send_pieces(mut self, pieces: u32) -> Self {
        self.builder = self.builder.send_pieces(pieces);
        self
    }

    /// Sets the minimum size of inline data, in bytes; default 0.
    pub fn inline(mut self, bytes: u32) -> Self {
        self.builder = self.builder.inline(bytes);
        self
    }

    /// Limits the path MTU below the port's. It must not exceed a target's.
    pub fn max_mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = mtu;
        self
    }

    /// Sets the time after which an unacknowledged packet is retransmitted.
    pub fn ack_timeout(mut self, time: impl Into<AckTimeout>) -> Self {
        self.ack_timeout = time.into();
        self
    }

    /// Creates the initiator on a port, ready to send.
    ///
    /// # Errors
    /// As [`QueuePairBuilder::build`]; [`Error::Unsupported`] or EOPNOTSUPP on a device
    /// without dynamic connections.
    pub fn build(self, local: &LocalAddress) -> Result<DcInitiator> {
        const RETRIES: u8 = 7;
        let mut qp = self.builder.recv_depth(0).build()?;
        let attr = QpAttr {
            port_num: local.port,
            path_mtu: local.mtu.min(self.mtu).code(),
            timeout: self.ack_timeout.code(),
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: qp.context().read_depths().1.min(16),
            sq_psn: qp.psn(),
            ..QpAttr::default()
        };
        let retries = QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY;
        let sends = QpAttrMask::MAX_QP_RD_ATOMIC | QpAttrMask::SQ_PSN;
        for (state, mask) in [
            (State::INIT, QpAttrMask::PKEY_INDEX | QpAttrMask::PORT),
            (State::RTR, QpAttrMask::PATH_MTU),
            (State::RTS, retries | sends),
        ] {
            let to = QpAttr {
                qp_state: state,
                ..attr
            };
            qp.modify(&to, mask | QpAttrMask::STATE)?;
        }
        Ok(DcInitiator { qp })
    }
}

impl DcTargetBuilder {
    /// Sets the access of initiators that have a key (`REMOTE_READ`, `REMOTE_WRITE`,
    /// `REMOTE_ATOMIC`); default none: initiators can only send.
    pub fn access(mut self, access: AccessFlags) -> Self {
        self.access = access | AccessFlags::LOCAL_WRITE;
        self
    }

    /// Limits the path MTU below the port's.
    pub fn max_mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = mtu;
        self
    }

    /// Sets the time that an initiator waits before it retries a message that found no
    /// receive posted.
    pub fn rnr_timer(mut self, time: impl Into<RnrTimer>) -> Self {
        self.rnr_timer = time.into();
        self
    }

    /// Creates the target on a port, ready to receive.
    ///
    /// # Errors
    /// As [`QueuePairBuilder::build`]; [`Error::Unsupported`] or EOPNOTSUPP on a device
    /// without dynamic connections; [`Error::Driver`] if the driver gives it no number.
    pub fn build(self, local: &LocalAddress) -> Result<DcTarget> {
        let mut qp = self.builder.build()?;
        let attr = QpAttr {
            port_num: local.port,
            path_mtu: local.mtu.min(self.mtu).code(),
            min_rnr_timer: self.rnr_timer.code(),
            qp_access_flags: self.access,
            ah_attr: local.path_to(local.gid, local.lid),
            ..QpAttr::default()
        };
        let init = QpAttr {
            qp_state: State::INIT,
            ..attr
        };
        let init_mask = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        qp.modify(
            &init,
            init_mask | QpAttrMask::ACCESS_FLAGS | QpAttrMask::STATE,
        )?;
        let ready = QpAttr {
            qp_state: State::RTR,
            ..attr
        };
        let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::MIN_RNR_TIMER;
        let number = qp.make_target(&ready, path | QpAttrMask::STATE)?;
        Ok(DcTarget {
            qp,
            number,
            key: self.key,
        })
    }
}

/// An initiator of dynamic connections, which sends to any target and does not receive.
///
/// Posting takes `&mut self` and no lock. Operations complete in the order of posting. A
/// failed operation (wrong key, no such target) moves the initiator to the error state,
/// which flushes all others.
pub struct DcInitiator {
    /// Private: each of its operations needs an address.
    qp: QueuePair,
}

impl DcInitiator {
    /// Returns the queue pair number, which completions contain.
    pub fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Returns the identifier that asynchronous events carry; unique in the context.
    pub fn id(&self) -> u64 {
        self.qp.id()
    }

    /// Returns the number of operations in flight.
    pub fn in_flight(&self) -> u32 {
        self.qp.in_flight().0
    }

    /// Posts one operation to a target.
    ///
    /// # Errors
    /// As [`QueuePair::post`]; [`Error::WrongDomain`] for an address whose handle is of
    /// another protection domain; [`Error::Invalid`] for a datagram's address in the
    /// request.
    pub fn post<D: Data>(
        &mut self,
        request: WorkRequest<D>,
        to: &DcAddress,
    ) -> Result<(), PostError<D::Returned>> {
        self.qp.send.post_to(request, to)
    }

    /// Posts several operations with one doorbell, as [`QueuePair::batch`] does.
    ///
    /// # Errors
    /// As [`QueuePair::batch`].
    pub fn batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut DcBatch<'_, '_>) -> Result<R, E>,
    ) -> Result<R, BatchError<E>> {
        self.qp.batch(|batch| fill(&mut DcBatch { batch }))
    }

    /// Destroys the initiator. Memory in flight is released as on drop.
    ///
    /// # Errors
    /// Returns the initiator with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        self.qp.close().map_err(|error| error.map(|qp| Self { qp }))
    }
}

impl fmt::Debug for DcInitiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DcInitiator").field(&self.qp_num()).finish()
    }
}

/// A batch of operations of a [`DcInitiator`].
#[derive(Debug)]
pub struct DcBatch<'a, 'h> {
    batch: &'a mut Batch<'h>,
}

impl DcBatch<'_, '_> {
    /// Adds one operation to a target.
    ///
    /// # Errors
    /// As [`DcInitiator::post`]. The batch is unchanged.
    pub fn post<D: Data>(
        &mut self,
        request: WorkRequest<D>,
        to: &DcAddress,
    ) -> Result<(), PostError<D::Returned>> {
        self.batch.post_to(request, to)
    }
}

/// A target of dynamic connections: initiators that have its key send to its shared
/// receive queue.
///
/// Dropping the target destroys it. Receives of the shared queue stay in flight.
pub struct DcTarget {
    /// Private: it has no queues, and no further state transition.
    qp: QueuePair,
    number: u32,
    key: u64,
}

impl DcTarget {
    /// Returns its number, which initiators need.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the identifier that asynchronous events carry; unique in the context.
    pub fn id(&self) -> u64 {
        self.qp.id()
    }

    /// Returns its address on a path, for initiators of a protection domain.
    ///
    /// # Errors
    /// As [`DcAddress::new`].
    pub fn address(&self, path: AddressHandle) -> Result<DcAddress> {
        DcAddress::new(path, self.number, self.key)
    }

    /// Destroys the target.
    ///
    /// # Errors
    /// Returns the target with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let Self { qp, number, key } = self;
        let back = |qp| Self { qp, number, key };
        qp.close().map_err(|error| error.map(back))
    }
}

impl fmt::Debug for DcTarget {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DcTarget").field(&self.number).finish()
    }
}
