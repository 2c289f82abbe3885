//! The shipped index protocol under loom: every interleaving of the two sides
//! that the memory model allows. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringverbs-ring --release --test loom`.
#![cfg(loom)]

use std::ptr::NonNull;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use ringverbs_ring::{
    BiasedLock, Consumer, Epoch, FrameConsumer, FrameHeader, FrameProducer, Header, IndexCheck,
    Indices, Outstanding, Producer, Sequences, Sleeper, SpinLock, order,
};

/// A ring in memory that loom watches: a data race on a slot fails the test.
struct Shared {
    header: Box<Header>,
    slots: Vec<UnsafeCell<u32>>,
}

// SAFETY: slots are handed over by the protocol under test; loom checks that.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(slots: u32) -> Arc<Self> {
        Arc::new(Self {
            header: Box::new(Header::new(0, slots - 1)),
            slots: (0..slots).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn indices(&self) -> Indices {
        // SAFETY: every test keeps the Arc while it uses the indices.
        unsafe { Indices::new(NonNull::from(&*self.header), self.slots.len() as u32 - 1, 0) }
    }

    fn write(&self, at: usize, value: u32) {
        // SAFETY: loom reports a concurrent access.
        self.slots[at].with_mut(|slot| unsafe { *slot = value });
    }

    fn read(&self, at: usize) -> u32 {
        // SAFETY: loom reports a concurrent access.
        self.slots[at].with(|slot| unsafe { *slot })
    }
}

/// A model with few preemptions: enough for two threads on two indices, and it
/// ends in seconds.
fn model(test: impl Fn() + Send + Sync + 'static) {
    bounded(3, test);
}

fn bounded(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(test);
}

/// We post, the device consumes: every entry arrives whole and in order, and
/// no slot is written while the device may still read it, across a wrap.
#[test]
fn device_sees_whole_entries_in_order() {
    model(|| {
        let shared = Shared::new(2);
        let device = {
            let shared = shared.clone();
            thread::spawn(move || {
                for expected in 1..=3 {
                    let at = shared.header.consumer();
                    while shared.header.producer() == at {
                        thread::yield_now();
                    }
                    assert_eq!(shared.read(at as usize), expected);
                    shared.header.publish_consumer((at + 1) & 1);
                }
            })
        };
        let mut producer = Producer::new(shared.indices());
        for value in 1..=3 {
            let at = producer.tail();
            while !producer.has_room(at) {
                thread::yield_now();
            }
            shared.write(at, value);
            let next = producer.indices().next(at);
            producer.publish(next);
        }
        device.join().unwrap();
    });
}

/// The device completes, we consume in batches: each completion once, in
/// order, and no slot is reused before it was read.
#[test]
fn completions_come_once_and_in_order() {
    model(|| {
        let shared = Shared::new(4);
        let device = {
            let shared = shared.clone();
            thread::spawn(move || {
                for value in 1..=4 {
                    let at = shared.header.producer();
                    let next = (at + 1) & 3;
                    while shared.header.consumer() == next {
                        thread::yield_now();
                    }
                    shared.write(at as usize, value);
                    shared.header.publish_producer(next);
                }
            })
        };
        let consumer = Consumer::new(shared.indices());
        let mut expected = 1;
        while expected <= 4 {
            let mut span = consumer.available();
            if span.at == span.end {
                thread::yield_now();
                continue;
            }
            while span.at != span.end {
                assert_eq!(shared.read(span.at), expected);
                expected += 1;
                span.at = consumer.indices().next(span.at);
            }
            consumer.release(span.at);
        }
        device.join().unwrap();
    });
}

/// The driver's side of notification: entries are added, and events raised,
/// under one lock, as in rxe_cq_post and rxe_req_notify_cq.
struct Notifier {
    armed: Mutex<bool>,
    raised: Mutex<u32>,
    wake: Condvar,
}

impl Notifier {
    fn complete(&self, shared: &Shared, value: u32) {
        let mut armed = self.armed.lock().unwrap();
        let at = shared.header.producer();
        shared.write(at as usize, value);
        shared
            .header
            .publish_producer((at + 1) & (shared.slots.len() as u32 - 1));
        if *armed {
            *armed = false;
            *self.raised.lock().unwrap() += 1;
            self.wake.notify_one();
        }
    }

    fn arm(&self) -> Result<(), ()> {
        *self.armed.lock().unwrap() = true;
        Ok(())
    }

    fn wait(&self) {
        let mut raised = self.raised.lock().unwrap();
        while *raised == 0 {
            raised = self.wake.wait(raised).unwrap();
        }
        *raised -= 1;
    }
}

/// Arm, look, wait: no completion is slept on. A lost wake-up is a deadlock,
/// which loom reports.
#[test]
fn no_wake_up_is_lost_between_arm_and_check() {
    model(|| {
        let shared = Shared::new(4);
        let notifier = Arc::new(Notifier {
            armed: Mutex::new(false),
            raised: Mutex::new(0),
            wake: Condvar::new(),
        });
        let device = {
            let (shared, notifier) = (shared.clone(), notifier.clone());
            thread::spawn(move || {
                notifier.complete(&shared, 1);
                notifier.complete(&shared, 2);
            })
        };
        let consumer = Consumer::new(shared.indices());
        let mut seen = 0;
        while seen < 2 {
            if !consumer.arm_and_check(|| notifier.arm()).unwrap() {
                notifier.wait();
            }
            let mut span = consumer.available();
            while span.at != span.end {
                seen += 1;
                assert_eq!(shared.read(span.at), seen);
                span.at = consumer.indices().next(span.at);
            }
            consumer.release(span.at);
        }
        device.join().unwrap();
    });
}

/// A look without the lock never calls a queue empty that holds an entry all
/// along, though a resize moves it meanwhile; and after the resize it looks
/// at the new ring.
#[test]
fn resize_does_not_look_empty() {
    model(|| {
        let old = Shared::new(2);
        let new = Shared::new(4);
        old.header.publish_producer(1);
        // SAFETY: both rings outlive the value; the Arcs are held to the end.
        let index_check = Arc::new(unsafe { IndexCheck::new(&old.indices()) });
        let resizer = {
            let (old, new, index_check) = (old.clone(), new.clone(), index_check.clone());
            thread::spawn(move || {
                index_check.suspend();
                // The kernel: copies the entry and closes the old ring.
                new.header.publish_producer(1);
                old.header.publish_consumer(1);
                index_check.resume(&new.indices());
            })
        };
        assert!(!index_check.is_empty());
        assert!(!index_check.is_empty());
        resizer.join().unwrap();
        assert!(!index_check.is_empty());
        new.header.publish_consumer(1);
        assert!(index_check.is_empty());
    });
}

/// A look without the lock, armed before: if it says empty while another
/// thread consumes, whatever is still there raises an event.
#[test]
fn unlocked_check_after_arming_misses_nothing() {
    model(|| {
        let shared = Shared::new(4);
        shared.write(0, 1);
        shared.header.publish_producer(1);
        // SAFETY: the Arc is held to the end.
        let index_check = Arc::new(unsafe { IndexCheck::new(&shared.indices()) });
        let notifier = Arc::new(Notifier {
            armed: Mutex::new(false),
            raised: Mutex::new(0),
            wake: Condvar::new(),
        });
        // Another thread takes what is there, once.
        let other = {
            let shared = shared.clone();
            thread::spawn(move || {
                let consumer = Consumer::new(shared.indices());
                let span = consumer.available();
                consumer.release(span.end);
            })
        };
        let device = {
            let (shared, notifier) = (shared.clone(), notifier.clone());
            thread::spawn(move || notifier.complete(&shared, 2))
        };
        notifier.arm().unwrap();
        if index_check.is_empty() {
            // Completion 2 came after this look; so the event is raised, or
            // the other thread has it: either way nothing is left unheard.
            device.join().unwrap();
            other.join().unwrap();
            let left = shared.header.producer() != shared.header.consumer();
            assert!(!left || *notifier.raised.lock().unwrap() == 1);
        } else {
            device.join().unwrap();
            other.join().unwrap();
        }
    });
}

/// The lock lets one thread in at a time, and hands over what it wrote.
#[test]
fn the_lock_excludes() {
    loom::model(|| {
        struct Guarded(SpinLock, UnsafeCell<u32>);
        // SAFETY: the cell is only touched under the lock; loom checks that.
        unsafe impl Sync for Guarded {}
        // SAFETY: plain data.
        unsafe impl Send for Guarded {}
        let guarded = Arc::new(Guarded(SpinLock::new(), UnsafeCell::new(0)));
        let add = |guarded: &Guarded| {
            guarded.0.lock();
            // SAFETY: under the lock.
            guarded.1.with_mut(|n| unsafe { *n += 1 });
            guarded.0.unlock();
        };
        let other = {
            let guarded = guarded.clone();
            thread::spawn(move || add(&guarded))
        };
        add(&guarded);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(guarded.1.with(|n| unsafe { *n }), 2);
    });
}

/// Entries that one thread hands to another through [`Sequences`] arrive whole
/// and in order, and no place is filled while it may still be read, across a
/// wrap of the counters.
#[test]
fn sequences_hand_over_whole_entries() {
    model(|| {
        const START: u32 = u32::MAX;
        const PLACES: u32 = 2;
        let shared = Arc::new((Sequences::starting_at(START), Shared::new(PLACES)));
        let place = |sequence: u32| (sequence % PLACES) as usize;
        let consumer = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (sequences, slots) = &*shared;
                for expected in 1..=3u32 {
                    let at = sequences.own_consumed();
                    while sequences.produced() == at {
                        thread::yield_now();
                    }
                    assert_eq!(slots.read(place(at)), expected);
                    sequences.publish_consumed(at.wrapping_add(1));
                }
            })
        };
        let (sequences, slots) = &*shared;
        for value in 1..=3u32 {
            let at = sequences.own_produced();
            while at.wrapping_sub(sequences.consumed()) == PLACES {
                thread::yield_now();
            }
            slots.write(place(at), value);
            sequences.publish_produced(at.wrapping_add(1));
        }
        consumer.join().unwrap();
    });
}

