//! Every completion status with its state and events; retries and their times.

use super::*;
use crate::rule::{Rule, Violation};

/// Runs a request of `length` bytes on queue pair 100 of HCA 0 that is changed to fail.
fn check_failure(
    operation: Operation,
    length: u32,
    modify_request: impl Fn(&mut World, &mut SendWork<Range>),
    expected: Status,
) -> World {
    let mut world = pair(LinkKind::Ethernet, 16 * 1024, 1, &QpConfig::default());
    let mut request = work(1, operation, 0, length, 0);
    modify_request(&mut world, &mut request);
    world.hcas[0].post_send(100, work(0, Operation::Write, 0, 8, 0));
    world.hcas[0].post_send(100, request);
    world.hcas[0].post_send(100, work(2, Operation::Write, 0, 8, 0));
    world.settle(SECOND);
    // Earlier requests succeed, later ones are flushed.
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(0, Status::Success), (1, expected), (2, Status::Flushed)],
        "{operation:?}"
    );
    assert_eq!(
        world.hcas[0].transport.query(100).unwrap().state,
        QpState::Error
    );
    assert_eq!(
        events(&mut world.hcas[0], 100),
        [QpEvent::State(QpState::Error)]
    );
    world
}

fn responder_is_in_error(world: &mut World, expected: &[QpEvent]) {
    assert_eq!(
        world.hcas[1].transport.query(200).unwrap().state,
        QpState::Error
    );
    let mut events = events(&mut world.hcas[1], 200);
    events.retain(|e| *e != QpEvent::State(QpState::Error));
    assert_eq!(events, expected);
}

const ADD: Operation = Operation::FetchAdd { add: 1 };

#[test]
fn local_protection_errors() {
    for operation in [Operation::Send, Operation::Write] {
        // The data of the third packet is inaccessible.
        check_failure(
            operation,
            3000,
            |w, r| {
                w.hcas[1].post_recv(200, 9, 0, 4096);
                r.local.length = 2500;
            },
            Status::LocalProtection,
        );
    }
    check_failure(
        Operation::Read,
        3000,
        |_, r| r.local.length = 2500,
        Status::LocalProtection,
    );
    check_failure(ADD, 8, |_, r| r.local.length = 4, Status::LocalProtection);
}

#[test]
pub(super) fn unsupported_operations_are_local_errors() {
    for service in [Service::Uc, Service::Ud] {
        for operation in [Operation::Read, ADD, Operation::SendInvalidate] {
            let config = QpConfig {
                service,
                ..QpConfig::default()
            };
            let mut world = pair(LinkKind::Ib, 64, 1, &config);
            let mut request = work(1, operation, 0, 8, 0);
            let path = world.hcas[0].path_to(1);
            request.datagram = Some(Box::new(Datagram {
                path,
                qpn: 200,
                qkey: 0,
                dc_key: 0,
            }));
            world.hcas[0].post_send(100, request);
            world.settle(SECOND);
            assert_eq!(
                statuses(&mut world.hcas[0], 100),
                [(1, Status::LocalQpOperation)]
            );
            let state = world.hcas[0].transport.query(100).unwrap().state;
            assert_eq!(state, QpState::SendQueueError);
        }
    }
    let config = QpConfig {
        max_rd_atomic: 0,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 1, &config);
    world.hcas[0].post_send(100, work(1, Operation::Read, 0, 8, 0));
    world.settle(SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(1, Status::LocalQpOperation)]
    );
}

#[test]
pub(super) fn malformed_work_requests_complete_in_order() {
    let error = EngineError {
        status: Status::MemoryBind,
        violation: Violation::new("opcode", 0x3f, Rule::Known),
    };
    for operation in [Operation::Send, Operation::Local, Operation::Read] {
        let refuse = |_: &mut World, request: &mut SendWork<Range>| {
            request.refused = Some(Box::new(error));
        };
        let world = check_failure(operation, 8, refuse, Status::MemoryBind);
        let expected = (Some(100), Failure::Engine(error).into());
        assert!(world.hcas[0].host.causes.contains(&expected));
    }
}

