//! Order, fences, limits and states.

use super::*;

/// Posts a read and a local operation with a fence. Returns the local operations that
/// ran before the response to the read.
fn local_operations_before_read_response(fence: Fence) -> Vec<u64> {
    let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &QpConfig::default());
    world.fabric.set_faults(Faults {
        delay: 1000,
        ..Faults::default()
    });
    world.hcas[0].post_send(100, work(1, Operation::Read, 0, 5000, 0));
    let mut local = work(2, Operation::Local, 0, 0, 0);
    local.fence = fence;
    world.hcas[0].post_send(100, local);
    world.turn();
    // No response has arrived yet: operations that ran did not wait.
    let early = world.hcas[0].host.queues(100).ran.clone();
    world.settle(SECOND);
    assert_eq!(world.hcas[0].host.queues(100).ran, [2]);
    let sent = statuses(&mut world.hcas[0], 100);
    assert_eq!(sent, [(1, Status::Success), (2, Status::Success)]);
    early
}

#[test]
fn fences_delay_local_operations() {
    assert_eq!(local_operations_before_read_response(Fence::None), [2]);
    assert_eq!(
        local_operations_before_read_response(Fence::Reads),
        [0_u64; 0]
    );
    assert_eq!(
        local_operations_before_read_response(Fence::All),
        [0_u64; 0]
    );
    // A write is not a read: `Fence::Reads` does not wait for it.
    for (fence, early) in [(Fence::Reads, vec![2]), (Fence::All, vec![])] {
        let mut world = pair(LinkKind::Ib, 1024, 1, &QpConfig::default());
        world.fabric.set_faults(Faults {
            delay: 1000,
            ..Faults::default()
        });
        world.hcas[0].post_send(100, work(1, Operation::Write, 0, 500, 0));
        let mut local = work(2, Operation::Local, 0, 0, 0);
        local.fence = fence;
        world.hcas[0].post_send(100, local);
        world.turn();
        assert_eq!(world.hcas[0].host.queues(100).ran, early);
        world.settle(SECOND);
        assert_eq!(statuses(&mut world.hcas[0], 100).len(), 2);
    }
}

/// A fenced send carries the data of the read before it.
#[test]
fn a_fenced_send_carries_the_data_of_the_read() {
    let mut world = pair(LinkKind::Ethernet, 64 * 1024, 1, &QpConfig::default());
    world.fabric.set_faults(Faults {
        delay: 1000,
        ..Faults::default()
    });
    fill(&mut world.hcas[1].host.memory[..5000], 3);
    world.hcas[1].post_recv(200, 1, 20_000, 5000);
    world.hcas[0].post_send(100, work(1, Operation::Read, 0, 5000, 0));
    let mut send = work(2, Operation::Send, 0, 5000, 0);
    send.fence = Fence::Reads;
    world.hcas[0].post_send(100, send);
    world.settle(SECOND);
    let memory = &world.hcas[1].host.memory;
    assert!(memory[..5000] == memory[20_000..25_000]);
}

/// Local operations run once and in order, even if the requests around them are
/// retransmitted.
#[test]
fn local_operations_run_once() {
    let config = QpConfig {
        ack_timeout: 5,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ethernet, 64 * 1024, 6, &config);
    world.fabric.set_faults(Faults {
        loss: 0.2,
        delay: 100,
        ..Faults::default()
    });
    for id in 0..100 {
        let operation = match id % 3 {
            0 => Operation::Write,
            1 => Operation::Local,
            _ => Operation::Read,
        };
        world.hcas[0].post_send(100, work(id, operation, 0, 3000, 0));
    }
    world.settle(100 * SECOND);
    let sent = statuses(&mut world.hcas[0], 100);
    assert_eq!(
        sent,
        (0..100).map(|id| (id, Status::Success)).collect::<Vec<_>>()
    );
    let ran: Vec<u64> = (0..100).filter(|id| id % 3 == 1).collect();
    assert_eq!(world.hcas[0].host.queues(100).ran, ran);
    assert!(world.hcas[0].transport.counters().retransmitted > 20);
}

