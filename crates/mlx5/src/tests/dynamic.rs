//! Dynamic connections: initiators name a target in each work request, targets have no
//! queues.

use uverbs::kernel::fake::Target;
use uverbs::{QpAttr, QpAttrMask, QpState, QpType, Sge};

use super::objects::{CREATE_QP, FakeDevice, VALID_ANSWER};
use super::*;
use crate::{
    CreateError, DcType, DciStreams, Destination, Link, Operands, QpChanges, QpOptions, QueuePair,
    RemoteMemory, modify_dct, modify_qp,
};

const INITIATOR: Service = Service::DcInitiator;
const DCTN: u32 = 0x0012_3456;
const KEY: u64 = 0x0102_0304_0506_0708;
const REMOTE: u64 = 0x2222_0000_8000;

/// An address with this LID.
fn address() -> Address {
    let attr = uverbs::AhAttr {
        dlid: 0x4321,
        ..uverbs::AhAttr::default()
    };
    Address(crate::ah::vector(&attr, Link::InfiniBand))
}

fn post(pair: &mut TestQp, opcode: Opcode, stream: u16) {
    let list = [Sge {
        addr: 0x9000,
        length: 8,
        lkey: 9,
    }];
    pair.send.begin();
    let wr = SendWr {
        remote: RemoteMemory {
            addr: REMOTE,
            rkey: 0x77,
        },
        operands: Operands::Atomic {
            compare_add: 11,
            swap: 22,
        },
        destination: Destination::Dc {
            address: &address(),
            // More than 24 bits.
            remote_dctn: DCTN | 0x7f00_0000,
            access_key: KEY,
            stream,
        },
        ..request(7, opcode, SendFlags::SIGNALED, &list)
    };
    push(&mut pair.send, &wr).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
}

#[test]
fn a_work_request_names_its_target() {
    // Segments, and the one that has the element.
    let table = [
        (Opcode::SEND, 5, 4),
        (Opcode::SEND_WITH_IMM, 5, 4),
        (Opcode::SEND_WITH_INV, 5, 4),
        (Opcode::RDMA_WRITE, 6, 5),
        (Opcode::RDMA_WRITE_WITH_IMM, 6, 5),
        (Opcode::RDMA_READ, 6, 5),
        (Opcode::ATOMIC_CMP_AND_SWP, 7, 6),
        (Opcode::ATOMIC_FETCH_AND_ADD, 7, 6),
    ];
    for (opcode, segments, data) in table {
        let mut pair = TestQp::new(1, INITIATOR, &cap(4, 1, 0));
        post(&mut pair, opcode, 0x0203);
        let bytes = pair.sent(0, 128);
        assert_eq!(be32(&bytes, 4), QPN << 8 | segments, "{opcode:?}");
        // Signature, stream, signalled.
        assert_eq!(bytes[8..12], [0, 2, 3, 8], "{opcode:?}");
        assert_eq!(be64(&bytes, 16), KEY, "{opcode:?}");
        assert_eq!(be32(&bytes, 24), 1 << 31 | DCTN, "{opcode:?}");
        assert_eq!(be16(&bytes, 30), 0x4321, "{opcode:?}");
        if data > 4 {
            assert_eq!((be64(&bytes, 64), be32(&bytes, 72)), (REMOTE, 0x77));
        }
        let element = &bytes[data * 16..];
        assert_eq!((be32(element, 0), be64(element, 8)), (8, 0x9000));
        assert_eq!(pair.record(1), 2);
    }
}

