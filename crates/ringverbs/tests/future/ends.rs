//! Futures that are forgotten, moved, polled by several threads, or outlive their
//! queue pair, driver or runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Wake, Waker};

use embedded::{Drive, Network};
use ringverbs::completion::ReadError;
use ringverbs::future::{
    AsyncCompletionQueue, AsyncQueuePair, Cause, Driver, Operation, Readable, Receive,
};
use ringverbs::{AccessFlags, Buffer, Device, Inline, WorkRequest};

use crate::{Bench, Pair, Woken, block_on, poll_once, runtime, until};

/// Memory that is in flight stays registered, whatever becomes of its future; and
/// is released when it has ended.
#[test]
fn dropped_and_forgotten_futures_free_nothing_in_flight() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    // In flight for as long as the peer has no receive.
    drop(a.send(bench.filled(b"dropped")));
    let mut polled = a.send(bench.filled(b"polled"));
    assert!(poll_once(&mut polled).is_pending());
    drop(polled);
    std::mem::forget(a.send(bench.filled(b"forgotten")));
    assert_eq!(a.in_flight().unwrap().0, 3);
    for text in ["dropped", "polled", "forgotten"] {
        let message = block_on(b.receive(bench.buffer(16))).unwrap();
        assert_eq!(&message.data[..], text.as_bytes());
    }
    until(|| a.in_flight().unwrap().0 == 0);
    // The slots of those that were dropped are used again, and all goes on.
    for _ in 0..100 {
        let receive = b.receive(bench.buffer(16));
        block_on(a.send(bench.filled(b"again"))).unwrap();
        block_on(receive).unwrap();
    }
    // A forgotten receive takes its message along; the next one gets the next.
    std::mem::forget(b.receive(bench.buffer(16)));
    let next = b.receive(bench.buffer(16));
    block_on(a.send(bench.filled(b"gone"))).unwrap();
    block_on(a.send(bench.filled(b"next"))).unwrap();
    assert_eq!(&block_on(next).unwrap().data[..], b"next");
}

/// The device's memory ranges tell when memory is released. A driver thread counts an
/// operation as ended before it releases the memory, so releases are waited for.
#[test]
fn memory_is_released_when_its_operation_has_ended() {
    let network = Network::new(Drive::Thread).unwrap();
    let device = network.device("roce").unwrap();
    let embedded = device.clone();
    let context = Device::from(device).open().unwrap();
    let bench = Bench::on(&context);
    let cq = bench.driven();
    let until_ranges = |count| until(|| embedded.ranges() == count);
    // The ranges of a queue pair's own queues.
    let (idle, peer) = bench.pair(&cq);
    let with_queues = embedded.ranges();
    drop(idle);
    let queues = with_queues - embedded.ranges();
    assert!(queues > 0);
    drop(peer);
    let (a, b) = bench.pair(&cq);
    let before = embedded.ranges();
    drop(a.send(bench.filled(b"dropped")));
    drop(a.send(bench.filled(b"never sent")));
    let kept = a.send(bench.filled(b"kept"));
    assert_eq!(embedded.ranges(), before + 3);
    let message = block_on(b.receive(bench.buffer(16))).unwrap();
    assert_eq!(&message.data[..], b"dropped");
    until_ranges(before + 3);
    drop(message);
    until_ranges(before + 2);
    // The queue pair releases its queues and the memory of the operation that nobody
    // waits for, but not what a future will return.
    drop(a);
    until_ranges(before - queues + 1);
    let error = block_on(kept).unwrap_err();
    assert_eq!(&error.data.as_ref().unwrap()[..], b"kept");
    assert_eq!(embedded.ranges(), before - queues + 1);
    drop(error);
    assert_eq!(embedded.ranges(), before - queues);
    drop(b);
    until_ranges(before - 2 * queues);
}

/// The futures of a queue pair that is dropped return the memory.
#[test]
fn futures_outlive_their_queue_pair() {
    let bench = Bench::new();
    let cq = bench.driven();
    let (a, b) = bench.pair(&cq);
    let done = b.receive(bench.buffer(16));
    block_on(a.send(bench.filled(b"done"))).unwrap();
    let mut sends = Vec::new();
    while sends.last().is_none_or(Operation::is_posted) {
        sends.push(a.send(bench.filled(b"in flight")));
    }
    let mut waiting = sends.pop().unwrap();
    assert!(poll_once(&mut waiting).is_pending());
    let receive = a.receive(bench.buffer(16));
    let message = a.message::<Vec<Buffer>>();
    let room = a.room();
    drop((a, b));
    assert_eq!(&block_on(done).unwrap().data[..], b"done");
    for send in sends {
        let error = block_on(send).unwrap_err();
        assert!(matches!(error.cause, Cause::Closed | Cause::Failed(_)));
        assert_eq!(&error.data.unwrap()[..], b"in flight");
    }
    let error = block_on(waiting).unwrap_err();
    assert!(matches!(error.cause, Cause::Closed));
    assert_eq!(&error.data.unwrap()[..], b"in flight");
    let error = block_on(receive).unwrap_err();
    assert!(matches!(error.cause, Cause::Closed));
    assert_eq!(error.data.unwrap().capacity(), 16);
    assert!(matches!(
        block_on(message).unwrap_err().cause,
        Cause::Closed
    ));
    assert!(matches!(block_on(room), Err(Cause::Closed)));
}

