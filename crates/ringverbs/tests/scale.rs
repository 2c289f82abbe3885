//! Many queue pairs and completion queues at once: made, used and destroyed,
//! and what an idle one costs. On a device whose name is in `RXE_DEV`, such as
//! rdma_rxe in a guest; without the variable on the ConnectX in this process.
//! `scale --nocapture`.
//!
//! `QPS` and `CQS` say how many; each completion queue has a domain and a
//! region, too.
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::time::{Duration, Instant};

use ringverbs::{
    Buffer, CompletionQueue, Context, Device, LocalAddress, Operation, ProtectionDomain, QueuePair,
    Transport,
};
use testing::{Usage, is_pattern, pattern, setting, variable};

/// Operations that a queue of a pair holds.
const DEPTH: u32 = 16;
/// Bytes of a message.
const SIZE: usize = 64;
/// KiB of the process's own that an idle queue pair may cost: the tables of
/// what is in flight on its two queues, and the handle. The rings of rdma_rxe are
/// the kernel's; of a ConnectX the queues are the process's too, and the rings that
/// work requests are written in before they are carried over.
const OWN_LIMIT: f64 = 8.0;
const OWN_LIMIT_MLX5: f64 = 24.0;

/// A completion queue, with all that completes there.
struct Group {
    pairs: Vec<(QueuePair, QueuePair)>,
    buffers: Vec<Buffer>,
    cq: CompletionQueue,
    domain: ProtectionDomain,
}

impl Group {
    fn new(context: &Context, pairs: usize) -> Self {
        let domain = context.alloc_pd().unwrap();
        let entries = pairs as u32 * 4;
        let cq = context.completion_queue().entries(entries).build().unwrap();
        let region = domain.alloc((pairs * 4 * SIZE).max(SIZE)).unwrap();
        Self {
            buffers: region.into_buffers(SIZE).take(pairs * 4).collect(),
            pairs: Vec::with_capacity(pairs),
            cq,
            domain,
        }
    }

    fn add_pair(&mut self) {
        let make = || {
            let builder = self.domain.queue_pair(Transport::Reliable, &self.cq);
            let builder = builder.send_depth(DEPTH).recv_depth(DEPTH);
            builder.build().unwrap()
        };
        self.pairs.push((make(), make()));
    }

    fn connect(&mut self, local: &LocalAddress) {
        for (a, b) in &mut self.pairs {
            let (at_a, at_b) = (a.endpoint(local), b.endpoint(local));
            a.connect(local, &at_b).unwrap();
            b.connect(local, &at_a).unwrap();
        }
    }

    /// A message in each direction of each pair. Returns how many.
    fn exchange(&mut self, group: usize) -> usize {
        let number = |pair: usize, side: usize| ((group * 100_000 + pair) * 2 + side) as u64;
        for (at, (a, b)) in self.pairs.iter_mut().enumerate() {
            for (side, qp) in [&mut *a, &mut *b].into_iter().enumerate() {
                // Named for the one who sends into it.
                qp.receive(self.buffers.pop().unwrap(), number(at, 1 - side))
                    .unwrap();
            }
            for (side, qp) in [a, b].into_iter().enumerate() {
                let mut buffer = self.buffers.pop().unwrap();
                buffer.fill_up();
                pattern(number(at, side), &mut buffer);
                qp.send(buffer, number(at, side)).unwrap();
            }
        }
        let wanted = self.pairs.len() * 4;
        let end = Instant::now() + Duration::from_secs(60);
        let mut received = 0;
        for done in 0..wanted {
            let mut completion = loop {
                assert!(Instant::now() < end, "only {done} of {wanted} completions");
                if let Some(completion) = self.cq.poll_one().unwrap() {
                    break completion;
                }
            };
            completion.result.unwrap();
            let buffer = completion.take_buffer().unwrap();
            if completion.operation == Operation::Receive {
                assert_eq!(buffer.len(), SIZE);
                assert!(is_pattern(completion.token, &buffer), "{completion:?}");
                received += 1;
            }
            self.buffers.push(buffer);
        }
        received
    }

    /// Every other queue pair is closed, the rest is dropped; what they shared
    /// has to be free then.
    fn destroy(self) {
        for (a, b) in self.pairs {
            a.close().unwrap();
            drop(b);
        }
        self.cq.close().unwrap();
        drop(self.buffers);
        self.domain.close().unwrap();
    }
}

