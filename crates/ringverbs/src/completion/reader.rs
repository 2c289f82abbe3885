//! Completion readers (`fi_cq`): entries in a chosen format, errors out of band.

use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uverbs::AsyncEventType;

use super::entry::{FLAG_GRH, received};
use super::format::Raw;
use super::wait::{self, MutexCond, Signaler, WaitObject, WaitSet, Waitable, Waiter, sealed};
use super::{
    CompletionQueue, CompletionQueueBuilder, CompletionQueueRef, ErrorEntry, Format, MessageFormat,
    ReadError, Status,
};
use crate::channel::is_again;
use crate::data::Payload;
use crate::inflight::Posted;
use crate::operation::Operation;
use crate::route_header::{ROUTE_HEADER, RawAddress, source_gid};
use crate::{AsyncEvent, CloseError, Context, Error, Result};

/// Number of reads of the asynchronous events after a possible overrun: the event arrives
/// slightly later than the entries.
const EVENT_READS: u32 = 64;

/// Number of completions that are retired at once.
const BATCH: usize = 64;

/// Builder of a [`CompletionReader`], from [`CompletionQueueBuilder::reader`].
#[derive(Debug)]
#[must_use]
pub struct ReaderBuilder<F: Format = MessageFormat> {
    queue: CompletionQueueBuilder,
    object: WaitObject,
    threshold: usize,
    format: PhantomData<F>,
}

impl CompletionQueueBuilder {
    /// Returns a builder of a reader of the queue, for entries in format `F`.
    pub fn reader<F: Format>(self) -> ReaderBuilder<F> {
        ReaderBuilder {
            queue: self,
            object: WaitObject::default(),
            threshold: 1,
            format: PhantomData,
        }
    }
}

impl<F: Format> ReaderBuilder<F> {
    /// Sets the object that blocking reads wait on.
    pub fn wait_object(mut self, object: WaitObject) -> Self {
        self.object = object;
        self
    }

    /// Sets the number of entries that a blocking read waits for (`FI_CQ_COND_THRESHOLD`);
    /// default 1. A read never waits for more entries than it has room for.
    pub fn threshold(mut self, entries: usize) -> Self {
        self.threshold = entries.max(1);
        self
    }

    /// Creates the queue and its reader.
    ///
    /// # Errors
    /// As [`CompletionQueueBuilder::build`]; [`Error::Invalid`] for a builder
    /// with a channel, since the reader creates its own; [`Error::System`] if the
    /// wait object cannot be created.
    pub fn build(self) -> Result<CompletionReader<F>> {
        if self.queue.has_channel() {
            return Err(Error::Invalid {
                what: "a reader creates the channel of its queue itself",
            });
        }
        let context = self.queue.context().clone();
        let waiter = Waiter::new(&context, &self.object)?;
        let mut queue = self.queue;
        if let Some(channel) = waiter.channel() {
            queue = queue.channel(channel);
        }
        let queue = queue.build_with(Some(waiter.events_fd()))?;
        Ok(CompletionReader {
            state: ReaderState {
                overrun: Overrun::No,
                event: None,
                since_empty: 0,
                event_reads: 0,
                signals_seen: waiter.signals(),
                failed: None,
                stashed: None,
            },
            queue_id: queue.id(),
            queue,
            waiter: Arc::new(waiter),
            threshold: self.threshold,
            format: PhantomData,
        })
    }
}

/// A completion queue that is read in one format, with separate successes and failures,
/// blocking or not (`fi_cq`).
///
/// It has one owner: a read that finds an entry takes no lock or atomic read-modify-write.
/// Any thread may read a [`SharedCompletionReader`](super::SharedCompletionReader).
///
/// ```no_run
/// # fn f(context: &ringverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use ringverbs::completion::{DataEntry, DataFormat, ReadError};
/// let queue = context.completion_queue().entries(64);
/// let mut reader = queue.reader::<DataFormat>().build()?;
/// // ... queue pairs on `reader.queue()`, operations ...
/// let mut entries: [DataEntry; 16] = Default::default();
/// match reader.read_timeout(&mut entries, None) {
///     Ok(count) => for entry in &mut entries[..count] {
///         println!("{}: {} bytes, data {:?}", entry.token, entry.len, entry.data);
///     },
///     Err(ReadError::ErrorAvailable) => println!("{}", reader.read_err().unwrap()),
///     Err(error) => return Err(error.into()),
/// }
/// # Ok(()) }
/// ```
///
/// A field that the format does not have cannot be named:
///
/// ```compile_fail,E0609
/// fn length(entry: ringverbs::completion::ContextEntry) -> usize {
///     entry.len
/// }
/// ```
pub struct CompletionReader<F: Format = MessageFormat> {
    state: ReaderState,
    queue: CompletionQueue,
    /// The id of the queue that the waiter was created for; a caller of `queue_mut` can
    /// replace `queue`.
    queue_id: u64,
    waiter: Arc<Waiter>,
    threshold: usize,
    format: PhantomData<F>,
}