#[test]
fn remote_access_errors() {
    for operation in [Operation::Write, Operation::Read, ADD] {
        let mut world = check_failure(operation, 8, |_, r| r.rkey = 99, Status::RemoteAccess);
        responder_is_in_error(&mut world, &[QpEvent::AccessError]);
        let mut world = check_failure(operation, 8, |_, r| r.va += 16 * 1024, Status::RemoteAccess);
        responder_is_in_error(&mut world, &[QpEvent::AccessError]);
        check_failure(
            operation,
            8,
            |_, r| r.va = u64::MAX - 7,
            Status::RemoteAccess,
        );
    }
    // The end of a long message is out of bounds, so nothing of it is written.
    let world = check_failure(
        Operation::Write,
        3000,
        |w, r| {
            fill(&mut w.hcas[0].host.memory, 5);
            w.hcas[1].host.memory.fill(0);
            r.va += 16 * 1024 - 2999;
        },
        Status::RemoteAccess,
    );
    assert!(world.hcas[1].host.memory[8..].iter().all(|b| *b == 0));
    // Missing rights.
    for (operation, right) in [(Operation::Write, 1), (Operation::Read, 0), (ADD, 2)] {
        let mut world = pair(LinkKind::Ib, 64, 1, &QpConfig::default());
        world.hcas[1].host.regions[0].access[right] = false;
        world.hcas[0].post_send(100, work(1, operation, 0, 8, 0));
        world.settle(SECOND);
        assert_eq!(
            statuses(&mut world.hcas[0], 100),
            [(1, Status::RemoteAccess)]
        );
    }
    // Empty messages need no valid key.
    let mut world = pair(LinkKind::Ib, 64, 1, &QpConfig::default());
    for (id, operation) in [(1, Operation::Write), (2, Operation::Read)] {
        let mut request = work(id, operation, 0, 0, 0);
        request.rkey = 99;
        world.hcas[0].post_send(100, request);
    }
    world.settle(SECOND);
    let sent = statuses(&mut world.hcas[0], 100);
    assert_eq!(sent, [(1, Status::Success), (2, Status::Success)]);
}

#[test]
fn refused_requests_are_reported_after_their_naks() {
    let too_long = (Operation::Send, VA, vec![(9, Status::LocalLength)], vec![]);
    let elsewhere = (Operation::Write, 0, vec![], vec![QpEvent::AccessError]);
    for (operation, va, receives, reported) in [too_long, elsewhere] {
        let mut world = pair(LinkKind::Ethernet, 64, 1, &QpConfig::default());
        world.hcas[1].transport.set_confirmed(true);
        if operation == Operation::Send {
            world.hcas[1].post_recv(200, 9, 0, 4);
        }
        let mut request = work(1, operation, 0, 8, 0);
        request.va = va;
        world.hcas[0].post_send(100, request);
        world.settle(SECOND);
        // The requester has the NAK.
        let [(1, Status::RemoteInvalidRequest | Status::RemoteAccess)] =
            statuses(&mut world.hcas[0], 100)[..]
        else {
            panic!("{:?}", statuses(&mut world.hcas[0], 100));
        };
        let responder = &mut world.hcas[1];
        assert!(responder.transport.awaits_confirmation());
        assert_eq!(recv_statuses(responder, 200), []);
        assert_eq!(events(responder, 200), []);
        let state = |hca: &Hca| hca.transport.query(200).unwrap().state;
        assert_eq!(state(responder), QpState::ReadyToSend);

        responder.transport.confirm_sent(&mut responder.host);
        assert!(!responder.transport.awaits_confirmation());
        assert_eq!(recv_statuses(responder, 200), receives);
        assert_eq!(state(responder), QpState::Error);
        responder_is_in_error(&mut world, &reported);
    }
    // Whoever sets the queue pair to the error state does not wait.
    let mut world = pair(LinkKind::Ethernet, 64, 1, &QpConfig::default());
    world.hcas[1].transport.set_confirmed(true);
    world.hcas[1].post_recv(200, 9, 0, 4);
    world.hcas[0].post_send(100, work(1, Operation::Send, 0, 8, 0));
    world.settle(SECOND);
    let responder = &mut world.hcas[1];
    let config = responder.transport.config(200).unwrap().clone();
    let error = QpState::Error;
    let transport = &mut responder.transport;
    transport
        .modify(&mut responder.host, 0, 200, error, config)
        .unwrap();
    let expected = [(9, Status::LocalLength)];
    assert_eq!(recv_statuses(responder, 200), expected);
    responder.transport.confirm_sent(&mut responder.host);
    assert_eq!(recv_statuses(responder, 200), expected);
}

