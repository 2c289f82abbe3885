//! The completion queue of futures, and its driver.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context as Task, Poll, ready};

use super::queue_pair;
use super::slots::{EndReason, WakeList};
use crate::completion::{
    Completion, CompletionQueueBuilder, CompletionQueueRef, CompletionReader, ContextFormat,
    ReadError, Signaler, WaitObject,
};
use crate::operation::Operation;
use crate::{AsyncEventType, Context, Error, QueuePair, Result};

/// Maximum number of completions delivered at once.
const BATCH: usize = 16;
/// Number of batches after which a driver yields to other tasks.
const ROUNDS: usize = 16;

/// Number of reads of the asynchronous events after a possible overrun: the event arrives
/// slightly later than the entries.
const EVENT_READS: u32 = 64;

/// The slot of an operation without a future.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Returns the token of an operation: its queue pair's index, and its slot.
pub(super) fn token(index: u32, slot: u32) -> u64 {
    u64::from(index) << 32 | u64::from(slot)
}

/// A completion queue that delivers completions to the futures of its operations.
///
/// A handle: clones refer to the same queue. Each
/// [`AsyncQueuePair`](super::AsyncQueuePair) on it keeps it alive.
///
/// Like any completion queue, it must have room for all operations that can be outstanding
/// on its queue pairs: after an overrun all of them fail with
/// [`Cause::Queue`](super::Cause::Queue).
#[derive(Clone)]
pub struct AsyncCompletionQueue {
    pub(super) shared: Arc<Shared>,
}

/// The state that the handles, queue pairs, futures and driver share.
pub(super) struct Shared {
    state: Mutex<QueueState>,
    signaler: Signaler,
    handle: CompletionQueueRef,
    /// Whether a driver waits for completions.
    driven: AtomicBool,
}

struct QueueState {
    reader: CompletionReader<ContextFormat>,
    /// The queue pairs, by the index in their tokens.
    queue_pairs: Vec<Option<Arc<queue_pair::Shared>>>,
    /// The indices of queue pairs with a shared receive queue, by queue pair number: tokens of
    /// shared receives contain no index.
    srq_consumers: HashMap<u32, usize>,
    /// The reason why the queue can no longer be read.
    broken: Option<Arc<ReadError>>,
    /// Completions read since the queue was last empty.
    since_empty: usize,
    /// Remaining reads of the asynchronous events.
    event_reads: u32,
}

impl AsyncCompletionQueue {
    /// Creates a completion queue and its driver, which the caller runs by [`Driver::run`] in a
    /// task, or by [`Driver::run_blocking`] in a thread. If it is dropped instead, waiting
    /// tasks are polled repeatedly.
    ///
    /// # Errors
    /// As [`ReaderBuilder::build`](crate::completion::ReaderBuilder::build).
    pub fn new(queue: CompletionQueueBuilder) -> Result<(Self, Driver)> {
        let this = Self::with_wait_object(queue, WaitObject::Fd)?;
        let driver = Driver {
            shared: Arc::downgrade(&this.shared),
            signaler: this.shared.signaler.clone(),
        };
        Ok((this, driver))
    }

    /// Creates a completion queue without a driver: waiting tasks are polled repeatedly instead
    /// of sleeping, like a loop of [`CompletionQueue::poll`](crate::CompletionQueue::poll).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn polled(queue: CompletionQueueBuilder) -> Result<Self> {
        Self::with_wait_object(queue, WaitObject::None)
    }

    fn with_wait_object(queue: CompletionQueueBuilder, object: WaitObject) -> Result<Self> {
        let reader = queue.reader().wait_object(object).build()?;
        let shared = Arc::new(Shared {
            signaler: reader.signaler(),
            handle: reader.handle(),
            driven: AtomicBool::new(false),
            state: Mutex::new(QueueState {
                reader,
                queue_pairs: Vec::new(),
                srq_consumers: HashMap::new(),
                broken: None,
                since_empty: 0,
                event_reads: 0,
            }),
        });
        Ok(Self { shared })
    }

    /// Returns a handle for creating queue pairs. They must be converted to an
    /// [`AsyncQueuePair`](super::AsyncQueuePair) before anything is posted: completions of
    /// other queue pairs are dropped with their memory.
    pub fn handle(&self) -> CompletionQueueRef {
        self.shared.handle.clone()
    }

    /// Returns the capacity in completions.
    pub fn capacity(&self) -> u32 {
        self.shared.lock().reader.queue().capacity()
    }

    /// Resizes the queue, for example before a queue pair is added; see
    /// [`CompletionQueue::resize`](crate::CompletionQueue::resize).
    ///
    /// # Errors
    /// As [`CompletionQueue::resize`](crate::CompletionQueue::resize).
    pub fn resize(&self, entries: u32) -> Result<u32> {
        self.shared.lock().reader.queue_mut().resize(entries)
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.shared.handle.context()
    }
}

