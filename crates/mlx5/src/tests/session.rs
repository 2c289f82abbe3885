//! CQEs of 128 bytes, and compressed CQEs. The encoder is written here; the vectors
//! are counted by hand.

use std::collections::VecDeque;

use proptest::prelude::*;
use uverbs::Sge;

use super::objects::{FakeDevice, VALID_ANSWER};
use super::*;
use crate::cq_ring::CqeFormat;
use crate::{
    CompletionError, CompletionQueue, CqOptions, CursorEntry, MiniFormat, Opcode, Role, SendFlags,
    WorkCompletion,
};

const RC: Service = Service::ReliableConnection;

fn format(wide: bool) -> CqeFormat {
    CqeFormat {
        shift: if wide { 7 } else { 6 },
        compresses: true,
    }
}

fn one(ring: &mut CqeRing) -> Result<WorkCompletion, CompletionError> {
    // SAFETY: what was posted names memory that lives.
    let read = unsafe { read(ring) }.unwrap();
    ring.publish();
    read
}

/// Posts a send, or a write; its slot.
fn post(pair: &mut TestQp, wr_id: u64, opcode: Opcode) -> u16 {
    let slot = pair.record(1) as u16;
    pair.send.begin();
    let wr = request(wr_id, opcode, SendFlags::SIGNALED, &[]);
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no data.
    unsafe { pair.send.publish() };
    slot
}

fn receive(pair: &mut TestQp, wr_id: u64, list: &[Sge]) -> u16 {
    let slot = pair.record(0) as u16;
    pair.recv.begin();
    pair.recv.push(wr_id, list).unwrap();
    // SAFETY: the test heeds the list.
    unsafe { pair.recv.publish() };
    slot
}

impl Device {
    /// Tells completions of one kind together: the first, how many, and for each
    /// the eight bytes.
    fn tell(&mut self, first: &TestCqe, minis: &[[u8; 8]]) {
        for (n, eight) in minis.chunks(8).enumerate() {
            let mut array = [0xee; 64];
            for (place, mini) in array.chunks_exact_mut(8).zip(eight) {
                place.copy_from_slice(mini);
            }
            let place = if n == 0 { 1 } else { 8 * n as u32 };
            self.put(self.written + place, array);
        }
        let mut title = first.bytes();
        title[44..48].copy_from_slice(&(minis.len() as u32).to_be_bytes());
        title[63] |= 0xc;
        self.write(title);
        self.written += minis.len() as u32 - 1;
    }
}

/// What stands in an array may look like an entry that tells of a message, even of
/// one that is outstanding: to a cursor it is none while the session lasts.
#[test]
fn cursor_does_not_read_mini_cqes_as_an_entry() {
    let mut ring = CqeRing::new(4, format(false), None).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, RC, &cap(8, 1, 0));
    ring.attach(&pair.queues, Role::RECEIVE).unwrap();
    for wr_id in 0..8 {
        receive(&mut pair, wr_id, &[]);
    }
    let first = TestCqe {
        opcode: 2,
        user_index: 70,
        ..TestCqe::default()
    };
    device.write_cqe(&first);
    let mut entry = CursorEntry::default();
    // SAFETY: no work request names memory.
    assert_eq!(unsafe { ring.next(&mut entry) }, Ok(true));
    receive(&mut pair, 8, &[]);
    // Hashes that are the queue pair's number; 32 bytes, whose first two are the slot
    // of that receive, and the last is the kind.
    let minis = [[0, 0, 0, 70, 0, 0, 0, 2 << 4]; 8];
    device.tell(&TestCqe { slot: 1, ..first }, &minis);
    for wr_id in 1..9 {
        // SAFETY: as above.
        unsafe {
            assert_eq!(ring.next(&mut entry), Ok(true));
            assert_eq!((entry.wr_id(), entry.status()), (wr_id, 0));
            assert_eq!(entry.byte_len(), 32);
        }
        // Outstanding in the same slot again.
        assert_eq!(u64::from(receive(&mut pair, wr_id + 8, &[])) % 8, wr_id % 8);
    }
    // SAFETY: as above.
    assert_eq!(unsafe { ring.next(&mut entry) }, Ok(false));
}

