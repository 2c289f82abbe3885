//! Objects: dependencies, rejected operations, and teardown.

use std::thread::sleep;
use std::time::{Duration, Instant};

use device_testing::embedded::driver::*;
use mlx5::{Address, AddressHandle, Bind, CompletionQueue, CqOptions, Link, MiniFormat};
use ringverbs_embedded::{Drive, Embedded, Network};
use uverbs::{
    AccessFlags, Data, Destination, Error, MrHandle, MrInit, MwType, Opcode, Operands, QpAttr,
    QpAttrMask as Mask, QpState, QpType, Rereg, SendFlags, SendWr, Udata,
};

fn errno<T>(result: Result<T, Error>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.errno().raw(),
    }
}

const EINVAL: i32 = 22;
const EBUSY: i32 = 16;
const EFAULT: i32 = 14;
const ENOENT: i32 = 2;

#[test]
fn an_object_in_use_is_not_destroyed() {
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let srq = host.srq(4);
    let qp = host.qp_with(QpType::RC, &mut cq, Some(&srq));
    let memory = host.memory(64);
    assert_eq!(errno(uverbs::pd::destroy(&host.context, host.pd)), EBUSY);
    assert_eq!(
        errno(uverbs::cq::destroy(&host.context, cq.object.handle())),
        EBUSY
    );
    assert_eq!(
        errno(uverbs::srq::destroy(&host.context, srq.object.handle())),
        EBUSY
    );
    drop(qp);
    drop((cq, srq));
    assert_eq!(errno(uverbs::pd::destroy(&host.context, host.pd)), EBUSY);
    drop(memory);
    assert_eq!(errno(uverbs::pd::destroy(&host.context, host.pd)), 0);
    assert_eq!(errno(uverbs::pd::destroy(&host.context, host.pd)), ENOENT);
}

/// The device still writes completions to a queue that could not be destroyed, and reads its
/// records.
#[test]
fn a_queue_that_is_dropped_in_use_keeps_its_memory() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(1 << 12), b.cq(16));
    let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(64), b.memory(64));
    drop(cqa);
    // They would reuse the freed memory.
    let mut others: Vec<_> = (0..64).map(|_| a.cq(1 << 12)).collect();
    for round in 0..8 {
        receive(&mut qb, round, to.sge(0, 64));
        post(&mut qa, round, Operation::Send, from.sge(0, 64));
        while cqb.ring.is_empty() {
            a.embedded.drive();
            b.embedded.drive();
        }
        assert_eq!(poll(&b, &mut cqb).wr_id, round);
    }
    while a.embedded.drive() {}
    assert!(others.iter_mut().all(|cq| poll_once(cq).is_none()));
}

#[test]
fn contexts_do_not_see_each_others_objects() {
    let embedded = Embedded::new("ib").unwrap();
    let (a, b) = (Host::new(&embedded), Host::new(&embedded));
    let memory = a.memory(64);
    assert_eq!(errno(uverbs::mr::destroy(&b.context, memory.mr)), ENOENT);
    assert_eq!(errno(uverbs::pd::destroy(&b.context, a.pd)), ENOENT);
    // They can communicate: one device, two contexts.
    let (mut cqa, mut cqb) = (a.cq(4), b.cq(4));
    let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let to = b.memory(64);
    memory.set(0, b"hello");
    receive(&mut qb, 1, to.sge(0, 64));
    post(&mut qa, 1, Operation::Send, memory.sge(0, 5));
    assert_eq!(wait(&mut cqb).byte_len, 5);
    assert_eq!(to.get(0, 5), b"hello");
    // Keys of one domain are invalid in the other.
    post(&mut qb, 2, Operation::Send, memory.sge(0, 5));
    assert_eq!(wait(&mut cqb).status, 4);
}

