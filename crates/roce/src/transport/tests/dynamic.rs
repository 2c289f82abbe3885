//! Dynamic connections: initiators that change their target, targets with many
//! initiators.

use super::*;
use crate::packet::{
    AtomicEth, BTH_BYTES, Bth, Class, DcEth, PacketBuilder, Pool, Psn, Template, op,
};
use proptest::prelude::*;

const KEY: u64 = 0x0bad_c0de_0000_0001;
const MEMORY: usize = 128 * 1024;

/// Creates HCAs with accessible memory and a target 200 each.
fn world(count: usize, kind: LinkKind, seed: u64) -> World {
    let mut world = World::new(count, kind, MEMORY, seed);
    for index in 0..count {
        open(&mut world.hcas[index], MEMORY);
        create_target(&mut world.hcas[index], 200);
    }
    world
}

fn create_target(hca: &mut Hca, dctn: u32) {
    let config = QpConfig {
        service: Service::DcTarget,
        srq: true,
        dc_key: KEY,
        ..QpConfig::default()
    };
    hca.transport.create(dctn, config.clone()).unwrap();
    let to = QpState::ReadyToReceive;
    let result = hca.transport.modify(&mut hca.host, 0, dctn, to, config);
    result.unwrap();
}

fn create_initiator(hca: &mut Hca, qpn: u32, log_errored_streams: u8) {
    let config = QpConfig {
        service: Service::DcInitiator,
        log_errored_streams,
        retry_count: 7,
        ..QpConfig::default()
    };
    let _ = hca.transport.create(qpn, config.clone());
    hca.raise(qpn, &config, 0);
}

fn reset(hca: &mut Hca, now: u64, qpn: u32) {
    let config = hca.transport.config(qpn).unwrap().clone();
    let to = QpState::Reset;
    let done = hca.transport.modify(&mut hca.host, now, qpn, to, config);
    done.unwrap();
}

/// Posts a request to a target of another HCA.
fn post(hca: &mut Hca, qpn: u32, (peer, dctn): (usize, u32), mut request: SendWork<Range>) {
    request.datagram = Some(Box::new(Datagram {
        path: hca.path_to(peer),
        qpn: dctn,
        qkey: 0,
        dc_key: KEY,
    }));
    hca.post_send(qpn, request);
}

fn successes(ids: std::ops::Range<u64>) -> Vec<(u64, Status)> {
    ids.map(|id| (id, Status::Success)).collect()
}

#[test]
fn an_initiator_switches_targets() {
    for kind in ADDRESSED {
        let mut world = world(3, kind, 1);
        fill(&mut world.hcas[0].host.memory[..3000], 7);
        create_initiator(&mut world.hcas[0], 100, 0);
        // The third target is on the initiator's own HCA.
        let targets = [(1, 200), (2, 200), (0, 200), (1, 200)];
        for peer in 0..3 {
            for id in 0..4 {
                let at = 40_000 + id as usize * 4000;
                world.hcas[peer].post_recv(200, id, at, 4000);
            }
        }
        for (id, to) in targets.into_iter().enumerate() {
            let id = id as u64 * 4;
            let hca = &mut world.hcas[0];
            post(hca, 100, to, work(id, Operation::Send, 0, 3000, 0));
            let write = work(id + 1, Operation::Write, 0, 2500, 60_000);
            post(hca, 100, to, write);
            let read = work(id + 2, Operation::Read, 70_000, 2500, 60_000);
            post(hca, 100, to, read);
            let add = Operation::FetchAdd { add: 5 };
            post(hca, 100, to, work(id + 3, add, 80_000, 8, 90_000));
        }
        world.settle(SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 100), successes(0..16));
        for (peer, messages) in [(1, 2), (2, 1), (0, 1)] {
            let source = world.hcas[0].host.memory[..3000].to_vec();
            let hca = &mut world.hcas[peer];
            assert_eq!(recv_statuses(hca, 200), successes(0..messages), "of {peer}");
            for (id, done) in &hca.host.queues(200).received {
                assert_eq!(done.source.unwrap().qpn, 100);
                assert_eq!((*id < messages, done.length), (true, 3000));
            }
            assert!(hca.host.memory[40_000..43_000] == source);
            assert!(hca.host.memory[60_000..62_500] == source[..2500]);
            assert_eq!(hca.host.memory[90_000], 5 * messages as u8);
            assert_eq!(events(hca, 200), [], "no event");
        }
        let source = world.hcas[0].host.memory[..2500].to_vec();
        assert!(world.hcas[0].host.memory[70_000..72_500] == source);
    }
}

