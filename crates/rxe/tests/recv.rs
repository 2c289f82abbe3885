//! The receive queue: what is written, limits, batches.

use device_testing::rxe::{Driver, UNWRITTEN, layout, layout::recv::*};
use proptest::prelude::*;
use ringverbs_rxe::{MAX_MESSAGE, PostError, RecvQueue, Sge};

const SLOTS: u32 = 8;
const MAX_SGE: u32 = 5;
const STRIDE: usize = 128;

fn queue() -> (Driver, RecvQueue) {
    let driver = Driver::new(7, SLOTS);
    let queue = RecvQueue::new(driver.ring(RecvQueue::ENTRY_SIZE), MAX_SGE);
    (driver, queue)
}

fn element(length: u32) -> Sge {
    Sge {
        addr: 0x4142_4344_4546_0000 + u64::from(length),
        length,
        lkey: 0x0055_aa00 + length % 0x100,
    }
}

fn publish(queue: &mut RecvQueue) {
    // SAFETY: nobody writes to the memory that entries name.
    unsafe { queue.publish() };
}

#[track_caller]
fn check(entry: &[u8], wr_id: u64, list: &[Sge]) {
    let length = list.iter().map(|sge| u64::from(sge.length)).sum();
    layout::check(
        "receive",
        entry,
        &[
            (WR_ID, wr_id),
            (DMA_LENGTH, length),
            (DMA_RESID, length),
            (DMA_CUR_SGE, 0),
            (DMA_NUM_SGE, list.len() as u64),
            (DMA_SGE_OFFSET, 0),
        ],
    );
    let mut data = layout::sges(list);
    data.resize(STRIDE - DATA, UNWRITTEN);
    assert_eq!(entry[DATA..], data);
}

fn ids(entries: &[Vec<u8>]) -> Vec<u64> {
    entries
        .iter()
        .map(|entry| layout::read(entry, WR_ID))
        .collect()
}

#[test]
fn lists_of_every_length() {
    let (driver, mut queue) = queue();
    assert_eq!((queue.capacity(), queue.max_sge()), (SLOTS - 1, MAX_SGE));
    for count in 0..=MAX_SGE {
        let list: Vec<Sge> = (0..count).map(element).collect();
        queue
            .push(0x0102_0304_0506_0700 + u64::from(count), &list)
            .unwrap();
        assert_eq!(driver.producer(), 0);
    }
    publish(&mut queue);
    assert_eq!(driver.producer(), MAX_SGE + 1);
    for count in 0..=MAX_SGE {
        let list: Vec<Sge> = (0..count).map(element).collect();
        let wr_id = 0x0102_0304_0506_0700 + u64::from(count);
        check(&driver.entry(count), wr_id, &list);
    }
    assert!(driver.unwritten_except(&[0, 1, 2, 3, 4, 5]));
}

#[test]
fn receives_of_one_element() {
    let (driver, mut queue) = queue();
    for (wr_id, length) in [
        (1, 0x0051_5253),
        (2, 0),
        (3, MAX_MESSAGE - 1),
        (4, MAX_MESSAGE),
    ] {
        queue.push(wr_id, &[element(length)]).unwrap();
    }
    for length in [MAX_MESSAGE + 1, u32::MAX] {
        let pushed = queue.push(9, &[element(length)]);
        assert_eq!(pushed, Err(PostError::MessageTooLong));
    }
    assert_eq!(driver.producer(), 0);
    publish(&mut queue);
    assert_eq!(driver.producer(), 4);
    check(&driver.entry(0), 1, &[element(0x0051_5253)]);
    check(&driver.entry(1), 2, &[element(0)]);
    check(&driver.entry(2), 3, &[element(MAX_MESSAGE - 1)]);
    check(&driver.entry(3), 4, &[element(MAX_MESSAGE)]);
}

#[test]
fn limits() {
    let (driver, mut queue) = queue();
    let refused = [
        (
            vec![element(1); MAX_SGE as usize + 1],
            PostError::TooManySges,
        ),
        (vec![element(MAX_MESSAGE + 1)], PostError::MessageTooLong),
        (
            vec![element(u32::MAX), element(1)],
            PostError::MessageTooLong,
        ),
        (
            vec![element(MAX_MESSAGE), element(1)],
            PostError::MessageTooLong,
        ),
    ];
    for (list, error) in refused {
        assert_eq!(queue.push(1, &list), Err(error));
    }
    let longest = [element(MAX_MESSAGE - 1), element(1)];
    queue.push(2, &longest).unwrap();
    queue.push(3, &[element(MAX_MESSAGE)]).unwrap();
    publish(&mut queue);
    assert_eq!(ids(&driver.consume()), [2, 3]);
}

