//! Every operation, by its effect.

use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use ringverbs::{
    AccessFlags, AhAttr, Error, FlushRange, FlushTo, Gid, GlobalRoute, Inline, Operation,
    RemoteAddr, RemoteRegion, Status, Transport, WorkRequest,
};

use crate::{Pair, QKEY};

fn everything() -> AccessFlags {
    AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC
        | AccessFlags::MW_BIND
}

pub(crate) fn remote(pair: &Pair, access: AccessFlags) -> RemoteRegion {
    pair.domain.alloc_remote(4096, access).unwrap()
}

pub(crate) fn bytes(region: &RemoteRegion, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn send_and_receive() {
    for transport in [Transport::Reliable, Transport::Unreliable] {
        let mut pair = Pair::new(transport);
        let (incoming, outgoing) = (pair.buffer(100), pair.filled(b"hello"));
        pair.b.receive(incoming, 1).unwrap();
        pair.a.send(outgoing, 2).unwrap();
        let mut done = pair.wait(2);
        assert_eq!(done[0].operation, Operation::Receive);
        assert_eq!(done[0].qp_num, pair.b.qp_num());
        assert_eq!(done[0].result.unwrap().byte_len, 5);
        let received = done[0].take_buffer().unwrap();
        assert_eq!(&received[..], b"hello");
        assert_eq!(received.capacity(), 4096);
        assert_eq!(done[1].operation, Operation::Send);
        assert_eq!(&done[1].take_buffer().unwrap()[..], b"hello");
    }
}

#[test]
fn lists_are_gathered_and_scattered_in_order() {
    let mut pair = Pair::new(Transport::Reliable);
    let parts: Vec<_> = [&b"one"[..], b"", b"two", b"three"]
        .iter()
        .map(|part| {
            let mut buffer = pair.buffer(16);
            buffer.copy_from(part).unwrap();
            buffer
        })
        .collect();
    let mut first = pair.buffer(8);
    let rest = first.split_off(4);
    pair.b.receive(vec![first, rest], 1).unwrap();
    pair.a.send(parts, 2).unwrap();
    let mut done = pair.wait(2);
    let received = done[0].take_buffers();
    assert_eq!(&received[0][..], b"onet");
    assert_eq!(&received[1][..], b"wothree");
    assert_eq!(done[1].take_buffers().len(), 4);
}

#[test]
fn inline_data_is_copied_at_once() {
    let mut pair = Pair::new(Transport::Reliable);
    let incoming = pair.buffer(100);
    pair.b.receive(incoming, 1).unwrap();
    let mut bytes = *b"short-lived";
    pair.a.send(Inline(&bytes), 2).unwrap();
    bytes.fill(0);
    let mut done = pair.wait(2);
    assert_eq!(&done[0].take_buffer().unwrap()[..], b"short-lived");
    assert!(done[1].take_buffer().is_none());
    let long = vec![0; 4096];
    let refused = pair.a.send(Inline(&long), 3).unwrap_err();
    assert_eq!(refused.token, 3);
    assert!(refused.data.is_some());
}

#[test]
fn immediate_data_arrives_in_host_order() {
    let mut pair = Pair::new(Transport::Reliable);
    let (incoming, outgoing) = (pair.buffer(100), pair.filled(b"x"));
    pair.b.receive(incoming, 1).unwrap();
    let request = WorkRequest::send(outgoing).immediate(0x0102_0304).token(2);
    pair.a.post(request).unwrap();
    let done = pair.wait(2);
    assert_eq!(done[0].result.unwrap().immediate(), Some(0x0102_0304));
    assert_eq!(done[1].result.unwrap().immediate(), None);
}

#[test]
fn write_read_and_write_with_immediate() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = remote(&pair, everything());
    let outgoing = pair.filled(b"written");
    pair.a.write(outgoing, region.key().offset(10), 1).unwrap();
    pair.wait_for(1).result.unwrap();
    assert_eq!(bytes(&region, 9, 9), b"\0written\0");

    let mut buffer = pair.buffer(16);
    buffer.set_len(7).unwrap();
    pair.a.read(buffer, region.key().offset(10), 2).unwrap();
    assert_eq!(&pair.wait_for(2).take_buffer().unwrap()[..], b"written");

    let outgoing = pair.filled(b"again");
    pair.b.receive((), 3).unwrap();
    let request = WorkRequest::write(outgoing, region.key()).immediate(9);
    pair.a.post(request.token(4)).unwrap();
    let done = pair.wait(2);
    let success = done[0].result.unwrap();
    assert!(success.is_remote_write());
    assert_eq!((success.immediate(), success.byte_len), (Some(9), 5));
    assert_eq!(bytes(&region, 0, 5), b"again");
}

