//! State transitions and the attributes that each requires (ibv_modify_qp(3)).

use std::marker::PhantomData;

use uverbs::{AccessFlags, AhAttr};

use super::{AckTimeout, Mtu, QpAttr, QpAttrMask, QueuePair, RnrTimer, State, Transport};
use crate::{Error, Result};

/// A transition with its attributes: [`Init`], [`ReadyToReceive`],
/// [`ReadyToSend`].
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    transport: Transport,
    attr: QpAttr,
    mask: QpAttrMask,
}

impl Transition {
    fn new(transport: Transport, to: State, attr: QpAttr, mask: QpAttrMask) -> Self {
        Self {
            transport,
            attr: QpAttr {
                qp_state: to,
                ..attr
            },
            mask: mask | QpAttrMask::STATE,
        }
    }

    /// Validates retry counts, which have three bits; devices would truncate
    /// them.
    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("retries of a connection", self.attr.retry_cnt),
            ("retries while the peer has no receive", self.attr.rnr_retry),
        ];
        match counts.into_iter().find(|(_, asked)| *asked > 7) {
            None => Ok(()),
            Some((what, asked)) => Err(Error::Limit {
                what,
                asked: asked.into(),
                allowed: 7,
            }),
        }
    }

    /// Returns the attributes as passed to the kernel.
    pub fn attributes(&self) -> (&QpAttr, QpAttrMask) {
        (&self.attr, self.mask)
    }
}

impl QueuePair {
    /// Moves the queue pair to another state.
    ///
    /// # Errors
    /// [`Error::State`] for a transition of another transport; [`Error::Limit`]
    /// for more than 7 retries; EINVAL if the transition is not allowed from the
    /// current state, or a value is out of range.
    pub fn transition(&mut self, to: impl Into<Transition>) -> Result<()> {
        let to = to.into();
        if to.transport != self.transport() {
            return Err(Error::State {
                verb: "transition",
                state: self.state(),
                needed: "a transition of its own transport",
            });
        }
        to.check()?;
        self.modify(&to.attr, to.mask)
    }
}

/// Marks transitions of a reliable connection.
#[derive(Clone, Copy, Debug)]
pub enum Reliable {}

/// Marks transitions of an unreliable connection.
#[derive(Clone, Copy, Debug)]
pub enum Unreliable {}

/// Marks transitions of a datagram queue pair.
#[derive(Clone, Copy, Debug)]
pub enum Datagram {}

macro_rules! optional {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),+) { $($field:ident = $value:expr),+ } $($mask:ident)|*;)+) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $($arg: $type),+) -> Self {
            $(self.0.attr.$field = $value;)+
            self.0.mask |= QpAttrMask::empty() $(| QpAttrMask::$mask)*;
            self
        }
    )+};
}

/// RESET to INIT: assigns the port; receives can be posted.
#[derive(Clone, Copy, Debug)]
pub struct Init(Transition);

impl From<Init> for Transition {
    fn from(from: Init) -> Self {
        from.0
    }
}

impl Init {
    fn new(transport: Transport, port: u8, mask: QpAttrMask) -> Self {
        let attr = QpAttr {
            port_num: port,
            ..QpAttr::default()
        };
        let base = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        Self(Transition::new(transport, State::INIT, attr, base | mask))
    }

    /// For a reliable connection. `access` limits the peer's access by keys.
    pub fn reliable(port: u8, access: AccessFlags) -> Self {
        let mut this = Self::new(Transport::Reliable, port, QpAttrMask::ACCESS_FLAGS);
        this.0.attr.qp_access_flags = access;
        this
    }

    /// For an unreliable connection.
    pub fn unreliable(port: u8, access: AccessFlags) -> Self {
        let mut this = Self::new(Transport::Unreliable, port, QpAttrMask::ACCESS_FLAGS);
        this.0.attr.qp_access_flags = access;
        this
    }

    /// For a datagram queue pair, which receives datagrams with the queue key `qkey`.
    pub fn datagram(port: u8, qkey: u32) -> Self {
        let mut this = Self::new(Transport::Datagram, port, QpAttrMask::QKEY);
        this.0.attr.qkey = qkey;
        this
    }

    optional! {
        /// Sets the index of the partition key; default 0.
        pkey_index(index: u16) { pkey_index = index };
    }
}

/// INIT to RTR: connects to the peer; messages are received.
///
/// Only attributes of the transport `T` can be set:
///
/// ```compile_fail,E0599
/// # use ringverbs::qp::{Mtu, ReadyToReceive};
/// # fn f(path: ringverbs::AhAttr) {
/// ReadyToReceive::unreliable(path, 17, 0, Mtu::Bytes1024).max_dest_rd_atomic(1);
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReadyToReceive<T>(Transition, PhantomData<T>);

