//! Reading completions: formats, cursor, errors out of band, counting.

use ringverbs::completion::{
    CompletionLevel, ContextFormat, DataEntry, DataFormat, EntryFlags, ROUTE_HEADER, ReadError,
    WaitObject, error_text, provider_error_text, source_gid,
};
use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend};
use ringverbs::{
    AccessFlags, AhAttr, CompletionQueueRef, Error, FlushRange, FlushTo, Gid, Inline, Operation,
    RemoteAddr, Status, Transport, WorkRequest,
};

use crate::World;
use device_testing::rxe::Driver;
use device_testing::rxe::kernel::{CREATE_QP, cap};
use device_testing::rxe::layout::{self, wc};
use uverbs::abi::ids::*;

const WITH_IMMEDIATE: u64 = 2;

/// A queue pair in RTS on a queue, of 7 places each way, with the driver's side
/// of its queues.
fn queue_pair(
    world: &World,
    queue: impl Into<CompletionQueueRef>,
) -> (ringverbs::QueuePair, crate::Queues) {
    let (recv, send): (Driver, Driver) = (world.machine.queue(7, 8), world.machine.queue(9, 8));
    let place = [recv.mminfo(), send.mminfo()].concat();
    world.machine.fake.on(CREATE_QP, move |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &cap(3, 4, 96));
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &17u32.to_ne_bytes());
        reply.set_driver_out(&place);
        Ok(())
    });
    let builder = world.domain.queue_pair(Transport::Reliable, queue);
    let mut qp = builder.build().unwrap();
    qp.transition(Init::reliable(1, AccessFlags::empty()))
        .unwrap();
    qp.transition(ReadyToReceive::reliable(
        AhAttr::default(),
        1,
        0,
        Mtu::Bytes1024,
    ))
    .unwrap();
    qp.transition(ReadyToSend::reliable(0)).unwrap();
    (qp, crate::Queues { send, recv })
}

fn write(token: u64) -> WorkRequest<Inline<'static>> {
    WorkRequest::write(Inline(b"x"), RemoteAddr::new(0x1000, 7)).token(token)
}

#[test]
fn a_failure_is_read_out_of_band_and_in_its_place() {
    let world = World::new();
    let queue = world.context.completion_queue().reader::<DataFormat>();
    let mut reader = queue.wait_object(WaitObject::None).build().unwrap();
    let (mut qp, queues) = queue_pair(&world, reader.queue());
    for token in 0..3 {
        qp.post(write(token)).unwrap();
    }
    let ids = queues.sent();
    world.complete(ids[0], 17);
    world.raise(&[
        (wc::WR_ID, ids[1]),
        (wc::STATUS, 10),
        (wc::VENDOR_ERR, 0x55),
        (wc::QP_NUM, 17),
    ]);
    world.raise(&[(wc::WR_ID, ids[2]), (wc::STATUS, 999), (wc::QP_NUM, 17)]);
    let mut out: [DataEntry; 4] = Default::default();
    assert_eq!(reader.read(&mut out).unwrap(), 1);
    assert_eq!(out[0].token, 0);
    assert_eq!(out[0].flags, EntryFlags::RMA | EntryFlags::WRITE);
    for _ in 0..2 {
        let read = reader.read(&mut out);
        assert!(matches!(read, Err(ReadError::ErrorAvailable)));
    }
    let entry = reader.read_err().unwrap();
    assert_eq!((entry.token, entry.qp_num), (1, 17));
    assert_eq!(entry.provider, Status::REM_ACCESS_ERR);
    assert_eq!((entry.vendor_err, entry.errno), (0x55, libc::EACCES));
    // A status that nobody knows.
    assert!(reader.read(&mut out).is_err());
    let entry = reader.read_err().unwrap();
    assert_eq!((entry.provider, entry.errno), (Status(999), libc::EIO));
    assert!(entry.to_string().contains("999"), "{entry}");
    assert_eq!(reader.read(&mut out).unwrap(), 0);
    assert!(reader.read_err().is_none());
}

