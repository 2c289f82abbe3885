//! The bytes of a buffer when it was posted, to be compared later.

use std::cell::RefCell;

use libc::c_int;

use crate::real;

/// Buffers up to this length are copied; longer ones are hashed.
const MAX_COPIED: usize = 4096;
/// Bytes that are read by one system call.
const CHUNK: usize = 64 << 10;

/// The bytes of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Copied(Vec<u8>),
    Hashed(u64),
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
        let mut hash = Hash::default();
        let buffer = |buffer: &RefCell<Vec<u8>>| -> Result<(), c_int> {
            let mut buffer = buffer.try_borrow_mut().map_err(|_| libc::EBUSY)?;
            buffer.resize(CHUNK, 0);
            for at in (0..length).step_by(CHUNK) {
                let chunk = &mut buffer[..CHUNK.min(length - at)];
                read(address.wrapping_add(at as u64), chunk)?;
                hash.update(chunk);
            }
            Ok(())
        };
        BUFFER.try_with(buffer).unwrap_or(Err(libc::EBUSY))?;
        Ok(Self::Hashed(hash.end()))
    }

    /// Compares a buffer with what it was; `None` if it cannot be read for another reason than
    /// its mapping.
    pub(super) fn compare(&self, address: u64, length: usize) -> Option<Fate> {
        match (self, Self::of(address, length)) {
            (before, Ok(after)) if *before == after => Some(Fate::Same),
            (Self::Copied(before), Ok(Self::Copied(after))) => {
                let mut both = before.iter().zip(&after);
                Some(Fate::Changed(
                    both.position(|(before, after)| before != after),
                ))
            }
            (_, Ok(_)) => Some(Fate::Changed(None)),
            (_, Err(libc::EFAULT)) => Some(Fate::Unreadable),
            (_, Err(_)) => None,
        }
    }
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

/// A hash in which any one word that changes changes the result.
struct Hash([u64; 4]);

impl Default for Hash {
    fn default() -> Self {
        Self([1, 2, 3, 4])
    }
}

impl Hash {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

    fn update(&mut self, bytes: &[u8]) {
        let blocks = bytes.chunks_exact(32);
        let rest = blocks.remainder();
        for block in blocks {
            for (lane, word) in self.0.iter_mut().zip(block.chunks_exact(8)) {
                let word = word.try_into().map_or(0, u64::from_ne_bytes);
                *lane = (*lane ^ word).wrapping_mul(Self::FACTOR).rotate_left(29);
            }
        }
        for byte in rest {
            self.0[0] = (self.0[0] ^ u64::from(*byte)).wrapping_mul(Self::FACTOR);
        }
    }

    fn end(self) -> u64 {
        let fold = |hash: u64, lane: u64| (hash ^ lane).wrapping_mul(Self::FACTOR).rotate_left(29);
        self.0.into_iter().fold(0, fold)
    }
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
    fn memory_that_is_not_mapped_is_no_fault() {
        let content = Content::Copied(vec![0; 8]);
        assert_eq!(content.compare(8, 8), Some(Fate::Unreadable));
        assert_eq!(Content::of(u64::MAX - 7, 8), Err(libc::EFAULT));
    }
}
