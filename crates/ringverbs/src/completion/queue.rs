//! The completion queue of one owner.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ring::{Epoch, Hint};
use uverbs::{Cq, CqInit};

use crate::channel::CompletionChannel;
use crate::completion::wait::{deadline, is_over};
use crate::completion::{Completion, CompletionQueueRef};
use crate::context::Ctx;
use crate::device::{self, CompletionRing, Entry};
use crate::inflight::{Fifo, Nothing, Posted, Reaper, Registry, Retired, WorkId};
use crate::{CloseError, Context, Error, Result};

/// Entries of a queue for which no size was asked.
const DEFAULT_ENTRIES: u32 = 128;

/// Polls that find nothing between looks at the clock.
const SPINS_TO_CLOCK: u32 = 1 << 6;
/// ... and between questions whether the device is still there, each a system
/// call: milliseconds.
const SPINS_TO_GONE: u32 = 1 << 18;

/// How to make a completion queue. From [`Context::completion_queue`].
#[derive(Debug)]
#[must_use]
pub struct CompletionQueueBuilder {
    context: Context,
    entries: u32,
    vector: u32,
    channel: Option<CompletionChannel>,
    timestamps: bool,
}

impl Context {
    /// A completion queue, to be described further and built.
    pub fn completion_queue(&self) -> CompletionQueueBuilder {
        CompletionQueueBuilder {
            context: self.clone(),
            entries: 0,
            vector: 0,
            channel: None,
            timestamps: false,
        }
    }
}

impl CompletionQueueBuilder {
    /// Entries at least; 0 leaves it to the library. A queue that is never
    /// overrun has as many as operations can be outstanding on all of its queue
    /// pairs.
    pub fn entries(mut self, entries: u32) -> Self {
        self.entries = entries;
        self
    }

