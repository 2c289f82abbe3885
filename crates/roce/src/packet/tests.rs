//! Frames against captured ones, and round trips.

use super::*;
use proptest::prelude::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter_map(|c| (c as char).to_digit(16))
        .map(|d| d as u8)
        .collect();
    digits.chunks(2).map(|p| p[0] << 4 | p[1]).collect()
}

fn icrc_of(frame: &[u8]) -> [u8; 4] {
    let network = NetworkHeaders::read(LinkKind::Ethernet, frame).unwrap();
    icrc::icrc(
        &frame[..network.end],
        LinkKind::Ethernet,
        network.l3,
        network.l3_at,
        network.bth_at,
    )
    .to_le_bytes()
}

/// A UC SEND that a ConnectX sent (the test vector of scapy's RoCE layer).
#[test]
fn icrc_of_a_captured_uc_send() {
    let frame = hex("248a07a8fa22 248a07a8fa22 0800
         4501 0040 0478 4000 4011 b4d5 c0a80007 c0a80007
         c000 12b7 002c aca2
         24 60 ffff 000000d3 00cf1710
         4630818be28935d90e9a95505401be885e500000
         78f353f3");
    assert_eq!(icrc_of(&frame), [0x78, 0xf3, 0x53, 0xf3]);
    let view = View::read(LinkKind::Ethernet, &frame).unwrap();
    assert_eq!(
        view.opcode,
        Some(Opcode {
            class: Class::Uc,
            operation: op::SEND_ONLY
        })
    );
    assert_eq!(
        (view.bth.dest_qpn, view.bth.psn),
        (211, Psn::new(13_571_856))
    );
    assert_eq!(view.payload.len(), 18);
}

/// A congestion notification that a ConnectX-4 Lx sent. Its opcode is not
/// supported; its ICRC is computed in the same way.
#[test]
fn icrc_of_a_captured_notification() {
    let frame = hex("e41d2dab2bc2 7cfe90643b32 0800
         45c2 003c 718c 4000 4011 9161 0a001101 0a001201
         0000 12b7 0028 0000
         8100 ffff 40000118 00000000 00000000000000000000000000000000 82fd002a");
    assert_eq!(icrc_of(&frame), [0x82, 0xfd, 0x00, 0x2a]);
    assert_eq!(View::read(LinkKind::Ethernet, &frame).unwrap().opcode, None);
}

/// The ICRC as rdma_rxe computes it, bit by bit: the CRC register has rxe's initial
/// value, and the masked headers are built by hand.
#[test]
fn icrc_as_rxe_computes_it() {
    fn crc(mut register: u32, bytes: &[u8]) -> u32 {
        for byte in bytes {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                register = register >> 1 ^ (0xedb8_8320 * (register & 1));
            }
        }
        register
    }
    let gid = |n| {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[15] = n;
        gid
    };
    let mut path = Path::roce_v2([2; 6], [4; 6], gid(1), gid(2));
    path.grh.as_mut().unwrap().traffic_class = 0x5a;
    path.grh.as_mut().unwrap().flow_label = 0x12345;
    let pool = Pool::new();
    for (path, header) in [
        (path, 40),
        (
            Path::roce_v2(
                [2; 6],
                [4; 6],
                gid_of_ipv4([10, 0, 0, 1]),
                gid_of_ipv4([10, 0, 0, 2]),
            ),
            20,
        ),
    ] {
        let packet = write_packet(&pool, &path, &[7; 61]);
        let frame = packet.frame();
        let mut masked = frame[14..frame.len() - 4].to_vec();
        if header == 40 {
            masked[0] = 0x6f;
            masked[1..4].fill(0xff);
            masked[7] = 0xff;
        } else {
            masked[1] = 0xff;
            masked[8] = 0xff;
            masked[10..12].fill(0xff);
        }
        masked[header + 6..header + 8].fill(0xff);
        masked[header + 8 + 4] = 0xff;
        let expected = !crc(0xdebb_20e3, &masked);
        assert_eq!(frame[frame.len() - 4..], expected.to_le_bytes());
    }
}

fn write_packet(pool: &Pool, path: &Path, payload: &[u8]) -> Packet {
    let template = Template::new(path);
    let opcode = Opcode {
        class: Class::Rc,
        operation: op::WRITE_ONLY,
    };
    let bth = Bth {
        opcode: opcode.encode(),
        pkey: DEFAULT_PKEY,
        dest_qpn: 0x123,
        ack_request: true,
        psn: Psn::new(77),
        ..Bth::default()
    };
    let mut builder = PacketBuilder::new(pool, &template, bth, payload.len());
    builder.put(
        &Reth {
            va: 0x1000,
            rkey: 9,
            length: payload.len() as u32,
        }
        .bytes(),
    );
    builder.space(payload.len()).copy_from_slice(payload);
    builder.finish()
}

fn paths() -> Vec<Path> {
    let v4 = Path::roce_v2(
        [2; 6],
        [4; 6],
        gid_of_ipv4([10, 0, 0, 1]),
        gid_of_ipv4([10, 0, 0, 2]),
    );
    let mut tagged = v4;
    tagged.link = Link::Ether {
        smac: [2; 6],
        dmac: [4; 6],
        vlan: Some(0x2005),
    };
    let v6 = Path::roce_v2([2; 6], [4; 6], [0xfd; 16], [0xfe; 16]);
    let v1 = Path {
        roce: Roce::V1,
        ..v6
    };
    let ib = Path::ib(3, 4);
    let routed = Path { grh: v6.grh, ..ib };
    let [ip4, ip6] = [v4, v6].map(|path| Path {
        link: Link::Ip,
        ..path
    });
    vec![v4, tagged, v6, v1, ib, routed, ip4, ip6]
}

#[test]
fn each_encapsulation_is_parsed_as_built() {
    let pool = Pool::new();
    for path in paths() {
        for length in [0, 1, 2, 3, 4, 64, 4096] {
            let payload: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let packet = write_packet(&pool, &path, &payload);
            let view = View::read(packet.kind(), packet.frame()).unwrap();
            assert_eq!(view.payload.bytes(), payload);
            assert_eq!(view.network.link, path.link);
            assert_eq!(view.reth().unwrap().length, length as u32);
            assert_eq!(view.network.dgid(packet.frame()), path.grh.map(|g| g.dgid));
            assert_eq!(view.network.sgid(packet.frame()), path.grh.map(|g| g.sgid));
        }
    }
}

#[test]
fn a_deferred_icrc_is_the_same_and_is_not_checked_before() {
    let (immediate, deferred) = (Pool::new(), Pool::with_deferred_icrc());
    for path in paths() {
        let expected = write_packet(&immediate, &path, &[3; 70]);
        let mut packet = write_packet(&deferred, &path, &[3; 70]);
        assert!(expected.has_icrc() && !packet.has_icrc() && !packet.clone().has_icrc());
        assert_eq!(
            View::parse_packet(&packet).unwrap().payload.bytes(),
            [3; 70]
        );
        // A mutable borrow adds the ICRC first, so that the change is detected.
        let mut changed = packet.clone();
        let last = changed.frame().len() - 6;
        changed.frame_mut()[last] ^= 1;
        assert_eq!(
            View::parse_packet(&changed).map(|_| ()),
            Err(ParseError::BadIcrc)
        );
        packet.add_icrc();
        assert!(packet.has_icrc() && View::parse_packet(&packet).is_ok());
        assert_eq!(packet.frame(), expected.frame(), "{path:?}");
    }
    // Not RDMA, cut, or of no bytes.
    for length in [0, 7, 13, 40] {
        for kind in [LinkKind::Ib, LinkKind::Ethernet, LinkKind::Ip] {
            let mut packet = deferred.copy_of(kind, &[0; 40][..length]).unwrap();
            packet.mark_without_icrc();
            packet.add_icrc();
            assert_eq!(packet.frame(), &[0; 40][..length]);
        }
    }
}

#[test]
fn ipv4_checksum_adds_up() {
    let packet = write_packet(&Pool::new(), &paths()[0], &[1; 33]);
    let sum: u32 = packet.frame()[14..34]
        .chunks(2)
        .map(|p| u32::from(p[0]) << 8 | u32::from(p[1]))
        .sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
}

#[test]
fn a_changed_bit_fails_the_icrc_check() {
    let pool = Pool::new();
    for path in paths() {
        let packet = write_packet(&pool, &path, &[5; 40]);
        let network = NetworkHeaders::read(packet.kind(), packet.frame()).unwrap();
        for at in network.bth_at..packet.frame().len() {
            if at == network.bth_at + 4 {
                continue; // resv8a may change on the way
            }
            let mut copy = packet.clone();
            copy.frame_mut()[at] ^= 0x10;
            assert_eq!(
                View::read(copy.kind(), copy.frame()).map(|_| ()),
                Err(ParseError::BadIcrc),
                "{path:?} byte {at}"
            );
        }
        // Fields that routers change do not count.
        let mut copy = packet.clone();
        if network.l3 == L3::Ipv4 {
            copy.frame_mut()[network.l3_at + 8] -= 1;
            copy.frame_mut()[network.l3_at + 1] = 3;
        }
        copy.frame_mut()[network.bth_at + 4] = 0xc0;
        assert!(View::read(copy.kind(), copy.frame()).is_ok());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200), ib: bool) {
        let kind = if ib { LinkKind::Ib } else { LinkKind::Ethernet };
        let _ = View::read(kind, &bytes);
    }

    /// A valid packet with a few bytes changed, cut at any length.
    #[test]
    fn a_damaged_packet_is_parsed_or_rejected(path in 0usize..6, changes in proptest::collection::vec((0usize..120, any::<u8>()), 0..4), cut in 0usize..200) {
        let mut packet = write_packet(&Pool::new(), &paths()[path], &[1; 20]);
        for (at, value) in changes {
            if let Some(byte) = packet.frame_mut().get_mut(at) {
                *byte = value;
            }
        }
        let length = cut.min(packet.frame().len());
        let _ = View::read(packet.kind(), &packet.frame()[..length]);
    }
}