/// Fails with the limit's name if so much cannot be.
fn check_limits(context: &Context, qps: u64, cqs: u64) {
    let device = context.query_device().unwrap();
    println!(
        "{qps} queue pairs, {cqs} completion queues; the device allows {} and {}",
        device.max_qp, device.max_cq
    );
    let number = |path: &str| -> u64 { fs::read_to_string(path).unwrap().trim().parse().unwrap() };
    let mappings = number("/proc/sys/vm/max_map_count");
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let soft = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        let word = line.and_then(|line| line.split_whitespace().next());
        // "unlimited" is no number.
        word.unwrap().parse().unwrap_or(u64::MAX)
    };
    let pages = (qps / cqs * 2 * SIZE as u64).div_ceil(4096);
    for (what, asked, allowed) in [
        ("queue pairs", qps, u64::from(device.max_qp)),
        ("completion queues", cqs, u64::from(device.max_cq)),
        ("domains", cqs, u64::from(device.max_pd)),
        ("regions", cqs, u64::from(device.max_mr)),
        ("mappings", 2 * qps + 2 * cqs + 100, mappings),
        ("open files", 32, soft("Max open files")),
        (
            "locked bytes",
            cqs * pages * 4096,
            soft("Max locked memory"),
        ),
    ] {
        assert!(
            asked <= allowed,
            "{what}: {asked} wanted, {allowed} allowed"
        );
    }
}

/// All of it once. Returns what is in use afterwards.
fn round(qps: usize, cqs: usize) -> Usage {
    let nothing = Usage::now();
    let started = Instant::now();
    let device = match on_device() {
        true => Device::named(&variable("RXE_DEV")),
        false => Device::embedded(),
    };
    let context = device.unwrap().open().unwrap();
    check_limits(&context, qps as u64, cqs as u64);
    let local = context.local_address(1).unwrap();
    let pairs = qps / 2;
    let mut groups: Vec<_> = (0..cqs)
        .map(|group| Group::new(&context, pairs / cqs + usize::from(group < pairs % cqs)))
        .collect();
    let empty = Usage::now();
    println!(
        "completion queues, domains, regions: {}",
        empty.since(&nothing)
    );
    for (group, state) in groups.iter_mut().enumerate() {
        for _ in 0..pairs / cqs + usize::from(group < pairs % cqs) {
            state.add_pair();
        }
    }
    let made = Usage::now();
    println!(
        "queue pairs, {:.1?}: {}",
        started.elapsed(),
        made.since(&empty)
    );
    for group in &mut groups {
        group.connect(&local);
    }
    let connected = Usage::now();
    println!(
        "connected, {:.1?}: {}",
        started.elapsed(),
        connected.since(&empty)
    );
    let mut received = 0;
    for (number, group) in groups.iter_mut().enumerate() {
        received += group.exchange(number);
    }
    println!("{received} messages, {:.1?}", started.elapsed());
    assert_eq!(received, pairs * 2);

    // Files do not grow with what is made; two are a pipe that wakes a poll.
    assert!(Usage::now().since(&nothing).files <= 6);
    let idle = connected.since(&empty);
    let each = |kib: i64| kib as f64 / (pairs * 2) as f64;
    println!(
        "an idle queue pair of depth {DEPTH}: {:.1} KiB resident, {:.1} of them the process's \
         own and the rest its rings; {:.1} KiB of the machine's memory, {:.1} of them slab",
        each(idle.resident),
        each(idle.anonymous),
        each(-idle.available),
        each(idle.slab),
    );
    match std::env::var("RXE_DEV") {
        Ok(name) if name.starts_with("mlx5") => assert!(each(idle.anonymous) < OWN_LIMIT_MLX5),
        Ok(_) => assert!(each(idle.anonymous) < OWN_LIMIT),
        // An embedded device's memory is the process's own, too.
        Err(_) => {}
    }

    for group in groups {
        group.destroy();
    }
    context.close().unwrap();
    let end = Usage::now();
    println!(
        "destroyed, {:.1?}: {}",
        started.elapsed(),
        end.since(&nothing)
    );
    // The embedded device stays, with the pipe that wakes a thread that polls.
    let kept = if on_device() { 0 } else { 2 };
    assert!(end.since(&nothing).files <= kept);
    end
}

/// Whether a device of the machine is tested, not the one in this process.
fn on_device() -> bool {
    std::env::var("RXE_DEV").is_ok()
}

#[test]
fn many_queue_pairs() {
    let (qps, cqs) = (setting("QPS", 200), setting("CQS", 50));
    let first = round(qps, cqs);
    let second = round(qps, cqs);
    // What the first left behind, the allocator's, is all that is ever left, but
    // for what it places elsewhere: less than a quarter KiB for a queue pair.
    let growth = second.since(&first);
    println!("second round: {growth}");
    let room = 1024 + qps as i64 / 4;
    assert!(growth.mappings <= 2, "mappings are left: {growth}");
    assert!(growth.resident <= room, "memory is left: {growth}");
    assert!(growth.virtual_size <= room, "memory is left: {growth}");
}
