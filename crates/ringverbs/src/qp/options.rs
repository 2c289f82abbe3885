//! How a queue pair is connected.

use uverbs::AhAttr;

use super::{AckTimeout, Mtu, ReadyToReceive, ReadyToSend, RnrTimer};

/// How to connect a queue pair: for
/// [`QueuePair::connect_with`](super::QueuePair::connect_with). Each side has
/// its own.
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
    reads_of_peer: u8,
    reads: u8,
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
            reads_of_peer: 16,
            reads: 16,
            ack_timeout: AckTimeout::default(),
            retries: 7,
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
    /// What is used unless told.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads and atomics of ours that may be outstanding; 16 unless told, and
    /// never more than the device can. No more than what the peer takes
    /// ([`responder_depth`](Self::responder_depth) there).
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.reads = count;
        self
    }

    /// Reads and atomics of the peer's that may be outstanding here; 16 unless
    /// told, and never more than the device can.
    pub fn responder_depth(mut self, count: u8) -> Self {
        self.reads_of_peer = count;
        self
    }

    /// How long to wait for an acknowledgement before sending again; 67 ms
    /// unless told. A `Duration` is rounded up to what there is; see also
    /// [`AckTimeout::NEVER`].
    pub fn ack_timeout(mut self, time: impl Into<AckTimeout>) -> Self {
        self.ack_timeout = time.into();
        self
    }

    /// How often to send again before the peer counts as gone, 0 to 7; 7 unless
    /// told. rdma_rxe takes 7 for ever.
    pub fn retries(mut self, count: u8) -> Self {
        self.retries = count;
        self
    }

    /// How often to send again to a peer that has no receive posted, 0 to 7; 7,
    /// unless told, is for ever.
    pub fn rnr_retries(mut self, count: u8) -> Self {
        self.rnr_retries = count;
        self
    }

    /// How long the peer waits that has met no receive here; 0.64 ms unless
    /// told. A `Duration` is rounded up to what there is.
    pub fn rnr_timer(mut self, time: impl Into<RnrTimer>) -> Self {
        self.rnr_timer = time.into();
        self
    }

    /// Traffic class: on Ethernet, IP's type of service, with the DSCP in its
    /// upper six bits. 0 unless told.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Service level, 0 to 15; on Ethernet, the priority (bits 0 to 2). 0 unless
    /// told.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// Routers that a packet may pass, plus one; 64 unless told.
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// The largest MTU of the path, if that is less than what both ports have.
    pub fn max_mtu(mut self, mtu: Mtu) -> Self {
        self.max_mtu = mtu;
        self
    }

    /// The path, as it is asked for.
    pub(super) fn path(&self, mut path: AhAttr) -> AhAttr {
        path.sl = self.service_level;
        path.grh.traffic_class = self.traffic_class;
        path.grh.hop_limit = self.hop_limit;
        path
    }

    /// The MTU between two ports.
    pub(super) fn mtu(&self, local: Mtu, peer: Mtu) -> Mtu {
        local.min(peer).min(self.max_mtu)
    }

    /// INIT to RTR, on a device that takes so many reads.
    pub(super) fn receive(
        &self,
        ready: ReadyToReceive<super::Reliable>,
        allowed: u8,
    ) -> ReadyToReceive<super::Reliable> {
        ready
            .max_dest_rd_atomic(self.reads_of_peer.min(allowed))
            .min_rnr_timer(self.rnr_timer)
    }

    /// RTR to RTS, on a device that has so many reads outstanding.
    pub(super) fn send(
        &self,
        ready: ReadyToSend<super::Reliable>,
        allowed: u8,
    ) -> ReadyToSend<super::Reliable> {
        ready
            .timeout(self.ack_timeout)
            .retry_cnt(self.retries)
            .rnr_retry(self.rnr_retries)
            .max_rd_atomic(self.reads.min(allowed))
    }
}
