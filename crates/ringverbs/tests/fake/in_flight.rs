//! The table of operations in flight.

use std::time::Duration;

use ringverbs::qp::State;
use ringverbs::{Error, Inline, QueuePair, RemoteAddr, Status, WorkRequest};
use uverbs::abi::ids::*;

use crate::{QUERY_GID, World};
use device_testing::rxe::layout;
use device_testing::rxe::layout::wc;

const SIGNALED: u64 = 2;

fn write(token: u64) -> WorkRequest<Inline<'static>> {
    WorkRequest::write(Inline(b"x"), RemoteAddr::new(0x1000, 7)).token(token)
}

/// Signals that the device was given, in order.
fn signals(queues: &crate::Queues) -> Vec<(u64, bool)> {
    let entries = queues.send.consume().into_iter();
    entries
        .map(|entry| {
            let flags = layout::read(&entry, layout::send::SEND_FLAGS);
            let id = layout::read(&entry, layout::send::WR_ID);
            (id, flags & SIGNALED != 0)
        })
        .collect()
}

#[test]
fn signaled_completion_retires_earlier_operations() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..2 {
        let buffer = world.buffer(b"quiet");
        let request = WorkRequest::send(buffer).unsignaled().token(token);
        qp.post(request).unwrap();
    }
    qp.post(write(9)).unwrap();
    let posted = signals(&queues);
    assert_eq!(
        posted.iter().map(|post| post.1).collect::<Vec<_>>(),
        [false, false, true]
    );
    assert_eq!(world.live(OBJECT_MR), 2);
    world.complete(posted[2].0, 17);
    assert_eq!(world.cq.poll_one().unwrap().unwrap().token, 9);
    assert_eq!(world.live(OBJECT_MR), 0);
    assert_eq!(qp.in_flight().0, 0);
}

#[test]
fn halves_work_and_are_drained_apart() {
    let mut world = World::new();
    let (qp, queues) = world.queue_pair(17);
    let id = qp.id();
    let (mut send, mut recv) = qp.split();
    assert_eq!((send.id(), recv.id()), (id, id));
    assert_eq!((send.qp_num(), recv.qp_num()), (17, 17));
    assert_eq!(recv.state(), State::RTS);
    let there = RemoteAddr::new(0x1000, 7);
    send.send(world.buffer(b"a"), 1).unwrap();
    send.write(world.buffer(b"b"), there, 2).unwrap();
    send.read(world.buffer(b"c"), there, 3).unwrap();
    recv.receive(world.buffer(b""), 4).unwrap();
    recv.receive(world.buffer(b""), 5).unwrap();

    let mut strange = world.context.completion_queue().build().unwrap();
    let nothing = Duration::ZERO;
    let wrong = send.drain(&mut strange, nothing, drop).unwrap_err();
    assert!(matches!(wrong, Error::Invalid { .. }), "{wrong}");
    assert!(recv.drain(&mut strange, nothing, drop).is_err());
    assert_eq!(recv.state(), State::RTS);
    drop(strange);

    let (sent, received) = (queues.sent(), queues.received());
    for id in [sent[0], received[0], sent[1], sent[2]] {
        world.raise(&[(wc::WR_ID, id), (wc::STATUS, 5), (wc::QP_NUM, 17)]);
    }
    let mut others = Vec::new();
    let patience = Duration::from_secs(10);
    let drained = send.drain(&mut world.cq, patience, |other| others.push(other));
    let drained = drained.unwrap();
    assert_eq!(
        drained.iter().map(|done| done.token).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert!(
        drained
            .iter()
            .all(|done| done.status() == Status::WR_FLUSH_ERR)
    );
    assert_eq!(
        others.iter().map(|done| done.token).collect::<Vec<_>>(),
        [4]
    );
    assert_eq!((send.state(), recv.state()), (State::ERR, State::ERR));

    // One receive has not come: the time is up.
    assert_eq!(recv.drain(&mut world.cq, nothing, drop).unwrap().len(), 0);
    assert_eq!((send.in_flight(), recv.in_flight()), (0, 1));
    world.complete(0xdead_beef, 17);
    world.complete(received[1], 17);
    let mut others = Vec::new();
    let failed = recv.drain(&mut world.cq, patience, |other| others.push(other));
    assert!(matches!(failed, Err(Error::Corruption { .. })));
    assert_eq!(others.len(), 1);
    QueuePair::reunite(send, recv).unwrap().close().unwrap();
}

#[test]
fn signals_of_the_library_are_not_reported() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for round in 0..10 {
        for token in 0..3 {
            qp.post(write(token).unsignaled()).unwrap();
        }
        let posted = signals(&queues);
        // The queue holds 7: every third is signalled.
        assert_eq!(posted.iter().filter(|post| post.1).count(), 1, "{round}");
        for (id, _) in posted.iter().filter(|post| post.1) {
            world.complete(*id, 17);
        }
        assert!(world.cq.poll_one().unwrap().is_none());
        assert_eq!(qp.in_flight().0, 0);
    }
}

