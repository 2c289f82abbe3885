//! Sequences that are too long to be met by chance.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use embedded::{Drive, Embedded, Network};
use ringverbs::qp::{QpAttr, QpAttrMask, State};
use ringverbs::raw::{SendRequest, WindowBind};
use ringverbs::{
    AccessFlags, BufferPool, CompletionQueue, Context, Device, Error, Inline, LocalAddress,
    Operation, ProtectionDomain, QueuePair, RemoteAddr, SharedCompletionQueue, Status, Transport,
    WindowType, WorkRequest,
};

use testing::PanickingSubscriber;

use crate::steps::again;

struct Setup {
    device: Embedded,
    context: Context,
    local: LocalAddress,
    domain: ProtectionDomain,
    cq: CompletionQueue,
}

impl Setup {
    fn new() -> Self {
        Self::on(Network::new(Drive::Caller).unwrap().device("roce").unwrap())
    }

    fn on(device: Embedded) -> Self {
        let context = Device::from(device.clone()).open().unwrap();
        let local = context.local_address(1).unwrap();
        let domain = context.alloc_pd().unwrap();
        let cq = context.completion_queue().entries(128).build().unwrap();
        Self {
            device,
            context,
            local,
            domain,
            cq,
        }
    }

    fn drive(&self) {
        for _ in 0..64 {
            self.device.drive();
        }
    }

    fn pair(&self) -> QueuePair {
        let builder = self.domain.queue_pair(Transport::Reliable, &self.cq);
        builder.memory_windows().inline(64).build().unwrap()
    }

    fn connected(&self) -> (QueuePair, QueuePair) {
        let (mut a, mut b) = (self.pair(), self.pair());
        let (at_a, at_b) = (a.endpoint(&self.local), b.endpoint(&self.local));
        a.connect(&self.local, &at_b).unwrap();
        b.connect(&self.local, &at_a).unwrap();
        (a, b)
    }
}

#[test]
fn a_failed_bind_that_the_raw_layer_has_seen() {
    let mut place = Setup::new();
    let (mut a, mut b) = place.connected();
    let (mut broken, _) = place.connected();
    let first = place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap();
    let second = place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap();
    let window = place.domain.memory_window(WindowType::One).unwrap();
    let access = AccessFlags::REMOTE_WRITE;
    let whole = first.slice(..).unwrap();
    let at = first.key();
    b.post(WorkRequest::bind(&window, whole, access)).unwrap();
    place.drive();
    place.cq.poll_one().unwrap().unwrap().result.unwrap();
    let key = window.rkey();
    // This bind fails, which nobody hears of but the raw layer.
    broken.set_error().unwrap();
    let whole = second.slice(..).unwrap();
    broken
        .post(WorkRequest::bind(&window, whole, access))
        .unwrap();
    broken.post(WorkRequest::send(Inline(b"next"))).unwrap();
    place.drive();
    assert_eq!(place.cq.poll_raw(1, |_| ()), 1);
    drop(place.cq.poll_one().unwrap().unwrap());
    let Err(refused) = first.close() else {
        // Shows the effect of a stray write.
        let mut mine = again(&place.domain, at.addr, at.rkey).expect("address and key come again");
        mine.fill(7);
        a.post(WorkRequest::write(
            Inline(b"stray"),
            RemoteAddr::new(at.addr, key),
        ))
        .unwrap();
        place.drive();
        let done = place.cq.poll_one().unwrap().unwrap();
        let begin = &mine[..8];
        panic!("a region was closed that a window is bound to: {done:?}, {begin:?}");
    };
    let (_, error) = refused.into_parts();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
}

