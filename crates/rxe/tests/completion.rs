//! The completion ring: batches, the cursor, and what a device may do to it.

use std::mem::MaybeUninit;

use device_testing::rxe::{Driver, layout, layout::wc};
use proptest::prelude::*;
use ringverbs_rxe::{WcRing, WorkCompletion};

const SLOTS: u32 = 8;

fn ring() -> (Driver, WcRing) {
    ring_at(0, 0)
}

/// A ring that is taken up with its indices at these.
fn ring_at(producer: u32, consumer: u32) -> (Driver, WcRing) {
    let driver = Driver::new(7, SLOTS);
    driver.set_producer(producer);
    driver.set_consumer(consumer);
    let ring = WcRing::new(driver.ring(WcRing::ENTRY_SIZE));
    (driver, ring)
}

/// The device raises a completion.
fn raise(driver: &Driver, wr_id: u64) {
    let at = driver.producer();
    let mut entry = vec![0; wc::SIZE];
    layout::write(&mut entry, wc::WR_ID, wr_id);
    driver.set_entry(at, &entry);
    driver.set_producer((at + 1) % SLOTS);
}

/// Takes at most `most` completions.
fn take(ring: &WcRing, most: usize) -> Vec<WorkCompletion> {
    let mut out = vec![MaybeUninit::uninit(); most];
    let count = ring.take(&mut out);
    // SAFETY: that many were written to the front.
    out[..count]
        .iter()
        .map(|wc| unsafe { wc.assume_init() })
        .collect()
}

fn ids(completions: &[WorkCompletion]) -> Vec<u64> {
    completions.iter().map(|wc| wc.wr_id).collect()
}

/// An entry in which every field has its own value, `status` and `opcode` as
/// given.
fn full_entry(status: u32, opcode: u32) -> Vec<u8> {
    let mut entry = vec![0; wc::SIZE];
    for (field, value) in [
        (wc::WR_ID, 0x0102_0304_0506_0708),
        (wc::STATUS, status.into()),
        (wc::OPCODE, opcode.into()),
        (wc::VENDOR_ERR, 0x2122_2324),
        (wc::BYTE_LEN, 0x3132_3334),
        (wc::EX, 0x4142_4344),
        (wc::QP_NUM, 0x5152_5354),
        (wc::SRC_QP, 0x6162_6364),
        (wc::WC_FLAGS, 0x7172_7374),
        (wc::PKEY_INDEX, 0x8182),
        (wc::SLID, 0x9192),
        (wc::SL, 0xa1),
        (wc::DLID_PATH_BITS, 0xa2),
    ] {
        layout::write(&mut entry, field, value);
    }
    entry
}

#[test]
fn every_field_is_where_the_driver_writes_it() {
    // Known and unknown values pass alike.
    for (status, opcode) in [(0, 0), (5, 128), (21, 9), (22, 10), (u32::MAX, u32::MAX)] {
        let (driver, ring) = ring();
        driver.set_entry(0, &full_entry(status, opcode));
        driver.set_producer(1);

        let span = ring.available();
        let entry = ring.entry(&span);
        assert_eq!(entry.wr_id(), 0x0102_0304_0506_0708);
        assert_eq!((entry.status(), entry.opcode()), (status, opcode));
        assert_eq!(entry.vendor_err(), 0x2122_2324);
        assert_eq!(entry.byte_len(), 0x3132_3334);
        assert_eq!(entry.ex(), 0x4142_4344);
        assert_eq!(entry.qp_num(), 0x5152_5354);
        assert_eq!(entry.src_qp(), 0x6162_6364);
        assert_eq!(entry.wc_flags(), 0x7172_7374);
        assert_eq!(entry.slid(), 0x9192);
        assert_eq!((entry.sl(), entry.dlid_path_bits()), (0xa1, 0xa2));
        // SAFETY: not released.
        let in_place = unsafe { entry.as_ptr().read() };

        let mut one = MaybeUninit::uninit();
        assert_eq!(ring.take(std::slice::from_mut(&mut one)), 1);
        assert_eq!(ring.take(&mut [MaybeUninit::uninit()]), 0);
        // SAFETY: it was taken.
        assert_eq!(unsafe { one.assume_init() }, in_place);

        // Taken in a batch, from the next slot.
        driver.set_entry(1, &full_entry(status, opcode));
        driver.set_producer(2);
        let taken = take(&ring, 4);
        assert_eq!(taken, [in_place]);
        let wc = taken[0];
        assert_eq!(wc.wr_id, 0x0102_0304_0506_0708);
        assert_eq!((wc.status, wc.opcode), (status, opcode));
        assert_eq!((wc.vendor_err, wc.byte_len), (0x2122_2324, 0x3132_3334));
        assert_eq!((wc.ex, wc.qp_num), (0x4142_4344, 0x5152_5354));
        assert_eq!((wc.src_qp, wc.wc_flags), (0x6162_6364, 0x7172_7374));
        assert_eq!((wc.pkey_index, wc.slid), (0x8182, 0x9192));
        assert_eq!((wc.sl, wc.dlid_path_bits), (0xa1, 0xa2));
    }
}

