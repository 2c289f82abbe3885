//! The sinks of the decoder against one another, batches against single polls.

use proptest::prelude::*;

use super::*;
use crate::{CursorEntry, Role};

/// A queue pair with one send and one receive outstanding, and its completion
/// queue.
fn outstanding() -> (CqeRing, Device, TestQp) {
    let mut ring = CqeRing::plain(2).unwrap();
    let device = Device::of(&ring);
    let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.queues, Role::SEND | Role::RECEIVE)
        .unwrap();
    pair.send.begin();
    push_send(&mut pair.send, 40).unwrap();
    pair.recv.begin();
    pair.recv.push(50, &[]).unwrap();
    // SAFETY: there is no device but the test, and no memory is named.
    unsafe {
        pair.send.publish();
        pair.recv.publish();
    }
    (ring, device, pair)
}

/// A queue pair is not found any more once it was detached, although a completion of
/// it was read last.
#[test]
fn a_detached_queue_pair_is_unknown() {
    let (mut ring, mut device, mut pair) = outstanding();
    let sent = TestCqe {
        user_index: 70,
        request: 0x0a,
        ..TestCqe::default()
    };
    let received = TestCqe { opcode: 2, ..sent };
    device.write_cqe(&sent);
    device.write_cqe(&received);
    let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 2];
    // SAFETY: no work request names memory.
    assert_eq!(unsafe { poll(&mut ring, &mut out) }, Ok(2));
    ring.detach(&pair.queues);
    pair.send.begin();
    push_send(&mut pair.send, 41).unwrap();
    pair.recv.begin();
    pair.recv.push(51, &[]).unwrap();
    // SAFETY: no memory is named.
    unsafe {
        pair.send.publish();
        pair.recv.publish();
    }
    let mut next = |ring: &mut CqeRing, what| {
        device.write_cqe(&TestCqe { slot: 1, ..what });
        // SAFETY: as above.
        unsafe { poll(ring, &mut out) }
    };
    let unknown = Err(CompletionError::UnknownQueue { user_index: 70 });
    assert_eq!(next(&mut ring, sent), unknown);
    assert_eq!(next(&mut ring, received), unknown);
    // Its sends complete here again, and its receives do not.
    ring.attach(&pair.queues, Role::SEND).unwrap();
    assert_eq!(next(&mut ring, received), unknown);
    assert_eq!(next(&mut ring, sent), Ok(1));
}

