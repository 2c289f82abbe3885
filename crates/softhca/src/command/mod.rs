//! The command interface: dispatch of commands and their handlers.

pub(crate) mod access_register;
pub(crate) mod cq;
pub(crate) mod dct;
pub(crate) mod device_memory;
pub(crate) mod eq;
pub(crate) mod ethernet;
pub(crate) mod general;
pub(crate) mod load;
pub(crate) mod mkey;
pub(crate) mod paging;
pub(crate) mod protection;
pub(crate) mod qp;
pub(crate) mod resource;
pub(crate) mod scheduling;
pub(crate) mod srq;
pub(crate) mod steering;
pub(crate) mod user;
pub(crate) mod vport;

use roce::bits::put32;

use crate::cause::Cause;
use crate::hca::Hca;
pub use crate::opcode;
use crate::platform::Platform;
pub use crate::status;
use crate::status::{CommandError, Outcome, Rule, Status, refuse};
use opcode as op;

pub(crate) use crate::layout::header::{NUMBER, OP_MOD, OPCODE, STATUS};

const SYNDROME: usize = 4;

/// Outputs are built at least this long, whatever room the driver gave, so that
/// handlers can write the common fields.
const MIN_OUTPUT: usize = 16;

impl<P: Platform> Hca<P> {
    /// Executes one command and returns its output.
    ///
    /// Reads only the input and the memory that it names. The command queue calls
    /// this, and tests call it without a queue.
    pub fn execute(&mut self, input: &[u8], output_length: usize) -> Vec<u8> {
        self.execute_command(input, output_length).0
    }

    /// As [`Hca::execute`]; also returns why the command was refused, if it was.
    pub fn execute_command(&mut self, input: &[u8], output_length: usize) -> (Vec<u8>, Outcome) {
        let mut output = vec![0; output_length.max(MIN_OUTPUT)];
        let opcode = OPCODE.get(input) as u16;
        self.core.stats.commands += 1;
        let core = &mut self.core;
        let refused = core.faults.command(opcode, || core.platform.now());
        let outcome = match refused {
            Some(refused) => Err(refused),
            None => match self.core.begin_command(opcode, input) {
                Ok(()) => self.dispatch(opcode, input, &mut output),
                Err(refused) => Err(refused),
            },
        };
        match outcome {
            Ok(()) => {
                self.core.finish_command(opcode, input, &output);
                if let (op::CREATE_QP | op::CREATE_DCT, Some(injector)) = (opcode, self.injector())
                {
                    injector.add_queue_pair(NUMBER.get(&output));
                }
                tracing::debug!(command = op::name(opcode), "done");
            }
            Err(refused) => {
                output.fill(0);
                STATUS.put(&mut output, refused.status() as u32);
                put32(&mut output, SYNDROME, refused.syndrome());
                self.core.stats.commands_refused += 1;
                self.core.observe(|_| {
                    Some(Cause::Command {
                        opcode,
                        error: refused,
                    })
                });
                tracing::info!(
                    command = op::name(opcode),
                    opcode = format_args!("{opcode:#x}"),
                    "{refused}"
                );
            }
        }
        output.truncate(output_length);
        (output, outcome)
    }

