//! Queue pairs whose operations are futures.

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as Task, Poll, Waker};

use uverbs::QpCap;

use super::operation::{Message, Operation, Receive, Room};
use super::queue::{self, NO_SLOT, token};
use super::slots::{Outcome, Slots, WakeList};
use super::{AsyncCompletionQueue, Cause, OperationError, Owned};
use crate::completion::Completion;
use crate::data::{Data, Sink, Source};
use crate::memory::MemorySlice;
use crate::operation::Operation as Kind;
use crate::qp::{Batch, QpAttr, State};
use crate::{
    AccessFlags, BatchError, ConnectOptions, Context, Endpoint, Error, Failure, Inline,
    LocalAddress, MemoryWindow, PostError, ProtectionDomain, QueuePair, RemoteAddr, Result, Status,
    Transport, WorkRequest,
};

/// A queue pair whose operations are futures.
///
/// Its methods take `&self`, from any thread: tasks share the queue pair by reference or in
/// an `Arc`. Each method posts at once, so operations are in the order of the calls, and
/// returns a future, which refers to the queue pair but does not keep it alive.
///
/// If the send queue is full, the future posts its operation when it is polled and there is
/// room. Waiting operations have no defined order among themselves, and come after all
/// posted operations. [`room`](Self::room) waits in advance.
///
/// Dropping the queue pair destroys it. Futures whose completions have arrived complete
/// normally; the others fail with [`Cause::Closed`] and return the operation's memory.
pub struct AsyncQueuePair {
    shared: Arc<Shared>,
    domain: ProtectionDomain,
    transport: Transport,
    cap: QpCap,
    id: u64,
}

/// State that the futures and the completion queue share.
pub(super) struct Shared {
    pub cq: Arc<queue::Shared>,
    /// The queue pair's index in the completion queue, a part of its tokens.
    pub index: u32,
    pub qp_num: u32,
    post_state: Mutex<PostState>,
    slots: Mutex<Slots>,
    /// The thread that is filling a batch; 0 if none is.
    batch_thread: AtomicUsize,
}

struct PostState {
    /// `None` when the queue pair was dropped.
    qp: Option<QueuePair>,
    /// An empty list that the next batch reuses for its slots.
    spare_slots: Vec<u32>,
}

/// A work request that was not posted.
pub(super) enum NotPosted<D: Data> {
    /// The send queue is full.
    Full(WorkRequest<D>),
    Refused(OperationError<D::Returned>),
}

/// Returns a nonzero value that is unique among running threads.
fn current_thread_token() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| ptr::from_ref(here).addr())
}

