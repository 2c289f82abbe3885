//! DevX: commands of a program in the device's own format, with the driver's checks.
//!
//! Each command is tagged with the user context of the program, and the device rejects
//! objects of other contexts. A rejected command fails with EREMOTEIO; its output contains
//! the device's answer nevertheless.

use std::os::fd::RawFd;

use mlx5_abi::ids::*;
use ring::Mapping;
use roce::bits::{Field, get_array};
use softhca::command::opcode as op;
use softhca::layout::header::{OBJ_ID, OBJ_TYPE, SHORT_NUMBER};
pub(crate) use softhca::layout::header::{OPCODE, UID};
use softhca::layout::mkc::access_mode;
use softhca::layout::{
    PAGE_LIST, cqc, flow, header, mkc, psv, q_counter, qpc, rqc, sqc, umem, wq, xrc_srqc, xrqc,
};
use softhca::rule::Rule;
use uverbs::AccessFlags;

use crate::driver::cause::{Class, Result, at_most, by_device, invalid, memory, refuse, require};
use crate::driver::command::{self, Input, NUMBER, make};
use crate::driver::data::DevxObject;
use crate::driver::dma_buffer;
use crate::driver::files::uar_mapping;
use crate::driver::object::{Created, Object, ObjectData, Summary};
use crate::driver::queues::WQ;
use crate::driver::request::Request;
use crate::driver::state::{State, VECTORS};
use crate::user::{Access, fault_in};

/// The group of an ATTACH_TO_MCG.
const GROUP: usize = 0x10;

/// Bytes of doorbell records.
const RECORDS: u64 = 8;
/// Opcodes that are general commands by definition.
const GENERAL: std::ops::Range<u16> = 0xb00..0xd00;

/// Opcodes that the checks accept although the device has no such commands.
mod others {
    pub(super) const QUERY_ESW_VPORT_CONTEXT: u16 = 0x752;
    pub(super) const QUERY_CONG_STATUS: u16 = 0x822;
    pub(super) const QUERY_CONG_PARAMS: u16 = 0x824;
    pub(super) const QUERY_CONG_STATISTICS: u16 = 0x826;
    pub(super) const GET_DROPPED_PACKET_LOG: u16 = 0x78a;
}

impl ObjectData for DevxObject {
    fn kind(&self) -> u16 {
        OBJECT_DEVX_OBJ
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "DevX object",
            number: self.number,
            length: 0,
        }
    }

    fn send_queue(&self) -> Option<u32> {
        matches!(self.opcode, op::CREATE_QP | op::CREATE_SQ).then_some(self.number)
    }

    fn represents(&self, object: Created) -> bool {
        object
            == Created {
                opcode: self.opcode,
                number: self.number,
                general: self.general,
            }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_devx(self)
    }

    fn release(&self, state: &mut State, _: RawFd, handle: u32) {
        state.unsubscribe_object(handle);
    }
}

/// A UAR.
#[derive(Debug)]
pub(crate) struct Uar {
    pub(crate) number: u32,
    /// Its slot in the context's file.
    pub(crate) slot: u32,
}

impl ObjectData for Uar {
    fn kind(&self) -> u16 {
        OBJECT_UAR
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "UAR",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DEALLOC_UAR, self.number)
    }

    fn release(&self, state: &mut State, file: RawFd, _: u32) {
        if let Ok(context) = state.context(file) {
            context.free_uar_slot(self.slot);
            let id = context.id;
            let at = uar_mapping(self.slot).0 as usize;
            state.watch.remove_uar(id, at);
        }
    }
}

/// Registered memory of DevX.
#[derive(Debug)]
struct Umem {
    number: u32,
    /// The device's mapping of a DMA buffer.
    _buffer: Option<Mapping>,
}

impl ObjectData for Umem {
    fn kind(&self) -> u16 {
        OBJECT_DEVX_UMEM
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "DevX memory",
            number: self.number,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_UMEM, self.number)
    }
}

