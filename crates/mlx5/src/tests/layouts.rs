//! Layouts of indirect memory keys, and copies in local memory.

use super::*;
use crate::{Interleaved, KeyChanges, KeyLayout, LayoutChange, Role};

const RC: Service = Service::ReliableConnection;
const KEY: u32 = 0x0123_4500;

fn pair(inline: u32) -> TestQp {
    let cap = cap(4, 1, inline);
    let send = SendPlan::new(&cap, RC, &LIMITS, KeyChanges::Layouts, 0).unwrap();
    let mut queues = qp_queues_with_plan(70, RC, send, &cap, None);
    Arc::get_mut(&mut queues).unwrap().memcpy = true;
    TestQp::with(queues, false)
}

fn change<'a>(layout: Option<KeyLayout<'a>>, access: Option<u32>) -> LayoutChange<'a> {
    LayoutChange {
        key: KEY,
        access,
        layout,
    }
}

fn push_layout(pair: &mut TestQp, wr_id: u64, change: &LayoutChange<'_>) -> Result<(), PostError> {
    pair.send.push_layout(wr_id, SendFlags::SIGNALED, change)
}

fn sge(addr: u64, length: u32) -> Sge {
    Sge {
        addr,
        length,
        lkey: 9,
    }
}

#[test]
fn a_list_is_padded_to_blocks() {
    for count in 0..=4u32 {
        let mut pair = pair(0);
        let list: Vec<Sge> = (0..count)
            .map(|i| sge(0x1000 + u64::from(i), 10 + i))
            .collect();
        pair.send.begin();
        let change = change(Some(KeyLayout::List(&list)), Some(1 | 8));
        push_layout(&mut pair, 7, &change).unwrap();
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        let padded = count.next_multiple_of(4);
        let bytes = pair.sent(0, 192);
        assert_eq!(bytes[3], 0x25);
        assert_eq!(be32(&bytes, 4), QPN << 8 | (8 + padded));
        assert_eq!(be32(&bytes, 12), KEY);
        // Inline, elements, and which members change: rights, length, key, free.
        assert_eq!((bytes[16], be16(&bytes, 20)), (0x80, padded as u16));
        let members = 1 << 0 | 1 << 13 | 0b1111 << 18 | 1 << 29;
        assert_eq!(be64(&bytes, 24), members);
        // Local write and atomics.
        assert_eq!(bytes[64 + 2], 0x40 | 0x08);
        assert_eq!(be32(&bytes, 64 + 4), 0xffff_ff00);
        let total: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
        assert_eq!(be64(&bytes, 64 + 24), total);
        for (i, sge) in list.iter().enumerate() {
            let at = 128 + i * 16;
            assert_eq!(
                (be32(&bytes, at), be32(&bytes, at + 4), be64(&bytes, at + 8)),
                (sge.length, 9, sge.addr)
            );
        }
        assert!(
            bytes[128 + count as usize * 16..]
                .iter()
                .all(|byte| *byte == 0)
        );
        assert_eq!(pair.record(1), 2 + padded / 4);
    }
}

#[test]
fn an_interleaved_layout_repeats_its_parts() {
    let mut pair = pair(0);
    let part = |addr, bytes, skip| Interleaved {
        addr,
        bytes,
        skip,
        lkey: 5,
    };
    let parts = [part(0x1000, 8, 2), part(0x2000, 3, 0)];
    let layout = KeyLayout::Interleaved {
        repeat: 100,
        parts: &parts,
    };
    pair.send.begin();
    push_layout(&mut pair, 7, &change(Some(layout), None)).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    let bytes = pair.sent(0, 192);
    assert_eq!((be32(&bytes, 4) & 0x3f, be16(&bytes, 20)), (12, 4));
    // The rights stay.
    assert_eq!(be64(&bytes, 24), 1 << 0 | 1 << 13 | 1 << 29);
    assert_eq!(be64(&bytes, 64 + 24), 11 * 100);
    let words = |at: usize| [0, 4, 8, 12].map(|i| be32(&bytes, at + i));
    assert_eq!(words(128), [11, 0x400, 100, 2]);
    assert_eq!(words(144), [10 << 16 | 8, 5, 0, 0x1000]);
    assert_eq!(words(160), [3 << 16 | 3, 5, 0, 0x2000]);
    assert_eq!(words(176), [0; 4]);
    // A distance has 16 bits.
    for (bytes, skip) in [(0xffff, 1), (1, 0xffff), (u32::MAX, u32::MAX), (1 << 16, 0)] {
        let parts = [part(0, bytes, skip); 3];
        let layout = KeyLayout::Interleaved {
            repeat: u32::MAX,
            parts: &parts,
        };
        let refused = push_layout(&mut pair, 7, &change(Some(layout), None));
        assert_eq!(refused, Err(PostError::MessageTooLong));
    }
}

