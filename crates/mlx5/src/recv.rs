//! Receive queues of queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;

use ring::DoorbellRecord;
use uverbs::Sge;

use crate::abi::{DataSegment, INVALID_LKEY};
use crate::send::MAX_SEGMENT;
use crate::{PostError, Work};

/// A receive queue.
///
/// A batch: [`RecvQueue::begin`], [`RecvQueue::push`] for each receive, and
/// [`RecvQueue::publish`] once.
///
/// Thread rule: one caller at a time (`&mut`). No method allocates, locks or
/// calls the system.
#[derive(Debug)]
pub struct RecvQueue {
    /// Receives that the device has been given, ever.
    posted: u32,
    /// Those, and the batch's.
    next: u32,
    record: DoorbellRecord,
    work: Arc<Work>,
}

impl RecvQueue {
    /// The writer over a queue pair's receive queue.
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Self {
            posted: 0,
            next: 0,
            record: work.memory.record(0),
            work,
        }
    }

    /// Receives that the queue holds at most.
    pub fn capacity(&self) -> u32 {
        self.work.recv.entries
    }

    /// Scatter/gather elements that a receive holds at most.
    pub fn max_sge(&self) -> u32 {
        self.work.recv.max_sge
    }

    /// The queue pair has been reset: starts anew. Its completions have been
    /// taken out before ([`crate::CompletionRing::clean`]).
    pub fn reset(&mut self) {
        (self.posted, self.next) = (0, 0);
        self.work.receives.reset();
        self.record.publish(0);
    }

    /// Starts a batch. A batch before it that was not published is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.next = self.posted;
    }

    /// Adds a receive into the memory of `list` to the batch. Every batch
    /// starts with [`RecvQueue::begin`].
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::TooManySges`],
    /// [`PostError::MessageTooLong`]; the batch is as it was.
    #[inline(always)]
    pub fn push(&mut self, wr_id: u64, list: &[Sge]) -> Result<(), PostError> {
        let work = &*self.work;
        let plan = &work.recv;
        let mark = self.next.wrapping_add(1);
        if mark.wrapping_sub(work.receives.completed()) > plan.entries {
            return Err(PostError::Full);
        }
        if list.len() > plan.max_sge as usize {
            return Err(PostError::TooManySges);
        }
        let slot = self.next & (plan.entries - 1);
        // SAFETY: an entry of the queue, of `max_sge` segments, that is not the
        // device's: there is room.
        unsafe {
            let entry = work.memory.entries().add((slot as usize) << plan.shift);
            write_list(entry.cast(), list, plan.max_sge)?;
        }
        work.receives.post(slot, wr_id, mark);
        self.next = mark;
        Ok(())
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    /// The memory of every list stays registered, and is neither read nor
    /// written by the process, until its receive has completed.
    #[inline(always)]
    pub unsafe fn publish(&mut self) {
        if self.next != self.posted {
            self.posted = self.next;
            self.record.publish(self.posted & 0xffff);
        }
    }
}

/// Writes a scatter list, without elements of no bytes, and its end if it is
/// shorter than the entry.
///
/// # Safety
/// `to` has room for `room` segments, and is aligned for them; the list is no
/// longer.
#[inline(always)]
pub(crate) unsafe fn write_list(
    to: NonNull<DataSegment>,
    list: &[Sge],
    room: u32,
) -> Result<(), PostError> {
    // SAFETY: `at` is less than `room`, at every call.
    let write = |at: usize, byte_count: u32, lkey: u32, addr: u64| unsafe {
        to.add(at).write(DataSegment {
            byte_count: byte_count.to_be(),
            lkey: lkey.to_be(),
            addr: addr.to_be(),
        });
    };
    let mut at = 0;
    match list {
        // Nearly all.
        [sge] if sge.length.wrapping_sub(1) < MAX_SEGMENT - 1 => {
            write(0, sge.length, sge.lkey, sge.addr);
            at = 1;
        }
        _ => {
            for sge in list {
                if sge.length >= MAX_SEGMENT {
                    return Err(PostError::MessageTooLong);
                }
                // No bytes would mean 2 GiB.
                if sge.length == 0 {
                    continue;
                }
                write(at, sge.length, sge.lkey, sge.addr);
                at += 1;
            }
        }
    }
    if at < room as usize {
        write(at, 0, INVALID_LKEY, 0);
    }
    Ok(())
}
