//! Unreliable datagrams: the GRH area, keys, multicast, GSI.

use super::*;
use crate::packet::{Link, MULTICAST_QPN};

pub(super) const QKEY: u32 = 0x1111_1111;

pub(super) fn config() -> QpConfig {
    QpConfig {
        service: Service::Ud,
        qkey: QKEY,
        ..QpConfig::default()
    }
}

/// Creates HCAs with a queue pair 50 each, and posted receives of 2048 bytes.
pub(super) fn world(count: usize, kind: LinkKind, config: &QpConfig) -> World {
    let mut world = World::new(count, kind, 64 * 1024, 1);
    for hca in &mut world.hcas {
        hca.transport.create(50, config.clone()).unwrap();
        hca.raise(50, config, 0);
        for id in 0..4 {
            hca.post_recv(50, id, 8192 + id as usize * 2048, 2048);
        }
    }
    world
}

pub(super) fn datagram(
    world: &World,
    to: usize,
    length: u32,
    qpn: u32,
    qkey: u32,
) -> SendWork<Range> {
    let mut request = work(1, Operation::SendImm, 0, length, 0);
    request.imm = 0x0102_0304;
    let path = world.hcas[0].path_to(to);
    request.datagram = Some(Box::new(Datagram {
        path,
        qpn,
        qkey,
        dc_key: 0,
    }));
    request
}

#[test]
fn a_datagram_is_stored_after_the_grh_area() {
    for kind in KINDS {
        let mut world = world(2, kind, &config());
        fill(&mut world.hcas[0].host.memory, 4);
        let request = datagram(&world, 1, 1000, 50, QKEY);
        world.hcas[0].post_send(50, request);
        world.settle(SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 50), [(1, Status::Success)]);
        let (id, done) = world.hcas[1].host.queues(50).received[0];
        assert_eq!(
            (id, done.length, done.kind, done.imm),
            (0, 1040, RecvKind::SendImm, 0x0102_0304)
        );
        let source = done.source.unwrap();
        assert_eq!((source.qpn, source.multicast), (50, false));
        let memory = &world.hcas[1].host.memory;
        assert!(memory[8192 + 40..8192 + 1040] == world.hcas[0].host.memory[..1000]);
        match source.link {
            Link::Ib { slid, .. } => {
                assert_eq!((kind, slid), (LinkKind::Ib, 1));
                assert!(memory[8192..8232].iter().all(|b| *b == 0));
            }
            Link::Ether { smac, .. } => {
                assert_eq!((kind, smac), (LinkKind::Ethernet, Hca::mac(0)));
            }
            Link::Ip => assert_eq!(kind, LinkKind::Ip),
        }
        if kind != LinkKind::Ib {
            // An IPv4 header is in the last 20 bytes: version, and source address.
            assert_eq!(
                (memory[8212], &memory[8224..8228]),
                (0x45, &[10, 0, 0, 1][..])
            );
        }
    }
}

#[test]
fn datagrams_longer_than_the_mtu_fail() {
    let mut world = world(2, LinkKind::Ethernet, &config());
    for (length, status) in [
        (0, Status::Success),
        (1024, Status::Success),
        (1025, Status::LocalLength),
    ] {
        let request = datagram(&world, 1, length, 50, QKEY);
        world.hcas[0].post_send(50, request);
        world.settle(SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 50).pop().unwrap().1, status);
    }
    let state = world.hcas[0].transport.query(50).unwrap().state;
    assert_eq!(state, QpState::SendQueueError);
    assert_eq!(world.hcas[1].host.queues(50).received.len(), 2);
}

/// The GRH counts: 960 bytes fit in a receive of 1000. Longer datagrams are dropped, and
/// neither use up the receive nor stop the queue pair.
#[test]
pub(super) fn a_datagram_that_is_too_long_for_the_receive_is_dropped() {
    let mut world = world(2, LinkKind::Ib, &config());
    for recv in &mut world.hcas[1].host.queues(50).recvs {
        recv.length = 1000;
    }
    for length in [1000, 961, 960] {
        let request = datagram(&world, 1, length, 50, QKEY);
        world.hcas[0].post_send(50, request);
        world.settle(SECOND);
    }
    let received = &world.hcas[1].host.queues(50).received;
    assert_eq!(received.len(), 1);
    let (id, done) = received[0];
    assert_eq!((id, done.status(), done.length), (0, Status::Success, 1000));
    let transport = &world.hcas[1].transport;
    assert_eq!(transport.query(50).unwrap().state, QpState::ReadyToSend);
    assert_eq!(transport.counters().dropped, 2);
}

