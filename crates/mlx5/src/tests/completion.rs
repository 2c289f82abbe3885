//! Completions, as the device writes them.

use std::mem::MaybeUninit;

use proptest::prelude::*;
use uverbs::Sge;

use super::*;
use crate::{
    Arming, CompletionError, Opcode, Operands, Role, SendFlags, TimedCompletion, WorkCompletion,
};

const RC: Service = Service::ReliableConnection;

fn ring(log2: u32) -> (CqeRing, Device) {
    let ring = CqeRing::plain(log2).unwrap();
    let device = Device::of(&ring);
    (ring, device)
}

fn take(ring: &mut CqeRing, most: usize) -> Result<Vec<WorkCompletion>, CompletionError> {
    let mut out = vec![MaybeUninit::uninit(); most];
    // SAFETY: what was posted names memory that lives.
    let taken = unsafe { poll(ring, &mut out) }?;
    // SAFETY: that many were written to the front.
    Ok(out[..taken]
        .iter()
        .map(|wc| unsafe { wc.assume_init() })
        .collect())
}

fn one(ring: &mut CqeRing) -> WorkCompletion {
    take(ring, 1).unwrap()[0]
}

/// Posts a work request, and gives the slot that its completion names.
fn post(pair: &mut TestQp, wr_id: u64, opcode: Opcode, list: &[Sge]) -> u16 {
    let slot = pair.record(1) as u16;
    pair.send.begin();
    // Operands, of those that have some.
    let wr = SendWr {
        operands: Operands::Atomic {
            compare_add: 0,
            swap: 0,
        },
        ..request(wr_id, opcode, SendFlags::SIGNALED, list)
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device but the test, which heeds the lists.
    unsafe { pair.send.publish() };
    slot
}

fn receive(pair: &mut TestQp, wr_id: u64, list: &[Sge]) -> u16 {
    let slot = pair.record(0) as u16;
    pair.recv.begin();
    pair.recv.push(wr_id, list).unwrap();
    // SAFETY: as above.
    unsafe { pair.recv.publish() };
    slot
}

fn sge(memory: &mut [u8]) -> Sge {
    Sge {
        addr: memory.as_mut_ptr().expose_provenance() as u64,
        length: memory.len() as u32,
        lkey: 1,
    }
}

fn attached(log2: u32) -> (CqeRing, Device, TestQp) {
    let (mut ring, device) = ring(log2);
    let pair = TestQp::new(70, RC, &cap(16, 2, 0));
    ring.attach(&pair.queues, Role::SEND | Role::RECEIVE)
        .unwrap();
    (ring, device, pair)
}

#[test]
fn send_completions_have_their_opcode() {
    let table = [
        (Opcode::SEND, 0x0a, 0, 0, 0),
        (Opcode::SEND_WITH_IMM, 0x0b, 0, 2, 0),
        (Opcode::SEND_WITH_INV, 0x01, 0, 0, 0),
        (Opcode::RDMA_WRITE, 0x08, 1, 0, 0),
        (Opcode::RDMA_WRITE_WITH_IMM, 0x09, 1, 2, 0),
        (Opcode::RDMA_READ, 0x10, 2, 0, 500),
        (Opcode::ATOMIC_CMP_AND_SWP, 0x11, 3, 0, 8),
        (Opcode::ATOMIC_FETCH_AND_ADD, 0x12, 4, 0, 8),
    ];
    let (mut ring, mut device, mut pair) = attached(4);
    for (i, (opcode, request, wc_opcode, flags, bytes)) in table.into_iter().enumerate() {
        let slot = post(&mut pair, i as u64 + 40, opcode, &[]);
        device.write_cqe(&TestCqe {
            user_index: 70,
            slot,
            request,
            byte_count: 500,
            time: 0x1122_3344_5566_0000 + i as u64,
            ..TestCqe::default()
        });
        let expected = WorkCompletion {
            wr_id: i as u64 + 40,
            opcode: wc_opcode,
            byte_len: bytes,
            qp_num: QPN,
            wc_flags: flags,
            ..WorkCompletion::default()
        };
        // SAFETY: no work request names memory.
        let timed = unsafe { read_timed(&mut ring) }.unwrap().unwrap();
        ring.publish();
        assert_eq!(timed.completion, expected, "{opcode:?}");
        assert_eq!(timed.time, 0x1122_3344_5566_0000 + i as u64);
        assert_eq!(device.consumed(), i as u32 + 1);
    }
    assert!(ring.is_empty());
    assert_eq!(take(&mut ring, 4).unwrap(), []);
}

#[test]
fn receives_have_what_the_peer_sent() {
    let (mut ring, mut device, mut pair) = attached(4);
    // Opcode; opcode, flags, immediate or key, P_Key index of the result.
    let raw = 0x0102_0304u32;
    let table = [
        (1, 129, 2, raw.to_be(), 0),
        (2, 128, 0, 0, 0x0304),
        (3, 128, 2, raw.to_be(), 0),
        (4, 128, 8, raw, 0),
    ];
    for (opcode, wc_opcode, flags, ex, pkey_index) in table {
        let slot = receive(&mut pair, 9, &[]);
        device.write_cqe(&TestCqe {
            opcode,
            user_index: 70,
            slot,
            byte_count: 77,
            immediate: raw,
            flags_rqpn: 2 << 28 | 5 << 24 | 0x1234,
            slid: 0x55,
            path: 0x83,
            ..TestCqe::default()
        });
        let expected = WorkCompletion {
            wr_id: 9,
            opcode: wc_opcode,
            byte_len: 77,
            ex,
            qp_num: QPN,
            src_qp: 0x1234,
            wc_flags: flags | 1,
            pkey_index,
            slid: 0x55,
            sl: 5,
            dlid_path_bits: 3,
            ..WorkCompletion::default()
        };
        assert_eq!(one(&mut ring), expected, "{opcode}");
    }
}

#[test]
fn errors_have_their_status() {
    let statuses = [
        (0x01, 1),
        (0x02, 2),
        (0x04, 4),
        (0x05, 5),
        (0x06, 6),
        (0x10, 7),
        (0x11, 8),
        (0x12, 9),
        (0x13, 10),
        (0x14, 11),
        (0x15, 12),
        (0x16, 13),
        (0x22, 16),
        (0x00, 21),
        (0x03, 21),
        (0xff, 21),
    ];
    let (mut ring, mut device, mut pair) = attached(6);
    for (syndrome, status) in statuses {
        for opcode in [13, 14] {
            let slot = match opcode {
                13 => post(&mut pair, 5, Opcode::SEND, &[]),
                _ => receive(&mut pair, 5, &[]),
            };
            device.write_cqe(&TestCqe {
                opcode,
                user_index: 70,
                slot,
                syndrome,
                vendor: 0x42,
                ..TestCqe::default()
            });
            let wc = one(&mut ring);
            assert_eq!((wc.status, wc.vendor_err), (status, 0x42), "{syndrome:#x}");
            assert_eq!((wc.wr_id, wc.qp_num), (5, QPN));
        }
    }
}

#[test]
fn receives_complete_in_any_order() {
    const ENTRIES: u32 = 16;
    let (mut ring, mut device) = ring(6);
    let mut made = qp_queues(70, RC, &cap(ENTRIES, 1, 0), None);
    Arc::get_mut(&mut made).unwrap().out_of_order = true;
    ring.attach(&made, Role::SEND | Role::RECEIVE).unwrap();
    let mut pair = TestQp::with(made, false);
    assert_eq!(pair.recv.capacity(), ENTRIES / 2);
    let full = |pair: &mut TestQp| {
        pair.recv.begin();
        pair.recv.push(0, &[]) == Err(PostError::Full)
    };
    let mut complete = |opcode, slot| {
        device.write_cqe(&TestCqe {
            opcode,
            user_index: 70,
            slot,
            ..TestCqe::default()
        });
    };
    for wr_id in 0..8 {
        assert_eq!(receive(&mut pair, wr_id, &[]), wr_id as u16);
    }
    assert!(full(&mut pair));
    // All but the oldest, and once more: then its entry is the next one.
    for round in 0..2u16 {
        for n in (1..8).rev() {
            let slot = round * 7 + n;
            // Errors, too.
            complete(if n % 2 == 0 { 2 } else { 14 }, slot);
            let wc = one(&mut ring);
            assert_eq!((wc.wr_id, wc.status == 0), (slot.into(), n % 2 == 0));
        }
        let posted = if round == 0 { 8..15 } else { 15..16 };
        for wr_id in posted {
            receive(&mut pair, wr_id, &[]);
        }
    }
    assert!(full(&mut pair));
    // A second completion of the same receive is refused.
    complete(2, 3);
    let error = CompletionError::UnknownRequest { slot: 3 };
    assert_eq!(take(&mut ring, 1).unwrap_err(), error);
    ring.skip();
    complete(2, 0);
    assert_eq!(one(&mut ring).wr_id, 0);
    for wr_id in 16..23 {
        receive(&mut pair, wr_id, &[]);
    }
    assert!(full(&mut pair));
    complete(2, 15);
    assert_eq!(one(&mut ring).wr_id, 15);
    pair.recv.reset();
    assert_eq!(receive(&mut pair, 1, &[]), 0);
}

#[test]
fn malformed_cqes_are_errors_and_skipped() {
    let (mut ring, mut device, mut pair) = attached(4);
    let other = TestQp::new(71, RC, &cap(4, 1, 0));
    ring.attach(&other.queues, Role::SEND).unwrap();
    let slot = post(&mut pair, 3, Opcode::SEND, &[]);
    let good = TestCqe {
        user_index: 70,
        slot,
        request: 0x0a,
        ..TestCqe::default()
    };
    let unknown = |user_index| CompletionError::UnknownQueue { user_index };
    let bad = [
        (
            TestCqe {
                user_index: 69,
                ..good
            },
            unknown(69),
        ),
        (
            TestCqe {
                user_index: 0xff_ffff,
                ..good
            },
            unknown(0xff_ffff),
        ),
        // Its receives complete elsewhere.
        (
            TestCqe {
                user_index: 71,
                opcode: 2,
                ..good
            },
            unknown(71),
        ),
        (
            TestCqe {
                request: 0x3f,
                ..good
            },
            CompletionError::UnknownOpcode {
                completion: 0,
                request: 0x3f,
            },
        ),
        (
            TestCqe { opcode: 9, ..good },
            CompletionError::UnknownOpcode {
                completion: 9,
                request: 0x0a,
            },
        ),
        (
            TestCqe {
                slot: slot + 1,
                ..good
            },
            CompletionError::UnknownRequest { slot: 1 },
        ),
        (
            TestCqe { opcode: 2, ..good },
            CompletionError::UnknownRequest { slot: 0 },
        ),
    ];
    for (i, (written, error)) in bad.into_iter().enumerate() {
        device.write_cqe(&written);
        assert_eq!(take(&mut ring, 4), Err(error));
        assert_eq!(device.consumed(), i as u32 + 1);
    }
    // Behind a good one it waits for the next call.
    device.write_cqe(&good);
    device.write_cqe(&TestCqe {
        user_index: 1,
        ..good
    });
    assert_eq!(take(&mut ring, 4).unwrap().len(), 1);
    assert_eq!(take(&mut ring, 4), Err(unknown(1)));
    assert!(ring.is_empty());
}

#[test]
fn data_in_a_cqe_is_scattered() {
    let (mut ring, mut device, mut pair) = attached(4);
    let (mut first, mut second) = ([0u8; 5], [0u8; 40]);
    let list = [sge(&mut first), sge(&mut second)];
    let data: Vec<u8> = (100..132).collect();
    let mut bytes = [0u8; 64];
    let mut write_cqe = |opcode: u8, slot: u16, length: u32, scatter: u8, request: u8| {
        bytes[..32].copy_from_slice(&data);
        bytes[32..36].copy_from_slice(&70u32.to_be_bytes());
        bytes[44..48].copy_from_slice(&length.to_be_bytes());
        bytes[56] = request;
        bytes[60..62].copy_from_slice(&slot.to_be_bytes());
        bytes[63] = opcode << 4 | scatter;
        device.write(bytes);
    };
    write_cqe(2, receive(&mut pair, 1, &list), 32, 4, 0);
    let wc = one(&mut ring);
    assert_eq!((wc.status, wc.byte_len, wc.src_qp), (0, 32, 0));
    assert_eq!([&first[..], &second[..27]].concat(), data);
    assert_eq!(second[27..], [0; 13]);
    second.fill(0);
    // A read's, of the work request's list.
    write_cqe(0, post(&mut pair, 2, Opcode::RDMA_READ, &list), 9, 4, 0x10);
    assert_eq!(one(&mut ring).status, 0);
    assert_eq!(second[..5], [105, 106, 107, 108, 0]);
    second.fill(0);
    // An atomic's.
    let slot = post(&mut pair, 2, Opcode::ATOMIC_FETCH_AND_ADD, &list[1..]);
    write_cqe(0, slot, 8, 4, 0x12);
    assert_eq!(one(&mut ring).status, 0);
    assert_eq!(second[..9], [100, 101, 102, 103, 104, 105, 106, 107, 0]);
    second.fill(0);
    // More than the list takes, more than there is, more than an entry has;
    // and of what does not read.
    write_cqe(2, receive(&mut pair, 3, &list[..1]), 6, 4, 0);
    assert_eq!(one(&mut ring).status, 1);
    write_cqe(2, receive(&mut pair, 3, &list), 33, 4, 0);
    assert_eq!(one(&mut ring).status, 1);
    write_cqe(2, receive(&mut pair, 3, &list), 8, 8, 0);
    assert_eq!(one(&mut ring).status, 1);
    write_cqe(0, post(&mut pair, 3, Opcode::RDMA_WRITE, &list), 8, 4, 0x10);
    assert_eq!(one(&mut ring).status, 1);
    assert_eq!(second, [0; 40]);
}

#[test]
fn arming_names_the_consumer_index() {
    let (mut ring, mut device, mut pair) = attached(2);
    let (register, memory) = DoorbellRegister::in_memory(0);
    let arming = Arming::new(&ring, 0x77);
    // SAFETY: the page that stands in for the register.
    let written = || u64::from_be(unsafe { memory.read() });
    for round in 0..5u64 {
        let slot = post(&mut pair, 0, Opcode::SEND, &[]);
        device.write_cqe(&TestCqe {
            user_index: 70,
            slot,
            request: 0x0a,
            ..TestCqe::default()
        });
        one(&mut ring);
        arming.arm(register.get(), round % 2 == 1);
        let solicited = (round % 2) << 24;
        let word = (round & 3) << 28 | solicited | (round + 1);
        assert_eq!(written(), word << 32 | 0x77);
        assert_eq!(u64::from(device.record(1)), word);
        arming.event();
    }
}

#[test]
fn completions_of_a_destroyed_queue_pair_are_removed() {
    let (mut ring, mut device) = ring(3);
    let mut keep = TestQp::new(1, RC, &cap(16, 1, 0));
    let mut gone = TestQp::new(2, RC, &cap(16, 1, 0));
    for pair in [&keep, &gone] {
        ring.attach(&pair.queues, Role::SEND | Role::RECEIVE)
            .unwrap();
    }
    let mut expected = Vec::new();
    // Over the end of the queue, so that owner bits differ.
    for i in 0..13u64 {
        let (pair, user_index) = if i % 3 == 0 {
            (&mut gone, 2)
        } else {
            (&mut keep, 1)
        };
        let slot = post(pair, i, Opcode::SEND, &[]);
        device.write_cqe(&TestCqe {
            user_index,
            slot,
            request: 0x0a,
            ..TestCqe::default()
        });
        if i < 6 {
            one(&mut ring);
        } else if user_index == 1 {
            expected.push(i);
        }
    }
    ring.detach(&gone.queues);
    assert_eq!(device.consumed(), 9);
    let left: Vec<_> = take(&mut ring, 16)
        .unwrap()
        .iter()
        .map(|wc| wc.wr_id)
        .collect();
    assert_eq!(left, expected);
    assert_eq!(device.consumed(), 13);
    // And no more of it is found.
    device.write_cqe(&TestCqe {
        user_index: 2,
        ..TestCqe::default()
    });
    assert_eq!(
        take(&mut ring, 1),
        Err(CompletionError::UnknownQueue { user_index: 2 })
    );
}

proptest! {
    /// However production and consumption take turns, over many rounds:
    /// everything is read once, in order, and nothing that was not written.
    #[test]
    fn owner_bits_invert_with_every_round(
        log2 in 0u32..4,
        turns in prop::collection::vec((0u32..9, 0usize..9), 1..80),
    ) {
        let (mut ring, mut device, mut pair) = attached(log2);
        let (mut written, mut read) = (0u64, 0u64);
        for (produce, consume) in turns {
            for _ in 0..produce {
                if written - read == u64::from(ring.capacity()) {
                    break;
                }
                let slot = post(&mut pair, written, Opcode::SEND, &[]);
                device.write_cqe(&TestCqe { user_index: 70, slot, request: 0x0a, ..TestCqe::default() });
                written += 1;
            }
            prop_assert_eq!(ring.is_empty(), written == read);
            for wc in take(&mut ring, consume).unwrap() {
                prop_assert_eq!(wc.wr_id, read);
                read += 1;
            }
            prop_assert_eq!(u64::from(device.consumed()), read);
        }
    }

    /// Any bytes at all: an answer, or an error, and nothing is written to but
    /// what was posted.
    #[test]
    fn random_cqes_are_survived(
        entries in prop::collection::vec((any::<[u8; 64]>(), 0u32..3, 0u16..6), 1..60),
    ) {
        let (mut ring, mut device, mut pair) = attached(3);
        let mut memory = [0u8; 4 + 16 + 4];
        let list = [sge(&mut memory[4..20])];
        for (mut bytes, user_index, slot) in entries {
            // Mostly of a queue pair that is there, and of few slots.
            if user_index != 0 {
                bytes[32..36].copy_from_slice(&70u32.to_be_bytes());
                bytes[60..62].copy_from_slice(&slot.to_be_bytes());
            }
            pair.recv.begin();
            if pair.recv.push(1, &list).is_ok() {
                // SAFETY: the memory outlives the loop.
                unsafe { pair.recv.publish() };
            }
            pair.send.begin();
            let read = request(1, Opcode::RDMA_READ, SendFlags::empty(), &list);
            if push(&mut pair.send, &read).is_ok() {
                // SAFETY: as above.
                unsafe { pair.send.publish() };
            }
            device.write(bytes);
            let taken = take(&mut ring, 4);
            // The invalid opcode says that there is none yet.
            if bytes[63] >> 4 == 15 {
                prop_assert_eq!(taken, Ok(vec![]));
                break;
            }
            prop_assert!(taken.is_err() || taken.unwrap().len() == 1);
        }
        prop_assert_eq!((&memory[..4], &memory[20..]), (&[0u8; 4][..], &[0u8; 4][..]));
    }
}

/// A malformed completion stays until it is skipped, behind others as well, and
/// completes once its queue pair is attached.
#[test]
fn poll_stops_at_a_malformed_completion() {
    let (mut ring, mut device, mut pair) = attached(4);
    let mut late = TestQp::new(71, RC, &cap(16, 2, 0));
    let mut out = [MaybeUninit::<TimedCompletion>::uninit(); 4];
    for wr_id in 40..44 {
        receive(&mut pair, wr_id, &[]);
        receive(&mut late, wr_id + 100, &[]);
    }
    let of = |user_index, slot| TestCqe {
        opcode: 2,
        user_index,
        slot,
        time: 1000 + u64::from(slot),
        ..TestCqe::default()
    };
    for written in [of(70, 0), of(71, 0), of(72, 0), of(70, 1)] {
        device.write_cqe(&written);
    }
    let mut poll = |ring: &mut CqeRing| {
        // SAFETY: no work request names memory.
        let count = unsafe { ring.poll(&mut out) }?;
        // SAFETY: that many were written.
        let out = out[..count]
            .iter()
            .map(|timed| unsafe { timed.assume_init() });
        Ok(out
            .map(|timed| (timed.completion.wr_id, timed.time))
            .collect())
    };
    let unknown = |user_index| Err::<Vec<_>, _>(CompletionError::UnknownQueue { user_index });
    assert_eq!(poll(&mut ring), Ok(vec![(40, 1000)]));
    assert_eq!(poll(&mut ring), unknown(71));
    assert_eq!(device.consumed(), 1);
    ring.attach(&late.queues, Role::RECEIVE).unwrap();
    assert_eq!(poll(&mut ring), Ok(vec![(140, 1000)]));
    assert_eq!(poll(&mut ring), unknown(72));
    ring.skip();
    assert_eq!(device.consumed(), 3);
    assert_eq!(poll(&mut ring), Ok(vec![(41, 1001)]));
    // Nothing is skipped where nothing is.
    ring.skip();
    assert_eq!((poll(&mut ring), device.consumed()), (Ok(vec![]), 4));
}

#[test]
fn completions_of_a_queue_that_a_program_reads_stay() {
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    let direct = ring.direct();
    assert_eq!((direct.count, direct.stride), (8, 64));
    assert_eq!(direct.entries, ring.entries());
    complete_one(&mut pair, &mut device, 1);
    // SAFETY: an entry of the ring.
    let entry = || unsafe { direct.entries.cast::<[u8; 64]>().read() };
    let before = entry();
    ring.clean(&pair.queues);
    ring.detach(&pair.queues);
    assert_eq!(entry(), before);
    assert_eq!(device.consumed(), 0);
}
