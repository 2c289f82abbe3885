//! Queue pairs.
//!
//! - `builder`: creating a queue pair
//! - `states`: state transitions and their attributes
//! - `drain`: completing the operations in flight
//! - `level`: guarantees of completions, and flushes
//! - `codes`: encoded values: MTU, timeouts
//! - `endpoint`: address exchange and connecting
//! - `halves`: methods of both halves of a queue pair
//! - `options`: connection parameters
//! - `request`, `post`: work requests and posting

mod builder;
mod codes;
mod drain;
mod endpoint;
mod halves;
mod level;
mod multicast;
mod options;
mod post;
mod request;
mod states;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use ring::Hint;
use uverbs::{Qp, QpCap, QpType, Udata};

use crate::completion::{CompletionQueue, Shared as CqShared};
use crate::context::Ctx;
use crate::data::Payload;
use crate::device::{Membership as CqMembership, RecvQueue, SendQueue};
use crate::inflight::{OrderedTable, OrderedWriter, Posted};
use crate::memory::MemorySlice;
use crate::mw::Bind;
use crate::operation::Operation;
use crate::{AddressHandle, CloseError, Context, Error, ProtectionDomain, Result, srq};

pub use builder::QueuePairBuilder;
pub use codes::{AckTimeout, Mtu, RnrTimer};
pub use drain::Drained;
pub use endpoint::{Endpoint, LocalAddress, PortAddress};
pub use level::{CompletionLevel, CompletionMethod, completion_method};
pub use multicast::Membership;
pub use options::ConnectOptions;
pub(crate) use post::WITHOUT_WINDOWS;
pub use post::{Batch, BatchError, PostError, ReceiveBatch};
pub use request::{FlushRange, FlushTo, WorkRequest};
pub use states::{Datagram, Init, ReadyToReceive, ReadyToSend, Reliable, Transition, Unreliable};

/// The state of a queue pair.
pub use uverbs::QpState as State;
/// Attributes of a queue pair in the kernel's format.
pub use uverbs::{QpAttr, QpAttrMask};

/// Transport service of a queue pair.
///
/// Extended reliable connections (XRC) are not supported. Raw packets and dynamic
/// connections have separate types: [`packet`](crate::packet),
/// [`dynamic`](crate::dynamic).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Reliable connection (RC): all operations, in order, acknowledged.
    Reliable,
    /// Unreliable connection (UC): sends and writes; lost packets are not
    /// retransmitted.
    Unreliable,
    /// Unreliable datagrams (UD): sends to any peer, of up to one packet.
    Datagram,
}

impl Transport {
    fn qp_type(self) -> QpType {
        match self {
            Self::Reliable => QpType::RC,
            Self::Unreliable => QpType::UC,
            Self::Datagram => QpType::UD,
        }
    }

    /// Returns the operations of the transport as a bit set.
    fn operations(self) -> u32 {
        const fn bit(operation: Operation) -> u32 {
            1 << operation as u32
        }
        let all = u32::MAX;
        match self {
            Self::Reliable => all,
            Self::Unreliable => {
                bit(Operation::Send)
                    | bit(Operation::Write)
                    | bit(Operation::LocalInvalidate)
                    | bit(Operation::BindWindow)
            }
            Self::Datagram => bit(Operation::Send),
        }
    }

    /// Returns the error text for an operation that the transport lacks.
    #[cold]
    #[inline(never)]
    fn without(self, operation: Operation) -> &'static str {
        macro_rules! lacks {
            ($what:literal) => {
                match self {
                    Self::Reliable => {
                        concat!("a reliable connection (RC) queue pair has no ", $what)
                    }
                    Self::Unreliable => {
                        concat!("an unreliable connection (UC) queue pair has no ", $what)
                    }
                    Self::Datagram => {
                        concat!("an unreliable datagram (UD) queue pair has no ", $what)
                    }
                }
            };
        }
        match operation {
            Operation::Send => lacks!("sends"),
            Operation::Write => lacks!("RDMA writes"),
            Operation::Read => lacks!("RDMA reads"),
            Operation::CompareSwap => lacks!("compare-and-swap operations"),
            Operation::FetchAdd => lacks!("fetch-and-add operations"),
            Operation::AtomicWrite => lacks!("atomic writes"),
            Operation::Flush => lacks!("flush operations"),
            Operation::LocalInvalidate => lacks!("local invalidate operations"),
            Operation::BindWindow => lacks!("memory window binds"),
            Operation::Receive => lacks!("receives"),
        }
    }
}