/// Both ways of reading a queue say the same of it.
#[test]
fn source_address_is_the_same_in_all_readers() {
    const ROUTE: u64 = 1;
    let mut world = World::new();
    let queue = world.context.completion_queue().reader::<DataFormat>();
    let mut reader = queue.wait_object(WaitObject::None).build().unwrap();
    let mut headers = [[0; ROUTE_HEADER]; 3];
    // IPv6, by its first bytes.
    headers[0][..7].copy_from_slice(&[0x60, 0, 0, 0, 0, 0, 17]);
    headers[0][8] = 0xfd;
    // IPv4, though the bytes in front of it look like IPv6: its checksum fits.
    headers[1][0] = 0x60;
    headers[1][6] = 17;
    let ip = &mut headers[1][20..];
    ip.copy_from_slice(&[
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 2, 3, 10, 1, 2, 4,
    ]);
    let sum: u32 = ip
        .chunks(2)
        .map(|two| u32::from(two[0]) << 8 | u32::from(two[1]))
        .sum();
    ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    // Nothing that there is.
    headers[2].fill(0xff);
    let ipv4: Gid = "::ffff:10.1.2.3".parse().unwrap();
    let ipv6: Gid = "fd00::".parse().unwrap();
    for (header, sender) in headers.iter().zip([Some(ipv6), Some(ipv4), None]) {
        assert_eq!(source_gid(header), sender);
        for by_reader in [false, true] {
            let (mut qp, queues) = match by_reader {
                false => queue_pair(&world, &world.cq),
                true => queue_pair(&world, reader.queue()),
            };
            let mut buffer = world.buffer(header);
            buffer.fill_up();
            qp.receive(buffer, 1).unwrap();
            world.raise(&[
                (wc::WR_ID, queues.received()[0]),
                (wc::BYTE_LEN, 48),
                (wc::WC_FLAGS, ROUTE),
                (wc::SRC_QP, 9),
            ]);
            if !by_reader {
                let done = world.cq.poll_one().unwrap().unwrap();
                assert_eq!(done.sender(), sender);
                continue;
            }
            let mut out: [(DataEntry, ()); 1] = Default::default();
            match reader.read_from(&mut out, |_| None) {
                Ok(count) => assert_eq!((count, sender), (1, None)),
                Err(error) => {
                    assert!(matches!(error, ReadError::ErrorAvailable), "{error}");
                    let entry = reader.read_err().unwrap();
                    assert_eq!(entry.source.map(|source| source.gid), sender);
                }
            }
        }
    }
}

#[test]
fn a_received_message_has_its_length_and_immediate_data() {
    let world = World::new();
    let queue = world.context.completion_queue().reader::<DataFormat>();
    let mut reader = queue.wait_object(WaitObject::None).build().unwrap();
    let (mut qp, queues) = queue_pair(&world, reader.queue());
    qp.receive(world.buffer(b""), 4).unwrap();
    let id = queues.received()[0];
    world.raise(&[
        (wc::WR_ID, id),
        (wc::BYTE_LEN, 5),
        (wc::WC_FLAGS, WITH_IMMEDIATE),
        (wc::EX, u64::from(77u32.to_be())),
    ]);
    let entry = reader.read_one().unwrap().unwrap();
    assert_eq!((entry.token, entry.len, entry.data), (4, 5, Some(77)));
    let flags = EntryFlags::RECV | EntryFlags::MSG | EntryFlags::REMOTE_CQ_DATA;
    assert_eq!(entry.flags, flags);
    assert_eq!(entry.payload.into_buffer().unwrap().len(), 5);
}

#[test]
fn queue_pairs_are_made_while_another_thread_polls() {
    fn for_any_thread<T: Clone + Send + Sync>(_: &T) {}
    const COUNT: u64 = 40;
    let world = World::new();
    let mut queue = world.context.completion_queue().build().unwrap();
    let handle = queue.handle();
    for_any_thread(&handle);
    assert_eq!(handle.id(), queue.id());
    std::thread::scope(|scope| {
        let poller = scope.spawn(move || {
            let next = |_| queue.poll_until_one().unwrap().token;
            (0..COUNT).map(next).collect::<Vec<_>>()
        });
        for token in 0..COUNT {
            let (mut qp, queues) = queue_pair(&world, &handle);
            qp.post(write(token)).unwrap();
            world.complete(queues.sent()[0], 17);
            while qp.in_flight().0 > 0 && !poller.is_finished() {
                std::thread::yield_now();
            }
        }
        let tokens = poller.join().unwrap();
        assert_eq!(tokens, (0..COUNT).collect::<Vec<_>>());
    });
}

#[test]
fn a_handle_keeps_the_queue_but_does_not_poll_it() {
    let world = World::new();
    let queue = world.context.completion_queue().build().unwrap();
    let handle = queue.handle();
    let (queue, busy) = queue.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(queue);
    let orphan = world.domain.queue_pair(Transport::Reliable, &handle);
    assert!(matches!(orphan.build(), Err(Error::Invalid { .. })));
    drop(handle);
    let queue = world.context.completion_queue().build().unwrap();
    drop(queue.handle());
    queue.close().unwrap();
}

