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
    /// The sending end of an extended reliable connection.
    XrcInitiator,
    /// The receiving end of one.
    XrcTarget,
    /// Sends over dynamic connections.
    DcInitiator,
    /// Is sent to over dynamic connections.
    DcTarget,
}

impl Service {
    /// Acknowledged.
    #[inline]
    #[must_use]
    pub const fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc | Self::Ud)
    }
}

/// States of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum QpState {
    /// Nothing is posted, sent or received.
    #[default]
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    ReadyToReceive,
    /// Ready to send.
    ReadyToSend,
    /// Sends are drained, then stop.
    SendQueueDrain,
    /// Sends are in error, receives go on.
    SendQueueError,
    /// Both queues are flushed.
    Error,
}

impl QpState {
    /// Packets are taken in.
    #[inline]
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(
            self,
            Self::ReadyToReceive | Self::ReadyToSend | Self::SendQueueDrain | Self::SendQueueError
        )
    }

    /// Requests are under way: packets go out, answers are taken.
    #[inline]
    #[must_use]
    pub const fn sends(self) -> bool {
        matches!(self, Self::ReadyToSend | Self::SendQueueDrain)
    }
}

/// All attributes of a queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// The service; of no effect after the creation.
    pub service: Service,
    /// Partition key.
    pub pkey: u16,
    /// Packets of any partition are taken (GSI).
    pub any_pkey: bool,
    /// Queue key (UD).
    pub qkey: u32,
    /// Path MTU. The port's for UD.
    pub mtu: Mtu,
    /// The way to the peer; none for UD, or before RTR.
    pub path: Option<Path>,
    /// The peer's QP number.
    pub remote_qpn: u32,
    /// The first PSN to send; taken on the way to RTS.
    pub send_psn: u32,
    /// The first PSN to expect; taken on the way to RTR.
    pub recv_psn: u32,
    /// Local ACK timeout: 4.096 us times two to this; 0 waits for ever.
    pub ack_timeout: u8,
    /// Retries after a timeout or a missing packet, 0 to 7.
    pub retry_count: u8,
    /// Retries when the peer was not ready, 0 to 6; 7 for ever.
    pub rnr_retry: u8,
    /// What a peer is told to wait when no receive is posted: the 5-bit code.
    pub min_rnr_timer: u8,
    /// Reads and atomics under way at once, at most. With 0 there can be none.
    pub max_rd_atomic: u8,
    /// Of the peer's.
    pub max_dest_rd_atomic: u8,
    /// The peer may read.
    pub allow_read: bool,
    /// The peer may write.
    pub allow_write: bool,
    /// The peer may do atomics.
    pub allow_atomic: bool,
    /// Receives come from an SRQ: they are not flushed.
    pub srq: bool,
    /// What a target of dynamic connections is asked with.
    pub dc_key: u64,
    /// How many streams of an initiator of dynamic connections are in error when
    /// the whole of it is, as a power of two.
    pub log_errored_streams: u8,
    /// The number in datagrams sent, if not the QP's own (1 for GSI).
    pub wire_qpn: Option<u32>,
    /// What this queue pair sends to a multicast group does not come back to this HCA.
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

/// What can be asked of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpView {
    /// The state.
    pub state: QpState,
    /// The next PSN that a new packet gets.
    pub send_psn: u32,
    /// The PSN that is expected next.
    pub recv_psn: u32,
    /// A drain is not finished: work requests are under way.
    pub draining: bool,
    /// Work requests taken from the send queue and not ended.
    pub outstanding: usize,
}

/// How long a code of the "RNR NAK timer field" stands for, in nanoseconds
/// (InfiniBand Architecture Specification, volume 1, table "Encoding for RNR NAK
/// timer field").
#[must_use]
pub fn rnr_wait(code: u8) -> u64 {
    // In units of 10 us.
    const UNITS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    u64::from(UNITS[usize::from(code & 0x1f)]) * 10_000
}

/// How long a local ACK timeout is, in nanoseconds; none is for ever.
#[must_use]
pub fn ack_wait(code: u8) -> Option<u64> {
    let code = code & 0x1f;
    (code != 0).then(|| 4096u64 << code)
}