#[test]
fn unmapped_memory_is_not_registered() {
    let host = Host::single("ib");
    let register = |addr, length, access| {
        let init = MrInit {
            pd: host.pd,
            addr,
            length,
            iova: addr,
            access,
        };
        // SAFETY: refused, or dropped at once; nothing uses the key.
        errno(unsafe { uverbs::mr::register(&host.context, &init, Udata::none()) })
    };
    let local = AccessFlags::LOCAL_WRITE;
    assert_eq!(register(4096, 4096, local), EFAULT);
    assert_eq!(register(u64::MAX - 4095, 4096, local), EINVAL);
    let text: &'static [u8] = b"read only, and part of the program";
    let address = text.as_ptr().expose_provenance() as u64;
    assert_eq!(register(address, text.len() as u64, local), EFAULT);
    assert_eq!(
        register(address, text.len() as u64, AccessFlags::empty()),
        0
    );
    assert_eq!(register(address, 0, AccessFlags::empty()), EINVAL);
    assert_eq!(register(address, 8, AccessFlags::REMOTE_WRITE), EINVAL);
}

#[test]
fn a_destroyed_key_gives_no_access() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (here, mut there) = (a.memory(64), b.memory(64));
    // Another key to the same memory stays.
    let init = MrInit {
        pd: b.pd,
        addr: there.address(),
        length: 64,
        iova: there.address(),
        access: all(),
    };
    // SAFETY: the memory outlives the region.
    let other = unsafe { uverbs::mr::register(&b.context, &init, Udata::none()) }.unwrap();
    uverbs::mr::destroy(&b.context, there.mr).unwrap();
    let gone = std::mem::replace(&mut there.keys, other.1);
    there.mr = other.0;
    post(&mut qa, 1, Operation::Write(&there, 0), here.sge(0, 8));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    let stays = std::mem::replace(&mut there.keys, gone);
    post(&mut qa, 2, Operation::Write(&there, 0), here.sge(0, 8));
    assert_eq!(poll(&a, &mut cqa).status, 10);
    there.keys = stays;
}

#[test]
fn a_region_can_be_changed() {
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let mut a = host.qp(QpType::RC, &mut cq);
    let b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let (here, there) = (host.memory(64), host.memory(64));
    let change = |region: MrHandle, access| {
        let change = Rereg {
            access: Some(access),
            ..Rereg::default()
        };
        // SAFETY: less is allowed than when the region was made.
        let keys = unsafe { uverbs::mr::rereg(&host.context, region, &change, Udata::none()) };
        keys.unwrap()
    };
    // Changing rights, also that to atomics, needs no new key.
    assert_eq!(change(there.mr, AccessFlags::REMOTE_READ), there.keys);
    let write = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    assert_eq!(change(there.mr, write), there.keys);
    post(&mut a, 0, Operation::Write(&there, 0), here.sge(0, 8));
    assert_eq!(wait(&mut cq).status, 0);
    assert_eq!(change(there.mr, AccessFlags::REMOTE_READ), there.keys);
    post(&mut a, 1, Operation::Read(&there, 0), here.sge(0, 8));
    assert_eq!(wait(&mut cq).status, 0);
    post(&mut a, 2, Operation::Write(&there, 0), here.sge(0, 8));
    assert_eq!(wait(&mut cq).status, 10);
}

#[test]
fn state_transitions_are_those_of_the_specification() {
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let qp = host.qp(QpType::RC, &mut cq);
    let change = |state, mask| {
        let attr = QpAttr {
            qp_state: state,
            port_num: 1,
            ..QpAttr::default()
        };
        errno(qp.object.modify(&attr, mask, Udata::none()))
    };
    let needed = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    assert_eq!(change(QpState::RTR, Mask::STATE), EINVAL);
    assert_eq!(change(QpState::INIT, needed - Mask::PORT), EINVAL);
    assert_eq!(change(QpState::INIT, needed | Mask::QKEY), EINVAL);
    assert_eq!(change(QpState::INIT, needed), 0);
    assert_eq!(change(QpState::RTR, Mask::STATE), EINVAL);
    assert_eq!(change(QpState::ERR, Mask::STATE), 0);
    assert_eq!(change(QpState::INIT, needed), EINVAL);
    assert_eq!(change(QpState::RESET, Mask::STATE), 0);
    connect(&qp, QpType::RC, qp.object.qp_num(), host.path());
    let (attr, init) = qp.object.query(Mask::STATE).unwrap();
    assert_eq!(
        (attr.qp_state, attr.path_mtu, attr.timeout),
        (QpState::RTS, 5, 14)
    );
    assert_eq!((attr.sq_psn, attr.dest_qp_num), (100, qp.object.qp_num()));
    assert_eq!((init.cap.max_send_wr, init.sq_sig_all), (64, false));
}

