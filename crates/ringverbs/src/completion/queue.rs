//! Completion queues with one owner.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ring::{Epoch, Span};
use uverbs::{Cq, CqInit};

use crate::channel::CompletionChannel;
use crate::completion::{Completion, CompletionQueueRef};
use crate::context::Ctx;
use crate::device::{self, Deadline, DeviceCompletions, Engine, Entry};
use crate::inflight::{OrderedTable, Posted, Reaper, Registry, Retired, Unmatched, WorkId};
use crate::{CloseError, Context, Error, Result};

/// Default size of a queue, in entries.
const DEFAULT_ENTRIES: u32 = 128;

/// Empty polls between two reads of the clock.
const SPINS_TO_CLOCK_READ: u32 = 1 << 6;
/// Empty polls between two system calls that check whether the device was removed; they
/// take milliseconds.
const SPINS_TO_DEVICE_CHECK: u32 = 1 << 18;
/// Maximum number of times that [`CompletionQueue::drive_if_empty`] runs an embedded device.
const TURNS: usize = 8;

/// Builder of a completion queue, from [`Context::completion_queue`].
#[derive(Debug)]
#[must_use]
pub struct CompletionQueueBuilder {
    context: Context,
    entries: u32,
    comp_vector: u32,
    channel: Option<CompletionChannel>,
    timestamps: bool,
}

impl Context {
    /// Returns a builder of a completion queue.
    pub fn completion_queue(&self) -> CompletionQueueBuilder {
        CompletionQueueBuilder {
            context: self.clone(),
            entries: 0,
            comp_vector: 0,
            channel: None,
            timestamps: false,
        }
    }
}

impl CompletionQueueBuilder {
    /// Sets the minimum number of entries; with 0, the default, the library chooses. A queue is
    /// never overrun if it has at least as many entries as operations can be outstanding on all
    /// of its queue pairs.
    pub fn entries(mut self, entries: u32) -> Self {
        self.entries = entries;
        self
    }

    /// Sets the completion vector of its events, less than
    /// [`Context::num_comp_vectors`]; default 0.
    pub fn comp_vector(mut self, comp_vector: u32) -> Self {
        self.comp_vector = comp_vector;
        self
    }

