//! Messages that the device writes to the buffers of receives, in the order of a queue pair.
//!
//! The device tells which bytes it is about to write ([`before_scatter`]), not for which receive:
//! messages are taken to be as long as their receives. After shorter ones this module is behind
//! the device, never before it, until their completions are polled: it misses errors then.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;

use super::content::{Content, Fate};
use super::watched::Pages;
use crate::explain::{Origin, lock};

/// Maximum number of receives that are compared with one that gets a message.
const MAX_COMPARED: usize = 64;

/// Those of the buffers of receives.
static PAGES: Pages = Pages::new();

/// By number of the queue pair.
static QUEUES: Mutex<BTreeMap<u32, Queue>> = Mutex::new(BTreeMap::new());

/// The receives of a queue pair whose completions were not polled, in their order.
#[derive(Debug)]
struct Queue {
    /// `None` if queue pairs of several devices have the number.
    device: Option<usize>,
    /// Later ones are described by their number of receives after one.
    receives: VecDeque<Receive<usize>>,
    /// Index of the one that gets the next bytes, or whose message is complete.
    current: usize,
}

/// A receive, of a queue that describes later receives by `L`.
#[derive(Debug)]
pub(super) struct Receive<L> {
    /// Addresses of its buffers.
    buffers: Vec<Range<u64>>,
    /// Number of bytes that it has got.
    length: u64,
    /// Where later messages have come too, and the receive of the first of them.
    overwritten: Option<(L, Range<u64>)>,
    /// Copies of the bytes that it had received then, each with address and length.
    copies: Vec<(u64, usize, Content)>,
    /// Where the program has freed a buffer.
    freed: Option<Origin>,
}

impl<L> Drop for Receive<L> {
    fn drop(&mut self) {
        self.buffers.iter().for_each(|it| PAGES.remove(it));
    }
}

/// Bytes of a message that a later one has changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overwritten<L> {
    /// The first one that differs.
    pub(super) address: u64,
    /// The receive of the later one.
    pub(super) by: L,
}

impl<L: Clone> Receive<L> {
    pub(super) fn new(buffers: Vec<Range<u64>>) -> Self {
        buffers.iter().for_each(|it| PAGES.add(it));
        Self {
            buffers,
            length: 0,
            overwritten: None,
            copies: Vec::new(),
            freed: None,
        }
    }

    /// Notes that the program frees memory. Once a message has arrived there, it may know that.
    pub(super) fn free(&mut self, memory: &Range<u64>, freed: &Origin) {
        let is_there = self.buffers.iter().any(|it| !common(it, memory).is_empty());
        if is_there && !self.is_filled() {
            self.freed.get_or_insert_with(|| freed.clone());
        }
    }

    /// Returns where the program has freed a buffer.
    pub(super) fn freed(&self) -> Option<&Origin> {
        self.freed.as_ref()
    }

    /// Notes bytes that it [expects](Self::expects).
    pub(super) fn fill(&mut self, bytes: &Range<u64>) {
        self.length += bytes.end - bytes.start;
    }

    /// Returns whether it has got any bytes.
    pub(super) fn is_filled(&self) -> bool {
        self.length != 0
    }

    /// Returns the address of the next byte, and how many may follow it.
    fn next(&self) -> Option<Range<u64>> {
        let mut before = self.length;
        for buffer in &self.buffers {
            let length = buffer.end - buffer.start;
            if before < length {
                return Some(buffer.start + before..buffer.end);
            }
            before -= length;
        }
        None
    }

    /// Returns whether bytes can be its next ones.
    pub(super) fn expects(&self, bytes: &Range<u64>) -> bool {
        let next = self.next();
        next.is_some_and(|next| next.start == bytes.start && bytes.end <= next.end)
    }

    /// Returns the bytes that it has got, by buffers.
    fn received(&self) -> impl Iterator<Item = Range<u64>> {
        let mut rest = self.length;
        self.buffers.iter().map(move |buffer| {
            let length = (buffer.end - buffer.start).min(rest);
            rest -= length;
            buffer.start..buffer.start + length
        })
    }

    /// Notes that a later message, of another receive, comes to a range. Returns whether this one
    /// has got any bytes there.
    pub(super) fn overwrite(&mut self, range: &Range<u64>, by: impl FnOnce() -> L) -> bool {
        if !self.received().any(|it| !common(&it, range).is_empty()) {
            return false;
        }
        match &mut self.overwritten {
            Some((_, all)) => *all = all.start.min(range.start)..all.end.max(range.end),
            None => {
                let copies = self.received().filter_map(|it| {
                    let length = (it.end - it.start) as usize;
                    Some((it.start, length, Content::of(it.start, length)?))
                });
                self.copies = copies.collect();
                self.overwritten = Some((by(), range.clone()));
            }
        }
        true
    }

    /// Returns where later messages have changed bytes.
    pub(super) fn changed(&self) -> Option<Overwritten<L>> {
        let (by, range) = self.overwritten.as_ref()?;
        self.copies.iter().find_map(|(start, length, content)| {
            let common = common(&(*start..start + *length as u64), range);
            let offset = |address: u64| address.saturating_sub(*start) as usize;
            let part = offset(common.start)..offset(common.end);
            match content.compare_part(*start, part) {
                Fate::Changed(offset) => Some(Overwritten {
                    address: start + offset as u64,
                    by: by.clone(),
                }),
                _ => None,
            }
        })
    }
}

