//! Buffers in flight, and what the device does with them.
//!
//! The device calls [`before_gather`] for all data that it reads, and [`before_scatter`] for all
//! that it writes. A filter by page, which is read without a lock, excludes nearly all of it.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::content::{Content, Fate};
use super::ranges::{Key, Ranges};
use super::receiving;
use super::shared;
use super::writes;
use crate::explain::{Origin, lock};
use crate::process;

/// How many buffers have bytes in each page, modulo their number.
pub(super) struct Pages([AtomicU32; 4096]);

const LOG_PAGE: u32 = 12;

impl Pages {
    pub(super) const fn new() -> Self {
        Self([const { AtomicU32::new(0) }; 4096])
    }

    /// Returns the counters of the pages of a range, each once.
    fn of(&self, range: &Range<u64>) -> impl Iterator<Item = &AtomicU32> {
        let first = range.start >> LOG_PAGE;
        let last = range.end.saturating_sub(1) >> LOG_PAGE;
        let count = (last.saturating_sub(first) + 1).min(self.0.len() as u64);
        (first..first + count).map(|page| &self.0[page as usize % self.0.len()])
    }

    pub(super) fn add(&self, range: &Range<u64>) {
        self.of(range)
            .for_each(|page| _ = page.fetch_add(1, Ordering::SeqCst));
    }

    pub(super) fn remove(&self, range: &Range<u64>) {
        self.of(range)
            .for_each(|page| _ = page.fetch_sub(1, Ordering::SeqCst));
    }

    /// Returns whether there may be a buffer that has bytes in a range.
    pub(super) fn may_have(&self, range: &Range<u64>) -> bool {
        self.of(range).any(|page| page.load(Ordering::SeqCst) != 0)
    }
}

/// Those of buffers in flight.
static PAGES: Pages = Pages::new();

static BUFFERS: Mutex<Ranges<Arc<Buffer>>> = Mutex::new(Ranges::new());

/// The time of posts and of what arrives, which increases by one each.
static CLOCK: AtomicU64 = AtomicU64::new(1);
/// When data has last arrived at a queue pair, by its number modulo their number.
static ARRIVED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
/// When a peer's message or write has last arrived at any queue pair.
static MESSAGE: AtomicU64 = AtomicU64::new(0);

impl Ranges<Arc<Buffer>> {
    /// Returns those of a queue pair and a use that an access to a range may be of. Work requests
    /// are carried out in their order.
    fn own(&self, (qpn, usage): (u32, Use), start: u64, end: u64) -> Own<'_> {
        let mut own = Own::default();
        let is_before = |buffer: &Buffer, other: Option<&Buffer>| {
            other.is_none_or(|other| buffer.at < other.at)
        };
        for buffer in self.overlapping(start..end) {
            if buffer.qpn != qpn || buffer.usage != usage {
                continue;
            }
            if is_before(buffer, own.oldest) {
                own.oldest = Some(buffer);
            }
            let accessed = buffer.accessed.load(Ordering::SeqCst);
            if buffer.part(start, end).start >= accessed && is_before(buffer, own.next) {
                own.next = Some(buffer);
            }
        }
        own
    }
}

/// Buffers of a queue pair that have bytes in a range.
#[derive(Default)]
struct Own<'a> {
    oldest: Option<&'a Buffer>,
    /// The oldest of which the range was not accessed.
    next: Option<&'a Buffer>,
}

/// What a work request does with its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The device reads it.
    Gather,
    /// The device writes the answer to a read or an atomic to it.
    Answer,
}

