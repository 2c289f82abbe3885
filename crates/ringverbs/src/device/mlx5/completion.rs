//! Decoding of completions.
//!
//! A CQE names its QP by a number, and decoding needs the QP's work queues. The
//! owner of the completion queue has a table of them. QPs that come and go on
//! other threads queue the change in [`Members`]; the owner applies it before it
//! decodes a CQE that it has seen, and so before the first CQE of a new QP. A
//! destroyed QP keeps its number until all of its CQEs have been read.
//!
//! QPs of this crate are created without data in CQEs, so decoding a CQE writes
//! to no memory of operations, whatever the CQE says and however late it is
//! read.

use std::mem::{MaybeUninit, offset_of};
use std::sync::Arc;

use ::mlx5::{Arming, CompletionError, DeviceContext, Timed, Work};
use ring::Span;
use uverbs::{Cq, WorkCompletion};

use super::members::{Armings, Members};
use super::too_many_entries;
use crate::context::Ctx;
use crate::device::completion::{Entry, MALFORMED};
use crate::error::Result;

/// Completions that are decoded at a time, a power of two.
const DECODED: usize = 64;

// Where `Entry` reads.
const _: () = {
    assert!(DECODED.is_power_of_two());
    assert!(offset_of!(Timed, completion) == 0);
    assert!(offset_of!(Timed, time) == size_of::<WorkCompletion>());
};

/// A completion queue with its decoded completions.
#[derive(Debug)]
pub(crate) struct Mlx5Completions {
    /// All initialised.
    decoded: [MaybeUninit<Timed>; DECODED],
    /// The decoded completions that were not released.
    span: Span,
    ring: ::mlx5::CqeRing,
    /// The capacity of the device's queue.
    entries: u32,
    /// CQEs that were read since the queue was created.
    read: u64,
    members: Arc<Members>,
    /// The state of `members` that was applied.
    changes_applied: u32,
    destroyed: Vec<DestroyedQp>,
    arming: Arc<Arming>,
    device: Arc<DeviceContext>,
    armings: Arc<Armings>,
    id: u64,
}

/// A destroyed QP, of which there may still be CQEs.
#[derive(Debug)]
struct DestroyedQp {
    work: Arc<Work>,
    /// There is none when so many have been read.
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
        let none = Timed {
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

    /// Where QPs that complete here queue their arrival and departure.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// The decoded completions that were not released.
    #[inline]
    pub fn unreleased(&self) -> Span {
        Span {
            at: self.span.at,
            end: self.span.end,
        }
    }

    /// The completions that are there now. A malformed one is reported, if
    /// `report` is set, as the first of a span.
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
        // SAFETY: a `Timed`, which is initialised and begins with a
        // `WorkCompletion`; it is written under `&mut` alone.
        unsafe { Entry::new(entry.as_ptr().cast()) }
    }

    /// # Safety
    /// As of the enum's; the position is checked nevertheless.
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

    /// Whether there is nothing to decode, apply or detach. (A malformed CQE that
    /// was left may be overwritten by the device, so that the queue is empty before
    /// destroyed QPs are detached.)
    #[inline]
    fn is_idle(&self) -> bool {
        self.ring.is_empty()
            && self.members.changes() == self.changes_applied
            && self.destroyed.is_empty()
    }

    /// Decodes the completions that are there, as many as the array has room for.
    /// All decoded ones were released.
    #[inline(never)]
    fn decode(&mut self, report: bool) {
        self.span = Span { at: 0, end: 0 };
        loop {
            if self.members.changes() != self.changes_applied && !self.apply_changes() {
                return;
            }
            // SAFETY: what was published to the queues that complete here was
            // published under their contracts. (No CQE writes to their memory:
            // `QpOptions::short_data`.)
            match unsafe { self.ring.poll(&mut self.decoded) } {
                Ok(count) => {
                    self.read += count as u64;
                    self.span.end = count;
                    break;
                }
                // It may be the first CQE of a QP that has arrived since.
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

    /// Applies the changes of `members`. Returns false if there is not enough
    /// memory; then nothing must be read.
    #[cold]
    #[inline(never)]
    fn apply_changes(&mut self) -> bool {
        let mut changes = self.members.lock();
        // The lock is held: at least all changes up to here are in it.
        let now = self.members.changes();
        while let Some((work, role)) = changes.arrived.last() {
            if let Err(error) = self.ring.attach(work, *role) {
                tracing::error!(%error, "completions are not read");
                return false;
            }
            changes.arrived.pop();
        }
        let detach_at = self.read + u64::from(self.ring.capacity());
        let destroyed = changes.destroyed.drain(..);
        self.destroyed
            .extend(destroyed.map(|work| DestroyedQp { work, detach_at }));
        self.changes_applied = now;
        true
    }

    /// Detaches the QPs of which there can be no CQE any more.
    #[cold]
    #[inline(never)]
    fn detach_destroyed(&mut self) {
        let all = self.ring.is_empty();
        let (read, ring) = (self.read, &mut self.ring);
        self.destroyed.retain(|destroyed| {
            let stays = !all && read < destroyed.detach_at;
            if !stays {
                ring.detach(&destroyed.work);
            }
            stays
        });
    }

    /// Requests an event for the next CQE that was not read, then returns whether
    /// there is a completion.
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
fn malformed() -> Timed {
    Timed {
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