/// Whoever sees an epoch sees the changes that led to it.
#[test]
fn an_epoch_brings_its_change() {
    model(|| {
        let shared = Arc::new((Epoch::new(), Shared::new(2)));
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.1.write(0, 7);
                shared.0.advance();
            })
        };
        if shared.0.now() == 1 {
            assert_eq!(shared.1.read(0), 7);
        }
        writer.join().unwrap();
    });
}

/// A value under a biased lock.
struct Biased(BiasedLock, UnsafeCell<u32>);
// SAFETY: the cell is only touched under the lock; loom checks that.
unsafe impl Sync for Biased {}
// SAFETY: plain data.
unsafe impl Send for Biased {}

impl Biased {
    fn new() -> Arc<Self> {
        Arc::new(Self(BiasedLock::new(), UnsafeCell::new(0)))
    }

    fn add(&self, thread: usize) {
        self.0.lock_as(thread);
        // SAFETY: under the lock.
        self.1.with_mut(|n| unsafe { *n += 1 });
        self.0.unlock();
    }
}

/// Either the thread that goes to sleep finds the doorbell, or who wrote it learns
/// that it has to be woken.
#[test]
fn a_sleeper_misses_no_doorbell() {
    loom::model(|| {
        let shared = Arc::new((Sleeper::new(), AtomicU32::new(0)));
        let poster = Arc::clone(&shared);
        let poster = thread::spawn(move || {
            poster.1.store(1, Ordering::Relaxed);
            poster.0.is_asleep()
        });
        assert!(shared.0.announce());
        let found = shared.1.load(Ordering::Relaxed) != 0;
        let woken = poster.join().unwrap();
        assert!(found || woken);
    });
}

