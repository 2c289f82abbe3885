//! Why packets are dropped, requests refused, and work requests fail, as it is reported.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use super::{datagram, dynamic, errors, flood, order, *};
use crate::packet::{
    Bth, MULTICAST_QPN, NakCode, PacketBuilder, Payload, Pool, Psn, Reth, Roce, Template, View, op,
};
use crate::transport::model::XRC_STRANGERS;

thread_local! {
    /// The sentences that causes of this thread's test have had, by name.
    static RECORDED: RefCell<BTreeMap<&'static str, String>> =
        const { RefCell::new(BTreeMap::new()) };
}

/// Called for each cause that the model is told.
pub(in crate::transport) fn record(cause: Cause) {
    RECORDED.with_borrow_mut(|recorded| {
        recorded
            .entry(name(cause))
            .or_insert_with(|| cause.to_string());
    });
}

/// Declares the names of all causes, and the function that returns that of one. A new cause does
/// not compile until it is here, and then has to be produced.
macro_rules! names {
    ($($kind:ident($cause:ident) { $($variant:ident)+ })+) => {
        const NAMES: &[&str] = &[$($(concat!(stringify!($cause), "::", stringify!($variant))),+),+];

        fn name(cause: Cause) -> &'static str {
            match cause {
                $($(Cause::$kind($cause::$variant { .. }) => {
                    concat!(stringify!($cause), "::", stringify!($variant))
                })+)+
            }
        }
    };
}

names! {
    Dropped(DropCause) {
        Malformed Icrc UnknownQp NoGroup Service State Direction PartitionKey Peer RoceVersion
        QueueKey OwnMulticast DatagramLength NoReceive AbsentMemory DcKey StaleConnection Closing
        Replies OutOfSequence Duplicate MissingResponse StaleResponse
    }
    Refused(Refusal) {
        Opcode Order Headers PayloadLength MessageLength Permission Srq Reads Alignment
        RemoteMemory ReceiveLength ReceiveMemory InvalidatedKey NoReceive AbsentMemory InjectedNak
        InjectedRnr
    }
    Failed(Failure) {
        Engine MessageLength Operation NoReads NoDestination NoPath LocalMemory Refused Response
        Retries RnrRetries Flushed
    }
}

/// Every cause is produced by a packet, a request or a work request, and has a sentence of its
/// own.
#[test]
fn every_cause_is_produced() {
    refusals_name_their_operands();
    failures_name_their_operands();
    drops_name_their_operands();
    every_drop_is_counted_once();
    datagram::a_datagram_that_is_too_long_for_the_receive_is_dropped();
    datagram::a_datagram_without_a_receive_is_dropped();
    datagram::multicast_reaches_attached_queue_pairs();
    datagram::the_queue_key_is_checked();
    dynamic::a_wrong_dc_access_key_is_counted_and_ignored();
    dynamic::a_late_packet_of_an_old_connection_is_ignored();
    dynamic::a_stream_error_leaves_other_streams_unaffected();
    errors::malformed_requests_are_nakked();
    errors::malformed_responses_are_errors();
    errors::unsupported_operations_are_local_errors();
    errors::malformed_work_requests_complete_in_order();
    errors::remote_invalid_request_errors();
    errors::remote_operation_errors();
    errors::invalidating_an_unknown_key_is_an_error();
    flood::queued_responses_are_bounded();
    order::outstanding_reads_are_limited();
    absent_memory_is_waited_for();
    absent_memory_loses_a_datagram();
    injected_refusals_end_or_delay_a_request();
    a_request_without_its_headers_is_refused();
    responses_are_lost();
    wrong_destinations();
    received(op::WRITE_FIRST, Service::Rc, 200, Some(MAX_LENGTH + 1));
    // SEND Only of XRC.
    received(0xa4, Service::XrcInitiator, 200, None);
    // That of UD.
    received(0x64, Service::Ud, MULTICAST_QPN, None);
    let recorded = RECORDED.with_borrow(BTreeMap::clone);
    let missing: Vec<&str> = (NAMES.iter().copied())
        .filter(|name| !recorded.contains_key(name))
        .collect();
    assert_eq!(missing, [""; 0]);
    let sentences: BTreeSet<&str> = recorded.values().map(String::as_str).collect();
    assert_eq!(sentences.len(), recorded.len(), "{recorded:#?}");
}

/// Returns what an HCA has reported.
fn causes_of(world: &World, index: usize) -> Vec<Cause> {
    let causes = &world.hcas[index].host.causes;
    causes.iter().map(|(_, cause)| *cause).collect()
}

