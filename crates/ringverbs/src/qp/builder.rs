//! Creating queue pairs.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use ring::Hint;
use uverbs::{QpCap, QpInit, QpType};

use super::{Inner, QueuePair, RecvHalf, SendHalf, State, Transport};
use crate::completion::{self, CompletionQueueRef};
use crate::device;
use crate::inflight::{MAX_DEPTH, OrderedWriter};
use crate::operation::Operation;
use crate::{Error, ProtectionDomain, Result, SharedReceiveQueue, srq};

/// Maximum inline data of rdma_rxe (`RXE_MAX_INLINE_DATA`): the size of its 32
/// scatter/gather elements. There is no query for it.
const MAX_INLINE_DATA: u32 = 32 * 16;

/// The operations that [`QueuePairBuilder::memory_windows`] enables.
pub(super) const CHANGES_OF_KEYS: u32 =
    1 << Operation::LocalInvalidate as u32 | 1 << Operation::BindWindow as u32;

/// Builder of a queue pair, from [`ProtectionDomain::queue_pair`].
#[must_use]
pub struct QueuePairBuilder {
    domain: ProtectionDomain,
    transport: Transport,
    send_cq: CompletionQueueRef,
    recv_cq: CompletionQueueRef,
    srq: Option<Arc<srq::Inner>>,
    cap: QpCap,
    signal_all: bool,
    windows: bool,
    packets: Option<device::Packets>,
    dynamic: Option<device::Dynamic>,
}

impl ProtectionDomain {
    /// Returns a builder of a queue pair whose operations complete in `cq`: a
    /// reference to a [`CompletionQueue`](crate::CompletionQueue), or a handle
    /// ([`CompletionQueue::handle`](crate::CompletionQueue::handle)) of one that
    /// another thread polls.
    pub fn queue_pair(
        &self,
        transport: Transport,
        cq: impl Into<CompletionQueueRef>,
    ) -> QueuePairBuilder {
        let cq = cq.into();
        QueuePairBuilder {
            domain: self.clone(),
            transport,
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            signal_all: false,
            windows: false,
            packets: None,
            dynamic: None,
        }
    }

    /// Returns a builder of an initiator or target of dynamic connections. Its owner keeps
    /// the queue pair private, because each operation needs an address.
    pub(crate) fn dynamic_queue_pair(
        &self,
        dynamic: device::Dynamic,
        cq: CompletionQueueRef,
    ) -> QueuePairBuilder {
        QueuePairBuilder {
            dynamic: Some(dynamic),
            ..self.queue_pair(Transport::Reliable, cq)
        }
    }

    /// Returns a builder of a raw packet queue pair. Its owner keeps the queue pair
    /// private: posting reads the frame, so its memory must be a readable slice, which not
    /// every source of a [`WorkRequest`](super::WorkRequest) is.
    pub(crate) fn packet_queue_pair(
        &self,
        packets: device::Packets,
        cq: &crate::CompletionQueue,
    ) -> QueuePairBuilder {
        QueuePairBuilder {
            packets: Some(packets),
            ..self.queue_pair(Transport::Datagram, cq)
        }
    }
}

impl QueuePairBuilder {
    /// Sets the completion queue of receives; default: the completion queue of sends.
    pub fn recv_cq(mut self, cq: impl Into<CompletionQueueRef>) -> Self {
        self.recv_cq = cq.into();
        self
    }

    /// Takes receives from a shared receive queue.
    pub fn srq(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(Arc::clone(srq.inner()));
        self
    }

    /// Sets the minimum depth of the send queue, in operations; default 64.
    pub fn send_depth(mut self, operations: u32) -> Self {
        self.cap.max_send_wr = operations;
        self
    }

    /// Sets the minimum depth of the receive queue, in receives; default 64.
    pub fn recv_depth(mut self, receives: u32) -> Self {
        self.cap.max_recv_wr = receives;
        self
    }

    /// Sets the minimum number of SGEs (pieces of memory) per send; default 1.
    pub fn send_pieces(mut self, pieces: u32) -> Self {
        self.cap.max_send_sge = pieces;
        self
    }

    /// Sets the minimum number of SGEs (pieces of memory) per receive; default 1.
    pub fn recv_pieces(mut self, pieces: u32) -> Self {
        self.cap.max_recv_sge = pieces;
        self
    }

    /// Sets the minimum size of inline data, in bytes; default 0.
    pub fn inline(mut self, bytes: u32) -> Self {
        self.cap.max_inline_data = bytes;
        self
    }

    /// Signals every operation, even if it is posted as unsignalled (`sq_sig_all`).
    pub fn signal_all(mut self) -> Self {
        self.signal_all = true;
        self
    }

    /// Allows operations that change memory keys: binds of memory windows and local
    /// invalidations. On ConnectX each takes three times the space of a short work
    /// request, and the send queue is sized for a full depth of them; on rdma_rxe there is
    /// no cost. Without this option, the queue pair refuses them on every device.
    pub fn memory_windows(mut self) -> Self {
        self.windows = true;
        self
    }