/// Neither the queue pair nor the device's thread looks at the others. Medians, since the
/// machine may be busy.
#[test]
fn a_queue_pair_costs_the_same_among_many() {
    const FEW: usize = 500;
    const MANY: usize = 12_000;
    const SAMPLES: usize = 201;
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let mut kept = Vec::new();
    let mut median = |count: usize| {
        while kept.len() < count {
            kept.push(host.qp(QpType::RC, &mut cq));
        }
        // The thread sleeps again.
        sleep(Duration::from_millis(20));
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..SAMPLES {
            let began = Instant::now();
            let qp = host.qp(QpType::RC, &mut cq);
            times[0].push(began.elapsed());
            let began = Instant::now();
            qp.object.destroy().unwrap();
            times[1].push(began.elapsed());
        }
        times.map(|mut times| {
            times.sort_unstable();
            times[SAMPLES / 2]
        })
    };
    let (few, many) = (median(FEW), median(MANY));
    println!("create, destroy: {few:?} among {FEW}, {many:?} among {MANY}");
    for (few, many) in few.into_iter().zip(many) {
        assert!(many < 3 * few, "{few:?} among {FEW}, {many:?} among {MANY}");
    }
}

/// The widths are those of the device's fields: mlx5_ib checks none of these values.
#[test]
fn attributes_are_cut_to_their_fields() {
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let qp = host.qp(QpType::RC, &mut cq);
    connect(&qp, QpType::RC, qp.object.qp_num(), host.path());
    modify(&qp, &QpAttr::default(), Mask::STATE);
    let attr = QpAttr {
        qp_state: QpState::INIT,
        port_num: 1,
        qp_access_flags: all(),
        ..QpAttr::default()
    };
    let init = Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    modify(&qp, &attr, init);
    let attr = QpAttr {
        qp_state: QpState::RTR,
        path_mtu: 5,
        dest_qp_num: 0xff00_0000 | qp.object.qp_num(),
        rq_psn: 0xff00_0005,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 44,
        ah_attr: host.path(),
        ..QpAttr::default()
    };
    let route = Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
    let reads = Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER;
    modify(&qp, &attr, Mask::STATE | route | reads);
    let attr = QpAttr {
        qp_state: QpState::RTS,
        sq_psn: 0x7f00_0006,
        timeout: 32 + 14,
        retry_cnt: 8 + 3,
        rnr_retry: 8 + 6,
        max_rd_atomic: 4,
        ..QpAttr::default()
    };
    let retries = Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC;
    modify(&qp, &attr, Mask::STATE | Mask::SQ_PSN | retries);
    let (attr, _) = qp.object.query(Mask::STATE).unwrap();
    assert_eq!((attr.min_rnr_timer, attr.timeout), (12, 14));
    assert_eq!((attr.retry_cnt, attr.rnr_retry), (3, 6));
    assert_eq!((attr.rq_psn, attr.sq_psn), (5, 6));
    assert_eq!(attr.dest_qp_num, qp.object.qp_num());
}

