//! Completion queues: creation and resizing.

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device_testing::rxe::{Driver, kernel::*, layout, layout::wc};
use ringverbs_rxe::{CompletionQueue, CreateError, WcRing, WorkCompletion};
use uverbs::abi::ids::*;
use uverbs::{Context, CqInit, Errno};

type Queue = CompletionQueue<Arc<Context>>;

fn init() -> CqInit<'static> {
    CqInit {
        cqe: 5,
        ..CqInit::default()
    }
}

fn create(machine: &Machine, queue: &Driver) -> Result<Queue, CreateError> {
    let mminfo = queue.mminfo();
    machine.fake.on(CREATE_CQ, move |reply| {
        reply.set(ATTR_CREATE_CQ_RESP_CQE, &7u32.to_ne_bytes());
        reply.set_driver_out(&mminfo);
        Ok(())
    });
    CompletionQueue::create(&machine.context, &init())
}

/// The driver moves the pending entries and answers RESIZE_CQ with `mminfo`.
fn resize_answered_with(
    machine: &Machine,
    cq: &mut Queue,
    mminfo: [u8; 16],
) -> Result<u32, CreateError> {
    machine.fake.on(RESIZE_CQ, move |reply| {
        reply.set(ATTR_CORE_OUT, &[31u32.to_ne_bytes(), [0; 4]].concat());
        reply.set_driver_out(&mminfo);
        Ok(())
    });
    resize(cq)
}

fn resize(cq: &mut Queue) -> Result<u32, CreateError> {
    CompletionQueue::resize(
        &cq.object,
        &mut cq.ring,
        &cq.index_check,
        &mut cq.retired,
        20,
    )
}

/// The device raises a completion.
fn raise(driver: &Driver, wr_id: u64) {
    let at = driver.producer();
    let mut entry = vec![0; wc::SIZE];
    layout::write(&mut entry, wc::WR_ID, wr_id);
    driver.set_entry(at, &entry);
    driver.set_producer((at + 1) % driver.slots);
}

fn take(ring: &WcRing) -> Vec<u64> {
    let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 64];
    let count = ring.take(&mut out);
    // SAFETY: that many were written to the front.
    let id = |wc: &MaybeUninit<WorkCompletion>| unsafe { wc.assume_init_ref() }.wr_id;
    out[..count].iter().map(id).collect()
}

#[test]
fn completion_queue_is_mapped_as_announced() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    let cq = create(&machine, &queue).unwrap();
    assert_eq!((cq.object.cqe(), cq.ring.capacity()), (7, 7));
    assert!(cq.index_check.is_empty());
    raise(&queue, 1);
    assert!(!cq.index_check.is_empty());
    assert_eq!(take(&cq.ring), [1]);
    assert!(cq.index_check.is_empty());
    drop(cq);
    assert!(machine.live().is_empty());
}

#[test]
fn unmappable_queue_is_destroyed() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    // Entries of 32 bytes hold no completion.
    queue.put(0, 5);
    let error = create(&machine, &queue).unwrap_err();
    assert!(matches!(error, CreateError::Geometry { .. }), "{error}");
    assert_eq!(error.errno(), libc::EPROTO);
    assert!(machine.live().is_empty());
    machine.fake.reset(CREATE_CQ);
    let error = CompletionQueue::create(&machine.context, &init()).unwrap_err();
    assert!(matches!(error, CreateError::Map { .. }), "{error}");
    assert!(machine.live().is_empty());
    machine
        .fake
        .on(CREATE_CQ, |_| Err(Errno::new(libc::ENOMEM)));
    let error = CompletionQueue::create(&machine.context, &init()).unwrap_err();
    assert_eq!(error.errno(), libc::ENOMEM);
}

#[test]
fn pending_completions_stay_through_resizes() {
    let machine = Machine::new();
    let mut queue = machine.queue(7, 8);
    let mut cq = create(&machine, &queue).unwrap();
    let (mut next, mut expected) = (0, 0);
    for slots in [32, 8, 4, 16, 8] {
        for _ in 0..3 {
            raise(&queue, next);
            next += 1;
        }
        let moved = machine.queue(7, slots);
        let mut at = queue.consumer();
        while at != queue.producer() {
            let wr_id = layout::read(&queue.entry(at), wc::WR_ID);
            raise(&moved, wr_id);
            at = (at + 1) % queue.slots;
        }
        assert_eq!(
            resize_answered_with(&machine, &mut cq, moved.mminfo()).unwrap(),
            31
        );
        assert_eq!(cq.ring.capacity(), slots - 1);
        assert!(!cq.index_check.is_empty());
        assert_eq!(take(&cq.ring), (expected..next).collect::<Vec<_>>());
        assert!(cq.index_check.is_empty());
        expected = next;
        assert_eq!(moved.consumer(), moved.producer());
        queue = moved;
    }
    assert_eq!(cq.retired.len(), 5);
}

