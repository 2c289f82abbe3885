//! 1000 round trips of 64 bytes between two queue pairs of a process.
use std::time::Instant;

use ibverbs::{CompletionQueue, MemoryRegion, QueuePair, ibv_qp_type, ibv_wc};

fn exchange(
    from: &mut QueuePair,
    to: &mut QueuePair,
    queue: &CompletionQueue,
    message: &mut MemoryRegion<u8>,
    place: &mut MemoryRegion<u8>,
) -> std::io::Result<()> {
    unsafe { to.post_receive(place, .., 1) }?;
    unsafe { from.post_send(message, .., 0) }?;
    let mut completions = [ibv_wc::default(); 2];
    let mut count = 0;
    while count < 2 {
        for completion in queue.poll(&mut completions)? {
            assert!(completion.is_valid(), "{:?}", completion.error());
            count += 1;
        }
    }
    Ok(())
}

fn main() -> std::io::Result<()> {
    let devices = ibverbs::devices()?;
    let context = devices.get(0).expect("a device").open()?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(16, 0)?;
    let build = || {
        let kind = ibv_qp_type::IBV_QPT_RC;
        domain
            .create_qp(&queue, &queue, kind)
            .set_gid_index(1)
            .build()
    };
    let (a, b) = (build()?, build()?);
    let (at_a, at_b) = (a.endpoint(), b.endpoint());
    let (mut a, mut b) = (a.handshake(at_b)?, b.handshake(at_a)?);
    let mut message = domain.allocate::<u8>(64)?;
    let mut place = domain.allocate::<u8>(64)?;
    message.fill(7);
    let start = Instant::now();
    for _ in 0..1000 {
        exchange(&mut a, &mut b, &queue, &mut message, &mut place)?;
        exchange(&mut b, &mut a, &queue, &mut place, &mut message)?;
    }
    assert!(message.iter().all(|byte| *byte == 7));
    println!("{:?} a round trip", start.elapsed() / 1000);
    Ok(())
}
