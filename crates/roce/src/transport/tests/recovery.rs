//! Recovery from losses before the local ACK timeout.

use super::*;
use crate::fabric::{Delivery, Tap};
use crate::packet::{OpcodeFlags, Packet, View};

/// Loses the frames for which the function returns true; it is called with the sender.
struct LossTap<F>(F);

impl<F: FnMut(usize, &View<'_>) -> bool + Send> Tap for LossTap<F> {
    fn transfer(&mut self, _: u64, from: usize, _: usize, packet: &mut Packet) -> Delivery {
        let view = View::read(packet.kind(), packet.frame()).unwrap();
        Delivery {
            lost: (self.0)(from, &view),
            ..Delivery::default()
        }
    }
}

const DELAY: u64 = 10_000;
const PSN: u32 = 0xff_fffe;
/// Offset of the peer's data in its memory.
const PEER_DATA: usize = 64 * 1024;
const MEMORY: usize = 128 * 1024;

/// Two HCAs, the local ACK timeout of which is four seconds.
fn world(
    recovers: [bool; 2],
    lose: impl FnMut(usize, &View<'_>) -> bool + Send + 'static,
) -> World {
    let config = QpConfig {
        send_psn: PSN,
        recv_psn: PSN,
        ack_timeout: 20,
        ..QpConfig::default()
    };
    let mut world = pair_with_recovery(LinkKind::Ethernet, MEMORY, 1, &config, recovers);
    world.fabric.set_faults(Faults {
        delay: DELAY,
        ..Faults::default()
    });
    world.fabric.set_tap(Some(Box::new(LossTap(lose))));
    fill(&mut world.hcas[0].host.memory[..PEER_DATA], 1);
    fill(&mut world.hcas[1].host.memory[PEER_DATA..], 2);
    world
}

/// Runs for 100 ms, in which all of `count` work requests must have ended without a
/// timeout.
fn check_success(world: &mut World, count: u64) {
    world.settle(100 * MS);
    let expected: Vec<_> = (0..count).map(|id| (id, Status::Success)).collect();
    assert_eq!(statuses(&mut world.hcas[0], 100), expected);
    assert_eq!(world.hcas[0].transport.counters().timeouts, 0);
}

/// Returns whether a frame is the request of this number, from 0, counted by packets.
fn is_request(from: usize, view: &View<'_>, number: u32) -> bool {
    from == 0 && view.bth.psn == crate::packet::Psn::new(PSN).plus(number)
}

fn is_ack(from: usize, view: &View<'_>) -> bool {
    from == 1
        && view.has(OpcodeFlags::RESPONSE)
        && !view.has(OpcodeFlags::READ)
        && !view.has(OpcodeFlags::ATOMIC)
}

/// Loses the first `count` frames that match.
fn lose_first(
    count: u32,
    mut matches: impl FnMut(usize, &View<'_>) -> bool + Send,
) -> impl FnMut(usize, &View<'_>) -> bool + Send {
    let mut remaining = count;
    move |from, view| {
        let lose = remaining > 0 && matches(from, view);
        remaining -= u32::from(lose);
        lose
    }
}

/// Writes 5000 bytes, five packets, twice. Returns the packets that were sent again, and
/// the time that it took.
fn write_twice(
    recovers: bool,
    lose: impl FnMut(usize, &View<'_>) -> bool + Send + 'static,
) -> (u64, u64) {
    let mut world = world([true, recovers], lose);
    let source = world.hcas[0].host.memory[..10_000].to_vec();
    for id in 0..2 {
        let at = 5000 * id as usize;
        world.hcas[0].post_send(100, work(id, Operation::Write, at, 5000, at));
    }
    let end = world.now + 100 * MS;
    while world.hcas[0].host.queues(100).sent.len() < 2 && world.now < end {
        world.settle(DELAY);
        world.now += DELAY;
    }
    let elapsed = world.now;
    check_success(&mut world, 2);
    assert!(world.hcas[1].host.memory[..10_000] == source);
    (world.hcas[0].transport.counters().retransmitted, elapsed)
}

#[test]
fn only_the_lost_packet_is_retransmitted() {
    let result = write_twice(true, lose_first(1, |from, view| is_request(from, view, 3)));
    assert!(result.0 == 1 && result.1 < 10 * DELAY, "{result:?}");
    // A peer without a reorder buffer needs all later packets, too.
    let result = write_twice(false, lose_first(1, |from, view| is_request(from, view, 3)));
    assert!(result.0 >= 7 && result.1 < 10 * DELAY, "{result:?}");
}

#[test]
fn a_lost_last_packet_is_recovered() {
    // The oldest and the newest packet are sent again.
    let result = write_twice(true, lose_first(1, |from, view| is_request(from, view, 9)));
    assert_eq!(result.0, 2);
}

#[test]
fn a_lost_tail_is_recovered() {
    let tail = |from, view: &View<'_>| (4..10).any(|n| is_request(from, view, n));
    for recovers in [true, false] {
        let result = write_twice(recovers, lose_first(6, tail));
        assert!((6..10).contains(&result.0), "{result:?}");
    }
}

#[test]
fn a_lost_acknowledgement_is_recovered() {
    for recovers in [true, false] {
        for losses in 1..3 {
            let result = write_twice(recovers, lose_first(losses, is_ack));
            assert!((1..=4).contains(&result.0), "{result:?}");
        }
    }
}

#[test]
fn a_lost_retransmission_is_recovered() {
    for recovers in [true, false] {
        for losses in 2..5 {
            let lose = lose_first(losses, |from, view| is_request(from, view, 3));
            let result = write_twice(recovers, lose);
            assert!(result.0 >= u64::from(losses), "{result:?}");
        }
    }
}

#[test]
fn a_lost_packet_and_its_nak_are_recovered() {
    for recovers in [true, false] {
        let mut packet = lose_first(1, |from, view: &View<'_>| is_request(from, view, 3));
        let mut nak = lose_first(1, is_ack);
        write_twice(recovers, move |from, view| {
            packet(from, view) || nak(from, view)
        });
    }
}

/// Reads 9000 bytes twice, nine packets each. Returns the number of response packets, and
/// that of probes.
fn read_twice(lose: impl FnMut(usize, &View<'_>) -> bool + Send + 'static) -> (u64, u64) {
    let mut world = world([true; 2], lose);
    for id in 0..2 {
        let at = 9000 * id as usize;
        world.hcas[0].post_send(100, work(id, Operation::Read, at, 9000, PEER_DATA + at));
    }
    check_success(&mut world, 2);
    let [local, peer] = [0, 1].map(|at: usize| &world.hcas[at].host.memory);
    assert!(local[..18_000] == peer[PEER_DATA..PEER_DATA + 18_000]);
    let [requester, responder] = [0, 1].map(|at: usize| world.hcas[at].transport.counters());
    (responder.packets_sent, requester.probes)
}

#[test]
fn only_the_lost_read_response_is_requested_again() {
    let response = |from, psn| from == 1 && psn == crate::packet::Psn::new(PSN).plus(5);
    for losses in 1..4 {
        let sent = read_twice(lose_first(losses, move |from, view| {
            response(from, view.bth.psn)
        }));
        // The next packet reveals the first loss, a probe each further one.
        assert_eq!(sent, (18 + u64::from(losses), u64::from(losses) - 1));
    }
}

#[test]
fn several_lost_read_responses_are_recovered() {
    let psn = |number| crate::packet::Psn::new(PSN).plus(number);
    for psns in [[2, 4, 11], [1, 2, 3], [3, 9, 10]] {
        let psns = psns.map(psn);
        let sent = read_twice(lose_first(3, move |from, view| {
            from == 1 && psns.contains(&view.bth.psn)
        }));
        assert_eq!(sent, (18 + 3, 0), "{psns:?}");
    }
}

#[test]
fn a_read_response_lost_twice_is_recovered() {
    let psn = |number| crate::packet::Psn::new(PSN).plus(number);
    let mut remaining = vec![psn(1), psn(2), psn(3), psn(2)];
    let sent = read_twice(move |from, view| {
        let index = remaining.iter().position(|psn| *psn == view.bth.psn);
        let index = index.filter(|_| from == 1);
        index.is_some_and(|index| {
            remaining.remove(index);
            true
        })
    });
    assert_eq!(sent, (18 + 3 + 1, 0));
}

#[test]
fn lost_last_read_responses_are_recovered() {
    let last = |from, view: &View<'_>| {
        let psn = crate::packet::Psn::new(PSN).plus(15);
        from == 1 && !view.bth.psn.before(psn)
    };
    assert_eq!(read_twice(lose_first(3, last)).0, 18 + 3);
}

#[test]
fn a_lost_read_request_is_recovered() {
    for number in [0, 9] {
        read_twice(lose_first(1, move |from, view| {
            is_request(from, view, number)
        }));
    }
    read_twice(lose_first(2, |from, _| from == 0));
}

/// Every frame of an exchange is lost once, alone and with one of those after it.
#[test]
fn any_two_lost_frames_are_recovered() {
    let run_with_losses = |lost: [u32; 2], recovers: bool| {
        let mut count = 0;
        let mut world = world([true, recovers], move |_, _| {
            count += 1;
            lost.contains(&count)
        });
        let own_data = world.hcas[0].host.memory[..PEER_DATA].to_vec();
        let peer_data = world.hcas[1].host.memory[PEER_DATA..].to_vec();
        world.hcas[1].post_recv(200, 0, 20_000, 4000);
        world.hcas[1].post_recv(200, 1, 30_000, 4000);
        let add = Operation::FetchAdd { add: 5 };
        let swap = Operation::CompareSwap {
            compare: 5,
            swap: 9,
        };
        world.hcas[1].host.memory[40_000..40_008].fill(0);
        for (id, request) in [
            work(0, Operation::Send, 0, 3000, 0),
            work(1, Operation::Write, 5000, 4000, 0),
            work(2, Operation::Read, 50_000, 4000, PEER_DATA),
            work(3, add, 60_000, 8, 40_000),
            work(4, Operation::Send, 3000, 2000, 0),
            work(5, swap, 60_008, 8, 40_000),
            work(6, Operation::Read, 55_000, 3000, PEER_DATA + 4000),
            work(7, Operation::Write, 9000, 1500, 5000),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(request.id, id as u64);
            world.hcas[0].post_send(100, request);
        }
        check_success(&mut world, 8);
        let [local, peer] = [0, 1].map(|at: usize| &world.hcas[at].host.memory);
        assert!(peer[..4000] == own_data[5000..9000] && peer[5000..6500] == own_data[9000..10_500]);
        assert!(
            peer[20_000..23_000] == own_data[..3000]
                && peer[30_000..32_000] == own_data[3000..5000]
        );
        assert!(local[50_000..54_000] == peer_data[..4000]);
        assert!(local[55_000..58_000] == peer_data[4000..7000]);
        assert_eq!(
            local[60_000..60_016],
            [0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(peer[40_000..40_008], [9, 0, 0, 0, 0, 0, 0, 0]);
        let frames = |at: usize| world.hcas[at].transport.counters().packets_sent;
        frames(0) + frames(1)
    };
    for recovers in [true, false] {
        let frames = run_with_losses([0; 2], recovers) as u32;
        assert!(frames > 20, "{frames}");
        for one in 1..=frames {
            for other in one..one + 12 {
                run_with_losses([one, other], recovers);
            }
        }
    }
}

/// A peer that does not answer is reported after the time of its timeouts, and where
/// packets get lost after four times that.
#[test]
fn a_dead_peer_is_reported_in_time() {
    let time_to_failure = |recovers: bool, patient: bool| {
        let mut world = world([recovers; 2], |from, _| from == 1);
        let config = QpConfig {
            ack_timeout: 14,
            retry_count: 2,
            path: Some(world.hcas[0].path_to(1)),
            remote_qpn: 200,
            ..QpConfig::default()
        };
        let hca = &mut world.hcas[0];
        hca.transport.set_patient(patient);
        let to = QpState::ReadyToSend;
        let modified = hca.transport.modify(&mut hca.host, 0, 100, to, config);
        modified.unwrap();
        world.hcas[0].post_send(100, work(0, Operation::Write, 0, 5000, 0));
        world.hcas[0].post_send(100, work(1, Operation::Read, 0, 5000, 0));
        while world.hcas[0].host.queues(100).sent.is_empty() {
            assert!(world.now < 100 * SECOND);
            world.settle(MS);
            world.now += MS;
        }
        let sent = statuses(&mut world.hcas[0], 100);
        assert_eq!(sent[0], (0, Status::RetryExceeded));
        (world.now / MS, world.hcas[0].transport.counters().probes)
    };
    let (before, none) = time_to_failure(false, false);
    let (after, probes) = time_to_failure(true, false);
    // 67 ms, three times.
    assert!((200..210).contains(&before), "{before} ms");
    assert!((800..840).contains(&after), "{after} ms");
    assert_eq!(none, 0);
    assert!((3..40).contains(&probes), "{probes} probes");
    // No probe while received packets are unread: they may contain the answer.
    assert_eq!(time_to_failure(true, true).1, 0);
}

/// Varying round-trip times cause no retransmission.
#[test]
fn no_probes_are_sent_without_losses() {
    let mut world = world([true; 2], |_, _| false);
    world.fabric.set_faults(Faults {
        delay: 50_000,
        jitter: 20_000,
        ..Faults::default()
    });
    for id in 0..200 {
        let operation = match id % 2 {
            0 => Operation::Write,
            _ => Operation::Read,
        };
        world.hcas[0].post_send(100, work(id, operation, 0, 20_000, PEER_DATA));
    }
    check_success(&mut world, 200);
    let counters = world.hcas[0].transport.counters();
    assert_eq!((counters.probes, counters.retransmitted), (0, 0));
}

/// After an RNR NAK all packets are sent again, and kept ones are discarded.
#[test]
fn an_rnr_nak_discards_kept_packets() {
    let mut world = world(
        [true; 2],
        lose_first(1, |from, view| is_request(from, view, 1)),
    );
    for id in 0..4 {
        world.hcas[0].post_send(100, work(id, Operation::Send, 1000 * id as usize, 1000, 0));
    }
    world.hcas[1].post_recv(200, 0, 0, 1000);
    world.settle(MS / 2);
    assert_eq!(recv_statuses(&mut world.hcas[1], 200).len(), 1);
    for id in 1..4 {
        world.hcas[1].post_recv(200, id, 1000 * id as usize, 1000);
    }
    check_success(&mut world, 4);
    let [local, peer] = [0, 1].map(|at: usize| &world.hcas[at].host.memory);
    assert!(local[..4000] == peer[..4000]);
}
