//! Shared receive queues: receive memory pools (RMP) for basic SRQs, XRC SRQs, and XRQs
//! for SRQs with tag matching.

use roce::bits::field;
use roce::transport::RecvWork;

use super::buffer::Buffer;
use super::core::Core;
use super::eq::event;
use super::tags::TagList;
use super::wqe::{self, LocalBuffers};
use crate::cause::{Cause, Misuse};
use crate::platform::Platform;

/// Position of the SRQ number in the identifier of a receive, above the index of its
/// WQE.
pub(crate) const SRQN_SHIFT: u32 = 32;

/// In the first segment of a WQE: index of the WQE that is used after it.
const NEXT_WQE_INDEX: roce::bits::Field = field(0, 15, 0);
/// Size of that segment in bytes.
const NEXT_SEGMENT: usize = 16;

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) pd: u32,
    /// XRC domain of an XRC SRQ.
    pub(crate) xrcd: Option<u32>,
    /// List of tags, if it has tag matching.
    pub(crate) tags: Option<Box<TagList>>,
    /// Completion queue and user index of an SRQ with one of these two.
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    pub(crate) doorbell: u64,
    pub(crate) privileged: bool,
    /// Index of the WQE that is used next.
    pub(crate) head: u16,
    /// Number of WQEs used.
    pub(crate) consumed: u16,
    /// Number of WQEs posted, as last read from the doorbell record.
    pub(crate) posted: u16,
    /// A limit event is posted when fewer WQEs than this are left; 0 disables it.
    pub(crate) limit: u16,
    pub(crate) state: u32,
}

impl Srq {
    /// Returns whether completions go to its own completion queue, not to those of its
    /// queue pairs.
    pub(crate) fn has_cq(&self) -> bool {
        self.xrcd.is_some() || self.tags.is_some()
    }
}

impl<P: Platform> Core<P> {
    /// Takes the next WQE of an SRQ.
    pub(crate) fn next_srq_receive(&mut self, srqn: u32) -> Option<RecvWork<LocalBuffers>> {
        let srq = self.srqs.get_mut(srqn)?;
        if srq.consumed == srq.posted {
            let Ok(posted) = self.platform.read_index(srq.doorbell) else {
                self.observe(|_| {
                    Some(Cause::Misuse(Misuse::Unmapped {
                        what: "doorbell record of SRQ",
                        number: srqn,
                    }))
                });
                return None;
            };
            srq.posted = posted as u16;
            if srq.consumed == srq.posted {
                return None;
            }
        }
        let index = srq.head & ((1u32 << srq.log_size) - 1) as u16;
        let stride = 1usize << srq.log_stride;
        let mut bytes = [0; wqe::MAX_RECV_WQE];
        let bytes = &mut bytes[..stride.min(wqe::MAX_RECV_WQE)];
        let at = u64::from(index) << srq.log_stride;
        if srq.buffer.read(&self.platform, at, bytes).is_err() {
            self.report_misuse(Misuse::Unmapped {
                what: "SRQ",
                number: srqn,
            });
            self.post_queue_event(event::SRQ_CATASTROPHIC, 0, srqn);
            return None;
        }
        srq.head = NEXT_WQE_INDEX.get(bytes) as u16;
        srq.consumed = srq.consumed.wrapping_add(1);
        let remaining = srq.posted.wrapping_sub(srq.consumed);
        let limit_reached = srq.limit != 0 && remaining < srq.limit;
        if limit_reached {
            srq.limit = 0;
        }
        let privileged = srq.privileged;
        let pd = srq.pd;
        let (local, length) =
            wqe::parse_receive(&bytes[NEXT_SEGMENT.min(bytes.len())..], pd, privileged);
        if limit_reached {
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
