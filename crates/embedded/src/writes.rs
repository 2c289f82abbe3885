//! The write commands, invoked through ioctl.

use std::os::fd::RawFd;

use softhca::command::opcode as op;
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::{
    AllocPdResp, AttachMcast, CMD_FLAG_EXTENDED, CreateAh, CreateAhResp, CreateCompChannelResp,
    DetachMcast, ExModifyCq, ExModifyQp, ExModifyQpResp, ModifyQp, ModifySrq, QuerySrq,
    QuerySrqResp,
};

use crate::command::{Input, make};
use crate::event::EventFile;
use crate::files::File;
use crate::object::{Is, Object};
use crate::query::mac_of;
use crate::request::Request;
use crate::state::State;
use crate::{Result, refuse};

const EX_QUERY_DEVICE: u32 = CMD_FLAG_EXTENDED | CMD_QUERY_DEVICE;
const EX_MODIFY_QP: u32 = CMD_FLAG_EXTENDED | CMD_MODIFY_QP;
const EX_MODIFY_CQ: u32 = CMD_FLAG_EXTENDED | EX_CMD_MODIFY_CQ;

impl State {
    /// # Safety
    /// As of [`State::execute`].
    pub(crate) unsafe fn write(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        match request.write_command()? {
            CMD_QUERY_DEVICE => self.query_device(request),
            EX_QUERY_DEVICE => self.query_device_ex(request),
            CMD_ALLOC_PD => return self.alloc_pd(fd, request),
            // SAFETY: passed on.
            CMD_REG_MR => return unsafe { self.reg_mr(fd, request) },
            // SAFETY: passed on.
            CMD_REREG_MR => return unsafe { self.rereg_mr(fd, request) },
            CMD_ALLOC_MW => return self.alloc_mw(fd, request),
            // SAFETY: passed on.
            CMD_RESIZE_CQ => return unsafe { self.resize_cq(fd, request) },
            CMD_CREATE_COMP_CHANNEL => return self.create_channel(request),
            CMD_MODIFY_QP => {
                let asked: ModifyQp = request.core()?;
                return self.modify_qp(fd, &asked);
            }
            EX_MODIFY_QP => {
                let asked: ExModifyQp = request.core()?;
                self.modify_qp(fd, &asked.base)?;
                let response_length = size_of::<ExModifyQpResp>() as u32;
                request.core_answer(&ExModifyQpResp {
                    comp_mask: 0,
                    response_length,
                });
            }
            CMD_QUERY_QP => return self.query_qp(fd, request),
            // Events come at once, whatever is asked for.
            EX_MODIFY_CQ => {
                let asked: ExModifyCq = request.core()?;
                return self.objects.cq(fd, asked.cq_handle).map(drop);
            }
            // SAFETY: passed on.
            CMD_OPEN_XRCD => return unsafe { self.open_xrcd(fd, request) },
            CMD_OPEN_QP => return self.open_qp(fd, request),
            CMD_MODIFY_SRQ => return self.modify_srq(fd, request),
            CMD_QUERY_SRQ => return self.query_srq(fd, request),
            CMD_CREATE_AH => return self.create_ah(fd, request),
            CMD_ATTACH_MCAST => {
                let asked: AttachMcast = request.core()?;
                return self.group(fd, &asked, true);
            }
            CMD_DETACH_MCAST => {
                let DetachMcast {
                    gid,
                    qp_handle,
                    mlid,
                    reserved,
                } = request.core()?;
                let asked = AttachMcast {
                    gid,
                    qp_handle,
                    mlid,
                    reserved,
                };
                return self.group(fd, &asked, false);
            }
            _ => return refuse(libc::EOPNOTSUPP),
        }
        Ok(())
    }

    fn alloc_pd(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let number = make(&mut self.hca, &Input::new(op::ALLOC_PD, 16))?;
        let pd_handle = self.objects.insert(Object {
            file: fd,
            needs: Vec::new(),
            uses: 0,
            given: Vec::new(),
            is: Is::Pd { number },
        });
        request.core_answer(&AllocPdResp { pd_handle });
        request.driver_answer(&number.to_ne_bytes());
        Ok(())
    }

    fn create_channel(&mut self, request: &mut Request) -> Result<()> {
        let (events, fd) = EventFile::new()?;
        self.files.insert(fd, File::Events(events));
        let fd = fd.cast_unsigned();
        request.core_answer(&CreateCompChannelResp { fd });
        Ok(())
    }

    fn modify_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        const LIMIT: u32 = 1 << 1;
        let asked: ModifySrq = request.core()?;
        let srq = self.objects.srq(fd, asked.srq_handle)?;
        // The queue is the process's memory: its size is what it was made with.
        if asked.attr_mask & !LIMIT != 0 || asked.srq_limit > srq.max_wr {
            return refuse(libc::EINVAL);
        }
        let (number, xrc) = (srq.number, srq.xrc);
        if asked.attr_mask & LIMIT != 0 {
            self.arm_srq(number, xrc, asked.srq_limit)?;
        }
        Ok(())
    }

    fn query_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let asked: QuerySrq = request.core()?;
        let srq = self.objects.srq(fd, asked.srq_handle)?;
        let (number, xrc) = (srq.number, srq.xrc);
        let (max_wr, max_sge) = (srq.max_wr, srq.max_sge);
        let srq_limit = self.srq_limit(number, xrc)?;
        request.core_answer(&QuerySrqResp {
            max_wr,
            max_sge,
            srq_limit,
            reserved: 0,
        });
        Ok(())
    }

    fn create_ah(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let asked: CreateAh = request.core()?;
        self.objects.pd(fd, asked.pd_handle)?;
        let attr = &asked.attr;
        let global = attr.is_global != 0;
        let known = usize::from(attr.grh.sgid_index) < self.gids().len();
        if attr.port_num != 1 || (global && !known) {
            return refuse(libc::EINVAL);
        }
        // Length of the answer, and the MAC address that packets go to.
        let mut answer = [0; 16];
        answer[..4].copy_from_slice(&10u32.to_ne_bytes());
        if self.is_ethernet() {
            if !global {
                return refuse(libc::EINVAL);
            }
            answer[4..10].copy_from_slice(&mac_of(&attr.grh.dgid)?);
        }
        let ah_handle = self.objects.insert(Object {
            file: fd,
            needs: vec![asked.pd_handle],
            uses: 0,
            given: Vec::new(),
            is: Is::Ah,
        });
        request.core_answer(&CreateAhResp { ah_handle });
        request.driver_answer(&answer);
        Ok(())
    }
}
