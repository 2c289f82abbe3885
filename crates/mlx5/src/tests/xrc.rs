//! XRC: initiators, targets, and the shared receive queues that initiators
//! name.

use uverbs::kernel::fake::Target;
use uverbs::{CqHandle, PdHandle, QpInit, QpOpen, QpType, Sge, SrqInit, SrqKind, XrcdHandle};

use super::objects::{CREATE_QP, CREATE_SRQ, FakeDevice, VALID_ANSWER};
use super::*;
use crate::{
    Bind, Destination, MwType, Operands, PostError, QueuePair, RemoteMemory, Role,
    SharedReceiveQueue,
};

const INITIATOR: Service = Service::XrcInitiator;
/// The peer's shared receive queue.
const SRQN: u32 = 0x0065_4321;
/// The peer's memory; its upper half would be a length.
const REMOTE: u64 = 0x2222_0000_8000;

fn sge(addr: u64, length: u32) -> Sge {
    Sge {
        addr,
        length,
        lkey: 9,
    }
}

/// Posts one work request of each kind of field; its slot.
fn post(pair: &mut TestQp, opcode: Opcode, list: &[Sge]) -> u16 {
    let slot = pair.record(1) as u16;
    pair.send.begin();
    let wr = SendWr {
        remote: RemoteMemory {
            addr: REMOTE,
            rkey: 0x77,
        },
        operands: Operands::Atomic {
            compare_add: 11,
            swap: 22,
        },
        destination: Destination::Xrc { remote_srqn: SRQN },
        ..request(7, opcode, SendFlags::SIGNALED, list)
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    slot
}

#[test]
fn xrc_requests_name_the_remote_srq() {
    // Segments, and the one that has the first element.
    let table = [
        (Opcode::SEND, 3, 2),
        (Opcode::SEND_WITH_IMM, 3, 2),
        (Opcode::SEND_WITH_INV, 3, 2),
        (Opcode::RDMA_WRITE, 4, 3),
        (Opcode::RDMA_WRITE_WITH_IMM, 4, 3),
        (Opcode::RDMA_READ, 4, 3),
        (Opcode::ATOMIC_CMP_AND_SWP, 5, 4),
        (Opcode::ATOMIC_FETCH_AND_ADD, 5, 4),
    ];
    for (opcode, segments, data) in table {
        let mut pair = TestQp::new(1, INITIATOR, &cap(4, 1, 0));
        post(&mut pair, opcode, &[sge(0x9000, 8)]);
        let bytes = pair.sent(0, 96);
        assert_eq!(be32(&bytes, 4), QPN << 8 | segments, "{opcode:?}");
        assert_eq!(be32(&bytes, 16), SRQN, "{opcode:?}");
        assert_eq!(bytes[20..32], [0; 12], "{opcode:?}");
        if data > 2 {
            assert_eq!((be64(&bytes, 32), be32(&bytes, 40)), (REMOTE, 0x77));
        }
        let element = &bytes[data * 16..];
        assert_eq!((be32(element, 0), be64(element, 8)), (8, 0x9000));
        // All that the plan says fits: the next one is behind it.
        assert_eq!(pair.record(1), if segments > 4 { 2 } else { 1 });
    }
}

#[test]
fn a_work_request_without_a_destination_is_refused() {
    for service in [INITIATOR, Service::Datagram] {
        let mut pair = TestQp::new(1, service, &cap(4, 1, 0));
        pair.send.begin();
        let refused = push_send(&mut pair.send, 1);
        assert_eq!(refused, Err(PostError::BadOperation));
    }
}

#[test]
fn other_services_have_no_xrc_segment() {
    for service in [Service::ReliableConnection, Service::UnreliableConnection] {
        let mut pair = TestQp::new(1, service, &cap(4, 1, 0));
        post(&mut pair, Opcode::RDMA_WRITE, &[sge(0x9000, 8)]);
        let bytes = pair.sent(0, 64);
        assert_eq!((be32(&bytes, 4), be64(&bytes, 16)), (QPN << 8 | 3, REMOTE));
    }
}

#[test]
fn xrc_key_changes_have_no_xrc_segment() {
    let cap = cap(4, 1, 0);
    let send = SendPlan::new(&cap, INITIATOR, &LIMITS, crate::KeyChanges::Windows, 0).unwrap();
    let mut pair = TestQp::with(qp_queues_with_plan(70, INITIATOR, send, &cap, None), false);
    pair.send.begin();
    let bind = Bind {
        window_rkey: 0x0001_2345,
        rkey: 0x0001_2346,
        window_type: MwType::TYPE_1,
        addr: 0x1000,
        length: 8,
        lkey: 0x77,
        access: 2,
    };
    let wr = SendWr {
        operands: Operands::Bind(&bind),
        destination: Destination::Xrc { remote_srqn: SRQN },
        ..SendWr::new(7, Opcode::BIND_MW, SendFlags::empty())
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    let bytes = pair.sent(0, 64);
    assert_eq!(be32(&bytes, 4), QPN << 8 | 12);
    // The flags of the change, where the queue's number would be.
    assert_eq!(bytes[16], 0x80 | 0x10);
}

#[test]
fn read_data_in_a_cqe_is_scattered() {
    let mut pair = TestQp::new(70, INITIATOR, &cap(4, 1, 0));
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    for (opcode, number) in [
        (Opcode::RDMA_READ, 0x10),
        (Opcode::ATOMIC_CMP_AND_SWP, 0x11),
    ] {
        let mut memory = [0u8; 16];
        let list = [sge(memory.as_mut_ptr().expose_provenance() as u64, 8)];
        let slot = post(&mut pair, opcode, &list);
        let mut bytes = TestCqe {
            user_index: 70,
            slot,
            request: number,
            byte_count: 8,
            scatter: 4,
            ..TestCqe::default()
        }
        .bytes();
        bytes[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        device.write(bytes);
        // SAFETY: what was posted is ours.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        assert_eq!((wc.status, wc.wr_id), (0, 7), "{opcode:?}");
        assert_eq!(memory[..9], [1, 2, 3, 4, 5, 6, 7, 8, 0], "{opcode:?}");
    }
}

#[test]
fn a_target_has_no_queues() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    machine.answer_qp(0);
    let xrcd = uverbs::xrcd::open(
        &machine.context,
        &uverbs::XrcdOpen::default(),
        uverbs::Udata::none(),
    )
    .unwrap();
    let init = QpInit {
        qp_type: QpType::XRC_TGT,
        xrcd: Some(xrcd),
        // What is asked for in vain.
        cap: cap(5, 2, 100),
        ..QpInit::default()
    };
    let mut qp = QueuePair::create(&machine.context, &device, &init, None).unwrap();
    let told = machine.driver_in(CREATE_QP);
    assert_eq!(told[16..28], [0; 12]);
    assert!(qp.recv.is_none() && qp.cap.max_send_wr == 0);
    qp.send.begin();
    let refused = push_send(&mut qp.send, 1);
    assert_eq!(refused, Err(PostError::BadOperation));
    // SAFETY: nothing was posted.
    assert!(!unsafe { qp.send.publish() });

    let open = Target::Write(uverbs::abi::write::cmd::CMD_OPEN_QP);
    machine.fake.reset(open);
    let opened = QueuePair::open(
        &machine.context,
        &device,
        &QpOpen {
            xrcd,
            qpn: QPN,
            qp_type: QpType::XRC_TGT,
            user_handle: 0,
        },
    );
    let mut opened = opened.unwrap();
    assert!(opened.recv.is_none());
    opened.send.begin();
    assert!(push_send(&mut opened.send, 1).is_err());
}

#[test]
fn an_initiator_has_no_receives() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let cq = machine.cq(3).unwrap();
    machine.answer_qp(0);
    let pd = uverbs::pd::alloc(&machine.context, uverbs::Udata::none()).unwrap();
    let init = QpInit {
        qp_type: QpType::XRC_INI,
        pd: Some(pd),
        send_cq: Some(cq.object.handle()),
        cap: cap(5, 2, 0),
        ..QpInit::default()
    };
    let qp = QueuePair::create(&machine.context, &device, &init, None).unwrap();
    assert!(qp.recv.is_none());
    assert_eq!((qp.cap.max_recv_wr, qp.cap.max_send_wr), (0, 5));
    let told = machine.driver_in(CREATE_QP);
    // No entries of a receive queue.
    assert_eq!(told[20..28], [0; 8]);
}

#[test]
fn xrc_srq_has_its_own_user_index() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let cq = machine.cq(3).unwrap();
    let mut ring = cq.ring;
    machine.fake.on(CREATE_SRQ, |reply| {
        use uverbs::abi::ids::*;
        for id in [
            ATTR_CREATE_SRQ_RESP_MAX_WR,
            ATTR_CREATE_SRQ_RESP_MAX_SGE,
            ATTR_CREATE_SRQ_RESP_SRQ_NUM,
        ] {
            reply.set(id, &[0; 4]);
        }
        reply.set_driver_out(&[0x44, 0, 0, 0, 0, 0, 0, 0]);
        Ok(())
    });
    let xrcd = uverbs::xrcd::open(
        &machine.context,
        &uverbs::XrcdOpen::default(),
        uverbs::Udata::none(),
    )
    .unwrap();
    let pd = uverbs::pd::alloc(&machine.context, uverbs::Udata::none()).unwrap();
    let init = |pd: PdHandle, xrcd: XrcdHandle, cq: CqHandle| SrqInit {
        pd,
        user_handle: 0,
        max_wr: 3,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Xrc { xrcd, cq },
        async_fd: None,
    };
    let init = init(pd, xrcd, cq.object.handle());
    let first = SharedReceiveQueue::create(&machine.context, &device, &init).unwrap();
    let mut srq = SharedReceiveQueue::create(&machine.context, &device, &init).unwrap();
    let told = machine.driver_in(CREATE_SRQ);
    let queues = srq.xrc.clone().unwrap();
    let index = u32::from_ne_bytes(told[24..28].try_into().unwrap());
    assert_eq!((index, srq.srq_num), (queues.user_index(), 0x44));
    assert_ne!(index, first.xrc.as_ref().unwrap().user_index());

    ring.attach(&queues, Role::RECEIVE).unwrap();
    let mut device = Device::of(&ring);
    for wr_id in [1, 2, 3] {
        srq.recv.locked().push(wr_id, &[]).unwrap();
    }
    // SAFETY: there is no device.
    unsafe { srq.recv.locked().publish() };
    let receive = |slot: u16| TestCqe {
        opcode: 2,
        user_index: index,
        slot,
        byte_count: 40,
        ..TestCqe::default()
    };
    // The queue pair's number is the target's; a send is none of the queue's.
    device.write_cqe(&receive(1));
    device.write_cqe(&TestCqe {
        opcode: 0,
        request: 0x0a,
        ..receive(0)
    });
    // SAFETY: nothing is written to.
    let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.qp_num, wc.byte_len), (2, QPN, 40));
    // SAFETY: as above.
    assert!(unsafe { read(&mut ring) }.unwrap().is_err());
    // What is unread when it goes is taken out, and it is forgotten.
    device.write_cqe(&receive(0));
    ring.detach(&queues);
    assert!(ring.is_empty());
    device.write_cqe(&receive(2));
    // SAFETY: as above.
    assert!(unsafe { read(&mut ring) }.unwrap().is_err());
}
