//! 1000 round trips of 64 bytes between two queue pairs of a process.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use rdma_io::cq::CompletionQueue;
use rdma_io::mr::{AccessFlags, OwnedMemoryRegion};
use rdma_io::qp::{QpInitAttr, QueuePair};
use rdma_io::wc::WorkCompletion;
use rdma_io::wr::{RecvWr, SendFlags, SendWr, Sge, WrOpcode};

type Any = Box<dyn std::error::Error>;

fn exchange(
    from: &QueuePair,
    to: &QueuePair,
    queue: &CompletionQueue,
    message: &OwnedMemoryRegion,
    place: &OwnedMemoryRegion,
) -> Result<(), Any> {
    let piece = |it: &OwnedMemoryRegion| Sge::new(it.addr(), 64, it.lkey());
    to.post_recv(&mut RecvWr::new(1).sg(piece(place)))?;
    let send = SendWr::new(0, WrOpcode::Send).flags(SendFlags::SIGNALED);
    from.post_send(&mut send.sg(piece(message)))?;
    let mut completions = [WorkCompletion::default(); 2];
    let mut count = 0;
    while count < 2 {
        let polled = queue.poll(&mut completions)?;
        for completion in &completions[..polled] {
            assert!(completion.is_success(), "{completion:?}");
        }
        count += polled;
    }
    Ok(())
}

fn main() -> Result<(), Any> {
    let context = Arc::new(rdma_io::device::open_first_device()?);
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(16)?;
    let init = QpInitAttr::default();
    let build = || domain.create_qp(&queue, &queue, &init);
    let (a, b) = (build()?, build()?);
    let access = AccessFlags::LOCAL_WRITE;
    let gid = context.query_gid(1, 0)?;
    for (qp, peer) in [(&a, &b), (&b, &a)] {
        qp.to_init(1, 0, access.bits())?;
        qp.to_rtr(peer.qp_num(), 0, &gid, 1)?;
    }
    a.to_rts(0)?;
    b.to_rts(0)?;
    let message = domain.reg_mr_owned(vec![7; 64], access)?;
    let place = domain.reg_mr_owned(vec![0; 64], access)?;
    // No borrow is kept by what is posted: the device writes behind this one.
    let behind: &[u8] = place.as_slice();
    let before = behind[0];
    let start = Instant::now();
    for _ in 0..1000 {
        exchange(&a, &b, &queue, &message, &place)?;
        exchange(&b, &a, &queue, &place, &message)?;
    }
    assert!(message.as_slice().iter().all(|byte| *byte == 7));
    println!("{:?} a round trip", start.elapsed() / 1000);
    println!("a shared slice had {before} and has {}", behind[0]);
    Ok(())
}
