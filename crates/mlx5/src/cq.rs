//! Completion queues: the kernel object and its ring.

use uverbs::{ContextRef, Cq, CqInit, Udata};

use crate::abi::{CreateCq, CreateCqResp, Plain};
use crate::{Arming, CompletionRing, CreateError};

/// A completion queue. The parts are public so that a face can put each under
/// the lock, or the single owner, that it needs.
///
/// The kernel object is destroyed before the entries' memory goes.
#[derive(Debug)]
pub struct CompletionQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Cq<C>,
    /// The entries and the reader of them.
    pub ring: CompletionRing,
    /// Asks for events.
    pub arming: Arming,
}

impl<C: ContextRef> CompletionQueue<C> {
    /// More entries than this no device has.
    const MOST: u32 = 1 << 24;

    /// Makes a completion queue of at least `init.cqe` entries; it holds
    /// `object.cqe()`.
    ///
    /// # Errors
    /// [`CreateError::TooLarge`] for none or too many; those of memory and of
    /// CREATE_CQ. Nothing is left behind.
    pub fn create(context: &C, init: &CqInit) -> Result<Self, CreateError> {
        // One more, as the C provider has it: the driver takes as many as its
        // next power of two.
        let entries = match init.cqe {
            0 => None,
            cqe => (cqe.checked_add(1)).and_then(u32::checked_next_power_of_two),
        };
        let entries = entries
            .filter(|entries| *entries <= Self::MOST)
            .ok_or(CreateError::TooLarge { what: "cqe" })?;
        let ring = CompletionRing::new(entries.ilog2())?;
        let request = CreateCq {
            buf_addr: ring.memory().address(),
            db_addr: ring.memory().records_address(),
            cqe_size: CompletionRing::ENTRY_SIZE as u32,
            ..CreateCq::default()
        };
        let mut answer = CreateCqResp::default();
        let init = CqInit {
            cqe: entries - 1,
            ..*init
        };
        // SAFETY: the addresses are those of the ring's memory, which has that
        // many entries and two doorbell records, and outlives the object: it
        // lives in the same value, behind it.
        let udata = unsafe { Udata::new(request.bytes(), answer.bytes_mut()) };
        let object = Cq::create(context, &init, udata)?;
        if object.cqe() != entries - 1 {
            return Err(CreateError::BadAnswer {
                what: "the entries of a completion queue",
            });
        }
        Ok(Self {
            arming: Arming::new(&ring, answer.cqn),
            object,
            ring,
        })
    }
}
