//! Waiting, signals, sharing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringverbs::completion::{
    ContextEntry, ContextFormat, DataFormat, ReadError, SharedCompletionReader, WaitObject, WaitSet,
};
use ringverbs::{AccessFlags, Inline, WorkRequest};

use crate::{Bench, woken};

/// For waits that are run by [`woken`].
const LONG: Option<Duration> = Some(crate::LONG);

#[test]
fn wait_objects_and_timeouts() {
    let objects = [
        WaitObject::Unspecified,
        WaitObject::Fd,
        WaitObject::Condvar,
        WaitObject::Yield,
        WaitObject::Set(WaitSet::new().unwrap()),
    ];
    for object in objects {
        let bench = Bench::new();
        let mut reader = bench.reader::<ContextFormat>(object.clone());
        let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
        let mut out: [ContextEntry; 4] = Default::default();
        let begin = Instant::now();
        let again = reader.read_timeout(&mut out, Some(Duration::from_millis(50)));
        assert!(matches!(again, Err(ReadError::Again)), "{object:?}");
        assert!(begin.elapsed() >= Duration::from_millis(50));
        b.receive(bench.buffer(8), 1).unwrap();
        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            a.post(WorkRequest::send(Inline(b"x")).unsignaled())
                .unwrap();
            a
        });
        assert_eq!(
            woken(|| reader.read_timeout(&mut out, LONG)).unwrap(),
            1,
            "{object:?}"
        );
        assert_eq!(out[0].token, 1);
        drop(sender.join().unwrap());
    }
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::None);
    let mut out: [ContextEntry; 1] = Default::default();
    let refused = reader.read_timeout(&mut out, LONG);
    assert!(matches!(refused, Err(ReadError::Queue(_))));
}

#[test]
fn wait_set_of_several_queues() {
    let bench = Bench::new();
    let set = WaitSet::new().unwrap();
    let mut one = bench.reader::<ContextFormat>(WaitObject::Set(set.clone()));
    let mut two = bench.reader::<DataFormat>(WaitObject::Set(set.clone()));
    let (mut a, mut b) = bench.pair(one.queue(), two.queue());
    let short = Some(Duration::from_millis(20));
    assert!(!set.wait(&mut [&mut one, &mut two], short).unwrap());
    b.receive(bench.buffer(8), 1).unwrap();
    a.post(WorkRequest::send(Inline(b"x")).unsignaled())
        .unwrap();
    assert!(woken(|| set.wait(&mut [&mut one, &mut two], LONG)).unwrap());
    assert!(one.read_one().unwrap().is_none());
    assert_eq!(two.read_one().unwrap().unwrap().token, 1);
    two.signaler().signal();
    assert!(woken(|| set.wait(&mut [&mut one, &mut two], LONG)).unwrap());
    assert!(!set.wait(&mut [&mut one, &mut two], short).unwrap());
}

#[test]
fn wait_threshold() {
    let bench = Bench::new();
    let queue = bench.context.completion_queue().entries(64);
    let builder = queue.reader::<ContextFormat>().threshold(5);
    let mut reader = builder.build().unwrap();
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let mut out: [ContextEntry; 16] = Default::default();
    let key = region.key();
    for token in 0..3 {
        a.write(Inline(b"x"), key, token).unwrap();
    }
    // Time is up with three.
    let early = Some(Duration::from_millis(100));
    assert_eq!(reader.read_timeout(&mut out, early).unwrap(), 3);
    let sender = std::thread::spawn(move || {
        for token in 0..5 {
            std::thread::sleep(Duration::from_millis(10));
            a.write(Inline(b"x"), key, token).unwrap();
        }
        a
    });
    let all = woken(|| reader.read_timeout(&mut out, LONG));
    assert_eq!(all.unwrap(), 5);
    drop(sender.join().unwrap());
}

#[test]
fn signals_wake_and_are_not_lost() {
    for object in [WaitObject::Fd, WaitObject::Condvar, WaitObject::Yield] {
        let bench = Bench::new();
        let mut reader = bench.reader::<ContextFormat>(object);
        let signaler = reader.signaler();
        let mut out: [ContextEntry; 1] = Default::default();
        signaler.signal();
        let early = reader.read_timeout(&mut out, None);
        assert!(matches!(early, Err(ReadError::Again)));
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            signaler.signal();
        });
        let woken = reader.read_timeout(&mut out, None);
        assert!(matches!(woken, Err(ReadError::Again)));
        other.join().unwrap();
    }
    // All that wait on a shared one.
    let bench = Bench::new();
    let reader = bench.reader::<ContextFormat>(WaitObject::Fd);
    let shared = Arc::new(SharedCompletionReader::new(reader));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let mut out: [ContextEntry; 1] = Default::default();
                shared.read_timeout(&mut out, None)
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    shared.signaler().signal();
    for thread in threads {
        assert!(matches!(thread.join().unwrap(), Err(ReadError::Again)));
    }
}

