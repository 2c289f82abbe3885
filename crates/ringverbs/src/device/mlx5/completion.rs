//! Decoding of CQEs.
//!
//! A CQE names its QP by number, and decoding requires the QP's work queues, so the owner of
//! the completion queue has a table of QPs. Other threads queue the creation and destruction
//! of QPs in [`Members`]; the owner applies these changes before it decodes, and so before
//! the first CQE of a new QP. A destroyed QP stays in the table until all of its CQEs have
//! been read.
//!
//! QPs of this crate are created without data in CQEs, so decoding never writes to memory of
//! operations, whatever a CQE contains and however late it is read.

use std::mem::{MaybeUninit, offset_of};
use std::sync::Arc;

use ::mlx5::{Arming, CompletionError, DeviceContext, QpQueues, TimedCompletion};
use ring::Span;
use uverbs::{Cq, WorkCompletion};

use super::members::{Armings, Members};
use super::too_many_entries;
use crate::context::Ctx;
use crate::device::completion::{Entry, MALFORMED};
use crate::error::Result;

/// Maximum number of completions decoded at a time, a power of two.
const DECODED: usize = 64;

// The offsets at which `Entry` reads.
const _: () = {
    assert!(DECODED.is_power_of_two());
    assert!(offset_of!(TimedCompletion, completion) == 0);
    assert!(offset_of!(TimedCompletion, time) == size_of::<WorkCompletion>());
};

/// A completion queue with its decoded completions.
#[derive(Debug)]
pub(crate) struct Mlx5Completions {
    /// Every element is initialised.
    decoded: [MaybeUninit<TimedCompletion>; DECODED],
    /// The decoded completions that were not released.
    span: Span,
    ring: ::mlx5::CqeRing,
    /// The capacity of the device's queue.
    entries: u32,
    /// Number of CQEs read since the queue was created.
    read: u64,
    members: Arc<Members>,
    /// The count of changes of `members` that were applied.
    changes_applied: u32,
    destroyed: Vec<DestroyedQp>,
    arming: Arc<Arming>,
    device: Arc<DeviceContext>,
    armings: Arc<Armings>,
    id: u64,
}

/// A destroyed QP that may still have CQEs in the queue.
#[derive(Debug)]
struct DestroyedQp {
    queues: Arc<QpQueues>,
    /// The value of `read` at which no CQE of the QP is left.
    detach_at: u64,
}

impl Mlx5Completions {
    /// `id` is the identifier of the completion queue in events.
    pub fn new(
        (ring, arming): (::mlx5::CqeRing, Arming),
        entries: u32,
        id: u64,
        device: Arc<DeviceContext>,
        armings: &Arc<Armings>,
    ) -> Self {
        let arming = Arc::new(arming);
        armings.lock().insert(id, Arc::clone(&arming));
        let members = Arc::<Members>::default();
        let none = TimedCompletion {
            completion: WorkCompletion::default(),
            time: 0,
        };
        Self {
            decoded: [MaybeUninit::new(none); DECODED],
            span: Span { at: 0, end: 0 },
            ring,
            entries,
            read: 0,
            changes_applied: members.changes(),
            members,
            destroyed: Vec::new(),
            arming,
            device,
            armings: Arc::clone(armings),
            id,
        }
    }

    /// Returns the list in which QPs queue their creation and destruction.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Returns the decoded completions that were not released.
    #[inline]
    pub fn unreleased(&self) -> Span {
        Span {
            at: self.span.at,
            end: self.span.end,
        }
    }

    /// Returns the available completions. If `report` is set, a malformed one is reported as
    /// the first of a span.
    #[inline]
    pub fn available(&mut self, report: bool) -> Span {
        if self.span.at == self.span.end && !self.is_idle() {
            self.decode(report);
        }
        self.unreleased()
    }