    /// Sets the channel that receives its events when it is armed.
    pub fn channel(mut self, channel: &CompletionChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// Requests timestamps: the time at which the device wrote each completion
    /// (`IBV_WC_EX_WITH_COMPLETION_TIMESTAMP`). They are available where
    /// completions are read in place:
    /// [`SuccessFields::timestamp`](super::SuccessFields::timestamp),
    /// [`raw::Entry::timestamp`](crate::raw::Entry::timestamp). ConnectX supports
    /// them, rdma_rxe does not.
    pub fn timestamps(mut self) -> Self {
        self.timestamps = true;
        self
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn has_channel(&self) -> bool {
        self.channel.is_some()
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Error::Limit`] for more entries than the device supports, or a
    /// completion vector out of range; [`Error::Unsupported`] for timestamps on a
    /// device without them; ENOMEM.
    pub fn build(self) -> Result<CompletionQueue> {
        self.build_with(None)
    }

    /// Creates the queue with its own file for asynchronous events.
    pub(super) fn build_with(self, async_fd: Option<BorrowedFd<'_>>) -> Result<CompletionQueue> {
        let Self {
            context,
            entries,
            comp_vector,
            channel,
            timestamps,
        } = self;
        if channel
            .as_ref()
            .is_some_and(|channel| !context.is_same(channel.context()))
        {
            return Err(Error::WrongDomain {
                what: "completion channel",
            });
        }
        let vectors = context.num_comp_vectors();
        if comp_vector >= vectors.max(1) {
            return Err(Error::Limit {
                what: "number of a completion vector",
                asked: comp_vector.into(),
                allowed: vectors.saturating_sub(1).into(),
            });
        }
        let entries = if entries == 0 {
            DEFAULT_ENTRIES
        } else {
            entries
        };
        let id = context.next_id();
        let init = CqInit {
            cqe: entries,
            user_handle: id,
            comp_vector,
            channel: channel.as_ref().map(AsFd::as_fd),
            async_fd,
            ..CqInit::default()
        };
        let provider = context.provider();
        let created = match provider.completion_queue(context.uverbs(), &init, timestamps) {
            Err(Error::Kernel(error)) if error.errno().raw() == libc::EINVAL => {
                let allowed = context.uverbs().query_device()?.max_cqe;
                return Err(if entries > allowed {
                    Error::Limit {
                        what: "entries of a completion queue",
                        asked: entries.into(),
                        allowed: allowed.into(),
                    }
                } else {
                    error.into()
                });
            }
            created => created?,
        };
        Ok(CompletionQueue {
            has_timestamps: timestamps,
            ring: ManuallyDrop::new(created.ring),
            reaper: Reaper::default(),
            destructions_seen: 0,
            first_consumed: false,
            engine: Engine::of_queue(&context, created.object.handle().0),
            shared: Arc::new(Shared {
                object: created.object,
                unmap_later: OnceLock::new(),
                queues: Registry::new(),
                members: created.members,
                destructions: Epoch::new(),
                channel,
                context,
                id,
                comp_vector,
            }),
        })
    }
}

/// The part of a completion queue that its queue pairs keep alive.
pub(crate) struct Shared {
    /// Destroyed before the ring is unmapped (`drop`).
    object: Cq<Ctx>,
    /// The ring of a dropped owner, to which the device may still write.
    unmap_later: OnceLock<DeviceCompletions>,
    /// The work queues whose operations complete here.
    pub(super) queues: Registry<OrderedTable>,
    members: device::Members,
    /// Counts work queues that were destroyed.
    destructions: Epoch,
    channel: Option<CompletionChannel>,
    pub(super) context: Context,
    id: u64,
    comp_vector: u32,
}

impl Shared {
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub fn object(&self) -> &Cq<Ctx> {
        &self.object
    }

    pub fn members(&self) -> &device::Members {
        &self.members
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Returns whether the owner has dropped the queue.
    pub(super) fn is_dropped(&self) -> bool {
        self.unmap_later.get().is_some()
    }

    /// Registers a work queue of up to `capacity` operations, which complete here.
    pub fn attach(&self, capacity: u32) -> Result<Arc<OrderedTable>> {
        self.queues.insert(|id| OrderedTable::new(id, capacity))
    }

    /// Called after the kernel has destroyed a work queue. If the poller has a reference to
    /// the work queue, it releases the operations in flight.
    pub fn detach(&self, table: &OrderedTable) {
        self.queues.remove(table.id());
        self.destructions.advance();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.object.has_ended() {
            return;
        }
        // If it is not destroyed, the device may still write to the ring, which stays mapped:
        // also if a panic ends this function.
        let kept = ManuallyDrop::new((self.unmap_later.take(), self.context.clone()));
        if let Err(error) = self.object.destroy() {
            if !self.object.has_ended() {
                tracing::error!(%error, "completion queue leaked, with its ring");
                return;
            }
        }
        drop(ManuallyDrop::into_inner(kept));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("handle", &self.object.handle().0)
            .field("queues", &self.queues.len())
            .finish()
    }
}

/// A completion queue with one owner.
///
/// Polling takes no lock, atomic read-modify-write, allocation or system call. The queue is
/// `Send`; [`SharedCompletionQueue`](crate::SharedCompletionQueue) is for concurrent use by
/// several threads.
///
/// An embedded device runs in the process's threads: an empty poll drives the device, and a
/// loop of empty polls sleeps for up to 5 ms at a time (a shared queue under its lock),
/// unless the caller drives the device (`ringverbs_embedded::Drive::Caller`).
///
/// Queue pairs keep the queue's kernel object alive. If the queue is dropped before them,
/// their completions are no longer read, and operations in flight are released with the
/// queue pairs.
pub struct CompletionQueue {
    pub(crate) ring: ManuallyDrop<DeviceCompletions>,
    pub(super) reaper: Reaper,
    /// The value of `Shared::destructions` up to which the reaper has released work queues.
    destructions_seen: u32,
    /// Whether a forgotten cursor has consumed the first entry without returning it to the
    /// device.
    pub(super) first_consumed: bool,
    /// Whether the entries have timestamps.
    pub(crate) has_timestamps: bool,
    pub(super) shared: Arc<Shared>,
    engine: Engine,
}

impl CompletionQueue {
    /// Returns a handle, with which any thread can create queue pairs while the owner polls.
    pub fn handle(&self) -> CompletionQueueRef {
        CompletionQueueRef::new(&self.shared)
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// Returns the identifier in its events; unique in the context.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Returns the capacity in completions, which is at least the requested number.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Returns the completion vector of its events, as set by
    /// [`CompletionQueueBuilder::comp_vector`]. Makes no system call: the kernel does not
    /// change the vector of a queue.
    pub fn comp_vector(&self) -> u32 {
        self.shared.comp_vector
    }

    /// Polls for up to `out.len()` completions, in order, each once (`ibv_poll_cq`). Returns
    /// the number that were written to the front of `out`, whose previous contents are
    /// dropped. Never blocks, except on an embedded device (see [`CompletionQueue`]).
    ///
    /// # Errors
    /// [`Error::Corruption`] for a completion that matches no operation in flight. It is
    /// discarded; earlier completions were returned by an earlier call, later ones are
    /// returned by the next call.
    pub fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        let mut slots = out.iter_mut();
        let max = slots.len();
        self.reap(
            max,
            |entry, retired| {
                if let Some(slot) = slots.next() {
                    slot.replace(entry, retired);
                }
            },
            drop,
        )
    }

    /// Polls for up to `max` completions, which are appended to `out`; returns their
    /// number. Allocates only if `out` has no room for them. Otherwise as
    /// [`CompletionQueue::poll`].
    ///
    /// ```no_run
    /// # fn f(cq: &mut ringverbs::CompletionQueue) -> ringverbs::Result<()> {
    /// let mut completions = Vec::with_capacity(16);
    /// cq.poll_into(&mut completions, 16)?;
    /// for completion in completions.drain(..) {
    ///     println!("{}: {:?}", completion.token, completion.result);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub fn poll_into(&mut self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.reap(
            max,
            |entry, retired| out.push(Completion::new(entry, retired)),
            drop,
        )
    }

    /// Polls for one completion. Never blocks, except on an embedded device (see
    /// [`CompletionQueue`]).
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub fn poll_one(&mut self) -> Result<Option<Completion>> {
        let mut found = None;
        self.reap(
            1,
            |entry, retired| found = Some(Completion::new(entry, retired)),
            drop,
        )?;
        Ok(found)
    }

    /// Spins until there is a completion. If none arrives (nothing is in flight, or the peer
    /// never sends), it spins forever; [`poll_for`](Self::poll_for) has a timeout.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`]; EIO if the device was removed.
    pub fn poll_until_one(&mut self) -> Result<Completion> {
        loop {
            if let Some(completion) = self.spin(None)? {
                return Ok(completion);
            }
        }
    }

    /// Spins until there is a completion, or returns `None` after the timeout. Polls at least
    /// once. A timeout beyond the range of the clock is unlimited.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll_until_one`].
    pub fn poll_for(&mut self, timeout: Duration) -> Result<Option<Completion>> {
        let deadline = self.engine.deadline(timeout);
        self.spin(deadline.as_ref())
    }

    fn spin(&mut self, deadline: Option<&Deadline>) -> Result<Option<Completion>> {
        // An empty poll of an embedded device may sleep.
        let polls_to_clock_read = if self.engine.is_embedded() {
            1
        } else {
            SPINS_TO_CLOCK_READ
        };
        loop {
            for _ in 0..SPINS_TO_DEVICE_CHECK / SPINS_TO_CLOCK_READ {
                for _ in 0..polls_to_clock_read {
                    if let Some(completion) = self.poll_one()? {
                        return Ok(Some(completion));
                    }
                    std::hint::spin_loop();
                }
                if deadline.is_some_and(Deadline::is_over) {
                    return Ok(None);
                }
            }
            // A query that the driver does not answer itself.
            if let Err(error) = self.shared.context.uverbs().query_gid_entry(1, 0) {
                if error.is_device_gone() {
                    // The device may have flushed everything when it was removed.
                    return self
                        .poll_one()?
                        .map_or(Err(error.into()), |last| Ok(Some(last)));
                }
            }
        }
    }

    /// Takes up to `max` completions of operations in flight from the queue, in order. Passes
    /// each completion with its operation to `each`, and operations that are retired without a
    /// completion that the user requested to `earlier`. Returns the number passed to `each`.
    ///
    /// All functions that read completions use this. Indices are read once and published
    /// once.
    ///
    /// # Errors
    /// [`Error::Corruption`] if the first entry matches no operation in flight; it is
    /// discarded. A later such entry is left to the next call.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        max: usize,
        mut each: impl FnMut(Entry<'_>, Retired<'_>),
        earlier: impl FnMut(Posted),
    ) -> Result<usize> {
        self.reap_while(
            max,
            |entry, retired| {
                each(entry, retired);
                true
            },
            earlier,
        )
    }

