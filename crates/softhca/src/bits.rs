//! Fields of the device's structures: big-endian words of 32 bits, a field
//! being some bits of one word.
//!
//! Everything here is total. A field that lies past the end of its buffer
//! reads as zero and is not written: inputs may be shorter than their
//! structure, and the guest says how long an output may be.

/// Some bits of a big-endian 32-bit word at a byte offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    offset: usize,
    shift: u32,
    mask: u32,
}

/// The bits `high` to `low` (both included, 31 the first on the wire) of the
/// word at byte `offset`.
pub const fn field(offset: usize, high: u32, low: u32) -> Field {
    assert!(offset.is_multiple_of(4) && high < 32 && low <= high);
    let width = high - low + 1;
    Field {
        offset,
        shift: low,
        mask: if width == 32 {
            u32::MAX
        } else {
            (1 << width) - 1
        },
    }
}

/// One bit of the word at byte `offset`.
pub const fn flag(offset: usize, bit: u32) -> Field {
    field(offset, bit, bit)
}

impl Field {
    /// The same field of a structure that begins at byte `base`.
    pub const fn at(self, base: usize) -> Field {
        Field {
            offset: self.offset + base,
            ..self
        }
    }

    /// The field's value; 0 past the end of `buf`.
    pub fn get(self, buf: &[u8]) -> u32 {
        (get32(buf, self.offset) >> self.shift) & self.mask
    }

    /// Whether the field is not 0.
    pub fn is_set(self, buf: &[u8]) -> bool {
        self.get(buf) != 0
    }

    /// Replaces the field by the low bits of `value`.
    pub fn put(self, buf: &mut [u8], value: u32) {
        let word = get32(buf, self.offset) & !(self.mask << self.shift);
        put32(buf, self.offset, word | ((value & self.mask) << self.shift));
    }
}

/// The big-endian word at byte `offset`; 0 past the end.
pub fn get32(buf: &[u8], offset: usize) -> u32 {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => u32::from_be_bytes(*bytes),
        None => 0,
    }
}

/// Writes a big-endian word at byte `offset`; nothing past the end.
pub fn put32(buf: &mut [u8], offset: usize, value: u32) {
    if let Some(bytes) = buf
        .get_mut(offset..)
        .and_then(|rest| rest.first_chunk_mut())
    {
        *bytes = value.to_be_bytes();
    }
}

/// The big-endian double word at byte `offset`; 0 past the end.
pub fn get64(buf: &[u8], offset: usize) -> u64 {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => 0,
    }
}

/// Writes a big-endian double word at byte `offset`; nothing past the end.
pub fn put64(buf: &mut [u8], offset: usize, value: u64) {
    if let Some(bytes) = buf
        .get_mut(offset..)
        .and_then(|rest| rest.first_chunk_mut())
    {
        *bytes = value.to_be_bytes();
    }
}

/// `N` bytes at byte `offset`; zeros past the end.
pub fn get_array<const N: usize>(buf: &[u8], offset: usize) -> [u8; N] {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => *bytes,
        None => [0; N],
    }
}

/// Writes bytes at byte `offset`, as many as there is room for.
pub fn put_bytes(buf: &mut [u8], offset: usize, bytes: &[u8]) {
    if let Some(rest) = buf.get_mut(offset..) {
        let n = rest.len().min(bytes.len());
        rest[..n].copy_from_slice(&bytes[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_what_the_wire_order_says() {
        let mut buf = [0x12, 0x34, 0x56, 0x78, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(field(0, 31, 16).get(&buf), 0x1234);
        assert_eq!(field(0, 7, 0).get(&buf), 0x78);
        assert_eq!(field(0, 31, 0).get(&buf), 0x1234_5678);
        field(4, 23, 8).put(&mut buf, 0xffff_0000);
        assert_eq!(buf[4..], [0xff, 0, 0, 0xff]);
        assert_eq!(field(0, 7, 0).at(4).get(&buf), 0xff);
    }

    #[test]
    fn past_the_end_is_zero_and_stays_unwritten() {
        let mut buf = [0xff; 6];
        assert_eq!(get32(&buf, 4), 0);
        assert_eq!(get64(&buf, 0), 0);
        put32(&mut buf, 3, 0);
        put64(&mut buf, usize::MAX, 0);
        assert_eq!(buf, [0xff; 6]);
        put_bytes(&mut buf, 4, &[1, 2, 3]);
        assert_eq!(buf, [0xff, 0xff, 0xff, 0xff, 1, 2]);
    }
}