#[test]
fn a_reset_queue_pair_can_be_reused() {
    let host = Host::single("ib");
    let (mut cq, mut other) = (host.cq(16), host.cq(16));
    let mut a = host.qp(QpType::RC, &mut cq);
    let mut b = host.qp(QpType::RC, &mut other);
    let memory = host.memory(64);
    for round in 0..3 {
        connect_pair(QpType::RC, (&a, &host), (&b, &host));
        for n in 0..round + 3 {
            receive(&mut b, n, memory.sge(0, 64));
            post(&mut a, n, Operation::Send, memory.sge(0, 8));
            assert_eq!((wait(&mut cq).wr_id, wait(&mut other).wr_id), (n, n));
        }
        let reset = QpAttr::default();
        for (qp, cq) in [(&mut a, &mut cq), (&mut b, &mut other)] {
            modify(qp, &reset, Mask::STATE);
            cq.ring.clean(&qp.queues);
            qp.send.reset();
            qp.recv.as_mut().unwrap().reset();
        }
    }
}

#[test]
fn a_resize_keeps_unread_completions() {
    let host = Host::single("ib");
    let mut cq = host.cq(7);
    let mut a = host.qp(QpType::RC, &mut cq);
    let mut b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let memory = host.memory(64);
    let mut exchange = |count: u64, cq: &mut Cq| {
        for n in 0..count {
            receive(&mut b, n, memory.sge(0, 64));
            post(&mut a, n, Operation::Send, memory.sge(0, 8));
        }
        for _ in 0..2 * count {
            assert_eq!(wait(cq).status, 0);
        }
    };
    for size in [31, 3, 100, 7] {
        exchange(1, &mut cq);
        let (object, ring) = (&cq.object, &mut cq.ring);
        let now = CompletionQueue::resize(object, ring, size, None).unwrap();
        assert!(now >= size);
        exchange(2, &mut cq);
    }
}

#[test]
fn completions_have_every_cqe_format() {
    for wide in [false, true] {
        for compression in [None, Some(MiniFormat::Hash), Some(MiniFormat::Checksum)] {
            let (a, b) = Host::pair("ib", Drive::Caller);
            let mut cqa = a.cq(64);
            let mut cqb = b.cq_with(
                64,
                CqOptions {
                    wide,
                    compression,
                    ..CqOptions::default()
                },
            );
            let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
            connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
            let (from, to) = (a.memory(100), b.memory(64 * 100));
            let data: Vec<u8> = (1..=100).collect();
            from.set(0, &data);
            // Lengths that fit into 32 bytes of a CQE, into 64, and into none.
            for round in 0..3 {
                for (n, length) in [1, 32, 33, 64, 65, 100].into_iter().enumerate() {
                    for m in 0..5 {
                        let id = n * 5 + m;
                        receive(&mut qb, id as u64, to.sge(id * 100, 100));
                        post(&mut qa, id as u64, Operation::Send, from.sge(0, length));
                    }
                    // Short data are in the CQE, and the driver copies them to memory.
                    while cqb.ring.is_empty() {
                        b.embedded.drive();
                    }
                    if round == 0 && compression.is_none() {
                        let short = if wide { 64 } else { 32 };
                        let untouched = to.get(n * 500, 1) == [0];
                        assert_eq!(untouched, length <= short, "{wide} {length}");
                    }
                    for m in 0..5 {
                        let id = n * 5 + m;
                        let wc = poll(&b, &mut cqb);
                        assert_eq!((wc.wr_id, wc.status), (id as u64, 0), "{round}");
                        assert_eq!(wc.byte_len, length as u32);
                        assert_eq!(to.get(id * 100, length), data[..length]);
                        assert_eq!(poll(&a, &mut cqa).wr_id, id as u64);
                    }
                }
            }
        }
    }
}