/// A buffer in flight, for both sides.
#[derive(Debug)]
struct Buffer {
    start: u64,
    end: u64,
    qpn: u32,
    usage: Use,
    /// When it was posted.
    at: u64,
    /// Its bytes then.
    content: OnceLock<Content>,
    /// The device has written to it, or is about to; not the answer to its work request.
    is_written: AtomicBool,
    /// End of the bytes that the device has accessed, from the start.
    accessed: AtomicUsize,
    /// Offset of a byte that had changed when the device accessed it, or [`NO_CHANGE`].
    changed: AtomicUsize,
    /// The queue pair that has written the answer to a read to it meanwhile; 0 if none.
    overlaps: AtomicU32,
    /// The queue pair that has received a message or a write there before the device has read it;
    /// 0 if none, [`OTHERS`] if the device has written something else to it, too.
    overtaken: AtomicU32,
    /// The same, once what the device reads differs from what was posted; 0 before.
    overtaken_by: AtomicU32,
    /// Where the program has freed it.
    freed: OnceLock<Origin>,
}

const NO_CHANGE: usize = usize::MAX;
const OTHERS: u32 = u32::MAX;
/// Longest writes of a peer that may be meant to change what is being sent: counters and flags.
const LONGEST_FLAG: usize = 8;

impl Buffer {
    /// Returns the part of a range of addresses.
    fn part(&self, start: u64, end: u64) -> Range<usize> {
        let offset = |address: u64| address.saturating_sub(self.start) as usize;
        offset(start)..offset(end.min(self.end))
    }

    /// Looks for a change in a part that the device is about to access for its work request.
    fn compare(&self, part: Range<usize>) {
        let accessed = self.accessed.fetch_max(part.end, Ordering::SeqCst);
        let is_written = || self.is_written.load(Ordering::SeqCst);
        let compared = || {
            let content = self.content.get();
            content.map(|it| it.compare_part(self.start, part.clone()))
        };
        if is_written() {
            let writer = self.overtaken.load(Ordering::SeqCst);
            let may_differ = ![0, OTHERS].contains(&writer) && part.start >= accessed;
            if may_differ && matches!(compared(), Some(Fate::Changed(_))) {
                self.overtaken_by.store(writer, Ordering::SeqCst);
            }
            return;
        }
        // What was accessed before may be accessed again although the peer has it, and the
        // program knows that. An answer is written once.
        if part.start < accessed && (self.usage == Use::Answer || has_arrived(self.qpn, self.at)) {
            return;
        }
        if let Some(Fate::Changed(offset)) = compared() {
            // After the comparison: the device marks a buffer before it writes to it.
            if !is_written() {
                self.changed.fetch_min(offset, Ordering::SeqCst);
            }
        }
    }

    /// Notes that a message or a peer's write is about to arrive in a range.
    fn overtake(&self, qpn: u32, start: u64, end: u64) {
        let part = self.part(start, end);
        if self.usage == Use::Gather && part.start >= self.accessed.load(Ordering::SeqCst) {
            self.overtaken.fetch_max(qpn, Ordering::SeqCst);
        }
    }
}

/// A buffer in flight, or one that was.
#[derive(Clone, Debug)]
pub(super) struct Local(Arc<Buffer>);

impl Local {
    pub(super) fn start(&self) -> u64 {
        self.0.start
    }

    pub(super) fn length(&self) -> usize {
        (self.0.end - self.0.start) as usize
    }

    /// Returns the end of the bytes that the device has accessed.
    pub(super) fn accessed(&self) -> usize {
        self.0.accessed.load(Ordering::SeqCst)
    }

    /// Returns bytes as they were posted, if there is a copy.
    pub(super) fn posted(&self, part: Range<usize>) -> Option<&[u8]> {
        self.0.content.get()?.copied(part)
    }
}

/// A buffer in flight, while it exists.
#[derive(Debug)]
pub(super) struct Watched {
    key: Key,
    buffer: Arc<Buffer>,
}

