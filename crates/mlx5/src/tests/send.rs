//! Send and receive work requests, as the device reads them.

use proptest::prelude::*;
use uverbs::AhAttr;

use super::*;
use crate::KeyChanges;
use crate::ah::Link;
use crate::{Destination, Operands, RemoteMemory};

const RC: Service = Service::ReliableConnection;

fn sge(addr: u64, length: u32, lkey: u32) -> Sge {
    Sge { addr, length, lkey }
}

/// Posts one work request with the data of `list`.
fn post(pair: &mut TestQp, opcode: Opcode, flags: SendFlags, list: &[Sge]) {
    pair.send.begin();
    let wr = SendWr {
        imm_or_key: 0x0102_0304u32.to_be(),
        remote: RemoteMemory {
            addr: 0x1111_2222_3333_4444,
            rkey: 0x5566_7788,
        },
        operands: Operands::Atomic {
            compare_add: 1,
            swap: 2,
        },
        ..request(7, opcode, flags, list)
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device.
    assert!(unsafe { pair.send.publish() });
}

#[test]
fn a_write_with_immediate_has_its_segments() {
    let mut pair = TestQp::new(1, RC, &cap(4, 2, 0));
    let list = [sge(0xaaaa, 100, 0xbb), sge(1, 0, 2), sge(0xcccc, 200, 0xdd)];
    pair.send.begin();
    let long = request(7, Opcode::SEND, SendFlags::empty(), &list);
    assert_eq!(push(&mut pair.send, &long), Err(PostError::TooManySges));
    let list = &list[..2];
    let flags = SendFlags::SIGNALED | SendFlags::FENCE | SendFlags::SOLICITED;
    post(&mut pair, Opcode::RDMA_WRITE_WITH_IMM, flags, list);
    let bytes = pair.sent(0, 64);
    // Modifier 0, index 0, opcode; three segments: the empty element is none.
    assert_eq!(be32(&bytes, 0), 0x09);
    assert_eq!(be32(&bytes, 4), QPN << 8 | 3);
    assert_eq!(bytes[8..12], [0, 0, 0, 0x80 | 0x08 | 0x02]);
    assert_eq!(be32(&bytes, 12), 0x0102_0304);
    assert_eq!(be64(&bytes, 16), 0x1111_2222_3333_4444);
    assert_eq!((be32(&bytes, 24), be32(&bytes, 28)), (0x5566_7788, 0));
    assert_eq!((be32(&bytes, 32), be32(&bytes, 36)), (100, 0xbb));
    assert_eq!(be64(&bytes, 40), 0xaaaa);
    // One block was used; the whole of it went to the register.
    assert_eq!(pair.record(1), 1);
    assert_eq!(pair.blue_flame_word(0), be64(&bytes, 0));
    assert_eq!(pair.blue_flame_word(5), be64(&bytes, 40));
}

#[test]
fn only_accepted_requests_are_outstanding() {
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
    let found = |pair: &TestQp, slot| pair.queues.sends.find(slot).map(|found| found.wr_id);
    post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    assert_eq!((found(&pair, 0), found(&pair, 1)), (Some(7), None));
    // Refused.
    pair.send.begin();
    let two = [sge(1, 1, 1); 2];
    let long = request(8, Opcode::SEND, SendFlags::empty(), &two);
    assert!(push(&mut pair.send, &long).is_err());
    assert_eq!(found(&pair, 1), None);
    // TestData up: two, of which another batch has the first place only.
    for abort in [SendQueue::abort, SendQueue::begin] {
        for wr_id in [9, 10] {
            push_send(&mut pair.send, wr_id).unwrap();
        }
        assert_eq!((found(&pair, 1), found(&pair, 2)), (Some(9), Some(10)));
        abort(&mut pair.send);
        assert_eq!((found(&pair, 1), found(&pair, 2)), (None, None));
    }
    post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    assert_eq!(
        [0, 1, 2].map(|slot| found(&pair, slot)),
        [Some(7), Some(7), None]
    );
    // The next one of all is still found where it is.
    post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    assert_eq!(found(&pair, 2), Some(7));
}

#[test]
fn operations_have_their_opcodes() {
    let table = [
        (Opcode::SEND, 0x0a, 1),
        (Opcode::SEND_WITH_IMM, 0x0b, 1),
        (Opcode::SEND_WITH_INV, 0x01, 1),
        (Opcode::RDMA_WRITE, 0x08, 2),
        (Opcode::RDMA_WRITE_WITH_IMM, 0x09, 2),
        (Opcode::RDMA_READ, 0x10, 2),
        (Opcode::ATOMIC_CMP_AND_SWP, 0x11, 3),
        (Opcode::ATOMIC_FETCH_AND_ADD, 0x12, 3),
    ];
    for (opcode, number, segments) in table {
        let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
        post(&mut pair, opcode, SendFlags::empty(), &[]);
        let bytes = pair.sent(0, 16);
        assert_eq!(be32(&bytes, 0), number, "{opcode:?}");
        assert_eq!(be32(&bytes, 4), QPN << 8 | segments, "{opcode:?}");
        assert_eq!(bytes[11], 0);
    }
}

#[test]
fn invalidated_key_is_big_endian() {
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
    post(&mut pair, Opcode::SEND_WITH_INV, SendFlags::empty(), &[]);
    post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    // The test gives 0x0102_0304 in network order.
    let host = 0x0102_0304u32.to_be();
    assert_eq!(be32(&pair.sent(12, 4), 0), host);
    assert_eq!(be32(&pair.sent(64 + 12, 4), 0), 0);
}

#[test]
fn atomics_have_their_operands() {
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
    let list = [sge(0x9000, 64, 3)];
    for (at, opcode) in [Opcode::ATOMIC_CMP_AND_SWP, Opcode::ATOMIC_FETCH_AND_ADD]
        .into_iter()
        .enumerate()
    {
        pair.send.begin();
        let without = request(0, opcode, SendFlags::empty(), &list);
        let refused = push(&mut pair.send, &without);
        assert_eq!(refused, Err(PostError::BadOperation));
        let wr = SendWr {
            remote: RemoteMemory {
                addr: 0x8000,
                rkey: 0x77,
            },
            operands: Operands::Atomic {
                compare_add: 11,
                swap: 22,
            },
            ..without
        };
        push(&mut pair.send, &wr).unwrap();
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        let bytes = pair.sent(at * 64, 64);
        assert_eq!((be64(&bytes, 16), be32(&bytes, 24)), (0x8000, 0x77));
        let operands = if at == 0 { (22, 11) } else { (11, 0) };
        assert_eq!((be64(&bytes, 32), be64(&bytes, 40)), operands);
        // Eight bytes, whatever the element has.
        assert_eq!((be32(&bytes, 48), be32(&bytes, 52)), (8, 3));
        assert_eq!(be32(&bytes, 4) & 0x3f, 4);
    }
}

#[test]
fn a_datagram_has_its_address() {
    let mut pair = TestQp::new(1, Service::Datagram, &cap(4, 1, 0));
    let attr = AhAttr {
        dlid: 0x4321,
        ..AhAttr::default()
    };
    let address = Address(crate::ah::vector(&attr, Link::InfiniBand));
    pair.send.begin();
    let list = [sge(0x1000, 4, 5)];
    let wr = SendWr {
        destination: Destination::Datagram {
            address: &address,
            remote_qpn: 0x123456,
            remote_qkey: 0x8001_0000,
        },
        ..request(0, Opcode::SEND, SendFlags::SIGNALED, &list)
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    let bytes = pair.sent(0, 128);
    assert_eq!(be32(&bytes, 4) & 0x3f, 5);
    assert_eq!(be32(&bytes, 16), 0x8001_0000);
    assert_eq!(be32(&bytes, 24), 0x8012_3456);
    assert_eq!(be16(&bytes, 30), 0x4321);
    assert_eq!((be32(&bytes, 64), be32(&bytes, 68)), (4, 5));
    // Two blocks.
    assert_eq!(pair.record(1), 2);
}

#[test]
fn operations_the_service_lacks_are_refused() {
    let refused = |service, opcode| {
        let mut pair = TestQp::new(1, service, &cap(4, 1, 0));
        pair.send.begin();
        push(&mut pair.send, &SendWr::new(0, opcode, SendFlags::empty())).err()
    };
    let bad = Some(PostError::BadOperation);
    assert_eq!(refused(Service::Datagram, Opcode::RDMA_WRITE), bad);
    assert_eq!(
        refused(Service::UnreliableConnection, Opcode::RDMA_READ),
        bad
    );
    assert_eq!(refused(RC, Opcode(4711)), bad);
    // These queues were made without room for them.
    assert_eq!(refused(RC, Opcode::BIND_MW), bad);
    assert_eq!(refused(RC, Opcode::LOCAL_INV), bad);
    // Nothing was taken, and 2 GiB are too much for an element.
    let mut pair = TestQp::new(1, RC, &cap(1, 1, 0));
    pair.send.begin();
    let long = [sge(0, 1 << 31, 0)];
    let long = request(0, Opcode::SEND, SendFlags::empty(), &long);
    assert_eq!(push(&mut pair.send, &long), Err(PostError::MessageTooLong));
    // SAFETY: there is no device.
    assert!(!unsafe { pair.send.publish() });
    let inline = SendWr {
        data: Data::Inline(&[]),
        ..SendWr::new(0, Opcode::RDMA_READ, SendFlags::empty())
    };
    assert_eq!(push(&mut pair.send, &inline), Err(PostError::BadOperation));
    // As much inline data as there is room for, in one piece or in several.
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 60));
    let bytes = [7u8; 80];
    let at = bytes.as_ptr().expose_provenance() as u64;
    for pieces in [
        &[sge(at, 77, 0)][..],
        &[sge(at, 40, 0), sge(at, 40, 0)],
        &[sge(at, u32::MAX, 0), sge(at, u32::MAX, 0)],
    ] {
        let inline = SendWr {
            data: Data::Inline(pieces),
            ..SendWr::new(0, Opcode::RDMA_WRITE, SendFlags::empty())
        };
        assert_eq!(push(&mut pair.send, &inline), Err(PostError::InlineTooLong));
    }
}

