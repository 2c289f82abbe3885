//! Messages whose futures were dropped.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::{Buffer, Error, Inline, WorkRequest};

use crate::{Bench, block_on, poll_once, runtime, until};

async fn send(qp: &AsyncQueuePair, number: u64) {
    let bytes = number.to_ne_bytes();
    let request = WorkRequest::send(Inline(&bytes));
    qp.post_inline(request).await.unwrap();
}

fn number(data: &Buffer) -> u64 {
    u64::from_ne_bytes(data[..].try_into().unwrap())
}

#[test]
fn the_message_of_a_dropped_receive_goes_to_the_next_one() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    // Dropped before anything arrives, polled and unpolled.
    let mut first = b.receive(bench.buffer(8));
    assert!(poll_once(&mut first).is_pending());
    drop(first);
    drop(b.receive(bench.buffer(8)));
    // Dropped after its message has arrived, unseen.
    let third = b.receive(bench.buffer(8));
    block_on(async {
        for at in 0..3 {
            send(&a, at).await;
        }
    });
    until(|| b.in_flight().unwrap().1 == 0);
    drop(third);
    for at in 0..3 {
        let message = block_on(b.message::<Buffer>()).unwrap();
        assert_eq!(number(&message.data), at);
    }
    // A receive is in the place of the one that was dropped.
    drop(b.receive(bench.buffer(8)));
    block_on(send(&a, 3));
    let message = block_on(b.receive(bench.buffer(16))).unwrap();
    assert_eq!((number(&message.data), message.data.capacity()), (3, 8));
    block_on(send(&a, 4));
    let message = block_on(b.message::<Buffer>()).unwrap();
    assert_eq!((number(&message.data), message.data.capacity()), (4, 16));
}

/// Messages that were given to futures come back in their order.
#[test]
fn messages_of_dropped_receives_stay_in_order() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let mut receives: Vec<_> = (0..4).map(|_| Some(b.receive(bench.buffer(8)))).collect();
        // One more without a future.
        b.post_receive(bench.buffer(8)).unwrap();
        block_on(async {
            for at in 0..5 {
                send(&a, at).await;
            }
        });
        until(|| b.in_flight().unwrap().1 == 0);
        for at in order {
            receives[at] = None;
        }
        for at in 0..5 {
            let message = block_on(b.message::<Buffer>()).unwrap();
            assert_eq!(number(&message.data), at);
        }
    }
}

/// Messages go to futures in the order of these, whoever is polled first.
#[test]
fn receives_end_in_their_order() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let mut first = b.receive(bench.buffer(8));
    let second = b.receive(bench.buffer(8));
    // Memory of another type: a message in it is not theirs.
    let many = b.receive(vec![bench.buffer(8)]);
    block_on(async {
        for at in 0..3 {
            send(&a, at).await;
        }
    });
    assert_eq!(number(&block_on(many).unwrap().data[0]), 2);
    assert_eq!(number(&block_on(second).unwrap().data), 1);
    let Poll::Ready(Ok(message)) = poll_once(&mut first) else {
        panic!("it had arrived");
    };
    assert_eq!(number(&message.data), 0);
}

/// A select loop that drops the waiting future again and again.
#[test]
fn a_select_loop_loses_no_message() {
    runtime().block_on(async {
        let bench = Bench::new();
        let queue = bench.domain.context().completion_queue().entries(64);
        let cq = AsyncCompletionQueue::spawn(queue).unwrap();
        let (a, b) = bench.pair(&cq);
        for _ in 0..8 {
            b.post_receive(bench.buffer(8)).unwrap();
        }
        const COUNT: u64 = 2000;
        let sender = async {
            for at in 0..COUNT {
                send(&a, at).await;
            }
        };
        let receiver = async {
            let mut next = 0;
            let mut given_up = 0;
            while next < COUNT {
                tokio::select! {
                    biased;
                    () = tokio::task::yield_now() => given_up += 1,
                    message = b.message::<Buffer>() => {
                        let message = message.unwrap();
                        assert_eq!(number(&message.data), next);
                        next += 1;
                        b.post_receive(message.data).unwrap();
                    }
                }
                // The other branch wins at once if it is polled twice.
                if given_up % 3 == 0 {
                    let mut wait = pin!(b.message::<Buffer>());
                    let waited = tokio::time::timeout(Duration::from_micros(50), &mut wait);
                    if let Ok(message) = waited.await {
                        let message = message.unwrap();
                        assert_eq!(number(&message.data), next);
                        next += 1;
                        b.post_receive(message.data).unwrap();
                    }
                }
            }
            given_up
        };
        let ((), given_up) = tokio::join!(sender, receiver);
        assert!(given_up > 0);
    });
}

#[test]
fn a_full_receive_queue_returns_the_buffer() {
    let bench = Bench::new();
    let (_a, b) = bench.pair(&bench.driven());
    let mut receives = Vec::new();
    let error = loop {
        let mut receive = b.receive(bench.buffer(8));
        match poll_once(&mut receive) {
            Poll::Pending => receives.push(receive),
            Poll::Ready(result) => break result.unwrap_err(),
        }
    };
    assert!(receives.len() >= 16);
    assert!(error.data.is_some());
    assert!(error.to_string().contains("outstanding"), "{error}");
    let full = b.post_receive(bench.buffer(8)).unwrap_err();
    assert!(matches!(full.error, Error::QueueFull { .. }));
    b.set_error().unwrap();
    for receive in receives {
        assert!(block_on(receive).unwrap_err().data.is_some());
    }
}
