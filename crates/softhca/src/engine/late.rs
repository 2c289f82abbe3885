//! Completions and events that a device with [`Chaos`](crate::chaos::Chaos) writes late.

use super::chaos::{Side, WaitingWrite};
use super::core::Core;
use super::cq::{Completion, UnreportedCompletions, opcode};
use super::mkey::{Accessor, Rights};
use super::signed::AccessingQp;
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

    /// Returns whether a message that needs a receive is sent an RNR NAK. The peer's limit of
    /// retries is not known here: only where this end's own is infinite.
    #[cold]
    pub(super) fn is_not_ready(&mut self, qpn: u32) -> bool {
        const INFINITE: u8 = 7;
        let retries = self.qp(qpn).map(|qp| qp.config.rnr_retry);
        if retries != Some(INFINITE) || !self.peer_retransmits(qpn) {
            return false;
        }
        let chaos = self.chaos.as_mut();
        chaos.is_some_and(|chaos| chaos.is_not_ready(qpn))
    }

    /// Places the payload of the last packet of an RDMA write, if the write is permitted. The
    /// packet does so again after the others.
    pub(crate) fn place(&mut self, qpn: u32, write: &WaitingWrite, payload: &[u8]) {
        let rights = Rights::REMOTE_WRITE;
        let Some(pd) = self.qp(qpn).map(|qp| qp.pd) else {
            return;
        };
        let accessor = Accessor {
            qpn,
            pd,
            privileged: false,
        };
        let (key, va, length) = (write.rkey, write.va, write.length.into());
        let permitted = self.translate(accessor, key, va, length, rights, &mut |_, _, _| Ok(()));
        if permitted.is_err() || self.protected_keys != 0 {
            // The packets say why. Blocks with signatures are whole, and in order.
            return;
        }
        let va = va.wrapping_add(u64::from(write.arrived));
        let accessing_qp = AccessingQp {
            qpn,
            is_requester: false,
        };
        // A page may have become absent: the packets meet it as well.
        let _ = self.write_in_wire_format(accessing_qp, accessor, key, va, payload, rights);
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
