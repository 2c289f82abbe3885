//! Queue pairs.
//!
//! - `builder`: how one is made;
//! - `states`: its transitions, with what each demands;
//! - `codes`: values that there are codes for: MTU, times;
//! - `endpoint`: what a peer has to know of it, and connecting;
//! - `halves`: what the two halves know and do when they are apart;
//! - `options`: how it is connected, if not as usual;
//! - `request`, `post`: work requests, and how they are posted.

mod builder;
mod codes;
mod endpoint;
mod halves;
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
use crate::device::{Attachment, Doorbell, RecvQueue, SendQueue};
use crate::inflight::{Fifo, FifoWriter, Posted};
use crate::memory::MemorySlice;
use crate::mw::Bind;
use crate::operation::Operation;
use crate::{AddressHandle, CloseError, Context, Error, ProtectionDomain, Result, srq};

pub use builder::QueuePairBuilder;
pub use codes::{AckTimeout, Mtu, RnrTimer};
pub use endpoint::{Endpoint, LocalAddress, PortAddress};
pub use multicast::Membership;
pub use options::ConnectOptions;
pub(crate) use post::WITHOUT_WINDOWS;
pub use post::{Batch, BatchError, PostError, ReceiveBatch};
pub use request::{FlushRange, FlushTo, WorkRequest};
pub use states::{Datagram, Init, ReadyToReceive, ReadyToSend, Reliable, Transition, Unreliable};

/// State of a queue pair.
pub use uverbs::QpState as State;
/// Attributes of a queue pair, as the kernel has them.
pub use uverbs::{QpAttr, QpAttrMask};

/// Transport service of a queue pair.
///
/// Extended reliable connections (XRC) and raw packets are not among them:
/// rdma_rxe has neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Reliable connection: everything, in order, with acknowledgements.
    Reliable,
    /// Unreliable connection: sends and writes; what is lost is lost.
    Unreliable,
    /// Unreliable datagrams: sends to any peer, up to one packet.
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

    /// Operations that it has, as a set of bits.
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
}

/// What an operation keeps alive besides its memory.
#[derive(Debug, Default)]
pub(crate) enum Companion {
    #[default]
    None,
    /// The path of a datagram.
    Address(AddressHandle),
    /// The bind of a window.
    Window(Box<Bind>),
}

impl Companion {
    /// The operation was written, and not posted.
    pub fn take_back(&mut self) {
        if let Self::Window(bind) = self {
            bind.taken_back();
        }
    }

    /// A completion says that the operation was done, or has failed.
    #[inline(always)]
    pub fn settle(&mut self, done: bool) {
        if let Self::Window(bind) = self {
            bind.completed(done);
        }
    }

    /// [`settle`](Self::settle), and drop. Nearly always there is none, and then
    /// no call.
    #[inline(always)]
    pub fn release(mut self, done: bool) {
        self.settle(done);
        match self {
            Self::None => std::mem::forget(self),
            Self::Address(_) | Self::Window(_) => drop(self),
        }
    }
}

/// A queue pair.
///
/// One owner posts (`&mut`): no lock. To use both queues from two threads,
/// [`split`](Self::split) it; to post to one queue from several, put it into a
/// lock.
///
/// Dropping it destroys it; then the kernel touches no memory of its
/// operations any more, and what was in flight is released: at once, or, as far
/// as the owner of a completion queue has met it, when that is polled next or
/// dropped. [`close_and_drain`](Self::close_and_drain) gives it back instead.
pub struct QueuePair {
    // Invariant: both are of one queue pair. No `&mut` to either is given out:
    // `mem::swap` would exchange it for another queue pair's.
    pub(crate) send: SendHalf,
    recv: RecvHalf,
}

/// The half of a queue pair that sends, writes, reads.
pub struct SendHalf {
    queue: ManuallyDrop<SendQueue>,
    doorbell: Doorbell,
    in_flight: FifoWriter,
    /// Operations posted since the last that is signalled, with those of the
    /// batch that is being made.
    unsignaled: u32,
    /// Without them.
    unsignaled_published: u32,
    /// As many of those there may be.
    unsignaled_limit: u32,
    /// Every operation is signalled.
    signal_all: bool,
    operations: u32,
    datagram: bool,
    /// Where reads go that are there for what they push in front of them. Made
    /// when it is needed first.
    scratch: Option<MemorySlice>,
    inner: Arc<Inner>,
}

