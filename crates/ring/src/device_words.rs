//! Words of a device's own memory or registers that are mapped into the process.

use std::io;
use std::ptr::NonNull;

use crate::Mapping;

/// A mapped range of a device's memory, read and written in words of 32 bits, since a
/// device need not support other widths.
///
/// The device and other mappings may write at any time: there is never a slice of it,
/// and a copy may contain some words from before a concurrent write and some from after.
/// Copies do not wait for the device, and order no other accesses.
#[derive(Debug)]
pub struct DeviceWords {
    mapping: Mapping,
    start: usize,
    length: usize,
}

// SAFETY: the mapping is reached by volatile accesses of single words only,
// which any thread may make.
unsafe impl Send for DeviceWords {}
// SAFETY: as above; a word that two threads write at once is one of theirs.
unsafe impl Sync for DeviceWords {}

impl DeviceWords {
    /// Bytes of a word.
    pub const WORD: usize = size_of::<u32>();

    /// `length` bytes of a mapping from `start` on.
    ///
    /// # Errors
    /// EINVAL if they do not lie in the mapping, or do not begin with a word.
    pub fn new(mapping: Mapping, start: usize, length: usize) -> io::Result<Self> {
        let inside = start
            .checked_add(length)
            .is_some_and(|end| end <= mapping.len());
        if !inside || start % Self::WORD != 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Self {
            mapping,
            start,
            length,
        })
    }

    /// Bytes in the range.
    pub fn len(&self) -> usize {
        self.length
    }

    /// The first byte.
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: in the mapping, by the check of `new`.
        unsafe { self.mapping.as_ptr().add(self.start) }
    }

    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The words from `offset` on, if `length` bytes are whole words in the
    /// range.
    fn words(&self, offset: usize, length: usize) -> Option<(*mut u32, usize)> {
        let end = offset.checked_add(length)?;
        let whole = offset % Self::WORD == 0 && length % Self::WORD == 0;
        if end > self.length || !whole {
            return None;
        }
        // SAFETY: in the mapping, by the check of `new` and the one above.
        let at = unsafe { self.mapping.as_ptr().add(self.start + offset) };
        Some((at.as_ptr().cast(), length / Self::WORD))
    }

    /// Copies `length` bytes from `from` to the device, in order. False, with
    /// nothing copied, if they are not whole words of the range.
    ///
    /// # Safety
    /// `length` bytes at `from` are readable, of whatever alignment.
    #[must_use]
    pub unsafe fn write(&self, offset: usize, from: *const u8, length: usize) -> bool {
        let Some((to, count)) = self.words(offset, length) else {
            return false;
        };
        let from = from.cast::<u32>();
        for i in 0..count {
            // SAFETY: the source by the caller's word, the destination by
            // `words`: inside, and aligned since a mapping begins a page.
            unsafe { to.add(i).write_volatile(from.add(i).read_unaligned()) };
        }
        true
    }

    /// Copies `length` bytes from the device to `to`, in order. False, with
    /// nothing copied, if they are not whole words of the range.
    ///
    /// # Safety
    /// `length` bytes at `to` are writable, of whatever alignment.
    #[must_use]
    pub unsafe fn read(&self, offset: usize, to: *mut u8, length: usize) -> bool {
        let Some((from, count)) = self.words(offset, length) else {
            return false;
        };
        let to = to.cast::<u32>();
        for i in 0..count {
            // SAFETY: as in `write`, the other way.
            unsafe { to.add(i).write_unaligned(from.add(i).read_volatile()) };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, length: usize) -> io::Result<DeviceWords> {
        DeviceWords::new(Mapping::anonymous(1)?, start, length)
    }

    fn read<const N: usize>(words: &DeviceWords, offset: usize) -> Option<[u8; N]> {
        let mut to = [0; N];
        // SAFETY: as many bytes as that.
        unsafe { words.read(offset, to.as_mut_ptr(), N) }.then_some(to)
    }

    #[test]
    fn writes_stay_in_their_range() {
        let words = range(64, 32).unwrap();
        // Of an odd address.
        let from = [0, 1, 2, 3, 4, 5, 6, 7, 8];
        // SAFETY: eight bytes from the second on.
        assert!(unsafe { words.write(12, from[1..].as_ptr(), 8) });
        assert_eq!(
            read::<16>(&words, 8).unwrap(),
            [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]
        );
        let first = words.mapping.as_ptr();
        // SAFETY: in the mapping.
        assert_eq!(unsafe { first.add(64 + 12).read() }, 1);
    }

    #[test]
    fn only_whole_words_of_the_range_are_copied() {
        let words = range(64, 32).unwrap();
        assert_eq!((words.len(), words.is_empty()), (32, false));
        assert!(read::<32>(&words, 0).is_some() && read::<0>(&words, 32).is_some());
        assert_eq!(read::<36>(&words, 0), None);
        assert_eq!(read::<4>(&words, 32), None);
        assert_eq!(read::<8>(&words, usize::MAX - 3), None);
        assert_eq!((read::<4>(&words, 2), read::<3>(&words, 0)), (None, None));
        let from = [0u8; 36];
        for (offset, length) in [(0, 36), (32, 4), (2, 4), (0, 2), (usize::MAX - 3, 8)] {
            // SAFETY: no longer than that.
            let copied = unsafe { words.write(offset, from.as_ptr(), length) };
            assert!(!copied, "{length} at {offset}");
        }
    }

    #[test]
    fn a_range_lies_in_its_mapping() {
        let page = Mapping::page_size();
        assert!(range(0, page).is_ok() && range(page, 0).is_ok());
        for (start, length) in [(64, page), (page + 64, 0), (2, 4), (usize::MAX - 3, 8)] {
            assert!(range(start, length).is_err(), "{length} at {start}");
        }
    }
}
