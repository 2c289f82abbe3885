//! Batches on the send queue: what the device sees when, room, wrap-around,
//! and that the quick and the general way write the same.

mod common;

use common::{Driver, STALE, layout, layout::send::*};
use proptest::prelude::*;
use ringverbs_rxe::{OneElement, Opcode, PostError, SendFlags, SendQueue, Sge};

const SLOTS: u32 = 8;

fn queue() -> (Driver, SendQueue) {
    let driver = Driver::new(9, SLOTS);
    let queue = SendQueue::new(driver.ring(SendQueue::ENTRY_SIZE), 2, 100);
    (driver, queue)
}

/// Adds a send without data to the batch.
fn add(queue: &mut SendQueue, wr_id: u64) -> Result<(), PostError> {
    queue
        .open(wr_id, Opcode::SEND, SendFlags::empty())?
        .no_data();
    queue.accept();
    Ok(())
}

fn publish(queue: &mut SendQueue) -> bool {
    // SAFETY: nobody reads the memory that entries name.
    unsafe { queue.publish() }
}

fn ids(entries: &[Vec<u8>]) -> Vec<u64> {
    entries
        .iter()
        .map(|entry| layout::read(entry, WR_ID))
        .collect()
}

#[test]
fn nothing_is_seen_before_it_is_published() {
    let (driver, mut queue) = queue();
    let queue = queue.begin().keep();
    assert!(!publish(queue), "an empty batch needs no doorbell");
    for wr_id in 0..3 {
        add(queue, wr_id).unwrap();
        assert_eq!(driver.producer(), 0);
    }
    assert!(publish(queue));
    assert_eq!(ids(&driver.consume()), [0, 1, 2]);
    assert!(!publish(queue), "it was published");
    assert_eq!(driver.producer(), 3);
}

#[test]
fn what_was_opened_but_not_accepted_is_not_in_the_batch() {
    let (driver, mut queue) = queue();
    let queue = queue.begin().keep();
    add(queue, 1).unwrap();
    let mut refused = queue.open(2, Opcode::SEND, SendFlags::empty()).unwrap();
    let list = [Sge::default(); 3];
    assert_eq!(refused.sge_list(&list), Err(PostError::TooManySges));
    add(queue, 3).unwrap();
    assert!(publish(queue));
    assert_eq!(ids(&driver.consume()), [1, 3]);
}

#[test]
fn an_aborted_batch_leaves_nothing() {
    let (driver, mut queue) = queue();
    for round in 0..3 * u64::from(SLOTS) {
        let batch = queue.begin().keep();
        for wr_id in 0..SLOTS - 1 {
            add(batch, 1000 + u64::from(wr_id)).unwrap();
        }
        assert_eq!(add(batch, 0), Err(PostError::Full));
        // Forgotten; the next one has all the room again.
        let batch = queue.begin().keep();
        assert!(!publish(batch));
        add(batch, round).unwrap();
        assert!(publish(batch));
        assert_eq!(ids(&driver.consume()), [round]);
    }
}

#[test]
fn full_at_the_capacity_and_room_again_as_the_device_consumes() {
    let (driver, mut queue) = queue();
    assert_eq!(queue.capacity(), SLOTS - 1);
    // From every position of the ring.
    for start in 0..SLOTS {
        let batch = queue.begin().keep();
        for wr_id in 0..SLOTS - 1 {
            add(batch, wr_id.into()).unwrap();
        }
        assert_eq!(add(batch, 99), Err(PostError::Full));
        assert!(publish(batch));
        // Still so in the next batch, in both ways.
        let mut writer = queue.begin();
        assert!(!writer.push_one(&Request::default()));
        let batch = writer.keep();
        assert_eq!(add(batch, 99), Err(PostError::Full));
        assert_eq!(driver.producer(), (start + SLOTS - 1) % SLOTS);
        // The free slot is the one that stayed free.
        assert_eq!(driver.entry(start + SLOTS - 1), vec![STALE; 512]);
        // One consumed, one may come.
        driver.set_consumer((start + 1) % SLOTS);
        add(batch, 7).unwrap();
        assert_eq!(add(batch, 99), Err(PostError::Full));
        assert!(publish(batch));
        assert_eq!(ids(&driver.consume()), [1, 2, 3, 4, 5, 6, 7]);
        // Begin the next round one further on.
        let batch = queue.begin().keep();
        assert_eq!(driver.producer(), start);
        add(batch, 0).unwrap();
        assert!(publish(batch));
        driver.consume();
    }
    assert_eq!(PostError::Full.errno(), libc::ENOMEM);
}

