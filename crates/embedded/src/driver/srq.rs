//! Shared receive queues: creation, limits, destruction.

use std::mem::offset_of;
use std::os::fd::RawFd;

use mlx5_abi::{CreateSrq, CreateSrqResp, SRQ_FLAG_SIGNATURE};
use roce::bits::Field;
use softhca::command::opcode as op;
use softhca::layout::{PAGE_LIST, arm_rq, rmpc, rqc, wq, xrc_srqc, xrqc};
use softhca::rule::Rule;
use uverbs::abi::ids::*;

use crate::driver::cause::{Class, Result, at_most, invalid, is, refuse, require};
use crate::driver::command::{Input, run};
use crate::driver::object::{Created, Events, Object, ObjectData, Srq, SrqKind, Summary};
use crate::driver::queues::{
    LOG_STRIDES, MAX_QUEUE_ENTRIES, QueueAddresses, WQ, check_driver_length, check_user_index,
};
use crate::driver::request::Request;
use crate::driver::state::State;

/// Maximum number of tags in the list of a shared receive queue.
pub(crate) const MAX_TAGS: u32 = 127;
/// Values of `ib_uverbs_srq_type`.
const SRQ_BASIC: u64 = 0;
const SRQ_XRC: u64 = 1;
const SRQ_TAGS: u64 = 2;
/// Bytes of the header of an entry, and of each element of its list.
const SEGMENT: u32 = 16;

/// A command that creates a shared receive queue.
struct SrqRequest {
    kind: SrqKind,
    driver: CreateSrq,
    /// Number of entries, and bytes of each.
    entries: u32,
    entry: u32,
    user_handle: u64,
    /// Numbers of the objects that it uses; 0 for those that the kind does not have.
    pd: u32,
    cq: u32,
    xrcd: u32,
    /// Maximum number of tags in its list.
    tags: u32,
    /// Handles of the objects that it uses.
    dependencies: Vec<u32>,
}

impl SrqRequest {
    fn addresses(&self) -> QueueAddresses {
        QueueAddresses {
            entries: self.driver.buf_addr,
            records: self.driver.db_addr,
        }
    }

    /// Returns the length of the queue's memory.
    fn bytes(&self) -> u64 {
        u64::from(self.entries) * u64::from(self.entry)
    }
}

impl ObjectData for Srq {
    fn kind(&self) -> u16 {
        OBJECT_SRQ
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "shared receive queue",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(self.kind.create_opcode(), self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(self.kind.destroy_opcode(), self.number)
    }

    fn report(&self, request: &mut Request) {
        self.events.report(request, ATTR_DESTROY_SRQ_RESP);
    }
}

impl State {
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let parsed = self.parse_srq(fd, request)?;
        let events = self.events(request, parsed.user_handle, ATTR_CREATE_SRQ_EVENT_FD);
        let input = self.encode_srq(fd, &parsed)?;
        let ranges = parsed.addresses().ranges(parsed.bytes())?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        let srq = Srq {
            number,
            max_wr: parsed.entries - 1,
            max_sge: parsed.entry / SEGMENT - 1,
            kind: parsed.kind,
            events,
        };
        let (max_wr, max_sge) = (srq.max_wr, srq.max_sge);
        let object = Object::new(fd, srq).using(parsed.dependencies);
        let handle = self.objects.insert(object.with_memory(ranges));
        request.set_handle(ATTR_CREATE_SRQ_HANDLE, handle);
        request.answer(ATTR_CREATE_SRQ_RESP_MAX_WR, &max_wr);
        request.answer(ATTR_CREATE_SRQ_RESP_MAX_SGE, &max_sge);
        if parsed.kind == SrqKind::Xrc {
            request.answer(ATTR_CREATE_SRQ_RESP_SRQ_NUM, &number);
        }
        request.driver_answer(&CreateSrqResp {
            srqn: number,
            reserved: 0,
        });
        Ok(())
    }

