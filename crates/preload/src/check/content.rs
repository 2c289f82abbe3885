//! The bytes of a buffer when it was posted, to be compared later.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Mutex;

use super::memory;
use crate::explain::lock;

/// Bytes that are read at a time.
const CHUNK: usize = 4096;
/// Bytes of a hash.
const BLOCK: usize = 1024;
/// Bytes of copies of buffers longer than a chunk: while there is room for it, a buffer is
/// copied, since a comparison takes less time than a hash; others are hashed.
const MAX_COPIED: usize = 32 << 20;

/// Memory of copies that is kept: the system would map it anew for each.
static MEMORY: Mutex<CopyMemory> = Mutex::new(CopyMemory {
    used: 0,
    free: Vec::new(),
});

struct CopyMemory {
    /// Bytes of the copies that there are.
    used: usize,
    /// No more bytes than [`MAX_COPIED`] with those that are used.
    free: Vec<Vec<u8>>,
}

impl CopyMemory {
    /// Returns memory for a copy of this length, empty; `None` if there would be too many.
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        // Lengths of similar copies are the same.
        let length = length.next_power_of_two();
        if length > MAX_COPIED - self.used {
            return None;
        }
        let found = self.free.iter().rposition(|it| it.capacity() == length);
        let memory = found.map(|at| self.free.swap_remove(at));
        let memory = memory.unwrap_or_else(|| {
            let mut kept: usize = self.free.iter().map(Vec::capacity).sum();
            while kept > MAX_COPIED - self.used - length {
                kept -= self.free.swap_remove(0).capacity();
            }
            Vec::with_capacity(length)
        });
        self.used += memory.capacity();
        Some(memory)
    }

    fn give_back(&mut self, mut memory: Vec<u8>) {
        self.used -= memory.capacity();
        memory.clear();
        self.free.push(memory);
    }
}

/// A copy of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Copy(Vec<u8>);

impl Copy {
    /// Returns `None` if the buffer is too long.
    fn new(length: usize) -> Option<Self> {
        match length {
            ..=CHUNK => Some(Self(Vec::with_capacity(length))),
            _ => lock(&MEMORY).take(length).map(Self),
        }
    }

    /// Reads a buffer of the program. Returns whether that is possible.
    fn read(&mut self, address: u64, length: usize) -> bool {
        let bytes = memory::read(address, &mut self.0.spare_capacity_mut()[..length]);
        let is_read = bytes.is_some();
        // SAFETY: so many bytes were read, or none.
        unsafe { self.0.set_len(if is_read { length } else { 0 }) };
        is_read
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.0);
        if memory.capacity() > CHUNK {
            lock(&MEMORY).give_back(memory);
        }
    }
}

/// The bytes of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Copied(Copy),
    /// The hash of each block, and the length.
    Hashed(Vec<u64>, usize),
}

/// The result of a comparison of a buffer with its bytes when it was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Same,
    /// Its bytes differ from this offset on; of a hashed one those of the block at it.
    Changed(usize),
    /// It is not mapped, or not readable.
    Unreadable,
}

impl Content {
    /// Reads a buffer of the program. Returns `None` if it is not readable.
    pub(super) fn of(address: u64, length: usize) -> Option<Self> {
        if let Some(mut copy) = Copy::new(length) {
            return copy.read(address, length).then_some(Self::Copied(copy));
        }
        let mut hashes = Vec::with_capacity(length.div_ceil(BLOCK));
        each_chunk(address, 0..length, |_, chunk| {
            hashes.extend(chunk.chunks(BLOCK).map(hash));
            None
        });
        let is_read = hashes.len() == length.div_ceil(BLOCK);
        is_read.then_some(Self::Hashed(hashes, length))
    }

    /// Returns a part of the bytes, if they were copied.
    pub(super) fn copied(&self, part: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::Copied(Copy(copy)) => copy.get(part),
            Self::Hashed(..) => None,
        }
    }

    /// Compares a buffer with what it was.
    pub(super) fn compare(&self, address: u64, length: usize) -> Fate {
        self.compare_part(address, 0..length)
    }

    /// As above, for a part of a buffer; of a hashed one for the blocks in it.
    pub(super) fn compare_part(&self, address: u64, part: Range<usize>) -> Fate {
        let found = match self {
            _ if part.is_empty() => None,
            Self::Copied(Copy(copy)) => each_chunk(address, part, |at, after| {
                let before = copy.get(at..)?.get(..after.len())?;
                if before == after {
                    return None;
                }
                let mut both = before.iter().zip(after);
                let changed = both.position(|(before, after)| before != after)?;
                Some(Fate::Changed(at + changed))
            }),
            Self::Hashed(hashes, length) => {
                // The last block may be shorter.
                let end = match part.end == *length {
                    true => part.end,
                    false => part.end / BLOCK * BLOCK,
                };
                let start = part.start.next_multiple_of(BLOCK);
                each_chunk(address, start..end, |at, chunk| {
                    let before = hashes.get(at / BLOCK..)?;
                    let mut both = before.iter().zip(chunk.chunks(BLOCK));
                    let changed = both.position(|(before, after)| *before != hash(after))?;
                    Some(Fate::Changed(at + changed * BLOCK))
                })
            }
        };
        found.unwrap_or(Fate::Same)
    }
}