/// An object that an operation keeps alive besides its memory.
#[derive(Debug, Default)]
pub(crate) enum Attachment {
    #[default]
    None,
    /// The address handle of a datagram, or of an operation to a DC target.
    Address(AddressHandle),
    /// The bind of a memory window.
    Window(Box<Bind>),
}

impl Attachment {
    /// Called for an operation whose batch was abandoned.
    pub fn not_posted(&mut self) {
        if let Self::Window(bind) = self {
            bind.not_posted();
        }
    }

    /// Called when a completion reports that the operation succeeded or failed.
    #[inline]
    pub fn record_outcome(&mut self, succeeded: bool) {
        if let Self::Window(bind) = self {
            bind.completed(succeeded);
        }
    }

    /// Calls [`record_outcome`](Self::record_outcome) and drops the attachment; makes no
    /// call in the common case, no attachment.
    #[inline]
    pub fn release(mut self, succeeded: bool) {
        self.record_outcome(succeeded);
        match self {
            Self::None => std::mem::forget(self),
            Self::Address(_) | Self::Window(_) => drop(self),
        }
    }
}

/// A queue pair.
///
/// Posting takes `&mut self` and no lock. To use the two queues from two threads,
/// [`split`](Self::split) the queue pair; to post to one queue from several
/// threads, put it into a lock.
///
/// Dropping the queue pair destroys it. The device then no longer accesses the memory
/// of its operations, which is released: at once, or, if completions of this queue pair
/// were polled, when the completion queue is next polled or dropped.
/// [`close_and_drain`](Self::close_and_drain) returns the memory instead.
pub struct QueuePair {
    // Invariant: both halves belong to one queue pair. No `&mut` to either is
    // handed out, because `mem::swap` could exchange it for a half of another
    // queue pair.
    pub(crate) send: SendHalf,
    recv: RecvHalf,
}

/// The half of a queue pair that posts to the send queue.
pub struct SendHalf {
    queue: ManuallyDrop<SendQueue>,
    in_flight: OrderedWriter,
    /// Operations posted since the last signalled operation, including the batch in
    /// preparation.
    unsignaled: u32,
    /// `unsignaled` without the batch in preparation.
    unsignaled_published: u32,
    /// Maximum of `unsignaled`.
    unsignaled_limit: u32,
    /// Whether every operation is signalled.
    signal_all: bool,
    operations: u32,
    datagram: bool,
    /// Target of the reads that push earlier writes; the data is ignored. Allocated at
    /// first use.
    scratch: Option<MemorySlice>,
    inner: Arc<Inner>,
}

/// The half of a queue pair that posts receives.
pub struct RecvHalf {
    /// `None` with a shared receive queue.
    queue: Option<(ManuallyDrop<RecvQueue>, OrderedWriter)>,
    /// Maximum SGEs of a receive.
    max_sge: u32,
    inner: Arc<Inner>,
}

/// State shared by both halves.
pub(crate) struct Inner {
    object: Qp<Ctx>,
    membership: CqMembership,
    /// The capacities that it was created with.
    cap: QpCap,
    /// The rings of dropped halves. The device may write to them until the kernel
    /// object is destroyed.
    unmap_send_later: OnceLock<SendQueue>,
    unmap_recv_later: OnceLock<RecvQueue>,
    send_cq: Arc<CqShared>,
    recv_cq: Arc<CqShared>,
    send_table: Arc<OrderedTable>,
    recv_table: Option<Arc<OrderedTable>>,
    srq: Option<Arc<srq::Inner>>,
    domain: ProtectionDomain,
    transport: Transport,
    /// The last known state.
    state: Hint,
    /// Whether a panic has ended a reset, so that the ring position is unknown; 0 or 1.
    reset_interrupted: Hint,
    id: u64,
    psn: u32,
}

