//! Every operation, every MTU, lengths around packet boundaries.

use super::*;
use proptest::prelude::*;

const SIZE: usize = 64 * 1024;

fn lengths(mtu: Mtu) -> [u32; 9] {
    let m = mtu.bytes();
    [0, 1, 3, m - 1, m, m + 1, 2 * m, 2 * m + 5, 7 * m + 2]
}

fn run(service: Service, operation: Operation, kind: LinkKind, mtu: Mtu, length: u32, psn: u32) {
    let config = QpConfig {
        service,
        mtu,
        send_psn: psn,
        recv_psn: psn,
        ..QpConfig::default()
    };
    let mut world = pair(kind, SIZE, 1, &config);
    fill(&mut world.hcas[0].host.memory, 1);
    fill(&mut world.hcas[1].host.memory, 2);
    let before = [
        world.hcas[0].host.memory.clone(),
        world.hcas[1].host.memory.clone(),
    ];
    world.hcas[1].post_recv(200, 7, 1000, 32 * 1024);
    let mut request = work(1, operation, 100, length, 33_000);
    request.imm = 0xdead_beef;
    request.solicited = true;
    if operation == Operation::SendInvalidate {
        request.imm = RKEY;
    }
    let imm = request.imm;
    world.hcas[0].post_send(100, request);
    world.settle(SECOND);

    let done = SendDone {
        cause: None,
        length,
    };
    assert_eq!(world.hcas[0].host.queues(100).sent, [(1, done)]);
    let n = length as usize;
    let mut expected = before.clone();
    let mut received = None;
    match operation {
        Operation::Write => {
            expected[1][33_000..33_000 + n].copy_from_slice(&before[0][100..100 + n])
        }
        Operation::WriteImm => {
            expected[1][33_000..33_000 + n].copy_from_slice(&before[0][100..100 + n]);
            received = Some(RecvKind::WriteImm);
        }
        Operation::Read => {
            expected[0][100..100 + n].copy_from_slice(&before[1][33_000..33_000 + n])
        }
        _ => {
            expected[1][1000..1000 + n].copy_from_slice(&before[0][100..100 + n]);
            received = Some(match operation {
                Operation::SendImm => RecvKind::SendImm,
                Operation::SendInvalidate => RecvKind::SendInvalidate,
                _ => RecvKind::Send,
            });
        }
    }
    for (side, expected) in expected.iter().enumerate() {
        assert!(
            world.hcas[side].host.memory == *expected,
            "memory of {side}"
        );
    }
    let queues = world.hcas[1].host.queues(200);
    match received {
        None => assert!(queues.received.is_empty()),
        Some(kind) => {
            let (id, done) = queues.received[0];
            assert_eq!(
                (id, done.status(), done.kind, done.length),
                (7, Status::Success, kind, length)
            );
            assert!(done.solicited);
            if kind != RecvKind::Send {
                assert_eq!(done.imm, imm);
            }
        }
    }
    let invalidated = operation == Operation::SendInvalidate;
    assert_eq!(world.hcas[1].host.regions.len(), usize::from(!invalidated));
    let view = world.hcas[0].transport.query(100).unwrap();
    assert_eq!(view.send_psn, (psn + mtu.packets(length)) & 0xff_ffff);
    assert_eq!(
        world.hcas[1].transport.query(200).unwrap().recv_psn,
        view.send_psn
    );
    assert_eq!(world.hcas[0].transport.counters().retransmitted, 0);
}

#[test]
fn rc_operations_at_packet_boundaries() {
    for kind in KINDS {
        for mtu in Mtu::ALL {
            for length in lengths(mtu) {
                for operation in [
                    Operation::Send,
                    Operation::SendImm,
                    Operation::SendInvalidate,
                    Operation::Write,
                    Operation::WriteImm,
                    Operation::Read,
                ] {
                    run(Service::Rc, operation, kind, mtu, length, 0xff_fffe);
                }
            }
        }
    }
}

