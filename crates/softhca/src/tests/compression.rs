//! Compressed CQEs, read as a driver reads them: by the layouts of Linux's `device.h`
//! (`mlx5_cqe64`, `mlx5_mini_cqe8`) and in the order in which `mlx5e` expands them.

use std::collections::VecDeque;

use proptest::prelude::*;

use crate::command::opcode as op;
use crate::engine::cq::{Completion, CqeError, opcode};
use crate::testing::driver::{Cq, Driver, Input, SIGNALED, remote, segment, word};

const HASH: u32 = 0;
const CHECKSUM: u32 = 1;

/// A queue with compression, and the expanded CQEs that were not returned yet.
struct Reader {
    cq: Cq,
    format: u32,
    expanded: VecDeque<Vec<u8>>,
    sessions: Vec<u32>,
}

impl Reader {
    fn new(driver: &mut Driver, log_size: u32, wide: bool, format: u32) -> Reader {
        let cq = driver.create_cq_with(log_size, wide, |input| {
            input.or(0x10, 14, 1).or(0x10, 12, format)
        });
        Reader {
            cq,
            format,
            expanded: VecDeque::new(),
            sessions: Vec::new(),
        }
    }

    /// Returns the next CQE, expanded from its session.
    fn poll(&mut self, driver: &Driver) -> Option<Vec<u8>> {
        if self.expanded.is_empty() {
            self.read_session(driver);
        }
        self.expanded.pop_front()
    }

    fn read_session(&mut self, driver: &Driver) {
        let cq = &mut self.cq;
        let first = cq.index;
        let entry = driver.read(cq.entry(first), 64);
        if entry[63] >> 4 == 15 || entry[63] & 1 != cq.owner(first) {
            return;
        }
        let mut count = 1;
        if entry[63] >> 2 & 3 == 3 {
            count = word(&entry, 44);
            self.sessions.push(count);
            let size = 1 << cq.log_size;
            assert!(
                first % size + count <= size,
                "a session past the ring's end"
            );
            let mut array = driver.read(cq.entry(first + 1), 64);
            for n in 0..count {
                if n != 0 && n % 8 == 0 {
                    array = driver.read(cq.entry(first + n), 64);
                }
                let mini = &array[n as usize % 8 * 8..][..8];
                let mut cqe = entry.clone();
                cqe[63] = entry[63] & 0xf2 | cq.owner(first + n);
                cqe[44..48].copy_from_slice(&mini[4..]);
                if entry[63] >> 4 == opcode::REQUESTER {
                    cqe[60..62].copy_from_slice(&mini[..2]);
                    cqe[56] = mini[2];
                } else {
                    let counter = (word(&entry, 60) >> 16) as u16;
                    let counter = counter.wrapping_add(n as u16);
                    cqe[60..62].copy_from_slice(&counter.to_be_bytes());
                    match self.format {
                        HASH => cqe[12..16].copy_from_slice(&mini[..4]),
                        _ => cqe[20..22].copy_from_slice(&mini[..2]),
                    }
                }
                self.expanded.push_back(cqe);
            }
        } else {
            self.expanded.push_back(entry);
        }
        // All entries are software's now, until the device comes round.
        for index in first..first + count {
            driver.write(cq.entry(index) + 63, &[0xf0 | cq.owner(index)]);
        }
        cq.index += count;
        driver.write(cq.doorbell, &(cq.index & 0xff_ffff).to_be_bytes());
    }
}

/// Rings the doorbell once for several WQEs.
fn ring(driver: &mut Driver, entries: &[Vec<u8>]) {
    driver.ring(entries.last().unwrap());
}

#[test]
fn a_session_has_a_title_and_an_array_of_mini_cqes() {
    let mut driver = Driver::new("ib");
    let mut reader = Reader::new(&mut driver, 4, false, HASH);
    let (mut a, _b) = driver.pair_on(&reader.cq);
    let (key, local, remote_va) = (driver.key, driver.pages(1), driver.pages(1));
    let entries: Vec<_> = [0x105, 0x106, 0x107]
        .map(|length| {
            let mut segments = remote(remote_va, key);
            segments.extend(segment(length, key, local));
            driver.write_wqe(&mut a, 0x10, SIGNALED, &segments)
        })
        .into();
    ring(&mut driver, &entries);
    let title = driver.read(reader.cq.entry(0), 64);
    assert_eq!(
        title[63], 0x0c,
        "a requester's, compressed, of the first round"
    );
    assert_eq!(title[44..48], [0, 0, 0, 3], "how many");
    assert_eq!(title[56..62], {
        let [_, x, y, z] = a.number.to_be_bytes();
        [0x10, x, y, z, 0, 0]
    });
    assert_eq!(title[32..36], [0, 0, 0, 7], "the user index");
    let array = driver.read(reader.cq.entry(1), 64);
    let expected = [
        [0, 0, 0x10, 0, 0, 0, 1, 5],
        [0, 1, 0x10, 0, 0, 0, 1, 6],
        [0, 2, 0x10, 0, 0, 0, 1, 7],
    ];
    assert_eq!(array[..24], *expected.as_flattened());
    assert_eq!(array[24..], [0; 40]);
    // The third entry belongs to the session, and is not written.
    assert_eq!(driver.read(reader.cq.entry(2) + 63, 1), [0xf1]);
    assert_eq!(driver.hca.stats().cqes, 3);
    for n in 0..3 {
        let entry = reader.poll(&driver).unwrap();
        assert_eq!((word(&entry, 60) >> 16, word(&entry, 44)), (n, 0x105 + n));
    }
    assert!(reader.poll(&driver).is_none());
}