/// An operation that was in flight when its queue pair was destroyed.
#[derive(Debug)]
pub struct Released {
    /// The token that it was posted with.
    pub token: u64,
    /// The operation. Whether it was executed is unknown.
    pub operation: Operation,
    /// The memory of the operation.
    pub payload: Payload,
}

impl From<Posted> for Released {
    fn from(posted: Posted) -> Self {
        Self {
            token: posted.token,
            operation: posted.operation,
            payload: posted.payload,
        }
    }
}

fn is_reset(attr: &QpAttr, mask: QpAttrMask) -> bool {
    mask.contains(QpAttrMask::STATE) && attr.qp_state == State::RESET
}

impl Inner {
    fn state(&self) -> State {
        State(self.state.get() as u8)
    }

    fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let reset = is_reset(attr, mask);
        if reset {
            let waiting =
                self.send_table.len() + self.recv_table.as_ref().map_or(0, |table| table.len());
            if waiting > 0 {
                return Err(Error::Busy {
                    object: "queue pair",
                    users: "operations in flight, which a reset would lose",
                });
            }
        }
        if !reset && self.reset_interrupted.get() != 0 {
            return Err(Error::State {
                verb: "transition",
                state: self.state(),
                needed: "a reset, because a panic has interrupted the last one",
            });
        }
        let before = self.state.get();
        if reset {
            // Also if a panic ends this function: nothing is posted until the next reset.
            self.reset_interrupted.set(1);
            self.state.set(State::RESET.0.into());
        }
        let modified = self.object.modify(attr, mask, Udata::none());
        if reset {
            // A failed reset may have taken effect. The device then starts over at ring
            // entries that name memory which was returned long ago.
            if modified.is_err() && !self.may_be_reset() {
                self.state.set(before);
            }
            self.reset_interrupted.set(0);
        }
        modified?;
        if mask.contains(QpAttrMask::STATE) {
            self.state.set(attr.qp_state.0.into());
        }
        Ok(())
    }

    fn may_be_reset(&self) -> bool {
        match self.object.query(QpAttrMask::STATE) {
            Ok((attr, _)) => attr.qp_state == State::RESET,
            Err(_) => true,
        }
    }

    /// Called after the kernel object was destroyed.
    fn destroyed(&self) {
        self.membership.end();
        self.send_cq.detach(&self.send_table);
        if let Some(table) = &self.recv_table {
            self.recv_cq.detach(table);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.object.has_ended() {
            return;
        }
        // If it is not destroyed, the device may still use operations in flight, so none of
        // them is released: also if a panic, such as one of the program's tracing subscriber,
        // ends this function.
        let kept = ManuallyDrop::new((
            (Arc::clone(&self.send_table), self.recv_table.clone()),
            (Arc::clone(&self.send_cq), Arc::clone(&self.recv_cq)),
            (self.srq.clone(), self.domain.clone()),
            (self.unmap_send_later.take(), self.unmap_recv_later.take()),
        ));
        if let Err(error) = self.object.destroy() {
            if !self.object.has_ended() {
                self.membership.leak();
                tracing::error!(%error, "queue pair leaked, with its operations in flight");
                return;
            }
        }
        self.destroyed();
        drop(ManuallyDrop::into_inner(kept));
    }
}

impl SendHalf {
    pub(crate) fn completes_in(&self) -> &Arc<CqShared> {
        &self.inner.send_cq
    }
}

impl RecvHalf {
    pub(crate) fn completes_in(&self) -> &Arc<CqShared> {
        &self.inner.recv_cq
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        // SAFETY: taken only here, and not used afterwards.
        let queue = unsafe { ManuallyDrop::take(&mut self.queue) };
        let _ = self.inner.unmap_send_later.set(queue);
    }
}