#[test]
fn a_target_serves_many_initiators_at_once() {
    for kind in ADDRESSED {
        let mut world = world(3, kind, 1);
        let from = [(0, 100), (0, 101), (1, 100), (1, 102)];
        for (n, (index, qpn)) in from.into_iter().enumerate() {
            let hca = &mut world.hcas[index];
            create_initiator(hca, qpn, 0);
            let start = n * 10_000;
            hca.host.memory[start..start + 9000].fill(n as u8 + 1);
            post(
                hca,
                qpn,
                (2, 200),
                work(0, Operation::SendImm, start, 9000, 0),
            );
        }
        for id in 0..4 {
            world.hcas[2].post_recv(200, id, id as usize * 10_000, 9000);
        }
        world.settle(SECOND);
        for (index, qpn) in from {
            assert_eq!(statuses(&mut world.hcas[index], qpn), successes(0..1));
        }
        let hca = &mut world.hcas[2];
        let mut fill_bytes = Vec::new();
        for id in 0..4 {
            let received = &hca.host.memory[id * 10_000..id * 10_000 + 9000];
            assert!(received.iter().all(|byte| *byte == received[0]), "mixed");
            fill_bytes.push(received[0]);
        }
        fill_bytes.sort_unstable();
        assert_eq!(fill_bytes, [1, 2, 3, 4]);
        assert_eq!(hca.host.queues(200).received.len(), 4);
    }
}

#[test]
pub(super) fn a_wrong_dc_access_key_is_counted_and_ignored() {
    let mut world = world(2, LinkKind::Ethernet, 1);
    create_initiator(&mut world.hcas[0], 100, 0);
    create_initiator(&mut world.hcas[0], 101, 0);
    let mut request = work(0, Operation::Write, 0, 8, 0);
    request.datagram = Some(Box::new(Datagram {
        path: world.hcas[0].path_to(1),
        qpn: 200,
        qkey: 0,
        dc_key: KEY + 1,
    }));
    world.hcas[0].host.memory[..8].fill(1);
    world.hcas[0].post_send(100, request);
    let write = work(0, Operation::Write, 0, 8, 64);
    post(&mut world.hcas[0], 101, (1, 200), write);
    world.settle(60 * SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(0, Status::RetryExceeded)]
    );
    assert_eq!(statuses(&mut world.hcas[0], 101), successes(0..1));
    let hca = &world.hcas[1];
    assert_eq!(hca.host.memory[..8], [0; 8]);
    assert_eq!(hca.host.memory[64..72], [1; 8]);
    assert!(hca.transport.counters().dc_key_violations >= 8);
}

#[test]
fn a_nak_ends_the_connection_but_not_the_target() {
    for kind in KINDS {
        let mut world = world(2, kind, 1);
        for qpn in [100, 101] {
            create_initiator(&mut world.hcas[0], qpn, 0);
        }
        let hca = &mut world.hcas[0];
        post(
            hca,
            100,
            (1, 200),
            work(0, Operation::Write, 0, 8, MEMORY - 4),
        );
        post(hca, 100, (1, 200), work(1, Operation::Write, 0, 8, 0));
        world.settle(SECOND);
        let expected = [(0, Status::RemoteAccess), (1, Status::Flushed)];
        assert_eq!(statuses(&mut world.hcas[0], 100), expected);
        assert_eq!(events(&mut world.hcas[1], 200), []);
        // Another initiator, and the same one with a new connection.
        let now = world.now;
        reset(&mut world.hcas[0], now, 100);
        create_initiator(&mut world.hcas[0], 100, 0);
        for (qpn, id) in [(101, 0), (100, 2)] {
            let write = work(id, Operation::Write, 0, 8, 0);
            post(&mut world.hcas[0], qpn, (1, 200), write);
        }
        world.settle(SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 101), successes(0..1));
        let last = statuses(&mut world.hcas[0], 100).pop();
        assert_eq!(last, Some((2, Status::Success)));
    }
}

