//! Registered memory whose mappings the program changes: the pages, and the regions that have
//! them. `pinned` changes them.
//!
//! A card has the pages pinned: whatever the program maps, unmaps or protects afterwards, the
//! card accesses the pages that were registered. Here the device accesses addresses of the
//! program, so the program's calls are intercepted (crates/preload): pages that the program
//! gives up are moved to an [`Area`] before, and the regions with those pages get a table
//! that has the address of each page ([`Moved`]). Keys of such regions refer to addresses
//! that no program has, from [`FIRST`] on, so that other accesses cost nothing.
//!
//! This code runs inside the program's allocator and signal handlers: it allocates by system
//! calls only, and waits for locks for a limited time.

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::driver::object::Mr;
use crate::driver::pages::{self, Transfer, page_size};

/// First address of moved regions, above all addresses of programs.
const FIRST: u64 = 1 << 63;

/// Registered ranges that overlap each chunk of the address space, modulo their number: a
/// summary that is read without a lock.
static CHUNKS: [AtomicU32; 1 << 16] = [const { AtomicU32::new(0) }; 1 << 16];
/// Number of registered ranges.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);
const LOG_CHUNK: u32 = 21;

/// Calls `each` for the chunks of a range, until it returns false.
fn each_chunk(start: u64, end: u64, mut each: impl FnMut(&AtomicU32) -> bool) {
    let Some(last) = end.checked_sub(1).filter(|last| *last >= start) else {
        return;
    };
    let first = start >> LOG_CHUNK;
    let count = ((last >> LOG_CHUNK) - first + 1).min(CHUNKS.len() as u64);
    for chunk in first..first + count {
        let index = chunk as usize % CHUNKS.len();
        if !CHUNKS.get(index).is_some_and(&mut each) {
            return;
        }
    }
}

/// Adds a registered range to the summary.
pub(crate) fn add(address: u64, length: u64) {
    REGISTERED.fetch_add(1, Ordering::SeqCst);
    each_chunk(address, address.saturating_add(length), |chunk| {
        chunk.fetch_add(1, Ordering::SeqCst);
        true
    });
}

/// Removes a registered range from the summary.
pub(crate) fn remove(address: u64, length: u64) {
    each_chunk(address, address.saturating_add(length), |chunk| {
        chunk.fetch_sub(1, Ordering::SeqCst);
        true
    });
    REGISTERED.fetch_sub(1, Ordering::SeqCst);
}

/// Returns false if no memory of a range is registered with any device of the process. Takes
/// no lock.
#[inline]
pub fn may_be_registered(range: &Range<usize>) -> bool {
    REGISTERED.load(Ordering::Relaxed) != 0 && has_chunk(range)
}

fn has_chunk(range: &Range<usize>) -> bool {
    let mut found = false;
    each_chunk(range.start as u64, range.end as u64, |chunk| {
        found = chunk.load(Ordering::Relaxed) != 0;
        !found
    });
    found
}

/// Pages that were moved away from the program, behind this header.
#[repr(C)]
pub(super) struct Area {
    /// Length of the mapping with this header.
    length: usize,
    /// Addresses that its pages had.
    start: usize,
    end: usize,
    /// The first page.
    pages: usize,
    /// Number of uses of its pages by regions.
    uses: AtomicUsize,
}

/// A use of an area, or several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AreaRef(NonNull<Area>);

impl AreaRef {
    /// Reserves an area for pages of a range, which does not have them yet. The caller has
    /// one use.
    pub(super) fn new(range: &Range<usize>) -> Option<Self> {
        let count = range.len() / page_size();
        // A byte for each page follows the header.
        let header = (size_of::<Area>() + count).next_multiple_of(page_size());
        let length = header.checked_add(range.len())?;
        let first = pages::reserve(length)?;
        // SAFETY: the pages are new.
        unsafe { pages::allow_access(first, header) };
        let area = NonNull::new(std::ptr::with_exposed_provenance_mut::<Area>(first))?;
        let header = Area {
            length,
            start: range.start,
            end: range.end,
            pages: first + header,
            uses: AtomicUsize::new(1),
        };
        // SAFETY: the pages are new, writable and large enough.
        unsafe { area.write(header) };
        Some(Self(area))
    }

    fn area(&self) -> &Area {
        // SAFETY: the area exists while there are uses.
        unsafe { self.0.as_ref() }
    }