impl Drop for RecvHalf {
    fn drop(&mut self) {
        if let Some((queue, _)) = &mut self.queue {
            // SAFETY: taken only here, and not used afterwards.
            let queue = unsafe { ManuallyDrop::take(queue) };
            let _ = self.inner.unmap_recv_later.set(queue);
        }
    }
}

impl QueuePair {
    fn inner(&self) -> &Arc<Inner> {
        &self.send.inner
    }

    /// Returns the queue pair number, 24 bits.
    pub fn qp_num(&self) -> u32 {
        self.inner().object.qp_num()
    }

    /// Returns the identifier that asynchronous events carry; unique in the
    /// context.
    pub fn id(&self) -> u64 {
        self.inner().id
    }

    /// Returns the transport service.
    pub fn transport(&self) -> Transport {
        self.inner().transport
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner().domain
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.inner().domain.context()
    }

    /// Returns why its last work request, or the last request of its peer, has failed, with both
    /// sides of what was compared; `None` on devices that are not embedded, which do not tell
    /// ([`Context::explanation`]).
    #[cfg(feature = "embedded")]
    pub fn explanation(&self) -> Option<String> {
        self.context().explanation(self.qp_num())
    }

    /// Returns the capacities, which are at least the requested ones.
    pub fn capacity(&self) -> QpCap {
        self.inner().cap
    }

    /// Returns the state that this crate last set. The device may have moved the queue
    /// pair to an error state since; [`query`](Self::query) asks the kernel.
    pub fn state(&self) -> State {
        self.inner().state()
    }