/// Calls `each` with the offset and the bytes of each chunk of a part of a buffer until it returns
/// something, and returns that.
fn each_chunk(
    address: u64,
    part: Range<usize>,
    mut each: impl FnMut(usize, &[u8]) -> Option<Fate>,
) -> Option<Fate> {
    let mut chunk = [MaybeUninit::uninit(); CHUNK];
    for at in part.clone().step_by(CHUNK) {
        let out = &mut chunk[..CHUNK.min(part.end - at)];
        let Some(bytes) = memory::read(address.wrapping_add(at as u64), out) else {
            return Some(Fate::Unreadable);
        };
        let found = each(at, bytes);
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Returns a hash that any one word that changes changes.
fn hash(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut lanes = [1_u64, 2, 3, 4];
    let blocks = bytes.chunks_exact(32);
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            let word = word.try_into().map_or(0, u64::from_ne_bytes);
            *lane = (*lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    for byte in rest {
        lanes[0] = (lanes[0] ^ u64::from(*byte)).wrapping_mul(FACTOR);
    }
    let fold = |hash: u64, lane: u64| (hash ^ lane).wrapping_mul(FACTOR).rotate_left(29);
    lanes.into_iter().fold(0, fold)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault;

    fn address_of(bytes: &mut [u8]) -> u64 {
        bytes.as_mut_ptr().expose_provenance() as u64
    }

    fn hashed(bytes: &mut [u8]) -> Content {
        let hashes = bytes.chunks(BLOCK).map(hash).collect();
        Content::Hashed(hashes, bytes.len())
    }

    #[test]
    fn changes_of_any_byte_are_found() {
        for length in [1, 64, 4096, 4097, 70_000, 200_000] {
            let mut bytes = vec![7u8; length];
            let hashed = hashed(&mut bytes);
            let copied = Content::of(address_of(&mut bytes), length).unwrap();
            assert!(matches!(copied, Content::Copied(_)));
            for changed in [0, length / 2, length - 1] {
                let at = address_of(&mut bytes);
                assert_eq!(copied.compare(at, length), Fate::Same);
                assert_eq!(hashed.compare(at, length), Fate::Same);
                bytes[changed] ^= 0x40;
                let at = address_of(&mut bytes);
                assert_eq!(copied.compare(at, length), Fate::Changed(changed));
                let block = changed / BLOCK * BLOCK;
                assert_eq!(hashed.compare(at, length), Fate::Changed(block));
                bytes[changed] ^= 0x40;
            }
        }
    }

    #[test]
    fn parts_of_hashed_buffers_are_compared_by_blocks() {
        let mut bytes = vec![7u8; 9000];
        let before = hashed(&mut bytes);
        bytes[2100] = 8;
        bytes[8999] = 8;
        let mut compare = |part| before.compare_part(address_of(&mut bytes), part);
        assert_eq!(compare(0..2048), Fate::Same);
        assert_eq!(compare(2048..3072), Fate::Changed(2048));
        assert_eq!(compare(1000..3071), Fate::Same);
        assert_eq!(compare(8000..9000), Fate::Changed(8192));
        assert_eq!(compare(8300..9000), Fate::Same);
        assert_eq!(compare(8000..8999), Fate::Same);
    }

    #[test]
    fn memory_that_is_not_mapped_is_no_fault() {
        fault::install();
        let mut bytes = [0; 8];
        assert_eq!(hashed(&mut bytes).compare(8, 8), Fate::Unreadable);
        let copied = Content::of(address_of(&mut bytes), 8).unwrap();
        assert_eq!(copied.compare(8, 8), Fate::Unreadable);
        assert_eq!(Content::of(u64::MAX - 7, 8), None);
    }

    #[test]
    fn memory_of_copies_is_used_again_and_limited() {
        let mut memory = CopyMemory {
            used: 0,
            free: Vec::new(),
        };
        let first = memory.take(5000).unwrap();
        let at = first.as_ptr();
        memory.give_back(first);
        let again = memory.take(8192).unwrap();
        assert_eq!((again.as_ptr(), memory.used), (at, 8192));
        assert!(memory.take(MAX_COPIED).is_none());
        memory.give_back(again);
        // Memory that is kept for copies is freed for a longer one.
        let all = memory.take(MAX_COPIED).unwrap();
        assert!(memory.free.is_empty() && memory.take(1).is_none());
        memory.give_back(all);
        assert_eq!(memory.used, 0);
    }
}
