//! Congestion marks, notifications, and the rate that answers them.

use std::sync::{Arc, Mutex};

use super::*;
use crate::fabric::{Delivery, Tap};
use crate::packet::{BTH_BYTES, Bth, CNP, Packet, PacketBuilder, Psn, Template, View};

const MEMORY: usize = 1 << 20;
const CE: u8 = 3;

/// A link with a capacity in bytes per second, for frames to HCA 1. It marks ECN-capable
/// frames that wait for longer than `mark_above`, and drops frames that wait for longer
/// than `drop_above`.
#[derive(Clone)]
struct Bottleneck(Arc<Mutex<Queue>>);

struct Queue {
    capacity: u64,
    mark_above: u64,
    drop_above: u64,
    free_at: u64,
    sent: u64,
    marked: u64,
    lost: u64,
    cnps: Vec<(u64, Vec<u8>)>,
    traffic_classes: Vec<u8>,
}

impl Bottleneck {
    fn new(capacity: u64, mark_above: u64, drop_above: u64) -> Self {
        Self(Arc::new(Mutex::new(Queue {
            capacity,
            mark_above,
            drop_above,
            free_at: 0,
            sent: 0,
            marked: 0,
            lost: 0,
            cnps: Vec::new(),
            traffic_classes: Vec::new(),
        })))
    }
}

impl Tap for Bottleneck {
    fn transfer(&mut self, now: u64, from: usize, _: usize, packet: &mut Packet) -> Delivery {
        let mut queue = self.0.lock().unwrap();
        let class = packet.frame()[15];
        if View::read(packet.kind(), packet.frame())
            .unwrap()
            .bth
            .opcode
            == CNP
        {
            queue.cnps.push((now, packet.frame().to_vec()));
        } else if !queue.traffic_classes.contains(&class) {
            queue.traffic_classes.push(class);
        }
        let mut delay = 10_000;
        if from == 0 {
            let length = packet.frame().len() as u64;
            let wait = queue.free_at.saturating_sub(now);
            let lost = wait > queue.drop_above;
            queue.lost += u64::from(lost);
            if lost {
                return Delivery {
                    lost,
                    ..Delivery::default()
                };
            }
            if wait > queue.mark_above && class & CE != 0 {
                packet.frame_mut()[15] |= CE;
                queue.marked += 1;
            }
            queue.sent += length;
            queue.free_at = now.max(queue.free_at) + length * SECOND / queue.capacity;
            delay += queue.free_at - now;
        }
        Delivery {
            delay,
            ..Delivery::default()
        }
    }
}

const NEVER: u64 = u64::MAX;

/// HCA 0 writes, or HCA 1 reads from it, messages of 64 KiB for half a second. Returns
/// the megabytes per second of the second half, counters, and the queue.
fn stream(service: Service, reads: bool, link: &Bottleneck) -> (u64, [Counters; 2]) {
    let config = QpConfig {
        service,
        send_psn: 0xff_fffe,
        recv_psn: 0xff_fffe,
        ..QpConfig::default()
    };
    let mut world = pair_with_recovery(LinkKind::Ethernet, MEMORY, 1, &config, [true; 2]);
    world.fabric.set_tap(Some(Box::new(link.clone())));
    let (side, qpn, operation) = match reads {
        true => (1, 200, Operation::Read),
        false => (0, 100, Operation::Write),
    };
    world.hcas[side].host.count_only = true;
    let (mut posted, mut ended_at_half) = (0, 0);
    while world.now < SECOND / 2 {
        let hca = &mut world.hcas[side];
        // An unreliable service posts 330 MB/s, since its sends end before they arrive.
        let max_posted = match service {
            Service::Uc => 1 + world.now / 200_000,
            _ => hca.host.sends_ended + 16,
        };
        while posted < max_posted {
            let at = (posted % 8) as usize * 65536;
            hca.post_send(qpn, work(posted, operation, at, 65536, at));
            posted += 1;
        }
        if ended_at_half == 0 && world.now >= SECOND / 4 {
            ended_at_half = hca.host.sends_ended;
        }
        world.settle(20_000);
        world.now += 20_000;
    }
    let done = world.hcas[side].host.sends_ended - ended_at_half;
    let counters = [0, 1].map(|at: usize| world.hcas[at].transport.counters());
    (done * 65536 * 4 / 1_000_000, counters)
}