#[test]
fn a_bind_in_the_closure_of_a_batch_that_is_abandoned() {
    let mut place = Setup::new();
    let (mut a, mut b) = place.connected();
    let (mut other, _peer) = place.connected();
    let regions: Vec<_> = (0..3)
        .map(|_| place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap())
        .collect();
    let window = place.domain.memory_window(WindowType::One).unwrap();
    let access = AccessFlags::REMOTE_WRITE;
    let bind = |n: usize| WorkRequest::bind(&window, regions[n].slice(..).unwrap(), access);
    let _ = b.batch(|batch| {
        batch.post(bind(0)).unwrap();
        let refused = other.post(bind(1)).unwrap_err();
        assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
        Err::<(), _>(())
    });
    other.post(bind(1)).unwrap();
    place.drive();
    place.cq.poll_one().unwrap().unwrap().result.unwrap();
    let said = window.rkey();
    let write = |place: &mut Setup, a: &mut QueuePair, rkey: u32, n: usize| {
        let at = RemoteAddr::new(regions[n].key().addr, rkey);
        a.post(WorkRequest::write(Inline(b"x"), at)).unwrap();
        place.drive();
        place.cq.poll_one().unwrap().unwrap().result
    };
    let first = write(&mut place, &mut a, said, 1);
    assert!(first.is_ok(), "with the window's key {said:#x}: {first:?}");
}

/// Completions go with the queue pair; closing the shared queue gives the buffer back.
#[test]
fn a_completion_of_a_shared_queue_that_was_closed() {
    let mut place = Setup::new();
    let mut srq = place
        .domain
        .shared_receive_queue()
        .depth(7)
        .build()
        .unwrap();
    let builder = place.domain.queue_pair(Transport::Reliable, &place.cq);
    let mut b = builder.srq(&srq).build().unwrap();
    let other = place
        .context
        .completion_queue()
        .entries(16)
        .build()
        .unwrap();
    let builder = place.domain.queue_pair(Transport::Reliable, &other);
    let mut a = builder.inline(16).build().unwrap();
    let (at_a, at_b) = (a.endpoint(&place.local), b.endpoint(&place.local));
    a.connect(&place.local, &at_b).unwrap();
    b.connect(&place.local, &at_a).unwrap();
    for token in 0..2 {
        let buffer = place.domain.alloc(1).unwrap().into_buffer();
        srq.receive(buffer, token).unwrap();
        a.post(WorkRequest::send(Inline(b"x"))).unwrap();
        place.drive();
        if token == 0 {
            place.cq.poll_one().unwrap().unwrap().result.unwrap();
        }
    }
    drop(b);
    let released = srq.close().unwrap();
    let tokens: Vec<_> = released.iter().map(|released| released.token).collect();
    assert_eq!(tokens, [1]);
    let left = place.cq.poll_one().unwrap();
    assert!(left.is_none(), "{left:?}");
}

/// A receive without bytes, in the middle of a region.
#[test]
fn empty_receive_gets_no_data() {
    let mut place = Setup::new();
    let (mut a, mut b) = place.connected();
    let mut rest = place.domain.alloc(1).unwrap().into_buffer();
    rest.fill(7);
    let nothing = rest.split_to(0);
    b.receive(nothing, 1).unwrap();
    a.post(WorkRequest::send(Inline(b"stray"))).unwrap();
    place.drive();
    for (token, operation, status) in [
        (1, Operation::Receive, Status::LOC_LEN_ERR),
        (0, Operation::Send, Status::REM_INV_REQ_ERR),
    ] {
        let done = place.cq.poll_one().unwrap().unwrap();
        let found = (done.token, done.operation, done.status());
        assert_eq!(found, (token, operation, status), "{done:?}");
    }
    assert!(place.cq.poll_one().unwrap().is_none());
    assert!(rest.iter().all(|byte| *byte == 7));
}

