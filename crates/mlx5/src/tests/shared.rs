//! Shared receive queues.

use std::mem::MaybeUninit;

use proptest::prelude::*;
use ring::DoorbellRecord;
use uverbs::Sge;

use super::*;
use crate::shared::SharedQueue;
use crate::{CursorEntry, PostError, Role, WorkCompletion};

fn sge(addr: u64) -> Sge {
    Sge {
        addr,
        length: 8,
        lkey: 2,
    }
}

/// What the device takes after `slot`.
fn next(shared: &SrqEntries, slot: u16) -> u16 {
    // SAFETY: two bytes of an entry.
    u16::from_be(unsafe { shared.entry(slot).add(2).cast::<u16>().read() })
}

/// The receive in a slot, if one is outstanding there.
fn find(shared: &SrqEntries, slot: u16) -> Option<u64> {
    shared.enter().find(slot)
}

#[test]
fn srq_receives_complete_in_any_order() {
    let shared = Arc::new(SrqEntries::new(3, 1, &LIMITS, None).unwrap());
    let mut queue = SharedQueue::new(Arc::clone(&shared));
    assert_eq!((queue.capacity(), queue.max_sge()), (3, 1));
    let (mut ring, queues) = (
        CqeRing::plain(4).unwrap(),
        qp_queues(
            5,
            Service::Datagram,
            &cap(1, 1, 0),
            Some(Arc::clone(&shared)),
        ),
    );
    let mut device = Device::of(&ring);
    ring.attach(&queues, Role::RECEIVE).unwrap();

    // The device follows the list on its own.
    let mut at = 0u16;
    let mut have = Vec::new();
    let mut posted = 0u64;
    for round in 0..50usize {
        while queue.locked().push(posted, &[sge(posted)]).is_ok() {
            have.push((at, posted));
            // SAFETY: the receive's one segment, behind the first.
            let addr = unsafe { shared.entry(at).add(24).cast::<u64>().read() };
            assert_eq!(u64::from_be(addr), posted);
            at = next(&shared, at);
            posted += 1;
        }
        assert_eq!(queue.locked().push(0, &[]), Err(PostError::Full));
        // SAFETY: there is no device that writes.
        unsafe { queue.locked().publish() };
        assert_eq!(have.len(), 3);
        let (slot, wr_id) = have.remove(round * 7 % 3);
        let written = TestCqe {
            opcode: 2,
            user_index: 5,
            slot,
            ..TestCqe::default()
        };
        device.write_cqe(&written);
        // SAFETY: what was posted is not written to.
        let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
        assert_eq!(wc.wr_id, wr_id);
        // Twice is once too often.
        device.write_cqe(&written);
        // SAFETY: as above.
        assert!(unsafe { read(&mut ring) }.unwrap().is_err());
        ring.publish();
        for slot in [4, 5, u16::MAX] {
            assert_eq!(find(&shared, slot), None);
        }
    }
}

/// One thread posts, as fast as there is room, the other plays the device, and
/// reads its completions: each receive is told once, in order.
#[test]
fn srq_post_while_polling() {
    const RECEIVES: u64 = 200_000;
    let shared = Arc::new(SrqEntries::new(7, 1, &LIMITS, None).unwrap());
    let mut ring = CqeRing::plain(4).unwrap();
    let queues = qp_queues(
        5,
        Service::Datagram,
        &cap(1, 1, 0),
        Some(Arc::clone(&shared)),
    );
    let mut device = Device::of(&ring);
    ring.attach(&queues, Role::RECEIVE).unwrap();
    std::thread::scope(|scope| {
        let mut queue = SharedQueue::new(Arc::clone(&shared));
        scope.spawn(move || {
            let mut wr_id = 0;
            while wr_id != RECEIVES {
                let mut queue = queue.locked();
                while wr_id != RECEIVES && queue.push(wr_id, &[sge(wr_id)]).is_ok() {
                    wr_id += 1;
                }
                // SAFETY: there is no device that writes.
                unsafe { queue.publish() };
                drop(queue);
                std::thread::yield_now();
            }
        });
        // SAFETY: a word, aligned, that lives as long as the queue.
        let posted = unsafe { DoorbellRecord::new(shared.memory().records.first().cast()) };
        let (mut slot, mut told) = (0, 0);
        while told != RECEIVES {
            if posted.published() as u16 == told as u16 {
                std::thread::yield_now();
                continue;
            }
            let behind = next(&shared, slot);
            let taken = std::mem::replace(&mut slot, behind);
            device.write_cqe(&TestCqe {
                opcode: 2,
                user_index: 5,
                slot: taken,
                ..TestCqe::default()
            });
            // SAFETY: no receive is written to.
            let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
            assert_eq!(wc.wr_id, told);
            ring.publish();
            told += 1;
        }
    });
}

