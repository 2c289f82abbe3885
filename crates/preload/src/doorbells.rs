//! Doorbell pages of the program.
//!
//! A provider writes doorbells to mapped pages, and tells nobody. While the device's thread
//! sleeps, the pages are write-protected: the first doorbell is a fault, whose handler makes
//! the page writable and wakes the thread. A page that has never been written stays
//! protected, so that pages without queues cost nothing.
//!
//! UCX rewrites the first bytes of `mmap` and others, and makes the system calls itself. Hence
//! the pages are counted: if they are not as many as the devices' UARs, they are looked up in
//! the process's memory map.

use std::fs::File;
use std::hint;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use embedded::{DoorbellGuard, Embedded, UarCounts};
use nix::time::{ClockId, clock_gettime};

use crate::fault::page_size;
use crate::process;
use crate::real;

/// Maximum number of pages. With more, doorbells are looked for at intervals.
const MAX_PAGES: usize = 4096;
/// State of a page, in the low bits of its address. Free entries are 0.
const PROTECTED: usize = 1;
const WRITABLE: usize = 2;
const STATE: usize = PROTECTED | WRITABLE;
/// Set in an entry for a UAR that the program has allocated; the others come with a context.
const ALLOCATED: usize = 4;
const FLAGS: usize = STATE | ALLOCATED;
/// Bounds of the interval between two looks for unknown pages; it doubles each time.
const MIN_SEARCH_INTERVAL: Duration = Duration::from_millis(1);
const MAX_SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two looks for a debugger.
const TRACER_INTERVAL: Duration = Duration::from_millis(100);

/// The pages, each an address with its state.
static PAGES: [AtomicUsize; MAX_PAGES] = [const { AtomicUsize::new(0) }; MAX_PAGES];
/// One above the largest index in use.
static END: AtomicUsize = AtomicUsize::new(0);
/// A page is not in the table.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);
/// Held while pages are protected, added and removed: a removed page may at once be another
/// mapping of the program.
static LOCKED: AtomicBool = AtomicBool::new(false);

struct Lock;