#[test]
fn the_receive_of_an_abandoned_message_is_reused() {
    let mut world = world(2, LinkKind::Ethernet, 1);
    create_initiator(&mut world.hcas[0], 100, 0);
    world.hcas[1].post_recv(200, 0, 0, 5000);
    // The data of the second packet is inaccessible.
    let mut broken = work(0, Operation::Send, 0, 3000, 0);
    broken.local.length = 1500;
    post(&mut world.hcas[0], 100, (1, 200), broken);
    world.settle(SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(0, Status::LocalProtection)]
    );
    assert_eq!(recv_statuses(&mut world.hcas[1], 200), []);
    // Another initiator finds no receive posted, because the first message may still
    // continue.
    create_initiator(&mut world.hcas[0], 101, 0);
    let send = |id| work(id, Operation::Send, 0, 3000, 0);
    post(&mut world.hcas[0], 101, (1, 200), send(0));
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 101), []);
    // A new connection of the first initiator abandons its message.
    let now = world.now;
    reset(&mut world.hcas[0], now, 100);
    create_initiator(&mut world.hcas[0], 100, 0);
    let write = work(1, Operation::Write, 0, 8, 64_000);
    post(&mut world.hcas[0], 100, (1, 200), write);
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 101), successes(0..1));
    assert_eq!(recv_statuses(&mut world.hcas[1], 200), successes(0..1));
}

/// Sends a delayed packet of an initiator that adds 1.
fn send_late_add(world: &mut World, source_qpn: u32, connection: u64, psn: u32) {
    let template = Template::new(&world.hcas[0].path_to(1));
    let mut bth = Bth::read(&[0; BTH_BYTES]);
    bth.opcode = Class::Dc as u8 | op::FETCH_ADD;
    (bth.pkey, bth.dest_qpn, bth.psn) = (0xffff, 200, Psn::new(psn));
    let mut builder = PacketBuilder::new(&Pool::new(), &template, bth, 0);
    let header = DcEth {
        key: KEY,
        connection,
        source_qpn,
        oldest: Psn::new(psn),
    };
    let atomic = AtomicEth {
        va: VA + 64_000,
        rkey: RKEY,
        swap_add: 1,
        compare: 0,
    };
    builder.put(&header.bytes());
    builder.put(&atomic.bytes());
    let now = world.now;
    world.hcas[0].port.send(now, builder.finish());
    world.settle(SECOND);
}

#[test]
pub(super) fn a_late_packet_of_an_old_connection_is_ignored() {
    for (connection, expected_sum) in [(1, 3), (u64::MAX, 4)] {
        let mut world = world(2, LinkKind::Ethernet, 1);
        let add = |id| work(id, Operation::FetchAdd { add: 1 }, 64_000, 8, 64_000);
        create_initiator(&mut world.hcas[0], 100, 0);
        for id in 0..2 {
            post(&mut world.hcas[0], 100, (1, 200), add(id));
        }
        world.settle(SECOND);
        // The initiator connects again, and its PSNs start anew.
        let now = world.now;
        reset(&mut world.hcas[0], now, 100);
        create_initiator(&mut world.hcas[0], 100, 0);
        post(&mut world.hcas[0], 100, (1, 200), add(2));
        world.settle(SECOND);
        // Its PSN is that of the next request of the current connection.
        send_late_add(&mut world, 100, connection, 1);
        assert_eq!(
            world.hcas[1].host.memory[64_000], expected_sum,
            "{connection}"
        );
    }
}

