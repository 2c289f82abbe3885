//! Raw packet queues on a ConnectX that is played: what a device can say that is wrong.

use ringverbs::packet::Checksums;
use ringverbs::{Error, Frame, Operation, Status};
use testing::allocations::allocations;

use crate::connectx::{Queues, RECEIVED, SEND_FAILED, SENT, World};

/// A receive that failed, with that syndrome.
fn receive_fails(world: &mut World, queues: &Queues, slot: u16, syndrome: u8) {
    const FAILED: u8 = 14;
    let mut bytes = [0u8; 64];
    bytes[32..36].copy_from_slice(&queues.user_index.to_be_bytes());
    bytes[55] = syndrome;
    bytes[60..62].copy_from_slice(&slot.to_be_bytes());
    bytes[63] = FAILED << 4;
    world.write(&bytes, None);
}

#[test]
fn a_frame_is_not_longer_than_its_buffer() {
    let mut world = World::new(16);
    let (mut queue, queues) = world.packet_queue(100);
    // A buffer has room for 128 bytes.
    for (slot, length) in [(0, 14), (1, 128), (2, 0)] {
        world.raise(&queues, RECEIVED, slot, length);
        let frame = queue.receive().unwrap().unwrap();
        assert_eq!(frame.len() as u32, length);
    }
    let mut got = Vec::new();
    for (slot, length) in [(3, 129), (4, u32::MAX), (5, 60)] {
        world.raise(&queues, RECEIVED, slot, length);
        match queue.poll(|frame| got.push(frame)) {
            Ok(_) => {}
            Err(Error::Driver { message, .. }) => {
                assert_eq!(message, format!("{length} bytes in a buffer of 128"));
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(
        got.iter().map(|frame| frame.len()).collect::<Vec<_>>(),
        [60]
    );
    assert_eq!(queue.counters().received, 4);
    // Each buffer is posted again.
    drop(got);
    assert!(queue.receive().unwrap().is_none());
    assert_eq!(queue.in_flight(), (0, 4));
}

#[test]
fn failures_are_errors_and_long_frames_are_counted() {
    let mut world = World::new(16);
    let (mut queue, queues) = world.packet_queue(100);
    receive_fails(&mut world, &queues, 0, 0x01);
    assert!(queue.receive().unwrap().is_none());
    assert_eq!(queue.counters().too_long, 1);
    // A protection error.
    receive_fails(&mut world, &queues, 1, 0x04);
    let failed = queue.receive().unwrap_err();
    let Error::Failed { operation, failure } = failed else {
        panic!("{failed}");
    };
    assert_eq!(operation, Operation::Receive);
    assert_eq!(failure.status, Status::LOC_PROT_ERR);
    let frame = queue.buffer(60).unwrap();
    queue.send(frame, Checksums::Unchanged).unwrap();
    world.raise(&queues, SEND_FAILED, 0, 0);
    let failed = queue.poll(drop).unwrap_err();
    assert!(
        matches!(
            failed,
            Error::Failed {
                operation: Operation::Send,
                ..
            }
        ),
        "{failed}"
    );
    assert_eq!(queue.in_flight().0, 0);
}

#[test]
fn invented_completions_match_no_operation() {
    let mut world = World::new(16);
    let (mut queue, queues) = world.packet_queue(100);
    let frame = queue.buffer(60).unwrap();
    queue.send(frame, Checksums::Unchanged).unwrap();
    for (opcode, slot) in [(SENT, 5), (SENT, u16::MAX), (9, 0)] {
        world.raise(&queues, opcode, slot, 60);
        let error = queue
            .poll(|_: Frame| panic!("nothing has come"))
            .unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
    }
    assert_eq!(queue.in_flight(), (1, 4));
    world.raise(&queues, RECEIVED, 0, 60);
    assert_eq!(queue.poll(drop).unwrap(), 1);
    world.raise(&queues, SENT, 0, 0);
    assert_eq!(queue.poll(drop).unwrap(), 0);
    assert_eq!(queue.in_flight(), (0, 4));
}

/// The device computes none, as the driver says here.
#[test]
fn checksums_are_refused_where_there_are_none() {
    let mut world = World::new(16);
    let (mut queue, _) = world.packet_queue(100);
    assert!(!queue.has_checksums());
    let frame = queue.buffer(60).unwrap();
    let refused = queue.send(frame, Checksums::Compute).unwrap_err();
    assert!(matches!(refused.error, Error::Unsupported { .. }));
    assert_eq!(refused.data.unwrap().len(), 60);
}

#[test]
fn frames_allocate_nothing_in_the_steady_state() {
    let mut world = World::new(16);
    let (mut queue, queues) = world.packet_queue(100);
    let mut frames = Vec::with_capacity(4);
    for round in 0..40u16 {
        let (sent, ()) = allocations(|| {
            let buffers = std::iter::from_fn(|| queue.buffer(60));
            frames.extend(buffers.take(3));
            let taken = queue.send_all(&mut frames.drain(..), Checksums::Unchanged);
            assert_eq!(taken.unwrap(), 3);
        });
        world.raise(&queues, SENT, 3 * round + 2, 0);
        world.raise(&queues, RECEIVED, round, 60);
        let (polled, count) = allocations(|| queue.poll(drop).unwrap());
        assert_eq!((count, queue.in_flight()), (1, (0, 3)));
        if round > 0 {
            assert_eq!((sent, polled), (0, 0), "{round}");
        }
    }
}
