//! The connection manager through `crates/rdmacm`, as programs use it, and with
//! malicious peers.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::poll::PollTimeout;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use proptest::prelude::*;
use rdmacm::{
    Address, ConnParam, Error, Event, EventChannel, EventKind, Id, JoinFlags, PortSpace, Reason,
    RejectReason, SidrStatus, State as IdState, param,
};
use uverbs::{AsyncEventType, QpState};

use super::mad::{Attribute, Mad, MadHeader};
use super::message::{Message, MessageKind};
use crate::cause::{Cause, DropCause};
use crate::poll::wait;
use crate::wires::agent::{MAD_SIZE, ManagementAgent, Peer, PortAddress};
use crate::{Drive, Embedded, Network};

const TIMEOUT: Duration = Duration::from_secs(30);
const NO_EVENT_WAIT: Duration = Duration::from_millis(10);

/// A directory that is removed after the test.
struct TempDirectory(Option<PathBuf>);

impl Drop for TempDirectory {
    fn drop(&mut self) {
        if let Some(directory) = &self.0 {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

/// How two devices reach each other's ports.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Topology {
    /// In one network.
    Process,
    /// In two that share a directory.
    Directory,
    /// As two hosts do.
    Hosts,
}

const ALL_TOPOLOGIES: [(Topology, Drive); 5] = [
    (Topology::Process, Drive::Caller),
    (Topology::Process, Drive::Thread),
    (Topology::Directory, Drive::Caller),
    (Topology::Directory, Drive::Thread),
    (Topology::Hosts, Drive::Thread),
];

thread_local! {
    /// The address of the second device of a test.
    static PEER_ADDRESS: Cell<Ipv4Addr> = const { Cell::new(Ipv4Addr::LOCALHOST) };
}

/// Returns an address that no other test has.
fn unused_address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(64);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, NEXT.fetch_add(1, Ordering::Relaxed), high, low)
}

/// Creates two devices that reach each other's ports.
fn device_pair(topology: Topology, drive: Drive) -> (Embedded, Embedded, TempDirectory) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    PEER_ADDRESS.set(Ipv4Addr::LOCALHOST);
    match topology {
        Topology::Process => {
            let network = Network::new(drive).unwrap();
            let device = || network.device("roce").unwrap();
            return (device(), device(), TempDirectory(None));
        }
        Topology::Hosts => {
            let far = unused_address();
            PEER_ADDRESS.set(far);
            let device = |address: Ipv4Addr| {
                let network = Network::roce(drive, &address.to_string()).unwrap();
                network.device("roce").unwrap()
            };
            return (device(unused_address()), device(far), TempDirectory(None));
        }
        Topology::Directory => {}
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("ringverbs-cm-{}-{number}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    let device = || {
        let network = Network::joined(drive, &directory).unwrap();
        network.device("roce").unwrap()
    };
    (device(), device(), TempDirectory(Some(directory)))
}

fn event_channel(device: &Embedded) -> EventChannel {
    EventChannel::open_on(device.connection_manager()).unwrap()
}

fn next_event(channel: &EventChannel, kind: EventKind) -> Event {
    let event = channel.wait(Some(TIMEOUT)).unwrap();
    let event = event.unwrap_or_else(|| panic!("no {kind:?}"));
    assert_eq!(event.kind(), kind, "{:?}", event.message().result());
    event
}

fn assert_no_event(channel: &EventChannel) {
    assert!(channel.wait(Some(NO_EVENT_WAIT)).unwrap().is_none());
}

fn listen(channel: &EventChannel, space: PortSpace, backlog: u32) -> (Id, SocketAddr) {
    let id = channel.create_id(space).unwrap();
    id.bind((IpAddr::from(PEER_ADDRESS.get()), 0)).unwrap();
    id.listen(backlog).unwrap();
    let at = id.local_addr().unwrap().unwrap();
    assert_ne!(at.port(), 0);
    (id, at)
}

fn resolved_id(channel: &EventChannel, space: PortSpace, to: SocketAddr) -> Id {
    let id = channel.create_id(space).unwrap();
    id.resolve_address(None, to, TIMEOUT).unwrap();
    next_event(channel, EventKind::ADDR_RESOLVED);
    id.resolve_route(TIMEOUT).unwrap();
    next_event(channel, EventKind::ROUTE_RESOLVED);
    id
}

fn param(qp_num: u32, private_data: &[u8]) -> ConnParam<'_> {
    ConnParam {
        qp_num,
        private_data,
        ..ConnParam::default()
    }
}

/// Checks the whole private data field: the data, followed by zeros.
fn assert_private_data(event: &Event, expected: &[u8], length: usize) {
    let data = event.message().private_data();
    assert_eq!(data.len(), length);
    assert_eq!(&data[..expected.len()], expected);
    assert!(data[expected.len()..].iter().all(|byte| *byte == 0));
}

fn next_request(channel: &EventChannel) -> (Event, Id) {
    let mut event = next_event(channel, EventKind::CONNECT_REQUEST);
    let id = event.take_request().unwrap();
    (event, id)
}

/// Establishes a connection; returns the requesting and the accepting id.
fn connected(near: &EventChannel, far: &EventChannel, listener: SocketAddr) -> (Id, Id) {
    let active = resolved_id(near, PortSpace::TCP, listener);
    active.connect(&param(1, b"")).unwrap();
    let (_, passive) = next_request(far);
    passive.accept(&param(2, b"")).unwrap();
    next_event(near, EventKind::CONNECT_RESPONSE);
    active.establish().unwrap();
    next_event(far, EventKind::ESTABLISHED);
    (active, passive)
}

fn assert_rejected(event: &Event, expected: RejectReason) {
    let reason = event.message().result().unwrap_err();
    assert_eq!(reason, Reason::Rejected(expected));
}

