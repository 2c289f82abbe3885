//! Rings of frames whose other side is hostile, or is killed: whoever takes part goes
//! on.
#![allow(missing_docs, reason = "a test")]

mod stranger;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use embedded_testing::driver::*;
use ringverbs_embedded::{Drive, Network};
use stranger::{Directory, Stranger, accept, connection, hand, listener, scribble};
use uverbs::{AhAttr, QpType};

/// Numbers from a seed.
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

fn host(directory: &Directory) -> Host {
    let network = Network::joined(Drive::Thread, &directory.0).unwrap();
    Host::new(&network.device("roce").unwrap())
}

/// A connection between two processes, over which messages go on.
///
/// Dropped in this order: a device keeps the completion queue of a queue pair that is
/// there, and its memory must outlive that.
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
    fn new(directory: &Directory) -> Self {
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
    fn go_on(&mut self) {
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

/// Any words anywhere in a ring, while its receiver reads it and exchanges messages
/// with others: it is disconnected at most.
#[test]
fn a_ring_of_a_hostile_sender_harms_nobody() {
    const HEADER: u64 = 96;
    let directory = Directory::new("ring-sender");
    let mut exchange = Exchange::new(&directory);
    let mut random = Random(7);
    for round in 0..60 {
        // One after the other, and several at a time.
        let Ok(mut stranger) = Stranger::new(&directory.0, (round % 2) as u16) else {
            continue;
        };
        for _ in 0..random.below(20) {
            let frame = vec![random.next() as u8; random.below(4400) as usize];
            stranger.push(random.below(5) as u8, &frame);
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
            scribble(&stranger.memory, at as usize, word);
        }
        exchange.go_on();
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
        let stranger = Stranger::new(&directory.0, 1).unwrap();
        scribble(&stranger.memory, 1024, if at == 0 { 65535 } else { 0 });
        scribble(&stranger.memory, at, word);
        exchange.go_on();
    }
}

/// First messages without a ring, or with something else.
#[test]
fn what_is_no_ring_is_refused() {
    let directory = Directory::new("no-ring");
    let mut exchange = Exchange::new(&directory);
    let (small, _) = nix::unistd::pipe().unwrap();
    let file: OwnedFd = File::open("/dev/zero").unwrap().into();
    let (_, ring) = ring::FrameSender::create().unwrap();
    let sets: [&[&OwnedFd]; 6] = [
        &[],
        &[&small],
        &[&file],
        &[&ring, &file],
        &[&file, &ring],
        &[&ring; 100],
    ];
    for descriptors in sets {
        for number in [0, 1] {
            let socket = connection(&directory.0, number).unwrap();
            hand(&socket, descriptors).unwrap();
            // Again, with a ring or without.
            let _ = hand(&socket, descriptors);
            exchange.go_on();
        }
    }
}

/// A queue pair with sends to a process whose queue pairs do not answer.
fn talk_to(host: &Host, path: &AhAttr) -> (Qp, Cq, Memory) {
    let mut cq = host.cq(64);
    let mut qp = host.qp(QpType::RC, &mut cq);
    connect(&qp, QpType::RC, 5, *path);
    let memory = host.memory(SIZE);
    for id in 0..8 {
        post(&mut qp, id, Operation::Send, memory.sge(0, SIZE));
    }
    (qp, cq, memory)
}

/// The path to the process that joins next.
fn next_path(directory: &Directory) -> AhAttr {
    host(directory).path()
}

/// A receiver that moves its index as it likes, reads nothing, sends something, or
/// closes.
#[test]
fn a_ring_of_a_hostile_receiver_harms_nobody() {
    const CONSUMER: usize = 32;
    let directory = Directory::new("ring-receiver");
    let mut exchange = Exchange::new(&directory);
    let path = next_path(&directory);
    let listener = listener(&directory.0, 2);
    let mut random = Random(3);
    for round in 0..20 {
        let talk = talk_to(&exchange.a, &path);
        let (socket, memory) = accept(&listener);
        for _ in 0..50 {
            let word = match random.below(3) {
                0 => random.below(3000) as u32,
                1 => u32::MAX - random.below(3000) as u32,
                _ => random.next() as u32,
            };
            scribble(&memory, CONSUMER, word);
            scribble(&memory, random.next() as usize, word);
        }
        exchange.go_on();
        if round % 2 == 0 {
            hand(&socket, &[]).unwrap();
        }
        drop(socket);
        exchange.go_on();
        drop(talk);
    }
}

const ROUNDS: u32 = 40;
const VARIABLE: &str = "RINGVERBS_TEST_RING";

/// The process that [`a_killed_process_harms_nobody`] kills. It sends to number 0.
#[test]
#[ignore = "run by another test"]
fn killed() {
    let Ok(directory) = std::env::var(VARIABLE) else {
        return;
    };
    let (path, dgid) = directory.split_once(' ').unwrap();
    let directory = std::mem::ManuallyDrop::new(Directory(path.into()));
    let this = host(&directory);
    let mut path = this.path();
    path.grh.dgid = u128::from_str_radix(dgid, 16).unwrap().to_be_bytes();
    println!("joined");
    loop {
        let _talk = talk_to(&this, &path);
        sleep(Duration::from_millis(2));
    }
}

/// A process that sends and is sent to is killed at any moment: others do not notice,
/// and its number is taken by the next one.
#[test]
fn a_killed_process_harms_nobody() {
    let directory = Directory::new("killed");
    let mut exchange = Exchange::new(&directory);
    let path = next_path(&directory);
    let dgid = u128::from_be_bytes(exchange.a.path().grh.dgid);
    let variable = format!("{} {dgid:x}", directory.0.display());
    let mut random = Random(11);
    for _ in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["killed", "--exact", "--ignored", "--nocapture"])
            .env(VARIABLE, &variable)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("joined")));
        let talk = talk_to(&exchange.a, &path);
        let end = Instant::now() + Duration::from_micros(random.below(20_000));
        while Instant::now() < end {
            exchange.go_on();
        }
        child.kill().unwrap();
        exchange.go_on();
        child.wait().unwrap();
        exchange.go_on();
        drop(talk);
    }
    // Its number is free.
    assert_eq!(next_path(&directory).grh.dgid, path.grh.dgid);
}
