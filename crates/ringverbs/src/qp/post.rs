//! Posting work requests.

use std::fmt;
use std::mem::ManuallyDrop;

use super::{Attachment, Inner, QueuePair, RecvHalf, SendHalf, State, WorkRequest};
use crate::data::{Data, Inline, Sink, Source};
use crate::dynamic::DcAddress;
use uverbs::Operands;

use crate::device::{Opcode, RecvQueue, SendFlags, SendQueue, SendWr};
use crate::inflight::{OrderedWriter, PostedInfo};
use crate::operation::{Operation, RemoteAddr};
use crate::{Error, Result};

/// An operation that was not posted, or that was posted although ringing the
/// doorbell failed.
///
/// It owns the operation's memory, so it does not convert to [`Error`]: `?` would drop
/// a pool buffer just because a queue was full. Take `data` out, or drop it with
/// [`into_error`](Self::into_error). `?` converts where no memory is owned: for `()`, and
/// for [`Inline`] bytes, where `D` is an empty `Inline<'static>`, which borrows nothing
/// and can be boxed or converted to `anyhow::Error`.
///
/// ```
/// # use ringverbs::{Error, Inline, QueuePair};
/// fn ping(qp: &mut QueuePair) -> Result<(), Error> {
///     Ok(qp.send(Inline(b"ping"), 1)?)
/// }
/// fn ping_anyhow(qp: &mut QueuePair, text: &str) -> anyhow::Result<()> {
///     Ok(qp.send(Inline(text.as_bytes()), 1)?)
/// }
/// ```
///
/// ```compile_fail,E0277
/// # use ringverbs::{Buffer, Error, QueuePair};
/// fn lost(qp: &mut QueuePair, buffer: Buffer) -> Result<(), Error> {
///     qp.send(buffer, 1)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct PostError<D> {
    /// The reason.
    pub error: Error,
    /// The operation's memory; `None` only with [`Error::Doorbell`], where the
    /// operation is in flight.
    pub data: Option<D>,
    /// The operation's token.
    pub token: u64,
}

impl<D> fmt::Display for PostError<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<D: fmt::Debug> std::error::Error for PostError<D> {
    /// The source of `error`, whose text is the text of this error.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<D> PostError<D> {
    /// Returns the reason and drops the operation's memory.
    pub fn into_error(self) -> Error {
        self.error
    }
}

impl From<PostError<()>> for Error {
    fn from(error: PostError<()>) -> Self {
        error.error
    }
}

impl From<PostError<Inline<'static>>> for Error {
    fn from(error: PostError<Inline<'static>>) -> Self {
        error.error
    }
}

/// A batch that was not posted, or that was posted although ringing the doorbell
/// failed.
///
/// Converts to [`Error`], so `?` works, if the closure's error does.
#[derive(Debug)]
pub enum BatchError<E> {
    /// The closure returned an error: nothing was posted, and the memory of the
    /// operations in the batch is released.
    Abandoned(E),
    /// [`Error::Doorbell`], on rdma_rxe only: the whole batch is in flight.
    Doorbell(Error),
    /// The closure was not called: an
    /// [`AsyncQueuePair`](crate::future::AsyncQueuePair) was in use by a batch of the
    /// same thread.
    Refused(Error),
}

impl<E: fmt::Display> fmt::Display for BatchError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abandoned(error) => error.fmt(f),
            Self::Doorbell(error) | Self::Refused(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for BatchError<E> {
    /// The cause of the reason; the reason's own text is the text of this error.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Abandoned(error) => error.source(),
            Self::Doorbell(error) | Self::Refused(error) => error.source(),
        }
    }
}

impl<E: Into<Error>> From<BatchError<E>> for Error {
    fn from(error: BatchError<E>) -> Self {
        match error {
            BatchError::Abandoned(error) => error.into(),
            BatchError::Doorbell(error) | BatchError::Refused(error) => error,
        }
    }
}