#[test]
fn a_connection_is_made_and_ended() {
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (listener, at) = listen(&far, PortSpace::TCP, 4);
        let active = resolved_id(&near, PortSpace::TCP, at);
        let long = [7; 256];
        for length in [57, 255] {
            let refused = active.connect(&param(1, &long[..length])).unwrap_err();
            assert!(matches!(refused, Error::PrivateDataTooLong { .. }));
        }
        let mut asked = param(0xabc, &long[..param::MAX_CONNECT_DATA]);
        (asked.responder_resources, asked.initiator_depth) = (3, 5);
        (asked.retry_count, asked.rnr_retry_count) = (6, 4);
        // Before there is a peer, remote access is not granted.
        let (attr, _) = active.qp_attr(QpState::INIT).unwrap();
        assert!(attr.qp_access_flags.is_empty());
        assert!(active.qp_attr(QpState::RTR).is_err());
        active.connect(&asked).unwrap();

        let (event, passive) = next_request(&far);
        assert!(event.is_of(&listener));
        assert_private_data(&event, &long[..56], param::MAX_CONNECT_DATA);
        let peer = event.message().connection().unwrap();
        assert_eq!((peer.qp_num, peer.retry_count), (0xabc, 6));
        assert_eq!((peer.responder_resources, peer.initiator_depth), (5, 3));
        assert_eq!(passive.peer_addr().unwrap(), active.local_addr().unwrap());
        assert_eq!(passive.local_addr().unwrap(), Some(at));
        let bound = |id: &Id| id.addresses().unwrap().device.unwrap();
        assert_eq!(bound(&passive).node_guid, b.node_guid());
        assert_eq!(bound(&active).node_guid, a.node_guid());
        let (rtr, _) = passive.qp_attr(QpState::RTR).unwrap();
        assert_eq!((rtr.dest_qp_num, rtr.max_dest_rd_atomic), (0xabc, 5));
        let (rts, _) = passive.qp_attr(QpState::RTS).unwrap();
        assert_eq!((rts.max_rd_atomic, rts.retry_cnt, rts.rnr_retry), (3, 6, 4));
        let mut answer = param(0xdef, b"welcome");
        (answer.responder_resources, answer.initiator_depth) = (4, 2);
        answer.rnr_retry_count = 1;
        passive.accept(&answer).unwrap();

        let event = next_event(&near, EventKind::CONNECT_RESPONSE);
        assert_private_data(&event, b"welcome", param::MAX_ACCEPT_DATA);
        assert_eq!(event.message().connection().unwrap().qp_num, 0xdef);
        let (attr, _) = active.qp_attr(QpState::RTR).unwrap();
        assert_eq!((attr.dest_qp_num, attr.max_dest_rd_atomic), (0xdef, 2));
        // The first PSN of one end is the one that the other expects.
        assert_eq!(
            (attr.rq_psn, active.qp_attr(QpState::RTS).unwrap().0.sq_psn),
            {
                let (theirs, _) = passive.qp_attr(QpState::RTS).unwrap();
                (theirs.sq_psn, rtr.rq_psn)
            }
        );
        let (attr, _) = active.qp_attr(QpState::RTS).unwrap();
        assert_eq!(
            (attr.max_rd_atomic, attr.retry_cnt, attr.rnr_retry),
            (4, 6, 1)
        );
        active.establish().unwrap();
        next_event(&far, EventKind::ESTABLISHED);
        let known = passive.notify(AsyncEventType::COMM_EST).unwrap_err();
        assert_eq!(known.errno().raw(), libc::EISCONN);

        active.disconnect().unwrap();
        next_event(&far, EventKind::DISCONNECTED);
        assert_no_event(&near);
        passive.disconnect().unwrap();
        next_event(&near, EventKind::DISCONNECTED);
        assert_eq!(active.state(), IdState::Disconnected);
        let left = active.destroy().map_err(|(_, error)| error).unwrap();
        assert_eq!((left.events_reported(), left.unacknowledged()), (4, 1));
        drop(passive);
        assert_no_event(&far);
        // Each end's messages are its device's, also if both have one manager.
        let (active, passive) = (a.management_counters(), b.management_counters());
        for (attribute, by_active) in [
            (Attribute::Request, true),
            (Attribute::Reply, false),
            (Attribute::Ready, true),
            (Attribute::Disconnect, true),
            (Attribute::Disconnected, false),
        ] {
            let index = attribute.index();
            let (sender, receiver) = match by_active {
                true => (active, passive),
                false => (passive, active),
            };
            assert!(sender.sent[index] > 0 && receiver.received[index] > 0);
            assert_eq!((receiver.sent[index], sender.received[index]), (0, 0));
        }
    }
}

/// Also if another thread has the wire when the process ends.
#[test]
fn the_end_of_a_process_is_told_to_other_hosts() {
    let (near, far, _directory) = device_pair(Topology::Hosts, Drive::Caller);
    let (near_channel, far_channel) = (event_channel(&near), event_channel(&far));
    let (_listener, at) = listen(&far_channel, PortSpace::TCP, 4);
    let id = resolved_id(&near_channel, PortSpace::TCP, at);
    id.connect(&param(1, b"")).unwrap();
    let settle = || {
        for _ in 0..50 {
            let _ = near.drive() | far.drive();
            // Longer than between two turns of the gateway.
            thread::sleep(Duration::from_micros(200));
        }
    };
    settle();
    let (_, accepted) = next_request(&far_channel);
    accepted.accept(&param(2, b"")).unwrap();
    settle();
    next_event(&near_channel, EventKind::CONNECT_RESPONSE);
    id.establish().unwrap();
    settle();
    next_event(&far_channel, EventKind::ESTABLISHED);
    let (flush, link) = near.runner.wire();
    let held = link.unwrap().hold();
    thread::scope(|scope| {
        let ending = scope.spawn(|| flush.flush());
        thread::sleep(Duration::from_millis(30));
        drop(held);
        ending.join().unwrap();
    });
    settle();
    next_event(&far_channel, EventKind::DISCONNECTED);
}

