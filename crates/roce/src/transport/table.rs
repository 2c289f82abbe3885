//! Table of queue pairs by number.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hasher for 24-bit numbers. It need not resist crafted collisions: the numbers are
/// those of one HCA.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
}

/// The QP table, looked up for every packet. It is never iterated, so that nothing
/// depends on its order.
pub(super) type Table<T> = HashMap<u32, T, BuildHasherDefault<NumberHasher>>;
