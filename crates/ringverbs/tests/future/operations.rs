//! What each operation returns.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as Task, Waker};

use ringverbs::future::{AsyncBatch, AsyncCompletionQueue, AsyncQueuePair, Cause};
use ringverbs::{
    AccessFlags, BatchError, Error, Inline, RemoteAddr, Status, WindowType, WorkRequest,
};

use crate::{Bench, Pair, Woken, block_on, poll_once, runtime, until};

const ALL: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// One of each, with what it is to have done.
async fn each_operation(bench: &Bench, (a, b): &Pair) {
    let receive = b.receive(bench.buffer(64));
    let sent = a.send(bench.filled(b"hello")).await.unwrap();
    assert_eq!(&sent[..], b"hello");
    let message = receive.await.unwrap();
    assert_eq!(&message.data[..], b"hello");

    let region = bench.domain.alloc_remote(4096, ALL).unwrap();
    let key = region.key();
    let written = a.write(bench.filled(b"written!"), key).await.unwrap();
    let mut there = [0; 8];
    region.read_at(0, &mut there).unwrap();
    assert_eq!(&there, b"written!");
    let read = a.read(bench.buffer(8), key).await.unwrap();
    assert_eq!(read[..], written[..]);

    region.store_u64(8, 40).unwrap();
    let old = a.fetch_add(written, key.offset(8), 2).await.unwrap();
    assert_eq!(old[..], 40_u64.to_ne_bytes());
    let old = a.compare_swap(old, key.offset(8), 42, 7).await.unwrap();
    assert_eq!(old[..], 42_u64.to_ne_bytes());
    assert_eq!(region.load_u64(8).unwrap(), 7);

    let window = bench.domain.memory_window(WindowType::Two).unwrap();
    let slice = region.slice(64..128).unwrap();
    let slice = b.bind(&window, slice, AccessFlags::REMOTE_WRITE).await;
    let through = RemoteAddr::new(slice.unwrap().key().addr, window.rkey());
    let both = vec![bench.filled(b"one"), bench.filled(b"")];
    let both = a.write(both, through).await.unwrap();
    assert_eq!(&both[0][..], b"one");
    region.read_at(64, &mut there[..3]).unwrap();
    assert_eq!(&there[..3], b"one");

    let receive = b.receive(());
    let request = WorkRequest::write(Inline(b"inl"), key).immediate(99);
    a.post_inline(request).await.unwrap();
    let message = receive.await.unwrap();
    assert_eq!(message.success.immediate(), Some(99));
    assert!(message.success.is_remote_write());
}

#[test]
fn each_operation_returns_its_memory_on_tokio() {
    runtime().block_on(async {
        let bench = Bench::new();
        let queue = bench.domain.context().completion_queue().entries(64);
        let cq = AsyncCompletionQueue::spawn(queue).unwrap();
        each_operation(&bench, &bench.pair(&cq)).await;
    });
}

#[test]
fn each_operation_returns_its_memory_on_any_executor() {
    let bench = Bench::new();
    let pair = bench.pair(&bench.driven());
    block_on(each_operation(&bench, &pair));
}

#[test]
fn futures_read_completions_without_a_driver() {
    let bench = Bench::new();
    let (cq, driver) = bench.queue();
    drop(driver);
    let pair = bench.pair(&cq);
    block_on(each_operation(&bench, &pair));
    let queue = bench.domain.context().completion_queue().entries(64);
    let pair = bench.pair(&AsyncCompletionQueue::polled(queue).unwrap());
    block_on(each_operation(&bench, &pair));
}

#[test]
fn a_driver_ends_with_the_last_handle() {
    let bench = Bench::new();
    let (cq, driver) = bench.queue();
    let thread = std::thread::spawn(move || driver.run_blocking());
    let (a, b) = bench.pair(&cq);
    let receive = b.receive(bench.buffer(8));
    drop((a, cq));
    assert!(!thread.is_finished());
    drop(b);
    drop(receive);
    thread.join().unwrap().unwrap();
}

