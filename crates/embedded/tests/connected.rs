//! Connected queue pairs: all operations, in each drive mode.

use device_testing::embedded::driver::*;
use ringverbs_embedded::Drive;
use uverbs::QpType;

const RECEIVED: u32 = 128;

#[test]
fn a_message_goes_through_a_device() {
    for profile in ["ib", "roce"] {
        let host = Host::single(profile);
        let mut cq = host.cq(16);
        let mut a = host.qp(QpType::RC, &mut cq);
        let mut b = host.qp(QpType::RC, &mut cq);
        connect_pair(QpType::RC, (&a, &host), (&b, &host));
        let (from, to) = (host.memory(64), host.memory(64));
        from.set(0, &[0x5a; 64]);
        receive(&mut b, 2, to.sge(0, 64));
        post(&mut a, 1, Operation::Send, from.sge(0, 64));
        let mut got = [wait(&mut cq), wait(&mut cq)];
        got.sort_by_key(|wc| wc.wr_id);
        assert_eq!((got[0].status, got[0].wr_id), (0, 1), "{profile}");
        assert_eq!((got[1].status, got[1].opcode), (0, RECEIVED));
        assert_eq!((got[1].byte_len, got[1].qp_num), (64, b.object.qp_num()));
        assert_eq!(to.get(0, 64), [0x5a; 64]);
        assert!(host.embedded.complaints().is_empty());
    }
}

#[test]
fn two_devices_communicate_in_each_drive_mode() {
    for profile in ["ib", "roce"] {
        for drive in [Drive::Caller, Drive::Watch] {
            for kind in [QpType::RC, QpType::UC] {
                let (a, b) = Host::pair(profile, drive);
                let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
                let (mut qa, mut qb) = (a.qp(kind, &mut cqa), b.qp(kind, &mut cqb));
                connect_pair(kind, (&qa, &a), (&qb, &b));
                // More than one packet, not a multiple of the MTU.
                let (from, to) = (a.memory(10_001), b.memory(20_000));
                let data: Vec<u8> = (0..10_001u32).map(|n| (n * 7) as u8).collect();
                from.set(0, &data);
                receive(&mut qb, 3, to.sge(5, 10_001));
                post(&mut qa, 4, Operation::Send, from.sge(0, 10_001));
                let sent = poll(&a, &mut cqa);
                let received = poll(&b, &mut cqb);
                assert_eq!((sent.status, sent.wr_id), (0, 4), "{profile} {drive:?}");
                assert_eq!((received.wr_id, received.byte_len), (3, 10_001));
                assert_eq!(to.get(5, 10_001), data);
                assert_eq!((to.get(0, 5), to.get(10_006, 5)), (vec![0; 5], vec![0; 5]));
                post(&mut qa, 5, Operation::Write(&to, 10_100), from.sge(0, 64));
                assert_eq!(poll(&a, &mut cqa).status, 0);
                while to.get(10_163, 1) != data[63..64] {
                    b.embedded.drive();
                }
                assert_eq!(to.get(10_100, 64), data[..64]);
                drop((qa, qb));
            }
        }
    }
}

/// Of more packets than the window of a reliable connection.
#[test]
fn long_messages_arrive_without_acknowledgements() {
    const SIZE: usize = 3 << 20;
    let (a, b) = Host::pair("roce", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::UC, &mut cqa), b.qp(QpType::UC, &mut cqb));
    connect_pair(QpType::UC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(SIZE), b.memory(SIZE));
    from.set(SIZE - 8, &[7; 8]);
    post(&mut qa, 1, Operation::Write(&to, 0), from.sge(0, SIZE));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    while to.get(SIZE - 8, 8) != [7; 8] {
        b.embedded.drive();
    }
}

#[test]
fn reads_and_atomics_return_old_values() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (here, there) = (a.memory(4096), b.memory(4096));
    there.set(100, b"far away");
    post(&mut qa, 1, Operation::Read(&there, 100), here.sge(0, 8));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    assert_eq!(here.get(0, 8), b"far away");
    // Atomics use the processor's byte order, as the driver has configured.
    there.set(0, &41u64.to_ne_bytes());
    post(&mut qa, 2, Operation::Add(&there, 1), here.sge(8, 8));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    post(&mut qa, 3, Operation::Swap(&there, 42, 7), here.sge(16, 8));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    post(&mut qa, 4, Operation::Swap(&there, 42, 8), here.sge(24, 8));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    let found = [8, 16, 24].map(|at| here.get(at, 8));
    assert_eq!(found, [41u64, 42, 7].map(|n| n.to_ne_bytes().to_vec()));
    assert_eq!(there.get(0, 8), 7u64.to_ne_bytes());
}

