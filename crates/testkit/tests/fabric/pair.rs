//! Two connected queue pairs on two nodes.

use std::time::Duration;

use ringverbs::{
    Buffer, Completion, CompletionQueue, ProtectionDomain, QueuePair, Result, Transport,
};
use ringverbs_testkit::{Fabric, connect};

/// Longer than all retries of a connection take, in simulated time.
pub const LONG: Duration = Duration::from_secs(100);

/// One side of a connection.
pub struct Side {
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub domain: ProtectionDomain,
}

impl Side {
    pub fn new(fabric: &Fabric, node: usize) -> Result<Self> {
        let context = fabric.node(node).open()?;
        let domain = context.alloc_pd()?;
        let cq = context.completion_queue().build()?;
        let qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
        Ok(Self { qp, cq, domain })
    }

    /// Returns a buffer with these bytes.
    pub fn buffer(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.domain.alloc(bytes.len()).unwrap().into_buffer();
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    pub fn complete(&mut self) -> Completion {
        self.cq.poll_for(LONG).unwrap().expect("no completion")
    }
}

pub fn pair(fabric: &Fabric) -> (Side, Side) {
    let (mut a, mut b) = (Side::new(fabric, 0).unwrap(), Side::new(fabric, 1).unwrap());
    connect(&mut a.qp, &mut b.qp).unwrap();
    (a, b)
}
