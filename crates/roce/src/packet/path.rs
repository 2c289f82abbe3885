//! Network headers: everything before the BTH, per link layer and RoCE version.

use std::net::{IpAddr, Ipv6Addr};

use super::header::{BTH_BYTES, ICRC_BYTES, u16_at, u32_at};

/// A 16-byte global identifier.
pub type Gid = [u8; 16];
/// A MAC address.
pub type Mac = [u8; 6];

/// The UDP port of RoCE v2 (IBA A17.3.2.2).
pub const ROCE_V2_PORT: u16 = 4791;

const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_ROCE_V1: u16 = 0x8915;
const PROTOCOL_UDP: u8 = 17;
const NEXT_HEADER_BTH: u8 = 0x1b;
const LNH_BTH: u8 = 2;
const LNH_GRH: u8 = 3;

/// The most bytes of [`Template::bytes`]: Ethernet with a VLAN tag, IPv6, UDP.
pub const MAX_NETWORK_BYTES: usize = 14 + 4 + 40 + 8;

/// The link layer of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// InfiniBand.
    Ib {
        /// Source LID.
        slid: u16,
        /// Destination LID.
        dlid: u16,
        /// Service level, 0 to 15.
        sl: u8,
    },
    /// Ethernet.
    Ether {
        /// Source MAC.
        smac: Mac,
        /// Destination MAC.
        dmac: Mac,
        /// VLAN tag control information, if tagged.
        vlan: Option<u16>,
    },
    /// None: packets start at the IP header, as a UDP socket sends them.
    Ip,
}

/// Global route: the fields of a GRH, or of the IP header that takes its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Grh {
    /// Source GID.
    pub sgid: Gid,
    /// Destination GID.
    pub dgid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Traffic class, or TOS of IPv4.
    pub traffic_class: u8,
    /// Hop limit, or TTL of IPv4.
    pub hop_limit: u8,
}

/// RoCE encapsulation of a BTH; ignored on InfiniBand. Without a link layer there is only
/// [`Roce::V2`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Roce {
    /// Ethertype 0x8915 and a GRH.
    V1,
    /// IP and UDP; IPv4 if both GIDs are IPv4-mapped.
    #[default]
    V2,
}

/// The path to a peer: a resolved address vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Link layer.
    pub link: Link,
    /// Global route; required for RoCE.
    pub grh: Option<Grh>,
    /// RoCE version.
    pub roce: Roce,
    /// UDP source port (RoCE v2); 0 stands for 0xc000.
    pub udp_source: u16,
}

impl Path {
    /// Returns an InfiniBand path without a global route.
    #[must_use]
    pub fn ib(slid: u16, dlid: u16) -> Self {
        Self {
            link: Link::Ib { slid, dlid, sl: 0 },
            grh: None,
            roce: Roce::V2,
            udp_source: 0,
        }
    }

    /// Returns a RoCE v2 path.
    #[must_use]
    pub fn roce_v2(smac: Mac, dmac: Mac, sgid: Gid, dgid: Gid) -> Self {
        Self {
            link: Link::Ether {
                smac,
                dmac,
                vlan: None,
            },
            ..Self::ip(sgid, dgid)
        }
    }

    /// Returns a RoCE v2 path without a link layer.
    #[must_use]
    pub fn ip(sgid: Gid, dgid: Gid) -> Self {
        Self {
            link: Link::Ip,
            grh: Some(Grh {
                sgid,
                dgid,
                flow_label: 0,
                traffic_class: 0,
                hop_limit: 64,
            }),
            roce: Roce::V2,
            udp_source: 0,
        }
    }
}

/// The IPv4 address in an IPv4-mapped GID (`::ffff:a.b.c.d`).
#[must_use]
pub fn ipv4_of(gid: &Gid) -> Option<[u8; 4]> {
    (gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff])
        .then(|| [gid[12], gid[13], gid[14], gid[15]])
}

/// The IPv4-mapped GID of an IPv4 address (IBA A17.4.1.1).
#[must_use]
pub fn gid_of_ipv4(address: [u8; 4]) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].copy_from_slice(&[0xff, 0xff]);
    gid[12..].copy_from_slice(&address);
    gid
}

