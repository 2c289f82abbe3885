//! Send queues.

use uverbs::{Data, Destination, PostError, Sge};

use super::{MAX_MESSAGE, SendWr, mlx5, rxe};
use crate::error::{Error, Result};

/// The send queue of a device.
#[derive(Debug)]
pub(crate) enum SendQueue {
    Rxe(rxe::SendQueue),
    Mlx5(mlx5::SendQueue),
}

/// The address of a datagram in a device's format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Address {
    /// The number of the kernel's address handle.
    Rxe(u32),
    /// The address vector.
    Mlx5(::mlx5::Address),
}

impl SendQueue {
    /// Starts a batch and discards an unpublished one.
    #[inline]
    pub fn begin(&mut self) {
        for_device!(self, queue => queue.begin());
    }

    /// Adds a work request to the batch, with `data` instead of `wr.data`.
    ///
    /// # Errors
    /// The device's refusal; an address of another device. The batch is unchanged.
    ///
    /// # Safety
    /// Inline data is readable.
    #[inline(always)]
    pub unsafe fn push(&mut self, wr: &SendWr<'_>, data: Data<'_>) -> Result<()> {
        // SAFETY: the caller's obligation.
        let pushed = unsafe { for_device!(self, queue => queue.push(wr, data)) };
        pushed.map_err(|error| self.refused(error, data))
    }

    /// Posts the batch, and rings the doorbell if there is anything in it.
    ///
    /// # Errors
    /// [`Error::Doorbell`] on rdma_rxe, whose doorbell is a system call: the batch is posted
    /// nevertheless.
    ///
    /// # Safety
    /// The memory of the work requests stays registered, and is accessed only as the
    /// operations allow, until each has completed.
    // Without the attribute, 18 more instructions on ConnectX.
    #[inline(always)]
    pub unsafe fn publish(&mut self) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { for_device!(self, queue => queue.publish()) }
    }

    /// Discards the batch.
    #[cold]
    pub fn abort(&mut self) {
        for_device!(self, queue => queue.abort());
    }

    /// Called after the queue pair was reset with nothing in flight.
    pub fn reset(&mut self) {
        for_device!(self, queue => queue.reset());
    }

    /// Maximum number of outstanding work requests.
    pub fn capacity(&self) -> u32 {
        for_device!(self, queue => queue.capacity())
    }

    /// Maximum SGEs of a work request.
    #[inline]
    pub fn max_sge(&self) -> u32 {
        for_device!(self, queue => queue.max_sge())
    }

    /// Maximum bytes of inline data.
    fn max_inline(&self) -> u32 {
        for_device!(self, queue => queue.max_inline())
    }

    /// Returns the error for a refused work request with this data.
    #[cold]
    #[inline(never)]
    fn refused(&self, error: PostError, data: Data<'_>) -> Error {
        let (Data::Sges(list) | Data::Inline(list)) = data;
        match error {
            PostError::InlineTooLong => Error::Limit {
                what: "bytes of inline data",
                asked: message_length(list),
                allowed: self.max_inline().into(),
            },
            error => refused(error, self.capacity(), list, self.max_sge()),
        }
    }
}

/// Returns inline data in the format of the device crates. No queue holds more bytes than an
/// SGE can describe, so longer data is refused in any case.
#[inline]
pub(crate) fn inline_piece(bytes: &[u8]) -> Sge {
    Sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        lkey: 0,
    }
}

/// Returns a work request with this data for a device crate's slow path, which reads the address: in its
/// format. The fast path takes the work request as it is.
///
/// # Errors
/// [`PostError::BadOperation`]: the address belongs to another device.
#[inline]
pub(super) fn addressed<'a, A>(
    wr: &SendWr<'a>,
    data: Data<'a>,
    address_of: impl FnOnce(&'a Address) -> Option<&'a A>,
) -> Result<uverbs::SendWr<'a, A>, PostError> {
    let destination = match wr.destination {
        Destination::Connected => Destination::Connected,
        Destination::InWqe => Destination::InWqe,
        Destination::Datagram {
            address,
            remote_qpn,
            remote_qkey,
        } => Destination::Datagram {
            address: address_of(address).ok_or(PostError::BadOperation)?,
            remote_qpn,
            remote_qkey,
        },
        Destination::Xrc { remote_srqn } => Destination::Xrc { remote_srqn },
        Destination::Dc {
            address,
            remote_dctn,
            access_key,
            stream,
        } => Destination::Dc {
            address: address_of(address).ok_or(PostError::BadOperation)?,
            remote_dctn,
            access_key,
            stream,
        },
    };
    Ok(uverbs::SendWr {
        wr_id: wr.wr_id,
        opcode: wr.opcode,
        flags: wr.flags,
        imm_or_key: wr.imm_or_key,
        remote: wr.remote,
        operands: wr.operands,
        destination,
        data,
    })
}

/// Returns the length of a message.
pub(super) fn message_length(list: &[Sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.length)).sum()
}

/// Returns the error for a work request with this scatter/gather list that a device crate
/// has refused.
#[cold]
#[inline(never)]
pub(super) fn refused(error: PostError, capacity: u32, list: &[Sge], max_sge: u32) -> Error {
    match error {
        PostError::Full => Error::QueueFull { capacity },
        PostError::TooManySges => Error::Limit {
            what: "scatter/gather elements",
            asked: list.len() as u64,
            allowed: max_sge.into(),
        },
        PostError::MessageTooLong => Error::Limit {
            what: "bytes in a message",
            asked: message_length(list),
            allowed: MAX_MESSAGE.into(),
        },
        PostError::Unsupported => Error::Unsupported {
            what: "a memory window of more than 2 GiB",
        },
        _ => Error::Invalid {
            what: "the queue pair does not support this operation, or not with this data",
        },
    }
}
