//! Request notification.

use std::sync::Arc;

use ring::{BlueFlame, DoorbellRecord, Epoch};

use crate::CqeRing;
use crate::memory::Records;

/// The consumer index has 24 bits.
const INDEX: u32 = 0xff_ffff;
/// `MLX5_CQ_DB_REQ_NOT_SOL`: an event for solicited completions only.
const SOLICITED_ONLY: u32 = 1 << 24;

/// Arms a completion queue.
///
/// Any thread, also while another polls: no lock is needed. CQEs that were read
/// but not released ([`CqeRing::publish`]) raise an event at once.
#[derive(Debug)]
pub struct Arming {
    consumed: DoorbellRecord,
    armed: DoorbellRecord,
    /// Number of events read. The device gets its two low bits: arming with the
    /// same number again has no effect.
    events: Epoch,
    /// The CQ number.
    pub(crate) cqn: u32,
    /// The doorbell records, which a resize keeps.
    _records: Arc<Records>,
}

impl Arming {
    pub(crate) fn new(ring: &CqeRing, cqn: u32) -> Self {
        let records = ring.records();
        Self {
            consumed: records.record(0),
            armed: records.record(1),
            events: Epoch::new(),
            cqn,
            _records: Arc::clone(records),
        }
    }

    /// Requests an event for the next completion, or the next solicited one,
    /// after the consumer index. `register` is
    /// [`crate::DeviceContext::cq_doorbell`].
    pub fn arm(&self, register: &BlueFlame, solicited_only: bool) {
        let kind = if solicited_only { SOLICITED_ONLY } else { 0 };
        let sequence = (self.events.now() & 3) << 28;
        let word = sequence | kind | self.consumed.published() & INDEX;
        self.armed.publish(word);
        let mut both = [0; 8];
        both[..4].copy_from_slice(&word.to_be_bytes());
        both[4..].copy_from_slice(&self.cqn.to_be_bytes());
        register.ring(u64::from_ne_bytes(both));
    }

    /// Counts an event: the next arming has another number.
    pub fn event(&self) {
        self.events.advance();
    }
}
