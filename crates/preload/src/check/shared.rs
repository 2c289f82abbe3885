//! The receives of shared receive queues, whose completions the program has not polled.
//!
//! The device tells for which queue pair it is about to write, and where ([`before_scatter`]),
//! not for which receive: it is the first one that expects bytes there. Completions of a queue
//! pair come in the order of its messages. Where one contradicts what is known of its queue pair,
//! such as that of a message without data, that is forgotten: errors are missed then.
//!
//! A receive completes into the completion queue of the queue pair that takes it. One that has got
//! data has its entry there. Those that wait are counted if all queue pairs that have ever used
//! the queue have one completion queue for receives. The queue pairs of a program may get further
//! ones later, so that errors by that are kept until the end of the queue.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::completion_queue::{CompletionQueue, Entry, Waiting};
use super::completion_queue_too_small;
use super::receives::{Completed, Received};
use super::receiving::Receive;
use crate::explain::{Finding, Objects, Origin, lock};

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
/// The process that uses them: a child of fork has a copy.
static PROCESS: AtomicU32 = AtomicU32::new(0);

struct State {
    queues: BTreeMap<Key, Queue>,
    /// The queues of queue pairs whose messages are followed, by number; `None` if queue pairs of
    /// several devices have it.
    queue_pairs: BTreeMap<u32, Option<Follower>>,
}

/// A queue pair whose messages are followed.
struct Follower {
    key: Key,
    /// The completion queue of its receives, if it is known.
    completions: Option<Arc<CompletionQueue>>,
}

/// Where the receives of a queue complete.
#[derive(Default)]
enum Destination {
    /// No queue pair has used it.
    #[default]
    None,
    /// All that wait.
    One(Waiting),
    Unknown,
}

/// A shared receive queue.
#[derive(Default)]
struct Queue {
    /// Receives that have got no data, in their order.
    waiting: VecDeque<Shared>,
    /// Those that have, in the order of each queue pair.
    filled: BTreeMap<u32, VecDeque<Shared>>,
    /// Other queue pairs than reliable ones use it: messages are not followed.
    is_ignored: bool,
    destination: Destination,
    /// Number of the last of the waiting receives that are known to wait: others may have got
    /// messages without data, whose completions will not come.
    counted: usize,
    /// An error that is reported when it is destroyed.
    kept: Option<Finding>,
}

/// A receive.
struct Shared {
    received: Received,
    receive: Receive<Origin>,
}

impl Queue {
    /// Handles that other receives wait.
    fn count(&mut self) {
        self.counted = self.counted.min(self.waiting.len());
        if let Destination::One(waiting) = &mut self.destination {
            waiting.set(u32::try_from(self.counted).unwrap_or(u32::MAX));
        }
    }

    /// Removes a receive that waits.
    fn take(&mut self, at: usize) -> Option<Shared> {
        let is_counted = at >= self.waiting.len() - self.counted.min(self.waiting.len());
        self.counted -= usize::from(is_counted && at < self.waiting.len());
        let taken = self.waiting.remove(at);
        self.count();
        taken
    }

    /// Notes the completion queue of a queue pair that uses it, if it is known.
    fn use_with(&mut self, completions: Option<&Arc<CompletionQueue>>) {
        match (&self.destination, completions) {
            (Destination::None, Some(queue)) => {
                self.destination = Destination::One(Waiting::new(queue));
                self.count();
            }
            (Destination::One(waiting), Some(queue)) if Arc::ptr_eq(waiting.queue(), queue) => {}
            _ => self.destination = Destination::Unknown,
        }
    }

    /// Notes bytes that a queue pair is about to get.
    fn fill(
        &mut self,
        qpn: u32,
        bytes: &Range<u64>,
        completions: Option<&Arc<CompletionQueue>>,
    ) -> Option<&Received> {
        let mut is_new = false;
        let filled = self.filled.entry(qpn).or_default();
        if !filled.back().is_some_and(|it| it.receive.expects(bytes)) {
            let mut first = self.waiting.iter().take(MAX_SEARCHED);
            let found = first.position(|it| it.receive.expects(bytes));
            let mut found = found.and_then(|at| self.take(at))?;
            found.received.entry = completions.map(Entry::new);
            let filled = self.filled.entry(qpn).or_default();
            filled.push_back(found);
            is_new = true;
        }
        let mut current = self.filled.get_mut(&qpn)?.pop_back()?;
        current.receive.fill(bytes);
        let others = self.filled.values_mut().flat_map(|it| it.iter_mut().rev());
        for other in others.take(MAX_COMPARED) {
            let later = || current.received.origin.clone();
            other.receive.overwrite(bytes, later);
        }
        let filled = self.filled.entry(qpn).or_default();
        filled.push_back(current);
        filled.back().filter(|_| is_new).map(|it| &it.received)
    }

