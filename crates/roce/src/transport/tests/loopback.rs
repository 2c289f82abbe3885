//! Loopback between queue pairs of one HCA has the same results as packets.

use super::*;
use crate::packet::Link;
use proptest::prelude::*;

const SLOT: usize = 16 * 1024;
const SLOTS: usize = 24;
/// Memory that is sent, that is written, of reads, and of receives; a counter.
const SENT_DATA: usize = 0;
const WRITTEN_DATA: usize = SLOTS * SLOT;
const READ_DATA: usize = 2 * SLOTS * SLOT;
const RECEIVED_DATA: usize = 3 * SLOTS * SLOT;
const COUNTER: usize = 4 * SLOTS * SLOT;

#[derive(Clone, Debug)]
enum Action {
    Post(Operation, u32),
    WrongKey,
    TooLong,
    Receive,
    Turn,
    /// A queue pair goes to the error state, or both are reset, with nothing to do.
    Fail(u32),
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    let length = prop_oneof![0u32..100, 900u32..1100, 0u32..SLOT as u32];
    let operation = prop_oneof![
        Just(Operation::Send),
        Just(Operation::SendImm),
        Just(Operation::Write),
        Just(Operation::Write),
        Just(Operation::WriteImm),
        Just(Operation::Read),
        Just(Operation::Local),
        (1u64..100).prop_map(|add| Operation::FetchAdd { add }),
    ];
    prop_oneof![
        20 => (operation, length).prop_map(|(operation, length)| Action::Post(operation, length)),
        1 => Just(Action::WrongKey),
        1 => Just(Action::TooLong),
        8 => Just(Action::Receive),
        6 => Just(Action::Turn),
        1 => prop_oneof![Just(100), Just(200)].prop_map(Action::Fail),
        1 => Just(Action::Restart),
    ]
}

fn loopback_world(kind: LinkKind, config: &QpConfig, loops_back: bool) -> World {
    let memory = COUNTER + 8;
    let mut world = World::new(1, kind, memory, 1);
    world.connect((0, 100), (0, 200), config);
    let hca = &mut world.hcas[0];
    if loops_back {
        hca.transport.set_loopback(Some(Arc::clone(&hca.port)));
    }
    open(hca, memory);
    fill(&mut hca.host.memory, 5);
    world
}

/// Completed sends, completed receives, and events of a queue pair.
type QueueResults = (
    Vec<(u64, SendDone)>,
    Vec<(u64, Status, u32, u32, bool)>,
    Vec<QpEvent>,
);

fn queue_results(hca: &mut Hca, qpn: u32) -> QueueResults {
    let queues = hca.host.queues(qpn);
    let received =
        |(id, done): &(u64, RecvDone)| (*id, done.status(), done.length, done.imm, done.solicited);
    (
        queues.sent.clone(),
        queues.received.iter().map(received).collect(),
        queues.events.clone(),
    )
}

fn change_state(world: &mut World, qpn: u32, to: QpState) {
    let now = world.now;
    let hca = &mut world.hcas[0];
    let config = hca.transport.config(qpn).unwrap().clone();
    let changed = hca.transport.modify(&mut hca.host, now, qpn, to, config);
    changed.unwrap();
}

