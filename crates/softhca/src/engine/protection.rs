//! Signatures and encryption of the data behind a memory key, as its byte stream formats
//! (BSF) describe them.
//!
//! Data is in blocks, which are signed and encrypted as units. Each has a signature behind
//! it in memory, on the wire, or both.

use roce::bits::{Field, field, flag, get64};
use roce::rule::{Rule, Violation};

use super::frame;
use super::xts::{self, Xts};

/// Base-2 logarithm of the number of encryption keys.
pub(crate) const LOG_MAX_ENCRYPTION_KEYS: u32 = 12;

/// Bytes of a format.
pub(crate) const BSF_SIZE: usize = 64;
/// Longest signature.
const MAX_SIGNATURE: usize = 8;

const SIZE: Field = field(0, 31, 30);
const SAME_STRUCTURE: Field = flag(0, 28);
const BSF_TYPE: Field = field(0, 25, 24);
const CHECK_MASK: Field = field(0, 23, 16);
/// Mask of copied bytes, if both sides have the same structure; otherwise the block size.
const WIRE_BS_SELECTOR: Field = field(0, 15, 8);
const MEMORY_BS_SELECTOR: Field = field(0, 7, 0);
const WIRE_SELECTOR: Field = field(8, 31, 24);
const WIRE_PSV: Field = field(8, 23, 0);
const MEMORY_SELECTOR: Field = field(12, 31, 24);
const MEMORY_PSV: Field = field(12, 23, 0);
/// Offsets of the inline sections.
const WIRE_INLINE: usize = 0x20;
const MEMORY_INLINE: usize = 0x30;

const INLINE_VALID: Field = flag(0, 31);
const APP_TAG: Field = field(0, 15, 0);
const REF_TAG: Field = field(4, 31, 0);
const GUARD: Field = field(8, 31, 24);
const ONES: Field = flag(8, 19);
const INCREMENTS: Field = flag(12, 22);
const ESCAPE: Field = field(12, 17, 16);

const ORDER: Field = field(0, 23, 16);
const STANDARD: Field = field(0, 7, 0);
const UNIT: Field = field(8, 31, 24);
const TWEAK: usize = 0x10;
const KEY: Field = field(0x20, 23, 0);
const KEY_TAG: usize = 0x28;

/// Kind of an encryption format; size codes: with an inline section, and with a second
/// format.
const ENCRYPTION: u32 = 1;
const INLINE_SIZE: u32 = 2;
const TWO_FORMATS: u32 = 3;

/// Returns the block size of a selector, in bytes.
fn block_size(selector: u32) -> Option<usize> {
    match selector {
        1 => Some(512),
        2 => Some(520),
        3 => Some(4096),
        4 => Some(4160),
        6 => Some(4048),
        _ => None,
    }
}

/// A checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checksum {
    /// The CRC of T10, 16 bits.
    T10Crc,
    /// The Internet checksum.
    Internet,
    Crc32,
    Crc32c,
    Crc64,
}

/// Computes the reflected CRC of a polynomial. The result is the exclusive or with `ones`.
fn reflected_crc(polynomial: u64, initial: u64, ones: u64, data: &[u8]) -> u64 {
    let mut crc = initial;
    for byte in data {
        crc ^= u64::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { polynomial } else { 0 };
        }
    }
    crc ^ ones
}

impl Checksum {
    /// Computes the checksum with an initial value of 0, or of all ones.
    fn of(self, initial_ones: bool, data: &[u8]) -> u64 {
        let initial = if initial_ones { u64::MAX } else { 0 };
        let (short, long) = (u64::from(u32::MAX), u64::MAX);
        match self {
            Checksum::T10Crc => {
                const POLYNOMIAL: u16 = 0x8bb7;
                let mut crc = initial as u16;
                for byte in data {
                    crc ^= u16::from(*byte) << 8;
                    for _ in 0..8 {
                        let carry = crc & 0x8000 != 0;
                        crc = crc << 1 ^ if carry { POLYNOMIAL } else { 0 };
                    }
                }
                crc.into()
            }
            Checksum::Internet => frame::fold(frame::sum(data) + (initial & 0xffff)).into(),
            Checksum::Crc32 => reflected_crc(0xedb8_8320, initial & short, short, data),
            Checksum::Crc32c => reflected_crc(0x82f6_3b78, initial & short, short, data),
            Checksum::Crc64 => reflected_crc(0x9a6c_9329_ac4b_c9b5, initial, long, data),
        }
    }
}

