//! Shared receive queue commands: RMPs, which are the SRQs of verbs, XRC SRQs, and XRQs
//! with tag matching. They share one range of numbers.

use roce::bits::{get32, get64, put64};

use super::load::object_number;
use super::resource::{insert, insert_with};
use crate::engine::core::Core;
use crate::engine::srq::Srq;
use crate::engine::tags::{self, TagList};
use crate::layout::{arm_rq, rmpc, wq, xrc_srqc, xrqc};
use crate::platform::Platform;
use crate::status::{Outcome, Rule, Status, in_use, invalid, no_object, refuse, too_many};

/// Base-2 logarithms of the limits of queue length and entry size.
const MAX_LOG_SIZE: u32 = 16;
const MAX_LOG_STRIDE: u32 = 9;
const MIN_LOG_STRIDE: u32 = 5;

const MODIFY_LIMIT: u32 = 1;

/// Returns the umem of a work queue's entries and the offset in it, if it names one.
pub(crate) fn wq_umem(wq: &[u8]) -> Option<(u32, u64)> {
    let in_umem = wq::WQ_UMEM_VALID.is_set(wq);
    in_umem.then(|| (wq::WQ_UMEM_ID.get(wq), get64(wq, wq::WQ_UMEM_OFFSET)))
}

/// Returns the umem of a work queue's doorbell records, if it names one.
pub(crate) fn wq_records_umem(wq: &[u8]) -> Option<u32> {
    wq::DBR_UMEM_VALID
        .is_set(wq)
        .then(|| wq::DBR_UMEM_ID.get(wq))
}

