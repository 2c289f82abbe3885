//! AES key wrap (RFC 3394).

use aes::cipher::{BlockCipherDecrypt, KeyInit};
use aes::{Aes128, Block};

/// Bytes by which a wrapped key is longer.
pub(crate) const LONGER: usize = 8;

/// Unwraps a key; `None` if this key did not wrap it.
pub(crate) fn unwrap(by: &[u8; 16], wrapped: &[u8]) -> Option<Vec<u8>> {
    let cipher = Aes128::new_from_slice(by).ok()?;
    let (check, key) = wrapped.split_first_chunk::<LONGER>()?;
    let (mut check, mut key) = (*check, key.to_vec());
    let count = key.len() / LONGER;
    let mut block = Block::default();
    for step in (1..=6 * count).rev() {
        let at = (step - 1) % count * LONGER;
        let mixed = u64::from_be_bytes(check) ^ step as u64;
        block[..LONGER].copy_from_slice(&mixed.to_be_bytes());
        block[LONGER..].copy_from_slice(&key[at..at + LONGER]);
        cipher.decrypt_block(&mut block);
        check.copy_from_slice(&block[..LONGER]);
        key[at..at + LONGER].copy_from_slice(&block[LONGER..]);
    }
    (count > 1 && key.len() % LONGER == 0 && check == [0xa6; LONGER]).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 3394, 4.1.
    #[test]
    fn a_key_is_unwrapped_by_the_key_that_wrapped_it() {
        let by = std::array::from_fn(|at| at as u8);
        let wrapped = [
            0x1fa6_8b0a_8112_b447u64,
            0xaef3_4bd8_fb5a_7b82,
            0x9d3e_8623_71d2_cfe5,
        ];
        let mut wrapped = wrapped.map(u64::to_be_bytes).concat();
        let key: Vec<u8> = (0..16).map(|at| at * 0x11).collect();
        assert_eq!(unwrap(&by, &wrapped), Some(key));
        assert_eq!(unwrap(&[0; 16], &wrapped), None);
        assert_eq!(unwrap(&by, &wrapped[..20]), None);
        assert_eq!(unwrap(&by, &wrapped[..8]), None);
        wrapped[20] ^= 1;
        assert_eq!(unwrap(&by, &wrapped), None);
    }
}
