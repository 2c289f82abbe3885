//! Dynamically connected transport (DC): driver-specific queue pairs. An initiator (DCI) is
//! a queue pair that sends to many targets. A target (DCT) is created in the device when it
//! becomes ready to receive, and has a number from then on (`mlx5_ib_modify_dct`).

use std::mem::offset_of;
use std::os::fd::RawFd;

use mlx5_abi::{CreateQpResp, ModifyQpResp};
use softhca::bits::{Field, field, flag};
use softhca::command::opcode as op;
use uverbs::abi::ids::*;
use uverbs::abi::write::ModifyQp;
use uverbs::{AccessFlags, QpAttrMask as Mask, QpState, QpType};

use crate::command::{Input, make, run};
use crate::object::{Object, ObjectData, Qp};
use crate::qp::Transition;
use crate::queues::{QpDriver, SCATTER_RECEIVED_32, SCATTER_RECEIVED_64, create_flags};
use crate::request::Request;
use crate::state::State;
use crate::{Result, refuse};

/// Service type of initiators.
pub(crate) const INITIATOR_SERVICE: u32 = 5;

const CONTEXT: usize = 0x10;
const LENGTH: usize = CONTEXT + 64;
const USER_INDEX: Field = field(CONTEXT + 0x4, 23, 0);
const CQ: Field = field(CONTEXT + 0x8, 23, 0);
const REMOTE_READ: Field = flag(CONTEXT + 0xc, 19);
const REMOTE_WRITE: Field = flag(CONTEXT + 0xc, 18);
const REMOTE_ATOMIC: Field = flag(CONTEXT + 0xc, 17);
/// `dp_ordering_force`, `dp_ordering_1`.
const FORCE_ORDER: Field = flag(CONTEXT + 0x4, 24);
const RELAXED_ORDER: Field = flag(CONTEXT + 0xc, 11);
const SCATTER: Field = field(CONTEXT + 0x10, 23, 16);
const RNR_TIMER: Field = field(CONTEXT + 0x10, 12, 8);
const SRQ: Field = field(CONTEXT + 0x14, 23, 0);
const PD: Field = field(CONTEXT + 0x18, 23, 0);
const TRAFFIC_CLASS: Field = field(CONTEXT + 0x1c, 31, 24);
const FLOW_LABEL: Field = field(CONTEXT + 0x1c, 19, 0);
const ACCESS_KEY: usize = CONTEXT + 0x20;
const MTU: Field = field(CONTEXT + 0x28, 26, 24);
const PORT: Field = field(CONTEXT + 0x28, 23, 16);
const PKEY_INDEX: Field = field(CONTEXT + 0x28, 15, 0);
const SOURCE_INDEX: Field = field(CONTEXT + 0x2c, 23, 16);
const HOP_LIMIT: Field = field(CONTEXT + 0x2c, 7, 0);

/// Attributes of a target, which are passed to the device when it becomes ready to receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) state: QpState,
    pd: u32,
    cq: u32,
    srq: u32,
    scatter: u32,
    user_index: u32,
    access_key: u64,
}

/// Returns the transition of an initiator (`modify_dci_qp_is_ok`).
pub(crate) fn transition(from: QpState, to: QpState) -> Option<Transition> {
    let with = |opcode, must, may| Some(Transition { opcode, must, may });
    let none = Mask::empty();
    let place = Mask::PKEY_INDEX | Mask::PORT;
    match (from, to) {
        (_, QpState::RESET) => with(op::TO_RST_QP, none, none),
        (_, QpState::ERR) if from != QpState::RESET => with(op::TO_ERR_QP, none, none),
        (QpState::RESET, QpState::INIT) => with(op::RST2INIT_QP, place, none),
        (QpState::INIT, QpState::INIT) => with(op::INIT2INIT_QP, none, place),
        (QpState::INIT, QpState::RTR) => {
            let may = Mask::PKEY_INDEX | Mask::AV;
            with(op::INIT2RTR_QP, Mask::PATH_MTU, may)
        }
        (QpState::RTR, QpState::RTS) => {
            let retries = Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY;
            let must = retries | Mask::MAX_QP_RD_ATOMIC | Mask::SQ_PSN;
            with(op::RTR2RTS_QP, must, Mask::MIN_RNR_TIMER)
        }
        (QpState::RTS, QpState::RTS) => with(op::RTS2RTS_QP, none, Mask::MIN_RNR_TIMER),
        _ => None,
    }
}