/// Returns whether a command needs no object.
fn is_general(opcode: u16) -> bool {
    GENERAL.contains(&opcode)
        || matches!(
            opcode,
            op::QUERY_HCA_CAP
                | op::QUERY_HCA_VPORT_CONTEXT
                | others::QUERY_ESW_VPORT_CONTEXT
                | op::QUERY_VPORT_STATE
                | op::QUERY_ADAPTER
                | op::QUERY_ISSI
                | op::QUERY_NIC_VPORT_CONTEXT
                | op::QUERY_ROCE_ADDRESS
                | op::QUERY_VNIC_ENV
                | op::QUERY_VPORT_COUNTER
                | others::GET_DROPPED_PACKET_LOG
                | op::NOP
                | others::QUERY_CONG_STATUS
                | others::QUERY_CONG_PARAMS
                | others::QUERY_CONG_STATISTICS
                | op::QUERY_LAG
        )
}

/// Returns the field with the new object's number in the output of a creating command, and
/// the command that destroys the object. Flow tables and their contents are missing, since
/// the device has none for programs.
fn creates(opcode: u16) -> Option<(Field, u16)> {
    Some(match opcode {
        op::CREATE_GENERAL_OBJECT => (OBJ_ID, op::DESTROY_GENERAL_OBJECT),
        op::CREATE_MKEY => (NUMBER, op::DESTROY_MKEY),
        op::CREATE_PSV => (psv::PSV0_INDEX, op::DESTROY_PSV),
        op::CREATE_CQ => (NUMBER, op::DESTROY_CQ),
        op::ALLOC_PD => (NUMBER, op::DEALLOC_PD),
        op::ALLOC_TRANSPORT_DOMAIN => (NUMBER, op::DEALLOC_TRANSPORT_DOMAIN),
        op::CREATE_RMP => (NUMBER, op::DESTROY_RMP),
        op::CREATE_SQ => (NUMBER, op::DESTROY_SQ),
        op::CREATE_RQ => (NUMBER, op::DESTROY_RQ),
        op::CREATE_RQT => (NUMBER, op::DESTROY_RQT),
        op::CREATE_TIR => (NUMBER, op::DESTROY_TIR),
        op::CREATE_TIS => (NUMBER, op::DESTROY_TIS),
        op::ALLOC_Q_COUNTER => (SHORT_NUMBER, op::DEALLOC_Q_COUNTER),
        op::ALLOC_FLOW_COUNTER => (OBJ_ID, op::DEALLOC_FLOW_COUNTER),
        op::CREATE_QP => (NUMBER, op::DESTROY_QP),
        op::CREATE_XRC_SRQ => (NUMBER, op::DESTROY_XRC_SRQ),
        op::CREATE_XRQ => (NUMBER, op::DESTROY_XRQ),
        op::CREATE_DCT => (NUMBER, op::DESTROY_DCT),
        op::ATTACH_TO_MCG => (NUMBER, op::DETACH_FROM_MCG),
        op::ALLOC_XRCD => (NUMBER, op::DEALLOC_XRCD),
        _ => return None,
    })
}

/// What a command does to an existing object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Query,
    Modify,
}

