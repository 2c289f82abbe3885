//! The two ends of a connection between two devices.

use ringverbs::qp::ConnectOptions;
use ringverbs::{
    Buffer, CompletionQueue, Device, LocalAddress, ProtectionDomain, QueuePair, Transport,
};

/// Bytes of the longest message: some packets.
pub const SIZE: usize = 20_000;
/// Operations in flight.
pub const DEPTH: usize = 16;
/// `ETIMEDOUT`.
const ETIMEDOUT: i32 = 110;
/// Receives that are posted, more than can be used up.
pub const RECEIVES: usize = 64;

/// An end: a device and the queue pair of the moment.
pub struct End {
    pub qp: QueuePair,
    pub cq: CompletionQueue,
    pub domain: ProtectionDomain,
    pub local: LocalAddress,
}

impl End {
    /// On the device that the variable names.
    pub fn new(variable: &str, transport: Transport) -> Self {
        let device = Device::named(&testing::variable(variable)).unwrap();
        let context = device.open().unwrap();
        let domain = context.alloc_pd().unwrap();
        let entries = (DEPTH + RECEIVES) as u32;
        let cq = context.completion_queue().entries(entries).build().unwrap();
        Self {
            qp: queue_pair(&domain, transport, &cq),
            cq,
            local: context.local_address(1).unwrap(),
            domain,
        }
    }

    /// Closes its queue pair and takes a new one.
    pub fn renew(&mut self) {
        let new = queue_pair(&self.domain, self.qp.transport(), &self.cq);
        let old = std::mem::replace(&mut self.qp, new);
        old.close().unwrap();
    }

    pub fn buffers(&self, count: usize) -> Vec<Buffer> {
        let region = self.domain.alloc(count * SIZE).unwrap();
        region.into_buffers(SIZE).take(count).collect()
    }
}

fn queue_pair(domain: &ProtectionDomain, transport: Transport, cq: &CompletionQueue) -> QueuePair {
    let builder = domain.queue_pair(transport, cq);
    let builder = builder.send_depth(DEPTH as u32).recv_depth(RECEIVES as u32);
    builder.build().unwrap()
}

/// Both ends, not connected.
pub fn ends(transport: Transport) -> (End, End) {
    let (a, b) = (
        End::new("RXE_DEV", transport),
        End::new("RXE_DEV1", transport),
    );
    assert_ne!(a.local.gid, b.local.gid, "both have the same address");
    (a, b)
}

/// Connects reliably, with so many retries; 7 are without end on rdma_rxe.
pub fn connect(a: &mut End, b: &mut End, retries: u8) {
    let (at_a, at_b) = (a.qp.endpoint(&a.local), b.qp.endpoint(&b.local));
    let options = ConnectOptions::new().retries(retries);
    for (end, peer) in [(a, at_b), (b, at_a)] {
        found(|| end.qp.connect_with(&end.local, &peer, &options));
    }
}

/// Until the kernel has asked the wire where the peer is; the question or the
/// answer may get lost.
pub fn found<T>(mut look: impl FnMut() -> ringverbs::Result<T>) -> T {
    let mut tries = 0;
    loop {
        match look() {
            Ok(found) => return found,
            Err(error) if error.errno() == ETIMEDOUT && tries < 10 => tries += 1,
            Err(error) => panic!("{error}"),
        }
    }
}