#[test]
pub(super) fn remote_invalid_request_errors() {
    // Too long for the receive: its completion reports that.
    let mut world = check_failure(
        Operation::Send,
        3000,
        |w, _| w.hcas[1].post_recv(200, 9, 0, 2999),
        Status::RemoteInvalidRequest,
    );
    responder_is_in_error(&mut world, &[]);
    assert_eq!(
        recv_statuses(&mut world.hcas[1], 200),
        [(9, Status::LocalLength)]
    );
    // Atomics have to be aligned.
    let mut world = check_failure(ADD, 8, |_, r| r.va += 4, Status::RemoteInvalidRequest);
    responder_is_in_error(&mut world, &[QpEvent::RequestError]);
    // The queue pair does not permit the operation.
    for operation in [Operation::Write, Operation::Read, ADD] {
        let mut world = pair(LinkKind::Ib, 64, 1, &QpConfig::default());
        let hca = &mut world.hcas[1];
        let config = QpConfig {
            allow_read: false,
            allow_write: false,
            allow_atomic: false,
            ..hca.transport.config(200).unwrap().clone()
        };
        hca.transport
            .modify(&mut hca.host, 0, 200, QpState::ReadyToSend, config)
            .unwrap();
        world.hcas[0].post_send(100, work(1, operation, 0, 8, 0));
        world.settle(SECOND);
        assert_eq!(
            statuses(&mut world.hcas[0], 100),
            [(1, Status::RemoteInvalidRequest)]
        );
        responder_is_in_error(&mut world, &[QpEvent::RequestError]);
    }
}

#[test]
pub(super) fn remote_operation_errors() {
    let mut world = check_failure(
        Operation::Send,
        3000,
        |w, _| {
            let hca = &mut w.hcas[1];
            hca.post_recv(200, 9, 0, 4096);
            hca.host.queues(200).recvs[0].local.length = 1500;
            hca.post_recv(200, 10, 0, 4096);
        },
        Status::RemoteOperation,
    );
    responder_is_in_error(&mut world, &[]);
    let received = recv_statuses(&mut world.hcas[1], 200);
    assert_eq!(
        received,
        [(9, Status::LocalProtection), (10, Status::Flushed)]
    );
}

#[test]
pub(super) fn invalidating_an_unknown_key_is_an_error() {
    let mut world = check_failure(
        Operation::SendInvalidate,
        8,
        |w, r| {
            w.hcas[1].post_recv(200, 9, 0, 64);
            r.imm = 77;
        },
        // The peer gets no response.
        Status::RetryExceeded,
    );
    assert_eq!(world.hcas[0].transport.counters().naks, 0);
    responder_is_in_error(&mut world, &[]);
    assert_eq!(
        recv_statuses(&mut world.hcas[1], 200),
        [(9, Status::RemoteInvalidRequest)]
    );
}

/// A write with immediate data whose memory is not accessible takes a receive, if there is
/// one, which tells the program about it. Of a longer message the first packet is refused,
/// which does not say that a receive is to be taken.
#[test]
fn a_write_with_immediate_to_a_wrong_key_fails_its_receive() {
    for (length, posted, expected, events) in [
        (8, true, &[(9, Status::LocalAccess)][..], &[][..]),
        (8, false, &[], &[QpEvent::AccessError]),
        (3000, true, &[(9, Status::Flushed)], &[QpEvent::AccessError]),
    ] {
        let mut world = check_failure(
            Operation::WriteImm,
            length,
            |w, r| {
                if posted {
                    w.hcas[1].post_recv(200, 9, 0, 64);
                }
                r.rkey = 99;
            },
            Status::RemoteAccess,
        );
        responder_is_in_error(&mut world, events);
        assert_eq!(recv_statuses(&mut world.hcas[1], 200), expected);
    }
}