/// `write_address` and `push_addressed` write what `push` does, or nothing; so does the
/// general path after `write_address`.
#[test]
fn fast_path_writes_the_same() {
    let address = address();
    let to_target = |stream| Destination::Dc {
        address: &address,
        remote_dctn: DCTN,
        access_key: KEY,
        stream,
    };
    let datagram = Destination::Datagram {
        address: &address,
        remote_qpn: DCTN,
        remote_qkey: 7,
    };
    let (target, short) = (to_target(0), 8);
    let table = [
        (INITIATOR, Opcode::SEND, target, short, true),
        (INITIATOR, Opcode::SEND_WITH_IMM, target, short, true),
        (INITIATOR, Opcode::RDMA_WRITE, target, short, true),
        (INITIATOR, Opcode::RDMA_READ, target, short, true),
        (INITIATOR, Opcode::SEND_WITH_INV, target, short, false),
        (INITIATOR, Opcode::ATOMIC_CMP_AND_SWP, target, short, false),
        (INITIATOR, Opcode::SEND, to_target(1), short, false),
        (INITIATOR, Opcode::SEND, target, 0, false),
        (INITIATOR, Opcode::SEND, target, 1 << 31, false),
        (INITIATOR, Opcode::SEND, datagram, short, false),
        (
            INITIATOR,
            Opcode::SEND,
            Destination::Connected,
            short,
            false,
        ),
        (Service::Datagram, Opcode::SEND, datagram, short, true),
        (
            Service::Datagram,
            Opcode::RDMA_WRITE,
            datagram,
            short,
            false,
        ),
        (
            Service::ReliableConnection,
            Opcode::SEND,
            target,
            short,
            false,
        ),
    ];
    for (service, opcode, destination, length, pushed) in table {
        let [mut fast, mut slow] = [1, 2].map(|i| TestQp::new(i, service, &cap(3, 1, 0)));
        let size = fast.queues.send.bytes();
        let list = [Sge {
            addr: 0x9000,
            length,
            lkey: 9,
        }];
        // Over the queue's end, up to a full queue.
        for round in 0..3 * fast.send.capacity() {
            let wr = SendWr {
                imm_or_key: round,
                operands: Operands::Atomic {
                    compare_add: 11,
                    swap: 22,
                },
                remote: RemoteMemory {
                    addr: REMOTE,
                    rkey: 0x77,
                },
                destination,
                ..request(round.into(), opcode, SendFlags::SIGNALED, &list)
            };
            let full = round == 2 * fast.send.capacity();
            let before = fast.sent(0, size);
            let open_wqe = fast.send.open(opcode, wr.flags, round);
            let written = fast.send.write_address(destination);
            let done = written && fast.send.push_addressed(open_wqe, &wr, &list[0]);
            assert_eq!(done, pushed && !full, "{opcode:?} {destination:?}");
            if !written {
                assert_eq!(fast.sent(0, size), before);
                break;
            }
            if !done {
                let destination = Destination::InWqe;
                // SAFETY: no inline data.
                let results = unsafe {
                    let rest = fast.send.push_slow(&SendWr { destination, ..wr });
                    (rest, slow.send.push_slow(&wr))
                };
                assert_eq!(results.0, results.1);
                if results.0.is_ok() {
                    assert_eq!(fast.sent(0, size), slow.sent(0, size), "{opcode:?}");
                }
                break;
            }
            // SAFETY: no inline data.
            unsafe { slow.send.push_slow(&wr) }.unwrap();
            assert_eq!(fast.sent(0, size), slow.sent(0, size), "{opcode:?}");
            for pair in [&mut fast, &mut slow] {
                // SAFETY: there is no device.
                unsafe { pair.send.publish() };
                let blocks = pair.record(1);
                let found = pair.queues.sends.find(blocks - 2).unwrap();
                assert_eq!((blocks, found.wr_id), (2 * (round + 1), round.into()));
                if round < pair.send.capacity() {
                    pair.queues.sends.complete(found);
                }
            }
        }
    }
}

#[test]
fn a_send_without_a_target_is_refused() {
    let mut pair = TestQp::new(1, INITIATOR, &cap(4, 1, 0));
    pair.send.begin();
    let refused = push_send(&mut pair.send, 1);
    assert_eq!(refused, Err(PostError::BadOperation));
    assert_eq!(pair.record(1), 0);
}

