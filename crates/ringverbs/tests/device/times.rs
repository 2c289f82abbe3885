//! When completions came, by the device's clock.

use std::time::{Duration, Instant};

use ringverbs::completion::Timestamp;
use ringverbs::{CompletionQueue, Inline, Status, Transport};

use crate::{Pair, has};

/// The time of the next completion, and whether the raw layer is to tell it.
fn next(pair: &mut Pair, raw: bool) -> Timestamp {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < end, "no completion");
        if raw {
            let mut time = None;
            pair.cq.poll_raw(1, |entry| time = entry.timestamp());
            if let Some(time) = time {
                return time;
            }
        } else if let Some(entry) = pair.cq.cursor().next_entry().unwrap() {
            return entry.result().unwrap().timestamp().unwrap();
        }
    }
}

/// Another two queue pairs, on that completion queue.
fn complete_in(pair: &mut Pair, cq: CompletionQueue) {
    pair.cq = cq;
    let make = |pair: &Pair| {
        let builder = pair.domain.queue_pair(Transport::Reliable, &pair.cq);
        builder.inline(8).build().unwrap()
    };
    (pair.a, pair.b) = (make(pair), make(pair));
    let (at_a, at_b) = (pair.a.endpoint(&pair.local), pair.b.endpoint(&pair.local));
    pair.a.connect(&pair.local, &at_b).unwrap();
    pair.b.connect(&pair.local, &at_a).unwrap();
}

#[test]
fn completions_have_device_timestamps() {
    let mut pair = Pair::new(Transport::Reliable);
    let Some(cq) = has(pair.context.completion_queue().timestamps().build()) else {
        assert!(has(pair.context.clock()).is_none());
        return;
    };
    let clock = pair.context.clock().unwrap();
    // The one that was there, without times.
    pair.a.send(Inline(b""), 0).unwrap();
    let incoming = pair.buffer(1);
    pair.b.receive(incoming, 0).unwrap();
    let mut told = 0;
    while told < 2 {
        if let Some(entry) = pair.cq.cursor().next_entry().unwrap() {
            assert_eq!(entry.result().unwrap().timestamp(), None);
            told += 1;
        }
    }
    complete_in(&mut pair, cq);

    let begin = Instant::now();
    let mut times = Vec::new();
    for round in 0..5 {
        // A send, and its receive. (What the raw layer reads is not brought to
        // an end by it.)
        let incoming = pair.buffer(1);
        pair.b.receive(incoming, 0).unwrap();
        pair.a.send(Inline(b"x"), 0).unwrap();
        for _ in 0..2 {
            times.push(next(&mut pair, round == 4));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let whole = begin.elapsed();
    let told = clock.between(times[0], times[9]);
    // Four sleeps lie between; the clocks are two.
    assert!(told >= Duration::from_millis(30), "{told:?} of {whole:?}");
    assert!(
        told <= whole * 2 + Duration::from_secs(1),
        "{told:?} of {whole:?}"
    );
    for pair in times.chunks(2).collect::<Vec<_>>().windows(2) {
        let apart = clock.between(pair[0][0], pair[1][0]);
        assert!(
            apart <= whole * 2 + Duration::from_secs(1),
            "{apart:?} of {whole:?}"
        );
    }
}

/// A failure has its syndrome where the time would be.
#[test]
fn failed_completion_has_no_timestamp() {
    let mut pair = Pair::new(Transport::Reliable);
    let Some(cq) = has(pair.context.completion_queue().timestamps().build()) else {
        return;
    };
    complete_in(&mut pair, cq);
    let incoming = pair.buffer(8);
    let nowhere = ringverbs::RemoteAddr::new(0, 0);
    pair.a.read(incoming, nowhere, 0).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let mut seen = None;
    while seen.is_none() {
        assert!(Instant::now() < end, "no completion");
        let see =
            |entry: ringverbs::raw::Entry<'_>| seen = Some((entry.status(), entry.timestamp()));
        pair.cq.poll_raw(1, see);
    }
    assert_eq!(seen, Some((Status::REM_ACCESS_ERR, None)));
}
