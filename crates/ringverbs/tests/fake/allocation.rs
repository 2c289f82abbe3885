//! Posting and polling allocate nothing once every queue has been met.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ringverbs::{Completion, Inline, RemoteAddr, WorkRequest};

use crate::World;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread allocates in `f`.
fn allocations<R>(f: impl FnOnce() -> R) -> (usize, R) {
    let before = ALLOCATIONS.get();
    let result = f();
    (ALLOCATIONS.get() - before, result)
}

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