impl Watched {
    /// Watches a range that a work request of a queue pair, posted at a time, uses.
    pub(super) fn new((qpn, at): (u32, u64), usage: Use, start: u64, length: usize) -> Self {
        let end = start.saturating_add(length as u64);
        let buffer = Arc::new(Buffer {
            start,
            end,
            qpn,
            usage,
            at,
            content: OnceLock::new(),
            is_written: AtomicBool::new(false),
            accessed: AtomicUsize::new(0),
            changed: AtomicUsize::new(NO_CHANGE),
            overlaps: AtomicU32::new(0),
            overtaken: AtomicU32::new(0),
            overtaken_by: AtomicU32::new(0),
            freed: OnceLock::new(),
        });
        let key = lock(&BUFFERS).insert(start..end, Arc::clone(&buffer));
        PAGES.add(&(start..end));
        Self { key, buffer }
    }

    /// Waits until what devices were about to write when it was not watched yet is written.
    pub(super) fn settle(&self) {
        let Buffer { start, end, .. } = *self.buffer;
        let Some(writes) = writes::under_way(start..end) else {
            return;
        };
        match process::settle() {
            true => writes.end(),
            // Its bytes may change at any time.
            false => self.buffer.is_written.store(true, Ordering::SeqCst),
        }
    }

    /// Sets the bytes, which were read since it is watched.
    pub(super) fn set_content(&self, content: Content) {
        let _ = self.buffer.content.set(content);
    }

    pub(super) fn content(&self) -> Option<&Content> {
        self.buffer.content.get()
    }

    pub(super) fn usage(&self) -> Use {
        self.buffer.usage
    }

    /// Returns whether the device has written to it, or is about to.
    pub(super) fn is_written(&self) -> bool {
        self.buffer.is_written.load(Ordering::SeqCst)
    }

    /// Returns where it had changed when the device accessed it.
    pub(super) fn changed(&self) -> Option<usize> {
        let offset = self.buffer.changed.load(Ordering::SeqCst);
        (offset != NO_CHANGE).then_some(offset)
    }

    /// Returns the queue pair that has written the answer to a read to it.
    pub(super) fn overlaps(&self) -> Option<u32> {
        let qpn = self.buffer.overlaps.load(Ordering::SeqCst);
        (qpn != 0).then_some(qpn)
    }

    /// Returns the queue pair that has received into it before the device has read it, if that
    /// has changed what it read.
    pub(super) fn overtaken_by(&self) -> Option<u32> {
        let qpn = self.buffer.overtaken_by.load(Ordering::SeqCst);
        (qpn != 0).then_some(qpn)
    }

    /// Returns where the program has freed it.
    pub(super) fn freed(&self) -> Option<&Origin> {
        self.buffer.freed.get()
    }

    pub(super) fn local(&self) -> Local {
        Local(Arc::clone(&self.buffer))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Buffer { start, end, .. } = *self.buffer;
        lock(&BUFFERS).remove(self.key);
        PAGES.remove(&(start..end));
    }
}

/// Returns whether there may be a buffer in flight that has bytes in a range.
pub(super) fn may_be_in_flight(range: &Range<u64>) -> bool {
    PAGES.may_have(range)
}

/// Notes that the program frees memory. What has arrived may have told it that the peer has the
/// data of a buffer there, or is the answer to its work request.
pub(super) fn freed(memory: &Range<u64>, freed: &Origin) {
    for buffer in lock(&BUFFERS).overlapping(memory.clone()) {
        if !has_arrived(buffer.qpn, buffer.at) {
            let _ = buffer.freed.set(freed.clone());
        }
    }
}

/// Called before a device reads data of a queue pair.
pub(super) fn before_gather(qpn: u32, address: u64, length: usize) {
    let end = address.saturating_add(length as u64);
    if length == 0 || !may_be_in_flight(&(address..end)) {
        return;
    }
    let buffers = lock(&BUFFERS);
    let own = buffers.own((qpn, Use::Gather), address, end);
    if let Some(buffer) = own.next.or(own.oldest) {
        buffer.compare(buffer.part(address, end));
    }
}

