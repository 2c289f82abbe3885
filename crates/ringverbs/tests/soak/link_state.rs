//! State that the two ends of a connection share in the process.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{Endpoint, LocalAddress, QueuePair, RemoteAddr};

/// Number of slots at the passive end for writes with immediate data, and for writes that are
/// read back.
pub const SLOTS: usize = 16;
/// Length of a slot, and of the longest message, in bytes.
pub const SLOT: usize = super::pool::SIZE;
/// Offset of the read-only bytes, behind all slots.
pub const CONSTANT: usize = 2 * SLOTS * SLOT;
/// Offset of the words for atomics.
pub const WORDS: usize = CONSTANT + SLOT;
/// Length of the passive end's memory in bytes.
pub const REGION: usize = WORDS + 16;
/// Number of the pattern of the read-only bytes.
pub const CONSTANT_NUMBER: u64 = u64::MAX;

/// A message to the passive end.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub number: u64,
    pub len: usize,
    /// The slot of a write; `None` for a send.
    pub slot: Option<usize>,
}

/// The shared state of a connection.
#[derive(Default)]
pub struct LinkState {
    /// Whether an end was killed on purpose, so that failures are expected.
    killed: AtomicBool,
    /// Messages that were sent and not yet received.
    sent: Mutex<VecDeque<Message>>,
}

impl LinkState {
    pub fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
    }

    pub fn is_killed(&self) -> bool {
        self.killed.load(Ordering::SeqCst)
    }

    /// Records a message before it is posted.
    pub fn push(&self, message: Message) {
        self.sent.lock().unwrap().push_back(message);
    }

    pub fn take_next(&self) -> Option<Message> {
        self.sent.lock().unwrap().pop_front()
    }

    /// Returns the number of messages in flight.
    pub fn in_flight_messages(&self) -> usize {
        self.sent.lock().unwrap().len()
    }
}

/// A request to the passive side.
pub enum Order {
    /// Connect, with a separate receive queue or the shared one.
    Connect {
        link: usize,
        shared: bool,
        link_state: Arc<LinkState>,
        peer: Endpoint,
        answer: Sender<(Endpoint, RemoteAddr)>,
    },
    /// The other end was destroyed, or is about to be.
    Gone {
        link: usize,
        link_state: Arc<LinkState>,
    },
}

/// Connects; a killed peer is detected after a second or two.
pub fn connect(qp: &mut QueuePair, local: &LocalAddress, peer: &Endpoint) {
    let path = local.path_to(peer.gid, peer.lid);
    let mtu = local.mtu.min(peer.mtu);
    let psn = qp.endpoint(local).psn;
    qp.initialize(local).unwrap();
    qp.transition(ReadyToReceive::reliable(path, peer.qp_num, peer.psn, mtu))
        .unwrap();
    // With 7, rdma_rxe retries forever.
    qp.transition(
        ReadyToSend::reliable(psn)
            .timeout(Duration::from_millis(268))
            .retry_cnt(6),
    )
    .unwrap();
}
