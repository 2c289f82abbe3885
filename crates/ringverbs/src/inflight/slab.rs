//! Operations in flight on a shared receive queue, which complete in any order
//! and on several completion queues.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Posted;
use super::id::{QueueId, WorkId};

/// Bits of a place's number in the sequence number; the others count how often
/// the place was used, so that an identifier comes again with the 16th use after
/// its own. Nobody but a device that reports a receive twice tells it late, and
/// what that ends is a receive in flight: as if the device had named it too soon,
/// which no count can show.
const PLACE_BITS: u32 = 20;
const USE_MASK: u32 = 0xf;
/// Receives that a shared receive queue may have in flight.
pub(crate) const MAX_PLACES: u32 = 1 << PLACE_BITS;

/// The receives in flight on a shared receive queue. Several threads: it has a
/// lock.
#[derive(Debug)]
pub(crate) struct Slab {
    id: QueueId,
    prefix: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    places: Vec<Place>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place {
    uses: u32,
    posted: Option<Posted>,
}

impl Slab {
    /// For up to `capacity` receives.
    pub fn new(id: QueueId, capacity: u32) -> Self {
        let mut state = State {
            places: Vec::new(),
            free: Vec::new(),
        };
        state.grow(capacity);
        Self {
            id,
            prefix: id.prefix(true),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number in the context's registry.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Receives in flight.
    pub fn len(&self) -> u32 {
        let state = self.lock();
        (state.places.len() - state.free.len()) as u32
    }

    /// Makes room for `capacity` receives in all; never less than there was.
    pub fn grow(&self, capacity: u32) {
        self.lock().grow(capacity);
    }

    /// Takes a place, if one is free. It is in flight once it is filled.
    pub fn reserve(&self) -> Option<WorkId> {
        let mut state = self.lock();
        let place = state.free.pop()?;
        let uses = state.places[place as usize].uses & USE_MASK;
        Some(WorkId::new(self.prefix, uses << PLACE_BITS | place))
    }

    /// Gives a reserved place back.
    pub fn cancel(&self, work: WorkId) {
        let mut state = self.lock();
        state.free.push(work.sequence() & (MAX_PLACES - 1));
    }

    /// Puts a receive into a reserved place.
    pub fn fill(&self, work: WorkId, posted: Posted) {
        let mut state = self.lock();
        let place = work.sequence() & (MAX_PLACES - 1);
        state.places[place as usize].posted = Some(posted);
    }

    /// Takes the receive out that `work` names, if it is in flight.
    pub fn remove(&self, work: WorkId) -> Option<Posted> {
        let mut state = self.lock();
        let place = work.sequence() & (MAX_PLACES - 1);
        let uses = work.sequence() >> PLACE_BITS;
        let entry = state.places.get_mut(place as usize)?;
        if entry.uses & USE_MASK != uses {
            return None;
        }
        let posted = entry.posted.take()?;
        entry.uses = entry.uses.wrapping_add(1);
        state.free.push(place);
        Some(posted)
    }

    /// Takes all receives out.
    pub fn take_all(&self) -> Vec<Posted> {
        let mut state = self.lock();
        let State { places, free } = &mut *state;
        let mut taken = Vec::new();
        for (number, place) in places.iter_mut().enumerate() {
            if let Some(posted) = place.posted.take() {
                place.uses = place.uses.wrapping_add(1);
                free.push(number as u32);
                taken.push(posted);
            }
        }
        taken
    }
}

impl State {
    fn grow(&mut self, capacity: u32) {
        let capacity = capacity.min(MAX_PLACES);
        for place in self.places.len() as u32..capacity {
            self.places.push(Place {
                uses: 0,
                posted: None,
            });
            self.free.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Payload;
    use crate::operation::Operation;
    use crate::qp::Companion;

    fn posted(token: u64) -> Posted {
        Posted {
            token,
            payload: Payload::None,
            companion: Companion::None,
            operation: Operation::Receive,
            quiet: false,
        }
    }

    fn slab(capacity: u32) -> Slab {
        let (index, generation) = (7, 9);
        Slab::new(QueueId { index, generation }, capacity)
    }

    fn post(slab: &Slab, token: u64) -> WorkId {
        let work = slab.reserve().unwrap();
        slab.fill(work, posted(token));
        work
    }

    /// Of all identifiers of a queue, those in flight and no others name
    /// something, after any number of uses.
    #[test]
    fn only_what_is_in_flight_is_found() {
        const CAPACITY: u32 = 3;
        let slab = slab(CAPACITY);
        let mut flying: Vec<(WorkId, u64)> = Vec::new();
        for token in 0..if cfg!(miri) { 6 } else { 40 } {
            flying.push((post(&slab, token), token));
            let places = (0..CAPACITY + 2).chain([MAX_PLACES - 1]);
            for (place, uses) in places.flat_map(|p| (0..=USE_MASK).map(move |u| (p, u))) {
                let work = WorkId::new(slab.prefix, uses << PLACE_BITS | place);
                if flying.iter().all(|(id, _)| *id != work) {
                    assert!(slab.remove(work).is_none(), "{work:?}");
                }
            }
            assert_eq!(slab.len(), flying.len() as u32);
            if flying.len() == CAPACITY as usize {
                // Two of three go, in any order, so that places are used unevenly.
                for _ in 0..2 {
                    let at = token as usize % flying.len();
                    let (work, token) = flying.remove(at);
                    assert_eq!(slab.remove(work).unwrap().token, token);
                    assert!(slab.remove(work).is_none());
                }
            }
        }
    }

    /// An identifier comes again with the 16th use of its place, and not before.
    #[test]
    fn an_identifier_rests_for_as_long_as_it_can() {
        let slab = slab(1);
        let first = post(&slab, 0);
        slab.remove(first).unwrap();
        for token in 1..=u64::from(USE_MASK) {
            let work = post(&slab, token);
            assert!(slab.remove(first).is_none());
            slab.remove(work).unwrap();
        }
        assert_eq!(post(&slab, 99), first);
    }

    /// What was reserved and not posted has not been used.
    #[test]
    fn a_place_that_was_given_back_has_not_been_used() {
        let slab = slab(1);
        let work = slab.reserve().unwrap();
        assert!(slab.remove(work).is_none() && slab.reserve().is_none());
        slab.cancel(work);
        assert_eq!(slab.reserve(), Some(work));
    }
}