/// The responder has resources for a limited number of reads, and refuses more.
#[test]
pub(super) fn outstanding_reads_are_limited() {
    let config = QpConfig {
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &config);
    world.fabric.set_faults(Faults {
        delay: 1000,
        ..Faults::default()
    });
    for id in 0..10 {
        world.hcas[0].post_send(100, work(id, Operation::Read, 0, 5000, 0));
    }
    world.turn();
    assert_eq!(world.hcas[0].transport.counters().packets_sent, 2);
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), 10);

    let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &config);
    let hca = &mut world.hcas[0];
    let config = QpConfig {
        max_rd_atomic: 16,
        ..hca.transport.config(100).unwrap().clone()
    };
    hca.transport
        .modify(&mut hca.host, 0, 100, QpState::ReadyToSend, config)
        .unwrap();
    for id in 0..10 {
        hca.post_send(100, work(id, Operation::Read, 0, 5000, 0));
    }
    world.settle(SECOND);
    let sent = statuses(&mut world.hcas[0], 100);
    assert!(
        sent.iter().any(|s| s.1 == Status::RemoteInvalidRequest),
        "{sent:?}"
    );
}

#[test]
fn a_draining_send_queue_stops_after_outstanding_requests() {
    let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &QpConfig::default());
    world.fabric.set_faults(Faults {
        delay: 1000,
        ..Faults::default()
    });
    world.hcas[0].post_send(100, work(1, Operation::Write, 0, 5000, 0));
    world.turn();
    let config = world.hcas[0].transport.config(100).unwrap().clone();
    let hca = &mut world.hcas[0];
    let to = QpState::SendQueueDrain;
    hca.transport
        .modify(&mut hca.host, 0, 100, to, config.clone())
        .unwrap();
    hca.post_send(100, work(2, Operation::Write, 0, 5000, 0));
    assert!(hca.transport.query(100).unwrap().draining);
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100), [(1, Status::Success)]);
    assert_eq!(events(&mut world.hcas[0], 100), [QpEvent::SqDrained]);
    let hca = &mut world.hcas[0];
    assert!(!hca.transport.query(100).unwrap().draining);
    let to = QpState::ReadyToSend;
    hca.transport
        .modify(&mut hca.host, 0, 100, to, config)
        .unwrap();
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), 2);
}

#[test]
fn error_state_flushes_both_queues_and_later_posts() {
    for srq in [false, true] {
        let config = QpConfig {
            srq,
            ..QpConfig::default()
        };
        let mut world = pair(LinkKind::Ib, 1024, 1, &config);
        world.hcas[1].port.set_link(false);
        let hca = &mut world.hcas[0];
        for id in 0..3 {
            hca.post_send(100, work(id, Operation::Write, 0, 8, 0));
            hca.post_recv(100, id, 0, 8);
        }
        hca.turn(0);
        let config = hca.transport.config(100).unwrap().clone();
        hca.transport
            .modify(&mut hca.host, 0, 100, QpState::Error, config)
            .unwrap();
        hca.post_send(100, work(3, Operation::Write, 0, 8, 0));
        while hca.turn(0) {}
        hca.post_send(100, work(4, Operation::Write, 0, 8, 0));
        hca.post_recv(100, 3, 0, 8);
        while hca.turn(0) {}
        let flushed = |n| (0..n).map(|id| (id, Status::Flushed)).collect::<Vec<_>>();
        assert_eq!(statuses(hca, 100), flushed(5));
        // Work requests of an SRQ are not flushed by the queue pair.
        assert_eq!(recv_statuses(hca, 100), flushed(if srq { 0 } else { 4 }));
        assert_eq!(events(hca, 100).contains(&QpEvent::LastWqe), srq);
        world.settle(SECOND);
        assert_eq!(world.hcas[0].transport.deadline(), None);
    }
}