#[test]
fn a_failed_operation_returns_its_memory() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let receive = a.receive(bench.buffer(64));
    let bad = a.write(bench.filled(b"lost?"), RemoteAddr::new(0, 1));
    let behind = a.write(bench.filled(b"behind"), RemoteAddr::new(0, 1));
    let error = block_on(bad).unwrap_err();
    assert!(matches!(error.cause, Cause::Failed(failure)
        if failure.status == Status::REM_ACCESS_ERR));
    assert_eq!(&error.data.unwrap()[..], b"lost?");
    let error = block_on(behind).unwrap_err();
    assert!(matches!(error.cause, Cause::Failed(failure)
        if failure.status == Status::WR_FLUSH_ERR));
    assert_eq!(&error.data.unwrap()[..], b"behind");
    let error = block_on(receive).unwrap_err();
    assert_eq!(error.data.unwrap().capacity(), 64);
    assert_eq!(a.failure().unwrap().status, Status::REM_ACCESS_ERR);
    // No receive is left that could be flushed.
    assert!(block_on(a.message::<ringverbs::Buffer>()).is_err());
    // Refused before it is posted.
    let foreign = bench.domain.context().alloc_pd().unwrap();
    let foreign = foreign.alloc(64).unwrap().into_buffer();
    let error = block_on(b.send(foreign)).unwrap_err();
    assert!(matches!(
        error.cause,
        Cause::Refused(Error::WrongDomain { .. })
    ));
    assert!(error.data.is_some());
}

#[test]
fn a_queue_pair_that_does_not_fit_is_returned() {
    let bench = Bench::new();
    let (cq, other) = (bench.driven(), bench.driven());
    let (qp, error) = AsyncQueuePair::new(bench.queue_pair(&cq), &other).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    // An operation in flight would have no future.
    let mut qp = qp;
    qp.initialize(&bench.local).unwrap();
    qp.receive(bench.buffer(8), 0).unwrap();
    let (_, error) = AsyncQueuePair::new(qp, &cq).unwrap_err();
    assert!(error.to_string().contains("in flight"), "{error}");
}

/// More than the queue holds are posted as there is room.
#[test]
fn a_full_queue_waits_for_room() {
    let bench = Bench::new();
    let cq = bench.driven();
    let (a, b) = bench.pair(&cq);
    let capacity = a.capacity().max_send_wr as usize;
    let region = bench.domain.alloc_remote(1 << 16, ALL).unwrap();
    let key = region.key();
    // The peer has no receive: what is posted stays in flight.
    let sends = (0..capacity).map(|_| a.send(bench.filled(b"x")));
    let mut sends: Vec<_> = sends.collect();
    until(|| {
        sends.push(a.send(bench.filled(b"x")));
        !sends.last().unwrap().is_posted()
    });
    let capacity = sends.len() - 1;
    let writes = (0..2 * capacity).map(|at| {
        let bytes = (at as u64 + 1).to_ne_bytes();
        a.write(bench.filled(&bytes), key.offset(8 * at))
    });
    let mut writes: Vec<_> = writes.collect();
    assert!(writes.iter().all(|write| !write.is_posted()));
    assert!(poll_once(&mut writes[0]).is_pending());
    let full = block_on(a.post_inline(WorkRequest::send(Inline(b"y")))).unwrap_err();
    assert!(matches!(
        full.cause,
        Cause::Refused(Error::QueueFull { .. })
    ));
    let mut room = a.room();
    assert!(poll_once(&mut room).is_pending());
    // Those that are dropped before there is room were never posted.
    let never = writes.split_off(2 * capacity - 2);
    drop(never);
    drop(sends.pop());
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for write in writes {
            let done = &done;
            scope.spawn(move || {
                block_on(write).unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        for _ in 0..sends.len() {
            block_on(async {
                let message = b.receive(bench.buffer(8));
                message.await.unwrap()
            });
            block_on(sends.remove(0)).unwrap();
        }
    });
    block_on(room).unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 2 * capacity - 2);
    for at in 0..2 * capacity {
        let expected = if at < 2 * capacity - 2 { at + 1 } else { 0 };
        assert_eq!(region.load_u64(8 * at).unwrap(), expected as u64);
    }
}

#[test]
fn batches_and_unsignaled_operations() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let region = bench.domain.alloc_remote(4096, ALL).unwrap();
    let key = region.key();
    for round in 1..100_u64 {
        let last = a.batch(|batch: &mut AsyncBatch<'_, '_>| {
            for at in 0..3 {
                let data = bench.filled(&round.to_ne_bytes());
                batch.post_unsignaled(WorkRequest::write(data, key.offset(8 * at)))?;
            }
            batch.post(WorkRequest::write(
                bench.filled(&round.to_ne_bytes()),
                key.offset(24),
            ))
        });
        block_on(last.unwrap()).unwrap();
        for at in 0..4 {
            assert_eq!(region.load_u64(8 * at).unwrap(), round);
        }
    }
    // Nothing but unsignaled ones, more than the queue holds.
    for round in 0..200 {
        let data = [round as u8];
        let request = WorkRequest::write(Inline(&data), key.offset(100));
        match a.post_unsignaled(request) {
            Ok(()) => {}
            Err(full) => {
                assert!(matches!(full.error, Error::QueueFull { .. }));
                block_on(a.room()).unwrap();
            }
        }
    }
    // One that fails is reported, with those behind it.
    let bad = WorkRequest::write(Inline(b"x"), RemoteAddr::new(0, 1));
    block_on(a.room()).unwrap();
    a.post_unsignaled(bad).unwrap();
    until(|| a.failure().is_some());
    assert_eq!(a.failure().unwrap().status, Status::REM_ACCESS_ERR);
    drop(b);
}