#[test]
fn a_comm_est_event_establishes_the_connection() {
    let (a, b, _directory) = device_pair(Topology::Process, Drive::Caller);
    let (near, far) = (event_channel(&a), event_channel(&b));
    let (_listener, at) = listen(&far, PortSpace::TCP, 4);
    let active = resolved_id(&near, PortSpace::TCP, at);
    active.connect(&param(1, b"")).unwrap();
    let (_, passive) = next_request(&far);
    passive.accept(&param(2, b"")).unwrap();
    next_event(&near, EventKind::CONNECT_RESPONSE);
    passive.notify(AsyncEventType::COMM_EST).unwrap();
    next_event(&far, EventKind::ESTABLISHED);
    active.establish().unwrap();
    assert_no_event(&far);
    active.disconnect().unwrap();
    next_event(&far, EventKind::DISCONNECTED);
}

#[test]
fn a_rejection_is_reported() {
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (listener, at) = listen(&far, PortSpace::TCP, 2);
        let ask = || {
            let active = resolved_id(&near, PortSpace::TCP, at);
            active.connect(&param(1, b"")).unwrap();
            active
        };
        // Rejected explicitly, and by dropping the request.
        let active = ask();
        let (_, passive) = next_request(&far);
        passive.reject(&[9; param::MAX_REJECT_DATA]).unwrap();
        let event = next_event(&near, EventKind::REJECTED);
        assert_rejected(&event, RejectReason::CONSUMER_DEFINED);
        assert_private_data(&event, &[9; 148], param::MAX_REJECT_DATA);
        let active = (active, ask());
        drop(next_request(&far));
        assert_rejected(
            &next_event(&near, EventKind::REJECTED),
            RejectReason::CONSUMER_DEFINED,
        );
        drop(active);
        // Too much private data: the peer is rejected.
        let active = ask();
        let (_, passive) = next_request(&far);
        let refused = passive.accept(&param(1, &[0; 197])).unwrap_err();
        assert!(matches!(refused, Error::PrivateDataTooLong { .. }));
        next_event(&near, EventKind::REJECTED);
        drop((active, passive));
        // The requester rejects the response.
        let active = ask();
        let (_, passive) = next_request(&far);
        passive.accept(&param(2, b"")).unwrap();
        next_event(&near, EventKind::CONNECT_RESPONSE);
        active.reject(b"after all, no").unwrap();
        let event = next_event(&far, EventKind::REJECTED);
        assert_rejected(&event, RejectReason::CONSUMER_DEFINED);
        assert_private_data(&event, b"after all, no", param::MAX_REJECT_DATA);
        drop((active, passive));
        // The requester is destroyed before it gets an answer.
        drop(ask());
        let (_, passive) = next_request(&far);
        assert_no_event(&far);
        assert!(matches!(
            passive.accept(&param(2, b"")),
            Err(Error::Refused { .. })
        ));
        // The backlog is full, so one more request is rejected; dropping the
        // listener rejects those that wait.
        let waiting = [ask(), ask()];
        let _one_more = ask();
        if drive == Drive::Caller {
            while b.drive() {}
        }
        assert_rejected(
            &next_event(&near, EventKind::REJECTED),
            RejectReason::CONSUMER_DEFINED,
        );
        assert_no_event(&near);
        drop(listener);
        for _ in &waiting {
            assert_rejected(
                &next_event(&near, EventKind::REJECTED),
                RejectReason::CONSUMER_DEFINED,
            );
        }
        let _nobody = ask();
        assert_rejected(
            &next_event(&near, EventKind::REJECTED),
            RejectReason::INVALID_SERVICE_ID,
        );
    }
}

#[test]
fn addresses_of_interfaces_are_local_and_multicast_groups_reachable() {
    let (a, ..) = device_pair(Topology::Process, Drive::Caller);
    let channel = event_channel(&a);
    let own = getifaddrs().unwrap().find_map(|interface| {
        let ip = interface.address?.as_sockaddr_in()?.ip();
        (!ip.is_loopback()).then_some(ip)
    });
    if let Some(own) = own {
        let to = SocketAddr::from((own, 7100));
        let id = channel.create_id(PortSpace::TCP).unwrap();
        id.bind(to).unwrap();
        id.listen(0).unwrap();
        let active = resolved_id(&channel, PortSpace::TCP, to);
        assert_eq!(active.local_addr().unwrap().unwrap().ip(), to.ip());
        active.connect(&param(1, b"")).unwrap();
        let (_, passive) = next_request(&channel);
        assert_eq!(passive.local_addr().unwrap(), Some(to));
    }
    for group in ["239.1.1.1:0", "[ff0e::1]:0"] {
        let id = resolved_id(&channel, PortSpace::UDP, group.parse().unwrap());
        assert!(id.local_addr().unwrap().unwrap().ip().is_loopback());
    }
}

/// libfabric binds to localhost to discover devices.
#[test]
fn hosts_have_loopback_addresses_of_their_own() {
    let (a, b, _directory) = device_pair(Topology::Hosts, Drive::Thread);
    let (near, far) = (event_channel(&a), event_channel(&b));
    let localhost = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = far.create_id(PortSpace::TCP).unwrap();
    listener.bind(localhost).unwrap();
    assert!(listener.addresses().unwrap().device.is_none());
    listener.listen(1).unwrap();
    let port = listener.local_addr().unwrap().unwrap().port();
    let to = SocketAddr::from((PEER_ADDRESS.get(), port));
    let ask = |channel: &EventChannel| {
        let id = channel.create_id(PortSpace::TCP).unwrap();
        id.bind(localhost).unwrap();
        id.resolve_address(None, to, TIMEOUT).unwrap();
        next_event(channel, EventKind::ADDR_RESOLVED);
        id.resolve_route(TIMEOUT).unwrap();
        next_event(channel, EventKind::ROUTE_RESOLVED);
        id.connect(&param(1, b"")).unwrap();
        id
    };
    let active = ask(&near);
    assert_ne!(active.local_addr().unwrap().unwrap().ip(), localhost.ip());
    assert_no_event(&far);
    let refused = next_event(&near, EventKind::REJECTED);
    assert_rejected(&refused, RejectReason::INVALID_SERVICE_ID);
    let active = ask(&far);
    let (_, passive) = next_request(&far);
    assert_eq!(passive.peer_addr().unwrap(), active.local_addr().unwrap());
}

