//! Posting.

use std::fmt;
use std::mem::ManuallyDrop;

use super::{Companion, Inner, QueuePair, RecvHalf, SendHalf, State, WorkRequest};
use crate::data::{Data, Inline, Sink, Source};
use crate::device::{Doorbell, RecvQueue, RecvWriter, SendFlags, SendQueue};
use crate::inflight::{FifoWriter, Note};
use crate::operation::{Operation, RemoteAddr};
use crate::{Error, Result};

/// An operation that was not posted, or one that was and of which the device
/// could not be told.
///
/// It has the operation's memory, and so it is no [`Error`] by itself: `?` would
/// drop a buffer of a pool, only because a queue was full. What to do is said
/// by taking `data` out, or by [`into_error`](Self::into_error), which drops it.
/// Where nothing is owned, `()` or [`Inline`], `?` does.
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
    /// Why.
    pub error: Error,
    /// Its memory; `None` only with [`Error::Doorbell`], where the operation is
    /// in flight in spite of it all.
    pub data: Option<D>,
    /// Its token.
    pub token: u64,
}

impl<D> fmt::Display for PostError<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<D: fmt::Debug> std::error::Error for PostError<D> {
    /// What is behind the reason, whose text is this one's.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<D> PostError<D> {
    /// The reason alone. The operation's memory is dropped.
    pub fn into_error(self) -> Error {
        self.error
    }
}

impl From<PostError<()>> for Error {
    fn from(error: PostError<()>) -> Self {
        error.error
    }
}

impl From<PostError<Inline<'_>>> for Error {
    fn from(error: PostError<Inline<'_>>) -> Self {
        error.error
    }
}

/// Why a batch was not handed to the device, or the device could not be told.
///
/// `?` makes an [`Error`] of it, if it does of what its closure returns.
#[derive(Debug)]
pub enum BatchError<E> {
    /// The closure has given up: nothing was posted, and the memory of what it
    /// had posted to the batch is released.
    Abandoned(E),
    /// [`Error::Doorbell`]: all of the batch is in flight.
    Doorbell(Error),
}

impl<E: fmt::Display> fmt::Display for BatchError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abandoned(error) => error.fmt(f),
            Self::Doorbell(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for BatchError<E> {
    /// What is behind the reason, whose text is this one's.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Abandoned(error) => error.source(),
            Self::Doorbell(error) => error.source(),
        }
    }
}

impl<E: Into<Error>> From<BatchError<E>> for Error {
    fn from(error: BatchError<E>) -> Self {
        match error {
            BatchError::Abandoned(error) => error.into(),
            BatchError::Doorbell(error) => error,
        }
    }
}

/// Of an operation that changes a memory key.
pub(crate) const WITHOUT_WINDOWS: &str = "memory windows are bound, and keys invalidated, on a \
     queue pair that was made for it: see QueuePairBuilder::memory_windows";

impl SendHalf {
    /// What the raw layer writes to, and the operations that there are, as a set
    /// of bits. Nothing is in the making.
    #[inline(always)]
    pub(crate) fn lend(&mut self) -> (&mut SendQueue, &mut Doorbell, u32) {
        self.in_flight.abandon();
        (&mut self.queue, &mut self.doorbell, self.operations)
    }

    /// Adds an operation to the batch that is being made.
    #[inline(always)]
    fn push<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D>> {
        // Not to be dropped by a panic: what is, lies in memory, and else the
        // parts of a request go from where they are to where they belong.
        let mut request = ManuallyDrop::new(request);
        match self.make(&mut request) {
            Ok(quiet) => {
                self.queue.accept();
                let request = ManuallyDrop::into_inner(request);
                let note = Note {
                    token: request.token,
                    operation: request.operation(),
                    companion: request.companion,
                    quiet,
                };
                // SAFETY: `make` has found room.
                unsafe { self.in_flight.push(note, request.data) };
                Ok(())
            }
            Err(error) => {
                let request = ManuallyDrop::into_inner(request);
                Err(PostError {
                    error,
                    data: Some(request.data),
                    token: request.token,
                })
            }
        }
    }

