//! XRC: initiators name the shared receive queues of a domain, over one target.

use std::os::fd::AsFd;

use device_testing::embedded::driver::*;
use mlx5::{QueuePair, Role, SharedReceiveQueue};
use ringverbs_embedded::{Drive, Embedded};
use uverbs::{
    Data, Destination, Errno, Error, Opcode, QpAttr, QpAttrMask as Mask, QpCap, QpInit, QpOpen,
    QpState, QpType, SendWr, Sge, SrqInit, SrqKind, Udata, XrcdHandle, XrcdOpen,
};

const RECEIVED: u32 = 128;
const REMOTE_INVALID_REQUEST: u32 = 9;
const REMOTE_ACCESS: u32 = 10;

fn open_xrcd(host: &Host) -> XrcdHandle {
    let init = XrcdOpen {
        fd: None,
        oflags: libc::O_CREAT,
    };
    uverbs::xrcd::open(&host.context, &init, Udata::none()).unwrap()
}

fn initiator(host: &Host, cq: &mut Cq) -> Qp {
    let init = QpInit {
        qp_type: QpType::XRC_INI,
        pd: Some(host.pd),
        send_cq: Some(cq.object.handle()),
        cap: QpCap {
            max_send_wr: 16,
            max_send_sge: 1,
            ..QpCap::default()
        },
        ..QpInit::default()
    };
    let qp = QueuePair::create(&host.context, &host.device, &init, None).unwrap();
    cq.ring.attach(&qp.queues, Role::SEND).unwrap();
    qp
}

fn target(host: &Host, xrcd: XrcdHandle) -> Qp {
    let init = QpInit {
        qp_type: QpType::XRC_TGT,
        xrcd: Some(xrcd),
        user_handle: 70,
        ..QpInit::default()
    };
    QueuePair::create(&host.context, &host.device, &init, None).unwrap()
}

fn create_srq(host: &Host, xrcd: XrcdHandle, cq: &mut Cq) -> Srq {
    let init = SrqInit {
        pd: host.pd,
        user_handle: 0,
        max_wr: 7,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Xrc {
            xrcd,
            cq: cq.object.handle(),
        },
        async_fd: None,
    };
    let srq = SharedReceiveQueue::create(&host.context, &host.device, &init).unwrap();
    cq.ring
        .attach(srq.xrc.as_ref().unwrap(), Role::RECEIVE)
        .unwrap();
    srq
}

fn receive(srq: &mut Srq, wr_id: u64, sge: Sge) {
    srq.recv.locked().push(wr_id, &[sge]).unwrap();
    // SAFETY: the tests keep their memory until they have the completion.
    unsafe { srq.recv.locked().publish() };
}

/// Posts a work request that names a shared queue.
fn post(qp: &mut Qp, wr_id: u64, srqn: u32, operation: Operation<'_>, sge: Sge) {
    let opcode = match operation {
        Operation::Write(..) => Opcode::RDMA_WRITE,
        Operation::Read(..) => Opcode::RDMA_READ,
        Operation::Add(..) => Opcode::ATOMIC_FETCH_AND_ADD,
        _ => Opcode::SEND,
    };
    qp.send.begin();
    let list = [sge];
    let wr = SendWr {
        destination: Destination::Xrc { remote_srqn: srqn },
        data: Data::Sges(&list),
        ..operation.request(wr_id, opcode)
    };
    // SAFETY: as in `receive`.
    unsafe {
        qp.send.push(&wr).unwrap();
        assert!(qp.send.publish());
    }
}

fn connected((a, initiator): (&Host, &Qp), (b, target): (&Host, &Qp)) {
    let (from, to) = (initiator.object.qp_num(), target.object.qp_num());
    connect(initiator, QpType::XRC_INI, to, b.path());
    connect(target, QpType::XRC_TGT, from, a.path());
}