#[test]
fn a_remote_region_is_sent_from_and_received_into() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = remote(&pair, AccessFlags::empty());
    region.write_at(100, b"from a region").unwrap();
    pair.b.receive(region.slice(200..300).unwrap(), 1).unwrap();
    pair.a.send(region.slice(100..113).unwrap(), 2).unwrap();
    let done = pair.wait(2);
    assert_eq!(done[0].result.unwrap().byte_len, 13);
    assert_eq!(bytes(&region, 200, 13), b"from a region");
}

#[test]
fn atomics() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = remote(&pair, everything());
    region.store_u64(8, 40).unwrap();
    let at = region.key().offset(8);
    let old = |done: &mut ringverbs::Completion| {
        let buffer = done.take_buffer().unwrap();
        u64::from_ne_bytes(buffer[..8].try_into().unwrap())
    };
    let buffer = pair.filled(&[0; 8]);
    pair.a
        .post(WorkRequest::fetch_add(buffer, at, 2).token(1))
        .unwrap();
    assert_eq!(old(&mut pair.wait_for(1)), 40);
    assert_eq!(region.load_u64(8).unwrap(), 42);
    for (compare, expected) in [(41, 42), (42, 7)] {
        let buffer = pair.filled(&[0; 8]);
        pair.a
            .post(WorkRequest::compare_swap(buffer, at, compare, 7).token(2))
            .unwrap();
        assert_eq!(old(&mut pair.wait_for(2)), 42);
        assert_eq!(region.load_u64(8).unwrap(), expected);
    }
    if pair.context.can_write_atomically() {
        let value = 0x0102_0304_0506_0708u64;
        let request = WorkRequest::atomic_write(at, value.to_ne_bytes());
        pair.a.post(request.token(3)).unwrap();
        pair.wait_for(3).result.unwrap();
        assert_eq!(region.load_u64(8).unwrap(), value);
    }
    let buffer = pair.filled(&[0; 8]);
    let refused = pair
        .a
        .post(WorkRequest::fetch_add(buffer, at.offset(1), 2))
        .unwrap_err();
    assert!(refused.data.is_some(), "{refused}");
}

#[test]
fn flush() {
    let mut pair = Pair::new(Transport::Reliable);
    if !pair.context.can_flush() {
        let at = ringverbs::RemoteAddr::default();
        let request = WorkRequest::flush(at, FlushRange::Region, FlushTo::Persistence);
        let refused = pair.a.post(request).unwrap_err();
        assert_eq!(refused.error.errno(), libc::EOPNOTSUPP);
        return;
    }
    let region = remote(&pair, everything() | AccessFlags::FLUSH_GLOBAL);
    let outgoing = pair.filled(b"flushed");
    pair.a.write(outgoing, region.key(), 1).unwrap();
    let range = FlushRange::Bytes(7);
    let request = WorkRequest::flush(region.key(), range, FlushTo::GlobalVisibility);
    pair.a.post(request.token(2)).unwrap();
    for completion in pair.wait(2) {
        completion.result.unwrap();
    }
}