    /// Reads the attributes of a new shared receive queue, checks them, and resolves what they
    /// name.
    fn parse_srq(&self, fd: RawFd, request: &Request) -> Result<SrqRequest> {
        let kind = match request.constant(ATTR_CREATE_SRQ_TYPE)? {
            SRQ_BASIC => SrqKind::Basic,
            SRQ_XRC => SrqKind::Xrc,
            SRQ_TAGS => SrqKind::Tags,
            other => return invalid("srq_type", other, Rule::AtMost(SRQ_TAGS)),
        };
        let driver = parse_driver(request, kind)?;
        let (entries, entry) = parse_sizes(request)?;
        let pd = request.handle(ATTR_CREATE_SRQ_PD_HANDLE)?;
        let mut parsed = SrqRequest {
            kind,
            driver,
            entries,
            entry,
            user_handle: request.value(ATTR_CREATE_SRQ_USER_HANDLE)?,
            pd: self.objects.pd(fd, pd)?,
            cq: 0,
            xrcd: 0,
            tags: 0,
            dependencies: vec![pd],
        };
        if kind != SrqKind::Basic {
            let cq = request.handle(ATTR_CREATE_SRQ_CQ_HANDLE)?;
            parsed.cq = self.objects.cq(fd, cq)?.number;
            parsed.dependencies.push(cq);
        }
        if kind == SrqKind::Xrc {
            let xrcd = request.handle(ATTR_CREATE_SRQ_XRCD_HANDLE)?;
            parsed.xrcd = self.objects.xrcd(fd, xrcd)?.number;
            parsed.dependencies.push(xrcd);
        }
        if kind == SrqKind::Tags {
            let id = ATTR_CREATE_SRQ_MAX_NUM_TAGS;
            if !request.has(id) {
                return refuse(Class::NotFound, "attribute", id, Rule::Present);
            }
            parsed.tags = request.value(id)?;
            at_most("max_num_tags", parsed.tags, MAX_TAGS.into())?;
        }
        Ok(parsed)
    }

    /// Encodes the command that creates a shared receive queue.
    fn encode_srq(&self, fd: RawFd, parsed: &SrqRequest) -> Result<Input> {
        // The context of a queue with tags precedes its work queue.
        let shift = match parsed.kind {
            SrqKind::Tags => xrqc::PAGE_LIST_SHIFT,
            SrqKind::Basic | SrqKind::Xrc => 0,
        };
        let addresses = parsed.addresses();
        let input = Input::new(parsed.kind.create_opcode(), PAGE_LIST + 8 + shift);
        let input = input.by(self.uid(fd));
        let (input, page_fields) = match parsed.kind {
            SrqKind::Xrc => (
                encode_xrc(input, parsed),
                (
                    xrc_srqc::LOG_PAGE_SIZE.at(xrc_srqc::AT),
                    xrc_srqc::PAGE_OFFSET.at(xrc_srqc::AT),
                ),
            ),
            SrqKind::Basic | SrqKind::Tags => (
                input
                    .set(wq::PD.at(WQ + shift), parsed.pd)
                    .set(wq::LOG_WQ_STRIDE.at(WQ + shift), parsed.entry.ilog2())
                    .set(wq::LOG_WQ_SZ.at(WQ + shift), parsed.entries.ilog2())
                    .long(WQ + wq::DBR_ADDR + shift, addresses.records),
                (
                    wq::LOG_WQ_PG_SZ.at(WQ + shift),
                    wq::PAGE_OFFSET.at(WQ + shift),
                ),
            ),
        };
        let input = match parsed.kind {
            SrqKind::Basic => input.set(rmpc::STATE.at(rmpc::AT), rqc::state::RDY),
            SrqKind::Xrc => input,
            SrqKind::Tags => encode_tags(input, parsed),
        };
        let memory = (addresses.entries, parsed.bytes());
        input.pages_at(PAGE_LIST + shift, page_fields, memory)
    }

    /// Requests an event when fewer receives than `limit` are left.
    pub(crate) fn arm_srq(&mut self, number: u32, kind: SrqKind, limit: u32) -> Result<()> {
        let opcode = match kind {
            SrqKind::Xrc => op::ARM_XRC_SRQ,
            SrqKind::Basic | SrqKind::Tags => op::ARM_RQ,
        };
        let input = Input::about(opcode, number).set(arm_rq::LWM, limit);
        run(&mut self.hca, &input, 16).map(drop)
    }

