//! The bytes of a buffer when it was posted, to be compared later.

use std::cell::RefCell;
use std::ops::Range;

use libc::c_int;

use crate::real;

/// Buffers up to this length are copied; longer ones are hashed.
const MAX_COPIED: usize = 4096;
/// Bytes of a hash.
const BLOCK: usize = 1024;
/// Bytes that are read by one system call.
const CHUNK: usize = 64 << 10;

/// The bytes of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Copied(Vec<u8>),
    /// The hash of each block, and the length.
    Hashed(Vec<u64>, usize),
}

/// The result of a comparison of a buffer with its bytes when it was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Same,
    /// Its bytes differ, if it is known, from this offset on.
    Changed(Option<usize>),
    /// It is not mapped, or not readable.
    Unreadable,
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Content {
    /// Reads a buffer of the program.
    ///
    /// # Errors
    /// EFAULT if it is not readable; others if this process may not read its memory so.
    pub(super) fn of(address: u64, length: usize) -> Result<Self, c_int> {
        if length <= MAX_COPIED {
            let mut copy = vec![0; length];
            read(address, &mut copy)?;
            return Ok(Self::Copied(copy));
        }
        let mut hashes = Vec::with_capacity(length.div_ceil(BLOCK));
        each_block(address, length, |hash| hashes.push(hash))?;
        Ok(Self::Hashed(hashes, length))
    }

    /// Compares a buffer with what it was; `None` if it cannot be read for another reason than
    /// its mapping.
    pub(super) fn compare(&self, address: u64, length: usize) -> Option<Fate> {
        self.compare_part(address, 0..length)
    }

    /// As above, for a part of a buffer; of a hashed one for the blocks in it.
    pub(super) fn compare_part(&self, address: u64, part: Range<usize>) -> Option<Fate> {
        let changed = match self {
            Self::Copied(before) => {
                let before = before.get(part.clone())?;
                let mut bytes = [0; MAX_COPIED];
                let after = bytes.get_mut(..before.len())?;
                read(address.wrapping_add(part.start as u64), after).map(|()| {
                    let mut both = before.iter().zip(&*after);
                    let at = both.position(|(before, after)| before != after);
                    at.map(|at| Some(part.start + at))
                })
            }
            Self::Hashed(hashes, length) => {
                let first = part.start.div_ceil(BLOCK);
                let start = first * BLOCK;
                // The last block may be shorter.
                let mut before = hashes.get(first..).unwrap_or_default().iter();
                let end = match part.end == *length {
                    true => part.end,
                    false => part.end / BLOCK * BLOCK,
                };
                let mut changed = None;
                let length = end.saturating_sub(start);
                each_block(address.wrapping_add(start as u64), length, |after| {
                    let is_same = before.next().is_none_or(|before| *before == after);
                    if !is_same {
                        changed = Some(None);
                    }
                })
                .map(|()| changed)
            }
        };
        match changed {
            Ok(None) => Some(Fate::Same),
            Ok(Some(offset)) => Some(Fate::Changed(offset)),
            Err(libc::EFAULT) => Some(Fate::Unreadable),
            Err(_) => None,
        }
    }
}

/// Calls `each` with the hash of each block of memory.
fn each_block(address: u64, length: usize, mut each: impl FnMut(u64)) -> Result<(), c_int> {
    let scratch = |scratch: &RefCell<Vec<u8>>| -> Result<(), c_int> {
        let mut scratch = scratch.try_borrow_mut().map_err(|_| libc::EBUSY)?;
        scratch.resize(CHUNK, 0);
        for at in (0..length).step_by(CHUNK) {
            let chunk = &mut scratch[..CHUNK.min(length - at)];
            read(address.wrapping_add(at as u64), chunk)?;
            chunk.chunks(BLOCK).for_each(|block| each(hash(block)));
        }
        Ok(())
    };
    BUFFER.try_with(scratch).unwrap_or(Err(libc::EBUSY))
}

/// Reads memory of this process that may not be mapped. `errno` stays as it was.
fn read(address: u64, out: &mut [u8]) -> Result<(), c_int> {
    let to = libc::iovec {
        iov_base: out.as_mut_ptr().cast(),
        iov_len: out.len(),
    };
    let from = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
        iov_len: out.len(),
    };
    let before = real::errno();
    // SAFETY: `to` is writable. The system reads `from`, and returns an error where nothing can
    // be read.
    let count = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    let result = match count {
        -1 => Err(real::errno()),
        count if count as usize == out.len() => Ok(()),
        // The rest is not mapped.
        _ => Err(libc::EFAULT),
    };
    real::set_errno(before);
    result
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

    #[test]
    fn changes_of_any_byte_are_found() {
        for length in [1, 64, 4096, 4097, 70_000, 200_000] {
            let mut bytes = vec![7u8; length];
            let address = |bytes: &mut Vec<u8>| bytes.as_mut_ptr().expose_provenance() as u64;
            let before = Content::of(address(&mut bytes), length).unwrap();
            let at = address(&mut bytes);
            assert_eq!(before.compare(at, length), Some(Fate::Same));
            for changed in [0, length / 2, length - 1] {
                bytes[changed] ^= 0x40;
                let offset = (length <= MAX_COPIED).then_some(changed);
                let at = address(&mut bytes);
                assert_eq!(before.compare(at, length), Some(Fate::Changed(offset)));
                bytes[changed] ^= 0x40;
            }
        }
    }

    #[test]
    fn parts_of_long_buffers_are_compared_by_blocks() {
        let mut bytes = vec![7u8; 9000];
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        let before = Content::of(address, bytes.len()).unwrap();
        bytes[2100] = 8;
        bytes[8999] = 8;
        let mut compare = |part| {
            let address = bytes.as_mut_ptr().expose_provenance() as u64;
            before.compare_part(address, part)
        };
        assert_eq!(compare(0..2048), Some(Fate::Same));
        assert_eq!(compare(2048..3072), Some(Fate::Changed(None)));
        assert_eq!(compare(1000..3071), Some(Fate::Same));
        assert_eq!(compare(8000..9000), Some(Fate::Changed(None)));
        assert_eq!(compare(8300..9000), Some(Fate::Same));
        assert_eq!(compare(8000..8999), Some(Fate::Same));
    }

    #[test]
    fn memory_that_is_not_mapped_is_no_fault() {
        let content = Content::Copied(vec![0; 8]);
        assert_eq!(content.compare(8, 8), Some(Fate::Unreadable));
        assert_eq!(Content::of(u64::MAX - 7, 8), Err(libc::EFAULT));
    }
}
