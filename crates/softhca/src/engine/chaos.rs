//! What a device with [`Chaos`] does late, and the counts that name its decisions.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use roce::packet::{Packet, Psn};

use crate::chaos::{Chaos, Choice, Decision, Kind};

/// Items that are due later. Those of one key stay in order.
#[derive(Debug)]
pub(crate) struct Late<K, T> {
    waiting: BTreeMap<K, VecDeque<(u64, T)>>,
}

impl<K, T> Default for Late<K, T> {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Copy, T> Late<K, T> {
    /// Returns when the last item of a key is due, if one waits.
    pub(crate) fn last_due(&self, key: K) -> Option<u64> {
        Some(self.waiting.get(&key)?.back()?.0)
    }

    /// Adds an item, after those of its key.
    pub(crate) fn push(&mut self, key: K, due: u64, item: T) {
        let due = self.last_due(key).map_or(due, |last| last.max(due));
        self.waiting.entry(key).or_default().push_back((due, item));
    }

    /// Removes the next item that is due: of those at one time, of the lowest key.
    pub(crate) fn pop(&mut self, now: u64) -> Option<(K, T)> {
        let fronts = self.waiting.iter();
        let fronts = fronts.filter_map(|(key, queue)| Some((queue.front()?.0, *key)));
        let (_, key) = fronts.filter(|(due, _)| *due <= now).min()?;
        let queue = self.waiting.get_mut(&key)?;
        let (_, item) = queue.pop_front()?;
        if queue.is_empty() {
            self.waiting.remove(&key);
        }
        Some((key, item))
    }

    /// Returns the last item of a key.
    pub(crate) fn last_mut(&mut self, key: K) -> Option<&mut T> {
        Some(&mut self.waiting.get_mut(&key)?.back_mut()?.1)
    }

    /// Changes when the items of a key are due.
    pub(crate) fn set_due(&mut self, key: K, due: u64) {
        for item in self.waiting.get_mut(&key).into_iter().flatten() {
            item.0 = due;
        }
    }

    /// Removes the items of keys.
    pub(crate) fn remove(&mut self, matches: impl Fn(&K) -> bool) {
        self.waiting.retain(|key, _| !matches(key));
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        let fronts = self.waiting.values();
        fronts.filter_map(|queue| Some(queue.front()?.0)).min()
    }
}

/// The queues of a queue pair that have an order of completions each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// A queue pair, as decisions name it.
#[derive(Debug, Default)]
struct QueuePair {
    /// Its number in the order of creation.
    order: u32,
    /// What was counted of it, by kind.
    counts: HashMap<Kind, u32>,
    /// The work request that was decided about last, and when it may be read.
    send: Option<(u32, u64)>,
    /// The next message takes a receive, since it was sent an RNR NAK.
    was_not_ready: bool,
}

/// A packet that waits to arrive.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) packet: Packet,
    /// An acknowledgement that a later one replaces.
    pub(crate) is_replaced: bool,
}

/// An RDMA write whose packets wait for its last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingWrite {
    pub(crate) first: Psn,
    pub(crate) next: Psn,
    pub(crate) rkey: u32,
    pub(crate) va: u64,
    /// Length of the whole message, and of its packets so far.
    pub(crate) length: u32,
    pub(crate) arrived: u32,
    pub(crate) choice: Choice,
}

/// The state of a device with [`Chaos`]. `C` is a completion.
#[derive(Debug)]
pub(crate) struct ChaosState<C> {
    chaos: Arc<Chaos>,
    device: u16,
    created: u32,
    queue_pairs: HashMap<u32, QueuePair>,
    /// Events of each completion queue.
    wake_up_counts: HashMap<u32, u32>,
    pub(crate) completions: Late<(u32, Side), C>,
    /// Queue pairs with work requests to read.
    pub(crate) sends: Late<u32, ()>,
    /// Completion queues with an event to post.
    pub(crate) wake_ups: Late<u32, ()>,
    /// Asynchronous events of queue pairs, by type.
    pub(crate) events: Late<u32, u8>,
    /// Packets to queue pairs.
    pub(crate) packets: Late<u32, Arrival>,
    pub(crate) writes: HashMap<u32, WaitingWrite>,
}