/// Two queue pairs exchange their places, and their futures stay who they are.
#[test]
fn swapped_futures_and_queue_pairs() {
    let bench = Bench::new();
    let cq = bench.driven();
    let (mut a, b) = bench.pair(&cq);
    let (mut c, d) = bench.pair(&cq);
    let mut at_b = b.receive(bench.buffer(8));
    let mut at_d = d.receive(bench.buffer(8));
    std::mem::swap(&mut a, &mut c);
    std::mem::swap(&mut at_b, &mut at_d);
    let mut to_d = a.send(bench.filled(b"to d"));
    let mut to_b = c.send(bench.filled(b"to b"));
    std::mem::swap(&mut to_b, &mut to_d);
    assert_eq!(&block_on(to_b).unwrap()[..], b"to d");
    assert_eq!(&block_on(to_d).unwrap()[..], b"to b");
    assert_eq!(&block_on(at_b).unwrap().data[..], b"to d");
    assert_eq!(&block_on(at_d).unwrap().data[..], b"to b");
}

/// A future is polled by one thread after another, with other wakers: the last one
/// is woken.
#[test]
fn a_future_moves_between_threads() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    for round in 0..200_u64 {
        let mut receive = b.receive(bench.buffer(8));
        assert!(poll_once(&mut receive).is_pending());
        let receive = std::thread::scope(|scope| {
            let polled = scope.spawn(|| {
                let mut receive = receive;
                assert!(poll_once(&mut receive).is_pending());
                receive
            });
            polled.join().unwrap()
        });
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| block_on(receive).unwrap());
            let text = round.to_ne_bytes();
            block_on(a.post_inline(WorkRequest::send(Inline(&text)))).unwrap();
            assert_eq!(waits.join().unwrap().data[..], text);
        });
    }
}

/// One future, behind a lock, polled by several threads.
#[test]
fn several_threads_poll_one_future() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let region = bench.domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE);
    let key = region.unwrap().key();
    drop(b);
    let (c, _d) = bench.pair(&bench.driven());
    drop(a);
    for _ in 0..100 {
        let ready = AtomicBool::new(false);
        let one = Mutex::new(c.write(bench.filled(b"shared"), key));
        let found = std::thread::scope(|scope| {
            let poll = || {
                let mut found = 0;
                while !ready.load(Ordering::Relaxed) {
                    let mut future = one.lock().unwrap();
                    if ready.load(Ordering::Relaxed) {
                        break;
                    }
                    if let Poll::Ready(result) = poll_once(&mut *future) {
                        ready.store(true, Ordering::Relaxed);
                        // The region is gone: what counts is the buffer.
                        let data = match result {
                            Ok(data) => data,
                            Err(error) => error.data.unwrap(),
                        };
                        assert_eq!(&data[..], b"shared");
                        found += 1;
                    }
                }
                found
            };
            let threads = [scope.spawn(poll), scope.spawn(poll), scope.spawn(poll)];
            threads
                .map(|thread| thread.join().unwrap())
                .iter()
                .sum::<i32>()
        });
        assert_eq!(found, 1);
    }
}

/// A runtime is shut down with operations in flight: they go on, and another
/// executor ends them.
#[test]
fn operations_outlive_their_runtime() {
    let bench = Bench::new();
    let first = runtime();
    let (pair, receive, send) = first.block_on(async {
        let queue = bench.domain.context().completion_queue().entries(64);
        let cq = AsyncCompletionQueue::spawn(queue).unwrap();
        let (a, b) = bench.pair(&cq);
        // Of a task that is dropped with its runtime.
        let lost = b.receive(bench.buffer(16));
        tokio::spawn(async move { lost.await.map(drop) });
        tokio::task::yield_now().await;
        let mut receive = b.receive(bench.buffer(16));
        let mut send = a.send(bench.filled(b"first"));
        assert!(poll_once(&mut receive).is_pending());
        let _ = poll_once(&mut send).is_pending();
        ((a, b), receive, send)
    });
    drop(first);
    let (a, b): Pair = pair;
    // Its claim went with its task: the message is for the next one.
    assert_eq!(&block_on(receive).unwrap().data[..], b"first");
    drop(send);
    block_on(a.send(bench.filled(b"second"))).unwrap();
    assert_eq!(
        &block_on(b.message::<Buffer>()).unwrap().data[..],
        b"second"
    );
}