#[test]
fn the_last_entry_can_be_changed_until_the_batch_is_published() {
    let (driver, mut queue) = queue();
    // Across the end of the ring, too.
    for round in 0..2 * SLOTS {
        let batch = queue.begin().keep();
        assert!(batch.last().is_none());
        add(batch, 1).unwrap();
        add(batch, 2).unwrap();
        batch.last().unwrap().immediate_or_key(0x77 + round);
        assert!(publish(batch));
        assert!(batch.last().is_none());
        let entries = driver.consume();
        assert_eq!(ids(&entries), [1, 2]);
        assert_eq!(layout::read(&entries[1], EX), u64::from(0x77 + round));
        assert_eq!(layout::read(&entries[0], EX), 0xffff_ffff);
    }
}

#[test]
fn absurd_indices_of_the_device_lead_nowhere_else() {
    for consumer in [SLOTS, SLOTS + 3, 0x8000_0000, u32::MAX] {
        let (driver, mut queue) = queue();
        driver.set_consumer(consumer);
        let batch = queue.begin().keep();
        let mut added = 0;
        while add(batch, 1).is_ok() {
            added += 1;
            // It claims to have consumed what was not produced yet: as far as
            // that, and no further.
            assert!(added < 2 * SLOTS);
        }
        assert!(publish(batch));
        assert!(driver.producer() < SLOTS);
    }
}

#[test]
fn a_queue_takes_up_where_the_indices_stand() {
    let driver = Driver::new(9, SLOTS);
    driver.set_producer(6);
    driver.set_consumer(6);
    let mut queue = SendQueue::new(driver.ring(SendQueue::ENTRY_SIZE), 2, 100);
    for wr_id in 1..=4 {
        add(&mut queue, wr_id).unwrap();
    }
    assert!(publish(&mut queue));
    assert_eq!(driver.producer(), 2);
    assert_eq!(ids(&driver.consume()), [1, 2, 3, 4]);
}

#[test]
fn entries_too_small_for_a_work_request_are_none() {
    for log2_stride in [3, 7] {
        let driver = Driver::new(log2_stride, SLOTS);
        // Whoever maps it asks for less than a work request has.
        let mut queue = SendQueue::new(driver.ring(8), 2, 100);
        assert_eq!((queue.capacity(), queue.max_sge()), (0, 0));
        let mut writer = queue.begin();
        assert!(!writer.push_one(&Request::default()));
        // SAFETY: no bytes.
        assert!(!unsafe { writer.push_one_inline(&Request::default()) });
        let queue = writer.keep();
        assert_eq!(add(queue, 1), Err(PostError::Full));
        assert!(queue.last().is_none());
        assert!(!publish(queue));
        assert!(driver.untouched_but(&[]));
    }
}

/// A work request of one element.
#[derive(Clone, Debug)]
struct Request {
    wr_id: u64,
    opcode: u32,
    flags: u32,
    ex: u32,
    remote: u64,
    rkey: u32,
    sge: Sge,
    inline: Option<Vec<u8>>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            wr_id: 0,
            opcode: Opcode::SEND.0,
            flags: 0,
            ex: 0,
            remote: 0,
            rkey: 0,
            sge: Sge::default(),
            inline: None,
        }
    }
}

impl OneElement for Request {
    fn wr_id(&self) -> u64 {
        self.wr_id
    }
    fn opcode(&self) -> Opcode {
        Opcode(self.opcode)
    }
    fn flags(&self) -> SendFlags {
        SendFlags::from_bits_retain(self.flags)
    }
    fn immediate_or_key(&self) -> u32 {
        self.ex
    }
    fn remote_addr(&self) -> u64 {
        self.remote
    }
    fn rkey(&self) -> u32 {
        self.rkey
    }
    fn sge(&self) -> &Sge {
        &self.sge
    }
}