#[test]
fn queue_is_full_until_requests_complete() {
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
    assert_eq!(pair.send.capacity(), 4);
    for _ in 0..4 {
        post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    }
    pair.send.begin();
    assert_eq!(push_send(&mut pair.send, 0), Err(PostError::Full));
    // The third completes, and with it those before it.
    let third = pair.queues.sends.find(2).unwrap();
    pair.queues.sends.complete(third);
    for _ in 0..3 {
        post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    }
    assert!(push_send(&mut pair.send, 0).is_err());
    pair.send.reset();
    assert_eq!(pair.record(1), 0);
    post(&mut pair, Opcode::SEND, SendFlags::empty(), &[]);
    assert_eq!(be32(&pair.sent(0, 4), 0) >> 8, 0);
}

#[test]
fn a_batch_is_published_by_one_doorbell() {
    let mut pair = TestQp::new(1, RC, &cap(8, 4, 0));
    pair.send.begin();
    for count in [4u64, 1] {
        let list: Vec<_> = (1..=count).map(|i| sge(i, i as u32, 1)).collect();
        let wr = request(count, Opcode::SEND, SendFlags::empty(), &list);
        push(&mut pair.send, &wr).unwrap();
    }
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    // Five segments are two blocks, so the second begins with the third.
    assert_eq!(be32(&pair.sent(0, 8), 4) & 0x3f, 5);
    assert_eq!(be32(&pair.sent(128, 8), 0), 2 << 8 | 0x0a);
    assert_eq!(be32(&pair.sent(128, 8), 4) & 0x3f, 2);
    assert_eq!(pair.record(1), 3);
    // Of two work requests the register gets a doorbell.
    assert_eq!(pair.blue_flame_word(0), be64(&pair.sent(128, 8), 0));
    assert_eq!(pair.blue_flame_word(1), 0);
}

