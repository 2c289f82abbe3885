//! The biased lock on real threads and the real membarrier(2), which loom can
//! only model.
#![cfg(not(loom))]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs_ring::BiasedLock;

/// Two counts that are equal whenever nobody is in.
struct Guarded {
    lock: BiasedLock,
    counts: UnsafeCell<(u64, u64)>,
}

// SAFETY: the counts are only touched under the lock, which is what is tested.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn new() -> Self {
        Self {
            lock: BiasedLock::new(),
            counts: UnsafeCell::new((0, 0)),
        }
    }

    fn add(&self) {
        self.lock.lock();
        let counts = self.counts.get();
        // SAFETY: under the lock. Volatile, so that somebody else in here
        // would be seen.
        unsafe {
            let (a, b) = ((&raw mut (*counts).0), (&raw mut (*counts).1));
            let seen = a.read_volatile();
            assert_eq!(seen, b.read_volatile(), "two threads in the lock");
            a.write_volatile(seen + 1);
            b.write_volatile(seen + 1);
        }
        self.lock.unlock();
    }

    fn total(&mut self) -> u64 {
        self.counts.get_mut().0
    }
}

/// The thread that came often in a row goes by the quick way; after another
/// has come it never does again.
#[test]
fn bias_is_granted_and_revoked() {
    let guarded = Guarded::new();
    assert!(!guarded.lock.try_lock_fast(), "nobody has the bias yet");
    (0..1000).for_each(|_| guarded.add());
    if !guarded.lock.try_lock_fast() {
        eprintln!("no membarrier(2) here: no bias");
        return;
    }
    assert!(!guarded.lock.try_lock_fast(), "it is taken");
    guarded.lock.unlock_fast();
    thread::scope(|scope| {
        scope.spawn(|| assert!(!guarded.lock.try_lock_fast()));
    });
    thread::scope(|scope| {
        scope.spawn(|| guarded.add());
    });
    (0..1000).for_each(|_| guarded.add());
    assert!(!guarded.lock.try_lock_fast(), "the bias comes back");
}

/// A batch may end on another thread than it began on, and an owner that is in
/// keeps others out.
#[test]
fn revocation_waits_for_the_owner() {
    let guarded = Guarded::new();
    (0..1000).for_each(|_| guarded.add());
    guarded.lock.lock();
    let out = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            guarded.lock.lock();
            assert!(out.load(Ordering::Relaxed), "the owner was still in");
            guarded.lock.unlock();
        });
        thread::sleep(Duration::from_millis(50));
        out.store(true, Ordering::Relaxed);
        scope.spawn(|| guarded.lock.unlock());
    });
}

/// The moment that matters, many times over: another thread comes while the
/// owner goes in and out as fast as it can.
#[test]
fn revocation_excludes_on_real_threads() {
    const COMES: u64 = 200;
    let end = Instant::now() + Duration::from_secs(3);
    let mut rounds = 0u32;
    while Instant::now() < end {
        let mut guarded = Guarded::new();
        let stop = AtomicBool::new(false);
        let ready = AtomicBool::new(false);
        let mine = thread::scope(|scope| {
            scope.spawn(|| {
                while !ready.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                for _ in 0..rounds % 512 {
                    std::hint::spin_loop();
                }
                (0..COMES).for_each(|_| guarded.add());
                stop.store(true, Ordering::Relaxed);
            });
            let mut mine = 0;
            while !stop.load(Ordering::Relaxed) {
                guarded.add();
                mine += 1;
                if mine == 100 {
                    ready.store(true, Ordering::Relaxed);
                }
            }
            mine
        });
        assert_eq!(guarded.total(), mine + COMES);
        rounds += 1;
    }
    assert!(rounds > 20, "only {rounds} rounds");
}