/// A descriptor that the executor never reports as readable.
struct NeverReadable;

impl Readable for NeverReadable {
    fn poll_readable(&mut self, _: &mut Task<'_>) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

/// When a driver is dropped, waiting tasks are woken and then polled repeatedly.
#[test]
fn tasks_are_woken_when_their_driver_is_dropped() {
    let bench = Bench::new();
    let (cq, driver) = bench.queue();
    let runtime = runtime();
    let (a, b) = bench.pair(&cq);
    let mut driving = Box::pin(driver.run(NeverReadable));
    assert!(poll_once(&mut driving).is_pending());
    std::thread::scope(|scope| {
        let receive = b.receive(bench.buffer(16));
        let waits = scope.spawn(|| block_on(receive).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        runtime.block_on(async { drop(driving) });
        // No other task polls for completions.
        drop(a.send(bench.filled(b"after")));
        assert_eq!(&waits.join().unwrap().data[..], b"after");
    });
}

/// A waker that drops futures and a queue pair when it is woken or dropped. It must not run
/// under a lock.
struct HoldingWaker(Mutex<Option<HeldObjects>>);

type HeldObjects = (
    Option<(Operation<Buffer>, Receive<Buffer>)>,
    Option<(Arc<AsyncQueuePair>, AsyncCompletionQueue)>,
);

impl Wake for HoldingWaker {
    fn wake(self: Arc<Self>) {
        let held = self.0.lock().unwrap().take();
        if let Some((_, Some((qp, _)))) = &held {
            let _ = qp.failure();
        }
        drop(held);
    }
}

#[test]
fn wakers_may_drop_futures_and_queue_pairs() {
    let bench = Bench::new();
    for how in 0..16 {
        // With a driver that is told of nothing, futures find all completions.
        let (cq, driver) = bench.queue();
        let (driver, idle) = match how & 1 {
            0 => {
                let thread = std::thread::spawn(|| driver.run_blocking());
                bench.until_driven(&cq);
                (Some(thread), None)
            }
            _ => {
                let mut driving = Box::pin(driver.run(NeverReadable));
                assert!(poll_once(&mut driving).is_pending());
                (None, Some(driving))
            }
        };
        let (a, b) = bench.pair(&cq);
        let (a, b) = (Arc::new(a), Arc::new(b));
        let held = match how & 2 {
            0 => {
                let futures = (b.send(bench.filled(b"y")), b.receive(bench.buffer(8)));
                (Some(futures), None)
            }
            _ => (None, Some((Arc::clone(&b), cq.clone()))),
        };
        let holds = Waker::from(Arc::new(HoldingWaker(Mutex::new(Some(held)))));
        let mut task = Task::from_waker(&holds);
        // Waits for a message, or for its operation, or for room.
        let mut receive = b.receive(bench.buffer(8));
        let mut send = b.send(bench.filled(b"z"));
        let is_receive = how & 4 == 0;
        let polled = match is_receive {
            true => Pin::new(&mut receive).poll(&mut task).map(drop),
            false => Pin::new(&mut send).poll(&mut task).map(drop),
        };
        assert!(polled.is_pending());
        drop(holds);
        drop(b);
        match how & 8 {
            // Replaced by another waker, and dropped with what it holds.
            0 if is_receive => drop(poll_once(&mut receive)),
            0 => drop(poll_once(&mut send)),
            // Woken, by the driver or by a future of the peer's.
            _ => {
                for _ in 0..2 {
                    a.post_receive(bench.buffer(8)).unwrap();
                    a.post_unsignaled(WorkRequest::send(Inline(b"x"))).unwrap();
                }
                let mut message = a.message::<Buffer>();
                let end = std::time::Instant::now() + std::time::Duration::from_millis(20);
                while std::time::Instant::now() < end {
                    if driver.is_none() {
                        let _ = poll_once(&mut message);
                    }
                    std::thread::yield_now();
                }
            }
        }
        drop((a, cq));
        let _ = (poll_once(&mut receive), poll_once(&mut send));
        drop((receive, send, idle));
        if let Some(driver) = driver {
            until(|| driver.is_finished());
            driver.join().unwrap().unwrap();
        }
    }
}

/// Of two tasks that wait, the first one is woken and gives up: the message is the
/// second one's, which is woken.
#[test]
fn withdrawn_claim_wakes_the_next_task() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let wakes = [(); 3].map(|()| Arc::new(Woken::default()));
    let mut receives = [(); 3].map(|()| Some(b.receive(bench.buffer(8))));
    for (receive, woken) in receives.iter_mut().flatten().zip(&wakes) {
        let waker = Waker::from(Arc::clone(woken));
        let polled = Pin::new(receive).poll(&mut Task::from_waker(&waker));
        assert!(polled.is_pending());
    }
    let woken = || [0, 1, 2].map(|at| wakes[at].count());
    a.post_unsignaled(WorkRequest::send(Inline(b"x"))).unwrap();
    until(|| woken() == [1, 0, 0]);
    // One that was not next leaves nothing.
    receives[1] = None;
    assert_eq!(woken(), [1, 0, 0]);
    receives[0] = None;
    assert_eq!(woken(), [1, 0, 1]);
    let Poll::Ready(Ok(message)) = poll_once(receives[2].as_mut().unwrap()) else {
        panic!("it is this one's");
    };
    assert_eq!(&message.data[..], b"x");
}

/// Another queue pair completes in the same queue, with all tokens that a future
/// could have.
#[test]
fn completions_of_other_queue_pairs_reach_no_future() {
    let bench = Bench::new();
    let cq = bench.driven();
    let (a, b) = bench.pair(&cq);
    let mut receive = b.receive(bench.buffer(8));
    // In flight until there is a receive.
    std::mem::forget(b.receive(bench.buffer(8)));
    let mut send = a.send(bench.filled(b"mine"));
    block_on(a.send(bench.filled(b"also"))).unwrap();
    let _ = block_on(&mut receive).unwrap();
    assert_eq!(&block_on(&mut send).unwrap()[..], b"mine");
    let mut send = a.send(bench.filled(b"mine"));
    let (mut c, mut d) = (bench.queue_pair(&cq), bench.queue_pair(&cq));
    let (at_c, at_d) = (c.endpoint(&bench.local), d.endpoint(&bench.local));
    c.connect(&bench.local, &at_d).unwrap();
    d.connect(&bench.local, &at_c).unwrap();
    for token in (0..16).flat_map(|slot| (0..4).map(move |place| place << 32 | slot)) {
        d.receive(bench.filled(b"theirs"), token).unwrap();
        let theirs = WorkRequest::send(Inline(b"x"));
        c.post(theirs.token(token)).unwrap();
        until(|| c.in_flight().0 == 0 && d.in_flight().1 == 0);
    }
    assert!(poll_once(&mut send).is_pending());
    let mut message = b.message::<Buffer>();
    assert!(poll_once(&mut message).is_pending());
    b.post_receive(bench.buffer(8)).unwrap();
    assert_eq!(&block_on(message).unwrap().data[..], b"mine");
    assert_eq!(&block_on(send).unwrap()[..], b"mine");
}

/// Completions are lost: no future waits for ever, without a driver, with one, or with
/// one that begins when a task has already found the overrun; nor does the driver.
#[test]
fn an_overrun_ends_all_futures() {
    let bench = Bench::new();
    for (driven, late) in [(false, false), (true, false), (true, true)] {
        let queue = || bench.domain.context().completion_queue().entries(4);
        let (cq, driver) = match driven {
            true => AsyncCompletionQueue::new(queue()).map(|(cq, driver)| (cq, Some(driver))),
            false => AsyncCompletionQueue::polled(queue()).map(|cq| (cq, None)),
        }
        .unwrap();
        let (a, b) = bench.pair(&cq);
        let region = bench.domain.alloc_remote(64, AccessFlags::REMOTE_WRITE);
        let region = region.unwrap();
        let receive = b.receive(bench.buffer(8));
        let write = || a.write(bench.filled(b"x"), region.key());
        let writes: Vec<_> = (0..16).map(|_| write()).collect();
        assert!(writes.iter().all(Operation::is_posted));
        // They complete while nobody looks.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let run = |driver: Driver| std::thread::spawn(|| driver.run_blocking());
        let (driver, thread) = match late {
            true => (driver, None),
            false => (None, driver.map(run)),
        };
        let mut lost = 0;
        for write in writes {
            match block_on(write) {
                Ok(data) => assert_eq!(&data[..], b"x"),
                Err(error) => {
                    assert!(matches!(error.cause, Cause::Queue(_)), "{error}");
                    lost += 1;
                }
            }
        }
        assert!((1..16).contains(&lost), "{lost}");
        let error = block_on(receive).unwrap_err();
        assert!(matches!(error.cause, Cause::Queue(_)), "{error}");
        let thread = thread.or(driver.map(run));
        // What is called afterwards fails at once, with its memory.
        let error = block_on(write()).unwrap_err();
        assert_eq!(&error.data.unwrap()[..], b"x");
        assert!(b.post_receive(bench.buffer(8)).is_err());
        assert!(block_on(b.message::<Buffer>()).is_err());
        if let Some(thread) = thread {
            until(|| thread.is_finished());
            let error = thread.join().unwrap().unwrap_err();
            assert!(matches!(*error, ReadError::Overrun), "{error}");
        }
    }
}
