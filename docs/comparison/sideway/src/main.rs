//! 1000 round trips of 64 bytes between two queue pairs of a process.
use std::sync::Arc;
use std::time::Instant;

use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::AddressHandleAttribute;
use sideway::ibverbs::completion::{ExtendedCompletionQueue, GenericCompletionQueue};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::queue_pair::{
    ExtendedQueuePair, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState,
    SendOperationFlags, SetScatterGatherEntry, WorkRequestFlags,
};

type Any = Box<dyn std::error::Error>;

fn exchange(
    from: &mut ExtendedQueuePair,
    to: &mut ExtendedQueuePair,
    queue: &ExtendedCompletionQueue,
    message: &MemoryRegion,
    place: &MemoryRegion,
) -> Result<(), Any> {
    let mut receives = to.start_post_recv();
    let receive = receives.construct_wr(1);
    unsafe { receive.setup_sge(place.lkey(), place.get_ptr() as u64, 64) };
    receives.post()?;
    let mut sends = from.start_post_send();
    let send = sends.construct_wr(0, WorkRequestFlags::Signaled);
    unsafe {
        send.setup_send()
            .setup_sge(message.lkey(), message.get_ptr() as u64, 64)
    };
    sends.post()?;
    let mut count = 0;
    while count < 2 {
        if let Ok(mut completions) = queue.start_poll() {
            for completion in &mut completions {
                assert_eq!(completion.status(), 0);
                count += 1;
            }
        }
    }
    Ok(())
}

fn main() -> Result<(), Any> {
    let devices = DeviceList::new()?;
    let context = devices.iter().next().expect("a device").open()?;
    let domain = context.alloc_pd()?;
    let mut builder = context.create_cq_builder();
    let queue = builder.setup_cqe(16).build_ex()?;
    let build = || {
        let mut builder = domain.create_qp_builder();
        let queue = GenericCompletionQueue::from(Arc::clone(&queue));
        builder
            .setup_send_cq(queue.clone())
            .setup_recv_cq(queue)
            .setup_send_ops_flags(SendOperationFlags::Send)
            .build_ex()
    };
    let (mut a, mut b) = (build()?, build()?);
    let gids = context.query_gid_table()?;
    let gid = gids.get(1).expect("a GID");
    let connect = |qp: &mut ExtendedQueuePair, peer: u32| -> Result<(), Any> {
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(1)
            .setup_access_flags(AccessFlags::LocalWrite);
        qp.modify(&init)?;
        let mut path = AddressHandleAttribute::new();
        path.setup_port(1)
            .setup_grh_src_gid_index(gid.gid_index() as u8)
            .setup_grh_dest_gid(&gid.gid())
            .setup_grh_hop_limit(64);
        let mut receive = QueuePairAttribute::new();
        receive
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(Mtu::Mtu1024)
            .setup_dest_qp_num(peer)
            .setup_rq_psn(0)
            .setup_max_dest_read_atomic(1)
            .setup_min_rnr_timer(12)
            .setup_address_vector(&path);
        qp.modify(&receive)?;
        let mut send = QueuePairAttribute::new();
        send.setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(0)
            .setup_timeout(14)
            .setup_retry_cnt(7)
            .setup_rnr_retry(7)
            .setup_max_read_atomic(1);
        Ok(qp.modify(&send)?)
    };
    let (at_a, at_b) = (a.qp_number(), b.qp_number());
    connect(&mut a, at_b)?;
    connect(&mut b, at_a)?;
    let (mut message, mut place) = (vec![7u8; 64], vec![0u8; 64]);
    let access = AccessFlags::LocalWrite;
    let register = |memory: &mut Vec<u8>| unsafe {
        domain.reg_mr(memory.as_mut_ptr() as usize, memory.len(), access)
    };
    let (at_message, at_place) = (register(&mut message)?, register(&mut place)?);
    let start = Instant::now();
    for _ in 0..1000 {
        exchange(&mut a, &mut b, &queue, &at_message, &at_place)?;
        exchange(&mut b, &mut a, &queue, &at_place, &at_message)?;
    }
    assert!(message.iter().all(|byte| *byte == 7));
    println!("{:?} a round trip", start.elapsed() / 1000);
    Ok(())
}