/// Either the thread that rests finds the command, or one of those who gave commands wakes
/// it.
#[test]
fn a_resting_thread_is_woken_once() {
    loom::model(|| {
        let shared = Arc::new((Sleeper::new(), AtomicU32::new(0)));
        let command = |shared: Arc<(Sleeper, AtomicU32)>, bit: u32| {
            thread::spawn(move || {
                shared.1.fetch_or(bit, Ordering::Relaxed);
                shared.0.claim_wake()
            })
        };
        let threads = [1, 2].map(|bit| command(Arc::clone(&shared), bit));
        shared.0.announce_rest();
        let found = shared.1.load(Ordering::Relaxed);
        let woken = threads.map(|it| it.join().unwrap());
        assert!(found == 3 || woken != [false, false]);
        assert_ne!(woken, [true, true]);
    });
}

/// The thread that has the bias and one that takes it away are never in
/// together, and each sees what the other did.
#[test]
fn revocation_excludes() {
    model(|| {
        let guarded = Biased::new();
        // Gets the bias.
        guarded.add(2);
        let other = {
            let guarded = guarded.clone();
            thread::spawn(move || guarded.add(4))
        };
        guarded.add(2);
        guarded.add(2);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(guarded.1.with(|n| unsafe { *n }), 4);
    });
}