#[test]
fn a_layout_fits_or_is_refused() {
    for inline in [0, 100, 500] {
        let mut pair = pair(inline);
        let most = pair.send.max_layout();
        assert!(most >= 4 && most >= (inline + 4) / 16, "{inline}: {most}");
        let list = vec![sge(1, 1); most as usize + 1];
        pair.send.begin();
        let refused = push_layout(&mut pair, 1, &change(Some(KeyLayout::List(&list)), None));
        assert_eq!(refused, Err(PostError::TooManySges));
        // As many as the queue holds, each of the longest kind.
        let list = &list[1..];
        for wr_id in 0..pair.send.capacity() {
            let change = change(Some(KeyLayout::List(list)), Some(1));
            push_layout(&mut pair, wr_id.into(), &change).unwrap();
        }
        let refused = push_layout(&mut pair, 9, &change(None, None));
        assert_eq!(refused, Err(PostError::Full));
    }
    // A queue that was not made for it.
    let mut pair = TestQp::new(70, RC, &cap(4, 4, 0));
    assert_eq!(pair.send.max_layout(), 0);
    let refused = push_layout(&mut pair, 9, &change(None, None));
    assert_eq!(refused, Err(PostError::BadOperation));
    let places = [(0x2000, 2), (0x1000, 1)];
    let refused = (pair.send).push_memcpy(1, SendFlags::empty(), places, 8, (0, 0));
    assert_eq!(refused, Err(PostError::BadOperation));
    // Nor does it believe the device.
    push_send(&mut pair.send, 1).unwrap();
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    device.write_cqe(&TestCqe {
        user_index: 70,
        request: 0x2f,
        ..TestCqe::default()
    });
    // SAFETY: there is no memory to write to.
    assert!(unsafe { read(&mut ring) }.unwrap().is_err());
}

#[test]
fn layouts_and_copies_complete_with_their_opcodes() {
    let mut pair = pair(0);
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::SEND).unwrap();
    for round in 0..20u64 {
        let slot = pair.record(1) % pair.queues.send.blocks;
        pair.send.begin();
        let (request, opcode) = if round % 2 == 0 {
            push_layout(&mut pair, round, &change(None, Some(1))).unwrap();
            (0x25, 135)
        } else {
            let places = [(0x2000, 2), (0x1000, 1)];
            pair.send
                .push_memcpy(round, SendFlags::SIGNALED, places, 64, (0x9000, 7))
                .unwrap();
            let bytes = pair.sent(slot as usize * 64, 64);
            assert_eq!((bytes[0], bytes[3], be32(&bytes, 4) & 0x3f), (1, 0x2f, 4));
            let segment =
                |at: usize| (be32(&bytes, at), be32(&bytes, at + 4), be64(&bytes, at + 8));
            assert_eq!(segment(16), (0, 7, 0x9000));
            assert_eq!(
                (segment(32), segment(48)),
                ((64, 1, 0x1000), (64, 2, 0x2000))
            );
            (0x2f, 137)
        };
        // SAFETY: there is no device.
        unsafe { pair.send.publish() };
        device.write_cqe(&TestCqe {
            user_index: 70,
            slot: slot as u16,
            request,
            ..TestCqe::default()
        });
        // SAFETY: there is no memory to write to.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        assert_eq!((wc.status, wc.wr_id, wc.opcode), (0, round, opcode));
    }
}

#[test]
fn a_copy_has_up_to_two_gib() {
    let mut pair = pair(0);
    pair.send.begin();
    let places = [(0x2000, 2), (0x1000, 1)];
    for length in [0, (1 << 31) + 1, u32::MAX] {
        let refused = (pair.send).push_memcpy(1, SendFlags::empty(), places, length, (0, 0));
        assert_eq!(refused, Err(PostError::MessageTooLong));
    }
    let longest = 1 << 31;
    (pair.send)
        .push_memcpy(1, SendFlags::empty(), places, longest, (0, 0))
        .unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    let bytes = pair.sent(0, 64);
    assert_eq!((be32(&bytes, 32), be32(&bytes, 48)), (0, 0));
}
