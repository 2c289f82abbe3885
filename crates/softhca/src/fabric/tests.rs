use super::*;
use crate::packet::{Bth, Draft, Path, Pool, Template};

fn ethernet(pool: &Pool, to: Mac, from: Mac, tag: u8) -> Packet {
    let mut frame = [tag; 60];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&[0x12, 0x34]);
    pool.copy_of(LinkKind::Ethernet, &frame).unwrap()
}

fn rdma(pool: &Pool, to: Mac, from: Mac) -> Packet {
    let path = Template::new(&Path::roce_v2(from, to, [1; 16], [1; 16]));
    Draft::new(pool, &path, Bth::default(), 0).finish()
}

fn ib(pool: &Pool, lid: u16, tag: u8) -> Packet {
    let mut frame = [tag; 32];
    frame[2..4].copy_from_slice(&lid.to_be_bytes());
    pool.copy_of(LinkKind::Ib, &frame).unwrap()
}

const A: Mac = [2, 0, 0, 0, 0, 1];
const B: Mac = [2, 0, 0, 0, 0, 2];
const C: Mac = [2, 0, 0, 0, 0, 3];

#[test]
fn unicast_broadcast_unknown_and_learned() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let (a, b) = (
        fabric.port(PortConfig::ethernet(A)),
        fabric.port(PortConfig::ethernet(B)),
    );
    let c = fabric.port(PortConfig::ethernet([0; 6]));
    a.send(0, ethernet(&pool, B, A, 1));
    assert!(b.recv(0).is_some() && c.recv(0).is_none() && a.recv(0).is_none());
    // Unknown: everybody else.
    a.send(0, ethernet(&pool, C, A, 2));
    assert!(b.recv(0).is_some() && c.recv(0).is_some() && a.recv(0).is_none());
    // C shows itself, and is known then.
    c.send(0, ethernet(&pool, [0xff; 6], C, 3));
    assert!(a.recv(0).is_some() && b.recv(0).is_some() && c.recv(0).is_none());
    a.send(0, ethernet(&pool, C, A, 4));
    assert!(b.recv(0).is_none() && c.recv(0).is_some());
}

#[test]
fn what_is_rdma_comes_back() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ethernet(A));
    let b = fabric.port(PortConfig::ethernet(B));
    for (to, heard) in [(A, [false; 2]), ([0xff; 6], [true; 2])] {
        a.send(0, rdma(&pool, to, A));
        assert!(a.recv(0).is_some(), "{to:x?}");
        a.send(0, ethernet(&pool, to, A, 5));
        assert!(a.recv(0).is_none(), "{to:x?}");
        assert_eq!([0; 2].map(|_| b.recv(0).is_some()), heard, "{to:x?}");
    }
    // As to an address that is known by what was sent from it.
    a.send(0, ethernet(&pool, B, C, 6));
    a.send(0, ethernet(&pool, C, A, 7));
    assert!(a.recv(0).is_none());
    assert_eq!(a.counters().discarded, 2);
}

#[test]
fn infiniband_goes_by_lid_with_its_mask() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ib(1));
    let b = fabric.port(PortConfig {
        lmc: 2,
        ..PortConfig::ib(8)
    });
    let e = fabric.port(PortConfig::ethernet(A));
    for lid in [8, 11] {
        a.send(0, ib(&pool, lid, 1));
        assert!(b.recv(0).is_some(), "{lid}");
    }
    a.send(0, ib(&pool, 12, 1));
    assert!(b.recv(0).is_none());
    assert_eq!(a.counters().discarded, 1);
    a.send(0, ib(&pool, 0xc001, 1));
    assert!(a.recv(0).is_some() && b.recv(0).is_some() && e.recv(0).is_none());
}