/// Escape masks: a block is not checked if all these bits of its signature are set.
const ESCAPE_APP: u64 = 0xffff << 32;
const ESCAPE_BOTH: u64 = 0xffff_ffff_ffff;

/// The signature of each block: a 64-bit number, of which the first bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Signature {
    checksum: Checksum,
    initial_ones: bool,
    /// Application and reference tag; 0 for a CRC.
    tags: u64,
    increments: bool,
    escape: u64,
}

impl Signature {
    /// Parses the signature of one side.
    fn parse(selector: u32, inline: &[u8]) -> Result<Signature, Violation> {
        if selector != 0 {
            return Ok(Signature {
                checksum: match selector & 0xf0 {
                    0x20 => Checksum::Crc32,
                    0x40 => Checksum::Crc32c,
                    0x50 => Checksum::Crc64,
                    _ => {
                        let rule = Rule::Supported;
                        return Err(Violation::new("selector of a signature", selector, rule));
                    }
                },
                initial_ones: selector & 1 == 0,
                tags: 0,
                increments: false,
                escape: 0,
            });
        }
        if !INLINE_VALID.is_set(inline) {
            let rule = Rule::With("inline values");
            return Err(Violation::new("selector of a signature", selector, rule));
        }
        Ok(Signature {
            checksum: match GUARD.get(inline) {
                1 => Checksum::T10Crc,
                2 => Checksum::Internet,
                guard => return Err(Violation::new("guard", guard, Rule::Supported)),
            },
            initial_ones: ONES.is_set(inline),
            tags: u64::from(APP_TAG.get(inline)) << 32 | u64::from(REF_TAG.get(inline)),
            increments: INCREMENTS.is_set(inline),
            escape: match ESCAPE.get(inline) {
                0 => 0,
                1 => ESCAPE_APP,
                _ => ESCAPE_BOTH,
            },
        })
    }

    fn bytes(&self) -> usize {
        match self.checksum {
            Checksum::Crc32 | Checksum::Crc32c => 4,
            _ => 8,
        }
    }

    /// Returns the signature of a block of data.
    fn of(&self, index: u64, data: &[u8]) -> u64 {
        let checksum = self.checksum.of(self.initial_ones, data);
        match self.checksum {
            Checksum::T10Crc | Checksum::Internet => {
                let step = if self.increments { index as u32 } else { 0 };
                let tag = (self.tags as u32).wrapping_add(step);
                checksum << 48 | self.tags & ESCAPE_APP | u64::from(tag)
            }
            Checksum::Crc32 | Checksum::Crc32c => checksum << 32,
            Checksum::Crc64 => checksum,
        }
    }

    /// Reads a signature from the bytes after a block.
    fn read(&self, bytes: &[u8]) -> u64 {
        let mut whole = [0; MAX_SIGNATURE];
        whole[..bytes.len().min(MAX_SIGNATURE)].copy_from_slice(bytes);
        u64::from_be_bytes(whole)
    }

    /// Compares the bytes of two signatures that a mask selects.
    fn check(&self, expected: u64, actual: u64, mask: u64) -> Option<SignatureError> {
        const GUARD: u64 = 0xffff << 48;
        const APP: u64 = 0xffff << 32;
        let is_dif = matches!(self.checksum, Checksum::T10Crc | Checksum::Internet);
        if self.escape != 0 && actual & self.escape == self.escape {
            return None;
        }
        let differs = (expected ^ actual) & mask;
        let syndrome = match differs {
            0 => return None,
            _ if !is_dif || differs & GUARD != 0 => 1 << 13,
            _ if differs & APP != 0 => 1 << 12,
            _ => 1 << 11,
        };
        Some(SignatureError {
            syndrome,
            expected,
            actual,
            of_memory: false,
            offset: 0,
        })
    }
}

