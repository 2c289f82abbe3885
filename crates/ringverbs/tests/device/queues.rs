//! Queues: order, signalling, sizes, sharing.

use ringverbs::raw::{Flags, SendRequest, WindowBind};
use ringverbs::{
    AccessFlags, Completion, Error, FlushRange, FlushTo, Inline, Operation, SharedCompletionQueue,
    Status, Transport, WindowType, WorkRequest,
};

use crate::{Pair, context, has, nothing, wait};

#[test]
fn completions_come_in_the_order_of_posting() {
    let mut pair = Pair::new(Transport::Reliable);
    for round in 0..20u64 {
        let mut parts = pair.domain.alloc(40960).unwrap().into_buffers(1024);
        for token in 0..20 {
            pair.b.receive(parts.next().unwrap(), token).unwrap();
        }
        pair.a
            .batch(|batch| {
                for token in 0..20 {
                    let byte = [token as u8];
                    let request = WorkRequest::send(Inline(&byte));
                    batch.post(request.token(100 + token))?;
                }
                Ok::<_, Error>(())
            })
            .unwrap();
        let mut order = (Vec::new(), Vec::new());
        let mut out: [Completion; 8] = Default::default();
        while order.0.len() + order.1.len() < 40 {
            let count = pair.cq.poll(&mut out).unwrap();
            for done in &mut out[..count] {
                done.result.unwrap();
                if done.operation == Operation::Receive {
                    assert_eq!(done.take_buffer().unwrap()[0], done.token as u8);
                    order.0.push(done.token);
                } else {
                    order.1.push(done.token);
                }
            }
        }
        assert_eq!(order.0, (0..20).collect::<Vec<_>>(), "round {round}");
        assert_eq!(order.1, (100..120).collect::<Vec<_>>());
    }
}

/// Completions are appended, no more than were asked for.
#[test]
fn completions_are_appended_to_a_vector() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = pair.domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE);
    let region = region.unwrap();
    for token in 0..5 {
        let outgoing = pair.filled(b"one of five");
        pair.a.write(outgoing, region.key(), token).unwrap();
    }
    let mut all = Vec::new();
    while all.len() < 5 {
        let before = all.len();
        let count = pair.cq.poll_into(&mut all, 2).unwrap();
        assert!(count <= 2 && all.len() == before + count);
    }
    let tokens: Vec<_> = all.iter().map(|done| done.token).collect();
    assert_eq!(tokens, [0, 1, 2, 3, 4]);
    assert!(all.iter().all(|done| done.result.is_ok()));
}

#[test]
fn signaled_completion_retires_unsignaled_operations() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = pair
        .domain
        .alloc_remote(4096, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let key = region.key();
    for token in 0..3 {
        let outgoing = pair.filled(b"quiet");
        let request = WorkRequest::write(outgoing, key).unsignaled().token(token);
        pair.a.post(request).unwrap();
    }
    nothing(&mut pair.cq);
    assert_eq!(pair.a.in_flight().0, 3);
    let outgoing = pair.filled(b"heard");
    pair.a.write(outgoing, key, 9).unwrap();
    pair.wait_for(9).result.unwrap();
    assert_eq!(pair.a.in_flight().0, 0);
}

#[test]
fn a_queue_does_not_fill_up_with_unsignaled_operations() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = pair
        .domain
        .alloc_remote(4096, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let mut full = 0;
    let mut posted = 0;
    while posted < 2000 {
        let request = WorkRequest::write(Inline(b"x"), region.key()).unsignaled();
        match pair.a.post(request) {
            Ok(()) => posted += 1,
            Err(error) => {
                assert!(matches!(error.error, Error::QueueFull { .. }), "{error}");
                full += 1;
                // Nobody hears of the library's own signals.
                assert!(pair.cq.poll_one().unwrap().is_none());
            }
        }
    }
    println!("full {full} times");
}

#[test]
fn a_flush_returns_every_buffer() {
    let mut pair = Pair::new(Transport::Reliable);
    for token in 0..10 {
        let buffer = pair.buffer(64);
        pair.a.receive(buffer, token).unwrap();
    }
    pair.a.set_error().unwrap();
    let outgoing = pair.filled(b"flushed");
    pair.a.send(outgoing, 10).unwrap();
    let refused = pair.buffer(64);
    assert!(pair.a.receive(refused, 11).is_err());
    let flushes = pair.context.can_flush();
    // The driver of Linux 6.1 drops receives without a word.
    let expected = if flushes { 11 } else { 1 };
    for mut completion in pair.wait(expected) {
        assert_eq!(completion.status(), Status::WR_FLUSH_ERR);
        assert!(completion.take_buffer().is_some());
    }
    let Pair { a, mut cq, .. } = pair;
    let left = a.close_and_drain(&mut cq, None).unwrap();
    assert_eq!(left.len(), 11 - expected);
}

