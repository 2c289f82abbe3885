//! AES-XTS (IEEE 1619).

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};

/// Bytes of a block of AES, and least bytes of a unit.
pub(crate) const BLOCK: usize = 16;

/// The two keys.
pub(crate) struct Xts {
    data: Cipher,
    tweak: Cipher,
}

impl std::fmt::Debug for Xts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Xts").finish_non_exhaustive()
    }
}

enum Cipher {
    Short(Box<Aes128>),
    Long(Box<Aes256>),
}

impl Cipher {
    fn new(key: &[u8]) -> Option<Cipher> {
        match key.len() {
            16 => Some(Cipher::Short(Box::new(Aes128::new_from_slice(key).ok()?))),
            32 => Some(Cipher::Long(Box::new(Aes256::new_from_slice(key).ok()?))),
            _ => None,
        }
    }

    fn apply(&self, block: &mut Block, encrypts: bool) {
        match (self, encrypts) {
            (Cipher::Short(cipher), true) => cipher.encrypt_block(block),
            (Cipher::Short(cipher), false) => cipher.decrypt_block(block),
            (Cipher::Long(cipher), true) => cipher.encrypt_block(block),
            (Cipher::Long(cipher), false) => cipher.decrypt_block(block),
        }
    }
}

/// Multiplies a tweak by x.
fn next(tweak: u128) -> u128 {
    const REDUCTION: u128 = 0x87;
    tweak << 1 ^ if tweak >> 127 != 0 { REDUCTION } else { 0 }
}

impl Xts {
    /// Creates a cipher from the data key and the tweak key, concatenated: 32 or 64 bytes.
    pub(crate) fn new(keys: &[u8]) -> Option<Xts> {
        let (data, tweak) = keys.split_at(keys.len() / 2);
        Some(Xts {
            data: Cipher::new(data)?,
            tweak: Cipher::new(tweak)?,
        })
    }

    /// Encrypts or decrypts a unit of at least [`BLOCK`] bytes.
    pub(crate) fn apply(&self, tweak: [u8; BLOCK], unit: &mut [u8], encrypts: bool) {
        let mut first = Block::from(tweak);
        self.tweak.apply(&mut first, true);
        let mut tweak = u128::from_le_bytes(first.into());
        let block = |bytes: &mut [u8], tweak: u128| {
            let mut whole = [0; BLOCK];
            whole.copy_from_slice(bytes);
            let mixed = u128::from_le_bytes(whole) ^ tweak;
            let mut block = Block::from(mixed.to_le_bytes());
            self.data.apply(&mut block, encrypts);
            let result = u128::from_le_bytes(block.into()) ^ tweak;
            bytes.copy_from_slice(&result.to_le_bytes());
        };
        let rest = unit.len() % BLOCK;
        let Some(whole) = (unit.len() / BLOCK).checked_sub(usize::from(rest != 0)) else {
            return;
        };
        let (blocks, end) = unit.split_at_mut(whole * BLOCK);
        for bytes in blocks.chunks_exact_mut(BLOCK) {
            block(bytes, tweak);
            tweak = next(tweak);
        }
        if rest == 0 || end.len() != BLOCK + rest {
            return;
        }
        // Ciphertext stealing: the last whole block and the partial one are swapped.
        let (first, second) = match encrypts {
            true => (tweak, next(tweak)),
            false => (next(tweak), tweak),
        };
        let (last, part) = end.split_at_mut(BLOCK);
        block(last, first);
        for (a, b) in last.iter_mut().zip(part) {
            std::mem::swap(a, b);
        }
        block(last, second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of IEEE 1619-2007, annex B: keys, unit, plaintext, ciphertext.
    #[test]
    fn vectors_of_the_standard() {
        let xts = Xts::new(&[0; 32]).unwrap();
        let mut unit = [0; 32];
        xts.apply([0; 16], &mut unit, true);
        let cipher = [
            0x91, 0x7c, 0xf6, 0x9e, 0xbd, 0x68, 0xb2, 0xec, 0x9b, 0x9f, 0xe9, 0xa3, 0xea, 0xdd,
            0xa6, 0x92, 0xcd, 0x43, 0xd2, 0xf5, 0x95, 0x98, 0xed, 0x85, 0x8c, 0x02, 0xc2, 0x65,
            0x2f, 0xbf, 0x92, 0x2e,
        ];
        assert_eq!(unit, cipher);
        xts.apply([0; 16], &mut unit, false);
        assert_eq!(unit, [0; 32]);
        // The fifteenth, of 17 bytes.
        let keys: Vec<u8> = (0xf0..=0xff).rev().chain((0xb0..=0xbf).rev()).collect();
        let xts = Xts::new(&keys).unwrap();
        let mut tweak = [0; 16];
        tweak[..5].copy_from_slice(&[0x9a, 0x78, 0x56, 0x34, 0x12]);
        let mut unit: Vec<u8> = (0..17).collect();
        xts.apply(tweak, &mut unit, true);
        let cipher = [
            0x6c, 0x16, 0x25, 0xdb, 0x46, 0x71, 0x52, 0x2d, 0x3d, 0x75, 0x99, 0x60, 0x1d, 0xe7,
            0xca, 0x09, 0xed,
        ];
        assert_eq!(unit, cipher);
        xts.apply(tweak, &mut unit, false);
        assert_eq!(unit, (0..17).collect::<Vec<u8>>());
    }

    #[test]
    fn long_keys_and_units_are_restored() {
        let keys: Vec<u8> = (0..64).collect();
        let xts = Xts::new(&keys).unwrap();
        for length in [16, 512, 520, 4048, 4160] {
            let plain: Vec<u8> = (0..length).map(|n| n as u8).collect();
            let mut unit = plain.clone();
            xts.apply([7; 16], &mut unit, true);
            assert_ne!(unit, plain);
            xts.apply([7; 16], &mut unit, false);
            assert_eq!(unit, plain);
        }
        assert!(Xts::new(&keys[..63]).is_none());
    }
}
