//! Asking a completion queue for an event.

use std::sync::Arc;

use ring::{BlueFlame, DoorbellRecord, Epoch};

use crate::CompletionRing;
use crate::memory::Records;

/// The consumer index has 24 bits.
const INDEX: u32 = 0xff_ffff;
/// `MLX5_CQ_DB_REQ_NOT_SOL`: an event for solicited completions only.
const SOLICITED_ONLY: u32 = 1 << 24;

/// Arms a completion queue.
///
/// Any thread, also one that is reading completions just then: it needs none of
/// the queue's locks. What was read but not published yet
/// ([`CompletionRing::publish`]) raises an event at once.
#[derive(Debug)]
pub struct Arming {
    consumed: DoorbellRecord,
    armed: DoorbellRecord,
    /// Events that were seen, of which the device is told two bits: it takes a
    /// second arming of the same number for a repetition.
    events: Epoch,
    /// The number that the device knows the queue by.
    cqn: u32,
    /// Where the records are, whatever becomes of the entries.
    _records: Arc<Records>,
}

impl Arming {
    pub(crate) fn new(ring: &CompletionRing, cqn: u32) -> Self {
        let records = ring.records();
        Self {
            consumed: records.record(0),
            armed: records.record(1),
            events: Epoch::new(),
            cqn,
            _records: Arc::clone(records),
        }
    }

    /// Asks for an event with the next completion, or the next solicited one,
    /// after those that were consumed. `register` is the device's for arming
    /// ([`crate::DeviceContext::arm_register`]).
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

    /// Takes note of an event: the next arming is another one.
    pub fn event(&self) {
        self.events.advance();
    }
}
