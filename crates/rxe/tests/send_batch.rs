//! Batches on the send queue: what the device sees when, room, wrap-around.

use device_testing::rxe::{Driver, UNWRITTEN, layout, layout::send::*};
use proptest::prelude::*;
use ringverbs_rxe::{Data, Opcode, PostError, RemoteMemory, SendFlags, SendQueue, SendWr, Sge};

const SLOTS: u32 = 8;

fn queue() -> (Driver, SendQueue) {
    let driver = Driver::new(9, SLOTS);
    let queue = SendQueue::new(driver.ring(SendQueue::ENTRY_SIZE), 2, 100);
    (driver, queue)
}

/// Adds a work request whose inline data, if any, is readable.
fn push(queue: &mut SendQueue, wr: &SendWr<'_, u32>) -> Result<(), PostError> {
    // SAFETY: inline data is readable.
    unsafe { queue.push(wr) }
}

/// Adds a send without data to the batch.
fn add(queue: &mut SendQueue, wr_id: u64) -> Result<(), PostError> {
    push(queue, &SendWr::new(wr_id, Opcode::SEND, SendFlags::empty()))
}

/// Adds a send of one element.
fn add_one(queue: &mut SendQueue, wr_id: u64) -> Result<(), PostError> {
    let list = [Sge::default()];
    push(
        queue,
        &SendWr {
            data: Data::Sges(&list),
            ..SendWr::new(wr_id, Opcode::SEND, SendFlags::empty())
        },
    )
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
    assert!(!publish(&mut queue), "an empty batch needs no doorbell");
    for wr_id in 0..3 {
        add(&mut queue, wr_id).unwrap();
        assert_eq!(driver.producer(), 0);
    }
    assert!(publish(&mut queue));
    assert_eq!(ids(&driver.consume()), [0, 1, 2]);
    assert!(!publish(&mut queue), "it was published");
    assert_eq!(driver.producer(), 3);
}

#[test]
fn a_refused_work_request_is_not_in_the_batch() {
    let (driver, mut queue) = queue();
    add(&mut queue, 1).unwrap();
    let list = [Sge::default(); 3];
    let too_many = SendWr {
        data: Data::Sges(&list),
        ..SendWr::new(2, Opcode::SEND, SendFlags::empty())
    };
    assert_eq!(push(&mut queue, &too_many), Err(PostError::TooManySges));
    add(&mut queue, 3).unwrap();
    assert!(publish(&mut queue));
    assert_eq!(ids(&driver.consume()), [1, 3]);
}

#[test]
fn an_aborted_batch_leaves_nothing() {
    let (driver, mut queue) = queue();
    for round in 0..3 * u64::from(SLOTS) {
        for wr_id in 0..SLOTS - 1 {
            add(&mut queue, 1000 + u64::from(wr_id)).unwrap();
        }
        assert_eq!(add(&mut queue, 0), Err(PostError::Full));
        queue.abort();
        // The next one has all the room again.
        assert!(!publish(&mut queue));
        add(&mut queue, round).unwrap();
        assert!(publish(&mut queue));
        assert_eq!(ids(&driver.consume()), [round]);
    }
}

#[test]
fn full_at_the_capacity_and_room_again_as_the_device_consumes() {
    let (driver, mut queue) = queue();
    assert_eq!(queue.capacity(), SLOTS - 1);
    // From every position of the ring.
    for start in 0..SLOTS {
        for wr_id in 0..SLOTS - 1 {
            add(&mut queue, wr_id.into()).unwrap();
        }
        assert_eq!(add(&mut queue, 99), Err(PostError::Full));
        assert!(publish(&mut queue));
        // Still so in the next batch, on both paths.
        assert_eq!(add_one(&mut queue, 99), Err(PostError::Full));
        assert_eq!(add(&mut queue, 99), Err(PostError::Full));
        assert_eq!(driver.producer(), (start + SLOTS - 1) % SLOTS);
        // The free slot is the one that stayed free.
        assert_eq!(driver.entry(start + SLOTS - 1), vec![UNWRITTEN; 512]);
        // One consumed, one may come.
        driver.set_consumer((start + 1) % SLOTS);
        add_one(&mut queue, 7).unwrap();
        assert_eq!(add(&mut queue, 99), Err(PostError::Full));
        assert!(publish(&mut queue));
        assert_eq!(ids(&driver.consume()), [1, 2, 3, 4, 5, 6, 7]);
        // Begin the next round one further on.
        assert_eq!(driver.producer(), start);
        add(&mut queue, 0).unwrap();
        assert!(publish(&mut queue));
        driver.consume();
    }
    assert_eq!(PostError::Full.errno(), libc::ENOMEM);
}