#[test]
fn refused_request_is_not_written_to_the_uar() {
    let mut pair = TestQp::new(1, RC, &cap(4, 1, 0));
    pair.send.begin();
    let two = [sge(1, 2, 3); 2];
    let wr = |list| request(0, Opcode::SEND, SendFlags::empty(), list);
    push(&mut pair.send, &wr(&two[..1])).unwrap();
    let refused = push(&mut pair.send, &wr(&two));
    assert_eq!(refused, Err(PostError::TooManySges));
    // SAFETY: there is no device.
    assert!(unsafe { pair.send.publish() });
    assert_eq!(pair.record(1), 1);
    let bytes = pair.sent(0, 32);
    for word in 0..4 {
        assert_eq!(pair.blue_flame_word(word), be64(&bytes, word * 8));
    }
}

/// The fast branch of `push` writes what the general one does.
#[test]
fn receive_fast_path_writes_the_same() {
    for max_sge in [0, 1, 2, 4] {
        let mut fast = TestQp::new(1, Service::ReliableConnection, &cap(2, max_sge, 0));
        let mut general = TestQp::new(2, Service::ReliableConnection, &cap(2, max_sge, 0));
        let size = general.queues.recv.bytes();
        let capacity = general.recv.capacity();
        for i in 0..capacity * 3 {
            let good = sge(5 + u64::from(i), 6 << 8 | i, 7);
            for one in [sge(5, 1 << 31, 7), sge(5, 0, 7), good] {
                let pushed = fast.recv.push(i.into(), &[one]);
                assert_eq!(pushed, general.recv.push_slow(i.into(), &[one]));
                let room = general.recv.max_sge() != 0 && i < capacity * 2;
                assert_eq!(pushed.is_ok(), room && one.length < 1 << 31);
                assert_eq!(fast.received(0, size), general.received(0, size));
                let found = [&fast, &general].map(|pair| pair.queues.receives.find(i));
                assert_eq!(found[0], found[1]);
                assert!(pushed.is_err() || found[0].is_some_and(|it| it.wr_id == i.into()));
                if pushed.is_ok() && one.length == 0 {
                    // Discarded, it is nowhere outstanding.
                    for pair in [&mut fast, &mut general] {
                        pair.recv.abort();
                        assert_eq!(pair.queues.receives.find(i), None);
                    }
                }
            }
            // SAFETY: there is no device.
            unsafe {
                fast.recv.publish();
                general.recv.publish();
            }
            assert_eq!(fast.record(0), general.record(0));
            // So that there is room for a second round, and for no third.
            if i + 1 == capacity && fast.record(0) == capacity {
                for pair in [&fast, &general] {
                    let last = pair.queues.receives.find(i).unwrap();
                    pair.queues.receives.complete(last);
                }
            }
        }
    }
}