impl Shared {
    pub fn slots(&self) -> MutexGuard<'_, Slots> {
        // Each change is complete before anything can panic.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post_state(&self) -> MutexGuard<'_, PostState> {
        // The queue pair discards operations that a panic has left unposted.
        self.post_state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the queue pair.
    ///
    /// # Errors
    /// [`Error::Busy`] in the closure of a batch, which has locked it.
    fn lock_for_post(&self) -> Result<MutexGuard<'_, PostState>> {
        let batch_thread = self.batch_thread.load(Ordering::Relaxed);
        if batch_thread != 0 && batch_thread == current_thread_token() {
            return Err(Error::Busy {
                object: "queue pair",
                users: "the batch whose closure this was called in",
            });
        }
        Ok(self.post_state())
    }

    /// Delivers a completion of this queue pair.
    pub fn completed(&self, completion: Completion, wake_list: &mut WakeList) {
        let failure = completion.result.err();
        let slot = completion.token as u32;
        let mut slots = self.slots();
        if completion.operation == Kind::Receive {
            slots.complete_receive(completion.into(), wake_list);
        } else {
            slots.complete(slot, completion.into(), wake_list);
            slots.wake_room_waiters(wake_list);
        }
        if let Some(failure) = failure {
            slots.record_failure(failure, wake_list);
        }
    }

    /// Takes a slot and posts, signalled, unless the send queue is full.
    pub fn post<D: Data>(&self, request: WorkRequest<D>) -> Result<u32, NotPosted<D>> {
        let begun = self.slots().begin();
        let slot = match begun {
            Ok(slot) => slot,
            Err(end) => {
                let refused = OperationError::new(end, Some(request.into_data().returned()));
                return Err(NotPosted::Refused(refused));
            }
        };
        let not_posted = self.post_at(slot, request);
        if not_posted.is_err() {
            self.slots().release_unposted(slot);
        }
        not_posted.map(|()| slot)
    }

    /// Posts an operation that has a slot.
    fn post_at<D: Data>(&self, slot: u32, request: WorkRequest<D>) -> Result<(), NotPosted<D>> {
        let refused =
            |cause: Cause, data| Err(NotPosted::Refused(OperationError::new(cause, data)));
        let mut post_state = match self.lock_for_post() {
            Ok(post_state) => post_state,
            Err(error) => {
                return refused(Cause::Refused(error), Some(request.into_data().returned()));
            }
        };
        let Some(qp) = &mut post_state.qp else {
            return refused(Cause::Closed, Some(request.into_data().returned()));
        };
        if !qp.has_room() {
            return Err(NotPosted::Full(request));
        }
        match qp.post(request.signaled().token(token(self.index, slot))) {
            // Without its memory the operation is in flight.
            Ok(()) | Err(PostError { data: None, .. }) => Ok(()),
            Err(PostError { error, data, .. }) => refused(Cause::Refused(error), data),
        }
    }

    /// Posts a work request for which the queue was full, or registers the task.
    pub fn post_or_wait<D: Data>(
        &self,
        request: WorkRequest<D>,
        task: &mut Task<'_>,
    ) -> Result<u32, NotPosted<D>> {
        self.cq.deliver_ready();
        let request = match self.post(request) {
            Err(NotPosted::Full(request)) => request,
            posted => return posted,
        };
        let driven = self.wait_for_room(task);
        // Retry: a completion before the registration did not wake the task.
        let posted = self.post(request);
        if !driven && matches!(posted, Err(NotPosted::Full(_))) {
            task.waker().wake_by_ref();
        }
        posted
    }

    /// Registers a task that waits for room; returns whether it will be woken.
    fn wait_for_room(&self, task: &mut Task<'_>) -> bool {
        let mut slots = self.slots();
        slots.wait_for_room(task.waker());
        self.cq.is_driven()
    }

    pub fn poll_room(&self, task: &mut Task<'_>) -> Poll<Result<(), Cause>> {
        let has_room = || -> Result<bool, Cause> {
            self.slots().check()?;
            let mut post_state = self.lock_for_post().map_err(Cause::Refused)?;
            Ok(post_state.qp.as_mut().ok_or(Cause::Closed)?.has_room())
        };
        if has_room()? {
            return Poll::Ready(Ok(()));
        }
        self.cq.deliver_ready();
        let driven = self.wait_for_room(task);
        if has_room()? {
            return Poll::Ready(Ok(()));
        }
        if !driven {
            task.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Takes the outcome of an operation, or registers the task.
    pub fn poll(&self, slot: u32, task: &mut Task<'_>) -> Poll<Outcome> {
        let taken = self.slots().try_take(slot);
        taken.map_or_else(
            || self.poll_or_register(task, |slots, waker| slots.poll(slot, waker)),
            Poll::Ready,
        )
    }

    /// Takes the message of a receive, or registers the task.
    pub fn poll_message(&self, claim: u64, task: &mut Task<'_>) -> Poll<Outcome> {
        let taken = self.slots().try_take_message(claim);
        taken.map_or_else(
            || self.poll_or_register(task, |slots, waker| slots.poll_claim(claim, waker)),
            Poll::Ready,
        )
    }

    fn poll_or_register(
        &self,
        task: &mut Task<'_>,
        poll: impl FnOnce(&mut Slots, &Waker) -> Result<Outcome, Option<Waker>>,
    ) -> Poll<Outcome> {
        self.cq.deliver_ready();
        let mut slots = self.slots();
        let polled = poll(&mut slots, task.waker());
        let driven = self.cq.is_driven();
        drop(slots);
        match polled {
            Ok(outcome) => Poll::Ready(outcome),
            Err(replaced) => {
                drop(replaced);
                if !driven {
                    task.waker().wake_by_ref();
                }
                Poll::Pending
            }
        }
    }

    /// Called when the future of an operation was dropped.
    pub fn abandon(&self, slot: u32) {
        let held = self.slots().abandon(slot);
        drop(held);
    }

    /// Called when the future of a receive was dropped.
    pub fn withdraw(&self, claim: u64) {
        let mut wake_list = WakeList::default();
        let held = self.slots().withdraw(claim, &mut wake_list);
        drop(held);
        wake_list.wake();
    }
}

impl AsyncQueuePair {
    /// Makes a queue pair asynchronous. It was created on the handle of `cq`, and nothing was
    /// posted to it; it may be in any state.
    ///
    /// Allocates the tables for its futures, as large as its queues.
    ///
    /// With a shared receive queue, [`message`](Self::message) returns the messages that this
    /// queue pair has received, regardless of the tokens of their receives. The number of
    /// messages that wait for it is limited only by the posted receives.
    ///
    /// # Errors
    /// Returns the queue pair with [`Error::Invalid`] if its operations complete in another
    /// queue, or if operations are in flight.
    pub fn new(qp: QueuePair, cq: &AsyncCompletionQueue) -> Result<Self, (QueuePair, Error)> {
        let (domain, transport) = (qp.domain().clone(), qp.transport());
        let (cap, id) = (qp.capacity(), qp.id());
        let shared = cq.shared.attach(qp, |qp, index| Shared {
            cq: Arc::clone(&cq.shared),
            index,
            qp_num: qp.qp_num(),
            post_state: Mutex::new(PostState {
                qp: Some(qp),
                spare_slots: Vec::new(),
            }),
            slots: Mutex::new(Slots::new(
                cap.max_send_wr as usize,
                cap.max_recv_wr as usize,
            )),
            batch_thread: AtomicUsize::new(0),
        })?;
        Ok(Self {
            shared,
            domain,
            transport,
            cap,
            id,
        })
    }

    /// Calls `f` with the queue pair. Only trusted callers get a `&mut`, because `mem::swap`
    /// could exchange it.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut QueuePair) -> R) -> Result<R> {
        let mut post_state = self.shared.lock_for_post()?;
        let qp = post_state.qp.as_mut().ok_or(Error::Invalid {
            what: "the queue pair was dropped",
        })?;
        Ok(f(qp))
    }

    /// Returns the queue pair number, 24 bits.
    pub fn qp_num(&self) -> u32 {
        self.shared.qp_num
    }

    /// Returns the identifier that asynchronous events carry
    /// ([`QueuePair::id`]).
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the transport service.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.domain.context()
    }

    /// Returns the capacities that the queue pair was created with.
    pub fn capacity(&self) -> QpCap {
        self.cap
    }

    /// Returns the state that this crate last set.
    ///
    /// # Errors
    /// [`Error::Busy`] in the closure of a batch, as for all fallible methods.
    pub fn state(&self) -> Result<State> {
        self.with(|qp| qp.state())
    }

    /// Returns the first failure of an operation; later operations were flushed.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.slots().failure()
    }

    /// Returns why an operation, or the last request of its peer, has failed, with both sides of
    /// what was compared; `None` on devices that are not embedded, which do not tell
    /// ([`Context::explanation`]).
    #[cfg(feature = "embedded")]
    pub fn explanation(&self) -> Option<String> {
        self.context().explanation(self.qp_num())
    }

    /// Queries the attributes of the queue pair. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query(&self) -> Result<QpAttr> {
        self.with(|qp| qp.query())?
    }

    /// Returns the numbers of operations in flight on the send queue and on the receive
    /// queue.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub fn in_flight(&self) -> Result<(u32, u32)> {
        self.with(|qp| qp.in_flight())
    }

    /// Returns the values that a peer needs to connect to it through `local`.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub fn endpoint(&self, local: &LocalAddress) -> Result<Endpoint> {
        self.with(|qp| qp.endpoint(local))
    }

    /// Moves the queue pair to INIT, so that receives can be posted. See
    /// [`QueuePair::initialize`].
    ///
    /// # Errors
    /// As [`QueuePair::initialize`].
    pub fn initialize(&self, local: &LocalAddress) -> Result<()> {
        self.with(|qp| qp.initialize(local))?
    }

    /// Connects the queue pair to a peer, by system calls that do not wait for the peer. See
    /// [`QueuePair::connect_with`].
    ///
    /// # Errors
    /// As [`QueuePair::connect_with`].
    pub fn connect_with(
        &self,
        local: &LocalAddress,
        peer: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<()> {
        self.with(|qp| qp.connect_with(local, peer, options))?
    }

    /// Connects the queue pair to a peer with the default options.
    ///
    /// # Errors
    /// As [`QueuePair::connect`].
    pub fn connect(&self, local: &LocalAddress, peer: &Endpoint) -> Result<()> {
        self.with(|qp| qp.connect(local, peer))?
    }

    /// Makes a datagram queue pair ready. See [`QueuePair::activate`].
    ///
    /// # Errors
    /// As [`QueuePair::activate`].
    pub fn activate(&self, local: &LocalAddress, qkey: u32) -> Result<()> {
        self.with(|qp| qp.activate(local, qkey))?
    }

    /// Moves the queue pair to the error state: all futures fail and return their memory
    /// ([`Status::WR_FLUSH_ERR`](crate::Status::WR_FLUSH_ERR)).
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn set_error(&self) -> Result<()> {
        let has_srq = self.with(|qp| qp.set_error().map(|()| qp.has_srq()))??;
        if has_srq {
            // No flushed receive would end its claims.
            let mut wake_list = WakeList::default();
            let flushed = Failure {
                status: Status::WR_FLUSH_ERR,
                vendor_err: 0,
            };
            self.shared.slots().record_failure(flushed, &mut wake_list);
            wake_list.wake();
        }
        Ok(())
    }

    /// Posts one operation, signalled, because its future waits for the completion. If the send
    /// queue is full, the future posts it.
    ///
    /// The future returns the memory. If the future is dropped, a posted operation continues.
    pub fn post<D: Owned>(&self, request: WorkRequest<D>) -> Operation<D> {
        Operation::new(&self.shared, self.shared.post(request))
    }

    /// Posts one operation without a future, signalled only when the library requires it (see
    /// [`WorkRequest::unsignaled`]). Its memory is released with a later completion; a failure
    /// is reported by [`failure`](Self::failure), and flushes later operations. Does not
    /// allocate.
    ///
    /// # Errors
    /// Returns the memory, as [`QueuePair::post`]; after [`Error::QueueFull`],
    /// [`room`](Self::room) waits for room.
    pub fn post_unsignaled<D: Data>(
        &self,
        request: WorkRequest<D>,
    ) -> Result<(), PostError<D::Returned>> {
        let request = request
            .unsignaled()
            .token(token(self.shared.index, NO_SLOT));
        let refused = |error, request: WorkRequest<D>| {
            Err(PostError {
                error,
                data: Some(request.into_data().returned()),
                token: 0,
            })
        };
        match self.shared.lock_for_post() {
            Err(error) => refused(error, request),
            Ok(mut post_state) => match &mut post_state.qp {
                Some(qp) => qp.post(request),
                None => refused(
                    Error::Invalid {
                        what: "the queue pair was dropped",
                    },
                    request,
                ),
            },
        }
    }

    /// Waits until the send queue has room for an operation. Another task may use the room
    /// first.
    pub fn room(&self) -> Room {
        Room::new(&self.shared)
    }

    /// Posts several operations with one doorbell, when `fill` returns `Ok`. If it returns
    /// `Err` or panics, none is posted, their memory is released, and their futures fail with
    /// [`Cause::Abandoned`].
    ///
    /// Other threads that post wait until `fill` returns. In `fill` itself, methods of this
    /// queue pair fail with [`Error::Busy`].
    ///
    /// # Errors
    /// [`BatchError::Abandoned`] with the error of `fill`, [`BatchError::Refused`]
    /// in another batch of this queue pair: nothing was posted.
    /// [`BatchError::Doorbell`] (on rdma_rxe only): the operations are in flight.
    pub fn batch<R, E>(
        &self,
        fill: impl FnOnce(&mut AsyncBatch<'_, '_>) -> Result<R, E>,
    ) -> Result<R, BatchError<E>> {
        let mut open_batch = OpenBatch::new(&self.shared).map_err(BatchError::Refused)?;
        let OpenBatch {
            post_state, slots, ..
        } = &mut open_batch;
        let qp = post_state
            .as_mut()
            .and_then(|post_state| post_state.qp.as_mut());
        let qp = qp.ok_or(BatchError::Refused(Error::Invalid {
            what: "the queue pair was dropped",
        }))?;
        let result = qp.batch(|batch| {
            fill(&mut AsyncBatch {
                batch,
                shared: &self.shared,
                slots,
            })
        });
        if !matches!(
            result,
            Err(BatchError::Abandoned(_) | BatchError::Refused(_))
        ) {
            open_batch.slots.clear();
        }
        result
    }

    /// Posts a send: a message for a receive of the peer.
    pub fn send<D: Source + Owned>(&self, data: D) -> Operation<D> {
        self.post(WorkRequest::send(data))
    }

    /// Posts an RDMA write to remote memory.
    pub fn write<D: Source + Owned>(&self, data: D, to: RemoteAddr) -> Operation<D> {
        self.post(WorkRequest::write(data, to))
    }

    /// Posts an RDMA read of remote memory into `data`, as many bytes as its length.
    pub fn read<D: Sink + Owned>(&self, data: D, from: RemoteAddr) -> Operation<D> {
        self.post(WorkRequest::read(data, from))
    }

    /// Adds to 8 bytes of remote memory atomically; see
    /// [`WorkRequest::fetch_add`]. The future returns `old` with the previous value.
    pub fn fetch_add<D: Sink + Owned>(&self, old: D, at: RemoteAddr, add: u64) -> Operation<D> {
        self.post(WorkRequest::fetch_add(old, at, add))
    }

    /// Compares 8 bytes of remote memory, and swaps them if equal; see
    /// [`WorkRequest::compare_swap`]. The future returns `old` with the previous
    /// value.
    pub fn compare_swap<D: Sink + Owned>(
        &self,
        old: D,
        at: RemoteAddr,
        compare: u64,
        swap: u64,
    ) -> Operation<D> {
        self.post(WorkRequest::compare_swap(old, at, compare, swap))
    }

    /// Binds a memory window; see [`WorkRequest::bind`]. A peer may use
    /// [`MemoryWindow::rkey`] when the future has returned the slice.
    pub fn bind(
        &self,
        window: &MemoryWindow,
        to: MemorySlice,
        access: AccessFlags,
    ) -> Operation<MemorySlice> {
        self.post(WorkRequest::bind(window, to, access))
    }

    /// Posts a send or write of bytes that are copied immediately (see [`Inline`]). If the send
    /// queue is full, the operation is refused, not delayed.
    ///
    /// ```no_run
    /// # async fn f(qp: &ringverbs::future::AsyncQueuePair) {
    /// # use ringverbs::{Inline, WorkRequest};
    /// let ping = WorkRequest::send(Inline(b"ping")).immediate(7);
    /// if let Err(error) = qp.post_inline(ping).await {
    ///     println!("{error}");
    /// }
    /// # }
    /// ```
    pub fn post_inline(&self, request: WorkRequest<Inline<'_>>) -> Operation<()> {
        let capacity = self.cap.max_send_wr;
        Operation::new(
            &self.shared,
            self.shared.post(request).map_err(|refused| {
                let cause = match refused {
                    NotPosted::Full(_) => Cause::Refused(Error::QueueFull { capacity }),
                    NotPosted::Refused(refused) => refused.cause,
                };
                NotPosted::Refused(OperationError::new(cause, None))
            }),
        )
    }

    /// Posts a receive into the whole capacity of `data`, and returns a future for
    /// the next message: [`post_receive`](Self::post_receive), then
    /// [`message`](Self::message).
    ///
    /// Futures get messages in the order of their creation, so if none is dropped, each gets
    /// the message in its own memory. If a future is dropped, its receive stays posted, and its
    /// message goes to the next future, in the memory in which it arrived. No message is lost,
    /// and messages are not reordered. A loop that drops receives must therefore not post a
    /// receive each time: it keeps the future, or calls only `message`.
    ///
    /// A full receive queue is an immediate error ([`Error::QueueFull`]), because only a
    /// message makes room.
    pub fn receive<D: Sink + Owned>(&self, data: D) -> Receive<D> {
        match self.post_receive(data) {
            Ok(()) => self.message(),
            Err(PostError { error, data, .. }) => {
                let refused = OperationError::new(Cause::Refused(error), data);
                Receive::refused(&self.shared, refused)
            }
        }
    }

    /// Posts a receive into the whole capacity of `data`, for a message that
    /// [`message`](Self::message) returns.
    ///
    /// # Errors
    /// Returns `data`, as [`QueuePair::receive`].
    pub fn post_receive<D: Sink + Owned>(&self, data: D) -> Result<(), PostError<D>> {
        let begun = self.shared.slots().begin_receive();
        let refused = |error, data| {
            Err(PostError {
                error,
                data: Some(data),
                token: 0,
            })
        };
        if begun.is_err() {
            let what = "the completion queue of the queue pair can no longer be read";
            return refused(Error::Invalid { what }, data);
        }
        let posted = match self.shared.lock_for_post() {
            Err(error) => refused(error, data),
            Ok(mut post_state) => match &mut post_state.qp {
                Some(qp) => qp.receive(data, token(self.shared.index, NO_SLOT)),
                None => refused(
                    Error::Invalid {
                        what: "the queue pair was dropped",
                    },
                    data,
                ),
            },
        };
        if posted.is_err() {
            let mut wake_list = WakeList::default();
            self.shared.slots().cancel_receive(&mut wake_list);
            wake_list.wake();
        }
        posted
    }

    /// Waits for the next message in memory of the type `D`: the oldest unclaimed one, or the
    /// next to arrive. Dropping the future loses no message.
    ///
    /// Fails if the queue pair has failed and none of its own receives is in flight.
    pub fn message<D: Sink + Owned>(&self) -> Receive<D> {
        let claim = self.shared.slots().claim(D::KIND);
        Receive::new(&self.shared, claim)
    }
}