#[test]
fn loopback_addresses_are_local() {
    let (a, ..) = device_pair(Topology::Process, Drive::Caller);
    let channel = event_channel(&a);
    let bind = |address: &str| {
        let id = channel.create_id(PortSpace::TCP).unwrap();
        let bound = id.bind(address.parse::<SocketAddr>().unwrap());
        bound.map(|()| id).map_err(|error| error.errno().raw())
    };
    assert_eq!(bind("203.0.113.1:1").unwrap_err(), libc::EADDRNOTAVAIL);
    let id = bind("[::]:7000").unwrap();
    assert_eq!(bind("127.0.0.1:7000").unwrap_err(), libc::EADDRNOTAVAIL);
    assert!(id.addresses().unwrap().device.is_none());
    id.listen(0).unwrap();
    // An unspecified IPv6 address includes IPv4, unless IPv6-only is set.
    for to in ["127.0.0.1:7000", "127.9.9.9:7000", "[::1]:7000"] {
        let to = to.parse().unwrap();
        let active = resolved_id(&channel, PortSpace::TCP, to);
        active.connect(&param(1, b"")).unwrap();
        let (_, passive) = next_request(&channel);
        assert_eq!(passive.local_addr().unwrap(), Some(to));
        drop(passive);
        next_event(&channel, EventKind::REJECTED);
    }
    drop(id);
    let only = channel.create_id(PortSpace::TCP).unwrap();
    only.set_ipv6_only(true).unwrap();
    only.bind("[::]:7000".parse::<SocketAddr>().unwrap())
        .unwrap();
    only.listen(0).unwrap();
    // The port of the other family is free.
    drop(bind("127.0.0.1:7000").unwrap());
    let active = resolved_id(&channel, PortSpace::TCP, "127.0.0.1:7000".parse().unwrap());
    active.connect(&param(1, b"")).unwrap();
    assert_rejected(
        &next_event(&channel, EventKind::REJECTED),
        RejectReason::INVALID_SERVICE_ID,
    );
    let id = channel.create_id(PortSpace::TCP).unwrap();
    let nowhere: SocketAddr = "203.0.113.1:1".parse().unwrap();
    id.resolve_address(None, nowhere, TIMEOUT).unwrap();
    let event = next_event(&channel, EventKind::ADDR_ERROR);
    assert!(matches!(event.message().result(), Err(Reason::Errno(_))));
}

#[test]
fn a_new_id_permits_few_commands() {
    let (a, ..) = device_pair(Topology::Process, Drive::Caller);
    let channel = event_channel(&a);
    let id = channel.create_id(PortSpace::TCP).unwrap();
    let wrong = |result: Result<(), Error>| {
        assert!(
            matches!(result, Err(Error::WrongState { .. })),
            "{result:?}"
        );
    };
    wrong(id.connect(&param(1, b"")));
    wrong(id.accept(&param(1, b"")));
    wrong(id.establish());
    wrong(id.reject(b""));
    wrong(id.disconnect());
    wrong(id.resolve_route(TIMEOUT));
    wrong(id.qp_attr(QpState::INIT).map(drop));
    assert_eq!(id.local_addr().unwrap(), None);
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    id.bind(at).unwrap();
    wrong(id.bind(at));
    id.listen(0).unwrap();
    wrong(id.listen(0));
    assert!(channel.create_id(PortSpace(1)).is_err());
    let id = channel.create_id(PortSpace::TCP).unwrap();
    id.write_event(0xfeed).unwrap();
    let event = next_event(&channel, EventKind::USER);
    assert_eq!(event.message().user_argument(), Some(0xfeed));
}

#[test]
fn datagram_services_report_their_queue_pair() {
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (listener, at) = listen(&far, PortSpace::UDP, 4);
        for accepted in [true, false] {
            let active = resolved_id(&near, PortSpace::UDP, at);
            let (attr, _) = active.qp_attr(QpState::INIT).unwrap();
            assert_eq!(attr.qkey, 0x0123_4567);
            active.connect(&param(1, &[4; 180])).unwrap();
            let (event, passive) = next_request(&far);
            assert_private_data(&event, &[4; 180], param::MAX_UD_CONNECT_DATA);
            if accepted {
                passive.accept(&param(0x77, b"me")).unwrap();
                let event = next_event(&near, EventKind::ESTABLISHED);
                assert_private_data(&event, b"me", param::MAX_UD_ACCEPT_DATA);
                let service = event.message().datagram().unwrap();
                assert_eq!((service.qp_num, service.qkey), (0x77, 0x0123_4567));
                let path = service.ah_attr;
                let far_gid = match passive.gids().unwrap().local {
                    Some(Address::Ib(it)) => it.gid,
                    other => panic!("{other:?}"),
                };
                assert!(path.is_global && path.port_num == 1);
                assert_eq!(path.grh.dgid, far_gid);
            } else {
                passive.reject(b"no").unwrap();
                let event = next_event(&near, EventKind::UNREACHABLE);
                let reason = event.message().result().unwrap_err();
                assert_eq!(reason, Reason::Sidr(SidrStatus::REJECT));
            }
        }
        drop(listener);
        let active = resolved_id(&near, PortSpace::UDP, at);
        active.connect(&param(1, b"")).unwrap();
        let event = next_event(&near, EventKind::UNREACHABLE);
        let reason = event.message().result().unwrap_err();
        assert_eq!(reason, Reason::Sidr(SidrStatus::UNSUPPORTED));
    }
}