/// A wrong signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SignatureError {
    pub(crate) syndrome: u16,
    pub(crate) expected: u64,
    pub(crate) actual: u64,
    pub(crate) of_memory: bool,
    /// Offset of the signed block in the converted unit, as it arrived.
    pub(crate) offset: usize,
}

/// Encryption of blocks.
#[derive(Debug)]
struct Encryption {
    xts: Xts,
    /// Data is encrypted when it is sent and decrypted when it is received; if false, the
    /// reverse.
    encrypts_sent: bool,
    /// Signatures are between memory and the encryption.
    signature_first: bool,
    /// The first tweak.
    tweak: u128,
    /// Bytes of a unit.
    unit: usize,
}

/// A data encryption key.
#[derive(Debug)]
pub(crate) struct EncryptionKey {
    pub(crate) pd: u32,
    /// The data key and the tweak key, concatenated.
    pub(crate) keys: Vec<u8>,
    pub(crate) tag: Option<[u8; 8]>,
    pub(crate) opaque: [u8; 8],
}

/// Maximum number of data bytes that are converted at once.
const MAX_CONVERTED: usize = 1 << 16;

/// Returns the least common multiple of two sizes, if it is not too large.
fn common_multiple(a: usize, b: usize) -> Result<usize, Violation> {
    let multiple = (1..=MAX_CONVERTED / a).map(|n| n * a).find(|n| n % b == 0);
    multiple.ok_or_else(|| {
        let (with, limit) = (b as u64, MAX_CONVERTED as u64);
        let rule = Rule::CommonMultiple { with, limit };
        Violation::new("size of signed blocks", a, rule)
    })
}

/// The protection of a key's data.
#[derive(Debug, Default)]
pub(crate) struct Protection {
    /// Bytes of data that are converted at once: a block, or the common multiple of the
    /// block sizes in memory and on the wire.
    block: usize,
    /// Bytes of data of a signed block in memory, and on the wire.
    blocks: [usize; 2],
    memory: Option<Signature>,
    wire: Option<Signature>,
    /// Bytes of an arriving signature that are checked, and those that are copied.
    checked: u64,
    copied: u64,
    /// PSVs of memory and wire.
    pub(crate) psvs: [Option<u32>; 2],
    encryption: Option<Encryption>,
}

/// Expands a mask of eight bits to a mask of eight bytes.
fn expand_mask(mask: u32) -> u64 {
    (0..8).fold(0, |all, n| match mask & 1 << n {
        0 => all,
        _ => all | 0xff << (8 * n),
    })
}