/// Requests and responses that meet absent memory are sent again, and succeed once it is present.
#[test]
fn absent_memory_is_waited_for() {
    for (operation, at, expected) in [
        (Operation::Send, 1, Refusal::AbsentMemory.into()),
        (Operation::Write, 1, Refusal::AbsentMemory.into()),
        (Operation::Read, 1, Refusal::AbsentMemory.into()),
        (Operation::Read, 0, DropCause::AbsentMemory.into()),
    ] {
        let mut world = pair(LinkKind::Ethernet, 64 * 1024, 1, &QpConfig::default());
        world.hcas[1].post_recv(200, 1, 8192, 3000);
        world.hcas[at].host.absent = 2;
        world.hcas[0].post_send(100, work(1, operation, 0, 3000, 0));
        world.settle(SECOND);
        let told = causes_of(&world, at);
        assert!(told.contains(&expected), "{operation:?}: {told:?}");
        assert_eq!(world.hcas[at].host.absent, 0);
        assert_eq!(statuses(&mut world.hcas[0], 100), [(1, Status::Success)]);
    }
}

/// The receive is used for the next datagram.
#[test]
fn absent_memory_loses_a_datagram() {
    let mut world = datagram::world(2, LinkKind::Ethernet, &datagram::config());
    world.hcas[1].host.absent = 1;
    for _ in 0..2 {
        let request = datagram::datagram(&world, 1, 1000, 50, datagram::QKEY);
        world.hcas[0].post_send(50, request);
        world.settle(SECOND);
    }
    assert_eq!(causes_of(&world, 1), [DropCause::AbsentMemory.into()]);
    assert_eq!(
        recv_statuses(&mut world.hcas[1], 50),
        [(0, Status::Success)]
    );
}

/// Delivers packets until one is the request that queue pair 200 executes next, and refuses that.
fn refuse_next(world: &mut World, refusal: Refusal) {
    loop {
        let hca = &mut world.hcas[0];
        hca.transport.run(&mut hca.host, world.now, 1);
        let packet = hca.transport.pop().expect("a request");
        let hca = &mut world.hcas[1];
        let view = View::parse_packet(&packet).unwrap();
        if hca.transport.executes_next(&view) {
            return hca.transport.refuse(&mut hca.host, 200, refusal);
        }
    }
}

/// An injected NAK ends a request, one of the receiver that is not ready delays it.
#[test]
fn injected_refusals_end_or_delay_a_request() {
    let code = NakCode::RemoteOperation;
    let ended = Failure::Refused(code);
    for (refusal, failure) in [
        (Refusal::InjectedNak(code), Some(ended)),
        (Refusal::InjectedRnr, None),
    ] {
        let mut world = pair(LinkKind::Ethernet, 64 * 1024, 1, &QpConfig::default());
        world.hcas[0].post_send(100, work(1, Operation::Write, 0, 8, 0));
        refuse_next(&mut world, refusal);
        world.settle(SECOND);
        assert_eq!(causes_of(&world, 1)[0], refusal.into());
        let told = causes_of(&world, 0);
        assert_eq!(told, Vec::from_iter(failure.map(Cause::from)), "{refusal}");
        let ends_well = statuses(&mut world.hcas[0], 100) == [(1, Status::Success)];
        assert_eq!(ends_well, failure.is_none(), "{refusal}");
    }
}

/// No packet lacks the headers of its opcode: it is malformed before. What loops back without a
/// frame is parsed by nobody.
#[test]
fn a_request_without_its_headers_is_refused() {
    for opcode in [op::WRITE_ONLY, op::READ_REQUEST, op::FETCH_ADD] {
        let mut world = pair(LinkKind::Ib, 64 * 1024, 1, &QpConfig::default());
        let path = world.hcas[0].path_to(1);
        let (l3, _) = Template::new(&path).l3();
        let bth = Bth {
            opcode,
            dest_qpn: 200,
            pkey: 0xffff,
            psn: Psn::new(0),
            ..Bth::default()
        };
        let view = View::looped_back(path.link, l3, bth, &[], Payload::Bytes(&[]));
        let hca = &mut world.hcas[1];
        let _: FollowUp = hca.transport.deliver(&mut hca.host, 0, 200, &view);
        assert_eq!(causes_of(&world, 1), [Refusal::Headers.into()]);
    }
}

/// Reads whose responses are lost.
fn responses_are_lost() {
    let mut world = pair(LinkKind::Ethernet, 64 * 1024, 3, &QpConfig::default());
    world.fabric.set_faults(Faults {
        loss: 0.1,
        ..Faults::default()
    });
    for id in 0..20 {
        world.hcas[0].post_send(100, work(id, Operation::Read, 0, 20_000, 0));
    }
    world.settle(SECOND);
}

