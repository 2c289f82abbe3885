//! The write commands, invoked through ioctl.

use std::mem::offset_of;
use std::os::fd::RawFd;

use softhca::command::opcode as op;
use softhca::rule::Rule;
use uverbs::abi::ids::{
    ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_UHW_OUT, OBJECT_AH, OBJECT_PD, OBJECT_RWQ_IND_TBL,
};
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::extended::*;
use uverbs::abi::write::{
    AllocMw, AllocMwResp, AllocPd, AllocPdResp, AttachMcast, CMD_FLAG_EXTENDED, CreateAh,
    CreateAhResp, CreateCompChannel, CreateCompChannelResp, CreateFlow, CreateFlowResp,
    CreateQpResp, DestroyFlow, DetachMcast, ExCreateRwqIndTable, ExCreateRwqIndTableResp,
    ExDestroyRwqIndTable, ExModifyCq, ExModifyQp, ExModifyQpResp, ExModifyWq, ExQueryDevice,
    ExQueryDeviceResp, ModifyQp, ModifySrq, OpenQp, OpenXrcd, OpenXrcdResp, QueryDevice,
    QueryDeviceResp, QueryQp, QueryQpResp, QuerySrq, QuerySrqResp, RegMr, RegMrResp, ReregMr,
    ReregMrResp, ResizeCq, ResizeCqResp,
};

use crate::driver::cause::{
    Class, Result, at_most, invalid, is, known_bits, refuse, require, require_support, reserved,
    system, unsupported,
};
use crate::driver::command::{Input, make};
use crate::driver::descriptors::ObjectChange;
use crate::driver::event::{EventFile, FileKind};
use crate::driver::files::File;
use crate::driver::object::{Object, ObjectData, Pd, Summary};
use crate::driver::request::Request;
use crate::driver::state::State;

/// Attributes of a queue pair that both modify commands support, and the one
/// that only the extended command supports.
const STANDARD_ATTRIBUTES: u32 = (1 << 21) - 1;
const RATE_LIMIT: u32 = 1 << 25;
/// `MLX5_MAX_CQ_PERIOD`.
pub(crate) const LONGEST_PERIOD: u16 = 0xfff;

/// Returns the minimum length of a command's structure, and of its answer
/// buffer.
///
/// # Errors
/// EINVAL for unknown command numbers; EOPNOTSUPP for commands that are not
/// supported.
fn sizes(command: u32) -> Result<(usize, usize)> {
    /// `IB_USER_VERBS_CMD_COMMAND_MASK`, and the exclusive upper bounds of the
    /// command numbers.
    const NUMBER: u32 = 0xff;
    const COMMANDS: u32 = CMD_OPEN_QP + 1;
    const EX_COMMANDS: u32 = EX_CMD_MODIFY_CQ + 1;
    macro_rules! sizes {
        ($request:ty) => {
            (size_of::<$request>(), 0)
        };
        ($request:ty, $answer:ty) => {
            (size_of::<$request>(), size_of::<$answer>())
        };
    }
    Ok(match command {
        CMD_QUERY_DEVICE => sizes!(QueryDevice, QueryDeviceResp),
        // Up to the length of the answer: the first version of the structure.
        EX_QUERY_DEVICE => {
            let answer = offset_of!(ExQueryDeviceResp, response_length) + 4;
            (size_of::<ExQueryDevice>(), answer)
        }
        CMD_ALLOC_PD => sizes!(AllocPd, AllocPdResp),
        CMD_REG_MR => sizes!(RegMr, RegMrResp),
        CMD_REREG_MR => sizes!(ReregMr, ReregMrResp),
        CMD_ALLOC_MW => sizes!(AllocMw, AllocMwResp),
        CMD_RESIZE_CQ => sizes!(ResizeCq, ResizeCqResp),
        CMD_CREATE_COMP_CHANNEL => sizes!(CreateCompChannel, CreateCompChannelResp),
        CMD_MODIFY_QP => sizes!(ModifyQp),
        EX_MODIFY_QP => sizes!(ModifyQp, ExModifyQpResp),
        CMD_QUERY_QP => sizes!(QueryQp, QueryQpResp),
        EX_MODIFY_CQ => sizes!(ExModifyCq),
        EX_MODIFY_WQ => sizes!(ExModifyWq),
        EX_CREATE_WQ_TABLE => sizes!(ExCreateRwqIndTable, ExCreateRwqIndTableResp),
        EX_DESTROY_WQ_TABLE => sizes!(ExDestroyRwqIndTable),
        EX_CREATE_FLOW => sizes!(CreateFlow, CreateFlowResp),
        EX_DESTROY_FLOW => sizes!(DestroyFlow),
        CMD_OPEN_XRCD => sizes!(OpenXrcd, OpenXrcdResp),
        CMD_OPEN_QP => sizes!(OpenQp, CreateQpResp),
        CMD_MODIFY_SRQ => sizes!(ModifySrq),
        CMD_QUERY_SRQ => sizes!(QuerySrq, QuerySrqResp),
        CMD_CREATE_AH => sizes!(CreateAh, CreateAhResp),
        CMD_ATTACH_MCAST => sizes!(AttachMcast),
        CMD_DETACH_MCAST => sizes!(DetachMcast),
        _ => {
            let number = command & NUMBER;
            let known = match command & !NUMBER {
                0 => number < COMMANDS,
                CMD_FLAG_EXTENDED => number < EX_COMMANDS,
                _ => false,
            };
            return match known {
                true => unsupported("write command", command, Rule::Supported),
                false => invalid("write command", command, Rule::Known),
            };
        }
    })
}

