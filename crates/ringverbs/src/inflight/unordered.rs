//! Operations in flight on a shared receive queue, which complete in any order and on
//! several completion queues.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Posted;
use super::id::{QueueId, WorkId};

/// Bits of the slot number in the sequence number; the other bits count the uses of the slot,
/// so an identifier is reused after 16 uses. Only a device that completes a receive twice can
/// report a reused identifier; it then completes a receive in flight too early, which a
/// defective device can do in any case.
const SLOT_BITS: u32 = 20;
const USE_MASK: u32 = 0xf;
/// Maximum receives in flight on a shared receive queue.
pub(crate) const MAX_SLOTS: u32 = 1 << SLOT_BITS;

/// The receives in flight on a shared receive queue, behind a lock, because several threads
/// use it.
#[derive(Debug)]
pub(crate) struct UnorderedTable {
    id: QueueId,
    prefix: u64,
    state: Mutex<TableState>,
}

#[derive(Debug)]
struct TableState {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    uses: u32,
    posted: Option<Posted>,
}

impl UnorderedTable {
    /// Creates a table for up to `capacity` receives.
    pub fn new(id: QueueId, capacity: u32) -> Self {
        let mut state = TableState {
            slots: Vec::new(),
            free: Vec::new(),
        };
        state.grow(capacity);
        Self {
            id,
            prefix: id.prefix(true),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns its identifier in the context's registry.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Returns the number of receives in flight.
    pub fn len(&self) -> u32 {
        let state = self.lock();
        (state.slots.len() - state.free.len()) as u32
    }

    /// Grows the table to `capacity` receives; never shrinks it.
    pub fn grow(&self, capacity: u32) {
        self.lock().grow(capacity);
    }

    /// Reserves a free slot, if any. The receive is in flight once the slot is filled.
    pub fn reserve(&self) -> Option<WorkId> {
        let mut state = self.lock();
        let slot = state.free.pop()?;
        let uses = state.slots[slot as usize].uses & USE_MASK;
        Some(WorkId::new(self.prefix, uses << SLOT_BITS | slot))
    }

    /// Cancels a reservation.
    pub fn cancel(&self, work: WorkId) {
        let mut state = self.lock();
        state.free.push(work.sequence() & (MAX_SLOTS - 1));
    }

    /// Puts a receive into a reserved slot.
    pub fn fill(&self, work: WorkId, posted: Posted) {
        let mut state = self.lock();
        let slot = work.sequence() & (MAX_SLOTS - 1);
        state.slots[slot as usize].posted = Some(posted);
    }

    /// Removes the receive that `work` names, if it is in flight.
    pub fn remove(&self, work: WorkId) -> Option<Posted> {
        let mut state = self.lock();
        let slot = work.sequence() & (MAX_SLOTS - 1);
        let uses = work.sequence() >> SLOT_BITS;
        let entry = state.slots.get_mut(slot as usize)?;
        if entry.uses & USE_MASK != uses {
            return None;
        }
        let posted = entry.posted.take()?;
        entry.uses = entry.uses.wrapping_add(1);
        state.free.push(slot);
        Some(posted)
    }

    /// Removes all receives.
    pub fn take_all(&self) -> Vec<Posted> {
        let mut state = self.lock();
        let TableState { slots, free } = &mut *state;
        let mut taken = Vec::new();
        for (number, slot) in slots.iter_mut().enumerate() {
            if let Some(posted) = slot.posted.take() {
                slot.uses = slot.uses.wrapping_add(1);
                free.push(number as u32);
                taken.push(posted);
            }
        }
        taken
    }
}

impl TableState {
    fn grow(&mut self, capacity: u32) {
        let capacity = capacity.min(MAX_SLOTS);
        for slot in self.slots.len() as u32..capacity {
            self.slots.push(Slot {
                uses: 0,
                posted: None,
            });
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Payload;
    use crate::operation::Operation;
    use crate::qp::Attachment;

    fn posted(token: u64) -> Posted {
        Posted {
            token,
            payload: Payload::None,
            attachment: Attachment::None,
            operation: Operation::Receive,
            unreported: false,
        }
    }

    fn table(capacity: u32) -> UnorderedTable {
        let (index, generation) = (7, 9);
        UnorderedTable::new(QueueId { index, generation }, capacity)
    }

    fn post(table: &UnorderedTable, token: u64) -> WorkId {
        let work = table.reserve().unwrap();
        table.fill(work, posted(token));
        work
    }

    /// Only identifiers in flight match, after any number of uses.
    #[test]
    fn only_receives_in_flight_are_found() {
        const CAPACITY: u32 = 3;
        let table = table(CAPACITY);
        let mut in_flight: Vec<(WorkId, u64)> = Vec::new();
        for token in 0..if cfg!(miri) { 6 } else { 40 } {
            in_flight.push((post(&table, token), token));
            let slots = (0..CAPACITY + 2).chain([MAX_SLOTS - 1]);
            for (slot, uses) in slots.flat_map(|p| (0..=USE_MASK).map(move |u| (p, u))) {
                let work = WorkId::new(table.prefix, uses << SLOT_BITS | slot);
                if in_flight.iter().all(|(id, _)| *id != work) {
                    assert!(table.remove(work).is_none(), "{work:?}");
                }
            }
            assert_eq!(table.len(), in_flight.len() as u32);
            if in_flight.len() == CAPACITY as usize {
                // Two of three complete, in any order, so that slots are used unevenly.
                for _ in 0..2 {
                    let at = token as usize % in_flight.len();
                    let (work, token) = in_flight.remove(at);
                    assert_eq!(table.remove(work).unwrap().token, token);
                    assert!(table.remove(work).is_none());
                }
            }
        }
    }

    /// An identifier is reused by the 16th use of its slot, and not earlier.
    #[test]
    fn identifiers_are_reused_as_late_as_possible() {
        let table = table(1);
        let first = post(&table, 0);
        table.remove(first).unwrap();
        for token in 1..=u64::from(USE_MASK) {
            let work = post(&table, token);
            assert!(table.remove(first).is_none());
            table.remove(work).unwrap();
        }
        assert_eq!(post(&table, 99), first);
    }

    /// A cancelled reservation does not count as a use.
    #[test]
    fn cancelled_slot_is_not_counted_as_used() {
        let table = table(1);
        let work = table.reserve().unwrap();
        assert!(table.remove(work).is_none() && table.reserve().is_none());
        table.cancel(work);
        assert_eq!(table.reserve(), Some(work));
    }
}