/// Called before a device writes data of a queue pair; of its peer's write or atomic if
/// `is_remote`.
pub(super) fn before_scatter(qpn: u32, address: u64, length: usize, is_remote: bool) {
    let end = address.saturating_add(length as u64);
    writes::begin(address..end);
    let last_message = MESSAGE.load(Ordering::SeqCst);
    let message_arrived = || {
        if !is_remote {
            shared::before_scatter(qpn, &(address..end));
            receiving::before_scatter(qpn, address..end);
        }
        arrived(qpn);
    };
    if length == 0 || !may_be_in_flight(&(address..end)) {
        return message_arrived();
    }
    let buffers = lock(&BUFFERS);
    let own = buffers.own((qpn, Use::Answer), address, end);
    if let Some(buffer) = own.next {
        buffer.compare(buffer.part(address, end));
    }
    let is_answer = own.oldest.is_some();
    match is_answer {
        true => ARRIVED[qpn as usize % ARRIVED.len()].store(now(), Ordering::SeqCst),
        false => message_arrived(),
    }
    for buffer in buffers.overlapping(address..end) {
        if own.next.is_some_and(|next| ptr::eq(next, &**buffer)) {
            continue;
        }
        buffer.is_written.store(true, Ordering::SeqCst);
        if is_answer || is_remote && length <= LONGEST_FLAG {
            buffer.overtaken.store(OTHERS, Ordering::SeqCst);
        } else {
            buffer.overtake(qpn, address, end);
        }
        // After a message the program may know that the peer has the data.
        if is_answer && buffer.qpn != qpn && last_message < buffer.at {
            buffer.overlaps.store(qpn, Ordering::SeqCst);
        }
    }
}

/// Returns the time, which no other call returns.
pub(super) fn now() -> u64 {
    CLOCK.fetch_add(1, Ordering::SeqCst)
}

/// Notes that a message has arrived at a queue pair.
pub(super) fn arrived(qpn: u32) {
    let now = now();
    ARRIVED[qpn as usize % ARRIVED.len()].store(now, Ordering::SeqCst);
    MESSAGE.store(now, Ordering::SeqCst);
}

