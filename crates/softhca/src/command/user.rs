//! Commands of programs (DevX): the permitted opcodes, and the objects that they may name.
//!
//! The driver tags a command with the number of the program's user context. The object
//! that it creates belongs to that context, and it may name no others. Without a tag it
//! is the driver's own, which is trusted. What the driver tags as shared, all may use.

use std::collections::HashMap;

use super::NUMBER;
use super::opcode as op;
use super::qp::ST_DCI;
use super::steering::QUERIED_COUNTER;
use crate::bits::{Field, field, get32, get64};
use crate::engine::buffer::{Buffer, PAGE_LIST_OFFSET};
use crate::engine::core::Core;
use crate::engine::umem::Umem;
use crate::platform::Platform;
use crate::status::{CommandError, Outcome, Status, refuse};

/// Number of the user context.
const UID: Field = field(0, 15, 0);
/// The driver's tag for objects that all programs may use (`MLX5_SHARED_RESOURCE_UID`).
const SHARED: u32 = 0xffff;
const CREATED_PSV: Field = field(0x10, 23, 0);
const LONG_NUMBER: Field = field(8, 31, 0);
const SHORT_NUMBER: Field = field(8, 7, 0);
const COUNTER_SET: Field = field(0x1c, 7, 0);
const GENERAL_TYPE: Field = field(4, 15, 0);
const TIR_DISP_TYPE: Field = field(0x24, 31, 28);
const RQT_LENGTH: Field = field(0x38, 15, 0);
const RQT_LIST: usize = 0x110;

const QP_SERVICE: Field = field(0x18, 23, 16);
/// Where a queue pair's receives are, and two of the values.
const QP_RECEIVES: Field = field(0xc4, 26, 24);
const OWN_RECEIVES: u32 = 0;
const SHARED_RECEIVES: u32 = 1;
/// Objects that CREATE_QP names. The last two matter only with a receive queue.
static QP_REFERENCES: [(Kind, Field); 6] = [
    (Kind::Pd, field(0x1c, 23, 0)),
    (Kind::Uar, field(0x24, 23, 0)),
    (Kind::Cq, field(0x94, 23, 0)),
    (Kind::Xrcd, field(0xb0, 23, 0)),
    (Kind::Cq, field(0xb4, 23, 0)),
    (Kind::Srq, field(0xc4, 23, 0)),
];

/// Kinds of objects that have numbers of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    CounterSet,
    Cq,
    General(u32),
    Mkey,
    Pd,
    Psv,
    Queue,
    Srq,
    Steering,
    TransportDomain,
    Uar,
    Umem,
    Xrcd,
}

/// An object of a user context.
#[derive(Debug)]
struct OwnedObject {
    uid: u32,
    /// The memory that it uses.
    memory: NamedMemory,
}

/// The memory that a command names.
#[derive(Debug, Clone, Copy, Default)]
struct NamedMemory {
    entries: Option<u32>,
    records: Option<u32>,
}

/// The objects of user contexts, and the command in execution.
#[derive(Debug, Default)]
pub(crate) struct Users {
    owned: HashMap<(Kind, u32), OwnedObject>,
    /// User context of the command; 0 for the driver's.
    uid: u32,
    named: NamedMemory,
}

impl Users {
    /// Returns the user context of the command in execution; 0 for the driver's.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether the command in execution is a program's.
    pub(crate) fn is_program(&self) -> bool {
        !matches!(self.uid, 0 | SHARED)
    }

    fn owner(&self, kind: Kind, number: u32) -> u32 {
        self.owned.get(&(kind, number)).map_or(0, |owned| owned.uid)
    }

    fn owns(&self, kind: Kind, number: u32) -> bool {
        self.owner(kind, number) == self.uid
    }

    fn may_use(&self, kind: Kind, number: u32) -> bool {
        self.owns(kind, number) || self.owner(kind, number) == SHARED
    }

    fn uses(&self, umem: u32) -> bool {
        let all = self.owned.values().map(|owned| owned.memory);
        let mut all = all.flat_map(|memory| [memory.entries, memory.records]);
        all.any(|used| used == Some(umem))
    }