#[test]
fn the_limit_of_elements_is_cut_to_the_entry() {
    // 128 bytes, 40 of them fixed: 88 bytes, or 5 elements and a half.
    let driver = Driver::new(7, SLOTS);
    let mut queue = RecvQueue::new(driver.ring(RecvQueue::ENTRY_SIZE), u32::MAX);
    assert_eq!(queue.max_sge(), 5);
    assert_eq!(queue.push(1, &[element(1); 6]), Err(PostError::TooManySges));
    assert!(driver.unwritten_except(&[]));
}

#[test]
fn full_at_the_capacity_and_room_again_as_the_device_consumes() {
    let (driver, mut queue) = queue();
    for start in 0..2 * SLOTS {
        let start = start % SLOTS;
        for wr_id in 0..SLOTS - 1 {
            queue.push(wr_id.into(), &[element(1)]).unwrap();
        }
        for list in [&[][..], &[element(1)]] {
            assert_eq!(queue.push(99, list), Err(PostError::Full));
        }
        publish(&mut queue);
        for list in [&[][..], &[element(1)]] {
            assert_eq!(queue.push(99, list), Err(PostError::Full));
        }
        assert_eq!(driver.entry(start + SLOTS - 1), vec![UNWRITTEN; STRIDE]);
        driver.set_consumer((start + 1) % SLOTS);
        queue.push(7, &[element(1)]).unwrap();
        assert_eq!(queue.push(99, &[]), Err(PostError::Full));
        publish(&mut queue);
        assert_eq!(ids(&driver.consume()), [1, 2, 3, 4, 5, 6, 7]);
        queue.push(0, &[element(1)]).unwrap();
        publish(&mut queue);
        driver.consume();
    }
}

#[test]
fn entries_too_small_for_a_receive_are_none() {
    for log2_stride in [3, 5] {
        let driver = Driver::new(log2_stride, SLOTS);
        // Whoever maps it asks for less than a receive has.
        let mut queue = RecvQueue::new(driver.ring(8), MAX_SGE);
        assert_eq!((queue.capacity(), queue.max_sge()), (0, 0));
        for list in [&[][..], &[element(1)]] {
            assert_eq!(queue.push(1, list), Err(PostError::Full));
        }
        assert!(driver.unwritten_except(&[]));
    }
}

#[test]
fn an_aborted_batch_leaves_nothing() {
    let (driver, mut queue) = queue();
    queue.push(1, &[element(1)]).unwrap();
    queue.push(2, &[]).unwrap();
    queue.abort();
    assert_eq!(driver.producer(), 0);
    queue.push(3, &[element(1)]).unwrap();
    publish(&mut queue);
    assert_eq!(ids(&driver.consume()), [3]);
}

#[test]
fn invalid_device_indices_stay_in_the_ring() {
    for consumer in [SLOTS, SLOTS + 3, 0x8000_0000, u32::MAX] {
        let (driver, mut queue) = queue();
        driver.set_consumer(consumer);
        let mut added = 0;
        while queue.push(1, &[element(1)]).is_ok() {
            added += 1;
            // It claims to have consumed what was not produced yet: as far as
            // that, and no further.
            assert!(added < 2 * SLOTS);
        }
        publish(&mut queue);
        assert!(driver.producer() < SLOTS);
    }
}

proptest! {
    #[test]
    fn receives_arrive_as_they_were_posted_over_many_rounds(
        batches in prop::collection::vec(
            prop::collection::vec(any::<(u64, u64, u32, u32)>(), 1..8), 1..40),
    ) {
        let (driver, mut queue) = queue();
        for receives in batches {
            let mut posted = Vec::new();
            for (wr_id, addr, length, lkey) in receives {
                let sge = Sge { addr, length: length % MAX_MESSAGE, lkey };
                prop_assert!(queue.push(wr_id, &[sge]).is_ok());
                posted.push((wr_id, sge));
            }
            publish(&mut queue);
            let entries = driver.consume();
            prop_assert_eq!(entries.len(), posted.len());
            for (entry, (wr_id, sge)) in entries.iter().zip(posted) {
                check(entry, wr_id, &[sge]);
            }
        }
    }
}
