//! Networks that share a directory. Both are in this process, but share nothing else; the
//! ping-pong test of crates/cli uses two processes.

mod raw_peer;

use std::time::{Duration, Instant};

use device_testing::embedded::driver::*;
use raw_peer::{RawPeer, TempDirectory};
use ringverbs_embedded::{Drive, Network};
use uverbs::QpType;

fn host(directory: &TempDirectory, profile: &str) -> Host {
    let network = Network::joined(Drive::Watch, &directory.0).unwrap();
    Host::new(&network.strict_device(profile).unwrap())
}

fn bytes(seed: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 7 + seed * 31) as u8).collect()
}

/// Messages of several packets with distinct contents, and one-sided operations.
fn exchange(kind: QpType, (a, b): (&Host, &Host), rounds: usize) {
    const SIZE: usize = 10_001;
    let (mut cqa, mut cqb) = (a.cq(64), b.cq(64));
    let (mut qa, mut qb) = (a.qp(kind, &mut cqa), b.qp(kind, &mut cqb));
    connect_pair(kind, (&qa, a), (&qb, b));
    let (from, to) = (a.memory(SIZE), b.memory(SIZE));
    for round in 0..rounds {
        let data = bytes(round, SIZE);
        from.set(0, &data);
        receive(&mut qb, round as u64, to.sge(0, SIZE));
        post(&mut qa, round as u64, Operation::Send, from.sge(0, SIZE));
        let (sent, received) = (wait(&mut cqa), wait(&mut cqb));
        assert_eq!((sent.status, sent.wr_id), (0, round as u64));
        assert_eq!((received.status, received.wr_id), (0, round as u64));
        assert_eq!(to.get(0, SIZE), data);
    }
    if kind != QpType::RC {
        return;
    }
    let back = a.memory(SIZE);
    post(&mut qa, 1, Operation::Read(&to, 0), back.sge(0, SIZE));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(back.get(0, SIZE), bytes(rounds - 1, SIZE));
    from.set(0, &bytes(77, SIZE));
    post(&mut qa, 2, Operation::Write(&to, 0), from.sge(0, SIZE));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(to.get(0, SIZE), bytes(77, SIZE));
    to.set(0, &40u64.to_ne_bytes());
    post(&mut qa, 3, Operation::Add(&to, 2), back.sge(0, 8));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(back.get(0, 8), 40u64.to_ne_bytes());
    assert_eq!(to.get(0, 8), 42u64.to_ne_bytes());
}

#[test]
fn messages_arrive_in_another_process() {
    for profile in ["ib", "roce"] {
        let directory = TempDirectory::new(profile);
        let (a, b) = (host(&directory, profile), host(&directory, profile));
        assert_ne!(a.path(), b.path());
        exchange(QpType::RC, (&a, &b), 20);
        exchange(QpType::RC, (&b, &a), 3);
    }
}

#[test]
fn three_devices_of_a_network_communicate() {
    let directory = TempDirectory::new("three");
    // Files that a killed process has left there.
    drop(Network::joined(Drive::Caller, &directory.0).unwrap());
    drop(std::os::unix::net::UnixListener::bind(directory.0.join("0.socket")).unwrap());
    let hosts: Vec<Host> = (0..3).map(|_| host(&directory, "roce")).collect();
    for (a, b) in [(0, 1), (1, 2), (2, 0)] {
        exchange(QpType::RC, (&hosts[a], &hosts[b]), 3);
    }
}

#[test]
fn a_process_that_ended_is_detected_and_its_slot_reused() {
    let directory = TempDirectory::new("gone");
    let (a, b) = (host(&directory, "roce"), host(&directory, "roce"));
    exchange(QpType::RC, (&a, &b), 1);
    let mut cqa = a.cq(16);
    let mut qa = a.qp(QpType::RC, &mut cqa);
    let there = b.path();
    {
        let mut cqb = b.cq(16);
        let qb = b.qp(QpType::RC, &mut cqb);
        connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    }
    drop(b);
    let from = a.memory(64);
    post(&mut qa, 9, Operation::Send, from.sge(0, 64));
    let failed = wait(&mut cqa);
    // IBV_WC_RETRY_EXC_ERR
    assert_eq!((failed.wr_id, failed.status), (9, 12));
    let next = host(&directory, "roce");
    assert_eq!(next.path(), there);
    exchange(QpType::RC, (&a, &next), 3);
}

/// Longer than all retries take together.
const LONG: Duration = Duration::from_millis(800);

