//! Doorbell pages of the program.
//!
//! A provider writes doorbells to mapped pages, and tells nobody. While the device's thread
//! sleeps, the pages are write-protected: the first doorbell is a fault, whose handler makes
//! the page writable and wakes the thread. A page that has never been written stays
//! protected, so that pages without queues cost nothing.

use std::hint;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use embedded::DoorbellGuard;

use crate::fault::page_size;
use crate::process;
use crate::real;

/// Maximum number of pages. With more, doorbells are looked for at intervals.
const MAX_PAGES: usize = 4096;
/// State of a page, in the low bits of its address. Free entries are 0.
const PROTECTED: usize = 1;
const WRITABLE: usize = 2;
const STATE: usize = PROTECTED | WRITABLE;
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
}

fn pages() -> &'static [AtomicUsize] {
    &PAGES[..END.load(Ordering::Acquire).min(MAX_PAGES)]
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

/// Adds a page that the program has mapped.
pub(crate) fn add(page: usize) {
    let _lock = Lock::take();
    let protected = !is_traced() && set_writable(page, false);
    let entry = page | if protected { PROTECTED } else { WRITABLE };
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
    let is_inside = |slot: &AtomicUsize| range.contains(&(slot.load(Ordering::Relaxed) & !STATE));
    if !pages().iter().any(is_inside) {
        return;
    }
    let _lock = Lock::take();
    for slot in pages().iter().filter(|slot| is_inside(slot)) {
        let entry = slot.swap(0, Ordering::AcqRel);
        if entry & PROTECTED != 0 {
            set_writable(entry & !STATE, true);
        }
    }
}

/// As [`remove`], if the pages stay mapped with other addresses or rights: their doorbells
/// are no longer noticed.
pub(crate) fn remove_mapped(range: &Range<usize>) {
    let page = |slot: &AtomicUsize| slot.load(Ordering::Relaxed) & !STATE;
    if pages().iter().any(|slot| range.contains(&page(slot))) {
        INCOMPLETE.store(true, Ordering::Relaxed);
        remove(range);
    }
}

/// Handles a fault: if the address is in a page of doorbells, makes the page writable, and
/// wakes the device's thread. Runs in a signal handler.
pub(crate) fn unprotect(address: usize) -> bool {
    let page = address & !(page_size() - 1);
    let is_page = |slot: &&AtomicUsize| slot.load(Ordering::Relaxed) & !STATE == page;
    let Some(slot) = pages().iter().find(is_page).filter(|_| page != 0) else {
        return false;
    };
    if !set_writable(page, true) {
        return false;
    }
    // Afterwards: a page that is marked protected is not protected again, so the thread,
    // which is woken below, would not notice later doorbells.
    let order = Ordering::AcqRel;
    let _ = slot.compare_exchange(page | PROTECTED, page | WRITABLE, order, Ordering::Relaxed);
    process::doorbell_rung();
    true
}

/// Returns whether a debugger would report each fault to its user.
fn is_traced() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let tracer = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|pid| pid.trim() != "0")
}

/// [`is_traced`], looked up at most every [`TRACER_INTERVAL`]. Without a lock, which a child of
/// fork could inherit.
fn is_traced_now() -> bool {
    static START: OnceLock<Instant> = OnceLock::new();
    /// When the last look was due, in intervals since the start, and what it has found.
    static LAST: AtomicU64 = AtomicU64::new(0);
    static TRACED: AtomicBool = AtomicBool::new(false);
    let elapsed = START.get_or_init(Instant::now).elapsed();
    let now = 1 + (elapsed.as_nanos() / TRACER_INTERVAL.as_nanos()) as u64;
    if LAST.swap(now, Ordering::Relaxed) != now {
        TRACED.store(is_traced(), Ordering::Relaxed);
    }
    TRACED.load(Ordering::Relaxed)
}

/// The guard of all devices of the process.
pub(crate) struct Guard;

impl DoorbellGuard for Guard {
    fn protect(&self) -> bool {
        if INCOMPLETE.load(Ordering::Relaxed) || is_traced_now() {
            return false;
        }
        let _lock = Lock::take();
        for slot in pages() {
            let entry = slot.load(Ordering::Relaxed);
            // Marked first: see `unprotect`.
            let order = Ordering::AcqRel;
            if entry & WRITABLE != 0 {
                let page = entry & !STATE;
                let marked =
                    slot.compare_exchange(entry, page | PROTECTED, order, Ordering::Relaxed);
                if marked.is_ok() && !set_writable(page, false) {
                    slot.store(entry, Ordering::Release);
                    return false;
                }
            }
        }
        true
    }
}
