//! Connection parameters.

use uverbs::AhAttr;

use super::{AckTimeout, Mtu, ReadyToReceive, ReadyToSend, RnrTimer};

/// Parameters for [`QueuePair::connect_with`](super::QueuePair::connect_with).
/// Each side chooses its own.
///
/// ```
/// use std::time::Duration;
/// use ringverbs::qp::{ConnectOptions, Mtu};
/// let options = ConnectOptions::new()
///     .ack_timeout(Duration::from_millis(250))
///     .retries(3)
///     .traffic_class(0x68)
///     .max_mtu(Mtu::Bytes1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct ConnectOptions {
    responder_depth: u8,
    initiator_depth: u8,
    ack_timeout: AckTimeout,
    retries: u8,
    rnr_retries: u8,
    rnr_timer: RnrTimer,
    traffic_class: u8,
    service_level: u8,
    hop_limit: u8,
    max_mtu: Mtu,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            responder_depth: 16,
            initiator_depth: 16,
            ack_timeout: AckTimeout::default(),
            retries: 6,
            rnr_retries: 7,
            rnr_timer: RnrTimer::default(),
            traffic_class: 0,
            service_level: 0,
            hop_limit: 64,
            max_mtu: Mtu::Bytes4096,
        }
    }
}

impl ConnectOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum number of outstanding RDMA reads and atomics of this side; default
    /// 16, reduced to the device's limit. Must not exceed the peer's
    /// [`responder_depth`](Self::responder_depth).
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.initiator_depth = count;
        self
    }

    /// Sets the maximum number of outstanding RDMA reads and atomics of the peer; default
    /// 16, reduced to the device's limit.
    pub fn responder_depth(mut self, count: u8) -> Self {
        self.responder_depth = count;
        self
    }

    /// Sets the time after which an unacknowledged packet is retransmitted;
    /// default 67 ms. A `Duration` is rounded up to the next encodable value; see
    /// also [`AckTimeout::NEVER`].
    pub fn ack_timeout(mut self, time: impl Into<AckTimeout>) -> Self {
        self.ack_timeout = time.into();
        self
    }

    /// Sets the number of retransmissions after which the connection fails, 0 to 7; default
    /// 6. With 7, rdma_rxe retries forever and never detects that a peer is gone.
    pub fn retries(mut self, count: u8) -> Self {
        self.retries = count;
        self
    }

    /// Sets the number of retries while the peer has no receive posted, 0 to 7;
    /// default 7, which means no limit.
    pub fn rnr_retries(mut self, count: u8) -> Self {
        self.rnr_retries = count;
        self
    }

    /// Sets the time that the peer waits before it retries a message that found no receive
    /// posted here; default 0.64 ms. A `Duration` is rounded up to the next encodable
    /// value.
    pub fn rnr_timer(mut self, time: impl Into<RnrTimer>) -> Self {
        self.rnr_timer = time.into();
        self
    }

    /// Sets the traffic class; default 0. On Ethernet it is IP's type of service,
    /// with the DSCP in the upper six bits.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Sets the service level, 0 to 15; default 0. On Ethernet it is the priority
    /// (bits 0 to 2).
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// Sets the hop limit, the number of routers on the path plus one; default
    /// 64.
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// Limits the path MTU below that of the ports of both sides.
    pub fn max_mtu(mut self, mtu: Mtu) -> Self {
        self.max_mtu = mtu;
        self
    }

    /// Applies the options to a path.
    pub(super) fn path(&self, mut path: AhAttr) -> AhAttr {
        path.sl = self.service_level;
        path.grh.traffic_class = self.traffic_class;
        path.grh.hop_limit = self.hop_limit;
        path
    }

    /// Returns the path MTU between two ports.
    pub(super) fn mtu(&self, local: Mtu, peer: Mtu) -> Mtu {
        local.min(peer).min(self.max_mtu)
    }

    /// Applies the options to the transition to RTR; `allowed` is the device's
    /// limit.
    pub(super) fn receive(
        &self,
        ready: ReadyToReceive<super::Reliable>,
        allowed: u8,
    ) -> ReadyToReceive<super::Reliable> {
        ready
            .max_dest_rd_atomic(self.responder_depth.min(allowed))
            .min_rnr_timer(self.rnr_timer)
    }

    /// Applies the options to the transition to RTS; `allowed` is the device's
    /// limit.
    pub(super) fn send(
        &self,
        ready: ReadyToSend<super::Reliable>,
        allowed: u8,
    ) -> ReadyToSend<super::Reliable> {
        ready
            .timeout(self.ack_timeout)
            .retry_cnt(self.retries)
            .rnr_retry(self.rnr_retries)
            .max_rd_atomic(self.initiator_depth.min(allowed))
    }
}