#[test]
fn a_refused_resize_changes_nothing() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    let mut cq = create(&machine, &queue).unwrap();
    machine
        .fake
        .on(RESIZE_CQ, |_| Err(Errno::new(libc::EINVAL)));
    assert_eq!(resize(&mut cq).unwrap_err().errno(), libc::EINVAL);
    assert!(cq.retired.is_empty());
    assert!(cq.index_check.is_empty());
    raise(&queue, 1);
    assert!(!cq.index_check.is_empty());
    assert_eq!(take(&cq.ring), [1]);
    assert_eq!(queue.consumer(), 1);
}

#[test]
fn unmapped_queue_reads_as_empty() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    let mut cq = create(&machine, &queue).unwrap();
    raise(&queue, 1);
    raise(&queue, 2);
    assert!(resize_answered_with(&machine, &mut cq, [0; 16]).is_err());
    // What is in the old memory is not the queue any more.
    assert!(take(&cq.ring).is_empty());
    let span = cq.ring.available();
    assert_eq!(span.at, span.end);
    assert!(!cq.ring.step(&mut { span }));
    assert_eq!(cq.ring.capacity(), 0);
    assert_eq!(queue.consumer(), 0);
    // It is not known to be empty: whoever asks is sent to the ring.
    assert!(!cq.index_check.is_empty());
    // The next resize brings it back.
    let moved = machine.queue(7, 16);
    raise(&moved, 1);
    raise(&moved, 2);
    resize_answered_with(&machine, &mut cq, moved.mminfo()).unwrap();
    assert_eq!(take(&cq.ring), [1, 2]);
    assert!(cq.index_check.is_empty());
}

#[test]
fn queue_is_not_empty_during_a_resize() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    let cq = create(&machine, &queue).unwrap();
    let (object, mut ring, mut retired) = (cq.object, cq.ring, cq.retired);
    let index_check = Arc::new(cq.index_check);
    assert!(index_check.is_empty());
    let moved = machine.queue(7, 16);
    let (seen, mminfo) = (Arc::new(AtomicBool::new(false)), moved.mminfo());
    machine.fake.on(RESIZE_CQ, {
        let (seen, index_check) = (Arc::clone(&seen), Arc::clone(&index_check));
        move |reply| {
            // Another thread looks while the kernel moves the queue.
            assert!(!index_check.is_empty());
            seen.store(true, Ordering::Relaxed);
            reply.set_driver_out(&mminfo);
            Ok(())
        }
    });
    CompletionQueue::resize(&object, &mut ring, &index_check, &mut retired, 15).unwrap();
    assert!(seen.load(Ordering::Relaxed));
    assert!(index_check.is_empty());
}

#[test]
fn queue_with_completions_is_not_empty_over_resizes() {
    let machine = Machine::new();
    let queue = machine.queue(7, 8);
    let mut cq = create(&machine, &queue).unwrap();
    raise(&queue, 1);
    let done = AtomicBool::new(false);
    let (object, ring, retired, index_check) =
        (&cq.object, &mut cq.ring, &mut cq.retired, &cq.index_check);
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let mut looks = 0u64;
            while !done.load(Ordering::Relaxed) {
                assert!(!index_check.is_empty());
                looks += 1;
            }
            looks
        });
        for round in 0..200 {
            // It always holds the one.
            let moved = machine.queue(7, 4 << (round % 3));
            raise(&moved, 1);
            let mminfo = moved.mminfo();
            machine.fake.on(RESIZE_CQ, move |reply| {
                reply.set_driver_out(&mminfo);
                Ok(())
            });
            CompletionQueue::resize(object, ring, index_check, retired, 5).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(looker.join().unwrap() > 0);
    });
    assert_eq!(take(&cq.ring), [1]);
}
