//! Following work requests for an observer, from the doorbell to the completion.
//!
//! Nothing is followed without an observer. Work requests are parsed twice with one: when their
//! doorbell rings, and when they are carried out.

use roce::transport::{Operation, RecvDone, RecvWork, SendDone, SendWork, Status};

use super::core::Core;
use super::cq::CONSUMED;
use super::follower::{Followed, FollowedQueue, Follower};
use super::qp::{Queue, Ring, SendId};
use super::srq::SRQN_SHIFT;
use super::wqe::{self, LocalBuffers, MAX_SEND_WQE, WqeContext};
use crate::platform::Platform;
use crate::work::{CompletionLoad, Ended, Posted};

/// Returns what is known of a queue that nobody has followed.
fn unfollowed(ring: Option<&Ring>, cqn: u32) -> FollowedQueue {
    let next = ring.map_or((0, 0), |ring| (ring.head, ring.taken));
    FollowedQueue::new(cqn, next.0, next.1)
}

impl<P: Platform> Core<P> {
    /// Tells the observer of work requests the sends that were posted to a queue pair.
    #[cold]
    pub(crate) fn follow_sends(&mut self, qpn: u32) {
        let Some(mut follower) = self.follower.take() else {
            return;
        };
        if !follower.is_left(qpn) {
            let mut bytes = [0; MAX_SEND_WQE];
            while let Some(posted) = self.next_posted_send(&mut follower, qpn, &mut bytes) {
                if !follower.post(posted) {
                    break;
                }
            }
        }
        self.follower = Some(follower);
    }

    fn next_posted_send(
        &self,
        follower: &mut Follower,
        qpn: u32,
        bytes: &mut [u8; MAX_SEND_WQE],
    ) -> Option<Posted> {
        let Some(Queue::Qp(qp)) = self.queues.get(qpn) else {
            return None;
        };
        let ring = qp.send.as_ref().filter(|ring| ring.rung)?;
        let tail = self.platform.read_index(ring.doorbell).ok()? as u16;
        let followed = follower.queue_pairs.entry(qpn).or_insert_with(|| Followed {
            sends: unfollowed(Some(ring), qp.send_cq),
            receives: unfollowed(qp.recv.as_ref(), qp.recv_cq),
            is_left: false,
        });
        let sends = &mut followed.sends;
        if sends.next == tail {
            return None;
        }
        let Ok((length, _)) = ring.read_wqe(&self.platform, (sends.next, tail), None, bytes) else {
            // The device drops what follows a malformed one.
            sends.next = tail;
            return None;
        };
        let context = WqeContext {
            service: qp.service,
            pd: qp.pd,
            privileged: qp.privileged,
            strict: self.settings.strict,
        };
        let send = wqe::parse_send(&bytes[..length], &context);
        let number = sends.number;
        sends.next = sends.next.wrapping_add(length.div_ceil(wqe::BLOCK) as u16);
        sends.number = sends.number.wrapping_add(1);
        let expected = i32::from(send.signaled);
        sends.expected += u32::from(send.signaled);
        let cqn = sends.cqn;
        follower.expect(cqn, expected);
        let is_local = matches!(send.operation, Operation::Local);
        let (is_signaled, is_inline) = (send.signaled, !send.local.inline.is_empty());
        let work = self.send_work(qpn, send, number);
        Some(Posted {
            work: self.described_send(qpn, &work)?,
            is_signaled,
            is_inline: is_inline && !is_local,
            queue: self.completion_load(follower, cqn),
            data: (follower.is_of_data())
                .then(|| self.posted_data(qpn, &work))
                .flatten(),
        })
    }

    /// Tells the observer of work requests the receives that were posted to a queue pair.
    #[cold]
    pub(crate) fn follow_receives(&mut self, qpn: u32) {
        let Some(mut follower) = self.follower.take() else {
            return;
        };
        if !follower.is_left(qpn) {
            while let Some(posted) = self.next_posted_receive(&mut follower, qpn) {
                if !follower.post(posted) {
                    break;
                }
            }
        }
        self.follower = Some(follower);
    }