#[test]
fn the_rate_adapts_to_a_link_that_marks() {
    for (service, reads) in [
        (Service::Rc, false),
        (Service::Rc, true),
        (Service::Uc, false),
    ] {
        let link = Bottleneck::new(20_000_000, MS, NEVER);
        let (rate, [requester, responder]) = stream(service, reads, &link);
        let queue = link.0.lock().unwrap();
        assert!(
            (14..=20).contains(&rate),
            "{service:?} {reads}: {rate} MB/s"
        );
        assert_eq!(requester.cnps_handled, responder.cnps_sent);
        assert!(responder.cnps_sent > 5 && responder.marked == queue.marked);
        // The queue stays short most of the time.
        let packets = queue.sent / 1100;
        assert!(
            queue.marked * 5 < packets * 3,
            "{} of {packets}",
            queue.marked
        );
        assert_eq!((requester.timeouts, responder.timeouts), (0, 0));
    }
}

/// A queue shorter than the window overflows: less with a window that adapts (of 27,000
/// packets 18,000 without one), and hardly if it marks before.
#[test]
fn a_full_queue_drops_few_marked_packets() {
    let lost = |mark_above| {
        let link = Bottleneck::new(20_000_000, mark_above, 2 * MS);
        let (rate, _) = stream(Service::Rc, false, &link);
        assert!(rate >= 14, "{rate} MB/s");
        let queue = link.0.lock().unwrap();
        queue.lost
    };
    let (with, without) = (lost(MS / 2), lost(NEVER));
    assert!(with < 50 && without < 6000, "{with} {without}");
}

#[test]
fn without_marks_the_rate_is_not_limited() {
    let link = Bottleneck::new(1_000_000_000, NEVER, NEVER);
    let (rate, counters) = stream(Service::Rc, false, &link);
    assert!(rate > 850, "{rate} MB/s");
    for counters in counters {
        assert_eq!((counters.cnps_sent, counters.cnps_handled), (0, 0));
        assert_eq!((counters.retransmitted, counters.marked), (0, 0));
    }
}

/// Returns the traffic classes of the packets of a queue pair with this one.
fn traffic_classes(traffic_class: u8, lossy: bool) -> Vec<u8> {
    let config = QpConfig::default();
    let mut world = pair_with_recovery(LinkKind::Ethernet, MEMORY, 1, &config, [lossy; 2]);
    let link = Bottleneck::new(1_000_000_000, NEVER, NEVER);
    world.fabric.set_tap(Some(Box::new(link.clone())));
    let mut path = world.hcas[0].path_to(1);
    if let Some(grh) = &mut path.grh {
        grh.traffic_class = traffic_class;
    }
    let hca = &mut world.hcas[0];
    let config = QpConfig {
        path: Some(path),
        remote_qpn: 200,
        ..config
    };
    let to = QpState::ReadyToSend;
    hca.transport
        .modify(&mut hca.host, 0, 100, to, config)
        .unwrap();
    assert_eq!(hca.transport.config(100).unwrap().path, Some(path));
    world.hcas[0].post_send(100, work(0, Operation::Write, 0, 5000, 0));
    // The peer's acknowledgements have its own class.
    while world.hcas[0].turn(0) {}
    let queue = link.0.lock().unwrap();
    queue.traffic_classes.clone()
}

#[test]
fn packets_are_ecn_capable() {
    for (class, sent) in [(0, 2), (0x68, 0x6a), (0x6a, 0x6a), (1, 1), (3, 2)] {
        assert_eq!(traffic_classes(class, true), [sent]);
        assert_eq!(traffic_classes(class, false), [class]);
    }
}

#[test]
fn at_most_one_cnp_is_sent_in_50_us() {
    let link = Bottleneck::new(1_000_000_000, 0, NEVER);
    let config = QpConfig::default();
    let mut world = pair_with_recovery(LinkKind::Ethernet, MEMORY, 1, &config, [true; 2]);
    world.fabric.set_tap(Some(Box::new(link.clone())));
    world.hcas[0].post_send(100, work(0, Operation::Write, 0, 500_000, 0));
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100), [(0, Status::Success)]);
    let queue = link.0.lock().unwrap();
    let times: Vec<u64> = queue.cnps.iter().map(|(time, _)| *time).collect();
    assert!(times.len() > 1 && (queue.marked as usize) > 2 * times.len());
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 50_000));
    let (_, frame) = &queue.cnps[0];
    let view = View::read(LinkKind::Ethernet, frame).unwrap();
    assert_eq!((view.bth.dest_qpn, view.bth.pkey), (100, 0xffff));
    assert!(!view.bth.ack_request && !view.bth.solicited && !view.bth.migrated);
    assert_eq!((view.payload.bytes(), view.opcode), (&[0; 16][..], None));
    // DSCP 48 without ECN; BECN.
    let bth = view.network.bth_at;
    assert_eq!((frame[15], frame[bth], frame[bth + 4]), (0xc0, 0x81, 0x40));
    assert_eq!(frame.len(), bth + BTH_BYTES + 16 + 4);
    // The PSN is in the past, as rdma_rxe requires.
    assert!(view.bth.psn.before(Psn::new(0)));
}