/// Of another domain than window and queue pair.
#[test]
fn a_window_is_bound_to_a_region_of_another_domain() {
    let mut place = Setup::new();
    let (_a, mut b) = place.connected();
    let elsewhere = place.context.alloc_pd().unwrap();
    let region = elsewhere.alloc_remote(1, AccessFlags::MW_BIND).unwrap();
    let window = place.domain.memory_window(WindowType::One).unwrap();
    let whole = region.slice(..).unwrap();
    let posted = b.post(WorkRequest::bind(&window, whole, AccessFlags::REMOTE_WRITE));
    let refused = posted.unwrap_err();
    assert!(
        matches!(refused.error, Error::WrongDomain { .. }),
        "{refused}"
    );
    place.drive();
    assert!(place.cq.poll_one().unwrap().is_none());
}

/// What a region's rights do not have, a window on it has not.
#[test]
fn a_window_is_bound_to_a_region_without_the_right() {
    let mut place = Setup::new();
    let (_a, mut b) = place.connected();
    let region = place.domain.alloc_remote(1, AccessFlags::empty()).unwrap();
    let window = place.domain.memory_window(WindowType::One).unwrap();
    let whole = region.slice(..).unwrap();
    let posted = b.post(WorkRequest::bind(&window, whole, AccessFlags::REMOTE_WRITE));
    let refused = posted.unwrap_err();
    assert!(matches!(refused.error, Error::Invalid { .. }), "{refused}");
    place.drive();
    assert!(place.cq.poll_one().unwrap().is_none());
}

#[test]
fn a_raw_bind_that_was_not_published() {
    let mut place = Setup::new();
    let (mut a, mut b) = place.connected();
    let first = place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap();
    let second = place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap();
    let window = place.domain.memory_window(WindowType::One).unwrap();
    let access = AccessFlags::REMOTE_WRITE;
    let at = first.key();
    b.post(WorkRequest::bind(&window, first.slice(..).unwrap(), access))
        .unwrap();
    place.drive();
    place.cq.poll_one().unwrap().unwrap().result.unwrap();
    let key = window.rkey();
    let bind = WindowBind::new(&window, &second.slice(..).unwrap(), access).unwrap();
    let request = SendRequest::bind_window(1, &bind);
    b.raw_send().push(&request).unwrap();
    drop(bind);
    // The window is bound to the first region, and may be to the second.
    for region in [first, second] {
        let (_, error) = region.close().unwrap_err().into_parts();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
    }
    let to = RemoteAddr::new(at.addr, key);
    a.post(WorkRequest::write(Inline(b"stray"), to)).unwrap();
    place.drive();
    place.cq.poll_one().unwrap().unwrap().result.unwrap();
}

#[test]
fn a_window_bound_on_two_queue_pairs_at_once() {
    for swap in [false, true] {
        let mut place = Setup::new();
        let (_a, mut b) = place.connected();
        let (mut c, _d) = place.connected();
        let regions: Vec<_> = (0..2)
            .map(|_| place.domain.alloc_remote(1, AccessFlags::MW_BIND).unwrap())
            .collect();
        let window = place.domain.memory_window(WindowType::One).unwrap();
        let access = AccessFlags::REMOTE_WRITE;
        let (one, other) = if swap {
            (&mut c, &mut b)
        } else {
            (&mut b, &mut c)
        };
        let bind = |n: usize| {
            let slice = regions[n].slice(..).unwrap();
            WorkRequest::bind(&window, slice, access).token(n as u64)
        };
        one.post(bind(0)).unwrap();
        let refused = other.post(bind(1)).unwrap_err();
        assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
        drop(refused);
        place.drive();
        // Until its completion was read.
        drop(other.post(bind(1)).unwrap_err());
        place.cq.poll_one().unwrap().unwrap().result.unwrap();
        other.post(bind(1)).unwrap();
        place.drive();
        place.cq.poll_one().unwrap().unwrap().result.unwrap();
        let [first, second] = regions.try_into().unwrap();
        first.close().unwrap();
        let (_, error) = second.close().unwrap_err().into_parts();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
    }
}

