//! Message rates of the embedded device, from work request to completion, in one process:
//! `cargo bench -p ringverbs-embedded`.
//!
//! If the caller drives, processor time is measured, which is the same on a busy machine. With
//! the network's thread, real time is measured.

use std::time::{Duration, Instant};

use device_testing::embedded::driver::*;
use ringverbs_embedded::{Drive, Embedded, Network};
use uverbs::{Data, Opcode, QpType, RemoteMemory, SendFlags, SendWr};

const TIME: Duration = Duration::from_millis(1500);
const BATCH: u32 = 32;

fn pair(drive: Drive, devices: usize) -> (Host, Host) {
    let network = Network::new(drive).expect("a network");
    let first = network.device("ib").expect("a device");
    let second = match devices {
        1 => first.clone(),
        _ => network.device("ib").expect("a device"),
    };
    (Host::new(&first), Host::new(&second))
}

/// Polls for the next completion; the caller drives if there is no thread.
fn completion(embedded: &Embedded, drive: Drive, cq: &mut Cq) {
    loop {
        if let Some(wc) = poll_once(cq) {
            assert_eq!(wc.status, 0);
            return;
        }
        match drive {
            Drive::Caller => {
                embedded.drive();
            }
            Drive::Thread | Drive::Watch => std::hint::spin_loop(),
        }
    }
}

