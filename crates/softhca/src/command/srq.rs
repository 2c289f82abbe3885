//! Shared receive queue commands: RMPs, which are the SRQs of verbs, XRC SRQs, and XRQs
//! with tag matching. They share one range of numbers.

use roce::bits::{Field, field, flag, get32, get64, put64};

use super::load::object_number;
use super::resource::return_number;
use crate::engine::core::Core;
use crate::engine::srq::Srq;
use crate::engine::tag_matching::{self, TagList};
use crate::platform::Platform;
use crate::status::{Outcome, Status, refuse};

/// Base-2 logarithms of the limits of queue length and entry size.
const MAX_LOG_SIZE: u32 = 16;
const MAX_LOG_STRIDE: u32 = 9;
const MIN_LOG_STRIDE: u32 = 5;

const XRC: usize = 0x10;
const XRC_STATE: Field = field(0, 31, 28);
const XRC_LOG_SIZE: Field = field(0, 27, 24);
const XRC_RLKY: Field = flag(4, 28);
const XRC_LOG_STRIDE: Field = field(4, 26, 24);
const XRC_DOMAIN: Field = field(4, 23, 0);
const XRC_PAGE_OFFSET: Field = field(8, 31, 26);
const XRC_CQN: Field = field(8, 23, 0);
const XRC_UIDX_EQUALS_SRQN: Field = flag(0x10, 31);
const XRC_LOG_PAGE_SIZE: Field = field(0x10, 29, 24);
const XRC_UIDX: Field = field(0x10, 23, 0);
const XRC_PD: Field = field(0x18, 23, 0);
const XRC_LIMIT: Field = field(0x1c, 31, 16);
const XRC_COUNT: Field = field(0x1c, 15, 0);
const XRC_DOORBELL: usize = 0x28;
const XRC_RECORDS_IN_UMEM: Field = flag(8, 24);
const XRC_RECORDS_UMEM: Field = field(0xc, 31, 0);
/// The umem of the entries, after the context.
const XRC_UMEM_OFFSET: usize = 0x50;
const XRC_UMEM: Field = field(0x58, 31, 0);
const XRC_IN_UMEM: Field = flag(0x5c, 31);

pub(crate) const POOL: usize = 0x20;
const POOL_STATE: Field = field(0, 23, 20);
/// Offset of the work queue in the context of an RMP, a receive queue or a send
/// queue.
pub(crate) const WQ: usize = 0x30;
pub(crate) const WQ_PAGE_OFFSET: Field = field(4, 20, 16);
const WQ_LIMIT: Field = field(4, 15, 0);
pub(crate) const WQ_PD: Field = field(8, 23, 0);
pub(crate) const WQ_DOORBELL: usize = 0x10;
pub(crate) const WQ_LOG_STRIDE: Field = field(0x20, 19, 16);
pub(crate) const WQ_LOG_PAGE_SIZE: Field = field(0x20, 12, 8);
pub(crate) const WQ_LOG_SIZE: Field = field(0x20, 4, 0);
const WQ_RECORDS_IN_UMEM: Field = flag(0x24, 31);
const WQ_IN_UMEM: Field = flag(0x24, 30);
const WQ_RECORDS_UMEM: Field = field(0x28, 31, 0);
const WQ_UMEM: Field = field(0x2c, 31, 0);
const WQ_UMEM_OFFSET: usize = 0x30;

const XRQ: usize = 0x10;
/// The device transfers rendezvous.
const XRQ_OFFLOAD: Field = field(XRQ, 3, 0);
const XRQ_TOPOLOGY: Field = field(XRQ, 11, 8);
const XRQ_UIDX: Field = field(XRQ + 0x4, 23, 0);
const XRQ_CQN: Field = field(XRQ + 0x8, 23, 0);
const XRQ_LOG_TAGS: Field = field(XRQ + 0x20, 31, 28);
const XRQ_NEXT_TAG: Field = field(XRQ + 0x20, 15, 0);
const XRQ_SEEN: Field = field(XRQ + 0x24, 31, 16);
const XRQ_RECEIVED: Field = field(XRQ + 0x24, 15, 0);
/// Offset of the work queue in the command, and the distance of its page list from that
/// of CREATE_RMP.
const XRQ_WQ: usize = 0x90;
const XRQ_PAGE_LIST_SHIFT: usize = XRQ_WQ - POOL - WQ;
const TAG_MATCHING: u32 = 1;
const TRANSFERS: u32 = 1;

const MODIFY_MASK: usize = 0x14;
const MODIFY_LIMIT: u32 = 1;
const ARM_LIMIT: Field = field(0xc, 15, 0);

/// Returns the umem of a work queue's entries and the offset in it, if it names one.
pub(crate) fn wq_umem(wq: &[u8]) -> Option<(u32, u64)> {
    let in_umem = WQ_IN_UMEM.is_set(wq);
    in_umem.then(|| (WQ_UMEM.get(wq), get64(wq, WQ_UMEM_OFFSET)))
}