impl ObjectData for Pd {
    fn kind(&self) -> u16 {
        OBJECT_PD
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "protection domain",
            number: self.number,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DEALLOC_PD, self.number)
    }
}

/// An address handle, of which the device knows nothing.
#[derive(Debug)]
struct Ah;

impl ObjectData for Ah {
    fn kind(&self) -> u16 {
        OBJECT_AH
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "address handle",
            number: 0,
            length: 0,
        }
    }

    fn destroy(&mut self, _: &mut State) -> Result<()> {
        Ok(())
    }
}

impl State {
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn write(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let command = request.write_command()?;
        let (least, room) = sizes(command)?;
        for (what, length, least) in [
            ("length of the input", request.room(ATTR_CORE_IN), least),
            ("length of the output", request.room(ATTR_CORE_OUT), room),
        ] {
            if length < least {
                let refused = refuse(Class::NoSpace, what, length, Rule::AtLeast(least as u64));
                return refused.map_err(|error| error.of(command));
            }
        }
        match command {
            CMD_QUERY_DEVICE => {
                let _: QueryDevice = request.core()?;
                self.query_device(request);
            }
            EX_QUERY_DEVICE => {
                let requested: ExQueryDevice = request.core()?;
                let ExQueryDevice {
                    comp_mask,
                    reserved,
                } = requested;
                is("comp_mask", comp_mask, 0)?;
                is("reserved", reserved, 0)?;
                let has_no_driver_data = request.driver_is_cleared(0);
                let length = request.driver_length();
                require(has_no_driver_data, "driver input", length, Rule::Zero)?;
                self.query_device_ex(request);
            }
            CMD_ALLOC_PD => return self.alloc_pd(fd, request),
            // SAFETY: guaranteed by the caller.
            CMD_REG_MR => return unsafe { self.reg_mr(fd, request) },
            // SAFETY: guaranteed by the caller.
            CMD_REREG_MR => return unsafe { self.rereg_mr(fd, request) },
            CMD_ALLOC_MW => return self.alloc_mw(fd, request),
            // SAFETY: guaranteed by the caller.
            CMD_RESIZE_CQ => return unsafe { self.resize_cq(fd, request) },
            CMD_CREATE_COMP_CHANNEL => return self.create_channel(fd, request),
            CMD_MODIFY_QP => {
                let requested: ModifyQp = request.core()?;
                return self.modify_qp(fd, request, &requested, STANDARD_ATTRIBUTES);
            }
            EX_MODIFY_QP => {
                let mut requested: ExModifyQp = request.core()?;
                if requested.rate_limit == 0 {
                    // No limit, as before.
                    requested.base.attr_mask &= !RATE_LIMIT;
                }
                let known = STANDARD_ATTRIBUTES | RATE_LIMIT;
                self.modify_qp(fd, request, &requested.base, known)?;
                let response_length = size_of::<ExModifyQpResp>() as u32;
                request.core_answer(&ExModifyQpResp {
                    comp_mask: 0,
                    response_length,
                });
            }
            CMD_QUERY_QP => return self.query_qp(fd, request),
            // Accepted without effect: events are always immediate.
            EX_MODIFY_CQ => {
                const MODERATE: u32 = 1 << 0;
                let requested: ExModifyCq = request.core()?;
                let mask = requested.attr_mask;
                require(mask != 0, "attr_mask", mask, Rule::NonZero)?;
                is("reserved", requested.reserved, 0)?;
                require_support(
                    mask <= MODERATE,
                    "attr_mask",
                    mask,
                    Rule::Bits(MODERATE.into()),
                )?;
                self.objects.cq(fd, requested.cq_handle)?;
                at_most("cq_period", requested.attr.cq_period, LONGEST_PERIOD.into())?;
            }
            EX_MODIFY_WQ => return self.modify_wq(fd, request),
            EX_CREATE_WQ_TABLE => return self.create_wq_table(fd, request),
            EX_DESTROY_WQ_TABLE => {
                let requested: ExDestroyRwqIndTable = request.core()?;
                reserved("comp_mask", requested.comp_mask)?;
                self.destroy(fd, requested.ind_tbl_handle, OBJECT_RWQ_IND_TBL)?;
            }
            // SAFETY: guaranteed by the caller.
            EX_CREATE_FLOW => return unsafe { self.create_flow(fd, request) },
            EX_DESTROY_FLOW => return self.destroy_flow(fd, request),
            // SAFETY: guaranteed by the caller.
            CMD_OPEN_XRCD => return unsafe { self.open_xrcd(fd, request) },
            CMD_OPEN_QP => return self.open_qp(fd, request),
            CMD_MODIFY_SRQ => return self.modify_srq(fd, request),
            CMD_QUERY_SRQ => return self.query_srq(fd, request),
            CMD_CREATE_AH => return self.create_ah(fd, request),
            CMD_ATTACH_MCAST => {
                let requested: AttachMcast = request.core()?;
                return self.group(fd, &requested, true);
            }
            CMD_DETACH_MCAST => {
                let DetachMcast {
                    gid,
                    qp_handle,
                    mlid,
                    reserved,
                } = request.core()?;
                let requested = AttachMcast {
                    gid,
                    qp_handle,
                    mlid,
                    reserved,
                };
                return self.group(fd, &requested, false);
            }
            // `sizes` rejects all others.
            _ => return unsupported("write command", command, Rule::Supported),
        }
        Ok(())
    }

