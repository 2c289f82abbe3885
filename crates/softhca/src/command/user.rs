//! Commands of programs (DevX): the permitted opcodes, and the objects that they may name.
//!
//! The driver tags a command with the number of the program's user context (UID). An
//! object that the command creates belongs to that context, and the command may name only
//! objects of that context. Commands with UID 0 are the driver's own, which is trusted.
//! All contexts may use objects of the context `SHARED_UID`.

use roce::bits::{Field, get32, get64};

use super::NUMBER;
use super::opcode as op;
use super::resource::{insert, remove};
use crate::engine::buffer::Buffer;
use crate::engine::core::Core;
use crate::engine::owners::{ObjectKind, OwnedObject, UmemUse};
use crate::engine::umem::Umem;
use crate::layout::header::{OBJ_ID, OBJ_TYPE, SHORT_NUMBER, UID};
use crate::layout::{
    PAGE_LIST, cqc, dctc, flow, mkc, psv, q_counter, qpc, rmpc, rqc, rqtc, sqc, tirc, tisc, umem,
    wq, xrc_srqc, xrqc,
};
use crate::platform::Platform;
use crate::status::{
    CommandError, Outcome, Rule, Status, in_use, invalid, no_object, refuse, too_many,
};

const RQT_LIST: usize = rqtc::AT + rqtc::RQ_NUM;
/// Objects that CREATE_QP names. The last two matter only with a receive queue.
static QP_REFERENCES: [(ObjectKind, Field); 6] = [
    (ObjectKind::Pd, qpc::PD.at(qpc::AT)),
    (ObjectKind::Uar, qpc::UAR_PAGE.at(qpc::AT)),
    (ObjectKind::Cq, qpc::CQN_SND.at(qpc::AT)),
    (ObjectKind::Xrcd, qpc::XRCD.at(qpc::AT)),
    (ObjectKind::Cq, qpc::CQN_RCV.at(qpc::AT)),
    (ObjectKind::Srq, qpc::SRQN.at(qpc::AT)),
];

/// Returns the kind of object that a command creates, and the field of its number in
/// the output.
fn created_object(opcode: u16, input: &[u8]) -> Option<(ObjectKind, Field)> {
    Some(match opcode {
        op::ALLOC_PD => (ObjectKind::Pd, NUMBER),
        op::ALLOC_UAR => (ObjectKind::Uar, NUMBER),
        op::ALLOC_XRCD => (ObjectKind::Xrcd, NUMBER),
        op::ALLOC_TRANSPORT_DOMAIN => (ObjectKind::TransportDomain, NUMBER),
        op::ALLOC_Q_COUNTER => (ObjectKind::CounterSet, SHORT_NUMBER),
        op::CREATE_MKEY => (ObjectKind::Mkey, NUMBER),
        op::CREATE_PSV => (ObjectKind::Psv, psv::PSV0_INDEX),
        op::CREATE_UMEM => (ObjectKind::Umem, NUMBER),
        op::CREATE_CQ => (ObjectKind::Cq, NUMBER),
        op::CREATE_QP | op::CREATE_DCT | op::CREATE_SQ | op::CREATE_RQ => {
            (ObjectKind::Queue, NUMBER)
        }
        op::CREATE_RMP | op::CREATE_XRC_SRQ | op::CREATE_XRQ => (ObjectKind::Srq, NUMBER),
        op::CREATE_TIR | op::CREATE_TIS | op::CREATE_RQT => (ObjectKind::Steering, NUMBER),
        op::ALLOC_FLOW_COUNTER | op::ALLOC_MODIFY_HEADER_CONTEXT => (ObjectKind::Steering, OBJ_ID),
        op::CREATE_GENERAL_OBJECT => (ObjectKind::General(OBJ_TYPE.get(input)), OBJ_ID),
        _ => return None,
    })
}

