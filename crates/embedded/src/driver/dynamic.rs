//! Dynamically connected transport (DC): driver-specific queue pairs. An initiator (DCI) is
//! a queue pair that sends to many targets. A target (DCT) is created in the device when it
//! becomes ready to receive, and has a number from then on (`mlx5_ib_modify_dct`).

use std::mem::offset_of;
use std::os::fd::RawFd;

use mlx5_abi::{CreateQpResp, ModifyQpResp};
use softhca::command::opcode as op;
use softhca::layout::dctc;
use softhca::layout::qpc::scatter;
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::write::ModifyQp;
use uverbs::{AccessFlags, QpAttrMask as Mask, QpState, QpType};

use crate::driver::cause::{Result, invalid};
use crate::driver::command::{Input, make, run};
use crate::driver::data::Target;
use crate::driver::object::{Object, Qp};
use crate::driver::qp::{Transition, check_mask, no_transition};
use crate::driver::queues::{QpDriver, create_flags};
use crate::driver::request::Request;
use crate::driver::state::State;

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
            let missing = match cq {
                None => ATTR_CREATE_QP_RECV_CQ_HANDLE,
                Some(_) => ATTR_CREATE_QP_SRQ_HANDLE,
            };
            return invalid("attribute", missing, Rule::Present);
        };
        create_flags(request, QpType::DRIVER)?;
        let driver = QpDriver::new(request)?;
        let scatter = match (driver.scatters(), self.objects.cq(fd, cq)?.entry) {
            (false, _) => 0,
            (true, 128) => scatter::RES_64,
            (true, _) => scatter::RES_32,
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
            shared_queue: Some(srq),
            ..Qp::without_queues(0, QpType::DRIVER, events)
        };
        let object = Object::new(fd, qp).using(vec![pd, cq, srq]);
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
            _ => return no_transition(target.state, to),
        };
        check_mask(mask, must | Mask::STATE, Mask::empty())?;
        let mut number = 0;
        if to == QpState::RTR {
            request.check_driver_output(ANSWER)?;
            let input = create_command(&target, attributes, self.counter_set)
                .fields(
                    dctc::AT,
                    [
                        (dctc::DP_ORDERING_FORCE, out_of_order.into()),
                        (dctc::DP_ORDERING_1, out_of_order.into()),
                    ],
                )
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
fn create_command(target: &Target, it: &ModifyQp, counter_set: u32) -> Input {
    let access = AccessFlags::from_bits_retain(it.qp_access_flags);
    let right = |flag| u32::from(access.contains(flag));
    Input::new(op::CREATE_DCT, dctc::AT + dctc::SIZE)
        .fields(
            dctc::AT,
            [
                (dctc::USER_INDEX, target.user_index),
                (dctc::CQN, target.cq),
                (dctc::SRQN, target.srq),
                (dctc::PD, target.pd),
                (dctc::CS_RES, target.scatter),
                (dctc::COUNTER_SET_ID, counter_set),
            ],
        )
        .long(dctc::AT + dctc::DC_ACCESS_KEY, target.access_key)
        .fields(
            dctc::AT,
            [
                (dctc::RRE, right(AccessFlags::REMOTE_READ)),
                (dctc::RWE, right(AccessFlags::REMOTE_WRITE)),
                (dctc::RAE, right(AccessFlags::REMOTE_ATOMIC)),
                (dctc::MIN_RNR_NAK, it.min_rnr_timer.into()),
                (dctc::MTU, it.path_mtu.into()),
                (dctc::PORT, it.port_num.into()),
                (dctc::PKEY_INDEX, it.pkey_index.into()),
                (dctc::TCLASS, it.dest.traffic_class.into()),
                (dctc::FLOW_LABEL, it.dest.flow_label),
                (dctc::MY_ADDR_INDEX, it.dest.sgid_index.into()),
                (dctc::HOP_LIMIT, it.dest.hop_limit.into()),
            ],
        )
}