/// Work requests without a destination or a path, or for an SRQ of another domain.
fn wrong_destinations() {
    let config = |service| QpConfig {
        service,
        ..QpConfig::default()
    };
    for service in [Service::Ud, Service::Rc] {
        let mut world = World::new(2, LinkKind::Ib, 64, 1);
        let hca = &mut world.hcas[0];
        hca.transport.create(100, config(service)).unwrap();
        hca.raise(100, &config(service), 0);
        hca.post_send(100, work(1, Operation::Send, 0, 8, 0));
        world.settle(SECOND);
    }
    let mut world = World::new(2, LinkKind::Ib, 64, 1);
    let ends = [
        (0, 100, Service::XrcInitiator),
        (1, 200, Service::XrcTarget),
    ];
    for (index, qpn, service) in ends {
        let path = Some(world.hcas[index].path_to(1 - index));
        let config = QpConfig {
            path,
            remote_qpn: 300 - qpn,
            ..config(service)
        };
        let hca = &mut world.hcas[index];
        hca.transport.create(qpn, config.clone()).unwrap();
        hca.raise(qpn, &config, 0);
    }
    let mut send = work(1, Operation::Send, 0, 8, 0);
    send.xrc_srqn = XRC_STRANGERS;
    world.hcas[0].post_send(100, send);
    world.settle(SECOND);
}

/// A packet of 1,024 bytes of payload arrives.
fn received(opcode: u8, service: Service, qpn: u32, reth: Option<u32>) {
    let mut world = World::new(2, LinkKind::Ib, 8192, 1);
    let config = QpConfig {
        service,
        path: Some(world.hcas[1].path_to(0)),
        ..QpConfig::default()
    };
    let hca = &mut world.hcas[1];
    hca.transport.create(200, config.clone()).unwrap();
    hca.raise(200, &config, 0);
    let template = Template::new(&world.hcas[0].path_to(1));
    let bth = Bth {
        opcode,
        dest_qpn: qpn,
        pkey: 0xffff,
        psn: Psn::new(0),
        ..Bth::default()
    };
    let mut builder = PacketBuilder::new(&Pool::new(), &template, bth, 1024);
    let reth = reth.map(|length| Reth {
        va: VA,
        rkey: RKEY,
        length,
    });
    if let Some(reth) = reth {
        builder.put(&reth.bytes());
    }
    builder.space(1024).fill(0);
    let hca = &mut world.hcas[1];
    hca.transport.receive(&mut hca.host, 0, builder.finish());
}

/// Returns what an HCA reports about a queue pair after it was sent a request.
fn reported(modify: impl FnOnce(&mut World, &mut SendWork<Range>), at: (usize, u32)) -> Vec<Cause> {
    let config = QpConfig {
        retry_count: 1,
        rnr_retry: 0,
        ack_timeout: 8,
        ..QpConfig::default()
    };
    let mut world = pair(LinkKind::Ethernet, 16 * 1024, 1, &config);
    let mut request = work(1, Operation::Send, 0, 3000, 0);
    modify(&mut world, &mut request);
    world.hcas[0].post_send(100, request);
    world.settle(SECOND);
    let causes = &world.hcas[at.0].host.causes;
    let of_qp = causes.iter().filter(|(qpn, _)| *qpn == Some(at.1));
    of_qp.map(|(_, cause)| *cause).collect()
}

const REQUESTER: (usize, u32) = (0, 100);
const RESPONDER: (usize, u32) = (1, 200);

#[test]
fn refusals_name_their_operands() {
    let of = |modify: &dyn Fn(&mut World, &mut SendWork<Range>)| reported(modify, RESPONDER);
    let refused = of(&|_, _| {});
    assert_eq!(refused[0], Refusal::NoReceive.into());
    let refused = of(&|world, _| world.hcas[1].post_recv(200, 1, 0, 2000));
    let (length, room) = (2048, 2000);
    let expected = Refusal::ReceiveLength { length, room };
    assert_eq!(refused[0], expected.into());
    let refused = of(&|_, request| {
        (request.operation, request.rkey) = (Operation::Write, 7);
    });
    let expected = Refusal::RemoteMemory {
        rkey: 7,
        va: VA,
        length: 3000,
        access: Access::Write,
        fault: Fault::Protection,
        receive: false,
    };
    assert_eq!(refused[0], expected.into());
    let refused = of(&|_, request| {
        (request.operation, request.va) = (Operation::FetchAdd { add: 1 }, VA + 4);
    });
    assert_eq!(refused[0], Refusal::Alignment(VA + 4).into());
}

