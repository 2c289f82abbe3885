//! Resolving a completion's operation.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::id::WorkId;
use super::registry::Departed;
use super::{Fifo, Lookup, Posted, Registry, Retired, Slab};

/// Why a completion names no operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmatched {
    /// Stale: its queue was destroyed.
    Stale,
    /// It names nothing that was in flight.
    Corrupt,
}

/// Where the operation of an identifier is, after [`Reaper::resolve`]. Without
/// the operation itself, so that the fast path keeps its values in registers.
enum Resolved {
    /// In a queue that is known from now on.
    Known,
    /// A shared receive, which was moved into `place`.
    Shared,
}

/// Finds operations by the identifiers of completions. It keeps the queues that
/// completions have named, so that an operation is found without a lock.
///
/// There is one to a completion queue, and it belongs to the queue's owner:
/// that makes it the only consumer of its queues.
#[derive(Debug)]
pub(crate) struct Reaper {
    queues: Vec<Option<Arc<Fifo>>>,
    slab: Option<Arc<Slab>>,
    /// Where an operation of a shared receive queue is while it is taken out.
    place: MaybeUninit<Posted>,
    /// For [`Reaper::purge`], empty between its calls.
    departed: Vec<Departed>,
}

impl Default for Reaper {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            slab: None,
            place: MaybeUninit::uninit(),
            departed: Vec::new(),
        }
    }
}