    /// Returns the mark of a page: whether the area has it. Only the thread that has made
    /// the area uses them.
    pub(super) fn mark(&self, page: usize) -> *mut bool {
        let index = (page - self.area().start) / page_size();
        // SAFETY: there is a byte for each page, behind the header.
        unsafe { self.0.add(1).cast::<bool>().add(index).as_ptr() }
    }

    /// Returns the new address of a page.
    pub(super) fn place(&self, page: usize) -> usize {
        self.area().pages + (page - self.area().start)
    }

    /// Transfers pages of the range, except those that the area has already.
    ///
    /// # Safety
    /// As for [`pages::transfer`].
    pub(super) unsafe fn take(&self, how: Transfer, pages: Range<usize>) {
        let page = page_size();
        let mut from = pages.start;
        while from < pages.end {
            // SAFETY: marks are initialized: 0 is false.
            let has = |at| unsafe { self.mark(at).read() };
            let mut to = from;
            while to < pages.end && !has(to) {
                to += page;
            }
            if to > from {
                // SAFETY: guaranteed by the caller; the area's pages are reserved.
                unsafe { self.take_new(how, from..to) };
            }
            from = to.max(from) + page;
        }
    }

    /// # Safety
    /// As for [`pages::transfer`].
    unsafe fn take_new(&self, how: Transfer, pages: Range<usize>) {
        let mut mark = |to: usize, length: usize| {
            let from = to - self.area().pages + self.area().start;
            // SAFETY: the area's own pages, which were transferred.
            unsafe { pages::allow_access(to, length) };
            for at in (from..from + length).step_by(page_size()) {
                // SAFETY: the byte of a page of the area.
                unsafe { self.mark(at).write(true) };
            }
        };
        // SAFETY: guaranteed by the caller; the area's pages are reserved.
        unsafe {
            pages::transfer(
                how,
                pages.start,
                self.place(pages.start),
                pages.len(),
                &mut mark,
            )
        };
    }

    pub(super) fn retain(&self) {
        self.area().uses.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn release(self) {
        if self.area().uses.fetch_sub(1, Ordering::AcqRel) == 1 {
            let length = self.area().length;
            // SAFETY: the mapping is the area's, and this was its last use.
            unsafe { pages::unmap(self.0.as_ptr().expose_provenance(), length) };
        }
    }
}

/// A page of a moved region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    /// Its address.
    pub(super) at: usize,
    /// The area that has it; `None`: the program has it.
    pub(super) area: Option<AreaRef>,
    /// The program has protected it from what the device may do.
    pub(super) protected: bool,
    /// The program has moved it: its address has an entry of its own in the summary.
    pub(super) followed: bool,
}

impl Page {
    /// Ends the uses of what has it.
    pub(super) fn release(&mut self) {
        if let Some(area) = self.area.take() {
            area.release();
        }
        if std::mem::take(&mut self.followed) {
            remove(self.at as u64, page_size() as u64);
        }
    }
}

/// The pages of a region some of which the program has moved, unmapped or protected.
#[derive(Debug)]
pub(crate) struct Moved {
    /// Its first address for the device.
    pub(super) base: u64,
    table: NonNull<Page>,
    count: usize,
    /// The region.
    pub(super) handle: u32,
    /// The program has moved pages, so that they may be at other addresses than the region's.
    pub(super) is_elsewhere: bool,
}

// SAFETY: the table is owned by this value; areas count their uses atomically.
unsafe impl Send for Moved {}

impl Moved {
    pub(super) fn new(base: u64, handle: u32, first: usize, count: usize) -> Option<Self> {
        let table = pages::map_zeros(count.checked_mul(size_of::<Page>())?)?;
        let table = NonNull::new(std::ptr::with_exposed_provenance_mut::<Page>(table))?;
        for index in 0..count {
            let page = Page {
                at: first + index * page_size(),
                area: None,
                protected: false,
                followed: false,
            };
            // SAFETY: the table has room for `count` pages.
            unsafe { table.add(index).write(page) };
        }
        Some(Self {
            base,
            table,
            count,
            handle,
            is_elsewhere: false,
        })
    }

    pub(super) fn pages(&self) -> &[Page] {
        // SAFETY: the table has that many pages, which `new` has written.
        unsafe { slice::from_raw_parts(self.table.as_ptr(), self.count) }
    }

    pub(super) fn pages_mut(&mut self) -> &mut [Page] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.table.as_ptr(), self.count) }
    }

    fn end(&self) -> u64 {
        self.base + (self.count * page_size()) as u64
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        self.pages_mut().iter_mut().for_each(Page::release);
        let table = self.table.as_ptr().expose_provenance();
        // SAFETY: the mapping is this value's.
        unsafe { pages::unmap(table, self.count * size_of::<Page>()) };
    }
}