impl Protection {
    /// Parses the formats of a work request. `key` finds an encryption key.
    pub(crate) fn parse<'a>(
        formats: &[u8],
        key: impl Fn(u32) -> Option<&'a EncryptionKey>,
    ) -> Result<Protection, Violation> {
        let mut protection = Protection::default();
        let count = formats.len() / BSF_SIZE;
        for format in formats.chunks_exact(BSF_SIZE) {
            let expected = if count > 1 { TWO_FORMATS } else { INLINE_SIZE };
            let size = SIZE.get(format);
            if size != expected {
                let (what, rule) = (
                    "size code of a byte stream format",
                    Rule::Is(expected.into()),
                );
                return Err(Violation::new(what, size, rule));
            }
            match BSF_TYPE.get(format) {
                0 => protection.parse_signatures(format)?,
                ENCRYPTION => protection.parse_encryption(format, &key)?,
                kind => {
                    let rule = Rule::Supported;
                    return Err(Violation::new("type of a byte stream format", kind, rule));
                }
            }
        }
        protection.check_units()?;
        Ok(protection)
    }

    fn parse_signatures(&mut self, format: &[u8]) -> Result<(), Violation> {
        let unknown = |code| Violation::new("size code of signed blocks", code, Rule::Known);
        let same = SAME_STRUCTURE.is_set(format);
        let (of_wire, of_memory) = (WIRE_BS_SELECTOR.get(format), MEMORY_BS_SELECTOR.get(format));
        let side = |has: bool, selector: Field, inline: usize| {
            has.then(|| Signature::parse(selector.get(format), &format[inline..]))
                .transpose()
        };
        self.memory = side(of_memory != 0, MEMORY_SELECTOR, MEMORY_INLINE)?;
        self.wire = side(same || of_wire != 0, WIRE_SELECTOR, WIRE_INLINE)?;
        let sizes = [of_memory, if same { of_memory } else { of_wire }];
        let mut found = [0; 2];
        for (size, to) in sizes.into_iter().zip(&mut found) {
            if size != 0 {
                *to = block_size(size).ok_or_else(|| unknown(size))?;
            }
        }
        // A side without signatures has no blocks of its own.
        (self.block, self.blocks) = match found {
            [0, 0] => (0, found),
            [size, 0] | [0, size] => (size, [size; 2]),
            [memory, wire] => (common_multiple(memory, wire)?, found),
        };
        if same && (self.memory.is_none() || self.block == 0) {
            return Err(unknown(of_memory));
        }
        self.checked = expand_mask(CHECK_MASK.get(format));
        self.copied = if same { expand_mask(of_wire) } else { 0 };
        self.psvs = [
            self.memory.map(|_| MEMORY_PSV.get(format)),
            self.wire.map(|_| WIRE_PSV.get(format)),
        ];
        Ok(())
    }

    fn parse_encryption<'a>(
        &mut self,
        format: &[u8],
        key: impl Fn(u32) -> Option<&'a EncryptionKey>,
    ) -> Result<(), Violation> {
        let (code, number) = (UNIT.get(format), KEY.get(format));
        let of_key = |rule| Violation::new("data encryption key", number, rule);
        let unit = block_size(code)
            .ok_or_else(|| Violation::new("size code of encrypted units", code, Rule::Known))?;
        let key = key(number).ok_or_else(|| of_key(Rule::Exists))?;
        let standard = STANDARD.get(format);
        if standard != 0 {
            let rule = Rule::Supported;
            return Err(Violation::new("standard of the encryption", standard, rule));
        }
        if key.tag.is_some_and(|tag| format[KEY_TAG..][..8] != tag) {
            return Err(of_key(Rule::With("its tag")));
        }
        let (encrypts_sent, signature_first) = match ORDER.get(format) {
            0 => (true, true),
            1 => (false, false),
            2 => (true, false),
            3 => (false, true),
            order => {
                let what = "order of encryption and signature";
                return Err(Violation::new(what, order, Rule::Known));
            }
        };
        self.encryption = Some(Encryption {
            xts: Xts::new(&key.keys).ok_or_else(|| {
                let (what, rule) = ("length of the data encryption key", Rule::OneOf(&[32, 64]));
                Violation::new(what, key.keys.len(), rule)
            })?,
            encrypts_sent,
            signature_first,
            // The format has the tweak in big-endian order; encryption uses little-endian.
            tweak: u128::from(get64(format, TWEAK)) << 64 | u128::from(get64(format, TWEAK + 8)),
            unit,
        });
        Ok(())
    }

    /// Checks that the block to be encrypted, with a signature before the encryption, is a
    /// whole number of units.
    fn check_units(&mut self) -> Result<(), Violation> {
        let Some(encryption) = &self.encryption else {
            return Ok(());
        };
        let unit = encryption.unit;
        if unit < xts::BLOCK {
            let rule = Rule::AtLeast(xts::BLOCK as u64);
            return Err(Violation::new("size of encrypted units", unit, rule));
        }
        if self.block == 0 {
            (self.block, self.blocks) = (unit, [unit; 2]);
        }
        // The signature is encrypted if it is added before the encryption.
        let signature_bytes = match encryption.signature_first {
            true => self.signature_bytes(false),
            false => self.signature_bytes(true),
        };
        let signed = self.block + signature_bytes;
        match signed % unit {
            0 => Ok(()),
            _ => {
                let rule = Rule::MultipleOf(unit as u64);
                Err(Violation::new("size of a signed block", signed, rule))
            }
        }
    }

    /// Returns whether there is a signature or encryption.
    pub(crate) fn is_enabled(&self) -> bool {
        self.block != 0
    }

    /// Bytes of the signatures of a converted unit, in memory or on the wire.
    fn signature_bytes(&self, in_memory: bool) -> usize {
        let (of, size) = match in_memory {
            true => (&self.memory, self.blocks[0]),
            false => (&self.wire, self.blocks[1]),
        };
        of.map_or(0, |signature| self.block / size * signature.bytes())
    }

    /// Returns whether block sizes in memory and on the wire differ.
    fn has_two_block_sizes(&self) -> bool {
        self.blocks[0] != self.blocks[1]
    }

    /// Converts an offset in memory to the one on the wire, for different block sizes.
    fn offset_to_wire(&self, offset: u64) -> u64 {
        let bytes = |of: &Option<Signature>| of.map_or(0, |signature| signature.bytes() as u64);
        let [memory, wire] = self.blocks.map(|size| size as u64);
        let (whole, rest) = {
            let size = memory + bytes(&self.memory);
            (offset / size, offset % size)
        };
        let data = whole.saturating_mul(memory) + rest.min(memory);
        data.saturating_add(data / wire * bytes(&self.wire))
    }

    /// Bytes of a converted unit with its signatures in memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.block + self.signature_bytes(true)
    }

    pub(crate) fn wire_bytes(&self) -> usize {
        self.block + self.signature_bytes(false)
    }

    /// Bytes of data that are converted at once.
    pub(crate) fn data_bytes(&self) -> usize {
        self.block
    }

    /// Whether data may be stored before its block is complete.
    pub(crate) fn may_store_incomplete_blocks(&self) -> bool {
        self.encryption.is_none() && !self.has_two_block_sizes()
    }

    /// Converts an offset of a local work request to the one on the wire. The local offset
    /// counts bytes in memory, or data alone if the wire has no signatures.
    pub(crate) fn local_to_wire(&self, offset: u64) -> u64 {
        if self.has_two_block_sizes() {
            return self.offset_to_wire(offset);
        }
        let unit = match self.wire {
            Some(_) => self.memory_bytes(),
            None => self.block,
        } as u64;
        let rest = (offset % unit).min(self.wire_bytes() as u64);
        let whole = (offset / unit).saturating_mul(self.wire_bytes() as u64);
        whole.saturating_add(rest)
    }

    /// Converts a length in memory to the one on the wire.
    pub(crate) fn memory_to_wire(&self, length: u64) -> u64 {
        if self.has_two_block_sizes() {
            return self.offset_to_wire(length);
        }
        let unit = self.memory_bytes() as u64;
        let rest = (length % unit).min(self.block as u64);
        let whole = (length / unit).saturating_mul(self.wire_bytes() as u64);
        whole.saturating_add(rest)
    }

    /// Converts a block from memory to the wire format, and checks its signature.
    pub(crate) fn encode(&self, index: u64, block: &[u8]) -> (Vec<u8>, Option<SignatureError>) {
        let mut bytes = block.to_vec();
        if let Some(encryption) = self.encryption.as_ref().filter(|e| !e.signature_first) {
            encryption.apply(index, &mut bytes, encryption.encrypts_sent);
        }
        let (mut bytes, error) = self.convert_signatures(index, &bytes, true);
        if let Some(encryption) = self.encryption.as_ref().filter(|e| e.signature_first) {
            encryption.apply(index, &mut bytes, encryption.encrypts_sent);
        }
        (bytes, error)
    }

    /// Converts a block from the wire to the memory format, and checks its signature.
    pub(crate) fn decode(&self, index: u64, block: &[u8]) -> (Vec<u8>, Option<SignatureError>) {
        let mut bytes = block.to_vec();
        if let Some(encryption) = self.encryption.as_ref().filter(|e| e.signature_first) {
            encryption.apply(index, &mut bytes, !encryption.encrypts_sent);
        }
        let (mut bytes, error) = self.convert_signatures(index, &bytes, false);
        if let Some(encryption) = self.encryption.as_ref().filter(|e| !e.signature_first) {
            encryption.apply(index, &mut bytes, !encryption.encrypts_sent);
        }
        (bytes, error)
    }

    /// Replaces the signatures of one side by those of the other.
    fn convert_signatures(
        &self,
        index: u64,
        block: &[u8],
        sends: bool,
    ) -> (Vec<u8>, Option<SignatureError>) {
        let [memory, wire] = [(&self.memory, self.blocks[0]), (&self.wire, self.blocks[1])];
        let ((from, from_size), (to, to_size)) = match sends {
            true => (memory, wire),
            false => (wire, memory),
        };
        let number = |size: usize, n: usize| {
            let count = (self.block / size) as u64;
            index.wrapping_mul(count).wrapping_add(n as u64)
        };
        let mut data = Vec::with_capacity(self.block);
        // Signatures are copied only between blocks of one size, converted one by one.
        let (mut received, mut error) = (None, None);
        let size = from_size + from.map_or(0, |signature| signature.bytes());
        for (n, part) in block.chunks(size).enumerate() {
            let (bytes, signature_bytes) = part.split_at(from_size.min(part.len()));
            if let Some(signature) = from {
                let actual = signature.read(signature_bytes);
                let expected = signature.of(number(from_size, n), bytes);
                let found = signature.check(expected, actual, self.checked);
                received = Some(actual);
                error = error.or(found.map(|error| SignatureError {
                    of_memory: sends,
                    offset: n * size,
                    ..error
                }));
            }
            data.extend_from_slice(bytes);
        }
        let Some(signature) = to else {
            return (data, error);
        };
        let copied = received.map_or(0, |_| self.copied);
        let mut bytes = Vec::with_capacity(self.block + signature.bytes());
        for (n, part) in data.chunks(to_size).enumerate() {
            let signature_value = signature.of(number(to_size, n), part) & !copied;
            let signature_value = signature_value | received.unwrap_or(0) & copied;
            bytes.extend_from_slice(part);
            bytes.extend_from_slice(&signature_value.to_be_bytes()[..signature.bytes()]);
        }
        (bytes, error)
    }
}

