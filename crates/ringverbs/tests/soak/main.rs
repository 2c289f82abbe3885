//! Everything at once, for long, with ends that die in the middle: no buffer is
//! lost, none comes back twice, all bytes are right, and nothing grows. On a
//! device whose name is in `RXE_DEV`, such as rdma_rxe in a guest; without the
//! variable on the ConnectX in this process, of which the victims have another.
//! `soak --nocapture`.
//!
//! `SOAK_SECONDS` says how long, `SOAK_SEED` which random choices are made.
//! It goes in rounds, after each of which everything is closed and counted.
#![allow(missing_docs, reason = "a test")]

mod active;
mod killed_peer;
mod link_state;
mod passive;
mod pool;
mod resources;

use std::fmt;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::Device;
use testing::{Rng, Usage, setting};

/// Threads with active ends.
const THREADS: usize = 2;
/// Active ends of a thread.
const LINKS: usize = 5;
/// A round's length, in seconds, where there is time for several.
const ROUND: u64 = 60;
/// KiB that the process may grow by after the first round: the allocator's
/// own, which depends on what was alive at the same time.
const GROWTH: i64 = 4096;
/// KiB that the whole machine may lose meanwhile; others use it as well.
const MACHINE_GROWTH: i64 = 128 * 1024;

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub lives: u64,
    pub operations: u64,
    pub messages: u64,
    pub failures: u64,
    pub active_kills: u64,
    pub passive_kills: u64,
    pub resets: u64,
    pub killed_peers: u64,
    /// Atomics that succeeded without their old value. rdma_rxe does that when
    /// a request is sent again although nothing was lost, as it is on a machine
    /// that is busy (rxe-tests/programs/losses.c shows it with C).
    pub without_data: u64,
    /// Queue pairs that were flushed after a reset although nobody had killed
    /// them. rdma_rxe of Linux 6.1 writes the completion of a failed request
    /// before it sets the queue pair's error state, and a reset does not wait for
    /// that: the error then belongs to the connection after the reset.
    pub late_errors: u64,
    /// Times that buffers were posted, came back, and went with a queue pair.
    pub buffers: [u64; 3],
}

impl Counts {
    pub fn count(&mut self, buffers: [u64; 3]) {
        for (sum, count) in self.buffers.iter_mut().zip(buffers) {
            *sum += count;
        }
    }

    fn add(&mut self, other: &Self) {
        for (sum, count) in [
            (&mut self.lives, other.lives),
            (&mut self.operations, other.operations),
            (&mut self.messages, other.messages),
            (&mut self.failures, other.failures),
            (&mut self.active_kills, other.active_kills),
            (&mut self.passive_kills, other.passive_kills),
            (&mut self.resets, other.resets),
            (&mut self.killed_peers, other.killed_peers),
            (&mut self.without_data, other.without_data),
            (&mut self.late_errors, other.late_errors),
        ] {
            *sum += count;
        }
        self.count(other.buffers);
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [posted, returned, released] = self.buffers;
        write!(
            f,
            "{} lives ({} killed here, {} there, {} processes; {} of a queue pair that was \
             reset, {} of them flushed by an earlier error), {} operations done ({} atomics without data) and {} failed, {} messages \
             take_next; {posted} buffers posted, {returned} back, {released} gone with their queue pair",
            self.lives,
            self.active_kills,
            self.passive_kills,
            self.killed_peers,
            self.resets,
            self.late_errors,
            self.operations,
            self.without_data,
            self.failures,
            self.messages,
        )
    }
}

/// Whether the device is rdma_rxe.
fn is_rxe() -> bool {
    std::env::var("RXE_DEV").is_ok_and(|name| !name.starts_with("embedded"))
}

/// Requests that the device has seen more than once, if it counts them.
fn duplicates() -> Option<u64> {
    let device = std::env::var("RXE_DEV")
        .ok()
        .filter(|name| !name.starts_with("embedded"))?;
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/duplicate_request");
    let text = std::fs::read_to_string(path).unwrap();
    Some(text.trim().parse().unwrap())
}

fn round(seed: u64, length: Duration) -> Counts {
    let mut numbers = Rng(seed);
    let end = Instant::now() + length;
    let context = Device::named(&device_name()).unwrap().open().unwrap();
    let (orders, received) = channel();
    let mut counts = Counts::default();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        let passive = passive::Passive::new(context.clone(), received, numbers.next());
        threads.push(scope.spawn(move || passive.run()));
        for thread in 0..THREADS {
            let links = thread * LINKS..(thread + 1) * LINKS;
            let (context, orders) = (context.clone(), orders.clone());
            let active = active::Active::new(context, links, orders, numbers.next());
            threads.push(scope.spawn(move || active.run(end)));
        }
        drop(orders);
        let (context, seed) = (context.clone(), numbers.next());
        threads.push(scope.spawn(move || killed_peer::run(context, seed, end)));
        for thread in threads {
            // Its own message is on the standard error.
            counts.add(&thread.join().unwrap_or_else(|_| panic!("a thread failed")));
        }
    });
    // Nobody has anything of it any more.
    context.close().unwrap();
    let [posted, returned, released] = counts.buffers;
    assert_eq!(posted, returned + released);
    assert!(counts.operations > 0 && counts.messages > 0);
    counts
}

/// The directory in which the processes of this test meet, if they need one.
fn directory() -> PathBuf {
    std::env::temp_dir().join(format!("ringverbs-soak-{}", std::process::id()))
}

/// The device under test; victims are told of it.
fn device_name() -> String {
    let embedded = |_| format!("embedded:{}", directory().display());
    std::env::var("RXE_DEV").unwrap_or_else(embedded)
}

#[test]
fn mixed_operations_with_deaths() {
    let on_device = std::env::var("RXE_DEV").is_ok();
    let seconds: u64 = setting("SOAK_SECONDS", if on_device { 10 } else { 4 });
    let clock = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let seed = setting("SOAK_SEED", clock.as_nanos() as u64);
    println!("SOAK_SECONDS={seconds} SOAK_SEED={seed}");
    let rounds = (seconds / ROUND).max(2);
    let length = Duration::from_secs(seconds) / rounds as u32;
    let mut all = Counts::default();
    let mut numbers = Rng(seed);
    let mut first = None;
    for number in 1..=rounds {
        let before = duplicates();
        let counts = round(numbers.next(), length);
        let again = duplicates().zip(before).map(|(now, before)| now - before);
        all.add(&counts);
        println!("round {number} of {rounds}: {counts}; {again:?} requests came again");
        assert!(
            counts.without_data == 0 || again.is_none_or(|again| again > 0),
            "the kernel has no part in it"
        );
        let now = Usage::now();
        // The first is there to warm up.
        let growth = now.since(first.get_or_insert(now));
        println!("  since the first: {growth}");
        assert_eq!(growth.files, 0, "open files are left: {growth}");
        assert!(growth.resident < GROWTH, "memory is left: {growth}");
        assert!(growth.mappings < 32, "mappings are left: {growth}");
        // The memory of a device in the kernel; a guest runs nothing else.
        assert!(
            !on_device || -growth.available < MACHINE_GROWTH,
            "the kernel's: {growth}"
        );
    }
    println!("all: {all}");
    if !on_device {
        std::fs::remove_dir_all(directory()).unwrap();
    }
    assert!(all.active_kills > 0 && all.failures > 0);
    assert!(seconds < 10 || (all.passive_kills > 0 && all.resets > 0 && all.killed_peers > 0));
}