/// A receive whose memory was not there.
fn page_fault(slot: u16) -> TestCqe {
    TestCqe {
        opcode: 14,
        user_index: 5,
        slot,
        syndrome: 0x22,
        vendor: 0x93,
        ..TestCqe::default()
    }
}

#[test]
fn page_fault_reposts_an_srq_receive() {
    let shared = Arc::new(SrqEntries::new(3, 2, &LIMITS, None).unwrap());
    let mut queue = SharedQueue::new(Arc::clone(&shared));
    let mut ring = CqeRing::plain(4).unwrap();
    let pair = qp_queues(
        5,
        Service::ReliableConnection,
        &cap(1, 1, 0),
        Some(Arc::clone(&shared)),
    );
    let mut device = Device::of(&ring);
    ring.attach(&pair, Role::RECEIVE).unwrap();
    // SAFETY: no receive names memory.
    let read = |ring: &mut CqeRing| unsafe { read(ring) };
    // SAFETY: the first word of the records.
    let posted = || u32::from_be(unsafe { shared.memory().records.first().cast::<u32>().read() });
    let address = |slot: u16, element: usize| {
        // SAFETY: the address of one of an entry's two elements.
        u64::from_be(unsafe {
            let at = shared.entry(slot).add(16 * element + 24);
            at.cast::<u64>().read()
        })
    };
    for wr_id in 0..3 {
        queue
            .locked()
            .push(wr_id, &[sge(100 + wr_id), sge(200)])
            .unwrap();
    }
    // SAFETY: there is no device that writes.
    unsafe { queue.locked().publish() };
    assert_eq!(posted(), 3);

    // The queue is full: it gets the one entry that nobody has, and its own is
    // free in its place.
    device.write_cqe(&page_fault(1));
    assert_eq!(read(&mut ring), None);
    assert_eq!((device.consumed(), posted()), (1, 4));
    assert_eq!(
        (next(&shared, 2), find(&shared, 1), find(&shared, 3)),
        (3, None, Some(1))
    );
    assert_eq!((address(3, 0), address(3, 1)), (101, 200));
    assert_eq!(queue.locked().push(9, &[]), Err(PostError::Full));

    // Again, and another behind it: one completion is told.
    device.write_cqe(&page_fault(3));
    device.write_cqe(&TestCqe {
        opcode: 2,
        user_index: 5,
        slot: 0,
        time: 77,
        ..TestCqe::default()
    });
    // SAFETY: as above.
    let timed = unsafe { read_timed(&mut ring) }.unwrap().unwrap();
    let wc = timed.completion;
    assert_eq!((wc.wr_id, wc.status, timed.time), (0, 0, 77));
    assert_eq!(
        (posted(), next(&shared, 1), find(&shared, 1)),
        (5, 3, Some(1))
    );

    // What has been pushed and not published stays so.
    queue.locked().push(7, &[sge(107)]).unwrap();
    device.write_cqe(&page_fault(1));
    assert_eq!(read(&mut ring), None);
    assert_eq!(posted(), 5);
    // SAFETY: as above.
    unsafe { queue.locked().publish() };
    assert_eq!(posted(), 7);
    // Behind the one that was pushed: slot 0 was its, then it.
    let (pushed, again) = (next(&shared, 1), next(&shared, next(&shared, 1)));
    assert_eq!(
        (find(&shared, pushed), find(&shared, again)),
        (Some(7), Some(1))
    );
    assert_eq!(address(again, 0), 101);

    // A slot without an outstanding receive is malformed; other failures are reported.
    device.write_cqe(&page_fault(1));
    assert!(read(&mut ring).unwrap().is_err());
    device.write_cqe(&TestCqe {
        vendor: 0,
        ..page_fault(again)
    });
    let wc = read(&mut ring).unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.status), (1, 16));
    device.write_cqe(&TestCqe {
        syndrome: 0x14,
        ..page_fault(pushed)
    });
    let wc = read(&mut ring).unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.status), (7, 11));

    // The queue pair goes: what it had not done is another's to do.
    device.write_cqe(&page_fault(2));
    ring.detach(&pair);
    assert_eq!(posted(), 8);
    let wr_ids: Vec<_> = (0..4).filter_map(|slot| find(&shared, slot)).collect();
    assert_eq!(wr_ids, [2]);
}

