//! What the two ends of a connection know of each other besides the wire.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{Endpoint, LocalAddress, QueuePair, RemoteAddr};

/// Places at the passive end for writes with immediate data, and for writes
/// that are read back.
pub const SLOTS: usize = 16;
/// Bytes of a place, and of the longest message.
pub const SLOT: usize = super::pool::SIZE;
/// Where the bytes begin that are only read, behind all slots.
pub const CONSTANT: usize = 2 * SLOTS * SLOT;
/// Where the words for atomics begin.
pub const WORDS: usize = CONSTANT + SLOT;
/// Bytes of the passive end's memory.
pub const REGION: usize = WORDS + 16;
/// Whose pattern the constant has.
pub const CONSTANT_NUMBER: u64 = u64::MAX;

/// A message that the passive end is to hear of.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub number: u64,
    pub len: usize,
    /// Where a write went; a send has none.
    pub slot: Option<usize>,
}

/// A connection's life.
#[derive(Default)]
pub struct Life {
    /// Somebody has ended it on purpose: failures are no surprise.
    killed: AtomicBool,
    /// Sent and not yet seen.
    sent: Mutex<VecDeque<Message>>,
}

impl Life {
    pub fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
    }

    pub fn is_killed(&self) -> bool {
        self.killed.load(Ordering::SeqCst)
    }

    /// Before the message is posted.
    pub fn sending(&self, message: Message) {
        self.sent.lock().unwrap().push_back(message);
    }

    pub fn seen(&self) -> Option<Message> {
        self.sent.lock().unwrap().pop_front()
    }

    /// Messages that are on their way.
    pub fn under_way(&self) -> usize {
        self.sent.lock().unwrap().len()
    }
}

/// What the passive side is asked.
pub enum Order {
    /// A connection, with a receive queue of its own or the shared one.
    Connect {
        link: usize,
        shared: bool,
        life: Arc<Life>,
        peer: Endpoint,
        answer: Sender<(Endpoint, RemoteAddr)>,
    },
    /// The other end is gone, or about to go.
    Gone { link: usize, life: Arc<Life> },
}

/// Connects; a peer that has vanished is noticed after a second or two.
pub fn connect(qp: &mut QueuePair, local: &LocalAddress, peer: &Endpoint) {
    let path = local.path_to(peer.gid, peer.lid);
    let mtu = local.mtu.min(peer.mtu);
    let psn = qp.endpoint(local).psn;
    qp.initialize(local).unwrap();
    qp.transition(ReadyToReceive::reliable(path, peer.qp_num, peer.psn, mtu))
        .unwrap();
    // rdma_rxe takes 7 retries for ever.
    qp.transition(
        ReadyToSend::reliable(psn)
            .timeout(Duration::from_millis(268))
            .retry_cnt(6),
    )
    .unwrap();
}