/// The error says what was asked for, and of what.
#[test]
fn operations_that_a_datagram_queue_pair_lacks_are_named() {
    let mut pair = Pair::new(Transport::Datagram);
    let buffer = pair.buffer(100);
    let refused = pair.a.read(buffer, RemoteAddr::default(), 1).unwrap_err();
    let text = "an unreliable datagram (UD) queue pair has no RDMA reads";
    assert_eq!(refused.to_string(), text);
    assert_eq!(refused.data.unwrap().capacity(), 4096);
    let refused = pair.a.write(Inline(b"8 bytes."), RemoteAddr::default(), 1);
    let text = "an unreliable datagram (UD) queue pair has no RDMA writes";
    assert_eq!(refused.unwrap_err().to_string(), text);
    let mut pair = Pair::new(Transport::Unreliable);
    let add = WorkRequest::fetch_add(pair.buffer(8), RemoteAddr::default(), 1);
    let text = "an unreliable connection (UC) queue pair has no fetch-and-add operations";
    assert_eq!(pair.a.post(add).unwrap_err().to_string(), text);
}

/// `?` with anyhow and with boxes, which take no borrowed errors.
#[test]
fn a_refused_post_of_inline_bytes_converts() {
    fn by_anyhow(pair: &mut Pair, text: &str) -> anyhow::Result<()> {
        Ok(pair.a.send(Inline(text.as_bytes()), 7)?)
    }
    fn boxed(pair: &mut Pair, text: &str) -> Result<(), Box<dyn std::error::Error>> {
        Ok(pair.a.send(Inline(text.as_bytes()), 7)?)
    }
    let mut pair = Pair::new(Transport::Reliable);
    let long = "x".repeat(1 << 20);
    let error = by_anyhow(&mut pair, &long).unwrap_err();
    let refused = error
        .downcast_ref::<ringverbs::PostError<Inline<'static>>>()
        .unwrap();
    assert!(matches!(refused.error, Error::Limit { .. }), "{refused}");
    assert_eq!(refused.token, 7);
    boxed(&mut pair, &long).unwrap_err();
    pair.b
        .receive(pair.domain.alloc(64).unwrap().into_buffer(), 1)
        .unwrap();
    by_anyhow(&mut pair, "short").unwrap();
    assert!(pair.wait(2).iter().all(|done| done.result.is_ok()));
}

#[test]
fn datagrams() {
    let mut pair = Pair::new(Transport::Datagram);
    let path = pair
        .domain
        .address_handle_to(&pair.local, &pair.local)
        .unwrap();
    let (incoming, outgoing) = (pair.buffer(100), pair.filled(b"datagram"));
    pair.b.receive(incoming, 1).unwrap();
    let request = WorkRequest::send(outgoing).to(&path, pair.b.qp_num(), QKEY);
    pair.a.post(request.immediate(5).token(2)).unwrap();
    // The operation keeps the path, but nobody else has to.
    drop(path);
    let mut done = pair.wait(2);
    let success = done[0].result.unwrap();
    assert_eq!(success.src_qp, pair.a.qp_num());
    assert_eq!(success.immediate(), Some(5));
    assert!(success.has_grh());
    assert_eq!(done[0].sender(), Some(pair.local.gid));
    let back = done[0].reply_address(&pair.local).unwrap();
    assert_eq!(
        (back.dlid, back.port_num),
        (pair.local.lid, pair.local.port)
    );
    assert_eq!((back.is_global, Gid(back.grh.dgid)), (true, pair.local.gid));
    assert_eq!(&done[0].take_buffer().unwrap()[40..], b"datagram");

    // Without a route header there is a way back on InfiniBand, by LIDs.
    if pair.local.lid != 0 {
        let short = AhAttr {
            is_global: false,
            grh: GlobalRoute {
                dgid: [0; 16],
                ..back.grh
            },
            sl: 3,
            ..back
        };
        let path = pair.domain.address_handle(&short).unwrap();
        let (incoming, outgoing) = (pair.buffer(100), pair.filled(b"by LID"));
        pair.b.receive(incoming, 1).unwrap();
        let request = WorkRequest::send(outgoing).to(&path, pair.b.qp_num(), QKEY);
        pair.a.post(request.token(2)).unwrap();
        let mut done = pair.wait(2);
        assert_eq!(done[0].sender(), None);
        assert_eq!(done[0].reply_address(&pair.local), Some(short));
        assert_eq!(done[1].reply_address(&pair.local), None);
        assert_eq!(&done[0].take_buffer().unwrap()[40..], b"by LID");
        let nowhere = pair.domain.address_handle_to(&pair.local, pair.local.gid);
        assert!(matches!(nowhere.unwrap_err(), Error::Invalid { .. }));
    }

    let outgoing = pair.filled(b"nowhere");
    let refused = pair.a.send(outgoing, 3).unwrap_err();
    assert_eq!(&refused.data.unwrap()[..], b"nowhere");
}

