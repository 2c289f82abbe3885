//! From a completion to the operation that it completes.

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::id::WorkId;
use super::{Fifo, Found, Posted, Registry, Retired, Slab};

/// What a completion is that completes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nothing {
    /// Of an operation of a queue that is gone: nobody's affair.
    Stale,
    /// Of nothing that was in flight.
    Corrupt,
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
}

impl Default for Reaper {
    fn default() -> Self {
        Self {
            queues: Vec::new(),
            slab: None,
            place: MaybeUninit::uninit(),
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
        let index = work.own_index();
        let known = match self.queues.get(index) {
            Some(Some(fifo)) => fifo.is_of(work),
            _ => false,
        };
        if known {
            self.retire(index, work, earlier)
        } else {
            self.reap_unknown(work, queues, slabs, earlier)
        }
    }

    #[inline(always)]
    fn retire(
        &mut self,
        index: usize,
        work: WorkId,
        earlier: impl FnMut(Posted),
    ) -> Result<Retired<'_>, Nothing> {
        let Some(Some(fifo)) = self.queues.get(index) else {
            return Err(Nothing::Corrupt);
        };
        // SAFETY: the queue is in this completion queue's registry only, and
        // the only reaper that looks there is borrowed exclusively, for as long
        // as what this returns.
        unsafe { fifo.retire(work, earlier) }.ok_or(Nothing::Corrupt)
    }

    /// Of a queue that was not met before, or of a shared receive queue.
    #[cold]
    #[inline(never)]
    fn reap_unknown(
        &mut self,
        work: WorkId,
        queues: &Registry<Fifo>,
        slabs: &Registry<Slab>,
        earlier: impl FnMut(Posted),
    ) -> Result<Retired<'_>, Nothing> {
        if work.is_shared() {
            let posted = self.take_shared(work, slabs)?;
            return Ok(Retired::moved(&mut self.place, posted));
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
        self.retire(index, work, earlier)
    }

    fn take_shared(&mut self, work: WorkId, slabs: &Registry<Slab>) -> Result<Posted, Nothing> {
        let id = work.queue();
        if self.slab.as_ref().is_none_or(|slab| slab.id() != id) {
            match slabs.find(id) {
                Found::Live(slab) => self.slab = Some(slab),
                Found::Gone => return Err(Nothing::Stale),
                Found::Never => return Err(Nothing::Corrupt),
            }
        }
        let posted = self.slab.as_ref().and_then(|slab| slab.remove(work));
        posted.ok_or(Nothing::Corrupt)
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
