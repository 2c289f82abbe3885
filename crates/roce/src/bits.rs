//! Fields of device structures: bit ranges of big-endian 32-bit words.
//!
//! All accesses are total: past the end of the buffer, a field reads as zero and is
//! not written. Inputs may be shorter than their structure, and the guest chooses
//! the length of an output.

/// A bit range of a big-endian 32-bit word at a byte offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    offset: usize,
    shift: u32,
    mask: u32,
}

/// The bits `high` to `low`, inclusive, of the word at byte `offset`; bit 31 is the
/// first on the wire.
pub const fn field(offset: usize, high: u32, low: u32) -> Field {
    assert!(offset % 4 == 0 && high < 32 && low <= high);
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
    /// The field in a structure that begins at byte `base`.
    pub const fn at(self, base: usize) -> Field {
        Field {
            offset: self.offset + base,
            ..self
        }
    }

    /// Returns the largest value that fits.
    pub fn largest(self) -> u32 {
        self.mask
    }

    /// Reads the field; 0 past the end of `buf`.
    pub fn get(self, buf: &[u8]) -> u32 {
        (get32(buf, self.offset) >> self.shift) & self.mask
    }

    /// Whether the field is nonzero.
    pub fn is_set(self, buf: &[u8]) -> bool {
        self.get(buf) != 0
    }

    /// Writes the low bits of `value` to the field.
    pub fn put(self, buf: &mut [u8], value: u32) {
        let word = get32(buf, self.offset) & !(self.mask << self.shift);
        put32(buf, self.offset, word | ((value & self.mask) << self.shift));
    }
}

/// Reads a big-endian 32-bit word at byte `offset`; 0 past the end.
pub fn get32(buf: &[u8], offset: usize) -> u32 {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => u32::from_be_bytes(*bytes),
        None => 0,
    }
}

/// Writes a big-endian 32-bit word at byte `offset`; does nothing past the end.
pub fn put32(buf: &mut [u8], offset: usize, value: u32) {
    if let Some(bytes) = buf
        .get_mut(offset..)
        .and_then(|rest| rest.first_chunk_mut())
    {
        *bytes = value.to_be_bytes();
    }
}

/// Reads a big-endian 64-bit word at byte `offset`; 0 past the end.
pub fn get64(buf: &[u8], offset: usize) -> u64 {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => 0,
    }
}

/// Writes a big-endian 64-bit word at byte `offset`; does nothing past the end.
pub fn put64(buf: &mut [u8], offset: usize, value: u64) {
    if let Some(bytes) = buf
        .get_mut(offset..)
        .and_then(|rest| rest.first_chunk_mut())
    {
        *bytes = value.to_be_bytes();
    }
}

/// Reads `N` bytes at byte `offset`; zeros past the end.
pub fn get_array<const N: usize>(buf: &[u8], offset: usize) -> [u8; N] {
    match buf.get(offset..).and_then(|rest| rest.first_chunk()) {
        Some(bytes) => *bytes,
        None => [0; N],
    }
}

/// Writes bytes at byte `offset`, as many as fit.
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
    fn fields_are_in_wire_order() {
        let mut buf = [0x12, 0x34, 0x56, 0x78, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(field(0, 31, 16).get(&buf), 0x1234);
        assert_eq!(field(0, 7, 0).get(&buf), 0x78);
        assert_eq!(field(0, 31, 0).get(&buf), 0x1234_5678);
        field(4, 23, 8).put(&mut buf, 0xffff_0000);
        assert_eq!(buf[4..], [0xff, 0, 0, 0xff]);
        assert_eq!(field(0, 7, 0).at(4).get(&buf), 0xff);
    }

    #[test]
    fn a_field_past_the_end_reads_as_zero_and_is_not_written() {
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