impl Drop for AsyncQueuePair {
    fn drop(&mut self) {
        let qp = self.shared.post_state().qp.take();
        if let Some(qp) = qp {
            self.shared.cq.detach(&self.shared, qp);
        }
    }
}

impl fmt::Debug for AsyncQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncQueuePair")
            .field("qp_num", &self.qp_num())
            .field("transport", &self.transport)
            .finish()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueuePair").field(&self.qp_num).finish()
    }
}

/// A batch that is being filled. Dropping it cancels its remaining operations.
struct OpenBatch<'q> {
    post_state: Option<MutexGuard<'q, PostState>>,
    shared: &'q Shared,
    slots: Vec<u32>,
}

impl<'q> OpenBatch<'q> {
    fn new(shared: &'q Shared) -> Result<Self> {
        let mut post_state = shared.lock_for_post()?;
        shared
            .batch_thread
            .store(current_thread_token(), Ordering::Relaxed);
        Ok(Self {
            slots: std::mem::take(&mut post_state.spare_slots),
            post_state: Some(post_state),
            shared,
        })
    }
}

impl Drop for OpenBatch<'_> {
    fn drop(&mut self) {
        self.shared.batch_thread.store(0, Ordering::Relaxed);
        let mut wake_list = WakeList::default();
        if !self.slots.is_empty() {
            let mut slots = self.shared.slots();
            for slot in self.slots.drain(..) {
                slots.cancel(slot, &mut wake_list);
            }
        }
        if let Some(mut post_state) = self.post_state.take() {
            post_state.spare_slots = std::mem::take(&mut self.slots);
        }
        wake_list.wake();
    }
}

