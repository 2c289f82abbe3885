//! Futures on tokio, and on another executor.

use std::pin::pin;
use std::task::{Context as Task, Poll, Waker};
use std::time::{Duration, Instant};

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::{Buffer, ProtectionDomain, QueuePair, Transport};
use ringverbs_testkit::{Capture, Fabric, connect};

fn buffer(domain: &ProtectionDomain, byte: u8) -> Buffer {
    let mut buffer = domain.alloc(64).unwrap().into_buffer();
    buffer.copy_from(&[byte; 64]).unwrap();
    buffer
}

type Make = fn(ringverbs::completion::CompletionQueueBuilder) -> AsyncCompletionQueue;

/// Connects queue pairs with completion queues that `make` creates.
fn pair(fabric: &Fabric, make: Make) -> (AsyncQueuePair, AsyncQueuePair) {
    let side = |node: usize| -> (QueuePair, AsyncCompletionQueue) {
        let context = fabric.node(node).open().unwrap();
        let cq = make(context.completion_queue());
        let domain = context.alloc_pd().unwrap();
        (
            domain.queue_pair(Transport::Reliable, &cq).build().unwrap(),
            cq,
        )
    };
    let ((mut a, cq_a), (mut b, cq_b)) = (side(0), side(1));
    connect(&mut a, &mut b).unwrap();
    let a = AsyncQueuePair::new(a, &cq_a).unwrap();
    (a, AsyncQueuePair::new(b, &cq_b).unwrap())
}

/// Ten messages each way, with lost frames.
async fn exchange(fabric: &Fabric, a: AsyncQueuePair, b: AsyncQueuePair) {
    fabric.frames().chance(0.2).lose();
    for number in 0..10 {
        let there = b.receive(buffer(b.domain(), 0));
        let sent = a.send(buffer(a.domain(), number));
        assert_eq!(*there.await.unwrap().data, [number; 64]);
        sent.await.unwrap();
        let back = a.receive(buffer(a.domain(), 0));
        b.send(buffer(b.domain(), number)).await.unwrap();
        assert_eq!(*back.await.unwrap().data, [number; 64]);
    }
}

async fn run_spawned() -> Capture {
    let fabric = Fabric::roce(2).unwrap();
    let (a, b) = pair(&fabric, |queue| AsyncCompletionQueue::spawn(queue).unwrap());
    fabric.run_until(exchange(&fabric, a, b)).await;
    assert!(fabric.now() > Duration::from_millis(60));
    fabric.capture()
}

#[tokio::test]
async fn tasks_wait_in_simulated_time() {
    let began = Instant::now();
    let first = run_spawned().await;
    assert!(first.frames.iter().any(|frame| frame.delivery.lost));
    for _ in 0..20 {
        assert!(run_spawned().await == first);
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_of_several_threads_wait() {
    let fabric = Fabric::builder().threads().build(2).unwrap();
    let (a, b) = pair(&fabric, |queue| AsyncCompletionQueue::spawn(queue).unwrap());
    fabric.frames().nth(1).lose();
    let receive = b.receive(buffer(b.domain(), 0));
    let sender = tokio::spawn(async move {
        a.send(buffer(a.domain(), 7)).await.unwrap();
        a
    });
    let received = fabric.run_until(receive).await.unwrap();
    assert_eq!(*received.data, [7; 64]);
    fabric.run_until(sender).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn tokio_s_own_time_outs_fire_when_the_fabric_is_idle() {
    let fabric = Fabric::roce(2).unwrap();
    let (a, _b) = pair(&fabric, |queue| AsyncCompletionQueue::spawn(queue).unwrap());
    let nobody_sends = a.receive(buffer(a.domain(), 0));
    let wait = tokio::time::timeout(Duration::from_secs(3600), nobody_sends);
    assert!(fabric.run_until(wait).await.is_err());
}

#[test]
fn a_simple_executor_works() {
    let fabric = Fabric::infiniband(2).unwrap();
    let (a, b) = pair(&fabric, |queue| {
        AsyncCompletionQueue::polled(queue).unwrap()
    });
    let mut task = pin!(fabric.run_until(exchange(&fabric, a, b)));
    let mut context = Task::from_waker(Waker::noop());
    while task.as_mut().poll(&mut context) == Poll::Pending {}
    assert!(fabric.now() > Duration::from_millis(60));
}
