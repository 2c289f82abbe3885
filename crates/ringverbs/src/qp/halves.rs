//! What the halves of a queue pair know and do, together or apart.

use uverbs::QpCap;

use super::{PostError, QpAttr, QpAttrMask, RecvHalf, SendHalf, State, Transport, WorkRequest};
use crate::data::{Sink, Source};
use crate::memory::MemorySlice;
use crate::operation::RemoteAddr;
use crate::{AccessFlags, Context, ProtectionDomain, Result};

macro_rules! of_the_queue_pair {
    ($half:ident) => {
        impl $half {
            /// The queue pair's number on the wire, 24 bits.
            pub fn qp_num(&self) -> u32 {
                self.inner.object.qp_num()
            }

            /// What asynchronous events name the queue pair by
            /// ([`QueuePair::id`](crate::QueuePair::id)).
            pub fn id(&self) -> u64 {
                self.inner.id
            }

            /// The queue pair's transport service.
            pub fn transport(&self) -> Transport {
                self.inner.transport
            }

            /// The queue pair's protection domain.
            pub fn domain(&self) -> &ProtectionDomain {
                &self.inner.domain
            }

            /// The context that the queue pair lives in.
            pub fn context(&self) -> &Context {
                self.inner.domain.context()
            }

            /// The sizes that the queue pair was made with.
            pub fn capacity(&self) -> QpCap {
                self.inner.cap
            }

            /// The state that either half was brought to last
            /// ([`QueuePair::state`](crate::QueuePair::state)).
            pub fn state(&self) -> State {
                self.inner.state()
            }

            /// Asks the kernel for the queue pair's attributes.
            ///
            /// # Errors
            /// EIO if the device is gone.
            pub fn query(&self) -> Result<QpAttr> {
                self.inner.query()
            }

            /// Moves the queue pair, both halves of it, to the error state:
            /// everything in flight is completed with
            /// [`Status::WR_FLUSH_ERR`](crate::Status::WR_FLUSH_ERR).
            ///
            /// # Errors
            /// EIO if the device is gone.
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
        if let Some(cap) = self.domain.context().provider().sizes(self.cap) {
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
    /// A byte that nobody looks at, for any number of reads at a time.
    pub(crate) fn scratch(&mut self) -> Result<MemorySlice> {
        if let Some(scratch) = &self.scratch {
            return Ok(scratch.clone());
        }
        let region = self.domain().alloc_remote(1, AccessFlags::empty())?;
        let scratch = region.slice(..1)?;
        self.scratch = Some(scratch.clone());
        Ok(scratch)
    }

    /// Sends a message to a receive of the peer's, and hears of its end.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn send<D: Source>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        self.post(WorkRequest::send(data).token(token))
    }

    /// Writes to memory of the peer's, and hears of its end.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn write<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.post(WorkRequest::write(data, to).token(token))
    }

    /// Reads memory of the peer's.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    #[inline]
    pub fn read<D: Sink>(
        &mut self,
        data: D,
        from: RemoteAddr,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.post(WorkRequest::read(data, from).token(token))
    }
}
