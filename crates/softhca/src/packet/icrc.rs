//! Invariant CRC: CRC-32 over everything that no switch or router changes.
//!
//! Fields that change on the way count as ones: LRH.VL, traffic class, flow label
//! and hop limit of GRH and IPv6; TOS, TTL and checksum of IPv4; the UDP checksum;
//! BTH.resv8a. Where there is no LRH, eight bytes of ones stand for it (InfiniBand
//! Architecture Specification, volume 1, 7.8.1, and annex 17).

use super::header::{BTH, ICRC};
use super::path::{L3, LinkKind, MAX_NETWORK};

/// The CRC of eight bytes of ones.
const ONES: u32 = 0x2144_df1c;

/// Computes the ICRC of a packet. `frame` is the whole packet; its last four bytes
/// are the place of the ICRC and do not count. The result is stored little-endian.
///
/// The caller guarantees what [`super::Network::checked`] checks: headers of the
/// size of `l3` between `l3_at` and `bth_at`, followed by a BTH and an ICRC.
#[inline]
#[must_use]
pub(crate) fn icrc(frame: &[u8], kind: LinkKind, l3: L3, l3_at: usize, bth_at: usize) -> u32 {
    let mut masked = [0u8; MAX_NETWORK + BTH];
    // The covered bytes begin with the LRH on InfiniBand, else with the L3 header.
    let start = if kind == LinkKind::Ib { 0 } else { l3_at };
    let length = bth_at + BTH - start;
    let masked = &mut masked[..length];
    masked.copy_from_slice(&frame[start..bth_at + BTH]);
    let mut crc = ONES;
    if kind == LinkKind::Ib {
        crc = 0;
        masked[0] |= 0xf0;
    }
    let global = l3_at - start;
    match l3 {
        L3::None => {}
        L3::Grh | L3::Ipv6 => {
            masked[global] |= 0x0f;
            masked[global + 1..global + 4].fill(0xff);
            masked[global + 7] = 0xff;
            if l3 == L3::Ipv6 {
                masked[global + 46..global + 48].fill(0xff);
            }
        }
        L3::Ipv4 => {
            masked[global + 1] = 0xff;
            masked[global + 8] = 0xff;
            masked[global + 10..global + 12].fill(0xff);
            masked[global + 26..global + 28].fill(0xff);
        }
    }
    masked[length - BTH + 4] = 0xff;
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(masked);
    hasher.update(&frame[bth_at + BTH..frame.len() - ICRC]);
    hasher.finalize()
}
