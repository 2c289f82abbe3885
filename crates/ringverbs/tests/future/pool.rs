//! Pools of buffers, and buffers that several operations read.

use ringverbs::future::Cause;
use ringverbs::{
    AccessFlags, Buffer, BufferPool, Error, Inline, PoolBuffer, SharedBuffer, Transport,
    WorkRequest,
};

use crate::{Bench, block_on, poll_once, until};

fn joined(pieces: &[PoolBuffer]) -> Vec<u8> {
    pieces
        .iter()
        .flat_map(|piece| piece.iter().copied())
        .collect()
}

fn free(pool: &BufferPool) -> Vec<usize> {
    pool.classes().map(|(_, _, free)| free).collect()
}

#[test]
fn a_pool_has_classes() {
    let bench = Bench::new();
    let pool = BufferPool::new(&bench.domain, &[(1000, 2), (60, 3)]).unwrap();
    let sizes: Vec<_> = pool.classes().map(|class| (class.0, class.1)).collect();
    assert_eq!(sizes, [(64, 3), (1024, 2)]);
    let mut small: Vec<PoolBuffer> = (0..3).map(|_| pool.get(64).unwrap()).collect();
    assert!(small.iter().all(|buffer| buffer.capacity() == 64));
    // The next larger class, until there is none.
    let large = [pool.get(10).unwrap(), pool.get(1024).unwrap()];
    assert_eq!((large[0].len(), large[0].capacity()), (10, 1024));
    assert!(pool.get(0).is_none() && pool.get(2000).is_none());
    drop(large);
    assert_eq!(free(&pool), [0, 2]);
    // No two have the same bytes.
    for (at, buffer) in small.iter_mut().enumerate() {
        buffer.fill(at as u8 + 1);
    }
    for (at, buffer) in small.iter().enumerate() {
        assert!(buffer.iter().all(|&byte| byte == at as u8 + 1));
    }
    drop(small);
    assert_eq!(free(&pool), [3, 2]);
    for bad in [&[][..], &[(0, 4)], &[(64, 0)]] {
        let error = BufferPool::new(&bench.domain, bad).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{bad:?}");
    }
    let huge = BufferPool::new(&bench.domain, &[(usize::MAX, 1)]);
    assert!(matches!(huge, Err(Error::NoMemory)));
    let many = BufferPool::new(&bench.domain, &[(1 << 40, 1 << 40)]);
    assert!(matches!(many, Err(Error::NoMemory)));
}

/// Whatever becomes of an operation, its buffers return to their pool, and not
/// before it has ended.
#[test]
fn buffers_return_to_their_pool() {
    let bench = Bench::new();
    let pool = BufferPool::new(&bench.domain, &[(64, 8)]).unwrap();
    let cq = bench.driven();
    let (a, b) = bench.pair(&cq);
    // In flight until the peer has a receive.
    let kept = a.send(pool.get(8).unwrap());
    drop(a.send(pool.get(8).unwrap()));
    a.post_unsignaled(WorkRequest::send(pool.get(8).unwrap()))
        .unwrap();
    std::mem::forget(a.send(pool.get(8).unwrap()));
    assert_eq!(free(&pool), [4]);
    assert_eq!(a.in_flight().unwrap().0, 4);
    for _ in 0..4 {
        let message = block_on(b.receive(bench.buffer(64))).unwrap();
        assert_eq!(message.data.len(), 8);
    }
    until(|| free(&pool) == [6]);
    drop(block_on(kept).unwrap());
    assert_eq!(free(&pool), [7]);
    // A receive that nobody waits for, one whose message nobody takes, and one in
    // flight when its queue pair is dropped.
    drop(b.receive(pool.get(64).unwrap()));
    block_on(a.post_inline(WorkRequest::send(Inline(b"unseen")))).unwrap();
    until(|| b.in_flight().unwrap().1 == 0);
    drop(b.receive(pool.get(64).unwrap()));
    assert_eq!(free(&pool), [5]);
    drop(b);
    assert_eq!(free(&pool), [7]);
    // What was forgotten is leaked.
    drop(a);
    assert_eq!(free(&pool), [7]);
}

/// The pool is dropped while buffers are in flight.
#[test]
fn a_pool_outlives_its_handle() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.driven());
    let pool = BufferPool::new(&bench.domain, &[(64, 4)]).unwrap();
    let receive = b.receive(pool.get(64).unwrap());
    let mut buffer = pool.get(64).unwrap();
    drop(pool);
    buffer.copy_from(b"still there").unwrap();
    let buffer = block_on(a.send(buffer)).unwrap();
    let message = block_on(receive).unwrap();
    assert_eq!(&message.data[..], b"still there");
    drop(buffer);
}