/// Error text for an operation that changes a memory key.
pub(crate) const WITHOUT_WINDOWS: &str = "memory windows are bound, and keys invalidated, on a \
     queue pair that was made for it: see QueuePairBuilder::memory_windows";

impl SendHalf {
    /// Returns the queue for the raw layer, and the available operations as a bit
    /// set. No batch is in preparation.
    #[inline]
    pub(crate) fn raw_queue(&mut self) -> (&mut SendQueue, u32) {
        self.in_flight.abandon();
        self.queue.begin();
        (&mut self.queue, self.operations)
    }

    /// Adds an operation to the batch in preparation.
    #[inline]
    fn push<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D::Returned>> {
        // A value with drop glue would have to be in memory in case of a panic; without
        // it, the fields of the request are moved directly to their destination.
        let mut request = ManuallyDrop::new(request);
        match self.push_wr(&mut request) {
            Ok(unreported) => {
                let request = ManuallyDrop::into_inner(request);
                let info = PostedInfo {
                    token: request.token,
                    operation: request.operation(),
                    attachment: request.attachment,
                    unreported,
                };
                // SAFETY: `push_wr` found a free entry.
                unsafe { self.in_flight.push(info, request.data) };
                Ok(())
            }
            Err(error) => {
                let request = ManuallyDrop::into_inner(request);
                Err(PostError {
                    error,
                    data: Some(request.data.returned()),
                    token: request.token,
                })
            }
        }
    }

    /// Validates the operation and adds its work request to the device's batch. Returns
    /// whether the library has signalled it without the user's request.
    #[inline]
    fn push_wr<D: Data>(&mut self, request: &mut WorkRequest<D>) -> Result<bool> {
        // SAFETY: inline data is borrowed by `request`.
        self.push_wr_by(request, |queue, wr| unsafe { queue.push(wr, wr.data) })
    }

