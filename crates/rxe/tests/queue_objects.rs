//! Queue pairs, shared receive queues and address handles: what is made of
//! the driver's answers.

use device_testing::rxe::kernel::*;
use device_testing::rxe::{Driver, layout};
use ringverbs_rxe::{
    AddressHandle, CreateError, Data, Opcode, PostError, QueuePair, RecvQueue, SendFlags, SendWr,
    Sge, SharedReceiveQueue,
};
use uverbs::abi::ids::*;
use uverbs::kernel::fake::{Call, Target};
use uverbs::{
    AhAttr, Errno, PdHandle, QpCap, QpCreateFlags, QpInit, QpType, SrqHandle, SrqInit, SrqKind,
    SrqModify,
};

fn qp_init(pd: PdHandle, srq: Option<SrqHandle>) -> QpInit<'static> {
    QpInit {
        qp_type: QpType::RC,
        pd: Some(pd),
        send_cq: None,
        recv_cq: None,
        srq,
        xrcd: None,
        table: None,
        cap: QpCap::default(),
        sq_sig_all: false,
        flags: QpCreateFlags::empty(),
        source_qpn: None,
        user_handle: 0,
        async_fd: None,
    }
}

fn srq_init(pd: PdHandle) -> SrqInit<'static> {
    SrqInit {
        pd,
        user_handle: 0,
        max_wr: 5,
        max_sge: 2,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    }
}

/// Answers CREATE_QP.
fn give_qp(machine: &Machine, recv: [u8; 16], send: [u8; 16]) {
    machine.fake.on(CREATE_QP, move |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &cap(3, 4, 96));
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &17u32.to_ne_bytes());
        // `struct rxe_create_qp_resp`: rq_mi, sq_mi.
        reply.set_driver_out(&[recv, send].concat());
        Ok(())
    });
}

/// Answers CREATE_SRQ.
fn give_srq(machine: &Machine, queue: [u8; 16]) {
    machine.fake.on(CREATE_SRQ, move |reply| {
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_WR, &7u32.to_ne_bytes());
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_SGE, &4u32.to_ne_bytes());
        // `struct rxe_create_srq_resp`: mi, srq_num, reserved.
        reply.set_driver_out(&[&queue[..], &0x1234u32.to_ne_bytes(), &[0; 4]].concat());
        Ok(())
    });
}

fn push(recv: &mut RecvQueue, wr_id: u64) -> Result<(), PostError> {
    recv.push(wr_id, &[Sge::default()])?;
    // SAFETY: nobody writes to the memory that entries name.
    unsafe { recv.publish() };
    Ok(())
}

fn ids(driver: &Driver) -> Vec<u64> {
    let entries = driver.consume();
    let read = |entry: &Vec<u8>| layout::read(entry, layout::recv::WR_ID);
    entries.iter().map(read).collect()
}

#[test]
fn queue_pair_is_mapped_as_announced() {
    let machine = Machine::new();
    let pd = machine.pd();
    let (recv, send) = (machine.queue(7, 16), machine.queue(9, 8));
    give_qp(&machine, recv.mminfo(), send.mminfo());
    let mut qp = QueuePair::create(&machine.context, &qp_init(pd.handle(), None)).unwrap();
    assert_eq!(qp.object.qp_num(), 17);
    assert_eq!((qp.send.capacity(), qp.send.max_sge()), (7, 3));
    let queue = qp.recv.as_mut().unwrap();
    assert_eq!((queue.capacity(), queue.max_sge()), (15, 4));
    push(queue, 5).unwrap();
    assert_eq!((recv.producer(), send.producer()), (1, 0));
    assert_eq!(ids(&recv), [5]);

    for (length, sent) in [(97, Err(PostError::InlineTooLong)), (96, Ok(()))] {
        let bytes = [1; 97];
        let piece = [Sge {
            addr: bytes.as_ptr().expose_provenance() as u64,
            length,
            lkey: 0,
        }];
        let wr = SendWr {
            data: Data::Inline(&piece),
            ..SendWr::new(6, Opcode::SEND, SendFlags::empty())
        };
        // SAFETY: the bytes are readable.
        assert_eq!(unsafe { qp.send.push(&wr) }, sent);
    }
    // SAFETY: inline data names no memory.
    assert!(unsafe { qp.send.publish() });
    let entry = &send.consume()[0];
    assert_eq!(layout::read(entry, layout::send::WR_ID), 6);

    // The doorbell is of this queue pair, on this file.
    machine.fake.take_calls();
    qp.doorbell.ring().unwrap();
    let calls = machine.fake.take_calls();
    let [Call::Write { fd, bytes }] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(*fd, machine.context.fd());
    // `struct ib_uverbs_post_send` behind the header: response, qp_handle.
    assert_eq!(bytes[16..20], qp.object.handle().0.to_ne_bytes());

    drop(qp);
    assert_eq!(machine.live(), [OBJECT_PD]);
}