#[test]
fn shared_receive_queue_of_several_queue_pairs() {
    let context = context();
    let domain = context.alloc_pd().unwrap();
    let mut cq = context.completion_queue().entries(100).build().unwrap();
    let mut srq = domain.shared_receive_queue().depth(32).build().unwrap();
    let local = context.local_address(1).unwrap();
    let mut pairs: Vec<_> = (0..4)
        .map(|_| {
            let mut a = domain
                .queue_pair(Transport::Reliable, &cq)
                .inline(32)
                .build()
                .unwrap();
            let builder = domain.queue_pair(Transport::Reliable, &cq);
            let mut b = builder.srq(&srq).build().unwrap();
            let (at_a, at_b) = (a.endpoint(&local), b.endpoint(&local));
            a.connect(&local, &at_b).unwrap();
            b.connect(&local, &at_a).unwrap();
            (a, b)
        })
        .collect();
    let mut parts = domain.alloc(32 * 64).unwrap().into_buffers(64);
    for token in 0..16 {
        srq.receive(parts.next().unwrap(), token).unwrap();
    }
    has(srq.resize(64));
    assert_eq!(srq.in_flight(), 16);
    for round in 0..4u8 {
        for (number, (a, _)) in pairs.iter_mut().enumerate() {
            a.send(Inline(&[round, number as u8]), 100).unwrap();
        }
    }
    let done = wait(&mut cq, 32);
    let mut tokens = Vec::new();
    for mut completion in done {
        completion.result.unwrap();
        if completion.operation == Operation::Receive {
            let buffer = completion.take_buffer().unwrap();
            let number = usize::from(buffer[1]);
            assert_eq!(completion.qp_num, pairs[number].1.qp_num());
            tokens.push(completion.token);
        }
    }
    assert_eq!(tokens, (0..16).collect::<Vec<_>>());
    let refused = pairs[0].1.receive(parts.next().unwrap(), 0).unwrap_err();
    assert!(refused.data.is_some(), "{refused}");
    srq.receive(parts.next().unwrap(), 77).unwrap();
    let (srq, busy) = srq.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(pairs);
    let left = srq.close().unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].token, 77);
}

#[test]
fn resize_keeps_pending_entries() {
    let mut pair = Pair::new(Transport::Reliable);
    let mut parts = pair.domain.alloc(4096).unwrap().into_buffers(64);
    for round in 0..6u64 {
        for token in 0..5 {
            pair.b.receive(parts.next().unwrap(), token).unwrap();
            pair.a.send(Inline(b"x"), 10 + token).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        let entries = if round % 2 == 0 { 1000 } else { 50 };
        assert!(pair.cq.resize(entries).unwrap() >= entries);
        let done = pair.wait(10);
        let tokens: Vec<_> = done.iter().map(|done| done.token).collect();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]);
    }
}

#[test]
fn halves_work_on_two_threads() {
    const MESSAGES: u64 = 2000;
    let Pair {
        mut a,
        b,
        cq,
        domain,
        ..
    } = Pair::new(Transport::Reliable);
    let cq = SharedCompletionQueue::new(cq);
    let (send_b, mut recv_b) = b.split();
    let mut free: Vec<_> = domain
        .alloc(32 * 64)
        .unwrap()
        .into_buffers(64)
        .take(32)
        .collect();
    let mut sent = 0;
    let mut received = 0;
    std::thread::scope(|scope| {
        let poster = scope.spawn(|| {
            let mut sent = 0;
            while sent < MESSAGES {
                match a.send(Inline(&sent.to_ne_bytes()), sent) {
                    Ok(()) => sent += 1,
                    Err(full) => assert!(matches!(full.error, Error::QueueFull { .. }), "{full}"),
                }
                std::thread::yield_now();
            }
        });
        while sent < MESSAGES || received < MESSAGES {
            while let Some(buffer) = free.pop() {
                recv_b.receive(buffer, 0).unwrap();
            }
            while let Some(mut done) = cq.poll_one().unwrap() {
                done.result.unwrap();
                if done.operation == Operation::Receive {
                    let buffer = done.take_buffer().unwrap();
                    assert_eq!(buffer[..8], received.to_ne_bytes());
                    received += 1;
                    free.push(buffer);
                } else {
                    assert_eq!(done.token, sent);
                    sent += 1;
                }
            }
        }
        poster.join().unwrap();
    });
    ringverbs::QueuePair::reunite(send_b, recv_b).unwrap();
}

