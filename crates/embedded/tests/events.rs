//! Completion channels and asynchronous events, with poll on their descriptors.

use std::os::fd::{AsFd, BorrowedFd};

use device_testing::embedded::driver::*;
use mlx5::CompletionQueue;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll as poll_fd};
use ringverbs_embedded::Drive;
use uverbs::{
    AsyncEventFile, AsyncEventType, CompletionChannel, CqInit, QpAttr, QpAttrMask as Mask, QpState,
    QpType, SrqModify, Udata,
};

const USER_HANDLE: u64 = 55;

fn is_readable(file: impl AsFd, milliseconds: u16) -> bool {
    poll_fd(
        &mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)],
        PollTimeout::from(milliseconds),
    )
    .unwrap()
        > 0
}

fn cq_with_channel(host: &Host, channel: BorrowedFd<'_>) -> Cq {
    let init = CqInit {
        cqe: 16,
        user_handle: USER_HANDLE,
        channel: Some(channel),
        ..CqInit::default()
    };
    CompletionQueue::create(&host.context, &host.device, &init).unwrap()
}

#[test]
fn completion_vectors_serve_their_own_queues() {
    let (a, b) = Host::pair("ib", Drive::Caller);
    let vectors = b.device_info().num_comp_vectors;
    assert_eq!(vectors, 4);
    let channel = CompletionChannel::create(&b.context).unwrap();
    let on = |vector: u32| {
        let init = CqInit {
            cqe: 16,
            user_handle: vector.into(),
            channel: Some(channel.as_fd()),
            comp_vector: vector,
            ..CqInit::default()
        };
        CompletionQueue::create(&b.context, &b.device, &init)
    };
    assert!(on(vectors).is_err());
    let mut queues: Vec<_> = (0..vectors).map(|vector| on(vector).unwrap()).collect();
    let (from, to) = (a.memory(64), b.memory(64));
    let mut cqa = a.cq(16);
    let pairs: Vec<_> = queues
        .iter_mut()
        .map(|cqb| {
            let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, cqb));
            connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
            cqb.arming.arm(b.device.cq_doorbell(), false);
            receive(&mut qb, 1, to.sge(0, 64));
            post(&mut qa, 1, Operation::Send, from.sge(0, 64));
            poll(&a, &mut cqa);
            (qa, qb)
        })
        .collect();
    while b.embedded.drive() {}
    channel.set_nonblocking(true).unwrap();
    let mut told: Vec<_> = pairs
        .iter()
        .map(|_| channel.read_event().unwrap())
        .collect();
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2, 3]);
    assert!(!is_readable(&channel, 0));
}

#[test]
fn an_armed_queue_generates_one_event_and_wakes_a_waiter() {
    for drive in [Drive::Watch, Drive::Caller] {
        let (a, b) = Host::pair("ib", drive);
        let channel = CompletionChannel::create(&b.context).unwrap();
        let mut cqa = a.cq(16);
        let mut cqb = cq_with_channel(&b, channel.as_fd());
        let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
        connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
        let (from, to) = (a.memory(64), b.memory(64));
        let mut read = 0;
        for round in 0..5u64 {
            cqb.arming.arm(b.device.cq_doorbell(), false);
            receive(&mut qb, round, to.sge(0, 64));
            receive(&mut qb, round + 100, to.sge(0, 64));
            post(&mut qa, round, Operation::Send, from.sge(0, 64));
            // Sleeps until the event arrives.
            assert_eq!(channel.read_event().unwrap(), USER_HANDLE);
            cqb.arming.event();
            read += 1;
            assert_eq!(poll(&b, &mut cqb).wr_id, round);
            // One event for all completions until the queue is armed again.
            post(&mut qa, round, Operation::Send, from.sge(0, 64));
            assert_eq!(poll(&b, &mut cqb).wr_id, round + 100);
            poll(&a, &mut cqa);
            poll(&a, &mut cqa);
            assert!(!is_readable(&channel, 0));
        }
        // An unread completion from before the arming causes an event.
        receive(&mut qb, 7, to.sge(0, 64));
        post(&mut qa, 7, Operation::Send, from.sge(0, 64));
        poll(&a, &mut cqa);
        while cqb.ring.is_empty() {
            b.embedded.drive();
        }
        cqb.arming.arm(b.device.cq_doorbell(), false);
        while !is_readable(&channel, 0) {
            b.embedded.drive();
        }
        // This event stays unread: it is discarded with its queue, and not counted.
        drop(qb);
        cqb.ring.publish();
        let gone = cqb.object.destroy().unwrap();
        assert_eq!((gone.completion, gone.asynchronous), (read, 0));
        assert!(!is_readable(&channel, 0));
        channel.set_nonblocking(true).unwrap();
        let nothing = channel.read_event().unwrap_err();
        assert_eq!(nothing.errno().raw(), libc_eagain());
    }
}