impl Lock {
    /// Takes the lock. Signal handlers and children of fork must not wait for a thread that
    /// will not run: the first do not come here, and the second call [`after_fork`].
    fn take() -> Self {
        let mut rounds = 0_u32;
        while LOCKED.swap(true, Ordering::Acquire) {
            rounds += 1;
            match rounds % 64 {
                0 => thread::yield_now(),
                _ => hint::spin_loop(),
            }
        }
        Self
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

/// Called in a child of fork.
pub(crate) fn after_fork() {
    LOCKED.store(false, Ordering::Release);
    MAPS.forget();
    STATUS.forget();
}

/// Opens the files that the guard reads. Called when the program opens its first device.
pub(crate) fn open_files() {
    MAPS.open();
    STATUS.open();
}

static MAPS: ProcFile = ProcFile::new("/proc/thread-self/maps");
static STATUS: ProcFile = ProcFile::new("/proc/self/status");

/// A file about this process that stays open: opening it takes a low descriptor for a moment,
/// which a thread of the program may be about to get.
struct ProcFile {
    path: &'static str,
    /// -1 if it is not open.
    descriptor: AtomicI32,
}

impl ProcFile {
    const fn new(path: &'static str) -> Self {
        Self {
            path,
            descriptor: AtomicI32::new(-1),
        }
    }

    fn open(&self) {
        if self.descriptor.load(Ordering::Relaxed) == -1 {
            if let Ok(file) = File::open(self.path) {
                self.descriptor.store(file.into_raw_fd(), Ordering::Relaxed);
            }
        }
    }

    /// Called in a child of fork, which closes the descriptors of its parent's devices.
    fn forget(&self) {
        self.descriptor.store(-1, Ordering::Relaxed);
    }

    /// Returns the contents; `None` if they cannot be read.
    fn read(&self) -> Option<String> {
        self.open();
        let descriptor = self.descriptor.load(Ordering::Relaxed);
        if descriptor == -1 {
            return None;
        }
        // SAFETY: the descriptor stays open, and is not closed here.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
        let (mut contents, mut part) = (Vec::new(), [0; 4096]);
        loop {
            match file.read_at(&mut part, contents.len() as u64).ok()? {
                0 => return String::from_utf8(contents).ok(),
                length => contents.extend_from_slice(&part[..length]),
            }
        }
    }
}

fn pages() -> &'static [AtomicUsize] {
    &PAGES[..END.load(Ordering::Acquire).min(MAX_PAGES)]
}

/// Returns the address of an entry's page; 0 if the entry is free.
fn page_of(slot: &AtomicUsize) -> usize {
    slot.load(Ordering::Relaxed) & !FLAGS
}

/// Sets the protection of a page of doorbells.
fn set_writable(page: usize, writable: bool) -> bool {
    let protection = match writable {
        true => libc::PROT_READ | libc::PROT_WRITE,
        false => libc::PROT_READ,
    };
    // SAFETY: a page of doorbells, which nobody executes, and which is only written; a store
    // to a protected one is a fault that `unprotect` handles.
    unsafe { real::mprotect(page as *mut libc::c_void, page_size(), protection) == 0 }
}

/// Adds a page that the program has mapped; `allocated` if it is that of a UAR that the program
/// has allocated.
pub(crate) fn add(page: usize, allocated: bool) {
    let _lock = Lock::take();
    insert(page, allocated, is_traced());
}

fn insert(page: usize, allocated: bool, traced: bool) {
    let protected = !traced && set_writable(page, false);
    let kind = if allocated { ALLOCATED } else { 0 };
    let entry = page | kind | if protected { PROTECTED } else { WRITABLE };
    for (index, slot) in PAGES.iter().enumerate() {
        if slot.load(Ordering::Relaxed) == 0 {
            slot.store(entry, Ordering::Release);
            END.fetch_max(index + 1, Ordering::Release);
            return;
        }
    }
    INCOMPLETE.store(true, Ordering::Relaxed);
    if protected {
        set_writable(page, true);
    }
}

/// Removes the pages of a range, before the program unmaps, moves or protects it.
pub(crate) fn remove(range: &Range<usize>) {
    let is_inside = |slot: &AtomicUsize| range.contains(&page_of(slot));
    if !pages().iter().any(is_inside) {
        return;
    }
    let _lock = Lock::take();
    for slot in pages().iter().filter(|slot| is_inside(slot)) {
        let entry = slot.swap(0, Ordering::AcqRel);
        if entry & PROTECTED != 0 {
            set_writable(entry & !FLAGS, true);
        }
    }
}

/// As [`remove`], if the pages stay mapped with other addresses or rights: their doorbells
/// are no longer noticed.
pub(crate) fn remove_mapped(range: &Range<usize>) {
    if pages().iter().any(|slot| range.contains(&page_of(slot))) {
        INCOMPLETE.store(true, Ordering::Relaxed);
        remove(range);
    }
}

/// Handles a fault: if the address is in a page of doorbells, makes the page writable, and
/// wakes the device's thread. Runs in a signal handler.
pub(crate) fn unprotect(address: usize) -> bool {
    let page = address & !(page_size() - 1);
    let of_page = pages().iter().find(|slot| page_of(slot) == page);
    let Some(slot) = of_page.filter(|_| page != 0) else {
        return false;
    };
    if !set_writable(page, true) {
        return false;
    }
    // Afterwards: a page that is marked protected is not protected again, so the thread,
    // which is woken below, would not notice later doorbells.
    let entry = slot.load(Ordering::Relaxed);
    if entry & PROTECTED != 0 && entry & !FLAGS == page {
        let order = Ordering::AcqRel;
        let _ = slot.compare_exchange(entry, entry ^ STATE, order, Ordering::Relaxed);
    }
    process::doorbell_rung();
    true
}

/// Returns whether a debugger would report each fault to its user.
fn is_traced() -> bool {
    let status = STATUS.read().unwrap_or_default();
    let tracer = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|pid| pid.trim() != "0")
}

/// Returns the time since the system started.
fn milliseconds() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    now.as_millis() as u64
}

/// [`is_traced`], looked up at most every [`TRACER_INTERVAL`]. Without a lock, which a child of
/// fork could inherit.
pub(crate) fn is_traced_now() -> bool {
    /// When the last look was due, in intervals since the start, and what it has found.
    static LAST: AtomicU64 = AtomicU64::new(0);
    static TRACED: AtomicBool = AtomicBool::new(false);
    let now = 1 + milliseconds() / TRACER_INTERVAL.as_millis() as u64;
    if LAST.swap(now, Ordering::Relaxed) != now {
        TRACED.store(is_traced(), Ordering::Relaxed);
    }
    TRACED.load(Ordering::Relaxed)
}

/// Returns whether the table has the pages of all UARs, and no others. The lock is held.
fn knows_all_pages() -> bool {
    /// One more than the number of changes at which all pages were known.
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    /// One more than the number of changes at the last search.
    static SEARCHED: AtomicU64 = AtomicU64::new(0);
    static NEXT_SEARCH: AtomicU64 = AtomicU64::new(0);
    static INTERVAL: AtomicU64 = AtomicU64::new(0);
    let uars = Embedded::uar_counts();
    let changes = uars.changes + 1;
    if KNOWN.load(Ordering::Relaxed) == changes {
        return true;
    }
    let now = milliseconds();
    if SEARCHED.swap(changes, Ordering::Relaxed) != changes {
        INTERVAL.store(0, Ordering::Relaxed);
    } else if now < NEXT_SEARCH.load(Ordering::Relaxed) {
        return false;
    }
    // Even if they are as many: a page may be another one at the same address.
    search();
    if !are_as_many(uars) {
        let shortest = MIN_SEARCH_INTERVAL.as_millis() as u64;
        let longest = MAX_SEARCH_INTERVAL.as_millis() as u64;
        let interval = INTERVAL.load(Ordering::Relaxed).clamp(shortest, longest);
        NEXT_SEARCH.store(now + interval, Ordering::Relaxed);
        INTERVAL.store(interval * 2, Ordering::Relaxed);
        return false;
    }
    KNOWN.store(changes, Ordering::Relaxed);
    true
}