#[test]
fn a_process_that_does_not_read_counts_as_alive() {
    let directory = TempDirectory::new("slow");
    // Each network is driven explicitly, so one that is not driven makes no progress.
    let host = || {
        let network = Network::joined(Drive::Caller, &directory.0).unwrap();
        Host::new(&network.strict_device("roce").unwrap())
    };
    let (a, b) = (host(), host());
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, mut qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(64), b.memory(64));
    receive(&mut qb, 1, to.sge(0, 64));
    post(&mut qa, 2, Operation::Send, from.sge(0, 64));
    let mut wait = |long: Duration| {
        let end = Instant::now() + long;
        while Instant::now() < end {
            a.embedded.drive();
            if let Some(completion) = poll_once(&mut cqa) {
                return Some(completion);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    };
    assert_eq!(wait(LONG), None);
    while b.embedded.drive() {}
    let completion = wait(Duration::from_secs(10)).unwrap();
    assert_eq!((completion.wr_id, completion.status), (2, 0));
    // The wait for it is bounded.
    post(&mut qa, 3, Operation::Send, from.sge(0, 64));
    assert_eq!(wait(LONG), None);
    let completion = wait(Duration::from_secs(60)).unwrap();
    assert_eq!((completion.wr_id, completion.status), (3, 12));
}

/// A frame with a device's address as its source must not redirect the device's frames, not
/// even while the sender exists.
#[test]
fn process_cannot_claim_a_device_address() {
    for profile in ["roce", "ib"] {
        let directory = TempDirectory::new(&format!("claim-{profile}"));
        let (a, b) = (host(&directory, profile), host(&directory, profile));
        let numbers = [&a, &b].map(|host| host.embedded.number() as u16 + 1);
        let mut peer = RawPeer::new(&directory.0, 1).unwrap();
        for number in numbers {
            let [high, low] = number.to_be_bytes();
            let mac = [0x02, 0x50, 0x53, 0, high, low];
            let ethernet = [&[0xff; 6][..], &mac, &[0; 50]].concat();
            let ib = [&[0, 2, 0xc0, 1, 0, 0, high, low][..], &[0; 50]].concat();
            for (tag, frame) in [(1, ethernet), (0, ib)] {
                peer.push(tag, &frame);
            }
        }
        while peer.ring.is_unread() == Ok(true) {
            std::thread::yield_now();
        }
        exchange(QpType::RC, (&a, &b), 3);
        drop(peer);
        exchange(QpType::RC, (&b, &a), 3);
    }
}

#[test]
fn malformed_frames_are_ignored() {
    let directory = TempDirectory::new("rubbish");
    let (a, b) = (host(&directory, "roce"), host(&directory, "roce"));
    let connect = || RawPeer::new(&directory.0, 1);
    let longest = vec![1; 0xffff];
    let frames = [
        (0, &[][..]),
        (1, &[]),
        (0, &[0]),
        (2, &[2; 60]),
        (3, &[9]),
        (4, &[2; 60]),
        (1, &[9; 14]),
        (1, &[1; 4353]),
        (1, &longest),
    ];
    for (tag, frame) in frames.into_iter().cycle().take(100) {
        // Some of it breaks the connection.
        let mut peer = connect().unwrap();
        for _ in 0..3 {
            peer.push(tag, frame);
        }
        let end = Instant::now() + Duration::from_millis(20);
        while peer.ring.is_unread() == Ok(true) && Instant::now() < end {
            std::thread::yield_now();
        }
    }
    // More connections than there are slots, silent or closed immediately.
    let idle: Vec<_> = (0..20).map(|_| connect()).collect();
    exchange(QpType::RC, (&a, &b), 3);
    drop(idle);
    for _ in 0..100 {
        drop(connect());
    }
    std::thread::sleep(Duration::from_millis(20));
    exchange(QpType::RC, (&b, &a), 3);
    exchange(QpType::RC, (&a, &b), 3);
    // A later connection gets a slot.
    exchange(QpType::RC, (&host(&directory, "roce"), &b), 3);
}

#[test]
fn joining_a_network_needs_a_directory() {
    let directory = TempDirectory::new("none");
    let nowhere = directory.0.join("not/there");
    assert!(Network::joined(Drive::Watch, &nowhere).is_err());
    std::fs::write(&directory.0, "a file").unwrap();
    assert!(Network::joined(Drive::Watch, &directory.0).is_err());
    std::fs::remove_file(&directory.0).unwrap();
}
