//! State shared by all queue pairs of a transport: outgoing packets and counters.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cause::DropCause;
use super::host::Host;
use crate::packet::{Packet, Pool};

/// Length of the longest message in bytes.
pub(super) const MAX_MESSAGE: u32 = 1 << 30;

/// Counters of the transport. They only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Packets sent.
    pub packets_sent: u64,
    /// Their bytes, from the first header of the link to the ICRC.
    pub bytes_sent: u64,
    /// Packets sent to a multicast group; included in `packets_sent`.
    pub multicasts_sent: u64,
    /// Their bytes.
    pub multicast_bytes_sent: u64,
    /// Packets received with a valid ICRC.
    pub packets_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Packets received for a multicast group; included in `packets_received`.
    pub multicasts_received: u64,
    /// Their bytes.
    pub multicast_bytes_received: u64,
    /// Request packets sent again; included in `packets_sent`.
    pub retransmitted: u64,
    /// Local ACK timeouts.
    pub timeouts: u64,
    /// Probes: the oldest and newest packet sent again before a timeout.
    pub probes: u64,
    /// NAKs received, not counting RNR NAKs.
    pub naks: u64,
    /// RNR NAKs received.
    pub rnr_naks: u64,
    /// Messages that found no receive posted, each time they were sent. Those over UC
    /// count as dropped.
    pub not_ready: u64,
    /// Duplicate requests received.
    pub duplicates: u64,
    /// Requests received with a PSN beyond the expected one; over UC, with any other
    /// than the expected one.
    pub out_of_sequence: u64,
    /// Responses received to no outstanding request.
    pub stale: u64,
    /// Frames dropped for a wrong ICRC.
    pub bad_icrc: u64,
    /// Frames dropped for malformed lengths or headers.
    pub malformed: u64,
    /// Packets dropped for a wrong partition key.
    pub pkey_violations: u64,
    /// Datagrams dropped for a wrong queue key.
    pub qkey_violations: u64,
    /// Requests over dynamic connections dropped for a wrong access key.
    pub dc_key_violations: u64,
    /// Packets received with a congestion mark.
    pub marked: u64,
    /// Congestion notifications sent.
    pub cnps_sent: u64,
    /// Congestion notifications received that named a queue pair, and came from its peer.
    pub cnps_handled: u64,
    /// Packets dropped for other reasons: unknown queue pair, wrong state, service or
    /// source, or refused by an unreliable service.
    pub dropped: u64,
}

/// State of the transport that all queue pairs share.
pub(super) struct Io {
    pub pool: Pool,
    pub out: VecDeque<Packet>,
    /// The queue pairs that have made these packets, if that is recorded.
    pub senders: Option<VecDeque<u32>>,
    pub counters: Counters,
    /// Time of the last [`Transport::run`](super::Transport::run).
    pub now: u64,
    /// The peer may not have had the time to respond; see
    /// [`Transport::set_patient`](super::Transport::set_patient).
    pub patient: bool,
    /// Payload of the request that is handed over without a packet: the largest MTU.
    pub payload: Box<[u8]>,
    /// [`Transport::confirm_sent`](super::Transport::confirm_sent) is called.
    pub confirmed: bool,
    /// Queue pairs whose NAK has not been confirmed to be sent.
    pub refusing: Vec<u32>,
    /// Cloned for each kept packet, so that the reference count is the number of kept packets.
    pub kept: Arc<()>,
}

impl Io {
    /// Counts and reports a packet that is dropped.
    pub fn drop_packet<H: Host>(&mut self, host: &mut H, qpn: Option<u32>, cause: DropCause) {
        *cause.counter(&mut self.counters) += 1;
        host.report(qpn, cause.into());
    }

    /// Records that a queue pair has made the last packets, if that is asked for.
    pub fn record_sender(&mut self, qpn: u32) {
        if let Some(senders) = &mut self.senders {
            senders.resize(self.out.len(), qpn);
        }
    }

    pub fn send(&mut self, packet: Packet) {
        self.counters.packets_sent += 1;
        self.counters.bytes_sent += packet.frame().len() as u64;
        self.out.push_back(packet);
    }
}
