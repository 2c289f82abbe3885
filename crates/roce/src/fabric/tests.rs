use super::*;
use crate::packet::{Bth, Mac, PacketBuilder, Path, Pool, Template, gid_of_ipv4};

fn ethernet(pool: &Pool, to: Mac, from: Mac, tag: u8) -> Packet {
    let mut frame = [tag; 60];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&[0x12, 0x34]);
    pool.copy_of(LinkKind::Ethernet, &frame).unwrap()
}

fn rdma(pool: &Pool, to: Mac, from: Mac) -> Packet {
    let path = Template::new(&Path::roce_v2(from, to, [1; 16], [1; 16]));
    PacketBuilder::new(pool, &path, Bth::default(), 0).finish()
}

fn ib(pool: &Pool, lid: u16, tag: u8) -> Packet {
    let mut frame = [tag; 32];
    frame[2..4].copy_from_slice(&lid.to_be_bytes());
    pool.copy_of(LinkKind::Ib, &frame).unwrap()
}

/// A packet without a link header, to an IPv4 address.
fn ip(pool: &Pool, to: [u8; 4]) -> Packet {
    let path = Template::new(&Path::ip(gid_of_ipv4([192, 0, 2, 9]), gid_of_ipv4(to)));
    PacketBuilder::new(pool, &path, Bth::default(), 0).finish()
}

const A: Mac = [2, 0, 0, 0, 0, 1];
const B: Mac = [2, 0, 0, 0, 0, 2];
const C: Mac = [2, 0, 0, 0, 0, 3];

#[test]
fn addresses_are_learned_and_unknown_ones_flooded() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let (a, b) = (
        fabric.port(PortConfig::ethernet(A)),
        fabric.port(PortConfig::ethernet(B)),
    );
    let c = fabric.port(PortConfig::ethernet([0; 6]));
    a.send(0, ethernet(&pool, B, A, 1));
    assert!(b.recv(0).is_some() && c.recv(0).is_none() && a.recv(0).is_none());
    // Unknown address: all other ports receive the frame.
    a.send(0, ethernet(&pool, C, A, 2));
    assert!(b.recv(0).is_some() && c.recv(0).is_some() && a.recv(0).is_none());
    // C sends a frame, so that its address is learned.
    c.send(0, ethernet(&pool, [0xff; 6], C, 3));
    assert!(a.recv(0).is_some() && b.recv(0).is_some() && c.recv(0).is_none());
    a.send(0, ethernet(&pool, C, A, 4));
    assert!(b.recv(0).is_none() && c.recv(0).is_some());
}

/// Whatever its destination, a packet goes to the other end; multicast also comes back.
#[test]
fn ports_without_a_link_layer_are_the_ends_of_a_link() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ip());
    let received = |port: &Port| port.recv(0).is_some();
    a.send(0, ip(&pool, [192, 0, 2, 1]));
    assert_eq!((received(&a), a.counters().discarded), (false, 1));
    let other = fabric.port(PortConfig::ethernet(A));
    let uplink = fabric.uplink();
    for (from, to) in [(&a, &uplink), (&uplink, &a)] {
        from.send(0, ip(&pool, [192, 0, 2, 9]));
        assert!(!received(from) && received(to) && !received(&other));
        from.send(0, ip(&pool, [224, 0, 0, 9]));
        assert_eq!(received(from), from.index == a.index);
        assert!(received(to) && !received(&other));
    }
    // Raw packets, too, unless ports with a link layer have the uplink's.
    for (from, to) in [(&a, &uplink), (&uplink, &other)] {
        from.send(0, ethernet(&pool, A, B, 1));
        assert!(received(to));
        assert!(
            [&a, &uplink, &other]
                .into_iter()
                .all(|port| !received(port))
        );
    }
    drop(other);
    uplink.send(0, ethernet(&pool, A, B, 1));
    assert!(received(&a) && !received(&uplink));
    drop(uplink);
    let b = fabric.port(PortConfig::ip());
    b.send(0, ip(&pool, [192, 0, 2, 1]));
    assert!(received(&a) && !received(&b));
}

#[test]
fn rdma_frames_are_looped_back() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ethernet(A));
    let b = fabric.port(PortConfig::ethernet(B));
    for (to, received) in [(A, [false; 2]), ([0xff; 6], [true; 2])] {
        a.send(0, rdma(&pool, to, A));
        assert!(a.recv(0).is_some(), "{to:x?}");
        a.send(0, ethernet(&pool, to, A, 5));
        assert!(a.recv(0).is_none(), "{to:x?}");
        assert_eq!([0; 2].map(|_| b.recv(0).is_some()), received, "{to:x?}");
    }
    // The same holds for a learned address.
    a.send(0, ethernet(&pool, B, C, 6));
    a.send(0, ethernet(&pool, C, A, 7));
    assert!(a.recv(0).is_none());
    assert_eq!(a.counters().discarded, 2);
}