#[test]
fn taking_from_an_empty_queue_takes_nothing() {
    for at in 0..SLOTS {
        let (driver, ring) = ring_at(at, at);
        assert_eq!(ring.capacity(), SLOTS - 1);
        assert!(take(&ring, 5).is_empty());
        assert_eq!(driver.consumer(), at);
    }
}

#[test]
fn taking_no_more_than_asked_for() {
    let (driver, ring) = ring();
    for wr_id in 0..7 {
        raise(&driver, wr_id);
    }
    assert!(take(&ring, 0).is_empty());
    assert_eq!(driver.consumer(), 0);
    assert_eq!(ids(&take(&ring, 3)), [0, 1, 2]);
    assert_eq!(driver.consumer(), 3);
    assert_eq!(ids(&take(&ring, 100)), [3, 4, 5, 6]);
    assert_eq!(driver.consumer(), 7);
}

#[test]
fn the_cursor_releases_exactly_what_was_read() {
    // From every position; `read` of `there` completions are looked at.
    for start in 0..SLOTS {
        for there in 1..SLOTS {
            for read in 1..=there {
                let (driver, ring) = ring_at(start, start);
                for wr_id in 0..there {
                    raise(&driver, wr_id.into());
                }
                let mut span = ring.available();
                assert_ne!(span.at, span.end);
                for wr_id in 0..read {
                    assert_eq!(ring.entry(&span).wr_id(), u64::from(wr_id));
                    if wr_id + 1 < read {
                        assert!(ring.step(&mut span));
                    }
                }
                assert_eq!(driver.consumer(), start, "not before it is released");
                ring.release(&span);
                assert_eq!(driver.consumer(), (start + read) % SLOTS);
            }
        }
    }
}

#[test]
fn cursor_ends_after_the_last_entry() {
    for start in 0..SLOTS {
        let (driver, ring) = ring_at(start, start);
        raise(&driver, 1);
        raise(&driver, 2);
        let mut span = ring.available();
        assert!(ring.step(&mut span));
        // However often there is none, the cursor stays on the last one.
        for _ in 0..3 {
            assert!(!ring.step(&mut span));
            assert_eq!(ring.entry(&span).wr_id(), 2);
        }
        ring.release(&span);
        assert_eq!(driver.consumer(), (start + 2) % SLOTS);
        let span = ring.available();
        assert_eq!(span.at, span.end);
        // The next one is neither lost nor an old one again.
        raise(&driver, 3);
        assert_eq!(ids(&take(&ring, 9)), [3]);
    }
}

#[test]
fn cursor_continues_with_new_entries() {
    let (driver, ring) = ring();
    raise(&driver, 1);
    let mut span = ring.available();
    assert!(!ring.step(&mut span));
    raise(&driver, 2);
    raise(&driver, 3);
    assert!(ring.step(&mut span));
    assert_eq!(ring.entry(&span).wr_id(), 2);
    assert!(ring.step(&mut span));
    assert_eq!(ring.entry(&span).wr_id(), 3);
    assert!(!ring.step(&mut span));
    ring.release(&span);
    assert_eq!(driver.consumer(), 3);
}

#[test]
fn step_within_the_span_reads_no_index() {
    for start in 0..SLOTS {
        let (driver, ring) = ring_at(start, start);
        raise(&driver, 1);
        raise(&driver, 2);
        let mut span = ring.available();
        raise(&driver, 3);
        assert!(ring.step_within(&mut span));
        assert!(!ring.step_within(&mut span));
        assert_eq!(ring.entry(&span).wr_id(), 2);
        assert!(ring.step(&mut span));
        assert_eq!(ring.entry(&span).wr_id(), 3);
        assert!(!ring.step(&mut span));
        ring.release(&span);
        assert_eq!(driver.consumer(), (start + 3) % SLOTS);
    }
}

#[test]
fn entries_too_small_for_a_completion_are_none() {
    let driver = Driver::new(5, SLOTS);
    // Whoever maps it asks for less than a completion has.
    let ring = WcRing::new(driver.ring(32));
    driver.set_producer(5);
    assert!(take(&ring, 9).is_empty());
    assert_eq!(ring.take(&mut [MaybeUninit::uninit()]), 0);
    assert_eq!((ring.capacity(), driver.consumer()), (0, 0));
}

