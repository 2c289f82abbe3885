//! Registered memory whose mappings the program changes.
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
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::driver::object::Mr;
use crate::driver::pages::{self, Transfer, page_size};
use crate::driver::region::WRITABLE;
use crate::driver::state::State;

/// First address of moved regions, above all addresses of programs.
const FIRST: u64 = 1 << 63;
/// Number of devices of a network that are handled.
const MAX_DEVICES: usize = 32;

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
struct Area {
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
struct AreaRef(NonNull<Area>);

impl AreaRef {
    /// Reserves an area for pages of a range, which does not have them yet. The caller has
    /// one use.
    fn new(range: &Range<usize>) -> Option<Self> {
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
    fn mark(&self, page: usize) -> *mut bool {
        let index = (page - self.area().start) / page_size();
        // SAFETY: there is a byte for each page, behind the header.
        unsafe { self.0.add(1).cast::<bool>().add(index).as_ptr() }
    }

    /// Returns the new address of a page.
    fn place(&self, page: usize) -> usize {
        self.area().pages + (page - self.area().start)
    }

    /// Transfers pages of the range, except those that the area has already.
    ///
    /// # Safety
    /// As for [`pages::transfer`].
    unsafe fn take(&self, how: Transfer, pages: Range<usize>) {
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

    fn retain(&self) {
        self.area().uses.fetch_add(1, Ordering::Relaxed);
    }

    fn release(self) {
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
struct Page {
    /// Its address.
    at: usize,
    /// The area that has it; `None`: the program has it.
    area: Option<AreaRef>,
    /// The program has protected it from what the device may do.
    protected: bool,
    /// The program has moved it: its address has an entry of its own in the summary.
    followed: bool,
}

impl Page {
    /// Ends the uses of what has it.
    fn release(&mut self) {
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
    base: u64,
    table: NonNull<Page>,
    count: usize,
    /// The region.
    handle: u32,
    /// The program has moved pages, so that they may be at other addresses than the region's.
    is_elsewhere: bool,
}

// SAFETY: the table is owned by this value; areas count their uses atomically.
unsafe impl Send for Moved {}

impl Moved {
    fn new(base: u64, handle: u32, first: usize, count: usize) -> Option<Self> {
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

    fn pages(&self) -> &[Page] {
        // SAFETY: the table has that many pages, which `new` has written.
        unsafe { slice::from_raw_parts(self.table.as_ptr(), self.count) }
    }

    fn pages_mut(&mut self) -> &mut [Page] {
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
    regions: Vec<Moved>,
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
    fn start(&mut self, handle: u32, mr: &Mr) -> Option<u64> {
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

    fn with_base(&self, base: u64) -> Option<&Moved> {
        let index = self
            .regions
            .binary_search_by_key(&base, |it| it.base)
            .ok()?;
        self.regions.get(index)
    }

    fn with_base_mut(&mut self, base: u64) -> Option<&mut Moved> {
        let index = self
            .regions
            .binary_search_by_key(&base, |it| it.base)
            .ok()?;
        self.regions.get_mut(index)
    }

    /// Returns the regions with pages that the program has moved.
    fn elsewhere(&self) -> impl Iterator<Item = u32> {
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
fn page_range(mr: &Mr) -> Option<Range<usize>> {
    let page = page_size() as u64;
    let end = mr.address.checked_add(mr.length)?;
    let end = end.checked_next_multiple_of(page)?;
    Some((mr.address / page * page) as usize..end as usize)
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Calls `each` for each run of pages that the program has, by the entries of a table.
fn each_run(pages: &[Page], mut each: impl FnMut(Range<usize>)) {
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

impl State {
    /// Calls `each` for each run of pages in a range that regions have and the program has
    /// not given up, and with the rights of the region.
    fn each_registered(&self, range: &Range<usize>, mut each: impl FnMut(Range<usize>, &Mr)) {
        let moved = &self.hca.platform().moved;
        let mut each_of = |mr: &Mr| {
            let run = |run: Range<usize>| {
                let run = intersection(&run, range);
                if !run.is_empty() {
                    each(run, mr);
                }
            };
            match moved.with_base(mr.moved) {
                Some(moved) => each_run(moved.pages(), run),
                None => page_range(mr).into_iter().for_each(run),
            }
        };
        for (_, mr) in self.objects.regions_in(range) {
            each_of(&mr);
        }
        for handle in moved.elsewhere() {
            self.objects
                .region(handle)
                .into_iter()
                .for_each(&mut each_of);
        }
    }

    /// Makes tables of the regions with pages in a range.
    fn start_moving(&mut self, range: &Range<usize>) {
        let before = self.hca.platform().moved.regions.len();
        for (handle, mr) in self.objects.regions_in(range) {
            let pages = page_range(&mr).map(|pages| intersection(&pages, range));
            if mr.moved != 0 || pages.is_none_or(|pages| pages.is_empty()) {
                continue;
            }
            if let Some(base) = self.hca.platform_mut().moved.start(handle, &mr) {
                let offset = mr.address % page_size() as u64;
                self.hca.set_key_memory(mr.key >> 8, base + offset);
            }
        }
        for moved in self.hca.platform().moved.regions.iter().skip(before) {
            self.objects.set_moved(moved.handle, moved.base);
        }
    }

    /// Changes the pages of a range that regions with tables have and the program has not
    /// given up.
    fn change_pages(&mut self, range: &Range<usize>, mut change: impl FnMut(&mut Page, &Mr)) {
        let regions = &mut self.hca.platform_mut().moved;
        let mut change_of = |moved: &mut Moved, mr: &Mr| {
            let mut is_elsewhere = moved.is_elsewhere;
            for page in moved.pages_mut() {
                if page.area.is_none() && range.contains(&page.at) {
                    change(page, mr);
                    is_elsewhere |= page.followed;
                }
            }
            moved.is_elsewhere = is_elsewhere;
        };
        for (_, mr) in self.objects.regions_in(range) {
            if let Some(moved) = regions.with_base_mut(mr.moved) {
                change_of(moved, &mr);
            }
        }
        for moved in regions.regions.iter_mut().filter(|it| it.is_elsewhere) {
            if let Some(mr) = self.objects.region(moved.handle) {
                change_of(moved, mr);
            }
        }
    }
}

/// How the program is about to give up pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Their mapping ends, or starts anew without them.
    Unmapped,
    /// They are removed from their file.
    Removed,
}

/// The lock of a device; `None` if it is not to be had.
type LockResult<'a> = Option<MutexGuard<'a, State>>;

/// The devices of a process, locked.
pub(crate) struct Locked<'a>([Option<MutexGuard<'a, State>>; MAX_DEVICES]);

impl<'a> Locked<'a> {
    /// Takes the locks of the devices, of which `lock` returns the one of an index until there
    /// is none. `None` if a lock is not to be had.
    pub(crate) fn new(mut lock: impl FnMut(usize) -> Option<LockResult<'a>>) -> Option<Self> {
        let mut locked = [const { None }; MAX_DEVICES];
        for (index, entry) in locked.iter_mut().enumerate() {
            let Some(locked) = lock(index) else {
                break;
            };
            *entry = Some(locked?);
        }
        Some(Self(locked))
    }

    fn states(&mut self) -> impl Iterator<Item = &mut State> {
        self.0.iter_mut().flatten().map(|state| &mut **state)
    }

    /// Returns the smallest range that includes all registered pages in a range.
    fn hull(&mut self, range: &Range<usize>) -> Option<Range<usize>> {
        let mut hull: Option<Range<usize>> = None;
        for state in self.states() {
            state.each_registered(range, |run, _| {
                let now = hull.take().unwrap_or(run.clone());
                hull = Some(now.start.min(run.start)..now.end.max(run.end));
            });
        }
        hull
    }

    /// Transfers the registered pages of a range to an area, and makes the regions refer to
    /// them. With [`Transfer::Share`], pages that cannot be shared stay. Returns whether there
    /// were any.
    ///
    /// # Safety
    /// As for [`pages::transfer`].
    unsafe fn take_pages(&mut self, range: &Range<usize>, how: &[Transfer], zeros: bool) -> bool {
        let Some(hull) = self.hull(range) else {
            return false;
        };
        let Some(area) = AreaRef::new(&hull) else {
            return true;
        };
        for how in how {
            for state in self.states() {
                // SAFETY: guaranteed by the caller.
                state.each_registered(&hull, |run, _| unsafe { area.take(*how, run) });
            }
        }
        for state in self.states() {
            state.start_moving(&hull);
            state.change_pages(&hull, |page, _| {
                let place = area.place(page.at);
                // SAFETY: the byte of a page of the area.
                let has = unsafe { area.mark(page.at).read() };
                if !has && zeros {
                    // SAFETY: a reserved page of the area, of zeros.
                    unsafe { pages::allow_access(place, page_size()) };
                }
                if has || zeros {
                    page.release();
                    area.retain();
                    page.at = place;
                    page.area = Some(area);
                    page.protected = false;
                }
            });
        }
        area.release();
        true
    }

    /// Keeps the registered pages of a range, which the program is about to give up, for the
    /// devices alone. Returns whether there are such pages.
    ///
    /// # Safety
    /// The program must be about to give up all pages of the range, which must be whole pages.
    pub(crate) unsafe fn keep(&mut self, range: &Range<usize>, loss: Loss) -> bool {
        let how: &[Transfer] = match loss {
            Loss::Unmapped => &[Transfer::Move, Transfer::Share, Transfer::Copy],
            Loss::Removed => &[Transfer::Copy],
        };
        // SAFETY: guaranteed by the caller.
        unsafe { self.take_pages(range, how, true) }
    }

    /// Returns whether pages of a range are registered.
    pub(crate) fn has(&mut self, range: &Range<usize>) -> bool {
        self.hull(range).is_some()
    }

    /// Moves pages by `change`; the devices follow them.
    pub(crate) fn follow(&mut self, range: &Range<usize>, change: impl FnOnce() -> Option<usize>) {
        // Makes the tables, so that the program sees no pages that the device does not follow.
        for state in self.states() {
            state.start_moving(range);
        }
        let Some(new) = change() else {
            return;
        };
        for state in self.states() {
            state.change_pages(range, |page, _| {
                let at = page.at - range.start + new;
                page.release();
                page.at = at;
                page.followed = true;
                add(at as u64, page_size() as u64);
            });
        }
    }

    /// Changes the protection of pages by `change`; the devices keep their access.
    pub(crate) fn protect<T>(
        &mut self,
        range: &Range<usize>,
        protection: i32,
        change: impl FnOnce() -> T,
    ) -> T {
        let needed = |mr: &Mr| match mr.access.intersects(WRITABLE) {
            true => libc::PROT_READ | libc::PROT_WRITE,
            false => libc::PROT_READ,
        };
        let mut lost = false;
        for state in self.states() {
            state.each_registered(range, |_, mr| lost |= needed(mr) & !protection != 0);
        }
        if lost {
            // SAFETY: pages are only shared.
            unsafe { self.take_pages(range, &[Transfer::Share], false) };
        }
        let result = change();
        for state in self.states() {
            if lost {
                state.start_moving(range);
            }
            state.change_pages(range, |page, mr| {
                page.protected = needed(mr) & !protection != 0;
            });
        }
        result
    }
}
