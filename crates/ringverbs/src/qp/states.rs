//! Transitions of a queue pair, with the attributes that each demands
//! (ibv_modify_qp(3), IBA 11.2.5.2).

use uverbs::{AccessFlags, AhAttr};

use super::{QpAttr, QpAttrMask, QueuePair, State, Transport};
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

    /// The attributes as the kernel has them.
    pub fn attributes(&self) -> (&QpAttr, QpAttrMask) {
        (&self.attr, self.mask)
    }
}

impl QueuePair {
    /// Brings it to another state.
    ///
    /// # Errors
    /// [`Error::State`] if the transition is one of another transport; EINVAL
    /// if the state it is in does not lead there, or a value is out of range.
    pub fn transition(&mut self, to: impl Into<Transition>) -> Result<()> {
        let to = to.into();
        if to.transport != self.transport() {
            return Err(Error::State {
                verb: "transition",
                state: self.state(),
                needed: "a transition of its own transport",
            });
        }
        self.modify(&to.attr, to.mask)
    }
}

macro_rules! transition {
    ($name:ident) => {
        impl From<$name> for Transition {
            fn from(from: $name) -> Self {
                from.0
            }
        }
    };
}

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

/// RESET to INIT: it belongs to a port, and takes receives.
#[derive(Clone, Copy, Debug)]
pub struct Init(Transition);
transition!(Init);

impl Init {
    fn new(transport: Transport, port: u8, mask: QpAttrMask) -> Self {
        let attr = QpAttr {
            port_num: port,
            ..QpAttr::default()
        };
        let base = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        Self(Transition::new(transport, State::INIT, attr, base | mask))
    }

    /// Of a reliable connection; the peer may do what `access` says, with
    /// memory that it has a key for.
    pub fn reliable(port: u8, access: AccessFlags) -> Self {
        let mut this = Self::new(Transport::Reliable, port, QpAttrMask::ACCESS_FLAGS);
        this.0.attr.qp_access_flags = access;
        this
    }

    /// Of an unreliable connection.
    pub fn unreliable(port: u8, access: AccessFlags) -> Self {
        let mut this = Self::new(Transport::Unreliable, port, QpAttrMask::ACCESS_FLAGS);
        this.0.attr.qp_access_flags = access;
        this
    }

    /// Of datagrams; it takes those with queue key `qkey`.
    pub fn datagram(port: u8, qkey: u32) -> Self {
        let mut this = Self::new(Transport::Datagram, port, QpAttrMask::QKEY);
        this.0.attr.qkey = qkey;
        this
    }

    optional! {
        /// Index of its partition key; 0 unless told.
        pkey_index(index: u16) { pkey_index = index };
    }
}

/// INIT to RTR: a connection knows its peer, and messages are received.
#[derive(Clone, Copy, Debug)]
pub struct ReadyToReceive(Transition);
transition!(ReadyToReceive);

impl ReadyToReceive {
    fn connected(
        transport: Transport,
        path: AhAttr,
        dest_qp_num: u32,
        psn: u32,
        path_mtu: u8,
    ) -> Self {
        let attr = QpAttr {
            ah_attr: path,
            dest_qp_num,
            rq_psn: psn,
            path_mtu,
            ..QpAttr::default()
        };
        let mask =
            QpAttrMask::AV | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN | QpAttrMask::PATH_MTU;
        Self(Transition::new(transport, State::RTR, attr, mask))
    }

    /// Of a reliable connection: the path to the peer, its queue pair number,
    /// the packet number it begins with, the code of the path's MTU (1 is 256
    /// bytes, 5 is 4096).
    pub fn reliable(path: AhAttr, dest_qp_num: u32, psn: u32, path_mtu: u8) -> Self {
        let mut this = Self::connected(Transport::Reliable, path, dest_qp_num, psn, path_mtu);
        this.0.mask |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        this.max_dest_rd_atomic(16).min_rnr_timer(12)
    }

    /// Of an unreliable connection.
    pub fn unreliable(path: AhAttr, dest_qp_num: u32, psn: u32, path_mtu: u8) -> Self {
        Self::connected(Transport::Unreliable, path, dest_qp_num, psn, path_mtu)
    }

    /// Of datagrams.
    pub fn datagram() -> Self {
        Self(Transition::new(
            Transport::Datagram,
            State::RTR,
            QpAttr::default(),
            QpAttrMask::empty(),
        ))
    }

    optional! {
        /// Reads and atomics that the peer may have outstanding here; 16
        /// unless told. Reliable connections only.
        max_dest_rd_atomic(count: u8) { max_dest_rd_atomic = count };
        /// Code of the time that a peer without a receive waits; 12 (0.64 ms)
        /// unless told. Reliable connections only.
        min_rnr_timer(code: u8) { min_rnr_timer = code };
    }
}

/// RTR to RTS: messages are sent.
#[derive(Clone, Copy, Debug)]
pub struct ReadyToSend(Transition);
transition!(ReadyToSend);

impl ReadyToSend {
    fn new(transport: Transport, psn: u32) -> Self {
        let attr = QpAttr {
            sq_psn: psn,
            ..QpAttr::default()
        };
        Self(Transition::new(
            transport,
            State::RTS,
            attr,
            QpAttrMask::SQ_PSN,
        ))
    }

    /// Of a reliable connection, whose packets are numbered from `psn` on.
    pub fn reliable(psn: u32) -> Self {
        let mut this = Self::new(Transport::Reliable, psn);
        this.0.mask |= QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        this.timeout(14).retry_cnt(7).rnr_retry(7).max_rd_atomic(16)
    }

    /// Of an unreliable connection.
    pub fn unreliable(psn: u32) -> Self {
        Self::new(Transport::Unreliable, psn)
    }

    /// Of datagrams.
    pub fn datagram(psn: u32) -> Self {
        Self::new(Transport::Datagram, psn)
    }

    optional! {
        /// Code of the time to wait for an acknowledgement, 4.096 µs × 2^code;
        /// 14 (67 ms) unless told, 0 is for ever. Reliable connections only.
        timeout(code: u8) { timeout = code };
        /// Retries after that time, 0 to 7; 7 unless told. Reliable
        /// connections only.
        retry_cnt(count: u8) { retry_cnt = count };
        /// Retries while the peer has no receive posted; 7, unless told, is
        /// for ever. Reliable connections only.
        rnr_retry(count: u8) { rnr_retry = count };
        /// Reads and atomics that this side may have outstanding; 16 unless
        /// told. Reliable connections only.
        max_rd_atomic(count: u8) { max_rd_atomic = count };
    }
}
