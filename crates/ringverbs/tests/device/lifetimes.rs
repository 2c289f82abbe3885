//! Handles dropped and forgotten in any order, objects closed while in use.

use ringverbs::{Error, Inline, RemoteAddr, Transport, WorkRequest};

use crate::{Pair, context, wait};

#[test]
fn handles_may_be_dropped_before_the_queue_pair() {
    let Pair {
        mut a,
        mut b,
        mut cq,
        domain,
        context,
        ..
    } = Pair::new(Transport::Reliable);
    let (incoming, outgoing) = (
        domain.alloc(64).unwrap().into_buffer(),
        domain.alloc(64).unwrap().into_buffer(),
    );
    drop((domain, context));
    b.receive(incoming, 1).unwrap();
    a.send(outgoing, 2).unwrap();
    for completion in wait(&mut cq, 2) {
        completion.result.unwrap();
    }
}

#[test]
fn completion_queue_may_be_dropped_before_its_queue_pairs() {
    let Pair {
        mut a,
        mut b,
        cq,
        domain,
        ..
    } = Pair::new(Transport::Reliable);
    drop(cq);
    b.receive(domain.alloc(64).unwrap().into_buffer(), 1)
        .unwrap();
    a.send(Inline(b"x"), 2).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    drop(a);
    drop(b);
    domain.close().unwrap();
}

#[test]
fn closing_an_object_in_use_returns_it() {
    let pair = Pair::new(Transport::Reliable);
    let Pair {
        mut a,
        b,
        cq,
        domain,
        context,
        ..
    } = pair;
    let (cq, busy) = cq.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    let (domain, busy) = domain.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    let (context, busy) = context.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    let region = domain.alloc_remote(64, Default::default()).unwrap();
    a.receive(region.slice(..).unwrap(), 1).unwrap();
    let (region, busy) = region.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop((a, b));
    // Nobody has polled, so nobody else holds what was in flight.
    region.close().unwrap();
    cq.close().unwrap();
    domain.close().unwrap();
    context.close().unwrap();
}

#[test]
fn closing_a_group_member_returns_it() {
    let Pair {
        a: _a,
        mut b,
        local,
        ..
    } = Pair::new(Transport::Datagram);
    if !local.gid.is_ipv4() {
        return testing::skip!("the device has no IPv4 address");
    }
    let membership = b.join("::ffff:239.1.2.3".parse().unwrap(), 0).unwrap();
    let (b, busy) = b.close().unwrap_err().into_parts();
    assert_eq!(busy.errno(), libc::EBUSY);
    drop(membership);
    b.close().unwrap();
}

#[test]
fn completions_of_a_destroyed_queue_pair_are_stale() {
    let mut pair = Pair::new(Transport::Reliable);
    for token in 0..5 {
        let request = WorkRequest::write(Inline(b"x"), RemoteAddr::default());
        pair.a.post(request.token(token)).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
    let Pair { a, b, mut cq, .. } = pair;
    a.close().unwrap();
    drop(b);
    for _ in 0..10 {
        assert!(cq.poll_one().unwrap().is_none());
    }
}

#[test]
fn forgotten_handles_only_leak() {
    let mut pair = Pair::new(Transport::Reliable);
    let (incoming, outgoing) = (pair.buffer(64), pair.buffer(64));
    let addresses = [incoming.as_ptr().addr(), outgoing.as_ptr().addr()];
    // SAFETY: asks about pages; changes nothing.
    let mapped =
        || addresses.map(|at| unsafe { libc::msync(at as *mut _, 1, libc::MS_ASYNC) == 0 });
    pair.b.receive(incoming, 1).unwrap();
    pair.a.send(outgoing, 2).unwrap();
    let Pair {
        a, b, cq, domain, ..
    } = pair;
    std::mem::forget(a);
    drop(cq);
    std::mem::forget(domain);
    assert_eq!(mapped(), [true, true]);
    // What was in flight on the one that was dropped goes with it, and on the
    // forgotten one it stays.
    drop(b);
    assert_eq!(mapped(), [false, true]);
    // The device is none the worse for it.
    let mut pair = Pair::new(Transport::Reliable);
    let incoming = pair.buffer(64);
    pair.b.receive(incoming, 1).unwrap();
    pair.a.send(Inline(b"after"), 2).unwrap();
    let mut done = pair.wait(2);
    assert_eq!(&done[0].take_buffer().unwrap()[..], b"after");
}

/// The kernel copies pinned pages for the child of a fork. Else the parent would
/// get a copy, by writing next to a buffer in flight, and the message would come
/// to where it was before.
#[test]
fn fork_leaves_registered_memory_to_the_device() {
    let mut pair = Pair::new(Transport::Reliable);
    let mut incoming = pair.buffer(4096);
    let mut same_page = incoming.split_off(64);
    same_page.fill(1);
    pair.b.receive(incoming, 1).unwrap();
    // SAFETY: the child waits for its end, by system calls alone.
    let child = unsafe {
        match libc::fork() {
            0 => loop {
                libc::pause();
            },
            child => child,
        }
    };
    assert!(child > 0);
    same_page.fill(2);
    pair.a.send(Inline(b"for the parent"), 2).unwrap();
    let mut done = pair.wait(2);
    let buffer = done[0].take_buffer();
    // SAFETY: our own child, which nobody else waits for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(&buffer.unwrap()[..], b"for the parent");
    assert!(same_page.iter().all(|&byte| byte == 2));
}

#[test]
fn errors_name_the_limit() {
    let context = context();
    let device = context.query_device().unwrap();
    let too_many = device.max_cqe + 1;
    let error = context.completion_queue().entries(too_many).build();
    assert!(matches!(
        error.unwrap_err(),
        Error::Limit { asked, allowed, .. }
            if asked == u64::from(too_many) && allowed == u64::from(device.max_cqe)
    ));
    let vectors = context.num_comp_vectors();
    let error = context.completion_queue().comp_vector(vectors).build();
    assert!(matches!(error.unwrap_err(), Error::Limit { .. }));
    let domain = context.alloc_pd().unwrap();
    let cq = context.completion_queue().build().unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    // A ConnectX holds more than it says if they are short.
    let error = builder.send_depth(device.max_qp_wr * 64).build();
    assert!(matches!(error.unwrap_err(), Error::Limit { .. }));
    let builder = domain.shared_receive_queue();
    let error = builder.depth(device.max_srq_wr + 1).build();
    assert!(matches!(error.unwrap_err(), Error::Limit { .. }));
    println!("{:?}", context.query_port(1).unwrap());
    if context.device().is_some() {
        assert_eq!(context.pkey(1, 0).unwrap(), 0xffff);
    }
    let local = context.local_address(1).unwrap();
    assert_eq!(context.gid(1, local.gid_index).unwrap(), local.gid);
}
