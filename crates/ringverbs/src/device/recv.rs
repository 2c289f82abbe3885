//! Receive queues' writers.

use uverbs::PostError;

use super::send::{message_length, refused};
use super::{MAX_MESSAGE, Sge};
use crate::error::Result;

/// A queue pair's receive queue.
#[derive(Debug)]
pub(crate) enum RecvQueue {
    Rxe(::rxe::RecvQueue),
    Mlx5(::mlx5::RecvQueue),
}

impl RecvQueue {
    /// Starts a batch; one that was not published is gone.
    #[inline(always)]
    pub fn writer(&mut self) -> RecvWriter<'_> {
        match self {
            Self::Rxe(queue) => RecvWriter::Rxe(queue.begin()),
            Self::Mlx5(queue) => RecvWriter::Mlx5(queue.begin()),
        }
    }

    /// The queue pair was reset, with nothing in flight.
    pub fn reset(&mut self) {
        if let Self::Mlx5(queue) = self {
            queue.reset();
        }
    }

    pub fn capacity(&self) -> u32 {
        match self {
            Self::Rxe(queue) => queue.capacity(),
            Self::Mlx5(queue) => queue.capacity(),
        }
    }

    pub fn max_sge(&self) -> u32 {
        match self {
            Self::Rxe(queue) => queue.max_sge(),
            Self::Mlx5(queue) => queue.max_sge(),
        }
    }
}

/// Writes one batch after another to a receive queue. Whose it is, is asked of
/// this value alone: in a loop that writes nothing else, once.
pub(crate) enum RecvWriter<'q> {
    Rxe(::rxe::RecvWriter<'q>),
    Mlx5(::mlx5::RecvWriter<'q>),
}

impl RecvWriter<'_> {
    /// Adds a receive to the batch.
    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        match self {
            Self::Rxe(writer) => {
                if matches!(list, [sge] if writer.push_one(wr_id, sge)) {
                    return Ok(());
                }
                writer.with_queue(|queue| push_rxe(queue, wr_id, list))
            }
            Self::Mlx5(writer) => {
                if matches!(list, [sge] if writer.push_one(wr_id, sge)) {
                    return Ok(());
                }
                writer.with_queue(|queue| push_mlx5(queue, wr_id, list))
            }
        }
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays, and is left alone, until its receive
    /// has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Rxe(writer) => writer.publish_any(),
                Self::Mlx5(writer) => writer.publish_any(),
            }
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) enum SharedRecvQueue {
    Rxe(::rxe::RecvQueue),
    Mlx5(::mlx5::SharedQueue),
}

impl SharedRecvQueue {
    /// Adds a receive to what is published next.
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<()> {
        let (capacity, max_sge) = (self.capacity(), self.max_sge());
        let pushed = match self {
            Self::Rxe(queue) => queue.begin().keep().push(wr_id, list),
            Self::Mlx5(queue) => push_counted(list, |list| queue.locked().push(wr_id, list)),
        };
        pushed.map_err(|error| refused(error, capacity, list, max_sge))
    }

    /// Hands it to the device.
    ///
    /// # Safety
    /// As of [`RecvWriter::publish`].
    pub unsafe fn publish(&mut self) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Rxe(queue) => queue.publish(),
                Self::Mlx5(queue) => queue.locked().publish(),
            }
        }
    }

    pub fn capacity(&self) -> u32 {
        match self {
            Self::Rxe(queue) => queue.capacity(),
            Self::Mlx5(queue) => queue.capacity(),
        }
    }

    pub fn max_sge(&self) -> u32 {
        match self {
            Self::Rxe(queue) => queue.max_sge(),
            Self::Mlx5(queue) => queue.max_sge(),
        }
    }
}

// What is not one of nearly all. Apart, so that nothing is saved for it.

#[inline(never)]
fn push_rxe(queue: &mut ::rxe::RecvQueue, wr_id: u64, list: &[Sge]) -> Result<()> {
    let pushed = queue.push(wr_id, list);
    pushed.map_err(|error| refused(error, queue.capacity(), list, queue.max_sge()))
}

#[inline(never)]
fn push_mlx5(queue: &mut ::mlx5::RecvQueue, wr_id: u64, list: &[Sge]) -> Result<()> {
    let pushed = push_counted(list, |list| queue.push(wr_id, list));
    pushed.map_err(|error| refused(error, queue.capacity(), list, queue.max_sge()))
}

/// Pushes to a queue of a ConnectX, which counts a message's bytes in 31 bits.
fn push_counted(
    list: &[Sge],
    push: impl FnOnce(&[Sge]) -> Result<(), PostError>,
) -> Result<(), PostError> {
    if message_length(list) >= MAX_MESSAGE.into() {
        return Err(PostError::MessageTooLong);
    }
    push(list)
}