/// One thread posts as soon as the other has seen the last; that one sleeps
/// whenever nothing is there. Where a wake-up is lost a wait ends by the clock,
/// which [`woken`] does not let pass: what it then finds is right all the same.
#[test]
fn no_wake_up_is_lost() {
    let waits = std::env::var("WAITS").map_or(5000, |text| text.parse::<u64>().unwrap());
    for object in [WaitObject::Fd, WaitObject::Condvar] {
        let bench = Bench::new();
        let mut mine = bench.reader::<ContextFormat>(object.clone());
        let mut theirs = bench.reader::<ContextFormat>(object);
        let (mut a, mut b) = bench.pair(mine.queue(), theirs.queue());
        b.receive(bench.buffer(8), 0).unwrap();
        a.receive(bench.buffer(8), 0).unwrap();
        let echo = std::thread::spawn(move || {
            let mut out: [ContextEntry; 4] = Default::default();
            let mut seen = 0;
            while seen < waits {
                let count = woken(|| theirs.read_timeout(&mut out, LONG)).unwrap();
                for entry in &mut out[..count] {
                    let buffer = std::mem::take(&mut entry.payload).into_buffer().unwrap();
                    b.receive(buffer, 0).unwrap();
                    b.post(WorkRequest::send(Inline(b"x")).unsignaled())
                        .unwrap();
                    seen += 1;
                }
            }
            (theirs, b)
        });
        let mut out: [ContextEntry; 4] = Default::default();
        for _ in 0..waits {
            a.post(WorkRequest::send(Inline(b"x")).unsignaled())
                .unwrap();
            let count = woken(|| mine.read_timeout(&mut out, LONG));
            assert_eq!(count.unwrap(), 1);
            let buffer = std::mem::take(&mut out[0].payload).into_buffer().unwrap();
            a.receive(buffer, 0).unwrap();
        }
        drop(echo.join().unwrap());
    }
}

#[test]
fn wait_then_read() {
    let bench = Bench::new();
    let mut reader = bench.reader::<ContextFormat>(WaitObject::Fd);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    assert!(!reader.wait(Some(Duration::from_millis(20))).unwrap());
    b.receive(bench.buffer(8), 7).unwrap();
    a.post(WorkRequest::send(Inline(b"x")).unsignaled())
        .unwrap();
    assert!(woken(|| reader.wait(LONG)).unwrap());
    assert_eq!(reader.read_one().unwrap().unwrap().token, 7);
}

#[test]
fn shared_channel_and_solicited_events() {
    let bench = Bench::new();
    let channel = bench.context.completion_channel().unwrap();
    let make = || {
        let queue = bench.context.completion_queue().channel(&channel);
        queue.build().unwrap()
    };
    let (mut one, mut two) = (make(), make());
    let (mut a, mut b) = bench.pair(&one, &two);
    for token in 0..2 {
        b.receive(bench.buffer(8), token).unwrap();
    }
    assert!(!one.arm(false).unwrap());
    assert!(!two.arm(true).unwrap());
    // Not solicited: no event.
    a.post(WorkRequest::send(Inline(b"x")).unsignaled())
        .unwrap();
    let short = Some(Duration::from_millis(100));
    assert!(channel.wait(short).unwrap().is_none());
    a.post(WorkRequest::send(Inline(b"x")).solicited()).unwrap();
    let event = || woken(|| channel.wait(LONG)).unwrap().unwrap();
    let events = [event(), event()];
    assert!(events.iter().any(|event| event.is_of(&one)));
    assert!(events.iter().any(|event| event.is_of(&two)));
    drop((a, b));
    // An event that nobody has taken does not keep a queue.
    one.close().unwrap();
    two.close().unwrap();
}

#[test]
fn shared_reader_returns_each_entry_once() {
    let bench = Bench::new();
    let reader = bench.reader::<ContextFormat>(WaitObject::Fd);
    let (mut a, _b) = bench.pair(reader.queue(), reader.queue());
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let shared = Arc::new(SharedCompletionReader::new(reader));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let mut mine = Vec::new();
                let mut out: [ContextEntry; 1] = Default::default();
                loop {
                    // Not every thread gets an entry soon: others may take all.
                    match shared.read_timeout(&mut out, LONG) {
                        Ok(count) => {
                            mine.extend(out[..count].iter().map(|entry| entry.token));
                        }
                        Err(ReadError::Again) => return mine,
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        })
        .collect();
    for token in 0..2000 {
        while a.in_flight().0 > 40 {
            std::thread::yield_now();
        }
        a.write(Inline(b"x"), region.key(), token).unwrap();
    }
    let end = Instant::now() + Duration::from_secs(20);
    while a.in_flight().0 > 0 {
        assert!(Instant::now() < end, "{} are left", a.in_flight().0);
        std::thread::yield_now();
    }
    let mut all = Vec::new();
    woken(|| {
        // A signal is for those that block. Who has just taken an entry does
        // not yet.
        while threads.iter().any(|thread| !thread.is_finished()) {
            shared.signaler().signal();
            std::thread::sleep(Duration::from_millis(20));
        }
        for thread in threads {
            let mine = thread.join().unwrap();
            assert!(mine.is_sorted());
            all.extend(mine);
        }
    });
    all.sort_unstable();
    assert_eq!(all, (0..2000).collect::<Vec<_>>());
}
