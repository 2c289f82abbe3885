//! WQEs that the program has made.

use super::*;
use crate::Role;

const RC: Service = Service::ReliableConnection;
const RAW: u32 = 136;

/// A WQE of so many segments; an inline write would look like this. Index and number
/// are wrong.
fn wqe(opcode: u8, segments: u8) -> Vec<u8> {
    let mut bytes = vec![0; usize::from(segments.max(1)) * 16];
    bytes[..8].copy_from_slice(&[0x35, 0x77, 0x88, opcode, 1, 2, 3, segments | 0x40]);
    // Signature, and flags: signalled, and a fence.
    bytes[8..12].copy_from_slice(&[0x5a, 0, 0, 0x88]);
    for (i, byte) in bytes.iter_mut().enumerate().skip(16) {
        *byte = i as u8;
    }
    bytes
}

fn raw_pair() -> TestQp {
    let mut queues = qp_queues(70, RC, &cap(4, 4, 0), None);
    Arc::get_mut(&mut queues).unwrap().raw_wqe = true;
    TestQp::with(queues, false)
}

fn push_raw(pair: &mut TestQp, wr_id: u64, wqe: &[u8]) -> Result<(), PostError> {
    // SAFETY: as long as it says; there is no device.
    unsafe { pair.send.push_raw(wr_id, wqe.as_ptr()) }
}

/// A completion of the work request in a slot.
fn done(slot: u32, request: u8) -> TestCqe {
    TestCqe {
        user_index: 70,
        slot: slot as u16,
        request,
        ..TestCqe::default()
    }
}

#[test]
fn raw_and_other_requests_share_the_queue() {
    // Blocks of two; four work requests.
    let mut pair = raw_pair();
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    let blocks = pair.queues.send.blocks;
    let mut at = 0;
    for round in 0..50u64 {
        let raw = round % 3 != 0;
        let segments = 3 + (round % 4) as u8;
        pair.send.begin();
        if raw {
            push_raw(&mut pair, round, &wqe(0x0a, segments)).unwrap();
        } else {
            push_send(&mut pair.send, round).unwrap();
        }
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        let slot = at % blocks;
        if raw {
            let bytes = pair.sent(slot as usize * 64, usize::from(segments) * 16);
            let given = wqe(0x0a, segments);
            assert_eq!(bytes[8..], given[8..]);
            assert_eq!(be32(&bytes, 0), 0x3500_000a | (at & 0xffff) << 8);
            assert_eq!(be32(&bytes, 4), QPN << 8 | u32::from(segments));
            at += u32::from(segments).div_ceil(4);
        } else {
            at += 1;
        }
        assert_eq!(pair.record(1), at & 0xffff);
        device.write_cqe(&done(slot, 0x0a));
        // SAFETY: there is no memory to write to.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        let opcode = if raw { RAW } else { 0 };
        assert_eq!((wc.status, wc.wr_id, wc.opcode), (0, round, opcode));
        // Once only.
        device.write_cqe(&done(slot, 0x0a));
        // SAFETY: as above.
        assert!(unsafe { read(&mut ring) }.unwrap().is_err());
    }
}

#[test]
fn any_opcode_completes_and_fails() {
    let mut pair = raw_pair();
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    for (opcode, completion, status) in [(0x2f, 0, 0), (0x08, 0, 0), (0x0a, 13, 10)] {
        let slot = pair.record(1);
        pair.send.begin();
        push_raw(&mut pair, 5, &wqe(opcode, 3)).unwrap();
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        device.write_cqe(&TestCqe {
            opcode: completion,
            syndrome: 0x13,
            ..done(slot, opcode)
        });
        // SAFETY: there is no memory to write to.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        assert_eq!((wc.status, wc.wr_id), (status, 5));
        if status == 0 {
            assert_eq!(wc.opcode, RAW);
        }
    }
}

#[test]
fn a_short_read_in_a_cqe_is_scattered() {
    let mut pair = raw_pair();
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    let mut memory = [0u8; 16];
    let mut bytes = wqe(0x10, 3);
    bytes[32..36].copy_from_slice(&8u32.to_be_bytes());
    let to = memory.as_mut_ptr().expose_provenance() as u64;
    bytes[40..48].copy_from_slice(&to.to_be_bytes());
    pair.send.begin();
    push_raw(&mut pair, 5, &bytes).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    let mut cqe = TestCqe {
        byte_count: 8,
        scatter: 4,
        ..done(0, 0x10)
    }
    .bytes();
    cqe[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    device.write(cqe);
    // SAFETY: what was posted is ours.
    let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
    assert_eq!((wc.status, wc.opcode, wc.byte_len), (0, RAW, 8));
    assert_eq!(memory[..9], [1, 2, 3, 4, 5, 6, 7, 8, 0]);
}

#[test]
fn oversized_wqes_are_refused() {
    let mut pair = raw_pair();
    pair.send.begin();
    // A work request of the longest kind has two blocks.
    for segments in [0, 9, 63] {
        let refused = push_raw(&mut pair, 1, &wqe(0x0a, segments));
        assert_eq!(refused, Err(PostError::BadOperation), "{segments}");
    }
    let capacity = pair.send.capacity();
    for wr_id in 0..capacity {
        push_raw(&mut pair, wr_id.into(), &wqe(0x0a, 8)).unwrap();
    }
    assert_eq!(push_raw(&mut pair, 9, &wqe(0x0a, 1)), Err(PostError::Full));
    pair.send.abort();
    assert_eq!(pair.record(1), 0);
    // A queue that was not made for it.
    let mut other = TestQp::new(70, RC, &cap(4, 4, 0));
    let refused = push_raw(&mut other, 1, &wqe(0x0a, 1));
    assert_eq!(refused, Err(PostError::BadOperation));
}