#[test]
fn receives_have_their_lists() {
    let mut pair = TestQp::new(1, RC, &cap(2, 3, 0));
    assert_eq!((pair.recv.capacity(), pair.recv.max_sge()), (2, 4));
    pair.recv.begin();
    let list = [sge(0x1000, 10, 1), sge(0, 0, 9), sge(0x2000, 20, 2)];
    pair.recv.push(1, &list).unwrap();
    pair.recv.push(2, &[sge(0, 1 << 31, 0)]).unwrap_err();
    pair.recv.push(2, &[sge(5, 6, 7); 4]).unwrap();
    assert_eq!(pair.recv.push(3, &[]), Err(PostError::Full));
    assert_eq!(pair.record(0), 0);
    // SAFETY: there is no device.
    unsafe { pair.recv.publish() };
    assert_eq!(pair.record(0), 2);
    let bytes = pair.received(0, 128);
    let segment = |i: usize| {
        let at = i * 16;
        (be32(&bytes, at), be32(&bytes, at + 4), be64(&bytes, at + 8))
    };
    assert_eq!(segment(0), (10, 1, 0x1000));
    assert_eq!(segment(1), (20, 2, 0x2000));
    // The end of a short list.
    assert_eq!(segment(2), (0, 0x100, 0));
    for i in 4..8 {
        assert_eq!(segment(i), (6, 7, 5));
    }
}

/// The data of a work request.
#[derive(Clone, Debug)]
enum TestData {
    List(Vec<Sge>),
    Inline(Vec<u8>, usize),
}

fn data() -> impl Strategy<Value = TestData> {
    let element = (any::<u64>(), 1u32..1 << 31, any::<u32>()).prop_map(|(a, l, k)| sge(a, l, k));
    prop_oneof![
        prop::collection::vec(element, 0..=6).prop_map(TestData::List),
        (prop::collection::vec(any::<u8>(), 0..=200), 0usize..200)
            .prop_map(|(bytes, cut)| TestData::Inline(bytes, cut)),
    ]
}