    fn next_posted_receive(&self, follower: &mut Follower, qpn: u32) -> Option<Posted> {
        let Some(Queue::Qp(qp)) = self.queues.get(qpn) else {
            return None;
        };
        let ring = qp.recv.as_ref()?;
        let tail = self.platform.read_index(ring.doorbell).ok()? as u16;
        let followed = follower.queue_pairs.entry(qpn).or_insert_with(|| Followed {
            sends: unfollowed(qp.send.as_ref(), qp.send_cq),
            receives: unfollowed(Some(ring), qp.recv_cq),
            is_left: false,
        });
        let receives = &mut followed.receives;
        let index = receives.next;
        if index == tail {
            return None;
        }
        receives.next = index.wrapping_add(1);
        receives.expected += 1;
        let cqn = receives.cqn;
        follower.expect(cqn, 1);
        let (local, length) = match super::qp::read_receive(&self.platform, ring, index) {
            Ok((_, (bytes, length))) => wqe::parse_receive(&bytes[..length], qp.pd, qp.privileged),
            Err(()) => (LocalBuffers::new(qp.pd, qp.privileged), 0),
        };
        let work = RecvWork {
            id: u64::from(index),
            length,
            local,
        };
        Some(Posted {
            work: self.described_receive(qpn, &work)?,
            is_signaled: true,
            is_inline: false,
            queue: self.completion_load(follower, cqn),
            data: None,
        })
    }

    /// Counts what may come to a completion queue. Its consumer index is read last: what the
    /// program has read before it posted is never counted.
    fn completion_load(&self, follower: &Follower, cqn: u32) -> CompletionLoad {
        let Some(cq) = self.cqs.get(cqn) else {
            return CompletionLoad {
                cqn,
                ignores_overrun: true,
                ..CompletionLoad::default()
            };
        };
        let expected = follower.expected.get(&cqn).copied().unwrap_or_default();
        let consumer = self.platform.read_index(cq.doorbell + CONSUMED);
        let unread = consumer.map_or(0, |consumer| cq.unread(consumer & 0xff_ffff));
        CompletionLoad {
            cqn,
            entries: 1 << cq.log_size,
            outstanding: expected.saturating_add(unread),
            ignores_overrun: cq.failed || cq.ignore_overrun,
        }
    }

    /// Tells the observer of work requests that a send has ended.
    #[cold]
    pub(crate) fn follow_send_done(
        &mut self,
        qpn: u32,
        work: &SendWork<LocalBuffers>,
        done: &SendDone,
    ) {
        let cqn = self.qp(qpn).map(|qp| qp.send_cq);
        let (Some(cqn), Some(follower)) = (cqn, &mut self.follower) else {
            return;
        };
        let id = SendId::unpack(work.id);
        let status = done.status();
        let ended = Ended {
            qpn,
            cqn,
            is_send: true,
            number: Some(id.number),
            status,
            length: done.length,
            has_completion: id.signaled || status != Status::Success,
        };
        follower.end(ended, id.signaled);
    }

    /// Tells the observer of work requests that a receive has ended.
    #[cold]
    pub(crate) fn follow_receive_done(
        &mut self,
        qpn: u32,
        work: &RecvWork<LocalBuffers>,
        done: &RecvDone,
    ) {
        let cqn = self.qp(qpn).map(|qp| qp.recv_cq);
        let (Some(cqn), Some(follower)) = (cqn, &mut self.follower) else {
            return;
        };
        let is_own = work.id >> SRQN_SHIFT == 0;
        let ended = Ended {
            qpn,
            cqn,
            is_send: false,
            number: is_own.then_some(work.id as u32),
            status: done.status(),
            length: done.length,
            has_completion: true,
        };
        follower.end(ended, is_own);
    }
}