#[test]
fn uc_operations_at_packet_boundaries() {
    for mtu in Mtu::ALL {
        for length in lengths(mtu) {
            for operation in [
                Operation::Send,
                Operation::SendImm,
                Operation::Write,
                Operation::WriteImm,
            ] {
                run(
                    Service::Uc,
                    operation,
                    LinkKind::Ethernet,
                    mtu,
                    length,
                    0xff_fffe,
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rc_operations_of_any_length(length in 0u32..31_000, mtu in 0usize..5, index in 0usize..6, ib: bool, psn in 0u32..1 << 24) {
        let operation = [
            Operation::Send,
            Operation::SendImm,
            Operation::SendInvalidate,
            Operation::Write,
            Operation::WriteImm,
            Operation::Read,
        ][index];
        let kind = if ib { LinkKind::Ib } else { LinkKind::Ethernet };
        run(Service::Rc, operation, kind, Mtu::ALL[mtu], length, psn);
    }
}

#[test]
fn atomics_return_the_previous_value() {
    for kind in KINDS {
        let mut world = pair(kind, 256, 1, &QpConfig::default());
        world.hcas[1].host.memory[64..72].copy_from_slice(&40u64.to_le_bytes());
        let hca = &mut world.hcas[0];
        hca.post_send(100, work(1, Operation::FetchAdd { add: 2 }, 0, 8, 64));
        hca.post_send(
            100,
            work(
                2,
                Operation::CompareSwap {
                    compare: 42,
                    swap: 7,
                },
                8,
                8,
                64,
            ),
        );
        hca.post_send(
            100,
            work(
                3,
                Operation::CompareSwap {
                    compare: 42,
                    swap: 9,
                },
                16,
                8,
                64,
            ),
        );
        world.settle(SECOND);
        let memory = &world.hcas[0].host.memory;
        let value = |at: usize| u64::from_le_bytes(memory[at..at + 8].try_into().unwrap());
        assert_eq!([value(0), value(8), value(16)], [40, 42, 7]);
        assert_eq!(world.hcas[1].host.memory[64], 7);
        assert_eq!(world.hcas[0].host.queues(100).sent.len(), 3);
        assert_eq!(world.hcas[0].host.queues(100).sent[0].1.length, 8);
    }
}

/// XRC: requests go to the SRQ that they name, through one target queue pair.
#[test]
fn xrc_requests_use_the_srq_that_they_name() {
    for kind in KINDS {
        let mut world = World::new(2, kind, 32 * 1024, 1);
        let config = QpConfig {
            service: Service::XrcInitiator,
            ..QpConfig::default()
        };
        world.connect((0, 100), (1, 200), &config);
        // The other end is the target.
        let hca = &mut world.hcas[1];
        let config = QpConfig {
            service: Service::XrcTarget,
            ..hca.transport.config(200).unwrap().clone()
        };
        hca.transport.destroy(200);
        hca.transport.create(200, config.clone()).unwrap();
        hca.raise(200, &config, 0);
        open(hca, 32 * 1024);
        for (srqn, id) in [(5, 50), (6, 60)] {
            hca.post_recv(
                srqn + super::super::model::XRC_SRQ,
                id,
                id as usize * 100,
                5000,
            );
        }
        fill(&mut world.hcas[0].host.memory, 3);
        for (id, srqn) in [(1, 6), (2, 5)] {
            let mut request = work(id, Operation::SendImm, 0, 3000, 0);
            request.xrc_srqn = srqn;
            world.hcas[0].post_send(100, request);
        }
        world.hcas[0].post_send(100, work(3, Operation::Write, 0, 3000, 20_000));
        world.hcas[0].post_send(100, work(4, Operation::Read, 25_000, 3000, 20_000));
        world.hcas[0].post_send(
            100,
            work(5, Operation::FetchAdd { add: 1 }, 30_000, 8, 30_000),
        );
        world.settle(SECOND);
        let sent = statuses(&mut world.hcas[0], 100);
        assert_eq!(
            sent,
            (1..=5).map(|id| (id, Status::Success)).collect::<Vec<_>>()
        );
        let received: Vec<_> = world.hcas[1]
            .host
            .queues(200)
            .received
            .iter()
            .map(|(id, done)| (*id, done.xrc_srqn, done.length))
            .collect();
        assert_eq!(received, [(60, Some(6), 3000), (50, Some(5), 3000)]);
        let (a, b) = (&world.hcas[0].host.memory, &world.hcas[1].host.memory);
        assert!(a[..3000] == b[5000..8000] && a[..3000] == b[20_000..23_000]);
        assert!(a[..3000] == a[25_000..28_000]);
    }
}

/// A read whose PSNs exceed half the PSN range would be ambiguous; one just below is
/// permitted.
#[test]
fn messages_longer_than_half_the_psn_range_fail() {
    let config = QpConfig {
        mtu: Mtu::B256,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 1, &config);
    world.hcas[0].post_send(100, work(1, Operation::Write, 0, 1 << 31, 0));
    world.settle(SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(1, Status::LocalLength)]
    );
    let config = QpConfig {
        mtu: Mtu::B4096,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 1, &config);
    world.hcas[0].post_send(100, work(1, Operation::Write, 0, (1 << 30) + 1, 0));
    world.settle(SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(1, Status::LocalLength)]
    );
}
