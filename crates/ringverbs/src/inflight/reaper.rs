//! Resolving a completion's operation.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::id::WorkId;
use super::registry::FreedSlot;
use super::{Lookup, OrderedTable, Posted, Registry, Retired, UnorderedTable};

/// The reason why a completion matches no operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmatched {
    /// The completion is stale: its queue was destroyed.
    Stale,
    /// The completion names no operation in flight.
    Corrupt,
}

/// The result of [`Reaper::resolve`]. It does not contain the operation, so that the fast
/// path keeps its values in registers.
enum Resolved {
    /// The operation is in a queue that is cached from now on.
    Cached,
    /// The operation is a shared receive, and was moved into `slot`.
    Shared,
}

/// Finds operations by the identifiers of completions. It caches the queues that completions
/// have named, so that an operation is found without a lock.
///
/// A completion queue has one reaper, which belongs to the queue's owner and so is the only
/// consumer of its work queues.
#[derive(Debug)]
pub(crate) struct Reaper {
    queues: Vec<Option<Arc<OrderedTable>>>,
    table: Option<Arc<UnorderedTable>>,
    /// Temporary slot of an operation of a shared receive queue.
    slot: MaybeUninit<Posted>,
    /// For [`Reaper::purge`], empty between its calls.
    freed: Vec<FreedSlot>,
}

impl Default for Reaper {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            table: None,
            slot: MaybeUninit::uninit(),
            freed: Vec::new(),
        }
    }
}