    /// Returns the error that was kept, if completions have been polled: otherwise the program
    /// may read the completion queue's memory itself.
    fn take_kept(&mut self) -> Option<Finding> {
        let Destination::One(waiting) = &self.destination else {
            return None;
        };
        self.kept.take().filter(|_| waiting.queue().is_polled())
    }

    /// Removes the receive of a queue pair's next completion.
    fn complete(&mut self, qpn: Option<u32>, wr_id: u64) -> Option<Shared> {
        if let Some((qpn, filled)) = qpn.and_then(|qpn| Some((qpn, self.filled.get_mut(&qpn)?))) {
            match filled.front() {
                Some(oldest) if oldest.received.wr_id == wr_id => return filled.pop_front(),
                _ => _ = self.filled.remove(&qpn),
            }
        }
        let mut waiting = self.waiting.iter();
        let Some(at) = waiting.position(|it| it.received.wr_id == wr_id) else {
            self.counted = 0;
            self.count();
            return None;
        };
        self.take(at)
    }
}

/// Handles a queue pair that will use a queue, with the completion queue of its receives if that
/// is known.
pub(super) fn used(key: Key, completions: Option<&Arc<CompletionQueue>>) {
    let mut state = lock(&STATE);
    state.queues.entry(key).or_default().use_with(completions);
    PROCESS.store(std::process::id(), Ordering::Relaxed);
}

/// Follows the messages of a reliable queue pair, with the completion queue of its receives.
pub(super) fn attach(qpn: u32, key: Key, completions: Option<Arc<CompletionQueue>>) {
    let mut state = lock(&STATE);
    let is_another = matches!(
        state.queue_pairs.get(&qpn),
        Some(known) if known.as_ref().is_none_or(|it| it.key.0 != key.0)
    );
    let follower = (!is_another).then_some(Follower { key, completions });
    state.queue_pairs.insert(qpn, follower);
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
    queue.is_ignored = true;
    queue.filled.clear();
    queue
        .waiting
        .iter_mut()
        .for_each(|it| it.received.unguard());
}

/// Handles a queue pair of a queue that may have taken receives of which no completion will tell.
pub(super) fn uncount(key: Key) {
    if let Some(queue) = lock(&STATE).queues.get_mut(&key) {
        queue.counted = 0;
        queue.count();
    }
}

/// Forgets a queue, which is destroyed. Returns the error that was kept.
pub(super) fn destroyed(key: Key) -> Option<Finding> {
    lock(&STATE).queues.remove(&key)?.take_kept()
}

/// Returns the errors that were kept of all queues, at the end of the process.
pub(super) fn ended() -> Vec<Finding> {
    // A thread of the parent may have had the lock at a fork.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return Vec::new();
    }
    let mut state = lock(&STATE);
    state
        .queues
        .values_mut()
        .filter_map(Queue::take_kept)
        .collect()
}

/// Handles receives that the provider has taken, the last of which was posted at a place.
pub(super) fn accepted(key: Key, origin: Origin) {
    let mut state = lock(&STATE);
    let Some(queue) = state.queues.get_mut(&key) else {
        return;
    };
    let Destination::One(waiting) = &queue.destination else {
        return;
    };
    let completions = waiting.queue();
    let excess = (completions.entries())
        .and_then(|entries| Some((entries, completions.excess_with_waiting(entries)?)));
    let Some((entries, all)) = excess.filter(|_| queue.kept.is_none()) else {
        return;
    };
    let message = format!(
        "shared receive queue: the completion queue of all its queue pairs has {entries} entries, \
         and {all} work requests are posted that complete into it"
    );
    let finding = completion_queue_too_small(key.0, None, completions, origin, message);
    queue.kept = Some(finding);
}

/// Keeps an error by receives that wait, and complete into this completion queue only.
pub(super) fn keep(completions: &Arc<CompletionQueue>, finding: Finding) {
    let mut state = lock(&STATE);
    let of = state.queues.values_mut().find(|queue| {
        matches!(&queue.destination, Destination::One(waiting)
            if Arc::ptr_eq(waiting.queue(), completions) && queue.counted != 0)
    });
    if let Some(queue) = of {
        queue.kept.get_or_insert(finding);
    }
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
    let count = receives.len();
    queue.waiting.extend(receives);
    if queue.is_ignored {
        let new = queue.waiting.iter_mut().rev().take(count);
        new.for_each(|it| it.received.unguard());
    }
    let excess = queue.waiting.len().saturating_sub(MAX_WAITING);
    queue.waiting.drain(..excess);
    queue.counted += count;
    queue.count();
    count
}

/// Removes the last receives, which were refused.
pub(super) fn take_back(key: Key, count: usize) {
    if let Some(queue) = lock(&STATE).queues.get_mut(&key) {
        let kept = queue.waiting.len().saturating_sub(count);
        queue.counted = queue.counted.saturating_sub(queue.waiting.len() - kept);
        queue.waiting.truncate(kept);
        queue.count();
    }
}

