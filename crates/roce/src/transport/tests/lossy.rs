//! Loss, duplication, reordering and corruption: every message arrives once and in
//! order.

use super::*;
use proptest::prelude::*;

const SLOT: usize = 16 * 1024;

#[derive(Clone, Debug)]
enum Action {
    Send(u32),
    WriteImm(u32),
    Write(u32),
    Read(u32),
    Add(u64),
    Swap,
}

fn action() -> impl Strategy<Value = Action> {
    let length = prop_oneof![0u32..100, 900u32..1100, 0u32..SLOT as u32];
    prop_oneof![
        length.clone().prop_map(Action::Send),
        length.clone().prop_map(Action::WriteImm),
        length.clone().prop_map(Action::Write),
        length.prop_map(Action::Read),
        (1u64..100).prop_map(Action::Add),
        Just(Action::Swap),
    ]
}

/// Runs the actions in order in both directions and checks the results. The memory of
/// each HCA holds its own data, slots that the peer writes, slots for reads and receives,
/// and one atomic. Returns the number of retransmitted packets.
fn check_exactly_once(
    actions: &[Action],
    faults: Faults,
    seed: u64,
    kind: LinkKind,
    config: &QpConfig,
) -> u64 {
    check_with_recovery([false; 2], actions, faults, seed, kind, config)
}

/// As [`check_exactly_once`]; `recovers` says which HCAs recover from losses before a
/// timeout.
fn check_with_recovery(
    recovers: [bool; 2],
    actions: &[Action],
    faults: Faults,
    seed: u64,
    kind: LinkKind,
    config: &QpConfig,
) -> u64 {
    let count = actions.len();
    let (own_data, peer_data, local_data) = (0, count * SLOT, 2 * count * SLOT);
    let counter = 3 * count * SLOT;
    let memory = counter + 8;
    let mut world = pair_with_recovery(kind, memory, seed, config, recovers);
    for side in 0..2 {
        fill(
            &mut world.hcas[side].host.memory[..peer_data],
            side as u8 + 1,
        );
    }
    let source: Vec<Vec<u8>> = world
        .hcas
        .iter()
        .map(|h| h.host.memory[..peer_data].to_vec())
        .collect();
    world.fabric.set_faults(faults);
    for (side, qpn) in [(0, 100), (1, 200)] {
        let hca = &mut world.hcas[side];
        for (i, action) in actions.iter().enumerate() {
            // The peer runs the same actions, so its sends need a receive here.
            if matches!(action, Action::Send(_) | Action::WriteImm(_)) {
                hca.post_recv(qpn, i as u64, local_data + i * SLOT, SLOT as u32);
            }
            let (start, at) = (own_data + i * SLOT, peer_data + i * SLOT);
            let mut request = match *action {
                Action::Send(n) => work(i as u64, Operation::SendImm, start, n, 0),
                Action::WriteImm(n) => work(i as u64, Operation::WriteImm, start, n, at),
                Action::Write(n) => work(i as u64, Operation::Write, start, n, at),
                Action::Read(n) => work(i as u64, Operation::Read, local_data + i * SLOT, n, start),
                Action::Add(add) => work(
                    i as u64,
                    Operation::FetchAdd { add },
                    local_data + i * SLOT,
                    8,
                    counter,
                ),
                Action::Swap => {
                    let operation = Operation::CompareSwap {
                        compare: 0,
                        swap: 1 << 40,
                    };
                    work(i as u64, operation, local_data + i * SLOT, 8, counter)
                }
            };
            request.imm = i as u32;
            hca.post_send(qpn, request);
        }
    }
    world.settle(3600 * SECOND);
    for (side, qpn) in [(0, 100), (1, 200)] {
        let expected: Vec<_> = (0..count as u64).map(|id| (id, Status::Success)).collect();
        assert_eq!(
            statuses(&mut world.hcas[side], qpn),
            expected,
            "sends of {side}"
        );
    }
    for (side, qpn) in [(0, 100), (1, 200)] {
        let peer = &source[1 - side];
        let memory = &world.hcas[side].host.memory;
        let mut receives = Vec::new();
        let mut expected_value = 0u64;
        for (i, action) in actions.iter().enumerate() {
            let stored =
                |base: usize, n: u32| &memory[base + i * SLOT..base + i * SLOT + n as usize];
            let expected_data = |n: u32| &peer[i * SLOT..i * SLOT + n as usize];
            match *action {
                Action::Send(n) => {
                    assert!(stored(local_data, n) == expected_data(n), "send {i}");
                    receives.push((i as u64, n, i as u32));
                }
                Action::WriteImm(n) => {
                    assert!(stored(peer_data, n) == expected_data(n), "write {i}");
                    receives.push((i as u64, n, i as u32));
                }
                Action::Write(n) => assert!(stored(peer_data, n) == expected_data(n), "write {i}"),
                Action::Read(n) => assert!(stored(local_data, n) == expected_data(n), "read {i}"),
                Action::Add(_) | Action::Swap => {
                    // One peer performs all atomics on this memory, in order: each sees
                    // the sum so far.
                    let mut seen = [0; 8];
                    seen.copy_from_slice(stored(local_data, 8));
                    assert_eq!(
                        u64::from_le_bytes(seen),
                        expected_value,
                        "atomic {i} of {side}"
                    );
                    match *action {
                        Action::Add(add) => expected_value += add,
                        _ if expected_value == 0 => expected_value = 1 << 40,
                        _ => {}
                    }
                }
            }
        }
        assert_eq!(
            memory[counter..counter + 8],
            expected_value.to_le_bytes(),
            "once each"
        );
        let actual: Vec<_> = world.hcas[side]
            .host
            .queues(qpn)
            .received
            .iter()
            .map(|(id, done)| (*id, done.length, done.imm))
            .collect();
        assert_eq!(actual, receives, "receives of {side}");
    }
    world
        .hcas
        .iter()
        .map(|h| h.transport.counters().retransmitted)
        .sum()
}