/// Frames have a correct ICRC wherever their bytes are observed or changed.
#[test]
fn frames_have_an_icrc_for_taps_captures_faults_and_recv() {
    struct IcrcTap;
    impl Tap for IcrcTap {
        fn transfer(&mut self, _: u64, _: usize, _: usize, packet: &mut Packet) -> Delivery {
            assert!(packet.has_icrc());
            Delivery::default()
        }
    }
    let pool = Pool::with_deferred_icrc();
    let fabric = Fabric::new(1);
    let a = fabric.port(PortConfig::ethernet(A));
    let b = fabric.port(PortConfig::ethernet(B));
    let arrives = |has_icrc| {
        let mut arrived = VecDeque::new();
        a.send(0, rdma(&pool, B, A));
        b.recv_all(0, 1, &mut arrived);
        assert_eq!(arrived[0].has_icrc(), has_icrc);
    };
    arrives(false);
    a.send(0, rdma(&pool, B, A));
    assert!(b.recv(0).unwrap().has_icrc());
    fabric.set_tap(Some(Box::new(IcrcTap)));
    arrives(true);
    fabric.set_tap(None);
    arrives(false);
    fabric.capture(Some(Capture::new(std::io::sink()).unwrap()));
    arrives(true);
    fabric.capture(None);
    a.set_faults(Faults {
        duplicate: 0.5,
        ..Faults::default()
    });
    arrives(true);
}