struct ReaderState {
    overrun: Overrun,
    event: Option<AsyncEvent>,
    /// Entries read since the queue was last empty. An overrun requires a full queue, so at
    /// least its capacity.
    since_empty: usize,
    /// Remaining reads of the asynchronous events.
    event_reads: u32,
    /// Number of signals for which a blocking read has returned.
    signals_seen: u32,
    failed: Option<ErrorEntry>,
    /// An error of the queue that was detected after entries.
    stashed: Option<Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Overrun {
    No,
    /// Detected, but the remaining entries must still be read.
    Detected,
    /// Reported to the user; permanent.
    Reported,
}

impl ReaderState {
    /// Checks for an overrun; called when the queue is empty.
    #[cold]
    fn check_overrun(&mut self, capacity: usize, waiter: &Waiter) -> Result<(), ReadError> {
        if self.since_empty >= capacity {
            self.event_reads = EVENT_READS;
        }
        self.since_empty = 0;
        if self.overrun == Overrun::Detected {
            self.overrun = Overrun::Reported;
            return Err(ReadError::Overrun);
        }
        self.event_reads = self.event_reads.saturating_sub(1);
        self.take_event(waiter);
        // Entries that arrived between the check of the queue and the event are
        // read first.
        Ok(())
    }

    fn take_event(&mut self, waiter: &Waiter) {
        match waiter.events().read_event() {
            Ok(event) => {
                if event.event == AsyncEventType::CQ_ERR && self.overrun == Overrun::No {
                    self.overrun = Overrun::Detected;
                }
                self.event = Some(event.into());
            }
            Err(error) if is_again(&error) => {}
            // The device was removed; the next command reports it.
            Err(_) => self.event_reads = 0,
        }
    }
}

impl<F: Format> CompletionReader<F> {
    /// Returns the queue, to create queue pairs on.
    pub fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// Returns a handle of the queue, on which any thread can create queue pairs.
    pub fn handle(&self) -> CompletionQueueRef {
        self.queue.handle()
    }

    /// Returns the queue, to poll it in band (`ibv_poll_cq`), resize or drain it. The reader
    /// does not return completions that were polled there. If the queue is replaced through
    /// this reference, waiting fails with [`Error::Invalid`].
    pub fn queue_mut(&mut self) -> &mut CompletionQueue {
        &mut self.queue
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.queue.context()
    }

    /// Reads up to `out.len()` entries, in order, each once; returns 0 if there are none. `out`
    /// may be empty. Neither blocks nor allocates.
    ///
    /// # Errors
    /// [`ReadError::ErrorAvailable`] if the next operation has failed, until
    /// [`CompletionReader::read_err`] is called. [`ReadError::Overrun`],
    /// permanently, after completions were lost and the remaining ones were read.
    /// [`ReadError::Queue`] as [`CompletionQueue::poll`].
    #[inline]
    pub fn read(&mut self, out: &mut [F::Entry]) -> Result<usize, ReadError> {
        let mut slots = out.iter_mut();
        let max = slots.len();
        self.fill(max, |raw| {
            if let Some(slot) = slots.next() {
                *slot = F::entry(raw);
            }
            Ok(())
        })
    }

    /// Reads one entry, if there is one.
    ///
    /// # Errors
    /// As [`CompletionReader::read`].
    #[inline]
    pub fn read_one(&mut self) -> Result<Option<F::Entry>, ReadError> {
        let mut found = None;
        self.fill(1, |raw| {
            found = Some(F::entry(raw));
            Ok(())
        })?;
        Ok(found)
    }

