//! Queue pairs with a shared receive queue.

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair, Cause};
use ringverbs::{Buffer, Error, Inline, SharedReceiveQueue, Status, Transport, WorkRequest};

use crate::{Bench, block_on, poll_once, until};

/// A token that is one of a queue pair's operations, too.
const TOKEN: u64 = 0;

fn shared_receives(bench: &Bench, count: usize) -> SharedReceiveQueue {
    let mut srq = bench.domain.shared_receive_queue().build().unwrap();
    for _ in 0..count {
        srq.receive(bench.buffer(8), TOKEN).unwrap();
    }
    srq
}

/// A client, and a server that takes its receives from `srq`.
fn connect(
    bench: &Bench,
    cq: &AsyncCompletionQueue,
    srq: &SharedReceiveQueue,
) -> (AsyncQueuePair, AsyncQueuePair) {
    let client = AsyncQueuePair::new(bench.queue_pair(cq), cq).unwrap();
    let builder = bench.domain.queue_pair(Transport::Reliable, cq);
    let server = AsyncQueuePair::new(builder.srq(srq).build().unwrap(), cq).unwrap();
    let [c, s] = [&client, &server].map(|qp| qp.endpoint(&bench.local).unwrap());
    client.connect(&bench.local, &s).unwrap();
    server.connect(&bench.local, &c).unwrap();
    (client, server)
}

async fn send(qp: &AsyncQueuePair, number: u64) {
    let bytes = number.to_ne_bytes();
    let request = WorkRequest::send(Inline(&bytes));
    qp.post_inline(request).await.unwrap();
}

async fn next(qp: &AsyncQueuePair) -> u64 {
    let message = qp.message::<Buffer>().await.unwrap();
    u64::from_ne_bytes(message.data[..].try_into().unwrap())
}

/// Whichever receives of the queue they take, in whatever order.
#[test]
fn each_queue_pair_gets_its_own_messages() {
    let bench = Bench::new();
    let cq = bench.driven();
    let mut srq = shared_receives(&bench, 16);
    let pairs: Vec<_> = (0..4).map(|_| connect(&bench, &cq, &srq)).collect();
    for round in 0..20 {
        block_on(async {
            for (place, (client, _)) in pairs.iter().enumerate() {
                for at in 0..4 {
                    send(client, round * 100 + place as u64 * 10 + at).await;
                }
            }
            for (place, (_, server)) in pairs.iter().enumerate().rev() {
                for at in 0..4 {
                    assert_eq!(next(server).await, round * 100 + place as u64 * 10 + at);
                }
            }
        });
        for _ in 0..16 {
            srq.receive(bench.buffer(8), TOKEN).unwrap();
        }
    }
}

#[test]
fn receives_are_posted_to_the_shared_queue_alone() {
    let bench = Bench::new();
    let cq = bench.driven();
    let srq = shared_receives(&bench, 1);
    let (_, server) = connect(&bench, &cq, &srq);
    let refused = server.post_receive(bench.buffer(8)).unwrap_err();
    assert!(refused.data.is_some());
    assert!(refused.error.to_string().contains("shared receive queue"));
    let refused = block_on(server.receive(bench.buffer(8))).unwrap_err();
    assert!(matches!(refused.cause, Cause::Refused(Error::State { .. })));
}

/// The queue's receives are for the others: nothing of this one is flushed.
#[test]
fn an_error_ends_what_waits_for_a_message() {
    let bench = Bench::new();
    let cq = bench.driven();
    let srq = shared_receives(&bench, 4);
    let (client, server) = connect(&bench, &cq, &srq);
    let (other_client, other_server) = connect(&bench, &cq, &srq);
    block_on(send(&client, 7));
    until(|| srq.in_flight() == 3);
    let mut waiting = [server.message::<Buffer>(), server.message()];
    assert!(poll_once(&mut waiting[1]).is_pending());
    server.set_error().unwrap();
    let [first, second] = waiting;
    assert_eq!(block_on(first).unwrap().data.len(), 8);
    let ended = block_on(second).unwrap_err();
    assert!(
        matches!(ended.cause, Cause::Failed(failure) if failure.status == Status::WR_FLUSH_ERR)
    );
    assert_eq!(srq.in_flight(), 3);
    block_on(async {
        send(&other_client, 8).await;
        assert_eq!(next(&other_server).await, 8);
    });
    // Dropping one leaves the receives, too.
    drop((server, other_server));
    assert_eq!(srq.in_flight(), 2);
    assert_eq!(srq.close().unwrap().len(), 2);
}