impl Encryption {
    /// Encrypts or decrypts the units of a block.
    fn apply(&self, index: u64, bytes: &mut [u8], encrypts: bool) {
        let units = (bytes.len() / self.unit) as u128;
        for (n, unit) in bytes.chunks_exact_mut(self.unit).enumerate() {
            let number = u128::from(index)
                .wrapping_mul(units)
                .wrapping_add(n as u128);
            let tweak = self.tweak.wrapping_add(number).to_le_bytes();
            self.xts.apply(tweak, unit, encrypts);
        }
    }
}

#[cfg(test)]
mod tests {
    use roce::bits::{put32, put64};

    use super::*;

    fn dif(inline: &mut [u8], guard: u32, initial_ones: bool, app: u32, tag: u32, flags: u32) {
        put32(inline, 0, 0xc000_0000 | app);
        put32(inline, 4, tag);
        put32(
            inline,
            8,
            guard << 24 | 0x80_0000 | u32::from(initial_ones) << 19,
        );
        put32(inline, 12, flags << 16 | 0xffff);
    }

    fn parse(formats: &[u8]) -> Result<Protection, Violation> {
        Protection::parse(formats, |_| None)
    }

    #[test]
    fn checksums_have_their_known_values() {
        let data = b"123456789";
        for (checksum, initial_ones, value) in [
            (Checksum::T10Crc, false, 0xd0db),
            (Checksum::Crc32, true, 0xcbf4_3926),
            (Checksum::Crc32c, true, 0xe306_9283),
            (Checksum::Crc64, true, 0xae8b_1486_0a79_9888),
        ] {
            assert_eq!(checksum.of(initial_ones, data), value, "{checksum:?}");
        }
        // RFC 1071, section 3.
        let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Checksum::Internet.of(false, &data), 0x220d);
    }

    #[test]
    fn blocks_of_two_sizes_are_converted_as_one_unit() {
        let mut format = [0; BSF_SIZE];
        put32(&mut format, 0, 0x80ff_0301);
        put32(&mut format, 12, 6);
        put32(&mut format, 8, 5);
        dif(&mut format[WIRE_INLINE..], 1, true, 0xabcd, 7, 0x40);
        dif(&mut format[MEMORY_INLINE..], 1, true, 0x1234, 20, 0x40);
        let both = parse(&format).unwrap();
        // Eight blocks in memory are one on the wire.
        assert_eq!(
            (both.memory_bytes(), both.wire_bytes()),
            (8 * 520, 4096 + 8)
        );
        assert!(!both.may_store_incomplete_blocks());
        for (memory, wire) in [(520, 512), (8 * 520, 4104), (9 * 520 + 3, 4104 + 515)] {
            assert_eq!(both.memory_to_wire(memory), wire);
            assert_eq!(both.local_to_wire(memory), wire);
        }
        let data: Vec<u8> = (0..4096u32).map(|n| (n * 7) as u8).collect();
        let checksum = |data: &[u8]| Checksum::T10Crc.of(true, data).to_be_bytes();
        let signed = |size: usize, app: [u8; 2], initial: u32| {
            let blocks = data.chunks(size).zip(initial..);
            let signed = blocks.map(|(data, tag)| {
                let checksum = &checksum(data)[checksum(data).len() - 2..];
                [data, checksum, &app, &tag.to_be_bytes()].concat()
            });
            signed.collect::<Vec<_>>().concat()
        };
        // The tags of the third unit follow those of the first two.
        let in_memory = signed(512, [0x12, 0x34], 20 + 2 * 8);
        let on_wire = signed(4096, [0xab, 0xcd], 7 + 2);
        assert_eq!(both.encode(2, &in_memory), (on_wire.clone(), None));
        assert_eq!(both.decode(2, &on_wire), (in_memory.clone(), None));
        // The first wrong signature is reported, with its offset.
        let mut corrupted = in_memory;
        corrupted[3 * 520 + 515] ^= 1;
        corrupted[5 * 520] ^= 1;
        let (sent, found) = both.encode(2, &corrupted);
        let found = found.unwrap();
        assert!(found.of_memory);
        assert_eq!((found.syndrome, found.offset), (1 << 12, 3 * 520));
        assert_ne!(sent, on_wire);
        let mut corrupted = on_wire;
        corrupted[0] ^= 1;
        assert_eq!(both.decode(2, &corrupted).1.unwrap().offset, 0);
        // The sizes 4096 and 4160 have no short common multiple.
        put32(&mut format, 0, 0x80ff_0304);
        assert!(parse(&format).is_err());
    }

    #[test]
    fn signatures_are_added_checked_and_removed() {
        let mut format = [0; BSF_SIZE];
        // No signature in memory; on the wire an integrity field, all of it checked.
        put32(&mut format, 0, 0x80ff_0100);
        put32(&mut format, 8, 5);
        dif(&mut format[WIRE_INLINE..], 1, true, 0xabcd, 7, 0x40);
        let inserts = parse(&format).unwrap();
        assert_eq!((inserts.memory_bytes(), inserts.wire_bytes()), (512, 520));
        assert_eq!(inserts.psvs, [None, Some(5)]);
        let data = [3; 512];
        let (sent, error) = inserts.encode(2, &data);
        assert_eq!(error, None);
        assert_eq!(&sent[514..], [0xab, 0xcd, 0, 0, 0, 9]);
        assert_eq!(inserts.decode(2, &sent), (data.to_vec(), None));
        // Each part, in the order in which it is reported.
        for (at, syndrome) in [(519, 1 << 11), (515, 1 << 12), (0, 1 << 13), (513, 1 << 13)] {
            let mut sent = sent.clone();
            sent[at] ^= 1;
            let (_, error) = inserts.decode(2, &sent);
            let error = error.unwrap();
            assert_eq!((error.syndrome, error.of_memory), (syndrome, false));
        }
        // Another block has another reference tag.
        let (_, error) = inserts.decode(3, &sent);
        let error = error.unwrap();
        assert_eq!((error.expected as u32, error.actual as u32), (10, 9));
    }

    #[test]
    fn escaped_blocks_are_not_checked() {
        for (flags, app, tag, escapes) in [
            (1, 0xffffu32, 1u32, true),
            (1, 0xfffe, 1, false),
            (2, 0xffff, 1, false),
            (2, 0xffff, u32::MAX, true),
        ] {
            let mut format = [0; BSF_SIZE];
            put32(&mut format, 0, 0x80ff_0100);
            dif(&mut format[WIRE_INLINE..], 2, false, 1, 2, flags);
            let protection = parse(&format).unwrap();
            let mut block = [9; 520];
            put64(&mut block, 512, u64::from(app) << 32 | u64::from(tag));
            assert_eq!(protection.decode(0, &block).1.is_none(), escapes);
        }
    }

    #[test]
    fn the_mask_selects_the_signature_bytes_to_copy() {
        let mut format = [0; BSF_SIZE];
        // The same structure: tags are copied, the guard is made; nothing is checked.
        put32(&mut format, 0, 0x9000_3f01);
        dif(&mut format[WIRE_INLINE..], 1, true, 1, 1, 0);
        dif(&mut format[MEMORY_INLINE..], 2, false, 2, 2, 0);
        let protection = parse(&format).unwrap();
        let mut block = [1; 520];
        put64(&mut block, 512, 0x1122_3344_5566_7788);
        let (sent, error) = protection.encode(0, &block);
        assert_eq!(error, None);
        assert_eq!(&sent[514..], &block[514..]);
        assert_eq!(
            get64(&sent, 512) >> 48,
            Checksum::T10Crc.of(true, &block[..512])
        );
    }

    #[test]
    fn lengths_count_the_signatures_of_their_side() {
        let mut format = [0; BSF_SIZE];
        // A CRC of 32 bits in memory alone.
        put32(&mut format, 0, 0x80f0_0001);
        put32(&mut format, 12, 0x2200_0004);
        let strips = parse(&format).unwrap();
        assert_eq!((strips.memory_bytes(), strips.wire_bytes()), (516, 512));
        assert_eq!(strips.memory_to_wire(516 * 3), 512 * 3);
        assert_eq!(strips.memory_to_wire(516 + 20), 512 + 20);
        // Local lengths are of data.
        assert_eq!(strips.local_to_wire(1024), 1024);
        put32(&mut format, 0, 0x8000_0100);
        put32(&mut format, 8, 0x2200_0004);
        let inserts = parse(&format).unwrap();
        assert_eq!(inserts.local_to_wire(1024 + 5), 2 * 516 + 5);
    }

    #[test]
    fn invalid_formats_are_rejected() {
        let mut format = [0; BSF_SIZE];
        for initial in [
            0x4000_0000,
            0x8000_0005,
            0x8000_0001,
            0x8000_0103,
            0x9000_ff00,
        ] {
            put32(&mut format, 0, initial);
            assert!(parse(&format).is_err(), "{initial:#x}");
        }
        put32(&mut format, 0, 0x8000_0000);
        assert!(!parse(&format).unwrap().is_enabled());
        // Encryption with a key that does not exist.
        put32(&mut format, 0, 0x8100_0000);
        put32(&mut format, 8, 1 << 24);
        assert!(parse(&format).is_err());
    }
}