/// The half of a queue pair that receives.
pub struct RecvHalf {
    /// None with a shared receive queue.
    queue: Option<(ManuallyDrop<RecvQueue>, FifoWriter)>,
    /// Elements that a receive may have.
    max_sge: u32,
    inner: Arc<Inner>,
}

/// What both halves need.
pub(crate) struct Inner {
    object: ManuallyDrop<Qp<Ctx>>,
    attachment: Attachment,
    /// The sizes that it was made with.
    cap: QpCap,
    /// The rings, once their halves are gone: the device may still write there
    /// until the object is.
    parked_send: OnceLock<SendQueue>,
    parked_recv: OnceLock<RecvQueue>,
    send_cq: Arc<CqShared>,
    recv_cq: Arc<CqShared>,
    send_fifo: Arc<Fifo>,
    recv_fifo: Option<Arc<Fifo>>,
    srq: Option<Arc<srq::Inner>>,
    domain: ProtectionDomain,
    transport: Transport,
    /// As far as this side knows.
    state: Hint,
    /// 1 once the object is destroyed.
    destroyed: Hint,
    id: u64,
    psn: u32,
}

/// An operation that was in flight on a queue pair that is gone.
#[derive(Debug)]
pub struct Released {
    /// The token that it was posted with.
    pub token: u64,
    /// What it was. Whether it was done nobody knows.
    pub operation: Operation,
    /// Its memory.
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
                self.send_fifo.len() + self.recv_fifo.as_ref().map_or(0, |fifo| fifo.len());
            if waiting > 0 {
                return Err(Error::Busy {
                    object: "queue pair",
                    users: "operations in flight, which a reset would lose",
                });
            }
        }
        let modified = self.object.modify(attr, mask, Udata::none());
        // A reset that is said to have failed may have been done: then the
        // device begins anew with entries that name memory given back long ago.
        if reset && modified.is_err() && self.may_be_reset() {
            self.state.set(State::RESET.0.into());
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

    /// The kernel's side is gone.
    fn departed(&self) {
        self.destroyed.set(1);
        self.attachment.leave();
        self.send_cq.leave(&self.send_fifo);
        if let Some(fifo) = &self.recv_fifo {
            self.recv_cq.leave(fifo);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used afterwards.
        let object = unsafe { ManuallyDrop::take(&mut self.object) };
        if self.destroyed.get() != 0 {
            object.into_handle();
            return;
        }
        match object.destroy() {
            Ok(_) => self.departed(),
            Err((object, error)) if self.domain.context().is_gone_by(&error) => {
                object.into_handle();
                self.departed();
            }
            Err((object, error)) => {
                // The device may go on using all that is in flight: it stays.
                tracing::error!(%error, "queue pair leaked, with its operations in flight");
                object.into_handle();
                self.attachment.stay();
                std::mem::forget(Arc::clone(&self.send_fifo));
                std::mem::forget(self.recv_fifo.clone());
                std::mem::forget(Arc::clone(&self.send_cq));
                std::mem::forget(Arc::clone(&self.recv_cq));
                std::mem::forget(self.srq.clone());
                std::mem::forget(self.domain.clone());
                std::mem::forget(self.parked_send.take());
                std::mem::forget(self.parked_recv.take());
            }
        }
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
        // SAFETY: taken here only, and not used afterwards.
        let queue = unsafe { ManuallyDrop::take(&mut self.queue) };
        let _ = self.inner.parked_send.set(queue);
    }
}

impl Drop for RecvHalf {
    fn drop(&mut self) {
        if let Some((queue, _)) = &mut self.queue {
            // SAFETY: taken here only, and not used afterwards.
            let queue = unsafe { ManuallyDrop::take(queue) };
            let _ = self.inner.parked_recv.set(queue);
        }
    }
}

impl QueuePair {
    fn inner(&self) -> &Arc<Inner> {
        &self.send.inner
    }

    /// Its number on the wire, 24 bits.
    pub fn qp_num(&self) -> u32 {
        self.inner().object.qp_num()
    }

    /// What asynchronous events name it by; no other object of the context has
    /// the same.
    pub fn id(&self) -> u64 {
        self.inner().id
    }

    /// Its transport service.
    pub fn transport(&self) -> Transport {
        self.inner().transport
    }

    /// Its protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner().domain
    }

    /// The context that it lives in.
    pub fn context(&self) -> &Context {
        self.inner().domain.context()
    }

    /// The sizes that it was made with, at least those asked for.
    pub fn capacity(&self) -> QpCap {
        self.inner().cap
    }

    /// The state that it was brought to last. The device may have moved it to
    /// an error state since; [`query`](Self::query) asks.
    pub fn state(&self) -> State {
        self.inner().state()
    }

    /// Asks the kernel for its attributes.
    ///
    /// # Errors
    /// EIO if the device is gone.
    pub fn query(&self) -> Result<QpAttr> {
        self.inner().query()
    }

    /// Changes attributes as they are given. [`transition`](Self::transition)
    /// and [`connect`](Self::connect) know which a transition takes.
    ///
    /// # Errors
    /// [`Error::Busy`] for a reset with operations in flight; EINVAL for a
    /// transition that is not allowed with these attributes. A reset that fails,
    /// and after which the kernel does not name another state, counts as done.
    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let modified = self.inner().modify(attr, mask);
        if is_reset(attr, mask) && self.state() == State::RESET {
            self.send.doorbell.reset();
            if let Some((queue, _)) = &mut self.recv.queue {
                queue.reset();
            }
        }
        modified
    }

    /// Moves it to the error state: everything in flight is completed with
    /// [`Status::WR_FLUSH_ERR`](crate::Status::WR_FLUSH_ERR).
    ///
    /// # Errors
    /// EIO if the device is gone.
    pub fn set_error(&mut self) -> Result<()> {
        self.inner().set_error()
    }

    /// Operations in flight: of the send queue, of the receive queue.
    pub fn in_flight(&self) -> (u32, u32) {
        let inner = self.inner();
        (
            inner.send_fifo.len(),
            inner.recv_fifo.as_ref().map_or(0, |fifo| fifo.len()),
        )
    }

    /// The two halves, each for an owner of its own. Either posts, asks and
    /// [drains](SendHalf::drain) what is its own; the queue pair is destroyed
    /// with the last, or when they are [one again](Self::reunite) and closed.
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    /// A queue pair from its halves.
    ///
    /// # Errors
    /// The halves, if they are of two queue pairs.
    pub fn reunite(send: SendHalf, recv: RecvHalf) -> Result<Self, (SendHalf, RecvHalf)> {
        if Arc::ptr_eq(&send.inner, &recv.inner) {
            Ok(Self { send, recv })
        } else {
            Err((send, recv))
        }
    }

    /// The send queue without the library's ownership: [`raw`](crate::raw).
    #[inline]
    pub fn raw_send(&mut self) -> crate::raw::SendQueue<'_> {
        self.send.raw()
    }

    /// The receive queue without the library's ownership: [`raw`](crate::raw).
    ///
    /// # Errors
    /// [`Error::Invalid`] with a shared receive queue.
    #[inline]
    pub fn raw_receive(&mut self) -> Result<crate::raw::RecvQueue<'_>> {
        self.recv.raw()
    }

    fn destroy(&self) -> Result<()> {
        let inner = self.inner();
        match uverbs::qp::destroy(inner.object.context(), inner.object.handle()) {
            Ok(_) => {}
            Err(error) if inner.domain.context().is_gone_by(&error) => {}
            Err(error) => return Err(error.into()),
        }
        inner.departed();
        Ok(())
    }

    /// Destroys it. What is in flight is released as when it is dropped.
    ///
    /// # Errors
    /// EBUSY with the queue pair, while it is in a multicast group.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        match self.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err(CloseError::new(self, error)),
        }
    }

    /// Destroys it, and gives back everything that was in flight, the send
    /// queue's first, each in the order in which it was posted. Completions of
    /// it that nobody has polled are worth nothing from now on.
    ///
    /// `recv_cq` is needed if receives complete in another queue than sends.
    ///
    /// # Errors
    /// [`Error::Invalid`] if these are not its completion queues; EBUSY while
    /// it is in a multicast group. Both with the queue pair.
    pub fn close_and_drain(
        self,
        send_cq: &mut CompletionQueue,
        recv_cq: Option<&mut CompletionQueue>,
    ) -> Result<Vec<Released>, CloseError<Self>> {
        let inner = Arc::clone(self.inner());
        let fits = send_cq.serves(&inner.send_cq)
            && match (&recv_cq, &inner.recv_fifo) {
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
        send_cq.drain(&inner.send_fifo, &mut keep);
        if let Some(fifo) = &inner.recv_fifo {
            recv_cq.unwrap_or(send_cq).drain(fifo, &mut keep);
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