/// A batch of operations for an [`AsyncQueuePair`].
pub struct AsyncBatch<'b, 'h> {
    batch: &'b mut Batch<'h>,
    shared: &'b Arc<Shared>,
    slots: &'b mut Vec<u32>,
}

impl AsyncBatch<'_, '_> {
    /// Adds an operation, and returns its future.
    ///
    /// # Errors
    /// As [`Batch::post`]. The batch is unchanged.
    pub fn post<D: Owned>(
        &mut self,
        request: WorkRequest<D>,
    ) -> Result<Operation<D>, PostError<D>> {
        let begun = self.shared.slots().begin();
        let Ok(slot) = begun else {
            let what = "the completion queue of the queue pair can no longer be read";
            return Err(PostError {
                error: Error::Invalid { what },
                data: Some(request.into_data()),
                token: 0,
            });
        };
        let request = request.signaled().token(token(self.shared.index, slot));
        match self.batch.post(request) {
            Ok(()) => {
                self.slots.push(slot);
                Ok(Operation::new(self.shared, Ok(slot)))
            }
            Err(refused) => {
                self.shared.slots().release_unposted(slot);
                Err(refused)
            }
        }
    }

    /// Adds an operation without a future; see
    /// [`AsyncQueuePair::post_unsignaled`].
    ///
    /// # Errors
    /// As [`Batch::post`]. The batch is unchanged.
    pub fn post_unsignaled<D: Data>(
        &mut self,
        request: WorkRequest<D>,
    ) -> Result<(), PostError<D::Returned>> {
        let token = token(self.shared.index, NO_SLOT);
        self.batch.post(request.unsignaled().token(token))
    }
}

impl fmt::Debug for AsyncBatch<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AsyncBatch").field(&self.batch).finish()
    }
}

const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<AsyncQueuePair>();
    is_shared::<AsyncCompletionQueue>();
    is_shared::<Operation<crate::Buffer>>();
    is_shared::<Receive<crate::Buffer>>();
    is_shared::<Message<crate::Buffer>>();
};