/// Returns whether a peer's message or write has arrived since a time.
pub(super) fn has_message(since: u64) -> bool {
    MESSAGE.load(Ordering::SeqCst) > since
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

    fn watched(start: u64, length: usize) -> Watched {
        Watched::new((9, now()), Use::Gather, start, length)
    }

    #[test]
    fn writes_mark_the_buffers_that_they_overlap() {
        let long = watched(AT, 3 << LOG_PAGE);
        let short = watched(AT + 100, 50);
        before_scatter(1, AT + 90, 10, true);
        assert!(long.is_written() && !short.is_written());
        before_scatter(1, AT + 149, 4000, true);
        assert!(short.is_written());
        let (before, after) = (watched(AT - 8, 8), watched(AT + 8, 8));
        before_scatter(1, AT, 8, true);
        assert!(!before.is_written() && !after.is_written());
    }

    #[test]
    fn buffers_that_are_freed_before_something_arrives_are_found() {
        let (first, last) = (watched(AT + 100, 50), watched(AT + 149, 8));
        let here = Origin::here();
        freed(&(AT..AT + 100), &here);
        freed(&(AT + 157..AT + 200), &here);
        assert!(first.freed().is_none() && last.freed().is_none());
        freed(&(AT + 40..AT + 101), &here);
        assert!(first.freed().is_some() && last.freed().is_none());
        // Something has arrived at the queue pair.
        arrived(9);
        freed(&(AT..AT + 200), &here);
        assert!(last.freed().is_none());
        assert!(may_be_in_flight(&(AT + 156..AT + 157)));
        drop((first, last));
    }

    #[test]
    fn what_arrives_before_a_buffer_is_read_is_found() {
        let mut bytes = vec![1; 96];
        let by = |qpn, usage, bytes: &mut [u8], arrives: &dyn Fn(u64)| {
            let (watched, at) = with_bytes(qpn, usage, bytes);
            arrives(at);
            bytes[20] ^= 1;
            before_gather(qpn, at, 96);
            watched.overtaken_by()
        };
        let write = |at| before_scatter(601, at + 16, 16, true);
        assert_eq!(by(602, Use::Gather, &mut bytes, &write), Some(601));
        // Read before, a flag, and together with the answer to a read of its own.
        let late = |at| {
            before_gather(602, at, 96);
            before_scatter(601, at + 16, 16, true);
        };
        assert_eq!(by(602, Use::Gather, &mut bytes, &late), None);
        let flag = |at| before_scatter(601, at + 16, 8, true);
        assert_eq!(by(602, Use::Gather, &mut bytes, &flag), None);
        let answered = |at| {
            let _answer = Watched::new((602, now()), Use::Answer, at, 64);
            before_scatter(602, at, 64, true);
            before_scatter(601, at + 16, 16, true);
        };
        assert_eq!(by(602, Use::Gather, &mut bytes, &answered), None);
    }

    #[test]
    fn what_arrives_has_a_time() {
        let since = now();
        assert!(!has_arrived(77, since));
        arrived(77);
        assert!(has_arrived(77, since) && !has_arrived(77, now()));
    }

    /// Returns a buffer of a queue pair, with the address of its bytes.
    fn with_bytes(qpn: u32, usage: Use, bytes: &mut [u8]) -> (Watched, u64) {
        let at = bytes.as_mut_ptr().expose_provenance() as u64;
        let watched = Watched::new((qpn, now()), usage, at, bytes.len());
        watched.set_content(Content::of(at, bytes.len()).unwrap());
        (watched, at)
    }

    #[test]
    fn changes_before_an_access_are_found() {
        let mut bytes = vec![1; 3000];
        let (watched, at) = with_bytes(201, Use::Gather, &mut bytes);
        before_gather(201, at, 1000);
        bytes[1500] = 2;
        // Another queue pair, another part.
        before_gather(202, at, 3000);
        before_gather(201, at + 1000, 500);
        assert_eq!(watched.changed(), None);
        // Received meanwhile: the second reading of a part may differ.
        arrived(201);
        bytes[5] = 2;
        before_gather(201, at, 1000);
        assert_eq!(watched.changed(), None);
        before_gather(201, at + 1500, 1500);
        assert_eq!(watched.changed(), Some(1500));
    }

    #[test]
    fn a_range_is_compared_with_the_oldest_that_was_not_read() {
        let mut bytes = vec![1; 64];
        let (first, at) = with_bytes(401, Use::Gather, &mut bytes);
        let (second, _) = with_bytes(401, Use::Gather, &mut bytes);
        before_gather(401, at, 64);
        bytes[7] = 2;
        before_gather(401, at, 64);
        assert_eq!((first.changed(), second.changed()), (None, Some(7)));
        // Read again.
        before_gather(401, at, 64);
        assert_eq!(first.changed(), Some(7));
    }

    #[test]
    fn answers_overlap_sends_of_others() {
        let mut bytes = vec![1; 64];
        let (sent, at) = with_bytes(301, Use::Gather, &mut bytes);
        let (own, _) = with_bytes(302, Use::Gather, &mut bytes);
        let (answer, _) = with_bytes(302, Use::Answer, &mut bytes);
        before_scatter(302, at, 64, true);
        assert_eq!((own.overlaps(), answer.changed()), (None, None));
        // A message of another test may have arrived.
        assert!(sent.is_written() && matches!(sent.overlaps(), None | Some(302)));
        // The answer to the first of two is no change of the other.
        let (first, _) = with_bytes(304, Use::Answer, &mut bytes);
        let (second, _) = with_bytes(304, Use::Answer, &mut bytes);
        before_scatter(304, at, 64, true);
        bytes[3] = 2;
        before_scatter(304, at, 64, true);
        assert_eq!((first.changed(), second.changed()), (None, None));
        let (answer, _) = with_bytes(303, Use::Answer, &mut bytes);
        bytes[9] = 2;
        before_scatter(303, at, 64, true);
        assert_eq!(answer.changed(), Some(9));
    }
}