fn run(kind: LinkKind, actions: &[Action], config: &QpConfig, loops_back: bool) -> World {
    let mut world = loopback_world(kind, config, loops_back);
    // On UC a message without a receive is lost, at different times in the two modes.
    let all = actions.len() as u64;
    let mut receives = 0..all;
    let receive = |hca: &mut Hca, number: u64| {
        let slot = number as usize % SLOTS * SLOT;
        hca.post_recv(200, number, RECEIVED_DATA + slot, SLOT as u32);
    };
    if config.service == Service::Uc {
        receives
            .by_ref()
            .for_each(|number| receive(&mut world.hcas[0], number));
    }
    for (id, action) in (0..).zip(actions) {
        let slot = id as usize % SLOTS * SLOT;
        let hca = &mut world.hcas[0];
        match *action {
            Action::Post(operation, length) => {
                let (start, at) = match operation {
                    Operation::Read => (READ_DATA + slot, SENT_DATA + slot),
                    Operation::FetchAdd { .. } => (READ_DATA + slot, COUNTER),
                    _ => (SENT_DATA + slot, WRITTEN_DATA + slot),
                };
                let mut work = work(id, operation, start, length.max(8), at);
                work.length = length;
                work.imm = id as u32;
                work.solicited = id % 3 == 0;
                work.fence = [Fence::None, Fence::Reads, Fence::All][id as usize % 5 % 3];
                hca.post_send(100, work);
            }
            Action::WrongKey => {
                let mut work = work(id, Operation::Write, SENT_DATA, 8, WRITTEN_DATA);
                work.rkey += 1;
                hca.post_send(100, work);
            }
            Action::TooLong => {
                let mut work = work(id, Operation::Send, SENT_DATA, 8, 0);
                work.length = SLOT as u32 + 1;
                hca.post_send(100, work);
            }
            Action::Receive => receives
                .by_ref()
                .take(1)
                .for_each(|number| receive(hca, number)),
            Action::Turn => drop(world.turn()),
            Action::Fail(qpn) => {
                world.settle(MS);
                change_state(&mut world, qpn, QpState::Error);
            }
            Action::Restart => {
                world.settle(MS);
                for to in [
                    QpState::Reset,
                    QpState::Init,
                    QpState::ReadyToReceive,
                    QpState::ReadyToSend,
                ] {
                    for qpn in [100, 200] {
                        change_state(&mut world, qpn, to);
                    }
                }
            }
        }
    }
    receives.for_each(|number| receive(&mut world.hcas[0], number));
    world.settle(SECOND);
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn loopback_has_the_same_results_as_packets(
        actions in proptest::collection::vec(action(), 1..60),
        unreliable in proptest::bool::ANY,
        mtu in 1u8..=5,
    ) {
        let config = QpConfig {
            service: if unreliable { Service::Uc } else { Service::Rc },
            mtu: Mtu::from_code(mtu).unwrap(),
            min_rnr_timer: 1,
            ..QpConfig::default()
        };
        for kind in KINDS {
            let mut worlds = [false, true].map(|loops_back| run(kind, &actions, &config, loops_back));
            for qpn in [100, 200] {
                let [with, without] = worlds.each_mut().map(|world| queue_results(&mut world.hcas[0], qpn));
                prop_assert_eq!(with, without, "{:?} {}", kind, qpn);
            }
            let [with, without] = worlds.each_ref().map(|world| &world.hcas[0]);
            prop_assert!(with.host.memory == without.host.memory, "{:?}: memory", kind);
            prop_assert_eq!(with.transport.query(200).unwrap(), without.transport.query(200).unwrap());
        }
    }
}

#[test]
fn looped_back_writes_make_no_packets() {
    for kind in ADDRESSED {
        let mut world = loopback_world(kind, &QpConfig::default(), true);
        world.hcas[0].post_recv(200, 9, RECEIVED_DATA, SLOT as u32);
        for (id, operation) in [(1, Operation::Write), (2, Operation::Send)] {
            world.hcas[0].post_send(100, work(id, operation, SENT_DATA, 10_000, WRITTEN_DATA));
            world.settle(SECOND);
            let sent = world.hcas[0].port.counters().sent;
            assert_eq!(sent > 0, operation == Operation::Send, "{kind:?}");
        }
        let hca = &mut world.hcas[0];
        let sent = [(1, Status::Success), (2, Status::Success)];
        assert_eq!(statuses(hca, 100), sent);
        assert_eq!(recv_statuses(hca, 200), [(9, Status::Success)]);
        let memory = &hca.host.memory;
        assert!(
            memory[WRITTEN_DATA..WRITTEN_DATA + 10_000] == memory[SENT_DATA..SENT_DATA + 10_000]
        );
        assert!(
            memory[RECEIVED_DATA..RECEIVED_DATA + 10_000] == memory[SENT_DATA..SENT_DATA + 10_000]
        );
    }
}

/// A queue pair connected to itself, one that its peer does not accept, and one whose
/// peer is connected to another use packets.
#[test]
fn requests_to_other_peers_make_packets() {
    let config = QpConfig::default();
    for (to_itself, other_pkey) in [(true, false), (false, true), (false, false)] {
        let mut world = loopback_world(LinkKind::Ib, &config, true);
        let hca = &mut world.hcas[0];
        let config = QpConfig {
            path: Some(hca.path_to(0)),
            remote_qpn: if to_itself { 300 } else { 200 },
            pkey: if other_pkey { 0x8001 } else { config.pkey },
            ..config.clone()
        };
        hca.transport.create(300, config.clone()).unwrap();
        hca.raise(300, &config, 0);
        hca.post_send(300, work(1, Operation::Write, SENT_DATA, 100, WRITTEN_DATA));
        world.settle(MS);
        let hca = &mut world.hcas[0];
        assert!(hca.port.counters().sent > 0);
        let expected: &[_] = if to_itself {
            &[(1, Status::Success)]
        } else {
            &[]
        };
        assert_eq!(statuses(hca, 300), expected);
        assert_eq!(hca.transport.counters().pkey_violations > 0, other_pkey);
    }
}