#[test]
fn frames_arrive_when_they_are_due_and_in_order() {
    let pool = Pool::new();
    let fabric = Fabric::new(3);
    let (a, b) = (
        fabric.port(PortConfig::ib(1)),
        fabric.port(PortConfig::ib(2)),
    );
    a.set_faults(Faults {
        delay: 100,
        jitter: 500,
        ..Faults::default()
    });
    for tag in 0..50 {
        a.send(u64::from(tag), ib(&pool, 2, tag));
    }
    assert!(b.recv(99).is_none());
    assert!(b.deadline().unwrap() >= 100);
    let mut tags = Vec::new();
    while let Some(at) = b.deadline() {
        tags.extend(b.recv(at).map(|p| p.frame()[31]));
    }
    assert_eq!(tags, (0..50).collect::<Vec<u8>>());
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let run = |seed| {
        let pool = Pool::new();
        let fabric = Fabric::new(seed);
        let (a, b) = (
            fabric.port(PortConfig::ib(1)),
            fabric.port(PortConfig::ib(2)),
        );
        a.set_faults(Faults {
            loss: 0.2,
            duplicate: 0.2,
            reorder: 0.2,
            corrupt: 0.2,
            ..Faults::default()
        });
        let mut seen = Vec::new();
        for tag in 0..200 {
            a.send(u64::from(tag) * 10_000, ib(&pool, 2, tag));
        }
        while let Some(packet) = b.recv(10_000_000) {
            seen.push(packet.frame().to_vec());
        }
        let counters = a.counters();
        assert!(counters.lost > 10 && counters.duplicated > 10);
        assert!(counters.reordered > 10 && counters.corrupted > 10);
        seen
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_link_that_is_down_carries_nothing() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let (a, b) = (
        fabric.port(PortConfig::ib(1)),
        fabric.port(PortConfig::ib(2)),
    );
    a.send(0, ib(&pool, 2, 1));
    b.set_link(false);
    assert!(b.recv(0).is_none() && !b.link());
    a.send(0, ib(&pool, 2, 1));
    b.set_link(true);
    assert!(b.recv(0).is_none());
    a.send(0, ib(&pool, 2, 1));
    assert!(b.recv(0).is_some());
    a.set_link(false);
    a.send(0, ib(&pool, 2, 1));
    assert!(b.recv(0).is_none());
    drop(b);
    a.set_link(true);
    a.send(0, ib(&pool, 2, 1));
    assert_eq!(a.counters().discarded, 2);
}

#[test]
fn a_full_port_drops_and_says_so() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ib(1));
    let b = fabric.port(PortConfig {
        queue: 3,
        ..PortConfig::ib(2)
    });
    for _ in 0..5 {
        a.send(0, ib(&pool, 2, 1));
    }
    assert_eq!((b.counters().overflow, a.room()), (2, 0));
}

#[test]
fn the_receiver_is_woken() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let (a, b) = (
        fabric.port(PortConfig::ib(1)),
        fabric.port(PortConfig::ib(2)),
    );
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    b.set_waker(move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    a.send(0, ib(&pool, 2, 1));
    a.send_all(0, [ib(&pool, 2, 1), ib(&pool, 2, 2)]);
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

/// Two fabrics, as of two processes, over a socket pair.
#[test]
fn a_trunk_joins_fabrics() {
    use std::os::unix::net::UnixDatagram;
    let pool = Pool::new();
    let (left, right) = UnixDatagram::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    let (here, there) = (Fabric::new(1), Fabric::new(2));
    let mut trunks = [
        Trunk::new(&here, pool.clone(), left),
        Trunk::new(&there, pool.clone(), right),
    ];
    let mut pump = || while trunks.iter_mut().any(|t| t.pump(0, 16).unwrap()) {};
    let (a, b) = (
        here.port(PortConfig::ethernet(A)),
        there.port(PortConfig::ethernet(B)),
    );
    let (c, d) = (here.port(PortConfig::ib(1)), there.port(PortConfig::ib(2)));
    // To an address elsewhere, and back; then it is learned, and stays so.
    for (from, to, frame) in [
        (&a, &b, ethernet(&pool, B, A, 1)),
        (&b, &a, ethernet(&pool, A, B, 2)),
        (&c, &d, ib(&pool, 2, 3)),
        (&d, &c, ib(&pool, 1, 4)),
    ] {
        let expected = frame.frame().to_vec();
        from.send(0, frame);
        pump();
        assert_eq!(to.recv(0).unwrap().frame(), expected);
    }
    // Local traffic stays local, multicast goes everywhere.
    a.send(0, rdma(&pool, A, A));
    pump();
    assert!(a.recv(0).is_some() && b.recv(0).is_none());
    c.send(0, ib(&pool, 0xc001, 6));
    pump();
    assert!(c.recv(0).is_some() && d.recv(0).is_some());
    assert_eq!((c.counters().discarded, d.counters().discarded), (0, 0));
}