    /// Writes the next entry of the queue. Returns whether it is signalled
    /// without the user's asking.
    #[inline(always)]
    fn make<D: Data>(&mut self, request: &mut WorkRequest<D>) -> Result<bool> {
        let operation = request.operation();
        if self.inner.state.get() < u32::from(State::RTS.0)
            || self.operations & 1 << operation as u32 == 0
        {
            return Err(self.cannot(operation));
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
        if D::INLINE {
            flags |= SendFlags::INLINE;
        }
        let mut wqe = self.queue.open(id.0, request.opcode(), flags)?;
        request.describe(&mut wqe, domain, &self.inner)?;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(signaled & !asked)
    }

    #[cold]
    fn cannot(&self, operation: Operation) -> Error {
        if !self.inner.domain.context().provider().has(operation) {
            return Error::Unsupported {
                what: "an operation that this device lacks",
            };
        }
        let bit = 1 << operation as u32;
        if self.inner.transport.operations() & bit & !self.operations != 0 {
            return Error::Invalid {
                what: WITHOUT_WINDOWS,
            };
        }
        if self.operations & 1 << operation as u32 == 0 {
            return Error::State {
                verb: "post of a send work request",
                state: self.inner.state(),
                needed: "a transport that has the operation",
            };
        }
        Error::State {
            verb: "post of a send work request",
            state: self.inner.state(),
            needed: "RTS (ready to send)",
        }
    }

    /// Starts a batch; what another one left behind is gone.
    #[inline(always)]
    fn begin(&mut self) {
        self.in_flight.abandon();
        self.queue.begin();
        // A signal that was never sent ends nothing.
        self.unsignaled = self.unsignaled_published;
    }

    /// Hands the batch to the device.
    #[inline(always)]
    fn publish(&mut self) -> Result<()> {
        self.in_flight.publish();
        self.unsignaled_published = self.unsignaled;
        // SAFETY: the memory of each operation is in the table of those in
        // flight, and stays there until it has completed or the queue pair is
        // destroyed: registered, and out of everybody's reach.
        if unsafe { self.queue.publish() } {
            self.doorbell.ring(|| self.queue.rewind())
        } else {
            Ok(())
        }
    }

    /// Posts one operation.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::QueueFull`], [`Error::Limit`],
    /// [`Error::WrongDomain`]: nothing was posted, and its memory is given back.
    /// [`Error::Doorbell`]: it is in flight.
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D>> {
        let token = request.token;
        self.begin();
        self.push(request)?;
        self.publish().map_err(|error| PostError {
            error,
            data: None,
            token,
        })
    }

    /// Posts several operations and tells the device once. What was posted to
    /// the batch is handed over when `fill` returns `Ok`. If it returns `Err`,
    /// or panics, nothing of it ever was: no operation is posted, and their
    /// memory is released. A batch that is to go as far as there was room
    /// returns `Ok` with what is left over.
    ///
    /// # Errors
    /// [`BatchError::Abandoned`] with `fill`'s error, and nothing is posted;
    /// [`BatchError::Doorbell`], and the operations are in flight.
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
                self.begin();
                Err(BatchError::Abandoned(error))
            }
        }
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.fifo().len()
    }
}

/// A batch of operations of a send queue.
pub struct Batch<'h> {
    half: &'h mut SendHalf,
}

impl Batch<'_> {
    /// Adds one operation.
    ///
    /// # Errors
    /// As [`SendHalf::post`], but not of the doorbell. The batch is as it was.
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D>> {
        self.half.push(request)
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Batch").field(&self.half).finish()
    }
}

impl RecvHalf {
    /// What the raw layer writes to. Nothing is in the making.
    #[inline(always)]
    pub(crate) fn lend(&mut self) -> Option<&mut RecvQueue> {
        let (queue, in_flight) = self.queue.as_mut()?;
        in_flight.abandon();
        Some(queue)
    }