/// The answer of a read, and the message for a receive, are under way while
/// their queue pairs fail, give the memory back, and are connected again.
#[test]
fn packets_of_a_former_connection() {
    for turns in 0..12 {
        let mut place = Setup::new();
        let (mut a, mut b) = place.connected();
        let region = place.domain.alloc_remote(1, AccessFlags::REMOTE_READ);
        let region = region.unwrap();
        region.write_at(0, &[1; 4096]).unwrap();
        let ours = || place.domain.alloc(4096).unwrap().into_buffer();
        b.receive(ours(), 0).unwrap();
        a.read(ours(), region.key(), 1).unwrap();
        a.send(ours(), 2).unwrap();
        a.post(WorkRequest::fetch_add(ours(), region.key(), 1).token(3))
            .unwrap();
        for _ in 0..turns {
            place.device.drive();
        }
        let ends = [a.endpoint(&place.local), b.endpoint(&place.local)];
        for qp in [&mut a, &mut b] {
            qp.set_error().unwrap();
        }
        let mut back = Vec::new();
        while back.len() < 4 {
            place.device.drive();
            while let Some(mut done) = place.cq.poll_one().unwrap() {
                let mut buffer = done.take_buffer().unwrap();
                buffer.fill_up();
                buffer.fill(7);
                back.push(buffer);
            }
        }
        for (qp, peer) in [(&mut a, &ends[1]), (&mut b, &ends[0])] {
            let reset = QpAttr {
                qp_state: State::RESET,
                ..QpAttr::default()
            };
            qp.modify(&reset, QpAttrMask::STATE).unwrap();
            qp.connect(&place.local, peer).unwrap();
        }
        place.drive();
        assert!(place.cq.poll_one().unwrap().is_none());
        for buffer in &back {
            assert!(buffer.iter().all(|byte| *byte == 7), "after {turns} turns");
        }
    }
}

/// A closure under which completions are read drives the device, destroys the
/// queue pair that they are of, and panics.
#[test]
fn a_closure_that_destroys_and_panics() {
    let mut place = Setup::new();
    let (mut a, mut b) = place.connected();
    for token in 0..4 {
        let buffer = place.domain.alloc(64).unwrap().into_buffer();
        b.receive(buffer, token).unwrap();
        let buffer = place.domain.alloc(64).unwrap().into_buffer();
        a.send(buffer, 4 + token).unwrap();
    }
    for _ in 0..2 {
        place.device.drive();
    }
    let device = place.device.clone();
    let mut gone = Some(b);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        place.cq.poll_raw(8, |entry| {
            drop(gone.take());
            for _ in 0..64 {
                device.drive();
            }
            assert!(!entry.status().is_success(), "in the middle");
        })
    }));
    assert!(panicked.is_err() && gone.is_none());
    // Each operation is read once, by the safe layer.
    a.set_error().unwrap();
    let mut tokens = Vec::new();
    // A poll that finds only what is of the queue pair that is gone gives
    // nothing.
    for _ in 0..8 {
        place.drive();
        while let Some(mut done) = place.cq.poll_one().unwrap() {
            tokens.push(done.token);
            assert_eq!(done.take_buffer().unwrap().capacity(), 4096);
        }
    }
    tokens.retain(|token| *token >= 4);
    assert_eq!(tokens, [4, 5, 6, 7]);
    // Those of a queue pair that is drained are its caller's, also if the
    // closure for the others panics.
    let (mut c, mut d) = place.connected();
    let pool = BufferPool::new(&place.domain, &[(4096, 1)]).unwrap();
    let mut victim = pool.get(4096).unwrap();
    victim.fill(7);
    let addr = victim.as_ptr().addr();
    d.receive(victim, 1).unwrap();
    c.send(Inline(b"stray"), 2).unwrap();
    let (mut e, _f) = place.connected();
    e.set_error().unwrap();
    e.send(Inline(b"other"), 3).unwrap();
    let thread = std::thread::spawn({
        let device = place.device.clone();
        move || {
            for _ in 0..200 {
                device.drive();
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    });
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let time = Duration::from_secs(5);
        let drained = d.drain(&mut place.cq, None, time, |_| panic!("of another"));
        drained.is_ok()
    }));
    thread.join().unwrap();
    assert!(panicked.is_err());
    // The memory is the program's again.
    let mut mine = pool.get(4096).expect("the pool has it back");
    assert_eq!(mine.as_ptr().addr(), addr);
    mine.fill(7);
    c.send(Inline(b"stray"), 4).unwrap_or_default();
    place.drive();
    assert!(mine.iter().all(|byte| *byte == 7));
}