/// Returns what a command does to an object, the command that creates the object, and the
/// field with its number.
fn subject(opcode: u16) -> Option<(Use, u16, Field)> {
    use Use::{Modify, Query};
    Some(match opcode {
        op::QUERY_GENERAL_OBJECT => (Query, op::CREATE_GENERAL_OBJECT, OBJ_ID),
        op::QUERY_MKEY => (Query, op::CREATE_MKEY, NUMBER),
        op::QUERY_CQ => (Query, op::CREATE_CQ, NUMBER),
        op::QUERY_RMP => (Query, op::CREATE_RMP, NUMBER),
        op::QUERY_SQ => (Query, op::CREATE_SQ, NUMBER),
        op::QUERY_RQ => (Query, op::CREATE_RQ, NUMBER),
        op::QUERY_RQT => (Query, op::CREATE_RQT, NUMBER),
        op::QUERY_TIR => (Query, op::CREATE_TIR, NUMBER),
        op::QUERY_TIS => (Query, op::CREATE_TIS, NUMBER),
        op::QUERY_Q_COUNTER => (Query, op::ALLOC_Q_COUNTER, q_counter::COUNTER_SET_ID),
        op::QUERY_FLOW_COUNTER => (Query, op::ALLOC_FLOW_COUNTER, flow::FLOW_COUNTER_ID),
        op::QUERY_QP => (Query, op::CREATE_QP, NUMBER),
        op::QUERY_XRC_SRQ => (Query, op::CREATE_XRC_SRQ, NUMBER),
        op::QUERY_XRQ => (Query, op::CREATE_XRQ, NUMBER),
        op::QUERY_DCT => (Query, op::CREATE_DCT, NUMBER),
        op::MODIFY_GENERAL_OBJECT => (Modify, op::CREATE_GENERAL_OBJECT, OBJ_ID),
        op::MODIFY_CQ => (Modify, op::CREATE_CQ, NUMBER),
        op::MODIFY_RMP => (Modify, op::CREATE_RMP, NUMBER),
        op::MODIFY_SQ => (Modify, op::CREATE_SQ, NUMBER),
        op::MODIFY_RQ => (Modify, op::CREATE_RQ, NUMBER),
        op::MODIFY_RQT => (Modify, op::CREATE_RQT, NUMBER),
        op::MODIFY_TIR => (Modify, op::CREATE_TIR, NUMBER),
        op::MODIFY_TIS => (Modify, op::CREATE_TIS, NUMBER),
        op::RST2INIT_QP
        | op::INIT2RTR_QP
        | op::INIT2INIT_QP
        | op::RTR2RTS_QP
        | op::RTS2RTS_QP
        | op::SQERR2RTS_QP
        | op::TO_ERR_QP
        | op::TO_RST_QP => (Modify, op::CREATE_QP, NUMBER),
        op::ARM_XRC_SRQ => (Modify, op::CREATE_XRC_SRQ, NUMBER),
        op::ARM_XRQ => (Modify, op::CREATE_XRQ, NUMBER),
        op::ARM_RQ => (Modify, op::CREATE_RMP, NUMBER),
        _ => return None,
    })
}

/// Sets the flags that a queue's memory is registered memory (umem), so that the device
/// ignores other descriptions of it in the command.
fn require_umem(input: &mut Vec<u8>) {
    const XRQ_WQ: usize = xrqc::AT + xrqc::WQ;
    let fields: &[Field] = match OPCODE.get(input) as u16 {
        op::CREATE_CQ => &[cqc::CQ_UMEM_VALID, cqc::DBR_UMEM_VALID.at(cqc::AT)],
        op::MODIFY_CQ => &[cqc::CQ_UMEM_VALID],
        op::CREATE_QP => &[qpc::WQ_UMEM_VALID, qpc::DBR_UMEM_VALID.at(qpc::AT)],
        op::CREATE_RQ | op::CREATE_SQ | op::CREATE_RMP => {
            &[wq::WQ_UMEM_VALID.at(WQ), wq::DBR_UMEM_VALID.at(WQ)]
        }
        op::CREATE_XRC_SRQ => &[
            xrc_srqc::XRC_SRQ_UMEM_VALID,
            xrc_srqc::DBR_UMEM_VALID.at(xrc_srqc::AT),
        ],
        op::CREATE_XRQ => &[wq::WQ_UMEM_VALID.at(XRQ_WQ), wq::DBR_UMEM_VALID.at(XRQ_WQ)],
        _ => &[],
    };
    // Fields beyond the end would not be written.
    if !fields.is_empty() && input.len() < PAGE_LIST {
        input.resize(PAGE_LIST, 0);
    }
    for field in fields {
        field.put(input, 1);
    }
}

/// Sets the flag that a memory key refers to registered memory (umem), unless it consists of
/// other keys.
fn require_umem_of_key(input: &mut [u8]) -> Result<()> {
    const OF_KEYS: [u32; 2] = [access_mode::KLMS, access_mode::KSM];
    const LEAST: usize = mkc::AT + mkc::SIZE;
    let length = input.len();
    require(
        length >= LEAST,
        "length of the command",
        length,
        Rule::AtLeast(LEAST as u64),
    )?;
    let mode = mkc::ACCESS_MODE_4_2.at(mkc::AT).get(input) << 2
        | mkc::ACCESS_MODE_1_0.at(mkc::AT).get(input);
    if !OF_KEYS.contains(&mode) {
        mkc::MKEY_UMEM_VALID.put(input, 1);
    }
    Ok(())
}