/// Two threads that come for the bias at once both wait for its owner.
#[test]
fn two_revocations_exclude() {
    // Three threads: more would take minutes.
    bounded(1, || {
        let guarded = Biased::new();
        guarded.add(2);
        let others = [4, 6].map(|thread| {
            let guarded = guarded.clone();
            thread::spawn(move || guarded.add(thread))
        });
        guarded.add(2);
        for other in others {
            other.join().unwrap();
        }
        // SAFETY: the other threads have ended.
        assert_eq!(guarded.1.with(|n| unsafe { *n }), 4);
    });
}

/// Threads that come to a new lock at once.
#[test]
fn granting_the_bias_excludes() {
    model(|| {
        let guarded = Biased::new();
        let other = {
            let guarded = guarded.clone();
            thread::spawn(move || {
                guarded.add(4);
                guarded.add(4);
            })
        };
        guarded.add(2);
        guarded.add(2);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(guarded.1.with(|n| unsafe { *n }), 4);
    });
}

/// A batch of the thread with the bias that another thread ends: the owner,
/// which comes again with nothing else between the two, sees what was done.
#[test]
fn a_release_by_another_thread_hands_over() {
    model(|| {
        let guarded = Biased::new();
        // Gets the bias.
        guarded.add(2);
        guarded.0.lock_as(2);
        let other = {
            let guarded = guarded.clone();
            thread::spawn(move || {
                // SAFETY: under the lock, which this thread was left.
                guarded.1.with_mut(|n| unsafe { *n += 1 });
                guarded.0.unlock();
            })
        };
        guarded.add(2);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        assert_eq!(guarded.1.with(|n| unsafe { *n }), 3);
    });
}

/// A queue in the process's own memory, as a device like mlx5 uses it: one
/// thread posts, the device takes the entry that the doorbell record tells and
/// writes a completion, its owner byte last, and another thread reads that and
/// gives the slot back. Every entry and completion arrives whole, no slot is
/// written while the device may still read it, and each identifier is the one
/// that was posted.
#[test]
fn slot_is_reused_after_its_completion_was_read() {
    use loom::sync::atomic::{AtomicU8, AtomicU32, Ordering};

    const SLOTS: usize = 2;
    const REQUESTS: usize = 3;

    struct Queue {
        entries: [UnsafeCell<usize>; SLOTS],
        record: AtomicU32,
        completions: [UnsafeCell<usize>; REQUESTS],
        owners: [AtomicU8; REQUESTS],
        outstanding: Outstanding,
    }
    // SAFETY: cells are handed over by the protocol under test; loom checks that.
    unsafe impl Send for Queue {}
    // SAFETY: as above.
    unsafe impl Sync for Queue {}

    model(move || {
        let queue = Arc::new(Queue {
            entries: std::array::from_fn(|_| UnsafeCell::new(0)),
            record: AtomicU32::new(0),
            completions: std::array::from_fn(|_| UnsafeCell::new(0)),
            owners: std::array::from_fn(|_| AtomicU8::new(0)),
            outstanding: Outstanding::new(SLOTS as u32).unwrap(),
        });
        let poster = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                for i in 0..REQUESTS {
                    let wr_count = i as u32 + 1;
                    // Whoever has to wait gives up instead: some interleaving
                    // does not have to.
                    if wr_count - queue.outstanding.completed() > SLOTS as u32 {
                        break;
                    }
                    // SAFETY: loom reports a concurrent access.
                    queue.entries[i % SLOTS].with_mut(|entry| unsafe { *entry = i + 10 });
                    queue
                        .outstanding
                        .post((i % SLOTS) as u32, i as u64 + 20, wr_count);
                    order::doorbell_record(&queue.record, wr_count.to_be());
                }
            })
        };
        let device = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                for i in 0..REQUESTS {
                    if u32::from_be(queue.record.load(Ordering::Acquire)) <= i as u32 {
                        break;
                    }
                    // SAFETY: loom reports a concurrent access.
                    let entry = queue.entries[i % SLOTS].with(|entry| unsafe { *entry });
                    // SAFETY: as above.
                    queue.completions[i].with_mut(|wc| unsafe { *wc = entry });
                    queue.owners[i].store(1, Ordering::Release);
                }
            })
        };
        for i in 0..REQUESTS {
            if order::written_by_device(&queue.owners[i]) == 0 {
                break;
            }
            // SAFETY: loom reports a concurrent access.
            let entry = queue.completions[i].with(|wc| unsafe { *wc });
            assert_eq!(entry, i + 10);
            let slot = (i % SLOTS) as u32;
            let found = queue.outstanding.find(slot).unwrap();
            assert_eq!(found.wr_id, i as u64 + 20);
            queue.outstanding.complete(found);
        }
        poster.join().unwrap();
        device.join().unwrap();
    });
}