#[test]
pub(super) fn a_stream_error_leaves_other_streams_unaffected() {
    for kind in KINDS {
        let mut world = world(2, kind, 1);
        // The initiator fails with the fourth stream in error.
        create_initiator(&mut world.hcas[0], 100, 2);
        let invalid_local = || {
            let mut invalid = work(0, Operation::Write, 0, 3000, 0);
            invalid.local.length = 1500;
            invalid
        };
        let invalid_remote = || work(0, Operation::Write, 0, 8, MEMORY);
        let add = || work(0, Operation::FetchAdd { add: 1 }, 64_000, 8, 64_000);
        let mut id = 0;
        let mut post_on_stream = |world: &mut World, stream: u16, mut request: SendWork<Range>| {
            request.stream = stream;
            request.id = id;
            id += 1;
            post(&mut world.hcas[0], 100, (1, 200), request);
        };
        post_on_stream(&mut world, 1, add());
        post_on_stream(&mut world, 2, invalid_local());
        post_on_stream(&mut world, 2, add());
        post_on_stream(&mut world, 1, add());
        post_on_stream(&mut world, 3, invalid_remote());
        post_on_stream(&mut world, 1, add());
        post_on_stream(&mut world, 3, add());
        post_on_stream(&mut world, 0, add());
        world.settle(SECOND);
        let statuses_by_id: Vec<_> = statuses(&mut world.hcas[0], 100)
            .into_iter()
            .map(|(_, status)| status)
            .collect();
        let expected = [
            Status::Success,
            Status::LocalProtection,
            Status::Flushed,
            Status::Success,
            Status::RemoteAccess,
            Status::Success,
            Status::Flushed,
            Status::Success,
        ];
        assert_eq!(statuses_by_id, expected);
        assert_eq!(world.hcas[1].host.memory[64_000], 4, "each once");
        let transport = &mut world.hcas[0].transport;
        assert!(transport.restore_stream(100, 2));
        assert!(!transport.restore_stream(100, 2), "no longer in error");
        assert!(!transport.restore_stream(100, 1));
        post_on_stream(&mut world, 2, add());
        post_on_stream(&mut world, 2, invalid_local());
        post_on_stream(&mut world, 4, invalid_local());
        post_on_stream(&mut world, 1, add());
        post_on_stream(&mut world, 5, invalid_local());
        post_on_stream(&mut world, 1, add());
        world.settle(SECOND);
        let statuses_by_id = statuses(&mut world.hcas[0], 100).split_off(8);
        let expected = [
            (8, Status::Success),
            (9, Status::LocalProtection),
            (10, Status::LocalProtection),
            (11, Status::Success),
            (12, Status::LocalProtection),
            (13, Status::Flushed),
        ];
        assert_eq!(statuses_by_id, expected);
        let view = world.hcas[0].transport.query(100).unwrap();
        assert_eq!(view.state, QpState::Error);
        // A reset clears the errors of streams.
        let now = world.now;
        reset(&mut world.hcas[0], now, 100);
        create_initiator(&mut world.hcas[0], 100, 2);
        post_on_stream(&mut world, 5, add());
        world.settle(SECOND);
        let last = statuses(&mut world.hcas[0], 100).pop();
        assert_eq!(last, Some((14, Status::Success)));
    }
}

#[test]
fn requests_after_a_response_without_a_scatter_target_execute_once() {
    let config = QpConfig {
        max_rd_atomic: 1,
        ..QpConfig::default()
    };
    for max_rd_atomic in [1, 16] {
        let mut world = world(2, LinkKind::Ib, 1);
        let hca = &mut world.hcas[0];
        let config = QpConfig {
            service: Service::DcInitiator,
            log_errored_streams: 2,
            max_rd_atomic,
            ..config.clone()
        };
        hca.transport.create(100, config.clone()).unwrap();
        hca.raise(100, &config, 0);
        for id in 0..6 {
            let mut request = work(id, Operation::FetchAdd { add: 1 }, 64_000, 8, 64_000);
            request.stream = 1;
            if id == 2 {
                request = work(id, Operation::Read, 0, 3000, 0);
                request.local.length = 1500;
                request.stream = 2;
            }
            post(hca, 100, (1, 200), request);
        }
        world.settle(SECOND);
        let mut expected = successes(0..6);
        expected[2].1 = Status::LocalProtection;
        assert_eq!(statuses(&mut world.hcas[0], 100), expected);
        assert_eq!(world.hcas[1].host.memory[64_000], 5);
    }
}