impl State {
    /// Returns the user context of a descriptor; 0 if it has none.
    pub(crate) fn uid(&self, fd: RawFd) -> u32 {
        self.opened(fd).map_or(0, |context| context.uid)
    }

    /// Returns the UAR of queues that name none.
    pub(crate) fn default_uar(&self, fd: RawFd) -> Result<u32> {
        let context = self.opened(fd);
        let must_name = context.is_some_and(|context| context.allocates_uars);
        require(!must_name, "UAR", 0u32, Rule::Present)?;
        Ok(context.and_then(|context| context.uar).unwrap_or(self.uar))
    }

    /// Returns a command of the program, tagged with its user context.
    fn tagged(&self, fd: RawFd, request: &Request, id: u16) -> Result<Vec<u8>> {
        let uid = self.uid(fd);
        let mut input = request.bytes(id).unwrap_or_default();
        if uid == 0 {
            // As in the kernel, which executes some queries with the user context of the
            // device, if it has one.
            let exempt = [op::QUERY_HCA_CAP, op::QUERY_HCA_VPORT_CONTEXT];
            let class = match exempt.contains(&(OPCODE.get(&input) as u16)) {
                true => Class::Unsupported,
                false => Class::Invalid,
            };
            return refuse(class, "descriptor", fd, Rule::With("a context for DevX"));
        }
        UID.put(&mut input, uid);
        Ok(input)
    }

    /// Executes a command and writes its answer, also if the device rejects it.
    fn execute_command(
        &mut self,
        request: &mut Request,
        input: &[u8],
        out: u16,
    ) -> Result<Vec<u8>> {
        let (output, outcome) = self.hca.execute_command(input, request.room(out));
        request.put(out, &output);
        match outcome {
            Ok(()) => Ok(output),
            Err(error) => {
                let command = op::name(OPCODE.get(input) as u16);
                Err(by_device(command, error).as_class(Class::Program(error)))
            }
        }
    }

    /// Executes a command that belongs to no object.
    pub(crate) fn devx_other(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let input = self.tagged(fd, request, ATTR_DEVX_OTHER_IN)?;
        let opcode = OPCODE.get(&input);
        require(
            is_general(opcode as u16),
            "opcode",
            opcode,
            Rule::OfType("general command"),
        )?;
        self.execute_command(request, &input, ATTR_DEVX_OTHER_OUT)
            .map(drop)
    }