/// A queue that is lent under a lock is replaced by another one; what belongs to
/// either is given back by the one that it completes on.
#[test]
fn a_shared_queue_that_is_replaced_under_its_lock() {
    let place = Setup::new();
    let queue = || {
        let builder = place.context.completion_queue();
        builder.entries(64).build().unwrap()
    };
    let (one, mut other) = (queue(), queue());
    let pair = |cq: &CompletionQueue| {
        let builder = place.domain.queue_pair(Transport::Reliable, cq);
        builder.build().unwrap()
    };
    let (mut a, mut b) = (pair(&one), pair(&other));
    let (at_a, at_b) = (a.endpoint(&place.local), b.endpoint(&place.local));
    a.connect(&place.local, &at_b).unwrap();
    b.connect(&place.local, &at_a).unwrap();
    let shared = SharedCompletionQueue::new(one);
    b.receive(place.domain.alloc(64).unwrap().into_buffer(), 1)
        .unwrap();
    a.send(place.domain.alloc(64).unwrap().into_buffer(), 2)
        .unwrap();
    place.drive();
    shared.with(|queue| std::mem::swap(queue, &mut other));
    assert_eq!(shared.poll_one().unwrap().unwrap().token, 1);
    assert!(shared.poll_one().unwrap().is_none());
    assert_eq!(other.poll_one().unwrap().unwrap().token, 2);
    b.receive(place.domain.alloc(64).unwrap().into_buffer(), 3)
        .unwrap();
    // The queue that it was made on is under the lock now.
    let b = b.close_and_drain(&mut other, None).unwrap_err();
    let released = shared.with(|queue| {
        let released = b.into_object().close_and_drain(queue, None);
        released.unwrap()
    });
    assert_eq!(released[0].token, 3);
    shared.close().unwrap();
    assert!(a.close_and_drain(&mut other, None).unwrap().is_empty());
    other.close().unwrap();
}