impl<T> From<ReadyToReceive<T>> for Transition {
    fn from(from: ReadyToReceive<T>) -> Self {
        from.0
    }
}

impl<T> ReadyToReceive<T> {
    fn connected(
        transport: Transport,
        path: AhAttr,
        dest_qp_num: u32,
        psn: u32,
        path_mtu: Mtu,
    ) -> Self {
        let attr = QpAttr {
            ah_attr: path,
            dest_qp_num,
            rq_psn: psn,
            path_mtu: path_mtu.code(),
            ..QpAttr::default()
        };
        let mask =
            QpAttrMask::AV | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN | QpAttrMask::PATH_MTU;
        let transition = Transition::new(transport, State::RTR, attr, mask);
        Self(transition, PhantomData)
    }
}

impl ReadyToReceive<Reliable> {
    /// For a reliable connection: the path to the peer, the peer's queue pair number and
    /// initial packet sequence number, and the path MTU.
    pub fn reliable(path: AhAttr, dest_qp_num: u32, psn: u32, path_mtu: Mtu) -> Self {
        let mut this = Self::connected(Transport::Reliable, path, dest_qp_num, psn, path_mtu);
        this.0.mask |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        this.max_dest_rd_atomic(16)
            .min_rnr_timer(RnrTimer::default())
    }

    optional! {
        /// Sets the maximum number of outstanding RDMA reads and atomics of the peer;
        /// default 16.
        max_dest_rd_atomic(count: u8) { max_dest_rd_atomic = count };
        /// Sets the time that the peer waits before it retries a message that found no
        /// receive posted here; default 0.64 ms. A `Duration` is rounded up to the next
        /// encodable value.
        min_rnr_timer(time: impl Into<RnrTimer>) { min_rnr_timer = time.into().code() };
    }
}

impl ReadyToReceive<Unreliable> {
    /// For an unreliable connection.
    pub fn unreliable(path: AhAttr, dest_qp_num: u32, psn: u32, path_mtu: Mtu) -> Self {
        Self::connected(Transport::Unreliable, path, dest_qp_num, psn, path_mtu)
    }
}

impl ReadyToReceive<Datagram> {
    /// For a datagram queue pair.
    pub fn datagram() -> Self {
        let (attr, mask) = (QpAttr::default(), QpAttrMask::empty());
        let transition = Transition::new(Transport::Datagram, State::RTR, attr, mask);
        Self(transition, PhantomData)
    }
}

/// RTR to RTS: messages can be sent.
///
/// Only reliable connections have timeouts and retries:
///
/// ```compile_fail,E0599
/// ringverbs::qp::ReadyToSend::unreliable(0).timeout(std::time::Duration::from_millis(10));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReadyToSend<T>(Transition, PhantomData<T>);

impl<T> From<ReadyToSend<T>> for Transition {
    fn from(from: ReadyToSend<T>) -> Self {
        from.0
    }
}

impl<T> ReadyToSend<T> {
    fn new(transport: Transport, psn: u32) -> Self {
        let attr = QpAttr {
            sq_psn: psn,
            ..QpAttr::default()
        };
        let transition = Transition::new(transport, State::RTS, attr, QpAttrMask::SQ_PSN);
        Self(transition, PhantomData)
    }
}

impl ReadyToSend<Reliable> {
    /// For a reliable connection with the initial packet sequence number `psn`.
    pub fn reliable(psn: u32) -> Self {
        let mut this = Self::new(Transport::Reliable, psn);
        this.0.mask |= QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        this.timeout(AckTimeout::default())
            .retry_cnt(6)
            .rnr_retry(7)
            .max_rd_atomic(16)
    }

    optional! {
        /// Sets the acknowledgement timeout; default 67 ms. A `Duration` is
        /// rounded up to the next encodable value; see also
        /// [`AckTimeout::NEVER`].
        timeout(time: impl Into<AckTimeout>) { timeout = time.into().code() };
        /// Sets the number of retransmissions, 0 to 7; default 6. With 7, rdma_rxe
        /// retries forever and never detects that a peer is gone.
        retry_cnt(count: u8) { retry_cnt = count };
        /// Sets the number of retries while the peer has no receive posted, 0 to
        /// 7; default 7, which means no limit.
        rnr_retry(count: u8) { rnr_retry = count };
        /// Sets the maximum number of outstanding RDMA reads and atomics of this side;
        /// default 16.
        max_rd_atomic(count: u8) { max_rd_atomic = count };
    }
}

impl ReadyToSend<Unreliable> {
    /// For an unreliable connection.
    pub fn unreliable(psn: u32) -> Self {
        Self::new(Transport::Unreliable, psn)
    }
}

impl ReadyToSend<Datagram> {
    /// For a datagram queue pair.
    pub fn datagram(psn: u32) -> Self {
        Self::new(Transport::Datagram, psn)
    }
}