#[test]
fn a_session_of_messages() {
    for wide in [false, true] {
        let mut ring = CqeRing::new(4, format(wide), None).unwrap();
        let mut device = Device::of(&ring);
        let mut pair = TestQp::new(70, RC, &cap(16, 1, 0));
        ring.attach(&pair.queues, Role::RECEIVE).unwrap();
        for wr_id in 0..10 {
            receive(&mut pair, wr_id, &[]);
        }
        // Ten with solicited data of one to ten bytes and a hash.
        let minis: Vec<_> = (1..=10u8).map(|n| [1, 2, 3, 4, 0, 0, 0, n]).collect();
        let first = TestCqe {
            opcode: 2,
            user_index: 70,
            slot: 0,
            flags_rqpn: 0x99,
            time: 0x1234,
            ..TestCqe::default()
        };
        device.tell(&first, &minis);
        for n in 0..10 {
            assert!(!ring.is_empty());
            // SAFETY: no work request names memory.
            let timed = unsafe { read_timed(&mut ring) }.unwrap().unwrap();
            ring.publish();
            let wc = timed.completion;
            assert_eq!((wc.wr_id, wc.byte_len), (n, n as u32 + 1));
            assert_eq!((wc.opcode, wc.src_qp, wc.qp_num), (128, 0x99, QPN));
            assert_eq!((timed.time, device.consumed()), (0x1234, n as u32 + 1));
        }
        assert!(ring.is_empty());
    }
}

