//! The registry of queues.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::id::{MAX_QUEUES, QueueId};
use crate::{Error, Result};

/// Queues by [`QueueId`]. A free slot is reused as late as possible, with another
/// generation.
#[derive(Debug)]
pub(crate) struct Registry<T> {
    state: Mutex<RegistryState<T>>,
}

#[derive(Debug)]
struct RegistryState<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    /// Slots that became free since [`Registry::take_freed`], each once.
    freed: Vec<u32>,
    /// Number of times that the lock was taken.
    #[cfg(test)]
    locked: usize,
}

#[derive(Debug)]
struct Slot<T> {
    /// The identifier of the queue in the slot, or of the last queue.
    id: QueueId,
    queue: Option<Arc<T>>,
    /// Whether the slot is in `freed`.
    is_listed: bool,
}

/// A slot whose queue was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreedSlot {
    pub index: u32,
    /// The queue that occupies the slot now.
    pub current: Option<QueueId>,
}

/// The result of looking up a queue.
#[derive(Debug)]
pub(crate) enum Lookup<T> {
    /// The queue exists.
    Live(Arc<T>),
    /// The queue was removed.
    Destroyed,
    /// No queue has had this identifier.
    Unknown,
}

impl<T> Registry<T> {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(RegistryState {
                slots: Vec::new(),
                free: VecDeque::new(),
                freed: Vec::new(),
                #[cfg(test)]
                locked: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState<T>> {
        #[cfg_attr(not(test), expect(unused_mut, reason = "tests count"))]
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        #[cfg(test)]
        {
            state.locked += 1;
        }
        state
    }

    /// Returns the number of times that the lock was taken before.
    #[cfg(test)]
    pub fn locked(&self) -> usize {
        self.lock().locked - 1
    }

    /// Adds a queue, created by `make` with its identifier.
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
        // Each slot is listed once, because `take_freed` may never be called.
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
                current: slot.queue.is_some().then_some(slot.id),
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
    fn removed_queue_is_not_found_as_its_successor() {
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
    fn freed_slot_is_listed_once() {
        let registry = Registry::new();
        let ids: Vec<_> = (0..3).map(|_| registry.insert(|id| id).unwrap()).collect();
        let mut freed = Vec::new();
        registry.take_freed(&mut freed);
        assert_eq!(freed, []);
        registry.remove(*ids[2]);
        registry.remove(*ids[0]);
        // The slot that was freed first is reused first.
        let mut last = registry.insert(|id| id).unwrap();
        for _ in 0..100 {
            registry.remove(*last);
            last = registry.insert(|id| id).unwrap();
        }
        registry.take_freed(&mut freed);
        assert_eq!(freed.len(), 2);
        for slot in &freed {
            let is_last = slot.index == last.index;
            assert_eq!(slot.current, is_last.then_some(*last));
            assert_ne!(slot.index, 1);
        }
        registry.take_freed(&mut freed);
        assert_eq!(freed, []);
        registry.remove(*last);
        registry.take_freed(&mut freed);
        let index = last.index;
        assert_eq!(
            freed,
            [FreedSlot {
                index,
                current: None
            }]
        );
    }

    #[test]
    fn unused_identifier_is_unknown() {
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