/// Returns the umem of a work queue's doorbell records, if it names one.
pub(crate) fn wq_records_umem(wq: &[u8]) -> Option<u32> {
    WQ_RECORDS_IN_UMEM
        .is_set(wq)
        .then(|| WQ_RECORDS_UMEM.get(wq))
}

/// Writes the context of a work queue at byte `at`.
fn put_wq(srq: &Srq, at: usize, output: &mut [u8]) {
    WQ_LIMIT.at(at).put(output, u32::from(srq.limit));
    WQ_PD.at(at).put(output, srq.pd);
    WQ_LOG_STRIDE.at(at).put(output, srq.log_stride);
    WQ_LOG_SIZE.at(at).put(output, srq.log_size);
    put64(output, at + WQ_DOORBELL, srq.doorbell);
}

impl<P: Platform> Core<P> {
    /// Creates an SRQ with the fields that all kinds share.
    #[allow(clippy::too_many_arguments)] // Fields of two contexts.
    fn new_srq(
        &mut self,
        input: &[u8],
        pd: u32,
        log_size: u32,
        log_stride: u32,
        pages: (u32, u32),
        umem: Option<(u32, u64)>,
        (doorbell, records): (u64, Option<u32>),
    ) -> Result<Srq, super::CommandError> {
        if !self.has_pd(pd) {
            return Err(refuse(
                Status::BadResource,
                "the SRQ's protection domain does not exist",
            ));
        }
        if log_size > MAX_LOG_SIZE || !(MIN_LOG_STRIDE..=MAX_LOG_STRIDE).contains(&log_stride) {
            return Err(refuse(
                Status::ExceedsLimit,
                "the SRQ or its WQEs are too long",
            ));
        }
        let buffer = self.queue_buffer(input, 1 << (log_size + log_stride), umem, pages, false)?;
        let doorbell = self.doorbell_address(doorbell, records)?;
        Ok(Srq {
            pd,
            xrcd: None,
            tags: None,
            cqn: 0,
            uidx: 0,
            buffer,
            log_size,
            log_stride,
            doorbell,
            privileged: false,
            head: 0,
            consumed: 0,
            posted: 0,
            limit: 0,
            state: 0,
        })
    }