/// A machine, and the driver's input for a queue pair with these options.
fn created(dc_type: DcType) -> (FakeDevice, QueuePair<Arc<uverbs::Context>>, Vec<u8>) {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let options = QpOptions {
        keys: crate::KeyChanges::None,
        dc_type: Some(dc_type),
        ..QpOptions::default()
    };
    let qp = machine.qp_of(&device, QpType::DRIVER, &options, 0, None);
    let told = machine.driver_in(CREATE_QP);
    (machine, qp.unwrap(), told)
}

#[test]
fn an_initiator_has_streams_and_no_receives() {
    let streams = DciStreams {
        log_concurrent: 3,
        log_errored: 1,
    };
    for (streams, flags, sizes) in [(None, 0, [0, 0]), (Some(streams), 1 << 11, [3, 1])] {
        let (_machine, qp, told) = created(DcType::Initiator { streams });
        assert!(qp.recv.is_none());
        assert_eq!(qp.cap.max_recv_wr, 0);
        assert!(qp.cap.max_send_wr >= 5);
        // No entries of a receive queue, the type, no key.
        assert_eq!(told[20..28], [0; 8]);
        let told_flags = u32::from_ne_bytes(told[28..32].try_into().unwrap());
        assert_eq!(told_flags & (1 << 4 | 1 << 5 | 1 << 11), 1 << 5 | flags);
        assert_eq!(told[40..48], [0; 8]);
        assert_eq!(told[52..54], sizes);
    }
}

#[test]
fn a_target_gets_its_number_when_it_is_ready() {
    let (machine, mut qp, told) = created(DcType::Target { access_key: KEY });
    assert!(qp.recv.is_none());
    let told_flags = u32::from_ne_bytes(told[28..32].try_into().unwrap());
    assert_eq!(told_flags & (1 << 4 | 1 << 5 | 1 << 11), 1 << 4);
    assert_eq!(told[40..48], KEY.to_ne_bytes());
    assert_eq!(told[16..28], [0; 12]);
    qp.send.begin();
    let refused = push_send(&mut qp.send, 1);
    assert_eq!(refused, Err(PostError::BadOperation));

    use uverbs::abi::write::{CMD_FLAG_EXTENDED, cmd};
    let modify = Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_MODIFY_QP);
    let to = |state| QpAttr {
        qp_state: state,
        ..QpAttr::default()
    };
    let answers = |length: u32, number: u32| {
        machine.fake.on(modify, move |reply| {
            let answer = [length, number, 3, 0].map(u32::to_ne_bytes).concat();
            reply.set_driver_out(&answer);
            Ok(())
        });
    };
    let mask = QpAttrMask::STATE;
    answers(0, 0);
    let none = QpChanges::default();
    let answer = modify_dct(&qp.object, &to(QpState::INIT), mask, &none).unwrap();
    assert_eq!(answer, (None, 3));
    // A driver that does not know targets.
    let refused = modify_dct(&qp.object, &to(QpState::RTR), mask, &none);
    assert!(matches!(refused, Err(CreateError::BadAnswer { .. })));
    // Of the number 24 bits count.
    answers(16, 0xff00_0000 | DCTN);
    let answer = modify_dct(&qp.object, &to(QpState::RTR), mask, &none).unwrap();
    assert_eq!(answer, (Some(DCTN), 3));

    // Driver data of a change.
    let changes = QpChanges {
        ece: 7,
        burst: Some((4096, 64)),
        out_of_order: true,
    };
    let granted = modify_qp(&qp.object, &to(QpState::INIT), mask, &changes).unwrap();
    assert_eq!(granted, 3);
    let told = machine.driver_in(modify);
    assert_eq!(told[..8], [1u32, 4096].map(u32::to_ne_bytes).concat());
    assert_eq!(told[8..12], [64u16, 0].map(u16::to_ne_bytes).concat());
    assert_eq!(told[12..], 7u32.to_ne_bytes());
    // Without any it is the old command.
    let granted = modify_qp(&qp.object, &to(QpState::INIT), mask, &none).unwrap();
    assert_eq!(granted, 0);
}