/// Some programs destroy a datagram queue pair without waiting, as librdmacm's mckey; others
/// disconnect right after their last message, as librpma's examples.
#[test]
fn posted_sends_complete_before_a_queue_pair_is_destroyed() {
    let (a, b) = Host::pair("ib", Drive::Watch);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (from, to) = (a.memory(64), b.memory(64));
    for round in 0..20 {
        let (mut qa, mut qb) = (a.qp(QpType::UC, &mut cqa), b.qp(QpType::UC, &mut cqb));
        connect_pair(QpType::UC, (&qa, &a), (&qb, &b));
        for n in 0..8 {
            receive(&mut qb, n, to.sge(0, 64));
        }
        for n in 0..8 {
            post(&mut qa, n, Operation::Send, from.sge(0, 64));
        }
        if round % 2 == 1 {
            let error = QpAttr {
                qp_state: QpState::ERR,
                ..QpAttr::default()
            };
            modify(&qa, &error, Mask::STATE);
        }
        drop(qa);
        for n in 0..8 {
            let done = wait(&mut cqb);
            assert_eq!((done.wr_id, done.status), (n, 0), "round {round}");
        }
    }
}

#[test]
fn datagrams_are_delivered() {
    for (profile, global) in [("ib", false), ("ib", true), ("roce", true)] {
        let (a, b) = Host::pair(profile, Drive::Caller);
        let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
        let (mut qa, mut qb) = (a.qp(QpType::UD, &mut cqa), b.qp(QpType::UD, &mut cqb));
        connect_pair(QpType::UD, (&qa, &a), (&qb, &b));
        let (from, to) = (a.memory(64), b.memory(4096));
        from.set(0, b"a datagram");
        receive(&mut qb, 1, to.sge(0, 4096));
        let link = match profile {
            "ib" => Link::InfiniBand,
            _ => Link::Ethernet { udp: true },
        };
        let mut path = b.path();
        path.is_global = global;
        let ah = AddressHandle::create(&a.context, a.pd, &path, 0, link).unwrap();
        let address: &Address = &ah.address;
        qa.send.begin();
        let list = [from.sge(0, 10)];
        let wr = SendWr {
            destination: Destination::Datagram {
                address,
                remote_qpn: qb.object.qp_num(),
                remote_qkey: QKEY,
            },
            data: Data::Sges(&list),
            ..SendWr::new(2, Opcode::SEND, SendFlags::SIGNALED)
        };
        // SAFETY: the memory lives to the end of the test.
        unsafe {
            qa.send.push(&wr).unwrap();
            qa.send.publish();
        }
        assert_eq!(poll(&a, &mut cqa).status, 0);
        let wc = poll(&b, &mut cqb);
        assert_eq!((wc.status, wc.byte_len), (0, 50), "{profile}");
        assert_eq!(wc.src_qp, qa.object.qp_num());
        assert_eq!(to.get(40, 10), b"a datagram");
    }
}

#[test]
fn shared_receives_serve_all_queue_pairs() {
    let host = Host::single("ib");
    let mut cq = host.cq(64);
    let mut srq = host.srq(16);
    let memory = host.memory(1024);
    let mut pairs: Vec<_> = (0..3)
        .map(|_| {
            let a = host.qp(QpType::RC, &mut cq);
            let b = host.qp_with(QpType::RC, &mut cq, Some(&srq));
            connect_pair(QpType::RC, (&a, &host), (&b, &host));
            (a, b)
        })
        .collect();
    for round in 0..20u64 {
        srq.recv
            .locked()
            .push(round, &[memory.sge(round as usize % 8 * 64, 64)])
            .unwrap();
        // SAFETY: the memory lives to the end of the test.
        unsafe { srq.recv.locked().publish() };
        let pair = &mut pairs[round as usize % 3];
        post(&mut pair.0, 1000, Operation::Send, memory.sge(512, 33));
        let mut got = [wait(&mut cq), wait(&mut cq)].map(|wc| (wc.wr_id, wc.status, wc.qp_num));
        got.sort_unstable();
        let of = (pair.0.object.qp_num(), pair.1.object.qp_num());
        assert_eq!(got, [(round, 0, of.1), (1000, 0, of.0)]);
    }
}

/// Posts a bind, and returns its completion status.
fn bind(qp: &mut Qp, cq: &mut Cq, bind: &Bind) -> u32 {
    qp.send.begin();
    let wr = SendWr {
        operands: Operands::Bind(bind),
        ..SendWr::new(1, Opcode::BIND_MW, SendFlags::SIGNALED)
    };
    // SAFETY: the memory lives to the end of the test.
    unsafe {
        qp.send.push(&wr).unwrap();
        qp.send.publish();
    }
    wait(cq).status
}