proptest! {
    /// Work requests of every length, in batches, over many rounds of a small
    /// queue: each is where the one before it ended, whole, also over the end
    /// of the queue, and the register gets it whole if it is alone and fits.
    #[test]
    fn work_requests_follow_each_other_around_the_ring(
        batches in prop::collection::vec(prop::collection::vec(data(), 1..=3), 1..40),
    ) {
        let mut pair = TestQp::new(1, RC, &cap(5, 6, 200));
        let mut at = 0u32;
        let mut half = 0;
        for (i, batch) in batches.iter().enumerate() {
            pair.send.begin();
            let mut expected = Vec::new();
            let mut begins = at;
            for data in batch {
                let mut wr = SendWr {
                    remote: RemoteMemory { addr: 1, rkey: 2 },
                    ..SendWr::new(i as u64, Opcode::RDMA_WRITE, SendFlags::empty())
                };
                let pieces: Vec<_>;
                let mut tail = Vec::new();
                match data {
                    TestData::List(list) => {
                        wr.data = Data::Sges(list);
                        for sge in list {
                            tail.extend(sge.length.to_be_bytes());
                            tail.extend(sge.lkey.to_be_bytes());
                            tail.extend(sge.addr.to_be_bytes());
                        }
                    }
                    TestData::Inline(bytes, cut) => {
                        let (one, other) = bytes.split_at((*cut).min(bytes.len()));
                        let piece = |p: &[u8]| sge(p.as_ptr().expose_provenance() as u64, p.len() as u32, 0);
                        // One piece or two.
                        pieces = [one, other].into_iter().filter(|p| cut % 2 == 0 || !p.is_empty()).map(piece).collect();
                        wr.data = Data::Inline(&pieces);
                        if !bytes.is_empty() {
                            tail.extend((bytes.len() as u32 | 1 << 31).to_be_bytes());
                            tail.extend(bytes);
                        }
                    }
                }
                push(&mut pair.send, &wr).unwrap();
                let segments = 2 + tail.len().div_ceil(16) as u32;
                expected.push((begins, segments, tail));
                begins += segments.div_ceil(4);
            }
            // SAFETY: there is no device.
            unsafe { pair.send.publish() };
            for (begin, segments, tail) in &expected {
                let bytes = pair.sent(*begin as usize * 64, 32 + tail.len());
                prop_assert_eq!(be32(&bytes, 0), (begin & 0xffff) << 8 | 8);
                prop_assert_eq!(be32(&bytes, 4), QPN << 8 | segments);
                prop_assert_eq!((be64(&bytes, 16), be32(&bytes, 24)), (1, 2));
                prop_assert_eq!(&bytes[32..], &tail[..]);
            }
            prop_assert_eq!(pair.record(1), begins & 0xffff);
            let (last, segments, _) = expected.last().unwrap();
            let whole = batch.len() == 1 && *segments <= 16;
            let words = if whole { segments.div_ceil(4) as usize * 8 } else { 1 };
            let bytes = pair.sent(*last as usize * 64, words * 8);
            for word in 0..words {
                prop_assert_eq!(pair.blue_flame_word(half + word), be64(&bytes, word * 8));
            }
            half ^= 32;
            at = begins;
            // All of it completes, by the last.
            let blocks = pair.queues.send.blocks;
            let found = pair.queues.sends.find(last & (blocks - 1));
            pair.queues.sends.complete(found.unwrap());
        }
    }
}

