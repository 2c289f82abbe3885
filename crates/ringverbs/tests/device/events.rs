//! Completion events, asynchronous events.

use std::time::Duration;

use ringverbs::{AsyncEventType, EventSource, Inline, Transport, WorkRequest};

use crate::{Pair, context, wait};

const SOON: Option<Duration> = Some(Duration::from_secs(10));
const SHORT: Option<Duration> = Some(Duration::from_millis(50));

#[test]
fn channel_events_name_their_queue() {
    let context = context();
    let domain = context.alloc_pd().unwrap();
    let channel = context.completion_channel().unwrap();
    let make = || {
        let builder = context.completion_queue().entries(20);
        builder.channel(&channel).build().unwrap()
    };
    let (mut first, mut second) = (make(), make());
    let mut a = domain
        .queue_pair(Transport::Reliable, &first)
        .inline(8)
        .build()
        .unwrap();
    let mut b = domain
        .queue_pair(Transport::Reliable, &second)
        .build()
        .unwrap();
    let local = context.local_address(1).unwrap();
    let (at_a, at_b) = (a.endpoint(&local), b.endpoint(&local));
    a.connect(&local, &at_b).unwrap();
    b.connect(&local, &at_a).unwrap();
    assert!(channel.wait(SHORT).unwrap().is_none());

    let mut parts = domain.alloc(4096).unwrap().into_buffers(64);
    b.receive(parts.next().unwrap(), 1).unwrap();
    assert!(!second.arm(false).unwrap());
    a.send(Inline(b"x"), 2).unwrap();
    let event = channel.wait(SOON).unwrap().unwrap();
    assert!(event.is_of(&second) && !event.is_of(&first));
    wait(&mut second, 1);
    // Only `second` was armed, and once.
    assert!(channel.wait(SHORT).unwrap().is_none());
    // What is there already is seen by arming, not by an event.
    assert!(first.arm(false).unwrap());
    wait(&mut first, 1);

    // Solicited only.
    for token in [3, 4] {
        b.receive(parts.next().unwrap(), token).unwrap();
    }
    assert!(!second.arm(true).unwrap());
    a.send(Inline(b"x"), 5).unwrap();
    assert!(
        channel
            .wait(SHORT)
            .unwrap()
            .is_none_or(|event| !event.is_of(&second))
    );
    a.post(WorkRequest::send(Inline(b"x")).solicited()).unwrap();
    let event = loop {
        let event = channel.wait(SOON).unwrap().unwrap();
        if event.is_of(&second) {
            break event;
        }
    };
    assert_eq!(event.queue, second.id());
    // Events that nobody read do not hold a queue back.
    drop((a, b));
    first.close().unwrap();
    second.close().unwrap();
}

/// A thread that waits for any completion is woken, although another then asks for solicited
/// ones.
#[test]
fn a_request_for_any_completion_is_not_weakened() {
    let context = context();
    let domain = context.alloc_pd().unwrap();
    let channel = context.completion_channel().unwrap();
    let first = context.completion_queue().entries(40).build().unwrap();
    let builder = context.completion_queue().entries(40);
    let mut second = builder.channel(&channel).build().unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &first);
    let mut a = builder.inline(8).build().unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &second);
    let mut b = builder.build().unwrap();
    let local = context.local_address(1).unwrap();
    let (at_a, at_b) = (a.endpoint(&local), b.endpoint(&local));
    a.connect(&local, &at_b).unwrap();
    b.connect(&local, &at_a).unwrap();
    let mut parts = domain.alloc(4096).unwrap().into_buffers(64);
    // Also once the device has read the first request.
    for (token, pause) in [(1, 0), (2, 0), (3, 20), (4, 0)] {
        b.receive(parts.next().unwrap(), token).unwrap();
        assert!(!second.arm(false).unwrap());
        std::thread::sleep(Duration::from_millis(pause));
        assert!(!second.arm(true).unwrap());
        a.send(Inline(b"x"), token).unwrap();
        let event = channel.wait(SOON).unwrap().unwrap();
        assert!(event.is_of(&second));
        wait(&mut second, 1);
    }
    // The last event ended the request.
    b.receive(parts.next().unwrap(), 5).unwrap();
    assert!(!second.arm(true).unwrap());
    a.send(Inline(b"x"), 5).unwrap();
    assert!(channel.wait(SHORT).unwrap().is_none());
}

#[test]
fn asynchronous_events_name_their_source() {
    let context = context();
    let domain = context.alloc_pd().unwrap();
    let mut cq = context.completion_queue().entries(20).build().unwrap();
    let mut srq = domain.shared_receive_queue().depth(10).build().unwrap();
    let mut a = domain
        .queue_pair(Transport::Reliable, &cq)
        .inline(8)
        .build()
        .unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    let mut b = builder.srq(&srq).build().unwrap();
    let local = context.local_address(1).unwrap();
    let (at_a, at_b) = (a.endpoint(&local), b.endpoint(&local));
    a.connect(&local, &at_b).unwrap();
    b.connect(&local, &at_a).unwrap();
    let mut parts = domain.alloc(4096).unwrap().into_buffers(64);
    for token in 0..3 {
        srq.receive(parts.next().unwrap(), token).unwrap();
    }
    srq.arm_limit(3).unwrap();
    assert_eq!(srq.limit().unwrap(), 3);
    a.send(Inline(b"x"), 9).unwrap();
    wait(&mut cq, 2);
    let events = context.async_events();
    let event = loop {
        let event = events.wait(SOON).unwrap().unwrap();
        if matches!(event.source, EventSource::SharedReceiveQueue(_)) {
            break event;
        }
    };
    assert_eq!(event.event, AsyncEventType::SRQ_LIMIT_REACHED);
    assert_eq!(event.source, EventSource::SharedReceiveQueue(srq.id()));
}

#[test]
fn overrun_raises_an_asynchronous_event() {
    let mut pair = Pair::new(Transport::Reliable);
    let context = pair.context.clone();
    let mut small = context.completion_queue().entries(1).build().unwrap();
    let capacity = small.capacity();
    let builder = pair.domain.queue_pair(Transport::Reliable, &small);
    let mut a = builder.inline(8).send_depth(64).build().unwrap();
    let (at_a, at_b) = (a.endpoint(&pair.local), pair.b.endpoint(&pair.local));
    a.connect(&pair.local, &at_b).unwrap();
    // A write to nowhere completes all the same: flushed.
    let _ = at_a;
    a.set_error().unwrap();
    for token in 0..u64::from(capacity) + 4 {
        let at = ringverbs::RemoteAddr::default();
        let request = WorkRequest::write(Inline(b"x"), at).token(token);
        a.post(request).unwrap();
    }
    let events = context.async_events();
    let event = events.wait(SOON).unwrap().unwrap();
    assert_eq!(event.event, AsyncEventType::CQ_ERR);
    assert_eq!(event.source, EventSource::CompletionQueue(small.id()));
    let _ = small.poll_one();
    pair.a.set_error().unwrap();
}