/// A clock: processor time of this process, or real time.
fn now(drive: Drive) -> Duration {
    let clock = match drive {
        Drive::Caller => libc::CLOCK_PROCESS_CPUTIME_ID,
        Drive::Thread | Drive::Watch => libc::CLOCK_MONOTONIC,
    };
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the time is written to a place for it.
    assert_eq!(unsafe { libc::clock_gettime(clock, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Posts RDMA writes of `size` bytes, the last of which is signaled.
fn post_batch(qp: &mut Qp, (from, to): (&Memory, &Memory), size: usize) {
    qp.send.begin();
    for n in 1..=BATCH {
        let flags = if n == BATCH {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        let list = [from.sge(0, size)];
        let wr = SendWr {
            remote: RemoteMemory {
                addr: to.address(),
                rkey: to.keys.rkey,
            },
            data: Data::Sges(&list),
            ..SendWr::new(0, Opcode::RDMA_WRITE, flags)
        };
        // SAFETY: no inline data.
        unsafe { qp.send.push(&wr) }.expect("room");
    }
    // SAFETY: the callers keep the memory until they have the batch's completion.
    unsafe { qp.send.publish() };
}

/// RDMA writes of `size` bytes, the last of each batch signaled.
fn writes(drive: Drive, devices: usize, size: usize) -> f64 {
    let (a, b) = pair(drive, devices);
    let (mut cqa, mut cqb) = (a.cq(256), b.cq(256));
    let mut qa = a.qp(QpType::RC, &mut cqa);
    let qb = b.qp(QpType::RC, &mut cqb);
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(size), b.memory(size));
    let (began, start) = (now(drive), Instant::now());
    let mut done = 0u64;
    while start.elapsed() < TIME {
        post_batch(&mut qa, (&from, &to), size);
        completion(&a.embedded, drive, &mut cqa);
        done += u64::from(BATCH);
    }
    done as f64 / (now(drive) - began).as_secs_f64()
}

/// Ping-pong of 64-byte sends; returns the nanoseconds of one direction.
fn ping_pong(drive: Drive, devices: usize) -> f64 {
    let (a, b) = pair(drive, devices);
    let (mut cqa, mut cqb) = (a.cq(256), b.cq(256));
    let mut qa = a.qp(QpType::RC, &mut cqa);
    let mut qb = b.qp(QpType::RC, &mut cqb);
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (ma, mb) = (a.memory(64), b.memory(64));
    let (began, start) = (now(drive), Instant::now());
    let mut rounds = 0u64;
    while start.elapsed() < TIME {
        // Each side receives and replies in turn.
        receive(&mut qb, 0, mb.sge(0, 64));
        post(&mut qa, 0, Operation::Send, ma.sge(0, 64));
        completion(&b.embedded, drive, &mut cqb);
        completion(&a.embedded, drive, &mut cqa);
        receive(&mut qa, 0, ma.sge(0, 64));
        post(&mut qb, 0, Operation::Send, mb.sge(0, 64));
        completion(&a.embedded, drive, &mut cqa);
        completion(&b.embedded, drive, &mut cqb);
        rounds += 1;
    }
    (now(drive) - began).as_nanos() as f64 / (rounds * 2) as f64
}

/// Rounds of the figures, which take turns, and the length of each.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(150);
const MANY: usize = 1000;
/// Buffers that `ringverbs perf` receives messages in, in turns.
const OUTSTANDING: usize = 64;

/// RDMA writes by one thread, which also drives the device: on queue pairs of one
/// device in turns, a batch on each.
struct Writer {
    qps: Vec<Qp>,
    _peers: (Vec<Qp>, Cq),
    cq: Cq,
    from: Memory,
    to: Memory,
    host: Host,
    size: usize,
    next: usize,
}

impl Writer {
    fn new(size: usize, count: usize) -> Self {
        let network = Network::new(Drive::Caller).expect("a network");
        let host = Host::new(&network.device("ib").expect("a device"));
        let (mut cq, mut peer) = (host.cq(256), host.cq(256));
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (a, b) = (host.qp(QpType::RC, &mut cq), host.qp(QpType::RC, &mut peer));
            connect_pair(QpType::RC, (&a, &host), (&b, &host));
            qps.push(a);
            peers.push(b);
        }
        let (from, to) = (host.memory(size), host.memory(size));
        Self {
            qps,
            _peers: (peers, peer),
            cq,
            from,
            to,
            host,
            size,
            next: 0,
        }
    }

    /// Writes in a second of processor time.
    fn rate(&mut self) -> f64 {
        let (began, start) = (now(Drive::Caller), Instant::now());
        let mut done = 0;
        while start.elapsed() < ROUND {
            let qp = &mut self.qps[self.next];
            post_batch(qp, (&self.from, &self.to), self.size);
            completion(&self.host.embedded, Drive::Caller, &mut self.cq);
            done += BATCH;
            self.next = (self.next + 1) % self.qps.len();
        }
        f64::from(done) / (now(Drive::Caller) - began).as_secs_f64()
    }
}

/// Copies of `size` bytes per second, to that many buffers in turns; a single one stays in the
/// cache.
fn copies(size: usize, buffers: usize) -> f64 {
    let (from, mut to) = (vec![1u8; size], vec![0u8; size * buffers]);
    let mut places = (0..buffers).cycle().map(|index| index * size);
    let (began, start) = (now(Drive::Caller), Instant::now());
    let mut done = 0;
    while start.elapsed() < ROUND {
        for _ in 0..BATCH {
            let at = places.next().unwrap_or(0);
            let to = std::hint::black_box(&mut to[at..at + size]);
            to.copy_from_slice(std::hint::black_box(&from));
        }
        done += BATCH;
    }
    f64::from(done) / (now(Drive::Caller) - began).as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// For `cargo xtask bench`: a line per figure, with its name and operations per second of
/// processor time.
fn figures() {
    let measure = |name: &str, size: usize, count: usize| {
        let mut writer = Writer::new(size, count);
        let mut rates = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            rates.0.push(writer.rate());
            rates.1.push(copies(size, 1));
        }
        println!("{name} {} {}", median(rates.0), median(rates.1));
    };
    for size in [64, 4096, 65536] {
        measure(&format!("write-{size}"), size, 1);
    }
    measure("write-64-many", 64, MANY);
    let rates = |buffers| median((0..ROUNDS).map(|_| copies(65536, buffers)).collect());
    println!("copy-65536 {} {}", rates(OUTSTANDING), rates(1));
}

fn main() {
    if std::env::args().any(|arg| arg == "figures") {
        return figures();
    }
    // `cargo test` runs benches without this argument.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    println!("{:<44}{:>12}{:>12}", "", "caller", "thread");
    for (devices, how) in [(1, "one device"), (2, "two devices")] {
        for size in [64, 4096, 65536] {
            let [caller, thread] =
                [Drive::Caller, Drive::Thread].map(|drive| writes(drive, devices, size) / 1e6);
            let what = format!("RC write, {size} bytes, {how}, M/s");
            println!("{what:<44}{caller:>12.3}{thread:>12.3}");
        }
        let [caller, thread] =
            [Drive::Caller, Drive::Thread].map(|drive| ping_pong(drive, devices) / 1e3);
        let what = format!("send, 64 bytes, {how}, µs one way");
        println!("{what:<44}{caller:>12.2}{thread:>12.2}");
    }
}
