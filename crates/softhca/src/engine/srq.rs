//! Shared receive queues: memory pools of the verbs' SRQs, and XRC's.

use super::buffer::Buffer;
use super::core::Core;
use super::eq::event;
use super::wqe::{self, Local};
use crate::bits::field;
use crate::platform::Platform;
use crate::transport::RecvWork;

/// Where the SRQ's number is in the id of a receive, above the entry's index.
pub(crate) const SRQN_SHIFT: u32 = 32;

/// In the first segment of an entry: which entry is used after it.
const NEXT: crate::bits::Field = field(0, 15, 0);
/// Bytes of that segment.
const NEXT_SEGMENT: usize = 16;

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) pd: u32,
    /// XRC: the domain, and where to complete.
    pub(crate) xrcd: Option<u32>,
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    pub(crate) doorbell: u64,
    pub(crate) privileged: bool,
    /// The entry that is used next.
    pub(crate) head: u16,
    /// How many were used.
    pub(crate) used: u16,
    /// How many were posted, as last read.
    pub(crate) posted: u16,
    /// An event is wanted when fewer than these are left; 0 for none.
    pub(crate) limit: u16,
    pub(crate) state: u32,
}

impl<P: Platform> Core<P> {
    /// Takes the next entry of an SRQ for a queue pair.
    pub(crate) fn next_of_srq(&mut self, srqn: u32) -> Option<RecvWork<Local>> {
        let srq = self.srqs.get_mut(srqn)?;
        if srq.used == srq.posted {
            srq.posted = self.platform.read_index(srq.doorbell).ok()? as u16;
            if srq.used == srq.posted {
                return None;
            }
        }
        let index = srq.head & ((1u32 << srq.log_size) - 1) as u16;
        let stride = 1usize << srq.log_stride;
        let mut bytes = [0; wqe::LONGEST_RECEIVE];
        let bytes = &mut bytes[..stride.min(wqe::LONGEST_RECEIVE)];
        let at = u64::from(index) << srq.log_stride;
        if srq.buffer.read(&self.platform, at, bytes).is_err() {
            self.complain(|| format!("SRQ {srqn} is not in memory"));
            self.post_queue_event(event::SRQ_CATASTROPHIC, 0, srqn);
            return None;
        }
        srq.head = NEXT.get(bytes) as u16;
        srq.used = srq.used.wrapping_add(1);
        let left = srq.posted.wrapping_sub(srq.used);
        let tell = srq.limit != 0 && left < srq.limit;
        if tell {
            srq.limit = 0;
        }
        let privileged = srq.privileged;
        let pd = srq.pd;
        let (local, length) = wqe::receive(&bytes[NEXT_SEGMENT.min(bytes.len())..], pd, privileged);
        if tell {
            self.post_queue_event(event::SRQ_LIMIT, 0, srqn);
        }
        self.stats.receive_requests += 1;
        Some(RecvWork {
            id: u64::from(srqn) << SRQN_SHIFT | u64::from(index),
            length,
            local,
        })
    }
}