    /// As [`CompletionQueue::reap`], until `each` returns false.
    ///
    /// # Errors
    /// As [`CompletionQueue::reap`].
    #[inline]
    pub(crate) fn reap_while(
        &mut self,
        max: usize,
        mut each: impl FnMut(Entry<'_>, Retired<'_>) -> bool,
        mut earlier: impl FnMut(Posted),
    ) -> Result<usize> {
        let mut span = self.available(true);
        // Also without completions, because the next one may take long.
        self.release_destroyed();
        if span.at == span.end || max == 0 {
            self.polled(0);
            return Ok(0);
        }
        let shared = &*self.shared;
        let srq_tables = &shared.context.inner().srq_tables;
        let mut count = 0;
        let mut failed = None;
        while span.at != span.end && count < max {
            // SAFETY: the span is fresh, and the queue is not resized while this
            // borrows it.
            let entry = unsafe { self.ring.entry_inside(&span) };
            let id = WorkId(entry.wr_id());
            match self
                .reaper
                .reap(id, &shared.queues, srq_tables, &mut earlier)
            {
                Ok(retired) if retired.is_unreported() && entry.status() == 0 => {
                    retired.with(|mut posted| {
                        posted.attachment.record_outcome(true);
                        earlier(posted);
                    });
                }
                Ok(retired) => {
                    count += 1;
                    if !each(entry, retired) {
                        self.ring.advance(&mut span);
                        break;
                    }
                }
                Err(Unmatched::Stale) => {}
                Err(Unmatched::Corrupt) => {
                    if count == 0 {
                        self.ring.advance(&mut span);
                        failed = Some(Error::Corruption {
                            wr_id: id.0,
                            qp_num: entry.qp_num(),
                        });
                    }
                    break;
                }
            }
            self.ring.advance(&mut span);
        }
        self.ring.release(&span);
        self.polled(1);
        failed.map_or(Ok(count), Err)
    }