#[test]
fn a_bind_without_permission_is_a_bind_error() {
    const BIND_ERROR: u32 = 6;
    let writable = AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND;
    let (read, write) = (AccessFlags::REMOTE_READ, AccessFlags::REMOTE_WRITE);
    let atomic = AccessFlags::REMOTE_ATOMIC;
    for (region, window, at, length, status) in [
        (writable, write | atomic, 0, 4096, 0),
        (AccessFlags::MW_BIND, read, 0, 4096, 0),
        // Without the right to bind, whatever the other rights.
        (AccessFlags::empty(), write, 0, 64, BIND_ERROR),
        (AccessFlags::empty(), read, 0, 64, BIND_ERROR),
        (
            AccessFlags::LOCAL_WRITE | write | read,
            write,
            0,
            64,
            BIND_ERROR,
        ),
        // Remote write access without local write access.
        (AccessFlags::MW_BIND, write, 0, 64, BIND_ERROR),
        (AccessFlags::MW_BIND | read, atomic, 0, 64, BIND_ERROR),
        // Outside the region.
        (writable, write, 4033, 64, BIND_ERROR),
        (writable, write, u64::MAX, 64, BIND_ERROR),
        (writable, write, 0, 4097, BIND_ERROR),
    ] {
        for kind in [MwType::TYPE_1, MwType::TYPE_2] {
            let host = Host::single("ib");
            let mut cq = host.cq(16);
            let a = host.qp(QpType::RC, &mut cq);
            let mut b = host.qp(QpType::RC, &mut cq);
            connect_pair(QpType::RC, (&a, &host), (&b, &host));
            let (here, mut there) = (host.memory(64), host.memory_at(4096, region, None));
            let object = uverbs::Mw::alloc(&host.context, host.pd, kind, Udata::none()).unwrap();
            let wanted = Bind {
                window_rkey: object.rkey(),
                rkey: object.rkey() & !0xff | (object.rkey() + 1) & 0xff,
                window_type: kind,
                addr: there.address().wrapping_add(at),
                length,
                lkey: there.keys.lkey,
                access: window.bits(),
            };
            assert_eq!(
                bind(&mut b, &mut cq, &wanted),
                status,
                "{kind:?} {region:?} {window:?} {at} {length}"
            );
            if status == 0 {
                continue;
            }
            // With neither key.
            for key in [object.rkey(), wanted.rkey] {
                there.keys.rkey = key;
                let mut from = host.qp(QpType::RC, &mut cq);
                let to = host.qp(QpType::RC, &mut cq);
                connect_pair(QpType::RC, (&from, &host), (&to, &host));
                post(&mut from, 2, Operation::Write(&there, 0), here.sge(0, 16));
                assert_eq!(wait(&mut cq).status, 10);
            }
        }
    }
}

#[test]
fn a_bound_window_gives_access_to_its_part_of_a_region() {
    let host = Host::single("ib");
    let mut cq = host.cq(16);
    let mut a = host.qp(QpType::RC, &mut cq);
    let mut b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let local = AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND;
    let (here, mut there) = (host.memory(64), host.memory_at(4096, local, None));
    let window = uverbs::Mw::alloc(&host.context, host.pd, MwType::TYPE_2, Udata::none()).unwrap();
    assert_eq!(errno(uverbs::pd::destroy(&host.context, host.pd)), EBUSY);
    let rkey = window.rkey() & !0xff | (window.rkey() + 1) & 0xff;
    let wanted = Bind {
        window_rkey: window.rkey(),
        rkey,
        window_type: MwType::TYPE_2,
        addr: there.address() + 100,
        length: 50,
        lkey: there.keys.lkey,
        access: AccessFlags::REMOTE_WRITE.bits(),
    };
    assert_eq!(bind(&mut b, &mut cq, &wanted), 0);
    here.set(0, b"through a window");
    there.keys.rkey = rkey;
    post(&mut a, 2, Operation::Write(&there, 134), here.sge(0, 16));
    assert_eq!(wait(&mut cq).status, 0);
    assert_eq!(there.get(134, 16), b"through a window");
    post(&mut a, 3, Operation::Write(&there, 135), here.sge(0, 16));
    assert_eq!(wait(&mut cq).status, 10);
    drop(window);
    let refused = uverbs::Mw::alloc(&host.context, host.pd, MwType(3), Udata::none());
    assert_eq!(errno(refused), EINVAL);
}