/// Removes the receive of a queue pair's next completion, which is polled.
pub(super) fn complete(key: Key, qpn: Option<u32>, wr_id: u64) -> Option<Completed> {
    let shared = {
        let mut state = lock(&STATE);
        let queue = state.queues.get_mut(&key)?;
        if let Destination::One(waiting) = &queue.destination {
            waiting.queue().note_polled();
        }
        queue.complete(qpn, wr_id)?
    };
    let overwritten = shared.receive.changed();
    Some(Completed {
        is_filled: shared.receive.is_filled(),
        freed: shared.receive.freed().cloned(),
        received: shared.received,
        overwritten: overwritten.map(|it| (it.address, it.by)),
    })
}

/// Notes that the program frees memory.
pub(super) fn freed(memory: &Range<u64>, freed: &Origin) {
    for queue in lock(&STATE).queues.values_mut() {
        let filled = queue.filled.values_mut().flatten();
        let all = queue.waiting.iter_mut().chain(filled);
        all.for_each(|it| it.receive.free(memory, freed));
    }
}

/// Returns a receive that a queue pair uses, or will, by the address of its first buffer.
pub(crate) fn find(qpn: u32, address: u64) -> Option<(u64, Origin)> {
    let state = lock(&STATE);
    let follower = state.queue_pairs.get(&qpn)?.as_ref()?;
    let queue = state.queues.get(&follower.key)?;
    let filled = queue.filled.get(&qpn).into_iter().flatten();
    let mut all = filled.chain(&queue.waiting);
    let found = all.find(|it| it.received.first_address() == Some(address))?;
    Some((found.received.wr_id, found.received.origin.clone()))
}

/// Handles a message whose completion may find no room: it has arrived, and no program can know
/// that its completion queue has been read since.
fn overrun((device, qpn): (usize, u32), completions: &CompletionQueue, filled: &Received) {
    let excess =
        (completions.entries()).and_then(|entries| Some((entries, completions.excess(entries)?)));
    let Some((entries, all)) = excess else {
        return;
    };
    let message = format!(
        "queue pair {qpn:#x}: its completion queue has {entries} entries, and {all} work requests \
         are posted that complete into it, or have got messages of it"
    );
    let posted = filled.origin.clone();
    let finding = completion_queue_too_small(device, None, completions, posted, message);
    completions.report_at_poll(finding);
}

/// Called before the device writes part of a message to a queue pair.
pub(super) fn before_scatter(qpn: u32, bytes: &Range<u64>) {
    if !IS_USED.load(Ordering::Relaxed) {
        return;
    }
    let State {
        queues,
        queue_pairs,
    } = &mut *lock(&STATE);
    let Some(Some(Follower { key, completions })) = queue_pairs.get(&qpn) else {
        return;
    };
    let queue = queues.get_mut(key).filter(|queue| !queue.is_ignored);
    let Some(filled) = queue.and_then(|it| it.fill(qpn, bytes, completions.as_ref())) else {
        return;
    };
    if let Some(completions) = completions {
        overrun((key.0, qpn), completions, filled);
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
            queue.counted += 1;
            queue.count();
        }

        fn message(&mut self, queue: &mut Queue, qpn: u32, byte: u8) {
            queue.fill(qpn, &self.range(), None);
            self.0.fill(byte);
        }
    }

    /// Returns whether the receive of a completion is known, and was overwritten.
    fn complete(queue: &mut Queue, qpn: u32, wr_id: u64) -> Option<bool> {
        let shared = queue.complete(Some(qpn), wr_id)?;
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
    fn receives_are_counted_that_wait_for_certain() {
        let completions = Arc::new(CompletionQueue::new(Origin::here(), (1, 0), false));
        let counted = || completions.excess_with_waiting(0);
        let (mut queue, mut memory) = (Queue::default(), Memory(vec![0; 64]));
        memory.post(&mut queue, 1);
        assert_eq!(counted(), None);
        queue.use_with(Some(&completions));
        assert_eq!(counted(), Some(1));
        // Others that wait may have been taken; one of them has.
        queue.counted = 0;
        memory.post(&mut queue, 2);
        memory.post(&mut queue, 3);
        assert_eq!(counted(), Some(2));
        assert_eq!(complete(&mut queue, 11, 1), Some(false));
        assert_eq!(counted(), Some(2));
        memory.post(&mut queue, 4);
        queue.counted = 1;
        assert_eq!(complete(&mut queue, 11, 4), Some(false));
        assert_eq!(counted(), None);
        // A completion of an unknown one.
        memory.post(&mut queue, 5);
        assert_eq!(counted(), Some(1));
        assert_eq!(complete(&mut queue, 11, 6), None);
        assert_eq!(counted(), None);
        memory.post(&mut queue, 7);
        assert_eq!(counted(), Some(1));
        let another = Arc::new(CompletionQueue::new(Origin::here(), (2, 0), false));
        queue.use_with(Some(&another));
        queue.use_with(Some(&completions));
        assert_eq!((counted(), another.excess_with_waiting(0)), (None, None));
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