    /// Reads entries with their senders (`fi_cq_readfrom`): what `find` returns for the address
    /// of a received datagram's sender; `S::default()` if the message does not state one.
    ///
    /// # Errors
    /// As [`CompletionReader::read`]; if `find` returns `None`, the message is an error entry
    /// (`EADDRNOTAVAIL`) with the sender's address.
    pub fn read_from<S: Default>(
        &mut self,
        out: &mut [(F::Entry, S)],
        mut find: impl FnMut(&RawAddress) -> Option<S>,
    ) -> Result<usize, ReadError> {
        let mut slots = out.iter_mut();
        let max = slots.len();
        self.fill(max, |raw| {
            let source = match sender(&raw) {
                None => S::default(),
                Some(address) => match find(&address) {
                    Some(source) => source,
                    None => return Err(unknown(raw, address)),
                },
            };
            if let Some(slot) = slots.next() {
                *slot = (F::entry(raw), source);
            }
            Ok(())
        })
    }

    /// Returns the failed operation that [`ReadError::ErrorAvailable`] announces.
    pub fn read_err(&mut self) -> Option<ErrorEntry> {
        self.state.failed.take()
    }

    /// Passes up to `max` entries to `put`; an entry that `put` refuses becomes an error
    /// entry.
    #[inline]
    fn fill(
        &mut self,
        max: usize,
        mut put: impl FnMut(Raw<'_>) -> Result<(), ErrorEntry>,
    ) -> Result<usize, ReadError> {
        loop {
            let count = self.fill_once(max, &mut put, drop)?;
            if count > 0 || max == 0 || !self.may_be_overrun()? {
                return Ok(count);
            }
        }
    }

    /// Called when the queue is empty. Returns whether to read again because of
    /// an overrun.
    #[inline]
    fn may_be_overrun(&mut self) -> Result<bool, ReadError> {
        let state = &mut self.state;
        let capacity = self.queue.capacity() as usize;
        if state.since_empty < capacity && state.overrun == Overrun::No && state.event_reads == 0 {
            state.since_empty = 0;
            return Ok(false);
        }
        let before = state.overrun;
        state.check_overrun(capacity, &self.waiter)?;
        Ok(state.overrun != before)
    }

    #[inline]
    fn fill_once(
        &mut self,
        max: usize,
        put: &mut impl FnMut(Raw<'_>) -> Result<(), ErrorEntry>,
        earlier: impl FnMut(Posted),
    ) -> Result<usize, ReadError> {
        let state = &mut self.state;
        if state.failed.is_some() {
            return Err(ReadError::ErrorAvailable);
        }
        if let Some(error) = state.stashed.take() {
            return Err(error.into());
        }
        if state.overrun == Overrun::Reported {
            return Err(ReadError::Overrun);
        }
        let failed = &mut state.failed;
        let count = self.queue.reap_while(
            max,
            |entry, retired| {
                let wc = &entry.read();
                let taken = retired.with(|mut posted| {
                    if wc.status != Status::SUCCESS.0 {
                        return Err(ErrorEntry::new(wc, posted));
                    }
                    if posted.operation == Operation::Receive {
                        posted.payload.received(received(wc.opcode, wc.byte_len));
                    }
                    put(Raw {
                        wc,
                        token: posted.token,
                        operation: posted.operation,
                        payload: posted.payload,
                    })
                });
                *failed = taken.err();
                failed.is_none()
            },
            earlier,
        )?;
        state.since_empty = state.since_empty.saturating_add(count);
        if state.failed.is_some() {
            return match count {
                0 | 1 => Err(ReadError::ErrorAvailable),
                // The failed one was counted.
                _ => Ok(count - 1),
            };
        }
        Ok(count)
    }

    /// Reads up to `out.len()` entries, and blocks until there are as many as the
    /// [threshold](ReaderBuilder::threshold), without limit if `timeout` is
    /// `None`. After the timeout it returns the available entries.
    ///
    /// # Errors
    /// As [`CompletionReader::read`]; [`ReadError::Again`] if there was no entry
    /// at the timeout, or a [`Signaler`] was used.
    pub fn read_timeout(
        &mut self,
        out: &mut [F::Entry],
        timeout: Option<Duration>,
    ) -> Result<usize, ReadError> {
        let max = out.len();
        self.block(max, timeout, |reader, done| reader.read(&mut out[done..]))
    }

    /// As [`CompletionReader::read_timeout`], with senders (`fi_cq_sreadfrom`).
    ///
    /// # Errors
    /// As [`CompletionReader::read_timeout`] and [`CompletionReader::read_from`].
    pub fn read_from_timeout<S: Default>(
        &mut self,
        out: &mut [(F::Entry, S)],
        mut find: impl FnMut(&RawAddress) -> Option<S>,
        timeout: Option<Duration>,
    ) -> Result<usize, ReadError> {
        let max = out.len();
        self.block(max, timeout, |reader, done| {
            reader.read_from(&mut out[done..], &mut find)
        })
    }

    fn block(
        &mut self,
        max: usize,
        timeout: Option<Duration>,
        mut read: impl FnMut(&mut Self, usize) -> Result<usize, ReadError>,
    ) -> Result<usize, ReadError> {
        if max == 0 {
            return read(self, 0);
        }
        let want = self.threshold.min(max);
        let deadline = wait::deadline(timeout);
        let mut done = 0;
        loop {
            match read(self, done) {
                Ok(count) => done += count,
                Err(error) => return self.entries_before_error(done, error),
            }
            if done >= want {
                return Ok(done);
            }
            if self.signalled() || wait::is_over(deadline) {
                return if done > 0 {
                    Ok(done)
                } else {
                    Err(ReadError::Again)
                };
            }
            if let Err(error) = self.sleep(deadline) {
                return self.entries_before_error(done, error.into());
            }
        }
    }

    /// Returns `done` if entries were read before the error, which the next read then reports;
    /// otherwise returns the error.
    pub(super) fn entries_before_error(
        &mut self,
        done: usize,
        error: ReadError,
    ) -> Result<usize, ReadError> {
        if done == 0 {
            return Err(error);
        }
        // The other errors report themselves again.
        if let ReadError::Queue(error) = error {
            self.state.stashed = Some(error);
        }
        Ok(done)
    }

    /// Takes a batch of completions without entries, and the unsignalled operations that they
    /// retire; passes the token and memory of each to `each`, and returns their number.
    ///
    /// # Errors
    /// As [`CompletionReader::read`].
    pub fn retire(&mut self, each: &mut dyn FnMut(u64, Payload)) -> Result<usize, ReadError> {
        loop {
            let each = std::cell::RefCell::new(&mut *each);
            let mut earlier = 0;
            let count = self.fill_once(
                BATCH,
                &mut |raw: Raw<'_>| {
                    (each.borrow_mut())(raw.token, raw.payload);
                    Ok(())
                },
                |posted| {
                    earlier += 1;
                    (each.borrow_mut())(posted.token, posted.payload);
                },
            )?;
            if count + earlier > 0 || !self.may_be_overrun()? {
                return Ok(count + earlier);
            }
        }
    }

    /// Returns whether there was a signal since the last call.
    fn signalled(&mut self) -> bool {
        let now = self.waiter.signals();
        std::mem::replace(&mut self.state.signals_seen, now) != now
    }

    /// Sleeps until the queue must be checked.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<()> {
        let before = self.waiter.wakeups();
        if self.waiter.channel().is_some() && self.arm()? {
            return Ok(());
        }
        self.waiter.sleep(before, deadline)?;
        self.consume_events()
    }

