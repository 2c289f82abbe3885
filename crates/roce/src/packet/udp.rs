//! RoCE v2 packets as a UDP socket sends and receives them: without the IP and UDP headers,
//! which the ICRC covers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use super::header::{BTH_BYTES, ICRC_BYTES, u16_at};
use super::icrc::{icrc, icrc_cause, icrc_change};
use super::path::{Grh, L3, LinkKind, NetworkHeaders, Path, Template, gid_of_ip};
use super::pool::{PACKET_CAPACITY, Packet, Pool};

/// Lengths of the headers that are invisible to a socket.
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;
/// Offset of the identification in an IPv4 header.
const IDENTIFICATION: usize = 4;

/// Returns the number of bytes before the BTH in a frame of [`LinkKind::Ip`].
#[must_use]
pub const fn headroom(ipv6: bool) -> usize {
    UDP + if ipv6 { IPV6 } else { IPV4 }
}

/// Reasons why a datagram is not a RoCE v2 packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DatagramError {
    /// It is too short, too long, or between addresses of two families.
    Length,
    /// The ICRC is wrong.
    Icrc,
}

/// Ancillary data of a received datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvMeta {
    /// Sender.
    pub source: IpAddr,
    /// UDP source port.
    pub port: u16,
    /// Receiver.
    pub destination: IpAddr,
    /// Traffic class, or TOS of IPv4.
    pub traffic_class: u8,
}

impl RecvMeta {
    /// Returns the data of a datagram with traffic class 0.
    #[must_use]
    pub fn new(source: SocketAddr, destination: IpAddr) -> Self {
        Self {
            source: source.ip(),
            port: source.port(),
            destination,
            traffic_class: 0,
        }
    }

    /// Returns the headers for the frames of such datagrams, of [`LinkKind::Ip`]; `None` if
    /// the addresses are of two families.
    #[must_use]
    pub fn headers(&self) -> Option<Headers> {
        let mapped = |address: IpAddr| address != address.to_canonical();
        let is_mapped = mapped(self.source) || mapped(self.destination);
        if is_mapped || self.source.is_ipv6() != self.destination.is_ipv6() {
            return None;
        }
        let path = Path::ip(gid_of_ip(self.source), gid_of_ip(self.destination));
        let template = Template::new(&Path {
            grh: path.grh.map(|grh| Grh {
                traffic_class: self.traffic_class,
                ..grh
            }),
            udp_source: self.port,
            ..path
        });
        Some(Headers {
            template,
            port: self.port,
        })
    }
}

/// The headers that are invisible to a socket, for datagrams with equal ancillary data.
pub struct Headers {
    template: Template,
    port: u16,
}

impl Headers {
    /// Creates the frame of a datagram, and checks its ICRC. The IPv4 identification is
    /// invisible to a socket: it is computed from the ICRC, so that only 16 of the 32 bits of
    /// the ICRC are checked.
    ///
    /// # Errors
    /// [`DatagramError`].
    pub fn frame(&self, pool: &Pool, datagram: &[u8]) -> Result<Packet, DatagramError> {
        let mut packet = self.unchecked_frame(pool, datagram)?;
        let (l3, l3_at) = self.template.l3();
        let bth_at = self.template.bytes().len();
        let frame = packet.frame_mut();
        let end = frame.len() - ICRC_BYTES;
        let computed = icrc(frame, LinkKind::Ip, l3, l3_at, bth_at);
        let stored = frame[end..]
            .iter()
            .rev()
            .fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let change = computed ^ stored;
        if change != 0 {
            if l3 != L3::Ipv4 {
                return Err(DatagramError::Icrc);
            }
            let at = l3_at + IDENTIFICATION;
            let cause = icrc_cause(change, end - at - 2).ok_or(DatagramError::Icrc)?;
            // The kernel has checked the header's checksum.
            frame[at..at + 2].copy_from_slice(&cause);
        }
        // The ICRC is right: the transport does not check it again.
        packet.mark_without_icrc();
        Ok(packet)
    }