impl<C> ChaosState<C> {
    pub(crate) fn new(chaos: Arc<Chaos>, device: u16) -> Self {
        Self {
            chaos,
            device,
            created: 0,
            queue_pairs: HashMap::new(),
            wake_up_counts: HashMap::new(),
            completions: Late::default(),
            sends: Late::default(),
            wake_ups: Late::default(),
            events: Late::default(),
            packets: Late::default(),
            writes: HashMap::new(),
        }
    }

    /// Returns after how many freed numbers one is used again, if that is not usual.
    pub(crate) fn reuse_after(&self) -> Option<usize> {
        let choice = self.chaos.decide(Decision {
            kind: Kind::Number,
            device: self.device,
            queue: 0,
            index: 0,
        })?;
        Some(if choice.is_first() { 0 } else { usize::MAX })
    }

    /// Returns whether packets to a queue pair are decided about.
    pub(crate) fn has(&self, qpn: u32) -> bool {
        self.queue_pairs.contains_key(&qpn)
    }

    /// Returns whether a message that needs a receive is sent an RNR NAK: each at most once.
    pub(crate) fn is_not_ready(&mut self, qpn: u32) -> bool {
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else {
            return false;
        };
        if std::mem::take(&mut queue_pair.was_not_ready) {
            return false;
        }
        let is_not_ready = self.decide(Kind::NotReady, qpn).is_some();
        if let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) {
            queue_pair.was_not_ready = is_not_ready;
        }
        is_not_ready
    }

    /// Adds a queue pair.
    pub(crate) fn created(&mut self, qpn: u32) {
        let order = self.created;
        self.created += 1;
        let queue_pair = QueuePair {
            order,
            ..QueuePair::default()
        };
        self.queue_pairs.insert(qpn, queue_pair);
    }

    /// Drops what a queue pair has not done, when it is reset or destroyed.
    pub(crate) fn reset(&mut self, qpn: u32) {
        self.completions.remove(|key| key.0 == qpn);
        self.sends.remove(|key| *key == qpn);
        self.events.remove(|key| *key == qpn);
        self.packets.remove(|key| *key == qpn);
        self.writes.remove(&qpn);
        if let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) {
            queue_pair.send = None;
        }
    }

    /// Removes a queue pair.
    pub(crate) fn destroyed(&mut self, qpn: u32) {
        self.reset(qpn);
        self.queue_pairs.remove(&qpn);
    }

    /// Removes a completion queue.
    pub(crate) fn queue_destroyed(&mut self, cqn: u32) {
        self.wake_ups.remove(|key| *key == cqn);
        self.wake_up_counts.remove(&cqn);
    }

    /// Decides about the next thing of a kind of a queue pair.
    pub(crate) fn decide(&mut self, kind: Kind, qpn: u32) -> Option<Choice> {
        let queue_pair = self.queue_pairs.get_mut(&qpn)?;
        let count = queue_pair.counts.entry(kind).or_default();
        let index = *count;
        *count = count.wrapping_add(1);
        self.chaos.decide(Decision {
            kind,
            device: self.device,
            queue: queue_pair.order,
            index,
        })
    }

    /// Returns whether the work request of this number is to be read later.
    pub(crate) fn holds_send(&mut self, qpn: u32, number: u32, now: u64) -> bool {
        let decided = self.queue_pairs.get(&qpn).and_then(|it| it.send);
        if let Some((_, due)) = decided.filter(|(decided, _)| *decided == number) {
            return due > now;
        }
        let due = self.decide(Kind::Send, qpn).map_or(now, |it| it.due(now));
        if let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) {
            queue_pair.send = Some((number, due));
        }
        if due > now {
            self.sends.push(qpn, due, ());
        }
        due > now
    }

    /// Keeps a completion, if it or one before it in its queue is late; else returns it.
    pub(crate) fn hold_completion(
        &mut self,
        (qpn, side): (u32, Side),
        now: u64,
        completion: C,
    ) -> Option<C> {
        let waits = self.completions.last_due((qpn, side));
        let choice = self.decide(Kind::Completion, qpn);
        let due = choice.map(|it| it.due(now)).into_iter().chain(waits).max();
        let Some(due) = due else {
            return Some(completion);
        };
        self.completions.push((qpn, side), due, completion);
        None
    }

    /// Returns whether the event of a completion queue is kept.
    pub(crate) fn holds_wake_up(&mut self, cqn: u32, now: u64) -> bool {
        let count = self.wake_up_counts.entry(cqn).or_default();
        let index = *count;
        *count = count.wrapping_add(1);
        let choice = self.chaos.decide(Decision {
            kind: Kind::WakeUp,
            device: self.device,
            queue: cqn,
            index,
        });
        if let Some(choice) = choice {
            self.wake_ups.push(cqn, choice.due(now), ());
        }
        choice.is_some()
    }

    /// Returns whether an event of a queue pair is kept: it follows the completions that the
    /// queue pair has produced, and its earlier events.
    pub(crate) fn holds_event(&mut self, qpn: u32, kind: u8, now: u64) -> bool {
        let choice = self.decide(Kind::Event, qpn).map(|it| it.due(now));
        let completions = [Side::Send, Side::Receive];
        let completions = completions.map(|side| self.completions.last_due((qpn, side)));
        let before = completions.into_iter().chain([self.events.last_due(qpn)]);
        let due = before.chain([choice]).flatten().max();
        if let Some(due) = due {
            self.events.push(qpn, due, kind);
        }
        due.is_some()
    }

    /// Returns when something is due.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let all = [
            self.completions.deadline(),
            self.sends.deadline(),
            self.wake_ups.deadline(),
            self.events.deadline(),
            self.packets.deadline(),
        ];
        all.into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_items_of_a_key_stay_in_order() {
        let mut late = Late::default();
        late.push('b', 10, 1);
        late.push('b', 5, 2);
        late.push('a', 7, 3);
        assert_eq!(late.deadline(), Some(7));
        assert_eq!(late.pop(6), None);
        let order: Vec<_> = std::iter::from_fn(|| late.pop(10)).collect();
        assert_eq!(order, [('a', 3), ('b', 1), ('b', 2)]);
        late.push('a', 1, 4);
        late.remove(|key| *key == 'a');
        assert_eq!(late.deadline(), None);
    }

    #[test]
    fn completions_of_a_queue_stay_in_order() {
        for seed in 0..100 {
            let mut state = ChaosState::new(Arc::new(Chaos::new(seed)), 0);
            state.created(7);
            let mut found = Vec::new();
            for number in 0..200 {
                let now = number * 1000;
                while let Some((_, held)) = state.completions.pop(now) {
                    found.push(held);
                }
                found.extend(state.hold_completion((7, Side::Send), now, number));
            }
            while let Some((_, held)) = state.completions.pop(u64::MAX) {
                found.push(held);
            }
            assert!(found.iter().copied().eq(0..200), "{found:?}");
        }
    }

    #[test]
    fn a_send_is_decided_about_once() {
        let mut held = 0;
        for seed in 0..100 {
            let mut state = ChaosState::<()>::new(Arc::new(Chaos::new(seed)), 0);
            state.created(7);
            if state.holds_send(7, 0, 1) {
                held += 1;
                let due = state.sends.deadline().unwrap();
                assert!(due > 1 && state.holds_send(7, 0, due - 1));
                assert!(state.sends.pop(due).is_some() && !state.holds_send(7, 0, due));
            }
            // Not of a queue that is no queue pair.
            assert!(!state.holds_send(8, 0, 1));
        }
        assert!(held > 5, "{held}");
    }
}