#[test]
fn raw_layer_posts_and_polls() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = pair
        .domain
        .alloc_remote(4096, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let (incoming, outgoing) = (pair.buffer(64), pair.filled(b"raw"));
    let mut recv = pair.b.raw_receive().unwrap();
    let mut element = incoming.raw_sge();
    element.length = 64;
    recv.push(1, &[element]).unwrap();
    recv.push(2, &[]).unwrap();
    // SAFETY: the buffer is not touched until 1 has completed.
    unsafe { recv.publish() };
    let mut send = pair.a.raw_send();
    let list = [outgoing.raw_sge()];
    let message = SendRequest::send(3).sges(&list);
    send.push(&message.flags(Flags::SIGNALED)).unwrap();
    let write = SendRequest::write(4, region.key()).immediate(77);
    let write = write.inline(b"inline").flags(Flags::SIGNALED);
    send.push(&write).unwrap();
    // SAFETY: the buffer is not touched until 3 has completed.
    unsafe { send.publish().unwrap() };
    let mut seen = Vec::new();
    while seen.len() < 4 {
        pair.cq.poll_raw(2, |entry| {
            assert_eq!(entry.status(), Status::SUCCESS);
            seen.push((entry.wr_id(), entry.byte_len(), entry.ex()));
        });
    }
    seen.sort_unstable();
    assert_eq!(seen[0].0, 1);
    assert_eq!(seen[0].1, 3);
    assert_eq!(seen[1].2, 77u32.to_be());
    assert_eq!(&incoming[..3], b"raw");
    let mut there = [0; 6];
    region.read_at(0, &mut there).unwrap();
    assert_eq!(&there, b"inline");
}

/// Every operation of the raw layer that is not a message.
#[test]
fn raw_layer_less_common_operations() {
    let mut pair = Pair::new(Transport::Reliable);
    let (atomic_writes, flushes) = (
        pair.context.can_write_atomically(),
        pair.context.can_flush(),
    );
    let mut access = AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC
        | AccessFlags::MW_BIND;
    if flushes {
        access |= AccessFlags::FLUSH_GLOBAL;
    }
    let region = pair.domain.alloc_remote(4096, access).unwrap();
    region.write_at(0, &5u64.to_ne_bytes()).unwrap();
    let Some(window) = has(pair.domain.memory_window(WindowType::Two)) else {
        return;
    };
    let part = region.slice(64..128).unwrap();
    let old = [pair.buffer(8), pair.buffer(8), pair.buffer(8)];
    let done = |pair: &mut Pair, count: u64| {
        let mut seen = 0;
        while seen < count {
            pair.cq.poll_raw(16, |entry| {
                assert_eq!(entry.status(), Status::SUCCESS, "{}", entry.wr_id());
                seen += 1;
            });
        }
    };

    let before = window.rkey();
    let bound = WindowBind::new(&window, &part, AccessFlags::REMOTE_WRITE).unwrap();
    let request = SendRequest::bind_window(1, &bound).flags(Flags::SIGNALED);
    let mut send = pair.b.raw_send();
    send.push(&request).unwrap();
    // SAFETY: window and region live until the end.
    unsafe { send.publish().unwrap() };
    done(&mut pair, 1);
    assert_eq!(window.rkey(), before);
    // SAFETY: its completion was just read.
    unsafe { bound.done() };
    assert_ne!(window.rkey(), before);

    let at = region.key();
    let through = ringverbs::RemoteAddr::new(part.key().addr, window.rkey());
    let mut send = pair.a.raw_send();
    let lists = [&old[0], &old[1], &old[2]].map(|old| [old.raw_sge()]);
    let mut requests = vec![
        SendRequest::fetch_add(1, at, 2).sges(&lists[0]),
        SendRequest::compare_swap(2, at, 7, 9).sges(&lists[1]),
        SendRequest::read(3, at).sges(&lists[2]),
        SendRequest::write(4, through).inline(b"window"),
    ];
    if atomic_writes {
        let value = 11u64.to_ne_bytes();
        requests.push(SendRequest::atomic_write(5, at.offset(16), value));
    }
    if flushes {
        let (range, to) = (FlushRange::Bytes(64), FlushTo::GlobalVisibility);
        requests.push(SendRequest::flush(6, at, range, to));
    }
    for request in &requests {
        send.push(&request.flags(Flags::SIGNALED)).unwrap();
    }
    let posted = requests.len() as u64;
    // SAFETY: the buffers are not touched until all have completed.
    unsafe { send.publish().unwrap() };
    done(&mut pair, posted);
    let old = old.map(|old| u64::from_ne_bytes(*old.first_chunk().unwrap()));
    assert_eq!(old, [5, 7, 9]);
    let mut there = [0; 6];
    region.read_at(64, &mut there).unwrap();
    assert_eq!(&there, b"window");
    if atomic_writes {
        assert_eq!(region.load_u64(16).unwrap(), 11);
    }

    let mut send = pair.b.raw_send();
    let request = SendRequest::local_invalidate(1, window.rkey());
    send.push(&request.flags(Flags::SIGNALED)).unwrap();
    // SAFETY: nothing of memory.
    unsafe { send.publish().unwrap() };
    done(&mut pair, 1);
}