proptest! {
    /// However completions of several queue pairs and kinds follow one another, and
    /// however many are asked for: batches are what single polls are.
    #[test]
    fn batches_decode_what_single_polls_do(
        log2 in 1u32..5,
        steps in prop::collection::vec((0u8..16, any::<u32>(), 0usize..6, any::<bool>()), 1..80),
    ) {
        let mut sides: Vec<_> = (0..2).map(|_| {
            let mut ring = CqeRing::plain(log2).unwrap();
            let device = Device::of(&ring);
            let pairs: Vec<_> = [70, 71, 134].map(|index| {
                let pair = TestQp::new(index, Service::ReliableConnection, &cap(4, 1, 0));
                ring.attach(&pair.queues, Role::SEND | Role::RECEIVE).unwrap();
                pair
            }).into();
            (ring, device, pairs)
        }).collect();
        let mut told: [Vec<_>; 2] = Default::default();
        let mut written = 0;
        for (n, (what, word, consume, take)) in (100u64..).zip(steps) {
            if written - told[0].len() < 1 << log2 {
                written += 1;
                for (_, device, pairs) in &mut sides {
                    let pair = &mut pairs[usize::from((what & 1) + (what >> 3))];
                    let (slot, opcode, queue) = if what & 2 != 0 {
                        let slot = pair.record(1);
                        pair.send.begin();
                        // Full, if many were not outstanding when they were read.
                        let _ = push_send(&mut pair.send, n);
                        (slot, 0, 0)
                    } else {
                        let slot = pair.record(0);
                        pair.recv.begin();
                        let _ = pair.recv.push(n, &[]);
                        (slot, 2 + (what >> 2 & 1), 1)
                    };
                    // SAFETY: no memory is named.
                    unsafe {
                        if queue == 0 { pair.send.publish(); } else { pair.recv.publish(); }
                    }
                    device.write_cqe(&TestCqe {
                        opcode,
                        user_index: pair.queues.user_index(),
                        // Some that are not outstanding, or of an odd format.
                        slot: if word % 13 == 0 { 3 } else { slot as u16 },
                        request: if word % 11 == 0 { 0x25 } else { 0x0a },
                        byte_count: word,
                        flags_rqpn: word.rotate_left(8),
                        time: n,
                        scatter: if word % 7 == 0 { 2 } else { 0 },
                        ..TestCqe::default()
                    });
                }
            }
            if !take {
                continue;
            }
            let (rows, singles) = sides.split_at_mut(1);
            let ring = &mut rows[0].0;
            let before = told[0].len();
            let mut out = [MaybeUninit::<TimedCompletion>::uninit(); 6];
            // SAFETY: no work request names memory.
            match unsafe { poll(ring, &mut out[..consume]) } {
                Ok(count) => for timed in &out[..count] {
                    // SAFETY: as many were written.
                    let timed = unsafe { timed.assume_init() };
                    told[0].push(Ok((timed.completion, timed.time)));
                },
                Err(error) => told[0].push(Err(error)),
            }
            let other = &mut singles[0].0;
            for _ in before..told[0].len() {
                // SAFETY: as above.
                let read = unsafe { read_timed(other) };
                told[1].extend(read.map(|read| read.map(|timed| (timed.completion, timed.time))));
            }
            other.publish();
            prop_assert_eq!(&told[0][before..], &told[1][before..]);
            prop_assert_eq!(rows[0].1.consumed(), singles[0].1.consumed());
            for (a, b) in rows[0].2.iter().zip(&singles[0].2) {
                prop_assert_eq!(a.queues.sends.completed(), b.queues.sends.completed());
                prop_assert_eq!(a.queues.receives.completed(), b.queues.receives.completed());
            }
        }
    }
}

/// A batch goes on at the ring's first entry, whatever is behind its last.
#[test]
fn a_batch_wraps_where_the_ring_does() {
    let mut ring = CqeRing::plain(1).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    pair.send.begin();
    for wr_id in 40..44 {
        push_send(&mut pair.send, wr_id).unwrap();
    }
    // SAFETY: no memory is named.
    unsafe { pair.send.publish() };
    let sent = |slot| TestCqe {
        user_index: 70,
        slot,
        request: 0x0a,
        ..TestCqe::default()
    };
    device.write_cqe(&sent(0));
    device.write_cqe(&sent(1));
    // As if it were the next: of the same queue, and of this round.
    // SAFETY: behind the two entries is the rest of a page.
    unsafe { device.entries.add(128).cast().write(sent(2).bytes()) };
    let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 4];
    // SAFETY: as above.
    assert_eq!(unsafe { poll(&mut ring, &mut out) }, Ok(2));
    device.write_cqe(&sent(2));
    // SAFETY: as above.
    assert_eq!(unsafe { poll(&mut ring, &mut out) }, Ok(1));
    // SAFETY: it was written.
    assert_eq!(unsafe { out[0].assume_init() }.wr_id, 42);
}

