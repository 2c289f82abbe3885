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
}

#[derive(Debug)]
struct Place<T> {
    /// Of the queue that is there, or was last.
    id: QueueId,
    queue: Option<Arc<T>>,
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
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let place = Place {
            id,
            queue: Some(Arc::clone(&queue)),
        };
        if state.free.pop_front().is_some() {
            state.places[id.index as usize] = place;
        } else {
            state.places.push(place);
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
        state.free.push_back(id.index);
        Some(queue)
    }

    /// The queue of that number.
    pub fn find(&self, id: QueueId) -> Found<T> {
        let state = self.lock();
        match state.places.get(id.index as usize) {
            Some(Place {
                id: there,
                queue: Some(queue),
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
