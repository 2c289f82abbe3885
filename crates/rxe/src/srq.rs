//! Shared receive queues.

use uverbs::{ContextRef, Srq, SrqInit, SrqModify, Udata};

use crate::abi::{self, CreateSrqResp, MmapInfo, ModifySrqCmd, Pod};
use crate::map::map_ring;
use crate::{CreateError, RecvQueue};

/// A shared receive queue. The parts are public so that the
/// caller can put the queue under a lock.
#[derive(Debug)]
pub struct SharedReceiveQueue<C: ContextRef> {
    /// The kernel object.
    pub object: Srq<C>,
    /// The queue.
    pub recv: RecvQueue,
    /// The SRQ number.
    pub srq_num: u32,
}

impl<C: ContextRef> SharedReceiveQueue<C> {
    /// Creates a shared receive queue and maps it.
    ///
    /// # Errors
    /// Those of CREATE_SRQ and of mapping; nothing is left behind.
    pub fn create(context: &C, init: &SrqInit) -> Result<Self, CreateError> {
        let mut response = CreateSrqResp::default();
        let object = Srq::create(context, init, abi::response(&mut response))?;
        let ring = map_ring(
            context,
            &response.queue,
            RecvQueue::ENTRY_SIZE,
            "shared receive queue",
        )?;
        Ok(Self {
            recv: RecvQueue::new(ring, object.max_sge()),
            srq_num: response.srq_num,
            object,
        })
    }

    /// Changes the limit, the size, or both. Posted receives stay posted.
    ///
    /// The caller has exclusive access to `recv` until this returns.
    ///
    /// # Errors
    /// Those of MODIFY_SRQ: nothing has changed. Those of mapping: the queue was
    /// resized but is unmapped; it is always full from then on.
    pub fn modify(
        object: &Srq<C>,
        recv: &mut RecvQueue,
        change: &SrqModify,
    ) -> Result<(), CreateError> {
        // The driver writes the new queue's location to an address in the input,
        // not to the response (rxe_srq_from_attr in rxe_srq.c).
        let mut response = MmapInfo::default();
        let command = ModifySrqCmd {
            mmap_info_addr: (&raw mut response).expose_provenance() as u64,
        };
        // SAFETY: the address is that of `response`, which outlives the call.
        let udata = unsafe { Udata::new(command.bytes(), &mut []) };
        object.modify(change, udata)?;
        if change.max_wr.is_none() {
            return Ok(());
        }
        // SAFETY: a local of this function, which the kernel may have written to.
        let response = unsafe { (&raw const response).read_volatile() };
        let ring = map_ring(
            object.context(),
            &response,
            RecvQueue::ENTRY_SIZE,
            "shared receive queue",
        );
        match ring {
            Ok(ring) => {
                *recv = RecvQueue::new(ring, recv.max_sge());
                Ok(())
            }
            Err(error) => {
                recv.seal();
                Err(error)
            }
        }
    }
}