proptest! {
    /// A cursor's entry equals the polled completion, also after the ring is
    /// changed; a malformed CQE changes nothing.
    #[test]
    fn a_cursor_decodes_what_a_poll_does(
        (opcode, request, user_index, slot) in (0u8..=15, 0u8..0x26, 69u32..72, 0u16..2),
        (byte_count, immediate, flags_rqpn) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (slid, path, time) in (any::<u16>(), any::<u8>(), any::<u64>()),
        (common, keep) in any::<(bool, bool)>(),
    ) {
        let written = TestCqe {
            opcode: if common { [0, 2, 3][opcode as usize % 3] } else { opcode },
            request: if common { [0x0a, 0x08][request as usize % 2] } else { request },
            user_index: if common { 70 } else { user_index },
            slot: if common { 0 } else { slot },
            byte_count,
            immediate,
            flags_rqpn,
            slid,
            path,
            time,
            syndrome: 5,
            vendor: 6,
            ..TestCqe::default()
        };
        let (mut cursor, mut cursor_device, pair) = outstanding();
        let (mut long, mut long_device, other) = outstanding();
        cursor_device.write_cqe(&written);
        long_device.write_cqe(&written);
        let mut entry = CursorEntry::default();
        // SAFETY: no work request names memory.
        let told = unsafe { cursor.next(&mut entry) };
        let both = |of: [&TestQp; 2]| of.map(|pair| {
            let queues = &pair.queues;
            (queues.sends.completed(), queues.receives.completed())
        });
        if told.is_err() {
            prop_assert!(!common);
            prop_assert_eq!(cursor.position(), 0);
            prop_assert!(pair.queues.sends.find(0).is_some());
            prop_assert!(pair.queues.receives.find(0).is_some());
        } else {
            prop_assert_eq!(told, Ok(written.opcode != 15));
        }
        // SAFETY: as above.
        let timed = match unsafe { read_timed(&mut long) } {
            None => {
                prop_assert_eq!(told, Ok(false));
                return Ok(());
            }
            Some(Err(error)) => {
                prop_assert_eq!(told, Err(error));
                return Ok(());
            }
            Some(Ok(timed)) => timed,
        };
        let wc = timed.completion;
        prop_assert_eq!(told, Ok(true));
        prop_assert_eq!((cursor.position(), long.position()), (1, 1));
        let [a, b] = both([&pair, &other]);
        prop_assert_eq!(a, b);
        if keep {
            // SAFETY: nothing was published.
            unsafe { entry.keep() };
            cursor_device.put(0, [0xff; 64]);
        }
        prop_assert_eq!((entry.wr_id(), entry.status()), (wc.wr_id, wc.status));
        prop_assert_eq!(entry.vendor_err(), wc.vendor_err);
        // SAFETY: it was decoded, and nothing published.
        unsafe {
            prop_assert_eq!(entry.qp_num(), wc.qp_num);
            if wc.status != 0 {
                return Ok(());
            }
            prop_assert_eq!((entry.opcode(), entry.wc_flags()), (wc.opcode, wc.wc_flags));
            prop_assert_eq!((entry.time(), timed.time), (time, time));
            if wc.opcode >= 128 {
                if wc.wc_flags & (2 | 8) != 0 {
                    prop_assert_eq!(entry.imm_data(), wc.ex);
                }
                prop_assert_eq!(entry.byte_len(), wc.byte_len);
                prop_assert_eq!(entry.src_qp(), wc.src_qp);
                prop_assert_eq!(entry.slid(), wc.slid);
                prop_assert_eq!(entry.sl(), wc.sl);
                prop_assert_eq!(entry.dlid_path_bits(), wc.dlid_path_bits);
            }
        }
    }
}

/// A cursor ignores an entry of the last round, although the same slot is
/// outstanding again.
#[test]
fn cursor_ignores_the_previous_round() {
    let (mut ring, mut device, mut pair) = outstanding();
    let mut entry = CursorEntry::default();
    let mut next = [40, 50];
    for opcode in [0, 2, 3] {
        // As many slots as entries: the old entry's slot is the one that is
        // outstanding now.
        for n in 0..13 {
            let (queue, next) = match opcode {
                0 => (&pair.queues.sends, &mut next[0]),
                _ => (&pair.queues.receives, &mut next[1]),
            };
            let (slot, wr_id) = (queue.completed() as u16, *next);
            *next += 1;
            // SAFETY: no work request names memory.
            assert_eq!(unsafe { ring.next(&mut entry) }, Ok(false));
            device.write_cqe(&TestCqe {
                opcode,
                slot,
                user_index: 70,
                request: 0x0a,
                ..TestCqe::default()
            });
            // SAFETY: as above.
            assert_eq!(unsafe { ring.next(&mut entry) }, Ok(true));
            assert_eq!(entry.wr_id(), wr_id, "{n}");
            ring.publish();
            // Its slot's turn comes again.
            pair.send.begin();
            pair.recv.begin();
            if opcode == 0 {
                push_send(&mut pair.send, wr_id + 1).unwrap();
            } else {
                pair.recv.push(wr_id + 1, &[]).unwrap();
            }
            // SAFETY: no memory is named.
            unsafe {
                pair.send.publish();
                pair.recv.publish();
            }
        }
    }
}