#[test]
fn groups_are_joined_and_left() {
    let (a, ..) = device_pair(Topology::Process, Drive::Caller);
    let channel = event_channel(&a);
    let id = channel.create_id(PortSpace::UDP).unwrap();
    let group = SocketAddr::from((Ipv4Addr::new(239, 1, 2, 3), 0));
    assert!(id.join_multicast(group, JoinFlags::FULL_MEMBER).is_err());
    id.bind((IpAddr::from(Ipv4Addr::LOCALHOST), 0)).unwrap();
    let membership = id.join_multicast(group, JoinFlags::FULL_MEMBER).unwrap();
    let event = next_event(&channel, EventKind::MULTICAST_JOIN);
    assert_eq!(event.membership(), Some(membership.key()));
    let to = event.message().datagram().unwrap();
    assert_eq!((to.qp_num, to.qkey), (0xff_ffff, 0x0123_4567));
    assert_eq!(to.ah_attr.grh.dgid[..2], [0xff, 0x0e]);
    assert_eq!(to.ah_attr.grh.dgid[12..], [239, 1, 2, 3]);
    drop(event);
    let left = membership.leave().map_err(|(_, error)| error).unwrap();
    assert_eq!((left.events_reported(), left.unacknowledged()), (1, 0));
    let second = id.join_multicast(group, JoinFlags::FULL_MEMBER).unwrap();
    drop(id);
    let left = second.leave().map_err(|(_, error)| error).unwrap();
    assert_eq!(left.events_reported(), 0);
    assert_no_event(&channel);
}

#[test]
fn ids_migrate_with_their_events() {
    for drive in [Drive::Caller, Drive::Thread] {
        let (a, b, _directory) = device_pair(Topology::Directory, drive);
        let (near, far, other) = (event_channel(&a), event_channel(&b), event_channel(&b));
        let (mut listener, at) = listen(&far, PortSpace::TCP, 4);
        let ask = || {
            let active = resolved_id(&near, PortSpace::TCP, at);
            active.connect(&param(1, b"")).unwrap();
            active
        };
        // One event is unread in the socket; one was read and moves separately.
        let (first, second) = (ask(), ask());
        let (_, mut passive) = next_request(&far);
        assert_eq!(listener.migrate(&other).unwrap(), 1);
        let (event, _passive) = next_request(&other);
        assert!(event.is_of(&listener));
        passive.migrate(&other).unwrap();
        passive.accept(&param(2, b"")).unwrap();
        next_event(&near, EventKind::CONNECT_RESPONSE);
        first.establish().unwrap();
        next_event(&other, EventKind::ESTABLISHED);
        assert_no_event(&far);
        // The connections end with their ids.
        drop((event, far));
        drop((passive, listener, _passive));
        next_event(&near, EventKind::DISCONNECTED);
        next_event(&near, EventKind::REJECTED);
        drop((first, second));
    }
}

/// Returns whether the channel becomes readable within `limit`.
fn is_readable(channel: &EventChannel, limit: Duration) -> bool {
    wait(channel.as_fd(), PollTimeout::try_from(limit).unwrap()).unwrap()
}

/// Checks that the channel is not readable, and has no event.
fn assert_unreadable(channel: &EventChannel) {
    assert!(!is_readable(channel, NO_EVENT_WAIT * 3));
    assert!(channel.try_event().unwrap().is_none());
}

/// Waits for the descriptor alone, then reads the event without waiting.
fn next_when_readable(channel: &EventChannel, kind: EventKind) -> Event {
    assert!(is_readable(channel, TIMEOUT), "no {kind:?}");
    let event = channel.try_event().unwrap();
    let event = event.unwrap_or_else(|| panic!("readable without {kind:?}"));
    assert_eq!(event.kind(), kind);
    event
}

#[test]
fn a_channel_is_readable_if_and_only_if_it_has_an_event() {
    for (topology, drive) in ALL_TOPOLOGIES {
        // A message of another network is handled when the caller drives its own.
        if (topology, drive) == (Topology::Directory, Drive::Caller) {
            continue;
        }
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (_listener, at) = listen(&far, PortSpace::TCP, 4);
        assert_unreadable(&near);
        let ask = || {
            let active = id_with_address(&near, at);
            next_when_readable(&near, EventKind::ADDR_RESOLVED);
            assert_unreadable(&near);
            active.resolve_route(TIMEOUT).unwrap();
            next_when_readable(&near, EventKind::ROUTE_RESOLVED);
            active.connect(&param(1, b"")).unwrap();
            let request = next_when_readable(&far, EventKind::CONNECT_REQUEST).take_request();
            (active, request.unwrap())
        };
        let (_active, passive) = ask();
        assert_unreadable(&far);
        assert_unreadable(&near);
        drop(passive);
        next_when_readable(&near, EventKind::REJECTED);
        assert_unreadable(&near);

        // Each of the following messages causes no event: a queue pair has reported the
        // connection before its peer, and ids end after their connections.
        let (active, passive) = ask();
        passive.accept(&param(2, b"")).unwrap();
        next_when_readable(&near, EventKind::CONNECT_RESPONSE);
        passive.notify(AsyncEventType::COMM_EST).unwrap();
        next_when_readable(&far, EventKind::ESTABLISHED);
        active.establish().unwrap();
        assert_unreadable(&far);
        active.disconnect().unwrap();
        next_when_readable(&far, EventKind::DISCONNECTED);
        assert_unreadable(&near);
        drop(active);
        assert_unreadable(&far);
        passive.disconnect().unwrap();
        assert_unreadable(&far);
        drop(passive);

        // A request that its sender cancels.
        let (active, passive) = ask();
        drop(active);
        assert_unreadable(&far);
        drop(passive);
        assert_unreadable(&near);
    }
}