    /// Returns the unread completions. The raw layer does not report malformed CQEs.
    #[inline]
    pub(crate) fn available(&mut self, report: bool) -> Span {
        if self.first_consumed {
            self.release_consumed();
        }
        self.ring.available(report)
    }

    /// Returns whether there are completions. If there are none, releases destroyed queue pairs
    /// and drives an embedded device, without sleeping.
    pub(crate) fn drive_if_empty(&mut self) -> bool {
        let span = self.available(true);
        if span.at != span.end {
            return true;
        }
        self.release_destroyed();
        for _ in 0..TURNS {
            // An operation takes a few runs of the device.
            if !self.engine.help() {
                break;
            }
            let span = self.available(true);
            if span.at != span.end {
                return true;
            }
        }
        false
    }

    /// Called at the end of a poll, with the number of CQEs found.
    #[inline]
    pub(crate) fn polled(&self, count: usize) {
        self.engine.polled(count);
    }

    /// Releases the entry that a forgotten cursor consumed.
    #[cold]
    #[inline(never)]
    fn release_consumed(&mut self) {
        self.first_consumed = false;
        let mut span = self.ring.unreleased();
        // The entry no longer exists if the ring could not be mapped after a resize, or the
        // device has overwritten it.
        if span.at != span.end {
            self.ring.advance(&mut span);
            self.ring.release(&span);
        }
    }