/// A ring of frames of one word, in memory that loom watches.
struct Frames {
    header: Box<FrameHeader>,
    slots: [UnsafeCell<u32>; 2],
    /// The wake-up, which is pending until the receiver has looked.
    doorbell: (Mutex<bool>, Condvar),
}

// SAFETY: slots are handed over by the protocol under test; loom checks that.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            header: Box::new(FrameHeader::new()),
            slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
            doorbell: (Mutex::new(false), Condvar::new()),
        })
    }

    fn slot(&self, at: u32) -> &UnsafeCell<u32> {
        &self.slots[at as usize % 2]
    }

    /// Sends the frames, waiting for room, and wakes the receiver once for all.
    fn send(&self, frames: impl Iterator<Item = u32>) {
        // SAFETY: the header outlives the value.
        let mut producer = unsafe { FrameProducer::new(NonNull::from(&*self.header), 2) };
        for frame in frames {
            let at = loop {
                match producer.room(1).unwrap() {
                    Some(at) => break at,
                    None => thread::yield_now(),
                }
            };
            // SAFETY: loom reports a concurrent access.
            self.slot(at).with_mut(|slot| unsafe { *slot = frame });
            producer.publish(1);
            if producer.takes_wake_up() {
                *self.doorbell.0.lock().unwrap() = true;
                self.doorbell.1.notify_one();
            }
        }
    }

    /// Receives a frame, if there is one.
    fn receive(&self, consumer: &mut FrameConsumer) -> Option<u32> {
        let (at, unread) = consumer.unread().unwrap();
        if unread == 0 {
            return None;
        }
        // SAFETY: loom reports a concurrent access.
        let frame = self.slot(at).with(|slot| unsafe { *slot });
        consumer.release(1);
        Some(frame)
    }
}

/// A receiver that sleeps whenever it finds nothing gets every frame, whole and in
/// order: loom reports a sleep that nobody ends.
#[test]
fn a_receiver_of_frames_misses_no_wake_up() {
    model(|| {
        let shared = Frames::new();
        let sender = {
            let shared = shared.clone();
            thread::spawn(move || shared.send(1..=3))
        };
        // SAFETY: the header outlives the value.
        let mut consumer = unsafe { FrameConsumer::new(NonNull::from(&*shared.header), 2) };
        let mut expected = 1;
        while expected <= 3 {
            if let Some(frame) = shared.receive(&mut consumer) {
                assert_eq!(frame, expected);
                expected += 1;
            } else if !consumer.arm() {
                let mut rung = shared.doorbell.0.lock().unwrap();
                while !*rung {
                    rung = shared.doorbell.1.wait(rung).unwrap();
                }
                *rung = false;
            }
        }
        sender.join().unwrap();
    });
}