#[test]
fn an_abandoned_batch_ends_its_futures() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let receive = b.receive(bench.buffer(8));
    let mut kept = Vec::new();
    let refused = a.batch(|batch| {
        kept.push(batch.post(WorkRequest::send(bench.filled(b"no"))).unwrap());
        drop(batch.post(WorkRequest::send(bench.filled(b"no"))).unwrap());
        assert!(poll_once(&mut kept[0]).is_pending());
        // The queue pair is in use: refused, and no deadlock.
        let busy = block_on(a.send(bench.filled(b"inside"))).unwrap_err();
        assert!(matches!(busy.cause, Cause::Refused(Error::Busy { .. })));
        assert_eq!(&busy.data.unwrap()[..], b"inside");
        assert!(a.post_unsignaled(WorkRequest::send(Inline(b"x"))).is_err());
        let nested = a.batch(|_| Ok::<_, Error>(()));
        assert!(matches!(nested, Err(BatchError::Refused(_))));
        assert!(a.state().is_err());
        Err::<(), _>("given up")
    });
    assert!(matches!(refused, Err(BatchError::Abandoned("given up"))));
    let error = block_on(kept.remove(0)).unwrap_err();
    assert!(matches!(error.cause, Cause::Abandoned), "{error:?}");
    // The same by a panic.
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        a.batch(|batch| -> Result<(), Error> {
            kept.push(batch.post(WorkRequest::send(bench.filled(b"no"))).unwrap());
            panic!("on purpose")
        })
    }));
    assert!(panic.is_err());
    let error = block_on(kept.remove(0)).unwrap_err();
    assert!(matches!(error.cause, Cause::Abandoned), "{error:?}");
    // The queue pair works on, and nothing of those batches was sent.
    let sent = a.batch(|batch| batch.post(WorkRequest::send(bench.filled(b"yes"))));
    block_on(sent.unwrap()).unwrap();
    assert_eq!(&block_on(receive).unwrap().data[..], b"yes");
}

/// One driver, many queue pairs, many tasks on several threads.
#[test]
fn a_driver_serves_many_queue_pairs() {
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let bench = Bench::new();
        let queue = bench.domain.context().completion_queue().entries(4096);
        let cq = AsyncCompletionQueue::spawn(queue).unwrap();
        let mut tasks = Vec::new();
        for number in 0..32_u64 {
            let (a, b) = bench.pair(&cq);
            let mut buffers = [bench.buffer(8), bench.buffer(8)];
            tasks.push(tokio::spawn(async move {
                for round in 0..50 {
                    let [mut to, from] = buffers;
                    let text = (number << 32 | round).to_ne_bytes();
                    to.copy_from(&text).unwrap();
                    let receive = b.receive(from);
                    let to = a.send(to).await.unwrap();
                    let message = receive.await.unwrap();
                    assert_eq!(message.data[..], text);
                    buffers = [message.data, to];
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// Nothing but unsignaled operations are in flight: the task that waits for room is
/// woken when they have ended.
#[test]
fn unsignaled_operations_make_room() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    // In flight until the peer has receives.
    let mut count = 0;
    while a.post_unsignaled(WorkRequest::send(Inline(b"x"))).is_ok() {
        count += 1;
    }
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut room = a.room();
    let polled = Pin::new(&mut room).poll(&mut Task::from_waker(&waker));
    assert!(polled.is_pending());
    for _ in 0..count.min(16) {
        b.post_receive(bench.buffer(8)).unwrap();
    }
    until(|| woken.count() > 0);
    block_on(room).unwrap();
}

/// A task waits for a message, and the queue pair fails with no receive posted that
/// could be flushed.
#[test]
fn a_failure_ends_the_wait_for_a_message() {
    let bench = Bench::new();
    let (a, _b) = bench.pair(&bench.driven());
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut message = a.message::<ringverbs::Buffer>();
    let polled = Pin::new(&mut message).poll(&mut Task::from_waker(&waker));
    assert!(polled.is_pending());
    drop(a.write(bench.filled(b"x"), RemoteAddr::new(0, 1)));
    until(|| woken.count() > 0);
    let error = block_on(message).unwrap_err();
    assert!(matches!(error.cause, Cause::Failed(failure)
        if failure.status == Status::REM_ACCESS_ERR));
}