#[test]
fn a_full_queue_is_read_to_the_end() {
    for start in 0..SLOTS {
        let (driver, ring) = ring_at(start, start);
        for wr_id in 0..SLOTS - 1 {
            raise(&driver, wr_id.into());
        }
        assert_eq!(ids(&take(&ring, 100)), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(driver.consumer(), driver.producer());
    }
}

#[test]
fn own_index_is_not_read_back() {
    let (driver, ring) = ring();
    raise(&driver, 1);
    raise(&driver, 2);
    assert_eq!(ids(&take(&ring, 1)), [1]);
    driver.set_consumer(0);
    assert_eq!(ids(&take(&ring, 9)), [2]);
    assert_eq!(driver.consumer(), 2);
}

#[test]
fn invalid_indices_stay_in_the_ring() {
    let absurd = [
        SLOTS,
        SLOTS + 1,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_fff9,
        u32::MAX,
    ];
    for producer in absurd {
        for consumer in absurd {
            let (driver, ring) = ring_at(producer, consumer);
            let there = producer.wrapping_sub(consumer) % SLOTS;
            let mut span = ring.available();
            let mut seen = u32::from(span.at != span.end);
            let base = ring.entry(&span).as_ptr().addr();
            while seen > 0 && ring.step(&mut span) {
                let at = ring.entry(&span).as_ptr().addr();
                assert!(at.abs_diff(base) < SLOTS as usize * 128);
                seen += 1;
                assert!(seen < SLOTS);
            }
            assert_eq!(seen, there);
            assert_eq!(take(&ring, 100).len(), there as usize);
            let released = driver.consumer();
            assert!(there == 0 || released == producer % SLOTS);
        }
    }
}

#[test]
fn arming_checks_the_queue_again() {
    let (driver, ring) = ring();
    let consumer = ring.consumer();
    assert_eq!(consumer.arm_and_check(|| Ok::<_, ()>(())), Ok(false));
    // It comes as the queue is armed: no event will tell of it.
    let late = consumer.arm_and_check(|| {
        raise(&driver, 1);
        Ok::<_, ()>(())
    });
    assert_eq!(late, Ok(true));
    assert_eq!(consumer.arm_and_check(|| Err(5)), Err(5));
}

/// What a reader may do.
#[derive(Clone, Debug)]
enum Act {
    Raise(u32),
    Take(usize),
    /// Take one by the short way.
    TakeOne,
    /// Read that many by the cursor, asking once more at the end.
    Cursor(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (1u32..8).prop_map(Act::Raise),
        (0usize..10).prop_map(Act::Take),
        Just(Act::TakeOne),
        (1usize..10).prop_map(Act::Cursor),
    ]
}

proptest! {
    #[test]
    fn completions_come_once_and_in_order(acts in prop::collection::vec(act(), 1..300)) {
        let (driver, ring) = ring();
        let mut model = std::collections::VecDeque::new();
        let mut next = 0;
        for act in acts {
            let got = match act {
                Act::Raise(count) => {
                    for _ in 0..count {
                        if model.len() < ring.capacity() as usize {
                            raise(&driver, next);
                            model.push_back(next);
                            next += 1;
                        }
                    }
                    continue;
                }
                Act::Take(most) => {
                    let got = ids(&take(&ring, most));
                    prop_assert_eq!(got.len(), most.min(model.len()));
                    got
                }
                Act::TakeOne => {
                    let mut out = MaybeUninit::uninit();
                    let got = ring.take(std::slice::from_mut(&mut out)) == 1;
                    prop_assert_eq!(got, !model.is_empty());
                    // SAFETY: written when it says so.
                    if got { vec![unsafe { out.assume_init() }.wr_id] } else { vec![] }
                }
                Act::Cursor(most) => {
                    let mut span = ring.available();
                    let mut got = Vec::new();
                    if span.at != span.end {
                        got.push(ring.entry(&span).wr_id());
                        while got.len() < most && ring.step(&mut span) {
                            got.push(ring.entry(&span).wr_id());
                        }
                        ring.release(&span);
                    }
                    prop_assert_eq!(got.len(), most.min(model.len()));
                    got
                }
            };
            for wr_id in got {
                prop_assert_eq!(Some(wr_id), model.pop_front());
            }
            let left = (driver.producer() + SLOTS - driver.consumer()) % SLOTS;
            prop_assert_eq!(left as usize, model.len());
        }
    }
}

/// The completions of one queue pair are taken out; the others stay in order,
/// wherever they lie in the ring.
#[test]
fn clean_removes_the_completions_of_one_queue_pair() {
    for start in 0..SLOTS {
        for pattern in 0u32..1 << 7 {
            let (driver, ring) = ring_at(start, start);
            let mut others = Vec::new();
            for n in 0..7u32 {
                let (at, other) = (driver.producer(), pattern >> n & 1);
                let mut entry = vec![0; wc::SIZE];
                layout::write(&mut entry, wc::WR_ID, n.into());
                layout::write(&mut entry, wc::QP_NUM, (17 + other).into());
                driver.set_entry(at, &entry);
                driver.set_producer((at + 1) % SLOTS);
                others.extend((other == 1).then_some(u64::from(n)));
            }
            ring.clean(17);
            assert_eq!(ids(&take(&ring, 8)), others, "{start} {pattern:b}");
            assert_eq!(driver.consumer(), driver.producer());
            raise(&driver, 9);
            ring.clean(17);
            assert_eq!(ids(&take(&ring, 8)), [9]);
        }
    }
}