    /// Creates the queue pair, in state RESET.
    ///
    /// # Errors
    /// [`Error::Limit`] for sizes above the device's limit;
    /// [`Error::WrongDomain`] for a completion queue of another context;
    /// [`Error::Invalid`] if the owner of the completion queue has dropped it;
    /// [`Error::Unsupported`] for memory windows on a device without them;
    /// ENOMEM.
    pub fn build(self) -> Result<QueuePair> {
        self.check_contexts()?;
        let context = self.domain.context();
        let send_cq = self.send_cq.live_shared()?;
        let recv_cq = self.recv_cq.live_shared()?;
        let id = context.next_id();
        let created = self.create(id, &send_cq, &recv_cq)?;
        // The queue pair uses the whole capacity of the device's rings.
        let send_depth = created.send.capacity().min(MAX_DEPTH);
        let recv_depth = created
            .recv
            .as_ref()
            .map(|queue| queue.capacity().min(MAX_DEPTH));
        let send_table = send_cq.attach(send_depth)?;
        let recv_table = recv_depth.map(|depth| recv_cq.attach(depth)).transpose();
        let recv_table = recv_table.inspect_err(|_| send_cq.detach(&send_table))?;
        let mut operations = self.transport.operations() & context.provider().operations();
        if !self.windows {
            operations &= !CHANGES_OF_KEYS;
        }
        // With a random PSN, stray packets of an earlier connection are unlikely to match.
        let psn = device::Engine::of(self.domain.context()).random() as u32 & 0x00ff_ffff;
        let inner = Arc::new(Inner {
            object: created.object,
            membership: created.membership,
            cap: created.cap,
            unmap_send_later: OnceLock::new(),
            unmap_recv_later: OnceLock::new(),
            send_cq,
            recv_cq,
            send_table: Arc::clone(&send_table),
            recv_table: recv_table.clone(),
            srq: self.srq,
            domain: self.domain,
            transport: self.transport,
            state: Hint::new(State::RESET.0.into()),
            reset_interrupted: Hint::new(0),
            id,
            psn,
        });
        let send = SendHalf {
            queue: ManuallyDrop::new(created.send),
            // SAFETY: the list was created just now; this is its only writer.
            in_flight: unsafe { OrderedWriter::new(send_table) },
            unsignaled: 0,
            unsignaled_published: 0,
            unsignaled_limit: send_depth / 2,
            signal_all: self.signal_all,
            operations,
            // A raw packet contains its addresses.
            datagram: self.transport == Transport::Datagram && self.packets.is_none(),
            scratch: None,
            inner: Arc::clone(&inner),
        };
        let max_sge = created.recv.as_ref().map_or(0, device::RecvQueue::max_sge);
        let queue = created.recv.zip(recv_table).map(|(queue, table)| {
            // SAFETY: as above.
            (ManuallyDrop::new(queue), unsafe {
                OrderedWriter::new(table)
            })
        });
        Ok(QueuePair {
            send,
            recv: RecvHalf {
                queue,
                max_sge,
                inner,
            },
        })
    }

    /// Checks that all objects are of one context.
    fn check_contexts(&self) -> Result<()> {
        let context = self.domain.context();
        if !context.is_same(self.send_cq.context()) || !context.is_same(self.recv_cq.context()) {
            return Err(Error::WrongDomain {
                what: "completion queue",
            });
        }
        match &self.srq {
            Some(srq) if !context.is_same(srq.domain().context()) => Err(Error::WrongDomain {
                what: "shared receive queue",
            }),
            _ => Ok(()),
        }
    }

    /// Creates the device's queue pair.
    fn create(
        &self,
        id: u64,
        send_cq: &completion::Shared,
        recv_cq: &completion::Shared,
    ) -> Result<device::QueuePair> {
        let context = self.domain.context();
        let init = QpInit {
            qp_type: match (self.packets, self.dynamic) {
                (Some(_), _) => QpType::RAW_PACKET,
                (_, Some(_)) => QpType::DRIVER,
                (None, None) => self.transport.qp_type(),
            },
            pd: Some(self.domain.handle()),
            send_cq: Some(send_cq.object().handle()),
            recv_cq: Some(recv_cq.object().handle()),
            srq: self.srq.as_ref().map(|srq| srq.object().handle()),
            cap: self.cap,
            sq_sig_all: self.signal_all,
            user_handle: id,
            ..QpInit::default()
        };
        let resources = device::QpResources {
            send: send_cq.members(),
            recv: recv_cq.members(),
            srq: self.srq.as_ref().map(|srq| srq.entries()),
            keys: self.windows,
            packets: self.packets,
            dynamic: self.dynamic,
            engine: device::Engine::of(context),
        };
        let created = context
            .provider()
            .queue_pair(context.uverbs(), &init, &resources);
        match created {
            Err(Error::Kernel(error)) if error.errno().raw() == libc::EINVAL => {
                Err(self.explain(error))
            }
            created => created,
        }
    }

    /// Finds the size that exceeds a device limit. The limits are queried only after the
    /// kernel has refused.
    fn explain(&self, error: uverbs::Error) -> Error {
        let cap = &self.cap;
        if cap.max_inline_data > MAX_INLINE_DATA {
            return Error::Limit {
                what: "bytes of inline data",
                asked: cap.max_inline_data.into(),
                allowed: MAX_INLINE_DATA.into(),
            };
        }
        let Ok(device) = self.domain.context().uverbs().query_device() else {
            return error.into();
        };
        let limits = [
            ("depth of a send queue", cap.max_send_wr, device.max_qp_wr),
            (
                "depth of a receive queue",
                cap.max_recv_wr,
                device.max_qp_wr,
            ),
            ("pieces of a send", cap.max_send_sge, device.max_sge),
            ("pieces of a receive", cap.max_recv_sge, device.max_sge),
        ];
        limits
            .into_iter()
            .find(|(_, asked, allowed)| asked > allowed)
            .map_or(error.into(), |(what, asked, allowed)| Error::Limit {
                what,
                asked: asked.into(),
                allowed: allowed.into(),
            })
    }
}