impl Reaper {
    /// Removes the operation that `work` names. Earlier operations without a completion are
    /// first passed to `earlier`.
    ///
    /// # Errors
    /// [`Unmatched`].
    #[inline]
    pub fn reap(
        &mut self,
        work: WorkId,
        queues: &Registry<OrderedTable>,
        srq_tables: &Registry<UnorderedTable>,
        earlier: impl FnMut(Posted),
    ) -> Result<Retired<'_>, Unmatched> {
        let table = match self.cached(work) {
            Some(table) => table,
            None => match self.resolve(work, queues, srq_tables)? {
                Resolved::Cached => self.cached(work).ok_or(Unmatched::Corrupt)?,
                // SAFETY: `resolve` has just filled the slot.
                Resolved::Shared => return Ok(unsafe { Retired::moved(&mut self.slot) }),
            },
        };
        // SAFETY: the reaper owns the queue, and releases none while it is borrowed,
        // which is as long as the result lives. The queue is in this completion
        // queue's registry only, and this is the registry's only reaper.
        unsafe { table.as_ref().retire(work, earlier) }.ok_or(Unmatched::Corrupt)
    }

    /// Returns the queue that `work` was posted to, if it is cached. A pointer, so that `self`
    /// is not borrowed otherwise.
    #[inline]
    fn cached(&self, work: WorkId) -> Option<NonNull<OrderedTable>> {
        let table = self.queues.get(work.own_index())?.as_deref()?;
        table.is_of(work).then_some(NonNull::from(table))
    }

    /// Looks up a queue in the registry and caches it, or moves the operation of a
    /// shared receive queue into `slot`.
    #[cold]
    #[inline(never)]
    fn resolve(
        &mut self,
        work: WorkId,
        queues: &Registry<OrderedTable>,
        srq_tables: &Registry<UnorderedTable>,
    ) -> Result<Resolved, Unmatched> {
        if work.is_shared() {
            self.take_shared(work, srq_tables)?;
            return Ok(Resolved::Shared);
        }
        let id = work.queue();
        let table = match queues.find(id) {
            Lookup::Live(table) => table,
            Lookup::Destroyed => return Err(Unmatched::Stale),
            Lookup::Unknown => return Err(Unmatched::Corrupt),
        };
        let index = id.index as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(table);
        Ok(Resolved::Cached)
    }

    /// Moves an operation of a shared receive queue into `slot`.
    fn take_shared(
        &mut self,
        work: WorkId,
        srq_tables: &Registry<UnorderedTable>,
    ) -> Result<(), Unmatched> {
        let id = work.queue();
        if self.table.as_ref().is_none_or(|table| table.id() != id) {
            match srq_tables.find(id) {
                Lookup::Live(table) => self.table = Some(table),
                Lookup::Destroyed => return Err(Unmatched::Stale),
                Lookup::Unknown => return Err(Unmatched::Corrupt),
            }
        }
        let posted = self.table.as_ref().and_then(|table| table.remove(work));
        let posted = posted.ok_or_else(|| match srq_tables.find(id) {
            Lookup::Destroyed => Unmatched::Stale,
            _ => Unmatched::Corrupt,
        })?;
        self.slot.write(posted);
        Ok(())
    }

    /// Releases destroyed queues with their operations in flight. Takes the lock once, and
    /// visits only the slots that became free since the last call, because thousands of queues
    /// may be destroyed one by one.
    #[cold]
    pub fn purge(&mut self, queues: &Registry<OrderedTable>) {
        queues.take_freed(&mut self.freed);
        // Without the lock, because drops may take other locks.
        for FreedSlot { index, current } in self.freed.drain(..) {
            if let Some(slot) = self.queues.get_mut(index as usize) {
                if slot
                    .as_ref()
                    .is_some_and(|table| Some(table.id()) != current)
                {
                    *slot = None;
                }
            }
        }
    }

    /// Removes the operations in flight on a queue, oldest first.
    pub fn drain(&mut self, table: &OrderedTable, mut each: impl FnMut(Posted)) {
        // SAFETY: the caller has checked that the queue completes here, and
        // `self` is its only consumer, borrowed exclusively.
        while let Some(posted) = unsafe { table.pop() } {
            each(posted);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    struct Fixture {
        reaper: Reaper,
        queues: Registry<OrderedTable>,
        srq_tables: Registry<UnorderedTable>,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                reaper: Reaper::default(),
                queues: Registry::new(),
                srq_tables: Registry::new(),
            }
        }

        /// A queue that the reaper has cached.
        fn cached_queue(&mut self) -> Weak<OrderedTable> {
            let table = self.queues.insert(|id| OrderedTable::new(id, 1)).unwrap();
            let work = WorkId::new(table.id().prefix(false), 0);
            let reaped = self.reaper.reap(work, &self.queues, &self.srq_tables, drop);
            // No operation is in flight.
            assert_eq!(reaped.err(), Some(Unmatched::Corrupt));
            assert!(self.reaper.cached(work).is_some());
            Arc::downgrade(&table)
        }

        fn destroy(&self, table: &Weak<OrderedTable>) {
            let id = table.upgrade().unwrap().id();
            self.queues.remove(id).unwrap();
        }

        /// Returns how often the lock is taken.
        fn purge(&mut self) -> usize {
            let before = self.queues.locked();
            self.reaper.purge(&self.queues);
            // `locked` takes it once.
            self.queues.locked() - before - 1
        }
    }

    /// A destroyed queue costs one lock, independent of the number of queues.
    #[test]
    fn purge_takes_the_lock_once() {
        const COUNT: usize = if cfg!(miri) { 10 } else { 1000 };
        let mut fixture = Fixture::new();
        let queues: Vec<_> = (0..COUNT).map(|_| fixture.cached_queue()).collect();
        let mut locked = 0;
        for (number, table) in queues.iter().enumerate() {
            fixture.destroy(table);
            locked += fixture.purge();
            assert!(table.upgrade().is_none());
            let alive = queues.iter().filter(|table| table.strong_count() > 0);
            assert_eq!(alive.count(), COUNT - number - 1);
        }
        assert_eq!(locked, COUNT);
        // Destroyed together, they cost one.
        let queues: Vec<_> = (0..COUNT).map(|_| fixture.cached_queue()).collect();
        for table in &queues {
            fixture.destroy(table);
        }
        assert_eq!(fixture.purge(), 1);
        assert!(queues.iter().all(|table| table.strong_count() == 0));
    }

    #[test]
    fn queue_in_a_reused_slot_is_kept() {
        let mut fixture = Fixture::new();
        let old = fixture.cached_queue();
        fixture.destroy(&old);
        let new = fixture.cached_queue();
        // It has replaced the old one.
        assert_eq!((old.strong_count(), new.strong_count()), (0, 2));
        fixture.purge();
        assert_eq!(new.strong_count(), 2);

        // The same for a queue that is not cached.
        fixture.destroy(&new);
        let uncached = fixture
            .queues
            .insert(|id| OrderedTable::new(id, 1))
            .unwrap();
        fixture.purge();
        assert_eq!((new.strong_count(), Arc::strong_count(&uncached)), (0, 2));
    }
}