    /// As [`frame`](Self::frame), whatever the ICRC. The IPv4 identification is 0.
    ///
    /// # Errors
    /// [`DatagramError::Length`].
    pub fn unchecked_frame(&self, pool: &Pool, datagram: &[u8]) -> Result<Packet, DatagramError> {
        let headers = self.template.bytes();
        let bth_at = headers.len();
        if !(BTH_BYTES + ICRC_BYTES..=PACKET_CAPACITY - bth_at).contains(&datagram.len()) {
            return Err(DatagramError::Length);
        }
        let mut packet = pool.get(LinkKind::Ip);
        packet.set_length(bth_at + datagram.len());
        let frame = packet.frame_mut();
        frame[..bth_at].copy_from_slice(headers);
        // In a path, a source port of 0 stands for the default one.
        frame[bth_at - UDP..bth_at - UDP + 2].copy_from_slice(&self.port.to_be_bytes());
        frame[bth_at..].copy_from_slice(datagram);
        self.template.finish(frame);
        Ok(packet)
    }
}

/// Where and how a socket sends a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Sender.
    pub source: IpAddr,
    /// Receiver.
    pub destination: IpAddr,
    /// UDP source port.
    pub port: u16,
    /// Traffic class, or TOS of IPv4.
    pub traffic_class: u8,
    /// Hop limit, or TTL.
    pub hop_limit: u8,
    /// The range of the datagram in the frame.
    pub payload: Range<usize>,
    l3: L3,
    l3_at: usize,
}

impl Transmit {
    /// Decodes the headers of a frame; `None` if it is not RoCE v2.
    #[must_use]
    pub fn parse(packet: &Packet) -> Option<Self> {
        let frame = packet.frame();
        let network = NetworkHeaders::read(packet.kind(), frame).ok()?;
        let at = network.l3_at;
        let (source, destination, traffic_class, hop_limit): (IpAddr, IpAddr, _, _) =
            match network.l3 {
                L3::Ipv4 => {
                    let address = |at: usize| frame.get(at..)?.first_chunk::<4>().copied();
                    let of = |at| address(at).map(|it| IpAddr::from(Ipv4Addr::from(it)));
                    (of(at + 12)?, of(at + 16)?, frame[at + 1], frame[at + 8])
                }
                L3::Ipv6 => {
                    let address = |at: usize| frame.get(at..)?.first_chunk::<16>().copied();
                    let of = |at| address(at).map(|it| IpAddr::from(Ipv6Addr::from(it)));
                    let class = (u16_at(frame, at) >> 4) as u8;
                    (of(at + 8)?, of(at + 24)?, class, frame[at + 7])
                }
                L3::None | L3::Grh => return None,
            };
        Some(Self {
            source,
            destination,
            port: u16_at(frame, network.bth_at - UDP),
            traffic_class,
            hop_limit,
            payload: network.bth_at..network.end,
            l3: network.l3,
            l3_at: at,
        })
    }

    /// Changes the source port of the frame, and the ICRC with it.
    pub fn set_port(&mut self, packet: &mut Packet, port: u16) {
        let at = self.payload.start - UDP;
        self.apply_change(packet, at, port ^ self.port);
        self.port = port;
    }

    /// Changes the IPv4 identification, which is 0 in a new frame, and the ICRC with
    /// it. Without effect on IPv6.
    pub fn set_identification(&self, packet: &mut Packet, identification: u16) {
        if self.l3 == L3::Ipv4 {
            let at = self.l3_at + IDENTIFICATION;
            let change = u16_at(packet.frame(), at) ^ identification;
            self.apply_change(packet, at, change);
        }
    }