#[test]
fn a_reset_discards_requests_and_packets() {
    let mut world = pair(LinkKind::Ib, 1024, 1, &QpConfig::default());
    world.fabric.set_faults(Faults {
        delay: 1000,
        ..Faults::default()
    });
    world.hcas[0].post_send(100, work(1, Operation::Write, 0, 8, 0));
    world.turn();
    for (index, qpn) in [(0, 100), (1, 200)] {
        let hca = &mut world.hcas[index];
        let mut config = hca.transport.config(qpn).unwrap().clone();
        hca.transport
            .modify(&mut hca.host, 0, qpn, QpState::Reset, config.clone())
            .unwrap();
        (config.send_psn, config.recv_psn) = (70, 70);
        hca.raise(qpn, &config, 0);
    }
    // The packet of the old connection arrives, and is ignored by the new one.
    world.settle(SECOND);
    world.hcas[0].post_send(100, work(2, Operation::Write, 0, 8, 0));
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100), [(2, Status::Success)]);
    assert_eq!(world.hcas[1].transport.query(200).unwrap().recv_psn, 71);
}

#[test]
fn nothing_is_sent_before_ready_to_send() {
    let mut world = World::new(2, LinkKind::Ib, 64, 1);
    let hca = &mut world.hcas[0];
    let config = QpConfig {
        path: Some(hca.path_to(1)),
        ..QpConfig::default()
    };
    hca.transport.create(100, config.clone()).unwrap();
    assert_eq!(
        hca.transport.create(100, config.clone()),
        Err(QpError::Exists)
    );
    for to in [QpState::Init, QpState::ReadyToReceive] {
        hca.transport
            .modify(&mut hca.host, 0, 100, to, config.clone())
            .unwrap();
        hca.post_send(100, work(1, Operation::Write, 0, 8, 0));
        while hca.turn(0) {}
        assert_eq!(hca.transport.counters().packets_sent, 0);
    }
    hca.transport
        .modify(&mut hca.host, 0, 100, QpState::ReadyToSend, config.clone())
        .unwrap();
    while hca.turn(0) {}
    assert_eq!(hca.transport.counters().packets_sent, 2);
    hca.transport.destroy(100);
    assert!(hca.transport.query(100).is_none());
    let unknown = hca
        .transport
        .modify(&mut hca.host, 0, 100, QpState::Init, config);
    assert_eq!(unknown, Err(QpError::Unknown));
    world.settle(SECOND);
}

#[test]
fn the_first_packet_raises_communication_established() {
    let mut world = pair(LinkKind::Ib, 64, 1, &QpConfig::default());
    let hca = &mut world.hcas[1];
    let config = hca.transport.config(200).unwrap().clone();
    hca.transport
        .modify(&mut hca.host, 0, 200, QpState::Reset, config.clone())
        .unwrap();
    for to in [QpState::Init, QpState::ReadyToReceive] {
        hca.transport
            .modify(&mut hca.host, 0, 200, to, config.clone())
            .unwrap();
    }
    for id in 0..3 {
        world.hcas[0].post_send(100, work(id, Operation::Write, 0, 8, 0));
    }
    world.settle(SECOND);
    assert_eq!(events(&mut world.hcas[1], 200), [QpEvent::Established]);
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), 3);
}

/// Packets of another partition or another peer are ignored.
#[test]
fn packets_of_other_partitions_and_peers_are_ignored() {
    let mut world = pair(LinkKind::Ethernet, 64, 1, &QpConfig::default());
    let hca = &mut world.hcas[0];
    let config = QpConfig {
        pkey: 0x8001,
        ..hca.transport.config(100).unwrap().clone()
    };
    hca.transport
        .modify(&mut hca.host, 0, 100, QpState::ReadyToSend, config)
        .unwrap();
    hca.post_send(100, work(1, Operation::Write, 0, 8, 0));
    world.turn();
    world.turn();
    assert_eq!(world.hcas[1].transport.counters().pkey_violations, 1);

    let mut world = pair(LinkKind::Ethernet, 64, 1, &QpConfig::default());
    let hca = &mut world.hcas[0];
    let mut config = hca.transport.config(100).unwrap().clone();
    if let Some(grh) = config.path.as_mut().and_then(|p| p.grh.as_mut()) {
        grh.sgid[15] = 99;
    }
    hca.transport
        .modify(&mut hca.host, 0, 100, QpState::ReadyToSend, config)
        .unwrap();
    hca.post_send(100, work(1, Operation::Write, 0, 8, 0));
    world.turn();
    world.turn();
    assert_eq!(world.hcas[1].transport.counters().dropped, 1);
}

