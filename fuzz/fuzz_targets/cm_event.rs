//! The connection manager's events and answers with arbitrary contents.
//!
//! The input is parsed as an event, and then as a script of a kernel: the id and contents
//! of each event, and the answer to each query. For every input: no panic, private data
//! within its bounds, and events only of existing ids.

#![no_main]

use std::os::fd::AsRawFd;

use libfuzzer_sys::fuzz_target;
use rdmacm::abi::{EventResp, cmd};
use rdmacm::address;
use rdmacm::event::{Form, Message};
use rdmacm::fake::FakeCm;
use rdmacm::{EventChannel, EventKind, Id, JoinFlags, PortSpace};
use uverbs::{Errno, QpState};

/// Commands whose answers come from the input.
const FUZZED_COMMANDS: [u32; 5] = [
    cmd::CMD_QUERY,
    cmd::CMD_QUERY_ROUTE,
    cmd::CMD_INIT_QP_ATTR,
    cmd::CMD_DESTROY_ID,
    cmd::CMD_LEAVE_MCAST,
];

fn parse(bytes: &[u8]) {
    for form in [Form::Connection, Form::Datagram] {
        let Ok((event, message)) = Message::parse(bytes, form) else {
            assert!(bytes.len() < size_of::<EventResp>());
            continue;
        };
        assert!(bytes.len() >= size_of::<EventResp>());
        assert_eq!(message.kind(), EventKind(event.event));
        check_message(&message);
    }
    if let Ok(Some(address)) = address::parse(bytes) {
        let kernel = address::Sockaddr::from(&address);
        assert_eq!(address::parse(&kernel.bytes), Ok(Some(address)));
        let _ = address.to_string();
    }
}

fn check_message(message: &Message) {
    assert!(message.private_data().len() < 256);
    assert!(
        message
            .connection()
            .is_none_or(|peer| peer.qp_num < 1 << 24)
    );
    assert!(message.datagram().is_none_or(|peer| peer.qp_num < 1 << 24));
    if let Err(reason) = message.result() {
        let _ = reason.to_string();
    }
    let _ = format!("{message:?}");
}

/// Calls every query of an id.
fn query_all(id: &Id) {
    let _ = (id.addresses(), id.gids());
    if let Ok(route) = id.route() {
        assert!(route.paths().len() <= 2);
    }
    if let Ok(paths) = id.ib_paths() {
        assert!(paths.len() <= 6);
    }
    if let Err(error) = id.qp_attr(QpState::RTR) {
        let _ = error.to_string();
    }
}

fuzz_target!(|bytes: &[u8]| {
    parse(bytes);
    let fake = FakeCm::new();
    let Ok(channel) = EventChannel::open_on(Box::new(fake.clone())) else {
        return;
    };
    let (Ok(connection), Ok(datagram)) = (
        channel.create_id(PortSpace::TCP),
        channel.create_id(PortSpace::UDP),
    ) else {
        return;
    };
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let Ok(membership) = datagram.join_multicast(address, JoinFlags::FULL_MEMBER) else {
        return;
    };
    let numbers = fake.live_objects();
    let mut requests = Vec::new();
    for piece in bytes.chunks(1 + size_of::<EventResp>()) {
        let Some((&control, piece)) = piece.split_first() else {
            continue;
        };
        if control & 0x80 != 0 {
            let command = FUZZED_COMMANDS[usize::from(control) % FUZZED_COMMANDS.len()];
            let answer = match control & 0x40 {
                0 => Ok(piece.to_vec()),
                _ => Err(Errno::new(i32::from(control))),
            };
            fake.reply(command, answer);
            query_all(&connection);
            continue;
        }
        // The low bits select a valid key and number for the event.
        let mut event = piece.to_vec();
        event.resize(event.len().max(16), 0);
        let keys = [connection.key(), datagram.key(), membership.key()];
        if let Some(key) = keys.get(usize::from(control & 3)) {
            event[..8].copy_from_slice(&key.as_u64().to_ne_bytes());
        }
        match usize::from(control >> 2 & 3) {
            3 => {}
            2 => event[8..12].copy_from_slice(&fake.new_object().to_ne_bytes()),
            which => event[8..12].copy_from_slice(&numbers[which].to_ne_bytes()),
        }
        fake.push_event(channel.as_raw_fd(), &event);
        match channel.try_event() {
            Ok(Some(mut event)) => {
                check_message(event.message());
                assert!(event.is_of(&connection) || event.is_of(&datagram));
                if let Some(request) = event.take_request() {
                    requests.push(request);
                }
            }
            Ok(None) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    assert!(channel.try_event().is_ok_and(|event| event.is_none()));
    let _ = membership.leave();
    drop(requests);
});
