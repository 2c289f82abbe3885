//! Completion queues: the kernel object and its mapped ring.

use ring::{IndexCheck, Retired};
use uverbs::{ContextRef, Cq, CqInit};

use crate::abi::{self, MmapInfo};
use crate::map::map_ring;
use crate::{CompletionRing, CreateError};

/// A completion queue. The parts are public so that a face can put each under
/// the lock, or the single owner, that it needs.
#[derive(Debug)]
pub struct CompletionQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Cq<C>,
    /// The entries and the cursor over them.
    pub ring: CompletionRing,
    /// Whether the queue is empty, without the lock.
    pub index_check: IndexCheck,
    /// What is left of rings that were replaced by a resize, for threads that
    /// may still be looking at them through `index_check`.
    pub retired: Vec<Retired>,
}

impl<C: ContextRef> CompletionQueue<C> {
    /// Makes a completion queue and maps it. It holds `object.cqe()` entries:
    /// at least as many as asked for.
    ///
    /// # Errors
    /// Those of CREATE_CQ and of mapping; nothing is left behind.
    pub fn create(context: &C, init: &CqInit) -> Result<Self, CreateError> {
        let mut response = MmapInfo::default();
        let object = Cq::create(context, init, abi::response(&mut response))?;
        let ring = map_ring(
            context,
            &response,
            CompletionRing::ENTRY_SIZE,
            "completion queue",
        )?;
        let ring = CompletionRing::new(ring);
        Ok(Self {
            // SAFETY: the ring's memory lives in the same value, and is
            // retired, not unmapped, when a resize replaces it.
            index_check: unsafe { IndexCheck::new(ring.consumer().indices()) },
            ring,
            retired: Vec::new(),
            object,
        })
    }

    /// Resizes the queue; the completions in it stay in it, in order. Returns
    /// how many it holds now.
    ///
    /// The caller holds `ring` and `retired` for itself until this returns;
    /// `index_check` may be asked by other threads all the while.
    ///
    /// # Errors
    /// Those of RESIZE_CQ: nothing has changed. Those of mapping: the queue
    /// has been resized but is out of reach; it reads as empty from now on.
    pub fn resize(
        object: &Cq<C>,
        ring: &mut CompletionRing,
        index_check: &IndexCheck,
        retired: &mut Vec<Retired>,
        cqe: u32,
    ) -> Result<u32, CreateError> {
        retired.try_reserve(1).map_err(|_| CreateError::NoMemory)?;
        let mut moved = MmapInfo::default();
        index_check.suspend();
        let cqe = match object.resize(cqe, abi::response(&mut moved)) {
            Ok(cqe) => cqe,
            Err(error) => {
                index_check.resume(ring.consumer().indices());
                return Err(error.into());
            }
        };
        let new = map_ring(
            object.context(),
            &moved,
            CompletionRing::ENTRY_SIZE,
            "completion queue",
        );
        match new {
            Ok(new) => {
                let old = std::mem::replace(ring, CompletionRing::new(new));
                index_check.resume(ring.consumer().indices());
                retired.push(old.into_mapping().retire());
                Ok(cqe)
            }
            Err(error) => {
                ring.seal();
                Err(error)
            }
        }
    }
}