#[test]
fn invalid_device_indices_stay_in_the_ring() {
    for consumer in [SLOTS, SLOTS + 3, 0x8000_0000, u32::MAX] {
        let (driver, mut queue) = queue();
        driver.set_consumer(consumer);
        let mut added = 0;
        while add(&mut queue, 1).is_ok() {
            added += 1;
            // It claims to have consumed what was not produced yet: as far as
            // that, and no further.
            assert!(added < 2 * SLOTS);
        }
        assert!(publish(&mut queue));
        assert!(driver.producer() < SLOTS);
    }
}

#[test]
fn queue_continues_at_the_shared_indices() {
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
        assert_eq!(add_one(&mut queue, 1), Err(PostError::Full));
        assert_eq!(add(&mut queue, 1), Err(PostError::Full));
        assert!(!publish(&mut queue));
        assert!(driver.unwritten_except(&[]));
    }
}

/// A work request of one element, or one piece of inline data.
#[derive(Clone, Debug)]
struct Request {
    wr_id: u64,
    opcode: Opcode,
    flags: u32,
    imm_or_key: u32,
    remote: RemoteMemory,
    sge: Sge,
    inline: Option<Vec<u8>>,
}

impl Request {
    fn push(&self, queue: &mut SendQueue) -> Result<(), PostError> {
        let list = [self.sge];
        let wr = SendWr {
            imm_or_key: self.imm_or_key,
            remote: self.remote,
            data: match self.inline {
                Some(_) => Data::Inline(&list),
                None => Data::Sges(&list),
            },
            ..SendWr::new(
                self.wr_id,
                self.opcode,
                SendFlags::from_bits_retain(self.flags),
            )
        };
        push(queue, &wr)
    }

    /// Why it is refused, if it is.
    fn error(&self) -> Option<PostError> {
        match &self.inline {
            Some(bytes) => (bytes.len() > 100).then_some(PostError::InlineTooLong),
            None => (self.sge.length > 1 << 31).then_some(PostError::MessageTooLong),
        }
    }

    fn check(&self, entry: &[u8]) {
        let length = self.sge.length.into();
        let inline = self.inline.is_some();
        layout::check(
            "request",
            entry,
            &[
                (WR_ID, self.wr_id),
                (OPCODE, self.opcode.0.into()),
                (
                    SEND_FLAGS,
                    u64::from(self.flags & !8) | u64::from(inline) << 3,
                ),
                (EX, self.imm_or_key.into()),
                (STATUS, 0),
                (STATE, 0),
                (DMA_LENGTH, length),
                (DMA_RESID, length),
                (DMA_CUR_SGE, 0),
                (DMA_NUM_SGE, u64::from(!inline)),
                (DMA_SGE_OFFSET, 0),
            ],
        );
        // The driver reads no remote memory of a send.
        if ![Opcode::SEND, Opcode::SEND_WITH_IMM].contains(&self.opcode) {
            let (addr, rkey) = (self.remote.addr, self.remote.rkey.into());
            let remote = [(RDMA_REMOTE_ADDR, addr), (RDMA_RKEY, rkey), (IOVA, addr)];
            layout::check("request", entry, &remote);
        }
        let data = match &self.inline {
            Some(bytes) => bytes.clone(),
            None => layout::sges(&[self.sge]),
        };
        assert_eq!(entry[DATA..DATA + data.len()], data);
    }
}

fn request() -> impl Strategy<Value = Request> {
    let fields = (
        any::<u64>(),
        prop::sample::select(vec![0u32, 1, 2, 3, 4, 9]),
        0u32..16,
        any::<(u32, u64, u32)>(),
        any::<(u64, u32, u32)>(),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..=110)),
    );
    fields.prop_map(
        |(wr_id, opcode, flags, (imm_or_key, remote, rkey), (addr, length, lkey), inline)| {
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
                opcode: Opcode(opcode),
                flags,
                imm_or_key,
                remote: RemoteMemory { addr: remote, rkey },
                sge,
                inline,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_request_is_written_as_the_driver_reads_it(
        requests in prop::collection::vec((request(), any::<bool>()), 1..40),
    ) {
        let (driver, mut queue) = queue();
        let mut batch: Vec<Request> = Vec::new();
        for (request, publishes) in requests {
            let expected = match request.error() {
                // Room is looked for first.
                _ if batch.len() == SLOTS as usize - 1 => Err(PostError::Full),
                Some(error) => Err(error),
                None => Ok(()),
            };
            prop_assert_eq!(request.push(&mut queue), expected);
            if expected.is_ok() {
                batch.push(request);
            }
            if publishes || expected == Err(PostError::Full) {
                prop_assert_eq!(publish(&mut queue), !batch.is_empty());
                let entries = driver.consume();
                prop_assert_eq!(entries.len(), batch.len());
                for (entry, request) in entries.iter().zip(batch.drain(..)) {
                    request.check(entry);
                }
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
            let before = next;
            for _ in 0..size {
                // Of both paths.
                let added = match next % 3 {
                    0 => add(&mut queue, next),
                    _ => add_one(&mut queue, next),
                };
                if added.is_err() {
                    break;
                }
                next += 1;
            }
            prop_assert_eq!(publish(&mut queue), next != before);
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
