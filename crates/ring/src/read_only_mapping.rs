//! Read-only mappings of memory that a driver or a device writes.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;

use mmap_rs::{Mmap, MmapFlags, MmapOptions};

use crate::mapping::to_io;
use crate::order;
use crate::primitive::AtomicU32;

/// A read-only shared mapping of pages of a device or a driver.
///
/// The content may change at any time, so it is read word by word, never through
/// a slice.
#[derive(Debug)]
pub struct ReadOnlyMapping {
    map: Mmap,
}

impl ReadOnlyMapping {
    /// Maps `size` bytes at `offset` of the driver's file `fd`.
    ///
    /// # Errors
    /// Those of mmap(2); EINVAL for a size of zero.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, size: usize) -> io::Result<Self> {
        // SAFETY: the descriptor is open for the length of this call and is
        // not closed through this File, which is never dropped.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd.as_raw_fd()) });
        let options = MmapOptions::new(size).map_err(to_io)?;
        // SAFETY: others write to this memory while it is mapped; it is only
        // read by volatile accesses and atomics.
        let options = unsafe { options.with_file(&file, offset) };
        let map = options.with_flags(MmapFlags::SHARED).map().map_err(to_io)?;
        Ok(Self { map })
    }

    /// Returns the address of `size` bytes at offset `at`, if they lie in the
    /// mapping and `at` is a multiple of `align`.
    pub fn address(&self, at: usize, size: usize, align: usize) -> Option<NonNull<u8>> {
        let end = at.checked_add(size)?;
        if end > self.map.size() || at % align != 0 {
            return None;
        }
        // SAFETY: in the mapping, by the check above.
        NonNull::new(unsafe { self.map.as_ptr().add(at) }.cast_mut())
    }

    /// Reads a 64-bit counter of a device, stored as two big-endian words, the
    /// high one first. The result is a value that the counter had during the
    /// call, never the halves of two values.
    ///
    /// Takes three reads of the device, or five if the low half has just wrapped.
    /// Returns `None` if the counter does not lie in the mapping.
    pub fn counter(&self, at: usize) -> Option<u64> {
        let high = self.address(at, 8, 4)?.cast::<u32>();
        // SAFETY: both words are in the mapping, and aligned.
        let read = |word: NonNull<u32>| u32::from_be(unsafe { word.as_ptr().read_volatile() });
        // SAFETY: as above.
        let low = unsafe { high.add(1) };
        Some(joined(|| read(high), || read(low)))
    }

    /// Copies `N` 64-bit words that a driver changes together, under a sequence
    /// count: a 32-bit word at `at` that is odd during a change and different
    /// after it. The words begin eight bytes after it.
    ///
    /// Returns `None` if they do not lie in the mapping, or if every one of
    /// [`Self::TRIES`] attempts met a change.
    pub fn record<const N: usize>(&self, at: usize) -> Option<[u64; N]> {
        let sign = self.address(at, 8 * (N + 1), 8)?.cast::<AtomicU32>();
        // SAFETY: in the mapping, aligned; an atomic word is read only.
        let sign = unsafe { sign.as_ref() };
        let word = |i: usize| {
            // SAFETY: in the mapping, by `address`, and aligned.
            unsafe {
                let first = std::ptr::from_ref(sign).cast::<u64>();
                first.add(1 + i).read_volatile()
            }
        };
        consistent(
            || order::record_begins(sign),
            word,
            || order::record_ends(sign),
        )
    }

    /// Maximum number of attempts to read a record.
    pub const TRIES: usize = 1000;
}

/// Reads a counter by its two halves.
fn joined(high: impl Fn() -> u32, low: impl Fn() -> u32) -> u64 {
    let joined = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let mut before = high();
    for _ in 0..4 {
        let (first, after) = (low(), high());
        if before == after {
            return joined(before, first);
        }
        // The high half has just changed, and is stable for the next 2^32 counts.
        before = after;
    }
    joined(before, low())
}

/// Reads a record between two equal and even sequence counts.
fn consistent<const N: usize>(
    begins: impl Fn() -> u32,
    word: impl Fn(usize) -> u64,
    ends: impl Fn() -> u32,
) -> Option<[u64; N]> {
    (0..ReadOnlyMapping::TRIES).find_map(|_| {
        let before = begins();
        if before & 1 != 0 {
            std::hint::spin_loop();
            return None;
        }
        let words = std::array::from_fn(&word);
        (ends() == before).then_some(words)
    })
}

// SAFETY: the memory is only read, word by word.
unsafe impl Send for ReadOnlyMapping {}
// SAFETY: as above.
unsafe impl Sync for ReadOnlyMapping {}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn page() -> (File, ReadOnlyMapping) {
        // SAFETY: a name, and no flags.
        let fd = unsafe { libc::memfd_create(c"page".as_ptr(), 0) };
        assert!(fd >= 0);
        // SAFETY: new, and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(4096).unwrap();
        let mapping = ReadOnlyMapping::new(file.as_fd(), 0, 4096).unwrap();
        (file, mapping)
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn a_counter_is_two_big_endian_words() {
        let (file, mapping) = page();
        let value = 0x0102_0304_0506_0708u64;
        file.write_all_at(&value.to_be_bytes(), 0x14).unwrap();
        assert_eq!(mapping.counter(0x14), Some(value));
        for at in [4092, 4096, usize::MAX - 3, 2] {
            assert_eq!(mapping.counter(at), None, "{at}");
        }
        assert!(mapping.counter(4088).is_some());
    }

    #[test]
    fn a_counter_is_never_torn() {
        for start in (1u64 << 32) - 8..(1 << 32) + 2 {
            // The counter advances by one with every load.
            let now = Cell::new(start);
            let tick = || now.replace(now.get() + 1);
            let read = joined(|| (tick() >> 32) as u32, || tick() as u32);
            assert!((start..now.get()).contains(&read), "{read:#x} {start:#x}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn a_record_is_read_between_changes() {
        let (file, mapping) = page();
        assert_eq!(mapping.record(8), Some([0u64; 3]));
        file.write_all_at(&2u32.to_ne_bytes(), 8).unwrap();
        let words: Vec<u8> = (1..4u64).flat_map(u64::to_ne_bytes).collect();
        file.write_all_at(&words, 16).unwrap();
        assert_eq!(mapping.record(8), Some([1u64, 2, 3]));
        // A change that never ends.
        file.write_all_at(&3u32.to_ne_bytes(), 8).unwrap();
        assert_eq!(mapping.record::<3>(8), None);
        assert_eq!(mapping.record::<3>(4), None);
        assert_eq!(mapping.record::<3>(4096 - 24), None);
        assert!(mapping.record::<3>(4096 - 32).is_some());
    }

    #[test]
    fn a_record_is_never_torn() {
        for start in 0..40 {
            // The driver executes one of its five stores with every load.
            let step = Cell::new(start);
            let sign = || {
                let step = step.replace(step.get() + 1);
                step / 5 * 2 + u32::from(step % 5 != 0)
            };
            let word = |i: usize| {
                let step = step.replace(step.get() + 1);
                u64::from(step / 5 + u32::from(step % 5 > i as u32 + 1))
            };
            assert_eq!(consistent::<3>(sign, word, sign), None, "{start}");
            // It stops changing after a while.
            let rests = |step: u32| step.min(25);
            let at = Cell::new(start);
            let look = || rests(at.replace(at.get() + 1));
            let sign = || look() / 5 * 2 + u32::from(look() % 5 != 0);
            let words = consistent(sign, |_| u64::from(look() / 5), sign);
            assert_eq!(words, Some([5u64; 3]), "{start}");
        }
    }
}