    fn apply_change(&self, packet: &mut Packet, at: usize, change: u16) {
        let change = change.to_be_bytes();
        let end = self.payload.end - ICRC_BYTES;
        let has_icrc = packet.has_icrc();
        let frame = packet.buffer_mut();
        for (byte, change) in frame.iter_mut().skip(at).zip(change) {
            *byte ^= change;
        }
        if !has_icrc || change == [0, 0] {
            return;
        }
        if let Some(change) = icrc_change(change, end - at - 2) {
            for (byte, change) in frame.iter_mut().skip(end).zip(change.to_le_bytes()) {
                *byte ^= change;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packet::{Bth, PacketBuilder, Pool, Psn, Roce, View, gid_of_ipv4};

    fn frame(pool: &Pool, ipv6: bool, payload: &[u8], traffic_class: u8) -> Packet {
        let gid = |n: u8| match ipv6 {
            true => [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n],
            false => gid_of_ipv4([192, 0, 2, n]),
        };
        let mut path = Path::ip(gid(1), gid(2));
        if let Some(grh) = &mut path.grh {
            grh.traffic_class = traffic_class;
        }
        let template = Template::new(&path);
        let bth = Bth {
            opcode: 4,
            solicited: false,
            migrated: true,
            pad: 0,
            version: 0,
            pkey: 0xffff,
            dest_qpn: 0x12_3456,
            ack_request: true,
            psn: Psn::new(77),
        };
        let mut builder = PacketBuilder::new(pool, &template, bth, payload.len());
        builder.space(payload.len()).copy_from_slice(payload);
        builder.finish()
    }

    /// Passes a frame through a socket, whose receiver sees only the [`RecvMeta`].
    fn pass_through_socket(pool: &Pool, packet: &Packet) -> Result<Packet, DatagramError> {
        let transmit = Transmit::parse(packet).unwrap();
        let meta = RecvMeta {
            source: transmit.source,
            port: transmit.port,
            destination: transmit.destination,
            traffic_class: transmit.traffic_class,
        };
        let headers = meta.headers().unwrap();
        headers.frame(pool, &packet.frame()[transmit.payload.clone()])
    }

    proptest! {
        #[test]
        fn a_packet_is_received_as_it_was_sent(
            ipv6 in any::<bool>(),
            payload in proptest::collection::vec(any::<u8>(), 0..4097),
            port in any::<u16>(),
            identification in any::<u16>(),
            traffic_class in any::<u8>(),
            deferred_icrc in any::<bool>(),
        ) {
            let pool = if deferred_icrc { Pool::with_deferred_icrc() } else { Pool::new() };
            let mut packet = frame(&pool, ipv6, &payload, traffic_class);
            let mut transmit = Transmit::parse(&packet).unwrap();
            prop_assert_eq!((transmit.traffic_class, transmit.hop_limit), (traffic_class, 64));
            transmit.set_port(&mut packet, port);
            transmit.set_identification(&mut packet, identification);
            packet.add_icrc();
            View::read(LinkKind::Ip, packet.frame()).unwrap();
            let received = pass_through_socket(&Pool::new(), &packet).unwrap();
            let view = View::read(LinkKind::Ip, received.frame()).unwrap();
            prop_assert_eq!(view.payload.bytes(), &payload[..]);
            let sent = Transmit::parse(&packet);
            prop_assert_eq!(Transmit::parse(&received), sent);
        }

        #[test]
        fn a_damaged_packet_is_refused(
            ipv6 in any::<bool>(),
            length in 0usize..1000,
            bit in any::<proptest::sample::Index>(),
        ) {
            let mut packet = frame(&Pool::new(), ipv6, &vec![7; length], 0);
            let at = headroom(ipv6) * 8;
            let bit = at + bit.index(packet.frame().len() * 8 - at);
            // Bits that no ICRC covers.
            if bit / 8 != at / 8 + 4 {
                packet.frame_mut()[bit / 8] ^= 1 << (bit % 8);
                match pass_through_socket(&Pool::new(), &packet) {
                    Err(error) => prop_assert_eq!(error, DatagramError::Icrc),
                    // One in 65536: another identification explains it.
                    Ok(received) => {
                        let at = IDENTIFICATION;
                        prop_assert!(!ipv6 && received.frame()[at..at + 2] != [0; 2]);
                    }
                }
            }
        }

        #[test]
        fn any_datagram_is_framed_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..PACKET_CAPACITY + 9),
            source in any::<IpAddr>(),
            destination in any::<IpAddr>(),
        ) {
            let meta = RecvMeta { source, port: 0, destination, traffic_class: 3 };
            if let Some(headers) = meta.headers() {
                let _ = headers.frame(&Pool::new(), &bytes);
            }
        }
    }

    #[test]
    fn frames_other_than_roce_v2_are_not_sent() {
        let pool = Pool::new();
        for kind in [LinkKind::Ib, LinkKind::Ethernet, LinkKind::Ip] {
            for frame in [&[][..], &[0; 100], &[0x45; 100], &[0x60; 100]] {
                assert_eq!(Transmit::parse(&pool.copy_of(kind, frame).unwrap()), None);
            }
        }
        let gid = |n| gid_of_ipv4([192, 0, 2, n]);
        let mut path = Path::roce_v2([2; 6], [4; 6], gid(1), gid(2));
        let packet = |path: &Path| {
            let template = Template::new(path);
            PacketBuilder::new(&pool, &template, Bth::default(), 0).finish()
        };
        let roce_v2 = Transmit::parse(&packet(&path)).unwrap();
        assert_eq!(roce_v2.payload, 42..58);
        path.roce = Roce::V1;
        assert_eq!(Transmit::parse(&packet(&path)), None);
    }
}