/// The GID of an address.
#[must_use]
pub fn gid_of_ip(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => gid_of_ipv4(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address that a GID stands for.
#[must_use]
pub fn ip_of_gid(gid: Gid) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

/// ECN field of a traffic class: the sender answers to congestion marks (IBA A17.3.1.1.3).
pub(crate) const ECT0: u8 = 0b10;
/// ECN field of a traffic class: the packet has met congestion.
pub(crate) const CE: u8 = 0b11;

/// The headers between the link header and the BTH.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum L3 {
    /// Nothing (InfiniBand within a subnet).
    #[default]
    None,
    /// A GRH.
    Grh,
    /// IPv4 and UDP.
    Ipv4,
    /// IPv6 and UDP.
    Ipv6,
}

/// The link layer that a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LinkKind {
    /// InfiniBand: the frame begins with an LRH.
    Ib,
    /// Ethernet: the frame begins with a MAC header.
    #[default]
    Ethernet,
    /// None: the frame begins with an IPv4 or IPv6 header, and is RoCE v2.
    Ip,
}

impl LinkKind {
    /// The length of the link header, without a VLAN tag.
    #[inline]
    #[must_use]
    pub const fn header_bytes(self) -> usize {
        match self {
            Self::Ib => 8,
            Self::Ethernet => 14,
            Self::Ip => 0,
        }
    }
}

/// An encoded path: all headers before the BTH, complete except for lengths and the
/// IPv4 checksum.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    buffer: [u8; MAX_NETWORK_BYTES],
    length: u8,
    l3_at: u8,
    l3: L3,
    kind: LinkKind,
    /// Ones' complement sum of the IPv4 header with length and checksum zero.
    ipv4_sum: u32,
}

struct Writer<'a> {
    out: &'a mut [u8; MAX_NETWORK_BYTES],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Writes a GRH or an IPv6 header; both have the same format.
    fn grh(&mut self, grh: &Grh, next_header: u8) {
        let first = 6 << 28 | u32::from(grh.traffic_class) << 20 | grh.flow_label & 0xf_ffff;
        self.put(&first.to_be_bytes());
        self.put(&[0, 0, next_header, grh.hop_limit]);
        self.put(&grh.sgid);
        self.put(&grh.dgid);
    }

    /// Writes IP and UDP headers (IBA A17.3.1). Returns the ones' complement sum of an IPv4
    /// header.
    fn ip(&mut self, grh: &Grh, udp_source: u16) -> u32 {
        let start = self.at;
        let mut sum = 0;
        if let Some((source, destination)) = ipv4_of(&grh.sgid).zip(ipv4_of(&grh.dgid)) {
            // Don't fragment; identification zero.
            self.put(&[0x45, grh.traffic_class, 0, 0, 0, 0, 0x40, 0]);
            self.put(&[grh.hop_limit, PROTOCOL_UDP, 0, 0]);
            self.put(&source);
            self.put(&destination);
            let words = self.out[start..self.at].chunks_exact(2);
            sum = words.map(|word| u32::from(u16_at(word, 0))).sum();
        } else {
            self.grh(grh, PROTOCOL_UDP);
        }
        self.udp(udp_source);
        sum
    }

    fn udp(&mut self, source: u16) {
        let source = if source == 0 { 0xc000 } else { source };
        self.put(&source.to_be_bytes());
        self.put(&ROCE_V2_PORT.to_be_bytes());
        // The checksum stays zero (IBA A17.3.2.4): the ICRC covers the packet.
        self.put(&[0; 4]);
    }
}

/// The IP header of a RoCE v2 path.
fn ip_version(grh: &Grh) -> L3 {
    match ipv4_of(&grh.sgid).zip(ipv4_of(&grh.dgid)) {
        Some(_) => L3::Ipv4,
        None => L3::Ipv6,
    }
}