    /// Releases work queues that were destroyed since the last call.
    #[inline]
    pub(super) fn release_destroyed(&mut self) {
        let now = self.shared.destructions.now();
        if now != self.destructions_seen {
            self.destructions_seen = now;
            self.reaper.purge(&self.shared.queues);
        }
    }

    /// Returns whether `shared` belongs to this queue.
    pub(crate) fn serves(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Takes the operations in flight from a destroyed work queue that completes here.
    pub(crate) fn drain(&mut self, table: &OrderedTable, each: impl FnMut(Posted)) {
        self.reaper.drain(table, each);
    }

    /// Returns the channel of its events.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.shared.channel.as_ref()
    }

    /// Requests notification for the next unread completion, or the next solicited one
    /// (`ibv_req_notify_cq`), then checks the queue again. Completions that are already in the
    /// queue raise no event, so the caller may wait for an event only if this returns `false`. A
    /// request for any completion stays until its event, also if one for solicited
    /// completions follows.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a channel; EIO if the device was removed.
    pub fn arm(&mut self, solicited_only: bool) -> Result<bool> {
        if self.shared.channel.is_none() {
            return Err(Error::Invalid {
                what: "a completion queue without a channel cannot be armed",
            });
        }
        if solicited_only {
            self.engine.arms();
        }
        let ready = self
            .ring
            .arm_and_check(&self.shared.object, solicited_only)?;
        self.engine.armed();
        Ok(ready)
    }

    /// Delays events until there are `count` completions or `period` microseconds
    /// have passed.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device does not support it.
    pub fn moderate(&self, count: u16, period: u16) -> Result<()> {
        Ok(self.shared.object.modify_moderation(count, period)?)
    }

    /// Resizes the queue to at least `entries`. Completions in it are kept, in
    /// order. Returns its new capacity.
    ///
    /// # Errors
    /// EINVAL if it holds more completions than `entries`, or the device does not support the
    /// size; the queue is unchanged. If the new ring cannot be mapped, the queue reads as empty
    /// from now on.
    pub fn resize(&mut self, entries: u32) -> Result<u32> {
        self.ring.resize(&self.shared.object, entries)
    }

    /// Closes the queue. Its unread completions are lost, and the memory of their
    /// operations is released.
    ///
    /// # Errors
    /// Returns the queue with [`Error::Busy`] while queue pairs or
    /// [handles](Self::handle) of it exist, or with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        if Arc::strong_count(&self.shared) > 1 {
            let error = Error::Busy {
                object: "completion queue",
                users: "queue pairs, or handles of it",
            };
            return Err(CloseError::new(self, error));
        }
        match self.shared.object.destroy() {
            Ok(_) => Ok(()),
            Err(_) if self.shared.object.has_ended() => Ok(()),
            Err(error) => Err(CloseError::new(self, error)),
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: taken only here, and not used afterwards.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        // The kernel object exists as long as queue pairs use it, and the ring
        // must outlive it.
        let _ = self.shared.unmap_later.set(ring);
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
