//! From a completion to the operation that it completes.

use std::sync::Arc;

use super::id::{QueueId, WorkId};
use super::{Fifo, Found, Posted, Registry, Slab};

/// What a completion stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reaped {
    /// An operation in flight, which is so no more.
    Done,
    /// An operation of a queue that is gone: nobody's affair.
    Stale,
    /// Nothing that was in flight.
    Corrupt,
}

/// Finds operations by the identifiers of completions. It keeps the queues that
/// it has met, so that an operation is found without a lock.
///
/// There is one to a completion queue, and it belongs to the queue's owner:
/// that makes it the only consumer of its queues.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    queues: Vec<Option<Arc<Fifo>>>,
    slab: Option<Arc<Slab>>,
}

impl Reaper {
    /// Finds the operation that `work` names, takes it out and gives it to
    /// `done`. Operations that it brings to an end without a completion of their
    /// own go to `earlier` before.
    #[inline(always)]
    pub fn reap(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
        earlier: impl FnMut(Posted),
        done: impl FnOnce(Posted),
    ) -> Reaped {
        if work.is_shared() {
            return self.reap_shared(work, slabs, done);
        }
        let id = work.queue();
        let index = id.index as usize;
        let known = match self.queues.get(index) {
            Some(Some(fifo)) => fifo.id() == id,
            _ => false,
        };
        if !known && let Some(other) = self.meet(id, queues) {
            return other;
        }
        let Some(Some(fifo)) = self.queues.get(index) else {
            return Reaped::Corrupt;
        };
        // SAFETY: the queue is in this completion queue's registry only, and
        // the only reaper that looks there is borrowed exclusively.
        if unsafe { fifo.retire(work, earlier, done) } {
            Reaped::Done
        } else {
            Reaped::Corrupt
        }
    }

    /// Looks a queue up that is not known here. Something is returned if there
    /// is none.
    #[cold]
    fn meet(&mut self, id: QueueId, queues: &Registry<Fifo>) -> Option<Reaped> {
        let fifo = match queues.find(id) {
            Found::Live(fifo) => fifo,
            Found::Gone => return Some(Reaped::Stale),
            Found::Never => return Some(Reaped::Corrupt),
        };
        let index = id.index as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(fifo);
        None
    }

    fn reap_shared(
        &mut self,
        work: WorkId,
        slabs: &Registry<Slab>,
        done: impl FnOnce(Posted),
    ) -> Reaped {
        let id = work.queue();
        if self.slab.as_ref().is_none_or(|slab| slab.id() != id) {
            match slabs.find(id) {
                Found::Live(slab) => self.slab = Some(slab),
                Found::Gone => return Reaped::Stale,
                Found::Never => return Reaped::Corrupt,
            }
        }
        match self.slab.as_ref().and_then(|slab| slab.remove(work)) {
            Some(posted) => {
                done(posted);
                Reaped::Done
            }
            None => Reaped::Corrupt,
        }
    }

    /// Lets go of queues that are gone, and so of what was in flight on them.
    pub fn purge(&mut self, queues: &Registry<Fifo>) {
        for place in &mut self.queues {
            if let Some(fifo) = place
                && !matches!(queues.find(fifo.id()), Found::Live(_))
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