#[test]
fn messages_and_deadlines_without_an_event_leave_a_channel_unreadable() {
    let (a, b, _directory) = device_pair(Topology::Directory, Drive::Thread);
    let (near, far) = (event_channel(&a), event_channel(&b));
    let (_listener, at) = listen(&far, PortSpace::TCP, 4);
    inject(&b, b"?");
    let (ip, port) = (Ipv4Addr::new(127, 0, 0, 2), at.port());
    inject(&b, valid_request((ip, port).into()).bytes());
    assert_unreadable(&far);
    // The deadlines of a connection that is established before.
    for device in [&a, &b] {
        device
            .runner
            .manager()
            .set_response_timeout(NO_EVENT_WAIT * 50);
    }
    let (active, passive) = connected(&near, &far, at);
    thread::sleep(NO_EVENT_WAIT * 60);
    assert_unreadable(&near);
    assert_unreadable(&far);
    active.disconnect().unwrap();
    next_when_readable(&far, EventKind::DISCONNECTED);
    next_when_readable(&near, EventKind::DISCONNECTED);
    drop(passive);
}

/// As with rdma_cm, an id that exists some time after both programs have disconnected has one
/// more event.
#[test]
fn connections_leave_timewait() {
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (_listener, at) = listen(&far, PortSpace::TCP, 4);
        let (active, passive) = connected(&near, &far, at);
        active.disconnect().unwrap();
        next_event(&far, EventKind::DISCONNECTED);
        passive.disconnect().unwrap();
        let ended = Instant::now();
        next_event(&near, EventKind::DISCONNECTED);
        for channel in [&near, &far] {
            next_event(channel, EventKind::TIMEWAIT_EXIT);
        }
        assert!(ended.elapsed() > Duration::from_millis(500));
        // Not of an id that is destroyed.
        let (active, passive) = connected(&near, &far, at);
        active.disconnect().unwrap();
        next_event(&far, EventKind::DISCONNECTED);
        passive.disconnect().unwrap();
        next_event(&near, EventKind::DISCONNECTED);
        drop((active, passive));
        // Nor of one whose program does not disconnect.
        let (active, _passive) = connected(&near, &far, at);
        drop(active);
        next_event(&far, EventKind::DISCONNECTED);
        let wait = Duration::from_millis(600);
        assert!(far.wait(Some(wait)).unwrap().is_none());
        assert_no_event(&near);
    }
}

/// As the kernel's file, the channel wakes waiting threads once for each event.
#[test]
fn each_event_is_an_edge() {
    let (a, ..) = device_pair(Topology::Process, Drive::Thread);
    let channel = event_channel(&a);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
    let event = EpollEvent::new(flags, 0);
    epoll.add(channel.as_fd(), event).unwrap();
    let edge = || {
        let mut events = [EpollEvent::empty()];
        let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap();
        assert!(count == 0 || events[0].events() == EpollFlags::EPOLLIN);
        count == 1
    };
    let id = channel.create_id(PortSpace::TCP).unwrap();
    assert!(!edge());
    for _ in 0..3 {
        id.write_event(1).unwrap();
        assert!(edge() && !edge());
    }
    for _ in 0..3 {
        next_when_readable(&channel, EventKind::USER);
    }
    assert!(!edge());
    assert_unreadable(&channel);
    id.write_event(1).unwrap();
    assert!(edge());
    next_when_readable(&channel, EventKind::USER);
}

#[test]
fn threads_that_wait_get_one_event_each() {
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (_listener, at) = listen(&far, PortSpace::TCP, 4);
        thread::scope(|scope| {
            let wait = || next_request(&far);
            let waiting = [scope.spawn(wait), scope.spawn(wait)];
            thread::sleep(NO_EVENT_WAIT);
            let ask = || {
                let active = resolved_id(&near, PortSpace::TCP, at);
                active.connect(&param(1, b"")).unwrap();
                active
            };
            let (_first, _second) = (ask(), ask());
            for thread in waiting {
                thread.join().unwrap();
            }
        });
        assert_no_event(&far);
    }
}

#[test]
fn a_thread_ends_with_its_network() {
    for round in 0..100 {
        let (a, b, _directory) = device_pair(Topology::Process, Drive::Thread);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (_listener, at) = listen(&far, PortSpace::TCP, 4);
        // The timer may expire meanwhile.
        a.runner
            .manager()
            .set_response_timeout(Duration::from_micros(round * 10));
        let active = resolved_id(&near, PortSpace::TCP, at);
        active.connect(&param(1, b"")).unwrap();
    }
}

fn id_with_address(channel: &EventChannel, to: SocketAddr) -> Id {
    let id = channel.create_id(PortSpace::TCP).unwrap();
    id.resolve_address(None, to, TIMEOUT).unwrap();
    id
}

#[test]
fn a_silent_peer_times_out() {
    for drive in [Drive::Caller, Drive::Thread] {
        a_silent_peer_times_out_on(drive);
    }
}

fn a_silent_peer_times_out_on(drive: Drive) {
    let (a, b, _directory) = device_pair(Topology::Process, drive);
    let (near, far) = (event_channel(&a), event_channel(&b));
    let (_listener, at) = listen(&far, PortSpace::TCP, 4);
    let manager = a.runner.manager();
    let timed_out = |channel: &EventChannel, kind| {
        let begin = Instant::now();
        let event = next_event(channel, kind);
        let reason = event.message().result().unwrap_err();
        assert!(matches!(reason, Reason::Errno(errno) if errno.raw() == libc::ETIMEDOUT));
        assert!(begin.elapsed() < TIMEOUT / 2);
    };
    let active = resolved_id(&near, PortSpace::TCP, at);
    manager.set_response_timeout(Duration::from_millis(50));
    active.connect(&param(1, b"")).unwrap();
    timed_out(&near, EventKind::UNREACHABLE);
    manager.set_response_timeout(TIMEOUT);
    drop((active, next_request(&far)));
    assert_no_event(&far);
    let (active, passive) = connected(&near, &far, at);
    manager.set_response_timeout(Duration::from_millis(50));
    active.disconnect().unwrap();
    timed_out(&near, EventKind::DISCONNECTED);
    drop(passive);
}