impl Template {
    /// Encodes the headers of `path`. A RoCE path without a global route gets zero
    /// GIDs.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        let mut buffer = [0; MAX_NETWORK_BYTES];
        let mut w = Writer {
            out: &mut buffer,
            at: 0,
        };
        let mut l3 = L3::None;
        let mut ipv4_sum = 0;
        let kind;
        let l3_at;
        match path.link {
            Link::Ib { slid, dlid, sl } => {
                kind = LinkKind::Ib;
                let lnh = if path.grh.is_some() { LNH_GRH } else { LNH_BTH };
                w.put(&[0, (sl & 0xf) << 4 | lnh]);
                w.put(&dlid.to_be_bytes());
                w.put(&[0, 0]);
                w.put(&slid.to_be_bytes());
                l3_at = w.at;
                if let Some(grh) = &path.grh {
                    l3 = L3::Grh;
                    w.grh(grh, NEXT_HEADER_BTH);
                }
            }
            Link::Ether { smac, dmac, vlan } => {
                kind = LinkKind::Ethernet;
                let grh = path.grh.unwrap_or_default();
                w.put(&dmac);
                w.put(&smac);
                if let Some(tag) = vlan {
                    w.put(&ETHERTYPE_VLAN.to_be_bytes());
                    w.put(&tag.to_be_bytes());
                }
                l3_at = w.at + 2;
                if path.roce == Roce::V1 {
                    l3 = L3::Grh;
                    w.put(&ETHERTYPE_ROCE_V1.to_be_bytes());
                    w.grh(&grh, NEXT_HEADER_BTH);
                } else {
                    l3 = ip_version(&grh);
                    let ethertype = match l3 {
                        L3::Ipv4 => ETHERTYPE_IPV4,
                        _ => ETHERTYPE_IPV6,
                    };
                    w.put(&ethertype.to_be_bytes());
                    ipv4_sum = w.ip(&grh, path.udp_source);
                }
            }
            Link::Ip => {
                kind = LinkKind::Ip;
                let grh = path.grh.unwrap_or_default();
                l3_at = 0;
                l3 = ip_version(&grh);
                ipv4_sum = w.ip(&grh, path.udp_source);
            }
        }
        let length = w.at as u8;
        Self {
            buffer,
            length,
            l3_at: l3_at as u8,
            l3,
            kind,
            ipv4_sum,
        }
    }

    /// The headers, without lengths and checksum.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..usize::from(self.length)]
    }

    /// The link layer of these frames.
    #[inline]
    #[must_use]
    pub fn kind(&self) -> LinkKind {
        self.kind
    }

    /// The headers between link header and BTH, and their offset in the frame.
    #[inline]
    #[must_use]
    pub fn l3(&self) -> (L3, usize) {
        (self.l3, usize::from(self.l3_at))
    }

    /// Writes lengths and checksum into a frame that begins with
    /// [`Template::bytes`] and is complete except for the value of the ICRC.
    #[inline]
    pub fn finish(&self, frame: &mut [u8]) {
        let at = usize::from(self.l3_at);
        let total = frame.len();
        if self.kind == LinkKind::Ib {
            // The LRH length is in words of four bytes, without the variant CRC.
            frame[4..6].copy_from_slice(&((total / 4) as u16 & 0x7ff).to_be_bytes());
        }
        match self.l3 {
            L3::None => {}
            L3::Grh => {
                frame[at + 4..at + 6].copy_from_slice(&((total - at - 40) as u16).to_be_bytes());
            }
            L3::Ipv6 => {
                let length = ((total - at - 40) as u16).to_be_bytes();
                frame[at + 4..at + 6].copy_from_slice(&length);
                frame[at + 44..at + 46].copy_from_slice(&length);
            }
            L3::Ipv4 => {
                let length = (total - at) as u16;
                frame[at + 2..at + 4].copy_from_slice(&length.to_be_bytes());
                let mut sum = self.ipv4_sum + u32::from(length);
                sum = (sum & 0xffff) + (sum >> 16);
                sum = (sum & 0xffff) + (sum >> 16);
                frame[at + 10..at + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
                frame[at + 24..at + 26].copy_from_slice(&(length - 20).to_be_bytes());
            }
        }
    }
}

/// The network headers of a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkHeaders {
    /// The link layer, as the sender filled it in.
    pub link: Link,
    /// The headers between link header and BTH.
    pub l3: L3,
    /// Offset of those headers.
    pub l3_at: usize,
    /// Offset of the BTH.
    pub bth_at: usize,
    /// End of the ICRC; link padding may follow.
    pub end: usize,
}

impl NetworkHeaders {
    /// Whether the frame was marked: it has met congestion. Only IP headers are marked.
    #[inline]
    #[must_use]
    pub fn is_marked(&self, frame: &[u8]) -> bool {
        let bits = |shift: u8| frame.get(self.l3_at + 1).map(|byte| byte >> shift & CE);
        match self.l3 {
            L3::Ipv4 => bits(0) == Some(CE),
            L3::Ipv6 => bits(4) == Some(CE),
            L3::None | L3::Grh => false,
        }
    }
}