/// Many queue pairs share [`Transport::run`], and none starves.
#[test]
fn queue_pairs_are_scheduled_fairly() {
    let mut world = World::new(2, LinkKind::Ib, 1 << 20, 1);
    for n in 0..20 {
        world.connect((0, 100 + n), (1, 200 + n), &QpConfig::default());
    }
    for hca in &mut world.hcas {
        open(hca, 1 << 20);
    }
    for n in 0..20 {
        for id in 0..4 {
            world.hcas[0].post_send(100 + n, work(id, Operation::Write, 0, 100_000, 0));
        }
    }
    let hca = &mut world.hcas[0];
    hca.transport.run(&mut hca.host, 0, 20 * 32);
    let sent = hca.transport.counters().packets_sent;
    assert_eq!(sent, 20 * 32);
    world.settle(SECOND);
    for n in 0..20 {
        assert_eq!(statuses(&mut world.hcas[0], 100 + n).len(), 4);
    }
}

/// A datagram that cannot be sent stops the send queue; receiving continues, and
/// sending can be enabled again.
#[test]
fn a_datagram_queue_pair_recovers_from_send_queue_error() {
    let config = QpConfig {
        service: Service::Ud,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 8192, 1, &config);
    let datagram = |world: &World, index: usize, id, length| {
        let mut request = work(id, Operation::Send, 0, length, 0);
        let path = world.hcas[index].path_to(1 - index);
        let qpn = if index == 0 { 200 } else { 100 };
        request.datagram = Some(Box::new(Datagram {
            path,
            qpn,
            qkey: 0,
            dc_key: 0,
        }));
        request
    };
    for (id, length) in [(1, 8), (2, 5000), (3, 8)] {
        let request = datagram(&world, 0, id, length);
        world.hcas[0].post_send(100, request);
    }
    world.hcas[0].post_recv(100, 9, 0, 1024);
    let request = datagram(&world, 1, 1, 8);
    world.hcas[1].post_send(200, request);
    world.settle(SECOND);
    let expected = [
        (1, Status::Success),
        (2, Status::LocalLength),
        (3, Status::Flushed),
    ];
    assert_eq!(statuses(&mut world.hcas[0], 100), expected);
    assert_eq!(
        recv_statuses(&mut world.hcas[0], 100),
        [(9, Status::Success)]
    );
    let hca = &mut world.hcas[0];
    assert_eq!(
        hca.transport.query(100).unwrap().state,
        QpState::SendQueueError
    );
    let config = hca.transport.config(100).unwrap().clone();
    hca.transport
        .modify(&mut hca.host, 0, 100, QpState::ReadyToSend, config)
        .unwrap();
    let request = datagram(&world, 0, 4, 8);
    world.hcas[0].post_send(100, request);
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100)[3], (4, Status::Success));
}

/// Acknowledgements carry the number of completed messages, and one serves a batch.
#[test]
fn acknowledgements_carry_the_message_count() {
    use crate::packet::{CREDITS_UNLIMITED, Syndrome};
    let mut world = pair(LinkKind::Ib, 8192, 1, &QpConfig::default());
    let mut responses = Vec::new();
    for batch in [3, 2] {
        for id in 0..batch {
            world.hcas[0].post_send(100, work(id, Operation::Write, 0, 3000, 0));
        }
        world.hcas[0].turn(0);
        let hca = &mut world.hcas[1];
        while let Some(packet) = hca.port.recv(0) {
            hca.transport.receive(&mut hca.host, 0, packet);
        }
        hca.transport.run(&mut hca.host, 0, 100);
        while let Some(packet) = hca.transport.pop() {
            let view = View::read(packet.kind(), packet.frame()).unwrap();
            let aeth = view.aeth().unwrap();
            assert_eq!(aeth.syndrome, Syndrome::Ack(CREDITS_UNLIMITED));
            responses.push((view.bth.psn.value(), aeth.msn));
        }
    }
    assert_eq!(responses, [(8, 3), (14, 5)]);
}

