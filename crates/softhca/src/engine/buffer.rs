//! Queue buffers in guest memory, described by a list of pages.

use roce::bits::get64;

use crate::platform::{Memory, Unmapped};

/// A buffer that is contiguous for the driver, and a list of pages for the device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buffer {
    pages: Vec<u64>,
    page_shift: u32,
    offset: u64,
    length: u64,
}

/// log2 of the parts of a page that `page_offset` fields count.
const OFFSET_PARTS_SHIFT: u32 = 6;

impl Buffer {
    /// Returns a buffer of `length` bytes in the pages listed in `input` from byte `at`
    /// on. `log_page_size` counts from 4 KiB, `page_offset` in 64ths of a page. `None`
    /// if pages are missing.
    pub(crate) fn from_page_list(
        input: &[u8],
        at: usize,
        length: u64,
        log_page_size: u32,
        page_offset: u32,
    ) -> Option<Buffer> {
        let page_shift = log_page_size.checked_add(12).filter(|shift| *shift < 48)?;
        let offset = u64::from(page_offset) << (page_shift - OFFSET_PARTS_SHIFT);
        let count = (offset.checked_add(length)?).div_ceil(1 << page_shift);
        let count = usize::try_from(count).ok()?;
        let listed_pages = input.len().saturating_sub(at) / 8;
        if count > listed_pages {
            return None;
        }
        let pages = (0..count)
            .map(|n| get64(input, at + 8 * n) & !0xfff)
            .collect();
        Some(Buffer::from_pages(pages, page_shift, offset, length))
    }

    /// Returns a buffer of `length` bytes that begins at byte `offset` of these pages.
    pub(crate) fn from_pages(
        mut pages: Vec<u64>,
        mut page_shift: u32,
        offset: u64,
        length: u64,
    ) -> Buffer {
        let are_consecutive = |pair: &[u64]| pair[0].checked_add(1 << page_shift) == Some(pair[1]);
        if pages.len() > 1 && pages.windows(2).all(are_consecutive) {
            // One page: entries at an odd offset may cross the listed ones.
            page_shift = (offset + length).next_power_of_two().ilog2();
            pages.truncate(1);
        }
        Buffer {
            pages,
            page_shift,
            offset,
            length,
        }
    }

    /// Returns the address of byte `at`, and the number of bytes from there to the end
    /// of its page.
    fn locate(&self, at: u64) -> Option<(u64, u64)> {
        if at >= self.length {
            return None;
        }
        let at = at + self.offset;
        let page = self.pages.get((at >> self.page_shift) as usize)?;
        let within = at & ((1 << self.page_shift) - 1);
        Some((page.wrapping_add(within), (1 << self.page_shift) - within))
    }

    /// Returns the address of an entry of `size` bytes at byte `at`. It lies in one
    /// page if entries are aligned to their size.
    pub(crate) fn entry(&self, at: u64, size: u64) -> Result<u64, Unmapped> {
        match self.locate(at) {
            Some((address, remaining)) if remaining >= size => Ok(address),
            _ => Err(Unmapped { address: at }),
        }
    }

    /// Copies from the buffer into `out`.
    pub(crate) fn read(
        &self,
        memory: &impl Memory,
        mut at: u64,
        mut out: &mut [u8],
    ) -> Result<(), Unmapped> {
        while !out.is_empty() {
            let (address, remaining) = self.locate(at).ok_or(Unmapped { address: at })?;
            let n = out
                .len()
                .min(usize::try_from(remaining).unwrap_or(usize::MAX));
            let (part, rest) = out.split_at_mut(n);
            memory.read(address, part)?;
            out = rest;
            at += n as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use roce::bits::put64;

    use super::*;

    #[test]
    fn entries_are_found_in_their_pages() {
        let mut input = vec![0; 16 + 16];
        put64(&mut input, 16, 0x10_0000 | 3);
        put64(&mut input, 24, 0x50_0000);
        let buffer = Buffer::from_page_list(&input, 16, 8192 - 128, 0, 2).unwrap();
        assert_eq!(buffer.entry(0, 64), Ok(0x10_0080));
        assert_eq!(buffer.entry(4096 - 128, 64), Ok(0x50_0000));
        assert!(buffer.entry(8192 - 128, 64).is_err());
        assert!(buffer.entry(u64::MAX, 64).is_err());
        assert!(Buffer::from_page_list(&input, 16, 8192, 0, 2).is_none());
        assert!(Buffer::from_page_list(&input, 16, u64::MAX, 0, 2).is_none());
        assert!(Buffer::from_page_list(&input, 16, 1, 63, 2).is_none());
    }
}