/// A process of the directory that does not exist.
const STRANGER: Peer = Peer::Member(30);

/// Passes a datagram of another process to a device's manager.
fn inject(device: &Embedded, bytes: &[u8]) {
    let port = PortAddress {
        ethernet: true,
        ..PortAddress::default()
    };
    inject_from(device, port, bytes);
}

fn inject_from(device: &Embedded, port: PortAddress, bytes: &[u8]) {
    let shared = &device.runner.manager().shared;
    shared.receive(STRANGER, port, bytes);
}

fn mad(kind: MessageKind, message: &Message, remote_id: u32) -> Mad {
    let header = MadHeader {
        transaction: 1,
        local_id: 77,
        remote_id,
        guid: 1,
        ack_timeout: 1,
    };
    Mad::encode(kind, message, &header)
}

fn valid_request(to: SocketAddr) -> Mad {
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let mut message = Message::new(MessageKind::Request, b"").with_addresses(from, to);
    message.space = 0x106;
    mad(MessageKind::Request, &message, 0)
}

/// Returns the datagrams that a device's manager has for a process that does not exist.
fn answers(device: &Embedded) -> Vec<Mad> {
    let shared = &device.runner.manager().shared;
    let all = std::iter::from_fn(|| shared.pop());
    let to_stranger = all.filter(|it| it.to == STRANGER);
    to_stranger
        .map(|it| Mad::parse(&it.bytes).unwrap())
        .collect()
}

#[test]
fn an_unknown_peer_is_answered_and_forgotten() {
    let (b, ..) = device_pair(Topology::Process, Drive::Caller);
    let far = event_channel(&b);
    let (_listener, at) = listen(&far, PortSpace::TCP, 0);
    // A request for another address, and one of another port type.
    let elsewhere = SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), at.port()));
    inject(&b, valid_request(elsewhere).bytes());
    inject_from(&b, PortAddress::default(), valid_request(at).bytes());
    let sent = answers(&b);
    assert_eq!(sent.len(), 2);
    let reasons = [RejectReason::INVALID_SERVICE_ID, RejectReason::INVALID_GID];
    for (mad, reason) in sent.iter().zip(reasons) {
        let (kind, message) = mad.message(PortAddress::default()).unwrap();
        assert_eq!(kind, MessageKind::Reject);
        assert_eq!(i32::from(message.reason), reason.0);
    }
    assert_no_event(&far);
    // Messages that are not due change nothing.
    inject(&b, valid_request(at).bytes());
    let (_, passive) = next_request(&far);
    passive.accept(&param(1, b"")).unwrap();
    let number = answers(&b).pop().unwrap().sender_id();
    for kind in [MessageKind::Ready, MessageKind::Ready, MessageKind::Reply] {
        inject(&b, mad(kind, &Message::new(kind, b""), number).bytes());
    }
    next_event(&far, EventKind::ESTABLISHED);
    assert_no_event(&far);
    drop(passive);
    assert!(
        answers(&b)
            .iter()
            .any(|it| it.attribute == Attribute::Disconnect)
    );
}