    /// Arms the reader and returns whether the caller may wait (`fi_trywait`): there is nothing
    /// to read, and the next completion will make the descriptor readable or notify the
    /// condition variable. After waking, call
    /// [`CompletionReader::consume_events`].
    ///
    /// # Errors
    /// [`ReadError::Queue`] without a wait object that can be waited for.
    pub fn try_wait(&mut self) -> Result<bool, ReadError> {
        let state = &self.state;
        if state.failed.is_some() || state.stashed.is_some() || state.overrun != Overrun::No {
            return Ok(false);
        }
        Ok(!self.arm()?)
    }

    /// Waits until there is an entry, without reading it (`rpma_cq_wait`): arms, checks, sleeps
    /// and consumes the event in one call. Returns false after the timeout, or if a signaler
    /// was used.
    ///
    /// # Errors
    /// [`ReadError::Queue`] with a wait object that cannot be armed (`None` and
    /// `Yield`).
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, ReadError> {
        let deadline = wait::deadline(timeout);
        loop {
            let before = self.waiter.wakeups();
            if !self.try_wait()? {
                return Ok(true);
            }
            if self.signalled() || wait::is_over(deadline) {
                return Ok(false);
            }
            self.waiter.sleep(before, deadline)?;
            self.consume_events()?;
        }
    }

    /// Consumes the events that made the descriptor readable.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn consume_events(&mut self) -> Result<()> {
        self.recheck_events();
        self.waiter.consume_events()
    }

    /// Reads the asynchronous events at the next check: a wakeup may be due to one.
    pub(crate) fn recheck_events(&mut self) {
        self.state.event_reads = self.state.event_reads.max(1);
    }