/// A late acknowledgement of a request that is about to be sent again does not skip the
/// local operation after it.
#[test]
fn a_late_acknowledgement_does_not_skip_a_local_operation() {
    let mut world = pair(LinkKind::Ib, 1024, 1, &QpConfig::default());
    world.hcas[0].post_send(100, work(1, Operation::Send, 0, 8, 0));
    let mut local = work(2, Operation::Local, 0, 0, 0);
    local.fence = Fence::All;
    world.hcas[0].post_send(100, local);
    world.hcas[0].turn(0);
    let request = world.hcas[1].port.recv(0).unwrap();
    // The request arrives twice: at first no receive is posted, then it is executed.
    for id in 0..2 {
        let hca = &mut world.hcas[1];
        hca.transport.receive(&mut hca.host, 0, request.clone());
        hca.turn(0);
        hca.post_recv(200, id, 0, 64);
        world.hcas[0].turn(0);
    }
    assert_eq!(world.hcas[0].transport.counters().rnr_naks, 1);
    let sent = statuses(&mut world.hcas[0], 100);
    assert_eq!(sent, [(1, Status::Success)]);
    world.settle(SECOND);
    assert_eq!(world.hcas[0].host.queues(100).ran, [2]);
}

/// A duplicate does not cause an acknowledgement of an older PSN than before. No timer
/// is running that would retransmit the later request.
#[test]
fn a_duplicate_does_not_lower_the_acknowledged_psn() {
    let config = QpConfig {
        ack_timeout: 0,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ethernet, 4096, 1, &config);
    for id in 0..2 {
        world.hcas[1].post_recv(200, id, 0, 64);
        world.hcas[0].post_send(100, work(id, Operation::Send, 0, 64, 0));
    }
    world.hcas[0].turn(0);
    let hca = &mut world.hcas[1];
    let [first, second] = [(); 2].map(|()| hca.port.recv(0).unwrap());
    for request in [first.clone(), second, first] {
        hca.transport.receive(&mut hca.host, 0, request);
    }
    world.settle(SECOND);
    assert_eq!(world.hcas[1].transport.counters().duplicates, 1);
    let sent = statuses(&mut world.hcas[0], 100);
    assert_eq!(sent, [(0, Status::Success), (1, Status::Success)]);
}

/// Without losses, reads among writes cause no retransmission.
#[test]
fn responses_keep_the_order_of_requests() {
    let mut world = pair(LinkKind::Ethernet, 64 * 1024, 1, &QpConfig::default());
    for id in 0..40 {
        let operation = match id % 4 {
            0 | 2 => Operation::Write,
            1 => Operation::Read,
            _ => Operation::FetchAdd { add: 1 },
        };
        let length = if id % 4 == 3 { 8 } else { 5000 };
        world.hcas[0].post_send(100, work(id, operation, 0, length, 0));
    }
    world.settle(SECOND);
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), 40);
    let counters = world.hcas[0].transport.counters();
    assert_eq!(
        (counters.retransmitted, counters.timeouts, counters.naks),
        (0, 0, 0)
    );
    assert_eq!(world.hcas[1].transport.counters().duplicates, 0);
}

/// A lost read response is detected by later responses, every time, without a timer.
#[test]
fn lost_responses_are_detected_without_a_timer() {
    let config = QpConfig {
        ack_timeout: 0,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &config);
    fill(&mut world.hcas[1].host.memory[..5000], 8);
    for id in 0..4 {
        world.hcas[0].post_send(
            100,
            work(id, Operation::Read, 5000 * (id as usize + 1), 5000, 0),
        );
    }
    // These response packets are lost; the last one is not among them.
    let mut count = 0;
    for _ in 0..20 {
        world.hcas[0].turn(0);
        let hca = &mut world.hcas[1];
        while let Some(packet) = hca.port.recv(0) {
            hca.transport.receive(&mut hca.host, 0, packet);
        }
        hca.transport.run(&mut hca.host, 0, 100);
        while let Some(packet) = hca.transport.pop() {
            count += 1;
            if ![3, 25].contains(&count) {
                hca.port.send(0, packet);
            }
        }
    }
    let expected: Vec<_> = (0..4).map(|id| (id, Status::Success)).collect();
    assert_eq!(statuses(&mut world.hcas[0], 100), expected);
    assert!(count > 25, "{count}");
    let memory = &world.hcas[0].host.memory;
    for id in 1..=4 {
        let at = id * 5000;
        assert!(memory[at..at + 5000] == world.hcas[1].host.memory[..5000]);
    }
}