/// Reasons why a frame is not an RDMA packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkError {
    /// The frame is not RDMA; it is for the network interface.
    NotRdma,
    /// The frame is RDMA, and malformed.
    Malformed,
}

impl NetworkHeaders {
    /// Locates the transport packet in a frame.
    ///
    /// # Errors
    /// [`NetworkError::NotRdma`] if the frame carries none; [`NetworkError::Malformed`] if
    /// its lengths or versions are wrong.
    #[inline]
    pub fn read(kind: LinkKind, frame: &[u8]) -> Result<Self, NetworkError> {
        match kind {
            LinkKind::Ib => Self::parse_ib(frame),
            LinkKind::Ethernet => Self::parse_ethernet(frame),
            LinkKind::Ip => Self::parse_ip(frame),
        }
    }

    fn check_bounds(self, frame: &[u8]) -> Result<Self, NetworkError> {
        if self.end > frame.len() || self.bth_at + BTH_BYTES + ICRC_BYTES > self.end {
            return Err(NetworkError::Malformed);
        }
        Ok(self)
    }

    fn parse_ib(frame: &[u8]) -> Result<Self, NetworkError> {
        if frame.len() < 8 {
            return Err(NetworkError::Malformed);
        }
        // Only link version 0 is defined.
        if frame[0] & 0xf != 0 {
            return Err(NetworkError::Malformed);
        }
        let end = usize::from(u16_at(frame, 4) & 0x7ff) * 4;
        let link = Link::Ib {
            slid: u16_at(frame, 6),
            dlid: u16_at(frame, 2),
            sl: frame[1] >> 4,
        };
        let (l3, bth_at) = match frame[1] & 3 {
            LNH_BTH => (L3::None, 8),
            LNH_GRH => {
                let bth_at = check_grh(frame, 8, end, NEXT_HEADER_BTH)?;
                (L3::Grh, bth_at)
            }
            _ => return Err(NetworkError::NotRdma),
        };
        Self {
            link,
            l3,
            l3_at: 8,
            bth_at,
            end,
        }
        .check_bounds(frame)
    }

    fn parse_ethernet(frame: &[u8]) -> Result<Self, NetworkError> {
        if frame.len() < 14 {
            return Err(NetworkError::Malformed);
        }
        let mut dmac = [0; 6];
        let mut smac = [0; 6];
        dmac.copy_from_slice(&frame[..6]);
        smac.copy_from_slice(&frame[6..12]);
        let mut ethertype = u16_at(frame, 12);
        let mut at = 14;
        let mut vlan = None;
        if ethertype == ETHERTYPE_VLAN {
            if frame.len() < 18 {
                return Err(NetworkError::Malformed);
            }
            vlan = Some(u16_at(frame, 14));
            ethertype = u16_at(frame, 16);
            at = 18;
        }
        let link = Link::Ether { smac, dmac, vlan };
        let (l3, bth_at, end) = match ethertype {
            ETHERTYPE_ROCE_V1 => {
                if frame.len() < at + 40 {
                    return Err(NetworkError::Malformed);
                }
                let end = at + 40 + usize::from(u16_at(frame, at + 4));
                (L3::Grh, check_grh(frame, at, end, NEXT_HEADER_BTH)?, end)
            }
            ETHERTYPE_IPV4 => {
                let (bth_at, end) = find_in_ipv4(frame, at)?;
                (L3::Ipv4, bth_at, end)
            }
            ETHERTYPE_IPV6 => {
                let (bth_at, end) = find_in_ipv6(frame, at)?;
                (L3::Ipv6, bth_at, end)
            }
            _ => return Err(NetworkError::NotRdma),
        };
        Self {
            link,
            l3,
            l3_at: at,
            bth_at,
            end,
        }
        .check_bounds(frame)
    }

