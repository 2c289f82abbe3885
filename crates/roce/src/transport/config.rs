//! Attributes and states of queue pairs.

use crate::packet::{DEFAULT_PKEY, Mtu, Path};

/// The transport service of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Service {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Initiator (sending end) of an extended reliable connection.
    XrcInitiator,
    /// Target (receiving end) of an extended reliable connection.
    XrcTarget,
    /// Initiator of dynamic connections: sends.
    DcInitiator,
    /// Target of dynamic connections: receives.
    DcTarget,
}

impl Service {
    /// Returns whether the service is reliable: requests are acknowledged.
    #[inline]
    #[must_use]
    pub const fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc | Self::Ud)
    }
}

/// States of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum QpState {
    /// RESET: nothing is posted, sent or received.
    #[default]
    Reset,
    /// INIT: receives may be posted.
    Init,
    /// RTR: ready to receive.
    ReadyToReceive,
    /// RTS: ready to send.
    ReadyToSend,
    /// SQD: outstanding sends complete, then sending stops.
    SendQueueDrain,
    /// SQE: the send queue is in error, receives go on.
    SendQueueError,
    /// ERR: both queues are flushed.
    Error,
}

impl QpState {
    /// Returns whether incoming packets are processed in this state.
    #[inline]
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(
            self,
            Self::ReadyToReceive | Self::ReadyToSend | Self::SendQueueDrain | Self::SendQueueError
        )
    }

    /// Returns whether requests may be in flight in this state: packets are sent and
    /// responses processed.
    #[inline]
    #[must_use]
    pub const fn sends(self) -> bool {
        matches!(self, Self::ReadyToSend | Self::SendQueueDrain)
    }
}

/// All attributes of a queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Transport service; fixed when the queue pair is created.
    pub service: Service,
    /// Partition key.
    pub pkey: u16,
    /// Accept packets of any partition (GSI).
    pub any_pkey: bool,
    /// Queue key (UD).
    pub qkey: u32,
    /// Path MTU; for UD, the MTU of the port.
    pub mtu: Mtu,
    /// Path to the peer; `None` for UD, and before RTR.
    pub path: Option<Path>,
    /// QP number of the peer.
    pub remote_qpn: u32,
    /// First PSN to send; takes effect on the transition to RTS.
    pub send_psn: u32,
    /// First PSN to expect; takes effect on the transition to RTR.
    pub recv_psn: u32,
    /// Local ACK timeout: 4.096 us times 2 to this power; 0 means no timeout.
    pub ack_timeout: u8,
    /// Retries after a timeout or a missing packet, 0 to 7.
    pub retry_count: u8,
    /// Retries after an RNR NAK, 0 to 6; 7 means unlimited.
    pub rnr_retry: u8,
    /// RNR NAK timer: the 5-bit code sent to a peer when no receive is posted.
    pub min_rnr_timer: u8,
    /// Maximum of outstanding reads and atomics as requester; 0 permits none.
    pub max_rd_atomic: u8,
    /// Maximum of outstanding reads and atomics as responder.
    pub max_dest_rd_atomic: u8,
    /// The peer may read.
    pub allow_read: bool,
    /// The peer may write.
    pub allow_write: bool,
    /// The peer may do atomics.
    pub allow_atomic: bool,
    /// Receives come from an SRQ, and so are not flushed.
    pub srq: bool,
    /// Access key of a DC target.
    pub dc_key: u64,
    /// Number of streams in error at which a whole DC initiator fails, as a power of
    /// two.
    pub log_errored_streams: u8,
    /// Source QP number in datagrams, if not the QP's own (1 for GSI).
    pub wire_qpn: Option<u32>,
    /// Discard multicast packets that this queue pair itself sent.
    pub block_multicast_loopback: bool,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self {
            service: Service::Rc,
            pkey: DEFAULT_PKEY,
            any_pkey: false,
            qkey: 0,
            mtu: Mtu::default(),
            path: None,
            remote_qpn: 0,
            send_psn: 0,
            recv_psn: 0,
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            allow_read: true,
            allow_write: true,
            allow_atomic: true,
            srq: false,
            dc_key: 0,
            log_errored_streams: 0,
            wire_qpn: None,
            block_multicast_loopback: false,
        }
    }
}

/// Queryable state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpView {
    /// State.
    pub state: QpState,
    /// PSN of the next new packet.
    pub send_psn: u32,
    /// PSN expected next.
    pub recv_psn: u32,
    /// An SQD drain is not finished: work requests are outstanding.
    pub draining: bool,
    /// Work requests taken from the send queue and not completed.
    pub outstanding: usize,
}

/// Returns the wait that a code of the "RNR NAK timer field" stands for, in nanoseconds
/// (IBA 9.7.5.2.8).
#[must_use]
pub fn rnr_wait(code: u8) -> u64 {
    // In units of 10 us.
    const UNITS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    u64::from(UNITS[usize::from(code & 0x1f)]) * 10_000
}

/// Returns the local ACK timeout for a code, in nanoseconds; `None` means no timeout
/// (IBA 9.7.6.1.3).
#[must_use]
pub fn ack_wait(code: u8) -> Option<u64> {
    let code = code & 0x1f;
    (code != 0).then(|| 4096u64 << code)
}