#[test]
fn multicast() {
    let mut pair = Pair::new(Transport::Datagram);
    let group = "::ffff:239.1.2.3".parse().unwrap();
    // The host's own packets come back only to a group that the host is in.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let Some(interface) = Ipv6Addr::from(pair.local.gid.0).to_ipv4_mapped() else {
        return testing::skip!("the device has no IPv4 address");
    };
    let address = Ipv4Addr::new(239, 1, 2, 3);
    socket.join_multicast_v4(&address, &interface).unwrap();
    let membership = pair.b.join(group, 0).unwrap();
    assert_eq!(membership.group(), group);
    let path = pair.domain.address_handle_to(&pair.local, group).unwrap();
    let incoming = pair.buffer(100);
    pair.b.receive(incoming, 1).unwrap();
    // Nobody promises that a datagram arrives.
    let mut received = None;
    let end = Instant::now() + Duration::from_secs(20);
    while received.is_none() {
        assert!(Instant::now() < end, "no datagram has arrived");
        let request = WorkRequest::send(Inline(b"to all")).to(&path, 0xff_ffff, QKEY);
        pair.a.post(request.token(2)).unwrap();
        let again = Instant::now() + Duration::from_millis(200);
        while received.is_none() && Instant::now() < again {
            if let Some(done) = pair.cq.poll_one().unwrap() {
                match done.token {
                    1 => received = Some(done),
                    _ => drop(done.result.unwrap()),
                }
            }
        }
    }
    let buffer = received.and_then(|mut done| done.take_buffer()).unwrap();
    assert_eq!(&buffer[40..], b"to all");
    membership.leave().unwrap();
}

#[test]
fn remote_access_errors() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = remote(&pair, AccessFlags::REMOTE_READ);
    let outgoing = pair.filled(b"no");
    pair.a.write(outgoing, region.key(), 1).unwrap();
    let mut done = pair.wait_for(1);
    assert_eq!(done.status(), Status::REM_ACCESS_ERR);
    assert_eq!(done.operation, Operation::Write);
    assert_eq!(&done.take_buffer().unwrap()[..], b"no");
    assert_eq!(bytes(&region, 0, 2), [0, 0]);
}

#[test]
fn long_message_fails_on_both_sides() {
    let mut pair = Pair::new(Transport::Reliable);
    let mut small = pair.buffer(100);
    let _rest = small.split_off(4);
    let outgoing = pair.filled(b"too long for it");
    pair.b.receive(small, 1).unwrap();
    pair.a.send(outgoing, 2).unwrap();
    let done = pair.wait(2);
    // LOC_LEN_ERR and REM_INV_REQ_ERR by the book; rdma_rxe calls both an
    // operation error.
    assert!(done[0].result.is_err(), "{:?}", done[0]);
    let answer = [Status::REM_INV_REQ_ERR, Status::REM_OP_ERR];
    assert!(answer.contains(&done[1].status()), "{:?}", done[1]);
}