fn config(psn: u32) -> QpConfig {
    QpConfig {
        send_psn: psn,
        recv_psn: psn,
        ack_timeout: 8,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        ..QpConfig::default()
    }
}

fn one_percent() -> Faults {
    Faults {
        delay: 2_000,
        jitter: 1_000,
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.01,
        reorder_delay: 20_000,
        corrupt: 0.01,
    }
}

fn high_loss() -> Faults {
    Faults {
        loss: 0.08,
        duplicate: 0.1,
        reorder: 0.2,
        ..one_percent()
    }
}

/// On a very lossy fabric, late responses alone can exhaust the seven retries of verbs, in
/// about one of ten thousand cases.
fn with_many_retries(psn: u32) -> QpConfig {
    QpConfig {
        retry_count: 40,
        ..config(psn)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn messages_arrive_once_over_a_lossy_fabric(
        actions in proptest::collection::vec(action(), 1..40),
        seed: u64,
        psn in prop_oneof![Just(0u32), Just(0xff_fff0), 0u32..1 << 24],
        ib: bool,
    ) {
        let kind = if ib { LinkKind::Ib } else { LinkKind::Ethernet };
        check_exactly_once(&actions, one_percent(), seed, kind, &config(psn));
    }

    /// With and without recovery before a timeout, at one or both ends.
    #[test]
    fn messages_arrive_once_with_recovery(
        actions in proptest::collection::vec(action(), 1..40),
        seed: u64,
        psn in prop_oneof![Just(0u32), Just(0xff_fff0), Just(0x7f_fff0), 0u32..1 << 24],
        both: bool,
        timeout in prop_oneof![Just(8u8), Just(14)],
        is_very_lossy: bool,
    ) {
        let (faults, config) = if is_very_lossy {
            (high_loss(), with_many_retries(psn))
        } else {
            (one_percent(), config(psn))
        };
        let config = QpConfig { ack_timeout: timeout, ..config };
        check_with_recovery([true, both], &actions, faults, seed, LinkKind::Ethernet, &config);
    }

    /// Loses more than any real network; progress resets the retry count.
    #[test]
    fn messages_arrive_once_over_a_very_lossy_fabric(actions in proptest::collection::vec(action(), 1..12), seed: u64) {
        check_exactly_once(&actions, high_loss(), seed, LinkKind::Ethernet, &with_many_retries(0xff_fff0));
    }
}

#[test]
fn lost_packets_are_retransmitted() {
    let actions: Vec<Action> = (0..300)
        .map(|i| match i % 5 {
            0 => Action::Send(3000),
            1 => Action::Write(5000),
            2 => Action::Read(9000),
            3 => Action::Add(i),
            _ => Action::WriteImm(64),
        })
        .collect();
    let retransmitted = check_exactly_once(
        &actions,
        one_percent(),
        42,
        LinkKind::Ethernet,
        &config(0xff_ff00),
    );
    assert!(retransmitted > 20, "{retransmitted} retransmitted packets");
    // The same seed gives the same result.
    assert_eq!(
        retransmitted,
        check_exactly_once(
            &actions,
            one_percent(),
            42,
            LinkKind::Ethernet,
            &config(0xff_ff00)
        )
    );
}

/// Atomics that are repeated often are still executed once each.
#[test]
fn atomics_are_executed_once() {
    let actions: Vec<Action> = (0..1000).map(|_| Action::Add(1)).collect();
    let faults = Faults {
        loss: 0.05,
        duplicate: 0.05,
        reorder: 0.05,
        ..one_percent()
    };
    let retransmitted = check_exactly_once(&actions, faults, 9, LinkKind::Ib, &config(5));
    assert!(retransmitted > 20, "{retransmitted} packets sent again");
}

/// Unreliable connections lose whole messages only.
#[test]
fn unreliable_messages_are_complete_or_lost() {
    let config = QpConfig {
        service: Service::Uc,
        mtu: Mtu::B256,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ethernet, 400 * 1024, 11, &config);
    let faults = Faults {
        delay: 10,
        loss: 0.03,
        reorder: 0.01,
        reorder_delay: 50,
        ..Faults::default()
    };
    world.fabric.set_faults(faults);
    const COUNT: usize = 200;
    for i in 0..COUNT {
        let start = i * 1024;
        world.hcas[0].host.memory[start..start + 1024].fill(i as u8);
        world.hcas[1].post_recv(200, i as u64, start, 1024);
        let mut request = work(i as u64, Operation::SendImm, start, 1024, 0);
        request.imm = i as u32;
        world.hcas[0].post_send(100, request);
    }
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), COUNT);
    let received = world.hcas[1].host.queues(200).received.clone();
    assert!(
        (COUNT / 2..COUNT).contains(&received.len()),
        "{}",
        received.len()
    );
    for (n, (id, done)) in received.iter().enumerate() {
        // Receives are consumed in order without gaps.
        assert_eq!(
            (*id, done.status(), done.length),
            (n as u64, Status::Success, 1024)
        );
        let at = n * 1024;
        assert!(
            world.hcas[1].host.memory[at..at + 1024]
                .iter()
                .all(|b| *b == done.imm as u8)
        );
    }
    assert!(received.windows(2).all(|w| w[0].1.imm < w[1].1.imm));
}

