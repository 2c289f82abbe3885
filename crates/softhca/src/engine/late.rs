//! Completions and events that a device with [`Chaos`](crate::chaos::Chaos) writes late.

use super::chaos::Side;
use super::core::Core;
use super::cq::{Completion, UnreportedCompletions, opcode};
use crate::platform::Platform;

/// Bytes that a CQE may contain.
const MAX_DATA: usize = 64;

/// A completion that is not written yet.
#[derive(Debug)]
pub(crate) struct LateCompletion {
    cqn: u32,
    completion: Completion<'static>,
    data: [u8; MAX_DATA],
    length: usize,
}

impl LateCompletion {
    fn new(cqn: u32, completion: &Completion<'_>) -> Self {
        let mut data = [0; MAX_DATA];
        let length = completion.data.len().min(MAX_DATA);
        data[..length].copy_from_slice(&completion.data[..length]);
        Self {
            cqn,
            completion: Completion {
                data: &[],
                signature: None,
                ..*completion
            },
            data,
            length,
        }
    }
}

impl<P: Platform> Core<P> {
    /// Returns whether a completion is kept. Those of one queue stay in order.
    #[cold]
    pub(super) fn holds_completion(&mut self, cqn: u32, completion: &Completion<'_>) -> bool {
        let now = self.platform.now();
        let Some(chaos) = &mut self.chaos else {
            return false;
        };
        if completion.signature.is_some() {
            // Of a key, and before the completion of the work request.
            return false;
        }
        let side = match completion.opcode {
            opcode::REQUESTER | opcode::REQUESTER_ERROR => Side::Send,
            _ => Side::Receive,
        };
        let late = LateCompletion::new(cqn, completion);
        let kept = chaos.hold_completion((completion.qpn, side), now, late);
        kept.is_none()
    }

    /// Returns whether the event of a completion queue is kept.
    #[cold]
    pub(super) fn holds_wake_up(&mut self, cqn: u32) -> bool {
        let now = self.platform.now();
        let chaos = self.chaos.as_mut();
        chaos.is_some_and(|chaos| chaos.holds_wake_up(cqn, now))
    }

    /// Posts an event of a queue pair, now or later.
    pub(super) fn post_queue_pair_event(&mut self, kind: u8, qpn: u32) {
        let now = self.platform.now();
        let chaos = self.chaos.as_mut();
        if !chaos.is_some_and(|chaos| chaos.holds_event(qpn, kind, now)) {
            self.post_queue_event(kind, 0, qpn);
        }
    }

    /// Writes what is due.
    pub(crate) fn release_late(&mut self, now: u64) {
        while let Some((_, late)) = self.chaos.as_mut().and_then(|it| it.completions.pop(now)) {
            let completion = Completion {
                data: &late.data[..late.length],
                ..late.completion
            };
            self.write_completion(late.cqn, &completion);
        }
        while let Some((qpn, kind)) = self.chaos.as_mut().and_then(|it| it.events.pop(now)) {
            self.post_queue_event(kind, 0, qpn);
        }
        while let Some((cqn, ())) = self.chaos.as_mut().and_then(|it| it.wake_ups.pop(now)) {
            let Some(cq) = self.cqs.get_mut(cqn) else {
                continue;
            };
            // It stands for all completions until now, as with event moderation.
            cq.unreported = UnreportedCompletions::Nothing;
            let eqn = cq.eqn;
            self.post_completion_event(eqn, cqn);
        }
    }
}
