//! Levels, librpma's operations, multi-receive buffers.

use std::time::Duration;

use ringverbs::completion::{CompletionLevel, ContextFormat, EntryFlags, MultiReceive, WaitObject};
use ringverbs::{AccessFlags, Error, FlushRange, FlushTo, Inline, WorkRequest};

use crate::{Bench, next};

fn access() -> AccessFlags {
    AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ
}

#[test]
#[ignore = "needs rdma_rxe"]
fn row_18_levels() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    let flushes = bench.context.can_flush();
    let rights = if flushes {
        access() | AccessFlags::FLUSH_GLOBAL
    } else {
        access()
    };
    let region = bench.domain.alloc_remote(4096, rights).unwrap();
    let levels = [
        CompletionLevel::Inject,
        CompletionLevel::Transmit,
        CompletionLevel::Delivery,
    ];
    for (token, level) in levels.into_iter().enumerate() {
        let data = [token as u8 + 1];
        let scratch = bench.buffer(8);
        let left = a
            .write_at_level(
                Inline(&data),
                region.key(),
                level,
                Some(scratch),
                token as u64,
            )
            .unwrap();
        let read_behind = level == CompletionLevel::Delivery && !flushes;
        assert_eq!(left.is_none(), read_behind);
        let entry = next(&mut reader).unwrap();
        assert_eq!(entry.token, token as u64);
        assert_eq!(entry.payload.into_buffer().is_some(), read_behind);
        let mut there = [0];
        region.read_at(0, &mut there).unwrap();
        assert_eq!(there, data);
        assert_eq!(a.in_flight().0, 0);
    }
    let matched = a.write_at_level(Inline(b"x"), region.key(), CompletionLevel::Match, None, 9);
    assert!(matches!(
        matched.unwrap_err().error,
        Error::Unsupported { .. }
    ));
    if !flushes {
        let commit = a.write_at_level(Inline(b"x"), region.key(), CompletionLevel::Commit, None, 9);
        assert!(matches!(
            commit.unwrap_err().error,
            Error::Unsupported { .. }
        ));
    }
}

#[test]
#[ignore = "needs rdma_rxe"]
fn row_24_operations_by_rpmas_names() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    let flushes = bench.context.can_flush();
    let rights = if flushes {
        access() | AccessFlags::FLUSH_GLOBAL
    } else {
        access()
    };
    let region = bench.domain.alloc_remote(4096, rights).unwrap();
    a.write(Inline(b"12345678"), region.key(), 1).unwrap();
    next(&mut reader).unwrap();
    let scratch = Some(bench.buffer(8));
    a.flush(
        region.key(),
        FlushRange::Bytes(8),
        FlushTo::GlobalVisibility,
        scratch,
        2,
    )
    .unwrap();
    assert_eq!(next(&mut reader).unwrap().token, 2);
    a.read(bench.buffer(8), region.key(), 3).unwrap();
    let read = next(&mut reader).unwrap();
    assert_eq!(&read.payload.into_buffer().unwrap()[..], b"12345678");
    a.atomic_write(region.key(), *b"abcdefgh", 4).unwrap();
    assert_eq!(next(&mut reader).unwrap().token, 4);
    assert_eq!(
        region.load_u64(0).unwrap(),
        u64::from_ne_bytes(*b"abcdefgh")
    );
    let off = a.atomic_write(region.key().offset(4), [0; 8], 5);
    assert!(matches!(off.unwrap_err().error, Error::Invalid { .. }));
    b.receive(bench.buffer(8), 6).unwrap();
    a.send_with_imm(Inline(b"x"), 1, 7).unwrap();
    let mut tokens = [
        next(&mut reader).unwrap().token,
        next(&mut reader).unwrap().token,
    ];
    tokens.sort_unstable();
    assert_eq!(tokens, [6, 7]);
}

#[test]
#[ignore = "needs rdma_rxe"]
fn row_20_one_buffer_for_many_messages() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    let buffer = bench.buffer(1000);
    let mut multi = MultiReceive::post(&mut b, buffer, 128, 100).unwrap();
    assert_eq!(multi.posted(), 7);
    for number in 0..7u8 {
        a.post(WorkRequest::send(Inline(&[number; 10])).unsignaled())
            .unwrap();
    }
    let end = std::time::Instant::now() + Duration::from_secs(10);
    let mut seen = 0;
    while seen < 7 {
        assert!(std::time::Instant::now() < end);
        let Some(completion) = reader.queue_mut().poll_one().unwrap() else {
            continue;
        };
        assert!(multi.owns(completion.token));
        let message = multi.take(completion).unwrap();
        assert_eq!(message.data, [seen; 10]);
        assert_eq!(message.offset, usize::from(seen) * 128);
        let released = message.flags.contains(EntryFlags::MULTI_RECV);
        seen += 1;
        assert_eq!(released, seen == 7);
    }
    assert_eq!(multi.into_buffer().unwrap().capacity(), 1000);
}
