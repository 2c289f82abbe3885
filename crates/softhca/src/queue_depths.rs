//! How full the queues of a queue pair and of a completion queue are, for whoever looks from
//! outside.

use roce::transport::QpState;

use crate::engine::cq::CONSUMED;
use crate::hca::Hca;
use crate::platform::Platform;

/// What waits in the queues of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueDepths {
    /// State of the queue pair.
    pub state: QpState,
    /// Sends that have not completed. One that the device has not taken yet counts once for
    /// each 64 bytes of its WQE.
    pub sends: u32,
    /// Posted receives; `None` if they are those of a shared receive queue.
    pub receives: Option<u32>,
}

impl<P: Platform> Hca<P> {
    /// Returns what waits in the queues of a queue pair; `None` if it does not exist or is one
    /// of raw packets.
    pub fn queue_depths(&self, qpn: u32) -> Option<QueueDepths> {
        let view = self.transport.query(qpn)?;
        let qp = self.core.qp(qpn)?;
        let posted = |doorbell, head| match self.core.platform.read_index(doorbell) {
            Ok(index) => u32::from((index as u16).wrapping_sub(head)),
            Err(_) => 0,
        };
        // Before the doorbell has rung, the record is that before the last reset.
        let send = qp.send.as_ref().filter(|ring| ring.rung);
        let waiting = send.map_or(0, |ring| posted(ring.doorbell, ring.head));
        Some(QueueDepths {
            state: view.state,
            sends: view.outstanding as u32 + waiting,
            receives: qp
                .recv
                .as_ref()
                .map(|ring| posted(ring.doorbell, ring.head)),
        })
    }

    /// Returns the number of completions of a queue that the program has not read.
    pub fn unread_completions(&self, cqn: u32) -> Option<u32> {
        let queue = self.core.cqs.get(cqn)?;
        let read = self.core.platform.read_index(queue.doorbell + CONSUMED);
        Some(queue.unread(read.unwrap_or(queue.consumer)))
    }
}
