//! Route headers of datagrams, and the sender that they name.

#![forbid(unsafe_code)]

use std::fmt;

use crate::Gid;

/// Bytes of the global route header in front of a received datagram.
pub const ROUTE_HEADER: usize = 40;

/// The address of a datagram's sender, from the datagram's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawAddress {
    /// The sender's GID.
    pub gid: Gid,
    /// The sender's queue pair.
    pub qp_num: u32,
}

impl fmt::Display for RawAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} queue pair {:#x}", self.gid, self.qp_num)
    }
}

/// The type of a route header.
enum Route<'h> {
    /// RoCE over IPv4: the IP header is in the last 20 bytes; the others are
    /// undefined.
    Ipv4(&'h [u8]),
    /// RoCE over IPv6, or InfiniBand, whose header has the same layout.
    Ipv6,
}

/// IP protocol number of UDP.
const UDP: u8 = 17;
/// Next header value of an InfiniBand transport header.
const TRANSPORT: u8 = 0x1b;

/// Guesses the type, because no field states it. A valid IPv4 checksum decides;
/// rdma_rxe does not set the checksum of loopback packets.
fn route(header: &[u8; ROUTE_HEADER]) -> Option<Route<'_>> {
    let inner = &header[20..];
    let could_be_ipv4 = inner[0] == 0x45 && inner[9] == UDP;
    let sum: u32 = inner
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    if could_be_ipv4 && (folded & 0xffff) + (folded >> 16) == 0xffff {
        return Some(Route::Ipv4(inner));
    }
    if header[0] >> 4 == 6 && matches!(header[6], UDP | TRANSPORT) {
        return Some(Route::Ipv6);
    }
    could_be_ipv4.then_some(Route::Ipv4(inner))
}

fn mapped(address: &[u8]) -> Gid {
    let mut gid = [0; 16];
    gid[10] = 0xff;
    gid[11] = 0xff;
    gid[12..].copy_from_slice(&address[..4]);
    Gid(gid)
}

fn sixteen(bytes: &[u8]) -> Gid {
    let mut gid = [0; 16];
    gid.copy_from_slice(&bytes[..16]);
    Gid(gid)
}

/// Returns the sender's GID from a datagram's route header: RoCE over IPv4 or
/// IPv6, or InfiniBand.
pub fn source_gid(header: &[u8; ROUTE_HEADER]) -> Option<Gid> {
    Some(match route(header)? {
        Route::Ipv4(inner) => mapped(&inner[12..16]),
        Route::Ipv6 => sixteen(&header[8..24]),
    })
}

/// Returns whether a datagram was sent to a multicast group.
pub(crate) fn is_multicast(header: &[u8; ROUTE_HEADER]) -> bool {
    match route(header) {
        Some(Route::Ipv4(inner)) => inner[16] >> 4 == 0xe,
        Some(Route::Ipv6) => header[24] == 0xff,
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4_header(from: [u8; 4], to: [u8; 4]) -> [u8; ROUTE_HEADER] {
        let mut header = [0xa5; ROUTE_HEADER];
        let ip = &mut header[20..];
        ip.fill(0);
        ip[0] = 0x45;
        ip[8] = 64;
        ip[9] = 17;
        ip[12..16].copy_from_slice(&from);
        ip[16..20].copy_from_slice(&to);
        let sum: u32 = ip
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
            .sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let check = !(folded as u16);
        ip[10..12].copy_from_slice(&check.to_be_bytes());
        header
    }

    #[test]
    fn ipv4_source_is_a_mapped_gid() {
        let header = ipv4_header([10, 1, 2, 3], [192, 168, 77, 1]);
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 1, 2, 3]);
        assert_eq!(source_gid(&header), Some(Gid(gid)));
        assert!(!is_multicast(&header));
        assert!(is_multicast(&ipv4_header([10, 1, 2, 3], [224, 0, 0, 5])));
    }

    #[test]
    fn zero_ipv4_checksum_is_accepted_unless_the_header_is_ipv6() {
        let mut header = ipv4_header([10, 1, 2, 3], [10, 1, 2, 4]);
        let right = source_gid(&header);
        header[30] ^= 1;
        assert_eq!(source_gid(&header), right);
        header[0] = 0x60;
        header[6] = UDP;
        assert_ne!(source_gid(&header), right);
        header[30] ^= 1;
        assert_eq!(source_gid(&header), right);
    }

    #[test]
    fn ipv6_source_is_the_gid() {
        let mut header = [0; ROUTE_HEADER];
        header[0] = 0x60;
        header[6] = UDP;
        header[8..24].copy_from_slice(&[7; 16]);
        header[24] = 0xff;
        assert_eq!(source_gid(&header), Some(Gid([7; 16])));
        assert!(is_multicast(&header));
    }

    #[test]
    fn malformed_header_has_no_source() {
        assert_eq!(source_gid(&[0; ROUTE_HEADER]), None);
        assert_eq!(source_gid(&[0xff; ROUTE_HEADER]), None);
    }
}