#[test]
fn infiniband_routes_by_lid_and_mask() {
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
        let mut received = Vec::new();
        for tag in 0..200 {
            a.send(u64::from(tag) * 10_000, ib(&pool, 2, tag));
        }
        while let Some(packet) = b.recv(10_000_000) {
            received.push(packet.frame().to_vec());
        }
        let counters = a.counters();
        assert!(counters.lost > 10 && counters.duplicated > 10);
        assert!(counters.reordered > 10 && counters.corrupted > 10);
        received
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn frames_are_dropped_while_the_link_is_down() {
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
fn a_full_port_counts_dropped_frames() {
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
    let received = count.clone();
    b.set_waker(move || {
        received.fetch_add(1, Ordering::Relaxed);
    });
    a.send(0, ib(&pool, 2, 1));
    a.send_all(0, [ib(&pool, 2, 1), ib(&pool, 2, 2)]);
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

/// Two fabrics connected by a socket pair, as in two processes.
#[test]
fn a_trunk_connects_fabrics() {
    use std::os::unix::net::UnixDatagram;
    let pool = Pool::new();
    let (left, right) = UnixDatagram::pair().unwrap();
    left.set_nonblocking(true).unwrap();
    right.set_nonblocking(true).unwrap();
    let (local, remote) = (Fabric::new(1), Fabric::new(2));
    let mut trunks = [
        Trunk::new(&local, pool.clone(), left),
        Trunk::new(&remote, pool.clone(), right),
    ];
    let mut pump = || while trunks.iter_mut().any(|t| t.pump(0, 16).unwrap()) {};
    let (a, b) = (
        local.port(PortConfig::ethernet(A)),
        remote.port(PortConfig::ethernet(B)),
    );
    let (c, d) = (
        local.port(PortConfig::ib(1)),
        remote.port(PortConfig::ib(2)),
    );
    // Frames to an address of the other fabric, and back; then the address is
    // learned.
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
    // Local traffic stays local; multicast goes to both fabrics.
    a.send(0, rdma(&pool, A, A));
    pump();
    assert!(a.recv(0).is_some() && b.recv(0).is_none());
    c.send(0, ib(&pool, 0xc001, 6));
    pump();
    assert!(c.recv(0).is_some() && d.recv(0).is_some());
    assert_eq!((c.counters().discarded, d.counters().discarded), (0, 0));
}

fn ib_from(pool: &Pool, lid: u16, from: u16, tag: u8) -> Packet {
    let mut packet = ib(pool, lid, tag);
    packet.frame_mut()[6..8].copy_from_slice(&from.to_be_bytes());
    packet
}

/// A peer of a connected network cannot move an address of this fabric.
#[test]
fn a_port_keeps_an_address_that_others_claim() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let uplink = fabric.uplink();
    // The uplink claims the address before such a port exists.
    uplink.send(0, ethernet(&pool, [0xff; 6], B, 1));
    let (a, b) = (
        fabric.port(PortConfig::ethernet(A)),
        fabric.port(PortConfig::ethernet(B)),
    );
    let reaches = |from: &Port, to: &Port, mac| {
        while to.recv(0).is_some() {}
        from.send(0, ethernet(&pool, mac, C, 2));
        to.recv(0).is_some()
    };
    assert!(reaches(&a, &b, B), "claimed before");
    // Claimed by the uplink, then by another port.
    for claimant in [&uplink, &a] {
        claimant.send(0, ethernet(&pool, [0xff; 6], B, 3));
        assert!(reaches(&a, &b, B) && reaches(&uplink, &b, B));
    }
    // A frame from the uplink with a source address of this fabric is discarded.
    while b.recv(0).is_some() {}
    let before = uplink.counters().discarded;
    uplink.send(0, ethernet(&pool, B, A, 4));
    assert!(b.recv(0).is_none() && uplink.counters().discarded == before + 1);
    // A port cannot be configured with the address of another.
    a.configure(PortConfig::ethernet(B));
    assert_eq!(a.config().mac, A);
    assert!(reaches(&uplink, &b, B) && reaches(&uplink, &a, A));
}

#[test]
fn a_peer_does_not_move_a_local_address() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let (first, second) = (fabric.uplink(), fabric.uplink());
    let (a, b) = (
        fabric.port(PortConfig::ethernet(A)),
        fabric.port(PortConfig::ethernet(B)),
    );
    let at = |mac| {
        for port in [&a, &first, &second] {
            while port.recv(0).is_some() {}
        }
        b.send(0, ethernet(&pool, mac, B, 1));
        [&a, &first, &second].map(|port| port.recv(0).is_some())
    };
    a.send(0, ethernet(&pool, [0xff; 6], C, 1));
    first.send(0, ethernet(&pool, [0xff; 6], C, 1));
    assert_eq!(at(C), [true, false, false]);
    // An address that two peers claim belongs to the last claimant; removing the
    // peer removes its claim.
    let other = [2, 0, 0, 0, 0, 9];
    second.send(0, ethernet(&pool, [0xff; 6], other, 1));
    first.send(0, ethernet(&pool, [0xff; 6], other, 1));
    assert_eq!(at(other), [false, true, false]);
    drop(first);
    b.send(0, ethernet(&pool, other, B, 1));
    assert!(second.recv(0).is_some(), "unknown again");
}

#[test]
fn the_address_table_is_bounded_per_port() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let uplink = fabric.uplink();
    let (a, b) = (
        fabric.port(PortConfig::ethernet(A)),
        fabric.port(PortConfig::ethernet(B)),
    );
    a.send(0, ethernet(&pool, B, C, 1));
    for n in 0..10_000_u32 {
        let [x, y, z, w] = n.to_be_bytes();
        uplink.send(0, ethernet(&pool, [0xff; 6], [6, x, y, z, w, 0], 2));
        while b.recv(0).is_some() {}
    }
    let learned: usize = fabric.lock().ports.iter().map(|p| p.learned.len()).sum();
    assert_eq!(learned, net::MAX_LEARNED + 1);
    while uplink.recv(0).is_some() || a.recv(0).is_some() {}
    b.send(0, ethernet(&pool, C, B, 3));
    assert!(a.recv(0).is_some() && uplink.recv(0).is_none());
}

/// The subnet manager responds only to ports of its own fabric.
#[test]
fn a_peer_cannot_use_a_local_address() {
    let pool = Pool::new();
    let fabric = Fabric::new(1);
    let uplink = fabric.uplink();
    let a = fabric.port(PortConfig::ib(1));
    let _b = fabric.port(PortConfig::ib(2));
    for from in [1, 2, subnet::LID] {
        uplink.send(0, ib_from(&pool, 1, from, 1));
        assert!(a.recv(0).is_none(), "{from:#x}");
    }
    uplink.send(0, ib_from(&pool, 1, 3, 1));
    assert!(a.recv(0).is_some());
    assert_eq!(uplink.counters().discarded, 3);
    // A port cannot send a request for another port.
    let request = [1; 256];
    let request = subnet::tests::datagram(2, false, &request);
    a.send(0, request);
    assert_eq!(a.counters().discarded, 1);
}

mod any {
    use proptest::prelude::*;

    use super::*;

    /// Addresses of ports, of no port, and of groups.
    fn mac() -> impl Strategy<Value = Mac> {
        prop_oneof![
            (0..8_u8).prop_map(|n| [2, 0, 0, 0, 0, n]),
            Just([0xff; 6]),
            Just([0; 6]),
            any::<Mac>(),
        ]
    }