    fn alloc_pd(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let _: AllocPd = request.core()?;
        request.check_driver_output(size_of::<mlx5_abi::AllocPdResp>())?;
        let input = Input::new(op::ALLOC_PD, 16).by(self.uid(fd));
        let number = make(&mut self.hca, &input)?;
        let pd_handle = self.objects.insert(Object::new(fd, Pd { number }));
        request.core_answer(&AllocPdResp { pd_handle });
        request.driver_answer(&mlx5_abi::AllocPdResp { pdn: number });
        Ok(())
    }

    fn create_channel(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let _: CreateCompChannel = request.core()?;
        let id = self.context(fd)?.id;
        let file = EventFile::new(FileKind::Completions, id);
        let (events, number) = file.map_err(system("event file of context", id))?;
        let fd = request.publish(number)? as u32;
        self.files.insert(number, File::Events(events));
        request.core_answer(&CreateCompChannelResp { fd });
        Ok(())
    }

    fn modify_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const MAX_WR: u32 = 1 << 0;
        const LIMIT: u32 = 1 << 1;
        let requested: ModifySrq = request.core()?;
        let srq = self.objects.srq(fd, requested.srq_handle)?;
        let limit = requested.attr_mask & LIMIT != 0;
        // The queue is in memory of the process, so its size cannot change.
        known_bits(
            "attr_mask",
            requested.attr_mask & (MAX_WR | LIMIT),
            LIMIT.into(),
        )?;
        if limit {
            at_most("srq_limit", requested.srq_limit, srq.max_wr.into())?;
        }
        let (number, kind) = (srq.number, srq.kind);
        if limit {
            self.arm_srq(number, kind, requested.srq_limit)?;
        }
        if let Some(changes) = self.objects.changes.as_mut().filter(|_| limit) {
            let handle = requested.srq_handle;
            changes.push(ObjectChange::ReceiveLimitSet { handle });
        }
        Ok(())
    }

    fn query_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: QuerySrq = request.core()?;
        let srq = self.objects.srq(fd, requested.srq_handle)?;
        let (number, kind) = (srq.number, srq.kind);
        let (max_wr, max_sge) = (srq.max_wr, srq.max_sge);
        let srq_limit = self.srq_limit(number, kind)?;
        request.core_answer(&QuerySrqResp {
            max_wr,
            max_sge,
            srq_limit,
            reserved: 0,
        });
        Ok(())
    }

    fn create_ah(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// The answer ends with the destination's MAC address.
        const ANSWER: usize = offset_of!(mlx5_abi::CreateAhResp, reserved);
        let requested: CreateAh = request.core()?;
        self.objects.pd(fd, requested.pd_handle)?;
        let attr = &requested.attr;
        let global = attr.is_global != 0;
        is("port_num", attr.port_num, 1)?;
        let index = attr.grh.sgid_index;
        let known = self.gid_at(index.into()).is_some();
        require(!global || known, "sgid_index", index, Rule::Exists)?;
        let mut answer = None;
        if self.is_ethernet() {
            is("is_global", attr.is_global.min(1), 1)?;
            let room = request.room(ATTR_UHW_OUT);
            require(
                room >= ANSWER,
                "length of the driver output",
                room,
                Rule::AtLeast(ANSWER as u64),
            )?;
            answer = Some(mlx5_abi::CreateAhResp {
                response_length: ANSWER as u32,
                dmac: self.resolve(&attr.grh.dgid)?,
                ..mlx5_abi::CreateAhResp::default()
            });
        }
        let ah_handle = self
            .objects
            .insert(Object::new(fd, Ah).using(vec![requested.pd_handle]));
        request.core_answer(&CreateAhResp { ah_handle });
        if let Some(answer) = answer {
            request.driver_answer_until(&answer, ANSWER);
        }
        Ok(())
    }
}