/// Returns a CNP to HCA 0.
fn cnp(from: &Template, qpn: u32, pkey: u16, length: usize) -> Packet {
    let bth = Bth {
        opcode: CNP,
        dest_qpn: qpn,
        pkey,
        ..Bth::default()
    };
    let mut builder = PacketBuilder::new(&Pool::new(), from, bth, length);
    builder.space(length).fill(0xff);
    builder.finish()
}

#[test]
fn cnps_for_no_controlled_queue_pair_are_discarded() {
    let is_cnp_handled = |lossy, service, qpn, pkey, length, from: usize| {
        let config = QpConfig {
            service,
            ..QpConfig::default()
        };
        let mut world = World::new(3, LinkKind::Ethernet, MEMORY, 1);
        world.hcas[0].transport.set_lossy(lossy);
        world.connect((0, 100), (1, 200), &config);
        let template = Template::new(&world.hcas[from].path_to(0));
        let hca = &mut world.hcas[0];
        let packet = cnp(&template, qpn, pkey, length);
        assert!(hca.transport.receive(&mut hca.host, 0, packet).is_none());
        let counters = hca.transport.counters();
        assert_eq!(counters.cnps_handled + counters.dropped, 1);
        counters.cnps_handled == 1
    };
    assert!(is_cnp_handled(true, Service::Rc, 100, 0xffff, 16, 1));
    assert!(is_cnp_handled(true, Service::Uc, 100, 0xffff, 16, 1));
    assert!(!is_cnp_handled(true, Service::Ud, 100, 0xffff, 16, 1));
    assert!(!is_cnp_handled(false, Service::Rc, 100, 0xffff, 16, 1));
    assert!(!is_cnp_handled(true, Service::Rc, 101, 0xffff, 16, 1));
    assert!(!is_cnp_handled(true, Service::Rc, 1, 0xffff, 16, 1));
    assert!(!is_cnp_handled(true, Service::Rc, 100, 0x1234, 16, 1));
    for length in [0, 4, 12, 20, 1024] {
        assert!(!is_cnp_handled(true, Service::Rc, 100, 0xffff, length, 1));
    }
    // Not from the peer.
    assert!(!is_cnp_handled(true, Service::Rc, 100, 0xffff, 16, 2));
}

/// Forged CNPs limit the rate of their queue pair to the minimum, and of no other one.
#[test]
fn forged_cnps_slow_down_only_their_queue_pair() {
    let config = QpConfig::default();
    let mut world = pair_with_recovery(LinkKind::Ethernet, MEMORY, 1, &config, [true; 2]);
    world.connect((0, 101), (1, 201), &config);
    let template = Template::new(&world.hcas[1].path_to(0));
    for qpn in [100, 101] {
        for id in 0..4 {
            world.hcas[0].post_send(qpn, work(id, Operation::Write, 0, 65536, 0));
        }
    }
    let mut ends = [0; 2];
    while ends.contains(&0) {
        assert!(world.now < SECOND);
        let hca = &mut world.hcas[0];
        let packet = cnp(&template, 100, 0xffff, 16);
        hca.transport.receive(&mut hca.host, world.now, packet);
        world.settle(10_000);
        world.now += 10_000;
        for (end, qpn) in ends.iter_mut().zip([100, 101]) {
            if *end == 0 && statuses(&mut world.hcas[0], qpn).len() == 4 {
                *end = world.now;
            }
        }
    }
    // 1 MB/s.
    assert!((200 * MS..400 * MS).contains(&ends[0]), "{ends:?}");
    assert!(ends[1] < 20 * MS, "{ends:?}");
    for qpn in [100, 101] {
        let sent = statuses(&mut world.hcas[0], qpn);
        assert!(sent.iter().all(|(_, status)| *status == Status::Success));
    }
    let counters = world.hcas[0].transport.counters();
    assert_eq!((counters.timeouts, counters.retransmitted), (0, 0));
}
