//! Datagrams of a hostile host, for tests and fuzzing.

use std::net::IpAddr;

use roce::packet::{LinkKind, Pool, RecvMeta, Transmit, View};

use crate::cm::hostile::Target;

/// Splits the first `length` bytes off, or all.
fn take<'a>(script: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = script.split_at(length.min(script.len()));
    *script = rest;
    taken
}

fn address(bytes: &[u8], ipv6: bool) -> IpAddr {
    let mut out = [0; 16];
    for (to, from) in out.iter_mut().zip(bytes) {
        *to = *from;
    }
    match ipv6 {
        true => IpAddr::from(out),
        false => IpAddr::from([out[0], out[1], out[2], out[3]]),
    }
}

/// Receives the datagrams of a script: each of a byte of flags, two of length,
/// addresses, and content.
///
/// # Panics
/// If a frame passes that has no right ICRC, or bounds are passed.
pub fn datagrams(script: &[u8]) {
    // No descriptors are left.
    let Some(mut target) = Target::new() else {
        return;
    };
    let pool = Pool::new();
    let mut rest = script;
    while let [flags, low, high, ..] = *rest {
        take(&mut rest, 3);
        let (ipv6, length) = (flags & 1 != 0, usize::from(u16::from_le_bytes([low, high])));
        if flags & 2 != 0 {
            target.receive(flags, take(&mut rest, 256));
            continue;
        }
        let arrival = RecvMeta {
            source: address(take(&mut rest, 16), ipv6),
            port: 4791,
            destination: address(take(&mut rest, 16), ipv6 ^ (flags & 4 != 0)),
            traffic_class: flags,
        };
        let content = take(&mut rest, length);
        let Some(headers) = arrival.headers() else {
            continue;
        };
        if let Ok(packet) = headers.frame(&pool, content) {
            let read = View::read(LinkKind::Ip, packet.frame());
            assert_ne!(read.err(), Some(roce::packet::ParseError::BadIcrc));
            assert!(Transmit::parse(&packet).is_some());
        }
    }
}

/// Receives connection manager messages of other hosts, between replies and requests
/// of the program: each of a byte of flags, and up to 256 bytes of content.
///
/// # Panics
/// If what is answered is malformed, or bounds are passed.
pub fn messages(script: &[u8]) {
    // No descriptors are left.
    let Some(mut target) = Target::new() else {
        return;
    };
    for message in script.chunks(257) {
        if let [flags, content @ ..] = message {
            target.receive(*flags, content);
        }
    }
}

/// Receives questions and answers about why requests fail, between questions of the program:
/// each of a byte of flags, and up to 256 bytes of content.
///
/// # Panics
/// If more is sent than was received, or to another than the peer, or bounds are passed.
pub fn reasons(script: &[u8]) {
    crate::runtime::reasons::hostile::receive(script);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_datagrams_are_handled(
            script in proptest::collection::vec(any::<u8>(), 0..3000),
            messages in any::<bool>(),
        ) {
            let mut script = script;
            if messages {
                // A sequence of messages to queue pair 1.
                for message in script.chunks_mut(259) {
                    message[0] |= 2;
                }
            }
            datagrams(&script);
        }
    }
}
