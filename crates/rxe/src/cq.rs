//! Completion queues: the kernel object and its mapped ring.

use ring::{IndexCheck, Retired};
use uverbs::{ContextRef, Cq, CqInit};

use crate::abi::{self, MmapInfo};
use crate::map::map_ring;
use crate::{CreateError, WcRing};

/// A completion queue. The parts are public so that the caller
/// can put each under its own lock or owner.
#[derive(Debug)]
pub struct CompletionQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Cq<C>,
    /// The entries and the cursor over them.
    pub ring: WcRing,
    /// Whether the queue is empty, without the lock.
    pub index_check: IndexCheck,
    /// Rings that a resize replaced, which threads may still read through `index_check`.
    pub retired: Vec<Retired>,
}

impl<C: ContextRef> CompletionQueue<C> {
    /// Creates a completion queue and maps it. It holds `object.cqe()` entries,
    /// at least the requested number.
    ///
    /// # Errors
    /// Those of CREATE_CQ and of mapping; nothing is left behind.
    pub fn create(context: &C, init: &CqInit) -> Result<Self, CreateError> {
        let mut response = MmapInfo::default();
        let object = Cq::create(context, init, abi::response(&mut response))?;
        let ring = map_ring(context, &response, WcRing::ENTRY_SIZE, "completion queue")?;
        let ring = WcRing::new(ring);
        Ok(Self {
            // SAFETY: the ring's memory lives in the same value, and is
            // retired, not unmapped, when a resize replaces it.
            index_check: unsafe { IndexCheck::new(ring.consumer().indices()) },
            ring,
            retired: Vec::new(),
            object,
        })
    }

    /// Resizes the queue; the completions in it stay, in order. Returns its
    /// capacity.
    ///
    /// The caller has exclusive access to `ring` and `retired` until this
    /// returns; other threads may use `index_check` meanwhile.
    ///
    /// # Errors
    /// Those of RESIZE_CQ: nothing has changed. Those of mapping: the queue was
    /// resized but is unmapped; it reads as empty from then on.
    pub fn resize(
        object: &Cq<C>,
        ring: &mut WcRing,
        index_check: &IndexCheck,
        retired: &mut Vec<Retired>,
        cqe: u32,
    ) -> Result<u32, CreateError> {
        retired.try_reserve(1).map_err(|_| CreateError::NoMemory)?;
        let mut response = MmapInfo::default();
        index_check.suspend();
        let cqe = match object.resize(cqe, abi::response(&mut response)) {
            Ok(cqe) => cqe,
            Err(error) => {
                index_check.resume(ring.consumer().indices());
                return Err(error.into());
            }
        };
        let new = map_ring(
            object.context(),
            &response,
            WcRing::ENTRY_SIZE,
            "completion queue",
        );
        match new {
            Ok(new) => {
                let old = std::mem::replace(ring, WcRing::new(new));
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