/// Each event of a queue pair is counted for it.
#[test]
fn events_are_counted_for_their_queue_pair() {
    for recovers in [false, true] {
        let config = QpConfig {
            ack_timeout: 8,
            ..with_many_retries(0)
        };
        let mut world = pair_with_recovery(LinkKind::Ethernet, 8 * SLOT, 3, &config, [recovers; 2]);
        world.fabric.set_faults(high_loss());
        for id in 0..200 {
            let operation = [Operation::Write, Operation::Send, Operation::Read][id as usize % 3];
            let post = work(id, operation, 0, 5000, SLOT);
            world.hcas[0].post_send(100, post);
        }
        // The first sends find no receive.
        world.settle(SECOND / 100);
        for id in 0..200 {
            world.hcas[1].post_recv(200, id, 2 * SLOT, SLOT as u32);
        }
        world.settle(100 * SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 100).len(), 200);
        let [requester, responder] = [0, 1].map(|side| {
            let counted = world.hcas[side].host.counted.clone();
            let count = move |event| counted.iter().filter(|it| **it == event).count() as u64;
            (count, world.hcas[side].transport.counters())
        });
        assert_eq!(
            responder.0(Counted::OutOfSequence),
            responder.1.out_of_sequence
        );
        assert_eq!(responder.0(Counted::Duplicate), responder.1.duplicates);
        assert_eq!(requester.0(Counted::SequenceNak), requester.1.naks);
        assert_eq!(requester.0(Counted::RnrNak), requester.1.rnr_naks);
        assert_eq!(requester.0(Counted::Timeout), requester.1.timeouts);
        assert!(requester.0(Counted::ImpliedNak) > 0 || recovers);
        for event in [
            requester.0(Counted::SequenceNak),
            requester.0(Counted::RnrNak),
            requester.0(Counted::Timeout),
            responder.0(Counted::OutOfSequence),
            responder.0(Counted::Duplicate),
        ] {
            assert!(event > 0);
        }
    }
}