/// A queue pair is connected anew to a peer that was not: the peer takes its
/// requests for repeated ones and acknowledges them, and none is carried out.
#[test]
fn a_connection_that_one_side_alone_begins_anew() {
    let mut place = Setup::new();
    let (mut a, b) = place.connected();
    let region = place
        .domain
        .alloc_remote(1, AccessFlags::REMOTE_WRITE)
        .unwrap();
    let mut behind: Vec<_> = (0..4)
        .map(|_| place.domain.alloc(1).unwrap().into_buffer())
        .collect();
    behind.iter_mut().for_each(|buffer| buffer.fill(7));
    let RemoteAddr { addr, rkey } = region.key();
    let write = |place: &mut Setup, a: &mut QueuePair, to: u64| {
        let at = RemoteAddr::new(to, rkey);
        a.post(WorkRequest::write(Inline(&[1; 16]), at)).unwrap();
        for _ in 0..10_000 {
            place.drive();
            if let Some(done) = place.cq.poll_one().unwrap() {
                return done.status();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no completion in 10 s");
    };
    assert!(write(&mut place, &mut a, addr).is_success());
    a.set_error().unwrap();
    let reset = QpAttr {
        qp_state: State::RESET,
        ..QpAttr::default()
    };
    a.modify(&reset, QpAttrMask::STATE).unwrap();
    let peer = b.endpoint(&place.local);
    a.connect(&place.local, &peer).unwrap();
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(write(&mut place, &mut a, addr + 4096 - 8));
        let mut end = [0; 16];
        region.read_at(4080, &mut end).unwrap();
        assert_eq!(end, [0; 16]);
        let mut bytes = behind.iter().flat_map(|buffer| buffer.iter());
        assert!(bytes.all(|byte| *byte == 7));
    }
    assert!(statuses[0].is_success(), "{statuses:?}");
    assert_eq!(statuses[1], Status::REM_ACCESS_ERR);
}

/// The modules of the device's engine at whose first event subscribers panic.
const ENGINE: &str = "engine::host";

/// The subscriber hears of another queue pair's error while a queue pair is destroyed, whose
/// receives stay posted then.
#[test]
fn a_subscriber_that_panics_in_a_destruction() {
    for _ in 0..20 {
        let device = Network::new(Drive::Thread).unwrap().device("roce").unwrap();
        let place = Setup::on(device);
        let cq = place.context.completion_queue().build().unwrap();
        let builder = place.domain.queue_pair(Transport::Reliable, &cq);
        let (mut a, mut b) = (place.pair(), builder.build().unwrap());
        let (at_a, at_b) = (a.endpoint(&place.local), b.endpoint(&place.local));
        a.connect(&place.local, &at_b).unwrap();
        b.connect(&place.local, &at_a).unwrap();
        let (mut c, _d) = place.connected();
        let pool = BufferPool::new(&place.domain, &[(4096, 4)]).unwrap();
        while let Some(buffer) = pool.get(4096) {
            b.receive(buffer, 1).unwrap();
        }
        let subscriber = PanickingSubscriber::new(ENGINE);
        let _ = catch_unwind(AssertUnwindSafe(|| {
            tracing::subscriber::with_default(subscriber, || {
                // Nothing is there.
                let to = RemoteAddr::new(4096, 7);
                c.post(WorkRequest::write(Inline(b"stray"), to)).unwrap();
                drop(b);
            });
        }));
        drop(cq);
        let mut mine: Vec<_> = std::iter::from_fn(|| pool.get(4096)).collect();
        mine.iter_mut().for_each(|buffer| buffer.fill(7));
        let mut place = place;
        drop(a.post(WorkRequest::send(Inline(b"stray"))));
        drop(place.cq.poll_for(Duration::from_millis(20)));
        assert!(mine.iter().flat_map(|it| it.iter()).all(|byte| *byte == 7));
    }
}

/// The engine stops between a message and its completion: the device fails, so that it does
/// not receive the next message into the same buffer.
#[test]
fn a_subscriber_that_panics_in_a_turn() {
    let place = Setup::new();
    let (mut a, mut b) = place.connected();
    let (mut c, d) = place.connected();
    let pool = BufferPool::new(&place.domain, &[(4096, 4)]).unwrap();
    while let Some(buffer) = pool.get(4096) {
        b.receive(buffer, 1).unwrap();
    }
    let subscriber = PanickingSubscriber::new(ENGINE);
    let to = RemoteAddr::new(4096, 7);
    c.post(WorkRequest::write(Inline(b"stray"), to)).unwrap();
    a.post(WorkRequest::send(Inline(b"message"))).unwrap();
    tracing::subscriber::with_default(subscriber, || {
        catch_unwind(AssertUnwindSafe(|| place.drive())).unwrap_err();
    });
    let error = place.domain.alloc(1).unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "{error}");
    place.drive();
    drop((a, b, c, d));
    assert_eq!(place.device.ranges(), 0);
    let mut mine: Vec<_> = std::iter::from_fn(|| pool.get(4096)).collect();
    assert_eq!(mine.len(), 4);
    mine.iter_mut().for_each(|buffer| buffer.fill(7));
    place.drive();
    assert!(mine.iter().flat_map(|it| it.iter()).all(|byte| *byte == 7));
}