    /// The completion vector that its events go to, less than
    /// [`Context::num_comp_vectors`].
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Where its events go when it is armed.
    pub fn channel(mut self, channel: &CompletionChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// Completions carry the time at which the device wrote them
    /// (`IBV_WC_EX_WITH_COMPLETION_TIMESTAMP`), for those who look at them where
    /// they lie: [`SuccessFields::timestamp`](super::SuccessFields::timestamp),
    /// [`raw::Entry::timestamp`](crate::raw::Entry::timestamp). ConnectX has it,
    /// rdma_rxe has not.
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

    /// Makes the queue, for one owner.
    ///
    /// # Errors
    /// [`Error::Limit`] for more entries than the device has, or a completion
    /// vector out of range; [`Error::Unsupported`] for timestamps, of a
    /// device that has none; ENOMEM.
    pub fn build(self) -> Result<CompletionQueue> {
        self.build_with(None)
    }

    /// With a file of its own for its asynchronous events.
    pub(super) fn build_with(self, async_fd: Option<BorrowedFd<'_>>) -> Result<CompletionQueue> {
        let Self {
            context,
            entries,
            vector,
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
        if vector >= vectors.max(1) {
            return Err(Error::Limit {
                what: "number of a completion vector",
                asked: vector.into(),
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
            comp_vector: vector,
            channel: channel.as_ref().map(AsFd::as_fd),
            async_fd,
            ..CqInit::default()
        };
        let provider = context.provider();
        let made = match provider.completion_queue(context.uverbs(), &init, timestamps) {
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
            made => made?,
        };
        Ok(CompletionQueue {
            decoded: made.ring.is_decoded(),
            timed: timestamps,
            ring: ManuallyDrop::new(made.ring),
            peek: made.peek,
            retired: Vec::new(),
            reaper: Reaper::default(),
            seen: 0,
            held: false,
            shared: Arc::new(Shared {
                object: ManuallyDrop::new(made.object),
                parked: OnceLock::new(),
                destroyed: Hint::new(0),
                queues: Registry::new(),
                completers: made.completers,
                departures: Epoch::new(),
                channel,
                context,
                id,
            }),
        })
    }
}

/// The part of a completion queue that its queue pairs keep.
pub(crate) struct Shared {
    /// Goes before the ring (`drop`).
    object: ManuallyDrop<Cq<Ctx>>,
    /// The ring, once its owner is gone: the device may still write there.
    parked: OnceLock<CompletionRing>,
    /// 1 once the object is destroyed.
    destroyed: Hint,
    /// The queues that complete here.
    pub(super) queues: Registry<Fifo>,
    /// The queue pairs that do, where the device needs to be read with them.
    completers: device::Completers,
    /// Counts the queues that have gone.
    departures: Epoch,
    channel: Option<CompletionChannel>,
    pub(super) context: Context,
    id: u64,
}

impl Shared {
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub fn object(&self) -> &Cq<Ctx> {
        &self.object
    }

    pub fn completers(&self) -> &device::Completers {
        &self.completers
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the owner is gone.
    pub(super) fn is_parked(&self) -> bool {
        self.parked.get().is_some()
    }

    /// Numbers a queue that completes here, for so many operations.
    pub fn enter(&self, capacity: u32) -> Result<Arc<Fifo>> {
        self.queues.insert(|id| Fifo::new(id, capacity))
    }

    /// A queue is gone: the kernel touches nothing of it any more. What was in
    /// flight is let go of, by the poller if it has met the queue.
    pub fn leave(&self, fifo: &Fifo) {
        self.queues.remove(fifo.id());
        self.departures.advance();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used afterwards.
        let object = unsafe { ManuallyDrop::take(&mut self.object) };
        if self.destroyed.get() != 0 {
            object.into_handle();
            return;
        }
        if let Err((object, error)) = object.destroy() {
            let gone = self.context.is_gone_by(&error);
            object.into_handle();
            if !gone {
                // The device may go on writing there: it stays.
                tracing::error!(%error, "completion queue leaked, with its ring");
                std::mem::forget(self.parked.take());
                std::mem::forget(self.context.clone());
            }
        }
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
/// Whoever has it polls: without a lock, an atomic read-modify-write, an
/// allocation or a system call. It is `Send`; for several threads at once there
/// is [`SharedCompletionQueue`](crate::SharedCompletionQueue).
///
/// Queue pairs keep what they need of it. If it is dropped before them nobody
/// reads their completions, and what is in flight stays theirs until they are
/// dropped.
pub struct CompletionQueue {
    pub(super) ring: ManuallyDrop<CompletionRing>,
    peek: ring::Peek,
    retired: Vec<ring::Retired>,
    pub(super) reaper: Reaper,
    /// Departures that the reaper knows of.
    seen: u32,
    /// A cursor has brought the first entry to an end and not given it back:
    /// it was forgotten.
    pub(super) held: bool,
    /// What the device writes is decoded before it is in the ring.
    decoded: bool,
    /// The ring has the times of completions.
    pub(crate) timed: bool,
    pub(super) shared: Arc<Shared>,
}

impl CompletionQueue {
    /// A handle, to make queue pairs on the queue from any thread while its
    /// owner polls.
    pub fn handle(&self) -> CompletionQueueRef {
        CompletionQueueRef::new(&self.shared)
    }

    #[inline(always)]
    pub(crate) fn ring(&self) -> &CompletionRing {
        &self.ring
    }

    /// The context that it lives in.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// What its events name it by; no other object of the context has the same.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Completions that it holds at most: at least as many as were asked for.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// Polls for up to `out.len()` completions, in order, each once. Returns
    /// how many were written to the front of `out`, whose old contents are
    /// dropped.
    ///
    /// # Errors
    /// [`Error::Corruption`] for a completion of nothing that was in flight.
    /// It is dropped; completions before it have been returned by an earlier
    /// call, those behind it come with the next.
    pub fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        let mut places = out.iter_mut();
        let max = places.len();
        self.reap(
            max,
            |entry, retired| {
                if let Some(place) = places.next() {
                    place.replace(entry, retired);
                }
            },
            drop,
        )
    }

    /// Polls for one completion.
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

    /// Spins until a completion is there. Where none is to come (nothing is in
    /// flight, or the peer never sends) it does so for ever: see
    /// [`poll_for`](Self::poll_for).
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`]; EIO if the device is gone.
    pub fn poll_until_one(&mut self) -> Result<Completion> {
        loop {
            if let Some(completion) = self.spin(None)? {
                return Ok(completion);
            }
        }
    }

    /// Spins until a completion is there, or the time is up: then `None`. It
    /// polls at least once. A time that the clock cannot tell has no end.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll_until_one`].
    pub fn poll_for(&mut self, timeout: Duration) -> Result<Option<Completion>> {
        self.spin(deadline(Some(timeout)))
    }

    fn spin(&mut self, deadline: Option<Instant>) -> Result<Option<Completion>> {
        loop {
            for _ in 0..SPINS_TO_GONE / SPINS_TO_CLOCK {
                for _ in 0..SPINS_TO_CLOCK {
                    if let Some(completion) = self.poll_one()? {
                        return Ok(Some(completion));
                    }
                    std::hint::spin_loop();
                }
                if is_over(deadline) {
                    return Ok(None);
                }
            }
            // What is not answered by the driver: see `Context::is_gone_by`.
            if let Err(error) = self.shared.context.uverbs().query_gid_entry(1, 0)
                && error.is_device_gone()
            {
                // It may have completed all by its end.
                return self
                    .poll_one()?
                    .map_or(Err(error.into()), |last| Ok(Some(last)));
            }
        }
    }

    /// Takes up to `max` completions of operations in flight out of the queue,
    /// in order. Each goes to `each`, with what the operation owned; what is
    /// brought to an end without a completion that the user asked for goes to
    /// `earlier`. Returns how many went to `each`.
    ///
    /// This is what all ways of reading completions stand on. Indices are read
    /// once and published once.
    ///
    /// # Errors
    /// [`Error::Corruption`] if the first entry names nothing in flight; it is
    /// dropped. If it is a later one, it is left to the next call.
    #[inline(always)]
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

    /// As [`CompletionQueue::reap`], until `each` says that it was enough.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub(crate) fn reap_while(
        &mut self,
        max: usize,
        mut each: impl FnMut(Entry<'_>, Retired<'_>) -> bool,
        mut earlier: impl FnMut(Posted),
    ) -> Result<usize> {
        let mut span = self.available();
        // Also if there is nothing to read: it may be long until there is.
        self.look_for_departures();
        if span.at == span.end || max == 0 {
            return Ok(0);
        }
        let shared = &*self.shared;
        let slabs = &shared.context.inner().slabs;
        let mut count = 0;
        let mut failed = None;
        while span.at != span.end && count < max {
            // SAFETY: the span is fresh, and the queue is not resized while this
            // borrows it.
            let place = unsafe { self.ring.entry_inside(&span) };
            let id = WorkId(place.wr_id());
            match self.reaper.reap(id, &shared.queues, slabs, &mut earlier) {
                Ok(retired) if retired.is_quiet() && place.status() == 0 => {
                    retired.with(|mut posted| {
                        posted.companion.settle(true);
                        earlier(posted);
                    });
                }
                Ok(retired) => {
                    count += 1;
                    if !each(place, retired) {
                        self.ring.advance(&mut span);
                        break;
                    }
                }
                Err(Nothing::Stale) => {}
                Err(Nothing::Corrupt) => {
                    if count == 0 {
                        self.ring.advance(&mut span);
                        failed = Some(Error::Corruption {
                            wr_id: id.0,
                            qp_num: place.qp_num(),
                        });
                    }
                    break;
                }
            }
            self.ring.advance(&mut span);
        }
        self.ring.release(&span);
        failed.map_or(Ok(count), Err)
    }

    /// The completions that are there now, and have not been looked at.
    #[inline(always)]
    pub(crate) fn available(&mut self) -> device::Span {
        if self.held | self.decoded {
            return self.prepared(true);
        }
        self.ring.ready()
    }

    /// The same, for the raw layer: without what makes no sense, of which
    /// nobody could be told.
    #[inline(always)]
    pub(crate) fn available_raw(&mut self) -> device::Span {
        if self.held | self.decoded {
            return self.prepared(false);
        }
        self.ring.ready()
    }

    /// The completions of a queue of which something is to be done first. Apart,
    /// so that others pay one condition for it.
    #[cold]
    #[inline(never)]
    fn prepared(&mut self, tell: bool) -> device::Span {
        if self.held {
            return self.give_back(tell);
        }
        self.ring.available(tell)
    }

    /// Gives back the entry that a cursor has left, and looks.
    #[cold]
    #[inline(never)]
    fn give_back(&mut self, tell: bool) -> device::Span {
        self.held = false;
        let mut span = self.ring.ready();
        // Not there any more if the ring could not be mapped when it was
        // resized, or the device has taken it back.
        if span.at != span.end {
            self.ring.advance(&mut span);
            self.ring.release(&span);
        }
        self.ring.available(tell)
    }

    /// Lets go of queues that have gone since this was asked last.
    #[inline(always)]
    pub(super) fn look_for_departures(&mut self) {
        let now = self.shared.departures.now();
        if now != self.seen {
            self.seen = now;
            self.reaper.purge(&self.shared.queues);
        }
    }

    /// Whether `fifo`'s operations complete here.
    pub(crate) fn serves(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Takes everything in flight out of a queue that completes here and whose
    /// kernel object is gone.
    pub(crate) fn drain(&mut self, fifo: &Fifo, each: impl FnMut(Posted)) {
        self.reaper.drain(fifo, each);
    }

    /// The channel that its events go to.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.shared.channel.as_ref()
    }

    /// Arms the queue and looks again, as one act: the next completion that
    /// comes (or the next that its sender solicited) puts an event into the
    /// channel. Those that are there already do not; so only if this says
    /// `false` may one wait for an event.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a channel; EIO if the device is gone.
    pub fn arm(&mut self, solicited_only: bool) -> Result<bool> {
        if self.shared.channel.is_none() {
            return Err(Error::Invalid {
                what: "a completion queue without a channel cannot be armed",
            });
        }
        self.ring.arm_and_look(&self.shared.object, solicited_only)
    }

    /// An event only after `count` completions or `period` microseconds.
    ///
    /// # Errors
    /// EOPNOTSUPP of a device that cannot.
    pub fn moderate(&self, count: u16, period: u16) -> Result<()> {
        Ok(self.shared.object.modify_moderation(count, period)?)
    }

    /// Resizes the queue to at least `entries`; what is in it stays in it, in
    /// order. Returns how many it holds now.
    ///
    /// # Errors
    /// EINVAL if it holds more completions than that, or the device cannot make
    /// it so large: nothing has changed. If the new queue cannot be mapped, it
    /// reads as empty from now on.
    pub fn resize(&mut self, entries: u32) -> Result<u32> {
        self.ring
            .resize(&self.shared.object, &self.peek, &mut self.retired, entries)
    }

    /// Closes the queue. Completions that are in it are lost; their operations'
    /// resources are released.
    ///
    /// # Errors
    /// [`Error::Busy`] with the queue, while queue pairs use it or there are
    /// [handles](Self::handle) of it; the kernel's reason.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        if Arc::strong_count(&self.shared) > 1 {
            let error = Error::Busy {
                object: "completion queue",
                users: "queue pairs, or handles of it",
            };
            return Err(CloseError::new(self, error));
        }
        let object = &self.shared.object;
        match uverbs::cq::destroy(object.context(), object.handle()) {
            Ok(_) => {}
            Err(error) if self.shared.context.is_gone_by(&error) => {}
            Err(error) => return Err(CloseError::new(self, error)),
        }
        self.shared.destroyed.set(1);
        Ok(())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used afterwards.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        // The kernel's side lives on while queue pairs use it, and what it
        // writes to outlives it.
        let _ = self.shared.parked.set(ring);
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