/// The moved regions of a device.
#[derive(Debug, Default)]
pub(crate) struct MovedRegions {
    /// In the order of their addresses.
    pub(super) regions: Vec<Moved>,
    /// Number of registered regions: as many can be moved without allocation.
    registered: usize,
    /// Address behind the last one.
    next: u64,
}

/// A part of an access to moved regions, within a page.
pub(crate) struct Part {
    pub(crate) at: usize,
    /// Its range in the access.
    pub(crate) range: Range<usize>,
    pub(crate) protected: bool,
}

impl MovedRegions {
    /// Called for each new region.
    pub(crate) fn add_registered(&mut self) {
        self.registered += 1;
        let missing = self.registered.saturating_sub(self.regions.len());
        self.regions.reserve(missing);
    }

    /// Called for each region that ends; `base` is 0 unless it was moved.
    pub(crate) fn remove_registered(&mut self, base: u64) {
        self.registered = self.registered.saturating_sub(1);
        if let Ok(index) = self.regions.binary_search_by_key(&base, |it| it.base) {
            self.regions.remove(index);
        }
    }

    /// Makes a table of the pages of a region. Returns its first address for the device.
    pub(super) fn start(&mut self, handle: u32, mr: &Mr) -> Option<u64> {
        if self.regions.len() == self.regions.capacity() {
            return None;
        }
        let pages = page_range(mr)?;
        let base = self.next.max(FIRST);
        self.next = base.checked_add(pages.len() as u64)?;
        let moved = Moved::new(base, handle, pages.start, pages.len() / page_size())?;
        self.regions.push(moved);
        Some(base)
    }

    pub(super) fn with_base(&self, base: u64) -> Option<&Moved> {
        let index = self
            .regions
            .binary_search_by_key(&base, |it| it.base)
            .ok()?;
        self.regions.get(index)
    }

    pub(super) fn with_base_mut(&mut self, base: u64) -> Option<&mut Moved> {
        let index = self
            .regions
            .binary_search_by_key(&base, |it| it.base)
            .ok()?;
        self.regions.get_mut(index)
    }

    /// Returns the regions with pages that the program has moved.
    pub(super) fn elsewhere(&self) -> impl Iterator<Item = u32> {
        let elsewhere = self.regions.iter().filter(|it| it.is_elsewhere);
        elsewhere.map(|it| it.handle)
    }

    /// Returns whether an address is one of moved regions.
    pub(crate) fn has(address: u64) -> bool {
        address >= FIRST
    }

    /// Calls `each` for the parts of an access, until it returns false. Returns whether all
    /// were accessed.
    pub(crate) fn access(
        &self,
        address: u64,
        length: usize,
        mut each: impl FnMut(Part) -> bool,
    ) -> bool {
        let index = self.regions.partition_point(|it| it.base <= address);
        let moved = index
            .checked_sub(1)
            .and_then(|index| self.regions.get(index));
        let end = address.checked_add(length as u64);
        let Some(moved) = moved.filter(|it| end.is_some_and(|end| end <= it.end())) else {
            return false;
        };
        let page = page_size();
        let mut offset = (address - moved.base) as usize;
        let mut done = 0;
        while done < length {
            let Some(entry) = moved.pages().get(offset / page) else {
                return false;
            };
            let within = offset % page;
            let count = (page - within).min(length - done);
            let part = Part {
                at: entry.at + within,
                range: done..done + count,
                protected: entry.protected,
            };
            if !each(part) {
                return false;
            }
            done += count;
            offset += count;
        }
        true
    }
}

/// Returns the pages of a region.
pub(super) fn page_range(mr: &Mr) -> Option<Range<usize>> {
    let page = page_size() as u64;
    let end = mr.address.checked_add(mr.length)?;
    let end = end.checked_next_multiple_of(page)?;
    Some((mr.address / page * page) as usize..end as usize)
}

pub(super) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Calls `each` for each run of pages that the program has, by the entries of a table.
pub(super) fn each_run(pages: &[Page], mut each: impl FnMut(Range<usize>)) {
    let mut run = 0..0;
    for page in pages.iter().filter(|page| page.area.is_none()) {
        if page.at != run.end {
            if !run.is_empty() {
                each(run.clone());
            }
            run.start = page.at;
        }
        run.end = page.at + page_size();
    }
    if !run.is_empty() {
        each(run);
    }
}
