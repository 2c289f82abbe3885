//! Safe calls that try to have the device, or a peer, reach memory that is the
//! program's.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::raw::{Flags, SendRequest, WindowBind};
use ringverbs::{
    AccessFlags, Buffer, Error, Inline, RemoteAddr, RemoteRegion, Status, Transport, WindowType,
    WorkRequest,
};

use crate::windows::is_rxe;
use crate::{Pair, context, has, wait};

const LENGTH: usize = 64 << 10;
const PATTERN: u8 = 0xee;

fn untouched(buffer: &[u8]) -> bool {
    buffer.iter().all(|byte| *byte == PATTERN)
}

fn owned(pair: &Pair, length: usize) -> Buffer {
    let mut buffer = pair.buffer(length);
    buffer.fill(PATTERN);
    buffer
}

/// The key of memory without remote rights is seen by safe code, and is no key
/// for peers.
#[test]
fn local_key_gives_peers_no_access() {
    for way in 0..3 {
        let mut pair = Pair::new(Transport::Reliable);
        let victim = owned(&pair, 4096);
        let sge = victim.raw_sge();
        let there = RemoteAddr::new(sge.addr, sge.lkey);
        let data = pair.filled(b"HACKED!!");
        let request = match way {
            0 => pair.a.write(data, there, 1),
            1 => pair.a.read(data, there, 1),
            _ => pair.a.post(WorkRequest::fetch_add(data, there, 1).token(1)),
        };
        request.unwrap();
        let mut done = pair.wait_for(1);
        assert_eq!(done.status(), Status::REM_ACCESS_ERR, "{way}");
        assert!(untouched(&victim), "{way}");
        assert_eq!(&done.take_buffer().unwrap()[..], b"HACKED!!");
    }
}

/// A region is closed while a peer writes to it, and its addresses, and perhaps
/// its key, become a buffer's.
#[test]
fn writes_under_way_do_not_outlive_their_region() {
    let access = AccessFlags::REMOTE_WRITE;
    // rdma_rxe of Linux 6.1 carries writes out while they are posted.
    let mut refused = usize::from(is_rxe(&context()));
    for round in 0..40 {
        // All writes take a device several turns, between which it carries out commands;
        // those of a fast device are longer, until one is met.
        let length = match refused {
            0 => (4 * LENGTH) << (round / 8),
            _ => 4 * LENGTH,
        };
        let mut pair = Pair::new(Transport::Reliable);
        let region = pair.domain.alloc_remote(length, access).unwrap();
        let there = region.key();
        for token in 0..8 {
            let data = pair.filled(&vec![1; length]);
            pair.a.write(data, there, token).unwrap();
        }
        thread::sleep(Duration::from_micros(100 * (round % 8)));
        region.close().unwrap();
        let victims: Vec<_> = (0..4).map(|_| owned(&pair, length)).collect();
        for done in pair.wait(8) {
            refused += usize::from(done.result.is_err());
        }
        assert!(victims.iter().all(|buffer| untouched(buffer)), "{round}");
    }
    assert!(refused > 0, "no write met a region that was closed");
}

/// What a queue pair that is destroyed gives back is not written to by messages
/// that are under way.
#[test]
fn receives_under_way_do_not_outlive_their_queue_pair() {
    for round in 0..40 {
        let mut pair = Pair::new(Transport::Reliable);
        for token in 0..8 {
            let buffer = pair.buffer(LENGTH);
            pair.b.receive(buffer, token).unwrap();
        }
        for token in 8..16 {
            let data = pair.filled(&[1; LENGTH]);
            pair.a.send(data, token).unwrap();
        }
        thread::sleep(Duration::from_micros(20 * round));
        let Pair { a, b, mut cq, .. } = pair;
        let released = b.close_and_drain(&mut cq, None).unwrap();
        let mut back: Vec<Buffer> = Vec::new();
        for released in released {
            back.extend(released.payload.into_buffer());
        }
        for buffer in &mut back {
            buffer.fill_up();
            buffer.fill(PATTERN);
        }
        let end = Instant::now() + Duration::from_millis(5);
        while Instant::now() < end {
            // Completions from before: their buffers are not among those.
            drop(cq.poll_one().unwrap());
        }
        assert!(back.iter().all(|buffer| untouched(buffer)), "{round}");
        drop(a);
    }
}