    pub(crate) fn clear(&mut self) {
        self.owned.clear();
    }
}

/// Returns the kind of object that a command creates, and the field of its number in
/// the output.
fn creates(opcode: u16, input: &[u8]) -> Option<(Kind, Field)> {
    Some(match opcode {
        op::ALLOC_PD => (Kind::Pd, NUMBER),
        op::ALLOC_UAR => (Kind::Uar, NUMBER),
        op::ALLOC_XRCD => (Kind::Xrcd, NUMBER),
        op::ALLOC_TRANSPORT_DOMAIN => (Kind::TransportDomain, NUMBER),
        op::ALLOC_Q_COUNTER => (Kind::CounterSet, SHORT_NUMBER),
        op::CREATE_MKEY => (Kind::Mkey, NUMBER),
        op::CREATE_PSV => (Kind::Psv, CREATED_PSV),
        op::CREATE_UMEM => (Kind::Umem, NUMBER),
        op::CREATE_CQ => (Kind::Cq, NUMBER),
        op::CREATE_QP | op::CREATE_DCT | op::CREATE_SQ | op::CREATE_RQ => (Kind::Queue, NUMBER),
        op::CREATE_RMP | op::CREATE_XRC_SRQ | op::CREATE_XRQ => (Kind::Srq, NUMBER),
        op::CREATE_TIR | op::CREATE_TIS | op::CREATE_RQT => (Kind::Steering, NUMBER),
        op::ALLOC_FLOW_COUNTER | op::ALLOC_MODIFY_HEADER_CONTEXT => (Kind::Steering, LONG_NUMBER),
        op::CREATE_GENERAL_OBJECT => (Kind::General(GENERAL_TYPE.get(input)), LONG_NUMBER),
        _ => return None,
    })
}

/// Returns the object that a command queries, changes or destroys.
fn subject(opcode: u16, input: &[u8]) -> Option<(Kind, u32)> {
    let (kind, field) = match opcode {
        op::DEALLOC_PD => (Kind::Pd, NUMBER),
        op::DEALLOC_UAR => (Kind::Uar, NUMBER),
        op::DEALLOC_XRCD => (Kind::Xrcd, NUMBER),
        op::DEALLOC_TRANSPORT_DOMAIN => (Kind::TransportDomain, NUMBER),
        op::DEALLOC_Q_COUNTER => (Kind::CounterSet, SHORT_NUMBER),
        op::QUERY_Q_COUNTER => (Kind::CounterSet, COUNTER_SET),
        op::QUERY_MKEY | op::DESTROY_MKEY => (Kind::Mkey, NUMBER),
        op::DESTROY_PSV => (Kind::Psv, NUMBER),
        op::DESTROY_UMEM => (Kind::Umem, NUMBER),
        op::QUERY_CQ | op::MODIFY_CQ | op::DESTROY_CQ => (Kind::Cq, NUMBER),
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
        | op::DESTROY_RQ => (Kind::Queue, NUMBER),
        op::QUERY_RMP
        | op::MODIFY_RMP
        | op::DESTROY_RMP
        | op::ARM_RQ
        | op::QUERY_XRC_SRQ
        | op::DESTROY_XRC_SRQ
        | op::ARM_XRC_SRQ
        | op::QUERY_XRQ
        | op::DESTROY_XRQ
        | op::ARM_XRQ => (Kind::Srq, NUMBER),
        op::MODIFY_TIR
        | op::DESTROY_TIR
        | op::QUERY_TIS
        | op::MODIFY_TIS
        | op::DESTROY_TIS
        | op::MODIFY_RQT
        | op::DESTROY_RQT => (Kind::Steering, NUMBER),
        op::DEALLOC_FLOW_COUNTER | op::DEALLOC_MODIFY_HEADER_CONTEXT => {
            (Kind::Steering, LONG_NUMBER)
        }
        op::QUERY_FLOW_COUNTER => (Kind::Steering, QUERIED_COUNTER),
        op::QUERY_GENERAL_OBJECT | op::MODIFY_GENERAL_OBJECT | op::DESTROY_GENERAL_OBJECT => {
            (Kind::General(GENERAL_TYPE.get(input)), LONG_NUMBER)
        }
        _ => return None,
    };
    Some((kind, field.get(input)))
}

