//! Which values a queue pair is connected with.

use std::time::Duration;

use ringverbs::completion::{CompletionLevel, completion_method};
use ringverbs::qp::{AckTimeout, ConnectOptions, FlushRange, FlushTo, LocalAddress, Mtu, State};
use ringverbs::query::{DeviceAttr, DeviceAttrEx};
use ringverbs::{AccessFlags, Endpoint, Error, Gid, Operation, RemoteAddr, Transport, WorkRequest};
use uverbs::abi::write::{CMD_FLAG_EXTENDED, ModifyQp, cmd};
use uverbs::kernel::fake::Target;

use crate::World;
use device_testing::rxe::kernel::Machine;

const MODIFY_QP: Target = Target::Write(cmd::CMD_MODIFY_QP);
const QUERY: Target = Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE);

/// A device whose queue pairs take `responder` reads of the peer's, and have
/// `initiator` of their own outstanding.
fn world(responder: u32, initiator: u32) -> World {
    world_of(DeviceAttrEx {
        base: DeviceAttr {
            max_qp_rd_atom: responder,
            max_qp_init_rd_atom: initiator,
            ..DeviceAttr::default()
        },
        ..DeviceAttrEx::default()
    })
}

fn world_of(device: DeviceAttrEx) -> World {
    let machine = Machine::new();
    machine.fake.on(QUERY, move |reply| {
        reply.set_core_out(&DeviceAttrEx {
            response_length: size_of::<DeviceAttrEx>() as u32,
            ..device
        });
        Ok(())
    });
    World::on(machine)
}

fn local() -> LocalAddress {
    LocalAddress {
        port: 1,
        gid_index: 2,
        gid: Gid([1; 16]),
        lid: 0,
        mtu: Mtu::Bytes4096,
    }
}

fn peer() -> Endpoint {
    Endpoint {
        qp_num: 0x123,
        psn: 0x456,
        lid: 0,
        mtu: Mtu::Bytes2048,
        gid: Gid([2; 16]),
    }
}

/// Connects, and returns what the kernel was told: INIT, RTR, RTS.
fn connected(world: &World, options: &ConnectOptions) -> [ModifyQp; 3] {
    let (mut qp, _queues) = world.new_queue_pair(17);
    world.machine.fake.take_calls();
    qp.connect_with(&local(), &peer(), options).unwrap();
    assert_eq!(qp.state(), State::RTS);
    let calls = world.machine.fake.take_ioctls();
    let modified = calls.iter().filter(|call| call.target() == MODIFY_QP);
    let told: Vec<ModifyQp> = modified.map(|call| call.core_in().unwrap()).collect();
    told.try_into().unwrap()
}

#[test]
fn connect_options_defaults() {
    let [_, receive, send] = connected(&World::new(), &ConnectOptions::new());
    assert_eq!((receive.dest_qp_num, receive.rq_psn), (0x123, 0x456));
    assert_eq!((receive.path_mtu, receive.min_rnr_timer), (4, 12));
    assert_eq!((receive.max_dest_rd_atomic, send.max_rd_atomic), (16, 16));
    assert_eq!((send.timeout, send.retry_cnt, send.rnr_retry), (14, 6, 7));
    let path = receive.dest;
    assert_eq!((path.hop_limit, path.traffic_class, path.sl), (64, 0, 0));
}

#[test]
fn connect_options_reach_the_kernel() {
    let options = ConnectOptions::new()
        .initiator_depth(3)
        .responder_depth(5)
        .ack_timeout(Duration::from_millis(1))
        .retries(2)
        .rnr_retries(1)
        .rnr_timer(Duration::from_millis(100))
        .traffic_class(0x68)
        .service_level(4)
        .hop_limit(1)
        .max_mtu(Mtu::Bytes1024);
    let [_, receive, send] = connected(&world(128, 128), &options);
    assert_eq!((receive.max_dest_rd_atomic, send.max_rd_atomic), (5, 3));
    // 4.096 µs × 2^8, and 122.88 ms.
    assert_eq!((send.timeout, receive.min_rnr_timer), (8, 27));
    assert_eq!((send.retry_cnt, send.rnr_retry), (2, 1));
    let path = receive.dest;
    assert_eq!((path.traffic_class, path.sl, path.hop_limit), (0x68, 4, 1));
    assert_eq!(receive.path_mtu, 3);
    let options = options.ack_timeout(AckTimeout::NEVER);
    let [_, _, send] = connected(&world(128, 128), &options);
    assert_eq!(send.timeout, 0);
}

#[test]
fn outstanding_reads_are_limited_to_the_device() {
    let options = ConnectOptions::new().initiator_depth(255);
    let [_, receive, send] = connected(&world(4, 300), &options);
    assert_eq!((receive.max_dest_rd_atomic, send.max_rd_atomic), (4, 255));
    let [_, receive, send] = connected(&world(300, 2), &ConnectOptions::new());
    assert_eq!((receive.max_dest_rd_atomic, send.max_rd_atomic), (16, 2));
}

#[test]
fn invalid_connect_options_are_refused() {
    let world = World::new();
    let (mut qp, _queues) = world.new_queue_pair(17);
    let options = ConnectOptions::new().rnr_retries(8);
    let error = qp.connect_with(&local(), &peer(), &options).unwrap_err();
    assert!(matches!(error, Error::Limit { asked: 8, .. }), "{error}");
    assert_eq!(qp.state(), State::RESET);
}

/// A device that can flush one way is asked for that one only, and promises
/// nothing of the other.
#[test]
fn flush_types_are_separate_capabilities() {
    let ways = [FlushTo::GlobalVisibility, FlushTo::Persistence];
    for bits in 0..4u64 {
        let world = world_of(DeviceAttrEx {
            device_cap_flags_ex: bits << 38,
            ..DeviceAttrEx::default()
        });
        let can = [bits & 1 != 0, bits & 2 != 0];
        assert_eq!(ways.map(|to| world.context.can_flush_to(to)), can);
        assert_eq!(world.context.can_flush(), bits != 0);
        let [init, ..] = connected(&world, &ConnectOptions::default());
        let access = AccessFlags::from_bits_retain(init.qp_access_flags);
        let flags = [AccessFlags::FLUSH_GLOBAL, AccessFlags::FLUSH_PERSISTENT];
        assert_eq!(flags.map(|flag| access.contains(flag)), can);
        let commit = completion_method(
            &world.context,
            Transport::Reliable,
            Operation::Write,
            CompletionLevel::Commit,
        );
        assert_eq!(commit.is_ok(), can[1]);
        let (mut qp, _queues) = world.queue_pair(18);
        for (to, can) in ways.into_iter().zip(can) {
            let flush = WorkRequest::flush(RemoteAddr::default(), FlushRange::Region, to);
            assert_eq!(qp.post(flush).is_ok(), can);
        }
    }
}
