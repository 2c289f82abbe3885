//! Headers and checksums of Ethernet frames.

use std::borrow::Cow;
use std::ops::Range;

/// Flags for unicast and multicast frames.
pub(crate) const UNICAST: u32 = 1;
pub(crate) const MULTICAST: u32 = 2;

/// Returns the flag of a frame.
pub(crate) fn cast(frame: &[u8]) -> u32 {
    match frame.first() {
        Some(first) if first & 1 != 0 => MULTICAST,
        _ => UNICAST,
    }
}

/// Origin of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Wire,
    /// A send queue of this interface, and its transport domain.
    Local {
        domain: Option<u32>,
    },
}

pub(super) const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

/// Offsets of the layers of a frame.
pub(crate) struct Layers {
    pub(crate) ipv4: bool,
    pub(crate) l3: usize,
    pub(crate) l4: usize,
    pub(crate) protocol: u8,
}

/// Returns the big-endian 16-bit number at an offset.
pub(crate) fn u16_at(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]))
}

/// Returns the layers of a frame that holds an IP packet.
pub(crate) fn layers(frame: &[u8]) -> Option<Layers> {
    let mut at = 12;
    let mut ethertype = u16_at(frame, at)?;
    while ethertype == VLAN {
        at += 4;
        ethertype = u16_at(frame, at)?;
    }
    let l3 = at + 2;
    match ethertype {
        IPV4 => Some(Layers {
            ipv4: true,
            l3,
            l4: l3 + usize::from(frame.get(l3)? & 0xf) * 4,
            protocol: *frame.get(l3 + 9)?,
        }),
        IPV6 => Some(Layers {
            ipv4: false,
            l3,
            l4: l3 + 40,
            protocol: *frame.get(l3 + 6)?,
        }),
        _ => None,
    }
}

/// Returns the sum of big-endian words of 16 bits, the last padded with zeros.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    bytes
        .chunks(2)
        .map(|pair| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0)))
        .sum()
}

/// Returns the checksum of data with this sum: the complement of the 16-bit sum.
pub(super) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Returns the checksum of data: the complement of the 16-bit one's complement sum.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u16 {
    fold(sum(bytes))
}

/// Returns the one's complement sum of the IP packet in a frame, without the padding of
/// a short frame; 0 if there is no IP packet.
pub(super) fn ip_packet_sum(frame: &[u8]) -> u16 {
    let Some(at) = layers(frame) else { return 0 };
    let length = if at.ipv4 {
        u16_at(frame, at.l3 + 2).map(usize::from)
    } else {
        u16_at(frame, at.l3 + 4).map(|payload| 40 + usize::from(payload))
    };
    let end = (at.l3 + length.unwrap_or(0)).min(frame.len());
    !fold(sum(frame.get(at.l3..end).unwrap_or(&[])))
}

/// Returns which checksums of a received frame are valid, and the types of its layers, as
/// fields of a CQE.
pub(super) fn verify_checksums(frame: &[u8]) -> (u8, u8) {
    const L2_OK: u8 = 1 << 0;
    const L3_OK: u8 = 1 << 1;
    const L4_OK: u8 = 1 << 2;
    const L3_IPV6: u8 = 1 << 2;
    const L3_IPV4: u8 = 2 << 2;
    const L4_TCP: u8 = 1 << 4;
    const L4_UDP: u8 = 2 << 4;
    let Some(at) = layers(frame) else {
        return (L2_OK, 0);
    };
    let (mut valid, mut types) = (L2_OK, if at.ipv4 { L3_IPV4 } else { L3_IPV6 });
    let header = frame.get(at.l3..at.l4).unwrap_or(&[]);
    // The sum over a header with its checksum is all ones.
    if header.len() >= 20 && (!at.ipv4 || fold(sum(header)) == 0) {
        valid |= L3_OK;
    }
    let is_fragment = at.ipv4 && u16_at(frame, at.l3 + 6).is_none_or(|bits| bits & 0x3fff != 0);
    let l4_type = match at.protocol {
        TCP => L4_TCP,
        UDP => L4_UDP,
        _ => return (valid, types),
    };
    if is_fragment {
        return (valid, types);
    }
    types |= l4_type;
    let l4 = l4_segment(frame, &at);
    if let Some((pseudo, segment)) = l4.and_then(|(sum, at)| Some((sum, frame.get(at)?))) {
        let no_checksum = l4_type == L4_UDP && at.ipv4 && segment.get(6..8) == Some(&[0; 2]);
        let all = pseudo + u64::from(at.protocol) + segment.len() as u64 + sum(segment);
        if !segment.is_empty() && (no_checksum || fold(all) == 0) {
            valid |= L4_OK;
        }
    }
    (valid, types)
}

/// Returns the sum of the addresses of an IP packet, and where its payload is, by the length in
/// its header.
fn l4_segment(frame: &[u8], at: &Layers) -> Option<(u64, Range<usize>)> {
    let (addresses, end) = if at.ipv4 {
        let total = usize::from(u16_at(frame, at.l3 + 2)?);
        (at.l3 + 12..at.l3 + 20, at.l3 + total)
    } else {
        let payload = usize::from(u16_at(frame, at.l3 + 4)?);
        (at.l3 + 8..at.l3 + 40, at.l3 + 40 + payload)
    };
    let pseudo = frame.get(addresses).map(sum)?;
    Some((pseudo, at.l4..end))
}

/// Returns a frame without its VLAN tag, and the tag.
pub(super) fn strip_vlan_tag(frame: &[u8]) -> (Cow<'_, [u8]>, Option<u16>) {
    match (u16_at(frame, 12), u16_at(frame, 14)) {
        (Some(VLAN), Some(tag)) => {
            let mut without = frame[..12].to_vec();
            without.extend_from_slice(&frame[16..]);
            (Cow::Owned(without), Some(tag))
        }
        _ => (Cow::Borrowed(frame), None),
    }
}

/// Sets the checksum of the IPv4 header and, with `l4`, that of TCP or UDP.
pub(super) fn set_checksums(frame: &mut [u8], l4: bool) {
    let Some(at) = layers(frame) else { return };
    if at.ipv4 {
        if let Some(header) = frame.get_mut(at.l3..at.l4) {
            if header.len() >= 20 {
                header[10..12].fill(0);
                let value = fold(sum(header));
                header[10..12].copy_from_slice(&value.to_be_bytes());
            }
        }
    }
    let offset = match at.protocol {
        TCP => 16,
        UDP => 6,
        _ => return,
    };
    if !l4 {
        return;
    }
    let Some((pseudo, range)) = l4_segment(frame, &at) else {
        return;
    };
    let end = range.end.min(frame.len());
    let Some(segment) = frame.get_mut(range.start..end) else {
        return;
    };
    let Some(field) = segment.get_mut(offset..offset + 2) else {
        return;
    };
    field.fill(0);
    let value = fold(pseudo + u64::from(at.protocol) + segment.len() as u64 + sum(segment));
    let value = if value == 0 && at.protocol == UDP {
        0xffff
    } else {
        value
    };
    segment[offset..offset + 2].copy_from_slice(&value.to_be_bytes());
}