#[test]
fn failures_name_their_operands() {
    let of = |modify: &dyn Fn(&mut World, &mut SendWork<Range>)| reported(modify, REQUESTER);
    let failed = of(&|_, _| {});
    let timer = QpConfig::default().min_rnr_timer;
    assert_eq!(failed, [Failure::RnrRetries { count: 0, timer }.into()]);
    let failed = of(&|world, _| world.hcas[1].port.set_link(false));
    let retries = Failure::Retries {
        count: 1,
        timeout: 8,
        excused: 0,
    };
    assert_eq!(failed, [retries.into()]);
    let sentence = "no answer of the peer after 1 retries with a timeout of 1.0ms";
    assert_eq!(retries.to_string(), sentence);
    let rnr = Failure::RnrRetries {
        count: 3,
        timer: 12,
    };
    let sentence = "the peer had no receive posted, after 3 retries, each after 640.0µs (RNR)";
    assert_eq!(rnr.to_string(), sentence);
    let failed = of(&|_, request| request.length = MAX_LENGTH + 1);
    assert_eq!(failed, [Failure::MessageLength(MAX_LENGTH + 1).into()]);
    let failed = of(&|_, request| request.local.length = 100);
    let expected = Failure::LocalMemory(Fault::Protection);
    assert_eq!(failed, [expected.into()]);
    let failed = of(&|world, request| {
        (request.operation, request.rkey) = (Operation::Read, 7);
        world.hcas[1].host.regions.clear();
    });
    let code = crate::packet::NakCode::RemoteAccess;
    assert_eq!(failed, [Failure::Refused(code).into()]);
}

/// Longest message.
const MAX_LENGTH: u32 = 1 << 30;

#[test]
fn drops_name_their_operands() {
    let of = |modify: &dyn Fn(&mut Hca, &mut QpConfig)| {
        let change = |world: &mut World, _: &mut SendWork<Range>| {
            let hca = &mut world.hcas[1];
            let mut config = hca.transport.config(200).cloned().unwrap();
            modify(hca, &mut config);
            let to = hca.transport.query(200).map(|view| view.state);
            let to = to.unwrap_or_default();
            let _ = hca.transport.modify(&mut hca.host, 0, 200, to, config);
        };
        reported(change, RESPONDER)[0]
    };
    let (packet, own) = (0xffff, 0x8001);
    let dropped = of(&|_, config| config.pkey = own);
    assert_eq!(dropped, DropCause::PartitionKey { packet, own }.into());
    let dropped = of(&|hca, config| config.path = Some(hca.path_to(5)));
    assert_eq!(dropped, DropCause::Peer.into());
    let dropped = of(&|_, config| config.path.as_mut().unwrap().roce = Roce::V1);
    assert_eq!(dropped, DropCause::RoceVersion.into());
    let dropped = of(&|hca, _| hca.transport.destroy(200));
    assert_eq!(dropped, DropCause::UnknownQp(200).into());
    let dropped = of(&|hca, _| {
        let config = QpConfig {
            service: Service::Uc,
            ..QpConfig::default()
        };
        hca.transport.destroy(200);
        hca.transport.create(200, config.clone()).unwrap();
        hca.raise(200, &config, 0);
    });
    let service = Service::Uc;
    // The first packet of a send over RC.
    assert_eq!(dropped, DropCause::Service { opcode: 0, service }.into());
    let dropped = of(&|hca, config| {
        let _ = hca
            .transport
            .modify(&mut hca.host, 0, 200, QpState::Error, config.clone());
    });
    assert_eq!(dropped, DropCause::State(QpState::Error).into());
}

/// Each dropped packet is reported, whatever a peer sends.
#[test]
fn every_drop_is_counted_once() {
    let mut world = pair(LinkKind::Ethernet, 64 * 1024, 3, &QpConfig::default());
    world.fabric.set_faults(Faults {
        loss: 0.1,
        duplicate: 0.1,
        reorder: 0.1,
        corrupt: 0.1,
        ..Faults::default()
    });
    for id in 0..20 {
        world.hcas[0].post_send(100, work(id, Operation::Write, 0, 20_000, 0));
    }
    world.settle(SECOND);
    for hca in &world.hcas {
        let counters = hca.transport.counters();
        let counted = counters.bad_icrc
            + counters.malformed
            + counters.duplicates
            + counters.out_of_sequence
            + counters.stale
            + counters.dropped;
        let dropped = |(_, cause): &&(Option<u32>, Cause)| matches!(cause, Cause::Dropped(_));
        let reported = hca.host.causes.iter().filter(dropped).count();
        assert!(counted > 0);
        assert_eq!(counted, reported as u64);
    }
}