#[test]
fn receives_count_up_from_the_title() {
    for wide in [false, true] {
        let mut driver = Driver::new("ib");
        let mut reader = Reader::new(&mut driver, 5, wide, CHECKSUM);
        let (mut a, mut b) = driver.pair_on(&reader.cq);
        let (key, from, to) = (driver.key, driver.pages(1), driver.pages(1));
        // Three rounds, so that a session ends at the end of the queue.
        for round in 0..3 {
            let entries: Vec<_> = (0..12)
                .map(|n| {
                    driver.post_recv(&mut b, &segment(64, key, to));
                    driver.write_wqe(&mut a, 0x0a, 0, &segment(n + 1, key, from))
                })
                .collect();
            ring(&mut driver, &entries);
            for n in 0..12 {
                let entry = reader.poll(&driver).unwrap();
                assert_eq!(entry[63] >> 4, opcode::SEND);
                assert_eq!(word(&entry, 60) >> 16, round * 12 + n, "{wide}");
                assert_eq!(word(&entry, 44), n + 1, "{wide} {round}");
                assert_eq!(word(&entry, 56), b.number);
            }
            assert!(reader.poll(&driver).is_none());
        }
        assert_eq!(reader.sessions, [12, 12, 8, 4]);
        assert_eq!(driver.hca.stats().cqes_compressed, 36);
    }
}

#[test]
fn an_armed_queue_reports_a_session_once_it_is_written() {
    let mut driver = Driver::new("ib");
    let mut reader = Reader::new(&mut driver, 4, false, HASH);
    let (mut a, _b) = driver.pair_on(&reader.cq);
    let uar = u64::from(driver.uar) * 4096;
    let mut bytes = 0_u32.to_be_bytes().to_vec();
    bytes.extend(reader.cq.number.to_be_bytes());
    driver.hca.write(uar + 0x20, &bytes);
    let entries: Vec<_> = (0..5)
        .map(|_| driver.write_wqe(&mut a, 0x00, SIGNALED, &[]))
        .collect();
    ring(&mut driver, &entries);
    assert_eq!(driver.hca.stats().eqes, 1);
    assert_eq!((0..9).map_while(|_| reader.poll(&driver)).count(), 5);
    assert_eq!(reader.sessions, [5]);
}

#[test]
fn a_session_does_not_pass_the_consumer_index() {
    let mut driver = Driver::new("ib");
    let mut reader = Reader::new(&mut driver, 3, false, HASH);
    let (mut a, _b) = driver.pair_on(&reader.cq);
    for count in [3, 6] {
        let entries: Vec<_> = (0..count)
            .map(|_| driver.write_wqe(&mut a, 0x00, SIGNALED, &[]))
            .collect();
        ring(&mut driver, &entries);
    }
    let query = Input::new(op::QUERY_CQ, 16).or(8, 0, reader.cq.number);
    let output = driver.execute(&query, 0x110);
    assert_eq!(word(&output, 0x10) >> 28, 0xa, "the ninth does not fit");
    assert_eq!(word(&output, 0x10) >> 12 & 7, 0b100, "how it compresses");
    assert_eq!((0..9).map_while(|_| reader.poll(&driver)).count(), 8);
    assert_eq!(reader.sessions, [3, 5]);
}

#[test]
fn unsupported_compression_formats_are_rejected() {
    let mut driver = Driver::new("ib");
    for (word, shift, value) in [(0x10, 12, 2), (0x10, 12, 3), (0x10, 0, 1)] {
        let page = driver.pages(2);
        let (uar, eqn) = (driver.uar, driver.eqn);
        let create = Input::new(op::CREATE_CQ, 0x118)
            .or(0x10, 14, 1)
            .or(word, shift, value)
            .or(0x1c, 24, 4)
            .or(0x1c, 0, uar)
            .or(0x24, 0, eqn)
            .put64(0x48, page + 4096)
            .put64(0x110, page);
        assert_eq!(driver.command(&create, 16).0, 3, "{value} << {shift}");
    }
}

