//! Posting and polling allocate nothing once every queue has been met.

use alloc_check::{Counting, allocations};
use ringverbs::{Completion, Inline, RemoteAddr, WorkRequest};

use crate::World;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