#[test]
fn queue_pair_with_an_srq_has_no_receive_queue() {
    let machine = Machine::new();
    let pd = machine.pd();
    let (shared, send) = (machine.queue(7, 8), machine.queue(9, 8));
    give_srq(&machine, shared.mminfo());
    let srq = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle())).unwrap();
    // Whatever the driver says of a receive queue.
    give_qp(&machine, [0xff; 16], send.mminfo());
    let init = qp_init(pd.handle(), Some(srq.object.handle()));
    let qp = QueuePair::create(&machine.context, &init).unwrap();
    assert!(qp.recv.is_none());
    assert_eq!(qp.send.capacity(), 7);
}

/// What a driver may say of a queue that cannot be.
fn contradictions(machine: &Machine) -> Vec<(&'static str, [u8; 16], i32)> {
    let mminfo = |offset: u64, size: u32| {
        let mut info = [0; 16];
        info[..8].copy_from_slice(&offset.to_ne_bytes());
        info[8..12].copy_from_slice(&size.to_ne_bytes());
        info
    };
    let slots = machine.queue(9, 8);
    slots.put(4, 6);
    let long = machine.queue(9, 8);
    long.put(4, 63);
    let short = machine.queue(5, 8);
    let shift = machine.queue(9, 8);
    shift.put(0, u32::MAX);
    vec![
        ("no answer", [0; 16], libc::EINVAL),
        ("not on a page", mminfo(4097, 4096), libc::EINVAL),
        ("a negative offset", mminfo(1 << 63, 4096), libc::EOVERFLOW),
        ("slots no power of two", slots.mminfo(), libc::EPROTO),
        ("longer than its mapping", long.mminfo(), libc::EPROTO),
        ("entries too short", short.mminfo(), libc::EPROTO),
        ("shift too far", shift.mminfo(), libc::EPROTO),
    ]
}

#[test]
fn contradictory_answers_are_refused() {
    let machine = Machine::new();
    let pd = machine.pd();
    let good = machine.queue(9, 8).mminfo();
    for (what, bad, errno) in contradictions(&machine) {
        for (recv, send) in [(bad, good), (good, bad)] {
            give_qp(&machine, recv, send);
            let result = QueuePair::create(&machine.context, &qp_init(pd.handle(), None));
            let error = result.err().unwrap_or_else(|| panic!("{what}"));
            check_error(what, &error, errno);
            assert_eq!(machine.live(), [OBJECT_PD], "{what}");
            let queue = if recv == bad { "receive" } else { "send" };
            assert!(error.to_string().contains(queue), "{what}: {error}");
        }
        give_srq(&machine, bad);
        let result = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle()));
        check_error(what, &result.err().unwrap(), errno);
        assert_eq!(machine.live(), [OBJECT_PD], "{what}");
    }
}

#[track_caller]
fn check_error(what: &str, error: &CreateError, errno: i32) {
    match error {
        CreateError::Geometry { .. } => assert_eq!(errno, libc::EPROTO, "{what}: {error}"),
        // Which errno mmap gives for an absurd offset is the C library's and
        // the kernel's choice.
        CreateError::Map { .. } => assert!(
            errno != libc::EPROTO && error.errno() != 0,
            "{what}: {error}"
        ),
        _ => panic!("{what}: {error}"),
    }
    assert!(std::error::Error::source(error).is_some());
}

#[test]
fn kernel_errors_are_passed_on() {
    let machine = Machine::new();
    let pd = machine.pd();
    for target in [CREATE_QP, CREATE_SRQ, CREATE_AH] {
        refuse(&machine, target, libc::ENOMEM);
    }
    let qp = QueuePair::create(&machine.context, &qp_init(pd.handle(), None));
    let srq = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle()));
    let ah = AddressHandle::create(&machine.context, pd.handle(), &AhAttr::default(), 0);
    for error in [qp.err(), srq.err(), ah.err()] {
        assert_eq!(error.unwrap().errno(), libc::ENOMEM);
    }
}

fn refuse(machine: &Machine, target: Target, errno: i32) {
    machine.fake.on(target, move |_| Err(Errno::new(errno)));
}