    pub(crate) fn create_xrc_srq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let context = &input[XRC.min(input.len())..];
        let mut srq = self.new_srq(
            input,
            XRC_PD.get(context),
            XRC_LOG_SIZE.get(context),
            XRC_LOG_STRIDE.get(context) + 4,
            (XRC_LOG_PAGE_SIZE.get(context), XRC_PAGE_OFFSET.get(context)),
            XRC_IN_UMEM
                .is_set(input)
                .then(|| (XRC_UMEM.get(input), get64(input, XRC_UMEM_OFFSET))),
            (
                get64(context, XRC_DOORBELL) & !3,
                (XRC_RECORDS_IN_UMEM.is_set(context)).then(|| XRC_RECORDS_UMEM.get(context)),
            ),
        )?;
        if XRC_RLKY.is_set(context) && self.object_owners.is_program() {
            return Err(refuse(
                Status::BadParameter,
                "programs may not use the reserved lkey",
            ));
        }
        let xrcd = XRC_DOMAIN.get(context);
        if self.xrcds.get(xrcd).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the SRQ's XRC domain does not exist",
            ));
        }
        srq.xrcd = Some(xrcd);
        srq.cqn = XRC_CQN.get(context);
        srq.privileged = XRC_RLKY.is_set(context);
        srq.limit = XRC_LIMIT.get(context) as u16;
        let uidx_equals_srqn = XRC_UIDX_EQUALS_SRQN.is_set(context);
        let uidx = XRC_UIDX.get(context);
        return_number(
            output,
            self.srqs.insert_with(|number| Srq {
                uidx: if uidx_equals_srqn { number } else { uidx },
                ..srq
            }),
        )
    }

    pub(crate) fn query_xrc_srq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(srq) = self.srqs.get(object_number(input)) else {
            return Err(refuse(Status::BadResource, "no such SRQ"));
        };
        XRC_STATE.at(XRC).put(output, srq.state);
        XRC_LOG_SIZE.at(XRC).put(output, srq.log_size);
        XRC_LOG_STRIDE
            .at(XRC)
            .put(output, srq.log_stride.saturating_sub(4));
        XRC_DOMAIN.at(XRC).put(output, srq.xrcd.unwrap_or(0));
        XRC_CQN.at(XRC).put(output, srq.cqn);
        XRC_PD.at(XRC).put(output, srq.pd);
        XRC_UIDX.at(XRC).put(output, srq.uidx);
        XRC_LIMIT.at(XRC).put(output, u32::from(srq.limit));
        XRC_COUNT
            .at(XRC)
            .put(output, u32::from(srq.posted.wrapping_sub(srq.consumed)));
        put64(output, XRC + XRC_DOORBELL, srq.doorbell);
        Ok(())
    }

    /// Creates an SRQ from the context of a work queue. `input` is the command from an
    /// offset on, such that its page list is where CREATE_RMP has it.
    fn new_srq_of_wq(&mut self, input: &[u8], wq: &[u8]) -> Result<Srq, super::CommandError> {
        let mut srq = self.new_srq(
            input,
            WQ_PD.get(wq),
            WQ_LOG_SIZE.get(wq),
            WQ_LOG_STRIDE.get(wq),
            (WQ_LOG_PAGE_SIZE.get(wq), WQ_PAGE_OFFSET.get(wq)),
            wq_umem(wq),
            (get64(wq, WQ_DOORBELL), wq_records_umem(wq)),
        )?;
        srq.limit = WQ_LIMIT.get(wq) as u16;
        Ok(srq)
    }

    pub(crate) fn create_rmp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let wq = &input[(POOL + WQ).min(input.len())..];
        let mut srq = self.new_srq_of_wq(input, wq)?;
        srq.state = POOL_STATE.at(POOL).get(input);
        // RMPs have no flag for the reserved lkey; the receives that the kernel
        // posts name real keys.
        return_number(output, self.srqs.insert(srq))
    }

    pub(crate) fn modify_rmp(&mut self, input: &[u8]) -> Outcome {
        let Some(srq) = self.srqs.get_mut(object_number(input)) else {
            return Err(refuse(Status::BadResource, "no such SRQ"));
        };
        srq.state = POOL_STATE.at(POOL).get(input);
        if get32(input, MODIFY_MASK) & MODIFY_LIMIT != 0 {
            srq.limit = WQ_LIMIT.at(POOL + WQ).get(input) as u16;
        }
        Ok(())
    }

    pub(crate) fn query_rmp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(srq) = self.srqs.get(object_number(input)) else {
            return Err(refuse(Status::BadResource, "no such SRQ"));
        };
        POOL_STATE.at(POOL).put(output, srq.state);
        put_wq(srq, POOL + WQ, output);
        Ok(())
    }

    pub(crate) fn create_xrq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let log_tags = XRQ_LOG_TAGS.get(input);
        if XRQ_TOPOLOGY.get(input) != TAG_MATCHING {
            return Err(refuse(Status::BadParameter, "an XRQ requires tag matching"));
        }
        if log_tags > tag_matching::LOG_MAX_TAGS {
            return Err(refuse(Status::ExceedsLimit, "the list of tags is too long"));
        }
        let cqn = XRQ_CQN.get(input);
        if self.cqs.get(cqn).is_none() {
            return Err(refuse(
                Status::BadResource,
                "the SRQ's completion queue does not exist",
            ));
        }
        let wq = &input[XRQ_WQ.min(input.len())..];
        let pages = &input[XRQ_PAGE_LIST_SHIFT.min(input.len())..];
        let mut srq = self.new_srq_of_wq(pages, wq)?;
        let transfers = XRQ_OFFLOAD.get(input) == TRANSFERS;
        srq.tags = Some(Box::new(TagList::new(log_tags, transfers)));
        srq.cqn = cqn;
        srq.uidx = XRQ_UIDX.get(input);
        return_number(output, self.srqs.insert(srq))
    }

    pub(crate) fn query_xrq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let srq = self.srqs.get(object_number(input));
        let Some((srq, tags)) = srq.and_then(|srq| Some((srq, srq.tags.as_deref()?))) else {
            return Err(refuse(Status::BadResource, "no such XRQ"));
        };
        XRQ_TOPOLOGY.put(output, TAG_MATCHING);
        XRQ_OFFLOAD.put(output, u32::from(tags.transfers) * TRANSFERS);
        XRQ_UIDX.put(output, srq.uidx);
        XRQ_CQN.put(output, srq.cqn);
        XRQ_LOG_TAGS.put(output, tags.log_size);
        XRQ_NEXT_TAG.put(output, tags.next.into());
        XRQ_SEEN.put(output, tags.seen.into());
        XRQ_RECEIVED.put(output, tags.received.into());
        put_wq(srq, XRQ_WQ, output);
        Ok(())
    }

    pub(crate) fn destroy_srq(&mut self, input: &[u8]) -> Outcome {
        let srqn = object_number(input);
        if self.queues.iter().any(|(_, queue)| queue.uses_srq(srqn)) {
            return Err(refuse(
                Status::ResourceBusy,
                "queue pairs still use the SRQ",
            ));
        }
        match self.srqs.remove(srqn) {
            Some(_) => Ok(()),
            None => Err(refuse(Status::BadResource, "no such SRQ")),
        }
    }

    /// Requests an event when fewer entries than a limit are left.
    pub(crate) fn arm_srq(&mut self, input: &[u8]) -> Outcome {
        match self.srqs.get_mut(object_number(input)) {
            Some(srq) => {
                srq.limit = ARM_LIMIT.get(input) as u16;
                Ok(())
            }
            None => Err(refuse(Status::BadResource, "no such SRQ")),
        }
    }
}
