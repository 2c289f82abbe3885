//! From a completion to the operation that it completes.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::id::WorkId;
use super::registry::Left;
use super::{Fifo, Found, Posted, Registry, Retired, Slab};

/// What a completion is that completes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nothing {
    /// Of an operation of a queue that is gone: nobody's affair.
    Stale,
    /// Of nothing that was in flight.
    Corrupt,
}

/// What a closer look has found: so small that the usual way keeps all that it
/// has in registers.
enum Closer {
    /// A queue that is known from now on.
    Own,
    /// An operation of a shared receive queue.
    Shared,
}

/// Finds operations by the identifiers of completions. It keeps the queues that
/// it has met, so that an operation is found without a lock.
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
    left: Vec<Left>,
}

impl Default for Reaper {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            slab: None,
            place: MaybeUninit::uninit(),
            left: Vec::new(),
        }
    }
}

impl Reaper {
    /// Finds the operation that `work` names and takes it out. Operations that it
    /// brings to an end without a completion of their own go to `earlier` before.
    ///
    /// # Errors
    /// What else the completion is, if nothing was found.
    #[inline(always)]
    pub fn reap(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
        earlier: impl FnMut(Posted),
    ) -> Result<Retired<'_>, Nothing> {
        let fifo = match self.known(work) {
            Some(fifo) => fifo,
            None => match self.look_closer(work, queues, slabs)? {
                Closer::Own => self.known(work).ok_or(Nothing::Corrupt)?,
                // SAFETY: it has just been put there.
                Closer::Shared => return Ok(unsafe { Retired::moved(&mut self.place) }),
            },
        };
        // SAFETY: the reaper has the queue, and lets go of none while it is
        // borrowed, which is for as long as what this returns. The queue is in
        // this completion queue's registry only, and this is the only reaper
        // that looks there.
        unsafe { fifo.as_ref().retire(work, earlier) }.ok_or(Nothing::Corrupt)
    }

    /// The queue that `work` was posted to, if it was met before. A pointer, so
    /// that one that was not met can be sought afterwards.
    #[inline(always)]
    fn known(&self, work: WorkId) -> Option<NonNull<Fifo>> {
        let fifo = self.queues.get(work.own_index())?.as_deref()?;
        fifo.is_of(work).then_some(NonNull::from(fifo))
    }

    /// Of a queue that was not met before, which is known afterwards, or of a
    /// shared receive queue, whose operation is put into `place`.
    #[cold]
    #[inline(never)]
    fn look_closer(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
    ) -> Result<Closer, Nothing> {
        if work.is_shared() {
            self.take_shared(work, slabs)?;
            return Ok(Closer::Shared);
        }
        let id = work.queue();
        let fifo = match queues.find(id) {
            Found::Live(fifo) => fifo,
            Found::Gone => return Err(Nothing::Stale),
            Found::Never => return Err(Nothing::Corrupt),
        };
        let index = id.index as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(fifo);
        Ok(Closer::Own)
    }

    /// Puts an operation of a shared receive queue into `place`.
    fn take_shared(&mut self, work: WorkId, slabs: &Registry<Slab>) -> Result<(), Nothing> {
        let id = work.queue();
        if self.slab.as_ref().is_none_or(|slab| slab.id() != id) {
            match slabs.find(id) {
                Found::Live(slab) => self.slab = Some(slab),
                Found::Gone => return Err(Nothing::Stale),
                Found::Never => return Err(Nothing::Corrupt),
            }
        }
        let posted = self.slab.as_ref().and_then(|slab| slab.remove(work));
        let posted = posted.ok_or_else(|| match slabs.find(id) {
            Found::Gone => Nothing::Stale,
            _ => Nothing::Corrupt,
        })?;
        self.place.write(posted);
        Ok(())
    }

    /// Lets go of queues that are gone, and so of what was in flight on them.
    /// Takes the lock once, and looks at the places only that were left since
    /// the last call: thousands of queues may go one by one.
    #[cold]
    pub fn purge(&mut self, queues: &Registry<Fifo>) {
        queues.take_left(&mut self.left);
        // What is dropped here takes the lock no more, but may take others.
        for Left { index, now } in self.left.drain(..) {
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
            // Nothing is in flight there.
            assert_eq!(reaped.err(), Some(Nothing::Corrupt));
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