#[test]
fn closing_a_context_destroys_its_objects() {
    let embedded = Embedded::new("ib").unwrap();
    for _ in 0..50 {
        let host = Host::new(&embedded);
        let mut cq = host.cq(4);
        let srq = host.srq(4);
        let qp = host.qp_with(QpType::UD, &mut cq, Some(&srq));
        let memory = host.memory(64);
        // As at exit of a program: only the context is closed.
        let context = std::sync::Arc::clone(&host.context);
        std::mem::forget((qp, srq, cq, memory, host));
        // SAFETY: nothing of the context is used after this.
        unsafe { context.kernel().close(context.fd()) }.unwrap();
        std::mem::forget(context);
    }
    assert_eq!(embedded.objects(), 0);
    // Only the event queues remain, one for each completion vector.
    assert_eq!(embedded.ranges(), 4);
}

#[test]
fn unknown_profiles_are_rejected() {
    let names: Vec<_> = Network::profiles().map(|(name, _)| name).collect();
    assert!(names.contains(&"ib") && names.contains(&"roce"));
    assert_eq!(errno(Embedded::new("none")), 19);
}

#[test]
fn a_gid_table_has_empty_entries() {
    for (profile, gids, length) in [("roce", 4, 128), ("ib", 1, 8)] {
        let host = Host::single(profile);
        let mut entries = vec![uverbs::GidEntry::default(); length];
        assert_eq!(host.context.query_gid_table(&mut entries).unwrap(), gids);
        let entry = |index| errno(host.context.query_gid_entry(1, index));
        assert_eq!(entry(gids as u32 - 1), 0);
        assert_eq!(entry(gids as u32), libc::ENODATA);
        assert_eq!(entry(length as u32 - 1), libc::ENODATA);
        assert_eq!(entry(length as u32), libc::EINVAL);
    }
}

/// Returns the numbers of the first queue pair and memory key of two devices of a network.
fn first_numbers(network: &Network) -> [(u32, u32); 2] {
    [(); 2].map(|()| {
        let host = Host::new(&network.strict_device("roce").unwrap());
        let mut cq = host.cq(16);
        let qp = host.qp(QpType::RC, &mut cq);
        (qp.object.qp_num(), host.memory(64).keys.rkey)
    })
}

/// A program that takes its own numbers for its peer's fails, as on cards. In simulated time
/// numbers are always the same.
#[test]
fn devices_have_numbers_of_their_own() {
    let new = || Network::new(Drive::Caller).unwrap();
    let [a, b] = first_numbers(&new());
    let [c, _] = first_numbers(&new());
    assert!(a.0 != b.0 && a.0 != c.0 && b.0 != c.0, "{a:?} {b:?} {c:?}");
    assert!(a.1 != b.1 && a.1 != c.1 && b.1 != c.1, "{a:?} {b:?} {c:?}");
    let seeded = |seed| {
        let network = new();
        network.set_seed(seed);
        let [(a, _), (b, _)] = first_numbers(&network);
        (a, b)
    };
    assert_eq!(seeded(7), seeded(7));
    assert_ne!(seeded(7), seeded(8));
    let simulated = || first_numbers(&Network::simulated(7).unwrap());
    assert_eq!(simulated(), simulated());
    assert_eq!(simulated()[0].0, 0x40);
}