/// Frames are routed by the destination: a path from the port's own LID may lead to
/// another port.
#[test]
fn requests_to_another_port_make_packets() {
    let mut world = loopback_world(LinkKind::Ib, &QpConfig::default(), true);
    let hca = &mut world.hcas[0];
    let mut path = hca.path_to(0);
    if let Link::Ib { slid, dlid, .. } = &mut path.link {
        (*slid, *dlid) = (*slid + 1, *dlid + 1);
    }
    let config = QpConfig {
        path: Some(path),
        remote_qpn: 200,
        ..QpConfig::default()
    };
    hca.raise(100, &config, 0);
    hca.post_send(100, work(1, Operation::Write, SENT_DATA, 100, WRITTEN_DATA));
    world.settle(MS);
    let hca = &mut world.hcas[0];
    assert!(hca.port.counters().discarded > 0);
    assert_eq!(statuses(hca, 100), []);
}

/// Queue pairs with congestion control count sent bytes, so they make packets.
#[test]
fn controlled_congestion_counts_packets() {
    for service in [Service::Rc, Service::Uc] {
        let mut world = World::new(1, LinkKind::Ethernet, COUNTER + 8, 1);
        let hca = &mut world.hcas[0];
        hca.transport.set_lossy(true);
        hca.transport.set_loopback(Some(Arc::clone(&hca.port)));
        let config = QpConfig {
            service,
            ..QpConfig::default()
        };
        world.connect((0, 100), (0, 200), &config);
        let hca = &mut world.hcas[0];
        open(hca, COUNTER + 8);
        hca.post_send(
            100,
            work(1, Operation::Write, SENT_DATA, 10_000, WRITTEN_DATA),
        );
        world.settle(SECOND);
        let hca = &mut world.hcas[0];
        assert_eq!(statuses(hca, 100), [(1, Status::Success)]);
        assert!(hca.port.counters().sent >= 10, "{service:?}");
    }
}

/// Writes behind a read are not acknowledged before its response has arrived.
#[test]
fn acknowledgements_follow_read_responses() {
    let mut world = loopback_world(LinkKind::Ib, &QpConfig::default(), true);
    let hca = &mut world.hcas[0];
    hca.post_send(100, work(0, Operation::Read, READ_DATA, 10_000, SENT_DATA));
    for id in 1..100 {
        hca.post_send(
            100,
            work(id, Operation::Write, SENT_DATA, 100, WRITTEN_DATA),
        );
    }
    world.settle(SECOND);
    let hca = &mut world.hcas[0];
    let all: Vec<_> = (0..100).map(|id| (id, Status::Success)).collect();
    assert_eq!(statuses(hca, 100), all);
    assert_eq!(hca.transport.counters().retransmitted, 0);
}

/// On UC, which has no acknowledgements, the packets that are not made are counted as those
/// that are.
#[test]
fn looped_back_packets_are_counted() {
    for kind in [LinkKind::Ib, LinkKind::Ethernet] {
        let config = QpConfig {
            service: Service::Uc,
            ..QpConfig::default()
        };
        let counters = [false, true].map(|loops_back| {
            let mut world = loopback_world(kind, &config, loops_back);
            for (id, length) in (0..).zip([0, 1, 1023, 1024, 1025, 9001]) {
                let write = work(id, Operation::Write, SENT_DATA, length, WRITTEN_DATA);
                world.hcas[0].post_send(100, write);
            }
            world.settle(SECOND);
            let counters = world.hcas[0].transport.counters();
            assert_eq!(world.hcas[0].port.counters().sent == 0, loops_back);
            [
                counters.packets_sent,
                counters.packets_received,
                counters.bytes_sent,
                counters.bytes_received,
            ]
        });
        assert_eq!(counters[0], counters[1], "{kind:?}");
        assert!(counters[0][2] > 12_074, "{counters:?}");
    }
}