/// Returns whether a command ends the object that it names.
fn ends(opcode: u16) -> bool {
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
fn is_general(opcode: u16) -> bool {
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
fn references(opcode: u16, input: &[u8]) -> &'static [(Kind, Field)] {
    match opcode {
        op::CREATE_MKEY => const { &[(Kind::Pd, field(0x1c, 23, 0))] },
        op::CREATE_PSV => const { &[(Kind::Pd, field(8, 23, 0))] },
        op::CREATE_CQ => const { &[(Kind::Uar, field(0x1c, 23, 0))] },
        op::CREATE_QP => match QP_RECEIVES.get(input) {
            // Whatever it says of receives.
            _ if QP_SERVICE.get(input) == ST_DCI => &QP_REFERENCES[..4],
            OWN_RECEIVES => &QP_REFERENCES[..5],
            SHARED_RECEIVES => &QP_REFERENCES,
            _ => &QP_REFERENCES[..4],
        },
        op::CREATE_DCT => {
            const {
                &[
                    (Kind::Cq, field(0x18, 23, 0)),
                    (Kind::Srq, field(0x24, 23, 0)),
                    (Kind::Pd, field(0x28, 23, 0)),
                ]
            }
        }
        op::CREATE_XRC_SRQ => {
            const {
                &[
                    (Kind::Xrcd, field(0x14, 23, 0)),
                    (Kind::Cq, field(0x18, 23, 0)),
                    (Kind::Pd, field(0x28, 23, 0)),
                ]
            }
        }
        op::CREATE_XRQ => {
            const {
                &[
                    (Kind::Cq, field(0x18, 23, 0)),
                    (Kind::Pd, field(0x98, 23, 0)),
                ]
            }
        }
        op::CREATE_RMP => const { &[(Kind::Pd, field(0x58, 23, 0))] },
        op::CREATE_SQ => {
            const {
                &[
                    (Kind::Cq, field(0x28, 23, 0)),
                    (Kind::Steering, field(0x4c, 23, 0)),
                    (Kind::Pd, field(0x58, 23, 0)),
                    (Kind::Uar, field(0x5c, 23, 0)),
                ]
            }
        }
        op::CREATE_RQ => {
            const {
                &[
                    (Kind::Cq, field(0x28, 23, 0)),
                    (Kind::Pd, field(0x58, 23, 0)),
                    (Kind::Uar, field(0x5c, 23, 0)),
                ]
            }
        }
        op::CREATE_TIR if TIR_DISP_TYPE.is_set(input) => {
            const {
                &[
                    (Kind::Steering, field(0x40, 23, 0)),
                    (Kind::TransportDomain, field(0x44, 23, 0)),
                ]
            }
        }
        op::CREATE_TIR => {
            const {
                &[
                    (Kind::Queue, field(0x3c, 23, 0)),
                    (Kind::TransportDomain, field(0x44, 23, 0)),
                ]
            }
        }
        op::CREATE_TIS => const { &[(Kind::TransportDomain, field(0x44, 23, 0))] },
        _ => &[],
    }
}

const OTHER_CONTEXT: CommandError =
    refuse(Status::BadResource, "an object of another user context");
const NOT_FOR_PROGRAMS: CommandError = refuse(Status::BadOpcode, "not a command for programs");
const NO_CONTEXT: CommandError = refuse(Status::BadParameter, "no such user context");
const MISSING: CommandError = refuse(Status::BadResource, "no such memory of a program");
const OUT_OF_BOUNDS: CommandError =
    refuse(Status::BadParameter, "beyond the memory of the program");
const READ_ONLY: CommandError = refuse(Status::BadParameter, "the memory is read-only");

impl<P: Platform> Core<P> {
    /// Begins a command: checks that its user context may issue it.
    pub(crate) fn enter(&mut self, opcode: u16, input: &[u8]) -> Outcome {
        self.users.uid = UID.get(input);
        self.users.named = NamedMemory::default();
        if !self.users.is_program() {
            return Ok(());
        }
        if self.user_contexts.get(self.users.uid).is_none() {
            return Err(NO_CONTEXT);
        }
        let subject = subject(opcode, input);
        if subject.is_none() && creates(opcode, input).is_none() && !is_general(opcode) {
            return Err(NOT_FOR_PROGRAMS);
        }
        let allowed = |(kind, number)| match ends(opcode) {
            true => self.users.owns(kind, number),
            false => self.users.may_use(kind, number),
        };
        if !subject.is_none_or(allowed) {
            return Err(OTHER_CONTEXT);
        }
        let named = references(opcode, input).iter();
        for (kind, number) in named.map(|(kind, field)| (*kind, field.get(input))) {
            // XRC domains are shared by the programs that open the same file. A number
            // of 0 names none, except that of the device's own protection domain.
            let none = number == 0 && kind != Kind::Pd;
            let shared = kind == Kind::Xrcd && !self.users.owned.contains_key(&(kind, number));
            if !none && !shared && !self.users.may_use(kind, number) {
                return Err(OTHER_CONTEXT);
            }
        }
        if matches!(opcode, op::CREATE_RQT | op::MODIFY_RQT) {
            let count = RQT_LENGTH.get(input) as usize;
            let listed = input.len().saturating_sub(RQT_LIST) / 4;
            for n in 0..count.min(listed) {
                let queue = get32(input, RQT_LIST + 4 * n) & 0xff_ffff;
                if !self.users.owns(Kind::Queue, queue) {
                    return Err(OTHER_CONTEXT);
                }
            }
        }
        Ok(())
    }

    /// Ends a command that was executed.
    pub(crate) fn leave(&mut self, opcode: u16, input: &[u8], output: &[u8]) {
        let users = &mut self.users;
        let memory = users.named;
        let names = memory.entries.or(memory.records).is_some();
        if let Some((kind, number)) = creates(opcode, input) {
            if users.uid != 0 || names {
                let uid = users.uid;
                let owned = OwnedObject { uid, memory };
                users.owned.insert((kind, number.get(output)), owned);
            }
        } else if let Some(subject) = subject(opcode, input) {
            if ends(opcode) {
                users.owned.remove(&subject);
            } else if let Some(owned) = users.owned.get_mut(&subject).filter(|_| names) {
                owned.memory.entries = memory.entries;
            }
        }
    }

    /// Returns a umem of the command's user context.
    fn umem(&self, umem: u32) -> Result<&Umem, CommandError> {
        match self.umems.get(umem) {
            Some(found) if self.users.owns(Kind::Umem, umem) => Ok(found),
            _ => Err(MISSING),
        }
    }

    /// Returns the memory of a queue's entries. `umem` is the number of the umem and
    /// the offset in it, if the command names one; without, the command lists pages,
    /// whose size and offset are `pages`.
    pub(crate) fn entries(
        &mut self,
        input: &[u8],
        length: u64,
        umem: Option<(u32, u64)>,
        pages: (u32, u32),
        written: bool,
    ) -> Result<Buffer, CommandError> {
        let Some((number, at)) = umem.filter(|_| length != 0) else {
            return Buffer::from_page_list(input, PAGE_LIST_OFFSET, length, pages.0, pages.1)
                .ok_or(refuse(
                    Status::BadInputLength,
                    "pages of the queue are missing",
                ));
        };
        let umem = self.umem(number)?;
        if written && !umem.writable {
            return Err(READ_ONLY);
        }
        let buffer = umem.part(at, length).ok_or(OUT_OF_BOUNDS)?;
        self.users.named.entries = Some(number);
        Ok(buffer)
    }

    /// Returns the address of a queue's doorbell records, which is an offset in a umem
    /// if the command names one.
    pub(crate) fn records(
        &mut self,
        address: u64,
        umem: Option<u32>,
        written: bool,
    ) -> Result<u64, CommandError> {
        const BYTES: u64 = 8;
        let Some(number) = umem else {
            return Ok(address);
        };
        let umem = self.umem(number)?;
        if written && !umem.writable {
            return Err(READ_ONLY);
        }
        let address = umem.address(address, BYTES).ok_or(OUT_OF_BOUNDS)?;
        if address % BYTES != 0 {
            return Err(refuse(
                Status::BadParameter,
                "the doorbell records are not aligned",
            ));
        }
        self.users.named.records = Some(number);
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
            return Err(refuse(
                Status::ExceedsLimit,
                "the memory key has too many pages",
            ));
        }
        let umem = self.umem(number)?;
        // The last page may end beyond the memory: accesses are checked.
        let length = umem.pages.len() as u64;
        if shift < 12 || shift > umem.page_shift || count > length << (umem.page_shift - shift) {
            return Err(OUT_OF_BOUNDS);
        }
        let address = |n: u64| umem.address(at.checked_add(n << shift)?, 1);
        let pages: Option<Vec<_>> = (0..count).map(address).collect();
        let pages = pages.ok_or(OUT_OF_BOUNDS)?;
        if pages.iter().any(|page| page & ((1 << shift) - 1) != 0) {
            return Err(refuse(
                Status::BadParameter,
                "pages of the memory key are not aligned",
            ));
        }
        let writable = umem.writable;
        self.users.named.entries = Some(number);
        Ok((pages, writable))
    }

    pub(crate) fn create_umem(&mut self, input: &[u8], output: &mut [u8]) -> Outcome {
        const LOG_PAGE_SIZE: Field = field(0x20, 4, 0);
        const OFFSET: Field = field(0x24, 31, 0);
        const COUNT: usize = 0x28;
        const LIST: usize = 0x30;
        const READABLE: u64 = 1;
        const WRITABLE: u64 = 2;
        let page_shift = LOG_PAGE_SIZE.get(input) + 12;
        let listed = input.len().saturating_sub(LIST) / 8;
        let count = usize::try_from(get64(input, COUNT)).unwrap_or(usize::MAX);
        if count == 0 || count > listed {
            return Err(refuse(
                Status::BadInputLength,
                "pages of the memory are missing",
            ));
        }
        let entries: Vec<u64> = (0..count).map(|n| get64(input, LIST + 8 * n)).collect();
        if entries.iter().any(|entry| entry & READABLE == 0) {
            return Err(refuse(Status::BadParameter, "a page that is not readable"));
        }
        let umem = Umem {
            writable: entries.iter().all(|entry| entry & WRITABLE != 0),
            pages: entries.iter().map(|entry| entry & !0xfff).collect(),
            page_shift,
            offset: OFFSET.get(input).into(),
        };
        let pages = (umem.pages.len() as u64).checked_mul(1 << page_shift);
        if umem.offset >= 1 << page_shift || pages.is_none() {
            return Err(refuse(Status::BadParameter, "the size of the memory"));
        }
        super::resource::created(output, self.umems.insert(umem))
    }

    pub(crate) fn destroy_umem(&mut self, input: &[u8]) -> Outcome {
        let umem = NUMBER.get(input);
        if self.users.uses(umem) {
            return Err(refuse(
                Status::ResourceBusy,
                "queues or keys still use the memory",
            ));
        }
        super::resource::removed(self.umems.remove(umem))
    }

    /// Ends a user context, whose objects must have been destroyed.
    pub(crate) fn destroy_uctx(&mut self, input: &[u8]) -> Outcome {
        let uid = NUMBER.get(input);
        if uid != 0 && self.users.owned.values().any(|owned| owned.uid == uid) {
            return Err(refuse(
                Status::ResourceBusy,
                "objects of the user context are left",
            ));
        }
        super::resource::removed(self.user_contexts.remove(uid))
    }
}
