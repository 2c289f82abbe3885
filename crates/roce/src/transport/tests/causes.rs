//! Why packets are dropped, requests refused, and work requests fail, as it is reported.

use super::*;
use crate::packet::Roce;

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
    assert_eq!(failed, [Failure::RnrRetries(0).into()]);
    let failed = of(&|world, _| world.hcas[1].port.set_link(false));
    assert_eq!(failed, [Failure::Retries(1).into()]);
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
