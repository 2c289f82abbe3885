//! What devices are about to write.
//!
//! A device tells what it writes before it does. A buffer that is posted in between is not yet
//! watched when it tells, and changes later. The last write of each thread that drives a device is
//! kept; it has ended when the device's lock was free, or that thread posts.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::watched::now;

/// The last write of a thread.
struct Write {
    /// When it was told, [`ENDED`] or [`CHANGING`].
    at: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

const ENDED: u64 = 0;
const CHANGING: u64 = u64::MAX;

/// By a number of the thread modulo their number: few threads drive devices.
static WRITES: [Write; 64] = [const {
    Write {
        at: AtomicU64::new(ENDED),
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
    }
}; 64];

/// Number of threads that have one.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Number of this thread.
    static THREAD: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Notes that this thread is about to write to a range for a device.
pub(super) fn begin(range: Range<u64>) {
    let number = THREAD.get().unwrap_or_else(|| {
        let number = THREADS.fetch_add(1, Ordering::SeqCst);
        THREAD.set(Some(number));
        number
    });
    let write = &WRITES[number % WRITES.len()];
    write.at.store(CHANGING, Ordering::SeqCst);
    write.start.store(range.start, Ordering::SeqCst);
    write.end.store(range.end, Ordering::SeqCst);
    // Before the device looks for buffers that are watched: it finds one, or who watches it finds
    // the write.
    write.at.store(now(), Ordering::SeqCst);
}

/// Writes of other threads that may not have ended.
pub(super) struct UnderWay(u64, Range<u64>);

/// Returns the writes to a range that may be under way.
pub(super) fn under_way(range: Range<u64>) -> Option<UnderWay> {
    let found = overlapping(&range).next().is_some();
    found.then(|| UnderWay(now(), range))
}

impl UnderWay {
    /// Notes that they have ended.
    pub(super) fn end(self) {
        let Self(until, range) = self;
        for (write, at) in overlapping(&range).filter(|(_, at)| *at < until) {
            let order = Ordering::SeqCst;
            let _ = write.at.compare_exchange(at, ENDED, order, order);
        }
    }
}

/// Returns the writes of other threads to a range, with their times.
fn overlapping(range: &Range<u64>) -> impl Iterator<Item = (&'static Write, u64)> {
    let own = THREAD.get().map(|number| number % WRITES.len());
    let count = THREADS.load(Ordering::SeqCst).min(WRITES.len());
    let others = WRITES[..count].iter().enumerate();
    let others = others.filter(move |(number, _)| Some(*number) != own);
    let range = range.clone();
    others.filter_map(move |(_, write)| {
        let at = write.at.load(Ordering::SeqCst);
        let start = write.start.load(Ordering::SeqCst);
        let end = write.end.load(Ordering::SeqCst);
        // If it has changed meanwhile, it may be any.
        let is_other = write.at.load(Ordering::SeqCst) != at || at == CHANGING;
        let overlaps = start < range.end && range.start < end;
        (at != ENDED && (is_other || overlaps)).then_some((write, at))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where no other test writes.
    const AT: u64 = 0x6000_0000_0000;

    #[test]
    fn writes_of_other_threads_may_be_under_way() {
        begin(AT..AT + 8);
        assert!(under_way(AT..AT + 8).is_none());
        let write = || begin(AT + 8..AT + 16);
        std::thread::spawn(write).join().unwrap();
        assert!(under_way(AT + 16..AT + 20).is_none());
        under_way(AT..AT + 9).unwrap().end();
        assert!(under_way(AT..AT + 9).is_none());
    }
}