/// The memory becomes invalid while a read response is being sent.
#[test]
fn a_read_fails_if_the_memory_is_deregistered() {
    let mut world = pair(LinkKind::Ib, 4 << 20, 1, &QpConfig::default());
    world.hcas[0].post_send(100, work(1, Operation::Read, 0, 1 << 20, 0));
    for _ in 0..3 {
        world.turn();
    }
    world.hcas[1].host.regions.clear();
    world.settle(SECOND);
    assert_eq!(
        statuses(&mut world.hcas[0], 100),
        [(1, Status::RemoteAccess)]
    );
    responder_is_in_error(&mut world, &[QpEvent::AccessError]);
}

#[test]
fn retries_are_counted_and_timed() {
    for (retry_count, ack_timeout) in [(0, 10), (3, 12), (7, 8)] {
        let config = QpConfig {
            retry_count,
            ack_timeout,
            ..QpConfig::default()
        };
        let mut world = pair(LinkKind::Ethernet, 64, 1, &config);
        world.hcas[1].port.set_link(false);
        world.hcas[0].post_send(100, work(1, Operation::Write, 0, 8, 0));
        world.hcas[0].post_send(100, work(2, Operation::Write, 0, 8, 0));
        world.settle(100 * SECOND);
        let sent = statuses(&mut world.hcas[0], 100);
        assert_eq!(sent, [(1, Status::RetryExceeded), (2, Status::Flushed)]);
        let attempts = u64::from(retry_count) + 1;
        assert_eq!(world.now, attempts * (4096 << ack_timeout));
        let counters = world.hcas[0].transport.counters();
        assert_eq!(
            (counters.timeouts, counters.packets_sent),
            (attempts, 2 * attempts)
        );
    }
}

/// A peer that has answered, or sent a request, may be silent for some time: retries count
/// afterwards.
#[test]
fn silence_of_a_living_peer_does_not_count_for_some_time() {
    type WarmUp<'a> = &'a dyn Fn(&mut World);
    const LIMIT: u64 = 10 * SECOND;
    let config = QpConfig {
        retry_count: 1,
        ack_timeout: 8,
        ..QpConfig::default()
    };
    let retries = 2 * (4096 << 8);
    let silent = |limit: u64, warm_up: WarmUp<'_>| {
        let mut world = pair(LinkKind::Ethernet, 64, 1, &config);
        world.hcas[0].host.max_silence = limit;
        warm_up(&mut world);
        world.settle(SECOND);
        let begin = world.now;
        world.hcas[1].port.set_link(false);
        world.hcas[0].post_send(100, work(1, Operation::Write, 0, 8, 0));
        (world, begin)
    };
    let answers = |world: &mut World| {
        world.hcas[0].post_send(100, work(0, Operation::Write, 0, 8, 0));
    };
    let asks = |world: &mut World| {
        world.hcas[1].post_send(200, work(0, Operation::Write, 0, 8, 0));
    };
    let nothing = |_: &mut World| {};
    let cases: [(u64, WarmUp<'_>, u64); 4] = [
        (0, &answers, 0),
        (LIMIT, &nothing, 0),
        (LIMIT, &answers, LIMIT),
        (LIMIT, &asks, LIMIT),
    ];
    for (limit, warm_up, excused) in cases {
        let (mut world, begin) = silent(limit, warm_up);
        world.settle(100 * SECOND);
        let last = statuses(&mut world.hcas[0], 100).pop();
        assert_eq!(last, Some((1, Status::RetryExceeded)));
        let took = world.now - begin;
        // Retransmissions are up to a second apart.
        let expected = excused + retries..=excused + retries + SECOND;
        assert!(expected.contains(&took), "{took}");
        let cause = Failure::Retries {
            count: 1,
            timeout: 8,
            excused,
        };
        let causes = &world.hcas[0].host.causes;
        assert!(causes.contains(&(Some(100), cause.into())), "{causes:?}");
        assert_eq!(cause.to_string().contains("patience"), excused != 0);
        let timeouts = world.hcas[0].transport.counters().timeouts;
        assert!(timeouts < 100, "{timeouts}");
    }
    let (mut world, _) = silent(LIMIT, &answers);
    world.settle(LIMIT - SECOND);
    world.hcas[1].port.set_link(true);
    world.settle(2 * SECOND);
    let last = statuses(&mut world.hcas[0], 100).pop();
    assert_eq!(last, Some((1, Status::Success)));
    // After an answer there is as much time again.
    let since = world.now;
    world.hcas[1].port.set_link(false);
    world.hcas[0].post_send(100, work(2, Operation::Write, 0, 8, 0));
    world.settle(100 * SECOND);
    let last = statuses(&mut world.hcas[0], 100).pop();
    assert_eq!(last, Some((2, Status::RetryExceeded)));
    assert!(world.now - since > LIMIT);
}