#[test]
pub(super) fn the_queue_key_is_checked() {
    let mut world = world(2, LinkKind::Ib, &config());
    for qkey in [QKEY ^ 1, QKEY, 1 << 31 | 5] {
        let request = datagram(&world, 1, 8, 50, qkey);
        world.hcas[0].post_send(50, request);
    }
    world.settle(SECOND);
    // The last qkey stands for the queue pair's own.
    assert_eq!(world.hcas[1].host.queues(50).received.len(), 2);
    assert_eq!(world.hcas[1].transport.counters().qkey_violations, 1);
}

#[test]
pub(super) fn a_datagram_without_a_receive_is_dropped() {
    let mut world = world(2, LinkKind::Ib, &config());
    for _ in 0..6 {
        let request = datagram(&world, 1, 8, 50, QKEY);
        world.hcas[0].post_send(50, request);
    }
    world.settle(SECOND);
    assert_eq!(world.hcas[1].host.queues(50).received.len(), 4);
    assert_eq!(world.hcas[1].transport.counters().not_ready, 2);
    assert_eq!(statuses(&mut world.hcas[0], 50).len(), 6);
}

#[test]
pub(super) fn multicast_reaches_attached_queue_pairs() {
    for kind in KINDS {
        for block in [false, true] {
            let config = QpConfig {
                block_multicast_loopback: block,
                ..config()
            };
            let mut world = world(3, kind, &config);
            let mut group = [0; 16];
            group[..4].copy_from_slice(&[0xff, 0x12, 0x40, 0x1b]);
            for index in [0, 1] {
                world.hcas[index].transport.attach(50, group);
                world.hcas[index].transport.attach(50, group);
            }
            let mut request = datagram(&world, 1, 100, MULTICAST_QPN, QKEY);
            let path = &mut request.datagram.as_mut().unwrap().path;
            let sgid = Hca::gid(0);
            path.grh = Some(crate::packet::Grh {
                sgid,
                dgid: group,
                ..Default::default()
            });
            match &mut path.link {
                Link::Ib { dlid, .. } => *dlid = 0xc001,
                Link::Ether { dmac, .. } => *dmac = [0x33, 0x33, 0, 0, 0, 1],
                Link::Ip => {}
            }
            world.hcas[0].post_send(50, request);
            world.settle(SECOND);
            let counts: Vec<_> = world
                .hcas
                .iter_mut()
                .map(|h| h.host.queues(50).received.len())
                .collect();
            assert_eq!(counts, [usize::from(!block), 1, 0]);
            assert!(
                world.hcas[1].host.queues(50).received[0]
                    .1
                    .source
                    .unwrap()
                    .multicast
            );
            let [sent, received] = [0, 1].map(|index| world.hcas[index].transport.counters());
            assert_eq!((sent.multicasts_sent, received.multicasts_received), (1, 1));
            assert_eq!(
                (sent.multicast_bytes_sent, received.multicast_bytes_received),
                (sent.bytes_sent, received.bytes_received)
            );
            assert_eq!(sent.bytes_sent, received.bytes_received);
            world.hcas[1].transport.detach(50, group);
            assert_eq!(
                recv_statuses(&mut world.hcas[1], 50),
                [(0, Status::Success)]
            );
        }
    }
}

/// QP 1 on the wire stands for the queue pair that is its alias.
#[test]
fn qp_1_is_an_alias() {
    let config = QpConfig {
        wire_qpn: Some(1),
        any_pkey: true,
        qkey: 0x8001_0000,
        ..config()
    };
    let mut world = world(2, LinkKind::Ethernet, &config);
    for hca in &mut world.hcas {
        hca.transport.alias(1, Some(50));
    }
    let request = datagram(&world, 1, 256, 1, 0x8001_0000);
    world.hcas[0].post_send(50, request);
    world.settle(SECOND);
    let (_, done) = world.hcas[1].host.queues(50).received[0];
    assert_eq!((done.source.unwrap().qpn, done.length), (1, 296));
    // Without an alias.
    world.hcas[1].transport.alias(1, None);
    let request = datagram(&world, 1, 256, 1, 0x8001_0000);
    world.hcas[0].post_send(50, request);
    world.settle(SECOND);
    assert_eq!(world.hcas[1].transport.counters().dropped, 1);
}

/// Frames that are not RDMA are returned to the caller.
#[test]
fn frames_other_than_rdma_are_returned_to_the_caller() {
    let mut world = world(1, LinkKind::Ethernet, &config());
    let mut frame = [0; 60];
    frame[12..14].copy_from_slice(&[0x08, 0x06]);
    let packet = Pool::new().copy_of(LinkKind::Ethernet, &frame).unwrap();
    let hca = &mut world.hcas[0];
    let returned = hca.transport.receive(&mut hca.host, 0, packet).unwrap();
    assert_eq!(returned.frame(), frame);
}