#[test]
fn cursor_consumes_only_returned_entries() {
    for forget in [false, true] {
        let mut world = World::new();
        let (mut qp, queues) = world.queue_pair(17);
        for token in 0..4 {
            qp.post(write(token)).unwrap();
        }
        for id in queues.sent() {
            world.complete(id, 17);
        }
        let mut cursor = world.cq.cursor();
        for token in 0..2 {
            let entry = cursor.next_entry().unwrap().unwrap();
            assert_eq!((entry.token(), entry.qp_num()), (token, 17));
            assert!(entry.result().is_ok());
        }
        if forget {
            std::mem::forget(cursor);
        } else {
            drop(cursor);
        }
        let mut cursor = world.cq.cursor();
        assert_eq!(cursor.next_entry().unwrap().unwrap().token(), 2);
        assert_eq!(cursor.next_entry().unwrap().unwrap().token(), 3);
        assert!(cursor.next_entry().unwrap().is_none());
        drop(cursor);
        assert!(world.cq.poll_one().unwrap().is_none());
        assert_eq!(world.completions.consumer(), world.completions.producer());
    }
}

#[test]
fn cursor_reports_corruption_and_continues() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.post(write(3)).unwrap();
    world.complete(0xdead_beef, 17);
    world.complete(queues.sent()[0], 17);
    let mut cursor = world.cq.cursor();
    assert!(cursor.next_entry().is_err());
    assert_eq!(cursor.next_entry().unwrap().unwrap().token(), 3);
    assert!(cursor.next_entry().unwrap().is_none());
}

#[test]
fn retired_operations_include_the_unsignaled() {
    let world = World::new();
    let queue = world.context.completion_queue().reader::<ContextFormat>();
    let mut reader = queue.wait_object(WaitObject::None).build().unwrap();
    let (mut qp, queues) = queue_pair(&world, reader.queue());
    qp.post(write(0).unsignaled()).unwrap();
    qp.post(write(1)).unwrap();
    qp.post(write(2)).unwrap();
    let ids = queues.sent();
    world.complete(ids[1], 17);
    world.raise(&[(wc::WR_ID, ids[2]), (wc::STATUS, 5)]);
    let mut tokens = Vec::new();
    let mut retire = || reader.retire(&mut |token, _| tokens.push(token));
    assert_eq!(retire().unwrap(), 2);
    assert!(matches!(retire(), Err(ReadError::ErrorAvailable)));
    assert_eq!(tokens, [0, 1]);
    assert_eq!(reader.read_err().unwrap().token, 2);
}

#[test]
fn a_device_without_flush_reads_a_byte_into_memory_of_the_library() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let there = RemoteAddr::new(0x1000, 7);
    assert_eq!(world.live(OBJECT_MR), 0);
    let bytes = FlushRange::Bytes(8);
    let persist = qp.flush(there, bytes, FlushTo::Persistence, 1);
    let refused = persist.unwrap_err();
    assert!(matches!(refused.error, Error::Unsupported { .. }));
    assert_eq!((refused.data, world.live(OBJECT_MR)), (Some(()), 0));

    qp.flush(there, bytes, FlushTo::GlobalVisibility, 2)
        .unwrap();
    let level = CompletionLevel::Delivery;
    for token in 3..6 {
        let buffer = world.buffer(b"written");
        qp.write_at_level(buffer, there, level, token).unwrap();
    }
    // The byte, once, and what is written.
    assert_eq!(world.live(OBJECT_MR), 4);
    // There is no room for a write and its read.
    let refused = qp.write_at_level(world.buffer(b"x"), there, level, 6);
    let refused = refused.unwrap_err();
    assert!(matches!(refused.error, Error::QueueFull { .. }));
    assert_eq!(&refused.data.unwrap()[..], b"x");
    let entries = queues.send.consume();
    let opcode = |entry: &Vec<u8>| layout::read(entry, layout::send::OPCODE);
    let opcodes: Vec<u64> = entries.iter().map(opcode).collect();
    let (write, read) = (0, 4);
    assert_eq!(opcodes, [read, write, read, write, read, write, read]);
    for at in [0, 2, 4, 6] {
        world.complete(layout::read(&entries[at], layout::send::WR_ID), 17);
    }
    for token in 2..6 {
        let mut done = world.cq.poll_one().unwrap().unwrap();
        assert_eq!((done.token, done.operation), (token, Operation::Read));
        assert!(done.take_buffer().is_none());
    }
    drop(qp);
    assert!(world.cq.poll_one().unwrap().is_none());
    assert_eq!(world.live(OBJECT_MR), 0);
}

#[test]
fn every_number_has_a_text() {
    assert!(error_text(libc::EACCES).contains("denied"));
    assert!(!error_text(-5).is_empty());
    assert!(!error_text(i32::MAX).is_empty());
    assert!(provider_error_text(Status(12345), 7).contains("12345"));
    for number in 0..64 {
        let status = Status(number);
        assert_eq!(status.errno() == 0, status.is_success());
    }
}

#[test]
fn timestamps_are_refused_when_the_queue_is_made() {
    let world = World::new();
    let queue = world.context.completion_queue().timestamps().build();
    assert!(matches!(queue, Err(ringverbs::Error::Unsupported { .. })));
}
