//! User memory (umem), registered by a program and named by a number in its commands.

use super::buffer::Buffer;

/// Registered memory.
#[derive(Debug)]
pub(crate) struct Umem {
    pub(crate) pages: Vec<u64>,
    pub(crate) page_shift: u32,
    /// Offset of the memory in its first page.
    pub(crate) offset: u64,
    /// Whether the device may write to all pages.
    pub(crate) writable: bool,
}

impl Umem {
    fn length(&self) -> u64 {
        ((self.pages.len() as u64) << self.page_shift) - self.offset
    }

    /// Returns the address of `size` bytes at byte `at`, if they are in one page.
    pub(crate) fn address(&self, at: u64, size: u64) -> Option<u64> {
        let end = at.checked_add(size)?;
        if end > self.length() {
            return None;
        }
        let at = at + self.offset;
        let within = at & ((1 << self.page_shift) - 1);
        if within + size > 1 << self.page_shift {
            return None;
        }
        let page = self.pages.get((at >> self.page_shift) as usize)?;
        page.checked_add(within)
    }

    /// Returns the part of `length` bytes from byte `at` on.
    pub(crate) fn part(&self, at: u64, length: u64) -> Option<Buffer> {
        let end = at.checked_add(length)?;
        if length == 0 || end > self.length() {
            return None;
        }
        let (at, end) = (at + self.offset, end + self.offset);
        let first = (at >> self.page_shift) as usize;
        let pages = end.div_ceil(1 << self.page_shift) as usize;
        let pages = self.pages.get(first..pages)?.to_vec();
        let within = at & ((1 << self.page_shift) - 1);
        Some(Buffer::from_pages(pages, self.page_shift, within, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_within_the_memory() {
        let umem = Umem {
            pages: vec![0x10_0000, 0x50_0000],
            page_shift: 12,
            offset: 0x100,
            writable: true,
        };
        assert_eq!(umem.address(0, 8), Some(0x10_0100));
        assert_eq!(umem.address(0xf00, 8), Some(0x50_0000));
        assert_eq!(umem.address(0xefc, 8), None);
        assert_eq!(umem.address(0x1ef8, 8), Some(0x50_0ff8));
        assert_eq!(umem.address(0x1ef9, 8), None);
        assert_eq!(umem.address(u64::MAX, 8), None);
        let part = umem.part(0xf00, 0x1000).unwrap();
        assert_eq!(part.entry(0, 64), Ok(0x50_0000));
        assert!(umem.part(0xf40, 0x1000).is_none());
        assert!(umem.part(u64::MAX, 2).is_none());
        assert!(umem.part(0, 0).is_none());
        let across = umem.part(0xec0, 0x80).unwrap();
        assert_eq!(across.entry(0x40, 64), Ok(0x50_0000));
    }
}