/// With the reason for each.
#[test]
fn observers_are_told_of_dropped_datagrams() {
    let (b, ..) = device_pair(Topology::Process, Drive::Caller);
    let (_other, told) = (b.network().device("roce").unwrap(), Arc::default());
    let sink: Arc<Mutex<Vec<Cause>>> = Arc::clone(&told);
    inject(&b, &[0; MAD_SIZE]);
    b.observe(Some(Arc::new(move |cause| {
        sink.lock().unwrap().push(*cause)
    })));
    inject(&b, &[0; MAD_SIZE]);
    let ready = mad(
        MessageKind::Ready,
        &Message::new(MessageKind::Ready, b""),
        77,
    );
    inject(&b, ready.bytes());
    b.runner
        .manager()
        .agents()
        .receive(STRANGER, PortAddress::default(), &[7; 9]);
    while b.drive() {}
    let attribute = Attribute::Ready as u16;
    let expected = [
        DropCause::Format,
        DropCause::NoConnection { attribute, id: 77 },
        DropCause::Length(9),
    ];
    assert_eq!(*told.lock().unwrap(), expected.map(Cause::Management));
    let text = told.lock().unwrap()[1].to_string();
    assert_eq!(
        text,
        "management datagram dropped: RTU for id 0x4d, which has no connection with it"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a peer sends, the only effects are events, and afterwards the port works as
    /// before.
    #[test]
    fn arbitrary_bytes_are_handled(
        datagrams in proptest::collection::vec(
            (proptest::array::uniform32(any::<u8>()), any::<u8>(), any::<bool>()),
            1..20,
        ),
    ) {
        let (a, ..) = device_pair(Topology::Process, Drive::Thread);
        let channel = event_channel(&a);
        let (_listener, at) = listen(&channel, PortSpace::TCP, 16);
        let mut ids = Vec::new();
        for (noise, attribute, accepts) in &datagrams {
            let mut bytes = *valid_request(at).bytes();
            bytes[17] = 0x10 + attribute % 10;
            // The ids, and most of the other fields.
            bytes[24..32].copy_from_slice(&noise[..8]);
            bytes[40..64].copy_from_slice(&noise[8..]);
            if bytes[17] != 0x10 {
                let numbers = a.runner.manager().shared.with(|ids| ids.machine.all_numbers());
                if let Some(number) = numbers.first() {
                    bytes[28..32].copy_from_slice(&number.to_be_bytes());
                }
            }
            inject(&a, &bytes[..MAD_SIZE - usize::from(noise[0] == 0)]);
            while let Some(mut event) = channel.try_event().unwrap() {
                let _ = event.message().result();
                if let Some(id) = event.take_request() {
                    if *accepts {
                        let _ = id.accept(&param(1, b""));
                    }
                    let _ = (id.qp_attr(QpState::RTR), id.route(), id.gids());
                    ids.push(id);
                }
            }
        }
        ids.clear();
        connected(&channel, &channel, at);
    }
}

/// Events of both ids after a connection has ended, in each network and state.
#[test]
fn outcomes_are_the_same_in_all_networks() {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum At {
        Requested,
        Accepted,
        Established,
    }
    /// How the connection is ended.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        ActiveDestroys,
        PassiveDestroys,
        ActiveRejects,
        PassiveRejects,
        ActiveDisconnects,
        PassiveDisconnects,
    }
    use Act::*;
    use At::*;
    const NONE: Option<EventKind> = None;
    let (rejected, disconnected) = (Some(EventKind::REJECTED), Some(EventKind::DISCONNECTED));
    let table = [
        (Requested, ActiveDestroys, NONE, NONE),
        (Requested, PassiveDestroys, rejected, NONE),
        (Requested, PassiveRejects, rejected, NONE),
        (Accepted, ActiveDestroys, NONE, rejected),
        (Accepted, PassiveDestroys, rejected, NONE),
        (Accepted, ActiveRejects, NONE, rejected),
        (Established, ActiveDestroys, NONE, disconnected),
        (Established, PassiveDestroys, disconnected, NONE),
        (Established, ActiveDisconnects, NONE, disconnected),
        (Established, PassiveDisconnects, disconnected, NONE),
    ];
    for (topology, drive) in ALL_TOPOLOGIES {
        let (a, b, _directory) = device_pair(topology, drive);
        let (near, far) = (event_channel(&a), event_channel(&b));
        let (_listener, at) = listen(&far, PortSpace::TCP, 4);
        for (state, act, near_expected, far_expected) in table {
            let active = resolved_id(&near, PortSpace::TCP, at);
            active.connect(&param(1, b"")).unwrap();
            let (_, passive) = next_request(&far);
            if state != Requested {
                passive.accept(&param(2, b"")).unwrap();
                next_event(&near, EventKind::CONNECT_RESPONSE);
            }
            if state == Established {
                active.establish().unwrap();
                next_event(&far, EventKind::ESTABLISHED);
            }
            let (mut active, mut passive) = (Some(active), Some(passive));
            let id = |id: &Option<Id>| id.as_ref().unwrap().number();
            assert_ne!(id(&active), 0);
            match act {
                ActiveDestroys => drop(active.take()),
                PassiveDestroys => drop(passive.take()),
                ActiveRejects => active.as_ref().unwrap().reject(b"no").unwrap(),
                PassiveRejects => passive.as_ref().unwrap().reject(b"no").unwrap(),
                ActiveDisconnects => active.as_ref().unwrap().disconnect().unwrap(),
                PassiveDisconnects => passive.as_ref().unwrap().disconnect().unwrap(),
            }
            for (channel, expected) in [(&near, near_expected), (&far, far_expected)] {
                match expected {
                    Some(kind) => {
                        let event = next_event(channel, kind);
                        if kind == EventKind::REJECTED {
                            assert_rejected(&event, RejectReason::CONSUMER_DEFINED);
                        }
                    }
                    None => assert_no_event(channel),
                }
            }
            // Whoever has disconnected hears of the other one's answer.
            let (waiting, answering) = match act {
                ActiveDisconnects => (&near, &passive),
                PassiveDisconnects => (&far, &active),
                _ => continue,
            };
            answering.as_ref().unwrap().disconnect().unwrap();
            next_event(waiting, EventKind::DISCONNECTED);
        }
    }
}

/// Both ends use GIDs of RoCE v2 that suit each other, whatever addresses they are bound to.
#[test]
fn the_address_selects_the_gids_of_both_ends() {
    let network = Network::new(Drive::Thread).unwrap();
    let [a, b] = [(); 2].map(|()| network.device("roce").unwrap());
    let ipv4 = |device: &Embedded| {
        let [.., c, d] = device.gid_entry(3).unwrap().gid;
        Ipv4Addr::new(127, 80, c, d)
    };
    let loopback = Ipv4Addr::LOCALHOST;
    for (from, to, index) in [
        (loopback, loopback, 1),
        (loopback, ipv4(&b), 1),
        (ipv4(&a), loopback, 3),
        (ipv4(&a), ipv4(&b), 3),
    ] {
        let (near, far) = (event_channel(&a), event_channel(&b));
        let listener = far.create_id(PortSpace::TCP).unwrap();
        listener.bind((IpAddr::from(to), 0)).unwrap();
        listener.listen(4).unwrap();
        let at = listener.local_addr().unwrap().unwrap();
        let active = near.create_id(PortSpace::TCP).unwrap();
        active.bind((IpAddr::from(from), 0)).unwrap();
        active.resolve_address(None, at, TIMEOUT).unwrap();
        next_event(&near, EventKind::ADDR_RESOLVED);
        active.resolve_route(TIMEOUT).unwrap();
        next_event(&near, EventKind::ROUTE_RESOLVED);
        active.connect(&param(1, b"")).unwrap();
        let (_event, passive) = next_request(&far);
        passive.accept(&param(2, b"")).unwrap();
        next_event(&near, EventKind::CONNECT_RESPONSE);
        for (id, own, peer) in [(&active, &a, &b), (&passive, &b, &a)] {
            let (attr, _) = id.qp_attr(QpState::RTR).unwrap();
            let grh = attr.ah_attr.grh;
            assert_eq!(u32::from(grh.sgid_index), index);
            assert_eq!(grh.dgid, peer.gid_entry(index as usize).unwrap().gid);
            let local = match id.gids().unwrap().local {
                Some(Address::Ib(it)) => it.gid,
                other => panic!("{other:?}"),
            };
            assert_eq!(local, own.gid_entry(index as usize).unwrap().gid);
        }
    }
}
