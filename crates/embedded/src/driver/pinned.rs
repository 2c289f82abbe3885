//! Changes of registered memory, for the calls by which a program changes its mappings: see
//! [`moved`](super::moved).

use std::ops::Range;
use std::sync::MutexGuard;

use crate::driver::moved::{AreaRef, Moved, Page, add, each_run, intersection, page_range};
use crate::driver::object::Mr;
use crate::driver::pages::{self, Transfer, page_size};
use crate::driver::region::WRITABLE;
use crate::driver::state::State;

/// Number of devices of a network that are handled.
const MAX_DEVICES: usize = 32;

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
