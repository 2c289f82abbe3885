//! Posting and polling allocate nothing once every queue has been met.

use ringverbs::{Completion, Inline, RemoteAddr, WorkRequest};
use testing::allocations::{CountingAllocator, allocations};

use std::pin::Pin;
use std::task::{Context as Task, Poll, Waker};

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};

use crate::{World, ready};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn the_steady_state_allocates_nothing() {
    assert_eq!(allocations(|| vec![0u8; 100]).0, 1);
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let mut out: [Completion; 8] = Default::default();
    let mut buffer = Some(world.buffer(b""));
    let mut doorbell = Vec::new();
    for round in 0..20 {
        let (posted, ()) = allocations(|| qp.receive(buffer.take().unwrap(), 1).unwrap());
        // The kernel of the test records each doorbell: how many requests it
        // was for must make no difference.
        world.machine.fake.take_calls();
        let (sent, ()) = allocations(|| {
            qp.batch(|batch| {
                for token in 0..1 + round % 6 {
                    let request = WorkRequest::write(Inline(b"x"), RemoteAddr::new(0x1000, 7));
                    let request = request.token(token);
                    let request = match token % 2 {
                        0 => request,
                        _ => request.unsignaled(),
                    };
                    batch.post(request).unwrap();
                }
                Ok::<_, ringverbs::Error>(())
            })
            .unwrap();
        });
        let last = *queues.sent().last().unwrap();
        for id in [queues.received()[0], last] {
            world.complete(id, 17);
        }
        let (polled, count) = allocations(|| world.cq.poll(&mut out).unwrap());
        assert!(count >= 1);
        for completion in &mut out[..count] {
            buffer = buffer.or(completion.take_buffer());
        }
        if round > 0 {
            assert_eq!((posted, polled), (0, 0), "{round}");
            doorbell.push(sent);
        }
    }
    assert!(
        doorbell.iter().all(|&sent| sent == doorbell[0]),
        "{doorbell:?}"
    );
}

/// Nor do futures, when each has a slot, and whether they sleep or not.
#[test]
fn futures_allocate_nothing_in_the_steady_state() {
    let world = World::new();
    let queue = world.context.completion_queue();
    let cq = AsyncCompletionQueue::polled(queue).unwrap();
    let (mut qp, queues) = world.new_queue_pair_on(&cq.handle(), 17);
    ready(&mut qp);
    let qp = AsyncQueuePair::new(qp, &cq).unwrap();
    let (mut buffer, mut incoming) = (world.buffer(b"x"), world.buffer(b""));
    let mut task = Task::from_waker(Waker::noop());
    let mut posts = Vec::new();
    for round in 0..20 {
        world.machine.fake.take_calls();
        let (posted, mut write) = allocations(|| qp.write(buffer, RemoteAddr::new(0x1000, 7)));
        let (received, mut receive) = allocations(|| qp.receive(incoming));
        let (waited, pending) = allocations(|| {
            Pin::new(&mut write).poll(&mut task).is_pending()
                && Pin::new(&mut receive).poll(&mut task).is_pending()
        });
        assert!(pending);
        for id in [
            *queues.received().last().unwrap(),
            *queues.sent().last().unwrap(),
        ] {
            world.complete(id, 17);
        }
        let (ended, done) = allocations(|| {
            let write = Pin::new(&mut write).poll(&mut task);
            (write, Pin::new(&mut receive).poll(&mut task))
        });
        let (Poll::Ready(Ok(written)), Poll::Ready(Ok(message))) = done else {
            panic!("{done:?}");
        };
        (buffer, incoming) = (written, message.data);
        incoming.fill_up();
        if round > 0 {
            assert_eq!((received, waited, ended), (0, 0, 0), "{round}");
            posts.push(posted);
        }
    }
    // The kernel of the test records each doorbell: as much as for the plain layer.
    let (mut plain, _queues) = world.queue_pair(18);
    world.machine.fake.take_calls();
    let request = WorkRequest::write(Inline(b"x"), RemoteAddr::new(0x1000, 7));
    let (doorbell, ()) = allocations(|| plain.post(request).unwrap());
    assert!(posts.iter().all(|&posted| posted == doorbell), "{posts:?}");
}
