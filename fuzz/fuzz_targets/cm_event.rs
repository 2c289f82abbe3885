//! The connection manager's events and answers, of any content.
//!
//! The input is parsed as an event, and then played by a kernel: it says of
//! each event which id it names and what is in it, and what each query is
//! answered. Whatever it says: no panic, private data within its room, and an
//! event is of an id that was made.

#![no_main]

use std::os::fd::AsRawFd;

use libfuzzer_sys::fuzz_target;
use rdmacm::abi::{EventResp, cmd};
use rdmacm::address;
use rdmacm::event::{Form, Message};
use rdmacm::fake::FakeCm;
use rdmacm::{EventChannel, EventKind, Id, JoinFlags, PortSpace};
use uverbs::{Errno, QpState};

/// Commands whose answers are the input's.
const ANSWERS: [u32; 5] = [
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
        look(&message);
    }
    if let Ok(Some(address)) = address::parse(bytes) {
        let kernel = address::Sockaddr::from(&address);
        assert_eq!(address::parse(&kernel.bytes), Ok(Some(address)));
        let _ = address.to_string();
    }
}

fn look(message: &Message) {
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

/// Asks for everything that a kernel answers.
fn ask(id: &Id) {
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
        let Some((&how, piece)) = piece.split_first() else {
            continue;
        };
        if how & 0x80 != 0 {
            let command = ANSWERS[usize::from(how) % ANSWERS.len()];
            let answer = match how & 0x40 {
                0 => Ok(piece.to_vec()),
                _ => Err(Errno::new(i32::from(how))),
            };
            fake.reply(command, answer);
            ask(&connection);
            continue;
        }
        // The low bits say which key and number the event really has.
        let mut event = piece.to_vec();
        event.resize(event.len().max(16), 0);
        let keys = [connection.key(), datagram.key(), membership.key()];
        if let Some(key) = keys.get(usize::from(how & 3)) {
            event[..8].copy_from_slice(&key.as_u64().to_ne_bytes());
        }
        match usize::from(how >> 2 & 3) {
            3 => {}
            2 => event[8..12].copy_from_slice(&fake.new_object().to_ne_bytes()),
            which => event[8..12].copy_from_slice(&numbers[which].to_ne_bytes()),
        }
        fake.push_event(channel.as_raw_fd(), &event);
        match channel.try_event() {
            Ok(Some(mut event)) => {
                look(event.message());
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
