//! The receives of shared receive queues, whose completions the program has not polled.
//!
//! The device tells for which queue pair it is about to write, and where ([`before_scatter`]),
//! not for which receive: it is the first one that expects bytes there. Completions of a queue
//! pair come in the order of its messages. Where one contradicts what is known of its queue pair,
//! such as that of a message without data, that is forgotten: errors are missed then.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::receives::{Completed, Received};
use super::receiving::Receive;
use crate::explain::{Objects, Origin, lock};

/// Maximum number of receives of a queue, waiting ones of which the oldest are forgotten.
const MAX_WAITING: usize = 32768;
/// Maximum number of waiting receives among which that of a message is looked for.
const MAX_SEARCHED: usize = 1024;
/// Maximum number of receives that are compared with one that gets a message.
const MAX_COMPARED: usize = 256;

/// Device and handle of a shared receive queue.
pub(super) type Key = (usize, u32);

static STATE: Mutex<State> = Mutex::new(State {
    queues: BTreeMap::new(),
    queue_pairs: BTreeMap::new(),
});
/// There is any queue pair to follow.
static IS_USED: AtomicBool = AtomicBool::new(false);

struct State {
    queues: BTreeMap<Key, Queue>,
    /// The queues of queue pairs whose messages are followed, by number; `None` if queue pairs of
    /// several devices have it.
    queue_pairs: BTreeMap<u32, Option<Key>>,
}

/// A shared receive queue.
#[derive(Default)]
struct Queue {
    /// Receives that have got no data, in their order.
    waiting: VecDeque<Shared>,
    /// Those that have, in the order of each queue pair.
    filled: BTreeMap<u32, VecDeque<Shared>>,
    /// Other queue pairs than reliable ones use it: it is not followed.
    is_ignored: bool,
}

/// A receive.
struct Shared {
    received: Received,
    receive: Receive<Origin>,
}

impl Queue {
    /// Notes bytes that a queue pair is about to get.
    fn fill(&mut self, qpn: u32, bytes: &Range<u64>) {
        let filled = self.filled.entry(qpn).or_default();
        if !filled.back().is_some_and(|it| it.receive.expects(bytes)) {
            let mut first = self.waiting.iter().take(MAX_SEARCHED);
            let found = first.position(|it| it.receive.expects(bytes));
            let Some(found) = found.and_then(|at| self.waiting.remove(at)) else {
                return;
            };
            filled.push_back(found);
        }
        let Some(mut current) = filled.pop_back() else {
            return;
        };
        current.receive.fill(bytes);
        let others = self.filled.values_mut().flat_map(|it| it.iter_mut().rev());
        for other in others.take(MAX_COMPARED) {
            let later = || current.received.origin.clone();
            other.receive.overwrite(bytes, later);
        }
        self.filled.entry(qpn).or_default().push_back(current);
    }

    /// Removes the receive of a queue pair's next completion.
    fn complete(&mut self, qpn: u32, wr_id: u64) -> Option<Shared> {
        if let Some(filled) = self.filled.get_mut(&qpn) {
            match filled.front() {
                Some(oldest) if oldest.received.wr_id == wr_id => return filled.pop_front(),
                _ => _ = self.filled.remove(&qpn),
            }
        }
        let mut waiting = self.waiting.iter();
        let at = waiting.position(|it| it.received.wr_id == wr_id)?;
        self.waiting.remove(at)
    }
}

/// Follows the messages of a reliable queue pair.
pub(super) fn attach(qpn: u32, key: Key) {
    let mut state = lock(&STATE);
    let known = state.queue_pairs.entry(qpn).or_insert(Some(key));
    if known.is_some_and(|(device, _)| device == key.0) {
        *known = Some(key);
    } else {
        *known = None;
    }
    IS_USED.store(true, Ordering::Relaxed);
}

/// Ignores the messages of a queue pair, which has a queue or not.
pub(super) fn detach(qpn: u32, key: Key) {
    let mut state = lock(&STATE);
    if state.queue_pairs.get(&qpn).is_some_and(Option::is_some) {
        state.queue_pairs.remove(&qpn);
    }
    if let Some(queue) = state.queues.get_mut(&key) {
        queue.filled.remove(&qpn);
    }
}

/// Ignores a queue that other queue pairs than reliable ones use.
pub(super) fn ignore(key: Key) {
    let mut state = lock(&STATE);
    let queue = state.queues.entry(key).or_default();
    *queue = Queue {
        is_ignored: true,
        ..Queue::default()
    };
}

/// Forgets a queue, which is destroyed.
pub(super) fn destroyed(key: Key) {
    lock(&STATE).queues.remove(&key);
}