    #[inline]
    pub fn entry(&self, span: &Span) -> Entry<'_> {
        let entry = &self.decoded[span.at % DECODED];
        // SAFETY: a `TimedCompletion`, which is initialised and begins with a
        // `WorkCompletion`; it is written under `&mut` alone.
        unsafe { Entry::new(entry.as_ptr().cast()) }
    }

    /// # Safety
    /// As for [`DeviceCompletions::entry_inside`](crate::device::DeviceCompletions); the
    /// position is checked nevertheless.
    #[inline]
    pub unsafe fn entry_inside(&self, span: &Span) -> Entry<'_> {
        self.entry(span)
    }

    #[inline]
    pub fn limit(&self, span: &mut Span, max: usize) -> usize {
        let count = max.min(span.end - span.at);
        span.end = span.at + count;
        count
    }

    #[inline]
    pub fn advance(&self, span: &mut Span) {
        span.at += 1;
    }

    #[inline]
    pub fn release(&mut self, span: &Span) {
        self.span.at = span.at;
    }

    /// Returns whether there is nothing to decode, apply or detach. (The device may overwrite
    /// an unread malformed CQE, so the queue can be empty before destroyed QPs are detached.)
    #[inline]
    fn is_idle(&self) -> bool {
        self.ring.is_empty()
            && self.members.changes() == self.changes_applied
            && self.destroyed.is_empty()
    }

    /// Decodes the available CQEs, as many as the array has room for. All decoded completions
    /// were released.
    #[inline(never)]
    fn decode(&mut self, report: bool) {
        self.span = Span { at: 0, end: 0 };
        loop {
            if self.members.changes() != self.changes_applied && !self.apply_changes() {
                return;
            }
            // SAFETY: work requests of the queues that complete here were published under
            // the contracts of `publish`. (No CQE writes to their memory:
            // `QpOptions::scatter_to_cqe`.)
            match unsafe { self.ring.poll(&mut self.decoded) } {
                Ok(count) => {
                    self.read += count as u64;
                    self.span.end = count;
                    break;
                }
                // It may be the first CQE of a QP that was created since.
                Err(_) if self.members.changes() != self.changes_applied => {}
                Err(error) => {
                    log(error);
                    self.ring.skip();
                    self.read += 1;
                    if report {
                        self.decoded[0].write(malformed());
                        self.span.end = 1;
                        break;
                    }
                }
            }
        }
        if !self.destroyed.is_empty() {
            self.detach_destroyed();
        }
    }

    /// Applies the changes of `members`. Returns false if memory is exhausted; then no CQE
    /// may be read.
    #[cold]
    #[inline(never)]
    fn apply_changes(&mut self) -> bool {
        let mut changes = self.members.lock();
        // Read under the lock, so that no later change is skipped.
        let now = self.members.changes();
        while let Some((queues, role)) = changes.created_qps.last() {
            if let Err(error) = self.ring.attach(queues, *role) {
                tracing::error!(%error, "completions are not read");
                return false;
            }
            changes.created_qps.pop();
        }
        let detach_at = self.read + u64::from(self.ring.capacity());
        let destroyed = changes.destroyed_qps.drain(..);
        self.destroyed
            .extend(destroyed.map(|queues| DestroyedQp { queues, detach_at }));
        self.changes_applied = now;
        true
    }

    /// Detaches destroyed QPs without CQEs in the queue.
    #[cold]
    #[inline(never)]
    fn detach_destroyed(&mut self) {
        let all = self.ring.is_empty();
        let (read, ring) = (self.read, &mut self.ring);
        self.destroyed.retain(|destroyed| {
            let stays = !all && read < destroyed.detach_at;
            if !stays {
                ring.detach(&destroyed.queues);
            }
            stays
        });
    }

    /// Requests notification for the next unread CQE, then returns whether there is a
    /// completion.
    pub fn arm_and_check(&mut self, _object: &Cq<Ctx>, solicited_only: bool) -> Result<bool> {
        self.arming.arm(self.device.cq_doorbell(), solicited_only);
        let span = self.available(true);
        Ok(span.at != span.end)
    }

    pub fn resize(&mut self, object: &Cq<Ctx>, cqe: u32) -> Result<u32> {
        let resized = ::mlx5::CompletionQueue::resize(object, &mut self.ring, cqe, None);
        self.entries = resized.map_err(|error| too_many_entries(error, cqe))?;
        Ok(self.entries)
    }

    pub fn capacity(&self) -> u32 {
        self.entries
    }
}

impl Drop for Mlx5Completions {
    fn drop(&mut self) {
        self.armings.lock().remove(&self.id);
    }
}

#[cold]
#[inline(never)]
fn malformed() -> TimedCompletion {
    TimedCompletion {
        completion: WorkCompletion {
            status: MALFORMED,
            ..WorkCompletion::default()
        },
        time: 0,
    }
}

#[cold]
#[inline(never)]
fn log(error: CompletionError) {
    tracing::error!(%error, "malformed completion");
}