    /// Starts a batch; what another one left behind is gone.
    #[inline(always)]
    fn begin(&mut self) -> ReceiveBatch<'_> {
        let queue = self.queue.as_mut().map(|(queue, in_flight)| {
            in_flight.abandon();
            (queue.writer(), in_flight)
        });
        ReceiveBatch {
            queue,
            max_sge: self.max_sge,
            inner: &self.inner,
        }
    }

    /// Posts a receive into `data`, as far as its capacity goes. A datagram
    /// needs 40 bytes more, for its route header, which come first.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::QueueFull`], [`Error::Limit`],
    /// [`Error::WrongDomain`], with `data`.
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        let mut batch = self.begin();
        batch.push(data, token)?;
        batch.publish();
        Ok(())
    }

    /// Posts several receives at once, when `fill` returns `Ok`. If it returns
    /// `Err`, or panics, none is posted, and their memory is released.
    ///
    /// # Errors
    /// Those of `fill`.
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

    /// Receives in flight.
    pub fn in_flight(&self) -> u32 {
        let queue = self.queue.as_ref();
        queue.map_or(0, |(_, in_flight)| in_flight.fifo().len())
    }
}

/// A batch of receives.
pub struct ReceiveBatch<'h> {
    queue: Option<(RecvWriter<'h>, &'h mut FifoWriter)>,
    max_sge: u32,
    inner: &'h Inner,
}

impl ReceiveBatch<'_> {
    /// Adds one receive.
    ///
    /// # Errors
    /// As [`RecvHalf::receive`]. The batch is as it was.
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.push(data, token)
    }

    #[inline(always)]
    fn push<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        // As in `SendHalf::push`.
        let data = ManuallyDrop::new(data);
        match self.write(&*data) {
            Ok(()) => {
                if let Some((_, in_flight)) = &mut self.queue {
                    let data = ManuallyDrop::into_inner(data);
                    let note = Note {
                        token,
                        companion: Companion::None,
                        operation: Operation::Receive,
                        quiet: false,
                    };
                    // SAFETY: `write` has found room.
                    unsafe { in_flight.push(note, data) };
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

    #[inline(always)]
    fn write<D: Sink>(&mut self, data: &D) -> Result<()> {
        // In the error state it would only come back, and not of every device.
        let state = self.inner.state();
        let Some((writer, in_flight)) = &mut self.queue else {
            return Err(Error::State {
                verb: "post of a receive",
                state,
                needed: "a receive queue of its own; this one has a shared one: post there",
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
            writer.push(id.0, list)
        })
    }

    #[inline(always)]
    fn publish(&mut self) {
        if let Some((writer, in_flight)) = &mut self.queue {
            in_flight.publish();
            // SAFETY: as in `SendHalf::publish`.
            unsafe { writer.publish() };
        }
    }
}

impl fmt::Debug for ReceiveBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveBatch").finish_non_exhaustive()
    }
}

impl QueuePair {
    /// As [`SendHalf::post`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn post<D: Data>(&mut self, request: WorkRequest<D>) -> Result<(), PostError<D>> {
        self.send.post(request)
    }

    /// As [`SendHalf::batch`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut Batch<'_>) -> Result<R, E>,
    ) -> Result<R, BatchError<E>> {
        self.send.batch(fill)
    }

    /// Sends a message to a receive of the peer's, and hears of its end.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn send<D: Source>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.send.send(data, token)
    }

    /// Writes to memory of the peer's, and hears of its end.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn write<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.send.write(data, to, token)
    }

    /// Reads memory of the peer's.
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

    /// As [`RecvHalf::receive`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.recv.receive(data, token)
    }

    /// As [`RecvHalf::batch`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn receive_batch<R, E>(
        &mut self,
        fill: impl FnOnce(&mut ReceiveBatch<'_>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.recv.batch(fill)
    }
}
