//! Queues by number.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::id::{MAX_QUEUES, QueueId};
use crate::{Error, Result};

/// Queues by their [`QueueId`]. A place that becomes free is used again as late
/// as possible, with another generation.
#[derive(Debug)]
pub(crate) struct Registry<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    places: Vec<Place<T>>,
    free: VecDeque<u32>,
    /// Places that queues have left since this was asked last, each once.
    left: Vec<u32>,
    /// How often the lock was taken.
    #[cfg(test)]
    locked: usize,
}

#[derive(Debug)]
struct Place<T> {
    /// Of the queue that is there, or was last.
    id: QueueId,
    queue: Option<Arc<T>>,
    /// It is in the list of those that were left.
    is_left: bool,
}

/// A place that a queue has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub index: u32,
    /// The queue that has it since, if one has.
    pub now: Option<QueueId>,
}

/// What a number stands for.
#[derive(Debug)]
pub(crate) enum Found<T> {
    /// A queue.
    Live(Arc<T>),
    /// A queue that is gone.
    Gone,
    /// Nothing that ever was.
    Never,
}

impl<T> Registry<T> {
    pub fn new() -> Self {
        Self {
            state: Mutex::new(State {
                places: Vec::new(),
                free: VecDeque::new(),
                left: Vec::new(),
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

    /// Numbers a queue that is made knowing its number.
    pub fn insert(&self, make: impl FnOnce(QueueId) -> T) -> Result<Arc<T>> {
        let mut state = self.lock();
        let id = match state.free.front() {
            Some(&index) => state.places[index as usize].id.successor(),
            None if state.places.len() < MAX_QUEUES as usize => QueueId {
                index: state.places.len() as u32,
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
            let place = &mut state.places[id.index as usize];
            place.id = id;
            place.queue = there;
        } else {
            state.places.push(Place {
                id,
                queue: there,
                is_left: false,
            });
        }
        Ok(queue)
    }

    /// Takes a queue out. Its number is of one that is gone from now on.
    pub fn remove(&self, id: QueueId) -> Option<Arc<T>> {
        let mut state = self.lock();
        let place = state.places.get_mut(id.index as usize)?;
        if place.id != id {
            return None;
        }
        let queue = place.queue.take()?;
        // Listed once, however often: nobody may ever ask.
        let listed = std::mem::replace(&mut place.is_left, true);
        state.free.push_back(id.index);
        if !listed {
            state.left.push(id.index);
        }
        Some(queue)
    }

    /// Puts the places into `left` that queues have left since this was asked
    /// last.
    pub fn take_left(&self, left: &mut Vec<Left>) {
        let mut state = self.lock();
        let state = &mut *state;
        left.clear();
        left.extend(state.left.drain(..).map(|index| {
            let place = &mut state.places[index as usize];
            place.is_left = false;
            Left {
                index,
                now: place.queue.is_some().then_some(place.id),
            }
        }));
    }

    /// The queue of that number.
    pub fn find(&self, id: QueueId) -> Found<T> {
        let state = self.lock();
        match state.places.get(id.index as usize) {
            Some(Place {
                id: there,
                queue: Some(queue),
                ..
            }) if *there == id => Found::Live(Arc::clone(queue)),
            Some(place) if id.precedes(place.id) => Found::Gone,
            _ => Found::Never,
        }
    }

    /// Queues that are there now.
    pub fn len(&self) -> usize {
        let state = self.lock();
        state.places.len() - state.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_never_taken_for_its_successor() {
        let registry = Registry::new();
        let first = registry.insert(|id| id).unwrap();
        assert!(matches!(registry.find(*first), Found::Live(found) if found == first));
        assert!(registry.remove(*first).is_some());
        assert!(matches!(registry.find(*first), Found::Gone));
        let second = registry.insert(|id| id).unwrap();
        assert_eq!(second.index, first.index);
        assert_ne!(second.generation, first.generation);
        assert!(matches!(registry.find(*first), Found::Gone));
        assert!(registry.remove(*first).is_none());
        assert!(matches!(registry.find(*second), Found::Live(_)));
        assert_eq!(registry.len(), 1);
    }

    #[test]
    fn places_are_left_once_however_often_until_somebody_asks() {
        let registry = Registry::new();
        let ids: Vec<_> = (0..3).map(|_| registry.insert(|id| id).unwrap()).collect();
        let mut left = Vec::new();
        registry.take_left(&mut left);
        assert_eq!(left, []);
        registry.remove(*ids[2]);
        registry.remove(*ids[0]);
        // The place that was left first is the first to be used again.
        let mut last = registry.insert(|id| id).unwrap();
        for _ in 0..100 {
            registry.remove(*last);
            last = registry.insert(|id| id).unwrap();
        }
        registry.take_left(&mut left);
        assert_eq!(left.len(), 2);
        for place in &left {
            let here = place.index == last.index;
            assert_eq!(place.now, here.then_some(*last));
            assert_ne!(place.index, 1);
        }
        registry.take_left(&mut left);
        assert_eq!(left, []);
        registry.remove(*last);
        registry.take_left(&mut left);
        let index = last.index;
        assert_eq!(left, [Left { index, now: None }]);
    }

    #[test]
    fn what_was_never_given_out_is_nothing() {
        let registry = Registry::new();
        let queue = registry.insert(|id| id).unwrap();
        let beyond = QueueId { index: 1, ..*queue };
        assert!(matches!(registry.find(beyond), Found::Never));
        assert!(matches!(registry.find(queue.successor()), Found::Never));
        let zero = QueueId {
            generation: 0,
            ..*queue
        };
        assert!(matches!(registry.find(zero), Found::Never));
    }
}
