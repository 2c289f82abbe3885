//! Invariant CRC: CRC-32 over everything that no switch or router changes.
//!
//! Fields that change on the way count as ones: LRH.VL, traffic class, flow label
//! and hop limit of GRH and IPv6; TOS, TTL and checksum of IPv4; the UDP checksum;
//! BTH.resv8a (IBA 7.8.1). Where there is no LRH, eight bytes of ones stand for it
//! (IBA A17.3.3).

use super::header::{BTH_BYTES, ICRC_BYTES};
use super::path::{L3, LinkKind, MAX_NETWORK_BYTES};
use super::pool::PACKET_CAPACITY;

/// The CRC of eight bytes of ones.
const ONES: u32 = 0x2144_df1c;

/// Computes the ICRC of a packet. `frame` is the whole packet; its last four bytes
/// are the place of the ICRC and are not covered. The result is stored little-endian.
///
/// The caller guarantees what [`super::NetworkHeaders::check_bounds`] checks: headers of the
/// size of `l3` between `l3_at` and `bth_at`, followed by a BTH and an ICRC.
#[inline]
#[must_use]
pub(crate) fn icrc(frame: &[u8], kind: LinkKind, l3: L3, l3_at: usize, bth_at: usize) -> u32 {
    let mut masked = [0u8; MAX_NETWORK_BYTES + BTH_BYTES];
    // The covered bytes begin with the LRH on InfiniBand, else with the L3 header.
    let start = if kind == LinkKind::Ib { 0 } else { l3_at };
    let length = bth_at + BTH_BYTES - start;
    let masked = &mut masked[..length];
    masked.copy_from_slice(&frame[start..bth_at + BTH_BYTES]);
    let mut crc = ONES;
    if kind == LinkKind::Ib {
        crc = 0;
        masked[0] |= 0xf0;
    }
    let offset = l3_at - start;
    match l3 {
        L3::None => {}
        L3::Grh | L3::Ipv6 => {
            masked[offset] |= 0x0f;
            masked[offset + 1..offset + 4].fill(0xff);
            masked[offset + 7] = 0xff;
            if l3 == L3::Ipv6 {
                masked[offset + 46..offset + 48].fill(0xff);
            }
        }
        L3::Ipv4 => {
            masked[offset + 1] = 0xff;
            masked[offset + 8] = 0xff;
            masked[offset + 10..offset + 12].fill(0xff);
            masked[offset + 26..offset + 28].fill(0xff);
        }
    }
    masked[length - BTH_BYTES + 4] = 0xff;
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(masked);
    hasher.update(&frame[bth_at + BTH_BYTES..frame.len() - ICRC_BYTES]);
    hasher.finalize()
}

/// The generator polynomial, lowest degree first (bit 31 is x^0).
const POLYNOMIAL: u32 = 0xedb8_8320;
/// Bytes that may follow a difference.
const MAX_FOLLOWING: usize = PACKET_CAPACITY + 2;

/// Multiplies by x.
const fn multiply_by_x(value: u32) -> u32 {
    (value >> 1) ^ ((value & 1) * POLYNOMIAL)
}

/// Divides by x.
const fn divide_by_x(value: u32) -> u32 {
    let carry = value >> 31;
    ((value ^ (carry * POLYNOMIAL)) << 1) | carry
}

/// x^(8n) for n from 0, or its inverse.
const fn powers(inverse: bool) -> [u32; MAX_FOLLOWING] {
    let mut table = [1 << 31; MAX_FOLLOWING];
    let mut at = 1;
    while at < MAX_FOLLOWING {
        let mut value = table[at - 1];
        let mut bit = 0;
        while bit < 8 {
            value = if inverse {
                divide_by_x(value)
            } else {
                multiply_by_x(value)
            };
            bit += 1;
        }
        table[at] = value;
        at += 1;
    }
    table
}

static POWERS: [u32; MAX_FOLLOWING] = powers(false);
static INVERSES: [u32; MAX_FOLLOWING] = powers(true);

/// Multiplies modulo the polynomial.
fn multiply(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    while a != 0 {
        product ^= b * (a >> 31);
        a <<= 1;
        b = multiply_by_x(b);
    }
    product
}

/// Returns the exclusive or of an ICRC with the one after two covered bytes change by
/// `bytes`, with `following` covered bytes after them. `None` beyond the longest
/// packet.
#[must_use]
pub fn icrc_change(bytes: [u8; 2], following: usize) -> Option<u32> {
    let power = POWERS.get(following.checked_add(2)?)?;
    Some(multiply(u16::from_le_bytes(bytes).into(), *power))
}

/// Returns the change of two covered bytes, with `following` covered bytes after them,
/// that changes the ICRC by `change`. `None` if there is no such change of these two
/// bytes alone, as for all but one in 65536 arbitrary values.
#[must_use]
pub fn icrc_cause(change: u32, following: usize) -> Option<[u8; 2]> {
    let inverse = INVERSES.get(following.checked_add(2)?)?;
    let bytes = u16::try_from(multiply(change, *inverse)).ok()?;
    Some(bytes.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_change_of_two_bytes_is_computed_and_found(
            mut data in proptest::collection::vec(any::<u8>(), 2..PACKET_CAPACITY),
            at in any::<proptest::sample::Index>(),
            change in any::<[u8; 2]>(),
            noise in 1u32..,
        ) {
            let at = at.index(data.len() - 1);
            let following = data.len() - at - 2;
            let before = crc32fast::hash(&data);
            data[at] ^= change[0];
            data[at + 1] ^= change[1];
            let difference = before ^ crc32fast::hash(&data);
            prop_assert_eq!(icrc_change(change, following), Some(difference));
            prop_assert_eq!(icrc_cause(difference, following), Some(change));
            // Other differences have no cause, or another one.
            let other = icrc_cause(difference ^ noise, following);
            prop_assert!(other != Some(change));
        }
    }

    #[test]
    fn most_icrc_changes_have_no_cause_in_two_bytes() {
        let mut found = 0;
        for step in 1..200_000u32 {
            let change = step.wrapping_mul(0x9e37_79b9);
            found += u32::from(icrc_cause(change, 1000).is_some());
        }
        // One in 65536.
        assert!(found < 20, "{found}");
        assert_eq!(icrc_cause(1, MAX_FOLLOWING), None);
        assert_eq!(icrc_change([1, 0], usize::MAX), None);
    }
}