    /// Returns the armed limit, or 0.
    pub(crate) fn srq_limit(&mut self, number: u32, kind: SrqKind) -> Result<u32> {
        const LIMIT: Field = wq::LWM.at(WQ);
        let (opcode, limit) = match kind {
            SrqKind::Basic => (op::QUERY_RMP, LIMIT),
            SrqKind::Xrc => (op::QUERY_XRC_SRQ, xrc_srqc::LWM.at(xrc_srqc::AT)),
            SrqKind::Tags => (op::QUERY_XRQ, LIMIT.at(xrqc::PAGE_LIST_SHIFT)),
        };
        let input = Input::about(opcode, number);
        run(&mut self.hca, &input, PAGE_LIST).map(|output| limit.get(&output))
    }
}

/// Reads the driver data of a new queue and checks them.
fn parse_driver(request: &Request, kind: SrqKind) -> Result<CreateSrq> {
    /// Of the version with a user index.
    const INDEX_LENGTH: usize = offset_of!(CreateSrq, reserved1);
    let driver: CreateSrq = request.driver();
    is("reserved0", driver.reserved0, 0)?;
    is("reserved1", driver.reserved1, 0)?;
    let (known, length) = (size_of_val(&driver), request.driver_length());
    let what = "length of the driver input";
    let is_known = request.driver_is_cleared(known);
    require(is_known, what, length, Rule::AtMost(known as u64))?;
    let flags = driver.flags;
    let has_no_signature = flags & SRQ_FLAG_SIGNATURE == 0;
    require(has_no_signature, "driver flags", flags, Rule::Supported)?;
    if kind != SrqKind::Basic {
        check_driver_length(request, INDEX_LENGTH)?;
        check_user_index(driver.uidx)?;
    }
    Ok(driver)
}

/// Reads the sizes of a new queue: the number of entries, and bytes of each. As in the driver:
/// one entry more than requested, and 16 bytes per entry more than its list.
fn parse_sizes(request: &Request) -> Result<(u32, u32)> {
    let max_wr: u32 = request.value(ATTR_CREATE_SRQ_MAX_WR)?;
    let max_sge: u32 = request.value(ATTR_CREATE_SRQ_MAX_SGE)?;
    at_most("max_wr", max_wr, u64::from(MAX_QUEUE_ENTRIES) - 1)?;
    at_most("max_sge", max_sge, 31)?;
    let entry = (SEGMENT + max_sge * SEGMENT)
        .next_power_of_two()
        .max(2 * SEGMENT);
    at_most("bytes of an entry", entry, 1 << *LOG_STRIDES.end())?;
    Ok(((max_wr + 1).next_power_of_two(), entry))
}

fn encode_xrc(input: Input, parsed: &SrqRequest) -> Input {
    input
        .fields(
            xrc_srqc::AT,
            [
                (xrc_srqc::LOG_XRC_SRQ_SIZE, parsed.entries.ilog2()),
                (xrc_srqc::LOG_RQ_STRIDE, parsed.entry.ilog2() - 4),
                (xrc_srqc::XRCD, parsed.xrcd),
                (xrc_srqc::CQN, parsed.cq),
                (xrc_srqc::USER_INDEX, parsed.driver.uidx),
                (xrc_srqc::PD, parsed.pd),
            ],
        )
        .long(
            xrc_srqc::AT + xrc_srqc::DB_RECORD_ADDR,
            parsed.addresses().records,
        )
}

fn encode_tags(input: Input, parsed: &SrqRequest) -> Input {
    input.fields(
        xrqc::AT,
        [
            (xrqc::TOPOLOGY, xrqc::TOPOLOGY_TAG_MATCHING),
            (xrqc::OFFLOAD, xrqc::OFFLOAD_RNDV),
            (xrqc::USER_INDEX, parsed.driver.uidx),
            (xrqc::CQN, parsed.cq),
            (
                xrqc::LOG_MATCHING_LIST_SZ,
                u32::BITS - parsed.tags.leading_zeros(),
            ),
        ],
    )
}