    /// Returns a signaler, which wakes blocking reads from any thread.
    pub fn signaler(&self) -> Signaler {
        Signaler {
            waiter: Arc::clone(&self.waiter),
        }
    }

    /// Returns the mutex and condition variable, with that wait object.
    pub fn condvar(&self) -> Option<Arc<MutexCond>> {
        self.waiter.condvar().cloned()
    }

    /// Returns the descriptor, with a wait object that has one.
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.waiter.fd()
    }

    /// Takes the asynchronous event of this queue: an overrun.
    pub fn async_event(&mut self) -> Option<AsyncEvent> {
        if self.state.event.is_none() {
            self.state.take_event(&self.waiter);
        }
        self.state.event.take()
    }

    /// Closes the queue. Unread completions are lost, and the memory of their
    /// operations is released.
    ///
    /// # Errors
    /// Returns the reader with [`Error::Busy`] while queue pairs use it.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let Self {
            state,
            queue,
            queue_id,
            waiter,
            threshold,
            format,
        } = self;
        queue.close().map_err(|refused| {
            refused.map(|queue| Self {
                state,
                queue,
                queue_id,
                waiter,
                threshold,
                format,
            })
        })
    }

    pub(super) fn limit(&self) -> usize {
        self.threshold
    }

    /// Arms the queue if the wait object requires it. Returns true if there is something to
    /// read.
    pub(crate) fn arm_for_wait(&mut self) -> Result<bool> {
        if self.waiter.channel().is_none() {
            return Ok(false);
        }
        self.arm()
    }

    /// Checks that the reader still has this waiter: a caller with a `&mut` can replace the
    /// reader by another one, whose events arrive elsewhere.
    pub(super) fn check_waiter(&self, waiter: &Arc<Waiter>) -> Result<()> {
        if Arc::ptr_eq(&self.waiter, waiter) {
            return Ok(());
        }
        Err(Error::Invalid {
            what: "the reader was replaced: its events arrive elsewhere",
        })
    }

    fn arm(&mut self) -> Result<bool> {
        if self.queue.id() != self.queue_id {
            return Err(Error::Invalid {
                what: "the reader's queue was replaced: another channel has its events",
            });
        }
        self.queue.arm(false)
    }
}

/// Returns the sender of a message, if the message states it.
fn sender(raw: &Raw<'_>) -> Option<RawAddress> {
    if raw.operation != Operation::Receive || raw.wc.wc_flags & FLAG_GRH == 0 {
        return None;
    }
    Some(RawAddress {
        gid: source_gid(raw.payload.route_header()?)?,
        qp_num: raw.wc.src_qp,
    })
}

/// Builds the error of a message from an unknown sender (`FI_EADDRNOTAVAIL`).
#[cold]
fn unknown(raw: Raw<'_>, address: RawAddress) -> ErrorEntry {
    ErrorEntry {
        token: raw.token,
        flags: super::EntryFlags::of_success(&raw),
        len: Some((raw.wc.byte_len as usize).saturating_sub(ROUTE_HEADER)),
        overflow_len: None,
        data: raw.data(),
        tag: None,
        errno: libc::EADDRNOTAVAIL,
        provider: Status::SUCCESS,
        vendor_err: 0,
        qp_num: raw.wc.qp_num,
        source: Some(address),
        payload: raw.payload,
    }
}

/// The descriptor of the wait object, readable when the queue must be checked; without a
/// wait object, the descriptor of the queue's asynchronous events.
impl<F: Format> AsFd for CompletionReader<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.waiter.fd() {
            Some(fd) => fd,
            None => self.waiter.events_fd(),
        }
    }
}

impl<F: Format> AsRawFd for CompletionReader<F> {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<F: Format> sealed::WaitSetMember for CompletionReader<F> {
    fn is_in(&self, set: &WaitSet) -> bool {
        self.waiter.is_in(set)
    }

    fn has_entries(&mut self) -> Result<bool> {
        if self.signalled() {
            return Ok(true);
        }
        match self.try_wait() {
            Ok(may_wait) => Ok(!may_wait),
            Err(ReadError::Queue(error)) => Err(error),
            Err(_) => Ok(true),
        }
    }

    fn consume_events(&mut self) -> Result<()> {
        Self::consume_events(self)
    }
}

impl<F: Format> Waitable for CompletionReader<F> {}

impl<F: Format> fmt::Debug for CompletionReader<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionReader")
            .field("queue", &self.queue)
            .field("wait_object", &self.waiter)
            .finish()
    }
}