/// Two threads bind one window on two queue pairs: one of them is refused, or
/// comes after the other's completion.
#[test]
fn one_window_is_bound_by_one_thread_at_a_time() {
    let mut pair = Pair::new(Transport::Reliable);
    let region = pair.domain.alloc_remote(4096, AccessFlags::MW_BIND);
    let region = region.unwrap();
    let Some(window) = has(pair.domain.memory_window(WindowType::One)) else {
        return;
    };
    for _ in 0..50 {
        let barrier = Arc::new(Barrier::new(2));
        let posted: u32 = thread::scope(|scope| {
            let threads = [&mut pair.a, &mut pair.b].map(|qp| {
                let (barrier, window, region) = (&barrier, &window, &region);
                scope.spawn(move || {
                    let part = region.slice(..64).unwrap();
                    let bind = WorkRequest::bind(window, part, AccessFlags::REMOTE_READ);
                    barrier.wait();
                    match qp.post(bind) {
                        Ok(()) => 1,
                        Err(refused) => {
                            assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
                            0
                        }
                    }
                })
            });
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        assert_eq!(posted, 1);
        pair.wait_for(0).result.unwrap();
    }
}

/// A window keeps the region that it is bound to after a bind of the raw layer
/// that was not published, and while a bind is refused on another queue pair.
#[test]
fn a_window_keeps_the_region_that_it_leads_to() {
    let mut pair = Pair::new(Transport::Reliable);
    let regions = [0; 2].map(|_| {
        let region = pair.domain.alloc_remote(4096, AccessFlags::MW_BIND);
        region.unwrap()
    });
    let Some(window) = has(pair.domain.memory_window(WindowType::One)) else {
        return;
    };
    let access = AccessFlags::REMOTE_WRITE;
    let busy = |region: RemoteRegion| {
        let (region, error) = region.close().unwrap_err().into_parts();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        region
    };
    let bind = |n: usize| WorkRequest::bind(&window, regions[n].slice(..).unwrap(), access);
    pair.b.post(bind(0).token(1)).unwrap();
    let refused = pair.a.post(bind(1)).unwrap_err();
    assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
    drop(refused);
    pair.wait_for(1).result.unwrap();
    let raw = WindowBind::new(&window, &regions[1].slice(..).unwrap(), access).unwrap();
    let request = SendRequest::bind_window(2, &raw);
    pair.b.raw_send().push(&request).unwrap();
    drop(raw);
    let [first, second] = regions.map(busy);
    let there = RemoteAddr::new(first.key().addr, window.rkey());
    let write = |pair: &mut Pair| {
        let request = WorkRequest::write(Inline(b"through"), there);
        pair.a.post(request.token(3)).unwrap();
        pair.wait_for(3).status()
    };
    assert_eq!(write(&mut pair), Status::SUCCESS);
    let mut bytes = [0; 7];
    first.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"through");
    // Once the other queue pair has bound it elsewhere, it leads there alone.
    let bind = WorkRequest::bind(&window, second.slice(..).unwrap(), access);
    pair.a.post(bind.token(4)).unwrap();
    pair.wait_for(4).result.unwrap();
    first.close().unwrap();
    let second = busy(second);
    assert_eq!(write(&mut pair), Status::REM_ACCESS_ERR);
    window.close().unwrap();
    second.close().unwrap();
}

/// Work requests that were written on the raw layer and not published are not
/// posted by the safe calls behind them.
#[test]
fn unpublished_requests_are_not_posted() {
    let mut pair = Pair::new(Transport::Reliable);
    let (stale, victim) = (pair.filled(b"never"), owned(&pair, 64));
    for _ in 0..100 {
        let mut raw = pair.a.raw_send();
        for id in 0..3 {
            let send = SendRequest::send(id).flags(Flags::SIGNALED);
            raw.push(&send.sges(&[stale.raw_sge()])).unwrap();
        }
        let mut raw = pair.b.raw_receive().unwrap();
        for id in 0..3 {
            raw.push(id, &[victim.raw_sge()]).unwrap();
        }
        let incoming = pair.buffer(64);
        pair.b.receive(incoming, 1).unwrap();
        pair.a.send(Inline(b"hello"), 2).unwrap();
        let mut done = wait(&mut pair.cq, 2);
        assert_eq!(&done[0].take_buffer().unwrap()[..], b"hello");
        assert!(done[1].result.is_ok() && untouched(&victim));
    }
}
