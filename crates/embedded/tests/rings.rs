//! Rings of frames whose other side is hostile or killed: other processes are not affected.
#![allow(missing_docs, reason = "a test")]

mod raw_peer;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use device_testing::embedded::driver::*;
use raw_peer::{
    RawPeer, TempDirectory, accept, connection, listener, overwrite_word, send_descriptors,
};
use ringverbs_embedded::{Drive, Network};
use uverbs::{AhAttr, QpType};

/// Random numbers from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.0 >> 24
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

fn host(directory: &TempDirectory) -> Host {
    let network = Network::joined(Drive::Watch, &directory.0).unwrap();
    Host::new(&network.device("roce").unwrap())
}

/// A connection between two devices, to check that messages still arrive.
///
/// Dropped in this order: a completion queue must outlive its queue pairs, and memory all
/// queues.
struct Exchange {
    qps: (Qp, Qp),
    cqs: (Cq, Cq),
    a: Host,
    _b: Host,
    memory: (Memory, Memory),
    round: u64,
}

const SIZE: usize = 9001;

impl Exchange {
    fn new(directory: &TempDirectory) -> Self {
        let (a, b) = (host(directory), host(directory));
        let mut cqs = (a.cq(64), b.cq(64));
        let qps = (a.qp(QpType::RC, &mut cqs.0), b.qp(QpType::RC, &mut cqs.1));
        connect_pair(QpType::RC, (&qps.0, &a), (&qps.1, &b));
        let memory = (a.memory(SIZE), b.memory(SIZE));
        Self {
            a,
            _b: b,
            cqs,
            qps,
            memory,
            round: 0,
        }
    }

    /// Sends a message, and checks it.
    fn check_messages(&mut self) {
        self.round += 1;
        let data: Vec<u8> = (0..SIZE as u64)
            .map(|at| (at * 7 + self.round) as u8)
            .collect();
        self.memory.0.set(0, &data);
        receive(&mut self.qps.1, self.round, self.memory.1.sge(0, SIZE));
        post(
            &mut self.qps.0,
            self.round,
            Operation::Send,
            self.memory.0.sge(0, SIZE),
        );
        for cq in [&mut self.cqs.0, &mut self.cqs.1] {
            let completion = wait(cq);
            assert_eq!((completion.status, completion.wr_id), (0, self.round));
        }
        assert_eq!(self.memory.1.get(0, SIZE), data);
    }
}

/// Random words anywhere in a ring, while its receiver reads it and exchanges messages with
/// others: at most the hostile sender is disconnected.
#[test]
fn a_hostile_sender_does_not_affect_others() {
    const HEADER: u64 = 96;
    let directory = TempDirectory::new("ring-sender");
    let mut exchange = Exchange::new(&directory);
    let mut random = Random(7);
    for round in 0..60 {
        // One after the other, and several at once.
        let Ok(mut peer) = RawPeer::new(&directory.0, (round % 2) as u16) else {
            continue;
        };
        for _ in 0..random.below(20) {
            let frame = vec![random.next() as u8; random.below(4400) as usize];
            peer.push(random.below(5) as u8, &frame);
        }
        for _ in 0..random.below(200) {
            let at = match random.below(4) {
                0 => random.below(HEADER),
                // Where frames begin.
                1 => 1024 + random.below(64),
                _ => random.next(),
            };
            let word = match random.below(3) {
                0 => random.below(8000) as u32,
                _ => random.next() as u32,
            };
            overwrite_word(&peer.memory, at as usize, word);
        }
        exchange.check_messages();
    }
    // Indices and lengths at their limits.
    for (at, word) in [
        (0, u32::MAX),
        (0, 1),
        (0, 65536),
        (0, 65537),
        (64, 1),
        (32, 7),
    ] {
        let peer = RawPeer::new(&directory.0, 1).unwrap();
        overwrite_word(&peer.memory, 1024, if at == 0 { 65535 } else { 0 });
        overwrite_word(&peer.memory, at, word);
        exchange.check_messages();
    }
}