    /// As [`push_wr`](Self::push_wr), with a function that pushes the work request.
    #[inline]
    fn push_wr_by<D: Data>(
        &mut self,
        request: &mut WorkRequest<D>,
        push: impl FnOnce(&mut SendQueue, &SendWr<'_>) -> Result<()>,
    ) -> Result<bool> {
        let operation = request.operation();
        if self.inner.state.get() < u32::from(State::RTS.0)
            || self.operations & 1 << operation as u32 == 0
        {
            return Err(self.refusal(operation));
        }
        let domain = self.inner.domain.identity();
        request.check(self.datagram, domain, self.inner.domain.context())?;
        let Some(id) = self.in_flight.next_id() else {
            return Err(Error::QueueFull {
                capacity: self.in_flight.capacity(),
            });
        };
        let asked = request.signaled | self.signal_all;
        let signaled = asked | (self.unsignaled + 1 >= self.unsignaled_limit);
        let mut flags = request.flags;
        if signaled {
            flags |= SendFlags::SIGNALED;
        }
        if operation == Operation::BindWindow {
            self.push_bind((id.0, flags), &mut request.attachment)?;
        } else {
            let queue = &mut self.queue;
            let max_sge = queue.max_sge();
            request.with_send_wr((id.0, flags), (max_sge, domain), |wr| push(queue, wr))?;
        }
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(signaled & !asked)
    }

    /// Adds a bind to the device's batch. A bind counts as in flight once it is validated,
    /// unless the device refuses it.
    #[cold]
    fn push_bind(
        &mut self,
        (wr_id, flags): (u64, SendFlags),
        attachment: &mut Attachment,
    ) -> Result<()> {
        let Attachment::Window(bind) = attachment else {
            return Err(self.refusal(Operation::BindWindow));
        };
        let operands = bind.begin(self.inner.id, self.inner.domain.identity())?;
        let wr = SendWr {
            operands: Operands::Bind(&operands),
            ..SendWr::new(wr_id, Opcode::BIND_MW, flags)
        };
        // SAFETY: there is no inline data.
        let pushed = unsafe { self.queue.push(&wr, wr.data) };
        if pushed.is_err() {
            bind.not_posted();
        }
        pushed
    }

    /// Returns the reason why an operation cannot be posted.
    #[cold]
    fn refusal(&self, operation: Operation) -> Error {
        if !self.inner.domain.context().provider().has(operation) {
            return Error::Unsupported {
                what: operation.plural(),
            };
        }
        let bit = 1 << operation as u32;
        if self.inner.transport.operations() & bit & !self.operations != 0 {
            return Error::Invalid {
                what: WITHOUT_WINDOWS,
            };
        }
        if self.operations & 1 << operation as u32 == 0 {
            return Error::Invalid {
                what: self.inner.transport.without(operation),
            };
        }
        Error::State {
            verb: operation.post(),
            state: self.inner.state(),
            needed: "RTS (ready to send)",
        }
    }

    /// Starts a batch and discards an abandoned one.
    #[inline]
    fn begin(&mut self) {
        self.in_flight.abandon();
        self.queue.begin();
        // Signalled requests of an abandoned batch do not count.
        self.unsignaled = self.unsignaled_published;
    }

    /// Publishes the batch and rings the doorbell.
    #[inline(always)]
    fn publish(&mut self) -> Result<()> {
        self.in_flight.publish();
        self.unsignaled_published = self.unsignaled;
        // SAFETY: the memory of each operation is registered and owned by the
        // in-flight list until the operation has completed or the queue pair is
        // destroyed, so nothing else accesses it.
        unsafe { self.queue.publish() }
    }

    /// Posts one operation.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::QueueFull`], [`Error::Limit`],
    /// [`Error::WrongDomain`]: nothing was posted, and the memory is returned.
    /// [`Error::Doorbell`] (on rdma_rxe only): the operation is in flight.
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D::Returned>> {
        let token = request.token;
        self.begin();
        self.push(request)?;
        self.publish().map_err(|error| PostError {
            error,
            data: None,
            token,
        })
    }

    /// Posts one operation of an initiator of dynamic connections.
    ///
    /// # Errors
    /// As [`SendHalf::post`]; [`Error::Invalid`] for a request with a datagram's address.
    pub(crate) fn post_to<D: Data>(
        &mut self,
        request: WorkRequest<D>,
        to: &DcAddress,
    ) -> Result<(), PostError<D::Returned>> {
        let token = request.token;
        self.begin();
        self.push_to(request, to)?;
        self.publish().map_err(|error| PostError {
            error,
            data: None,
            token,
        })
    }

    /// Adds an operation of an initiator of dynamic connections to the batch in
    /// preparation.
    pub(crate) fn push_to<D: Data>(
        &mut self,
        mut request: WorkRequest<D>,
        to: &DcAddress,
    ) -> Result<(), PostError<D::Returned>> {
        let checked = match request.is_addressed() {
            true => Err(Error::Invalid {
                what: "an operation of a DC initiator goes to a DcAddress",
            }),
            false if to.identity() != self.inner.domain.identity() => Err(Error::WrongDomain {
                what: "address handle",
            }),
            false => self.push_wr_by(&mut request, |queue, wr| {
                let wr = SendWr {
                    destination: to.destination(),
                    ..*wr
                };
                // SAFETY: inline data is borrowed by `request`.
                unsafe { queue.push(&wr, wr.data) }
            }),
        };
        match checked {
            Ok(unreported) => {
                let info = PostedInfo {
                    token: request.token,
                    operation: request.operation(),
                    attachment: Attachment::Address(to.path().clone()),
                    unreported,
                };
                // SAFETY: `push_wr_by` found a free entry.
                unsafe { self.in_flight.push(info, request.data) };
                Ok(())
            }
            Err(error) => Err(PostError {
                error,
                data: Some(request.data.returned()),
                token: request.token,
            }),
        }
    }

    /// Posts a signalled send: a message for a receive of the peer.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn send<D: Source>(&mut self, data: D, token: u64) -> Result<(), PostError<D::Returned>> {
        self.post(WorkRequest::send(data).token(token))
    }