#[test]
fn failure_of_an_unsignaled_operation_is_reported() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..3 {
        qp.post(write(token).unsignaled()).unwrap();
    }
    let posted = signals(&queues);
    for (id, _) in &posted {
        world.raise(&[(wc::WR_ID, *id), (wc::STATUS, 5)]);
    }
    for token in 0..3 {
        let completion = world.cq.poll_one().unwrap().unwrap();
        assert_eq!(completion.token, token);
        assert!(completion.result.is_err());
    }
}

#[test]
fn full_queue_returns_the_buffers() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..7 {
        qp.receive(world.buffer(b""), token).unwrap();
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    let refused = qp.send(world.buffer(b"mine"), 7).unwrap_err();
    assert!(matches!(refused.error, Error::QueueFull { capacity: 7 }));
    assert_eq!(refused.token, 7);
    assert_eq!(&refused.data.unwrap()[..], b"mine");
    // The device has room again; the table has not, until completions are read.
    queues.sent();
    queues.received();
    assert!(qp.send(world.buffer(b"mine"), 7).is_err());
    let refused = qp.receive(world.buffer(b"mine"), 8).unwrap_err();
    assert_eq!(&refused.data.unwrap()[..], b"mine");
}

#[test]
fn closed_queue_pair_returns_buffers_in_flight() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..3 {
        qp.send(world.buffer(&[token as u8]), token).unwrap();
        qp.receive(world.buffer(&[]), 10 + token).unwrap();
    }
    let id = queues.sent()[0];
    world.complete(id, 17);
    world.cq.poll_one().unwrap().unwrap();
    let mut other = world.context.completion_queue().build().unwrap();
    let (qp, error) = qp
        .close_and_drain(&mut other, None)
        .unwrap_err()
        .into_parts();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let left = qp.close_and_drain(&mut world.cq, None).unwrap();
    let tokens: Vec<_> = left.iter().map(|left| left.token).collect();
    assert_eq!(tokens, [1, 2, 10, 11, 12]);
    for released in left {
        assert!(released.payload.into_buffer().is_some());
    }
    assert_eq!(world.live(OBJECT_QP), 0);
}

#[test]
fn failed_doorbell_leaves_the_operation_in_flight() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let eio = uverbs::Errno::new(libc::EIO);
    world.machine.fake.set_write_error(Some(eio));
    let refused = qp.send(world.buffer(b"x"), 3).unwrap_err();
    assert!(matches!(
        refused.error,
        Error::Doorbell { errno: libc::EIO }
    ));
    assert!(refused.error.is_device_gone());
    assert!(refused.data.is_none());
    assert_eq!(qp.in_flight().0, 1);
    let id = queues.sent()[0];
    world.complete(id, 17);
    assert_eq!(world.cq.poll_one().unwrap().unwrap().token, 3);
}

#[test]
fn sequence_numbers_wrap() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..5000 {
        qp.post(write(token)).unwrap();
        let id = queues.sent()[0];
        world.complete(id, 17);
        assert_eq!(world.cq.poll_one().unwrap().unwrap().token, token);
    }
}

#[test]
fn a_reset_is_refused_while_it_would_lose_operations() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.post(write(1)).unwrap();
    let reset = ringverbs::qp::QpAttr::default();
    let mask = ringverbs::qp::QpAttrMask::STATE;
    let error = qp.modify(&reset, mask).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    let id = queues.sent()[0];
    world.complete(id, 17);
    world.cq.poll_one().unwrap().unwrap();
    qp.modify(&reset, mask).unwrap();
}

/// A wait has an end that the caller says, or the device's own.
#[test]
fn spin_ends_with_timeout_or_device_removal() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..3 {
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    let ids = queues.sent();
    for timeout in [Duration::ZERO, Duration::from_millis(5)] {
        assert!(world.cq.poll_for(timeout).unwrap().is_none());
    }
    for (id, timeout) in ids.into_iter().zip([Duration::ZERO, Duration::MAX]) {
        world.complete(id, 17);
        assert!(world.cq.poll_for(timeout).unwrap().is_some());
    }
    let eio = uverbs::Errno::new(libc::EIO);
    world.machine.fake.on(QUERY_GID, move |_| Err(eio));
    for error in [
        world.cq.poll_until_one().unwrap_err(),
        world.cq.poll_for(Duration::MAX).unwrap_err(),
    ] {
        assert!(error.is_device_gone(), "{error}");
    }
}

/// A timeout that the clock cannot tell is none, and no panic.
#[test]
fn drain_accepts_any_timeout() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"x"), 1).unwrap();
    world.raise(&[
        (wc::WR_ID, queues.sent()[0]),
        (wc::QP_NUM, 17),
        (wc::STATUS, 5),
    ]);
    let drained = qp.drain(&mut world.cq, None, Duration::MAX, drop).unwrap();
    assert_eq!(drained.completions.len(), 1);
    assert!(drained.released.is_empty());
}