/// First messages without a ring, or with other descriptors.
#[test]
fn memory_without_a_ring_is_rejected() {
    let directory = TempDirectory::new("no-ring");
    let mut exchange = Exchange::new(&directory);
    let (small, _) = nix::unistd::pipe().unwrap();
    let file: OwnedFd = File::open("/dev/zero").unwrap().into();
    let (_, ring) = ring::FrameSender::create().unwrap();
    let sets: [&[&OwnedFd]; 10] = [
        &[],
        &[&small],
        &[&small; 2],
        &[&small; 3],
        &[&small; 253],
        &[&ring, &small, &small],
        &[&file],
        &[&ring, &file],
        &[&file, &ring],
        &[&ring; 100],
    ];
    for descriptors in sets {
        for number in [0, 1] {
            let socket = connection(&directory.0, number).unwrap();
            send_descriptors(&socket, descriptors).unwrap();
            // Again, with a ring or without.
            let _ = send_descriptors(&socket, descriptors);
            exchange.check_messages();
        }
    }
    let number = |at: &str| std::fs::metadata(at).map(|it| it.ino()).ok();
    let own = number(&format!("/proc/self/fd/{}", small.as_raw_fd()));
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = all.filter(|it| it.path().to_str().and_then(number) == own);
    assert_eq!(open.count(), 1, "descriptors stay open");
}

/// Creates a queue pair that sends to a process that does not answer.
fn send_without_answer(host: &Host, path: &AhAttr) -> (Qp, Cq, Memory) {
    let mut cq = host.cq(64);
    let mut qp = host.qp(QpType::RC, &mut cq);
    connect(&qp, QpType::RC, 5, *path);
    let memory = host.memory(SIZE);
    for id in 0..8 {
        post(&mut qp, id, Operation::Send, memory.sge(0, SIZE));
    }
    (qp, cq, memory)
}

/// Returns the path to the process that joins next.
fn next_path(directory: &TempDirectory) -> AhAttr {
    host(directory).path()
}

/// A receiver that sets its index arbitrarily, reads nothing, sends data, or closes.
#[test]
fn a_hostile_receiver_does_not_affect_others() {
    const CONSUMER: usize = 32;
    let directory = TempDirectory::new("ring-receiver");
    let mut exchange = Exchange::new(&directory);
    let path = next_path(&directory);
    let listener = listener(&directory.0, 2);
    let mut random = Random(3);
    for round in 0..20 {
        let sender = send_without_answer(&exchange.a, &path);
        let (socket, memory) = accept(&listener);
        for _ in 0..50 {
            let word = match random.below(3) {
                0 => random.below(3000) as u32,
                1 => u32::MAX - random.below(3000) as u32,
                _ => random.next() as u32,
            };
            overwrite_word(&memory, CONSUMER, word);
            overwrite_word(&memory, random.next() as usize, word);
        }
        exchange.check_messages();
        if round % 2 == 0 {
            send_descriptors(&socket, &[]).unwrap();
        }
        drop(socket);
        exchange.check_messages();
        drop(sender);
    }
}

const ROUNDS: u32 = 40;
const VARIABLE: &str = "RINGVERBS_TEST_RING";

/// The process that [`a_killed_process_does_not_affect_others`] kills. It sends to number 0.
#[test]
#[ignore = "run by another test"]
fn killed_process() {
    let directory = std::env::var(VARIABLE).expect("run by another test");
    let (path, dgid) = directory.split_once(' ').unwrap();
    let directory = std::mem::ManuallyDrop::new(TempDirectory(path.into()));
    let this = host(&directory);
    let mut path = this.path();
    path.grh.dgid = u128::from_str_radix(dgid, 16).unwrap().to_be_bytes();
    println!("joined");
    loop {
        let _sender = send_without_answer(&this, &path);
        sleep(Duration::from_millis(2));
    }
}

/// A process is killed at a random moment while it communicates: others are not affected, and
/// the next process takes its number.
#[test]
fn a_killed_process_does_not_affect_others() {
    let directory = TempDirectory::new("killed");
    let mut exchange = Exchange::new(&directory);
    let path = next_path(&directory);
    let dgid = u128::from_be_bytes(exchange.a.path().grh.dgid);
    let variable = format!("{} {dgid:x}", directory.0.display());
    let mut random = Random(11);
    for _ in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["killed_process", "--exact", "--ignored", "--nocapture"])
            .env(VARIABLE, &variable)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("joined")));
        let sender = send_without_answer(&exchange.a, &path);
        let end = Instant::now() + Duration::from_micros(random.below(20_000));
        while Instant::now() < end {
            exchange.check_messages();
        }
        child.kill().unwrap();
        exchange.check_messages();
        child.wait().unwrap();
        exchange.check_messages();
        drop(sender);
    }
    // The number is free again.
    assert_eq!(next_path(&directory).grh.dgid, path.grh.dgid);
}