#[test]
fn a_target_forgets_the_least_recently_active_peer() {
    let mut world = world(2, LinkKind::Ib, 1);
    // More initiators than the target remembers; the first one sends again in between.
    let mut connections = Vec::new();
    for n in 0..1100_u32 {
        let qpn = 1000 + n;
        create_initiator(&mut world.hcas[0], qpn, 0);
        let add = || work(0, Operation::FetchAdd { add: 1 }, 64_000, 8, 64_000);
        connections.push(world.now.max(1));
        post(&mut world.hcas[0], qpn, (1, 200), add());
        if n == 1000 {
            post(&mut world.hcas[0], 1000, (1, 200), add());
        }
        world.settle(SECOND);
    }
    let count = |world: &World| {
        let value = &world.hcas[1].host.memory[64_000..64_002];
        u16::from_le_bytes([value[0], value[1]])
    };
    assert_eq!(count(&world), 1101);
    // Duplicates of remembered initiators are not executed again.
    for n in [0, 1098, 1099] {
        send_late_add(&mut world, 1000 + n, connections[n as usize], 0);
        assert_eq!(count(&world), 1101, "{n}");
    }
    // A forgotten initiator is accepted as a new one.
    let add = work(1, Operation::FetchAdd { add: 1 }, 64_000, 8, 64_000);
    post(&mut world.hcas[0], 1001, (1, 200), add);
    world.settle(SECOND);
    let last = statuses(&mut world.hcas[0], 1001).pop();
    assert_eq!(last, Some((1, Status::Success)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Over a lossy fabric with frequent changes of the target, every request is
    /// executed once and in order.
    #[test]
    fn requests_to_changing_targets_execute_once_over_a_lossy_fabric(
        requests in prop::collection::vec((0usize..3, 0u8..4, 0u32..3000), 1..60),
        loss in 0.0..0.1f64,
        duplicate in 0.0..0.1f64,
        reorder in 0.0..0.1f64,
        seed: u64,
    ) {
        let mut world = world(3, LinkKind::Ethernet, seed);
        fill(&mut world.hcas[0].host.memory[..3000], 9);
        let source = world.hcas[0].host.memory[..3000].to_vec();
        create_initiator(&mut world.hcas[0], 100, 0);
        world.fabric.set_faults(Faults {
            loss,
            duplicate,
            reorder,
            ..Faults::default()
        });
        for peer in 0..3 {
            for id in 0..60 {
                world.hcas[peer].post_recv(200, id, 40_000, 3000);
            }
        }
        let mut added = [0u64; 3];
        let mut sent: [Vec<u32>; 3] = Default::default();
        for (id, &(peer, kind, length)) in requests.iter().enumerate() {
            let id = id as u64;
            let mut request = match kind {
                0 => work(id, Operation::Write, 0, length, 50_000),
                1 => work(id, Operation::Read, 60_000, length, 0),
                2 => {
                    sent[peer].push(id as u32);
                    work(id, Operation::SendImm, 0, length, 0)
                }
                _ => {
                    added[peer] += u64::from(length);
                    let add = u64::from(length);
                    work(id, Operation::FetchAdd { add }, 70_000, 8, 80_000)
                }
            };
            request.imm = id as u32;
            post(&mut world.hcas[0], 100, (peer, 200), request);
        }
        world.settle(3600 * SECOND);
        prop_assert_eq!(statuses(&mut world.hcas[0], 100), successes(0..requests.len() as u64));
        for peer in 0..3 {
            let hca = &mut world.hcas[peer];
            let actual: Vec<u32> = hca.host.queues(200).received.iter().map(|r| r.1.imm).collect();
            prop_assert_eq!(&actual, &sent[peer]);
            let counter = &hca.host.memory[80_000..80_008];
            prop_assert_eq!(counter, added[peer].to_le_bytes());
            let max_length = requests.iter().filter(|a| a.0 == peer && a.1 == 0).map(|a| a.2).max();
            let written = max_length.unwrap_or(0) as usize;
            prop_assert!(hca.host.memory[50_000..50_000 + written] == source[..written]);
        }
    }
}