    /// Posts a signalled RDMA write to remote memory.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn write<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D::Returned>> {
        self.post(WorkRequest::write(data, to).token(token))
    }

    /// Posts a signalled RDMA read of remote memory, of the buffer's length.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn read<D: Sink>(
        &mut self,
        data: D,
        from: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.post(WorkRequest::read(data, from).token(token))
    }

    /// Posts several operations with one doorbell, when `fill` returns `Ok`. If it returns
    /// `Err` or panics, none is posted and their memory is released. To post as many
    /// operations as the queue has room for, return `Ok` with the remaining ones.
    ///
    /// # Errors
    /// [`BatchError::Abandoned`] with the error of `fill`: nothing was posted.
    /// [`BatchError::Doorbell`] (on rdma_rxe only): the operations are in flight.
    #[inline]
    pub fn batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut Batch<'_>) -> Result<R, E>,
    ) -> Result<R, BatchError<E>> {
        self.begin();
        match fill(&mut Batch { half: self }) {
            Ok(result) => {
                self.publish().map_err(BatchError::Doorbell)?;
                Ok(result)
            }
            Err(error) => {
                self.queue.abort();
                self.begin();
                Err(BatchError::Abandoned(error))
            }
        }
    }

    /// Returns the number of operations in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.table().len()
    }

    /// Returns whether there is room for an operation.
    pub(crate) fn has_room(&mut self) -> bool {
        self.begin();
        self.in_flight.next_id().is_some()
    }
}

/// A batch of operations for a send queue.
pub struct Batch<'h> {
    half: &'h mut SendHalf,
}

impl Batch<'_> {
    /// Adds one operation.
    ///
    /// # Errors
    /// As [`SendHalf::post`], except the doorbell's. The batch is unchanged.
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D::Returned>> {
        self.half.push(request)
    }

    /// Adds one operation of an initiator of dynamic connections.
    pub(crate) fn post_to<D: Data>(
        &mut self,
        request: WorkRequest<D>,
        to: &DcAddress,
    ) -> Result<(), PostError<D::Returned>> {
        self.half.push_to(request, to)
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Batch").field(&self.half).finish()
    }
}

impl RecvHalf {
    /// Returns the queue for the raw layer. No batch is in preparation.
    #[inline]
    pub(crate) fn raw_queue(&mut self) -> Option<&mut RecvQueue> {
        let (queue, in_flight) = self.queue.as_mut()?;
        in_flight.abandon();
        queue.begin();
        Some(queue)
    }

    /// Starts a batch and discards an abandoned one.
    #[inline]
    fn begin(&mut self) -> ReceiveBatch<'_> {
        let queue = self.queue.as_mut().map(|(queue, in_flight)| {
            in_flight.abandon();
            queue.begin();
            (&mut **queue, in_flight)
        });
        ReceiveBatch {
            queue,
            max_sge: self.max_sge,
            inner: &self.inner,
        }
    }

    /// Posts a receive into the whole capacity of `data`. A datagram needs 40 more bytes for
    /// the global route header in front of it.
    ///
    /// # Errors
    /// Returns `data` with [`Error::State`], [`Error::QueueFull`],
    /// [`Error::Limit`] or [`Error::WrongDomain`].
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        let mut batch = self.begin();
        batch.push(data, token)?;
        batch.publish();
        Ok(())
    }

    /// Posts several receives at once when `fill` returns `Ok`. If it returns
    /// `Err` or panics, none is posted and their memory is released.
    ///
    /// # Errors
    /// The error of `fill`.
    #[inline]
    pub fn batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut ReceiveBatch<'_>) -> Result<R, E>,
    ) -> Result<R, E> {
        let mut batch = self.begin();
        let result = fill(&mut batch);
        match result {
            Ok(_) => batch.publish(),
            Err(_) => drop(self.begin()),
        }
        result
    }

    /// Returns the number of receives in flight.
    pub fn in_flight(&self) -> u32 {
        let queue = self.queue.as_ref();
        queue.map_or(0, |(_, in_flight)| in_flight.table().len())
    }
}