/// Writes the context of a work queue at byte `at`.
fn put_wq(srq: &Srq, at: usize, output: &mut [u8]) {
    wq::LWM.at(at).put(output, u32::from(srq.limit));
    wq::PD.at(at).put(output, srq.pd);
    wq::LOG_WQ_STRIDE.at(at).put(output, srq.log_stride);
    wq::LOG_WQ_SZ.at(at).put(output, srq.log_size);
    put64(output, at + wq::DBR_ADDR, srq.doorbell);
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
            return Err(no_object("protection domain", pd));
        }
        if log_size > MAX_LOG_SIZE || !(MIN_LOG_STRIDE..=MAX_LOG_STRIDE).contains(&log_stride) {
            return Err(match log_size > MAX_LOG_SIZE {
                true => too_many("log_wq_sz", log_size, MAX_LOG_SIZE.into()),
                false => refuse(
                    Status::ExceedsLimit,
                    "log_wq_stride",
                    log_stride,
                    Rule::Between(MIN_LOG_STRIDE.into(), MAX_LOG_STRIDE.into()),
                ),
            });
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
        let context = &input[xrc_srqc::AT.min(input.len())..];
        let mut srq = self.new_srq(
            input,
            xrc_srqc::PD.get(context),
            xrc_srqc::LOG_XRC_SRQ_SIZE.get(context),
            xrc_srqc::LOG_RQ_STRIDE.get(context) + 4,
            (
                xrc_srqc::LOG_PAGE_SIZE.get(context),
                xrc_srqc::PAGE_OFFSET.get(context),
            ),
            xrc_srqc::XRC_SRQ_UMEM_VALID.is_set(input).then(|| {
                (
                    xrc_srqc::XRC_SRQ_UMEM_ID.get(input),
                    get64(input, xrc_srqc::XRC_SRQ_UMEM_OFFSET),
                )
            }),
            (
                get64(context, xrc_srqc::DB_RECORD_ADDR) & !3,
                (xrc_srqc::DBR_UMEM_VALID.is_set(context))
                    .then(|| xrc_srqc::DBR_UMEM_ID.get(context)),
            ),
        )?;
        if xrc_srqc::RLKY.is_set(context) && self.object_owners.is_program() {
            return Err(invalid("rlky", 1u32, Rule::Permitted));
        }
        let xrcd = xrc_srqc::XRCD.get(context);
        if self.xrcds.get(xrcd).is_none() {
            return Err(no_object("XRC domain", xrcd));
        }
        srq.xrcd = Some(xrcd);
        srq.cqn = xrc_srqc::CQN.get(context);
        srq.privileged = xrc_srqc::RLKY.is_set(context);
        srq.limit = xrc_srqc::LWM.get(context) as u16;
        let uidx_equals_srqn = xrc_srqc::USER_INDEX_EQUAL_XRC_SRQN.is_set(context);
        let uidx = xrc_srqc::USER_INDEX.get(context);
        insert_with(output, &mut self.srqs, "SRQ", |number| Srq {
            uidx: if uidx_equals_srqn { number } else { uidx },
            ..srq
        })
    }

    pub(crate) fn query_xrc_srq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(srq) = self.srqs.get(object_number(input)) else {
            return Err(no_object("SRQ", object_number(input)));
        };
        xrc_srqc::STATE.at(xrc_srqc::AT).put(output, srq.state);
        xrc_srqc::LOG_XRC_SRQ_SIZE
            .at(xrc_srqc::AT)
            .put(output, srq.log_size);
        xrc_srqc::LOG_RQ_STRIDE
            .at(xrc_srqc::AT)
            .put(output, srq.log_stride.saturating_sub(4));
        xrc_srqc::XRCD
            .at(xrc_srqc::AT)
            .put(output, srq.xrcd.unwrap_or(0));
        xrc_srqc::CQN.at(xrc_srqc::AT).put(output, srq.cqn);
        xrc_srqc::PD.at(xrc_srqc::AT).put(output, srq.pd);
        xrc_srqc::USER_INDEX.at(xrc_srqc::AT).put(output, srq.uidx);
        xrc_srqc::LWM
            .at(xrc_srqc::AT)
            .put(output, u32::from(srq.limit));
        xrc_srqc::WQE_CNT
            .at(xrc_srqc::AT)
            .put(output, u32::from(srq.posted.wrapping_sub(srq.consumed)));
        put64(
            output,
            xrc_srqc::AT + xrc_srqc::DB_RECORD_ADDR,
            srq.doorbell,
        );
        Ok(())
    }

    /// Creates an SRQ from the context of a work queue. `input` is the command from an
    /// offset on, such that its page list is where CREATE_RMP has it.
    fn new_srq_of_wq(&mut self, input: &[u8], wq: &[u8]) -> Result<Srq, super::CommandError> {
        let mut srq = self.new_srq(
            input,
            wq::PD.get(wq),
            wq::LOG_WQ_SZ.get(wq),
            wq::LOG_WQ_STRIDE.get(wq),
            (wq::LOG_WQ_PG_SZ.get(wq), wq::PAGE_OFFSET.get(wq)),
            wq_umem(wq),
            (get64(wq, wq::DBR_ADDR), wq_records_umem(wq)),
        )?;
        srq.limit = wq::LWM.get(wq) as u16;
        Ok(srq)
    }

    pub(crate) fn create_rmp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let wq = &input[(rmpc::AT + rmpc::WQ).min(input.len())..];
        let mut srq = self.new_srq_of_wq(input, wq)?;
        srq.state = rmpc::STATE.at(rmpc::AT).get(input);
        // RMPs have no flag for the reserved lkey; the receives that the kernel
        // posts name real keys.
        insert(output, &mut self.srqs, "SRQ", srq)
    }

    pub(crate) fn modify_rmp(&mut self, input: &[u8]) -> Outcome {
        let Some(srq) = self.srqs.get_mut(object_number(input)) else {
            return Err(no_object("SRQ", object_number(input)));
        };
        srq.state = rmpc::STATE.at(rmpc::AT).get(input);
        if get32(input, rmpc::MODIFY_BITMASK) & MODIFY_LIMIT != 0 {
            srq.limit = wq::LWM.at(rmpc::AT + rmpc::WQ).get(input) as u16;
        }
        Ok(())
    }

    pub(crate) fn query_rmp(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let Some(srq) = self.srqs.get(object_number(input)) else {
            return Err(no_object("SRQ", object_number(input)));
        };
        rmpc::STATE.at(rmpc::AT).put(output, srq.state);
        put_wq(srq, rmpc::AT + rmpc::WQ, output);
        Ok(())
    }

    pub(crate) fn create_xrq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let log_tags = xrqc::LOG_MATCHING_LIST_SZ.at(xrqc::AT).get(input);
        if xrqc::TOPOLOGY.at(xrqc::AT).get(input) != xrqc::TOPOLOGY_TAG_MATCHING {
            return Err(invalid(
                "topology",
                xrqc::TOPOLOGY.at(xrqc::AT).get(input),
                Rule::Is(xrqc::TOPOLOGY_TAG_MATCHING.into()),
            ));
        }
        if log_tags > tags::LOG_MAX_TAGS {
            return Err(too_many(
                "log_matching_list_sz",
                log_tags,
                tags::LOG_MAX_TAGS.into(),
            ));
        }
        let cqn = xrqc::CQN.at(xrqc::AT).get(input);
        if self.cqs.get(cqn).is_none() {
            return Err(no_object("completion queue", cqn));
        }
        let wq = &input[(xrqc::AT + xrqc::WQ).min(input.len())..];
        let pages = &input[xrqc::PAGE_LIST_SHIFT.min(input.len())..];
        let mut srq = self.new_srq_of_wq(pages, wq)?;
        let transfers = xrqc::OFFLOAD.at(xrqc::AT).get(input) == xrqc::OFFLOAD_RNDV;
        srq.tags = Some(Box::new(TagList::new(log_tags, transfers)));
        srq.cqn = cqn;
        srq.uidx = xrqc::USER_INDEX.at(xrqc::AT).get(input);
        insert(output, &mut self.srqs, "SRQ", srq)
    }

    pub(crate) fn query_xrq(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        let srq = self.srqs.get(object_number(input));
        let Some((srq, tags)) = srq.and_then(|srq| Some((srq, srq.tags.as_deref()?))) else {
            return Err(no_object("XRQ", object_number(input)));
        };
        xrqc::TOPOLOGY
            .at(xrqc::AT)
            .put(output, xrqc::TOPOLOGY_TAG_MATCHING);
        xrqc::OFFLOAD
            .at(xrqc::AT)
            .put(output, u32::from(tags.transfers) * xrqc::OFFLOAD_RNDV);
        xrqc::USER_INDEX.at(xrqc::AT).put(output, srq.uidx);
        xrqc::CQN.at(xrqc::AT).put(output, srq.cqn);
        xrqc::LOG_MATCHING_LIST_SZ
            .at(xrqc::AT)
            .put(output, tags.log_size);
        xrqc::APPEND_NEXT_INDEX
            .at(xrqc::AT)
            .put(output, tags.next.into());
        xrqc::SW_PHASE_CNT
            .at(xrqc::AT)
            .put(output, tags.seen.into());
        xrqc::HW_PHASE_CNT
            .at(xrqc::AT)
            .put(output, tags.received.into());
        put_wq(srq, xrqc::AT + xrqc::WQ, output);
        Ok(())
    }

    pub(crate) fn destroy_srq(&mut self, input: &[u8]) -> Outcome {
        let srqn = object_number(input);
        if self.queues.iter().any(|(_, queue)| queue.uses_srq(srqn)) {
            return Err(in_use("SRQ", srqn));
        }
        match self.srqs.remove(srqn) {
            Some(_) => Ok(()),
            None => Err(no_object("SRQ", srqn)),
        }
    }

    /// Requests an event when fewer entries than a limit are left.
    pub(crate) fn arm_srq(&mut self, input: &[u8]) -> Outcome {
        match self.srqs.get_mut(object_number(input)) {
            Some(srq) => {
                srq.limit = arm_rq::LWM.get(input) as u16;
                Ok(())
            }
            None => Err(no_object("SRQ", object_number(input))),
        }
    }
}
