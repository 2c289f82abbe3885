//! Buffers in flight, which the device marks before it writes to them.
//!
//! The device calls [`before_scatter`] for all data that it writes. A filter by page, which is
//! read without a lock, excludes nearly all of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::explain::lock;

/// Buffers in flight that have bytes in each page, modulo their number.
static PAGES: [AtomicU32; 4096] = [const { AtomicU32::new(0) }; 4096];
const LOG_PAGE: u32 = 12;

static BUFFERS: Mutex<Buffers> = Mutex::new(Buffers {
    ranges: BTreeMap::new(),
    longest: 0,
    next: 0,
});

/// The time of posts and of what arrives, which increases by one each.
static CLOCK: AtomicU64 = AtomicU64::new(1);
/// When data has last arrived at a queue pair, by its number modulo their number.
static ARRIVED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

struct Buffers {
    /// Exclusive end and mark of each, by its start and a number.
    ranges: BTreeMap<(u64, u64), (u64, Arc<AtomicBool>)>,
    /// Maximum length, since there were none.
    longest: u64,
    next: u64,
}

/// A buffer in flight.
#[derive(Debug)]
pub(super) struct Watched {
    start: u64,
    end: u64,
    number: u64,
    is_written: Arc<AtomicBool>,
}

/// Returns the counters of the pages of a range, each once.
fn pages(start: u64, end: u64) -> impl Iterator<Item = &'static AtomicU32> {
    let first = start >> LOG_PAGE;
    let count = (end.saturating_sub(1) >> LOG_PAGE).saturating_sub(first) + 1;
    (first..first + count.min(PAGES.len() as u64)).map(|page| &PAGES[page as usize % PAGES.len()])
}

impl Watched {
    /// Marks a range that the device writes to while the value exists.
    pub(super) fn new(start: u64, length: usize) -> Self {
        let end = start.saturating_add(length as u64);
        let is_written = Arc::<AtomicBool>::default();
        let mut buffers = lock(&BUFFERS);
        let number = buffers.next;
        buffers.next += 1;
        if buffers.ranges.is_empty() {
            buffers.longest = 0;
        }
        buffers.longest = buffers.longest.max(end - start);
        let mark = Arc::clone(&is_written);
        buffers.ranges.insert((start, number), (end, mark));
        drop(buffers);
        pages(start, end).for_each(|page| _ = page.fetch_add(1, Ordering::SeqCst));
        Self {
            start,
            end,
            number,
            is_written,
        }
    }

    /// Returns whether the device has written to it, or is about to.
    pub(super) fn is_written(&self) -> bool {
        self.is_written.load(Ordering::SeqCst)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        lock(&BUFFERS).ranges.remove(&(self.start, self.number));
        pages(self.start, self.end).for_each(|page| _ = page.fetch_sub(1, Ordering::SeqCst));
    }
}

/// Called before a device writes data of a queue pair.
pub(super) fn before_scatter(qpn: u32, address: u64, length: usize) {
    arrived(qpn);
    let end = address.saturating_add(length as u64);
    if pages(address, end).all(|page| page.load(Ordering::SeqCst) == 0) {
        return;
    }
    let buffers = lock(&BUFFERS);
    let first = address.saturating_sub(buffers.longest);
    for ((start, _), (its_end, is_written)) in buffers.ranges.range((first, 0)..(end, 0)) {
        if address < *its_end && *start < end {
            is_written.store(true, Ordering::SeqCst);
        }
    }
}

/// Returns the time, which no other call returns.
pub(super) fn now() -> u64 {
    CLOCK.fetch_add(1, Ordering::SeqCst)
}

/// Notes that something has arrived at a queue pair.
pub(super) fn arrived(qpn: u32) {
    ARRIVED[qpn as usize % ARRIVED.len()].store(now(), Ordering::SeqCst);
}

/// Returns whether something has arrived at a queue pair, or one with a similar number, since a
/// time.
pub(super) fn has_arrived(qpn: u32, since: u64) -> bool {
    ARRIVED[qpn as usize % ARRIVED.len()].load(Ordering::SeqCst) > since
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where no memory is: nothing is accessed.
    const AT: u64 = 0x7000_0000_0000;

    #[test]
    fn writes_mark_the_buffers_that_they_overlap() {
        let long = Watched::new(AT, 3 << LOG_PAGE);
        let short = Watched::new(AT + 100, 50);
        before_scatter(1, AT + 90, 10);
        assert!(long.is_written() && !short.is_written());
        before_scatter(1, AT + 149, 4000);
        assert!(short.is_written());
        let (before, after) = (Watched::new(AT - 8, 8), Watched::new(AT + 8, 8));
        before_scatter(1, AT, 8);
        assert!(!before.is_written() && !after.is_written());
    }

    #[test]
    fn what_arrives_has_a_time() {
        let since = now();
        assert!(!has_arrived(77, since));
        arrived(77);
        assert!(has_arrived(77, since) && !has_arrived(77, now()));
    }
}
