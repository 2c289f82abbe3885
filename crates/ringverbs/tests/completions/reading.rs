//! Sizes, formats, errors, flags, overrun, closing, resizing.

use std::time::{Duration, Instant};

use ringverbs::completion::{
    ContextEntry, ContextFormat, DataEntry, DataFormat, EntryFlags, MessageFormat, RawAddress,
    ReadError, SharedCompletionReader, TaggedFormat, WaitObject,
};
use ringverbs::query::DriverId;
use ringverbs::{
    AccessFlags, Error, EventSource, Inline, Operation, RemoteAddr, Status, WorkRequest,
};

use crate::{Bench, QKEY, next, nothing};

#[test]
fn queue_size() {
    let bench = Bench::new();
    let limit = bench.context.query_device().unwrap().max_cqe;
    let make = |entries| bench.context.completion_queue().entries(entries).build();
    assert!(make(0).unwrap().capacity() > 0);
    assert!(make(100).unwrap().capacity() >= 100);
    match make(limit + 1) {
        Err(Error::Limit { asked, allowed, .. }) => {
            assert_eq!((asked, allowed), (u64::from(limit) + 1, limit.into()));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn completion_vector() {
    let bench = Bench::new();
    let vectors = bench.context.num_comp_vectors();
    let make = |comp_vector| {
        bench
            .context
            .completion_queue()
            .comp_vector(comp_vector)
            .build()
    };
    for vector in [0, vectors - 1] {
        assert_eq!(make(vector).unwrap().comp_vector(), vector);
    }
    let default = bench.context.completion_queue().build().unwrap();
    assert_eq!(default.comp_vector(), 0);
    assert!(matches!(make(vectors), Err(Error::Limit { .. })));
}

#[test]
fn formats_and_flags() {
    let bench = Bench::new();
    let mut reader = bench.reader::<DataFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    let region = bench
        .domain
        .alloc_remote(
            4096,
            AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC,
        )
        .unwrap();

    b.receive(bench.buffer(64), 1).unwrap();
    a.send_with_imm(Inline(b"hello"), 77, 2).unwrap();
    for _ in 0..2 {
        let entry = next(&mut reader).unwrap();
        if entry.token == 1 {
            assert_eq!((entry.len, entry.data), (5, Some(77)));
            let flags = EntryFlags::RECV | EntryFlags::MSG | EntryFlags::REMOTE_CQ_DATA;
            assert_eq!(entry.flags, flags);
            assert_eq!(&entry.payload.into_buffer().unwrap()[..], b"hello");
        } else {
            assert_eq!(entry.flags, EntryFlags::SEND | EntryFlags::MSG);
            assert_eq!(entry.data, None);
        }
    }

    b.receive(bench.buffer(64), 3).unwrap();
    a.write_with_imm(Inline(b"there"), region.key(), 78, 4)
        .unwrap();
    for _ in 0..2 {
        let entry = next(&mut reader).unwrap();
        if entry.token == 3 {
            assert_eq!(entry.data, Some(78));
            let flags = EntryFlags::RMA | EntryFlags::REMOTE_WRITE | EntryFlags::REMOTE_CQ_DATA;
            assert_eq!(entry.flags, flags);
            assert_eq!(entry.payload.into_buffer().unwrap().len(), 0);
        } else {
            assert_eq!(entry.flags, EntryFlags::RMA | EntryFlags::WRITE);
        }
    }

    a.read(bench.buffer(8), region.key(), 5).unwrap();
    let entry = next(&mut reader).unwrap();
    assert_eq!(entry.flags, EntryFlags::RMA | EntryFlags::READ);
    a.post(WorkRequest::fetch_add(bench.buffer(8), region.key(), 1))
        .unwrap();
    let entry = next(&mut reader).unwrap();
    let flags = EntryFlags::ATOMIC | EntryFlags::READ | EntryFlags::WRITE;
    assert_eq!(entry.flags, flags);

    // The other formats, over queues of their own.
    let mut small = bench.reader::<ContextFormat>(WaitObject::None);
    let mut tagged = bench.reader::<TaggedFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(small.queue(), tagged.queue());
    b.receive(bench.buffer(64), 1).unwrap();
    a.send(bench.filled(b"x"), 2).unwrap();
    let entry = next(&mut small).unwrap();
    assert_eq!(entry.token, 2);
    assert_eq!(&entry.payload.into_buffer().unwrap()[..], b"x");
    let entry = next(&mut tagged).unwrap();
    assert_eq!((entry.token, entry.len, entry.tag), (1, 1, None));
}

#[test]
fn batches_in_order() {
    let bench = Bench::new();
    let mut reader = bench.reader::<DataFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    assert_eq!(reader.read(&mut []).unwrap(), 0);
    for round in 0..10 {
        for token in 0..16 {
            b.receive(bench.buffer(8), token).unwrap();
            a.post(WorkRequest::send(Inline(b"x")).unsignaled())
                .unwrap();
        }
        assert_eq!(reader.read(&mut []).unwrap(), 0);
        let mut tokens = Vec::new();
        let mut out: [DataEntry; 5] = Default::default();
        while tokens.len() < 16 {
            let count = reader.read(&mut out).unwrap();
            tokens.extend(out[..count].iter().map(|entry| entry.token));
        }
        assert_eq!(tokens, (0..16).collect::<Vec<_>>(), "round {round}");
    }
    nothing(&mut reader);
}

#[test]
fn cursor_reads_entries_in_place() {
    let bench = Bench::new();
    let mut reader = bench.reader::<DataFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    for token in 0..6u8 {
        b.receive(bench.buffer(8), token.into()).unwrap();
        let data = [token];
        let send = WorkRequest::send(Inline(&data)).immediate(token.into());
        a.post(send.unsignaled()).unwrap();
    }
    let queue = reader.queue_mut();
    let mut seen = 0;
    while seen < 6 {
        let mut cursor = queue.cursor();
        // At most two of a batch, then it is dropped or forgotten.
        for _ in 0..2 {
            let Some(mut entry) = cursor.next_entry().unwrap() else {
                break;
            };
            assert_eq!(entry.token(), seen);
            assert_eq!(entry.result().unwrap().immediate(), Some(seen as u32));
            assert_eq!(entry.result().unwrap().byte_len(), 1);
            let buffer = entry.take_payload().into_buffer().unwrap();
            assert_eq!(buffer[..], [seen as u8]);
            seen += 1;
        }
        if seen % 4 == 0 {
            std::mem::forget(cursor);
        }
    }
    nothing(&mut reader);
}

#[test]
fn errors_out_of_band_in_band_and_as_text() {
    let bench = Bench::new();
    let mut reader = bench.reader::<MessageFormat>(WaitObject::None);
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    a.write(Inline(b"x"), RemoteAddr::new(0, 0xdead), 5)
        .unwrap();
    a.write(bench.filled(b"y"), RemoteAddr::new(0, 0xdead), 6)
        .unwrap();
    let error = next(&mut reader).unwrap_err();
    assert!(matches!(error, ReadError::ErrorAvailable), "{error}");
    // It stays until it has been read.
    assert!(matches!(reader.read_one(), Err(ReadError::ErrorAvailable)));
    let entry = reader.read_err().unwrap();
    assert_eq!(entry.token, 5);
    assert_eq!(entry.provider, Status::REM_ACCESS_ERR);
    assert_eq!((entry.errno, entry.len), (libc::EACCES, None));
    assert_eq!(entry.qp_num, a.qp_num());
    assert!(entry.to_string().contains("does not allow"), "{entry}");
    assert!(reader.read_err().is_none());
    // The same in band.
    let end = std::time::Instant::now() + Duration::from_secs(10);
    let mut completion = loop {
        if let Some(completion) = reader.queue_mut().poll_one().unwrap() {
            break completion;
        }
        assert!(std::time::Instant::now() < end);
    };
    assert_eq!(completion.token, 6);
    assert_eq!(completion.status(), Status::WR_FLUSH_ERR);
    assert!(completion.take_buffer().is_some());
}

#[test]
fn source_addresses() {
    let bench = Bench::new();
    let mut reader = bench.reader::<DataFormat>(WaitObject::None);
    let mut sender = bench.datagram(reader.queue());
    let mut receiver = bench.datagram(reader.queue());
    let path = bench
        .domain
        .address_handle_to(&bench.local, &bench.local)
        .unwrap();
    let mut known = None;
    let mut out: [(DataEntry, Option<RawAddress>); 4] = Default::default();
    for round in 0..2 {
        receiver.receive(bench.buffer(128), 1).unwrap();
        let send = WorkRequest::send(Inline(b"who")).to(&path, receiver.qp_num(), QKEY);
        sender.post(send.unsignaled()).unwrap();
        let end = std::time::Instant::now() + Duration::from_secs(10);
        let result = loop {
            let find = |address: &RawAddress| (known == Some(*address)).then_some(known);
            match reader.read_from(&mut out, find) {
                Ok(0) => assert!(std::time::Instant::now() < end),
                other => break other,
            }
        };
        if round == 0 {
            assert!(matches!(result, Err(ReadError::ErrorAvailable)));
            let entry = reader.read_err().unwrap();
            assert_eq!(entry.errno, libc::EADDRNOTAVAIL);
            assert_eq!(entry.len, Some(3));
            let address = entry.source.unwrap();
            let expected = RawAddress {
                gid: bench.local.gid,
                qp_num: sender.qp_num(),
            };
            assert_eq!(address, expected);
            assert_eq!(&entry.payload.into_buffer().unwrap()[40..], b"who");
            known = Some(address);
        } else {
            assert_eq!(result.unwrap(), 1);
            assert_eq!(out[0].1, known);
        }
    }
}

#[test]
fn overrun_is_sticky() {
    let bench = Bench::new();
    let builder = bench.context.completion_queue().entries(4);
    let mut reader = builder.reader::<ContextFormat>().build().unwrap();
    let other = bench
        .context
        .completion_queue()
        .entries(256)
        .build()
        .unwrap();
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let capacity = reader.queue().capacity() as usize;
    let (mut a, _b) = bench.pair(reader.queue(), &other);
    for token in 0..capacity as u64 + 8 {
        a.write(Inline(b"x"), region.key(), token).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    let mut out = Vec::new();
    out.resize_with(64, Default::default);
    // A ConnectX holds one more than it says.
    let read = reader.read(&mut out).unwrap();
    assert!([capacity, capacity + 1].contains(&read), "{read}");
    for _ in 0..3 {
        assert!(matches!(reader.read(&mut out), Err(ReadError::Overrun)));
    }
    let again = reader.read_timeout(&mut out, Some(Duration::from_secs(1)));
    assert!(matches!(again, Err(ReadError::Overrun)));
    let event = reader.async_event().expect("the asynchronous event");
    assert_eq!(
        event.source,
        EventSource::CompletionQueue(reader.queue().id())
    );
}

#[test]
fn close_busy_and_with_entries() {
    let bench = Bench::new();
    let reader = bench.reader::<DataFormat>(WaitObject::Fd);
    let other = bench.context.completion_queue().build().unwrap();
    let (mut a, mut b) = bench.pair(reader.queue(), &other);
    b.receive(bench.buffer(64), 1).unwrap();
    a.send(bench.filled(b"left"), 2).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let (reader, error) = reader.close().unwrap_err().into_parts();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    drop((a, b));
    reader.close().unwrap();
    other.close().unwrap();
    // Memory of the entry that was left is free again, or this would be busy.
    bench.domain.close().unwrap();
}

#[test]
fn selective_completion() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    for token in 0..3 {
        let write = WorkRequest::write(Inline(b"x"), region.key());
        a.post(write.unsignaled().token(token)).unwrap();
    }
    nothing(&mut reader);
    let bad = WorkRequest::write(Inline(b"x"), RemoteAddr::new(0, 1)).unsignaled();
    a.post(bad.token(9)).unwrap();
    assert!(next(&mut reader).is_err());
    assert_eq!(reader.read_err().unwrap().token, 9);
}

#[test]
fn separate_receive_queue() {
    let bench = Bench::new();
    let mut sends = bench.reader::<DataFormat>(WaitObject::None);
    let mut receives = bench.reader::<DataFormat>(WaitObject::None);
    let make = || {
        let builder = bench
            .domain
            .queue_pair(ringverbs::Transport::Reliable, sends.queue());
        builder
            .recv_cq(receives.queue())
            .inline(16)
            .build()
            .unwrap()
    };
    let (mut a, mut b) = (make(), make());
    let (at_a, at_b) = (a.endpoint(&bench.local), b.endpoint(&bench.local));
    a.connect(&bench.local, &at_b).unwrap();
    b.connect(&bench.local, &at_a).unwrap();
    b.receive(bench.buffer(64), 1).unwrap();
    a.send(Inline(b"x"), 2).unwrap();
    assert_eq!(next(&mut receives).unwrap().token, 1);
    assert_eq!(next(&mut sends).unwrap().token, 2);
    nothing(&mut sends);
    nothing(&mut receives);
}

#[test]
fn resize_keeps_pending_completions() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let mut expected = 0;
    for size in [20, 100, 30] {
        for token in 0..15 {
            a.write(Inline(b"x"), region.key(), token).unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(reader.queue_mut().resize(size).unwrap() >= size);
        for token in 0..15 {
            assert_eq!(next(&mut reader).unwrap().token, token);
            expected += 1;
        }
    }
    assert_eq!(expected, 45);
    // rxe has no moderation, and says so.
    let rxe = bench.context.device().unwrap().found().driver_id == DriverId::RXE;
    assert_eq!(reader.queue().moderate(10, 10).is_err(), rxe);
}

#[test]
fn draining_a_queue_pair() {
    let bench = Bench::new();
    let mut reader = bench.reader::<DataFormat>(WaitObject::None);
    let (a, mut b) = bench.pair(reader.queue(), reader.queue());
    for token in 0..10 {
        b.receive(bench.buffer(64), token).unwrap();
    }
    let drained = b.drain(reader.queue_mut(), None, Duration::from_secs(2), |_| ());
    let mut drained = drained.unwrap();
    let mut tokens: Vec<u64> = Vec::new();
    for completion in &mut drained.completions {
        assert_eq!(completion.status(), Status::WR_FLUSH_ERR);
        assert_eq!(completion.operation, Operation::Receive);
        assert!(completion.take_buffer().is_some());
        tokens.push(completion.token);
    }
    for released in drained.released {
        assert!(released.payload.into_buffer().is_some());
        tokens.push(released.token);
    }
    assert_eq!(tokens, (0..10).collect::<Vec<_>>());
    drop(a);
}

/// The channel of a reader is that of its own queue: with another in its place a
/// wait would sleep on events that go elsewhere.
#[test]
fn reader_of_a_replaced_queue_refuses_to_wait() {
    let bench = Bench::new();
    let mut one = bench.reader::<ContextFormat>(WaitObject::Fd);
    let mut other = bench.reader::<ContextFormat>(WaitObject::Fd);
    std::mem::swap(one.queue_mut(), other.queue_mut());
    for reader in [&mut one, &mut other] {
        let mut entries = [ContextEntry::default()];
        let time = Some(Duration::from_secs(10));
        let waited = reader.read_timeout(&mut entries, time);
        assert!(
            matches!(waited, Err(ReadError::Queue(Error::Invalid { .. }))),
            "{waited:?}"
        );
    }
    std::mem::swap(one.queue_mut(), other.queue_mut());
    assert!(one.try_wait().unwrap() && other.try_wait().unwrap());
}

/// A shared reader lends its reader under its lock, and that may be replaced.
#[test]
fn replaced_shared_reader_refuses_to_wait() {
    let bench = Bench::new();
    let mut other = bench.reader::<ContextFormat>(WaitObject::Fd);
    let shared = SharedCompletionReader::new(bench.reader::<ContextFormat>(WaitObject::Fd));
    shared.with(|reader| std::mem::swap(reader, &mut other));
    let mut entries = [ContextEntry::default()];
    let waited = shared.read_timeout(&mut entries, Some(Duration::from_secs(10)));
    assert!(
        matches!(waited, Err(ReadError::Queue(Error::Invalid { .. }))),
        "{waited:?}"
    );
    shared.with(|reader| std::mem::swap(reader, &mut other));
    let waited = shared.read_timeout(&mut entries, Some(Duration::ZERO));
    assert!(matches!(waited, Err(ReadError::Again)), "{waited:?}");
}

/// A wait that fails loses no entry that was read before it.
#[test]
fn entries_read_before_an_error_are_returned() {
    let bench = Bench::new();
    let reader = || {
        let queue = bench.context.completion_queue().entries(64);
        let builder = queue.reader::<ContextFormat>().threshold(2);
        builder.wait_object(WaitObject::Fd).build().unwrap()
    };
    let (mut one, mut other) = (reader(), reader());
    // Waiting fails, and reading does not.
    std::mem::swap(one.queue_mut(), other.queue_mut());
    let mut entries: [ContextEntry; 2] = Default::default();
    let time = Some(Duration::from_secs(10));
    let (mut a, mut b) = bench.pair(one.queue(), other.queue());
    b.receive(bench.buffer(8), 5).unwrap();
    a.send(bench.filled(b"x"), 7).unwrap();
    drop(next(&mut other).unwrap());
    // The send completes after the receive, and must not be waited for.
    let device = bench.context.device().unwrap();
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        device.drive();
    }
    assert_eq!(one.read_timeout(&mut entries, time).unwrap(), 1);
    assert_eq!(entries[0].token, 7);
    let read = one.read_timeout(&mut entries, time);
    assert!(
        matches!(read, Err(ReadError::Queue(Error::Invalid { .. }))),
        "{read:?}"
    );
}