/// One buffer, in flight on several queue pairs, and read meanwhile.
#[test]
fn a_shared_buffer_is_sent_by_several_queue_pairs_at_once() {
    let bench = Bench::new();
    let cq = bench.driven();
    let pairs: Vec<_> = (0..4).map(|_| bench.pair(&cq)).collect();
    let pool = BufferPool::new(&bench.domain, &[(64, 1)]).unwrap();
    let mut buffer = pool.get(11).unwrap();
    buffer.copy_from(b"hello world").unwrap();
    let shared = buffer.freeze();
    let hello = shared.slice(..5).unwrap();
    let world = shared.slice(6..).unwrap();
    let mut sends: Vec<_> = pairs.iter().map(|(a, _)| a.send(shared.clone())).collect();
    // More than any device takes.
    let mut parts = vec![hello.clone(); 1000];
    parts.push(world.clone());
    for send in &mut sends {
        assert!(poll_once(send).is_pending());
    }
    assert_eq!(&shared[..], b"hello world");
    assert_eq!((&hello[..], &world[..]), (&b"hello"[..], &b"world"[..]));
    let refused = block_on(pairs[0].0.send(parts)).unwrap_err();
    assert!(matches!(refused.cause, Cause::Refused(Error::Limit { .. })));
    assert_eq!(&refused.data.unwrap()[1000][..], b"world");
    drop((hello, world));
    // In flight: nobody gets it back.
    let shared = shared.try_into_pool_buffer().unwrap_err();
    drop(shared);
    for (send, (_, b)) in sends.into_iter().zip(&pairs) {
        assert_eq!(free(&pool), [0]);
        let message = block_on(b.receive(bench.buffer(64))).unwrap();
        assert_eq!(&message.data[..], b"hello world");
        let back = block_on(send).unwrap();
        assert_eq!(&back[..], b"hello world");
    }
    assert_eq!(free(&pool), [1]);
}

#[test]
fn parts_of_shared_buffers_keep_within_them() {
    let bench = Bench::new();
    let shared: SharedBuffer = bench.filled(b"0123456789").freeze();
    let part = shared.slice(2..=7).unwrap();
    assert_eq!(&part.slice(1..3).unwrap()[..], b"34");
    assert_eq!(&part.slice(6..).unwrap()[..], b"");
    for range in [7..8, 0..7, usize::MAX - 1..usize::MAX] {
        assert!(matches!(part.slice(range), Err(Error::Limit { .. })));
    }
    #[expect(clippy::reversed_empty_ranges, reason = "refused")]
    let reversed = part.slice(3..2);
    assert!(reversed.is_err());
    let whole = part.try_into_buffer().unwrap_err();
    drop(shared);
    let buffer: Buffer = whole.try_into_buffer().unwrap();
    assert_eq!(&buffer[..], b"0123456789");
}

/// Buffers of a pool are gathered and scattered, mixed classes in one message.
#[test]
fn scatter_and_gather_over_pool_buffers() {
    let bench = Bench::new();
    let cq = bench.driven();
    let make = || {
        let builder = bench.domain.queue_pair(Transport::Reliable, &cq);
        let qp = builder.send_pieces(3).recv_pieces(3).build().unwrap();
        ringverbs::future::AsyncQueuePair::new(qp, &cq).unwrap()
    };
    let (a, b) = (make(), make());
    let (at_a, at_b) = (a.endpoint(&bench.local), b.endpoint(&bench.local));
    a.connect(&bench.local, &at_b.unwrap()).unwrap();
    b.connect(&bench.local, &at_a.unwrap()).unwrap();
    let pool = BufferPool::new(&bench.domain, &[(64, 4), (4096, 4)]).unwrap();
    let receive = b.receive(vec![
        pool.get(64).unwrap(),
        pool.get(64).unwrap(),
        pool.get(4096).unwrap(),
    ]);
    let mut pieces = vec![
        pool.get(3).unwrap(),
        pool.get(200).unwrap(),
        pool.get(1).unwrap(),
    ];
    let mut text = Vec::new();
    for (at, piece) in pieces.iter_mut().enumerate() {
        for (offset, byte) in piece.iter_mut().enumerate() {
            *byte = (100 * at + offset) as u8;
        }
        text.extend_from_slice(piece);
    }
    block_on(a.send(pieces)).unwrap();
    let message = block_on(receive).unwrap();
    let lengths: Vec<usize> = message.data.iter().map(|piece| piece.len()).collect();
    assert_eq!(lengths, [64, 64, 76]);
    assert_eq!(joined(&message.data), text);
    drop(message);
    assert_eq!(free(&pool), [4, 4]);
    let region = bench.domain.alloc_remote(4096, AccessFlags::REMOTE_READ);
    let region = region.unwrap();
    region.write_at(0, &[7; 100]).unwrap();
    let to = vec![pool.get(60).unwrap(), pool.get(40).unwrap()];
    let read = block_on(a.read(to, region.key())).unwrap();
    assert_eq!(joined(&read), [7; 100]);
}