#[test]
fn a_region_is_found_at_its_own_addresses() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let here = a.memory(64);
    here.set(0, b"at another address");
    for iova in [0, 0x1_0000, 0x7fff_ffff_0000, 3 << 30] {
        let there = b.memory_at(100_000, all(), Some(iova));
        let first = iova + there.address() % 4096;
        let mut write = |at: u64| {
            qa.send.begin();
            let list = [here.sge(0, 18)];
            let wr = uverbs::SendWr {
                remote: uverbs::RemoteMemory {
                    addr: at,
                    rkey: there.keys.rkey,
                },
                data: uverbs::Data::Sges(&list),
                ..uverbs::SendWr::new(9, uverbs::Opcode::RDMA_WRITE, uverbs::SendFlags::SIGNALED)
            };
            // SAFETY: the memory lives to the end of the test.
            unsafe {
                qa.send.push(&wr).unwrap();
                qa.send.publish();
            }
            poll(&a, &mut cqa).status
        };
        assert_eq!(write(first + 50_000), 0);
        assert_eq!(there.get(50_000, 18), b"at another address");
        assert_eq!(write(first + 100_000 - 18), 0);
        assert_eq!(there.get(100_000 - 18, 18), b"at another address");
        let asked = uverbs::mr::query(&b.context, there.mr).unwrap();
        assert_eq!((asked.iova, asked.length), (first, 100_000));
    }
}

#[test]
fn forbidden_accesses_have_the_right_status() {
    use uverbs::AccessFlags;
    const PROTECTION: u32 = 4;
    const REMOTE_ACCESS: u32 = 10;
    const FLUSHED: u32 = 5;
    let (a, b) = Host::pair("ib", Drive::Caller);
    let read_only = b.memory_at(64, AccessFlags::REMOTE_READ, None);
    let gone = b.memory(64);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let here = a.memory(64);
    let mut attempt = |work: Operation<'_>, sge| {
        let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
        connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
        receive(&mut qb, 1, gone.sge(0, 64));
        post(&mut qa, 2, work, sge);
        post(&mut qa, 3, Operation::Send, here.sge(0, 8));
        let status = poll(&a, &mut cqa).status;
        let (attr, _) = qa.object.query(uverbs::QpAttrMask::STATE).unwrap();
        assert_eq!(attr.qp_state, uverbs::QpState::ERR);
        assert_eq!(poll(&a, &mut cqa).status, FLUSHED);
        // Work requests posted after the failure are flushed, too.
        receive(&mut qa, 4, here.sge(0, 8));
        let late = poll(&a, &mut cqa);
        assert_eq!((late.status, late.wr_id), (FLUSHED, 4));
        cqa.ring.detach(&qa.queues);
        cqb.ring.detach(&qb.queues);
        status
    };
    let whole = here.sge(0, 64);
    assert_eq!(
        attempt(Operation::Write(&read_only, 0), whole),
        REMOTE_ACCESS
    );
    assert_eq!(attempt(Operation::Write(&gone, 1), whole), REMOTE_ACCESS);
    assert_eq!(
        attempt(Operation::Add(&read_only, 1), here.sge(0, 8)),
        REMOTE_ACCESS
    );
    let mut wrong = whole;
    wrong.lkey ^= 1;
    assert_eq!(attempt(Operation::Send, wrong), PROTECTION);
    wrong = whole;
    wrong.addr += 1;
    assert_eq!(attempt(Operation::Send, wrong), PROTECTION);
    assert_eq!(here.get(0, 64), [0; 64]);
}

#[test]
fn access_flags_of_a_queue_pair_bind_its_peer() {
    use uverbs::AccessFlags;
    let (a, b) = Host::pair("ib", Drive::Caller);
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (here, there) = (a.memory(64), b.memory(64));
    let mut allowed = |access, work: Operation<'_>| {
        let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
        connect(&qa, QpType::RC, qb.object.qp_num(), b.path());
        connect_with_access(&qb, QpType::RC, qa.object.qp_num(), a.path(), access);
        post(&mut qa, 1, work, here.sge(0, 8));
        let status = poll(&a, &mut cqa).status;
        cqa.ring.detach(&qa.queues);
        cqb.ring.detach(&qb.queues);
        status == 0
    };
    let works = || {
        [
            Operation::Read(&there, 0),
            Operation::Write(&there, 0),
            Operation::Add(&there, 1),
        ]
    };
    for (access, expected) in [
        (AccessFlags::empty(), [false, false, false]),
        (AccessFlags::REMOTE_READ, [true, false, false]),
        (AccessFlags::REMOTE_WRITE, [false, true, false]),
        (AccessFlags::REMOTE_ATOMIC, [false, false, true]),
    ] {
        let found = works().map(|work| allowed(access, work));
        assert_eq!(found, expected, "{access:?}");
    }
}

#[test]
fn deregistered_memory_is_not_accessed() {
    let (a, b) = Host::pair("ib", Drive::Watch);
    let (mut cqa, mut cqb) = (a.cq(64), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let here = a.memory(4096);
    here.set(0, &[0xff; 4096]);
    let there = b.memory(4096);
    for n in 0..20 {
        post(&mut qa, n, Operation::Write(&there, 0), here.sge(0, 4096));
    }
    // Within the region.
    uverbs::mr::destroy(&b.context, there.mr).unwrap();
    there.set(0, &[0; 4096]);
    // The first failure is due to the key; later work requests are flushed.
    let status: Vec<_> = (0..20).map(|_| wait(&mut cqa).status).collect();
    let done = status.iter().take_while(|status| **status == 0).count();
    if let Some((first, rest)) = status[done..].split_first() {
        assert_eq!(*first, 10);
        assert!(rest.iter().all(|status| *status == 5));
    }
    assert_eq!(there.get(0, 4096), vec![0; 4096]);
    // Already destroyed.
    std::mem::forget(there);
    drop(qb);
}
