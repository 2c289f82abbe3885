//! Methods of both halves of a queue pair.

use uverbs::QpCap;

use super::{QpAttr, QpAttrMask, RecvHalf, SendHalf, State, Transport};
use crate::memory::MemorySlice;
use crate::{AccessFlags, Context, ProtectionDomain, Result};

macro_rules! of_the_queue_pair {
    ($half:ident) => {
        impl $half {
            /// Returns the queue pair number, 24 bits.
            pub fn qp_num(&self) -> u32 {
                self.inner.object.qp_num()
            }

            /// Returns the identifier that asynchronous events carry
            /// ([`QueuePair::id`](crate::QueuePair::id)).
            pub fn id(&self) -> u64 {
                self.inner.id
            }

            /// Returns the transport service.
            pub fn transport(&self) -> Transport {
                self.inner.transport
            }

            /// Returns the protection domain.
            pub fn domain(&self) -> &ProtectionDomain {
                &self.inner.domain
            }

            /// Returns the context.
            pub fn context(&self) -> &Context {
                self.inner.domain.context()
            }

            /// Returns the capacities that the queue pair was created with.
            pub fn capacity(&self) -> QpCap {
                self.inner.cap
            }

            /// Returns the state that this crate last set
            /// ([`QueuePair::state`](crate::QueuePair::state)).
            pub fn state(&self) -> State {
                self.inner.state()
            }

            /// Queries the queue pair's attributes. A system call.
            ///
            /// # Errors
            /// EIO if the device was removed.
            pub fn query(&self) -> Result<QpAttr> {
                self.inner.query()
            }

            /// Moves the whole queue pair to the error state: operations in
            /// flight are flushed, that is, they complete with
            /// [`Status::WR_FLUSH_ERR`](crate::Status::WR_FLUSH_ERR).
            ///
            /// # Errors
            /// EIO if the device was removed.
            pub fn set_error(&mut self) -> Result<()> {
                self.inner.set_error()
            }
        }
    };
}

of_the_queue_pair!(SendHalf);
of_the_queue_pair!(RecvHalf);

impl super::Inner {
    pub(super) fn query(&self) -> Result<QpAttr> {
        let all = QpAttrMask::from_bits_retain(0x001f_ffff);
        let (mut attr, _) = self.object.query(all)?;
        if let Some(cap) = self.domain.context().provider().capacities(self.cap) {
            attr.cap = cap;
        }
        Ok(attr)
    }

    pub(super) fn set_error(&self) -> Result<()> {
        let attr = QpAttr {
            qp_state: State::ERR,
            ..QpAttr::default()
        };
        self.modify(&attr, QpAttrMask::STATE)
    }
}

impl SendHalf {
    /// Returns a byte of registered memory for reads whose data is ignored;
    /// shared by any number of reads.
    pub(crate) fn scratch(&mut self) -> Result<MemorySlice> {
        if let Some(scratch) = &self.scratch {
            return Ok(scratch.clone());
        }
        let region = self.domain().alloc_remote(1, AccessFlags::empty())?;
        let scratch = region.slice(..1)?;
        self.scratch = Some(scratch.clone());
        Ok(scratch)
    }
}