/// Returns the object that a command queries, modifies or destroys.
fn target_object(opcode: u16, input: &[u8]) -> Option<(ObjectKind, u32)> {
    let (kind, field) = match opcode {
        op::DEALLOC_PD => (ObjectKind::Pd, NUMBER),
        op::DEALLOC_UAR => (ObjectKind::Uar, NUMBER),
        op::DEALLOC_XRCD => (ObjectKind::Xrcd, NUMBER),
        op::DEALLOC_TRANSPORT_DOMAIN => (ObjectKind::TransportDomain, NUMBER),
        op::DEALLOC_Q_COUNTER => (ObjectKind::CounterSet, SHORT_NUMBER),
        op::QUERY_Q_COUNTER => (ObjectKind::CounterSet, q_counter::COUNTER_SET_ID),
        op::QUERY_MKEY | op::DESTROY_MKEY => (ObjectKind::Mkey, NUMBER),
        op::DESTROY_PSV => (ObjectKind::Psv, NUMBER),
        op::DESTROY_UMEM => (ObjectKind::Umem, NUMBER),
        op::QUERY_CQ | op::MODIFY_CQ | op::DESTROY_CQ => (ObjectKind::Cq, NUMBER),
        op::QUERY_QP
        | op::RST2INIT_QP
        | op::INIT2INIT_QP
        | op::INIT2RTR_QP
        | op::RTR2RTS_QP
        | op::RTS2RTS_QP
        | op::SQERR2RTS_QP
        | op::SQD_RTS_QP
        | op::TO_ERR_QP
        | op::TO_RST_QP
        | op::DESTROY_QP
        | op::ATTACH_TO_MCG
        | op::DETACH_FROM_MCG
        | op::QUERY_DCT
        | op::DRAIN_DCT
        | op::DESTROY_DCT
        | op::QUERY_SQ
        | op::MODIFY_SQ
        | op::DESTROY_SQ
        | op::QUERY_RQ
        | op::MODIFY_RQ
        | op::DESTROY_RQ => (ObjectKind::Queue, NUMBER),
        op::QUERY_RMP
        | op::MODIFY_RMP
        | op::DESTROY_RMP
        | op::ARM_RQ
        | op::QUERY_XRC_SRQ
        | op::DESTROY_XRC_SRQ
        | op::ARM_XRC_SRQ
        | op::QUERY_XRQ
        | op::DESTROY_XRQ
        | op::ARM_XRQ => (ObjectKind::Srq, NUMBER),
        op::MODIFY_TIR
        | op::DESTROY_TIR
        | op::QUERY_TIS
        | op::MODIFY_TIS
        | op::DESTROY_TIS
        | op::MODIFY_RQT
        | op::DESTROY_RQT => (ObjectKind::Steering, NUMBER),
        op::DEALLOC_FLOW_COUNTER | op::DEALLOC_MODIFY_HEADER_CONTEXT => {
            (ObjectKind::Steering, OBJ_ID)
        }
        op::QUERY_FLOW_COUNTER => (ObjectKind::Steering, flow::FLOW_COUNTER_ID),
        op::QUERY_GENERAL_OBJECT | op::MODIFY_GENERAL_OBJECT | op::DESTROY_GENERAL_OBJECT => {
            (ObjectKind::General(OBJ_TYPE.get(input)), OBJ_ID)
        }
        _ => return None,
    };
    Some((kind, field.get(input)))
}

/// Returns whether a command destroys the object that it names.
fn destroys_object(opcode: u16) -> bool {
    matches!(
        opcode,
        op::DEALLOC_PD
            | op::DEALLOC_UAR
            | op::DEALLOC_XRCD
            | op::DEALLOC_TRANSPORT_DOMAIN
            | op::DEALLOC_Q_COUNTER
            | op::DESTROY_MKEY
            | op::DESTROY_PSV
            | op::DESTROY_UMEM
            | op::DESTROY_CQ
            | op::DESTROY_QP
            | op::DESTROY_DCT
            | op::DESTROY_SQ
            | op::DESTROY_RQ
            | op::DESTROY_RMP
            | op::DESTROY_XRC_SRQ
            | op::DESTROY_XRQ
            | op::DESTROY_TIR
            | op::DESTROY_TIS
            | op::DESTROY_RQT
            | op::DEALLOC_FLOW_COUNTER
            | op::DEALLOC_MODIFY_HEADER_CONTEXT
            | op::DESTROY_GENERAL_OBJECT
    )
}

/// Returns whether a command queries information that every program may read.
fn is_public_query(opcode: u16) -> bool {
    matches!(
        opcode,
        op::NOP
            | op::QUERY_ADAPTER
            | op::QUERY_HCA_CAP
            | op::QUERY_HCA_VPORT_CONTEXT
            | op::QUERY_ISSI
            | op::QUERY_LAG
            | op::QUERY_NIC_VPORT_CONTEXT
            | op::QUERY_ROCE_ADDRESS
            | op::QUERY_VNIC_ENV
            | op::QUERY_VPORT_COUNTER
            | op::QUERY_VPORT_STATE
    )
}