#[test]
fn a_session_of_work_requests() {
    let mut ring = CqeRing::new(3, format(false), None).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, RC, &cap(16, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    post(&mut pair, 1, Opcode::SEND);
    post(&mut pair, 2, Opcode::RDMA_WRITE);
    post(&mut pair, 3, Opcode::SEND);
    post(&mut pair, 4, Opcode::RDMA_READ);
    // Of four, three have completions, and not in even steps.
    let minis = [
        [0, 0, 0x0a, 0, 0, 0, 0, 0],
        [0, 1, 0x08, 0, 0, 0, 0, 0],
        [0, 3, 0x10, 0, 0, 0, 1, 0],
    ];
    let first = TestCqe {
        user_index: 70,
        request: 0x0a,
        ..TestCqe::default()
    };
    device.tell(&first, &minis);
    let read = [0; 3].map(|_| one(&mut ring).unwrap());
    let read = read.map(|wc| (wc.wr_id, wc.opcode, wc.byte_len, wc.qp_num));
    let expected = [(1, 0, 0, QPN), (2, 1, 0, QPN), (4, 2, 256, QPN)];
    assert_eq!(read, expected);
    assert!(ring.is_empty());
}

#[test]
fn malformed_session_is_one_entry() {
    let mut ring = CqeRing::new(3, format(false), None).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, RC, &cap(16, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    for (count, opcode) in [(0, 0), (1, 0), (9, 0), (u32::MAX, 2), (2, 13), (2, 9)] {
        let mut title = TestCqe {
            opcode,
            user_index: 70,
            ..TestCqe::default()
        }
        .bytes();
        title[44..48].copy_from_slice(&count.to_be_bytes());
        title[63] |= 0xc;
        device.write(title);
        assert_eq!(one(&mut ring), Err(CompletionError::BadSession { count }));
        assert!(ring.is_empty());
    }
    // Where the queue was made without, the bits say that there is data.
    let mut ring = CqeRing::plain(3).unwrap();
    ring.attach(&pair.queues, Role::SEND).unwrap();
    let slot = post(&mut pair, 1, Opcode::RDMA_READ);
    let mut device = Device::of(&ring);
    device.write_cqe(&TestCqe {
        user_index: 70,
        slot,
        request: 0x10,
        byte_count: 2,
        scatter: 0xc,
        ..TestCqe::default()
    });
    assert_eq!(one(&mut ring).unwrap().status, 1);
}

#[test]
fn error_in_a_session_is_reported_by_the_next_call() {
    let mut ring = CqeRing::new(4, format(false), None).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, RC, &cap(16, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    let mut minis = Vec::new();
    for n in 0..9 {
        minis.push([
            0,
            post(&mut pair, n, Opcode::SEND) as u8,
            0x0a,
            0,
            0,
            0,
            0,
            0,
        ]);
    }
    // The middle one, and the last one, which has an array of its own.
    minis[4][2] = 0x3f;
    minis[8][2] = 0x3f;
    let first = TestCqe {
        user_index: 70,
        request: 0x0a,
        ..TestCqe::default()
    };
    device.tell(&first, &minis);
    device.write_cqe(&TestCqe {
        slot: post(&mut pair, 9, Opcode::SEND),
        ..first
    });
    let mut take = || {
        let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 16];
        // SAFETY: there is no data.
        unsafe { poll(&mut ring, &mut out) }
    };
    let error = Err(CompletionError::UnknownOpcode {
        completion: 0,
        request: 0x3f,
    });
    assert_eq!(
        [take(), take(), take(), take(), take()],
        [Ok(4), error, Ok(3), error, Ok(1)]
    );
    assert_eq!(device.consumed(), 10);
}

#[test]
fn long_entries_have_more_data() {
    let mut ring = CqeRing::new(
        2,
        CqeFormat {
            shift: 7,
            compresses: false,
        },
        None,
    )
    .unwrap();
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, RC, &cap(8, 1, 0));
    ring.attach(&pair.queues, Role::RECEIVE).unwrap();
    let data: [u8; 64] = std::array::from_fn(|n| n as u8 + 100);
    // Over the end of the queue.
    for round in 0..6u32 {
        let mut memory = [0u8; 60];
        let list = [Sge {
            addr: memory.as_mut_ptr().expose_provenance() as u64,
            length: 60,
            lkey: 1,
        }];
        let slot = receive(&mut pair, 5, &list);
        let write_cqe = |device: &mut Device, byte_count, scatter| {
            device.put_before(data);
            device.write_cqe(&TestCqe {
                opcode: 2,
                user_index: 70,
                slot,
                byte_count,
                scatter,
                flags_rqpn: 0x42,
                ..TestCqe::default()
            });
        };
        match round % 3 {
            // 64 bytes are before the fields, which are all there.
            0 => {
                write_cqe(&mut device, 60, 8);
                let wc = one(&mut ring).unwrap();
                assert_eq!((wc.status, wc.byte_len, wc.src_qp), (0, 60, 0x42));
                assert_eq!(memory[..], data[..60]);
            }
            // More than the list takes, and more than there are.
            1 => {
                write_cqe(&mut device, 61 + 3 * (round / 3), 8);
                assert_eq!(one(&mut ring).unwrap().status, 1);
            }
            // None came.
            _ => {
                write_cqe(&mut device, 60, 0);
                assert_eq!(one(&mut ring).unwrap().status, 0);
                assert_eq!(memory, [0; 60]);
            }
        }
    }
}

#[test]
fn create_cq_names_the_cqe_format() {
    let machine = FakeDevice::new();
    let cases = [
        (false, None, [64, 0, 0, 0, 0, 0]),
        (true, None, [128, 0, 0, 0, 0, 0]),
        (false, Some(MiniFormat::Hash), [64, 0, 0, 0, 1, 1]),
        (true, Some(MiniFormat::Checksum), [128, 0, 0, 0, 1, 2]),
    ];
    for (wide, compression, expected) in cases {
        let device = machine.open(&VALID_ANSWER).unwrap();
        machine.cq(1).unwrap();
        machine.fake.take_ioctls();
        let init = uverbs::CqInit {
            cqe: 7,
            ..uverbs::CqInit::default()
        };
        let options = CqOptions {
            wide,
            compression,
            ..CqOptions::default()
        };
        let cq =
            CompletionQueue::create_with(&machine.context, &device, &init, options, None).unwrap();
        assert_eq!(cq.ring.capacity(), 8);
        let calls = machine.fake.take_ioctls();
        assert_eq!(calls[0].driver_in()[16..22], expected);
    }
}

/// The device's next action.
#[derive(Clone, Debug)]
enum DeviceStep {
    /// Writes a CQE that is not compressed.
    Single,
    /// Writes a session of compressed CQEs.
    Session(u32),
    /// Writes a session of the other queue pair.
    OtherQp(u32),
}

fn device_step() -> impl Strategy<Value = DeviceStep> {
    prop_oneof![
        Just(DeviceStep::Single),
        (2u32..20).prop_map(DeviceStep::Session),
        (2u32..20).prop_map(DeviceStep::OtherQp),
    ]
}

proptest! {
    /// However single completions and sessions of both kinds take turns with
    /// reading, moving and cleaning: everything is read once, in order.
    #[test]
    fn sessions_decode_to_their_completions(
        wide in any::<bool>(),
        turns in prop::collection::vec((device_step(), 0u64..24, 0u8..8), 1..60),
    ) {
        let mut ring = CqeRing::new(5, format(wide), None).unwrap();
        let mut device = Device::of(&ring);
        let mut pairs = [70, 71].map(|index| TestQp::new(index, RC, &cap(64, 1, 0)));
        for pair in &pairs {
            ring.attach(&pair.queues, Role::SEND | Role::RECEIVE).unwrap();
        }
        let mut expected = VecDeque::new();
        let mut wr_id = 0;
        for (device_step, consume, change) in turns {
            let room = ring.capacity() - 1 - expected.len() as u32;
            let (which, count) = match device_step {
                DeviceStep::Single => (0, 1),
                DeviceStep::Session(count) => (0, count),
                DeviceStep::OtherQp(count) => (1, count),
            };
            if count <= room {
                let pair = &mut pairs[which];
                let mut minis = Vec::new();
                let mut first = None;
                for n in 0..count {
                    wr_id += 1;
                    let bytes = wr_id as u32 * 3;
                    let mut mini = [0; 8];
                    let slot = if which == 0 {
                        let slot = post(pair, wr_id, Opcode::RDMA_READ);
                        mini[..2].copy_from_slice(&slot.to_be_bytes());
                        mini[2] = 0x10;
                        slot
                    } else {
                        mini[..4].copy_from_slice(&[9; 4]);
                        receive(pair, wr_id, &[])
                    };
                    mini[4..].copy_from_slice(&bytes.to_be_bytes());
                    minis.push(mini);
                    expected.push_back((wr_id, bytes, which));
                    if n == 0 {
                        first = Some(TestCqe {
                            opcode: if which == 0 { 0 } else { 2 },
                            user_index: 70 + which as u32,
                            slot,
                            request: 0x10,
                            byte_count: bytes,
                            ..TestCqe::default()
                        });
                    }
                }
                match count {
                    1 => device.write_cqe(&first.unwrap()),
                    _ => device.tell(&first.unwrap(), &minis),
                }
            }
            match change {
                // The queue moves.
                0 => {
                    let log2 = 5 + consume as u32 % 2;
                    let memory = CqeRing::new_entries(log2, format(wide), None).unwrap();
                    if expected.len() < 1 << log2 {
                        device.move_to(memory.first(), 1 << log2);
                        prop_assert!(ring.move_to(memory, log2));
                    }
                }
                // A queue pair is reset.
                1 => {
                    ring.clean(&pairs[1].queues);
                    pairs[1].recv.reset();
                    expected.retain(|(_, _, which)| *which == 0);
                }
                _ => {}
            }
            for _ in 0..consume.min(expected.len() as u64) {
                let wc = one(&mut ring).unwrap();
                let (wr_id, bytes, which) = expected.pop_front().unwrap();
                prop_assert_eq!((wc.wr_id, wc.byte_len), (wr_id, bytes));
                prop_assert_eq!(wc.opcode, if which == 0 { 2 } else { 128 });
            }
            prop_assert_eq!(ring.is_empty(), expected.is_empty());
            prop_assert_eq!(device.consumed() + expected.len() as u32, device.written);
        }
    }

    /// Any bytes at all: as many answers or errors as there can be, and no more.
    #[test]
    fn random_sessions_are_survived(
        entries in prop::collection::vec((any::<[u8; 64]>(), 0u8..4, 0u32..12), 1..60),
    ) {
        let mut ring = CqeRing::new(3, format(false), None).unwrap();
        let mut device = Device::of(&ring);
        let mut pair = TestQp::new(70, RC, &cap(16, 1, 0));
        ring.attach(&pair.queues, Role::SEND | Role::RECEIVE).unwrap();
        for (mut bytes, title, count) in entries {
            bytes[32..36].copy_from_slice(&70u32.to_be_bytes());
            if title != 0 {
                bytes[44..48].copy_from_slice(&count.to_be_bytes());
                bytes[63] = (bytes[63] | 0xc) & 0x3f;
            }
            post(&mut pair, 1, Opcode::SEND);
            pair.send.reset();
            device.write(bytes);
            // SAFETY: there is no data.
            let read = (0..64).take_while(|_| unsafe { read(&mut ring) }.is_some()).count();
            prop_assert!(read <= 8 * 8);
            ring.publish();
            if title % 2 == 1 {
                ring.clean(&pair.queues);
            }
            device.written = device.consumed();
        }
    }
}