#[test]
fn no_timeout_means_no_retransmission() {
    let config = QpConfig {
        ack_timeout: 0,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ethernet, 64, 1, &config);
    world.hcas[1].port.set_link(false);
    world.hcas[0].post_send(100, work(1, Operation::Write, 0, 8, 0));
    world.settle(100 * SECOND);
    assert!(statuses(&mut world.hcas[0], 100).is_empty());
    assert_eq!(world.hcas[0].transport.deadline(), None);
}

/// A response resets the retry count: a link that loses every other packet is slow, not
/// dead.
#[test]
fn progress_resets_the_retry_count() {
    let config = QpConfig {
        retry_count: 7,
        ack_timeout: 5,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 4, &config);
    world.fabric.set_faults(Faults {
        loss: 0.3,
        ..Faults::default()
    });
    for id in 0..200 {
        world.hcas[0].post_send(100, work(id, Operation::Write, 0, 8, 0));
    }
    world.settle(100 * SECOND);
    let sent = statuses(&mut world.hcas[0], 100);
    assert!(sent.len() == 200 && sent.iter().all(|s| s.1 == Status::Success));
    assert!(world.hcas[0].transport.counters().timeouts > 7);
}

#[test]
fn rnr_retries_are_counted_and_timed() {
    for (operation, code) in [
        (Operation::Send, 1),
        (Operation::WriteImm, 12),
        (Operation::Send, 0),
    ] {
        for rnr_retry in [0, 2, 6] {
            let config = QpConfig {
                rnr_retry,
                min_rnr_timer: code,
                ..QpConfig::default()
            };
            let mut world = pair(LinkKind::Ethernet, 64, 1, &config);
            world.hcas[0].post_send(100, work(1, operation, 0, 8, 0));
            let total_wait = u64::from(rnr_retry) * rnr_wait(code);
            if total_wait > 0 {
                world.settle(total_wait - 1);
                assert!(statuses(&mut world.hcas[0], 100).is_empty());
            }
            // Bounded, so that a queue pair that never gives up fails the test soon.
            world.settle(total_wait + SECOND);
            assert_eq!(
                statuses(&mut world.hcas[0], 100),
                [(1, Status::RnrRetryExceeded)]
            );
            let counters = world.hcas[0].transport.counters();
            assert_eq!(counters.rnr_naks, u64::from(rnr_retry) + 1);
            assert_eq!(counters.timeouts, 0);
            // The peer is not in error.
            let state = world.hcas[1].transport.query(200).unwrap().state;
            assert_eq!(state, QpState::ReadyToSend);
        }
    }
}

