//! Queues by identifier.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::id::{MAX_QUEUES, QueueId};
use crate::{Error, Result};

/// Queues by their [`QueueId`]. A slot that becomes free is reused as late as
/// possible, with another generation.
#[derive(Debug)]
pub(crate) struct Registry<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    /// Slots that became free since [`Registry::take_freed`], each once.
    freed: Vec<u32>,
    /// How often the lock was taken.
    #[cfg(test)]
    locked: usize,
}

#[derive(Debug)]
struct Slot<T> {
    /// Of the queue in the slot, or the last one that was.
    id: QueueId,
    queue: Option<Arc<T>>,
    /// Whether the slot is in `freed`.
    is_listed: bool,
}

/// A slot whose queue was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreedSlot {
    pub index: u32,
    /// The queue that has the slot now.
    pub now: Option<QueueId>,
}

/// The result of looking up a queue.
#[derive(Debug)]
pub(crate) enum Lookup<T> {
    /// It exists.
    Live(Arc<T>),
    /// It was removed.
    Destroyed,
    /// There never was such a queue.
    Unknown,
}

impl<T> Registry<T> {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State {
                slots: Vec::new(),
                free: VecDeque::new(),
                freed: Vec::new(),
                #[cfg(test)]
                locked: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        #[cfg_attr(not(test), expect(unused_mut, reason = "tests count"))]
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        #[cfg(test)]
        {
            state.locked += 1;
        }
        state
    }

    /// How often the lock was taken before.
    #[cfg(test)]
    pub fn locked(&self) -> usize {
        self.lock().locked - 1
    }

    /// Adds a queue, which `make` creates with its identifier.
    pub fn insert(&self, make: impl FnOnce(QueueId) -> T) -> Result<Arc<T>> {
        let mut state = self.lock();
        let id = match state.free.front() {
            Some(&index) => state.slots[index as usize].id.successor(),
            None if state.slots.len() < MAX_QUEUES as usize => QueueId {
                index: state.slots.len() as u32,
                generation: 1,
            },
            None => {
                return Err(Error::Limit {
                    what: "queues on one completion queue",
                    asked: u64::from(MAX_QUEUES) + 1,
                    allowed: u64::from(MAX_QUEUES),
                });
            }
        };
        let queue = Arc::new(make(id));
        let there = Some(Arc::clone(&queue));
        if state.free.pop_front().is_some() {
            let slot = &mut state.slots[id.index as usize];
            slot.id = id;
            slot.queue = there;
        } else {
            state.slots.push(Slot {
                id,
                queue: there,
                is_listed: false,
            });
        }
        Ok(queue)
    }

    /// Removes a queue.
    pub fn remove(&self, id: QueueId) -> Option<Arc<T>> {
        let mut state = self.lock();
        let slot = state.slots.get_mut(id.index as usize)?;
        if slot.id != id {
            return None;
        }
        let queue = slot.queue.take()?;
        // Listed once: `take_freed` may never be called.
        let listed = std::mem::replace(&mut slot.is_listed, true);
        state.free.push_back(id.index);
        if !listed {
            state.freed.push(id.index);
        }
        Some(queue)
    }

    /// Replaces the contents of `freed` by the slots whose queues were removed
    /// since the last call.
    pub fn take_freed(&self, freed: &mut Vec<FreedSlot>) {
        let mut state = self.lock();
        let state = &mut *state;
        freed.clear();
        freed.extend(state.freed.drain(..).map(|index| {
            let slot = &mut state.slots[index as usize];
            slot.is_listed = false;
            FreedSlot {
                index,
                now: slot.queue.is_some().then_some(slot.id),
            }
        }));
    }

    /// Looks up a queue.
    pub fn find(&self, id: QueueId) -> Lookup<T> {
        let state = self.lock();
        match state.slots.get(id.index as usize) {
            Some(Slot {
                id: there,
                queue: Some(queue),
                ..
            }) if *there == id => Lookup::Live(Arc::clone(queue)),
            Some(slot) if id.precedes(slot.id) => Lookup::Destroyed,
            _ => Lookup::Unknown,
        }
    }

    /// Returns the number of queues.
    pub fn len(&self) -> usize {
        let state = self.lock();
        state.slots.len() - state.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_not_taken_for_its_successor() {
        let registry = Registry::new();
        let first = registry.insert(|id| id).unwrap();
        assert!(matches!(registry.find(*first), Lookup::Live(found) if found == first));
        assert!(registry.remove(*first).is_some());
        assert!(matches!(registry.find(*first), Lookup::Destroyed));
        let second = registry.insert(|id| id).unwrap();
        assert_eq!(second.index, first.index);
        assert_ne!(second.generation, first.generation);
        assert!(matches!(registry.find(*first), Lookup::Destroyed));
        assert!(registry.remove(*first).is_none());
        assert!(matches!(registry.find(*second), Lookup::Live(_)));
        assert_eq!(registry.len(), 1);
    }

    #[test]
    fn a_free_slot_is_listed_once() {
        let registry = Registry::new();
        let ids: Vec<_> = (0..3).map(|_| registry.insert(|id| id).unwrap()).collect();
        let mut left = Vec::new();
        registry.take_freed(&mut left);
        assert_eq!(left, []);
        registry.remove(*ids[2]);
        registry.remove(*ids[0]);
        // The place that was left first is the first to be used again.
        let mut last = registry.insert(|id| id).unwrap();
        for _ in 0..100 {
            registry.remove(*last);
            last = registry.insert(|id| id).unwrap();
        }
        registry.take_freed(&mut left);
        assert_eq!(left.len(), 2);
        for place in &left {
            let here = place.index == last.index;
            assert_eq!(place.now, here.then_some(*last));
            assert_ne!(place.index, 1);
        }
        registry.take_freed(&mut left);
        assert_eq!(left, []);
        registry.remove(*last);
        registry.take_freed(&mut left);
        let index = last.index;
        assert_eq!(left, [FreedSlot { index, now: None }]);
    }

    #[test]
    fn an_identifier_that_was_never_used_is_unknown() {
        let registry = Registry::new();
        let queue = registry.insert(|id| id).unwrap();
        let beyond = QueueId { index: 1, ..*queue };
        assert!(matches!(registry.find(beyond), Lookup::Unknown));
        assert!(matches!(registry.find(queue.successor()), Lookup::Unknown));
        let zero = QueueId {
            generation: 0,
            ..*queue
        };
        assert!(matches!(registry.find(zero), Lookup::Unknown));
    }
}