fn libc_eagain() -> i32 {
    nix::errno::Errno::EAGAIN as i32
}

/// A driver tells of doorbells, or the device looks for them.
#[test]
fn a_sleeping_device_finds_a_doorbell() {
    for drive in [Drive::Watch, Drive::Watch] {
        let (host, _other) = Host::pair("ib", drive);
        let channel = CompletionChannel::create(&host.context).unwrap();
        let mut cq = cq_with_channel(&host, channel.as_fd());
        let mut a = host.qp(QpType::RC, &mut cq);
        let mut b = host.qp(QpType::RC, &mut cq);
        connect_pair(QpType::RC, (&a, &host), (&b, &host));
        let memory = host.memory(64);
        receive(&mut b, 1, memory.sge(0, 64));
        cq.arming.arm(host.device.cq_doorbell(), false);
        // Longer than the device's thread stays awake.
        std::thread::sleep(std::time::Duration::from_millis(50));
        post(&mut a, 2, Operation::Send, memory.sge(0, 64));
        if drive == Drive::Watch {
            host.embedded.notify_doorbell();
        }
        // poll(2) itself, which does not wake the device.
        assert!(is_readable(&channel, 60_000));
    }
}

#[test]
fn asynchronous_events_name_their_object() {
    let host = Host::single("ib");
    let events = AsyncEventFile::alloc(&host.context).unwrap();
    let mut cq = host.cq(16);
    let srq = host.srq(8);
    let mut srq = srq;
    let mut a = host.qp(QpType::RC, &mut cq);
    let b = host.qp_with(QpType::RC, &mut cq, Some(&srq));
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let memory = host.memory(64);
    for n in 0..4 {
        srq.recv.locked().push(n, &[memory.sge(0, 64)]).unwrap();
    }
    // SAFETY: the memory lives to the end of the test.
    unsafe { srq.recv.locked().publish() };
    let limit = SrqModify {
        limit: Some(3),
        ..SrqModify::default()
    };
    srq.object.modify(&limit, Udata::none()).unwrap();
    assert_eq!(srq.object.query().unwrap().limit, 3);
    for n in 0..2 {
        post(&mut a, n, Operation::Send, memory.sge(0, 8));
    }
    let event = events.read_event().unwrap();
    assert_eq!(
        (event.event, event.element),
        (AsyncEventType::SRQ_LIMIT_REACHED, 88)
    );
    for _ in 0..4 {
        assert_eq!(wait(&mut cq).status, 0);
    }
    assert_eq!(srq.object.query().unwrap().limit, 0);
    // Cable events.
    host.embedded.set_cable(false);
    let event = events.read_event().unwrap();
    assert_eq!((event.event, event.element), (AsyncEventType::PORT_ERR, 1));
    assert_eq!(host.context.query_port(1).unwrap().legacy.state, 1);
    host.embedded.set_cable(true);
    assert_eq!(
        events.read_event().unwrap().event,
        AsyncEventType::PORT_ACTIVE
    );
    // A queue pair that fails, and the last WQE reached event.
    assert!(host.embedded.fail_queue_pair(a.object.qp_num()));
    let event = events.read_event().unwrap();
    assert_eq!((event.event, event.element), (AsyncEventType::QP_FATAL, 77));
    let error = QpAttr {
        qp_state: QpState::ERR,
        ..QpAttr::default()
    };
    modify(&b, &error, Mask::STATE);
    let event = events.read_event().unwrap();
    assert_eq!(
        (event.event, event.element),
        (AsyncEventType::QP_LAST_WQE_REACHED, 77)
    );
    assert_eq!(a.object.destroy().unwrap(), 1);
    assert_eq!(b.object.destroy().unwrap(), 1);
    assert_eq!(srq.object.destroy().unwrap(), 1);
}

#[test]
fn an_overrun_raises_an_event() {
    let host = Host::single("ib");
    let events = AsyncEventFile::alloc(&host.context).unwrap();
    let mut cq = host.cq(2);
    let mut a = host.qp(QpType::RC, &mut cq);
    let mut b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let memory = host.memory(64);
    for n in 0..8 {
        receive(&mut b, n, memory.sge(0, 64));
        post(&mut a, n, Operation::Send, memory.sge(0, 8));
    }
    assert_eq!(events.read_event().unwrap().event, AsyncEventType::CQ_ERR);
}