    /// Queries the attributes of the queue pair. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query(&self) -> Result<QpAttr> {
        self.inner().query()
    }

    /// Modifies attributes (`ibv_modify_qp`). [`transition`](Self::transition) and
    /// [`connect`](Self::connect) select the attributes that a transition requires.
    ///
    /// # Errors
    /// [`Error::Busy`] for a reset with operations in flight; EINVAL for a transition that
    /// is not allowed with these attributes. After a failed reset the queue pair counts
    /// as reset unless the kernel reports another state.
    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let modified = self.inner().modify(attr, mask);
        if is_reset(attr, mask) && self.state() == State::RESET {
            self.send.queue.reset();
            if let Some((queue, _)) = &mut self.recv.queue {
                queue.reset();
            }
        }
        modified
    }

    /// Moves the queue pair to the error state: operations in flight are flushed, that is,
    /// they complete with [`Status::WR_FLUSH_ERR`](crate::Status::WR_FLUSH_ERR).
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn set_error(&mut self) -> Result<()> {
        self.inner().set_error()
    }

    /// Returns the numbers of operations in flight on the send queue and on the receive
    /// queue.
    pub fn in_flight(&self) -> (u32, u32) {
        let inner = self.inner();
        (
            inner.send_table.len(),
            inner.recv_table.as_ref().map_or(0, |table| table.len()),
        )
    }

    /// Called when a raw packet queue pair becomes ready to receive; until then receives
    /// are only queued.
    pub(crate) fn announce_receives(&mut self) {
        if let Some((queue, _)) = &mut self.recv.queue {
            queue.announce();
        }
    }

    /// Moves a target of dynamic connections to RTR. Returns its number.
    pub(crate) fn make_target(&mut self, attr: &QpAttr, mask: QpAttrMask) -> Result<u32> {
        let number = crate::device::modify_target(&self.inner().object, attr, mask)?;
        self.inner().state.set(State::RTR.0.into());
        number.ok_or(Error::Invalid {
            what: "the transition does not give a target its number",
        })
    }

    /// Returns the initial packet sequence number.
    pub(crate) fn psn(&self) -> u32 {
        self.inner().psn
    }

    /// Returns the kernel's handle.
    pub(crate) fn handle(&self) -> uverbs::QpHandle {
        self.inner().object.handle()
    }

    /// Returns whether the send queue has room for an operation.
    pub(crate) fn has_room(&mut self) -> bool {
        self.send.has_room()
    }

    /// Returns whether it takes receives from a shared receive queue.
    pub(crate) fn has_srq(&self) -> bool {
        self.inner().srq.is_some()
    }

    /// Returns whether all its operations complete in `cq`.
    pub fn completes_in(&self, cq: &CompletionQueue) -> bool {
        cq.serves(&self.inner().send_cq) && cq.serves(&self.inner().recv_cq)
    }

    /// Splits the queue pair into two halves with separate owners. Each half posts to its
    /// own queue and can be [drained](SendHalf::drain). The queue pair is destroyed when
    /// the last half is dropped, or when the halves are [reunited](Self::reunite) and
    /// closed.
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    /// Joins the two halves of a queue pair.
    ///
    /// # Errors
    /// Returns the halves if they belong to different queue pairs.
    pub fn reunite(send: SendHalf, recv: RecvHalf) -> Result<Self, (SendHalf, RecvHalf)> {
        if Arc::ptr_eq(&send.inner, &recv.inner) {
            Ok(Self { send, recv })
        } else {
            Err((send, recv))
        }
    }

    /// Returns the send queue without ownership tracking: see
    /// [`raw`](crate::raw).
    #[inline]
    pub fn raw_send(&mut self) -> crate::raw::SendQueue<'_> {
        self.send.raw()
    }

    /// Returns the receive queue without ownership tracking: see
    /// [`raw`](crate::raw).
    ///
    /// # Errors
    /// [`Error::Invalid`] if it uses a shared receive queue.
    #[inline]
    pub fn raw_receive(&mut self) -> Result<crate::raw::RecvQueue<'_>> {
        self.recv.raw()
    }

    fn destroy(&self) -> Result<()> {
        let inner = self.inner();
        match inner.object.destroy() {
            Ok(_) => {}
            Err(_) if inner.object.has_ended() => {}
            Err(error) => return Err(error.into()),
        }
        inner.destroyed();
        Ok(())
    }

    /// Destroys the queue pair. Memory in flight is released as on drop.
    ///
    /// # Errors
    /// Returns the queue pair with EBUSY while it is a member of a multicast
    /// group.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        match self.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err(CloseError::new(self, error)),
        }
    }

    /// Destroys the queue pair and returns the operations that were in flight: first those
    /// of the send queue, then those of the receive queue, each in the order of posting.
    /// Unread completions are lost.
    ///
    /// `recv_cq` is required if receives complete in another queue than sends.
    ///
    /// # Errors
    /// Returns the queue pair with [`Error::Invalid`] if these are not its
    /// completion queues, or with EBUSY while it is a member of a multicast
    /// group.
    pub fn close_and_drain(
        self,
        send_cq: &mut CompletionQueue,
        recv_cq: Option<&mut CompletionQueue>,
    ) -> Result<Vec<Released>, CloseError<Self>> {
        let inner = Arc::clone(self.inner());
        let fits = send_cq.serves(&inner.send_cq)
            && match (&recv_cq, &inner.recv_table) {
                (_, None) => true,
                (Some(cq), Some(_)) => cq.serves(&inner.recv_cq),
                (None, Some(_)) => send_cq.serves(&inner.recv_cq),
            };
        if !fits {
            let what = "these are not the completion queues of the queue pair";
            return Err(CloseError::new(self, Error::Invalid { what }));
        }
        if let Err(error) = self.destroy() {
            return Err(CloseError::new(self, error));
        }
        let mut released = Vec::new();
        let mut keep = |posted: Posted| released.push(Released::from(posted));
        send_cq.drain(&inner.send_table, &mut keep);
        if let Some(table) = &inner.recv_table {
            recv_cq.unwrap_or(send_cq).drain(table, &mut keep);
        }
        Ok(released)
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qp_num", &self.qp_num())
            .field("transport", &self.transport())
            .field("state", &self.state())
            .finish()
    }
}

impl fmt::Debug for SendHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SendHalf")
            .field(&self.inner.object.qp_num())
            .finish()
    }
}

impl fmt::Debug for RecvHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RecvHalf")
            .field(&self.inner.object.qp_num())
            .finish()
    }
}
