//! Levels, librpma's operations, multi-receive buffers.

use std::time::Duration;

use ringverbs::completion::{
    CompletionLevel, ContextFormat, EntryFlags, MultiReceive, TagMatch, TaggedEndpoint, WaitObject,
};
use ringverbs::{AccessFlags, Error, FlushRange, FlushTo, Inline, WorkRequest};

use crate::{Bench, next};

fn access() -> AccessFlags {
    AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ
}

#[test]
fn completion_levels() {
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
        let token = token as u64;
        a.write_at_level(Inline(&data), region.key(), level, token)
            .unwrap();
        assert_eq!(next(&mut reader).unwrap().token, token);
        let mut there = [0];
        region.read_at(0, &mut there).unwrap();
        assert_eq!(there, data);
        assert_eq!(a.in_flight().0, 0);
    }
    let matched = a.write_at_level(Inline(b"x"), region.key(), CompletionLevel::Match, 9);
    assert!(matches!(
        matched.unwrap_err().error,
        Error::Unsupported { .. }
    ));
    if !flushes {
        let commit = a.write_at_level(Inline(b"x"), region.key(), CompletionLevel::Commit, 9);
        assert!(matches!(
            commit.unwrap_err().error,
            Error::Unsupported { .. }
        ));
    }
}

#[test]
fn operations_of_librpma() {
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
    a.flush(
        region.key(),
        FlushRange::Bytes(8),
        FlushTo::GlobalVisibility,
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
fn multi_receive_fills_one_buffer() {
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
        assert!(multi.owns(&completion));
        let message = multi.take(completion).unwrap();
        assert_eq!(message.data, [seen; 10]);
        assert_eq!(message.offset, usize::from(seen) * 128);
        let released = message.flags.contains(EntryFlags::MULTI_RECV);
        seen += 1;
        assert_eq!(released, seen == 7);
    }
    assert_eq!(multi.into_buffer().unwrap().capacity(), 1000);
}

#[test]
#[allow(
    clippy::result_large_err,
    reason = "an entry, not an error of the test's"
)]
fn tagged_messages() {
    let bench = Bench::new();
    let make = || {
        bench
            .context
            .completion_queue()
            .entries(64)
            .build()
            .unwrap()
    };
    let (left, right) = (make(), make());
    let (a, b) = bench.pair(&left, &right);
    let mut a = TaggedEndpoint::new(a, left, 8, 256).unwrap();
    let mut b = TaggedEndpoint::new(b, right, 8, 256).unwrap();
    let take = |end: &mut TaggedEndpoint| {
        let until = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(entry) = end.next_entry().unwrap() {
                return entry;
            }
            assert!(std::time::Instant::now() < until);
        }
    };
    // Expected, in the order of the receives; then unexpected, peeked, claimed.
    let masked = TagMatch {
        tag: 0x100,
        ignore: 0xff,
    };
    b.receive(bench.buffer(64), masked, 1);
    b.receive(bench.buffer(64), TagMatch::exact(0x107), 2);
    for (number, message) in [&b"first"[..], b"second", b"third", b"too long"]
        .iter()
        .enumerate()
    {
        a.send(0x107, message, 10 + number as u64).unwrap();
        assert_eq!(take(&mut a).unwrap().token, 10 + number as u64);
    }
    for (token, message) in [(1, &b"first"[..]), (2, b"second")] {
        let entry = take(&mut b).unwrap();
        assert_eq!(
            (entry.token, entry.tag, entry.len),
            (token, Some(0x107), message.len())
        );
        assert_eq!(entry.flags, EntryFlags::RECV | EntryFlags::TAGGED);
        assert_eq!(&entry.payload.into_buffer().unwrap()[..], message);
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(b.next_entry().unwrap().is_none());
    assert_eq!(b.peek(TagMatch::any()), Some((0x107, 5)));
    assert_eq!(b.peek(TagMatch::exact(1)), None);
    let claimed = b.claim(masked).unwrap();
    b.receive(bench.buffer(3), TagMatch::any(), 4);
    b.receive_claimed(claimed, bench.buffer(64), 3).unwrap();
    let error = take(&mut b).unwrap_err();
    assert_eq!((error.token, error.errno), (4, libc::EMSGSIZE));
    assert_eq!((error.len, error.overflow_len), (Some(3), Some(5)));
    let entry = take(&mut b).unwrap();
    assert!(entry.flags.contains(EntryFlags::CLAIM));
    assert_eq!(&entry.payload.into_buffer().unwrap()[..], b"third");
    // More than there are buffers for: the rest waits at the sender.
    for number in 0..40u8 {
        while a.send(7, &[number], number.into()).is_err() {
            if a.next_entry().unwrap().is_none() {
                b.next_entry().unwrap();
                if b.peek(TagMatch::any()).is_some() {
                    b.receive(bench.buffer(8), TagMatch::exact(7), 0);
                }
            }
        }
    }
}

/// Tokens are the caller's: a receive of another queue pair with the same one is
/// not taken for a piece, and the piece still is.
#[test]
fn multi_receive_identifies_pieces_by_address() {
    let bench = Bench::new();
    let mut cq = bench.context.completion_queue().build().unwrap();
    let (mut a, mut b) = bench.pair(&cq, &cq);
    let (mut c, mut d) = bench.pair(&cq, &cq);
    let mut multi = MultiReceive::post(&mut b, bench.buffer(256), 128, 100).unwrap();
    let mut same_region = bench.buffer(384);
    let rest = same_region.split_off(128);
    d.receive(same_region, 100).unwrap();
    let mut other = MultiReceive::post(&mut d, rest, 128, 7).unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(10);
    let (mut mine, mut theirs, mut alone) = (0, 0, 0);
    let mut sent = 0;
    while mine + theirs + alone < 5 {
        assert!(std::time::Instant::now() < end);
        // The receive with the same token completes first, while all pieces are
        // in flight.
        if sent == mine + theirs + alone {
            let qp = if sent < 3 { &mut c } else { &mut a };
            qp.post(WorkRequest::send(Inline(b"hello")).unsignaled())
                .unwrap();
            sent += 1;
        }
        let Some(completion) = cq.poll_one().unwrap() else {
            continue;
        };
        let completion = match multi.take(completion) {
            Ok(message) => {
                assert_eq!((message.data, message.offset), (&b"hello"[..], mine * 128));
                mine += 1;
                continue;
            }
            Err(completion) => completion,
        };
        match other.take(completion) {
            Ok(message) => {
                assert_eq!(
                    (message.data, message.offset),
                    (&b"hello"[..], theirs * 128)
                );
                theirs += 1;
            }
            Err(completion) => {
                assert_eq!(completion.token, 100);
                alone += 1;
            }
        }
    }
    assert_eq!((mine, theirs, alone), (2, 2, 1));
    assert_eq!(multi.into_buffer().unwrap().capacity(), 256);
    assert_eq!(other.into_buffer().unwrap().capacity(), 256);
}