/// Returns the fields of a command that name other objects.
fn referenced_objects(opcode: u16, input: &[u8]) -> &'static [(ObjectKind, Field)] {
    match opcode {
        op::CREATE_MKEY => const { &[(ObjectKind::Pd, mkc::PD.at(mkc::AT))] },
        op::CREATE_PSV => const { &[(ObjectKind::Pd, NUMBER)] },
        op::CREATE_CQ => const { &[(ObjectKind::Uar, cqc::UAR_PAGE.at(cqc::AT))] },
        op::CREATE_QP => match qpc::RQ_TYPE.at(qpc::AT).get(input) {
            // The receive queue type of a DC initiator is ignored.
            _ if qpc::ST.at(qpc::AT).get(input) == qpc::st::DCI => &QP_REFERENCES[..4],
            qpc::rq_type::REGULAR => &QP_REFERENCES[..5],
            qpc::rq_type::SRQ => &QP_REFERENCES,
            _ => &QP_REFERENCES[..4],
        },
        op::CREATE_DCT => {
            const {
                &[
                    (ObjectKind::Cq, dctc::CQN.at(dctc::AT)),
                    (ObjectKind::Srq, dctc::SRQN.at(dctc::AT)),
                    (ObjectKind::Pd, dctc::PD.at(dctc::AT)),
                ]
            }
        }
        op::CREATE_XRC_SRQ => {
            const {
                &[
                    (ObjectKind::Xrcd, xrc_srqc::XRCD.at(xrc_srqc::AT)),
                    (ObjectKind::Cq, xrc_srqc::CQN.at(xrc_srqc::AT)),
                    (ObjectKind::Pd, xrc_srqc::PD.at(xrc_srqc::AT)),
                ]
            }
        }
        op::CREATE_XRQ => {
            const {
                &[
                    (ObjectKind::Cq, xrqc::CQN.at(xrqc::AT)),
                    (ObjectKind::Pd, wq::PD.at(xrqc::AT + xrqc::WQ)),
                ]
            }
        }
        op::CREATE_RMP => const { &[(ObjectKind::Pd, wq::PD.at(rmpc::AT + rmpc::WQ))] },
        op::CREATE_SQ => {
            const {
                &[
                    (ObjectKind::Cq, sqc::CQN.at(sqc::AT)),
                    (ObjectKind::Steering, sqc::TIS_NUM_0.at(sqc::AT)),
                    (ObjectKind::Pd, wq::PD.at(sqc::AT + sqc::WQ)),
                    (ObjectKind::Uar, wq::UAR_PAGE.at(sqc::AT + sqc::WQ)),
                ]
            }
        }
        op::CREATE_RQ => {
            const {
                &[
                    (ObjectKind::Cq, rqc::CQN.at(rqc::AT)),
                    (ObjectKind::Pd, wq::PD.at(rqc::AT + rqc::WQ)),
                    (ObjectKind::Uar, wq::UAR_PAGE.at(rqc::AT + rqc::WQ)),
                ]
            }
        }
        op::CREATE_TIR if tirc::DISP_TYPE.at(tirc::AT).is_set(input) => {
            const {
                &[
                    (ObjectKind::Steering, tirc::INDIRECT_TABLE.at(tirc::AT)),
                    (
                        ObjectKind::TransportDomain,
                        tirc::TRANSPORT_DOMAIN.at(tirc::AT),
                    ),
                ]
            }
        }
        op::CREATE_TIR => {
            const {
                &[
                    (ObjectKind::Queue, tirc::INLINE_RQN.at(tirc::AT)),
                    (
                        ObjectKind::TransportDomain,
                        tirc::TRANSPORT_DOMAIN.at(tirc::AT),
                    ),
                ]
            }
        }
        op::CREATE_TIS => {
            const {
                &[(
                    ObjectKind::TransportDomain,
                    tisc::TRANSPORT_DOMAIN.at(tisc::AT),
                )]
            }
        }
        _ => &[],
    }
}

/// Creates the error of a command that names a range beyond a umem, from `at` on.
fn out_of_bounds(at: u64, umem: &Umem) -> CommandError {
    let length = (umem.pages.len() as u64) << umem.page_shift;
    invalid("offset in the umem", at, Rule::Within(length))
}

fn not_owned((kind, number): (ObjectKind, u32)) -> CommandError {
    refuse(Status::BadResource, kind.name(), number, Rule::OfContext)
}