impl Reaper {
    /// Takes out the operation that `work` names. Operations before it, which end
    /// without a completion of their own, are passed to `earlier` first.
    ///
    /// # Errors
    /// [`Unmatched`].
    #[inline(always)]
    pub fn reap(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
        earlier: impl FnMut(Posted),
    ) -> Result<Retired<'_>, Unmatched> {
        let fifo = match self.known(work) {
            Some(fifo) => fifo,
            None => match self.resolve(work, queues, slabs)? {
                Resolved::Known => self.known(work).ok_or(Unmatched::Corrupt)?,
                // SAFETY: it has just been put there.
                Resolved::Shared => return Ok(unsafe { Retired::moved(&mut self.place) }),
            },
        };
        // SAFETY: the reaper has the queue, and lets go of none while it is
        // borrowed, which is for as long as what this returns. The queue is in
        // this completion queue's registry only, and this is the only reaper
        // that looks there.
        unsafe { fifo.as_ref().retire(work, earlier) }.ok_or(Unmatched::Corrupt)
    }

    /// Returns the queue that `work` was posted to, if it is known. A pointer, so
    /// that `self` is not borrowed if it is not.
    #[inline(always)]
    fn known(&self, work: WorkId) -> Option<NonNull<Fifo>> {
        let fifo = self.queues.get(work.own_index())?.as_deref()?;
        fifo.is_of(work).then_some(NonNull::from(fifo))
    }

    /// Looks up a queue that is not known, which is known afterwards, or moves the
    /// operation of a shared receive queue into `place`.
    #[cold]
    #[inline(never)]
    fn resolve(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
    ) -> Result<Resolved, Unmatched> {
        if work.is_shared() {
            self.take_shared(work, slabs)?;
            return Ok(Resolved::Shared);
        }
        let id = work.queue();
        let fifo = match queues.find(id) {
            Lookup::Live(fifo) => fifo,
            Lookup::Destroyed => return Err(Unmatched::Stale),
            Lookup::Unknown => return Err(Unmatched::Corrupt),
        };
        let index = id.index as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(fifo);
        Ok(Resolved::Known)
    }

    /// Moves an operation of a shared receive queue into `place`.
    fn take_shared(&mut self, work: WorkId, slabs: &Registry<Slab>) -> Result<(), Unmatched> {
        let id = work.queue();
        if self.slab.as_ref().is_none_or(|slab| slab.id() != id) {
            match slabs.find(id) {
                Lookup::Live(slab) => self.slab = Some(slab),
                Lookup::Destroyed => return Err(Unmatched::Stale),
                Lookup::Unknown => return Err(Unmatched::Corrupt),
            }
        }
        let posted = self.slab.as_ref().and_then(|slab| slab.remove(work));
        let posted = posted.ok_or_else(|| match slabs.find(id) {
            Lookup::Destroyed => Unmatched::Stale,
            _ => Unmatched::Corrupt,
        })?;
        self.place.write(posted);
        Ok(())
    }

    /// Releases queues that were destroyed, with what was in flight on them.
    /// Takes the lock once, and looks only at the slots that became free since the
    /// last call: thousands of queues may be destroyed one by one.
    #[cold]
    pub fn purge(&mut self, queues: &Registry<Fifo>) {
        queues.take_departed(&mut self.departed);
        // The lock is not held: drops may take other locks.
        for Departed { index, now } in self.departed.drain(..) {
            if let Some(place) = self.queues.get_mut(index as usize)
                && place.as_ref().is_some_and(|fifo| Some(fifo.id()) != now)
            {
                *place = None;
            }
        }
    }

    /// Takes what is in flight on a queue out of it, oldest first.
    pub fn drain(&mut self, fifo: &Fifo, mut each: impl FnMut(Posted)) {
        // SAFETY: the caller has checked that the queue completes here, and
        // `self` is its only consumer, borrowed exclusively.
        while let Some(posted) = unsafe { fifo.pop() } {
            each(posted);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    struct World {
        reaper: Reaper,
        queues: Registry<Fifo>,
        slabs: Registry<Slab>,
    }

    impl World {
        fn new() -> Self {
            Self {
                reaper: Reaper::default(),
                queues: Registry::new(),
                slabs: Registry::new(),
            }
        }

        /// A queue that the reaper has met.
        fn met(&mut self) -> Weak<Fifo> {
            let fifo = self.queues.insert(|id| Fifo::new(id, 1)).unwrap();
            let work = WorkId::new(fifo.id().prefix(false), 0);
            let reaped = self.reaper.reap(work, &self.queues, &self.slabs, drop);
            // Unmatched is in flight there.
            assert_eq!(reaped.err(), Some(Unmatched::Corrupt));
            assert!(self.reaper.known(work).is_some());
            Arc::downgrade(&fifo)
        }

        fn leave(&self, fifo: &Weak<Fifo>) {
            let id = fifo.upgrade().unwrap().id();
            self.queues.remove(id).unwrap();
        }

        /// How often the lock is taken.
        fn purge(&mut self) -> usize {
            let before = self.queues.locked();
            self.reaper.purge(&self.queues);
            // And once by asking.
            self.queues.locked() - before - 1
        }
    }

    /// However many there are, one that goes costs one lock.
    #[test]
    fn queues_that_go_one_by_one_cost_each_the_same() {
        const COUNT: usize = if cfg!(miri) { 10 } else { 1000 };
        let mut world = World::new();
        let queues: Vec<_> = (0..COUNT).map(|_| world.met()).collect();
        let mut locked = 0;
        for (number, fifo) in queues.iter().enumerate() {
            world.leave(fifo);
            locked += world.purge();
            assert!(fifo.upgrade().is_none());
            let alive = queues.iter().filter(|fifo| fifo.strong_count() > 0);
            assert_eq!(alive.count(), COUNT - number - 1);
        }
        assert_eq!(locked, COUNT);
        // All together they cost one.
        let queues: Vec<_> = (0..COUNT).map(|_| world.met()).collect();
        for fifo in &queues {
            world.leave(fifo);
        }
        assert_eq!(world.purge(), 1);
        assert!(queues.iter().all(|fifo| fifo.strong_count() == 0));
    }

    #[test]
    fn a_queue_that_has_the_place_of_one_that_is_gone_stays() {
        let mut world = World::new();
        let old = world.met();
        world.leave(&old);
        let new = world.met();
        // What it took the place of, it has replaced.
        assert_eq!((old.strong_count(), new.strong_count()), (0, 2));
        world.purge();
        assert_eq!(new.strong_count(), 2);

        // ... also if the reaper does not know yet.
        world.leave(&new);
        let unmet = world.queues.insert(|id| Fifo::new(id, 1)).unwrap();
        world.purge();
        assert_eq!((new.strong_count(), Arc::strong_count(&unmet)), (0, 2));
    }
}