    fn dispatch(&mut self, opcode: u16, input: &[u8], output: &mut [u8]) -> Outcome {
        let core = &mut self.core;
        match opcode {
            op::NOP => Ok(()),
            op::ENABLE_HCA | op::INIT_HCA | op::SET_DRIVER_VERSION => Ok(()),
            op::DISABLE_HCA => Ok(()),
            op::TEARDOWN_HCA => self.teardown(),
            op::QUERY_ISSI => core.query_issi(output),
            op::SET_ISSI => core.set_issi(input),
            op::QUERY_PAGES => core.query_pages(input, output),
            op::MANAGE_PAGES => core.manage_pages(input, output),
            op::QUERY_HCA_CAP => core.query_hca_cap(input, output),
            op::SET_HCA_CAP => core.set_hca_cap(input),
            op::QUERY_ADAPTER => core.query_adapter(output),
            op::ACCESS_REG => self.access_register(input, output),
            op::QUERY_SPECIAL_CONTEXTS => core.query_special_contexts(output),

            op::QUERY_HCA_VPORT_CONTEXT => {
                core.query_hca_vport_context(output)?;
                vport::put_violations(output, &self.transport.counters());
                Ok(())
            }
            op::MODIFY_HCA_VPORT_CONTEXT => core.modify_hca_vport_context(input),
            op::QUERY_HCA_VPORT_GID => core.query_hca_vport_gid(input, output),
            op::QUERY_HCA_VPORT_PKEY => core.query_hca_vport_pkey(input, output),
            op::QUERY_VPORT_STATE => core.query_vport_state(output),
            op::MODIFY_VPORT_STATE => Ok(()),
            op::QUERY_NIC_VPORT_CONTEXT => {
                core.query_nic_vport_context(input, output)?;
                vport::put_qkey_violations(output, &self.transport.counters());
                Ok(())
            }
            op::MODIFY_NIC_VPORT_CONTEXT => core.modify_nic_vport_context(input),
            op::SET_ROCE_ADDRESS => self.set_roce_address(input),
            op::QUERY_ROCE_ADDRESS => core.query_roce_address(input, output),
            op::QUERY_VPORT_COUNTER => self.query_vport_counter(output),
            op::QUERY_VNIC_ENV => Ok(()),
            op::SET_L2_TABLE_ENTRY | op::DELETE_L2_TABLE_ENTRY | op::SET_MAD_DEMUX => Ok(()),

            op::CREATE_UCTX => core.create_uctx(output),
            op::DESTROY_UCTX => core.destroy_uctx(input),
            op::CREATE_UMEM => core.create_umem(input, output),
            op::DESTROY_UMEM => core.destroy_umem(input),
            op::CREATE_GENERAL_OBJECT => core.create_general_object(input, output),
            op::MODIFY_GENERAL_OBJECT => core.modify_general_object(input),
            op::QUERY_GENERAL_OBJECT => core.query_general_object(input, output),
            op::DESTROY_GENERAL_OBJECT => core.destroy_general_object(input),
            op::ALLOC_UAR => core.alloc_uar(output),
            op::DEALLOC_UAR => core.dealloc_uar(input),
            op::ALLOC_PD => core.alloc_pd(output),
            op::DEALLOC_PD => core.dealloc_pd(input),
            op::ALLOC_XRCD => core.alloc_xrcd(output),
            op::DEALLOC_XRCD => core.dealloc_xrcd(input),
            op::QUERY_LAG => core.query_lag(output),
            op::ALLOC_TRANSPORT_DOMAIN => core.alloc_transport_domain(output),
            op::DEALLOC_TRANSPORT_DOMAIN => core.dealloc_transport_domain(input),
            op::ALLOC_Q_COUNTER => core.alloc_q_counter(output),
            op::DEALLOC_Q_COUNTER => core.dealloc_q_counter(input),
            op::QUERY_Q_COUNTER => core.query_q_counter(input, output),

            op::CREATE_MKEY => core.create_mkey(input, output),
            op::DESTROY_MKEY => core.destroy_mkey(input),
            op::QUERY_MKEY => core.query_mkey(input, output),
            op::CREATE_PSV => core.create_psv(input, output),
            op::DESTROY_PSV => core.destroy_psv(input),
            op::PAGE_FAULT_RESUME => core.page_fault_resume(input),
            op::ALLOC_MEMIC => core.alloc_memic(input, output),
            op::MODIFY_MEMIC => core.modify_memic(input, output),
            op::DEALLOC_MEMIC => core.dealloc_memic(input),
            op::CREATE_EQ => core.create_eq(input, output),
            op::DESTROY_EQ => core.destroy_eq(input),
            op::QUERY_EQ => core.query_eq(input, output),
            op::CREATE_CQ => core.create_cq(input, output),
            op::DESTROY_CQ => core.destroy_cq(input),
            op::MODIFY_CQ => core.modify_cq(input),
            op::QUERY_CQ => core.query_cq(input, output),

            op::CREATE_QP => self.create_qp(input, output),
            op::DESTROY_QP => self.destroy_qp(input),
            op::QUERY_QP => self.query_qp(input, output),
            op::RST2INIT_QP
            | op::INIT2INIT_QP
            | op::INIT2RTR_QP
            | op::RTR2RTS_QP
            | op::RTS2RTS_QP
            | op::SQERR2RTS_QP
            | op::SQD_RTS_QP
            | op::TO_ERR_QP
            | op::TO_RST_QP => self.modify_qp(opcode, input, output),
            op::ATTACH_TO_MCG => self.attach_to_mcg(input),
            op::DETACH_FROM_MCG => self.detach_from_mcg(input),

            op::CREATE_DCT => self.create_dct(input, output),
            op::DRAIN_DCT => self.drain_dct(input),
            op::DESTROY_DCT => self.destroy_dct(input),
            op::QUERY_DCT => self.query_dct(input, output),

            op::CREATE_XRC_SRQ => core.create_xrc_srq(input, output),
            op::QUERY_XRC_SRQ => core.query_xrc_srq(input, output),
            op::CREATE_RMP => core.create_rmp(input, output),
            op::MODIFY_RMP => core.modify_rmp(input),
            op::QUERY_RMP => core.query_rmp(input, output),
            op::CREATE_XRQ => core.create_xrq(input, output),
            op::QUERY_XRQ => core.query_xrq(input, output),
            op::DESTROY_XRC_SRQ | op::DESTROY_RMP | op::DESTROY_XRQ => core.destroy_srq(input),
            op::ARM_RQ | op::ARM_XRC_SRQ | op::ARM_XRQ => core.arm_srq(input),

            op::CREATE_SQ => self.create_sq(input, output),
            op::MODIFY_SQ => self.modify_sq(input),
            op::DESTROY_SQ => self.destroy_sq(input),
            op::QUERY_SQ => core.query_sq(input, output),
            op::CREATE_RQ => core.create_rq(input, output),
            op::MODIFY_RQ => core.modify_rq(input),
            op::QUERY_RQ => core.query_rq(input, output),
            op::DESTROY_RQ => core.destroy_rq(input),
            op::CREATE_TIR
            | op::CREATE_TIS
            | op::CREATE_RQT
            | op::CREATE_FLOW_TABLE
            | op::CREATE_FLOW_GROUP
            | op::ALLOC_MODIFY_HEADER_CONTEXT
            | op::ALLOC_FLOW_COUNTER => core.create_steering(opcode, input, output),
            op::DESTROY_TIR
            | op::DESTROY_TIS
            | op::DESTROY_RQT
            | op::DESTROY_FLOW_TABLE
            | op::DESTROY_FLOW_GROUP
            | op::DEALLOC_MODIFY_HEADER_CONTEXT
            | op::DEALLOC_FLOW_COUNTER => core.destroy_steering(opcode, input),
            op::QUERY_TIS => core.query_tis(input, output),
            op::QUERY_FLOW_COUNTER => core.query_flow_counter(input, output),
            op::MODIFY_TIR
            | op::MODIFY_TIS
            | op::MODIFY_RQT
            | op::MODIFY_FLOW_TABLE
            | op::SET_FLOW_TABLE_ROOT
            | op::SET_FLOW_TABLE_ENTRY
            | op::DELETE_FLOW_TABLE_ENTRY => core.modify_steering(opcode, input),
            _ => Err(refuse(Status::BadOpcode, "opcode", opcode, Rule::Supported)),
        }
    }
}