#[test]
fn requests_succeed_once_the_receiver_is_ready() {
    for operation in [Operation::Send, Operation::WriteImm] {
        let config = QpConfig {
            rnr_retry: 7,
            min_rnr_timer: 14,
            ..QpConfig::default()
        };
        let mut world = pair(LinkKind::Ethernet, 16 * 1024, 1, &config);
        fill(&mut world.hcas[0].host.memory, 9);
        for id in 0..3 {
            world.hcas[0].post_send(100, work(id, operation, 0, 3000, 8000));
        }
        world.settle(500 * MS);
        assert!(statuses(&mut world.hcas[0], 100).is_empty());
        assert!(world.hcas[0].transport.counters().rnr_naks > 100);
        for id in 0..3 {
            world.hcas[1].post_recv(200, id, 4000, 3000);
        }
        world.settle(SECOND);
        let good: Vec<_> = (0..3).map(|id| (id, Status::Success)).collect();
        assert_eq!(statuses(&mut world.hcas[0], 100), good);
        assert_eq!(recv_statuses(&mut world.hcas[1], 200), good);
        let at = if operation == Operation::Send {
            4000
        } else {
            8000
        };
        assert!(world.hcas[1].host.memory[at..at + 3000] == world.hcas[0].host.memory[..3000]);
    }
}

#[test]
fn timer_codes_are_those_of_the_specification() {
    assert_eq!(rnr_wait(0), 655_360_000);
    assert_eq!(rnr_wait(1), 10_000);
    assert_eq!(rnr_wait(12), 640_000);
    assert_eq!(rnr_wait(31), 491_520_000);
    assert_eq!(ack_wait(0), None);
    assert_eq!(ack_wait(14), Some(67_108_864));
}

#[test]
pub(super) fn malformed_responses_are_errors() {
    use crate::packet::{Aeth, Bth, Opcode, PacketBuilder, Psn, Syndrome, Template, op};
    let status_after_response = |operation, payload: &[u8]| {
        let mut world = pair(LinkKind::Ib, 8192, 1, &QpConfig::default());
        world.hcas[1].port.set_link(false);
        world.hcas[0].post_send(100, work(1, Operation::Read, 0, 3000, 0));
        world.turn();
        let template = Template::new(&world.hcas[1].path_to(0));
        let opcode = Opcode {
            class: crate::packet::Class::Rc,
            operation,
        }
        .encode();
        let bth = Bth {
            opcode,
            dest_qpn: 100,
            pkey: 0xffff,
            psn: Psn::new(0),
            ..Bth::default()
        };
        let pool = Pool::new();
        let mut builder = PacketBuilder::new(&pool, &template, bth, payload.len());
        if operation != op::READ_RESPONSE_MIDDLE {
            builder.put(
                &Aeth {
                    syndrome: Syndrome::Ack(0x1f),
                    msn: 0,
                }
                .bytes(),
            );
        }
        if operation == op::ATOMIC_ACKNOWLEDGE {
            builder.put(&[0; 8]);
        }
        builder.put(payload);
        let hca = &mut world.hcas[0];
        assert!(
            hca.transport
                .receive(&mut hca.host, 0, builder.finish())
                .is_none()
        );
        let sent = statuses(hca, 100);
        sent.first().map(|s| s.1)
    };
    let full = [0; 1024];
    assert_eq!(status_after_response(op::READ_RESPONSE_FIRST, &full), None);
    assert_eq!(status_after_response(op::READ_RESPONSE_MIDDLE, &full), None);
    assert_eq!(
        status_after_response(op::READ_RESPONSE_FIRST, &full[..1000]),
        Some(Status::BadResponse)
    );
    assert_eq!(
        status_after_response(op::READ_RESPONSE_ONLY, &full),
        Some(Status::BadResponse)
    );
    assert_eq!(
        status_after_response(op::ATOMIC_ACKNOWLEDGE, &[]),
        Some(Status::BadResponse)
    );
}