impl From<&AsyncCompletionQueue> for CompletionQueueRef {
    fn from(queue: &AsyncCompletionQueue) -> Self {
        queue.handle()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Each completion is read and delivered in one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a driver wakes the tasks. The caller must hold the lock of the slots
    /// that the driver would wake.
    pub fn is_driven(&self) -> bool {
        self.driven.load(Ordering::Relaxed)
    }

    /// Delivers the available completions, unless another thread is doing so.
    pub fn deliver_ready(&self) {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let mut wake_list = WakeList::default();
        let driven = self.is_driven();
        let count = state.deliver(!driven, &mut wake_list);
        // With a driver, the driver detects it.
        let overrun = !driven && count == 0 && state.is_overrun();
        drop(state);
        wake_list.wake();
        if overrun {
            self.fail(ReadError::Overrun);
        }
    }

    /// Adds a queue pair.
    ///
    /// # Errors
    /// Returns the queue pair if it cannot be used here.
    pub fn attach(
        self: &Arc<Self>,
        qp: QueuePair,
        make: impl FnOnce(QueuePair, u32) -> queue_pair::Shared,
    ) -> Result<Arc<queue_pair::Shared>, (QueuePair, Error)> {
        let mut state = self.lock();
        let what = if !qp.completes_in(state.reader.queue()) {
            "this is not the completion queue of the queue pair"
        } else if qp.in_flight() != (0, 0) {
            "operations are in flight that have no futures"
        } else {
            let free = state.queue_pairs.iter().position(Option::is_none);
            let index = free.unwrap_or_else(|| {
                state.queue_pairs.push(None);
                state.queue_pairs.len() - 1
            });
            if qp.has_srq() {
                state.srq_consumers.insert(qp.qp_num(), index);
            }
            let shared = Arc::new(make(qp, index as u32));
            if let Some(error) = &state.broken {
                let end = EndReason::Queue(Arc::clone(error));
                shared.slots().end(&end, &mut WakeList::default());
            }
            state.queue_pairs[index] = Some(Arc::clone(&shared));
            return Ok(shared);
        };
        drop(state);
        Err((qp, Error::Invalid { what }))
    }

    /// Destroys a queue pair. Its futures complete, with the memory of their operations.
    pub fn detach(&self, shared: &queue_pair::Shared, qp: QueuePair) {
        let mut wake_list = WakeList::default();
        let mut state = self.lock();
        // Operations that have completed end with their own results.
        let capacity = state.reader.queue().capacity() as usize;
        for _ in 0..=capacity / BATCH {
            if state.deliver(false, &mut wake_list) == 0 {
                break;
            }
        }
        if let Some(entry) = state.queue_pairs.get_mut(shared.index as usize) {
            *entry = None;
        }
        state.srq_consumers.remove(&shared.qp_num);
        let released = qp.close_and_drain(state.reader.queue_mut(), None);
        drop(state);
        let mut slots = shared.slots();
        match released {
            Ok(released) => {
                for operation in released {
                    if operation.operation == Operation::Receive {
                        slots.close_receive(operation.payload, &mut wake_list);
                    } else {
                        slots.close_slot(operation.token as u32, operation.payload, &mut wake_list);
                    }
                }
            }
            // The queue pair is dropped with the error, which leaks it and its operations.
            Err(refused) => tracing::error!(error = %refused.error, "queue pair not closed"),
        }
        slots.end(&EndReason::Closed, &mut wake_list);
        drop(slots);
        wake_list.wake();
    }

    /// Fails all futures, because the queue can no longer be read.
    fn fail(&self, error: ReadError) -> Arc<ReadError> {
        let mut wake_list = WakeList::default();
        let mut state = self.lock();
        let error = Arc::clone(state.broken.get_or_insert_with(|| Arc::new(error)));
        let end = EndReason::Queue(Arc::clone(&error));
        for shared in state.queue_pairs.iter().flatten() {
            shared.slots().end(&end, &mut wake_list);
        }
        drop(state);
        wake_list.wake();
        // Ends a driver that has started concurrently.
        self.signaler.signal();
        error
    }

    /// Called when a driver starts or ends.
    fn set_driven(&self, driven: bool) {
        let mut wake_list = WakeList::default();
        let state = self.lock();
        self.driven.store(driven, Ordering::Relaxed);
        if !driven {
            // Tasks that are already registered are polled repeatedly from now on; later
            // ones find no driver.
            for shared in state.queue_pairs.iter().flatten() {
                shared.slots().wake_all(&mut wake_list);
            }
        }
        drop(state);
        wake_list.wake();
    }

    /// Delivers everything, then arms the queue. Returns true if there may be more.
    ///
    /// # Errors
    /// An overrun, possibly detected earlier by a task; the device was removed. All futures
    /// have failed.
    fn drive(&self) -> Result<bool, Arc<ReadError>> {
        for round in 0..ROUNDS {
            let mut wake_list = WakeList::default();
            let mut state = self.lock();
            if let Some(error) = &state.broken {
                return Err(Arc::clone(error));
            }
            let count = state.deliver(false, &mut wake_list);
            let armed = match count {
                // A wakeup without a completion may be due to an asynchronous event.
                0 => state.arm(round == 0),
                _ => Ok(false),
            };
            drop(state);
            wake_list.wake();
            if armed.map_err(|error| self.fail(error))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Wakes the driver, so that it ends.
        self.signaler.signal();
    }
}

impl QueueState {
    /// Delivers up to [`BATCH`] completions to their futures; returns their number. With
    /// `may_sleep`, an empty poll of an embedded device may sleep.
    fn deliver(&mut self, may_sleep: bool, wake_list: &mut WakeList) -> usize {
        let (queue_pairs, srq_consumers) = (&self.queue_pairs, &self.srq_consumers);
        let queue = self.reader.queue_mut();
        if !may_sleep && !queue.drive_if_empty() {
            return 0;
        }
        let at = |index: usize| queue_pairs.get(index)?.as_ref();
        let find = |token: u64| at((token >> 32) as usize);
        let consumer = |number: u32| at(*srq_consumers.get(&number)?);
        let wake_list = RefCell::new(wake_list);
        let read = queue.reap(
            BATCH,
            |entry, retired| {
                let completion = Completion::new(entry, retired);
                let number = completion.qp_num;
                // The number check excludes queue pairs that are not asynchronous, whose
                // tokens are arbitrary.
                let of_token = find(completion.token).filter(|shared| shared.qp_num == number);
                let shared = match completion.operation {
                    Operation::Receive => of_token.or_else(|| consumer(number)),
                    _ => of_token,
                };
                if let Some(shared) = shared {
                    shared.completed(completion, &mut wake_list.borrow_mut());
                }
            },
            |posted| {
                // It had no future; its memory is released here.
                if let Some(shared) = find(posted.token) {
                    shared
                        .slots()
                        .wake_room_waiters(&mut wake_list.borrow_mut());
                }
            },
        );
        let count = read.unwrap_or_else(|error| {
            tracing::error!(%error, "completion dropped");
            1
        });
        self.since_empty = self.since_empty.saturating_add(count);
        count
    }

    /// Consumes events and arms the queue; returns whether the caller may wait. With `check`,
    /// reads asynchronous events even if the queue cannot have been full.
    fn arm(&mut self, check: bool) -> Result<bool, ReadError> {
        self.reader.consume_events()?;
        if check {
            self.event_reads = self.event_reads.max(1);
        }
        if self.is_overrun() {
            return Err(ReadError::Overrun);
        }
        self.reader.try_wait()
    }

    /// Returns whether completions were lost. Called when the queue is empty.
    fn is_overrun(&mut self) -> bool {
        let capacity = self.reader.queue().capacity() as usize;
        // An overrun requires a full queue.
        if std::mem::take(&mut self.since_empty) >= capacity {
            self.event_reads = EVENT_READS;
        }
        if self.event_reads == 0 {
            return false;
        }
        self.event_reads -= 1;
        let event = self.reader.async_event();
        event.is_some_and(|event| event.event == AsyncEventType::CQ_ERR)
    }
}

/// A file descriptor whose readiness an executor reports.
///
/// ```no_run
/// # use std::{io, task::{Context, Poll, ready}};
/// # struct AsyncFile; impl AsyncFile {
/// #     fn poll_read_ready(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> { Poll::Pending }
/// #     fn clear_ready(&self) {}
/// # }
/// struct Registered(AsyncFile); // a file that the executor watches
///
/// impl ringverbs::future::Readable for Registered {
///     fn poll_readable(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
///         ready!(self.0.poll_read_ready(task))?;
///         self.0.clear_ready();
///         Poll::Ready(Ok(()))
///     }
/// }
/// ```
pub trait Readable {
    /// Returns ready if the descriptor may have become readable since this last returned ready;
    /// otherwise wakes the task when it does.
    ///
    /// # Errors
    /// The executor can no longer watch the descriptor.
    fn poll_readable(&mut self, task: &mut Task<'_>) -> Poll<io::Result<()>>;
}

/// Waits for the completions of an [`AsyncCompletionQueue`] and delivers them to their
/// futures. It ends when all handles of the queue and all of its queue pairs are dropped.
#[derive(Debug)]
#[must_use = "without a driver, waiting tasks are polled repeatedly"]
pub struct Driver {
    shared: Weak<Shared>,
    /// Keeps the descriptor open.
    signaler: Signaler,
}

impl Driver {
    /// Drives the queue in a task. `readable` watches the driver's descriptor, or a
    /// duplicate of it.
    ///
    /// # Errors
    /// The queue was overrun, the device was removed, or `readable` failed. All futures fail
    /// with the same error.
    pub async fn run(self, mut readable: impl Readable) -> Result<(), Arc<ReadError>> {
        let running = RunningDriver::new(self.shared.clone());
        poll_fn(|task| running.poll(&mut readable, task)).await
    }

    /// Drives the queue in this thread.
    ///
    /// # Errors
    /// As [`Driver::run`].
    pub fn run_blocking(self) -> Result<(), Arc<ReadError>> {
        let running = RunningDriver::new(self.shared.clone());
        while let Some(shared) = running.shared.upgrade() {
            match shared.drive() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return Err(error),
            }
            drop(shared);
            if let Err(error) = self.signaler.wait() {
                return match running.shared.upgrade() {
                    Some(shared) => Err(shared.fail(error.into())),
                    None => Ok(()),
                };
            }
        }
        Ok(())
    }
}

impl AsFd for Driver {
    /// Readable when the queue must be checked.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signaler.wait_fd()
    }
}

/// A running driver: while it exists, tasks rely on its wakeups.
struct RunningDriver {
    shared: Weak<Shared>,
}

impl RunningDriver {
    fn new(shared: Weak<Shared>) -> Self {
        if let Some(shared) = shared.upgrade() {
            shared.set_driven(true);
        }
        Self { shared }
    }

    fn poll(
        &self,
        readable: &mut impl Readable,
        task: &mut Task<'_>,
    ) -> Poll<Result<(), Arc<ReadError>>> {
        loop {
            let Some(shared) = self.shared.upgrade() else {
                return Poll::Ready(Ok(()));
            };
            match shared.drive() {
                Ok(false) => {}
                Ok(true) => {
                    task.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
            if let Err(error) = ready!(readable.poll_readable(task)) {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let what = "waiting for a completion queue's descriptor";
                let error = Error::System { what, errno };
                return Poll::Ready(Err(shared.fail(error.into())));
            }
        }
    }
}

impl Drop for RunningDriver {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.set_driven(false);
        }
    }
}

impl fmt::Debug for AsyncCompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AsyncCompletionQueue")
            .field(&self.shared.handle)
            .finish()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.handle.fmt(f)
    }
}
