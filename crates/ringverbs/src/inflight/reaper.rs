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

/// What a closer look has found: so small that the usual way keeps all that it
/// has in registers.
enum Closer {
    /// A queue that is known from now on.
    Own,
    /// An operation of a shared receive queue.
    Shared,
    /// See [`Nothing`].
    Stale,
    /// See [`Nothing`].
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
        if !known {
            match self.look_closer(work, queues, slabs) {
                Closer::Own => {}
                // SAFETY: it has just been put there.
                Closer::Shared => return Ok(unsafe { Retired::moved(&mut self.place) }),
                Closer::Stale => return Err(Nothing::Stale),
                Closer::Corrupt => return Err(Nothing::Corrupt),
            }
        }
        let Some(Some(fifo)) = self.queues.get(index) else {
            return Err(Nothing::Corrupt);
        };
        // SAFETY: the queue is in this completion queue's registry only, and
        // the only reaper that looks there is borrowed exclusively, for as long
        // as what this returns.
        unsafe { fifo.retire(work, earlier) }.ok_or(Nothing::Corrupt)
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
    ) -> Closer {
        if work.is_shared() {
            return match self.take_shared(work, slabs) {
                Ok(posted) => {
                    self.place.write(posted);
                    Closer::Shared
                }
                Err(Nothing::Stale) => Closer::Stale,
                Err(Nothing::Corrupt) => Closer::Corrupt,
            };
        }
        let id = work.queue();
        let fifo = match queues.find(id) {
            Found::Live(fifo) => fifo,
            Found::Gone => return Closer::Stale,
            Found::Never => return Closer::Corrupt,
        };
        let index = id.index as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(fifo);
        Closer::Own
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