/// A batch of receives.
pub struct ReceiveBatch<'h> {
    queue: Option<(&'h mut RecvQueue, &'h mut OrderedWriter)>,
    max_sge: u32,
    inner: &'h Inner,
}

impl ReceiveBatch<'_> {
    /// Adds one receive.
    ///
    /// # Errors
    /// As [`RecvHalf::receive`]. The batch is unchanged.
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.push(data, token)
    }

    #[inline]
    fn push<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        // As in `SendHalf::push`.
        let data = ManuallyDrop::new(data);
        match self.push_wr(&*data) {
            Ok(()) => {
                if let Some((_, in_flight)) = &mut self.queue {
                    let data = ManuallyDrop::into_inner(data);
                    let info = PostedInfo {
                        token,
                        attachment: Attachment::None,
                        operation: Operation::Receive,
                        unreported: false,
                    };
                    // SAFETY: `push_wr` found a free entry.
                    unsafe { in_flight.push(info, data) };
                }
                Ok(())
            }
            Err(error) => Err(PostError {
                error,
                data: Some(ManuallyDrop::into_inner(data)),
                token,
            }),
        }
    }

    /// Validates a receive and adds its work request to the device's batch.
    #[inline]
    fn push_wr<D: Sink>(&mut self, data: &D) -> Result<()> {
        // In the error state a receive would only be flushed, and not every device does
        // that.
        let state = self.inner.state();
        let Some((queue, in_flight)) = &mut self.queue else {
            return Err(Error::State {
                verb: "post of a receive",
                state,
                needed: "a receive queue of its own; post to its shared receive queue instead",
            });
        };
        if state == State::RESET || state == State::ERR {
            return Err(Error::State {
                verb: "post of a receive",
                state,
                needed: "INIT, RTR or RTS",
            });
        }
        let Some(id) = in_flight.next_id() else {
            return Err(Error::QueueFull {
                capacity: in_flight.capacity(),
            });
        };
        data.scatter(self.max_sge, self.inner.domain.identity(), |list| {
            queue.push(id.0, list)
        })
    }

    #[inline(always)]
    fn publish(&mut self) {
        if let Some((queue, in_flight)) = &mut self.queue {
            in_flight.publish();
            // SAFETY: as in `SendHalf::publish`.
            unsafe { queue.publish() };
        }
    }
}

impl fmt::Debug for ReceiveBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveBatch").finish_non_exhaustive()
    }
}

impl QueuePair {
    /// Posts one operation. See [`SendHalf::post`].
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D::Returned>> {
        self.send.post(request)
    }

    /// Posts several operations with one doorbell. See [`SendHalf::batch`].
    ///
    /// # Errors
    /// As [`SendHalf::batch`].
    #[inline]
    pub fn batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut Batch<'_>) -> Result<R, E>,
    ) -> Result<R, BatchError<E>> {
        self.send.batch(fill)
    }

    /// Posts a signalled send: a message for a receive of the peer.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn send<D: Source>(&mut self, data: D, token: u64) -> Result<(), PostError<D::Returned>> {
        self.send.send(data, token)
    }

    /// Posts a signalled RDMA write to remote memory.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn write<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D::Returned>> {
        self.send.write(data, to, token)
    }

    /// Posts a signalled RDMA read of remote memory, of the buffer's length.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn read<D: Sink>(
        &mut self,
        data: D,
        from: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.send.read(data, from, token)
    }

    /// Posts a receive. See [`RecvHalf::receive`].
    ///
    /// # Errors
    /// As [`RecvHalf::receive`].
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.recv.receive(data, token)
    }

    /// Posts several receives at once. See [`RecvHalf::batch`].
    ///
    /// # Errors
    /// As [`RecvHalf::batch`].
    #[inline]
    pub fn receive_batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut ReceiveBatch<'_>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.recv.batch(fill)
    }
}