    fn parse_ip(frame: &[u8]) -> Result<Self, NetworkError> {
        let (l3, found) = match frame.first().map(|byte| byte >> 4) {
            Some(4) => (L3::Ipv4, find_in_ipv4(frame, 0)),
            Some(6) => (L3::Ipv6, find_in_ipv6(frame, 0)),
            _ => return Err(NetworkError::Malformed),
        };
        // There is no network interface for other packets.
        let (bth_at, end) = found.map_err(|_| NetworkError::Malformed)?;
        Self {
            link: Link::Ip,
            l3,
            l3_at: 0,
            bth_at,
            end,
        }
        .check_bounds(frame)
    }

    /// The destination GID; an IPv4 address as an IPv4-mapped GID.
    #[must_use]
    pub fn dgid(&self, frame: &[u8]) -> Option<Gid> {
        self.gid(frame, 24, 16)
    }

    /// The source GID; an IPv4 address as an IPv4-mapped GID.
    #[must_use]
    pub fn sgid(&self, frame: &[u8]) -> Option<Gid> {
        self.gid(frame, 8, 12)
    }

    fn gid(&self, frame: &[u8], grh: usize, ipv4: usize) -> Option<Gid> {
        match self.l3 {
            L3::None => None,
            L3::Grh | L3::Ipv6 => frame
                .get(self.l3_at + grh..self.l3_at + grh + 16)?
                .try_into()
                .ok(),
            L3::Ipv4 => {
                let at = self.l3_at + ipv4;
                Some(gid_of_ipv4(frame.get(at..at + 4)?.try_into().ok()?))
            }
        }
    }

    /// The 40 bytes before the payload in a datagram's receive buffer: the GRH or
    /// IPv6 header; an IPv4 header in the last 20 (IBA A17.4.5.2); zeros without either.
    #[must_use]
    pub fn grh_area(&self, frame: &[u8]) -> [u8; 40] {
        let mut out = [0; 40];
        match self.l3 {
            L3::None => {}
            L3::Grh | L3::Ipv6 => out.copy_from_slice(&frame[self.l3_at..self.l3_at + 40]),
            L3::Ipv4 => out[20..].copy_from_slice(&frame[self.l3_at..self.l3_at + 20]),
        }
        out
    }
}

/// Checks IPv4 and UDP headers at `at`. Returns the offset of the BTH, and the end of the
/// packet.
fn find_in_ipv4(frame: &[u8], at: usize) -> Result<(usize, usize), NetworkError> {
    let Some(header) = frame.get(at..at + 28) else {
        return Err(NetworkError::NotRdma);
    };
    // Only IPv4 without options, not a fragment, UDP to the port of RoCE v2 (IBA A17.3.1.1).
    if header[0] != 0x45
        || header[9] != PROTOCOL_UDP
        || u16_at(header, 6) & 0x3fff != 0
        || u16_at(header, 22) != ROCE_V2_PORT
    {
        return Err(NetworkError::NotRdma);
    }
    let length = usize::from(u16_at(header, 2));
    if usize::from(u16_at(header, 24)) + 20 != length {
        return Err(NetworkError::Malformed);
    }
    Ok((at + 28, at + length))
}

/// Checks IPv6 and UDP headers at `at`. Returns the offset of the BTH, and the end of the
/// packet.
fn find_in_ipv6(frame: &[u8], at: usize) -> Result<(usize, usize), NetworkError> {
    if frame.len() < at + 48
        || frame[at + 6] != PROTOCOL_UDP
        || u16_at(frame, at + 42) != ROCE_V2_PORT
    {
        return Err(NetworkError::NotRdma);
    }
    let end = at + 40 + usize::from(u16_at(frame, at + 4));
    if u16_at(frame, at + 44) != u16_at(frame, at + 4) {
        return Err(NetworkError::Malformed);
    }
    Ok((check_grh(frame, at, end, PROTOCOL_UDP)? + 8, end))
}

/// Checks a GRH (IBA 9.6.1.2) or IPv6 header (IBA A17.4.4.1) at `at` in a packet that ends at
/// `end`. Returns the offset of the next header.
fn check_grh(frame: &[u8], at: usize, end: usize, next_header: u8) -> Result<usize, NetworkError> {
    if frame.len() < at + 40 || u32_at(frame, at) >> 28 != 6 || frame[at + 6] != next_header {
        return Err(NetworkError::Malformed);
    }
    if at + 40 + usize::from(u16_at(frame, at + 4)) != end {
        return Err(NetworkError::Malformed);
    }
    Ok(at + 40)
}