impl State {
    /// Creates a target, which has a shared receive queue only.
    pub(crate) fn create_dc_target(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let cq = request.optional_handle(ATTR_CREATE_QP_RECV_CQ_HANDLE);
        let srq = request.optional_handle(ATTR_CREATE_QP_SRQ_HANDLE);
        let (Some(cq), Some(srq)) = (cq, srq) else {
            return refuse(libc::EINVAL);
        };
        create_flags(request, QpType::DRIVER)?;
        let driver = QpDriver::new(request)?;
        let scatter = match (driver.scatters(), self.objects.cq(fd, cq)?.entry) {
            (false, _) => 0,
            (true, 128) => SCATTER_RECEIVED_64,
            (true, _) => SCATTER_RECEIVED_32,
        };
        let target = Target {
            state: QpState::RESET,
            pd: self.objects.pd(fd, pd)?,
            cq: self.objects.cq(fd, cq)?.number,
            srq: self.objects.srq(fd, srq)?.number,
            scatter,
            user_index: driver.uidx,
            access_key: driver.access_key,
        };
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let qp = Qp {
            target: Some(target),
            ..Qp::without_queues(0, QpType::DRIVER, events)
        };
        let object = Object {
            file: fd,
            dependencies: vec![pd, cq, srq],
            uses: 0,
            ranges: Vec::new(),
            data: ObjectData::Qp(Box::new(qp)),
        };
        self.add_qp(request, object, 0, [0; 5], CreateQpResp::default());
        Ok(())
    }

    /// Modifies a target: to INIT, then to RTR, which creates it in the device.
    pub(crate) fn modify_dc_target(
        &mut self,
        fd: RawFd,
        request: &mut Request,
        (handle, target): (u32, Target),
        (attributes, mask): (&ModifyQp, Mask),
        out_of_order: bool,
    ) -> Result<()> {
        /// The answer ends with the number.
        const ANSWER: usize = offset_of!(ModifyQpResp, ece_options);
        let to = QpState(attributes.qp_state);
        let must = match (target.state, to) {
            (QpState::RESET, QpState::INIT) => Mask::ACCESS_FLAGS | Mask::PKEY_INDEX | Mask::PORT,
            (QpState::INIT, QpState::RTR) => Mask::MIN_RNR_TIMER | Mask::AV | Mask::PATH_MTU,
            _ => return refuse(libc::EINVAL),
        };
        if mask != must | Mask::STATE {
            return refuse(libc::EINVAL);
        }
        let mut number = 0;
        if to == QpState::RTR {
            request.check_driver_output(ANSWER)?;
            let input = create_command(&target, attributes)
                .set(FORCE_ORDER, out_of_order.into())
                .set(RELAXED_ORDER, out_of_order.into())
                .by(self.uid(fd));
            number = make(&mut self.hca, &input)?;
            let answer = ModifyQpResp {
                response_length: ANSWER as u32,
                dctn: number,
                ..ModifyQpResp::default()
            };
            request.driver_answer_until(&answer, ANSWER);
        }
        self.objects.renumber_qp(fd, handle, number)?;
        let qp = self.objects.qp_mut(fd, handle)?;
        qp.attributes = *attributes;
        qp.target = Some(Target {
            state: to,
            ..target
        });
        Ok(())
    }

    /// Destroys a target in the device, if it was created there.
    pub(crate) fn destroy_dc_target(&mut self, number: u32) -> Result<()> {
        if number == 0 {
            return Ok(());
        }
        run(&mut self.hca, &Input::about(op::DRAIN_DCT, number), 16)?;
        run(&mut self.hca, &Input::about(op::DESTROY_DCT, number), 16).map(drop)
    }
}

/// Returns the command that creates a target.
fn create_command(target: &Target, it: &ModifyQp) -> Input {
    let access = AccessFlags::from_bits_retain(it.qp_access_flags);
    let right = |flag| u32::from(access.contains(flag));
    Input::new(op::CREATE_DCT, LENGTH)
        .set(USER_INDEX, target.user_index)
        .set(CQ, target.cq)
        .set(SRQ, target.srq)
        .set(PD, target.pd)
        .set(SCATTER, target.scatter)
        .long(ACCESS_KEY, target.access_key)
        .set(REMOTE_READ, right(AccessFlags::REMOTE_READ))
        .set(REMOTE_WRITE, right(AccessFlags::REMOTE_WRITE))
        .set(REMOTE_ATOMIC, right(AccessFlags::REMOTE_ATOMIC))
        .set(RNR_TIMER, it.min_rnr_timer.into())
        .set(MTU, it.path_mtu.into())
        .set(PORT, it.port_num.into())
        .set(PKEY_INDEX, it.pkey_index.into())
        .set(TRAFFIC_CLASS, it.dest.traffic_class.into())
        .set(FLOW_LABEL, it.dest.flow_label)
        .set(SOURCE_INDEX, it.dest.sgid_index.into())
        .set(HOP_LIMIT, it.dest.hop_limit.into())
}
