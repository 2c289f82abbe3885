//! Tests of the whole crate against the fake kernel.

mod c_headers;
mod commands;
mod device;
mod events;
mod lifetime;
mod multicast;
mod parsing;

use core::time::Duration;
use std::net::SocketAddr;

use zerocopy::IntoBytes;

use crate::fake::{FakeCm, event};
use crate::*;

const SECOND: Duration = Duration::from_secs(1);

/// Returns a fake kernel and a channel on it.
fn channel() -> (FakeCm, EventChannel) {
    let fake = FakeCm::new();
    let channel = EventChannel::open_on(Box::new(fake.clone())).unwrap();
    fake.take_commands();
    (fake, channel)
}

/// As above, with an id.
fn with_id(space: PortSpace) -> (FakeCm, EventChannel, Id) {
    let (fake, channel) = channel();
    let id = channel.create_id(space).unwrap();
    fake.take_commands();
    (fake, channel, id)
}

fn fd(channel: &EventChannel) -> i32 {
    use std::os::fd::AsRawFd;
    channel.as_raw_fd()
}

/// Queues an event of an id in its channel.
fn happen(fake: &FakeCm, id: &Id, kind: EventKind, status: i32, param: &[u8]) {
    let bytes = event(id.key().0, id.number(), kind, status, param);
    fake.push_event(fd(&id.channel()), &bytes);
}

/// Queues a connection request to a listening id; returns the request's number.
fn ask(fake: &FakeCm, listening: &Id) -> u32 {
    let number = fake.new_object();
    let param = abi::ConnParam {
        qp_num: 0x0100_0017,
        private_data_len: 4,
        responder_resources: 3,
        ..abi::ConnParam::default()
    };
    let kind = EventKind::CONNECT_REQUEST;
    let bytes = event(listening.key().0, number, kind, 0, param.as_bytes());
    fake.push_event(fd(&listening.channel()), &bytes);
    number
}

fn v4() -> SocketAddr {
    "192.0.2.7:4791".parse().unwrap()
}

fn v6() -> SocketAddr {
    "[2001:db8::17%3]:258".parse().unwrap()
}

fn numbers(fake: &FakeCm) -> Vec<u32> {
    fake.take_commands()
        .iter()
        .map(|asked| asked.command)
        .collect()
}