    fn lid() -> impl Strategy<Value = u16> {
        prop_oneof![0..8_u16, Just(subnet::LID), Just(0xc001), any::<u16>()]
    }

    /// A frame, and which port sends it.
    fn frame() -> impl Strategy<Value = (usize, LinkKind, Vec<u8>)> {
        let rest = proptest::collection::vec(any::<u8>(), 0..300);
        let ethernet = (mac(), mac(), rest.clone()).prop_map(|(to, from, rest)| {
            let frame = [&to[..], &from, &rest].concat();
            (LinkKind::Ethernet, frame)
        });
        let ib = (lid(), lid(), rest.clone()).prop_map(|(to, from, rest)| {
            let lids = [to.to_be_bytes(), from.to_be_bytes()];
            let frame = [&[0, 2], &lids[0][..], &[0, 0], &lids[1], &rest].concat();
            (LinkKind::Ib, frame)
        });
        let ip = rest.clone().prop_map(|frame| (LinkKind::Ip, frame));
        // A request to the subnet manager: arbitrary, or one to join or leave a
        // group.
        let request =
            (lid(), any::<[u8; 4]>(), 0..4_u8, rest).prop_map(|(from, tid, kind, rest)| {
                let mut mad = [0; 256];
                for (byte, given) in mad[56..].iter_mut().zip(&rest) {
                    *byte = *given;
                }
                let (method, components) = match kind {
                    0 => (0x15, 0x1_0003_u64),
                    1 => (rest.first().copied().unwrap_or(1), u64::MAX),
                    _ => (0x02, 0x1_71c7),
                };
                mad[..4].copy_from_slice(&[1, 3, 2, method]);
                mad[8..12].copy_from_slice(&tid);
                mad[16..18].copy_from_slice(&[0, 0x38]);
                mad[48..56].copy_from_slice(&components.to_be_bytes());
                mad[56] = 0xff;
                mad[72..88].copy_from_slice(&subnet::gid(subnet::guid(from)));
                mad[104] |= 1;
                let packet = subnet::tests::datagram(from, false, &mad);
                (LinkKind::Ib, packet.frame().to_vec())
            });
        (0..8_usize, prop_oneof![ethernet, ib, ip, request])
            .prop_map(|(at, (kind, frame))| (at, kind, frame))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn a_ports_own_address_is_never_learned(
            frames in proptest::collection::vec(frame(), 0..200)
        ) {
            let pool = Pool::new();
            let fabric = Fabric::new(1);
            // Ports of each kind, one of which is added later, and two uplinks.
            let uplinks = [fabric.uplink(), fabric.uplink()];
            let mut local: Vec<Port> = (1..4).map(|n| fabric.port(PortConfig::ethernet([2, 0, 0, 0, 0, n]))).collect();
            local.extend((1..4).map(|n| fabric.port(PortConfig::ib(n))));
            let clear = |local: &[Port]| for port in local.iter().chain(&uplinks) {
                while port.recv(0).is_some() {}
            };
            for (at, kind, frame) in frames {
                if let Some(packet) = pool.copy_of(kind, &frame) {
                    local.iter().chain(&uplinks).nth(at).unwrap().send(0, packet);
                }
                clear(&local);
            }
            local.push(fabric.port(PortConfig::ethernet([2, 0, 0, 0, 0, 4])));
            local.push(fabric.port(PortConfig::ib(4)));
            local.push(fabric.port(PortConfig::ip()));
            {
                let net = fabric.lock();
                for port in &net.ports {
                    prop_assert!(port.learned.len() <= net::MAX_LEARNED);
                }
                let ports = [1, 2, 3].map(|lid| subnet::gid(subnet::guid(lid)));
                prop_assert!(net.subnet.members().iter().all(|port| ports.contains(port)));
            }
            // A frame to a port reaches that port alone, whoever sends it.
            for to in 0..local.len() {
                let config = local[to].config();
                for from in local.iter().chain(&uplinks) {
                    let packet = match config.kind {
                        LinkKind::Ib => ib_from(&pool, config.lid, 100, 1),
                        LinkKind::Ethernet => ethernet(&pool, config.mac, [2, 1, 1, 1, 1, 1], 1),
                        LinkKind::Ip => ip(&pool, [192, 0, 2, 1]),
                    };
                    let (is_sender, other) = (from.index == local[to].index, from.config().kind != config.kind);
                    let uplink = uplinks.iter().any(|up| up.index == from.index);
                    if is_sender || (other && !uplink) {
                        continue;
                    }
                    from.send(0, packet);
                    for port in local.iter().chain(&uplinks) {
                        prop_assert_eq!(port.recv(0).is_some(), port.index == local[to].index);
                    }
                }
            }
        }
    }
}