    pub(crate) fn devx_query_eqn(&mut self, request: &mut Request) -> Result<()> {
        let vector: u32 = request.value(ATTR_DEVX_QUERY_EQN_VECTOR)?;
        at_most("vector", vector, u64::from(VECTORS) - 1)?;
        let number = self.event_queue(vector);
        request.answer(ATTR_DEVX_QUERY_EQN_NUMBER, &number);
        Ok(())
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn devx_create(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let mut input = self.tagged(fd, request, ATTR_DEVX_OBJ_CREATE_IN)?;
        let opcode = OPCODE.get(&input) as u16;
        require(
            !header::TUNNELED.is_set(&input),
            "vhca_tunnel_id",
            1u32,
            Rule::Zero,
        )?;
        let Some((field, destroy)) = creates(opcode) else {
            return invalid("opcode", opcode, Rule::OfType("command that creates"));
        };
        match opcode {
            // The number is beyond the minimum length of answers.
            op::CREATE_PSV => {
                let room = request.room(ATTR_DEVX_OBJ_CREATE_OUT);
                let rule = Rule::AtLeast(psv::SIZE as u64);
                require(room >= psv::SIZE, "length of the output", room, rule)?;
            }
            op::CREATE_MKEY => require_umem_of_key(&mut input)?,
            _ => require_umem(&mut input),
        }
        let packets = match opcode {
            op::CREATE_SQ | op::CREATE_RQ if self.has_packets() => self.open_packets()?,
            _ => None,
        };
        let output = self.execute_command(request, &input, ATTR_DEVX_OBJ_CREATE_OUT)?;
        let number = match opcode {
            op::ATTACH_TO_MCG => NUMBER.get(&input),
            _ => field.get(&output),
        };
        let general = match opcode {
            op::CREATE_GENERAL_OBJECT => OBJ_TYPE.get(&input),
            _ => 0,
        };
        let named = match opcode {
            op::CREATE_PSV => NUMBER,
            _ => field,
        };
        let destroy = Input::new(destroy, 32)
            .set(named, number)
            .set(UID, self.uid(fd));
        let destroy = match opcode {
            op::CREATE_GENERAL_OBJECT => destroy.set(OBJ_TYPE, general),
            op::ATTACH_TO_MCG => destroy.bytes(GROUP, &get_array::<16>(&input, GROUP)),
            _ => destroy,
        };
        let object = DevxObject {
            opcode,
            general,
            number,
            destroy,
            _packets: packets,
        };
        // SAFETY: guaranteed by the caller.
        if let Err(errno) = unsafe { self.watch_object(&object) } {
            self.destroy_devx(&object)?;
            return Err(errno);
        }
        let handle = self.objects.insert(Object::new(fd, object));
        request.set_handle(ATTR_DEVX_OBJ_CREATE_HANDLE, handle);
        Ok(())
    }

    /// Watches the doorbell records of a new object.
    ///
    /// # Safety
    /// They must stay valid until the object is destroyed.
    unsafe fn watch_object(&mut self, object: &DevxObject) -> Result<()> {
        let number = object.number;
        let records = match object.opcode {
            op::CREATE_CQ => self.hca.cq_doorbell_address(number),
            op::CREATE_QP | op::CREATE_SQ => self.hca.queue_doorbell_address(number),
            _ => None,
        };
        let Some(records) = records else {
            return Ok(());
        };
        // Records must be within the registered memory, not only within its pages.
        let is_inside = self.hca.platform().contains(records, RECORDS);
        require(is_inside, "doorbell records", records, Rule::Writable)?;
        let is_aligned = records % RECORDS == 0;
        require(
            is_aligned,
            "doorbell records",
            records,
            Rule::MultipleOf(RECORDS),
        )?;
        match object.opcode {
            // SAFETY: aligned words; the device does not let the program deregister
            // the memory before the queue is destroyed.
            op::CREATE_CQ => unsafe { self.watch.add_arm(number, records) },
            // SAFETY: as above.
            _ => unsafe { self.watch.add_queue(number, records) },
        }
        Ok(())
    }

    /// Destroys the device's part of an object.
    fn destroy_devx(&mut self, object: &DevxObject) -> Result<()> {
        let (creator, number) = (object.opcode, object.number);
        if creator == op::CREATE_DCT {
            return self.destroy_dc_target(number);
        }
        let done = command::run(&mut self.hca, &object.destroy, 16);
        // Fails if the membership has ended with its queue pair.
        if creator != op::ATTACH_TO_MCG {
            done?;
        }
        match creator {
            op::CREATE_CQ => self.watch.remove_arm(number),
            op::CREATE_QP | op::CREATE_SQ => self.watch.remove_queue(number),
            _ => {}
        }
        Ok(())
    }

    pub(crate) fn devx_query(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let input = self.checked_query(fd, request)?;
        self.execute_command(request, &input, ATTR_DEVX_OBJ_QUERY_OUT)
            .map(drop)
    }

    /// Returns a query of the object that the request names.
    pub(crate) fn checked_query(&self, fd: RawFd, request: &Request) -> Result<Vec<u8>> {
        let input = self.tagged(fd, request, ATTR_DEVX_OBJ_QUERY_IN)?;
        self.check_subject(fd, request, &input, Use::Query)?;
        Ok(input)
    }

    pub(crate) fn devx_modify(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let mut input = self.tagged(fd, request, ATTR_DEVX_OBJ_MODIFY_IN)?;
        self.check_subject(fd, request, &input, Use::Modify)?;
        let now_errored = OPCODE.get(&input) as u16 == op::TO_ERR_QP;
        if now_errored {
            self.flush_sends(None);
        }
        require_umem(&mut input);
        self.execute_command(request, &input, ATTR_DEVX_OBJ_MODIFY_OUT)?;
        let resets = match OPCODE.get(&input) as u16 {
            op::MODIFY_SQ => sqc::STATE.at(sqc::AT).get(&input) == rqc::state::RST,
            opcode => opcode == op::TO_RST_QP,
        };
        if resets {
            self.watch.reset_sends(NUMBER.get(&input));
        }
        Ok(())
    }

    /// Checks that a command is about the object that the request names: one of DevX,
    /// or one of verbs.
    fn check_subject(&self, fd: RawFd, request: &Request, input: &[u8], access: Use) -> Result<()> {
        let of_command = subject(OPCODE.get(input) as u16);
        let Some((_, creator, field)) = of_command.filter(|(used, ..)| *used == access) else {
            let rule = Rule::OfType(match access {
                Use::Query => "command that queries",
                Use::Modify => "command that modifies",
            });
            return invalid("opcode", OPCODE.get(input), rule);
        };
        let number = field.get(input);
        require(
            !header::TUNNELED.is_set(input),
            "vhca_tunnel_id",
            1u32,
            Rule::Zero,
        )?;
        let general = match creator {
            op::CREATE_GENERAL_OBJECT => OBJ_TYPE.get(input),
            _ => 0,
        };
        let created = Created {
            opcode: creator,
            number,
            general,
        };
        let handle = request.handle(ATTR_DEVX_OBJ_QUERY_HANDLE)?;
        let is_it = self.objects.get(fd, handle)?.data.represents(created);
        let rule = Rule::OfType("object that the command names");
        require(is_it, "number", number, rule).map_err(|error| error.of(handle))
    }

    /// Registers memory (umem).
    ///
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn register_umem(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const KNOWN: AccessFlags = AccessFlags::LOCAL_WRITE
            .union(AccessFlags::REMOTE_WRITE)
            .union(AccessFlags::REMOTE_READ);
        const SIZES_AT_LEAST: u64 = !0xfff;
        let uid = self.uid(fd);
        require(uid != 0, "descriptor", fd, Rule::With("a context for DevX"))?;
        let address: u64 = request.value(ATTR_DEVX_UMEM_REG_ADDR)?;
        let length: u64 = request.value(ATTR_DEVX_UMEM_REG_LEN)?;
        let access = request.flags(ATTR_DEVX_UMEM_REG_ACCESS, KNOWN.bits())?;
        let access = AccessFlags::from_bits_retain(access);
        let writable = access.contains(AccessFlags::LOCAL_WRITE);
        let is_remote = access.contains(AccessFlags::REMOTE_WRITE);
        let needed = Rule::Contains(AccessFlags::LOCAL_WRITE.bits().into());
        require(!is_remote || writable, "access", access.bits(), needed)?;
        let need = match writable {
            true => Access::Write,
            false => Access::Read,
        };
        let (address, buffer) = match request.program_fd(ATTR_DEVX_UMEM_REG_DMABUF) {
            Some(buffer) => {
                require(length != 0, "length", length, Rule::NonZero)?;
                // The address is an offset in the buffer.
                let (mapping, address) = dma_buffer::map(buffer, address, length)?;
                (address, Some(mapping))
            }
            None => {
                let refused = memory("addr", address, Rule::Readable);
                fault_in(address, length, need).map_err(refused)?;
                (address, None)
            }
        };
        let sizes = match request.has(ATTR_DEVX_UMEM_REG_PAGE_SIZES) {
            true => request.value(ATTR_DEVX_UMEM_REG_PAGE_SIZES)?,
            false => u64::MAX,
        };
        // As in the kernel, page sizes larger than the memory do not count.
        let largest = length
            .max(4096)
            .checked_next_power_of_two()
            .unwrap_or(u64::MAX);
        let usable = SIZES_AT_LEAST & (largest | (largest - 1));
        require(
            sizes & usable != 0,
            "pgsz_bitmap",
            sizes,
            Rule::Contains(usable),
        )?;
        let input = pages(address, length, writable)?.set(UID, uid);
        let number = make(&mut self.hca, &input)?;
        // SAFETY: the range is part of a mapping that the object keeps, whose file does not
        // shrink; or guaranteed by the caller.
        unsafe { self.hca.platform_mut().grant(address, length) };
        let object = Object::new(
            fd,
            Umem {
                number,
                _buffer: buffer,
            },
        );
        let handle = self
            .objects
            .insert(object.with_memory(vec![(address, length)]));
        request.set_handle(ATTR_DEVX_UMEM_REG_HANDLE, handle);
        request.answer(ATTR_DEVX_UMEM_REG_NUMBER, &number);
        Ok(())
    }

    pub(crate) fn alloc_uar(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// With BlueFlame registers, and without.
        const TYPES: std::ops::RangeInclusive<u64> = 0..=1;
        let kind: u64 = request.constant(ATTR_ALLOC_UAR_TYPE)?;
        at_most("type", kind, *TYPES.end())?;
        let Some(slot) = self.context(fd)?.allocate_uar_slot() else {
            return refuse(Class::NoMemory, "UARs of the context", fd, Rule::Free);
        };
        let input = Input::new(op::ALLOC_UAR, 16).set(UID, self.uid(fd));
        let number = match make(&mut self.hca, &input) {
            Ok(number) => number,
            Err(errno) => {
                self.context(fd)?.free_uar_slot(slot);
                return Err(errno);
            }
        };
        let handle = self.objects.insert(Object::new(fd, Uar { number, slot }));
        let (offset, length) = uar_mapping(slot);
        let context = self.context(fd)?.id;
        self.watch.add_uar(context, offset as usize);
        request.set_handle(ATTR_ALLOC_UAR_HANDLE, handle);
        request.answer(ATTR_ALLOC_UAR_MMAP_OFFSET, &offset);
        request.answer(ATTR_ALLOC_UAR_MMAP_LENGTH, &length);
        request.answer(ATTR_ALLOC_UAR_PAGE_ID, &number);
        Ok(())
    }

    /// Checks that a UAR number belongs to the context.
    pub(crate) fn check_uar(&self, fd: RawFd, number: u32) -> Result<u32> {
        let mut uars = self.objects.numbered(OBJECT_UAR, number);
        match uars.any(|object| object.file == fd) {
            true => Ok(number),
            false => invalid("UAR", number, Rule::Exists),
        }
    }
}

/// Returns the command that registers memory, with its pages. Large pages are used only for
/// memory that consists entirely of them, so that the device gets no access to other memory.
fn pages(address: u64, length: u64, writable: bool) -> Result<Input> {
    const SHIFTS: std::ops::RangeInclusive<u32> = 12..=30;
    const MAX_PAGES: u64 = 1 << 22;
    const READABLE: u64 = 1 << 0;
    const WRITABLE: u64 = 1 << 1;
    let aligned = (address | length).trailing_zeros();
    let shift = aligned.clamp(*SHIFTS.start(), *SHIFTS.end());
    let page = 1u64 << shift;
    let within = address % page;
    let count = (within + length).div_ceil(page);
    if count > MAX_PAGES {
        return refuse(Class::NoMemory, "pages", count, Rule::AtMost(MAX_PAGES));
    }
    let bits = if writable {
        READABLE | WRITABLE
    } else {
        READABLE
    };
    let mut input = Input::new(op::CREATE_UMEM, umem::MTT + 8 * count as usize)
        .set(umem::LOG_PAGE_SIZE, shift - SHIFTS.start())
        .set(umem::PAGE_OFFSET, within as u32)
        .long(umem::NUM_OF_MTT, count);
    for n in 0..count {
        let at = address - within + (n << shift);
        input = input.long(umem::MTT + 8 * n as usize, at | bits);
    }
    Ok(input)
}