#[test]
fn a_page_fault_of_a_receive_queue_is_reported() {
    let mut ring = CqeRing::plain(4).unwrap();
    let mut pair = TestQp::new(5, Service::ReliableConnection, &cap(2, 1, 0));
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::RECEIVE).unwrap();
    pair.recv.begin();
    pair.recv.push(3, &[]).unwrap();
    // SAFETY: there is no device that writes.
    unsafe { pair.recv.publish() };
    device.write_cqe(&page_fault(0));
    // SAFETY: as above.
    let wc = unsafe { read(&mut ring) }.unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.status, wc.vendor_err), (3, 16, 0x93));
}

proptest! {
    /// Receives of a shared queue are polled in batches, one by one, and by a
    /// cursor with the same result, and their slots are free in the same order.
    #[test]
    fn batches_and_cursors_decode_what_single_polls_do(
        steps in prop::collection::vec(
            (prop::collection::vec((0u16..9, 0u8..8, any::<u32>()), 1..6), 1usize..6),
            1..20,
        ),
    ) {
        let make = || {
            let shared = Arc::new(SrqEntries::new(7, 1, &LIMITS, None).unwrap());
            let queue = SharedQueue::new(Arc::clone(&shared));
            let mut ring = CqeRing::plain(3).unwrap();
            for index in [5, 6] {
                let queues = qp_queues(
                    index,
                    Service::ReliableConnection,
                    &cap(1, 1, 0),
                    Some(Arc::clone(&shared)),
                );
                ring.attach(&queues, Role::RECEIVE).unwrap();
            }
            let device = Device::of(&ring);
            (shared, queue, ring, device)
        };
        let (mut rows, mut cursor, mut long) = (make(), make(), make());
        let mut posted = 0;
        for (written, room) in steps {
            while long.1.locked().push(posted, &[]).is_ok() {
                for (_, queue, ..) in [&mut rows, &mut cursor] {
                    queue.locked().push(posted, &[]).unwrap();
                }
                posted += 1;
            }
            for (slot, what, word) in &written {
                for (.., device) in [&mut rows, &mut cursor, &mut long] {
                    if *what == 7 {
                        device.write_cqe(&page_fault(*slot));
                        continue;
                    }
                    device.write_cqe(&TestCqe {
                        opcode: 2 + (what & 1),
                        user_index: 5 + u32::from(what >> 1 & 1),
                        // Twice, or none at all: some make no sense.
                        slot: *slot,
                        byte_count: *word,
                        immediate: word.rotate_left(8),
                        flags_rqpn: word.rotate_left(16),
                        time: (*word).into(),
                        ..TestCqe::default()
                    });
                }
            }
            let mut told = Vec::new();
            loop {
                let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 6];
                // SAFETY: no receive names memory.
                match unsafe { poll(&mut rows.2, &mut out[..room]) } {
                    Ok(0) => break,
                    // SAFETY: as many were written.
                    Ok(count) => told.extend(out[..count].iter().map(|wc| Ok(unsafe { wc.assume_init() }))),
                    Err(error) => told.push(Err(error)),
                }
            }
            let mut entry = CursorEntry::default();
            for told in told {
                // SAFETY: as above.
                prop_assert_eq!(unsafe { read(&mut long.2) }, Some(told));
                // SAFETY: as above; it is this test's.
                let one = unsafe { cursor.2.next(&mut entry) };
                prop_assert_eq!(one, told.map(|_| true));
                if one.is_err() {
                    cursor.2.skip();
                }
                if let Ok(wc) = told {
                    prop_assert_eq!((entry.wr_id(), entry.status()), (wc.wr_id, wc.status));
                    prop_assert_eq!((entry.opcode(), entry.wc_flags()), (wc.opcode, wc.wc_flags));
                    // SAFETY: it was decoded, and nothing published.
                    prop_assert_eq!(unsafe { entry.byte_len() }, wc.byte_len);
                }
            }
            // SAFETY: as above.
            unsafe {
                prop_assert_eq!(read(&mut long.2), None);
                prop_assert_eq!(cursor.2.next(&mut entry), Ok(false));
            }
            long.2.publish();
            cursor.2.publish();
            prop_assert_eq!(rows.3.consumed(), long.3.consumed());
            for slot in 0..8 {
                for other in [&rows.0, &cursor.0] {
                    prop_assert_eq!(find(other, slot), find(&long.0, slot));
                    prop_assert_eq!(next(other, slot), next(&long.0, slot));
                }
            }
        }
    }
}