/// Returns what two ranges have in common.
fn common(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Adds a receive of a queue pair.
pub(super) fn push((device, qpn): (usize, u32), buffers: Vec<Range<u64>>) {
    let mut queues = lock(&QUEUES);
    let queue = queues.entry(qpn).or_insert_with(|| Queue {
        device: Some(device),
        receives: VecDeque::new(),
        current: 0,
    });
    if queue.device != Some(device) {
        queue.device = None;
        queue.receives.clear();
        return;
    }
    queue.receives.push_back(Receive::new(buffers));
}

/// Removes the oldest receive, whose completion is polled.
pub(super) fn pop(qpn: u32) -> Option<Receive<usize>> {
    let mut queues = lock(&QUEUES);
    let queue = queues.get_mut(&qpn)?;
    let oldest = queue.receives.pop_front()?;
    queue.current = queue.current.saturating_sub(1);
    Some(oldest)
}

/// Removes the last receives, which were refused.
pub(super) fn take_back(qpn: u32, count: usize) {
    if let Some(queue) = lock(&QUEUES).get_mut(&qpn) {
        let kept = queue.receives.len().saturating_sub(count);
        queue.receives.truncate(kept);
    }
}

/// Returns whether there may be a receive that has bytes in a range.
pub(super) fn may_be_posted(range: &Range<u64>) -> bool {
    PAGES.may_have(range)
}

/// Notes that the program frees memory.
pub(super) fn freed(memory: &Range<u64>, freed: &Origin) {
    for queue in lock(&QUEUES).values_mut() {
        (queue.receives.iter_mut()).for_each(|it| it.free(memory, freed));
    }
}

/// Forgets the receives of a queue pair.
pub(super) fn forget(qpn: u32) {
    lock(&QUEUES).remove(&qpn);
}

/// Called before the device writes part of a message to a queue pair.
pub(super) fn before_scatter(qpn: u32, bytes: Range<u64>) {
    let mut queues = lock(&QUEUES);
    let Some(queue) = queues.get_mut(&qpn) else {
        return;
    };
    let from = queue.current;
    let mut receives = queue.receives.iter().enumerate().skip(from);
    let expecting = receives.find(|(at, it)| {
        // The message of the current one may be complete.
        (*at == from || !it.is_filled()) && it.expects(&bytes)
    });
    let Some((current, _)) = expecting else {
        return;
    };
    queue.current = current;
    queue.receives[current].fill(&bytes);
    let earlier = queue.receives.range_mut(..current).enumerate().rev();
    for (at, receive) in earlier.take(MAX_COMPARED) {
        if receive.overwrite(&bytes, || current - at) {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Memory(Vec<u8>);

    impl Memory {
        fn range(&mut self, part: Range<u64>) -> Range<u64> {
            let at = self.0.as_mut_ptr().expose_provenance() as u64;
            at + part.start..at + part.end
        }

        fn message(&mut self, qpn: u32, part: Range<u64>, byte: u8) {
            before_scatter(qpn, self.range(part.clone()));
            self.0[part.start as usize..part.end as usize].fill(byte);
        }
    }

    fn pop(qpn: u32) -> Option<Overwritten<usize>> {
        super::pop(qpn)?.changed()
    }

    #[test]
    fn messages_that_change_what_was_not_polled_are_found() {
        let mut memory = Memory(vec![0; 256]);
        let qpn = 501;
        let key = (0, qpn);
        for _ in 0..3 {
            push(key, vec![memory.range(0..64)]);
        }
        push(key, vec![memory.range(128..192)]);
        // Polled in time; the same bytes.
        memory.message(qpn, 0..64, 1);
        assert_eq!(pop(qpn), None);
        memory.message(qpn, 0..64, 2);
        memory.message(qpn, 0..64, 2);
        assert_eq!(pop(qpn), None);
        memory.message(qpn, 128..192, 3);
        assert_eq!(pop(qpn), None);
        assert_eq!(pop(qpn), None);
        // A short message, then a longer one in two parts.
        let buffers = vec![memory.range(0..64), memory.range(100..120)];
        push(key, buffers.clone());
        push(key, vec![memory.range(160..168)]);
        push(key, buffers);
        memory.message(qpn, 0..60, 4);
        memory.message(qpn, 160..168, 5);
        memory.message(qpn, 0..64, 4);
        memory.0[30] = 5;
        memory.message(qpn, 100..120, 5);
        let address = memory.range(30..31).start;
        assert_eq!(pop(qpn), Some(Overwritten { address, by: 2 }));
        assert_eq!((pop(qpn), pop(qpn), pop(qpn)), (None, None, None));
        forget(qpn);
    }

    #[test]
    fn buffers_that_are_freed_before_their_message_are_found() {
        let mut memory = Memory(vec![0; 64]);
        let qpn = 503;
        push((0, qpn), vec![memory.range(0..8), memory.range(16..24)]);
        push((0, qpn), vec![memory.range(32..40)]);
        let here = Origin::here();
        freed(&memory.range(8..16), &here);
        memory.message(qpn, 0..8, 1);
        freed(&memory.range(0..64), &here);
        memory.message(qpn, 16..24, 1);
        memory.message(qpn, 32..40, 1);
        let is_freed = || super::pop(qpn).map(|it| it.freed().is_some());
        assert_eq!([is_freed(), is_freed()], [Some(false), Some(true)]);
        forget(qpn);
    }

    #[test]
    fn a_number_of_two_devices_is_not_followed() {
        let mut memory = Memory(vec![0; 8]);
        let qpn = 502;
        for device in [0, 1, 0] {
            push((device, qpn), vec![memory.range(0..8)]);
        }
        memory.message(qpn, 0..8, 1);
        memory.message(qpn, 0..8, 2);
        assert_eq!(pop(qpn), None);
        forget(qpn);
    }
}