/// Requests that no correct peer sends are refused as invalid.
#[test]
pub(super) fn malformed_requests_are_nakked() {
    use crate::packet::{Bth, NakCode, PacketBuilder, Psn, Reth, Syndrome, Template, op};
    // Returns the response to the last of the requests: operation, RETH length, payload
    // length.
    let response_to_last = |requests: &[(u8, u32, usize)]| {
        let mut world = pair(LinkKind::Ib, 8192, 1, &QpConfig::default());
        world.hcas[1].post_recv(200, 1, 0, 8192);
        let template = Template::new(&world.hcas[0].path_to(1));
        let pool = Pool::new();
        for (index, (operation, total, payload)) in requests.iter().enumerate() {
            let bth = Bth {
                opcode: *operation,
                dest_qpn: 200,
                pkey: 0xffff,
                psn: Psn::new(index as u32),
                ..Bth::default()
            };
            let mut builder = PacketBuilder::new(&pool, &template, bth, *payload);
            if *total != 0 {
                builder.put(
                    &Reth {
                        va: VA,
                        rkey: RKEY,
                        length: *total,
                    }
                    .bytes(),
                );
            }
            builder.space(*payload).fill(1);
            let hca = &mut world.hcas[1];
            hca.transport.receive(&mut hca.host, 0, builder.finish());
        }
        let hca = &mut world.hcas[1];
        hca.transport.run(&mut hca.host, 0, 100);
        let packet = hca.transport.pop()?;
        let view = View::read(packet.kind(), packet.frame()).unwrap();
        assert_eq!(view.bth.psn.value() as usize, requests.len() - 1);
        Some(view.aeth().unwrap().syndrome)
    };
    let invalid = Some(Syndrome::Nak(NakCode::InvalidRequest));
    for requests in [
        // Lengths that do not add up.
        &[(op::WRITE_ONLY, 100, 99)][..],
        &[(op::WRITE_ONLY, 99, 100)],
        &[(op::WRITE_FIRST, 2000, 1024), (op::WRITE_LAST, 0, 975)],
        &[(op::WRITE_FIRST, 2000, 1024), (op::WRITE_LAST, 0, 977)],
        &[(op::WRITE_FIRST, 2000, 1024), (op::WRITE_MIDDLE, 0, 1024)],
        &[(op::WRITE_FIRST, 1024, 1024)],
        // Packets that are short, empty, or too long.
        &[(op::SEND_FIRST, 0, 1000)],
        &[(op::SEND_ONLY, 0, 1025)],
        &[(op::SEND_FIRST, 0, 1024), (op::SEND_MIDDLE, 0, 100)],
        &[(op::SEND_FIRST, 0, 1024), (op::SEND_LAST, 0, 0)],
        // Wrong positions in a message.
        &[(op::SEND_MIDDLE, 0, 1024)],
        &[(op::WRITE_LAST, 0, 10)],
        &[(op::SEND_FIRST, 0, 1024), (op::SEND_FIRST, 0, 1024)],
        &[(op::SEND_FIRST, 0, 1024), (op::WRITE_LAST, 0, 10)],
        &[(op::WRITE_FIRST, 2000, 1024), (op::READ_REQUEST, 10, 0)],
        // A read with a payload; a reserved opcode.
        &[(op::READ_REQUEST, 10, 8)],
        &[(0x15, 0, 0)],
    ] {
        assert_eq!(response_to_last(requests), invalid, "{requests:?}");
    }
    assert_eq!(
        response_to_last(&[(op::WRITE_FIRST, 2000, 1024), (op::WRITE_LAST, 0, 976)]),
        None
    );
}

/// The timer applies to the oldest packet and restarts with each acknowledgement, so
/// that a transfer longer than the timeout does not expire.
#[test]
fn progress_restarts_the_timer() {
    let config = QpConfig {
        ack_timeout: 4,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ib, 64, 1, &config);
    world.fabric.set_faults(Faults {
        delay: 10_000,
        ..Faults::default()
    });
    for id in 0..2000 {
        world.hcas[0].post_send(100, work(id, Operation::Write, 0, 8, 0));
    }
    world.settle(SECOND);
    assert!(world.now > 4 * (4096 << 4));
    assert_eq!(statuses(&mut world.hcas[0], 100).len(), 2000);
    let counters = world.hcas[0].transport.counters();
    assert_eq!((counters.timeouts, counters.retransmitted), (0, 0));
}
