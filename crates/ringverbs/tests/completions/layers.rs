//! Levels, librpma's operations.

use ringverbs::completion::{CompletionLevel, ContextFormat, WaitObject};
use ringverbs::{AccessFlags, Error, FlushRange, FlushTo, Inline};

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