#[test]
fn an_address_handle_has_the_drivers_number() {
    let machine = Machine::new();
    let pd = machine.pd();
    machine.fake.on(CREATE_AH, |reply| {
        // `struct rxe_create_ah_resp`: ah_num, reserved.
        reply.set_driver_out(&[0x0123_4567u32.to_ne_bytes(), [0; 4]].concat());
        Ok(())
    });
    let create = || AddressHandle::create(&machine.context, pd.handle(), &AhAttr::default(), 0);
    let ah = create().unwrap();
    assert_eq!(ah.ah_num, 0x0123_4567);
    drop(ah);
    // Kernels before 5.19 give none; such a handle would name no one.
    machine.fake.reset(CREATE_AH);
    let error = create().unwrap_err();
    assert!(matches!(error, CreateError::NoAddressHandleNumber));
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    assert_eq!(machine.live(), [OBJECT_PD]);
}

/// Answers MODIFY_SRQ as rxe does: to the address in the driver's input.
fn give_moved(machine: &Machine, moved: [u8; 16]) {
    machine.fake.on(MODIFY_SRQ, move |reply| {
        let input = reply.call().driver_in().try_into().unwrap();
        let address = u64::from_ne_bytes(input) as usize;
        let to = std::ptr::with_exposed_provenance_mut::<[u8; 16]>(address);
        // SAFETY: `struct rxe_modify_srq_cmd` is the address of a
        // `struct mminfo`, aligned or not.
        unsafe { to.write_unaligned(moved) };
        Ok(())
    });
}

#[test]
fn srq_resize_keeps_posted_receives() {
    let machine = Machine::new();
    let pd = machine.pd();
    let first = machine.queue(7, 8);
    give_srq(&machine, first.mminfo());
    let mut srq = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle())).unwrap();
    assert_eq!(srq.srq_num, 0x1234);
    assert_eq!((srq.recv.capacity(), srq.recv.max_sge()), (7, 4));
    push(&mut srq.recv, 1).unwrap();
    push(&mut srq.recv, 2).unwrap();
    // The driver has copied both.
    let second = machine.queue(7, 32);
    second.set_entry(0, &first.entry(0));
    second.set_entry(1, &first.entry(1));
    second.set_producer(2);
    give_moved(&machine, second.mminfo());
    let change = SrqModify {
        max_wr: Some(20),
        limit: None,
    };
    SharedReceiveQueue::modify(&srq.object, &mut srq.recv, &change).unwrap();
    assert_eq!((srq.recv.capacity(), srq.recv.max_sge()), (31, 4));
    push(&mut srq.recv, 3).unwrap();
    assert_eq!(ids(&second), [1, 2, 3]);
    assert_eq!(first.producer(), 2, "the old one is left alone");
}

#[test]
fn srq_limit_change_keeps_the_mapping() {
    let machine = Machine::new();
    let pd = machine.pd();
    let queue = machine.queue(7, 8);
    give_srq(&machine, queue.mminfo());
    let mut srq = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle())).unwrap();
    let change = SrqModify {
        max_wr: None,
        limit: Some(3),
    };
    SharedReceiveQueue::modify(&srq.object, &mut srq.recv, &change).unwrap();
    push(&mut srq.recv, 1).unwrap();
    assert_eq!(ids(&queue), [1]);
}

#[test]
fn unmapped_srq_is_full() {
    let machine = Machine::new();
    let pd = machine.pd();
    let change = SrqModify {
        max_wr: Some(20),
        limit: None,
    };
    for (what, bad, errno) in contradictions(&machine) {
        let queue = machine.queue(7, 8);
        give_srq(&machine, queue.mminfo());
        let mut srq = SharedReceiveQueue::create(&machine.context, &srq_init(pd.handle())).unwrap();
        // The kernel refuses: nothing has changed.
        refuse(&machine, MODIFY_SRQ, libc::EINVAL);
        let result = SharedReceiveQueue::modify(&srq.object, &mut srq.recv, &change);
        assert_eq!(result.unwrap_err().errno(), libc::EINVAL);
        push(&mut srq.recv, 1).unwrap();
        // It moves, and cannot be mapped.
        give_moved(&machine, bad);
        let result = SharedReceiveQueue::modify(&srq.object, &mut srq.recv, &change);
        check_error(what, &result.unwrap_err(), errno);
        assert_eq!(push(&mut srq.recv, 2), Err(PostError::Full), "{what}");
        assert_eq!(srq.recv.push(2, &[]), Err(PostError::Full), "{what}");
        assert_eq!(srq.recv.capacity(), 0);
        // A later change may bring it back.
        let again = machine.queue(7, 8);
        give_moved(&machine, again.mminfo());
        SharedReceiveQueue::modify(&srq.object, &mut srq.recv, &change).unwrap();
        push(&mut srq.recv, 3).unwrap();
        assert_eq!(ids(&again), [3]);
    }
}