impl<P: Platform> Core<P> {
    /// Begins a command: checks that its user context may issue it.
    pub(crate) fn begin_command(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        self.object_owners.uid = UID.get(input);
        self.object_owners.umem_use = UmemUse::default();
        if !self.object_owners.is_program() {
            return Ok(());
        }
        if self.user_contexts.get(self.object_owners.uid).is_none() {
            return Err(invalid("uid", self.object_owners.uid, Rule::Exists));
        }
        let target = target_object(opcode, input);
        if target.is_none() && created_object(opcode, input).is_none() && !is_public_query(opcode) {
            return Err(refuse(Status::BadOpcode, "opcode", opcode, Rule::Permitted));
        }
        let is_allowed = |(kind, number)| match destroys_object(opcode) {
            true => self.object_owners.owns(kind, number),
            false => self.object_owners.may_use(kind, number),
        };
        if let Some(target) = target.filter(|target| !is_allowed(*target)) {
            return Err(not_owned(target));
        }
        let references = referenced_objects(opcode, input).iter();
        for (kind, number) in references.map(|(kind, field)| (*kind, field.get(input))) {
            // Programs that open the same file share an XRC domain. Number 0 names no
            // object, except the device's own protection domain.
            let is_null = number == 0 && kind != ObjectKind::Pd;
            let is_shared =
                kind == ObjectKind::Xrcd && !self.object_owners.owned.contains_key(&(kind, number));
            if !is_null && !is_shared && !self.object_owners.may_use(kind, number) {
                return Err(not_owned((kind, number)));
            }
        }
        if matches!(opcode, op::CREATE_RQT | op::MODIFY_RQT) {
            let count = rqtc::RQT_ACTUAL_SIZE.at(rqtc::AT).get(input) as usize;
            let entries = input.len().saturating_sub(RQT_LIST) / 4;
            for n in 0..count.min(entries) {
                let queue = get32(input, RQT_LIST + 4 * n) & 0xff_ffff;
                if !self.object_owners.owns(ObjectKind::Queue, queue) {
                    return Err(not_owned((ObjectKind::Queue, queue)));
                }
            }
        }
        Ok(())
    }

    /// Ends a command that was executed.
    pub(crate) fn finish_command(&mut self, opcode: u16, input: &[u8], output: &[u8]) {
        let object_owners = &mut self.object_owners;
        let memory = object_owners.umem_use;
        let uses_umem = memory.entries.or(memory.records).is_some();
        if let Some((kind, number)) = created_object(opcode, input) {
            if object_owners.uid != 0 || uses_umem {
                let uid = object_owners.uid;
                let owned = OwnedObject { uid, memory };
                object_owners
                    .owned
                    .insert((kind, number.get(output)), owned);
            }
        } else if let Some(target) = target_object(opcode, input) {
            if destroys_object(opcode) {
                object_owners.owned.remove(&target);
            } else if let Some(owned) = object_owners.owned.get_mut(&target).filter(|_| uses_umem) {
                owned.memory.entries = memory.entries;
            }
        }
    }

    /// Returns a umem of the command's user context.
    fn umem(&self, umem: u32) -> Result<&Umem, CommandError> {
        match self.umems.get(umem) {
            Some(found) if self.object_owners.owns(ObjectKind::Umem, umem) => Ok(found),
            _ => Err(no_object("umem", umem)),
        }
    }

    /// Returns the memory of a queue's entries. `umem` is the number of the umem and
    /// the offset in it, if the command names one; without, the command lists pages,
    /// whose size and offset are `pages`.
    pub(crate) fn queue_buffer(
        &mut self,
        input: &[u8],
        length: u64,
        umem: Option<(u32, u64)>,
        pages: (u32, u32),
        needs_write: bool,
    ) -> Result<Buffer, CommandError> {
        let Some((number, at)) = umem.filter(|_| length != 0) else {
            return Buffer::from_page_list(input, PAGE_LIST, length, pages.0, pages.1).ok_or_else(
                || {
                    refuse(
                        Status::BadInputLength,
                        "input",
                        input.len(),
                        Rule::AtLeast((PAGE_LIST + 8) as u64),
                    )
                },
            );
        };
        let umem = self.umem(number)?;
        if needs_write && !umem.writable {
            return Err(invalid("umem", number, Rule::Writable));
        }
        let buffer = umem.part(at, length);
        let buffer = buffer.ok_or_else(|| out_of_bounds(at, umem))?;
        self.object_owners.umem_use.entries = Some(number);
        Ok(buffer)
    }