proptest! {
    /// The fast branch of `push`, and `push_open_wqe`, write the same bytes as the general
    /// one, and the same is outstanding, whatever they push, around the ring.
    #[test]
    fn send_fast_path_writes_the_same(
        batches in prop::collection::vec(
            prop::collection::vec(
                (0u32..17, 0u32..8, any::<[u64; 3]>(), any::<[u32; 3]>(), 0u32..90, 0u8..8),
                1..4,
            ),
            1..40,
        ),
        unreliable in any::<bool>(),
        signal_all in any::<bool>(),
        (room, keys) in (
            prop::sample::select(vec![0u32, 12, 76]),
            prop::sample::select(vec![KeyChanges::None, KeyChanges::Windows, KeyChanges::Layouts]),
        ),
    ) {
        let service = if unreliable { Service::UnreliableConnection } else { RC };
        let cap = cap(5, 1, room);
        let make = || {
            let plan = SendPlan::new(&cap, service, &LIMITS, keys, 0).unwrap();
            TestQp::with(qp_queues_with_plan(1, service, plan, &cap, None), signal_all)
        };
        let (mut fast, mut general) = (make(), make());
        let source: Vec<u8> = (1..=90).collect();
        let mut posted = 0;
        for batch in batches {
            fast.send.begin();
            general.send.begin();
            for (opcode, flags, [wr_id, remote, addr], [imm, rkey, lkey], length, kind) in batch {
                let copied = sge(source.as_ptr().expose_provenance() as u64, length, lkey);
                let halves = [sge(copied.addr, length / 2, lkey),
                    sge(copied.addr + u64::from(length / 2), length - length / 2, lkey)];
                let (whole, gathered) = ([copied], [sge(addr, length, lkey)]);
                let wr = SendWr {
                    imm_or_key: imm,
                    remote: RemoteMemory { addr: remote, rkey },
                    operands: Operands::Atomic { compare_add: remote ^ addr, swap: addr },
                    data: match kind & 3 {
                        0 => Data::Inline(&whole),
                        1 => Data::Inline(&halves),
                        _ => Data::Sges(&gathered),
                    },
                    ..SendWr::new(wr_id, Opcode(opcode), SendFlags::from_bits_retain(flags))
                };
                let open_wqe = fast.send.open(wr.opcode, wr.flags, imm);
                // SAFETY: inline data is of `source`.
                let pushed = unsafe {
                    let done = kind & 4 != 0 && fast.send.push_open_wqe(open_wqe, &wr, wr.data);
                    let first = if done { Ok(()) } else { fast.send.push(&wr) };
                    (first, general.send.push_slow(&wr))
                };
                prop_assert_eq!(pushed.0, pushed.1);
            }
            // SAFETY: there is no device.
            let published = unsafe { (fast.send.publish(), general.send.publish()) };
            prop_assert_eq!(published.0, published.1);
            let size = fast.queues.send.bytes();
            prop_assert_eq!(fast.sent(0, size), general.sent(0, size));
            prop_assert_eq!(fast.record(1), general.record(1));
            for word in 0..64 {
                prop_assert_eq!(fast.blue_flame_word(word), general.blue_flame_word(word));
            }
            let found = |pair: &TestQp, slot| pair.queues.sends.find(slot).map(|found| found.wr_id);
            for slot in 0..fast.queues.send.blocks {
                prop_assert_eq!(found(&fast, slot), found(&general, slot));
                prop_assert_eq!(fast.queues.sends.noted(slot), general.queues.sends.noted(slot));
            }
            // All complete, so that there is room.
            while posted != fast.record(1) {
                for pair in [&fast, &general] {
                    let slot = posted & (pair.queues.send.blocks - 1);
                    if let Some(found) = pair.queues.sends.find(slot) {
                        pair.queues.sends.complete(found);
                    }
                }
                posted = (posted + 1) & 0xffff;
            }
        }
    }
}

#[test]
fn inline_data_is_padded_with_zeros() {
    for general in [false, true] {
        for length in 0..=200u32 {
            let mut pair = TestQp::new(1, RC, &cap(4, 1, 200));
            // SAFETY: the whole queue.
            unsafe {
                pair.queues
                    .send_at()
                    .write_bytes(0xff, pair.queues.send.bytes())
            };
            // Exactly as much: a reader beyond it is found by the sanitizer.
            let source: Vec<u8> = (0..length).map(|n| n as u8 + 1).collect();
            let pieces = [sge(source.as_ptr().expose_provenance() as u64, length, 0)];
            let wr = SendWr {
                data: Data::Inline(&pieces),
                ..SendWr::new(7, Opcode::SEND, SendFlags::empty())
            };
            // SAFETY: the piece is `source`.
            let pushed = unsafe {
                if general {
                    pair.send.push_slow(&wr)
                } else {
                    pair.send.push(&wr)
                }
            };
            pushed.unwrap();
            let bytes = pair.sent(0, 256);
            let end = if length == 0 {
                16
            } else {
                (20 + length as usize).next_multiple_of(16)
            };
            assert_eq!(be32(&bytes, 4) & 0x3f, end as u32 / 16, "{length}");
            if length != 0 {
                assert_eq!(be32(&bytes, 16), length | 1 << 31);
                let (data, rest) = bytes[20..end].split_at(source.len());
                assert_eq!(data, source);
                assert!(rest.iter().all(|byte| *byte == 0), "{length}");
            }
            assert!(bytes[end..].iter().all(|byte| *byte == 0xff), "{length}");
        }
    }
}