/// A completion like those of a queue pair. Most fields rarely differ, so that sessions
/// form.
#[derive(Debug, Clone)]
struct Sample {
    completion: Completion<'static>,
    /// Number of polls after this completion.
    polls: u32,
    /// The device has nothing more to do after this completion.
    pause: bool,
}

fn sample() -> impl Strategy<Value = Sample> {
    let rare = |most: u32| prop_oneof![30 => Just(0), 1 => 0..most];
    (
        (
            prop_oneof![20 => Just(2_u8), 20 => Just(0), 1 => 0..15_u8],
            rare(2),
        ),
        (0..3_u16, rare(4), any::<u16>(), any::<u32>()),
        (
            rare(3),
            rare(3),
            prop_oneof![9 => Just(false), 1 => Just(true)],
        ),
        (rare(40), prop_oneof![12 => Just(false), 1 => Just(true)]),
    )
        .prop_map(
            |(
                (kind, scattered),
                (skip, request, sum, bytes),
                (imm, uidx, solicited),
                (polls, pause),
            )| {
                let error = (kind >= 13).then_some(CqeError::new(4, 0x52, 0x93));
                let data: &[u8] = if scattered == 1 && kind < 5 {
                    &[0xee; 20]
                } else {
                    &[]
                };
                Sample {
                    completion: Completion {
                        // Only opcodes that exist.
                        opcode: match kind {
                            5..=12 => opcode::SEND,
                            kind => kind,
                        },
                        qpn: 0x123,
                        request: request as u8,
                        uidx: 7 + uidx,
                        // An increment; the counter is computed below.
                        wqe_counter: u16::from(skip == 2),
                        byte_count: bytes,
                        immediate: imm,
                        solicited,
                        checksum: if skip == 0 { 0 } else { sum },
                        error,
                        data,
                        ..Completion::default()
                    },
                    polls,
                    pause,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The CQEs read from a queue with compression are the completions written to it.
    #[test]
    fn compressed_cqes_expand_to_the_completions(
        samples in prop::collection::vec(sample(), 1..400),
        wide in any::<bool>(),
        format in 0..2_u32,
        log_size in 4..7_u32,
    ) {
        let mut driver = Driver::new("ib");
        let log_size = log_size.min(if wide { 5 } else { 6 });
        let mut reader = Reader::new(&mut driver, log_size, wide, format);
        let cqn = reader.cq.number;
        let mut expected = VecDeque::new();
        let mut counter = 0xfff0_u16;
        let mut unread = 0;
        for Sample { mut completion, polls, pause } in samples {
            counter = counter.wrapping_add(1 + completion.wqe_counter);
            completion.wqe_counter = counter;
            if completion.opcode == opcode::REQUESTER || completion.error.is_some() {
                completion.checksum = 0;
            }
            driver.hca.core.complete(cqn, &completion);
            expected.push_back(completion);
            unread += 1;
            let full = unread == 1 << log_size;
            if pause || full || polls > 0 {
                driver.hca.core.write_sessions();
            }
            let polls = if full { unread } else { polls };
            for _ in 0..polls {
                let Some(entry) = reader.poll(&driver) else { break };
                check(&expected.pop_front().unwrap(), &entry)?;
            }
            unread = (expected.len() - reader.expanded.len()) as u32;
        }
        driver.hca.core.write_sessions();
        while let Some(completion) = expected.pop_front() {
            let entry = reader.poll(&driver);
            prop_assert!(entry.is_some(), "{completion:?} is missing");
            check(&completion, &entry.unwrap())?;
        }
        prop_assert!(reader.poll(&driver).is_none());
        prop_assert!(reader.sessions.iter().all(|n| (2..=64).contains(n)));
    }
}

fn check(completion: &Completion<'_>, entry: &[u8]) -> Result<(), TestCaseError> {
    prop_assert_eq!(entry[63] >> 4, completion.opcode);
    prop_assert_eq!(entry[63] >> 1 & 1, u8::from(completion.solicited));
    prop_assert_eq!(entry[63] >> 2 & 3, u8::from(!completion.data.is_empty()));
    let qpn = u32::from(completion.request) << 24 | completion.qpn;
    prop_assert_eq!(word(entry, 56), qpn);
    prop_assert_eq!(word(entry, 60) >> 16, u32::from(completion.wqe_counter));
    prop_assert_eq!(word(entry, 44), completion.byte_count);
    prop_assert_eq!(word(entry, 36), completion.immediate);
    prop_assert_eq!(word(entry, 32), completion.uidx);
    match completion.error {
        Some(error) => {
            let written = CqeError::new(entry[55], entry[54], entry[52]);
            prop_assert_eq!(written, error);
        }
        None => {
            prop_assert_eq!(word(entry, 20) >> 16, u32::from(completion.checksum));
            prop_assert_eq!(word(entry, 12) != 0, !completion.data.is_empty());
        }
    }
    prop_assert_eq!(&entry[..completion.data.len()], completion.data);
    Ok(())
}