fn request() -> impl Strategy<Value = Request> {
    let fields = (
        any::<u64>(),
        prop::sample::select(vec![0u32, 1, 2, 3, 4, 9]),
        0u32..8,
        any::<(u32, u64, u32)>(),
        any::<(u64, u32, u32)>(),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..=110)),
    );
    fields.prop_map(
        |(wr_id, opcode, flags, (ex, remote, rkey), (addr, length, lkey), inline)| {
            let sge = match &inline {
                Some(bytes) => Sge {
                    addr: bytes.as_ptr().expose_provenance() as u64,
                    length: bytes.len() as u32,
                    lkey,
                },
                None => Sge { addr, length, lkey },
            };
            Request {
                wr_id,
                opcode,
                flags: flags | if inline.is_some() { 8 } else { 0 },
                ex,
                remote,
                rkey,
                sge,
                inline,
            }
        },
    )
}

/// The general way, as what it is the reference for.
fn general(queue: &mut SendQueue, request: &Request) -> Result<(), PostError> {
    let mut wqe = queue.open(request.wr_id, request.opcode(), request.flags())?;
    wqe.immediate_or_key(request.ex);
    // All but sends; one that invalidates has room for it.
    if ![Opcode::SEND, Opcode::SEND_WITH_IMM].contains(&request.opcode()) {
        wqe.rdma(request.remote, request.rkey);
    }
    match &request.inline {
        Some(bytes) => wqe.inline(bytes)?,
        None => wqe.sge_list(&[request.sge])?,
    };
    queue.accept();
    Ok(())
}

fn quick(queue: &mut SendQueue, requests: &[Request]) -> Result<(), PostError> {
    let mut writer = queue.begin();
    for request in requests {
        let taken = if request.inline.is_some() {
            // SAFETY: the element is the request's vector.
            unsafe { writer.push_one_inline(request) }
        } else {
            writer.push_one(request)
        };
        if !taken {
            let queue = writer.keep();
            general(queue, request)?;
            // Back to the quick way needs a new batch; what is in this one is
            // published first.
            publish(queue);
            writer = queue.begin();
        }
    }
    publish(writer.keep());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn both_ways_write_the_same(
        batches in prop::collection::vec(
            (prop::collection::vec(request(), 1..=10), 0..SLOTS), 1..12),
    ) {
        let (quick_driver, mut quick_queue) = queue();
        let (general_driver, mut general_queue) = queue();
        for (requests, consumed) in batches {
            let by_quick = quick(&mut quick_queue, &requests);
            let batch = general_queue.begin().keep();
            let by_general = requests.iter().try_for_each(|request| general(batch, request));
            prop_assert_eq!(by_quick, by_general);
            if by_general.is_err() {
                // What the quick way had published must be in the reference,
                // too: compare from a common state again.
                let difference = (quick_driver.producer() + SLOTS - general_driver.producer()) % SLOTS;
                let batch = general_queue.begin().keep();
                for request in &requests[..difference as usize] {
                    general(batch, request).unwrap();
                }
            }
            publish(&mut general_queue);
            prop_assert_eq!(quick_driver.producer(), general_driver.producer());
            let outstanding =
                (quick_driver.producer() + SLOTS - quick_driver.consumer()) % SLOTS;
            let mut at = quick_driver.consumer();
            while at != quick_driver.producer() {
                prop_assert_eq!(quick_driver.entry(at), general_driver.entry(at));
                at = (at + 1) % SLOTS;
            }
            // The device consumes some, not always all.
            let to = (quick_driver.consumer() + consumed.min(outstanding)) % SLOTS;
            for driver in [&quick_driver, &general_driver] {
                let mut at = driver.consumer();
                while at != to {
                    driver.set_entry(at, &[STALE; 512]);
                    at = (at + 1) % SLOTS;
                }
                driver.set_consumer(to);
            }
        }
    }

    #[test]
    fn every_request_arrives_once_and_in_order(
        sizes in prop::collection::vec((1u64..10, any::<bool>()), 1..200),
    ) {
        let (driver, mut queue) = queue();
        let (mut next, mut expected) = (0u64, 0u64);
        for (size, consume) in sizes {
            let mut writer = queue.begin();
            let before = next;
            for _ in 0..size {
                let request = Request { wr_id: next, ..Request::default() };
                if !writer.push_one(&request) {
                    break;
                }
                next += 1;
            }
            let batch = writer.keep();
            if next - before < size && add(batch, next).is_ok() {
                next += 1;
            }
            prop_assert_eq!(publish(batch), next != before);
            prop_assert!(next - expected < u64::from(SLOTS));
            if consume {
                for id in ids(&driver.consume()) {
                    prop_assert_eq!(id, expected);
                    expected += 1;
                }
                prop_assert_eq!(expected, next);
            }
        }
    }
}