/// Returns whether there is a page for each UAR that the program has allocated, and at least one
/// for each context that has others.
fn are_as_many(uars: UarCounts) -> bool {
    let (mut allocated, mut others) = (0, 0);
    for slot in pages() {
        match slot.load(Ordering::Relaxed) {
            0 => {}
            entry if entry & ALLOCATED != 0 => allocated += 1,
            _ => others += 1,
        }
    }
    allocated == uars.allocated && others >= uars.contexts && (others == 0) == (uars.contexts == 0)
}

/// Puts pages of doorbells into the table, and takes others out of it, as the memory map says.
fn search() {
    // Without it nothing is known, and nothing changes.
    let Some(maps) = MAPS.read() else {
        return;
    };
    let mappings: Vec<_> = maps.lines().filter_map(registers).collect();
    // The device's own mappings have other pages too.
    let mappings = mappings.iter().filter(|it| it.has_only_doorbells());
    for slot in pages() {
        let entry = slot.load(Ordering::Relaxed);
        let page = entry & !FLAGS;
        let Some(mapping) = mappings.clone().find(|it| it.pages.contains(&page)) else {
            // Another mapping may be there by now: its protection stays.
            slot.store(0, Ordering::Release);
            continue;
        };
        // A page that is marked protected has been mapped again, or `unprotect` runs.
        let state = match mapping.is_writable {
            true => WRITABLE,
            false => entry & STATE,
        };
        let found = page | mapping.kind(page) | state;
        let _ = slot.compare_exchange(entry, found, Ordering::AcqRel, Ordering::Relaxed);
    }
    let mut traced = None;
    for mapping in mappings.filter(|it| it.is_writable) {
        for page in mapping.pages.clone().step_by(page_size()) {
            if !pages().iter().any(|slot| page_of(slot) == page) {
                let traced = *traced.get_or_insert_with(is_traced);
                insert(page, mapping.kind(page) == ALLOCATED, traced);
            }
        }
    }
}

/// A part of a context's file that is mapped.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    pages: Range<usize>,
    is_writable: bool,
    offset: usize,
}

impl Mapping {
    /// Returns the offset of a page in the context's file.
    fn offset(&self, page: usize) -> i64 {
        (self.offset + (page - self.pages.start)) as i64
    }

    fn has_only_doorbells(&self) -> bool {
        let mut pages = self.pages.clone().step_by(page_size());
        pages.all(|page| Embedded::is_doorbell_page(self.offset(page)))
    }

    /// Returns the flag of a page in its entry of the table.
    fn kind(&self, page: usize) -> usize {
        match Embedded::is_allocated_uar(self.offset(page)) {
            true => ALLOCATED,
            false => 0,
        }
    }
}

/// Returns the mapping of a line of a memory map, if it is one of a context's file.
fn registers(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let rights = words.next()?;
    let offset = number(words.next()?)?;
    let name = words.nth(2)?;
    (name == "/memfd:ringverbs-registers").then_some(Mapping {
        pages: number(start)?..number(end)?,
        is_writable: rights.contains('w'),
        offset,
    })
}

/// The guard of all devices of the process.
pub(crate) struct Guard;

impl DoorbellGuard for Guard {
    fn protect(&self) -> bool {
        if INCOMPLETE.load(Ordering::Relaxed) || is_traced_now() {
            return false;
        }
        let _lock = Lock::take();
        if !knows_all_pages() {
            return false;
        }
        for slot in pages() {
            let entry = slot.load(Ordering::Relaxed);
            // Marked first: see `unprotect`.
            let order = Ordering::AcqRel;
            if entry & WRITABLE != 0 {
                let page = entry & !FLAGS;
                let marked = slot.compare_exchange(entry, entry ^ STATE, order, Ordering::Relaxed);
                if marked.is_ok() && !set_writable(page, false) {
                    slot.store(entry, Ordering::Release);
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_map_names_registers() {
        let line = "7fc66754e000-7fc667550000 -w-s 00902000 00:01 1466    \
                    /memfd:ringverbs-registers (deleted)";
        let found = registers(line).unwrap();
        assert_eq!(found.pages, 0x7fc6_6754_e000..0x7fc6_6755_0000);
        assert!(found.is_writable && found.offset == 0x90_2000);
        let protected = registers(&line.replace("-w-s", "r--s")).unwrap();
        assert!(!protected.is_writable);
        for other in [
            line.replace("registers", "frames"),
            line.replace("7fc667550000", "z"),
            line.replace('-', ""),
            "7fc657eff000-7fc658000000 rw-p 00000000 00:00 0".to_owned(),
            String::new(),
        ] {
            assert_eq!(registers(&other), None, "{other}");
        }
    }
}