    /// Returns the address of a queue's doorbell records, which is an offset in a umem
    /// if the command names one. The device only reads them.
    pub(crate) fn doorbell_address(
        &mut self,
        address: u64,
        umem: Option<u32>,
    ) -> Result<u64, CommandError> {
        const BYTES: u64 = 8;
        let Some(number) = umem else {
            return Ok(address);
        };
        let umem = self.umem(number)?;
        let at = umem.address(address, BYTES);
        let address = at.ok_or_else(|| out_of_bounds(address, umem))?;
        if address % BYTES != 0 {
            return Err(invalid(
                "doorbell records",
                address,
                Rule::MultipleOf(BYTES),
            ));
        }
        self.object_owners.umem_use.records = Some(number);
        Ok(address)
    }

    /// Returns the addresses of `count` pages of `1 << shift` bytes in a umem, and
    /// whether they may be written.
    pub(crate) fn umem_pages(
        &mut self,
        (number, at): (u32, u64),
        shift: u32,
        count: u64,
    ) -> Result<(Vec<u64>, bool), CommandError> {
        /// As many as a command can list.
        const MAX_PAGES: u64 = 1 << 21;
        if count > MAX_PAGES {
            return Err(too_many("pages", count, MAX_PAGES));
        }
        let umem = self.umem(number)?;
        // The last page may end beyond the memory: accesses are checked.
        let length = umem.pages.len() as u64;
        if shift < 12 || shift > umem.page_shift || count > length << (umem.page_shift - shift) {
            return Err(out_of_bounds(at, umem));
        }
        let address = |n: u64| umem.address(at.checked_add(n << shift)?, 1);
        let pages: Option<Vec<_>> = (0..count).map(address).collect();
        let pages = pages.ok_or_else(|| out_of_bounds(at, umem))?;
        if pages.iter().any(|page| page & ((1 << shift) - 1) != 0) {
            return Err(invalid(
                "offset in the umem",
                at,
                Rule::MultipleOf(1 << shift),
            ));
        }
        let writable = umem.writable;
        self.object_owners.umem_use.entries = Some(number);
        Ok((pages, writable))
    }

    pub(crate) fn create_umem(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        const READABLE: u64 = 1;
        const WRITABLE: u64 = 2;
        let page_shift = umem::LOG_PAGE_SIZE.get(input) + 12;
        let entries = input.len().saturating_sub(umem::MTT) / 8;
        let count = usize::try_from(get64(input, umem::NUM_OF_MTT)).unwrap_or(usize::MAX);
        if count == 0 || count > entries {
            return Err(refuse(
                Status::BadInputLength,
                "num_of_mtt",
                count,
                Rule::Between(1, entries as u64),
            ));
        }
        let entries: Vec<u64> = (0..count)
            .map(|n| get64(input, umem::MTT + 8 * n))
            .collect();
        if entries.iter().any(|entry| entry & READABLE == 0) {
            return Err(invalid(
                "mtt",
                entries
                    .iter()
                    .position(|it| it & READABLE == 0)
                    .unwrap_or(0),
                Rule::Readable,
            ));
        }
        let new = Umem {
            writable: entries.iter().all(|entry| entry & WRITABLE != 0),
            pages: entries.iter().map(|entry| entry & !0xfff).collect(),
            page_shift,
            offset: umem::PAGE_OFFSET.get(input).into(),
        };
        let pages = (new.pages.len() as u64).checked_mul(1 << page_shift);
        if new.offset >= 1 << page_shift || pages.is_none() {
            return Err(invalid(
                "page_offset",
                new.offset,
                Rule::AtMost((1 << page_shift) - 1),
            ));
        }
        insert(output, &mut self.umems, "umem", new)
    }

    pub(crate) fn destroy_umem(&mut self, input: &[u8]) -> Outcome {
        let umem = NUMBER.get(input);
        if self.object_owners.is_umem_in_use(umem) {
            return Err(in_use("umem", umem));
        }
        remove(&mut self.umems, "umem", umem)
    }

    /// Ends a user context, whose objects must have been destroyed.
    pub(crate) fn destroy_uctx(&mut self, input: &[u8]) -> Outcome {
        let uid = NUMBER.get(input);
        if uid != 0
            && self
                .object_owners
                .owned
                .values()
                .any(|owned| owned.uid == uid)
        {
            return Err(in_use("user context", uid));
        }
        remove(&mut self.user_contexts, "user context", uid)
    }
}