fn errno(result: Result<impl Sized, Error>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

#[test]
fn an_initiator_reaches_the_shared_queue_that_it_names() {
    for profile in ["ib", "roce"] {
        let (a, b) = Host::pair(profile, Drive::Caller);
        let (mut cqa, mut cqb, mut other) = (a.cq(16), b.cq(16), b.cq(16));
        let xrcd = open_xrcd(&b);
        let mut first = create_srq(&b, xrcd, &mut cqb);
        let mut second = create_srq(&b, xrcd, &mut other);
        assert_ne!(first.srq_num, second.srq_num);
        let there = target(&b, xrcd);
        let mut here = initiator(&a, &mut cqa);
        connected((&a, &here), (&b, &there));
        let (from, to) = (a.memory(10_001), b.memory(30_000));
        let data: Vec<u8> = (0..10_001u32).map(|n| (n * 7) as u8).collect();
        from.set(0, &data);
        receive(&mut first, 11, to.sge(0, 10_001));
        receive(&mut second, 12, to.sge(10_001, 10_001));
        for (srq, cq, wr_id, at) in [(&second, &mut other, 12, 10_001), (&first, &mut cqb, 11, 0)] {
            post(
                &mut here,
                1,
                srq.srq_num,
                Operation::Send,
                from.sge(0, 10_001),
            );
            assert_eq!(poll(&a, &mut cqa).status, 0, "{profile}");
            let wc = poll(&b, cq);
            assert_eq!((wc.status, wc.wr_id, wc.opcode), (0, wr_id, RECEIVED));
            assert_eq!((wc.byte_len, wc.qp_num), (10_001, there.object.qp_num()));
            assert_eq!(to.get(at, 10_001), data);
        }
        // Operations without a receive use the protection domain of the named SRQ.
        let number = first.srq_num;
        to.set(0, &41u64.to_ne_bytes());
        post(&mut here, 2, number, Operation::Add(&to, 1), from.sge(0, 8));
        assert_eq!(poll(&a, &mut cqa).status, 0);
        assert_eq!(from.get(0, 8), 41u64.to_ne_bytes());
        post(
            &mut here,
            3,
            number,
            Operation::Read(&to, 0),
            from.sge(8, 8),
        );
        assert_eq!(poll(&a, &mut cqa).status, 0);
        assert_eq!(from.get(8, 8), 42u64.to_ne_bytes());
        post(
            &mut here,
            4,
            number,
            Operation::Write(&to, 30_000 - 9),
            from.sge(8, 8),
        );
        assert_eq!(poll(&a, &mut cqa).status, 0);
        assert_eq!(to.get(30_000 - 9, 8), 42u64.to_ne_bytes());
    }
}

#[test]
fn shared_queues_of_other_domains_are_rejected() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (xrcd, other) = (open_xrcd(&b), open_xrcd(&b));
    let mut foreign_srq = create_srq(&b, other, &mut cqb);
    let basic = b.srq(7);
    let (from, to) = (a.memory(64), b.memory(64));
    receive(&mut foreign_srq, 1, to.sge(0, 64));
    let numbers = [
        (foreign_srq.srq_num, Operation::Send, REMOTE_INVALID_REQUEST),
        (basic.srq_num, Operation::Send, REMOTE_INVALID_REQUEST),
        (0xff_ffff, Operation::Send, REMOTE_INVALID_REQUEST),
        (foreign_srq.srq_num, Operation::Write(&to, 0), REMOTE_ACCESS),
    ];
    for (number, operation, status) in numbers {
        let there = target(&b, xrcd);
        let mut here = initiator(&a, &mut cqa);
        connected((&a, &here), (&b, &there));
        post(&mut here, 2, number, operation, from.sge(0, 64));
        let wc = poll(&a, &mut cqa);
        assert_eq!((wc.status, wc.wr_id), (status, 2), "{number:#x}");
    }
    assert_eq!(to.get(0, 64), [0; 64]);
    // The receive is still posted, for initiators of the domain.
    let there = target(&b, other);
    let mut here = initiator(&a, &mut cqa);
    connected((&a, &here), (&b, &there));
    post(
        &mut here,
        3,
        foreign_srq.srq_num,
        Operation::Send,
        from.sge(0, 64),
    );
    assert_eq!(poll(&a, &mut cqa).status, 0);
    assert_eq!(poll(&b, &mut cqb).wr_id, 1);
}

#[test]
fn a_domain_is_found_by_its_file_and_a_target_by_its_number() {
    let embedded = Embedded::new("ib").unwrap();
    let (a, b) = (Host::new(&embedded), Host::new(&embedded));
    let nothing = embedded.objects();
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let open = |host: &Host, oflags| {
        let init = XrcdOpen {
            fd: Some(file.as_fd()),
            oflags,
        };
        uverbs::xrcd::open(&host.context, &init, Udata::none())
    };
    let none = errno(open(&a, 0)).unwrap();
    assert_eq!(none.raw(), libc::EAGAIN);
    let first = open(&a, libc::O_CREAT | libc::O_EXCL).unwrap();
    let there_is = errno(open(&b, libc::O_CREAT | libc::O_EXCL)).unwrap();
    assert_eq!(there_is.raw(), libc::EINVAL);
    let second = open(&b, 0).unwrap();
    let private = open_xrcd(&b);
    let by_number = |xrcd, qpn| {
        let init = QpOpen {
            xrcd,
            qpn,
            qp_type: QpType::XRC_TGT,
            user_handle: 71,
        };
        QueuePair::open(&b.context, &b.device, &init)
    };
    let made = target(&a, first);
    let number = made.object.qp_num();
    assert!(by_number(private, number).is_err());
    assert!(by_number(second, number + 1).is_err());
    let opened = by_number(second, number).unwrap();
    assert_eq!(opened.object.qp_num(), number);
    let init = QpAttr {
        qp_state: QpState::INIT,
        port_num: 1,
        qp_access_flags: all(),
        ..QpAttr::default()
    };
    let mask = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    modify(&opened, &init, mask);
    // Attributes set through one object are visible through the other, and events are
    // reported to both.
    let (attr, _) = made.object.query(Mask::all()).unwrap();
    assert_eq!((attr.qp_state, attr.port_num), (QpState::INIT, 1));
    // The target, and the domain, exist until the last object is destroyed.
    let busy = errno(uverbs::xrcd::destroy(&a.context, first)).unwrap();
    assert_eq!(busy.raw(), libc::EBUSY);
    drop(made);
    uverbs::xrcd::destroy(&a.context, first).unwrap();
    let (attr, _) = opened.object.query(Mask::all()).unwrap();
    assert_eq!(attr.qp_state, QpState::INIT);
    let again = by_number(second, number).unwrap();
    drop((opened, again));
    assert!(by_number(second, number).is_err());
    uverbs::xrcd::destroy(&b.context, second).unwrap();
    uverbs::xrcd::destroy(&b.context, private).unwrap();
    assert_eq!(errno(open(&b, 0)).unwrap().raw(), libc::EAGAIN);
    assert_eq!(embedded.objects(), nothing);
}