/// Adds receives. Returns how many.
pub(super) fn push(
    key: Key,
    receives: impl IntoIterator<Item = Received>,
    objects: &Objects,
) -> usize {
    let receives = receives.into_iter().map(|mut received| Shared {
        receive: Receive::new(received.locate(key.0, objects)),
        received,
    });
    let receives = Vec::from_iter(receives);
    let mut state = lock(&STATE);
    let queue = state.queues.entry(key).or_default();
    if queue.is_ignored {
        return 0;
    }
    let count = receives.len();
    queue.waiting.extend(receives);
    let excess = queue.waiting.len().saturating_sub(MAX_WAITING);
    queue.waiting.drain(..excess);
    count
}

/// Removes the last receives, which were refused.
pub(super) fn take_back(key: Key, count: usize) {
    if let Some(queue) = lock(&STATE).queues.get_mut(&key) {
        let kept = queue.waiting.len().saturating_sub(count);
        queue.waiting.truncate(kept);
    }
}

/// Removes the receive of a queue pair's next completion, which is polled.
pub(super) fn complete(key: Key, qpn: u32, wr_id: u64) -> Option<Completed> {
    let shared = lock(&STATE).queues.get_mut(&key)?.complete(qpn, wr_id)?;
    let overwritten = shared.receive.changed();
    Some(Completed {
        is_filled: shared.receive.is_filled(),
        received: shared.received,
        overwritten: overwritten.map(|it| (it.address, it.by)),
    })
}

/// Returns a receive that a queue pair uses, or will, by the address of its first buffer.
pub(crate) fn find(qpn: u32, address: u64) -> Option<(u64, Origin)> {
    let state = lock(&STATE);
    let queue = state.queues.get(&(*state.queue_pairs.get(&qpn)?)?)?;
    let filled = queue.filled.get(&qpn).into_iter().flatten();
    let mut all = filled.chain(&queue.waiting);
    let found = all.find(|it| it.received.first_address() == Some(address))?;
    Some((found.received.wr_id, found.received.origin.clone()))
}

/// Called before the device writes part of a message to a queue pair.
pub(super) fn before_scatter(qpn: u32, bytes: &Range<u64>) {
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let mut state = lock(&STATE);
    let Some(Some(key)) = state.queue_pairs.get(&qpn).copied() else {
        return;
    };
    if let Some(queue) = state.queues.get_mut(&key) {
        queue.fill(qpn, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Memory(Vec<u8>);

    impl Memory {
        fn range(&mut self) -> Range<u64> {
            let at = self.0.as_mut_ptr().expose_provenance() as u64;
            at..at + self.0.len() as u64
        }

        /// Adds a receive of all of it.
        fn post(&mut self, queue: &mut Queue, wr_id: u64) {
            let received = Received::new(wr_id, Vec::new(), Origin::here());
            let receive = Receive::new(vec![self.range()]);
            queue.waiting.push_back(Shared { received, receive });
        }

        fn message(&mut self, queue: &mut Queue, qpn: u32, byte: u8) {
            queue.fill(qpn, &self.range());
            self.0.fill(byte);
        }
    }

    /// Returns whether the receive of a completion is known, and was overwritten.
    fn complete(queue: &mut Queue, qpn: u32, wr_id: u64) -> Option<bool> {
        let shared = queue.complete(qpn, wr_id)?;
        Some(shared.receive.changed().is_some())
    }

    #[test]
    fn messages_of_two_queue_pairs_that_change_each_other_are_found() {
        let (mut queue, mut memory) = (Queue::default(), Memory(vec![0; 64]));
        let mut other = Memory(vec![0; 64]);
        for wr_id in 1..=3 {
            memory.post(&mut queue, wr_id);
        }
        other.post(&mut queue, 4);
        memory.message(&mut queue, 11, 1);
        other.message(&mut queue, 12, 1);
        memory.message(&mut queue, 12, 2);
        assert_eq!(complete(&mut queue, 11, 1), Some(true));
        assert_eq!(complete(&mut queue, 12, 4), Some(false));
        // In time.
        assert_eq!(complete(&mut queue, 12, 2), Some(false));
        memory.message(&mut queue, 12, 3);
        assert_eq!(complete(&mut queue, 12, 3), Some(false));
        assert!(queue.waiting.is_empty());
    }

    #[test]
    fn what_a_completion_contradicts_is_forgotten() {
        let (mut queue, mut memory) = (Queue::default(), Memory(vec![0; 64]));
        memory.post(&mut queue, 1);
        memory.post(&mut queue, 2);
        // The first one has got a message without data, by another queue pair.
        memory.message(&mut queue, 11, 1);
        assert_eq!(complete(&mut queue, 11, 2), Some(false));
        assert_eq!(complete(&mut queue, 12, 1), None);
        // The same again: nothing is left of the former message.
        memory.post(&mut queue, 1);
        memory.message(&mut queue, 11, 2);
        assert_eq!(complete(&mut queue, 11, 1), Some(false));
    }
}
